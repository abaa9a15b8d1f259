"""What runs nightly and what at each merge, where a test has a case for each framework."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def nightly_but(kept: Collection[str], frameworks: Iterable[str]) -> list[Any]:
    """Returns the parameters of a test: frameworks that run at each merge, and the others, which run nightly.

    For a claim whose code all adapters share; what is a framework's own has tests in `tests/plugins`.
    """
    return [each if each in kept else pytest.param(each, marks=pytest.mark.nightly) for each in frameworks]
