"""What becomes of a finding: it ends the job, it is a warning, or nothing is said of it. Everything asks here.

Two things decide: what the user has chosen for its kind, and whether it does harm. A difference that may be legitimate,
such as evaluations of different lengths, warns at most.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from countoff.core.checks import KINDS
from countoff.core.messages import nearest
from countoff.core.verdict import Level, Verdict, VerdictKind

__all__ = ["checked", "effect", "parsed"]


def effect(verdict: Verdict, chosen: Mapping[str, Level]) -> Level:
    """Returns what becomes of a finding.

    Args:
        verdict: The finding.
        chosen: The user's levels, by kind.

    Example:
        >>> uneven = Verdict("UnevenBatches", "rank 1 ran out of data.")
        >>> effect(uneven, {}), effect(uneven, {"UnevenBatches": "warn"})
        ('raise', 'warn')
        >>> effect(Verdict("UnevenBatches", "rank 1 ran out of data.", harmful=False), {})
        'warn'
        >>> effect(Verdict("Stalled", "…"), {}), effect(Verdict("Stalled", "…"), {"Stalled": "raise"})
        ('warn', 'raise')
    """
    kind = KINDS.get(verdict.kind)  # an adapter of the user's own may have kinds of its own
    harms_by_default = kind is not None and kind.level == "raise"
    harmful = harms_by_default if verdict.harmful is None else verdict.harmful
    level = chosen.get(verdict.kind, "raise" if harmful else "warn")
    legitimate = harms_by_default and not harmful
    return "warn" if level == "raise" and legitimate else level


def checked(value: object) -> dict[str, Level]:
    """Returns the user's levels as they are kept, in the order of `KINDS`.

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
    known = cast("Mapping[object, VerdictKind]", KINDS)
    for kind, level in given.items():
        if kind not in known:
            raise ValueError(f"unknown kind {kind!r}{nearest(str(kind), KINDS)}")
        accepted = known[kind].accepts
        if level not in accepted:
            raise ValueError(f"{kind} accepts {' or '.join(repr(each) for each in accepted)}, not {level!r}")
    return {kind: cast("Level", given[kind]) for kind in KINDS if kind in given}


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
