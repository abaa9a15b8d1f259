"""The trace on real ranks: what it tells of each way in which a job can go, and that the job does not notice it."""

import json
import os
import re
import shutil
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from countoff.core.trace import writer
from countoff.report import facts, reader
from countoff.torch import Countoff
from integration_tests import accelerate_jobs, loops
from integration_tests.digits import own_rank, share_loader
from integration_tests.harness import tell
from integration_tests.in_turn import in_turn
from integration_tests.lightning_jobs import Job, fit
from integration_tests.output import verdict_lines
from tests.traces import kinds, of, read

BLOCKED_SECONDS = 10.0


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The directory of the trace, which nobody has made."""
    return tmp_path / "runs" / "today"


@pytest.fixture
def traced(run_ranks: Any, directory: Path) -> Any:
    """`run_ranks` with a trace."""

    def run(function: Any, ranks: int, *arguments: Any, env: dict[str, str] | None = None, **how: Any) -> Any:
        variables = {"COUNTOFF_TRACE_DIR": str(directory), **(env or {})}
        return run_ranks(function, ranks, *arguments, env=variables, **how)

    return run


def spans(lines: list[dict[str, Any]]) -> list[tuple[str, str, int]]:
    return [(line["span"], line["why"], line["b"]) for line in of("close", lines)]


def stacked(incident: dict[str, Any]) -> list[int]:
    """The ranks whose stacks an incident has."""
    return sorted(rank for each in incident["stacks"] for rank in each["ranks"])


def in_order(lines: list[dict[str, Any]]) -> bool:
    """Whether the lines that the training thread has asked for are in the order of their times."""
    times = [line["t"] for line in lines if line["k"] in ("begin", "open", "close", "end")]
    return times == sorted(times)


def healthy() -> tuple[list[dict[str, Any]], int]:
    before = threading.active_count()
    return loops.healthy_without_and_with(), threading.active_count() - before


def test_a_healthy_loop_trains_to_the_same_bits_and_is_told_whole(traced, directory):
    for result in traced(healthy, 2):
        (without, with_trace), threads = result.value
        assert verdict_lines(result) == [], result
        assert without["weights"] == with_trace["weights"]
        assert threads == 0, "a thread is left over"
        lines = read(directory, result.rank)
        assert in_order(lines)
        epoch = [("digits", "exhausted", 2), ("train epoch {}", "exhausted", 10), ("digits", "stopped", 1)]
        broken = [*epoch[:1], ("train epoch {}", "stopped", 5), *epoch[2:]]
        whole = [
            (name.format(number), why, batches)
            for number, part in enumerate((epoch, broken, epoch))
            for name, why, batches in part
        ]
        assert spans(lines) == [*whole, ("train epoch 3", "stopped", 1)]
        assert of("close", lines)[-1]["s"] == 26
        assert of("begin", lines)[0]["framework"] == "PyTorch"
        assert kinds(lines)[-1] == "end"
        assert of("end", lines)[0]["how"] == "finished"
        assert bool(of("roll", lines)) is bool(of("totals", lines)) is (result.rank == 0)
    assert [line["span"] for line in of("roll", read(directory))][:3] == ["digits", "train epoch 0", "digits"]
    assert of("totals", read(directory))[-1]["true"]["batches_per_epoch"] == 10
    assert not (directory / "incident.json").exists()


def assert_counted(rows: list[dict[str, Any]]) -> None:
    """Asserts what the ranks of an uneven job had counted: 5, 4 and 5 batches."""
    counted = {row["rank"]: (row["where"], row["batches"]) for row in rows}
    # The end of a pass waits for 5 ms at most. On a busy machine, the short rank is in its next epoch by then.
    assert counted.pop(1) in [("train epoch 0", 4), ("train epoch 1", 1)]
    assert counted == {0: ("train epoch 0", 5), 2: ("train epoch 0", 5)}


def test_an_uneven_job_leaves_the_verdict_and_the_incident(traced, directory):
    """Every rank's file ends with the verdict; rank 0 keeps the counts and the stacks of all ranks."""
    traced(loops.uneven, 3, [5, 4, 5], expect=[1, 1, 1])
    for rank in range(3):
        lines = read(directory, rank)
        verdict = of("verdict", lines)[0]["verdict"]
        assert (verdict["kind"], verdict["ranks"]) == ("UnevenBatches", [1])
        assert_counted(verdict["rows"])
        assert kinds(lines)[-3:] == ["verdict", "stacks", "end"]
        assert any("loops.py" in frame for frame in of("stacks", lines)[0]["frames"])
        assert lines[-1]["how"] == "verdict"
    assert sorted(path.name for path in directory.iterdir()) == [
        "incident.json",
        *(f"rank-0000{rank}.jsonl" for rank in range(3)),
    ]
    incident = json.loads((directory / "incident.json").read_text())
    assert (incident["ranks"], incident["world_size"]) == ([1], 3)
    assert_counted(incident["counted"])
    assert stacked(incident) == [0, 1, 2]
    assert any("loops.py" in frame for each in incident["stacks"] for frame in each["frames"])
    variables = incident["environment"]
    assert variables["COUNTOFF_TRACE_DIR"] == str(directory)
    assert not [name for name in variables if not name.startswith(("COUNTOFF", "NCCL", "PYTORCH", "TORCH"))]


def train_until_killed() -> None:
    dist.init_process_group("gloo")
    model, optimizer = loops.model_and_optimizer()
    loader = share_loader(2000)
    countoff = Countoff(optimizer=optimizer)
    for number, batch in enumerate(countoff.train(loader)):
        loops.train_on(model, optimizer, batch)
        time.sleep(0.01)
        if number == 20:
            tell("training")


def test_a_killed_rank_has_no_end(traced, directory):
    def kill(watch: Any) -> None:
        watch.wait_for(1, "training")
        watch.kill(1)

    traced(train_until_killed, 2, expect=None, while_running=kill)
    killed, survivor = read(directory, 1), read(directory, 0)
    assert not of("end", killed)
    assert kinds(killed)[-1] == "open"
    assert of("end", survivor)[0]["how"] == "verdict"
    assert of("verdict", survivor)[0]["verdict"]["kind"] == "LostRank"
    counted = json.loads((directory / "incident.json").read_text())["counted"]
    assert [row["rank"] for row in counted] == [0]


def test_a_rank_that_raises_says_so(traced, directory):
    traced(loops.raises_in_the_loop, 2, expect=None)
    ends = [of("end", read(directory, rank))[0] for rank in (0, 1)]
    assert [end["how"] for end in ends] == ["verdict", "failed"]
    assert "ValueError: loss is not finite" in ends[1]["what"]


def test_a_restarted_job_goes_on_in_the_same_files(traced, directory):
    traced(loops.uneven, 2, [5, 4], expect=None)
    traced(loops.uneven, 2, [5, 5])
    for rank in (0, 1):
        lines = read(directory, rank)
        assert len(of("begin", lines)) == 2
        assert [end["how"] for end in of("end", lines)] == ["verdict", "finished"]


def stall() -> None:
    """Rank 1 sleeps in its loader, for as long as nobody wakes it."""
    dist.init_process_group("gloo")
    woken = threading.Event()
    threading.Thread(target=wake_after_the_report, args=(woken,), daemon=True).start()
    loader = share_loader(8, before=partial(sleep_in_the_loader, woken))
    model, optimizer = loops.model_and_optimizer()
    countoff = Countoff(optimizer=optimizer)
    for batch in countoff.train(loader):
        loops.train_on(model, optimizer, batch)


def sleep_in_the_loader(woken: threading.Event, number: int) -> None:
    if own_rank() == 1 and number == 12:
        woken.wait(60)


def wake_after_the_report(woken: threading.Event) -> None:
    """Keeps the trace as it is during the stall, once each rank has written a tick after the report."""
    while "Stalled" not in Path("rank0.log").read_text():
        time.sleep(0.05)
    if own_rank() == 1:
        directory = Path(os.environ["COUNTOFF_TRACE_DIR"])
        reported = of("warning", until_written(directory, 0, "warning"))[0]["t"]
        for rank in (0, 1):
            until_written(directory, rank, "tick", reported)
        shutil.copytree(directory, directory.parent / "during")
    woken.set()


def until_written(directory: Path, rank: int, kind: str, after: float = 0.0) -> list[dict[str, Any]]:
    """Waits for a line of this kind in a rank's trace; the deadline is that of the launch."""
    while not any(line["t"] > after for line in of(kind, read(directory, rank))):
        time.sleep(0.05)
    return read(directory, rank)


def test_a_stall_shows_where_each_rank_was(traced, directory):
    traced(stall, 2, env={"COUNTOFF_STALL_SECONDS": "1.5"})
    lines = [read(directory, rank) for rank in (0, 1)]
    assert [of("stacks", each)[0]["state"] for each in lines] == ["collective", "loader"]
    assert any("sleep_in_the_loader" in frame for frame in of("stacks", lines[1])[0]["frames"])
    assert of("warning", lines[0])[0]["verdict"]["kind"] == "Stalled"
    pause = max(of("pause", lines[1]), key=lambda line: line["s"])
    assert pause["s"] > 1.0
    assert pause["in"] == "loader"
    assert "sleep_in_the_loader" in pause["at"][0]
    assert [of("end", each)[0]["how"] for each in lines] == ["finished"] * 2
    during = facts.headline(reader.read([str(directory.parent / "during")]))
    assert during.startswith("stalled: no rank has made progress for 1.5 s; rank 1 is at ")
    assert re.search(r" in sleep_in_the_loader[^;]*, in its loader; until then ", during)
    assert facts.headline(reader.read([str(directory)])).startswith("finished: ")


def test_in_warn_mode_the_trace_goes_on(traced, directory):
    traced(loops.skip_a_step, 2, 3, 2, env={"COUNTOFF_ON_DIVERGENCE": "warn"})
    for rank in (0, 1):
        lines = read(directory, rank)
        assert of("verdict", lines)[0]["verdict"]["kind"] == "StepMismatch"
        assert spans(lines) == [("train epoch 0", "exhausted", 10)]
        assert of("end", lines)[0]["how"] == "finished", "although the program ends without `detach`"
    assert not (directory / "incident.json").exists()


def test_lightning_is_told(traced, directory):
    """Three epochs with evaluations, and the same bits as without countoff."""
    job = Job(even=80, val=[2, 2], trainer={"max_epochs": 3})
    for result in traced(in_turn, 2, {"plain": (fit, replace(job, options=None)), "with a trace": (fit, job)}):
        assert result.value["plain"] == result.value["with a trace"]
        lines = read(directory, result.rank)
        assert of("begin", lines)[0]["framework"] == "Lightning"
        inner = [(f"train epoch {epoch}", "exhausted", 10) for epoch in range(3)]
        assert [span for span in spans(lines) if span[0].startswith("train")] == inner
        assert [span[1:] for span in spans(lines) if not span[0].startswith("train")] == [("exhausted", 2)] * 3
        assert of("close", lines)[-1]["s"] == 30
        assert [line["lr"] for line in lines if "lr" in line] == [[0.1]]
        assert of("end", lines)[0]["how"] == "finished"
        assert in_order(lines)


def test_accelerate_is_told(traced, directory):
    loop = accelerate_jobs.Loop(samples=80, evals=[16], accumulation=2)
    for result in traced(accelerate_jobs.with_and_without, 2, [loop]):
        ((plain, counted),) = result.value
        assert plain.weights == counted.weights
        lines = read(directory, result.rank)
        assert of("begin", lines)[0]["framework"] == "Accelerate"
        train = [span for span in spans(lines) if span[0].startswith("train")]
        assert train == [(f"train epoch {epoch}", "exhausted", 10) for epoch in range(len(train))]
        assert of("close", lines)[-1]["s"] == counted.steps
        assert of("end", lines)[0]["how"] == "finished"


def test_the_trainer_tells_where_its_schedule_ends(traced, directory):
    pytest.importorskip("transformers")
    from integration_tests import trainer_jobs

    job = trainer_jobs.Job(samples=80)
    for result in traced(trainer_jobs.with_and_without, 2, [job]):
        ((plain, counted),) = result.value
        assert plain.weights == counted.weights
        lines = read(directory, result.rank)
        assert [line.get("horizon") for line in of("totals", lines)] == ([] if result.rank else [counted.steps])
        assert of("close", lines)[-1]["s"] == counted.steps
        assert of("end", lines)[0]["how"] == "finished"


def test_composer_is_told(traced, directory):
    pytest.importorskip("composer")
    from integration_tests import composer_jobs

    job = composer_jobs.Job(even=80)
    for result in traced(composer_jobs.fit_with_and_without, 2, [job]):
        lines = read(directory, result.rank)
        assert of("begin", lines)[0]["framework"] == "Composer"
        assert [span[0] for span in spans(lines) if span[0].startswith("train")] == ["train epoch 0", "train epoch 1"]
        assert of("end", lines)[0]["how"] == "finished"
        assert result.value[0][0]["weights"] == result.value[0][1]["weights"]


def on_a_file_system_that_blocks() -> tuple[float, float]:
    """Trains one epoch while nothing is written; how long the loop took, and the end of the fit."""
    append = writer._File.append

    def block(file: Any, lines: Any) -> None:
        time.sleep(BLOCKED_SECONDS)
        append(file, lines)

    writer._File.append = block  # pyright: ignore[reportAttributeAccessIssue]
    dist.init_process_group("gloo")
    model, optimizer = loops.model_and_optimizer()
    loader = share_loader(10)
    countoff = Countoff(optimizer=optimizer)
    began = time.monotonic()
    for batch in countoff.train(loader):
        loops.train_on(model, optimizer, batch)
    trained = time.monotonic()
    countoff.close()
    ended = time.monotonic()
    return trained - began, ended - trained


def test_a_file_system_that_blocks_holds_up_nobody(traced):
    for result in traced(on_a_file_system_that_blocks, 2):
        loop, end = result.value
        assert loop < 5
        assert end < 2 + 1  # it is given up after 1.5 s; the rest is the end of any fit
        (line,) = verdict_lines(result)
        assert line.endswith("ends here: the file system does not answer; training goes on")


def test_a_directory_that_cannot_be_made_is_one_warning(run_ranks, tmp_path):
    (tmp_path / "file").touch()
    where = str(tmp_path / "file" / "runs")
    for result in run_ranks(loops.uneven, 2, [5, 5], env={"COUNTOFF_TRACE_DIR": where}):
        said = [line for line in result.output.splitlines() if "countoff" in line]
        assert said == [
            f"[rank {result.rank}] countoff: the trace in {where!r} ends here: Not a directory; training goes on"
        ]


AHEAD = 3.0


def train_with_a_clock_that_is_ahead() -> None:
    """The ranks of the second host have a clock that is ahead."""
    real = time.time
    if own_rank() > 1:
        time.time = lambda: real() + AHEAD
    dist.init_process_group("gloo")
    model, optimizer = loops.model_and_optimizer()
    loader = share_loader(60)
    with Countoff(optimizer=optimizer) as countoff:
        for batch in countoff.train(loader):
            loops.train_on(model, optimizer, batch)
            time.sleep(0.08)


def test_the_clocks_of_hosts_are_compared(run_hosts, directory):
    run_hosts(train_with_a_clock_that_is_ahead, hosts=2, per_host=2, env={"COUNTOFF_TRACE_DIR": str(directory)})
    assert not of("clock", read(directory, 0)) + of("clock", read(directory, 1))
    (clock,) = of("clock", read(directory, 2))
    assert abs(clock["ahead"] - AHEAD) <= clock["error"] < 0.5
    assert not of("clock", read(directory, 3)), "one rank tells it for its host"


def test_hosts_without_a_shared_file_system_keep_what_they_know(run_hosts, tmp_path):
    """The first rank of each host writes the incident there; only rank 0 knows the counts of all ranks."""
    places = [tmp_path / "host-0", tmp_path / "host-1"]
    results = run_hosts(
        loops.uneven,
        [5, 4, 5, 5],
        hosts=2,
        per_host=2,
        env=lambda rank: {"COUNTOFF_TRACE_DIR": str(places[rank // 2])},
        expect=None,
    )
    for host, place in enumerate(places):
        assert sorted(path.name for path in place.glob("rank-*")) == [
            f"rank-0000{rank}.jsonl" for rank in (2 * host, 2 * host + 1)
        ]
    found = [json.loads((place / "incident.json").read_text()) for place in places]
    for incident in found:
        assert incident["ranks"] == [1]
        assert sorted(row["rank"] for row in incident["counted"]) == [0, 1, 2, 3], "\n".join(map(str, results))
    assert stacked(found[0]) == [0, 1, 2, 3], "\n".join(map(str, results))
    assert stacked(found[1]) in ([2], [3])  # its own, of the rank that prints for the host
    assert found[1]["written_by"]["host"] == "node-1"
