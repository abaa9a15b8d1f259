"""The text of a verdict, line by line, and the error that it is raised as."""

import pickle
import subprocess
import sys
import textwrap
from dataclasses import replace
from typing import Any

import pytest

from countoff.core import verdict
from countoff.core.checks import KINDS
from countoff.core.checks.lost import DIED, EXITED, LEFT, STOPPED, lost_rank
from countoff.core.checks.uneven import DECISION, EVALUATION, WHO_EVALUATES
from countoff.core.messages import number_of
from countoff.core.protocol.counters import SpanCounters
from countoff.core.protocol.rows import row
from countoff.core.verdict import DivergenceError, Verdict, at_hosts, error_for, table

EPOCH = "train epoch 0"


def ranks_with(batches: list[int]) -> list[dict[str, Any]]:
    """The rows of as many ranks as there are numbers of batches."""
    return [row(rank, SpanCounters(EPOCH, started=count), 2, "in batch 5") for rank, count in enumerate(batches)]


def test_the_whole_message_of_two_ranks() -> None:
    rows = (
        row(1, SpanCounters(EPOCH, started=4), 2, "ran out"),
        row(0, SpanCounters(EPOCH, started=4, prefetched=5), 2, "in batch 4"),
    )
    printed = Verdict(
        "UnevenBatches",
        "rank 1 ran out of data after 4 batches of train epoch 0; rank 0 has batch 5.",
        (1, 0),
        why="The ranks' loaders differ in length.",
        remedy="give every rank the same number of batches: drop_last=True.",
        rows=rows,
        spread_seconds=0.00123,
        standing="ran out first",
        world_size=2,
    )
    message = """
        countoff: UnevenBatches: rank 1 ran out of data after 4 batches of train epoch 0; rank 0 has batch 5.
          ran out first: rank 1 of 2 ranks
          rank  where          batches  fetched  steps  state
          1     train epoch 0  4        4        2      ran out
          0     train epoch 0  4        5        2      in batch 4
          why: The ranks' loaders differ in length.
          do:  give every rank the same number of batches: drop_last=True.
          more: countoff explain UnevenBatches
    """
    assert printed.render() == textwrap.dedent(message).strip("\n")


def test_each_alternative_of_a_remedy_has_a_line() -> None:
    told = Verdict("UnevenBatches", "they differ.", remedy="even the data.\nstop together.\nignore this.")
    lines = told.render().splitlines()
    assert lines[1:-1] == ["  do:  even the data.", "  or:  stop together.", "  or:  ignore this."]
    assert told.to_dict()["remedy"] == told.remedy


def test_only_a_newline_parts_alternatives_and_no_text_forges_a_line() -> None:
    """Whatever somebody has written to the store, each line of it begins as one of a remedy does."""
    hostile = Verdict("LostRank", "gone.\nforged", why="a\nb", remedy="x\r\ncountoff: y\u2028z\x1b[2J\n\n \n")
    assert hostile.render().splitlines() == [
        "countoff: LostRank: gone.\\nforged",
        "  why: a\\nb",
        "  do:  x\\r",
        "  or:  countoff: y\\u2028z\\x1b[2J",
        "  more: countoff explain LostRank",
    ]
    assert hostile.to_dict()["remedy"].splitlines() == hostile.alternatives


@pytest.mark.parametrize(
    ("verdict", "line"),
    [
        (Verdict("UnevenBatches", "", (2,), counted=4, world_size=4), "out of step: rank 2 of 4 ranks"),
        (
            Verdict("UnevenBatches", "", (0, 2), standing="ran out first", behind=(1, 3), counted=4, world_size=4),
            "ran out first: rank 0 of 4 ranks; ranks 1, 3 have not got so far",
        ),
        (
            Verdict("UnevenBatches", "", (0, 2), standing="ran out first", behind=(1,), counted=3, world_size=4),
            "ran out first: rank 0 of 4 ranks; rank 1 has not got so far; 3 of 4 ranks reported",
        ),
        (Verdict("StepMismatch", "", (0, 1), standing="differ", world_size=2), "differ: ranks 0, 1 of 2 ranks"),
        (Verdict("LostRank", "", (3,), gone=True, counted=3, world_size=4), "lost: rank 3 of 4 ranks"),
        (Verdict("LostRank", "", (3,), gone=True, counted=3), "lost: rank 3 of 4 ranks"),
        (Verdict("LostRank", "", (1,), gone=True, world_size=4), "lost: rank 1 of 4 ranks; 2 of 4 ranks reported"),
    ],
    ids=[
        "the minority",
        "nobody else so far",
        "one missing",
        "a tie",
        "gone",
        "of an unknown number",
        "gone, and more",
    ],
)
def test_the_line_below_the_headline_accuses_only_where_that_is_proved(verdict: Verdict, line: str) -> None:
    """It names the minority; without one it says what is known, and never calls both sides out of step."""
    assert replace(verdict, rows=tuple(ranks_with([4, 5]))).render().splitlines()[1] == f"  {line}"


def test_a_stall_accuses_nobody() -> None:
    """A slow rank is no fault, so a message about a stall shows the table without a rank that is out of step."""
    message = Verdict("Stalled", "no rank moves.", (1,), rows=tuple(ranks_with([4, 5]))).render()
    assert message.splitlines()[1].split() == ["rank", "where", "batches", "fetched", "steps", "state"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.00031711500169576796, "3.17e-4"),
        (3e-05, "3e-5"),
        (1e-3, "0.001"),
        (0.1, "0.1"),
        (0.0, "0"),
        (1.0, "1"),
        (123456.0, "1.23e5"),
        (-1.5e-7, "-1.5e-7"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
    ],
)
def test_numbers_are_written_as_people_write_them(value: float, text: str) -> None:
    assert number_of(value) == text


def test_a_message_has_no_table_before_the_first_batch() -> None:
    """As long as no rank has a batch, the message names the ranks and shows no table."""
    message = Verdict("PlanMismatch", "they differ.", (0,), rows=(row(0, None, 0, "between spans"),)).render()
    assert message.splitlines() == ["countoff: PlanMismatch: they differ.", "  out of step: rank 0 of 1 rank"]


@pytest.mark.parametrize(("ranks", "rest"), [(16, []), (17, ["  … and 1 rank more"]), (40, ["  … and 24 ranks more"])])
def test_a_table_has_at_most_sixteen_rows(ranks: int, rest: list[str]) -> None:
    """A table shows sixteen rows, and the number of the others."""
    assert table(ranks_with([5] * ranks))[17:] == rest


@pytest.mark.parametrize(
    ("sentence", "told"),
    [
        ("rank 3 ran out; rank 0 has batch 5.", "rank 3 on b ran out; rank 0 on a has batch 5."),
        ("rank 3 is gone; rank 3 had begun.", "rank 3 on b is gone; rank 3 had begun."),
        ("32 on ranks 0, 1; 16 on ranks 2, 3.", "32 on ranks 0, 1 on a; 16 on ranks 2, 3 on b."),
        ("ranks 0–3 read the same.", "ranks 0, 1 on a and ranks 2, 3 on b read the same."),
        ("ranks 0 and 1 share it.", "ranks 0 and 1 on a share it."),
        ("ranks 0 and 3 share it.", "rank 0 on a and rank 3 on b share it."),
        ("5 on rank 1, 4 on rank 2.", "5 on rank 1 on a, 4 on rank 2 on b."),
        ("ranks 3, 4 differ.", "ranks 3, 4 differ."),
        ("ranks 0–999999999999 differ.", "ranks 0–999999999999 differ."),
        ("ranks 0, 2, … (20 in all) differ.", "ranks 0, 2, … (20 in all) differ."),
        ("dp_rank 3 and pp_rank 3.", "dp_rank 3 and pp_rank 3."),
        ("rank 3 began b a after 4.", "rank 3 on b began b a after 4."),
        ("host b with ranks 2, 3 is gone; rank 0 waits.", "host b with ranks 2, 3 is gone; rank 0 on a waits."),
    ],
)
def test_a_sentence_names_the_host_of_each_rank_once(sentence: str, told: str) -> None:
    """Each rank gets its host at its first mention, whole lists get one, and nothing else changes."""
    hosts = {0: "a", 1: "a", 2: "b", 3: "b"}
    placed = at_hosts(Verdict("LostRank", sentence, (0, 1, 2, 3)), hosts)
    assert placed.sentence == told
    assert at_hosts(placed, hosts) == placed
    assert at_hosts(Verdict("LostRank", sentence), {}).sentence == sentence


def test_a_table_shows_hosts_where_there_are_several() -> None:
    rows = tuple({**line, "host": f"node-{line['rank'] // 2}"} for line in ranks_with([5, 5, 5, 4]))
    verdict = Verdict("UnevenBatches", "rank 3 ran out.", (3,), rows=rows, world_size=4)
    assert "node" not in verdict.render()
    _, named, head, *lines = at_hosts(verdict, {3: "node-1"}).render().splitlines()
    assert named == "  out of step: rank 3 of 4 ranks, on node-1"
    assert head.split()[:3] == ["rank", "host", "where"]
    assert [line.split()[1] for line in lines[:4]] == ["node-0", "node-0", "node-1", "node-1"]


def test_no_rows_make_no_table() -> None:
    assert table(()) == []


@pytest.mark.parametrize("hostile", ["\x1b[2J\x1b]0;title\x07", "a\nb", "\u202etxt", "\ud800", "\x9b31m", "\r"])
def test_control_characters_are_not_printed(hostile: str) -> None:
    """Text that another process wrote is printed without control characters, in all parts of a message."""
    verdict = Verdict("LostRank", f"rank 1 {hostile}", (1,), why=hostile, rows=({"where": hostile, "batches": 3},))
    for text in (verdict.headline, str(error_for(verdict)), *verdict.render().splitlines()):
        assert text.isprintable()


RAISED = [*(name for name, kind in KINDS.items() if kind.level == "raise"), "Stalled"]


@pytest.mark.parametrize("kind", RAISED)
def test_each_kind_is_raised_as_the_error_of_its_name(kind: str) -> None:
    error = error_for(Verdict(kind, "they differ."))
    assert type(error) is getattr(verdict, kind)
    assert isinstance(error, DivergenceError)
    assert str(error) == "they differ."


def test_other_kinds_are_raised_as_the_base_error() -> None:
    """A kind that has no error of its own is raised as a `DivergenceError`."""
    assert type(error_for(Verdict("DuplicateData", "ranks read the same."))) is DivergenceError


@pytest.mark.parametrize("kind", [*RAISED, "DuplicateData"])
def test_an_error_survives_pickling(kind: str) -> None:
    error = error_for(Verdict(kind, "they differ.", (1, 0), rows=tuple(ranks_with([4, 5]))))
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.verdict) == (type(error), str(error), error.verdict)
    assert copy.verdict.rows == error.verdict.rows


def test_a_verdict_is_whole_where_only_an_error_is_unpickled() -> None:
    """In a process that drives others, nothing else of countoff is imported."""
    error = error_for(Verdict("LostRank", "rank 1 is gone.", (1,), gone=True))
    script = (
        f"import pickle; error = pickle.loads({pickle.dumps(error)!r}); "
        "print(error.verdict.restart, str(error).splitlines()[-1], sep='|')"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.strip() == f"{error.verdict.restart}|{str(error).splitlines()[-1]}"
    assert error.verdict.restart == "may_help"


@pytest.mark.parametrize(
    ("verdict", "restart"),
    [
        *[
            (Verdict(kind, "they differ.", (1,)), "useless")
            for kind in ("PlanMismatch", "UnevenBatches", "StepMismatch", "LearningRateMismatch", "RankMapError")
        ],
        (Verdict("UnevenBatches", "evaluations differ in length.", subject=EVALUATION), "useless"),
        (Verdict("UnevenBatches", "rank 1 left the loop.", subject=DECISION), "unknown"),
        (Verdict("UnevenBatches", "rank 1 alone evaluates.", subject=WHO_EVALUATES), "unknown"),
        (lost_rank(2, "is gone (pid 4)", subject=DIED), "may_help"),
        (lost_rank(2, "is stopped (pid 4, SIGSTOP)", subject=STOPPED), "may_help"),
        (lost_rank(2, "has not been heard for 180 s"), "may_help"),
        (lost_rank(0, "or whoever hosts the job's store is gone"), "may_help"),
        (lost_rank(2, "raised ValueError", gone=False), "unknown"),
        (lost_rank(2, "left the job (sys.exit)", subject=EXITED), "unknown"),
        (lost_rank(2, "left the job before its fit had ended", subject=LEFT), "unknown"),
        (Verdict("LateRank", "rank 1 has not counted off."), "unknown"),
        (Verdict("Stalled", "no rank has made progress."), "unknown"),
    ],
    ids=lambda value: value.headline if isinstance(value, Verdict) else None,
)
def test_a_restart_is_useless_only_where_the_program_decides(verdict: Verdict, restart: str) -> None:
    """What follows from program and data comes again; a process or host that is gone does not have to."""
    assert verdict.restart == restart
    assert verdict.to_dict()["restart"] == restart


def test_every_kind_of_the_table_has_a_restart() -> None:
    """A restart is useless after the kinds that raise by themselves, except those about a missing rank."""
    raising = {name for name, kind in KINDS.items() if kind.level == "raise"}
    assert {name for name in KINDS if Verdict(name, "").restart == "useless"} == raising - {"LostRank"}


def test_a_verdict_as_json() -> None:
    """The keys and types of a verdict that programs read."""
    lost = replace(
        lost_rank(3, "is gone\x1b (pid 4)", "It was killed.", subject=DIED),
        time=1700000000.25,
        rows=(
            {**ranks_with([2])[0], "side": None, "known": 1.0, "host": "node-0"},
            {**ranks_with([2])[0], "rank": "1, 2", "ranks": 2},
        ),
        hosts={3: "node-1"},
        world_size=4,
        remedy="read its output.",
    )
    counted = {"where": EPOCH, "batches": 2, "fetched": 2, "steps": 2, "state": "in batch 5"}
    assert lost.to_dict() == {
        "kind": "LostRank",
        "sentence": "rank 3 is gone\\x1b (pid 4).",
        "restart": "may_help",
        "ranks": [3],
        "standing": "out of step",
        "world_size": 4,
        "hosts": {"3": "node-1"},
        "leave_out": ["node-1"],
        "rows": [
            {**counted, "rank": 0, "ranks": 1, "host": "node-0"},
            {**counted, "rank": "1, 2", "ranks": 2},
        ],
        "why": "It was killed.",
        "remedy": "read its output.",
        "time": 1700000000.25,
        "time_utc": "2023-11-14T22:13:20.250Z",
    }
    assert replace(lost, subject=LEFT).to_dict()["leave_out"] == []
    assert replace(lost, hosts={3: "node\n1"}).to_dict()["leave_out"] == ["node\\n1"]


@pytest.mark.parametrize("seconds", [1e300, float("nan"), float("inf"), -1e20])
def test_a_time_that_no_clock_shows_is_left_out(seconds: float) -> None:
    """The time comes from another rank, through the store."""
    assert Verdict("LostRank", "", time=seconds).to_dict()["time_utc"] == ""
