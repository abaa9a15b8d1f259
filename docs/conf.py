"""The documentation as a site: `make docs`. The pages are Markdown, the API reference comes from the docstrings."""

import os
import re
from importlib import metadata
from pathlib import Path

from sphinx.application import Sphinx

DOCS = Path(__file__).parent
ROOT = DOCS.parent
# Pages outside docs/ that the site shows, by their name there.
OUTER_PAGES = {
    "index": ROOT / "README.md",
    "contributing": ROOT / "CONTRIBUTING.md",
    "security": ROOT / "SECURITY.md",
    "changelog": ROOT / "CHANGELOG.md",
    "benchmarks": ROOT / "benchmarks" / "README.md",
    "golden-tables": ROOT / "tests" / "golden" / "README.md",
}
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)#\s]+)")

project = "countoff"
author = "the countoff authors"
release = metadata.version("countoff")
html_title = f"countoff {release}"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "sphinx_llms_txt"]
# llms.txt lists the pages, and llms-full.txt has them all, for those who let an agent look for the cause of a failure.
llms_txt_summary = (
    "countoff names the rank that is out of step in a job on many GPUs. Of a job that has failed, its output has the "
    "verdict below a line with `countoff:`, and COUNTOFF_VERDICT_FILE has it as JSON. `countoff explain --json KIND` "
    "has the cause and the fix of a kind of verdict, `countoff report --json DIR` the facts of a trace, and "
    "`countoff check --json FILE` what a configuration does silently wrong."
)
exclude_patterns = ["_build"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
highlight_language = "none"  # of blocks that name no language, as messages of countoff's
myst_heading_anchors = 3  # headings are linked to by their names, as on GitHub
# Of a console with commands, these are copied, without the prompt and the output; of any other block, all of it.
copybutton_prompt_text = "$ "

# No framework is needed to build the site.
autodoc_mock_imports = [
    "accelerate",
    "composer",
    "lightning",
    "numpy",
    "pytorch_lightning",
    "streaming",
    "torch",
    "torchtitan",
    "transformers",
]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_numpy_docstring = False


def read_source(app: Sphinx, name: str, source: list[str]) -> None:
    """Puts a page from outside docs/ in place of its stub, and makes every link fit the site."""
    page = OUTER_PAGES.get(name)
    if page is not None:
        app.env.note_dependency(str(page))
        source[0] = f"{page.read_text()}\n{source[0].partition('<!-- site -->')[2]}"
    directory = DOCS if page is None else page.parent
    source[0] = LINK.sub(lambda link: f"]({site_path(directory / link[1])}", source[0])


def site_path(target: Path) -> str:
    """Where a file of the repository is on the site, relative to its pages; files that are no page are downloads."""
    target = Path(os.path.normpath(target))
    shown = {page: f"{name}.md" for name, page in OUTER_PAGES.items()}
    return shown.get(target) or os.path.relpath(target, DOCS)


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", read_source)
