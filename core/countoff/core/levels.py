"""What becomes of a finding: it ends the job, it is a warning, or nothing is said of it. Everything asks here.

Three things decide. What the user has chosen for its kind. Whether it is proved: what a framework's own trainer shows
is a proof, and so is what an unambiguous loop shows; what is only guessed from outside of a loop warns at most. And
whether it does harm: a difference that may be legitimate, such as evaluations of different lengths, warns too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, NamedTuple, cast

from countoff.core._nearest import nearest
from countoff.core.verdict import Kind, Verdict

__all__ = ["LEVELS", "KindLevels", "Level", "as_warning", "checked", "effect", "parsed"]

Level = Literal["raise", "warn", "off"]
"""What becomes of findings of one kind: an error on every rank, one warning on rank 0, or nothing."""


class KindLevels(NamedTuple):
    """The levels of one kind of verdict.

    Attributes:
        default: The level where the user has chosen none.
        accepted: The levels that can be chosen.
    """

    default: Level
    accepted: tuple[Level, ...]


_ENDS = KindLevels("raise", ("raise", "warn", "off"))
_CAN_END = KindLevels("warn", ("raise", "warn", "off"))
_WARNS = KindLevels("warn", ("warn", "off"))

LEVELS: Mapping[Kind, KindLevels] = {
    "PlanMismatch": _ENDS,
    "UnevenBatches": _ENDS,
    "StepMismatch": _ENDS,
    "LearningRateMismatch": _ENDS,
    "RankMapError": _ENDS,
    "LostRank": _ENDS,
    "Stalled": _CAN_END,
    "WrongLength": _WARNS,
    "Truncated": _WARNS,
    "Repeated": _WARNS,
    "DuplicateData": _CAN_END,
    "DoubleSharded": _CAN_END,
    "StreamsDiffer": _CAN_END,
    "PeersDiffer": _CAN_END,
    "SameOrder": _WARNS,
    "ResumeMismatch": _CAN_END,
    "WeightsDiffer": _CAN_END,
    "UnseenLoader": _WARNS,
    "WrongHorizon": _WARNS,
    "WrongTotal": _WARNS,
    "NotDistributed": _WARNS,
    "VersionMismatch": _CAN_END,
    "SettingsMismatch": _CAN_END,
    "LateRank": _WARNS,
}
"""Of each kind, what is done by default, and what can be chosen. A kind that rests on a guess can end no job."""


def effect(verdict: Verdict, chosen: Mapping[Kind, Level], *, harmful: bool) -> Level:
    """Returns what becomes of a finding.

    Args:
        verdict: The finding.
        chosen: The user's levels, by kind.
        harmful: Whether training on would do harm. False for a difference that may be legitimate.

    Example:
        >>> uneven = Verdict("UnevenBatches", "rank 1 ran out of data.")
        >>> effect(uneven, {}, harmful=True), effect(uneven, {"UnevenBatches": "warn"}, harmful=True)
        ('raise', 'warn')
        >>> effect(Verdict("UnevenBatches", "…", guess="two threads read the loader"), {}, harmful=True)
        'warn'
        >>> effect(Verdict("Stalled", "…"), {"Stalled": "raise"}, harmful=False)
        'raise'
    """
    known = LEVELS.get(verdict.kind)  # an adapter of the user's own may have kinds of its own
    level = chosen.get(verdict.kind, "raise" if harmful else "warn")
    legitimate = known is not None and known.default == "raise" and not harmful
    return "warn" if level == "raise" and (verdict.guess or legitimate) else level


def as_warning(verdict: Verdict) -> Verdict:
    """Returns the warning for a finding that is not proved: it says why it may be wrong, and how to be exact.

    Args:
        verdict: The finding; one that is proved is returned as it is.
    """
    if not verdict.guess:
        return verdict
    return replace(
        verdict,
        why=f"This is a guess, and ends nothing: {verdict.guess}. {verdict.why}".strip(),
        remedy=(
            "to have it compared exactly, take the batches from handle.counted(loader) on the thread that trains. If "
            f"the ranks are meant to differ here, levels={{'{verdict.kind}': 'off'}}."
        ),
    )


def checked(value: object) -> dict[Kind, Level]:
    """Returns the user's levels as they are kept, in the order of `LEVELS`.

    Args:
        value: A mapping from kinds to levels.

    Raises:
        ValueError: If it is none, or has an unknown kind or a level that the kind does not accept; with the reason.

    Example:
        >>> checked({"Stalled": "raise"})
        {'Stalled': 'raise'}
    """
    if not isinstance(value, Mapping):
        raise ValueError
    given = cast("Mapping[object, object]", value)
    known: Mapping[object, KindLevels] = {**LEVELS}
    for kind, level in given.items():
        if kind not in known:
            raise ValueError(f"unknown kind {kind!r}{nearest(str(kind), LEVELS)}")
        accepted = known[kind].accepted
        if level not in accepted:
            raise ValueError(f"{kind} accepts {' or '.join(repr(each) for each in accepted)}, not {level!r}")
    return {kind: cast("Level", given[kind]) for kind in LEVELS if kind in given}


def parsed(text: str) -> dict[str, str]:
    """Returns the levels in the text of an environment variable.

    Raises:
        ValueError: If it is no list of kinds and levels.

    Example:
        >>> parsed("Stalled=raise, SameOrder=off")
        {'Stalled': 'raise', 'SameOrder': 'off'}
    """
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    if not all(sign for _, sign, _ in pairs):
        raise ValueError
    return {kind.strip(): level.strip() for kind, _, level in pairs}
