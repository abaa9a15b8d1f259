"""The facts of the live view: which ranks share a row, which comes first, and how fast they are."""

from __future__ import annotations

import cProfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from countoff.report.live import Row, rows_of
from countoff.report.reader import Reader, read
from tests.example_traces import BEGAN, RankWriter, verdict


def train(
    directory: Path,
    *,
    ranks: int = 4,
    ticks: int = 12,
    reads: Callable[[int], int] = lambda _: 10,
    loader: Mapping[int, float] = {},
    then: Callable[[RankWriter], None] = lambda _: None,
) -> None:
    """Ranks in one epoch, with a tick every five seconds, those of each rank at a moment of its own."""
    for rank in range(ranks):
        writer = RankWriter(directory, rank, ranks, begin={"host": f"node{rank // 2}"})
        writer.open("train epoch 0")
        writer.time += rank % 5
        for _ in range(ticks):
            writer.tick(5, reads(rank), steps=reads(rank), loader=loader.get(rank, 0.1), lr=[0.1])
        then(writer)
        writer.save()


def rows(directory: Path, after: float) -> list[Row]:
    """What is to be seen so many seconds after the beginning of the job."""
    return rows_of(read([str(directory)]).runs[-1], BEGAN + after)


def batches(row: Row) -> tuple[int | None, int | None]:
    return row.fewest_batches, row.most_batches


def test_ranks_that_do_the_same_share_a_row(tmp_path: Path) -> None:
    train(tmp_path)
    (row,) = rows(tmp_path, 65)
    assert (row.ranks, row.hosts, row.span, row.note) == ((0, 1, 2, 3), ("node0", "node1"), "train epoch 0", "")
    assert (batches(row), row.batches_per_second, row.learning_rates) == ((120, 120), 2.0, (0.1,))
    assert row.loader_share == pytest.approx(0.02)
    assert row.age_seconds == 5.0


def test_a_rank_that_waits_for_its_loader_comes_first(tmp_path: Path) -> None:
    train(tmp_path, loader={2: 3.0})
    first, others = rows(tmp_path, 65)
    assert (first.ranks, first.note, others.ranks, others.note) == ((2,), "slow loader", (0, 1, 3), "")
    assert first.loader_share == pytest.approx(0.6)


def test_ranks_that_all_wait_for_their_loaders_share_a_row(tmp_path: Path) -> None:
    train(tmp_path, loader={**dict.fromkeys(range(4), 2.5), 2: 3.2})
    (row,) = rows(tmp_path, 65)
    assert row.note == ""


def test_a_slow_rank_comes_first(tmp_path: Path) -> None:
    """Not where its batches might only just have been started."""
    train(tmp_path / "slow", reads=lambda rank: 7 if rank == 3 else 10)
    assert [(row.ranks, row.note) for row in rows(tmp_path / "slow", 65)] == [((3,), "behind"), ((0, 1, 2), "")]
    train(tmp_path / "young", ticks=4, reads=lambda rank: 7 if rank == 3 else 10)
    assert [(row.ranks, row.note) for row in rows(tmp_path / "young", 25)] == [((3,), "slow"), ((0, 1, 2), "")]
    train(tmp_path / "few", reads=lambda rank: 1, ticks=3)
    assert len(rows(tmp_path / "few", 20)) == 1


def test_a_rank_in_an_earlier_span_comes_before_the_others(tmp_path: Path) -> None:
    def close(writer: RankWriter) -> None:
        if writer.path.name != "rank-00001.jsonl":
            writer.close("train epoch 0")
            writer.open("evaluation after epoch", eval=True)

    train(tmp_path, then=close)
    assert [(row.ranks, row.span) for row in rows(tmp_path, 65)] == [
        ((1,), "train epoch 0"),
        ((0, 2, 3), "evaluation after epoch"),
    ]


def test_a_rank_without_a_line_is_silent(tmp_path: Path) -> None:
    """In a span each rank writes every five seconds. One whose process was killed does not, and comes first."""

    def go_on(writer: RankWriter) -> None:
        for _ in range(0 if writer.path.name == "rank-00000.jsonl" else 9):
            writer.tick(5, 10)

    train(tmp_path, ticks=3, then=go_on)
    silent, others = rows(tmp_path, 64)
    assert (silent.ranks, silent.note, silent.age_seconds) == ((0,), "silent", 49.0)
    assert silent.batches_per_second == pytest.approx(30 / 49)  # of the last seconds, in which there were none
    assert (others.ranks, others.batches_per_second) == ((1, 2, 3), 2.0)


def test_before_its_first_tick_a_span_has_no_numbers(tmp_path: Path) -> None:
    train(tmp_path, ticks=0)
    (row,) = rows(tmp_path, 4)
    assert (row.span, batches(row), row.batches_per_second, row.loader_share) == (
        "train epoch 0",
        (None, None),
        None,
        None,
    )


def test_the_rank_that_the_verdict_names_is_lost_and_not_silent(tmp_path: Path) -> None:
    def go_on(writer: RankWriter) -> None:
        if writer.path.name != "rank-00000.jsonl":
            writer.time += 20
            writer.line("verdict", verdict=verdict("LostRank", [0], rows=[]))

    train(tmp_path, ticks=3, then=go_on)
    lost, _ = rows(tmp_path, 64)
    assert (lost.ranks, lost.note) == ((0,), "lost")


def test_once_nobody_moves_each_number_of_batches_has_a_row(tmp_path: Path) -> None:
    def stall(writer: RankWriter) -> None:
        writer.tick(1, {"rank-00001.jsonl": 0, "rank-00002.jsonl": 1}.get(writer.path.name, 2))
        for _ in range(9):
            writer.tick(5, 0)

    train(tmp_path, ranks=6, ticks=2, then=stall)
    assert [(row.ranks, row.note, batches(row), row.batches_per_second) for row in rows(tmp_path, 60)] == [
        ((1,), "behind", (20, 20), 0.0),
        ((2,), "behind", (21, 21), 0.0),
        ((0, 3, 4, 5), "stands still", (22, 22), 0.0),
    ]


def test_ranks_that_stand_still_say_since_when(tmp_path: Path) -> None:
    """After ten seconds; where batches take long, after three usual ones."""

    def seen(name: str, ticks: int, reads: int) -> list[tuple[str, float | None]]:
        def stand(writer: RankWriter) -> None:
            for _ in range(ticks):
                writer.tick(5, 0)

        train(tmp_path / name, ranks=1, ticks=4, reads=lambda _: reads, then=stand)
        return [(row.note, row.still_seconds) for row in rows(tmp_path / name, 21 + 5 * ticks)]

    assert seen("one tick", 1, 10) == [("", None)]
    assert seen("two ticks", 2, 10) == [("stands still", 11.0)]
    assert seen("slow batches", 2, 1) == [("", None)]
    assert seen("slow batches for long", 3, 1) == [("stands still", 16.0)]


def test_a_rank_that_has_evaluated_meanwhile_does_not_stand_still(tmp_path: Path) -> None:
    def evaluate(writer: RankWriter) -> None:
        writer.open("evaluation", eval=True)
        writer.tick(60, 50)
        writer.close("evaluation")
        writer.batches = 40
        writer.tick(5, 0)

    train(tmp_path, ranks=1, ticks=4, then=evaluate)
    (row,) = rows(tmp_path, 85)
    assert (row.span, batches(row), row.note, row.still_seconds) == ("train epoch 0", (40, 40), "", None)


def test_ranks_between_spans_have_no_batches(tmp_path: Path) -> None:
    train(tmp_path, ranks=2, then=lambda writer: writer.close("train epoch 0"))
    RankWriter(tmp_path, 2, 2).save()
    assert [(row.ranks, row.span, batches(row), row.batches_per_second) for row in rows(tmp_path, 60)] == [
        ((2,), "before the first span", (None, None), None),
        ((0, 1), "between spans", (None, None), None),
    ]


def test_ended_ranks_come_last_and_failed_ones_first(tmp_path: Path) -> None:
    endings = {0: {"how": "finished"}, 1: {"how": "failed", "what": "ValueError: [bold]no[/bold]"}}

    def end(writer: RankWriter) -> None:
        if ending := endings.get(int(writer.path.name[5:10])):
            writer.line("end", **ending)

    train(tmp_path, then=end)
    assert [(row.ranks, row.span, row.note) for row in rows(tmp_path, 65)] == [
        ((1,), "failed", "ValueError: [bold]no[/bold]"),
        ((2, 3), "train epoch 0", ""),
        ((0,), "finished", ""),
    ]


def test_ranks_without_a_trace_have_a_row(tmp_path: Path) -> None:
    for rank in (0, 3):
        RankWriter(tmp_path, rank, 5).save()
    first, others = rows(tmp_path, 1)
    assert (first.ranks, first.span, first.age_seconds, others.ranks) == ((1, 2, 4), "no trace", None, (0, 3))


def test_an_evaluation_inside_of_an_epoch_has_a_rate_of_its_own(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path)

    def look() -> tuple[str, tuple[int | None, int | None], float | None]:
        writer.save()
        (row,) = rows(tmp_path, writer.time - BEGAN)
        return row.span, batches(row), row.batches_per_second

    writer.open("train epoch 0")
    writer.tick(5, 10)
    assert look() == ("train epoch 0", (10, 10), 2.0)
    writer.open("evaluation", eval=True)
    assert look() == ("evaluation", (None, None), None)
    writer.tick(5, 50)
    assert look() == ("evaluation", (50, 50), 10.0)
    writer.close("evaluation")
    assert look() == ("train epoch 0", (10, 10), 2.0)  # nothing new of the epoch yet
    writer.batches = 10
    writer.tick(5, 30)
    assert look() == ("train epoch 0", (40, 40), pytest.approx(40 / 15))


def test_batches_before_a_resume_are_not_this_runs(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path)
    writer.open("train epoch 3", at=1_000)
    writer.batches = 1_000
    writer.save()
    (row,) = rows(tmp_path, 0)
    assert (batches(row), row.batches_per_second) == ((1_000, 1_000), None)
    writer.tick(5, 10)
    writer.save()
    (row,) = rows(tmp_path, 5)
    assert (batches(row), row.batches_per_second) == ((1_010, 1_010), 2.0)


def test_a_rate_is_that_of_the_last_half_minute(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path)
    writer.open("train epoch 0")
    found: list[float | None] = []
    for index in range(30):
        writer.tick(5, 10 if index < 20 else 30)
        writer.save()
        found.append(rows(tmp_path, writer.time - BEGAN)[0].batches_per_second)
    assert (found[19], found[22], found[25:]) == (2.0, 4.0, [6.0] * 5)


def test_slow_batches_have_a_longer_window(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path)
    writer.open("train epoch 0")
    for index in range(48):  # a batch in 40 s
        writer.tick(5, index % 8 == 7)
    writer.save()
    (row,) = rows(tmp_path, 240)
    assert row.batches_per_second == pytest.approx(1 / 40)


def test_no_line_is_of_the_future(tmp_path: Path) -> None:
    """Where the clock of this host is behind that of rank 0."""
    train(tmp_path)
    (row,) = rows(tmp_path, -3_600)
    assert (row.note, row.age_seconds) == ("", 3.0)


def test_a_restarted_rank_begins_anew(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path)
    reader = Reader([str(tmp_path)])
    writer.open("train epoch 0")
    writer.tick(5, 100)
    writer.save()
    writer.close("train epoch 0")
    writer.save()
    (row,) = rows_of(reader.read().runs[-1], writer.time)
    assert row.span == "between spans"
    writer.time += 60
    writer.line("begin", v=1, rank=0, world=1, host="node0", pid=7)
    writer.save()
    (row,) = rows_of(reader.read().runs[-1], writer.time)
    assert (row.span, row.age_seconds) == ("before the first span", 0.0)
    writer.open("train epoch 0")
    writer.tick(5, 10)
    writer.save()
    (row,) = rows_of(reader.read().runs[-1], writer.time)
    assert (batches(row), row.batches_per_second) == ((10, 10), 2.0)


def test_the_work_of_a_look_grows_as_the_ranks_do(tmp_path: Path) -> None:
    """Sixteen times as many ranks take sixteen times as many calls of functions, and no more rows."""
    calls: dict[int, int] = {}
    for ranks in (256, 4_096):
        train(tmp_path / str(ranks), ranks=ranks, ticks=2, loader={7: 4.0})
        (run,) = Reader([str(tmp_path / str(ranks))]).read().runs
        profile = cProfile.Profile()
        first, others = profile.runcall(rows_of, run, BEGAN + 15)
        assert (first.ranks, len(others.ranks)) == ((7,), ranks - 1)
        calls[ranks] = sum(entry.callcount for entry in profile.getstats())
    assert calls[4_096] < 17 * calls[256]
