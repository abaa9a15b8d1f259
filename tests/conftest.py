"""Bounds the name look-ups of torch's store."""

import os

# torch's TCPStore makes a reverse DNS look-up of its peer at each connection. A lost answer would cost 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
