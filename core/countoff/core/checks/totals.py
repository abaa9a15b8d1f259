"""Does the framework count the samples of a step once? `WrongTotal`. Adapters look for it."""

from __future__ import annotations

from countoff.core.verdict import VerdictKind

__all__ = ["WRONG_TOTAL"]

WRONG_TOTAL = VerdictKind(
    "WrongTotal",
    "the framework's total batch size counts each batch once per process (`split_batches`)",
    ends=False,
)
