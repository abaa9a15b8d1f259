"""The matrix as a markdown table, as JSON, and as lines on the way."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from integration_tests.faults.cases import CASES
from integration_tests.faults.matrix import Row

_HEAD = ("fault", "adapter", "ranks", "device", "verdict", "names", "ms", "exit codes", "same words", "left behind", "")


def line(row: Row) -> str:
    """One cell in one line."""
    verdict = row.kind or "silence"
    outcome = "ok" if not row.wrong else "WRONG: " + "; ".join(row.wrong)
    return f"{row.fault} {row.adapter} {_ranks(row)} ranks, {row.device}: {verdict}, {row.seconds:.1f} s: {outcome}"


def markdown(rows: Sequence[Row]) -> str:
    """The whole matrix."""
    table = [_HEAD, tuple("---" for _ in _HEAD), *(_cells(row) for row in rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in table)


def promptness(rows: Sequence[Row]) -> str:
    """The milliseconds from the proof to the last rank, of the verdicts that give them, by number of ranks."""
    lines = ["| ranks | jobs | median ms | quartiles | most |", "|---|---|---|---|---|"]
    for ranks in sorted({row.ranks for row in rows}):
        found = sorted(
            row.milliseconds
            for row in rows
            if row.ranks == ranks and row.since == "proof" and row.milliseconds is not None
        )
        if len(found) > 1:
            low, middle, high = statistics.quantiles(found, n=4)
            lines.append(f"| {ranks} | {len(found)} | {middle:.1f} | {low:.1f} to {high:.1f} | {found[-1]:.1f} |")
    return "\n".join(lines)


def _ranks(row: Row) -> str:
    """The number of ranks; that of hosts and of ranks on each, where there are several hosts."""
    return str(row.ranks) if row.hosts == 1 else f"{row.hosts} × {row.ranks // row.hosts}"


def _cells(row: Row) -> tuple[str, ...]:
    case = CASES[row.fault]
    milliseconds = "" if row.milliseconds is None else f"{row.milliseconds:.1f} after the {row.since}"
    if milliseconds and case.said_first:
        milliseconds += f" ({case.said_first})"
    named = ", ".join(map(str, sorted(row.named))) if row.kind and not case.all_named else "-"
    return (
        f"{row.fault} {case.title}",
        row.adapter,
        _ranks(row),
        row.device,
        row.kind or "silence",
        named,
        milliseconds or "-",
        " ".join("alive" if code is None else str(code) for code in row.exit_codes),
        "yes" if row.same_words else "NO",
        ", ".join(row.left) or "nothing",
        "ok" if not row.wrong else "WRONG: " + "; ".join(row.wrong),
    )


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows with everything that was measured."""
    return [asdict(row) for row in rows]
