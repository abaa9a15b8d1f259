"""`countoff report` of traces that real ranks have written."""

import re
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, TensorDataset

from countoff.cli.__main__ import main
from countoff.report import facts
from countoff.report.page import render
from countoff.report.reader import Reader
from countoff.torch import Countoff
from integration_tests import devices, loops
from integration_tests.digits import digits, own_rank
from integration_tests.output import verdict_lines


def page_of(directory: Path) -> tuple[Any, str]:
    """The trace of a job and its page."""
    trace = Reader([str(directory)]).read()
    assert (trace.skipped, trace.problems) == (0, [])
    return trace, render(trace)


def test_an_uneven_job_shows_its_verdict_and_where_the_counts_part(run_ranks: Any, tmp_path: Path) -> None:
    results = run_ranks(loops.uneven, 3, [5, 4, 5], expect=[1, 1, 1], env={"COUNTOFF_TRACE_DIR": str(tmp_path)})
    trace, page = page_of(tmp_path)
    (run,) = trace.runs
    printed = max((verdict_lines(result) for result in results), key=len)
    assert printed[0] == f"countoff: {trace.verdict.headline}"
    first, *rest = facts.classes_of(run)  # rank 0 or 2 may not have begun its last batch when the verdict came
    assert first.ranks == (1,)
    assert sorted(rank for each in rest for rank in each.ranks) == [0, 2]
    assert "named by the verdict" in first.reasons
    (divergence,) = facts.first_divergences(run)
    assert divergence.groups[0][0] == 4
    assert 1 in divergence.groups[0][1]
    assert divergence.groups[-1][0] == 5
    assert any("loops.py" in frame for _, _, frames in facts.stacks_of(run) for frame in frames)
    assert re.search(r'<pre class="bad"><span class="lines">countoff: UnevenBatches: ', page)
    assert re.search(
        "counts begin to differ in train epoch 0: ranks? [01, ]*: 4 batches; ranks? [02, ]*: 5 (fetched )?batches", page
    )


def different_batch_sizes() -> None:
    devices.join()
    model, optimizer = loops.model_and_optimizer()
    images, labels = digits()
    loader = DataLoader(TensorDataset(images[:48], labels[:48]), batch_size=4 if own_rank() == 1 else 8)
    countoff = Countoff(optimizer=optimizer)
    for batch in countoff.train(loader):
        loops.train_on(model, optimizer, batch)


def test_a_job_whose_plans_differ_shows_the_numbers_of_each_class_of_ranks(
    run_ranks: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_ranks(different_batch_sizes, 3, expect=[1, 1, 1], env={"COUNTOFF_TRACE_DIR": str(tmp_path)})
    trace, page = page_of(tmp_path)
    assert trace.verdict.kind == "PlanMismatch"
    (run,) = trace.runs
    sizes = {row.name: row.groups for row in facts.plan_differences_of(run)}["batch_size"]
    assert sizes == (("4", (1,)), ("8", (0, 2)))
    totals = {each.ranks: each.true for each in facts.totals_of(run)}
    assert [(ranks, true["global_batch_size"]) for ranks, true in totals.items()] == [((1,), 12), ((0, 2), 24)]
    assert "<h2>The ranks&#39; plans differ</h2>" in page
    assert "<h2>Totals of rank 1</h2>" in page
    assert "<h2>Totals of ranks 0, 2</h2>" in page
    with pytest.raises(SystemExit):
        main(["report", "--text", str(tmp_path)])
    text = capsys.readouterr().out
    assert re.search(r"\nbatch_size +rank 1 +≠ 4 *\nbatch_size +ranks 0, 2 +≠ 8", text)
    assert "Totals of rank 1" in text


def test_a_healthy_job_has_all_its_spans_in_one_column(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(loops.healthy_without_and_with, 2, env={"COUNTOFF_TRACE_DIR": str(tmp_path)})
    trace, page = page_of(tmp_path)
    (run,) = trace.runs
    table = facts.counts_of(run)
    assert table.classes == ((0, 1),)
    epochs = [cell.batches for row in table.rows for cell in row.cells if cell and "epoch" in row.key.name]
    assert epochs[0] == 10
    assert not any(any(row.outlier) for row in table.rows)
    assert facts.first_divergences(run) == []
    assert ">Finished: 4 epochs, 2 ranks, " in page
