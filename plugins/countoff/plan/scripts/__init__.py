"""Launch scripts: read without running anything, down to the programs that they start."""
