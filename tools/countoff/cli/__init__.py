"""The command line: the arguments of all commands, and `countoff explain`. Starts without torch."""
