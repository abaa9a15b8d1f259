"""Composer 0.23.3, whose loop still hangs where ranks are uneven: `make test-composer-classic`.

Composer stops all ranks at the shortest since 0.23.5. The one before that is laid over the environment of the other
tests by PYTHONPATH, and these tests are skipped wherever it is not.
"""

import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest

from integration_tests.composer_jobs import Job, fit
from integration_tests.harness import RanksTimedOut
from integration_tests.jobs import assert_named


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
    with pytest.raises(RanksTimedOut, match="still alive"):
        run_ranks(fit, 2, Job(**case, options=None), deadline_seconds=25)


def test_a_short_train_loader_is_named_on_every_rank(run_ranks):
    results = run_ranks(fit, 2, Job(**TRAIN), expect=None, deadline_seconds=60)
    assert_named(
        results, "UnevenBatches", [1, 0], "rank 1 ran out of data after 7 batches of train epoch 0", "has batch 8"
    )


def test_an_evaluator_that_hangs_is_a_stall_whose_table_shows_who_has_how_many_batches(run_ranks):
    """Its end is a collective, so no rank passes it: the counters are a sign of it, and no proof."""
    with pytest.raises(RanksTimedOut) as hung:
        run_ranks(fit, 2, Job(**EVAL, options={"stall_seconds": 2}), deadline_seconds=30)
    text = str(hung.value)
    assert "countoff: Stalled: no rank has got on for 2 s; ranks 0, 1 are in a collective." in text
    assert re.search(r"0 +evaluation digits0 +3 ", text)
    assert re.search(r"1 +evaluation digits0 +2 ", text)
