"""Loops that attach nothing, and are found by watching, on real ranks."""

import pytest

from integration_tests import found_loaders
from integration_tests.composer_jobs import said

FOUND = ["2 epochs of 16 steps, found"]
FOUND_ONCE = ["1 epochs of 8 steps, found"]
BY_WATCHING = "Found by watching, so it ends nothing; with attach() in the code it would end the job."
NOT_EVEN = "countoff: this loop was found by watching, so its ranks are not made even: that needs attach() in the code."
OF_ACCELERATE = {
    "as it is": FOUND,
    "attached": ["2 epochs of 16 steps"],
    "asked to make ranks even": FOUND,
    "of another version of Accelerate": [],
    "inside of LocalSGD": [],
    "read by a thread": [],
    "of two learning rates": FOUND,
    "over two loaders": ["4 epochs of 40 steps, found", "of [8] and [12] batches"],
    "over a stream that knows its length": [*FOUND, "asked 0 times more"],
}
OF_TORCH = {
    "as it is": FOUND,
    "attached": ["2 epochs of 16 steps"],
    "sharded over all ranks": FOUND,
    "asked to make ranks even": FOUND,
    "of another version of torch": [],
    "of two learning rates": FOUND,
    "on one rank": [],
    "inside of Join": [],
    "read by a thread": [],
    "packed": [],
    "of equal global batches": FOUND_ONCE,
    "evaluated with gradients": [*FOUND, "1 more"],
    "beside another loader": FOUND,
    "attached later": ["2 epochs of 16 steps"],
    "without a group": [],
}
OF_DEEPSPEED = {
    **{f"ZeRO {stage}": ["2 epochs of 8 steps, found"] for stage in range(4)},
    "in a pipeline": [],
    "of one data rank": [],
}
SAID = {"asked to make ranks even": NOT_EVEN, "of two learning rates": BY_WATCHING}


def assert_said(jobs, results, not_observed):
    """Rank 0 says what is to be said in some jobs, and nothing in the others; the other rank says nothing."""
    told = dict(zip(jobs, said(results[0]), strict=True))
    assert {name for name, text in told.items() if text} == SAID.keys(), results[0]
    for name, text in SAID.items():
        assert text in told[name], told[name]
    assert not any(said(results[1])), results[1]
    assert all(result.output.count(not_observed) == 1 for result in results)


def test_the_loader_of_accelerate_that_trains_is_found_by_its_use(run_ranks):
    """What the code attaches counts alone, what cannot be told is left alone, and what is found ends nothing."""
    pytest.importorskip("accelerate")
    from integration_tests import found_accelerate

    results = run_ranks(found_accelerate.run_all, 2, deadline_seconds=120)
    assert [result.value for result in results] == [OF_ACCELERATE, OF_ACCELERATE]
    assert results[0].output.count("batches before prepare()") == 1, "only what is attached logs its length"
    not_observed = "countoff: this loop over Accelerate's loaders is not observed: AttributeError: no gradient_state"
    assert_said(found_accelerate.JOBS, results, not_observed)


def test_the_loader_of_torch_that_trains_is_found_by_its_use(run_ranks):
    """The same; and where ranks may rightly take different numbers of batches, nobody waits or says a word."""
    results = run_ranks(found_loaders.run_all, 2, deadline_seconds=120)
    for result in results:
        assert {name: begun for name, begun in result.value.items() if name in OF_TORCH} == OF_TORCH
    dealt = [result.value["dealt out"] for result in results]
    assert dealt == [[], ["2 epochs of 8 steps, found"]], "the last rank alone may take them for its own"
    for number, name in enumerate(("packed once on the first rank", "packed once on the last rank")):
        assert [bool(result.value[name]) for result in results] == [number == 1, number == 0]
    assert_said(found_loaders.JOBS, results, "countoff: this loop is not observed: AttributeError: no batch_sampler")


def test_the_loop_of_a_deepspeed_engine_is_found_where_all_ranks_are_data_ranks(run_ranks):
    """One over a part of the job, and one that takes its batches by itself, are left alone. Nobody says a word."""
    pytest.importorskip("deepspeed")
    from integration_tests import found_engines

    results = run_ranks(found_engines.run_all, 2, deadline_seconds=180)
    assert [result.value for result in results] == [OF_DEEPSPEED, OF_DEEPSPEED]
    assert not any(text for result in results for text in said(result))
