"""`countoff top`: what it prints in a pipe and on a terminal, and that the terminal is as before however it ends."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from countoff.report.top import COLUMNS
from countoff.report.top import rows as live
from countoff.report.top.watch import WatchedJob
from tests import example_traces
from tests.example_traces import HOSTILE, RankWriter
from tests.paths import ROOT
from tests.terminal import Terminal

SCRIPT = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what it runs in the background ignore it
sys.path[:0] = {[str(ROOT / "core"), str(ROOT / "plugins")]}
from countoff.cli.__main__ import main
main()
"""
FAST = ["--every", "0.2"]


@pytest.fixture(autouse=True)
def _jobs_begin_a_minute_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example_traces, "BEGAN", time.time() - 60)


def start(arguments: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """Starts `countoff top` with a pipe."""
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, "top", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def run(*arguments: str) -> tuple[int, str, str]:
    """The exit code, the output and the errors of `countoff top`."""
    with start(arguments) as process:
        output, errors = process.communicate(timeout=60)
    return process.returncode, output, errors


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


def table(output: str) -> list[dict[str, str]]:
    """The rows in the output of a pipe."""
    lines = output.splitlines()
    header = next(line for line in lines if line.startswith("# time\t"))
    assert header == "# " + "\t".join(COLUMNS)
    rows = [line.split("\t") for line in lines if not line.startswith("#")]
    return [dict(zip(COLUMNS, row, strict=True)) for row in rows]


def below_heading(terminal: Terminal) -> list[str]:
    """The lines of the table on a terminal, and what is below it: the heading may have two lines."""
    lines = [line.rstrip() for line in terminal.screen.splitlines()]
    return lines[lines.index("") + 1 :]


def test_one_look_prints_a_line_for_each_class_of_ranks(tmp_path: Path) -> None:
    running(tmp_path)
    code, output, errors = run("--once", str(tmp_path))
    assert (code, errors) == (0, "")
    first, others = table(output)
    assert first == {
        "time": first["time"],
        "ranks": "2",
        "hosts": "node1",
        "span": "train epoch 0",
        "fewest_batches": "120",
        "most_batches": "120",
        "batches_per_second": "2",
        "loader_share": "0.6",
        "learning_rate": "0.1",
        "age_seconds": first["age_seconds"],
        "note": "slow loader",
    }
    assert (others["ranks"], others["hosts"], others["loader_share"], others["note"]) == (
        "0-1,3",
        "node0,node1",
        "0.02",
        "",
    )
    assert 0 <= float(first["age_seconds"]) < 60


def test_a_pipe_gets_lines_until_all_ranks_have_ended(tmp_path: Path) -> None:
    writers = running(tmp_path)
    with start([*FAST, str(tmp_path)]) as process:
        assert process.stdout is not None
        seen = [process.stdout.readline() for _ in range(5)]
        end(writers)
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    rows = table("".join(seen) + output)
    assert [row["ranks"] for row in rows[:4]] == ["2", "0-1,3"] * 2
    assert (rows[-1]["ranks"], rows[-1]["span"]) == ("0-3", "finished")
    assert output.splitlines()[-1] == "# countoff: no verdict: 4 ranks finished"


def test_a_directory_that_does_not_exist_is_waited_for(tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "today"
    with start([*FAST, str(directory)]) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"# waiting for {directory}…\n"
        directory.mkdir(parents=True)
        assert process.stdout.readline() == f"# waiting for the first line of a rank in {directory}…\n"
        end(running(directory))
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert table(output)[-1]["span"] == "finished"


def test_the_verdict_ends_the_view(tmp_path: Path) -> None:
    example_traces.uneven(tmp_path)
    code, output, errors = run(str(tmp_path))
    assert (code, errors) == (1, "")
    assert "# countoff: UnevenBatches: rank 2 ran out of data" in output
    assert "#   out of step: rank 2 of 8 ranks" in output
    assert "#   do:  Cut the data evenly." in output


def test_a_verdict_without_its_table_is_waited_for(tmp_path: Path) -> None:
    writers = running(tmp_path)
    writers[0].line("verdict", verdict=example_traces.verdict(rows=[]))
    writers[0].save()
    with start([*FAST, str(tmp_path)]) as process:
        assert process.stdout is not None
        while "UnevenBatches" not in process.stdout.readline():
            pass
        writers[1].line("verdict", verdict=example_traces.verdict())
        writers[1].save()
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "#   rank       where          batches" in output


@pytest.mark.parametrize("how", ["finished", "verdict"])
def test_after_a_run_that_is_over_the_next_one_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(example_traces, "BEGAN", time.time() - 1_000)
    old = running(tmp_path, ranks=2)
    if how == "verdict":
        old[0].line("verdict", verdict=example_traces.verdict(time=old[0].time, rows=[]))
    end(old, how)
    with start([*FAST, str(tmp_path)]) as process:
        assert process.stdout is not None
        seen = ""
        while "# this run has ended; waiting for the next one\n" not in seen:
            line = process.stdout.readline()
            assert line, "it has not waited"
            seen += line
        monkeypatch.setattr(example_traces, "BEGAN", time.time() - 60)
        end(running(tmp_path, ranks=2))
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert output.splitlines()[-1] == "# countoff: no verdict: 2 ranks finished"
    code, output, _ = run("--once", str(tmp_path))
    assert (code, output.splitlines()[-1]) == (0, "# countoff: no verdict: 2 ranks finished")


def test_one_look_as_json(tmp_path: Path) -> None:
    """It has the columns of a line, with lists in place of text, and ends at once."""
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
    code, output, _ = run("--json", "--every", "60", str(tmp_path))
    look = json.loads(output)
    assert (code, look["ended"], look["failed"]) == (1, True, True)
    assert (look["verdict"]["kind"], [each["kind"] for each in look["warnings"]]) == ("UnevenBatches", ["WrongLength"])


def test_one_look_tells_a_run_that_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example_traces, "BEGAN", time.time() - 1_000)
    end(running(tmp_path, ranks=2), "failed")
    code, output, _ = run("--once", str(tmp_path))
    assert (code, output.splitlines()[-1]) == (1, "# countoff: no verdict: 2 ranks failed")


def test_one_look_does_not_wait_for_a_table(tmp_path: Path) -> None:
    writers = running(tmp_path)
    writers[0].line("verdict", verdict=example_traces.verdict(rows=[]))
    writers[0].save()
    code, output, _ = run("--once", str(tmp_path))
    assert (code, output.count("\n# countoff: UnevenBatches: rank 2 ran out")) == (1, 1)


def test_a_job_that_only_warns_goes_on_after_its_verdict(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path, begin={"settings": {"on_divergence": "warn"}})
    writer.line("verdict", verdict=example_traces.verdict())
    writer.save()
    code, output, _ = run("--once", str(tmp_path))
    assert (code, "# UnevenBatches: rank 2" in output, "countoff: UnevenBatches" in output) == (0, True, False)
    end([writer])
    code, output, _ = run("--once", str(tmp_path))
    assert (code, output.splitlines()[-1]) == (1, "# countoff: no verdict: 1 rank finished")


def test_a_rank_that_failed_is_told_by_the_exit_code(tmp_path: Path) -> None:
    writers = running(tmp_path)
    end(writers[:1], "failed", what="ValueError: no")
    end(writers[1:])
    code, output, _ = run(str(tmp_path))
    assert (code, table(output)[0]["note"]) == (1, "ValueError: no")
    assert output.splitlines()[-1] == "# countoff: no verdict: 3 ranks finished; 1 rank failed"


def test_the_last_line_says_how_ranks_ended(tmp_path: Path) -> None:
    for rank, how in enumerate(["closed", "closed", "signal"]):
        end([RankWriter(tmp_path / "a", rank, 4)], how)
    _, output, _ = run("--once", str(tmp_path / "a"))
    assert output.splitlines()[-1] == (
        "# countoff: no verdict: 2 ranks left before the end; 1 rank was ended by a signal; 1 rank left no trace"
    )
    end([RankWriter(tmp_path / "b", rank, 2) for rank in range(2)], "signal", what="SIGTERM")
    _, output, _ = run("--once", str(tmp_path / "b"))
    assert output.splitlines()[-1] == "# countoff: no verdict: 2 ranks were ended by a signal"


def test_each_warning_is_printed_once(tmp_path: Path) -> None:
    writers = running(tmp_path)
    for name in ("WrongLength", "SameOrder"):
        writers[0].line("warning", verdict=example_traces.verdict(name, time=writers[0].time))
        writers[0].save()
        writers[0].time += 1
    with start([*FAST, str(tmp_path)]) as process:
        assert process.stdout is not None
        seen = "".join(process.stdout.readline() for _ in range(8))
        end(writers)
        output, _ = process.communicate(timeout=60)
    assert (seen + output).count("SameOrder") == 1
    assert "# SameOrder: rank 2 ran out of data" in seen


def test_hosts_that_write_to_their_own_disks(tmp_path: Path) -> None:
    for rank in range(2):
        end([RankWriter(tmp_path / f"node{rank}", rank, 2, begin={"host": f"node{rank}"})])
    code, output, _ = run("--once", str(tmp_path / "node0"), str(tmp_path / "node1"))
    assert (code, [row["ranks"] for row in table(output)]) == (0, ["0-1"])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "the following arguments are required: DIR"),
        (["--every", "0", "x"], "--every must be a number of seconds from 0.2 to 3600, got 0"),
        (["--every", "nan", "x"], "--every must be a number of seconds from 0.2 to 3600, got nan"),
        (["--every", "x", "x"], "argument --every: invalid float value: 'x'"),
        (["--once", "nowhere"], "there is no directory nowhere; without --once or --json, countoff top waits for it"),
        (["--json", "nowhere"], "there is no directory nowhere; without --once or --json, countoff top waits for it"),
        (["--once", "no\x1b[31m\nwhere"], r"there is no directory no\x1b[31m\nwhere;"),
        ([__file__], "test_top.py cannot be read: Not a directory"),
        (["--evry", "2", "x"], "there is no argument --evry; did you mean --every?"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], reason: str) -> None:
    code, output, errors = run(*arguments)
    assert (code, output, errors.count("\n")) == (2, "", 1)
    assert reason in errors


def test_one_look_at_a_directory_without_a_trace_is_one_line(tmp_path: Path) -> None:
    code, output, errors = run("--once", str(tmp_path))
    assert (code, output) == (2, "")
    assert errors == f"countoff: there is no trace in {tmp_path}; without --once or --json, countoff top waits for it\n"


def test_a_closed_pipe_is_no_error_to_report(tmp_path: Path) -> None:
    running(tmp_path)
    with start([*FAST, str(tmp_path)]) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert (process.wait(60), process.stderr.read()) == (1, "")


def test_ctrl_c_ends_a_pipe_without_a_word(tmp_path: Path) -> None:
    running(tmp_path)
    with start([*FAST, str(tmp_path)]) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "")


def test_hostile_texts_do_nothing(tmp_path: Path) -> None:
    """Neither control characters nor rich's markup of a trace reach the terminal as such."""
    for rank, text in enumerate([*HOSTILE, "[bold red]x[/] [link=file:///etc/passwd]y[/link]"]):
        writer = RankWriter(tmp_path, rank, 8, begin={"host": text, "framework": text})
        writer.open(text)
        writer.tick(5, 10)
        writer.line("warning", verdict=example_traces.verdict(kind=text, sentence=text, time=writer.time + rank))
        writer.save()
    _, output, _ = run("--once", str(tmp_path))
    assert all(each.isprintable() or each in "\t\n" for each in output)
    with Terminal(["top", *FAST, str(tmp_path)], columns=300) as terminal:
        terminal.read_until("[bold red]x[/] [link=file:///etc/passwd]y[/link]: [bold red]x")
        assert r"\x1b[31mred" in terminal.screen
        assert "\x1b[31m" not in terminal.output
        assert "\x1b]8" not in terminal.output


def test_q_leaves_and_the_terminal_is_as_before(tmp_path: Path) -> None:
    running(tmp_path)
    with Terminal(["top", *FAST, str(tmp_path)], columns=300) as terminal:
        terminal.read_until("q leaves")
        lines = [line.split() for line in terminal.screen.splitlines()]
        assert lines[0][:4] == [f"{tmp_path}:", "Lightning,", "4", "ranks"]
        assert lines[2][:3] == ["ranks", "host", "span"]
        assert lines[3][:8] == ["2", "node1", "train", "epoch", "0", "120", "2", "60%"]
        assert lines[4][:4] == ["0,", "1,", "3", "2"]
        assert not terminal.is_restored
        terminal.press("xq")
        assert (terminal.wait(), terminal.is_restored, terminal.left) == (0, True, "")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGQUIT, 131)]
)
def test_a_signal_leaves_and_the_terminal_is_as_before(tmp_path: Path, number: signal.Signals, code: int) -> None:
    running(tmp_path)
    with Terminal(["top", *FAST, str(tmp_path)]) as terminal:
        terminal.read_until("q leaves")
        terminal.send(number)
        assert (terminal.wait(), terminal.is_restored, terminal.left) == (code, True, "")


def test_ctrl_c_at_the_keyboard(tmp_path: Path) -> None:
    """Also while it waits for the job."""
    with Terminal(["top", "--every", "60", str(tmp_path / "later")]) as terminal:
        terminal.read_until("waiting for")
        terminal.press("\x03")
        assert (terminal.wait(), terminal.is_restored) == (130, True)
        assert "Traceback" not in terminal.output


def test_ctrl_z_gives_the_terminal_back_until_the_command_goes_on(tmp_path: Path) -> None:
    running(tmp_path)
    with Terminal(["top", *FAST, str(tmp_path)]) as terminal:
        terminal.read_until("q leaves")
        terminal.press("\x1a")
        terminal.wait_until_stopped()
        assert terminal.is_restored
        terminal.output = ""
        terminal.send(signal.SIGCONT)
        terminal.read_until("q leaves")
        assert not terminal.is_restored
        terminal.press("q")
        assert (terminal.wait(), terminal.is_restored) == (0, True)


def test_the_verdict_stays_in_the_terminal(tmp_path: Path) -> None:
    writers = running(tmp_path)
    with Terminal(["top", *FAST, str(tmp_path)]) as terminal:
        terminal.read_until("q leaves")
        writers[0].line("verdict", verdict=example_traces.verdict())
        writers[0].save()
        assert (terminal.wait(), terminal.is_restored) == (1, True)
        assert terminal.left.startswith("countoff: UnevenBatches: rank 2 ran out of data")
        assert terminal.left.count("\n") == 8


def test_a_trace_that_vanishes_is_one_line(tmp_path: Path) -> None:
    running(tmp_path / "trace")
    with Terminal(["top", *FAST, str(tmp_path / "trace")]) as terminal:
        terminal.read_until("q leaves")
        shutil.rmtree(tmp_path / "trace")
        assert (terminal.wait(), terminal.is_restored) == (2, True)
        assert terminal.left == f"countoff: {tmp_path / 'trace'} cannot be read: No such file or directory\r\n"


def test_rows_that_do_not_fit_are_counted(tmp_path: Path) -> None:
    writers = running(tmp_path, ranks=30)
    for writer in writers:
        writer.open(f"train epoch {writer.path.name}")
        writer.save()
    with Terminal(["top", *FAST, str(tmp_path)], lines=16) as terminal:
        terminal.read_until("q leaves")
        heading = len(terminal.screen.splitlines()) - len(below_heading(terminal)) - 1
        rows = 10 - heading
        assert f"… and {30 - rows} rows more, of {30 - rows} ranks" in terminal.screen
        assert terminal.screen.count("train epoch") == rows


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (120, ["ranks", "host", "span", "batch", "batches/s", "loader", "learning rate", "age", "note"]),
        (80, ["ranks", "host", "span", "batch", "batches/s", "loader", "age", "note"]),
        (60, ["ranks", "span", "batch", "batches/s", "note"]),
        (40, ["ranks", "span", "note"]),
    ],
)
def test_a_narrow_terminal_leaves_out_the_least_useful_columns(tmp_path: Path, columns: int, shown: list[str]) -> None:
    running(tmp_path, ranks=8)
    with Terminal(["top", *FAST, str(tmp_path)], columns=columns) as terminal:
        terminal.read_until("q leaves")
        header, slow, others, *_ = below_heading(terminal)
    assert re.split(r" {2,}", header) == shown
    assert re.fullmatch(r"2 .* train epoch 0 .*slow loader", slow)
    assert re.match(r"0, 1, 3–7 .*train epoch 0", others)


def test_which_ranks_and_where_they_are_is_told_on_several_lines_rather_than_cut(tmp_path: Path) -> None:
    """A row takes as many lines then; a very long exception is cut."""
    writers = running(tmp_path, ranks=8)
    end(writers[:1], "failed", what="ValueError: " + 9 * "no ")
    with Terminal(["top", *FAST, str(tmp_path)], columns=30, lines=13) as terminal:
        terminal.read_until("q leaves")
        lines = below_heading(terminal)
    assert [line.split("  ")[0] for line in lines[:2]] == ["ranks", "0"]
    assert lines[6] == "… and 1 row more, of 6 ranks"
    assert lines[1].endswith("ValueError:")
    assert lines[3].endswith("…")
    assert [line[7:14].rstrip() for line in lines[4:6]] == ["train", "epoch 0"]


@pytest.mark.parametrize(("columns", "shown"), [(120, True), (80, False)])
def test_an_exception_is_not_cut_while_host_and_learning_rate_are_there(
    tmp_path: Path, columns: int, shown: bool
) -> None:
    writers = running(tmp_path, ranks=8)
    end(writers[:1], "failed", what="ValueError: no more data")
    with Terminal(["top", *FAST, str(tmp_path)], columns=columns) as terminal:
        terminal.read_until("q leaves")
        header = below_heading(terminal)[0]
        assert ("host" in header, "learning rate" in header) == (shown, shown)
        assert "ValueError: no more data" in terminal.screen


def test_a_long_heading_has_two_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running(tmp_path)
    monkeypatch.chdir(tmp_path)
    with Terminal(["top", *FAST, "."], columns=40) as terminal:
        terminal.read_until("q leaves")
        assert re.search(r"begun\s+\d+-\d+-\d+\s+\d+:\d+:\d+\s", terminal.screen)


def test_another_size_of_the_terminal_is_painted_at_once(tmp_path: Path) -> None:
    running(tmp_path)
    with Terminal(["top", "--every", "60", str(tmp_path)]) as terminal:
        terminal.read_until("learning rate")
        terminal.read_until("q leaves")
        terminal.output = ""
        terminal.resize(24, 60)
        terminal.read_until("q leaves")
        assert ("batches/s" in terminal.screen, "learning rate" in terminal.screen) == (True, False)


def test_one_look_on_a_terminal_is_a_table(tmp_path: Path) -> None:
    running(tmp_path)
    with Terminal(["top", "--once", str(tmp_path)]) as terminal:
        assert (terminal.wait(), terminal.is_restored) == (0, True)
        assert "slow loader" in terminal.left
        assert "q leaves" not in terminal.left


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(tmp_path: Path) -> None:
    end(running(tmp_path))
    with Terminal(["top", *FAST, str(tmp_path)], environment={"TERM": "dumb"}) as terminal:
        assert terminal.wait() == 0
        assert terminal.output.startswith("# time\t")


def test_a_job_of_4096_ranks_has_two_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look reads what each rank has added, and the ranks are two classes."""
    monkeypatch.setattr(live, "SILENT_SECONDS", 600.0)  # to write the files may take long
    writers = running(tmp_path, ranks=4_096)
    job = WatchedJob([str(tmp_path)], once=True)
    assert [len(row.ranks) for row in job.look().rows] == [1, 4_095]
    for writer in writers:
        writer.tick(5, 10, loader=3.0 if writer is writers[2] else 0.1)
        writer.save()
    assert [row.batches for row in job.look().rows] == [(130, 130), (130, 130)]


def test_a_file_that_cannot_be_read_is_told_once(tmp_path: Path) -> None:
    writers = running(tmp_path)
    (tmp_path / "rank-00004.jsonl").mkdir()
    with start([*FAST, str(tmp_path)]) as process:
        assert process.stdout is not None
        seen = [process.stdout.readline() for _ in range(6)]
        end(writers)
        output, _ = process.communicate(timeout=60)
    assert ("".join(seen) + output).count(
        f"# cannot be read: {tmp_path}/rank-00004.jsonl: it is not a regular file\n"
    ) == 1
