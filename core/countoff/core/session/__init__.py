"""One process's part in a job: what it knows of its fit, its place in the store, its threads, and who is alive."""
