"""Notifications, by the real apprise to a receiver on this machine."""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from countoff.core.alerts import notifications
from countoff.core.alerts.notifications import Notifications, NotTold
from countoff.core.finding import Finding
from countoff.core.verdict import Verdict
from tests.receiver import Receiver, breaks, hangs, receiving, talks_nonsense

FINDING = Finding(Verdict("LostRank", "rank 2 is gone.", why="It was killed."), "error")


def address(receiver: Receiver) -> str:
    return f"json://me:hunter2@{receiver.place}/"


def test_an_address_gets_title_text_and_kind() -> None:
    with receiving() as receiver:
        Notifications([address(receiver)]).tell(FINDING)
    [body] = receiver.bodies
    assert (body["title"], body["message"], body["type"]) == (FINDING.title, FINDING.message, "failure")


def test_a_warning_is_told_as_one() -> None:
    with receiving() as receiver:
        Notifications([address(receiver)]).tell(Finding(FINDING.verdict, "warning"))
    assert [body["type"] for body in receiver.bodies] == ["warning"]


def test_one_that_fails_holds_no_other_back() -> None:
    """The error names what is no secret of it."""
    with receiving() as receiver, receiving(breaks) as other:
        with pytest.raises(NotTold, match=r"^not taken by address 1 \(json\), address 3 \(nonsense\)$"):
            Notifications([address(other), address(receiver), "nonsense://hunter2"]).tell(FINDING)
        assert len(receiver.bodies) == len(other.bodies) == 1


@pytest.mark.parametrize("answer", [breaks, talks_nonsense])
def test_what_is_not_taken_is_told(answer: Callable[[BaseHTTPRequestHandler], None]) -> None:
    with receiving(answer) as receiver, pytest.raises(NotTold, match=r"^not taken by address 1 \(json\)$"):
        Notifications([address(receiver)]).tell(FINDING)


def test_nobody_who_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(NotTold, match=r"^not taken by address 1 \(json\)$"):
            Notifications([f"json://127.0.0.1:{free.getsockname()[1]}"]).tell(FINDING)


def test_one_that_hangs_ends_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that sends is ended, and none is left behind."""
    monkeypatch.setattr(notifications, "SEND_SECONDS", 3)
    with receiving(hangs) as receiver:
        begun = time.monotonic()
        with pytest.raises(NotTold, match=r"^not taken by address 1 \(json\)$"):
            Notifications([address(receiver)]).tell(FINDING)
        assert time.monotonic() - begun >= 1.5  # it was the time that ended it
        assert len(receiver.bodies) <= 1  # the server may have got it
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_one_that_hangs_is_no_word_about_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the program ignores the signal by which the process that sends ends itself."""
    monkeypatch.setattr(notifications, "SEND_SECONDS", 3)
    before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    try:
        with receiving() as receiver, receiving(hangs) as other:
            failed = Notifications([address(receiver), f"json://127.0.0.1:{other.server_port}?rto=60"]).send(
                "title", "text", kind="info"
            )
    finally:
        signal.signal(signal.SIGALRM, before)
    assert failed == ["address 2 (json)"]
    assert len(receiver.bodies) == 1


def test_the_program_may_have_its_own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """apprise may lie where only the program has put it. Python ignores what is no text."""
    with receiving() as receiver:
        path = [*sys.path, Path("/nowhere")]
        monkeypatch.setattr(sys, "path", [])
        with pytest.raises(NotTold):
            Notifications([address(receiver)]).tell(FINDING)
        monkeypatch.setattr(sys, "path", path)
        Notifications([address(receiver)]).tell(FINDING)
        assert len(receiver.bodies) == 1


def test_no_code_of_the_users_runs_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with receiving() as receiver:
        Notifications([address(receiver)]).tell(FINDING)
        assert len(receiver.bodies) == 1
    assert not (tmp_path / "ran").exists()


def test_a_program_that_is_no_python_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(NotTold, match="there is no Python"):
        Notifications(["json://127.0.0.1"]).tell(FINDING)
