"""Runs a command several times beside processes that keep every core busy: some tests only pass on a free machine.

    python -m integration_tests.under_load                                   ten times `make test`
    python -m integration_tests.under_load --runs 3 -- make unit
    python -m integration_tests.under_load -- .venv/bin/python -m pytest -q tests/core/test_verdict.py

Between the runs, and at the end, nothing else is left running: the load ends with the command, however that ends.
"""

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): sum(range(1_000_000))"
"""A process that keeps a core busy until its parent ends."""
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Run:
    """One run of the command.

    Attributes:
        code: Its exit code, as `subprocess` has it.
        seconds: How long it took.
        failed: The tests that pytest lists as failed.
        log: What it has printed.
    """

    code: int
    seconds: float
    failed: tuple[str, ...]
    log: Path


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keeps as many cores busy inside the `with`."""
    load = [subprocess.Popen([sys.executable, "-c", _BUSY, str(os.getpid())]) for _ in range(processes)]
    try:
        yield
    finally:
        for each in load:
            each.kill()
        for each in load:
            each.wait()


def run_once(command: Sequence[str], processes: int, log: Path) -> Run:
    """Runs the command once under load; what it prints goes into a file.

    Args:
        command: The command and its arguments.
        processes: Busy processes beside it.
        log: The file.
    """
    began = time.monotonic()
    with busy(processes), log.open("wb") as file:
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    failed = _FAILED.findall(log.read_text(errors="replace"))
    return Run(code, time.monotonic() - began, tuple(dict.fromkeys(failed)), log)


def table(runs: Sequence[Run]) -> str:
    """The runs as a table in markdown."""
    lines = ["| run | exit code | seconds | failed tests | output |", "|---|---|---|---|---|"]
    for number, run in enumerate(runs, 1):
        failed = ", ".join(run.failed) or "–"
        lines.append(f"| {number} | {run.code} | {run.seconds:.0f} | {failed} | {run.log} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command as often as asked for; returns 1 if a run has failed."""
    parser = argparse.ArgumentParser(
        prog="python -m integration_tests.under_load",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=int, default=10, metavar="N", help="of the command (10)")
    parser.add_argument(
        "--busy", type=int, default=os.cpu_count() or 2, metavar="N", help="processes beside it (one for each core)"
    )
    parser.add_argument("command", nargs="*", metavar="COMMAND", help="after --, with its arguments (make test)")
    options = parser.parse_args(arguments)
    command = options.command or ["make", "test"]
    logs = Path(tempfile.mkdtemp(prefix="under-load-"))
    runs: list[Run] = []
    try:
        for number in range(1, options.runs + 1):
            runs.append(run_once(command, options.busy, logs / f"run-{number}.log"))
            how = "passed" if runs[-1].code == 0 else f"exit code {runs[-1].code}"
            print(f"run {number} of {options.runs}: {how}, {runs[-1].seconds:.0f} s", file=sys.stderr, flush=True)
    finally:  # also what was found before an interrupt
        print(table(runs))
    return int(any(run.code for run in runs))


if __name__ == "__main__":
    sys.exit(main())
