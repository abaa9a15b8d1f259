"""The examples in the docstrings of the adapters and the tools. Those of the core are run by pytest itself."""

import doctest
import importlib

import pytest

from tests.paths import SOURCE_ROOTS

MODULES = [
    ".".join(file.relative_to(root).with_suffix("").parts)
    for root in SOURCE_ROOTS[1:]
    for file in sorted(root.rglob("*.py"))
    if ">>> " in file.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_hold(name: str) -> None:
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted
    assert not found.failed
