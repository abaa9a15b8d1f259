"""The reader of traces: what it makes of whole, torn, rotated, moved and hostile files."""

from __future__ import annotations

import json
import math
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from countoff.report.model import Fit, Trace
from countoff.report.reader import Reader, read
from tests import example_traces
from tests.example_traces import BEGAN, HOSTILE, RankWriter

KINDS: dict[str, dict[str, Any]] = {
    "begin": {
        "v": 1, "rank": 0, "world": 2, "host": "node0", "pid": 7, "framework": "Lightning",
        "run": {"a": "b"}, "versions": {"torch": "2.7"}, "settings": {"x": 1}, "plan": {"batches_per_epoch": 9},
    },
    "clock": {"ahead": 0.5, "error": 0.001},
    "open": {"span": "train epoch 0", "eval": False, "at": 0},
    "tick": {"b": 10, "s": 10, "lr": [0.1], "l": 0.5},
    "pause": {"s": 2.0, "in": "loader", "at": ["a.py:1 in f"]},
    "close": {"span": "train epoch 0", "why": "exhausted", "b": 10, "s": 10, "l": 0.5, "unused": 1},
    "warning": {"verdict": example_traces.verdict("Truncated")},
    "roll": {"span": "train epoch 0", "spread": 0.5, "last": [1]},
    "once": {"span": "train epoch 0", "rows": 61, "repeated": 1, "dropped": 2},
    "totals": {"true": {"steps": 9}, "reported": {"steps": 8}, "horizon": 9},
    "stacks": {"state": "collective", "frames": ["a.py:1 in f"]},
    "verdict": {"verdict": example_traces.verdict()},
    "dropped": {"lines": 3},
    "end": {"how": "finished", "what": "text"},
}  # fmt: skip
"""One line of each kind, in the order in which they may come."""

GARBAGE: list[object] = [
    *HOSTILE, "", None, True, -1, 0.5, 10**400, 1e308, math.nan, math.inf, -math.inf,
    [], {}, [[]], [None, "x", 1e400, {"a": []}], {"a": {"b": [1]}, "\x00": math.nan}, ["x" * 1_000], "y" * 10_000,
]  # fmt: skip
"""What a field may hold that somebody else has written."""


def only(trace: Trace, rank: int = 0) -> Fit:
    """What one rank has recorded of the only run."""
    (run,) = trace.runs
    return run.fits[rank]


def near(time: float) -> Any:
    """As a time: a relative tolerance of seconds since the epoch would be half an hour."""
    return pytest.approx(time, rel=0, abs=0.001)


def load(*directories: Path) -> Trace:
    return read([str(directory) for directory in directories])


def test_a_healthy_job_is_one_run_with_all_counts_and_no_verdict(tmp_path: Path) -> None:
    example_traces.healthy(tmp_path, ranks=4)
    trace = load(tmp_path)
    (run,) = trace.runs
    assert (trace.skipped, trace.problems, trace.verdict, run.world_size, run.missing) == (0, [], None, 4, [])
    for fit in run.fits.values():
        assert [span.batches for span in fit.spans if not span.is_evaluation] == [120, 120, 120]
        assert [(span.batches, span.depth) for span in fit.spans if span.is_evaluation] == [(10, 1)] * 3
        assert (fit.steps, fit.open, fit.ending and fit.ending.how) == (360, [], "finished")
        assert fit.spans[0].loader_seconds == pytest.approx(1.2)
        assert fit.spans[0].ticks[0].learning_rates == (0.1,)
    assert run.fits[0].reported_totals == {"steps": 360.0}


@pytest.mark.parametrize(("frames", "skipped"), [([], 0), (["a.py:1 in f"], 0), (None, 1), ("a.py:1 in f", 1)])
def test_a_stack_that_could_not_be_had_has_no_frames(tmp_path: Path, frames: object, skipped: int) -> None:
    writer = RankWriter(tmp_path)
    writer.line("stacks", state="code", frames=frames)
    writer.save()
    trace = load(tmp_path)
    found = [(stack.state, list(stack.frames)) for stack in only(trace).stacks]
    assert (trace.skipped, found) == (skipped, [] if skipped else [("code", frames)])


def test_a_job_that_a_verdict_ended_has_it_as_it_was_printed(tmp_path: Path) -> None:
    example_traces.uneven(tmp_path)
    trace = load(tmp_path)
    assert trace.verdict is not None
    assert trace.verdict.render().splitlines()[0].endswith("all other ranks have more.")
    assert "2" in trace.verdict.render().splitlines()[3].split()
    fit = only(trace, 1)
    assert [(pause.seconds, pause.where) for pause in fit.pauses] == [(9.0, "collective")]
    assert fit.stacks[-1].frames == tuple(example_traces.BLOCKED)
    assert only(trace, 2).spans[0].batches == 90
    assert only(trace, 1).spans[0].end is None


def test_the_incident_has_the_verdict_where_no_rank_has_recorded_it(tmp_path: Path) -> None:
    example_traces.healthy(tmp_path, ranks=1, epochs=1)
    stacks = [{"ranks": [0, 7], "state": "code", "frames": ["train.py:41 in step\x1b[31m", 7]}, {"ranks": "x"}, 3]
    incident = {**example_traces.verdict(time=BEGAN + 70), "stacks": stacks}
    (tmp_path / "incident.json").write_text(json.dumps(incident))
    trace = load(tmp_path)
    assert trace.verdict is not None
    assert trace.verdict.kind == "UnevenBatches"
    assert trace.incidents[0].stacks == [((0, 7), "code", ("train.py:41 in step\\x1b[31m",))]


def test_the_counts_at_the_verdict_are_newer_than_the_last_tick(tmp_path: Path) -> None:
    for rank in range(2):
        writer = RankWriter(tmp_path, rank, 2)
        writer.open("train epoch 0")
        writer.tick(5, 10)
        rows = [{"rank": 0, "where": "train epoch 0", "batches": 13, "steps": 12}]
        writer.line("verdict", verdict=example_traces.verdict(rows=rows))
        writer.save()
    counted = [{"rank": 1, "where": "train epoch 0", "batches": 14, "steps": 9}, {"rank": [], "batches": "x"}]
    (tmp_path / "incident.json").write_text(json.dumps({**example_traces.verdict(), "counted": counted}))
    trace = load(tmp_path)
    assert [(span.batches, span.steps) for rank in range(2) for span in only(trace, rank).spans] == [(13, 12), (14, 9)]


def test_times_are_on_the_clock_of_rank_0(tmp_path: Path) -> None:
    for rank, ahead in enumerate([0.0, 3.0]):
        writer = RankWriter(tmp_path / f"host{rank}", rank, 2, ahead=ahead, begin={"host": f"node{rank}"})
        writer.open("train epoch 0")
        writer.tick(5, 10)
        writer.line("pause", s=2, **{"in": "code"})
        writer.line("end", how="finished")
        writer.save()
    trace = load(tmp_path / "host0", tmp_path / "host1")
    fit = only(trace, 1)
    assert fit.clock_error == 0.0004
    assert fit.begin == near(BEGAN)
    assert fit.spans[0].ticks[0].time == fit.pauses[0].begin == fit.last - 2 == near(BEGAN + 5)
    assert trace.runs[0].hosts == {"node0": (0,), "node1": (1,)}


def test_the_last_estimate_of_the_clock_holds_for_the_whole_process_and_no_other(tmp_path: Path) -> None:
    first = RankWriter(tmp_path, begin={"pid": 1})
    first.line("clock", ahead=1.0)
    first.open("train epoch 0")
    first.line("clock", ahead=2.0)
    first.save()
    assert only(load(tmp_path)).spans[0].begin == near(BEGAN - 2)
    second = RankWriter(tmp_path, begin={"pid": 2})
    second.line("clock", ahead=5.0)
    second.save()
    runs = load(tmp_path).runs
    assert [run.begin for run in runs] == [near(BEGAN - 5), near(BEGAN - 2)]


def on_two_hosts(directory: Path, names: tuple[str, str], ahead: float, compares: bool, pid: int) -> None:
    """Two ranks on each of two hosts; where `compares`, rank 2 tells how far the clock of its host is ahead."""
    for rank in range(4):
        begin = {"host": names[rank // 2], "pid": pid}
        writer = RankWriter(directory, rank, 4, begin=None)
        writer.ahead, writer.time = ahead * (rank > 1), BEGAN + pid
        writer.line("begin", v=1, rank=rank, world=4, framework="", run={}, versions={}, settings={}, plan={}, **begin)
        if compares and rank == 2:
            writer.line("clock", ahead=ahead, error=0.02)
        writer.open("train epoch 0")
        writer.tick(5, 10)
        writer.save()


@pytest.mark.parametrize("ahead", [3.0, -7200.0])
def test_one_rank_of_a_host_tells_its_clock_for_all_of_them(ahead: float, tmp_path: Path) -> None:
    on_two_hosts(tmp_path, ("node0", "node1"), ahead, compares=True, pid=0)
    (run,) = load(tmp_path).runs
    assert [fit.begin for fit in run.fits.values()] == [near(BEGAN)] * 4
    assert [fit.clock_error for fit in run.fits.values()] == [None, None, 0.02, 0.02]


def test_a_clock_is_not_told_for_another_run_or_for_rank_0s_host(tmp_path: Path) -> None:
    """In the next run the same host may be rank 0's; and two hosts may have one name."""
    on_two_hosts(tmp_path / "a", ("node0", "node1"), 3.0, compares=True, pid=0)
    on_two_hosts(tmp_path / "a", ("node1", "node0"), 0.0, compares=False, pid=900)
    runs = sorted(load(tmp_path / "a").runs, key=lambda run: run.begin)
    assert [fit.begin for run in runs for fit in run.fits.values()] == [near(BEGAN)] * 4 + [near(BEGAN + 900)] * 4
    on_two_hosts(tmp_path / "b", ("localhost", "localhost"), 3.0, compares=True, pid=0)
    begins = [fit.begin for rank in range(4) for run in load(tmp_path / "b").runs for fit in [run.fits[rank]]]
    assert begins == [near(BEGAN), near(BEGAN), near(BEGAN), near(BEGAN + 3)]


def test_a_restart_in_the_same_file_is_another_run_of_all_ranks(tmp_path: Path) -> None:
    example_traces.healthy(tmp_path, ranks=2, epochs=1, begin={"pid": 1})
    for rank in range(3):  # one more than before
        writer = RankWriter(tmp_path, rank, 3, begin={"pid": 2})
        writer.time = BEGAN + 10_000 + rank
        writer.lines.clear()
        writer.line("begin", rank=rank, world=3, pid=2)
        writer.open("train epoch 0", at=7)
        writer.save()
    runs = load(tmp_path).runs
    assert [list(run.fits) for run in runs] == [[0, 1], [0, 1, 2]]
    assert runs[1].fits[2].spans[0].before == 7


def test_two_directories_of_one_job_and_its_resume_are_two_runs(tmp_path: Path) -> None:
    example_traces.uneven(tmp_path / "first", ranks=2)
    for writer in example_traces.healthy(tmp_path / "second", ranks=2, epochs=1):
        lines = [json.loads(line) for line in writer.path.read_text().splitlines()]
        writer.path.write_text("".join(json.dumps({**line, "t": line["t"] + 3600}) + "\n" for line in lines))
    trace = load(tmp_path / "second", tmp_path / "first")
    assert [run.fits[0].directory for run in trace.runs] == [str(tmp_path / "first"), str(tmp_path / "second")]
    assert trace.runs[0].verdict is not None
    assert trace.verdict is None  # the last run has none


def began(directory: Path, ranks: dict[int, float], **values: Any) -> None:
    """Lets ranks begin a fit, so many seconds after the job began."""
    for rank, seconds in ranks.items():
        writer = RankWriter(directory, rank, begin=None)
        writer.time += seconds
        writer.line("begin", **{"rank": rank, "world": 4, "host": "node0", **values})
        writer.save()


def ranks_of(directory: Path) -> list[list[int]]:
    return [list(run.fits) for run in load(directory).runs]


def test_a_restart_with_other_ranks_is_another_run(tmp_path: Path) -> None:
    began(tmp_path, dict.fromkeys(range(4), 0), pid=1)
    began(tmp_path, {5: 99.9, **dict.fromkeys((0, 1, 2, 3, 4, 6, 7), 100)}, pid=2, world=8)
    assert ranks_of(tmp_path) == [[0, 1, 2, 3], [*range(8)]]


def test_a_rank_that_only_the_restart_has_joins_it_even_if_it_begins_first(tmp_path: Path) -> None:
    began(tmp_path, {0: 0, 1: 0.1, 3: 0.2}, pid=1)
    began(tmp_path, {0: 120.2, 1: 120.3, 2: 120, 3: 120.1}, pid=2)
    assert ranks_of(tmp_path) == [[0, 1, 3], [0, 1, 2, 3]]


def test_a_rank_that_begins_late_belongs_to_its_run(tmp_path: Path) -> None:
    began(tmp_path, {0: 0, 1: 0.1, 2: 200, 3: 0}, pid=1)
    began(tmp_path, {0: 250, 1: 250, 2: 250, 3: 250}, pid=2)
    assert ranks_of(tmp_path) == [[0, 1, 2, 3], [0, 1, 2, 3]]


def test_ranks_of_a_host_that_were_launched_again_are_another_run(tmp_path: Path) -> None:
    began(tmp_path, {0: 0, 1: 0}, pid=1, run={"torchelastic_run_id": "a", "torchelastic_restart_count": "0"})
    began(tmp_path, {2: 20, 3: 20}, pid=2, run={"torchelastic_run_id": "a", "torchelastic_restart_count": "1"})
    assert ranks_of(tmp_path) == [[0, 1], [2, 3]]


def test_hosts_count_their_own_restarts(tmp_path: Path) -> None:
    began(tmp_path, {0: 0, 1: 0}, run={"torchelastic_run_id": "a", "torchelastic_restart_count": "0"})
    began(tmp_path, {2: 1, 3: 1}, host="node1", run={"torchelastic_run_id": "a", "torchelastic_restart_count": "1"})
    assert ranks_of(tmp_path) == [[0, 1, 2, 3]]


def test_two_fits_of_one_process_are_two_runs(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path)
    writer.open("train epoch 0")
    writer.line("begin", g=1, rank=0, world=1, pid=1000)
    writer.line("open", g=1, span="train epoch 0")
    writer.line("tick", g=1, b=3, s=3)
    writer.line("close", span="train epoch 0", b=5, s=5)
    writer.save()
    assert [run.fits[0].spans[0].batches for run in load(tmp_path).runs] == [5, 3]


def test_a_line_torn_by_a_kill_is_left_and_the_next_process_goes_on_there(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path, begin={"pid": 1})
    writer.open("train epoch 0")
    writer.tick(5, 10)
    writer.tick(5, 10)
    writer.save(torn=20)
    trace = load(tmp_path)
    assert (only(trace).spans[0].batches, trace.skipped) == (10, 0)
    RankWriter(tmp_path, begin={"pid": 2}).save()
    trace = load(tmp_path)
    assert ([run.fits[0].pid for run in trace.runs], trace.skipped) == ([1, 2], 1)


def test_rotated_files_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path)
    writer.open("train epoch 0")
    writer.tick(5, 10)
    lines = [f"{line}\n" for line in writer.lines]
    for name, line in zip(["rank-00000.9.jsonl", "rank-00000.10.jsonl", "rank-00000.jsonl"], lines, strict=True):
        (tmp_path / name).write_text(line)
    trace = load(tmp_path)
    assert (only(trace).spans[0].batches, only(trace).pid, trace.skipped) == (10, 1000, 0)


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    example_traces.healthy(tmp_path, ranks=4, epochs=1)
    (tmp_path / "rank-00002.jsonl").unlink()
    assert load(tmp_path).runs[0].missing == [2]


def test_a_file_without_its_begin_still_counts(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path, 3, begin=None)
    writer.open("train epoch 0")
    writer.tick(5, 10)
    writer.save()
    run = load(tmp_path).runs[0]
    assert (run.fits[3].spans[0].batches, run.world_size, run.missing) == (10, 4, [0, 1, 2])


def test_a_reader_reads_only_what_was_appended_and_follows_a_rotation(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path, 0, 1, ahead=1.0)
    writer.open("train epoch 0")
    writer.save()
    reader = Reader([str(tmp_path)])
    assert only(reader.read()).tick is None
    writer.tick(5, 10)
    (line,) = writer.lines
    writer.save(torn=10)
    assert only(reader.read()).tick is None
    with writer.path.open("a") as file:
        file.write(f"{line}\n"[-10:])
    assert only(reader.read()).spans[0].batches == 10
    writer.tick(5, 10)
    writer.save().rename(tmp_path / "rank-00000.1.jsonl")
    writer.tick(5, 10)
    writer.close("train epoch 0")
    writer.save()
    trace = reader.read()
    span = only(trace).spans[0]
    assert (span.batches, [tick.batches for tick in span.ticks], trace.skipped) == (30, [10, 20, 30, 30], 0)
    assert only(trace).spans[0].begin == near(BEGAN)


def test_a_long_trace_is_thinned_out_and_keeps_all_counts_and_rates(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path)
    for epoch in range(3):
        writer.open(f"train epoch {epoch}")
        for tick in range(5_000):
            # Only some ticks have a rate: the others have the same one as the last that has.
            rates = {"lr": [round(1 - tick / 5_000, 4)]} if tick % 10 == 0 else {}
            writer.tick(5, 10, steps=10, loader=0.5, **rates)
        writer.close(f"train epoch {epoch}")
    writer.open("train epoch 3")
    for _ in range(777):
        writer.tick(5, 1)
    writer.save()
    few, all_ = (Reader([str(tmp_path)], most_records=limit).read() for limit in (300, 20_000))
    assert sum(len(span.ticks) for span in only(all_).spans) == 15_777 + 3
    assert sum(len(span.ticks) for span in only(few).spans) <= 300 + 4
    for thin, full in zip(only(few).spans, only(all_).spans, strict=True):
        assert (thin.batches, thin.steps, thin.loader_seconds, thin.end) == (
            full.batches, full.steps, full.loader_seconds, full.end,
        )  # fmt: skip
        assert len(thin.ticks) > 5
        assert set(thin.ticks) <= set(full.ticks)
    assert only(few).tick == only(all_).tick
    assert only(few).last == only(all_).last


@pytest.mark.parametrize("kind", KINDS)
def test_no_field_of_any_line_can_break_the_reader(tmp_path: Path, kind: str) -> None:
    writer = RankWriter(tmp_path, begin=None)
    tail = RankWriter(tmp_path, begin=None)
    for field in [*KINDS[kind], "t", "g", "k"]:
        for value in GARBAGE:
            for other, values in KINDS.items():
                writer.line(other, **(values | ({field: value} if other == kind else {})))
    nested = dict(KINDS[kind])
    for value in GARBAGE:
        for name in [*example_traces.verdict()] if kind in ("verdict", "warning") else []:
            writer.line(kind, **(nested | {"verdict": example_traces.verdict() | {name: value}}))
    tail.line("open", span="the last one")
    (tmp_path / "rank-00000.jsonl").write_text("\n".join([*writer.lines, *tail.lines, ""]))
    trace = load(tmp_path)
    last = trace.runs[-1].fits[0]
    texts = [text for run in trace.runs for fit in run.fits.values() for text in texts_of(fit)]
    assert all(text.isprintable() and len(text) <= 5_000 for text in texts)
    assert any(span.name == "the last one" for run in trace.runs for span in run.fits[0].spans)
    for run in trace.runs:
        assert math.isfinite(run.begin)
        assert math.isfinite(run.end)
        if run.verdict is not None:
            assert run.verdict.render()
    assert last.rank == 0


def texts_of(fit: Fit) -> list[str]:
    """The texts that a page or a terminal may show."""
    found = [fit.host, fit.framework, *map(str, fit.run.items()), *map(str, fit.plan.items())]
    found += [span.name for span in fit.spans] + [span.why for span in fit.spans]
    found += [frame for pause in fit.pauses for frame in pause.frames]
    found += [frame for stack in fit.stacks for frame in (*stack.frames, stack.state)]
    for verdict in [fit.verdict, *fit.warnings]:
        if verdict is not None:
            found += [verdict.kind, verdict.sentence, verdict.why, *verdict.remedy.split("\n"), *verdict.hosts.values()]
            found += [str(cell) for row in verdict.rows for cell in row.values()]
    return found + ([fit.ending.how, fit.ending.what] if fit.ending else [])


@pytest.mark.parametrize(
    "text",
    [b"", b"\n\n", b"\xff\xfe\x00\n", b"[1]\nnull\n7\n", b"[" * 100_000 + b"\n", b"\x00" * 50_000,
     b'{"k":"tick",}\n' * 99],
    ids=["empty", "blank", "not UTF-8", "no objects", "deep", "zeros", "broken ticks"],
)  # fmt: skip
def test_a_file_of_garbage_is_skipped(tmp_path: Path, text: bytes) -> None:
    example_traces.healthy(tmp_path, ranks=1, epochs=1)
    with (tmp_path / "rank-00000.jsonl").open("ab") as file:
        file.write(text)
    (tmp_path / "rank-00001.jsonl").write_bytes(text)
    trace = load(tmp_path)
    assert only(trace).steps == 120
    assert list(trace.runs[0].fits) == [0]


def test_skipped_lines_are_counted(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path)
    writer.line("open")
    writer.line("of a later version", x=1)
    writer.line("close", span="never opened", b=1, s=1)
    writer.line("end", how="badly")
    writer.lines.append("nonsense")
    writer.save()
    assert load(tmp_path).skipped == 4


def test_a_line_that_is_too_long_is_skipped_and_the_next_one_read(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path)
    writer.lines.append("x" * 5_000_000)
    writer.open("train epoch 0")
    writer.save()
    trace = load(tmp_path)
    assert (trace.skipped, only(trace).spans[0].name) == (1, "train epoch 0")


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    example_traces.healthy(tmp_path, ranks=1, epochs=1)
    for name in ["rank-1.jsonl", "rank-999999999.jsonl", "rank-00001.jsonl.gz", "notes.txt"]:
        (tmp_path / name).write_text("{}\n")
    (tmp_path / "rank-00002.jsonl").mkdir()
    trace = load(tmp_path)
    assert list(trace.runs[0].fits) == [0]
    assert ["rank-00002.jsonl" in problem for problem in trace.problems] == [True]


def test_the_link_of_an_incident_is_not_followed(tmp_path: Path) -> None:
    example_traces.uneven(tmp_path / "trace")
    (tmp_path / "elsewhere").write_text(json.dumps(example_traces.verdict()))
    (tmp_path / "trace" / "incident.json").symlink_to(tmp_path / "elsewhere")
    assert load(tmp_path / "trace").incidents == []


def test_a_rank_file_that_is_a_link_is_told_and_left(tmp_path: Path) -> None:
    example_traces.healthy(tmp_path / "trace", ranks=2)
    (tmp_path / "trace" / "rank-00001.jsonl").rename(tmp_path / "elsewhere")
    (tmp_path / "trace" / "rank-00001.jsonl").symlink_to(tmp_path / "elsewhere")
    trace = load(tmp_path / "trace")
    assert list(trace.runs[0].fits) == [0]
    assert trace.problems == [f"{tmp_path}/trace/rank-00001.jsonl: it is not a regular file"]


@pytest.mark.parametrize("name", ["rank-00001.jsonl", "incident.json"])
def test_nobody_waits_for_a_pipe(tmp_path: Path, name: str) -> None:
    example_traces.healthy(tmp_path, ranks=1)
    os.mkfifo(tmp_path / name)
    found: list[Trace] = []
    reading = threading.Thread(target=lambda: found.append(load(tmp_path)), daemon=True)
    reading.start()
    reading.join(10)
    assert not reading.is_alive()
    assert list(found[0].runs[0].fits) == [0]
    assert found[0].incidents == []


def test_a_directory_that_is_not_there_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read: No such file or directory"):
        load(tmp_path / "nowhere")


def test_the_same_directory_twice_is_read_once(tmp_path: Path) -> None:
    example_traces.healthy(tmp_path, ranks=1, epochs=1)
    assert len(load(tmp_path, tmp_path / ".").runs) == 1


def test_a_resumed_fit_goes_on_with_the_steps_before_it(tmp_path: Path) -> None:
    example_traces.resumed(tmp_path)
    first, second = read([str(tmp_path)]).runs
    assert (first.steps_before, second.steps_before) == (0, 120)
    assert [fit.steps for fit in first.fits.values()] == [180, 180]
    assert [fit.steps for fit in second.fits.values()] == [360, 360]
    assert [(span.name, span.steps) for span in second.fits[1].spans] == [
        ("train epoch 1", 240),
        ("train epoch 2", 360),
    ]
    assert second.fits[0].spans[0].ticks[0].steps == 130
    assert second.fits[0].horizon == 360


def test_a_fit_that_was_begun_again_before_it_trained_is_no_run(tmp_path: Path) -> None:
    """Its warnings are those of the fit that the process went on with."""
    warning = example_traces.verdict("VersionMismatch", sentence="they differ.", rows=[])
    for rank in range(2):
        writer = RankWriter(tmp_path, rank, 2)
        if rank == 0:
            writer.line("warning", verdict=warning)
        writer.time += 1
        writer.line("end", how="finished")
        writer.line("begin", g=1, v=1, rank=rank, world=2, host="node0", pid=1000 + rank, run={}, before=7)
        writer.line("open", g=1, span="train epoch 0")
        writer.save()
    reader = Reader([str(tmp_path)])
    for _ in range(2):  # as the live view does
        (run,) = reader.read().runs
        assert [warning.kind for warning in run.warnings] == ["VersionMismatch"]
        assert [(fit.steps_before, len(fit.spans), len(fit.warnings)) for fit in run.fits.values()] == [
            (7, 1, 1),
            (7, 1, 0),
        ]


def test_a_fit_without_a_span_is_a_run_where_nothing_of_its_process_follows(tmp_path: Path) -> None:
    for pid in (1, 2):
        writer = RankWriter(tmp_path, begin={"pid": pid})
        writer.line("end", how="finished")
        writer.save()
    assert len(read([str(tmp_path)]).runs) == 2


def test_the_learning_rates_at_the_start_of_a_span_hold_for_its_ticks(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path)
    writer.open("train epoch 0", s=0, lr=[0.1])
    writer.tick(5, 10, steps=10)
    writer.close("train epoch 0", lr=[0.05])
    writer.open("validation", eval=True)
    writer.tick(5, 10)
    writer.save()
    train, evaluation = read([str(tmp_path)]).runs[0].fits[0].spans
    assert train.start is not None
    assert [tick.learning_rates for tick in (train.start, *train.ticks)] == [(0.1,), (0.1,), (0.05,)]
    assert evaluation.start is None
    assert [tick.learning_rates for tick in evaluation.ticks] == [(0.05,)]
