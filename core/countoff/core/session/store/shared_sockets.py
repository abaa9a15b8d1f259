"""Sockets of torch's clients and of gloo, reached through their descriptors.

A copy of a descriptor shares its flags with the socket itself. Python makes a new socket object non-blocking where the
program has called `socket.setdefaulttimeout`, and the owner of the connection would then fail in its next call.
"""

from __future__ import annotations

import os
import socket

__all__ = ["copy_of"]


def copy_of(descriptor: int) -> socket.socket:
    """Returns a socket object for a copy of a descriptor, whose flags stay as they are; to be closed by the caller.

    Args:
        descriptor: The descriptor of a stream socket.

    Raises:
        OSError: If it is none.
    """
    copy = os.dup(descriptor)
    try:
        # Told that the socket does not block, Python does not look at its default, and changes nothing.
        return socket.socket(type=socket.SOCK_STREAM | getattr(socket, "SOCK_NONBLOCK", 0), fileno=copy)
    except OSError:
        os.close(copy)
        raise
