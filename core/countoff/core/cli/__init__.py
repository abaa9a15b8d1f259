"""The command line: `countoff plan`, `check` and `demo`. Starts without torch."""
