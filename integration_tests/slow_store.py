"""A store that answers late: a relay in front of a real TCPStore, whose replies can be held back."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]


class SlowStore:
    """A TCPStore behind a relay.

    Attributes:
        port: Where to connect.
        delay_seconds: How long every reply is held back; 0 at first.
    """

    def __init__(self) -> None:
        self.delay_seconds = 0.0
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port = self._door.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._door.accept()
                server = socket.create_connection(("127.0.0.1", self._store.port))
                for source, sink, is_reply in ((client, server, False), (server, client, True)):
                    threading.Thread(target=self._pump, args=(source, sink, is_reply), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, is_reply: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if is_reply and self.delay_seconds:
                    time.sleep(self.delay_seconds)
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        self._door.close()


@contextlib.contextmanager
def slow_store() -> Iterator[SlowStore]:
    """A slow store for one test."""
    store = SlowStore()
    try:
        yield store
    finally:
        store.close()
