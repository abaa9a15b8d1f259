"""The command line: `countoff plan`, `check`, `explain` and `demo`. Starts without torch."""
