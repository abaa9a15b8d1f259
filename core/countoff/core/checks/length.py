"""Does a loader report the number of batches that one rank has? `WrongLength`."""

from __future__ import annotations

from countoff.core.plan import BatchPlan
from countoff.core.verdict import Verdict, VerdictKind
from countoff.core.words import count_of

__all__ = ["WRONG_LENGTH", "judge_length"]

WRONG_LENGTH = VerdictKind(
    "WrongLength",
    "`len(loader)` is not the number of batches of one rank, for example because it counts those of all ranks",
    default="warns, and logs the true totals",
    ends=False,
)


def judge_length(plan: BatchPlan, *, counted_by: str, consequences: str) -> Verdict | None:
    """Returns a `WrongLength` if a loader reports another number of batches than it has.

    Args:
        plan: The plan of this rank's loader.
        counted_by: Who goes by the reported number.
        consequences: What that does, as one or more sentences.
    """
    true, reported = plan.loader_batches, plan.reported_batches
    if true is None or reported is None or plan.wrong_length_factor is None:
        return None
    why = ""
    if plan.size_taken_for_length:
        why = (
            f"{reported} is the size of the dataset over all {plan.dp_degree} data ranks (`size`), not one rank's "
            "`length`."
        )
    sentence = f"{counted_by} counts on {count_of(reported, 'batch')} per epoch and rank; there are {true}."
    return WRONG_LENGTH.found(f"{sentence} {consequences}", why=why)
