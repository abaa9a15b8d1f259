"""Is countoff on, on every rank, and does this rank still compare? `LateRank`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from countoff.core.messages import names_of
from countoff.core.verdict import Cause, Verdict, VerdictKind

__all__ = ["LATE_RANK", "alone", "goes_on_without", "needed", "none_compares", "waits_for"]

LATE_RANK = VerdictKind(
    "LateRank",
    "countoff is off on some rank, or has not started there yet",
    default='warns; raises with `uneven_train` or `uneven_eval="stop"`',
    ends=False,
    label="missing",
    causes={
        "": Cause(
            remedy=(
                "turn countoff on there too, by the same call at the same place as on the other ranks.\n"
                "if it is on, connecting may be slow: torch looks up the name of each peer, and an answer that the "
                "name server loses costs 5 s. RES_OPTIONS='timeout:1 attempts:1' on all ranks bounds that."
            )
        )
    },
)
"""**Cause.** `COUNTOFF=0` or another script on that rank; a start that takes longer than `deadline_seconds` (60); a
[slow name server](limits.md#a-slow-name-server). After "this rank trains on without comparing", the job's store did not
answer that rank. After "nothing is compared", the store's process may open [too few files](limits.md#many-ranks).

**Fix.** Turn countoff on everywhere. If ranks start minutes apart, raise `deadline_seconds`.
"""


def waits_for(ranks: Sequence[int]) -> Verdict:
    """Returns the line about ranks that have not counted off yet, while the others wait for them.

    Args:
        ranks: These ranks, ascending.
    """
    hint = "A slow name server delays it too: RES_OPTIONS='timeout:1 attempts:1' on all ranks bounds that."
    return replace(_missing(ranks, f" {hint} (waiting)"), remedy="")


def goes_on_without(ranks: Sequence[int]) -> Verdict:
    """Returns the warning that the others go on without ranks that have not counted off.

    Args:
        ranks: These ranks, ascending.
    """
    return _missing(ranks, " (training goes on without comparing with it)")


def needed(ranks: Sequence[int]) -> Verdict:
    """Returns the verdict that ranks have not counted off where all must, because ranks take as many batches.

    Args:
        ranks: These ranks, ascending.
    """
    late = _missing(ranks)
    why = (
        "With uneven_train='stop' or uneven_eval='stop', every rank must tell the others which batches it has. The job "
        "would wait for a rank that does not."
    )
    remedy = f"{late.remedy}\nif ranks start minutes apart, raise deadline_seconds."
    return replace(late, why=why, remedy=remedy, harmful=True)


def alone(reason: str) -> Verdict:
    """Returns the line about this rank where it trains on without comparing.

    Args:
        reason: Why, as the beginning of a sentence.
    """
    return LATE_RANK.found(f"{reason} (this rank trains on without comparing)")


def none_compares(reason: str) -> Verdict:
    """Returns the line about a job in which no rank compares.

    Args:
        reason: Why, as the beginning of a sentence.
    """
    return LATE_RANK.found(f"{reason} (nothing is compared; training goes on)")


def _missing(ranks: Sequence[int], more: str = "") -> Verdict:
    verb = "has" if len(ranks) == 1 else "have"
    sentence = f"{names_of(ranks)} {verb} not counted off: is countoff on there?{more}"
    return LATE_RANK.found(sentence, ranks, remedy=LATE_RANK.cause_of("").remedy)
