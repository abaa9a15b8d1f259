"""The environment in which every Python process below places countoff's hooks at its start."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

__all__ = ["REPORT", "SITE", "ignores_environment", "with_hooks"]

SITE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "site")
"""The directory whose `sitecustomize` Python imports at its start."""
REPORT = "_COUNTOFF_RUN_REPORT"
"""The variable that names the file by which a rank says that it has the hooks."""


def with_hooks(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment with the hooks in it, in which countoff is on unless ``COUNTOFF`` says otherwise.

    Args:
        environment: Variables by name.
    """
    path = [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each != SITE]
    added = {"PYTHONPATH": os.pathsep.join([SITE, *path] if any(path) else [SITE])}
    if not environment.get("COUNTOFF", "").strip():
        added["COUNTOFF"] = "1"
    return {**environment, **added}


def ignores_environment() -> str:
    """Returns the flag of this Python with which it would not place the hooks; an empty text if there is none."""
    flags = sys.flags
    return "-I" if flags.isolated else "-E" if flags.ignore_environment else "-S" if flags.no_site else ""
