"""Threads, sockets and processes: everything of the core that does I/O."""
