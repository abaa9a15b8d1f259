"""The text of every message in every adapter, as golden files: a change of words is a change somebody looks at.

``COUNTOFF_WRITE_GOLDEN=1 python -m pytest tests/test_messages.py`` writes the files again, the messages and the table
in docs/verdicts.md with its tables, and the one in docs/how-it-works.md.
"""

import os
import re
from collections import Counter
from pathlib import Path

import pytest

from countoff._adapter.words import Words
from countoff.core.checks import KINDS
from tests.adapters import WORDS
from tests.paths import ROOT
from tests.situations import ALL, SITUATIONS, Situation

MESSAGES = ROOT / "tests" / "golden" / "messages"
PAGE = ROOT / "docs" / "verdicts.md"
WRITES = os.environ.get("COUNTOFF_WRITE_GOLDEN") == "1"
SHOWN = {
    "UnevenBatches": ("lightning", "a rank's train loader is short, on 4 ranks"),
    "PlanMismatch": ("torch", "position differs, on 2 ranks"),
    "StepMismatch": ("torch", "a rank has skipped a step, found at the end of the epoch"),
    "RankMapError": ("lingua", "dp_ranks of a wrong factor, on 2 × 4 ranks"),
    "LostRank": ("torch", "a rank has raised an exception"),
    "Stalled": ("torch", "a rank's loader never returns"),
    "WrongLength": ("composer", "len(loader) counts the batches of both ranks"),
    "Truncated": ("composer", "Composer ends all ranks at the shortest"),
    "DuplicateData": ("torch", "all ranks read the same"),
    "WrongHorizon": ("accelerate", "a schedule made in steps"),
}
"""The messages that docs/verdicts.md shows, by adapter and situation; of any other kind, the first one."""


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COUNTOFF_WRITE_GOLDEN", raising=False)  # no option of countoff


def possible(adapter: str) -> list[Situation]:
    """The situations that can happen in a framework."""
    return [situation for situation in SITUATIONS if adapter in situation.adapters]


def messages(adapter: str, capsys: pytest.CaptureFixture[str]) -> str:
    """All messages of one adapter, each below what has happened."""
    texts = [f"# {each.kind}: {each.title}\n\n{each.message(adapter, capsys)}\n" for each in possible(adapter)]
    return "\n".join(texts)


@pytest.mark.parametrize("adapter", ALL)
def test_every_message_is_the_golden_one(adapter: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = messages(adapter, capsys)
    file = MESSAGES / f"{adapter}.txt"
    if WRITES:
        file.write_text(found)
    assert found == file.read_text()


@pytest.mark.parametrize("adapter", ALL)
def test_every_check_of_an_adapter_has_its_message(adapter: str) -> None:
    """The golden file has each kind that the adapter declares, and no other."""
    assert {situation.kind for situation in possible(adapter)} == set(WORDS[adapter].kinds)


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


@pytest.mark.parametrize("adapter", ALL)
def test_no_message_has_more_digits_than_a_person_writes(adapter: str) -> None:
    text = (MESSAGES / f"{adapter}.txt").read_text()
    assert re.findall(r"\d\.\d{4,}", text) == []
    assert "known on every rank" not in text


def example(kind: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The message that the page shows for a kind, as rank 0 prints it."""
    first = next((each.adapters[0], each.title) for each in SITUATIONS if each.kind == kind)
    adapter, title = SHOWN.get(kind, first)
    (situation,) = [each for each in possible(adapter) if (each.kind, each.title) == (kind, title)]
    return "".join(f"[rank 0] {line}\n" for line in situation.message(adapter, capsys).splitlines())


def test_the_page_shows_real_messages(capsys: pytest.CaptureFixture[str]) -> None:
    """Each section of docs/verdicts.md begins with a message of the golden files."""
    head, *sections = re.split(r"^(?=## )", PAGE.read_text(), flags=re.MULTILINE)
    found = [head]
    for section in sections:
        kind = section.split()[1]
        if kind in KINDS:
            shown = example(kind, capsys)
            section = re.sub(
                r"```\n.*?```", lambda _, shown=shown: f"```\n{shown}```", section, count=1, flags=re.DOTALL
            )
        found.append(section)
    if WRITES:
        PAGE.write_text("".join(found))
    assert "".join(found) == PAGE.read_text()


def test_the_page_has_a_section_for_each_kind() -> None:
    """In the order of the code, and each with its cause, an example and what to do."""
    sections = re.findall(r"^## (\w+)\n(.*?)(?=^## )", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    kinds = [kind for kind, _ in sections if kind in KINDS]
    assert kinds == list(KINDS)
    for kind, text in sections:
        if kind in KINDS:
            assert re.findall(r"^\*\*(\w+)\.\*\*", text, re.MULTILINE) == ["Cause", "Example", "Fix"], kind


def cell(words: Words, kind: str) -> str:
    """Whether an adapter can report a kind, and under which condition."""
    return words.only.get(kind, "yes") if kind in words.kinds else "no"


def test_the_table_of_checks_is_what_adapters_declare() -> None:
    """The page's table of checks has each kind and each adapter, with the condition where there is one."""
    head = "| |" + "".join(f" {words.framework} |" for words in WORDS.values())
    rows = [head, "|---" * (len(WORDS) + 1) + "|"]
    for kind in KINDS:
        cells = "".join(f" {cell(words, kind)} |" for words in WORDS.values())
        rows.append(f"| [`{kind}`](#{kind.lower()}) |{cells}")
    table = "\n".join(rows)
    page = PAGE.read_text()
    if WRITES:
        page = re.sub(r"^\| \|.*?\n(?=\n)", lambda _: f"{table}\n", page, count=1, flags=re.MULTILINE | re.DOTALL)
        PAGE.write_text(page)
    assert table in page


def has_table(page: Path, head: str, rows: str) -> bool:
    """Whether a page has a table, which is written there first if that is asked for."""
    text, head = page.read_text(), f"{head}\n{'|---' * head.count(' | ')}|---|\n"
    if WRITES:
        text = re.sub(rf"{re.escape(head)}(?:\|.*\n)*", lambda _: head + rows, text)
        page.write_text(text)
    return f"\n{head}{rows}\n" in text


def test_the_page_has_the_table_of_kinds() -> None:
    """The page's first table has each kind with its meaning and its default."""
    rows = "".join(
        f"| [`{kind.name}`](#{kind.name.lower()}) | {kind.meaning} | {kind.default} |\n" for kind in KINDS.values()
    )
    assert has_table(PAGE, "| verdict | meaning | default |", rows)


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
    golden = "\n".join(file.read_text() for file in sorted(MESSAGES.glob("*.txt")))
    known = {re.sub(r"\d+", "0", text) for text in QUOTED.findall(golden)} | {OWN}
    quoted = [text for text in QUOTED.findall(page.read_text()) if "train.py:" not in text]
    assert [text for text in quoted if re.sub(r"\d+", "0", text) not in known] == []
