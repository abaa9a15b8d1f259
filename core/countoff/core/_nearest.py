"""The names that were probably meant by one that does not exist: of a command, a flag, a setting, a field."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["nearest"]

_ALIKE = 0.6
"""How much of two names must be the same, as `difflib` measures it, for one to be meant by the other."""
_SHORTEST = 2
"""Letters of a beginning that is enough to find the whole name."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns ``; did you mean …?`` with the known names nearest to the given one; an empty text if none is near.

    Names that begin with the given one are the nearest, then the most similar one, in whatever case. Several are named
    only where they are equally near.

    Example:
        >>> nearest("bacth_size", ["batch_size", "seq_len"])
        '; did you mean batch_size?'
        >>> nearest("--dp", ["--dp-shard", "--dp-replicate", "--cp"])
        '; did you mean --dp-shard or --dp-replicate?'
    """
    names = {one: one.lower() for one in known}
    given = name.lower()
    near = [one for one, lower in names.items() if len(given.strip("-")) >= _SHORTEST and lower.startswith(given)]
    if not near:
        alike = {one: difflib.SequenceMatcher(None, lower, given).ratio() for one, lower in names.items()}
        most = max(alike.values(), default=0.0)
        near = [one for one, ratio in alike.items() if ratio == most >= _ALIKE]
    if not near:
        return ""
    *others, last = near
    before = f"{', '.join(others)} or " if others else ""
    return f"; did you mean {before}{last}?"
