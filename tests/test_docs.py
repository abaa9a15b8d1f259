"""What the documentation says of the code is so: its options, its links, its code, the example that it quotes."""

import dataclasses
import re
import textwrap
from pathlib import Path
from urllib.parse import unquote

import pytest

from countoff.core import Settings

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
OPTION = re.compile(r"^\| `(\w+)` \| `([^`]*)` \| `(\w+)` \|", re.MULTILINE)
LINK = re.compile(r"\[[^]]*\]\(([^)\s]+)\)")


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language on a page."""
    found = FENCE.finditer(page.read_text())
    return [textwrap.dedent(block["text"]) for block in found if block["language"] == language]


def anchors(page: Path) -> set[str]:
    """The names by which a page's headings are linked to."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def is_broken(page: Path, link: str) -> bool:
    """Whether a relative link leads to no file of the repository, or to no heading in it."""
    path, _, anchor = unquote(link).partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists() or not target.is_relative_to(ROOT):
        return True
    return bool(anchor) and anchor not in anchors(target)


def test_the_settings_page_lists_every_option_with_its_default_and_variable() -> None:
    documented = OPTION.findall((ROOT / "docs" / "settings.md").read_text())
    options = [(field.name, repr(field.default)) for field in dataclasses.fields(Settings)]
    assert [(name, default) for name, default, _ in documented] == options
    for name, _, variable in documented:
        assert variable == ("COUNTOFF" if name == "enabled" else f"COUNTOFF_{name.upper()}")


def test_the_readme_shows_the_defaults_that_hold() -> None:
    shown = re.findall(r"^\| `(\w+)` \| `([^`]*)` \| [^`|]*\|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert dict(shown) == {field.name: repr(field.default) for field in dataclasses.fields(Settings)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    relative = [link for link in LINK.findall(FENCE.sub("", page.read_text())) if "://" not in link]
    assert [link for link in relative if is_broken(page, link)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_compile(page: Path) -> None:
    for block in blocks(page, "python"):
        compile(block, page.name, "exec")


def test_the_adapter_of_the_docs_is_the_one_that_runs() -> None:
    quoted = blocks(ROOT / "docs" / "write-an-adapter.md", "python")[0]
    adapter = quoted[quoted.index("class Countoff") :].strip()
    assert adapter in (ROOT / "examples" / "own_trainer.py").read_text()


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda example: example.name)
def test_an_example_says_how_to_run_it(example: Path) -> None:
    docstring = example.read_text().split('"""')[1]
    assert f"torchrun --standalone --nproc-per-node 2 examples/{example.name}\n" in docstring


def test_nothing_in_the_documentation_depends_on_the_machine_on_which_it_was_written() -> None:
    texts = "\n".join(page.read_text() for page in [*PAGES, *sorted((ROOT / "examples").glob("*.py"))])
    assert re.findall(r"(?<![\w.])/(?:work|tmp|home|root|shared)\b", texts) == []


def test_the_make_targets_of_the_readme_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`make ([a-z-]+)`", (ROOT / "README.md").read_text()))
    assert named
    assert named <= targets
