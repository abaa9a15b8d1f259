"""Runs the programs and prints a table as markdown; exits with 1 if any of them is not as it should be."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from integration_tests.harness import ask_no_name_server
from integration_tests.reports.cases import REPORTS
from integration_tests.reports.runner import Outcome, run


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the reports that are asked for; returns 1 if something is not as it should be."""
    parser = argparse.ArgumentParser("python -m integration_tests.reports", description=(__doc__ or "").splitlines()[0])
    names = [report.program for report in REPORTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PROGRAM", help=", ".join(names))
    given = parser.parse_args(arguments)
    ask_no_name_server()
    with tempfile.TemporaryDirectory() as directory:
        outcomes = run([report for report in REPORTS if report.program in given.only], Path(directory))
    print("| report | with | what countoff says | after | the right program |\n|---|---|---|---|---|")
    print("\n".join(map(_row, outcomes)))
    bad = [f"  {outcome.report.names}: {fault}" for outcome in outcomes for fault in outcome.faults]
    print("\n".join([f"\n{len(outcomes)} reports, {len(bad)} not as they should be", *bad]))
    return 1 if bad else 0


def _row(outcome: Outcome) -> str:
    found = outcome.found
    said, when = (f"`{found.kind}`: {found.sentence}", found.when) if found else ("nothing", "–")
    right = "NOT silent" if any(outcome.right) else "silent"
    return f"| {outcome.report.names} | {outcome.report.framework} | {said} | {when} | {right} |"


if __name__ == "__main__":
    sys.exit(main())
