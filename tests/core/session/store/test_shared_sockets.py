"""A copy of another library's socket leaves that socket as it is."""

import fcntl
import os
import socket

import pytest

from countoff.core.session.store.shared_sockets import copy_of


@pytest.mark.parametrize("default", [None, 5.0, 0.0])
def test_a_copy_leaves_the_flags_of_the_socket_as_they_are(default: float | None) -> None:
    """A program may set a default time-out for its downloads. The connection is not Python's, and waits in C."""
    before = socket.getdefaulttimeout()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as own:
        own.setblocking(True)
        socket.setdefaulttimeout(default)
        try:
            with copy_of(own.fileno()) as copy:
                assert (copy.family, copy.getpeername()) == (socket.AF_INET, server.getsockname())
                assert not fcntl.fcntl(own.fileno(), fcntl.F_GETFL) & os.O_NONBLOCK
                copy.shutdown(socket.SHUT_RDWR)
        finally:
            socket.setdefaulttimeout(before)
        assert own.recv(1) == b""


def test_what_is_no_socket_is_refused() -> None:
    with open(os.devnull) as file, pytest.raises(OSError, match=r"not a socket|non-socket"):
        copy_of(file.fileno())
