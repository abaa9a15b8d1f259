"""Small parts of the benchmarks, run: eight simulated ranks on a real store, and two real ranks."""

import json

import pytest
import torch

from benchmarks import credits_scale, even_cost, gpu_cost, scale, simulated_traces
from benchmarks.results import report
from countoff.core.trace.format import LINES
from countoff.report import facts
from countoff.report.reader import read
from integration_tests.output import verdict_lines


def test_the_benchmark_counts_every_operation_of_the_store(tmp_path, capsys):
    """Eight simulated ranks pass their sync points on a real store, and each operation is in the table."""
    tables = report(scale.tables(quick=True, sizes=[8]), tmp_path / "found.json")
    costs = {row["what"]: row for row in tables[0].rows}
    assert costs["tick"]["operations"] == 8 + 1  # one compare-and-set of each rank; the first one deletes an old record
    assert costs["sync point, one rank first"]["operations"] == 1 + 2 * 8  # the writer's, then each rank's wait and get
    assert len(json.loads((tmp_path / "found.json").read_text())["tables"]) == len(tables)
    assert "| tick | 8 |" in capsys.readouterr().out


def test_credits_have_three_operations_per_block_and_leave_nothing():
    """Each rank counts itself once per block, and receives one grant; after the pass, the store holds nothing of it."""
    simulation, left = credits_scale.measure(8)
    assert left == [0] * len(credits_scale.EPOCHS)
    assert [row["keys and entries left"] for row in credits_scale.ends({8: (simulation, left)}).rows] == left
    table = credits_scale.batches({8: simulation})
    for row, epoch in zip(table.rows, credits_scale.EPOCHS, strict=True):
        counts = {what: count for what, (count, *_) in simulation.costs[epoch.name("batches")].counts.items()}
        blocks = 32 // row["batches of a block"]
        # One `add`, then the reader's `wait` and `get`, or the compare-and-set by which a rank writes a grant: the
        # one that comes second reads the other one's by it. And each grant is removed once.
        writes = counts["sync point: compare_set"]
        assert counts["credits: add"] == counts["sync point: wait"] + writes == 8 * blocks
        assert counts["sync point: get"] == counts["sync point: wait"]
        assert writes >= blocks == counts["sync point: delete_key"]
        assert row["operations per rank and batch"] * 8 * 32 == sum(counts.values())


def test_blocks_grow_with_the_ranks_and_with_short_batches():
    """The table has the size from which the host is busy for at most a twentieth, and says where it cannot keep up."""
    few, many = credits_scale.growth([64, 4096]).rows
    assert (few["5 ms"], few["20 ms"]) == ("8: 0.048", "2: 0.048")
    assert (many["5 ms"], many["20 ms"]) == ("16: waits", "16: 0.38")
    assert many["training waits below, ms"] == pytest.approx(4096 * 3 * 0.01 / 16)


def test_simulated_ranks_write_whole_traces(tmp_path):
    """What the real recorder and writer make of an hour of 16 ranks on two hosts, whose clocks are not the same."""
    assert simulated_traces.write(tmp_path, 16, 2) == sum(file.stat().st_size for file in tmp_path.iterdir())
    trace = read([str(tmp_path)])
    assert (trace.skipped, trace.problems, trace.verdict) == (0, [], None)
    (run,) = trace.runs
    assert sorted(run.fits) == list(range(16))
    assert {host: len(ranks) for host, ranks in run.hosts.items()} == {"node0": 8, "node1": 8}
    assert 3_600 <= run.end - run.begin < 3_602
    assert {fit.ending and fit.ending.how for fit in run.fits.values()} == {"finished"}
    odd, usual = facts.classes_of(run)
    assert (odd.ranks, odd.reasons, len(usual.ranks)) == ((5,), ("slow loader in train epoch 0",), 15)
    assert facts.first_divergences(run) == []
    table = facts.counts_of(run)
    cells = [(str(row.key), cell.batches, cell.steps) for row in table.rows for cell in row.cells if cell]
    assert table.classes == (tuple(range(16)),)
    assert cells == [
        ("train epoch 0", 16_801, 16_801),
        ("validation", 1_050, 16_801),
        ("train epoch 1", 16_801, 33_602),
        ("validation (2)", 1_050, 33_602),
    ]
    paces = facts.paces_of(run)
    spreads = [pace.spread_seconds for pace in paces]
    assert spreads == [pytest.approx(0.012, abs=1e-3)] * 4, "the clocks are not corrected"
    assert [(pace.paused, pace.pause_seconds) for pace in paces[::2]] == [(0, 15.0)] * 2
    kinds = {json.loads(line)["k"] for line in (tmp_path / "rank-00000.jsonl").read_text().splitlines()}
    assert kinds == set(LINES) - {"clock", "once", "warning", "stacks", "verdict", "dropped"}


@pytest.mark.nightly
def test_even_passes_are_measured_beside_their_rivals(run_ranks):
    """Every mode takes its batches in one process group; credits are waited for, proven lengths are not."""
    case = even_cost.Case(even_cost.ALL, step_ms=1, batches=8, rounds=1)
    found = run_ranks(even_cost.measure, 2, case)[0].value
    rows = {row["mode"]: row for row in even_cost.rows_of(1, found, credits=True)}
    assert set(rows) == set(even_cost.ALL)
    assert found[even_cost.STOP].waits[0] >= 1
    assert found[even_cost.STOP_PROVEN].waits == [0]
    assert found[even_cost.STOP].lookahead[0] >= 1  # its loader has no workers
    assert "one wait" in rows[even_cost.STOP]["goal"]


def test_the_benchmark_of_a_gpu_runs(run_ranks):
    """What it measures on a GPU also runs on CPUs, on a model that is small enough, and every variant is measured."""
    size = gpu_cost.Size(repeats=1, batches=3, samples=2, tokens=8, width=8, layers=1)
    plain = run_ranks(gpu_cost.plain_costs, 2, size)
    lightning = run_ranks(gpu_cost.lightning_costs, 1, size)
    assert [line for result in plain + lightning for line in verdict_lines(result)] == []
    for found, variants in ((plain[0].value, 4), (lightning[0].value, 3)):
        assert set(found) == set(gpu_cost.CLOCKS)
        assert [list(map(len, samples.values())) for samples in found.values()] == [[1] * variants] * 2
    assert len(run_ranks(gpu_cost.fingerprint_costs, 1, 1)[0].value) == 2 * len(gpu_cost.BATCHES)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_benchmark_of_a_gpu_says_that_it_needs_one(capsys):
    report(gpu_cost.tables(quick=True), None)
    assert "| needs a GPU, found 0 |" in capsys.readouterr().out
