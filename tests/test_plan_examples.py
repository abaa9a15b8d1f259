"""The examples in the docstrings of the room of configurations."""

import doctest
import importlib
import pkgutil

import pytest

from countoff import plan

MODULES = [module.name for module in pkgutil.walk_packages(plan.__path__, f"{plan.__name__}.")]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_hold(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0
