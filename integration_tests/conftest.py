"""Fixtures that bind the harness to the test's own directory, and the `ranks` mark."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from integration_tests import harness, torchrun

# Not for the search for doctests: one imports every framework, the others what may not be there.
collect_ignore = ["preload.py", "trl_jobs.py", "composer_parts.py", "titan_job.py", "faults"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes `ranks` once for each count in its `ranks` mark; with no mark, for 2."""
    if "ranks" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("ranks")
        metafunc.parametrize("ranks", mark.args if mark else (2,), ids=lambda count: f"{count}ranks")


@pytest.fixture
def run_ranks(tmp_path: Path) -> Callable[..., list[harness.RankResult]]:
    """`harness.run_ranks`, below the test's own directory."""
    return functools.partial(harness.run_ranks, directory=tmp_path)


@pytest.fixture
def run_torchrun(tmp_path: Path) -> Callable[..., torchrun.CompletedRun]:
    """`torchrun.run_torchrun`, in the test's own directory."""
    return functools.partial(torchrun.run_torchrun, directory=tmp_path)
