"""The background threads of a process: what each of them does for the guards that are open."""
