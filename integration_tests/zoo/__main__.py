"""Runs the zoo and prints a line per family: see the package's docstring."""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from countoff.core.messages import count_of
from integration_tests import zoo
from integration_tests.harness import ask_no_name_server
from integration_tests.zoo.registry import FAMILIES, MODES, programs_of
from integration_tests.zoo.runner import Findings, run_programs


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs programs; returns 1 if any of them failed."""
    parser = argparse.ArgumentParser("python -m integration_tests.zoo", description=(zoo.__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="which families")
    parser.add_argument("--programs", nargs="+", default=[], help="which programs (default: all of the families)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=[], help="which modes (default: a program's own)")
    parser.add_argument("--times", type=int, default=1, help="how often each of them runs (default: 1)")
    given = parser.parse_args(arguments)
    ask_no_name_server()
    wrong = dict[str, str]()
    programs_in_all = 0
    for family in given.only:
        programs = [each for each in programs_of(family) if not given.programs or each.name in given.programs]
        programs_in_all += len(programs)
        for _ in range(given.times if programs else 0):
            with tempfile.TemporaryDirectory() as directory:
                found = run_programs(programs, Path(directory), given.modes)
            wrong |= found.failures
            print(_line(family, len(programs), found), flush=True)
            for run, text in found.failures.items():
                print(f"\n{run}: {text}\n", flush=True)
    print(f"{count_of(programs_in_all, 'program')}; {count_of(len(wrong), 'run')} failed")
    print("\n".join(f"  {run}" for run in wrong))
    return 1 if wrong else 0


def _line(family: str, programs: int, found: Findings) -> str:
    return (
        f"{family:18} {count_of(programs, 'program'):>12} {count_of(len(found.runs), 'run'):>9} "
        f"{found.seconds:5.0f} s {count_of(len(found.failures), 'failure'):>12}"
    )


if __name__ == "__main__":
    sys.exit(main())
