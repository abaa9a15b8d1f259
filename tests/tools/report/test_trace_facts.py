"""What follows from a trace: ranks that behaved alike, who is slow, counts, and where they part."""

from __future__ import annotations

import doctest
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from countoff.report import facts, ranks, words
from countoff.report.facts import summary
from countoff.report.facts.classes import classes_table
from countoff.report.facts.counts import counts_table
from countoff.report.facts.paces import slow_table
from countoff.report.facts.parts import Lines, Table
from countoff.report.facts.plans import plans_table
from countoff.report.facts.rates import rate_lines_of, rates_table
from countoff.report.model import Run
from countoff.report.reader import Reader, read
from tests import example_traces
from tests.example_traces import BEGAN, RankWriter


def run_of(directory: Path) -> Run:
    return read([str(directory)]).runs[-1]


def span_of(directory: Path, batches: dict[int, int | None], *, steps: dict[int, int] | None = None) -> Run:
    """One train epoch in which each rank closes after so many batches; None: it reads 99 and does not close."""
    for rank, number in batches.items():
        writer = RankWriter(directory, rank, len(batches))
        writer.open("train epoch 0")
        writer.tick(5, 99 if number is None else number, steps=(steps or {}).get(rank, 9))
        if number is not None:
            writer.close("train epoch 0")
        writer.save()
    return run_of(directory)


def test_ranks_that_behaved_alike_are_one_class(tmp_path: Path) -> None:
    example_traces.healthy(tmp_path, ranks=8)
    (only,) = facts.classes_of(run_of(tmp_path))
    assert (only.ranks, only.reasons, only.hosts) == (tuple(range(8)), (), ("node0",))


def test_the_rank_that_the_verdict_names_comes_first(tmp_path: Path) -> None:
    example_traces.uneven(tmp_path)
    first, rest = facts.classes_of(run_of(tmp_path))
    assert (first.ranks, first.reasons) == ((2,), ("named by the verdict", "other counts"))
    assert (rest.ranks, rest.reasons) == ((0, 1, 3, 4, 5, 6, 7), ())


@pytest.mark.parametrize(("standing", "marked"), [("ran out first", [3]), ("differ", [1, 3]), ("out of step", [1, 3])])
def test_only_the_ranks_that_the_message_names_are_marked(tmp_path: Path, standing: str, marked: list[int]) -> None:
    """The rank that has shown that another one ran out of data is not at fault."""
    for rank in range(4):
        writer = RankWriter(tmp_path, rank, 4)
        writer.open("train epoch 0")
        found = example_traces.verdict(ranks=[3, 1], standing=standing, world_size=4, rows=[])
        writer.line("verdict", verdict=found)
        writer.line("end", how="verdict")
        writer.save()
    found = facts.classes_of(run_of(tmp_path))
    assert [rank for each in found for rank in each.ranks if each.reasons == ("named by the verdict",)] == marked
    assert list(found[0].ranks) == marked


def test_a_rank_with_a_slow_loader_is_odd_and_named_in_each_epoch(tmp_path: Path) -> None:
    example_traces.healthy(tmp_path, ranks=8, loader={2: 0.4}, hosts=2)
    run = run_of(tmp_path)
    first, _ = facts.classes_of(run)
    assert (first.ranks, first.reasons) == ((2,), ("slow loader",))
    train = [pace for pace in facts.paces_of(run) if not pace.is_evaluation]
    assert [(pace.waited, pace.slow, pace.seconds) for pace in train] == [(2, (2,), 70)] * 3
    assert train[0].waited_seconds == pytest.approx(24)
    assert train[0].median_seconds == pytest.approx(1.2)
    assert {pace.measured for pace in train} == {True}
    assert {pace.measured for pace in facts.paces_of(run) if pace.is_evaluation} == {False}
    slow, fast = facts.hosts_of(run, facts.paces_of(run))
    assert (slow.host, fast.host, slow.loader_seconds) == ("node0", "node1", pytest.approx((72 + 3 * 3.6) / 4))


def test_what_was_waited_in_spans_that_memory_has_no_room_for_counts_too(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path)
    for epoch in range(300):
        writer.open(f"train epoch {epoch}")
        writer.tick(1, 5, loader=0.5)
        writer.open("validation")
        writer.tick(1, 5, loader=0.25)
        writer.close("validation")
        writer.loader = 0.5
        writer.close(f"train epoch {epoch}")
    writer.save()
    trace = Reader([str(tmp_path)], most_records=100).read()
    run = trace.runs[-1]
    assert run.fits[0].dropped_spans > 400
    written = facts.document(trace)["runs"][0]
    (host,) = written["hosts"]
    assert [each["loader_seconds"] for each in (written["ranks"][0], host)] == [225, 225]
    assert host["loader_share"] == pytest.approx(225 / 600)
    (row,) = classes_table(run, facts.classes_of(run)).rows
    assert "3 min 45 s" in [cell.text for cell in row]


def test_ranks_that_wait_a_little_longer_are_not_slow(tmp_path: Path) -> None:
    example_traces.healthy(tmp_path, ranks=8, loader={2: 0.028})
    run = run_of(tmp_path)
    assert len(facts.classes_of(run)) == 1
    assert not any(pace.slow for pace in facts.paces_of(run))


def test_a_killed_rank_and_one_without_a_trace_are_classes_of_their_own(tmp_path: Path) -> None:
    example_traces.healthy(tmp_path, ranks=5, epochs=1)
    (tmp_path / "rank-00001.jsonl").unlink()
    lines = (tmp_path / "rank-00003.jsonl").read_text().splitlines()
    (tmp_path / "rank-00003.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    found = facts.classes_of(run_of(tmp_path))
    assert [(each.ranks, each.reasons) for each in found] == [
        ((1,), ("no trace",)),
        ((3,), ("no end",)),
        ((0, 2, 4), ()),
    ]


def test_the_last_rank_at_the_end_of_a_span_is_named(tmp_path: Path) -> None:
    for rank, late in enumerate([0.0, 2.5, 0.5]):
        writer = RankWriter(tmp_path, rank, 3)
        writer.open("train epoch 0")
        writer.tick(5 + late, 10)
        writer.close("train epoch 0")
        writer.save()
    (pace,) = facts.paces_of(run_of(tmp_path))
    assert (pace.last, pace.spread_seconds) == (1, 2.5)


@pytest.mark.parametrize(
    ("late", "error", "hosts", "last"),
    [(0.008, 0.0, 1, None), (0.02, 0.0, 1, 1), (0.3, 0.4, 2, None), (0.5, 0.4, 2, 1), (0.3, 0.4, 1, 1)],
)
def test_nobody_is_last_by_less_than_noise_and_clocks_explain(
    tmp_path: Path, late: float, error: float, hosts: int, last: int | None
) -> None:
    for rank in range(2):
        writer = RankWriter(tmp_path, rank, 2, begin={"host": f"node{rank % hosts}"})
        if rank and error:
            writer.line("clock", ahead=0.0, error=error)
        writer.open("train epoch 0")
        writer.tick(5 + late * rank, 10)
        writer.close("train epoch 0")
        writer.save()
    run = run_of(tmp_path)
    (pace,) = facts.paces_of(run)
    assert (pace.last, pace.spread_seconds) == (last, pytest.approx(late, abs=0.001))
    assert sum(host.last for host in facts.hosts_of(run, [pace])) == (last is not None)


def test_a_long_pause_in_a_ranks_own_code_is_told_of_the_span_it_was_in(tmp_path: Path) -> None:
    for rank in range(4):
        writer = RankWriter(tmp_path, rank, 4)
        writer.open("train epoch 0")
        writer.tick(5, 10)
        writer.line("pause", s=40.0, **{"in": "code" if rank == 2 else "collective"}, at=["job.py:25 in nap"])
        writer.tick(45, 10)
        writer.line("pause", s=1.5, **{"in": "loader"}, at=["job.py:9 in read"])
        writer.tick(5, 10)
        writer.open("validation", eval=True)
        writer.line("pause", s=3.0, **{"in": "code"}, at=["job.py:30 in score"])
        writer.tick(5, 10)
        writer.close("validation")
        writer.close("train epoch 0")
        writer.save()
    train, evaluation = facts.paces_of(run_of(tmp_path))
    assert (train.paused, train.pause_seconds, train.pause_is_outlier) == (2, 40, True)
    assert (evaluation.paused, evaluation.pause_seconds, evaluation.pause_is_outlier) == (0, 3, False)


def test_counts_part_where_one_rank_has_closed_with_fewer(tmp_path: Path) -> None:
    run = span_of(tmp_path, {0: 90, 1: None, 2: None})
    (divergence,) = facts.first_divergences(run)
    assert (divergence.time, divergence.groups) == (BEGAN + 5, ((90, (0,)), (99, (1, 2))))
    assert (
        divergence.sentence
        == "the ranks' counts begin to differ in train epoch 0: rank 0: 90 batches; ranks 1, 2: 99 batches"
    )


def _out_of_data(directory: Path, why: str) -> Run:
    """Rank 1 has closed after ten batches; rank 0 has fetched one more when the verdict comes."""
    rows = [{"rank": rank, "where": "train epoch 0", "batches": 10, "fetched": 11 - rank} for rank in range(2)]
    for rank in range(2):
        writer = RankWriter(directory, rank, 2)
        writer.open("train epoch 0")
        writer.tick(5, 10 if rank else 8)
        if rank:
            writer.close("train epoch 0", why)
        writer.line("verdict", verdict=example_traces.verdict(ranks=[1], rows=rows))
        writer.save()
    return run_of(directory)


def test_a_batch_that_is_only_fetched_parts_counts_where_data_ran_out(tmp_path: Path) -> None:
    run = _out_of_data(tmp_path, "exhausted")
    (divergence,) = facts.first_divergences(run)
    assert divergence.groups == ((10, (1,)), (11, (0,)))
    assert divergence.sentence.endswith(": rank 1: 10 batches; rank 0: 11 fetched batches")
    (row,) = facts.counts_of(run).rows
    assert sorted((cell.batches, cell.fetched or 0) for cell in row.cells if cell) == [(10, 0), (10, 11)]
    assert row.outlier == (True, True)


def test_a_batch_that_is_fetched_beyond_a_limit_does_not_part_counts(tmp_path: Path) -> None:
    assert facts.first_divergences(_out_of_data(tmp_path, "stopped")) == []


def test_a_span_that_nobody_has_closed_took_as_long_as_is_known_at_least(tmp_path: Path) -> None:
    for rank, seconds in enumerate([0, 3]):
        writer = RankWriter(tmp_path, rank, 2)
        writer.open("train epoch 0")
        writer.time += seconds
        if seconds:
            writer.line("end", how="closed")
        writer.save()
    (pace,) = facts.paces_of(run_of(tmp_path))
    assert (pace.seconds, pace.closed) == (3, False)


def test_counts_part_at_a_verdict_in_what_ranks_had_fetched(tmp_path: Path) -> None:
    """A framework that fetches ahead gets the verdict while every rank is still in its last common batch."""
    common = {"where": "train epoch 0", "batches": 18, "steps": 17}
    rows = [{"rank": 2, "fetched": 18, **common}, {"rank": "0, 1, 3–7", "fetched": 19, "ranks": 7, **common}]
    for rank in range(8):
        writer = RankWriter(tmp_path, rank, 8)
        writer.open("train epoch 0")
        writer.tick(5, 18, steps=17)
        writer.time += 1
        writer.line("verdict", verdict=example_traces.verdict(rows=rows, time=BEGAN + 5.5))
        writer.save()
    (divergence,) = facts.first_divergences(run_of(tmp_path))
    assert (divergence.time, divergence.groups) == (BEGAN + 5.5, ((18, (2,)), (19, (0, 1, 3, 4, 5, 6, 7))))
    assert divergence.sentence.endswith(": rank 2: 18 fetched batches; ranks 0, 1, 3–7: 19 fetched batches")
    table = facts.counts_of(run_of(tmp_path))
    assert table.classes == ((2,), (0, 1, 3, 4, 5, 6, 7))
    assert [cell and (cell.batches, cell.fetched) for cell in table.rows[0].cells] == [(18, 18), (18, 19)]
    assert table.rows[0].outlier == (True, False)
    assert cells_of(counts_table(table))[1][1:] == ["≠ 18 batches, 17 steps", "18 batches, 17 steps, 19 fetched"]


def test_counts_of_a_span_that_nobody_has_closed_do_not_part(tmp_path: Path) -> None:
    assert facts.first_divergences(span_of(tmp_path, {0: None, 1: None})) == []


def test_a_rank_that_is_still_behind_does_not_part(tmp_path: Path) -> None:
    assert facts.first_divergences(span_of(tmp_path, {0: 100, 1: 100, 2: None})) == []


def test_steps_part_where_batches_do_not(tmp_path: Path) -> None:
    (divergence,) = facts.first_divergences(span_of(tmp_path, {0: 10, 1: 10, 2: 10}, steps={1: 8}))
    assert (divergence.noun, divergence.groups) == ("step", ((8, (1,)), (9, (0, 2))))


def exits_of(directory: Path, whys: dict[int, tuple[int, str]]) -> Run:
    """One train epoch that each rank closes after so many batches, for this reason; none: it does not close it."""
    for rank, (batches, why) in whys.items():
        writer = RankWriter(directory, rank, len(whys))
        writer.open("train epoch 0")
        writer.tick(5, batches, steps=batches)
        if why:
            writer.close("train epoch 0", why)
        writer.save()
    return run_of(directory)


def test_ranks_that_a_signal_has_stopped_do_not_part(tmp_path: Path) -> None:
    run = exits_of(tmp_path, {0: (500, "exited"), 1: (500, "exited"), 2: (500, "exited"), 3: (501, "exited")})
    assert facts.first_divergences(run) == []
    assert not any(each.reasons for each in facts.classes_of(run))
    assert facts.counts_of(run).rows[0].outlier == (False, False)


def test_a_rank_that_exits_parts_from_one_that_does_not(tmp_path: Path) -> None:
    whys = {0: (90, "exhausted"), 1: (95, "exited"), 2: (96, "exited"), 3: (96, "exited")}
    run = exits_of(tmp_path / "a", whys)
    (divergence,) = facts.first_divergences(run)
    assert divergence.groups == ((90, (0,)), (95, (1,)), (96, (2, 3)))
    assert facts.classes_of(run)[0].ranks == (0,)
    assert [each.reasons for each in facts.classes_of(run)] == [("other counts",), (), ()]
    run = exits_of(tmp_path / "b", {0: (500, "exited"), 1: (501, "exited"), 2: (520, ""), 3: (500, "exited")})
    assert [divergence.groups[0] for divergence in facts.first_divergences(run)] == [(500, (0, 3))]
    assert [each.ranks for each in facts.classes_of(run) if each.reasons] == [(2,)]


def test_odd_cells_are_marked_and_their_column_comes_first(tmp_path: Path) -> None:
    table = facts.counts_of(span_of(tmp_path, {0: 10, 1: 10, 2: 9, 3: 10}))
    assert table.classes == ((2,), (0, 1, 3))
    (row,) = table.rows
    assert [cell and cell.batches for cell in row.cells] == [9, 10]
    assert row.outlier == (True, False)


def test_ranks_that_closed_with_fewer_than_others_go_on_with_are_odd(tmp_path: Path) -> None:
    table = facts.counts_of(span_of(tmp_path, {0: 80, 1: 80, 2: 90, 3: None, 4: None, 5: None, 6: None}))
    outlier = [ranks for ranks, outlier in zip(table.classes, table.rows[0].outlier, strict=True) if outlier]
    assert outlier == [(0, 1), (2,)]


def test_where_two_sides_differ_both_are_marked(tmp_path: Path) -> None:
    assert facts.counts_of(span_of(tmp_path, {0: 10, 1: 11})).rows[0].outlier == (True, True)


def test_a_span_that_only_some_ranks_have_is_not_odd(tmp_path: Path) -> None:
    example_traces.healthy(tmp_path, ranks=3, epochs=1, evaluations=False)
    writer = RankWriter(tmp_path, 0, begin=None)
    writer.time += 100
    writer.open("evaluation", eval=True)
    writer.close("evaluation")
    writer.save()
    table = facts.counts_of(run_of(tmp_path))
    assert table.classes == ((0,), (1, 2))
    assert table.rows[1].cells[1] is None
    assert not any(table.rows[1].outlier)


def different_plans(directory: Path, **begin: Any) -> Run:
    """A job whose rank 1 has other lengths than rank 0 and rank 2; rank 3 does not know its own."""
    for rank, batches in enumerate((25, 24, 25, None)):
        plan = {"batch_size": 8, "max_epochs": 3, **({} if batches is None else {"batches_per_epoch": batches})}
        writer = RankWriter(directory, rank, 4, begin={"plan": plan, **begin})
        if batches is not None:
            writer.line("totals", true={"total_steps": 3 * batches}, reported={"total_steps": 75})
        writer.save()
    return read([str(directory)]).runs[0]


def test_values_of_the_plan_in_which_ranks_differ_are_told_with_the_totals_of_each_class(tmp_path: Path) -> None:
    run = different_plans(tmp_path)
    assert cells_of(plans_table(facts.plan_differences_of(run)))[1:] == [
        ["batches_per_epoch", "rank 1", "≠ 24"],
        ["batches_per_epoch", "ranks 0, 2", "≠ 25"],
    ]
    assert [(each.ranks, each.rows) for each in facts.totals_of(run)] == [
        ((1,), [("total_steps", 72.0, 75.0)]),
        ((0, 2), [("total_steps", 75.0, 75.0)]),
    ]


def test_a_total_that_has_turned_out_to_be_wrong_is_told_no_more(tmp_path: Path) -> None:
    """Each line has all totals that are known then."""
    writer = RankWriter(tmp_path, 0, 1)
    writer.line("totals", true={"total_steps": 75, "samples_per_epoch": 1600}, reported={})
    writer.line("totals", true={"total_steps": 75}, reported={})
    writer.save()
    assert read([str(tmp_path)]).runs[0].fits[0].true_totals == {"total_steps": 75.0}


def test_epochs_that_have_read_each_sample_once_are_told(tmp_path: Path) -> None:
    """How many of the closed ones, with the totals that are measured by that where it is so in all of them."""
    for epochs in ((0, 1, 2), (0, 2)):
        folder = tmp_path / str(len(epochs))
        first = example_traces.healthy(folder)[0]
        first.line("totals", true={"samples_per_epoch": 62, "samples_repeated": 1, "total_steps": 9}, reported={})
        for epoch in (*epochs, 7):
            first.line("once", span=f"train epoch {epoch}", rows=61, repeated=1)
        first.save()
        trace = read([str(folder)])
        found = {fact.key: fact for fact in facts.facts_of(trace, trace.runs[0])}
        whole = len(epochs) == 3
        named = "" if whole else ": train epoch 0, train epoch 2"
        said = f"each of 61 samples was read once and 1 once more, as planned, in {len(epochs)} of 3 epochs (measured)"
        (lines,) = found["read_once"].parts
        assert isinstance(lines, Lines)
        assert lines.lines == [f"E{said[1:]}{named}."]
        assert f"{said}{named}" in facts.headline(trace)
        (totals,) = found["totals"].value
        assert totals["measured"] == (["samples_per_epoch", "samples_repeated"] if whole else [])
        assert found["read_once"].value[0]["epochs"] == tuple(f"train epoch {epoch}" for epoch in epochs)


def test_lengths_may_differ_where_ranks_are_made_even(tmp_path: Path) -> None:
    assert facts.plan_differences_of(different_plans(tmp_path, settings={"uneven_train": "stop"})) == []


def test_a_limit_that_only_one_rank_has_is_a_difference(tmp_path: Path) -> None:
    for rank in range(2):
        begin = {"plan": {"max_steps": 9}, "settings": {"weights_every": 2}} if rank else {"plan": {"dp_rank": 0}}
        RankWriter(tmp_path, rank, 2, begin=begin).save()
    rows = facts.plan_differences_of(read([str(tmp_path)]).runs[0])
    assert [(row.name, row.groups) for row in rows] == [
        ("max_steps", (("none", (0,)), ("9", (1,)))),
        ("weights_every", (("the default", (0,)), ("2", (1,)))),
    ]


def test_stacks_are_grouped_and_the_rare_one_comes_first(tmp_path: Path) -> None:
    example_traces.uneven(tmp_path)
    found = facts.stacks_of(run_of(tmp_path))
    assert [(ranks, state) for ranks, state, _ in found] == [
        ((2,), "code"),
        ((0, 1, 3, 4, 5, 6, 7), "collective"),
    ]


def test_the_headline_is_the_verdict_or_what_was_trained_without_one(tmp_path: Path) -> None:
    example_traces.uneven(tmp_path / "a")
    example_traces.healthy(tmp_path / "b", ranks=8, ticks=280)
    assert facts.headline(read([str(tmp_path / "a")])).startswith("UnevenBatches: rank 2 ran out of data")
    assert facts.headline(read([str(tmp_path / "b")])) == "finished: 3 epochs, 8 ranks, 1 h 21 min"


@pytest.mark.parametrize(
    ("hows", "told"),
    [
        (["finished", "finished"], ""),
        (["failed: RuntimeError: CUDA out of memory"], "; rank 0 failed: RuntimeError: CUDA out of memory"),
        (["finished", None], "; 1 rank has no end (rank 1): killed, or still running"),
        ([None, None, "failed"], "; rank 2 failed; 2 ranks have no end (ranks 0, 1): killed, or still running"),
        (["signal: SIGTERM", None, "signal: SIGTERM"],
         "; ranks 0, 2 were ended by SIGTERM; 1 rank has no end (rank 1): killed, or still running"),
        ([None], "; 1 rank has no end: killed, or still running"),
        (["failed: a", "failed: b", "failed: a", "failed: c"],
         "; ranks 0, 2 failed: a; rank 1 failed: b; 1 other rank failed"),
        (["closed", "finished"], "; rank 0 left before the end"),
        (["failed: " + "x" * 900], "; rank 0 failed: " + "x" * 200 + "…"),
    ],
)  # fmt: skip
def test_the_headline_names_who_did_not_finish(tmp_path: Path, hows: list[str | None], told: str) -> None:
    for rank, how in enumerate(hows):
        writer = RankWriter(tmp_path, rank, len(hows))
        if how:
            writer.line("end", how=how.partition(": ")[0], what=how.partition(": ")[2])
        writer.save()
    trace = read([str(tmp_path)])
    what = "no verdict" if told else "finished"
    assert facts.headline(trace) == f"{what}: 0 epochs, {len(hows)} rank{'s' * (len(hows) > 1)}, 0 s{told}"
    assert facts.is_healthy(trace) == (not told)


@pytest.mark.parametrize("apart", [2.0, 60.0])
def test_ranks_that_fell_silent_together_were_killed_together(tmp_path: Path, apart: float) -> None:
    """Where a container has no memory left, its kernel kills all ranks, and none can say so."""
    for rank in range(2):
        writer = RankWriter(tmp_path, rank, 2)
        writer.open("train epoch 0")
        writer.tick(5.0 + apart * rank, 10)
        writer.save()
    trace = read([str(tmp_path)])
    said = facts.headline(trace)
    assert "; 2 ranks have no end: killed, or still running" in said
    assert ("; all ranks wrote their last lines within 2 s, and none wrote why: if they run no more" in said) == (
        apart == 2.0
    )


def test_a_heading_begins_with_a_capital_unless_with_a_name_of_code(tmp_path: Path) -> None:
    example_traces.different_plans(tmp_path / "a")
    example_traces.uneven(tmp_path / "b")
    headings = [facts.heading(read([str(tmp_path / name)])) for name in "ab"]
    assert [heading.split(" ")[0] for heading in headings] == ["batch_size", "Rank"]


def test_at_least_so_many_is_true_of_each_rank_of_a_class(tmp_path: Path) -> None:
    """Ranks that have not closed the span share a column, though they have counted differently."""
    for rank in range(3):
        writer = RankWriter(tmp_path, rank, 3)
        writer.open("train epoch 0")
        writer.tick(5, 82 - rank)
        writer.save()
    table = facts.counts_of(run_of(tmp_path))
    assert table.classes == ((0, 1, 2),)
    assert [cell and (cell.batches, cell.closed) for cell in table.rows[0].cells] == [(80, False)]


def test_counts_are_those_of_the_verdict_where_it_has_later_ones(tmp_path: Path) -> None:
    """A killed rank is not in its table, and has those of its last tick."""
    example_traces.killed(tmp_path)
    table = facts.counts_of(run_of(tmp_path))
    assert table.classes == ((0, 1, 3), (2,))
    assert [cell and (cell.batches, cell.closed) for cell in table.rows[0].cells] == [(84, False), (80, False)]


def test_a_span_of_which_only_the_begin_is_known_says_nothing(tmp_path: Path) -> None:
    """All ranks were killed before the first tick of their second epoch."""
    for rank in range(2):
        writer = RankWriter(tmp_path, rank, 2)
        writer.open("train epoch 0")
        writer.tick(5, 20, steps=20)
        writer.close("train epoch 0")
        writer.open("train epoch 1")
        writer.save()
    table = facts.counts_of(run_of(tmp_path))
    assert [cell and cell.batches for row in table.rows for cell in row.cells] == [20, None]
    assert [str(row.key) for row in table.known_rows] == ["train epoch 0"]


def test_counts_after_a_verdict_that_only_warned_are_those_of_the_last_tick(tmp_path: Path) -> None:
    rows = [{"rank": "0, 1", "where": "train epoch 0", "batches": 19, "fetched": 20, "steps": 18, "ranks": 2}]
    for rank in range(2):
        writer = RankWriter(tmp_path, rank, 2)
        writer.open("train epoch 0")
        writer.line("verdict", verdict=example_traces.verdict(rows=rows))
        writer.tick(5, 30 + rank, steps=30)
        writer.save()
    table = facts.counts_of(run_of(tmp_path))
    assert table.classes == ((0, 1),)
    assert [cell and (cell.batches, cell.fetched) for cell in table.rows[0].cells] == [(30, None)]


def test_a_verdict_or_a_missing_rank_is_not_healthy(tmp_path: Path) -> None:
    example_traces.uneven(tmp_path / "a")
    example_traces.healthy(tmp_path / "b", ranks=3)
    assert facts.is_healthy(read([str(tmp_path / "b")]))
    (tmp_path / "b" / "rank-00001.jsonl").unlink()
    assert not facts.is_healthy(read([str(tmp_path / "a")]))
    assert not facts.is_healthy(read([str(tmp_path / "b")]))


def test_a_rank_that_was_killed_long_before_the_others_is_odd(tmp_path: Path) -> None:
    for rank, ticks in enumerate([20, 20, 16, 19]):
        writer = RankWriter(tmp_path, rank, 4)
        writer.open("train epoch 0")
        for _ in range(ticks):
            writer.tick(5, 10)
        writer.save()
    found = facts.classes_of(run_of(tmp_path))
    assert [(each.ranks, each.reasons) for each in found] == [((2,), ("silent before the others",)), ((0, 1, 3), ())]


def test_a_rank_that_is_in_no_span_is_not_silent(tmp_path: Path) -> None:
    for rank in range(2):
        writer = RankWriter(tmp_path, rank, 2)
        if rank == 0:
            writer.open("evaluation", eval=True)
            writer.tick(60, 10)
        writer.save()
    assert not any(each.reasons for each in facts.classes_of(run_of(tmp_path)))


def test_the_title_tells_whether_all_finished_and_who_was_slow(tmp_path: Path) -> None:
    example_traces.healthy(tmp_path / "a", ranks=8)
    example_traces.healthy(tmp_path / "b", ranks=8, loader={2: 0.5}, evaluations=False)
    example_traces.stalled(tmp_path / "c")
    finished = "finished: 3 epochs, 8 ranks, 3 min"
    assert facts.headline(read([str(tmp_path / "a")])) == f"{finished} 30 s"
    assert facts.headline(read([str(tmp_path / "b")])) == f"{finished}; rank 2 waited 50 % of the time for its loader"
    assert facts.heading(read([str(tmp_path / "b")])).startswith("Finished: 3 epochs")
    assert facts.headline(read([str(tmp_path / "c")])) == (
        "stalled: no rank has made progress for 60 s; rank 3 is at data.py:9 in __getitem__, in its own code; "
        "until then a part of one epoch, 4 ranks, 2 min"
    )


@pytest.mark.parametrize(
    ("sentence", "why", "told"),
    [
        ("no rank moves; rank 1 is in its code.", "rank 1 is at a.py:4 in f.",
         "no rank moves; rank 1 is at a.py:4 in f, in its own code"),
        ("no rank moves; ranks 0, 1 are in its loader or in its code.", "ranks 0, 1 are at a.py:4 in f. Collectives",
         "no rank moves; ranks 0, 1 are at a.py:4 in f, in their loader or in their own code"),
        ("no rank moves; rank 1 is in a collective; rank 1 is an epoch ahead of the others, in train epoch 4.",
         "rank 1 is at a.py:4 in f.",
         "no rank moves; rank 1 is at a.py:4 in f, in a collective; rank 1 is an epoch ahead of the others, in train "
         "epoch 4"),
        ("no rank moves; ranks 1, 2 are in its code.", "rank 1 is at a.py:4 in f; rank 2 is at b.py:5 in g.",
         "no rank moves; ranks 1, 2 are in its code; rank 1 is at a.py:4 in f"),
        ("no rank moves; rank 1 is in its code.", "no rank is in a line of the user's own.",
         "no rank moves; rank 1 is in its code; no rank is in a line of the user's own"),
        ("no rank moves.", "", "no rank moves"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["warning", "verdict"])
def test_the_headline_of_a_stall_says_each_rank_once(
    tmp_path: Path, kind: str, sentence: str, why: str, told: str
) -> None:
    writer = RankWriter(tmp_path)
    stall = example_traces.verdict("Stalled", [1], sentence=sentence, why=why, rows=[], time=BEGAN)
    writer.line(kind, verdict=stall)
    writer.save()
    trace = read([str(tmp_path)])
    if kind == "warning":
        assert facts.headline(trace) == f"stalled: {told}; until then 0 epochs, 1 rank, 0 s"
    else:
        assert (facts.headline(trace), facts.heading(trace)) == (f"Stalled: {told}", f"N{told[1:]}")


@pytest.mark.parametrize("kind", ["warning", "verdict"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_rank_for_which_the_others_wait_comes_first(tmp_path: Path, kind: str, ranks: int) -> None:
    """Also of two ranks, where no place is that of most."""
    for rank in range(ranks):
        writer = RankWriter(tmp_path, rank, ranks)
        writer.open("train epoch 0")
        writer.line(kind, verdict=example_traces.verdict("Stalled", [1], rows=[], world_size=ranks))
        writer.line("stacks", state="code" if rank == 1 else "collective", frames=["a.py:1 in f"])
        writer.save()
    first, rest = facts.classes_of(run_of(tmp_path))
    assert first.ranks == (1,)
    assert first.reasons[0] == "the others wait for it"
    assert rest.reasons == ()


def test_what_even_ranks_have_left_is_no_difference(tmp_path: Path) -> None:
    """With `uneven_train`, ranks count alike by leaving batches."""
    for rank in range(4):
        writer = RankWriter(tmp_path, rank, 4)
        writer.open("train epoch 0")
        writer.tick(5, 10, steps=10)
        writer.close("train epoch 0", unused=0 if rank == 3 else 2)
        writer.line("end", how="finished")
        writer.save()
    run = run_of(tmp_path)
    assert facts.counts_of(run).rows[0].outlier == (False, False)
    assert not any(each.reasons for each in facts.classes_of(run))


@pytest.mark.parametrize("ended", [False, True])
def test_a_job_that_stands_still_writes_ticks_and_is_stalled(tmp_path: Path, ended: bool) -> None:
    """Also if the launcher ends it: the stall is the worse of the two."""
    for rank in range(2):
        writer = RankWriter(tmp_path, rank, 2)
        writer.open("train epoch 0")
        writer.tick(5, 10, steps=10)
        writer.tick(60, 0)
        if rank == 0:
            writer.line("warning", verdict=example_traces.verdict("Stalled", [1], time=writer.time, rows=[]))
        writer.tick(5, 0)
        if ended:
            writer.line("end", how="signal", what="SIGTERM")
        writer.save()
    assert facts.stall_of(read([str(tmp_path)])) is not None
    assert facts.headline(read([str(tmp_path)])).startswith("stalled: ")


def test_a_stall_that_is_over_is_no_headline(tmp_path: Path) -> None:
    """The job went on after the warning; or a verdict came, or the ranks ended by themselves."""
    for name, after in (("on", "tick"), ("ended", "end")):
        for rank in range(2):
            writer = RankWriter(tmp_path / name, rank, 2)
            writer.open("train epoch 0")
            writer.tick(5, 10)
            writer.time += 60
            if rank == 0:
                writer.line("warning", verdict=example_traces.verdict("Stalled", [1], time=writer.time, rows=[]))
            if after == "tick":
                writer.tick(5, 10)
            else:
                writer.line("end", how="closed")
            writer.save()
        assert facts.stall_of(read([str(tmp_path / name)])) is None
        assert "stalled" not in facts.headline(read([str(tmp_path / name)]))


def test_the_table_of_who_is_slow_marks_what_is_worth_a_look(tmp_path: Path) -> None:
    example_traces.healthy(tmp_path, ranks=4, epochs=1, loader={2: 0.6})
    table = slow_table(facts.paces_of(run_of(tmp_path)))
    train, evaluation = ([cell.text for cell in row] for row in table.rows)
    assert [column.name for column in table.columns][4:6] == ["waited longest for its loader", "it waited"]
    assert (train[0], train[4:7]) == ("train epoch 0", ["rank 2", "36 s ≠", "1.2 s"])
    assert [cell.text for row in table.rows for cell in row if cell.is_highlighted] == ["36 s ≠"]
    assert evaluation[4:7] == ["–", "–", "–"]
    assert {cell.hint for cell in table.rows[1][4:7]} == {"not measured"}


def cells_of(table: Table) -> list[list[str]]:
    return [[column.name for column in table.columns], *([cell.text for cell in row] for row in table.rows)]


def test_different_learning_rates_are_told_of_each_group_of_ranks(tmp_path: Path) -> None:
    example_traces.different_rates(tmp_path)
    run = run_of(tmp_path)
    assert cells_of(rates_table(run)) == [
        ["ranks", "step 60, start of train epoch 1", "step 180, end of train epoch 2"],
        ["rank 3", "≠ 0.0375", "≠ 0.025"],
        ["ranks 0–2", "0.075", "0.05"],
    ]
    assert [(line.ranks, line.rates[0], line.rates[-1]) for line in rate_lines_of(run)] == [
        ((3,), 0.1, 0.025),
        ((0, 1, 2), 0.1, 0.05),
    ]
    assert facts.classes_of(run)[0].reasons == ("other learning rates",)


def test_equal_learning_rates_have_one_line_though_ticks_are_at_other_steps(tmp_path: Path) -> None:
    for rank in range(3):
        writer = RankWriter(tmp_path, rank, 3)
        writer.open("train epoch 0", s=0, lr=[0.1])
        writer.tick(5, 40 + rank, steps=40 + rank, lr=[0.1 - rank / 1000])
        writer.tick(5, 60 - rank, steps=60 - rank, lr=[0.05])
        writer.close("train epoch 0")
        writer.save()
    run = run_of(tmp_path)
    assert rates_table(run).rows == []
    assert [line.ranks for line in rate_lines_of(run)] == [()]


def test_stages_of_a_pipeline_may_have_other_parameter_groups(tmp_path: Path) -> None:
    for rank in range(2):
        writer = RankWriter(tmp_path, rank, 2)
        writer.open("train epoch 0", s=0, lr=[0.1, 0.2][: 1 + rank])
        writer.save()
    assert rates_table(run_of(tmp_path)).rows == []


@pytest.mark.parametrize("kind", ["verdict", "warning"])
def test_the_learning_rates_of_a_mismatch_within_an_epoch_are_those_of_its_table(tmp_path: Path, kind: str) -> None:
    rows = [{"rank": "1", "rate": "3e-4"}, {"rank": "0, 2–3", "rate": "3.17e-4"}, {"rank": "4", "rate": "–"}]
    for rank in range(5):
        writer = RankWriter(tmp_path, rank, 5)
        writer.open("train epoch 0", s=0, lr=[0.001])
        writer.line(kind, verdict=example_traces.verdict("LearningRateMismatch", [1], rows=rows, world_size=5))
        writer.save()
    assert cells_of(rates_table(run_of(tmp_path))) == [
        ["ranks", f"at the {kind}"],
        ["rank 1", "≠ 3e-4"],
        ["ranks 0, 2, 3", "3.17e-4"],
    ]


def test_a_resume_has_its_own_lines(tmp_path: Path) -> None:
    """Its steps go on from those of the checkpoint."""
    for rank in range(2):
        for steps, rate in ((0, 0.1), (10, 0.1 - 0.05 * rank)):
            writer = RankWriter(tmp_path, rank, 2, begin=None)
            writer.time += 60 * steps
            first = {"rank": rank, "world": 2, "host": "node0", "pid": 1 + steps, "before": steps}
            writer.line("begin", v=1, **first, run={}, versions={}, settings={}, plan={})
            writer.open("train epoch 0", s=0, lr=[rate])
            writer.tick(5, 10, steps=10)
            writer.close("train epoch 0")
            writer.save()
    runs = read([str(tmp_path)]).runs
    assert [len(rates_table(run).rows) for run in runs] == [0, 2]
    assert [(line.ranks, line.steps, line.rates) for run in runs for line in rate_lines_of(run)] == [
        ((), [0, 10], [0.1, 0.1]),
        ((0,), [10, 20], [0.1, 0.1]),
        ((1,), [10, 20], [0.05, 0.05]),
    ]


def test_counts_at_a_stall_are_those_of_its_table(tmp_path: Path) -> None:
    """Only one rank has recorded it; the others' last ticks are older. A rank that has gone on since keeps its own."""
    rows = [
        {"rank": rank, "where": "train epoch 0", "batches": 12 + rank, "fetched": 12 + rank, "steps": 12}
        for rank in range(3)
    ]
    for rank in range(3):
        writer = RankWriter(tmp_path, rank, 3)
        writer.open("train epoch 0")
        writer.tick(5, 12)
        if rank == 0:
            writer.time += 60
            writer.line("warning", verdict=example_traces.verdict("Stalled", [0], rows=rows, time=writer.time))
        if rank == 2:
            writer.tick(5, 9)
        writer.save()
    table = facts.counts_of(run_of(tmp_path))
    cells = dict(zip(table.classes, table.rows[0].cells, strict=True))
    assert {ranks: cell and cell.batches for ranks, cell in cells.items()} == {(0,): 12, (1,): 13, (2,): 21}
    assert sorted(cells_of(counts_table(table))[1][1:]) == [
        "12 batches, 12 steps",
        "13 batches, 12 steps",
        "≥ 21 batches, 0 steps",
    ]


def test_an_epoch_that_only_one_rank_has_ended_is_a_part(tmp_path: Path) -> None:
    for rank in range(2):
        writer = RankWriter(tmp_path, rank, 2)
        writer.open("train epoch 0")
        writer.tick(5, 12 + rank)
        if rank == 0:
            writer.close("train epoch 0")
            writer.time += 60
            stall = example_traces.verdict("Stalled", [0], sentence="no rank moves.", why="", rows=[], time=writer.time)
            writer.line("warning", verdict=stall)
        writer.save()
    assert facts.headline(read([str(tmp_path)])).endswith("; until then a part of one epoch, 2 ranks, 1 min 5 s")


def test_an_epoch_that_nobody_has_ended_is_a_part(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path)
    writer.open("train epoch 0")
    writer.tick(5, 10)
    writer.close("train epoch 0")
    writer.open("train epoch 1")
    writer.save()
    assert facts.headline(read([str(tmp_path)])).startswith("no verdict: 1 epoch and a part of one, 1 rank, 5 s; ")


def test_each_fact_is_written_once_for_programs_and_people(tmp_path: Path) -> None:
    """A program and people read the same facts. Of batches that were left, there are no zeros."""
    example_traces.made_even(tmp_path)
    trace = read([str(tmp_path)])
    written = facts.facts_of(trace, trace.runs[0])
    assert list(facts.document(trace)["runs"][0]) == [fact.key for fact in written]
    titles = [part.title for fact in written for part in fact.parts if part.title]
    assert titles == ["Ranks that behaved alike", "Who is slow", "Counts", "Totals"]
    (counts,) = (part for fact in written for part in fact.parts if part.title == "Counts")
    assert isinstance(counts, Table)
    assert cells_of(counts)[1] == ["train epoch 0", "60 batches, 60 steps, 2 unused", "60 batches, 60 steps"]


@pytest.mark.parametrize("module", [ranks, summary, words], ids=lambda module: module.__name__)
def test_examples_in_docstrings_hold(module: ModuleType) -> None:
    assert doctest.testmod(module).attempted
    assert doctest.testmod(module).failed == 0
