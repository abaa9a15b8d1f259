"""Models that ranks must hold alike, compared when a fit begins; on real ranks."""

import pytest

from integration_tests import weight_jobs


@pytest.mark.ranks(2, 4)
def test_a_model_that_is_changed_after_wrapping_is_named(run_ranks, ranks):
    """The parameter and the rank are named, and a model that is the same, or may differ, is silent."""
    results = run_ranks(weight_jobs.hold_models, ranks, "ddp", ["", "frozen", "dtype", "alike", "frozen, allowed"])
    others = "rank 0" if ranks == 2 else "ranks 0–2"
    odd = f"rank {ranks - 1}"
    one, other = (others, odd) if ranks == 2 else (odd, others)  # of two ranks, nobody knows which is right
    due = [
        {},
        {"ModelMismatch": f"before the first batch, 3.bias needs no gradient on {odd}, and needs one on {others}."},
        {
            "ModelMismatch": (
                f"before the first batch, the model of {one} differs from that of {other}, first in 0.weight."
            )
        },
        {},
        {},
    ]
    assert results[0].value == due  # which prints it; the others may have left before it came to them


def test_only_ranks_that_hold_the_same_shard_are_compared(run_ranks):
    results = run_ranks(weight_jobs.hold_models, 4, "hsdp", ["", "frozen"])
    sentence = "before the first batch, parameter 6 of 6 needs no gradient on rank 3, and needs one on rank 1."
    assert results[0].value == [{}, {"ModelMismatch": sentence}]
