"""What countoff puts on a framework's objects does not show in copies of them, and is taken back.

The Trainer's and Composer's are in `test_transformers.py` and `test_composer_healthy.py`.
"""

from collections.abc import Callable
from importlib.util import find_spec

import pytest

from integration_tests import objects
from integration_tests.harness import RankResult

RunRanks = Callable[..., list[RankResult]]


def test_a_plain_loops_objects_stay_as_they_are(run_ranks: RunRanks) -> None:
    """A loader can be copied during a fit as without countoff, and is as before after it, an exception or a verdict."""
    results = run_ranks(objects.of_torch, 2)
    assert [result.value for result in results] == [["UnevenBatches", "PlanMismatch"]] * 2


@pytest.mark.skipif(find_spec("accelerate") is None, reason="needs Accelerate")
def test_accelerates_objects_stay_as_they_are(run_ranks: RunRanks) -> None:
    """Accelerate's objects can be copied during a fit, and are as before after it, an exception or a verdict."""
    results = run_ranks(objects.of_accelerate, 2)
    assert [result.value for result in results] == [["UnevenBatches"]] * 2
