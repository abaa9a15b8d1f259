"""The examples in the docstrings of the plugins. Those of the core are run by pytest itself."""

import doctest
import importlib

import pytest

from tests.paths import ROOT

PLUGINS = ROOT / "plugins"
MODULES = [
    ".".join(file.relative_to(PLUGINS).with_suffix("").parts)
    for file in sorted(PLUGINS.rglob("*.py"))
    if ">>> " in file.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_hold(name: str) -> None:
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted
    assert not found.failed
