"""Each remedy of the golden messages is applied to the letter to a job that hears it; then the job is silent."""

import ast
import re
from pathlib import Path

import pytest

pytest.importorskip("accelerate")

from integration_tests import remedy_jobs
from integration_tests.harness import RankResult
from integration_tests.remedy_jobs import ACCELERATE, CASES, TORCH
from tests.remedies import APPLIED, without_numbers

ROOT = Path(__file__).parents[1]
BY_FRAMEWORK = [
    pytest.param(list(TORCH), id="torch"),
    pytest.param(list(ACCELERATE), id="accelerate", marks=pytest.mark.nightly),
]


def of_a_rank(result: RankResult) -> dict[str, set[str]]:
    """The remedies that a rank has heard, by job."""
    return {name: {without_numbers(remedy) for _, remedy in found} for name, found in result.value.items()}


@pytest.mark.alone  # on a busy machine, a job may hear of another consequence of its fault first
@pytest.mark.parametrize("names", BY_FRAMEWORK)
def test_the_jobs_hear_the_remedies_that_they_apply(run_ranks, names):
    """Each job with a fault hears the remedies that the table gives it, on some rank."""
    results = run_ranks(remedy_jobs.faults, 2, names, deadline_seconds=300)
    found = [of_a_rank(result) for result in results]
    heard = {name: set().union(*(each[name] for each in found)) for name in names}
    for entry in APPLIED:
        for remedy in entry.remedies:
            jobs = [name for name in entry.jobs if name in heard]
            assert all(remedy in heard[name] for name in jobs), (remedy, {name: heard[name] for name in jobs})


@pytest.mark.parametrize("names", BY_FRAMEWORK)
def test_a_job_with_its_remedy_is_silent(run_ranks, names):
    """With what the message says, ranks end with exit code 0, and hear only once what the user has accepted."""
    results = run_ranks(remedy_jobs.mended, 2, names, deadline_seconds=300)
    heard = remedy_jobs.still_heard(results)
    assert {job: kinds for job, kinds in heard.items() if kinds} == {}
    told = {kind for name in names for kind in CASES[name].hears.values()}
    printed = re.findall(r"^\[rank \d+\] countoff: (\w+)", "\n".join(result.output for result in results), re.M)
    assert set(printed) <= told


def test_the_table_names_jobs_and_tests_that_exist():
    """And every job applies some remedy of the table."""
    named = {name for entry in APPLIED for name in entry.jobs}
    assert named == set(CASES)
    for each in {test for entry in APPLIED for test in entry.tests}:
        file, _, name = each.partition("::")
        tree = ast.parse((ROOT / file).read_text())
        assert name in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)], each
