"""Fabric: scripts that do not mention countoff are counted where they iterate what Fabric has set up."""

from typing import Any

import pytest

from integration_tests import fabric_jobs
from integration_tests.fabric_jobs import Script
from integration_tests.jobs import assert_named, verdict_lines

FLAG = {"COUNTOFF": "1"}
# Each script, and what countoff has counted at its end: train epochs, batches of the last one, optimizer steps.
HEALTHY: dict[str, tuple[Any, Script, tuple[int, int, int]]] = {
    "pretraining": (fabric_jobs.pretrain, Script(), (3, 4, 13)),
    "pretraining with accumulation": (fabric_jobs.pretrain, Script(accumulate=3), (3, 4, 4)),
    "pretraining on a sharded dataset": (fabric_jobs.pretrain, Script(even=40), (3, 4, 13)),
    "fine-tuning": (fabric_jobs.finetune, Script(), (2, 5, 10)),
    "gradients on around a validation": (fabric_jobs.validate_with_gradients, Script(), (3, 5, 15)),
    # The first new loader may be one for evaluation, until there is a step.
    "a new loader for each epoch": (fabric_jobs.train_on_new_loaders, Script(), (3, 5, 15)),
    "two loaders together": (fabric_jobs.train_on_two_loaders, Script(), (3, 5, 15)),
    "hooks": (fabric_jobs.call_hooks, Script(), (2, 5, 10)),
    "hooks over loaders of the script's own": (fabric_jobs.call_hooks_over_other_loaders, Script(), (2, 5, 10)),
}


def test_healthy_scripts_train_to_the_same_bits_and_are_counted(run_ranks):
    """Unchanged scripts print nothing, end with the same weights as without countoff, and are counted once."""
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


def test_uneven_ranks_of_unchanged_scripts_stop_together(run_ranks):
    """With `stop` from the environment, every rank trains to the bits of the script whose loaders were cut."""
    env = {"COUNTOFF_UNEVEN_TRAIN": "stop", "COUNTOFF_UNEVEN_EVAL": "stop"}
    results = run_ranks(fabric_jobs.cut_and_even, 2, EVEN, env=env, deadline_seconds=120)
    for name in EVEN:
        assert len({outcome["weights"] for result in results for outcome in result.value[name]}) == 1, name
    said = "\n".join(verdict_lines(results[0]))
    assert "Truncated: train epoch 0 stopped on every rank after 4 batches, where rank 1 ran out of data" in said
    assert "Truncated: evaluation stopped on every rank after 2 batches, where rank 0 ran out of data" in said
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


@pytest.mark.parametrize("case", UNEVEN)
def test_a_short_rank_of_an_unchanged_script_is_named(run_ranks, case):
    """With the flag alone, every rank ends with the verdict that names the short rank and its batches."""
    function, script, words = UNEVEN[case]
    results = run_ranks(function, 2, script, env=FLAG, expect=None, deadline_seconds=40)
    assert_named(results, "UnevenBatches", [int("rank 1" in words)], words, "of train epoch 0")


def test_an_uneven_evaluation_is_warned_of(run_ranks):
    """A pass with gradients disabled is an evaluation: uneven ranks are warned of once."""
    results = run_ranks(fabric_jobs.finetune, 2, Script(val=(3, 2)), env=FLAG)
    (headline,) = [line for line in verdict_lines(results[0]) if "countoff: " in line]
    assert "UnevenBatches: " in headline
    assert "rank 1 ran out of data after 2 batches of evaluation" in headline
    assert verdict_lines(results[1]) == []


def test_a_loop_that_gives_nothing_to_count_is_warned_of(run_ranks):
    """After 64 optimizer steps without a batch of a loader that Fabric has set up, rank 0 says so, once."""
    results = run_ranks(fabric_jobs.train_on_a_bare_loader, 2, 130, env=FLAG)
    lines = verdict_lines(results[0])
    assert sum("countoff: " in line for line in lines) == 1, results[0].output
    assert "UnseenLoader: 64 optimizer steps, and no batch of a loader that Fabric has set up." in lines[0]
    assert any("fabric.setup_dataloaders" in line for line in lines if "do:" in line)
    assert verdict_lines(results[1]) == []


def test_a_loader_that_the_script_attaches_is_counted_once(run_ranks):
    """A loader that the script attaches by itself is that handle's, and nothing is said of the flag."""
    results = run_ranks(fabric_jobs.attach_by_hand, 2, Script(), env=FLAG)
    for result in results:
        assert verdict_lines(result) == []
        assert result.value["counted"] is None
        assert result.value["attached"] == 5


def test_a_loop_without_a_loader_that_is_counted_is_silent(run_ranks):
    """What the warning says about a loop without a loader mends it, with the flag on too."""
    warned = run_ranks(fabric_jobs.train_without_a_loader, 2, 70, False, env=FLAG)
    (remedy,) = [line for line in verdict_lines(warned[0]) if "do:" in line]
    assert "handle.counted(…), where handle = countoff.torch.attach(), called after fabric.launch()." in remedy
    for result in run_ranks(fabric_jobs.train_without_a_loader, 2, 70, True, env=FLAG):
        assert verdict_lines(result) == []
        assert result.value == 70


def test_nothing_of_countoff_stays_on_fabrics_objects(run_ranks):
    """Fabric and its loaders have no attribute of countoff's and can be pickled; their classes are restored."""
    for result in run_ranks(fabric_jobs.objects_of_a_script, 2, Script()):
        assert all(result.value.values()), result.value
        assert verdict_lines(result) == []
