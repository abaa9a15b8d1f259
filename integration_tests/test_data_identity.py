"""What the ranks read, compared: identical data, peers that differ, an order that never changes; on real ranks."""

from dataclasses import replace
from typing import Any

import pytest

from integration_tests import data_frames, identity_jobs
from integration_tests.composer_jobs import needs_composer
from integration_tests.harness import RankResult
from integration_tests.identity_jobs import Sharing
from integration_tests.in_turn import in_turn
from integration_tests.output import verdict_lines

KINDS = tuple(f"countoff: {kind}: " for kind in ("DuplicateData", "DoubleSharded", "PeersDiffer", "SameOrder"))
EVERY_RANK = "ranks 0, 1 read identical data in train epoch 0: their batches 1 to 2 are equal."
AGAIN = "train epoch 1 was read in the same order as the train epoch before it, though the sampler shuffles."


def warned(results: list[RankResult]) -> list[dict[str, str]]:
    """What rank 0 was warned of in each case; it alone prints, and each warning once."""
    found: list[dict[str, str]] = [each["warned"] for each in results[0].value]
    told = [f"countoff: {kind}: {sentence}" for each in found for kind, sentence in each.items()]
    for result in results:
        printed = [line for line in verdict_lines(result) if line.startswith(KINDS)]
        assert printed == ([] if result.rank else told), result
    return found


def weights(results: list[RankResult]) -> list[Any]:
    """The final weights in each case, equal on all ranks."""
    found = [[each["weights"] for each in result.value] for result in results]
    assert all(each == found[0] for each in found)
    return found[0]


FAULTY = {
    "no sampler at all": (Sharing(), {"DuplicateData": EVERY_RANK}),
    "every rank is the sampler's rank 0": (Sharing(readers=(0, 0)), {"DuplicateData": EVERY_RANK}),
    "a stream that nobody shards": (Sharing(data="whole"), {"DuplicateData": EVERY_RANK}),
    "more batches than the epoch has": (
        Sharing(options={"FINGERPRINT_BATCHES": 32}),
        {"DuplicateData": EVERY_RANK.replace("1 to 2", "1 to 20")},
    ),
    "set_epoch is never called": (Sharing(readers=(0, 1), shuffle=True, set_epoch=False), {"SameOrder": AGAIN}),
    "nor with a look at the data in between, which nobody counts": (
        Sharing(readers=(0, 1), shuffle=True, set_epoch=False, looks=True),
        {"SameOrder": AGAIN},
    ),
    "a share by rank where ranks work on one batch": (
        Sharing(data="own", tensor_parallel=2),
        {
            "PeersDiffer": "ranks 0 and 1 share dp_rank 0 and must read the same data; in train epoch 0 their batch 1 "
            "is not the same."
        },
    ),
}
HEALTHY = {
    "shuffled shares": Sharing(readers=(0, 1), shuffle=True),
    "shares in one order": Sharing(readers=(0, 1), set_epoch=False),
    "shares of a stream": Sharing(data="own"),
    "a look at the data after every epoch": Sharing(readers=(0, 1), shuffle=True, looks=True),
    "one sample over and over": Sharing(data="constant"),
    "nothing but labels": Sharing(data="labels"),
    "a single batch": Sharing(samples=4),
    "fewer samples than ranks": Sharing(samples=1, readers=(0, 1)),
    "ranks that work on one batch": Sharing(tensor_parallel=2),
    "switched off": Sharing(options={"compare_data": False}),
}


def test_wrong_shares_in_a_plain_loop_are_warned_of(run_ranks):
    """Each wrong way to share out the data gives its own warning, once, on rank 0, with its remedy and off switch."""
    results = run_ranks(identity_jobs.share, 2, [sharing for sharing, _ in FAULTY.values()], deadline_seconds=120)
    assert dict(zip(FAULTY, warned(results), strict=True)) == {name: found for name, (_, found) in FAULTY.items()}
    text = "\n".join(verdict_lines(results[0]))
    assert "  why: Nothing gives the ranks different shares of the data" in text
    assert "  do:  give every rank its own share: DataLoader(sampler=DistributedSampler(dataset))" in text
    assert "Countoff(..., compare_data=False)" in text


def test_right_shares_in_a_plain_loop_give_no_warning(run_ranks):
    """Right shares give no warning, and the weights are the same bits as without countoff."""
    bare = [replace(sharing, options=None) for sharing in HEALTHY.values()]
    results = run_ranks(identity_jobs.share, 2, [*HEALTHY.values(), *bare], deadline_seconds=120)
    assert dict(zip(HEALTHY, warned(results), strict=False)) == {name: {} for name in HEALTHY}
    found = weights(results)
    assert found[: len(HEALTHY)] == found[len(HEALTHY) :]


def test_odd_batches_and_passes_train_to_the_same_bits(run_ranks):
    """No method of a batch is called, no mode sees an operation more, and nothing is said about right passes."""
    jobs = {"bare": (identity_jobs.odd, False), "watched": (identity_jobs.odd, True)}
    for result in run_ranks(in_turn, 2, jobs, deadline_seconds=240):
        assert result.value["watched"] == result.value["bare"]
        assert verdict_lines(result) == []


def test_only_the_ranks_that_read_the_same_are_named(run_ranks):
    """Of four ranks those that read identical data are named, and repeats inside the data set are not."""
    # Of three samples over and over, ranks 0 and 3 of 4 get the same: that is the data set's doing.
    repeating = Sharing(samples=3, repeats=30, readers=(0, 1, 2, 3))
    sharings = [Sharing(readers=(0, 1, 0, 1)), Sharing(readers=(0, 1, 2, 2)), repeating]
    one, other, none = warned(run_ranks(identity_jobs.share, 4, sharings, deadline_seconds=120))
    both = "ranks 0, 2 read identical data in train epoch 0, and so do ranks 1, 3: their batches 1 to 2 are equal."
    assert one == {"DuplicateData": both}
    assert other == {"DuplicateData": EVERY_RANK.replace("0, 1", "2, 3")}
    assert none == {}


TWICE = {
    "DoubleSharded": "the train data is sharded twice: what each rank holds is already 1 of 2 shares "
    "(DistributedSampler), and Accelerate shards it again, so that each rank reads about 1/2 of its own. In "
    "train epoch 0, about 1/2 of the data is read."
}
DUPLICATE, SAME_ORDER = {"DuplicateData": EVERY_RANK}, {"SameOrder": AGAIN}
FRAMEWORKS = {
    "lightning": {"digits": {}, "right": {}, "same": DUPLICATE, "whole": DUPLICATE, "forgetful": SAME_ORDER},
    "composer": {"right": {}, "same": DUPLICATE, "whole": DUPLICATE, "forgetful": SAME_ORDER},
    # prepare() shards every loader, so ranks read different data whatever goes in: also a share.
    "accelerate": {"digits": {}, "right": TWICE, "same": TWICE, "whole": {}, "forgetful": {**TWICE, **SAME_ORDER}},
}


@pytest.mark.parametrize("framework", ["lightning", pytest.param("composer", marks=needs_composer), "accelerate"])
def test_the_loops_of_the_frameworks_give_the_same_warnings(run_ranks, framework):
    """The frameworks' own loops give the same warnings, and the same weights as without countoff."""
    expected = FRAMEWORKS[framework]
    cases = [(data, countoff) for countoff in (True, False) for data in expected]
    results = run_ranks(data_frames.all_of, 2, framework, cases, deadline_seconds=120)
    assert dict(zip(expected, warned(results), strict=False)) == expected
    found = weights(results)
    assert found[: len(expected)] == found[len(expected) :]
