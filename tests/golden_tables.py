"""The tables in tests/golden that the real frameworks have made."""

import csv

from tests.paths import GOLDEN

Row = dict[str, str]


def golden(table: str, *, rows: int) -> list[Row]:
    """The rows of a table, which has so many of them."""
    with (GOLDEN / f"{table}.csv").open(newline="") as lines:
        read = list(csv.DictReader(lines))
    assert len(read) == rows
    return read
