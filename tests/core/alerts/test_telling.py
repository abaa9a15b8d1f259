"""Who is told, by whom, and how long that is waited for."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from countoff.core import Settings
from countoff.core.alerts import telling
from countoff.core.alerts.alert import Alert, NotTold
from countoff.core.alerts.notifications import Notifications
from countoff.core.alerts.telling import ADDRESSES, RUNS, Telling, wait_for_all
from countoff.core.verdict import Verdict
from countoff.core.waiting import until

VERDICT = Verdict("LostRank", "rank 2 is gone.")
ADDRESS = ("json://127.0.0.1",)


@dataclass
class Run:
    """A tracker's run of the test's own."""

    name: str = "a run"
    act: Callable[[], object] = lambda: None
    told: list[Alert] = field(default_factory=list[Alert])

    def tell(self, alert: Alert) -> None:
        self.act()
        self.told.append(alert)


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    (tmp_path / "log").touch()
    return tmp_path / "log"


@pytest.fixture(autouse=True)
def _new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has been sent yet."""
    monkeypatch.setattr(telling, "addressed", set[tuple[int, str]]())


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The titles of what is sent to addresses."""
    titles: list[str] = []
    monkeypatch.setattr(Notifications, "tell", lambda _, alert: titles.append(alert.title))
    return titles


def wait_until(done: Callable[[], object]) -> None:
    assert until(lambda: bool(done()), time.monotonic() + 30)


def always(what: str) -> bool:
    return True


def never(what: str) -> bool:
    return False


def fail(error: Exception) -> None:
    raise error


def test_the_teller_tells_the_runs_and_the_host_its_log(pod: Path) -> None:
    run = Run()
    one = Telling(Settings(termination_log=str(pod), verdict_file="/v.json", trace_dir="/t"), lambda: [run])
    one.expect()
    one.tell(VERDICT, for_host=True, claim=always)
    one.wait()
    assert [(alert.ends, alert.files) for alert in run.told] == [(True, ("/v.json", "/t"))]
    assert pod.read_text("utf-8").startswith("countoff: LostRank")


def test_others_tell_nobody(pod: Path) -> None:
    run = Run()
    one = Telling(Settings(termination_log=str(pod)), lambda: [run])
    one.tell(VERDICT, for_host=False, claim=never)
    one.wait()
    assert (run.told, pod.read_text()) == ([], "")


def test_a_warning_is_told_once_of_each_kind_and_never_in_the_log(pod: Path) -> None:
    """The termination log has what ended a container."""
    run = Run()
    one = Telling(Settings(termination_log=str(pod), verdict_file="/v.json"), lambda: [run])
    for kind in ("Stalled", "SameOrder", "Stalled"):
        one.warn(Verdict(kind, "something."))
    wait_until(lambda: len(run.told) == 2)
    one.wait()  # nothing is waited for
    assert {(alert.verdict.kind, alert.ends, alert.files) for alert in run.told} == {
        ("Stalled", False, ()),
        ("SameOrder", False, ()),
    }
    assert len(run.told) == 2
    assert pod.read_text() == ""


def test_notify_false_leaves_trackers_alone() -> None:
    run = Run()
    one = Telling(Settings(notify=False), lambda: [run])
    one.expect()
    one.tell(VERDICT, for_host=True, claim=always)
    one.warn(VERDICT)
    one.wait()
    assert run.told == []


def test_a_tracker_that_cannot_be_asked_has_no_run(sent: list[str]) -> None:
    one = Telling(Settings(notify=ADDRESS), lambda: fail(ValueError("closed")))  # pyright: ignore[reportArgumentType]
    one.expect()
    one.tell(VERDICT, for_host=False, claim=always)
    one.wait()
    assert len(sent) == 1


def test_a_rank_claims_what_it_can_tell_and_tells_what_it_gets(sent: list[str]) -> None:
    """One rank may have the run of a tracker, and another one the addresses."""
    run, claimed = Run(), list[str]()

    def claim(what: str) -> bool:
        claimed.append(what)
        return what == RUNS

    Telling(Settings()).tell(VERDICT, for_host=False, claim=claim)
    assert claimed == []
    one = Telling(Settings(notify=ADDRESS), lambda: [run])
    one.expect()
    one.tell(VERDICT, for_host=False, claim=claim)
    one.wait()
    assert sorted(claimed) == [ADDRESSES, RUNS]
    assert (len(run.told), sent) == (1, [])


def test_a_store_that_ends_holds_nothing_up(pod: Path) -> None:
    one = Telling(Settings(termination_log=str(pod)), lambda: [Run()])
    one.expect()
    with pytest.raises(OSError, match="gone"):
        one.tell(VERDICT, for_host=True, claim=lambda _: fail(OSError("gone")))  # pyright: ignore[reportArgumentType]
    one.wait()
    assert pod.read_text("utf-8").startswith("countoff: LostRank")


def test_addresses_get_a_kind_of_warning_once_in_a_process(sent: list[str]) -> None:
    """A program may fit a thousand times. A tracker has another run each time."""
    run = Run()
    for verdict in (Verdict("Stalled", "a."), Verdict("Stalled", "b.")):
        Telling(Settings(notify=ADDRESS), lambda: [run]).warn(verdict)
    wait_until(lambda: len(run.told) == 2 and sent)
    assert sent == ["countoff: Stalled: a."]


def test_a_process_that_starts_no_thread_any_more_tells_all_the_same(
    pod: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a function of atexit in Python 3.12."""
    run = Run()
    monkeypatch.setattr(threading.Thread, "start", lambda _: fail(RuntimeError("can't create new thread")))
    one = Telling(Settings(termination_log=str(pod)), lambda: [run])
    one.expect()
    one.tell(VERDICT, for_host=True, claim=always)
    one.wait()
    assert len(run.told) == 1
    assert pod.read_text("utf-8").startswith("countoff: LostRank")


def test_one_that_hangs_holds_no_other_back_and_the_end_not_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telling, "TELL_SECONDS", 0.3)
    released, run = threading.Event(), Run()
    one = Telling(Settings(), lambda: [Run("hangs", released.wait), run])
    begun = time.monotonic()
    one.expect()
    one.tell(VERDICT, for_host=False, claim=always)
    one.wait()
    assert time.monotonic() - begun >= 0.3
    assert len(run.told) == 1
    released.set()


def test_the_wait_begins_before_the_verdict_is_printed() -> None:
    """A slow file system may take as long as the main thread waits for the printing."""
    one = Telling(Settings())
    one.wait()  # nothing is expected
    one.expect()
    waiting = threading.Thread(target=one.wait)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    one.tell(VERDICT, for_host=False, claim=never)
    waiting.join()


def test_the_end_of_a_process_waits_for_all_its_guards() -> None:
    released, run = threading.Event(), Run()
    run.act = released.wait
    one, other = Telling(Settings(), lambda: [run]), Telling(Settings())
    for each in (one, other):
        each.expect()
        each.tell(VERDICT, for_host=False, claim=always)
    waiting = threading.Thread(target=wait_for_all)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    released.set()
    waiting.join()
    assert len(run.told) == 1


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (NotTold("not taken by slack"), "the alert was not told to a run: not taken by slack"),
        (ValueError("slack://hunter2"), "the alert was not told to a run: ValueError"),
    ],
)
def test_a_failure_is_one_debug_line_without_a_secret(
    error: Exception, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    one = Telling(Settings(), lambda: [Run("a run", lambda: fail(error))])
    with caplog.at_level(logging.DEBUG, "countoff"):
        one.expect()
        one.tell(VERDICT, for_host=False, claim=always)
        one.wait()
    assert caplog.messages == [said]
