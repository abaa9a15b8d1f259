"""Reads a trace as a test wants it: every line whole, with the keys of its kind."""

import json
from pathlib import Path
from typing import Any

from countoff.core.trace.format import LINES, file_name


def read(directory: Path, rank: int = 0) -> list[dict[str, Any]]:
    """The lines of a rank."""
    lines = [json.loads(line) for line in (directory / file_name(rank)).read_text().splitlines()]
    for line in lines:
        keys = LINES[line["k"]]
        assert {"k", "t", *keys.required} <= line.keys() <= {"k", "t", "g", *keys.required, *keys.optional}, line
    return lines


def kinds(lines: list[dict[str, Any]]) -> list[str]:
    """The kinds of the lines that do not depend on how long anything took."""
    return [line["k"] for line in lines if line["k"] not in ("tick", "pause")]


def of(kind: str, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of one kind."""
    return [line for line in lines if line["k"] == kind]
