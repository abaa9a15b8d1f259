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
from countoff.core.alerts.telling import Telling
from countoff.core.verdict import Verdict

VERDICT = Verdict("LostRank", "rank 2 is gone.")


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


def fail(error: Exception) -> None:
    raise error


def test_the_teller_tells_the_runs_and_the_host_its_log(pod: Path) -> None:
    run = Run()
    one = Telling(Settings(termination_log=str(pod), verdict_file="/v.json", trace_dir="/t"), lambda: [run])
    one.tell(VERDICT, for_host=True, for_job=True)
    one.wait()
    assert [(alert.ends, alert.files) for alert in run.told] == [(True, ("/v.json", "/t"))]
    assert pod.read_text("utf-8").startswith("countoff: LostRank")


def test_others_tell_nobody(pod: Path) -> None:
    run = Run()
    one = Telling(Settings(termination_log=str(pod)), lambda: [run])
    one.tell(VERDICT, for_host=False, for_job=False)
    one.wait()
    assert (run.told, pod.read_text()) == ([], "")


def test_a_warning_is_told_once_of_each_kind_and_never_in_the_log(pod: Path) -> None:
    """The termination log has what ended a container."""
    run = Run()
    one = Telling(Settings(termination_log=str(pod), verdict_file="/v.json"), lambda: [run])
    for kind in ("Stalled", "SameOrder", "Stalled"):
        one.warn(Verdict(kind, "something."))
    while len(run.told) < 2:
        time.sleep(0.001)
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
    one.tell(VERDICT, for_host=True, for_job=True)
    one.warn(VERDICT)
    one.wait()
    assert (one.reaches, run.told) == ("", [])


def test_whom_a_rank_reaches() -> None:
    assert Telling(Settings()).reaches == ""
    assert Telling(Settings(notify=("json://127.0.0.1",))).reaches == "addresses"
    assert Telling(Settings(notify=("json://127.0.0.1",)), lambda: [Run()]).reaches == "run"
    assert Telling(Settings(), lambda: fail(ValueError("closed"))).reaches == ""  # pyright: ignore[reportArgumentType]


def test_one_that_hangs_holds_no_other_back_and_the_end_not_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telling, "TELL_SECONDS", 0.3)
    released, run = threading.Event(), Run()
    one = Telling(Settings(), lambda: [Run("hangs", released.wait), run])
    begun = time.monotonic()
    one.tell(VERDICT, for_host=False, for_job=True)
    one.wait()
    assert time.monotonic() - begun >= 0.3
    assert len(run.told) == 1
    released.set()


def test_the_others_wait_for_the_teller(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Telling(Settings())
    one.tell(VERDICT, for_host=False, for_job=False)
    over = one.expect()
    waited = threading.Thread(target=one.wait)
    waited.start()
    waited.join(0.1)
    assert waited.is_alive()
    over()
    waited.join()


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
        one.tell(VERDICT, for_host=False, for_job=True)
        one.wait()
    assert caplog.messages == [said]
