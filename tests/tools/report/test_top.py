"""`countoff top`: the table on a terminal and in a pipe, its JSON, and that the terminal is as before at its end."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from countoff.report import live
from countoff.report.reader import Reader
from tests import example_traces
from tests.example_traces import HOSTILE, RankWriter
from tests.paths import SOURCE_ROOTS
from tests.terminal import Terminal

SCRIPT = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what it runs in the background ignore it
sys.path[:0] = {list(map(str, SOURCE_ROOTS))}
from countoff.cli.__main__ import main
main()
"""


@pytest.fixture(autouse=True)
def _jobs_begin_a_minute_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example_traces, "BEGAN", time.time() - 60)


def run(*arguments: str) -> tuple[int, str, str]:
    """The exit code, the output and the errors of `countoff top` in a pipe."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "top", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout, done.stderr


def running(directory: Path, *, ranks: int = 4, slow: int = 2) -> list[RankWriter]:
    """A job in its first epoch, one rank of which waits for its loader."""
    writers: list[RankWriter] = []
    for rank in range(ranks):
        writer = RankWriter(directory, rank, ranks, begin={"host": f"node{rank // 2}"})
        writer.open("train epoch 0")
        for _ in range(12):
            writer.tick(5, 10, steps=10, loader=3.0 if rank == slow else 0.1, lr=[0.1])
        writer.save()
        writers.append(writer)
    return writers


def end(writers: Sequence[RankWriter], how: str = "finished", **values: Any) -> None:
    for writer in writers:
        writer.line("end", how=how, **values)
        writer.save()


def test_in_a_pipe_it_prints_this_moment_as_a_table(tmp_path: Path) -> None:
    running(tmp_path)
    code, output, errors = run(str(tmp_path))
    assert (code, errors) == (0, "")
    heading, _, header, slow, others = output.splitlines()
    assert heading.startswith(f"{tmp_path}: Lightning, 4 ranks on 2 hosts, begun ")
    assert header.split() == ["ranks", "span", "note", "batch", "batches/s", "loader", "age", "host"]
    assert slow.split()[:8] == ["2", "train", "epoch", "0", "slow", "loader", "120", "2"]
    assert slow.split()[-1] == "node1"
    assert others.split()[:8] == ["0,", "1,", "3", "train", "epoch", "0", "120", "2"]


def test_a_stall_is_told_before_and_after_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First that no batch has begun; then also the line of code of the ranks for which the others wait.

    The job is of tomorrow, so that each look is at the moment of its last line, however long the look takes.
    """
    monkeypatch.setattr(example_traces, "BEGAN", time.time() + 86_400)
    writers = running(tmp_path, slow=-1)
    for writer in writers:
        for _ in range(3):
            writer.tick(5, 0)
        writer.save()
    _, output, _ = run(str(tmp_path))
    assert " no batch for 15 s " in output
    assert "Stalled" not in output
    stall = example_traces.verdict(
        "Stalled",
        [2],
        sentence="no rank has made progress for 15 s; rank 2 is in its loader.",
        why="rank 2 is at data.py:9 in __getitem__; ranks 0, 1, 3 are at train.py:41 in step.",
    )
    writers[0].line("warning", verdict=stall)
    writers[0].save()
    _, output, _ = run("--json", str(tmp_path))
    assert [(row["note"], row["still_seconds"]) for row in json.loads(output)["rows"]] == [("stands still", 15.0)]
    _, output, _ = run(str(tmp_path))
    assert "rank 2 is at data.py:9 in __getitem__, in its loader" in output


def test_the_verdict_ends_the_view(tmp_path: Path) -> None:
    example_traces.uneven(tmp_path)
    code, output, errors = run(str(tmp_path))
    assert (code, errors) == (1, "")
    assert output.count("countoff: UnevenBatches: rank 2 ran out of data") == 1
    assert "  do:  Cut the data evenly.\n  or:  Stop together.\n" in output


def test_as_json_it_prints_this_moment(tmp_path: Path) -> None:
    running(tmp_path)
    code, output, errors = run("--json", str(tmp_path))
    look = json.loads(output)
    assert (code, errors) == (0, "")
    assert look["job"].startswith(f"{tmp_path}: Lightning, 4 ranks on 2 hosts, begun ")
    assert (look["world_size"], look["ended"], look["failed"], look["problem"]) == (4, False, False, None)
    assert (look["verdict"], look["warnings"]) == (None, [])
    slow, others = look["rows"]
    assert (slow["ranks"], slow["hosts"], slow["span"], slow["note"]) == (
        [2],
        ["node1"],
        "train epoch 0",
        "slow loader",
    )
    assert (slow["fewest_batches"], slow["most_batches"], slow["learning_rates"]) == (120, 120, [0.1])
    assert (others["ranks"], others["loader_share"]) == ([0, 1, 3], pytest.approx(0.02))


def test_json_has_the_verdict_apart_from_the_warnings(tmp_path: Path) -> None:
    writers = running(tmp_path)
    writers[0].line("warning", verdict=example_traces.verdict("WrongLength", time=writers[0].time))
    writers[0].line("verdict", verdict=example_traces.verdict())
    writers[0].save()
    code, output, _ = run("--json", str(tmp_path))
    look = json.loads(output)
    assert (code, look["ended"], look["failed"]) == (1, True, True)
    assert (look["verdict"]["kind"], [each["kind"] for each in look["warnings"]]) == ("UnevenBatches", ["WrongLength"])


def test_a_job_that_only_warns_goes_on_after_its_verdict(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path, begin={"settings": {"on_divergence": "warn"}})
    writer.line("verdict", verdict=example_traces.verdict())
    writer.save()
    code, output, _ = run(str(tmp_path))
    assert (code, "UnevenBatches: rank 2" in output, "countoff: UnevenBatches" in output) == (0, True, False)
    end([writer])
    code, output, _ = run(str(tmp_path))
    assert (code, output.splitlines()[-1]) == (1, "countoff: no verdict: 1 rank finished")


def test_a_rank_that_failed_is_told_by_the_exit_code(tmp_path: Path) -> None:
    writers = running(tmp_path)
    end(writers[:1], "failed", what="ValueError: no")
    end(writers[1:])
    code, output, _ = run(str(tmp_path))
    assert (code, "ValueError: no" in output) == (1, True)
    assert output.splitlines()[-1] == "countoff: no verdict: 3 ranks finished; 1 rank failed"


def test_the_last_line_says_how_ranks_ended(tmp_path: Path) -> None:
    for rank, how in enumerate(["closed", "closed", "signal"]):
        end([RankWriter(tmp_path / "a", rank, 4)], how)
    _, output, _ = run(str(tmp_path / "a"))
    assert output.splitlines()[-1] == (
        "countoff: no verdict: 2 ranks left before the end; 1 rank was ended by a signal; 1 rank left no trace"
    )
    end([RankWriter(tmp_path / "b", rank, 2) for rank in range(2)], "signal", what="SIGTERM")
    _, output, _ = run(str(tmp_path / "b"))
    assert output.splitlines()[-1] == "countoff: no verdict: 2 ranks were ended by a signal"


def test_hosts_that_write_to_their_own_disks(tmp_path: Path) -> None:
    for rank in range(2):
        end([RankWriter(tmp_path / f"node{rank}", rank, 2, begin={"host": f"node{rank}"})])
    code, output, _ = run("--json", str(tmp_path / "node0"), str(tmp_path / "node1"))
    assert (code, [row["ranks"] for row in json.loads(output)["rows"]]) == (0, [[0, 1]])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "the following arguments are required: DIR"),
        (["nowhere"], "nowhere cannot be read: No such file or directory"),
        (["--json", "no\x1b[31m\nwhere"], r"no\x1b[31m\nwhere cannot be read"),
        ([__file__], "test_top.py cannot be read: Not a directory"),
        ([str(Path(__file__).parent)], f"there is no trace in {Path(__file__).parent}"),
        (["--jsno", "x"], "there is no argument --jsno; did you mean --json?"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], reason: str) -> None:
    code, output, errors = run(*arguments)
    assert (code, output, errors.count("\n")) == (2, "", 1)
    assert reason in errors


def test_hostile_texts_do_nothing(tmp_path: Path) -> None:
    """Neither control characters nor rich's markup of a trace reach the terminal as such."""
    for rank, text in enumerate([*HOSTILE, "[bold red]x[/] [link=file:///etc/passwd]y[/link]"]):
        writer = RankWriter(tmp_path, rank, 8, begin={"host": text, "framework": text})
        writer.open(text)
        writer.tick(5, 10)
        writer.line("warning", verdict=example_traces.verdict(kind=text, sentence=text, time=writer.time + rank))
        writer.save()
    _, output, _ = run(str(tmp_path))
    assert all(each.isprintable() or each == "\n" for each in output)
    with Terminal(["top", str(tmp_path)], columns=300, lines=60) as terminal:
        terminal.read_until("[bold red]x[/] [link=file:///etc/passwd]y[/link]: [bold red]x")
        assert r"\x1b[31mred" in terminal.shown
        assert "\x1b]8" not in terminal.output


def test_the_table_is_painted_anew_and_the_verdict_stays(tmp_path: Path) -> None:
    directory = tmp_path / "later"
    with Terminal(["top", str(directory)]) as terminal:
        terminal.read_until(f"waiting for {directory}…")
        writers = running(directory)
        terminal.read_until("slow loader")
        writers[0].line("verdict", verdict=example_traces.verdict())
        writers[0].save()
        assert (terminal.wait(), terminal.is_restored) == (1, True)
        assert "do:  Cut the data evenly." in terminal.shown.rpartition("countoff: UnevenBatches: rank 2 ran out")[2]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_and_the_terminal_is_as_before(tmp_path: Path, number: signal.Signals, code: int) -> None:
    running(tmp_path)
    with Terminal(["top", str(tmp_path)]) as terminal:
        terminal.read_until("slow loader")
        terminal.send(number)
        assert (terminal.wait(), terminal.is_restored) == (code, True)
        assert "Traceback" not in terminal.output


def test_a_trace_that_vanishes_is_one_line(tmp_path: Path) -> None:
    running(tmp_path / "trace")
    with Terminal(["top", str(tmp_path / "trace")], columns=300) as terminal:
        terminal.read_until("slow loader")
        shutil.rmtree(tmp_path / "trace")
        assert (terminal.wait(), terminal.is_restored) == (2, True)
        assert terminal.shown.endswith(f"countoff: {tmp_path / 'trace'} cannot be read: No such file or directory\r\n")


def test_a_narrow_terminal_cuts_no_rank_and_no_reason(tmp_path: Path) -> None:
    """Rows take as many lines as they need."""
    writers = running(tmp_path, ranks=8)
    end(writers[:1], "failed", what="ValueError: no more data")
    with Terminal(["top", str(tmp_path)], columns=50) as terminal:
        terminal.read_until("ValueError")
        header, _, lines = terminal.shown.partition("\r\n\r\n")[2].partition("\r\n")
    assert header.split() == ["ranks", "span", "note", "batch", "batches/s"]
    assert all(word in lines for word in ("failed", "ValueError", "data"))


def test_a_job_of_4096_ranks_has_two_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks are two classes, and only what each has added is read again."""
    monkeypatch.setattr(live, "SILENT_SECONDS", 600.0)  # to write the files may take long
    writers = running(tmp_path, ranks=4_096)
    reader = Reader([str(tmp_path)], most_records=20_000)
    assert [len(row.ranks) for row in live.rows_of(reader.read().runs[-1], time.time())] == [1, 4_095]
    for writer in writers:
        writer.tick(5, 10, loader=3.0 if writer is writers[2] else 0.1)
        writer.save()
    found = live.rows_of(reader.read().runs[-1], time.time())
    assert [(row.fewest_batches, row.most_batches) for row in found] == [(130, 130), (130, 130)]


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    running(tmp_path)
    (tmp_path / "rank-00004.jsonl").mkdir()
    assert run(str(tmp_path))[1].endswith(f"cannot be read: {tmp_path}/rank-00004.jsonl: it is not a regular file\n")
