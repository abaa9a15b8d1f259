"""Does the framework count the job that runs? Adapters look for that, by what they know of their framework.

A loader may report the batches of all ranks (`WrongLength`), a total may count each batch once per process
(`WrongTotal`), and each process may train as the only one (`NotDistributed`).
"""

from __future__ import annotations

from countoff.core.plan import BatchPlan
from countoff.core.verdict import Verdict, VerdictKind
from countoff.core.words import count_of

__all__ = ["NOT_DISTRIBUTED", "WRONG_LENGTH", "WRONG_TOTAL", "judge_length"]

WRONG_LENGTH = VerdictKind(
    "WrongLength",
    "`len(loader)` is not the number of batches of one rank, for example because it counts those of all ranks",
    default="warns, and logs the true totals",
    ends=False,
)
WRONG_TOTAL = VerdictKind(
    "WrongTotal",
    "the framework's total batch size counts each batch once per process (`split_batches`)",
    ends=False,
)
NOT_DISTRIBUTED = VerdictKind(
    "NotDistributed",
    "several processes were launched, but the framework treats each as the only one",
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
