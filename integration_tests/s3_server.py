"""An S3 that listens on this machine, in which a test can hold, delay or refuse what ranks ask for."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server


class Store:
    """The server, while it runs.

    Attributes:
        url: Where it listens.
        environment: What a rank needs to find it, through streaming's own downloader and boto3.
        released: While this is not set, requests for what `holds` names are not answered.
        holds: Part of the path of a request that is held.
        delays: Part of the path of one that is answered late.
        refuses: Part of the path of one that is answered with 404.
    """

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.environment = {
            "S3_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        self.released = threading.Event()
        self.holds = self.delays = self.refuses = ()

    def answer(
        self, application: Callable[..., Any], environ: dict[str, Any], start: Callable[..., Any]
    ) -> Iterable[bytes]:
        path, reads = environ["PATH_INFO"], environ["REQUEST_METHOD"] in ("GET", "HEAD")
        if reads and any(part in path for part in self.holds):
            self.released.wait(60)
        if reads and any(part in path for part in self.delays):
            time.sleep(0.2)
        if reads and any(part in path for part in self.refuses):
            start("404 Not Found", [("Content-Length", "0")])
            return [b""]
        return application(environ, start)


@contextlib.contextmanager
def s3_server() -> Iterator[Store]:
    """Runs the server on a free port, in threads of this process."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    application = DomainDispatcherApplication(create_backend_app)
    server = make_server(
        "127.0.0.1", 0, lambda environ, start: store.answer(application, environ, start), threaded=True
    )
    store = Store(server.server_port)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield store
    finally:
        store.released.set()
        server.shutdown()
        thread.join()
        server.server_close()
