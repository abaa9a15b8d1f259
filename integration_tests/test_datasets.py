"""Datasets and splits of them that must be the same on all ranks, and are not or are; on real ranks."""

import re

import pytest

from integration_tests import dataset_jobs
from integration_tests.output import verdict_lines
from tests.test_docs import DOCS, blocks

JOBS = [("torch", 4), ("lightning", 2)]
JOBS += [
    pytest.param(*job, marks=pytest.mark.nightly)
    for job in (("torch", 2), ("accelerate", 4), ("transformers", 2), ("fabric", 2))
]
ROWS = re.compile(r"rows \d+, \d+, \d+, …")
PAGE = DOCS / "datasets.md"
COMMAND = re.compile(r"^\$ .* which\.py (.*)\n([^$]*)", re.MULTILINE)
QUOTED = [each for block in blocks(PAGE, "console") for each in COMMAND.findall(block)]


@pytest.mark.nightly
@pytest.mark.torchrun
@pytest.mark.parametrize(("arguments", "output"), QUOTED, ids=[arguments for arguments, _ in QUOTED])
def test_the_script_of_the_page_prints_what_the_page_shows(run_torchrun, arguments, output):
    """But for how far rank 0 has come when it learns that rank 1 has run out."""
    [script] = (block for block in blocks(PAGE, "python") if "sys.argv" in block)
    printed = run_torchrun(script, 2, *arguments.split()).output
    starts = [line.partition("; rank 0")[0] for line in output.splitlines() if line != "…"]
    assert [start for start in starts if f"\n{start}" not in f"\n{printed}"] == [], printed
    assert printed.count("[rank 0] countoff: ") == 1, printed


@pytest.mark.parametrize(("framework", "world_size"), [*JOBS, ("composer", 2)])
def test_data_that_differs_is_named_once_and_the_same_data_is_not(run_ranks, framework, world_size):
    pytest.importorskip("lightning" if framework == "fabric" else framework)
    results = run_ranks(dataset_jobs.train, world_size, framework, deadline_seconds=240)
    due = [case.expected(world_size) for case in dataset_jobs.cases_of(framework, world_size)]
    heads = [line for line in verdict_lines(results[0]) if line.startswith("countoff: ")]
    if not dataset_jobs.FRAMEWORKS[framework][
        1
    ]:  # the evaluation is known later: the train data of a split has been named before
        heads, streams = ([line for line in heads if ("StreamsDiffer" in line) == found] for found in (False, True))
        assert len(streams) == sum("SplitLeak" in line for line in due)
    assert [ROWS.sub("{rows}", line) for line in heads] == [line for line in due if line]
    assert all(verdict_lines(result) == [] for result in results[1:])


def test_lengths_that_differ_have_the_datasets_as_their_cause(run_ranks):
    """A trainer of Lightning cannot begin, and the verdict names why: one message, not two."""
    results = run_ranks(dataset_jobs.fit_uneven, 2, expect=None, deadline_seconds=120)
    lines = verdict_lines(results[0])
    assert [line for line in lines if line.startswith("countoff: ")] == [
        "countoff: PlanMismatch: before the first batch, the train dataset has 32 rows on rank 0, 24 rows on rank 1."
    ]
    assert any("why: From this follows: batches_per_epoch is 4 on rank 0, 3 on rank 1." in line for line in lines)
