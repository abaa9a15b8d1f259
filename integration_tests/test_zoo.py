"""Odd, legal, healthy programs: countoff prints nothing in them, and changes nothing that they compute."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from integration_tests.zoo.registry import FAMILIES, Program, programs_of
from integration_tests.zoo.runner import lines_of_countoff, run_programs


def _assert_healthy(programs: Sequence[Program], directory: Path, modes: Sequence[str]) -> None:
    found = run_programs(programs, directory, modes)
    assert not found.failures, "\n\n".join(f"{run}: {text}" for run, text in found.failures.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_healthy_programs(family, tmp_path):
    """countoff prints nothing in the programs of one family, and they come to their end.

    Those that may end in a way of their own run without countoff too, and end alike. What programs compute is compared
    by `test_the_whole_zoo`.
    """
    programs = [each for each in programs_of(family) if not each.nightly]
    if not programs:
        pytest.skip(f"{FAMILIES[family]} is not installed")
    _assert_healthy([each for each in programs if not each.alone], tmp_path, ("on",))
    _assert_healthy([each for each in programs if each.alone], tmp_path, ("off", "on"))


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_zoo(family, tmp_path):
    """countoff prints nothing and changes nothing in all programs of one family, in each of their modes."""
    _assert_healthy(programs_of(family), tmp_path, ())


def test_lines_of_countoff():
    """A line counts if countoff has printed it or if it names countoff, but for places in stacks and for late ranks."""
    stack = '  File "/site-packages/countoff/torch.py", line 3, in train'
    thread = "Exception in thread countoff-reader:"
    late = ["[rank 0] countoff: LateRank: rank 1 has not counted off", "[rank 0]   more: countoff explain LateRank"]
    said = ["[rank 1] countoff: Stalled: no progress", "[rank 1]   why: nobody knows", thread]
    assert lines_of_countoff("\n".join(["[rank1]: of torch", "ValueError: 3", stack, *late, *said])) == said
