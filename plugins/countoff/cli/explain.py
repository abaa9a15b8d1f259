"""``countoff explain``: the section of docs/verdicts.md about one kind of verdict, without network or torch."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from countoff.core.checks import KINDS
from countoff.core.words import nearest

__all__ = ["explain"]

_PACKAGED = Path(__file__).with_name("verdicts.md")
"""Where the wheel has docs/verdicts.md."""
_OF_CHECKOUT = Path(__file__).parents[3] / "docs" / "verdicts.md"
"""The page itself, where countoff runs from its sources."""


def explain(chosen: argparse.Namespace) -> int:
    """Prints what a kind of verdict means, or the list of all kinds.

    Returns:
        The exit code, 0.

    Raises:
        ValueError: If there is no such kind; the message is one line, with the nearest kind.
    """
    if chosen.kind is None:
        width = max(len(kind) for kind in KINDS)
        for kind, info in KINDS.items():
            print(f"{kind:<{width}}  {info.meaning.replace('`', '')}")
        return 0
    print(_section(_known(chosen.kind)))
    return 0


def _known(name: str) -> str:
    """Returns the kind of this name, in whatever case."""
    kinds = {kind.lower(): kind for kind in KINDS}
    if name.lower() in kinds:
        return kinds[name.lower()]
    hint = nearest(name, KINDS) or "; countoff explain lists all kinds"
    raise ValueError(f"there is no verdict {name!r}{hint}")


def _section(kind: str) -> str:
    """Returns the text about a kind, without the targets of links, which lead nowhere in a terminal."""
    text = (_PACKAGED if _PACKAGED.exists() else _OF_CHECKOUT).read_text(encoding="utf-8")
    _, _, rest = text.partition(f"\n## {kind}\n")
    section = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", rest.partition("\n## ")[0])
    return f"{kind}\n{section.rstrip()}"
