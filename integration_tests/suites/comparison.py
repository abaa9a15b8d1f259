"""Runs a suite without countoff and with it, and tells which tests differ."""

import fnmatch
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from integration_tests.harness import NAME_LOOKUPS, python_path
from integration_tests.suites.expected import EXPECTED

_SCRIPT_SECONDS = 600


@dataclass(frozen=True)
class Outcome:
    """What became of one test on one rank.

    Attributes:
        outcome: `passed`, `failed` or `skipped`, or the exit code of a script.
        message: The first line of its error.
        words: What countoff printed in it.
    """

    outcome: str
    message: str = ""
    words: tuple[str, ...] = ()


Outcomes = dict[str, Outcome]
"""Outcomes by test; on several ranks, the test's name begins with the rank."""
Run = Callable[[bool, Sequence[str]], Outcomes]
"""Runs tests with countoff on or off: those given, or all that were chosen if none are given."""


@dataclass(frozen=True)
class Difference:
    """A test that does not end as it does without countoff, or in which countoff printed something."""

    test: str
    without: Outcome
    counted: Outcome
    reason: str

    def lines(self) -> list[str]:
        """Returns what is printed about it."""
        said = [self.counted.message, *self.counted.words]
        head = f"{self.test}: {self.without.outcome} without, {self.counted.outcome} with countoff"
        return [head, *(f"    {line}" for line in said if line), f"    expected: {self.reason or 'NO'}"]


def compare(suite: str, run: Run) -> tuple[Outcomes, list[Difference]]:
    """Runs a suite both ways. What differs is run once more both ways, and counts if it differs again.

    Returns:
        The outcomes without countoff, and the differences.
    """
    without, counted = run(False, ()), run(True, ())
    suspects = _differing(without, counted)
    if suspects:
        tests = sorted({test.partition(" ")[2] for test in suspects})
        without, counted = without | run(False, tests), counted | run(True, tests)
    found = [
        Difference(
            test, without.get(test, Outcome("absent")), counted.get(test, Outcome("absent")), _reason(suite, test)
        )
        for test in _differing(without, counted)
    ]
    return without, found


def _differing(without: Outcomes, counted: Outcomes) -> list[str]:
    absent = Outcome("absent")
    return sorted(
        test
        for test in without.keys() | counted.keys()
        if without.get(test, absent).outcome != counted.get(test, absent).outcome or counted.get(test, absent).words
    )


def _reason(suite: str, test: str) -> str:
    reasons = (reason for pattern, reason in EXPECTED[suite].items() if fnmatch.fnmatch(test, pattern))
    return next(reasons, "")


def pytest_suite(suite: str, checkout: Path, parts: Sequence[str], options: Sequence[str], ranks: int) -> Run:
    """Returns a run of a checkout's pytest suite.

    Args:
        suite: Its name.
        checkout: The directory in which pytest is started.
        parts: Files and folders below it.
        options: More options of pytest.
        ranks: Processes, each of which runs all tests, as torchrun starts them.
    """

    def run(counting: bool, tests: Sequence[str]) -> Outcomes:
        with tempfile.TemporaryDirectory() as directory:
            report = Path(directory) / "report"
            arguments = [
                "-m",
                "pytest",
                "-q",
                "-p",
                "integration_tests.suites.reporter",
                "-p",
                "no:cacheprovider",
                "--rootdir=.",
            ]
            launcher = [sys.executable, *(_torchrun(ranks) if ranks > 1 else [])]
            env = environment(counting, suite) | {"SUITE_REPORT": str(report)}
            env["PYTHONPATH"] = f"{checkout}:{env['PYTHONPATH']}"
            subprocess.run([*launcher, *arguments, *options, *(tests or parts)], cwd=checkout, env=env, check=False)
            return {
                f"{rank} {entry['test']}": Outcome(entry["outcome"], entry["message"], tuple(entry["words"]))
                for rank in range(ranks)
                for entry in _entries(report.with_name(f"report.{rank}"))
            }

    return run


def _entries(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        raise SystemExit("pytest has run no test: see its output above")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def script_suite(suite: str, modules: Sequence[str], ranks: int) -> Run:
    """Returns a run of modules as scripts under torchrun; a module's outcome is its exit code."""

    def run(counting: bool, tests: Sequence[str]) -> Outcomes:
        return {f"- {module}": _run_script(suite, module, ranks, counting) for module in tests or modules}

    return run


def _run_script(suite: str, module: str, ranks: int, counting: bool) -> Outcome:
    what = [str(Path(__file__).with_name("counted.py")), module] if counting else ["-m", module]
    print(f"… {module}{', counted' if counting else ''}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as directory:
        with open(Path(directory) / "output", "w+", encoding="utf-8", errors="replace") as output:
            process = subprocess.Popen(
                [sys.executable, *_torchrun(ranks), *what],
                cwd=directory,
                env=environment(counting, suite),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                outcome = f"exit code {process.wait(_SCRIPT_SECONDS)}"
            except subprocess.TimeoutExpired:
                process.terminate()  # torchrun then ends its ranks
                process.wait()
                outcome = f"runs after {_SCRIPT_SECONDS} s"
        lines = Path(directory, "output").read_text(encoding="utf-8", errors="replace").splitlines()
    words = [line for line in lines if "] countoff: " in line]
    errors = [line for line in lines if "Error" in line]
    return Outcome(outcome, errors[0][:200] if outcome != "exit code 0" and errors else "", tuple(words[:3]))


def _torchrun(ranks: int) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]


def environment(counting: bool, suite: str) -> dict[str, str]:
    """Returns the environment of a run: on the CPU, with countoff on or off."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("COUNTOFF")}
    cpu = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    node = {"NODE_RANK": "0"} if suite == "composer" else {}  # Composer's launcher sets it, torchrun does not
    fixed = {"PYTHONPATH": python_path(), **cpu, **node, **NAME_LOOKUPS}
    return {**inherited, **fixed, "COUNTOFF": "1" if counting else "0", "SUITE_NAME": suite}
