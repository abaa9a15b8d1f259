"""`countoff top --prometheus`: serves what the looks at a job show, until Ctrl-C. Needs the extra `prometheus`."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from prometheus_client import CollectorRegistry, start_http_server

from countoff.core.words import plain
from countoff.report.model import Trace
from countoff.report.top.metrics import JobCollector
from countoff.report.top.watch import WatchedJob

_LOOPBACK = "127.0.0.1"
"""Who names no host means this machine: the metrics have the names of hosts, and nobody has to log in to read them."""
_ADDRESS = re.compile(r"(?:(?P<host>[^\s:\[\]]*)|\[(?P<bare>[^\s\[\]]+)\]):(?P<port>\d{1,5})", re.ASCII)
_LAST_PORT = 65_535


class Address(NamedTuple):
    """Where to serve.

    Attributes:
        host: The name or the address of an interface.
        port: The port; 0: one that is free.
    """

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Reads ``:PORT`` or ``HOST:PORT``; an IPv6 address stands in brackets.

        Raises:
            ValueError: If it is neither.

        >>> Address.parse(":9464"), Address.parse("[::1]:9464")
        (Address(host='127.0.0.1', port=9464), Address(host='::1', port=9464))
        """
        found = _ADDRESS.fullmatch(text)
        if found is None or int(found["port"]) > _LAST_PORT:
            raise ValueError(
                f"--prometheus must be :PORT or HOST:PORT with a port of at most {_LAST_PORT}, as :9464, "
                f"got {plain(text)!r}"
            )
        return cls(found["bare"] or found["host"] or _LOOPBACK, int(found["port"]))

    @property
    def url(self) -> str:
        """Where the metrics are."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/metrics"


def serve(job: WatchedJob, directories: Sequence[str], text: str, every: float, rest: float) -> NoReturn:
    """Serves what the job shows, until Ctrl-C or SIGTERM.

    Args:
        job: The job.
        directories: Its directories, as they were given.
        text: Where, as `Address.parse` reads it.
        every: Seconds from one look to the next.
        rest: Between two looks so many times as long passes as a look takes.

    Raises:
        ValueError: If there is no such address, it cannot be served at, or a directory cannot be read at the first
            look.
    """
    signal.signal(signal.SIGTERM, _end)  # the first process of a container is not ended by it otherwise
    address = Address.parse(text)
    collector = JobCollector(plain(" ".join(str(Path(each)) for each in directories)))
    problem = ""
    with _served(address, collector) as url:
        seconds = _look(job, collector)
        print(f"countoff: {job.name} is served at {url}; Ctrl-C ends it", flush=True)
        while True:
            time.sleep(max(every, rest * seconds))
            try:
                seconds, problem = _look(job, collector), ""
            except ValueError as error:  # the directory may come back, and what was seen is still worth a scrape
                if str(error) != problem:
                    problem = str(error)
                    print(f"countoff: {problem}; it is tried again", file=sys.stderr, flush=True)


def _look(job: WatchedJob, collector: JobCollector) -> float:
    """Looks at the job; returns the seconds that it took."""
    begin = time.monotonic()
    look = job.look()
    collector.update(job.trace or Trace([]), look.rows, time.time())
    return time.monotonic() - begin


@contextlib.contextmanager
def _served(address: Address, collector: JobCollector) -> Iterator[str]:
    """Serves metrics for the block.

    Returns:
        Where.

    Raises:
        ValueError: If that is not possible.
    """
    registry = CollectorRegistry()
    registry.register(collector)
    try:
        server, _ = start_http_server(address.port, addr=address.host, registry=registry)
    except (OSError, UnicodeError) as error:  # a name that is none of the internet's
        why = error.strerror if isinstance(error, OSError) else "it is no name of a host"
        raise ValueError(f"--prometheus cannot serve at {plain(address.host)}:{address.port}: {why}") from None
    server.handle_error = _say_nothing
    try:
        yield address._replace(port=server.server_port).url
    finally:
        server.shutdown()
        server.server_close()


def _say_nothing(request: object, client_address: object) -> None:
    """In place of a traceback: a scraper that hangs up is no error of this command."""


def _end(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)
