"""Says what is not observed, and why, where the program must go on all the same."""

from __future__ import annotations

import functools
import sys

__all__ = ["say_unobserved"]


@functools.cache
def say_unobserved(name: str, reason: str) -> None:
    """Prints once that something is not observed.

    Args:
        name: What it is.
        reason: Why, in one line.
    """
    print(f"countoff: {name} is not observed: {reason}", file=sys.stderr, flush=True)
