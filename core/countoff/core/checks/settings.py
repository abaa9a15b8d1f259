"""Do ranks compare their steps and learning rates after the same batches? `SettingsMismatch`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from countoff.core.checks.check import Check, FitStart
from countoff.core.checks.plan import first_difference
from countoff.core.protocol.records import Records
from countoff.core.verdict import Cause, Verdict, VerdictKind

__all__ = ["SETTINGS_MISMATCH", "SettingsCheck", "judge_tick_batches"]

SETTINGS_MISMATCH = VerdictKind(
    "SettingsMismatch",
    "ranks have different `tick_batches`",
    causes={"": Cause(remedy="give every rank the same tick_batches.")},
)


class SettingsCheck(Check):
    """Compares `tick_batches` at the roll call.

    Args:
        tick_batches: Batches of this rank from one tick to the next.
    """

    def __init__(self, tick_batches: int) -> None:
        self._tick_batches = tick_batches

    def report(self, start: FitStart, room: int) -> Mapping[str, Any]:  # noqa: D102
        return {"ticks": self._tick_batches}

    def compare_reports(self, reports: Records, *, complete: bool, refused: bool) -> Iterator[Verdict | None]:  # noqa: D102
        yield judge_tick_batches({rank: report.get("ticks") for rank, report in reports.items()})


def judge_tick_batches(tick_batches: Mapping[int, Any]) -> Verdict | None:
    """Returns a `SettingsMismatch` if ranks look at steps and learning rates after different numbers of batches."""
    settings = {rank: {"tick_batches": batches} for rank, batches in tick_batches.items()}
    difference = first_difference(settings, ["tick_batches"])
    if difference is None:
        return None
    sentence, ranks = difference
    effect = "steps and learning rates are compared only after batches at which all of them look."
    return SETTINGS_MISMATCH.found(f"{sentence}: {effect}", ranks)
