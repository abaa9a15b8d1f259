"""What happens to a guard, as lines of its trace: the lines of one rank, pauses, and how a fit ends."""

import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from countoff.core import FitPlan, Guard, Settings, Verdict, formats
from countoff.core.checks.check import FitStart
from countoff.core.protocol.counters import SpanCounters, UnusedBatches
from countoff.core.protocol.evidence import Evidence
from countoff.core.protocol.failures import Failure
from countoff.core.session.liveness import collectives
from countoff.core.session.liveness.processes import Process
from countoff.core.session.state import State
from countoff.core.session.threads.writer import Writer
from countoff.core.trace import incident, writer
from countoff.core.trace import recorder as module
from countoff.core.trace.recorder import Recorder
from countoff.report.reader import read as read_trace
from tests.fake_store import FakeStore
from tests.other_ranks import KeptRecords
from tests.traces import kinds, of, read

BEGINS = FitStart(FitPlan(), {})
VERDICT = Verdict("UnevenBatches", "rank 1 ran out of data.", (1,))


@pytest.fixture(autouse=True)
def _no_writer_is_left() -> Iterator[None]:
    yield
    assert not writer.writers


def guard(directory: Path, **options: Any) -> Guard:
    made = Guard(
        Settings(trace_dir=str(directory), **options),
        rank=0,
        world_size=1,
        learning_rates=lambda: [0.1, float("nan")],
        framework="Lightning",
    )
    totals = {"countoff/batches_per_epoch": 3, "countoff/reported_batches_per_epoch": 4}
    made.trace_totals(lambda: totals, lambda: 12)
    return made


def test_a_fit_of_one_rank(tmp_path: Path) -> None:
    """With one rank there is no other thread of countoff's, and the trace is whole."""
    fit, began = guard(tmp_path, weights_every=8), time.time()
    fit.fit_start(FitPlan(batch_size=2, position=[0, 1, 40]), {"lightning": "2.5"})
    fit.train_start(0, 1)
    for _ in range(2):
        fit.batch()
        fit.step()
    fit.waited(0.25)
    fit.report_unused(UnusedBatches(5))
    fit.train_end("stopped")
    fit.eval_start("validation")
    fit.batch()
    fit.eval_end("exhausted")
    fit.fit_end()
    fit.close()
    lines = read(tmp_path)
    assert kinds(lines) == ["begin", *kinds(lines[1:-1]), "end"]
    begin, end = lines[0], lines[-1]
    assert began - 0.001 <= begin["t"] <= end["t"] <= time.time() + 0.001
    assert begin["v"] == formats.TRACE
    assert (begin["rank"], begin["world"], begin["pid"]) == (0, 1, os.getpid())
    assert begin["framework"] == "Lightning"
    assert begin["settings"] == {"weights_every": 8, "trace_dir": str(tmp_path)}
    assert begin["plan"] == {"batch_size": 2, "position": [0, 1, 40], "runs_to_end": True}
    assert begin["before"] == 40
    assert begin["versions"]["lightning"] == "2.5"
    spans = [{name: value for name, value in line.items() if name not in ("k", "t", "g")} for line in lines[1:-1]]
    assert [span for span in spans if "span" in span] == [
        {"span": "train epoch 0", "at": 1, "s": 0, "lr": [0.1, None]},
        {"span": "train epoch 0", "why": "stopped", "b": 3, "s": 2, "l": 0.25, "unused": 5},
        {"span": "validation", "eval": True},
        {"span": "validation", "why": "exhausted", "b": 1, "s": 2, "l": 0.0},
    ]
    assert [line["horizon"] for line in of("totals", lines)] == [12]
    assert [(line["true"], line["reported"]) for line in of("totals", lines)] == [
        ({"batches_per_epoch": 3}, {"batches_per_epoch": 4})
    ]
    assert end["how"] == "finished"


def test_fits_of_one_process_are_told_apart(tmp_path: Path) -> None:
    for _ in range(2):
        fit = guard(tmp_path)
        fit.fit_start(FitPlan())
        fit.fit_end()
        fit.close()
    assert [line.get("before") for line in of("begin", read(tmp_path))] == [None] * 2
    numbers = [line.get("g", 0) for line in of("begin", read(tmp_path))]
    assert numbers[1] == numbers[0] + 1
    assert [line.get("g", 0) for line in of("end", read(tmp_path))] == numbers


def leave(fit: Guard, error: BaseException | None = None) -> None:
    fit.fit_start(FitPlan())
    fit.train_start(0)
    fit.batch()
    if error is not None:
        fit.failed(error)
    fit.close()


@pytest.mark.parametrize(
    ("error", "how", "what"),
    [
        (ValueError("shard 3 is torn\nmore"), "failed", "ValueError: shard 3 is torn"),
        (SystemExit(2), "failed", "SystemExit: 2"),
        (SystemExit(0), "closed", None),
        (None, "closed", None),
    ],
)
def test_how_a_fit_was_left(error: BaseException | None, how: str, what: str | None, tmp_path: Path) -> None:
    leave(guard(tmp_path), error)
    end = read(tmp_path)[-1]
    assert (end["k"], end["how"], end.get("what")) == ("end", how, what)


def test_a_warning_is_traced_as_it_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit = guard(tmp_path)
    fit.fit_start(FitPlan())
    fit.warn(Verdict("WrongLength", "the length is wrong."))
    fit.fit_end()
    fit.close()
    warning = of("warning", read(tmp_path))[0]["verdict"]
    assert (warning["kind"], warning["sentence"]) == ("WrongLength", "the length is wrong.")
    assert "WrongLength" in capsys.readouterr().err


def waiting_lines(fit: Guard) -> None:
    """Ends with the number of lines that wait for a thread which this process does not have."""
    recorder = fit.state.observer
    assert isinstance(recorder, Recorder)
    before = len(recorder.writer.queue)
    fit.train_start(0)
    fit.failed(ValueError("torn"))
    sys.exit(len(recorder.writer.queue) - before)


def test_a_process_that_was_forked_off_writes_nothing(tmp_path: Path) -> None:
    """A loader's worker inherits the guard, and no writer."""
    fit = guard(tmp_path)
    fit.fit_start(FitPlan())
    child = multiprocessing.get_context("fork").Process(target=waiting_lines, args=(fit,))
    child.start()
    child.join(10)
    assert child.exitcode == 0
    fit.close()
    assert kinds(read(tmp_path)) == ["begin", "totals", "end"]


def test_a_trace_that_cannot_be_written_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    fit, directory = guard(tmp_path / "file" / "runs"), str(tmp_path / "file" / "runs")
    leave(fit)
    fit = guard(tmp_path / "file" / "runs")
    leave(fit)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"[rank 0] countoff: the trace in {directory!r} ends here: Not a directory; training goes on"]


def state_of(policy: Any = "raise", rank: int = 1) -> State:
    state = State(rank, 4, Settings(on_divergence=policy), {})
    state.spans.append(SpanCounters("train epoch 0", started=7))
    return state


def recorded(directory: Path, act: Callable[[Recorder], object], state: State | None = None) -> list[dict[str, Any]]:
    state = state or state_of()
    recorder = Recorder(state, 0, str(directory))
    recorder.fit_started(BEGINS, None)
    act(recorder)
    recorder.closed()
    recorder.closed()
    return [line for line in read(directory, state.rank) if line["k"] not in ("begin", "tick")]


def test_a_stack_that_cannot_be_told_costs_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that runs on a strange interpreter still posts its row and prints the verdict."""

    def fail(*_: object) -> Any:
        raise RuntimeError("no frames")

    def act(recorder: Recorder) -> None:
        recorder.posted(cast("Any", FakeStore()))
        recorder.gathered(cast("Any", FakeStore()), {1: {"rank": 1, "batches": 7}})
        recorder.concluded(VERDICT, whole=True)

    monkeypatch.setattr(incident, "post_stack", fail)
    assert [line["k"] for line in recorded(tmp_path, act)] == ["verdict", "stacks", "end"]


def test_a_verdict_ends_the_trace_of_a_fit(tmp_path: Path) -> None:
    """What comes after the verdict is not the run's any more; the directory has the incident."""

    def act(recorder: Recorder) -> None:
        recorder.gathered(cast("Any", FakeStore()), {1: {"rank": 1, "batches": 7, "side": [1]}})
        recorder.concluded(VERDICT, whole=True)
        recorder.span_opening(SpanCounters("train epoch 1"))

    verdict, stacks, end = recorded(tmp_path, act)
    assert verdict["verdict"]["sentence"] == "rank 1 ran out of data."
    assert stacks["state"] == "code"
    assert "test_recorder.py" in "".join(stacks["frames"])
    assert (end["k"], end["how"]) == ("end", "verdict")
    assert json.loads((tmp_path / "incident.json").read_text())["counted"] == [{"rank": 1, "batches": 7}]


def test_a_signal_is_the_last_line_of_the_trace(tmp_path: Path) -> None:
    """It is in the file before the process ends by it."""

    def act(recorder: Recorder) -> None:
        recorder.ended_by("SIGTERM")
        (end,) = [line for line in read(tmp_path, 1) if line["k"] == "end"]
        assert (end["how"], end["what"]) == ("signal", "SIGTERM")
        recorder.span_opening(SpanCounters("train epoch 1"))

    assert [line["k"] for line in recorded(tmp_path, act)] == ["end"]


def test_a_verdict_is_in_the_trace_before_a_signal_ends_the_process(tmp_path: Path) -> None:
    def act(recorder: Recorder) -> None:
        recorder.concluded(VERDICT, whole=True)
        recorder.ended_by("SIGTERM")
        assert read(tmp_path, 1)[-1]["how"] == "verdict"
        assert (tmp_path / "incident.json").exists()

    recorded(tmp_path, act)


@pytest.fixture
def flight_recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Stands in for NCCL's: it answers once the event is set."""
    answers = threading.Event()
    monkeypatch.setattr(collectives, "flight_record", lambda: b"record" if answers.wait(60) else b"")
    monkeypatch.setattr(writer, "CLOSE_SECONDS", 0.5)
    yield answers
    answers.set()
    for thread in threading.enumerate():
        if thread.name == "countoff flight record":
            thread.join(10)


def test_a_flight_recorder_that_does_not_answer_costs_its_record_alone(
    tmp_path: Path, flight_recorder: threading.Event, capsys: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    lines = recorded(tmp_path, lambda recorder: recorder.concluded(VERDICT, whole=True))
    assert time.monotonic() - began < 5
    assert [line["k"] for line in lines] == ["verdict", "stacks", "end"]
    assert sorted(os.listdir(tmp_path)) == ["incident.json", "rank-00001.jsonl"]
    said = f"the incident in {str(tmp_path)!r} is without NCCL's flight record: NCCL does not answer"
    assert capsys.readouterr().err.splitlines() == [f"[rank 1] countoff: {said}"]
    assert (1, str(tmp_path)) not in writer.failed, "the file system is not to blame: later fits have a trace"


def test_the_flight_record_is_part_of_the_incident(
    tmp_path: Path, flight_recorder: threading.Event, capsys: pytest.CaptureFixture[str]
) -> None:
    flight_recorder.set()
    recorded(tmp_path, lambda recorder: recorder.concluded(VERDICT, whole=False))
    assert (tmp_path / "nccl_trace_rank_1").read_bytes() == b"record"
    assert capsys.readouterr().err == ""


def test_the_rank_that_failed_says_so(tmp_path: Path) -> None:
    state = state_of()
    state.failure = Failure("ValueError: torn", where="in batch 7 of train epoch 0")
    end = recorded(tmp_path, lambda recorder: recorder.concluded(VERDICT, whole=False), state)[-1]
    assert (end["how"], end["what"]) == ("failed", "ValueError: torn (in batch 7 of train epoch 0)")
    assert not (tmp_path / "incident.json").exists()


def test_a_verdict_in_warn_mode_ends_nothing(tmp_path: Path) -> None:
    def act(recorder: Recorder) -> None:
        recorder.concluded(VERDICT, whole=True)
        recorder.span_opening(SpanCounters("train epoch 1"))
        recorder.fit_ended()

    lines = recorded(tmp_path, act, state_of("warn"))
    assert [line["k"] for line in lines] == ["verdict", "stacks", "open", "end"]
    assert lines[-1]["how"] == "finished"
    assert not (tmp_path / "incident.json").exists()


@pytest.mark.parametrize(
    ("ends", "told"),
    [
        (lambda recorder: recorder.concluded(VERDICT, whole=False), ["verdict", "stacks", "pause", "end"]),
        (Recorder.fit_ended, ["end"]),
    ],
    ids=["verdict", "finished"],
)
def test_a_pause_that_lasts_at_the_end_is_told_of_a_fit_that_has_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: Callable[[Recorder], object], told: list[str]
) -> None:
    """What a program does after its training is no pause of it."""
    monkeypatch.setattr(module, "PAUSE_SECONDS", 0.01)

    def act(recorder: Recorder) -> None:
        deadline = time.monotonic() + 10
        while recorder.pauses.where is None and time.monotonic() < deadline:
            time.sleep(0.01)
        ends(recorder)

    assert [line["k"] for line in recorded(tmp_path, act)] == told


def test_rank_0_tells_how_a_span_ended(tmp_path: Path) -> None:
    closed = {0: 10.0, 1: 12.5, 2: 12.5, 3: 11.0}
    roll = recorded(tmp_path, lambda recorder: recorder.rolled("train epoch 0", closed))[0]
    assert (roll["span"], roll["spread"], roll["last"]) == ("train epoch 0", 2.5, [1, 2])


class Looks:
    """Looks of the writer at a fit's counters, by a clock of the test's own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        self.pauses = module.Pauses(Evidence())
        self.span = SpanCounters("train epoch 0")
        self.found: list[float] = []

    def train(self, batches: int, seconds: float) -> None:
        """Trains on so many batches, each of which takes so long."""
        for _ in range(batches):
            self.span.started += 1
            self.wait(seconds)

    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.look()
            self.now += min(writer.LOOK_SECONDS, until - self.now)

    def look(self) -> None:
        pause = self.pauses.look(self.now, self.span, 0)
        if pause is not None:
            self.found.append(round(pause.seconds, 3))


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    return Looks(monkeypatch)


def test_a_pause_is_longer_than_a_second(looks: Looks) -> None:
    looks.train(40, 0.05)
    looks.train(1, 0.9)
    looks.train(40, 0.05)
    looks.train(1, 4.0)
    looks.train(40, 0.05)
    assert looks.found == [pytest.approx(4.0, abs=0.3)]


def test_batches_that_take_seconds_are_no_pauses(looks: Looks) -> None:
    """The first one is: nothing tells yet how long a batch takes."""
    looks.train(20, 5.0)
    assert looks.found == [pytest.approx(5.0, abs=0.3)]
    looks.train(1, 30.0)
    looks.train(20, 5.0)
    assert looks.found[1:] == [pytest.approx(30.0, abs=0.3)]


def test_a_writer_that_was_blocked_does_not_stretch_a_pause(looks: Looks) -> None:
    looks.train(40, 0.05)
    looks.train(1, 2.0)
    looks.look()
    looks.now += 60.0  # the file system did not answer; meanwhile training went on
    looks.train(600, 0.1)
    assert looks.found == [pytest.approx(2.0, abs=0.3)]


def test_a_minute_of_a_long_fit_takes_less_than_a_kibibyte(tmp_path: Path) -> None:
    state = State(3, 4096, Settings(), {}, steps=1_000_000)
    recorder = Recorder(state, 12, str(tmp_path), lambda: [0.1])
    recorder.span = SpanCounters("train epoch 7", started=1_000_000, loader_seconds=12345.678)
    recorder.fit_started(BEGINS, None)
    recorder.writer.flush(30)
    now = time.monotonic() + 10.0  # later than any look of the writer
    lines = [line for second in range(240) for line in recorder.look(now + second / 4)]
    recorder.closed()
    ticks = of("tick", [dict(line) for line in lines])
    assert len(ticks) == 12
    clock = recorder.line("clock", ahead=-12.345678, error=0.012345)
    assert sum(len(json.dumps(line, separators=(",", ":"))) + 1 for line in (*ticks, clock)) < 1024


class Turns:
    """A writer that takes its turn when the test says so."""

    def __init__(self) -> None:
        self._waiting: list[Any] = []

    def put(self, line: Any) -> None:
        self._waiting.append(line)

    def turn(self) -> list[Any]:
        """Returns the lines that were put since the last turn."""
        waiting, self._waiting = self._waiting, []
        lines: list[Any] = []
        for each in waiting:
            lines += cast("Any", each)() if callable(each) else [each]
        return lines


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Turns:
    """The writer of the test's recorders."""
    turns = Turns()
    monkeypatch.setattr(module.writer, "join", lambda *_: turns)
    monkeypatch.setattr(module.writer, "leave", lambda *_: None)
    return turns


def test_a_tick_is_of_the_span_that_the_lines_before_it_are_in(turns: Turns) -> None:
    """The state opens a span after its line, and closes it later than its line: a rank waits for others meanwhile."""
    state = State(0, 1, Settings(), {})
    train, evaluation = SpanCounters("train epoch 0", started=5000), SpanCounters("validation", evaluation=True)
    recorder, now = Recorder(state, 0, "runs"), 0.0

    def ticks() -> list[int]:
        nonlocal now
        now += 10
        turns.turn()
        return [line["b"] for line in recorder.look(now) if line["k"] == "tick"]

    recorder.fit_started(BEGINS, None)
    assert ticks() == []
    recorder.span_opening(train)
    state.spans.append(train)
    assert ticks() == [5000]
    recorder.span_opening(evaluation)
    assert ticks() == [0]
    state.spans.append(evaluation)
    evaluation.started = 3
    assert ticks() == [3]
    recorder.span_closing(evaluation, "exhausted", orderly=True)
    assert ticks() == [5000]
    state.spans.pop()
    recorder.span_closing(train, "exhausted", orderly=True)
    assert ticks() == []
    recorder.closed()


def test_one_rank_of_each_host_compares_clocks_and_not_all_at_once(
    turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0's store would get 20 questions a second from each rank."""
    compared: list[tuple[int, float]] = []
    now = 1000.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    monkeypatch.setattr(Writer, "poll_every", lambda writer, *_: compared.append((writer.state.rank, now)))
    recorders: list[Recorder] = []
    for rank in range(0, 4096, 4):
        for each in (rank, rank + 1):
            recorder, writer = Recorder(state := State(each, 4096, Settings(), {}), 0, "runs"), Writer(state)
            heartbeats = writer.session.heartbeats
            heartbeats.neighbours = {at: Process(at, 1, 1) for at in range(rank, rank + 4)}
            heartbeats.all_registered = True
            recorder.met(writer)
            recorder.fit_started(BEGINS, KeptRecords())
            recorder.counted_off()
            recorders.append(recorder)
    turns.turn()
    for _ in range(4 * 59):
        for recorder in recorders:
            recorder.look(now)
        now += 0.25
    assert sorted(rank for rank, _ in compared) == list(range(4, 4096, 4))
    times = [at for _, at in compared]
    assert max(map(times.count, times)) < 20
    for recorder in recorders:
        recorder.closed()


def test_nothing_comes_before_the_begin_of_a_fit(turns: Turns) -> None:
    """A fit may begin while the writer, which has found no line of it, goes on to look at it."""
    recorder = Recorder(state_of(), 0, "runs")
    recorder.span = SpanCounters("train epoch 0")
    assert recorder.look(time.monotonic() + 100.0) == []
    recorder.fit_started(BEGINS, None)
    assert recorder.look(time.monotonic() + 200.0) == []
    assert kinds(turns.turn()) == ["begin"]
    assert [line["k"] for line in recorder.look(time.monotonic() + 300.0)] == ["tick"]
    recorder.closed()


def test_learning_rates_are_told_when_they_change(tmp_path: Path) -> None:
    rates = [0.1]
    recorder = Recorder(state_of(), 0, str(tmp_path), lambda: rates)
    assert [recorder.changed_rates(recorder.read_rates()) for _ in range(2)][1] == {}
    rates[0] = 0.05
    assert recorder.changed_rates(recorder.read_rates()) in ({"lr": [0.05]}, {})  # the writer may have been first
    recorder.closed()


def test_a_short_epoch_has_its_learning_rates_at_both_ends(tmp_path: Path) -> None:
    """It ends before the first tick. The rates are those at its start, and not those when the writer comes to it."""
    rates = [0.1]
    fit = Guard(Settings(trace_dir=str(tmp_path)), rank=0, world_size=1, learning_rates=lambda: rates)
    fit.fit_start(FitPlan(position=[0, 0, 40]))
    for epoch in range(2):
        fit.train_start(epoch)
        for _ in range(2):
            fit.batch()
            fit.step()
            rates[0] /= 2
        fit.train_end("exhausted")
    fit.fit_end()
    fit.close()
    lines = [line for line in read(tmp_path) if line["k"] in ("open", "close")]
    assert [(line["s"], line.get("lr")) for line in lines if "s" in line] == [(0, [0.1]), (2, [0.025]), (4, [0.00625])]
    (run,) = read_trace([str(tmp_path)]).runs
    spans = run.fits[0].spans
    assert [span.start and (span.start.steps, span.start.learning_rates) for span in spans] == [(40, (0.1,)), None]
    assert [(tick.steps, tick.learning_rates) for span in spans for tick in span.ticks] == [
        (42, (0.025,)),
        (44, (0.00625,)),
    ]


def test_rates_that_cannot_be_read_cost_nothing(tmp_path: Path) -> None:
    def broken() -> list[float]:
        raise RuntimeError("the optimizers are being replaced")

    recorder = Recorder(state_of(), 0, str(tmp_path), broken)
    assert recorder.changed_rates(recorder.read_rates()) == {}
    recorder.closed()
