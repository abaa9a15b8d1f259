"""Fabric: scripts that say which passes are counted."""

from typing import Any

import pytest

from integration_tests import fabric_jobs
from integration_tests.fabric_jobs import Script
from integration_tests.output import assert_named, verdict_lines

# Each script, and what countoff has counted at its end: train epochs that have ended, batches of the last one, steps.
HEALTHY: dict[str, tuple[Any, Script, tuple[int, int, int]]] = {
    "pretraining": (fabric_jobs.pretrain, Script(), (2, 4, 13)),
    "pretraining with accumulation": (fabric_jobs.pretrain, Script(accumulate=3), (2, 4, 4)),
    "pretraining on a sharded dataset": (fabric_jobs.pretrain, Script(even=40), (2, 4, 13)),
    "fine-tuning": (fabric_jobs.finetune, Script(), (2, 5, 10)),
    "validations inside": (fabric_jobs.validate_inside, Script(), (3, 5, 15)),
    "a new loader for each epoch": (fabric_jobs.train_on_new_loaders, Script(), (4, 5, 20)),
    "two loaders together": (fabric_jobs.train_on_two_loaders, Script(), (3, 5, 15)),
    "loaders that Fabric has not set up": (fabric_jobs.train_on_own_loaders, Script(), (2, 5, 10)),
    "no loader": (fabric_jobs.train_without_a_loader, Script(), (1, 13, 13)),
}


def test_healthy_scripts_train_to_the_same_bits_and_are_counted(run_ranks):
    """Scripts print nothing, end with the same weights as with countoff off, and are counted right."""
    jobs = {name: job[:2] for name, job in HEALTHY.items()}
    results = run_ranks(fabric_jobs.without_and_with, 2, jobs, deadline_seconds=240)
    assert [line for result in results for line in verdict_lines(result)] == []
    for name, (_, _, expected) in HEALTHY.items():
        assert len({outcome["weights"] for result in results for outcome in result.value[name]}) == 1, name
        for result in results:
            plain, counted = result.value[name]
            assert plain["counted"] is None, name
            assert tuple(counted["counted"].values()) == expected, name


EVEN: dict[str, tuple[Any, Script]] = {
    "pretraining": (fabric_jobs.pretrain, Script(train=(5, 4), val=(2, 3))),
    "pretraining with accumulation": (fabric_jobs.pretrain, Script(train=(5, 7), accumulate=3)),
    "fine-tuning": (fabric_jobs.finetune, Script(train=(4, 6), val=(3, 2))),
    "a new loader for each epoch": (fabric_jobs.train_on_new_loaders, Script(train=(4, 5))),
}


def test_uneven_ranks_of_scripts_stop_together(run_ranks):
    """With `stop` from the environment, every rank trains to the bits of the script whose loaders were cut."""
    env = {"COUNTOFF_UNEVEN_TRAIN": "stop", "COUNTOFF_UNEVEN_EVAL": "stop"}
    results = run_ranks(fabric_jobs.cut_and_even, 2, EVEN, env=env, deadline_seconds=120)
    for name in EVEN:
        assert len({outcome["weights"] for result in results for outcome in result.value[name]}) == 1, name
    said = "\n".join(verdict_lines(results[0]))
    assert "Truncated: train epoch 0 stopped on every rank after 4 batches, where rank 1 ran out of data" in said
    assert "Truncated: validation stopped on every rank after 2 batches, where rank 0 ran out of data" in said
    assert verdict_lines(results[1]) == []


UNEVEN: dict[str, tuple[Any, Script, str]] = {
    "pretraining": (fabric_jobs.pretrain, Script(train=(5, 4)), "rank 1 ran out of data after 4 batches"),
    "accumulation": (fabric_jobs.pretrain, Script(train=(5, 4), accumulate=2), "rank 1 ran out of data after 4"),
    "fine-tuning": (fabric_jobs.finetune, Script(train=(4, 5)), "rank 0 ran out of data after 4 batches"),
    "fine-tuning with the older package": (
        fabric_jobs.finetune,
        Script(train=(4, 5), package="lightning_fabric"),
        "rank 0 ran out of data after 4 batches",
    ),
    "two loaders": (fabric_jobs.train_on_two_loaders, Script(train=(5, 4)), "rank 1 ran out of data after 4 batches"),
}


# Accumulation is in the healthy scripts too, and the older package trains with the same script.
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.nightly if case in ("accumulation", "fine-tuning") else ())
        for case in UNEVEN
    ],
)
def test_a_short_rank_of_a_script_is_named(run_ranks, case):
    """Every rank ends with the verdict that names the short rank and its batches."""
    function, script, words = UNEVEN[case]
    results = run_ranks(function, 2, script, expect=None, deadline_seconds=40)
    assert_named(results, "UnevenBatches", [int("rank 1" in words)], words, "of train epoch 0")


def test_an_uneven_evaluation_is_warned_of(run_ranks):
    """Uneven ranks in an evaluation are warned of once."""
    results = run_ranks(fabric_jobs.finetune, 2, Script(val=(3, 2)))
    (headline,) = [line for line in verdict_lines(results[0]) if "countoff: " in line]
    assert "UnevenBatches: " in headline
    assert "rank 1 ran out of data after 2 batches of validation" in headline
    assert verdict_lines(results[1]) == []


def test_nothing_of_countoff_is_on_fabrics_objects(run_ranks):
    """Fabric and its loaders have no attribute of countoff's in a pass, and can be pickled; their class is its own."""
    for result in run_ranks(fabric_jobs.objects_of_a_script, 2, Script(train=(2, 2))):
        assert all(result.value.values()), result.value
        assert verdict_lines(result) == []
