"""The documentation agrees with the code: its options, verdicts, links, make targets, paths and quoted examples."""

import ast
import dataclasses
import re
import textwrap
from pathlib import Path
from urllib.parse import unquote

import pytest

from countoff.core import Settings
from countoff.core.checks import KINDS
from tests.paths import ROOT, SOURCE_ROOTS

DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    ROOT / "benchmarks" / "README.md",
    ROOT / "tests" / "golden" / "README.md",
    ROOT / "tests" / "data_0_1" / "README.md",
    *sorted(DOCS.glob("*.md")),
]
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
OPTION = re.compile(r"^\| `(\w+)` \| `([^`]*)` \| (?:`(\w+)`|none) \|", re.MULTILINE)
QUESTION = re.compile(r"^\| [^|]+\? \| (`\w+`(?:, `\w+`)*) \| ([^|]+) \|$", re.MULTILINE)
LINK = re.compile(r"\[[^]]*\]\(([^)\s]+)\)")

NETWORK = {"socket", "ssl", "socketserver", "http", "urllib", "xmlrpc", "smtplib", "ftplib", "asyncio"}
NETWORK |= {"requests", "httpx", "aiohttp", "urllib3", "websockets", "grpc", "boto3", "huggingface_hub", "sentry_sdk"}
NETWORK |= {"apprise", "wandb", "mlflow", "comet_ml", "trackio", "tensorboard"}
"""Packages that can reach a network."""


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


def defaults() -> dict[str, str]:
    """The defaults of all options, as the pages show them."""
    return {name: repr(value) for name, value in dataclasses.asdict(Settings()).items()}


def test_settings_page_lists_every_option() -> None:
    """The settings page has each option with its default and its environment variable, in the order of the code."""
    documented = OPTION.findall((DOCS / "settings.md").read_text())
    assert [(name, default) for name, default, _ in documented] == list(defaults().items())
    for name, _, variable in documented:
        assert variable == {"enabled": "COUNTOFF", "on_finding": ""}.get(name, f"COUNTOFF_{name.upper()}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    """Each relative link of a page leads to a file of the repository, and to a heading in it."""
    relative = [link for link in LINK.findall(FENCE.sub("", page.read_text())) if "://" not in link]
    assert [link for link in relative if is_broken(page, link)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_compile(page: Path) -> None:
    """Each Python block of a page compiles."""
    for block in blocks(page, "python"):
        compile(block, page.name, "exec")


def test_quoted_adapter_is_the_example() -> None:
    """The adapter that the page shows is the one of the example, which tests run."""
    quoted = blocks(DOCS / "write-an-adapter.md", "python")[0]
    adapter = quoted[quoted.index("class Countoff") :].strip()
    assert adapter in (ROOT / "examples" / "own_trainer.py").read_text()


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda example: example.name)
def test_examples_show_their_command(example: Path) -> None:
    """Each example's docstring has the command that runs it."""
    docstring = example.read_text().split('"""')[1]
    command = rf"torchrun --standalone --nproc-per-node 2 (--max-restarts 2 )?examples/{re.escape(example.name)}\b"
    assert re.search(command, docstring)


def test_pages_name_no_path_of_a_machine() -> None:
    """No page and no example names a path of the machine on which it was written."""
    texts = "\n".join(page.read_text() for page in [*PAGES, *sorted((ROOT / "examples").glob("*.py"))])
    assert re.findall(r"(?<![\w.])/(?:work|tmp|home|root|shared)\b", texts) == []


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/start.md"])
def test_make_targets_exist(page: str) -> None:
    """Each `make` target that a page names is one of the Makefile's."""
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`make ([a-z-]+)", (ROOT / page).read_text()))
    assert named
    assert named <= targets


def section(page: Path, heading: str) -> str:
    """The text of one section of a page, up to the next heading of its level."""
    return page.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]


def test_readme_names_every_verdict_once() -> None:
    """README's table has every kind once, by the question that a user asks, and says which kinds end the job."""
    rows = QUESTION.findall(section(ROOT / "README.md", "What it checks"))
    listed = [(kind, level) for kinds, level in rows for kind in re.findall(r"\w+", kinds)]
    words = {"raise": "ends the job", "warn": "warns"}
    assert sorted(listed) == sorted((kind, words[info.level]) for kind, info in KINDS.items())


def test_glossary_is_alphabetical() -> None:
    """The glossary has each term once, in alphabetical order, with a text below it."""
    terms = re.findall(r"^## (.+)\n\n\S", (DOCS / "glossary.md").read_text(), re.MULTILINE)
    assert len(terms) == (DOCS / "glossary.md").read_text().count("\n## ")
    assert terms == sorted(set(terms), key=lambda term: term.lower().replace("_", " "))


@pytest.mark.parametrize("page", ["README.md", "docs/how-it-works.md", "docs/architecture.md", "CONTRIBUTING.md"])
def test_main_pages_link_to_the_glossary(page: str) -> None:
    """A reader of a main page finds the glossary."""
    assert re.search(r"\((docs/)?glossary\.md[#)]", (ROOT / page).read_text())


def imports(path: Path) -> set[str]:
    """The packages that a module imports, wherever in it."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    whole = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    parts = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in whole + parts}


def test_privacy_lists_every_module_that_can_reach_a_network() -> None:
    """The page names each module of countoff that imports what can reach a network, and no other one."""
    modules = {path: path.relative_to(root) for root in SOURCE_ROOTS for path in root.rglob("*.py")}
    reaching = {".".join(name.with_suffix("").parts) for path, name in modules.items() if imports(path) & NETWORK}
    table = section(DOCS / "privacy.md", "Check it")
    assert sorted(re.findall(r"`(countoff\.[\w.]+)`", table)) == sorted(reaching)


def test_site_has_every_page() -> None:
    """Each page of docs/ is in the site's table of contents, once."""
    trees = re.findall(r"```{toctree}\n(.*?)```", (DOCS / "index.md").read_text(), re.DOTALL)
    listed = [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]
    assert sorted(listed) == sorted(page.stem for page in DOCS.glob("*.md") if page.stem != "index")


def test_start_links_to_every_page() -> None:
    """Start lists each page of docs/, or what the site shows in its place: a checkout has no table of contents."""
    linked = {(DOCS / link).resolve() for link in LINK.findall(section(DOCS / "start.md", "All pages"))}
    shown = {page: re.findall(r"The site shows \[.*\]\((.*)\) here", page.read_text()) for page in DOCS.glob("*.md")}
    pages = {(DOCS / target).resolve() for page, stub in shown.items() for target in stub or [page.name]}
    assert pages - linked == {DOCS / "start.md", ROOT / "README.md"}


def test_api_reference_has_every_public_module() -> None:
    """The API reference names each public module of the core and of the adapters."""
    inside = {
        "at_exit",
        "constants",
        "flag",
        "forgotten",
        "formats",
        "messages",
        "packages",
        "software",
        "waiting",
        "whole_file",
    }
    modules = {path.stem for path in (ROOT / "core" / "countoff" / "core").glob("[a-z]*.py")} - inside
    core = {f"countoff.core.{name}" for name in modules}
    adapters = {f"countoff.{path.stem}" for path in (ROOT / "plugins" / "countoff").glob("[a-z]*.py")}
    named = set(re.findall(r"automodule:: (\S+)", (DOCS / "api.md").read_text()))
    assert core | adapters <= named


def test_paths_of_the_architecture_exist() -> None:
    """Each file that the map of the source tree names is in the repository, below its root or its room."""
    houses = [ROOT / "core" / "countoff" / "core", *(root / "countoff" for root in SOURCE_ROOTS)]
    roots = [ROOT, *houses, *(room for house in houses for room in house.iterdir() if room.is_dir())]
    named = re.findall(r"`([\w/*]+\.(?:py|md))`", FENCE.sub("", (DOCS / "architecture.md").read_text()))
    assert named
    assert [name for name in named if not any(list(root.glob(name)) for root in roots)] == []
