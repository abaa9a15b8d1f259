"""Notifications, by the real apprise to a receiver on this machine."""

import os
import socket
import sys
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler

import pytest

from countoff.core.alerts import notifications
from countoff.core.alerts.alert import Alert, NotTold
from countoff.core.alerts.notifications import Notifications
from countoff.core.verdict import Verdict
from tests.receiver import Receiver, breaks, hangs, receiving, talks_nonsense

ALERT = Alert(Verdict("LostRank", "rank 2 is gone.", why="It was killed."), ends=True)


def address(receiver: Receiver) -> str:
    return f"json://me:hunter2@{receiver.place}/"


def test_an_address_gets_title_text_and_kind() -> None:
    with receiving() as receiver:
        Notifications([address(receiver)]).tell(ALERT)
    [body] = receiver.bodies
    assert (body["title"], body["message"], body["type"]) == (ALERT.title, ALERT.text, "failure")


def test_a_warning_is_told_as_one() -> None:
    with receiving() as receiver:
        Notifications([address(receiver)]).tell(Alert(ALERT.verdict, ends=False))
    assert [body["type"] for body in receiver.bodies] == ["warning"]


def test_one_that_fails_holds_no_other_back() -> None:
    """The error names what is no secret of it."""
    with receiving() as receiver, receiving(breaks) as other:
        with pytest.raises(NotTold, match=r"^not taken by json, nonsense$"):
            Notifications([address(other), address(receiver), "nonsense://hunter2"]).tell(ALERT)
        assert len(receiver.bodies) == len(other.bodies) == 1


@pytest.mark.parametrize("answer", [breaks, talks_nonsense])
def test_what_is_not_taken_is_told(answer: Callable[[BaseHTTPRequestHandler], None]) -> None:
    with receiving(answer) as receiver, pytest.raises(NotTold, match=r"^not taken by json$"):
        Notifications([address(receiver)]).tell(ALERT)


def test_nobody_who_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(NotTold, match=r"^not taken by json$"):
            Notifications([f"json://127.0.0.1:{free.getsockname()[1]}"]).tell(ALERT)


def test_one_that_hangs_ends_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that sends is ended, and none is left behind."""
    monkeypatch.setattr(notifications, "SEND_SECONDS", 2)
    with receiving(hangs) as receiver:
        begun = time.monotonic()
        with pytest.raises(NotTold, match=r"^not taken by json$"):
            Notifications([address(receiver)]).tell(ALERT)
        assert time.monotonic() - begun >= 1.5  # it was the time that ended it
        assert len(receiver.bodies) <= 1  # the server may have got it
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_the_program_itself_may_have_its_own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """apprise may lie where only the program has put it."""
    with receiving() as receiver:
        path = [*sys.path]
        monkeypatch.setattr(sys, "path", [])
        with pytest.raises(NotTold):
            Notifications([address(receiver)]).tell(ALERT)
        monkeypatch.setattr(sys, "path", path)
        Notifications([address(receiver)]).tell(ALERT)
        assert len(receiver.bodies) == 1
