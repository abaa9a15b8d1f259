"""Composer 0.23.3, whose loop still hangs where ranks are uneven: `make test-composer-classic`.

Composer stops all ranks at the shortest since 0.23.5. The one before that is laid over the environment of the other
tests by PYTHONPATH, and these tests are skipped wherever it is not.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest

from integration_tests.composer_jobs import Job, fit
from integration_tests.harness import RanksTimedOut
from integration_tests.output import assert_named


def is_classic() -> bool:
    """Whether the Composer that the ranks would import is one that hangs."""
    try:
        return tuple(int(part) for part in version("mosaicml").split(".")[:3]) < (0, 23, 5)
    except PackageNotFoundError:
        return False


pytestmark = pytest.mark.skipif(not is_classic(), reason="for Composer 0.23.3: make test-composer-classic")

TRAIN: dict[str, Any] = {"train": [8, 7], "reported": [8, 8]}
EVAL: dict[str, Any] = {"even": 64, "evals": [3, 2]}


@pytest.mark.parametrize("case", [TRAIN, EVAL], ids=["train", "eval"])
def test_the_loop_hangs_without_countoff(run_ranks, case):
    """Composer 0.23.3 hangs on uneven ranks without countoff."""
    with pytest.raises(RanksTimedOut, match="still alive"):
        run_ranks(fit, 2, Job(**case, options=None), deadline_seconds=25)


def test_a_short_train_loader_is_named_on_every_rank(run_ranks):
    """Every rank names the rank whose train loader is short."""
    results = run_ranks(fit, 2, Job(**TRAIN), expect=None, deadline_seconds=60)
    assert_named(
        results, "UnevenBatches", [1], "rank 1 ran out of data after 7 batches of train epoch 0", "has batch 8"
    )


NAMED = "rank 1 ran out of data after 2 batches of evaluation digits0; rank 0 has batch 3"


def test_a_short_evaluator_is_named_on_every_rank(run_ranks):
    """Every rank names the rank whose evaluator is short."""
    results = run_ranks(fit, 2, Job(**EVAL, options={"uneven_eval": "raise"}), expect=None, deadline_seconds=60)
    assert_named(results, "UnevenBatches", [1], NAMED)


def test_a_short_evaluator_is_named_when_it_has_hung(run_ranks):
    """An uneven evaluation that was only warned of is named once it has stalled."""
    results = run_ranks(fit, 2, Job(**EVAL, options={"stall_seconds": 2}), expect=None, deadline_seconds=60)
    assert results[0].output.count(f"[rank 0] countoff: UnevenBatches: {NAMED}") == 2
    for result in results:
        assert f"countoff UnevenBatches: {NAMED}" in result.error_file, result
        assert result.exit_code != 0, result
