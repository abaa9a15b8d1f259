"""Odd, legal, healthy programs: countoff prints nothing in them, and changes nothing that they compute."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from integration_tests.zoo import known
from integration_tests.zoo.known import surprises
from integration_tests.zoo.registry import FAMILIES, Program, programs_of
from integration_tests.zoo.runner import lines_of_countoff, run_programs


def _assert_healthy(programs: Sequence[Program], directory: Path, modes: Sequence[str]) -> None:
    found = run_programs(programs, directory, modes)
    wrong = surprises(found.failures, found.runs)
    assert not wrong, "\n\n".join(f"{run}: {text}" for run, text in wrong.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_healthy_programs(family, tmp_path):
    """countoff prints nothing and changes nothing in the programs of one family."""
    programs = [each for each in programs_of(family) if not each.nightly]
    if not programs:
        pytest.skip(f"{FAMILIES[family]} is not installed")
    _assert_healthy(programs, tmp_path, ("off", "on", "stop"))


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_the_rest_of_the_zoo(family, tmp_path):
    """The same for programs that take long, and for all programs where short ranks repeat batches."""
    _assert_healthy([each for each in programs_of(family) if each.nightly], tmp_path, ("off", "on", "stop"))
    _assert_healthy([each for each in programs_of(family) if "repeat" in each.modes], tmp_path, ("off", "repeat"))


def test_lines_of_countoff():
    """A line counts if countoff has printed it or if it names countoff, but for places in stacks and for late ranks."""
    stack = '  File "/site-packages/countoff/torch.py", line 3, in attach'
    thread = "Exception in thread countoff-listener:"
    late = ["[rank 0] countoff: LateRank: rank 1 has not counted off", "[rank 0]   more: countoff explain LateRank"]
    said = ["[rank 1] countoff: Stalled: no progress", "[rank 1]   why: nobody knows", thread]
    assert lines_of_countoff("\n".join(["[rank1]: of torch", "ValueError: 3", stack, *late, *said])) == said


def test_known_failures(monkeypatch):
    """A failure that is not known is a surprise, and so is a known one that has passed."""
    monkeypatch.setattr(known, "KNOWN", {"a[on]": "says so", "b[on]": "says so", "other[on]": "says so"})
    found = surprises({"a[on]": "said", "d[on]": "said"}, ["a[on]", "b[on]", "d[on]"])
    assert found == {"d[on]": "said", "b[on]": "passes, and is in the list of those that fail: says so"}


def test_every_known_failure_is_a_run():
    """The lists of known failures name runs that there are, of the families that can run here."""
    if any(find_spec(package) is None for package in FAMILIES.values()):
        pytest.skip("not all of the frameworks are here")
    runs = {f"{each.name}[{mode}]" for family in FAMILIES for each in programs_of(family) for mode in each.modes}
    assert {run for run in known.KNOWN if run not in runs} == set()
