"""What to do about each kind of verdict: the sentences that all adapters share, and those of data identity."""

from __future__ import annotations

from collections.abc import Mapping

from countoff.core.verdict import Kind

__all__ = ["data_remedies", "with_common_remedies"]

_COMMON: Mapping[Kind, str] = {
    "StepMismatch": "step on the same batches everywhere: no condition of one rank around optimizer.step().",
    "LearningRateMismatch": "give the scheduler the same horizon on every rank, and step it on every rank.",
    "LostRank": "read that rank's own output first; the others only lost their peer.",
}


def with_common_remedies(*own: Mapping[Kind, str]) -> dict[Kind, str]:
    """Returns the remedies of one adapter: those that all adapters share, with the adapter's own in their place.

    Args:
        own: The adapter's own remedies, by kind of verdict; of two for one kind, the later one holds.
    """
    merged = dict(_COMMON)
    for remedies in own:
        merged.update(remedies)
    return merged


def data_remedies(*, shares: str, order: str, off: str) -> dict[Kind, str]:
    """Returns the remedies for the verdicts of data identity.

    Args:
        shares: How each rank gets a share of its own, in the framework's terms.
        order: How each epoch gets an order of its own.
        off: How the check is turned off.
    """
    return {
        "DuplicateData": f"{shares} If equal data is what you want there, turn the check off: {off}.",
        "PeersDiffer": (
            "shard and seed by dp_rank, not by rank, so that ranks which work on one batch together read the same "
            f"samples in the same order with the same random transforms. To turn the check off: {off}."
        ),
        "SameOrder": f"{order} If one order for all epochs is what you want: DistributedSampler(shuffle=False).",
    }
