"""The job's store: a client of it, where ranks meet in it, and records of all ranks that are gathered there."""
