"""Milliseconds from the moment at which a divergence can be proved to every rank knowing it, case by case.

    python -m benchmarks.latency              # every case, five times
    python -m benchmarks.latency --quick      # a few cases, three times

Interrupted, it prints what it has measured.

Real ranks and real frameworks, as in the integration tests. Prints a markdown table; a run that did not go as it should
(another verdict, another culprit, a rank that exits 0 or hangs) is printed in full on stderr and makes the exit code 1.

The milliseconds are those of the line `known on every rank X ms after it could be proved`. They run from the time stamp
that the short rank puts on its closing mark, or on its announcement that the batch now starting is its last, before
either is handed to the store; to the last rank's clock when its first thread reads the verdict. For a `PlanMismatch`
they run from rank 0's comparison of the plans. All ranks are on this host, so it is one clock.
"""

import argparse
import contextlib
import os
import re
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning
import torch

from integration_tests import loops
from integration_tests.harness import RankResult, RanksTimedOut, run_ranks
from integration_tests.jobs import Job, fit, verdict_lines
from integration_tests.test_lightning_uneven import CASES, make_job

_KNOWN = re.compile(r"known on every rank ([\d.]+) ms after it could be proved")
_KIND = re.compile(r"countoff: (\w+): ")
_ODD = re.compile(r"out of step: ranks? ([\d, ]+) of")
_QUICK = {"plain", "validation (3, 2), synchronised per step", "plain PyTorch"}


@dataclass(frozen=True)
class Case:
    """One job with one rank out of step, and what every rank must say of it."""

    name: str
    world_size: int
    short: str
    function: Callable[..., Any]
    arguments: Sequence[Any]
    odd: Sequence[int]
    words: str
    kind: str = "UnevenBatches"


@dataclass(frozen=True)
class Ending:
    """How one run of a case ended."""

    kinds: frozenset[str]
    culprit_is_right: bool
    milliseconds: float | None
    exit_codes: tuple[int | None, ...]
    hung: bool
    results: Sequence[RankResult] = field(repr=False)

    def is_right(self, case: Case) -> bool:
        """Whether every rank said what it should, when it should, and ended badly."""
        said = self.kinds == {case.kind} and self.culprit_is_right and self.milliseconds is not None
        return said and not self.hung and all(code not in (0, None) for code in self.exit_codes)


def lightning_cases() -> Iterator[Case]:
    for name, arguments in CASES.items():
        for world_size, short, rank in places(2, 4):
            batches, odd = one_short(world_size, rank)
            words = f"rank {rank} ran out of data after 4 batches of train epoch 0"
            yield Case(name, world_size, short, fit, [make_job(batches, arguments)], odd, words)
    for world_size, short, rank in places(2, 4):
        batches, odd = one_short(world_size, rank)
        job = Job(train=batches, reported=batches)
        odd, words = sorted(odd), "batches_per_epoch is 4 on rank" if world_size > 2 else f"4 on rank {rank}"
        yield Case("sized_unequal", world_size, short, fit, [job], odd, words, "PlanMismatch")


def evaluation_cases() -> Iterator[Case]:
    for val in [(2, 0), (3, 2)]:
        job = Job(train=[4, 4], val=val, model={"eval_sync": "step"}, options={"uneven_eval": "raise"})
        words = f"rank 1 ran out of data after {val[1]} batches of validation"
        yield Case(f"validation {val}, synchronised per step", 2, "last", fit, [job], [1, 0], words)


def torch_cases() -> Iterator[Case]:
    for world_size, short, rank in places(2, 4, 8):
        batches, odd = one_short(world_size, rank)
        words = f"rank {rank} ran out of data after 4 batches of train epoch 0"
        yield Case("plain PyTorch", world_size, short, loops.uneven, [batches], odd, words)


def places(*world_sizes: int) -> Iterator[tuple[int, str, int]]:
    """World size, place of the short rank in words, its number."""
    for world_size in world_sizes:
        yield world_size, "first", 0
        yield world_size, "last", world_size - 1


def one_short(world_size: int, short: int) -> tuple[list[int], list[int]]:
    """Batches per rank, and the ranks that a verdict must name: of two, both."""
    batches = [4 if rank == short else 5 for rank in range(world_size)]
    return batches, [short] if world_size > 2 else [short, 1 - short]


def run_once(case: Case, directory: Path) -> Ending:
    hung = False
    try:
        results = run_ranks(
            case.function, case.world_size, *case.arguments, directory=directory, expect=None, deadline_seconds=60
        )
    except RanksTimedOut as late:
        hung, results = True, late.results
    texts = ["\n".join(verdict_lines(result)) for result in results]
    known = {float(text) for text in _KNOWN.findall("\n".join(texts))}
    return Ending(
        kinds=frozenset(kind for text in texts for kind in _KIND.findall(text) or ["none"]),
        culprit_is_right=len(set(texts)) == 1 and names(texts[0], case),
        milliseconds=known.pop() if len(known) == 1 else None,
        exit_codes=tuple(result.exit_code for result in results),
        hung=hung,
        results=results,
    )


def names(text: str, case: Case) -> bool:
    found = _ODD.search(text)
    return found is not None and found[1] == ", ".join(map(str, case.odd)) and case.words in text


def table_row(case: Case, endings: Sequence[Ending]) -> str:
    kinds = ", ".join(sorted(frozenset().union(*(ending.kinds for ending in endings))))
    right = sum(ending.culprit_is_right for ending in endings)
    times = [ending.milliseconds for ending in endings if ending.milliseconds is not None]
    median = f"{statistics.median(times):.1f}" if times else "none"
    spread = f"{min(times):.1f} to {max(times):.1f}" if times else "none"
    codes = Counter("hung" if ending.hung else codes_of(ending.exit_codes) for ending in endings)
    listed = ", ".join(code if len(codes) == 1 else f"{code} ({count} times)" for code, count in codes.most_common())
    cells = [case.name, case.world_size, case.short, kinds, f"{right} of {len(endings)}", median, spread, listed]
    return "| " + " | ".join(map(str, cells)) + " |"


def codes_of(exit_codes: Sequence[int | None]) -> str:
    """Exit codes of all ranks, one of each kind."""
    return "/".join(str(code) for code in sorted(set(exit_codes), key=str))


def run_all(cases: Sequence[Case], repeats: int) -> list[list[Ending]]:
    """Every case `repeats` times: all cases once, then all again, so that a noisy minute spoils no case alone."""
    endings: list[list[Ending]] = [[] for _ in cases]
    with contextlib.suppress(KeyboardInterrupt):
        run_in_turns(cases, repeats, endings)
    return endings


def run_in_turns(cases: Sequence[Case], repeats: int, endings: Sequence[list[Ending]]) -> None:
    for repeat in range(repeats):
        for number, case in enumerate(cases):
            place = f"round {repeat + 1} of {repeats}, case {number + 1} of {len(cases)}"
            with tempfile.TemporaryDirectory() as directory:
                ending = run_once(case, Path(directory))
            endings[number].append(ending)
            print(f"{place}: {case.name}, {case.world_size} ranks: {ending.milliseconds} ms", file=sys.stderr)
            if not ending.is_right(case):
                print(f"NOT AS IT SHOULD BE: {case}\n{ending}", *ending.results, sep="\n", file=sys.stderr)


def print_table(cases: Sequence[Case], endings: Sequence[Sequence[Ending]]) -> None:
    print(f"torch {torch.__version__}, lightning {lightning.__version__}; load average {os.getloadavg()[1]:.1f}\n")
    print("| case | ranks | short rank | verdict on every rank | culprit right | median ms | range | exit codes |")
    print("|---|---|---|---|---|---|---|---|")
    measured = [pair for pair in zip(cases, endings, strict=True) if pair[1]]
    for case, of_case in measured:
        print(table_row(case, of_case))
    times = [one.milliseconds for of_case in endings for one in of_case if one.milliseconds is not None]
    if times:
        slow = sum(time > 10 for time in times)
        print(f"\nAll {len(times)} runs: median {statistics.median(times):.1f} ms, {slow} over 10 ms.")


def main() -> int:
    parser = argparse.ArgumentParser(description="Milliseconds until every rank knows, case by case.")
    parser.add_argument("--quick", action="store_true", help="a few cases at 2 ranks, three times")
    parser.add_argument("--repeats", type=int, help="runs per case (5; 3 with --quick)")
    parser.add_argument("--only", default="", help="only the cases whose name contains this")
    options = parser.parse_args()
    cases = [case for case in (*lightning_cases(), *evaluation_cases(), *torch_cases()) if options.only in case.name]
    if options.quick:
        cases = [case for case in cases if case.name in _QUICK and case.world_size == 2]
    endings = run_all(cases, options.repeats or (3 if options.quick else 5))
    print_table(cases, endings)
    right = all(one.is_right(case) for case, of_case in zip(cases, endings, strict=True) for one in of_case)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
