"""Interrupts a gloo collective in which the main thread is blocked, so that the process need not be killed.

A blocked main thread receives no signal and no asynchronous exception until the collective returns. The collective
returns at once, with an error, when its connections are shut down. Handlers, checkpoints on error and loggers then run
as after any other exception. An asynchronous exception of our own would not work: it is raised by whichever Python
code runs first while the stack unwinds. That is often a finalizer (of a generator, or of a loader that stops its
workers), in which the exception is lost.

Only the process group's own connections may be shut down, not those of a store, a logger or an object store. They are
recognised by what waits on them (gloo's `transport/tcp/loop.cc`): an epoll instance with a pipe, a listening socket
and no eventfd, on which a thread blocks that Python did not start. torch's store server and gRPC wake theirs by an
eventfd, asyncio runs on a thread of Python's, and a client has no listening socket. Linux only: everywhere else, and
where /proc shows nothing, no connection is found and nothing is shut down.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from countoff.core.session.store.shared_sockets import copy_of

_LISTENING = "0A"  # in the fourth column of /proc/net/tcp
_CONNECTED = "01"


def cut_collectives() -> int:
    """Shuts down this process's gloo connections; collectives under way fail, here and on the peers.

    Returns:
        How many connections were shut down.
    """
    connections = list(_gloo_connections())
    for descriptor in connections:
        with contextlib.suppress(OSError), copy_of(descriptor) as end:
            end.shutdown(socket.SHUT_RDWR)
    return len(connections)


def _gloo_connections() -> Iterator[int]:
    with contextlib.suppress(OSError):
        states = _socket_states()
        waited_on = _waited_on()
        for descriptor in (int(name) for name in os.listdir("/proc/self/fd")):
            if descriptor in waited_on and _target(descriptor) == "anon_inode:[eventpoll]":
                yield from _of_gloo(descriptor, states)


def _of_gloo(epoll: int, states: dict[str, str]) -> list[int]:
    """The connections in an epoll instance that is gloo's; none of any other."""
    listed = re.findall(r"^tfd:\s*(\d+)", Path(f"/proc/self/fdinfo/{epoll}").read_text("ascii"), re.MULTILINE)
    watched = {int(number): _target(int(number)) for number in listed}
    kinds = {target.split(":")[0] for target in watched.values()}
    state = {descriptor: states.get(target, "") for descriptor, target in watched.items()}
    if "pipe" not in kinds or "anon_inode:[eventfd]" in watched.values() or _LISTENING not in state.values():
        return []
    return [descriptor for descriptor in watched if state[descriptor] == _CONNECTED]


def _socket_states() -> dict[str, str]:
    """State of every TCP socket of this network namespace, by what its descriptor points at."""
    states: dict[str, str] = {}
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            columns = [line.split() for line in Path(f"/proc/self/net/{table}").read_text("ascii").splitlines()[1:]]
            states.update((f"socket:[{column[9]}]", column[3]) for column in columns)
    return states


def _waited_on() -> set[int]:
    """Descriptors in which a thread that is not Python's blocks: first argument of the system call it is in."""
    own = {thread.native_id for thread in threading.enumerate()}
    descriptors: set[int] = set()
    for thread in (int(name) for name in os.listdir("/proc/self/task")):
        if thread not in own:
            with contextlib.suppress(OSError, ValueError, IndexError):
                descriptors.add(int(Path(f"/proc/self/task/{thread}/syscall").read_text("ascii").split()[1], 16))
    return descriptors


def _target(descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""
