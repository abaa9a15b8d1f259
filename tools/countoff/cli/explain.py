"""``countoff explain``: what a name in a message or an exit code means, without network or torch."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

from countoff.core import formats
from countoff.core.checks import KINDS
from countoff.core.messages import nearest
from countoff.plan.issues import CODES

__all__ = ["explain"]

_PACKAGED = Path(__file__).with_name("verdicts.md")
"""Where the wheel has docs/verdicts.md."""
_OF_CHECKOUT = Path(__file__).parents[3] / "docs" / "verdicts.md"
"""The page itself, where countoff runs from its sources."""
_ERRORS = "Errors and exit codes"
"""The section of the page whose parts explain what is no kind of verdict."""
_WIDEST = 100
"""Longer lines are hard to read."""


@dataclass(frozen=True)
class Subject:
    """What can be explained.

    Attributes:
        name: Its name, as a message or an exit code shows it.
        meaning: What it means, in one line.
        text: All about it, in Markdown.
    """

    name: str
    meaning: str
    text: str


def explain(chosen: argparse.Namespace) -> int:
    """Prints what names mean, or the list of all names.

    Returns:
        The exit code, 0.

    Raises:
        ValueError: If there is no such name; the message is one line, with the nearest name.
    """
    known = _subjects()
    found = [_known(name, known) for name in chosen.names]
    if chosen.json:
        shown = [{"format": formats.JSON_OUTPUT, **asdict(each)} for each in found or known.values()]
        print(json.dumps(shown[0] if len(shown) == 1 else shown, indent=2))
    elif found:
        _print(found)
    else:
        _print_list(list(known.values()))
    return 0


def _subjects() -> Mapping[str, Subject]:
    """All that can be explained, by name: kinds of verdicts, errors and exit codes, codes of ``countoff check``."""
    page = (_PACKAGED if _PACKAGED.exists() else _OF_CHECKOUT).read_text(encoding="utf-8")
    found = [Subject(kind, _plain(info.meaning), _section(page, "##", kind)) for kind, info in KINDS.items()]
    errors = _section(page, "##", _ERRORS)
    for title in re.findall(r"^### (.+)$", errors, re.MULTILINE):
        text = _section(f"\n{errors}", "###", title)
        found.append(Subject(title.split()[-1], _plain(text.partition(". ")[0]), text))
    found += [Subject(code, meaning, _of_check(meaning)) for code, meaning in CODES.items()]
    return {each.name: each for each in found}


def _of_check(meaning: str) -> str:
    first = f"{meaning[0].upper()}{meaning[1:]}."
    return f"{first} It is a code of `countoff check`, whose line has the numbers and what to do."


def _section(page: str, level: str, title: str) -> str:
    """Returns the text below a heading, without the targets of links, which lead nowhere in a terminal."""
    _, _, rest = page.partition(f"\n{level} {title}\n")
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", rest.partition(f"\n{level} ")[0]).strip()


def _plain(text: str) -> str:
    return " ".join(text.replace("`", "").split())


def _known(name: str, known: Mapping[str, Subject]) -> Subject:
    """Returns the subject of this name, in whatever case."""
    names = {each.lower(): each for each in known}
    if name.lower() in names:
        return known[names[name.lower()]]
    hint = nearest(name, known) or "; countoff explain lists all names"
    raise ValueError(f"nothing is called {name!r}{hint}")


def _print(subjects: Sequence[Subject]) -> None:
    """Prints all about subjects; without rich, their Markdown as it is."""
    try:
        from rich.console import Console
        from rich.markdown import CodeBlock, Markdown, MarkdownElement
        from rich.padding import Padding
        from rich.text import Text
    except ModuleNotFoundError:
        print("\n\n".join(f"{each.name}\n\n{each.text}" for each in subjects))
        return

    class Message(CodeBlock):
        """A block of code that is wrapped at words: rich's own cuts off what is longer than a line."""

        def __rich_console__(self, console: object, options: object) -> Iterator[Padding]:
            yield Padding(Text(str(self.text).rstrip(), style="yellow"), (0, 2))

    class Page(Markdown):
        elements: ClassVar[dict[str, type[MarkdownElement]]] = {**Markdown.elements, "fence": Message}

    console = Console(highlight=False)
    console.width = min(console.width, _WIDEST)
    with console.capture() as printed:
        for place, each in enumerate(subjects):
            if place:
                console.rule()
            console.print(Text(each.name, style="bold"))
            console.print()
            console.print(Page(each.text, hyperlinks=False))
    text = printed.get()
    if not console.is_terminal:  # rich fills lines up with spaces, which a file would keep
        text = re.sub(r" +$", "", text, flags=re.MULTILINE)
    sys.stdout.write(text)


def _print_list(subjects: Sequence[Subject]) -> None:
    """Prints a row for each subject: on a terminal as wide as that is, in a pipe one line, for grep."""
    names = max(len(each.name) for each in subjects)
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    for each in subjects:
        row = f"{each.name:<{names}}  {each.meaning}"
        print(textwrap.fill(row, columns, subsequent_indent=" " * (names + 2), break_on_hyphens=False))
