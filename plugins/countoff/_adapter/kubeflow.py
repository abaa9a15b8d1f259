"""Tells Kubeflow how far a fit has come: `trainerStatus` of the TrainJob, as transformers' own callback does.

The controller of Kubeflow Trainer sets the variables where its feature gate `TrainJobStatus` is on (KEP-2779). The
first rank posts, on a thread of its own, and whatever the server does, nobody waits for it but the end of the fit, for
at most `LAST_SECONDS`. `http.client` and not `urllib.request`: that would send the token on to wherever the server
redirects to, and keeps the socket from the one that must end the wait.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from countoff.core.checks.check import Listener
from countoff.core.protocol.counters import SpanCounters

__all__ = ["StatusPosts", "Training", "is_asked_for"]

SERVER_URL = "KUBEFLOW_TRAINER_SERVER_URL"
CA_FILE = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
TOKEN_FILE = "KUBEFLOW_TRAINER_SERVER_TOKEN"
EVERY_SECONDS = 5.0
"""From one post to the next, as transformers has it: each one is a write to the cluster's API server."""
ANSWER_SECONDS = 5.0
"""After so long without an answer a post is given up."""
CONNECT_SECONDS = LAST_SECONDS = 1.0
"""The last post may take so long: the end of the fit waits for it."""
_LARGEST = 2**31 - 1
"""Numbers of a TrainJob's status have 32 bits."""
_LONGEST = 64
"""A metric's name may have so many characters. The server refuses the whole status for one that is longer."""
_log = logging.getLogger("countoff")
_posting: StatusPosts | None = None
"""The posts of the fit that this process tells of: a TrainJob has one status."""


class Training(Protocol):
    """A fit, as its status needs it; read on the thread of the posts."""

    @property
    def steps_done(self) -> int:
        """Optimizer steps of the whole run until now."""
        ...

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the whole run; None while they are not known."""
        ...

    @property
    def metrics(self) -> Mapping[str, float]:
        """What countoff logs, by name."""
        ...


def is_asked_for() -> bool:
    """Returns whether this job is to tell Kubeflow how far it is; by the variables that transformers reads."""
    disabled = os.environ.get("DISABLE_KUBEFLOW_INTEGRATION", "").upper() == "TRUE"
    return bool(os.environ.get(SERVER_URL)) and not disabled


class StatusPosts(Listener):
    """Posts the status of one fit, from its first train epoch until its guard is closed.

    A fit that begins while another one of the process is told of posts nothing.

    Args:
        training: The fit.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._thread: threading.Thread | None = None
        self._connection: HTTPConnection | None = None
        self._over, self._given_up = threading.Event(), threading.Event()
        self._finished = self._failing = False
        self._began, self._steps_before = 0.0, 0
        self._told: object = None

    # Told by the guard, on the training thread.

    def span_opened(self, span: SpanCounters, epoch: int | None) -> None:
        """Begins to post, with the first train epoch: the ranks have met, and an evaluation alone has no progress."""
        global _posting
        del span
        if epoch is None or self._thread is not None or _posting is not None:
            return
        self._began, self._steps_before = time.monotonic(), self._training.steps_done
        thread = threading.Thread(target=self._run, name="countoff kubeflow", daemon=True)
        with contextlib.suppress(RuntimeError):  # the interpreter is about to end, and starts no thread any more
            thread.start()
            self._thread, _posting = thread, self

    def fit_ended(self) -> None:
        """The last post says that the fit is complete."""
        self._finished = True

    def closed(self) -> None:
        """Ends the thread. Waits for the last post, 1 s at most; a second call does nothing."""
        global _posting
        if _posting is not self or self._thread is None:
            return
        _posting = None
        self._over.set()
        self._thread.join(LAST_SECONDS)
        if self._thread.is_alive():  # in a forked process it is not, and the socket is that of the parent
            self._given_up.set()
            connection = self._connection
            if connection is not None and connection.sock is not None:
                with contextlib.suppress(OSError):  # the server has closed it meanwhile
                    connection.sock.shutdown(socket.SHUT_RDWR)  # ends the wait for an answer; `close` would not

    # The thread of the posts.

    def _run(self) -> None:
        last = False
        while not self._given_up.is_set():
            failure = ""
            try:
                self._post_news(last)
            except Exception as error:  # whatever goes wrong here, training goes on
                failure = _reason(error)
            if failure and not self._failing:
                _log.debug("Kubeflow was not told how far the fit is: %s", failure)
            self._failing = bool(failure)
            if last:
                return
            last = self._over.wait(EVERY_SECONDS)

    def _post_news(self, last: bool) -> None:
        """Posts the status, unless it is what the server has; a job that stands still then has an old one."""
        steps, total = self._training.steps_done, self._training.total_steps
        metrics = {**self._training.metrics, "current_step": steps}
        if (news := (metrics, total, last and self._finished)) == self._told:
            return
        status: dict[str, Any] = {"lastUpdatedTime": datetime.now(timezone.utc).isoformat(timespec="seconds")}
        if news[-1]:
            status |= {"progressPercentage": 100, "estimatedRemainingSeconds": 0}
        elif total:
            status["progressPercentage"] = min(99, 100 * steps // total)  # 100 is for the end, as in transformers
            if (here := steps - self._steps_before) > 0:
                left = (time.monotonic() - self._began) / here * max(0, total - steps)
                status["estimatedRemainingSeconds"] = min(_LARGEST, int(left))
        status["metrics"] = [
            {"name": name, "value": str(value)} for name, value in metrics.items() if len(name) <= _LONGEST
        ]
        self._post(json.dumps({"trainerStatus": status}).encode())
        self._told = news

    def _post(self, body: bytes) -> None:
        """Posts a status.

        Raises:
            Exception: If the server has not taken it.
        """
        token = Path(os.environ[TOKEN_FILE]).read_text().strip()  # each time: Kubernetes renews it
        url = urlsplit(os.environ[SERVER_URL])
        if url.scheme == "https":
            context = ssl.create_default_context(cafile=os.environ.get(CA_FILE) or None)
            connection = HTTPSConnection(url.netloc, timeout=CONNECT_SECONDS, context=context)
        else:
            connection = HTTPConnection(url.netloc, timeout=CONNECT_SECONDS)
        connection.set_debuglevel(0)  # a program that has set another one for all would print the token
        self._connection = connection
        with contextlib.closing(connection):
            connection.connect()
            connection.sock.settimeout(LAST_SECONDS if self._over.is_set() else ANSWER_SECONDS)
            if self._given_up.is_set():  # while there was no socket to end the wait with
                return
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            connection.request("POST", url._replace(scheme="", netloc="").geturl() or "/", body, headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise HTTPException(answer.status)


def _reason(error: Exception) -> str:
    """What went wrong, without any text of the error: that may quote the token, or what the server has sent."""
    if isinstance(error, OSError) and error.errno is not None:
        return f"{type(error).__name__}, {os.strerror(error.errno)}"
    if type(error) is HTTPException:
        return f"its server answered {error.args[0]}"
    return type(error).__name__
