"""What runs nightly and what at each merge, where a test has a case for each framework."""

from collections.abc import Collection
from typing import Any

import pytest


def nightly_but(kept: Collection[str], frameworks: Collection[str]) -> list[Any]:
    """Returns the parameters of a test: frameworks that run at each merge, and the others, which run nightly.

    For a claim whose code all adapters share.

    Raises:
        ValueError: If a framework is to run at each merge that the test does not have.
    """
    if unknown := set(kept) - set(frameworks):
        raise ValueError(f"expected some of {', '.join(frameworks)}, got {', '.join(sorted(unknown))}")
    return [each if each in kept else pytest.param(each, marks=pytest.mark.nightly) for each in frameworks]
