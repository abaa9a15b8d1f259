"""Runs the fault matrix and prints it as a markdown table; exits with 1 if any cell is not as it should be."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from integration_tests.devices import DeviceError, add_device_option, choose_device
from integration_tests.faults.cases import CANNOT, CASES, Case

RANKS = (2, 4, 8)
PAUSE_SECONDS = "15"
"""How long a late rank pauses. A checkpoint takes twice that; the tests have less time."""
_BENEATH = ("accelerate", "streaming")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the cells that are asked for.

    Returns:
        0 if every cell is right, else 1.
    """
    parser = _parser()
    chosen = parser.parse_args(arguments)
    devices: dict[int, Literal["cpu", "cuda"]] = {}
    if chosen.hosts < 1:
        parser.error(f"--hosts: expected at least 1, got {chosen.hosts}")
    counts = chosen.ranks or [ranks for ranks in RANKS if ranks % chosen.hosts == 0 and ranks > chosen.hosts]
    if not counts:
        parser.error(f"--hosts: none of {RANKS} ranks can be spread evenly over {chosen.hosts} hosts; give --ranks")
    if uneven := [ranks for ranks in counts if ranks % chosen.hosts]:
        parser.error(f"--hosts: {uneven[0]} ranks cannot be spread evenly over {chosen.hosts} hosts")
    for ranks in counts:
        try:
            devices[ranks] = choose_device(chosen.device, ranks)
        except DeviceError as error:
            if chosen.ranks or not devices:
                parser.error(f"--{error}")
            print(f"left out: {ranks} ranks, as --{error}", file=sys.stderr)
    from integration_tests import hosts
    from integration_tests.faults import report
    from integration_tests.faults.matrix import run_cell

    if chosen.hosts > 1 and "cuda" in devices.values():
        parser.error("--hosts: ranks on several hosts train on the CPU; leave --device out")
    if chosen.hosts > 1 and (why := hosts.why_impossible()):
        parser.error(f"--hosts: {why}")
    adapters = chosen.adapter or list(CANNOT)
    os.environ.setdefault("FAULTS_PAUSE_SECONDS", PAUSE_SECONDS)
    os.environ.setdefault("PRELOAD", " ".join(["torch", "lightning", *adapters, *_BENEATH]))
    cells = list(cells_of(adapters, list(devices), chosen.only, everywhere=bool(chosen.ranks)))
    rows = []
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as directory:
        for number, (case, adapter, ranks) in enumerate(cells, start=1):
            rows.append(row := run_cell(case, adapter, ranks, Path(directory), devices[ranks], hosts=chosen.hosts))
            print(f"{number}/{len(cells)} {report.line(row)}", file=sys.stderr, flush=True)
            if row.wrong:
                print(row.output, file=sys.stderr, flush=True)
            if chosen.json:
                chosen.json.write_text(json.dumps(report.as_json(rows), indent=1), encoding="utf-8")
    print(report.markdown(rows))
    print(f"\nFrom the proof until the last rank knew:\n\n{report.promptness(rows)}")
    left_out = [(name, adapter) for adapter in adapters for name in CANNOT[adapter] if name in (chosen.only or CASES)]
    for name, adapter in left_out:
        print(f"\n{name} cannot happen in {adapter}: {CANNOT[adapter][name]}.")
    return int(any(row.wrong for row in rows))


def cells_of(
    adapters: Sequence[str], counts: Sequence[int], only: Sequence[str] | None = None, *, everywhere: bool = False
) -> Iterator[tuple[Case, str, int]]:
    """Yields the case, the adapter and the number of ranks of each cell that is asked for."""
    for adapter in adapters:
        for ranks in counts:
            for case in _cases(only, ranks, everywhere=everywhere):
                if case.name not in CANNOT[adapter]:
                    yield case, adapter, ranks


def _cases(only: Sequence[str] | None, ranks: int, *, everywhere: bool) -> list[Case]:
    """The faults that are asked for, with so many ranks; by default more than two where that makes a majority."""
    asked = [case for case in CASES.values() if case.least_ranks <= ranks and (not only or case.name in only)]
    return [case for case in asked if everywhere or case.positional or ranks == RANKS[0]]


def _parser() -> argparse.ArgumentParser:
    faults = "\n".join(f"  {case.name:5} {case.title}" for case in CASES.values())
    parser = argparse.ArgumentParser(
        prog="python -m integration_tests.faults",
        description=__doc__,
        epilog=f"faults:\n{faults}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", metavar="FAULT", choices=list(CASES), help="these faults; default: all")
    adapters = f"of {' '.join(CANNOT)}; default: all"
    parser.add_argument("--adapter", nargs="+", metavar="NAME", choices=list(CANNOT), help=adapters)
    some = " ".join(case.name for case in CASES.values() if case.positional)
    counts = f"with so many ranks; default: 2, and {some} with 4 and 8 too"
    parser.add_argument("--ranks", nargs="+", type=int, metavar="COUNT", help=counts)
    hosts = "spread the ranks over so many hosts, which are namespaces of this machine; default: 1"
    parser.add_argument("--hosts", type=int, metavar="COUNT", default=1, help=hosts)
    add_device_option(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every row there too, as soon as it is known")
    return parser


if __name__ == "__main__":
    sys.exit(main())
