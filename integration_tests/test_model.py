"""Models that ranks must hold alike, compared when a fit begins; on real ranks."""

import pytest

from integration_tests import weight_jobs


@pytest.mark.ranks(4, nightly=(2,))
def test_a_model_that_is_changed_after_wrapping_is_named(run_ranks, ranks):
    """The rank is named, and how many parameters it has; a model that is the same, or may differ, is silent."""
    cases = ["", "frozen", "dtype", "alike", "renamed", "frozen, allowed"]
    results = run_ranks(weight_jobs.hold_models, ranks, "ddp", cases)
    others = "rank 0" if ranks == 2 else "ranks 0–2"
    odd = f"rank {ranks - 1}"
    one, other = (others, odd) if ranks == 2 else (odd, others)  # of two ranks, nobody knows which is right
    here, there = (6, 5) if ranks == 2 else (5, 6)
    needs = f"{here} parameters need a gradient on {one}, {there} parameters on {other}"
    numbers = "6 parameters with 2474 numbers"
    due = [
        {},
        {"PlanMismatch": f"before the first batch, {needs}."},
        {
            "PlanMismatch": (
                f"before the first batch, the model has {numbers} on {one}, of other shapes or types than on {other}."
            )
        },
        {},
        {},
        {},
    ]
    assert results[0].value == due  # which prints it; the others may have left before it came to them


def test_only_ranks_that_hold_the_same_shard_are_compared(run_ranks):
    results = run_ranks(weight_jobs.hold_models, 4, "hsdp", ["", "frozen"])
    sentence = "before the first batch, 6 parameters need a gradient on rank 1, 5 parameters on rank 3."
    assert results[0].value == [{}, {"PlanMismatch": sentence}]
