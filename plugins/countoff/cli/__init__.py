"""The command line: `countoff plan`, `check`, `explain`, `top` and `demo`. Starts without torch."""
