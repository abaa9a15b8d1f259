"""Who is told, by whom, and how long that is waited for."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from countoff.core import Settings, constants
from countoff.core.alerts import alerts, sinks
from countoff.core.alerts.alerts import Alerts, wait_for_all
from countoff.core.alerts.notifications import Notifications, NotTold
from countoff.core.alerts.sinks import GROUP
from countoff.core.finding import Finding
from countoff.core.verdict import Verdict
from countoff.core.waiting import until

VERDICT = Verdict("LostRank", "rank 2 is gone.")
ADDRESS = ("json://127.0.0.1",)


@dataclass
class Listener:
    """What a test gives as `on_finding`."""

    act: Callable[[], object] = lambda: None
    told: list[Finding] = field(default_factory=list[Finding])

    def __call__(self, finding: Finding) -> None:
        self.act()
        self.told.append(finding)


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setattr(constants, "TERMINATION_LOG", str(tmp_path / "log"))
    (tmp_path / "log").touch()
    return tmp_path / "log"


@pytest.fixture(autouse=True)
def _new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has been sent yet."""
    monkeypatch.setattr(alerts, "addressed", set[tuple[int, str]]())


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The titles of what is sent to addresses."""
    titles: list[str] = []
    monkeypatch.setattr(Notifications, "tell", lambda _, finding: titles.append(finding.title))
    return titles


def wait_until(done: Callable[[], object]) -> None:
    assert until(lambda: bool(done()), time.monotonic() + 30)


def always() -> bool:
    return True


def never() -> bool:
    return False


def fail(error: BaseException) -> None:
    raise error


def say_nothing(line: str) -> None:
    raise AssertionError(line)


def tell(
    one: Alerts,
    claim: Callable[[], bool] = always,
    say: Callable[[str], object] = say_nothing,
    *,
    for_host: bool = True,
) -> None:
    """Tells of the verdict, and waits for it as the end of a process does."""
    one.expect()
    try:
        one.tell(VERDICT, for_host=for_host, claim=claim, say=say)
    finally:
        one.wait()


def install(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    """Installs a package that listens."""
    found = EntryPoints([EntryPoint("pager", target, GROUP)])
    monkeypatch.setattr(sinks, "entry_points", lambda *, group: found.select(group=group))


def test_the_user_the_log_and_the_container_are_told(pod: Path, caplog: pytest.LogCaptureFixture) -> None:
    listener = Listener()
    tell(
        Alerts(
            Settings(verdict_file="/v.json", trace_dir="/t", on_finding=listener),
        )
    )
    [finding] = listener.told
    assert (finding.level, finding.files) == ("error", ("/v.json", "/t"))
    assert pod.read_text("utf-8").startswith("countoff: LostRank")
    [record] = caplog.records
    assert (record.name, record.levelname, record.getMessage()) == ("countoff", "ERROR", "LostRank: rank 2 is gone.")
    parts = {name: vars(record)[name] for name in ("finding", "kind", "ranks", "hosts")}
    assert parts == {"finding": finding, "kind": "LostRank", "ranks": (), "hosts": []}


def test_others_tell_nobody(pod: Path, caplog: pytest.LogCaptureFixture) -> None:
    listener = Listener()
    tell(Alerts(Settings(on_finding=listener)), never, for_host=False)
    assert (listener.told, pod.read_text(), caplog.records) == ([], "", [])


def test_a_rank_that_has_nobody_to_tell_claims_nothing() -> None:
    tell(Alerts(Settings()), lambda: pytest.fail("there is nobody to tell"))


def test_each_warning_is_told_and_never_in_the_containers_log(pod: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The termination log has what ended a container."""
    listener = Listener()
    one = Alerts(Settings(verdict_file="/v.json", on_finding=listener))
    for kind in ("Stalled", "SameOrder"):
        one.warn(Verdict(kind, "something."), say_nothing)
    wait_until(lambda: len(listener.told) == 2 and len(caplog.records) == 2)
    one.wait()  # nothing is waited for
    assert {(finding.kind, finding.level, finding.files) for finding in listener.told} == {
        ("Stalled", "warning", ()),
        ("SameOrder", "warning", ()),
    }
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert pod.read_text() == ""


def test_a_rank_that_is_not_to_tell_leaves_function_and_addresses_alone(sent: list[str]) -> None:
    listener = Listener()
    tell(Alerts(Settings(notify=ADDRESS, on_finding=listener)), never)
    assert (listener.told, sent) == ([], [])


def test_a_store_that_ends_holds_nothing_up(pod: Path) -> None:
    one = Alerts(Settings(on_finding=Listener()))
    with pytest.raises(OSError, match="gone"):
        tell(one, lambda: fail(OSError("gone")))  # pyright: ignore[reportArgumentType]
    assert pod.read_text("utf-8").startswith("countoff: LostRank")


def test_the_end_of_a_fit_waits_for_its_warnings() -> None:
    """A function of the user's may itself end the fit: it waits for nothing then."""
    go_on, told = threading.Event(), list[str]()

    def end_the_fit(finding: Finding) -> None:
        one.close()  # with the thread that is waited for it would wait for itself
        go_on.wait(20)
        told.append(finding.kind)

    one = Alerts(Settings(on_finding=end_the_fit))
    one.warn(Verdict("Stalled", "something."), say_nothing)
    threading.Timer(0.2, go_on.set).start()
    one.close()
    assert told == ["Stalled"]
    assert "countoff alert" not in [each.name for each in threading.enumerate()]


def test_addresses_get_a_kind_of_warning_once_in_a_process(sent: list[str]) -> None:
    """A program may fit a thousand times."""
    listener = Listener()
    for verdict in (Verdict("Stalled", "a."), Verdict("Stalled", "b.")):
        Alerts(Settings(notify=ADDRESS, on_finding=listener)).warn(verdict, say_nothing)
    wait_until(lambda: len(listener.told) == 2 and sent)
    assert sent == ["countoff: Stalled: a."]


def test_an_installed_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is loaded when there is a finding, and not sooner."""
    told: list[Finding] = []
    monkeypatch.setattr(alerts, "told_of_test", told.append, raising=False)
    install(monkeypatch, "countoff.core.alerts.alerts:told_of_test")
    tell(Alerts(Settings()))
    assert [finding.kind for finding in told] == ["LostRank"]


def test_an_installed_package_that_cannot_be_imported_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "no_such_package:tell")
    said: list[str] = []
    listener = Listener()
    tell(Alerts(Settings(on_finding=listener)), say=said.append)
    assert said == ["pager of countoff.findings raised ModuleNotFoundError, and was not told of LostRank"]
    assert len(listener.told) == 1


def test_a_process_that_starts_no_thread_any_more_tells_all_the_same(
    pod: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a function of atexit in Python 3.12."""
    listener = Listener()
    monkeypatch.setattr(threading.Thread, "start", lambda _: fail(RuntimeError("can't create new thread")))
    tell(Alerts(Settings(on_finding=listener)))
    assert len(listener.told) == 1
    assert pod.read_text("utf-8").startswith("countoff: LostRank")


def test_one_that_hangs_holds_no_other_back_and_the_end_not_for_longer(
    pod: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerts, "NOTIFY_SECONDS", 0.3)
    released = threading.Event()
    one = Alerts(Settings(on_finding=Listener(released.wait)))
    begun = time.monotonic()
    tell(one)
    assert time.monotonic() - begun >= 0.3
    assert pod.read_text("utf-8").startswith("countoff: LostRank")
    released.set()


def test_the_wait_begins_before_the_verdict_is_printed() -> None:
    """A slow file system may take as long as the main thread waits for the printing."""
    one = Alerts(Settings())
    one.wait()  # nothing is expected
    one.expect()
    waiting = threading.Thread(target=one.wait)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    one.tell(VERDICT, for_host=False, claim=never, say=say_nothing)
    waiting.join()


def test_the_end_of_a_process_waits_for_all_its_guards() -> None:
    released = threading.Event()
    listener = Listener(released.wait)
    one, other = Alerts(Settings(on_finding=listener)), Alerts(Settings())
    for each in (one, other):
        each.expect()
        each.tell(VERDICT, for_host=False, claim=always, say=say_nothing)
    waiting = threading.Thread(target=wait_for_all)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    released.set()
    waiting.join()
    assert len(listener.told) == 1


@pytest.mark.parametrize("error", [ValueError("https://hunter2"), SystemExit(3)])
def test_a_function_that_fails_is_one_line_without_a_secret(error: BaseException) -> None:
    """The text of an error may hold an address. What the function raises ends nothing."""
    said: list[str] = []

    def page(finding: Finding) -> None:
        raise error

    begun = time.monotonic()
    tell(Alerts(Settings(on_finding=page)), say=said.append)
    [line] = said
    assert line.endswith(f".page raised {type(error).__name__}, and was not told of LostRank")
    assert time.monotonic() - begun < alerts.NOTIFY_SECONDS


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (NotTold("not taken by slack"), "notify was not told of LostRank: not taken by slack"),
        (ValueError("slack://hunter2"), "notify was not told of LostRank: ValueError"),
    ],
)
def test_a_failure_of_an_address_is_one_debug_line_without_a_secret(
    error: Exception, said: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Notifications, "tell", lambda _, finding: fail(error))
    with caplog.at_level(logging.DEBUG, "countoff"):
        tell(Alerts(Settings(notify=ADDRESS)), for_host=False)
    assert caplog.messages == [said]


def test_without_a_handler_python_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """The verdict is printed already. Python's handler of last resort would print it again."""
    log = logging.getLogger("countoff")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log, "propagate", False)  # pytest's own handlers are above it
        assert [type(handler) for handler in log.handlers] == [logging.NullHandler]
        tell(Alerts(Settings()))
    assert capfd.readouterr() == ("", "")
