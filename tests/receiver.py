"""An HTTP server on this machine that keeps what it is sent, and answers as a test wants."""

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any, Literal

Answer = Literal["ok", "error", "garbage", "hang"]
_ANSWERS = {"ok": b"HTTP/1.0 200 OK\r\n\r\n", "error": b"HTTP/1.0 500 No\r\n\r\n", "garbage": b"\0\xff no HTTP \0" * 99}


class Receiver:
    """What has come.

    Attributes:
        port: Where it listens, on 127.0.0.1.
        bodies: The JSON that was posted, in the order of its arrival.
    """

    def __init__(self, answer: Answer) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._answer = answer
        self._came = threading.Condition()
        self._released = threading.Event()
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver._take(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                if receiver._answer == "hang":
                    receiver._released.wait()
                else:
                    self.wfile.write(_ANSWERS[receiver._answer])

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing is printed."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port

    def _take(self, body: dict[str, Any]) -> None:
        with self._came:
            self.bodies.append(body)
            self._came.notify_all()

    def wait_for(self, count: int, seconds: float = 60.0) -> list[dict[str, Any]]:
        """Returns what has come, once that is so much."""
        with self._came:
            assert self._came.wait_for(lambda: len(self.bodies) >= count, seconds), self.bodies
            return list(self.bodies)

    @contextlib.contextmanager
    def serving(self) -> Iterator["Receiver"]:
        """Serves until the end of the block."""
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield self
        finally:
            self._released.set()
            self._server.shutdown()
            self._server.server_close()
            thread.join()
