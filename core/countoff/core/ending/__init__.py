"""How a job ends with a verdict: its table, its printing, its file, and the end of a process that is blocked."""
