"""An HTTP server on a thread, which keeps what it is sent and answers as a test wants it to."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Request:
    """What was sent.

    Attributes:
        method: The HTTP method.
        path: The path.
        headers: The headers, by their names in lower case.
        content: The JSON of the body.
    """

    method: str
    path: str
    headers: dict[str, str]
    content: Any


class Receiver(ThreadingHTTPServer):
    """The server.

    Args:
        answer: Answers a request.

    Attributes:
        requests: What was sent until now.
    """

    daemon_threads = True

    def __init__(self, answer: Callable[[BaseHTTPRequestHandler], None]) -> None:
        self.requests: list[Request] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                requests.append(Request(self.command, self.path, headers, json.loads(body)))
                answer(self)

            def log_message(self, format: str, *args: Any) -> None:
                """Prints nothing."""

        requests = self.requests
        super().__init__(("127.0.0.1", 0), Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints nothing: a client may go away."""

    @property
    def place(self) -> str:
        """Its address and port."""
        return f"127.0.0.1:{self.server_address[1]}"

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{self.place}"

    @property
    def bodies(self) -> list[Any]:
        """The JSON that was sent until now."""
        return [request.content for request in self.requests]

    def wait_for(self, number: int, seconds: float = 20.0) -> list[Request]:
        """Returns the requests, once there are so many."""
        deadline = time.monotonic() + seconds
        while len(self.requests) < number:
            assert time.monotonic() < deadline, f"{len(self.requests)} requests after {seconds} s"
            time.sleep(0.01)
        return self.requests


def accepts(handler: BaseHTTPRequestHandler) -> None:
    """Answers with 200 and no content."""
    handler.send_response(200)
    handler.end_headers()


def hangs(handler: BaseHTTPRequestHandler) -> None:
    """Does not answer."""
    time.sleep(60)


def breaks(handler: BaseHTTPRequestHandler) -> None:
    """Answers with 500."""
    handler.send_error(500)


def talks_nonsense(handler: BaseHTTPRequestHandler) -> None:
    """Answers what is no HTTP."""
    handler.wfile.write(b"\0\xff no HTTP \0\r\n\r\n")
    handler.close_connection = True


@contextlib.contextmanager
def receiving(answer: Callable[[BaseHTTPRequestHandler], None] = accepts) -> Iterator[Receiver]:
    """A server that runs until the block ends."""
    with Receiver(answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
