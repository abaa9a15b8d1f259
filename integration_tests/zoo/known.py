"""Programs of the zoo that are known to fail: who mends one removes its entry. A run here that passes is a failure."""

from collections.abc import Collection, Mapping
from typing import Final

KNOWN: Final[Mapping[str, str]] = {}
"""What is wrong with a run, by "program[mode]"."""


def surprises(failures: Mapping[str, str], runs: Collection[str]) -> dict[str, str]:
    """Returns the failures that are not known, and the known ones that did not fail.

    Args:
        failures: What is wrong, by "program[mode]".
        runs: All runs.
    """
    new = {run: text for run, text in failures.items() if run not in KNOWN}
    mended = [run for run in KNOWN if run in runs and run not in failures]
    return {**new, **{run: f"passes, and is in the list of those that fail: {KNOWN[run]}" for run in mended}}
