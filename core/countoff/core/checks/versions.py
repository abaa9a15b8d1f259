"""Do ranks run the same versions of what computes? `VersionMismatch`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from countoff.core.checks.check import Check, FitStart
from countoff.core.checks.plan import first_difference
from countoff.core.protocol.records import Records
from countoff.core.verdict import Cause, Verdict, VerdictKind

__all__ = ["VERSION_MISMATCH", "VersionCheck", "judge_versions"]

VERSION_MISMATCH = VerdictKind(
    "VersionMismatch",
    "ranks run different versions of Python, torch, countoff or the framework",
    causes={"": Cause(remedy="install the same versions on every host.")},
)


class VersionCheck(Check):
    """Compares versions at the roll call."""

    def report(self, start: FitStart, room: int) -> Mapping[str, Any]:  # noqa: D102
        return {"versions": dict(start.versions)}

    def compare_reports(self, reports: Records, *, complete: bool, refused: bool) -> Iterator[Verdict | None]:  # noqa: D102
        yield judge_versions({rank: report["versions"] for rank, report in reports.items()})


def judge_versions(versions: Mapping[int, Mapping[str, Any]]) -> Verdict | None:
    """Returns a `VersionMismatch` if ranks run different versions of a package."""
    names = sorted({name for version in versions.values() for name in version})
    difference = first_difference(versions, names)
    if difference is None:
        return None
    sentence, ranks = difference
    return VERSION_MISMATCH.found(f"{sentence}.", ranks)
