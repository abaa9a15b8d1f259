"""A relay in front of a real TCPStore. It can delay the store's replies, drop a connection, or send garbage instead."""

import contextlib
import itertools
import random
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Literal

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]


class Relay:
    """Passes data between a store and its clients.

    Args:
        target: The store's port, on this host.
        bad: What happens to one reply: its connection is dropped, or random bytes are sent instead; None: nothing.
        at: The number of that reply, from 0, counted over the replies to all clients.
        address: Where it listens.

    Attributes:
        port: The port to which clients connect.
        delay_seconds: How long each reply is delayed; 0 at first.
    """

    def __init__(
        self,
        target: int,
        bad: Literal["drop", "garbage"] | None = None,
        at: int = 0,
        address: str = "127.0.0.1",
    ) -> None:
        self.delay_seconds = 0.0
        self._target, self._bad, self._at = target, bad, at
        self._replies = itertools.count()
        self._ends: set[socket.socket] = set()
        self._pumps: list[threading.Thread] = []
        self._server = socket.create_server((address, 0))
        self.port = self._server.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """Ends its threads and all connections, and accepts no new one."""
        _shut(self._server)
        self._acceptor.join()
        self._server.close()
        for end in list(self._ends):
            _shut(end)
        for pump in self._pumps:
            pump.join()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self._target))
                except OSError:  # the store is gone already
                    near.close()
                    raise
                self._ends |= {near, far}
                for way in ((near, far, False), (far, near, True)):
                    pump = threading.Thread(target=self._pump, args=way, daemon=True)
                    self._pumps.append(pump)
                    pump.start()

    def _pump(self, source: socket.socket, sink: socket.socket, is_reply: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if is_reply and next(self._replies) == self._at and self._bad is not None:
                    if self._bad == "drop":
                        break
                    data = random.Random(self._at).randbytes(len(data))
                if is_reply and self.delay_seconds:
                    time.sleep(self.delay_seconds)
                sink.sendall(data)
        for end in (source, sink):
            _shut(end)
            end.close()
            self._ends.discard(end)


def _shut(end: socket.socket) -> None:
    """Shuts a socket down, which wakes the thread that it blocks; closing alone does not."""
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def slow_store() -> Iterator[Relay]:
    """Starts a store for one test, with a relay in front of it."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    relay = Relay(store.port)
    try:
        yield relay
    finally:
        relay.close()
