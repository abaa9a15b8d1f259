"""Comparison of what ranks reported at a roll call: their plans, settings and versions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from countoff.core.verdict import Verdict, names_of

PROOF_FIELDS = (
    "batches_per_epoch",
    "proven_batches_per_epoch",
    "batch_size",
    "gradient_accumulation_steps",
    "max_epochs",
    "max_steps",
    "position",
    "dp_degree",
)
"""Fields of a `FitPlan` in which ranks must not differ."""


def group_ranks_by_value(records: Mapping[int, Mapping[str, Any]], field: str) -> list[tuple[Any, list[int]]]:
    """The values of one field with the ranks that hold each, the fewest ranks first.

    >>> group_ranks_by_value({0: {"lr": 1}, 1: {"lr": 2}, 2: {"lr": 1}}, "lr")
    [(2, [1]), (1, [0, 2])]
    """
    found: list[tuple[Any, list[int]]] = []
    for rank, record in sorted(records.items()):
        value = record.get(field)
        for known, ranks in found:
            if known == value:
                ranks.append(rank)
                break
        else:
            found.append((value, [rank]))
    return sorted(found, key=lambda group: len(group[1]))


def first_difference(
    records: Mapping[int, Mapping[str, Any]], fields: Sequence[str]
) -> tuple[str, tuple[int, ...]] | None:
    """The first of `fields` in which ranks differ, in words, with the ranks of the smallest group.

    >>> plan = {"batches_per_epoch": 5}
    >>> first_difference({0: plan, 1: {"batches_per_epoch": 4}, 2: plan}, ["batches_per_epoch"])
    ('batches_per_epoch is 4 on rank 1, 5 on ranks 0, 2', (1,))
    """
    for name in fields:
        found = group_ranks_by_value(records, name)
        if len(found) > 1:
            words = ", ".join(f"{_value(value)} on {names_of(ranks)}" for value, ranks in found[:4])
            smallest, largest = found[0][1], found[-1][1]
            return f"{name} is {words}", tuple(smallest if len(smallest) < len(largest) else sorted(records))
    return None


def judge_plans(plans: Mapping[int, Mapping[str, Any]]) -> Verdict | None:
    """Returns a `PlanMismatch` if the ranks' plans differ in one of `PROOF_FIELDS`."""
    difference = first_difference(plans, PROOF_FIELDS)
    if difference is None:
        return None
    sentence, ranks = difference
    return Verdict(
        "PlanMismatch",
        f"before the first batch, {sentence}.",
        ranks,
        why="Ranks that count to different numbers take different decisions at every limit, schedule and epoch's end.",
        time=time.time(),
    )


def judge_tick_batches(tick_batches: Mapping[int, Any]) -> Verdict | None:
    """Returns a `SettingsMismatch` if ranks look at steps and learning rates after different numbers of batches."""
    settings = {rank: {"tick_batches": batches} for rank, batches in tick_batches.items()}
    difference = first_difference(settings, ["tick_batches"])
    if difference is None:
        return None
    sentence, ranks = difference
    effect = "steps and learning rates are compared only after batches at which all of them look."
    return Verdict("SettingsMismatch", f"{sentence}: {effect}", ranks, time=time.time())


def judge_versions(versions: Mapping[int, Mapping[str, Any]]) -> Verdict | None:
    """Returns a `VersionMismatch` if ranks run different versions of a package."""
    names = sorted({name for version in versions.values() for name in version})
    difference = first_difference(versions, names)
    if difference is None:
        return None
    sentence, ranks = difference
    return Verdict("VersionMismatch", f"{sentence}.", ranks, time=time.time())


def agreed_fields(plans: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Names of the fields that have the same value in all plans."""
    names = sorted({name for plan in plans.values() for name in plan})
    return [name for name in names if len(group_ranks_by_value(plans, name)) == 1]


def _value(value: Any) -> str:
    return "unknown" if value is None else str(value)
