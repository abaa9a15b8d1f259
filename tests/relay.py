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

    Attributes:
        port: The port to which clients connect.
        delay_seconds: How long each reply is delayed; 0 at first.
    """

    def __init__(self, target: int, bad: Literal["drop", "garbage"] | None = None, at: int = 0) -> None:
        self.delay_seconds = 0.0
        self._target, self._bad, self._at = target, bad, at
        self._replies = itertools.count()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Accepts no new connection."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread in `accept`, which closing alone does not
        self._server.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self._target))
                except OSError:  # the store is gone already
                    near.close()
                    raise
                for pump in ((near, far, False), (far, near, True)):
                    threading.Thread(target=self._pump, args=pump, daemon=True).start()

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
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@contextlib.contextmanager
def slow_store() -> Iterator[Relay]:
    """Starts a store for one test, with a relay in front of it."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    relay = Relay(store.port)
    try:
        yield relay
    finally:
        relay.close()
