"""What a configuration really trains, and what is wrong with it: `countoff plan` and `countoff check`."""
