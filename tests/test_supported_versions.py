"""The table of supported versions in docs/start.md, which is written from what the tests run on."""

import importlib
import re
import sys

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.version import Version

from tests.paths import DOCS, ROOT
from tests.test_messages import has_table

PACKAGES = {
    "torch": "PyTorch",
    "lightning": "Lightning and Fabric, as `lightning`",
    "pytorch-lightning": "Lightning, as `pytorch_lightning`",
    "mosaicml": "Composer",
    "mosaicml-streaming": "mosaicml-streaming",
    "accelerate": "Accelerate",
    "transformers": "transformers",
}
# Imported by name: type checkers do not know tomllib for Python 3.10, and tomli is not installed from 3.11 on.
TOML = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
PROJECT = TOML.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = [Requirement(each) for extra in PROJECT["project"]["optional-dependencies"].values() for each in extra]


def pins(name: str) -> dict[str, str]:
    """The versions that one of the constraints has on the Python of CI, by package."""
    pinned: dict[str, str] = {}
    for line in (ROOT / "constraints" / name).read_text().splitlines():
        package, version, marker = re.fullmatch(r"(\S+)==(\S+)(?: ; (.*))?", line).groups()  # pyright: ignore[reportOptionalMemberAccess]
        if not marker or Marker(marker).evaluate({"python_full_version": "3.11.0", "python_version": "3.11"}):
            pinned[package] = version
    return pinned


OF_COMPOSER = pins("torch-2.7.txt")
"""Composer and its streaming are on torch 2.7 only."""
OLDEST = {**OF_COMPOSER, **pins("oldest.txt")}
NEWEST = {**OF_COMPOSER, **pins("latest.txt")}


def test_the_page_has_the_table_of_versions() -> None:
    """It has the oldest and the newest version that the tests have: `COUNTOFF_WRITE_GOLDEN=1` writes it again."""
    rows = "".join(f"| {name} | {OLDEST[package]} | {NEWEST[package]} |\n" for package, name in PACKAGES.items())
    assert has_table(DOCS / "start.md", "| package | oldest | newest |", rows)


def test_the_table_has_every_framework() -> None:
    """Each package that an extra of a framework names is in it."""
    frameworks = ("torch", "lightning", "composer", "accelerate", "transformers")
    needs = PROJECT["project"]["optional-dependencies"]
    assert {Requirement(each).name for name in frameworks for each in needs[name]} == set(PACKAGES) - {
        "pytorch-lightning"
    }


@pytest.mark.parametrize("requirement", [each for each in EXTRAS if each.name in PACKAGES], ids=str)
def test_an_extra_asks_for_no_older_version_than_is_tested(requirement: Requirement) -> None:
    """The lower bound is the oldest version that the tests have, and the newest one is allowed."""
    bounds = [Version(each.version) for each in requirement.specifier if each.operator == ">="]
    assert bounds == [Version(OLDEST[requirement.name])]
    of_composer = "<" in {each.operator for each in requirement.specifier}
    assert (OF_COMPOSER if of_composer else NEWEST)[requirement.name] in requirement.specifier
