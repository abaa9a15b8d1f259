"""The text of every message in every adapter, as a golden file per kind: a change of words is one that somebody sees.

``COUNTOFF_WRITE_GOLDEN=1 python -m pytest tests/test_messages.py`` writes the files again, docs/verdicts.md, which
shows some of them, and the table in docs/how-it-works.md.
"""

import os
import re
from collections import Counter
from pathlib import Path

import pytest

from countoff.core.checks import KINDS
from tests import verdicts_page
from tests.adapters import MESSAGES
from tests.paths import ROOT
from tests.situations import ALL, SITUATIONS, Situation

GOLDEN_MESSAGES = ROOT / "tests" / "golden" / "messages"
WRITES = os.environ.get("COUNTOFF_WRITE_GOLDEN") == "1"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COUNTOFF_WRITE_GOLDEN", raising=False)  # no option of countoff


def possible(adapter: str) -> list[Situation]:
    """The situations that can happen in a framework."""
    return [situation for situation in SITUATIONS if adapter in situation.adapters]


def messages(kind: str, capsys: pytest.CaptureFixture[str]) -> str:
    """All messages of one kind, each once, below what has happened and in which adapters it has these words."""
    texts: list[str] = []
    for situation in SITUATIONS:
        if situation.kind == kind:
            adapters: dict[str, list[str]] = {}
            for adapter in situation.adapters:
                adapters.setdefault(situation.message(adapter, capsys), []).append(adapter)
            texts += [f"# {situation.title}\n", *(f"## {', '.join(of)}\n\n{text}\n" for text, of in adapters.items())]
    return "\n".join(texts)


@pytest.mark.parametrize("kind", KINDS)
def test_every_message_is_the_golden_one(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = messages(kind, capsys)
    file = GOLDEN_MESSAGES / f"{kind}.txt"
    if WRITES:
        file.write_text(found)
    assert found == file.read_text()


@pytest.mark.parametrize("adapter", ALL)
def test_every_check_of_an_adapter_has_its_message(adapter: str) -> None:
    """There is a situation of each kind that the adapter declares, and of no other."""
    assert {situation.kind for situation in possible(adapter)} == set(MESSAGES[adapter].kinds)


@pytest.mark.parametrize("adapter", ALL)
def test_every_message_says_why_or_what_to_do_and_where_to_read_more(
    adapter: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for situation in possible(adapter):
        head, *rest = situation.message(adapter, capsys).splitlines()
        assert head.startswith(f"countoff: {situation.kind}: ")
        assert any(line.startswith("  do:  ") for line in rest), (situation.title, rest)
        assert rest[-1] == f"  more: countoff explain {situation.kind}"
        assert max(Counter(rest).values()) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_no_message_has_more_digits_than_a_person_writes(kind: str) -> None:
    text = (GOLDEN_MESSAGES / f"{kind}.txt").read_text()
    assert re.findall(r"\d\.\d{4,}", text) == []
    assert "known on every rank" not in text


def test_the_page_of_verdicts_is_what_its_command_writes() -> None:
    if WRITES:
        verdicts_page.PAGE.write_text(verdicts_page.page())
    assert verdicts_page.PAGE.read_text() == verdicts_page.page()


def test_each_section_of_the_page_begins_with_a_golden_message() -> None:
    """In the order of the code; below the message, the cause and what to do."""
    golden = "\n".join(file.read_text() for file in sorted(GOLDEN_MESSAGES.glob("*.txt")))
    sections = re.findall(r"^## (\w+)\n(.*?)(?=^## )", verdicts_page.PAGE.read_text(), re.MULTILINE | re.DOTALL)
    texts = {kind: text for kind, text in sections if kind in KINDS}
    assert list(texts) == list(KINDS)
    for kind, text in texts.items():
        before, message, below = text.split("```")
        assert len(before.strip().splitlines()) < 3
        assert message.startswith(f"\ncountoff: {kind}: ")
        assert message in golden
        assert re.findall(r"^\*\*(\w+)\.\*\*", below, re.MULTILINE) == ["Cause", "Fix"], kind


def has_table(page: Path, head: str, rows: str) -> bool:
    """Whether a page has a table, which is written there first if that is asked for."""
    text, head = page.read_text(), f"{head}\n{'|---' * head.count(' | ')}|---|\n"
    if WRITES:
        text = re.sub(rf"{re.escape(head)}(?:\|.*\n)*", lambda _: head + rows, text)
        page.write_text(text)
    return f"\n{head}{rows}\n" in text


def test_how_it_works_has_the_table_of_levels() -> None:
    """The table has the default of each kind and the levels that it accepts; kinds that are alike share a row."""
    alike: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for kind in KINDS.values():
        alike.setdefault((kind.level, kind.accepts), []).append(f"`{kind.name}`")
    rows = "".join(
        f"| {', '.join(kinds)} | `{level}` | {', '.join(f'`{each}`' for each in accepts)} |\n"
        for (level, accepts), kinds in alike.items()
    )
    assert has_table(ROOT / "docs" / "how-it-works.md", "| kind | default | accepts |", rows)


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Of docs/write-an-adapter.md.
OWN = "give every rank the same number of batches: Rowboat goes on until the loader ends."
QUOTED = re.compile(r"^ *(?:\[rank 0\])?   ?(?:why:|do: |or: ) (.+)$", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_pages_quote_what_is_printed(page: Path) -> None:
    """Each cause and remedy in a message that a page quotes is one of the golden files, but for its numbers."""
    golden = "\n".join(file.read_text() for file in sorted(GOLDEN_MESSAGES.glob("*.txt")))
    known = {re.sub(r"\d+", "0", text) for text in QUOTED.findall(golden)} | {OWN}
    quoted = [text for text in QUOTED.findall(page.read_text()) if "train.py:" not in text]
    assert [text for text in quoted if re.sub(r"\d+", "0", text) not in known] == []
