"""All benchmarks, or some: ``python -m benchmarks --only scale --quick``. See README.md beside this file."""

import argparse
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.results import Table, report

# Part to its group, its module, and the function that makes its tables. Only a part that runs imports its framework.
PARTS = {
    "guard": ("cost", "batch_cost", "guard_tables"),
    "forward": ("cost", "batch_cost", "forward_tables"),
    "lightning": ("cost", "batch_cost", "lightning_tables"),
    "composer": ("cost", "composer_cost", "tables"),
    "transformers": ("cost", "transformers_cost", "tables"),
    "accelerate": ("cost", "accelerate_cost", "tables"),
    "tools": ("cost", "tools", "tables"),
    "passes": ("cost", "pass_cost", "tables"),
    "even": ("cost", "even_cost", "tables"),
    "identity": ("cost", "fingerprint_cost", "tables"),
    "weights": ("cost", "weights_cost", "tables"),
    "trace": ("cost", "trace_cost", "tables"),
    "gpu": ("cost", "gpu_cost", "tables"),
    "report": ("cost", "report_cost", "tables"),
    "start": ("cost", "start_cost", "tables"),
    "detection": ("detection", "detection", "tables"),
    "rollcall": ("rollcall", "roll_call", "tables"),
    "scale": ("scale", "scale", "tables"),
    "credits": ("scale", "credits_scale", "tables"),
    "lifelines": ("scale", "lifelines_scale", "tables"),
}
EPILOG = """\
parts:
  cost        what a batch costs on the training thread, compared with a callback that does nothing; its parts:
    guard         Guard.batch() and Guard.micro_batch() alone
    forward       a forward pass of a small DDP module, counted as a micro-batch or not
    lightning     Lightning's hooks and whole epochs          composer      Composer's events and fetches
    transformers  the Trainer's events                        accelerate    a prepared loader
    tools         a plain DDP loop: countoff, Join, an all_reduce of counters, DETAIL, heartbeats
    passes        a whole pass of 16, 64 and 512 batches in a plain DDP loop
    even          even passes (uneven_train), Join, and an all_reduce of a flag per batch
    identity      one fingerprint of a batch, and the test whether one is due
    weights       the hashes of 100 million parameters (weights_every), and other ways to read them
    trace         a batch and an epoch's ends with a trace (trace_dir) and without, and the size of a trace
    gpu           a small transformer on a GPU: a plain loop, Lightning, and fingerprints; needs a GPU
    report        `countoff report` of traces of 8, 256 and 4,096 ranks
    start         how much later a program starts with `countoff run` in front of it
  detection   seconds from a fault until every rank knows, for the same tools, and whether the rank at fault is named
  rollcall    the roll call at fit start, on 2, 4, 8 and 24 real ranks
  scale       store operations, bytes, processor time and latency of 64 to 100,000 simulated ranks; also:
    credits       those of even passes (uneven_train), with 64 to 4,096
    lifelines     the sockets and the processor time of rank 0, with one real connection per host

examples:
  python -m benchmarks --only scale --quick               two minutes or less
  python -m benchmarks --only guard tools --json out.json
  python -m benchmarks                                    everything: an hour or more on two busy cores

Tables are markdown on stdout, each as soon as it is ready; progress is on stderr. A part whose framework is not
installed prints that instead. Compare the rows of one table. Do not compare two runs: the load or the machine differs.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the chosen parts; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="What countoff costs, how soon every rank knows, and how both grow, compared with other tools.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    choices = list(dict.fromkeys([*(group for group, *_ in PARTS.values()), *PARTS]))
    parser.add_argument("--only", nargs="+", choices=choices, metavar="PART", help=f"some of: {', '.join(choices)}")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, ranks and sizes, to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the tables, unrounded, as JSON")
    options = parser.parse_args(arguments)
    # For the ranks and for the store that this process hosts: torch's TCPStore makes a reverse DNS look-up on each
    # connection, and a look-up that gets no answer takes 5 s by default.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    names = [name for name, part in PARTS.items() if options.only is None or {name, part[0]} & set(options.only)]
    report(tables(names, quick=options.quick), options.json)
    return 0


def tables(names: Sequence[str], *, quick: bool) -> Iterator[Table]:
    """Yields the tables of the parts."""
    for name in names:
        _, module, function = PARTS[name]
        try:
            yield from getattr(importlib.import_module(f"benchmarks.{module}"), function)(quick)
        except ImportError as error:
            yield Table(f"`{name}`", [{"not measured": f"not installed here: {error}"}])


if __name__ == "__main__":
    sys.exit(main())
