"""A process whose main thread is sampled all the time ends as it would without that: the interpreter does not crash."""

import os
import subprocess
import sys

import pytest

from integration_tests.stack_stress import ENDS


def stress(*options: str, samples: int) -> subprocess.CompletedProcess[str]:
    """Runs the stress in a process of its own."""
    command = [sys.executable, "-m", "integration_tests.stack_stress", "--samples", str(samples), *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["", *sys.path])}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=3000)


@pytest.mark.nightly
@pytest.mark.parametrize("end", ENDS)
def test_a_process_that_is_sampled_ends_as_it_would(end: str) -> None:
    ran = stress("--end", end, samples=300)
    assert ran.returncode == ENDS[end], ran.stderr[-2000:]
    assert "samples" in ran.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("options", [[], ["--foreign"], ["--foreign", "--idle"]], ids=["busy", "foreign", "idle"])
def test_a_long_run_of_samples_does_no_harm(options: list[str]) -> None:
    """C code that begins threads of Python's is what `faulthandler` does not survive in Python 3.11."""
    ran = stress(*options, samples=100_000)
    assert ran.returncode == 0, ran.stderr[-2000:]
