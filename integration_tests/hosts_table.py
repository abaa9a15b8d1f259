"""Loses ranks, hosts and links of jobs on several hosts, and prints what the survivors say and how soon, as markdown.

    python -m integration_tests.hosts_table
    python -m integration_tests.hosts_table --only power partition --frameworks plain

All settings have their defaults, so a lost host takes `lost_seconds` (15) to be found. Needs what `hosts` needs.
"""

import argparse
import logging
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from integration_tests import loops
from integration_tests.harness import RankResult, RanksFailed
from integration_tests.hosts import HostsWatch, run_hosts, why_impossible
from integration_tests.lightning_jobs import Job, fit
from integration_tests.output import printed_lines
from integration_tests.test_hosts import JOBS, wait_until_watched

Shape = tuple[int, int]
SHORT = [5, 5, 5, 4]
_KNOWN = r"known on every rank ([\d.]+) ms after"


@dataclass(frozen=True)
class Loss:
    """What happens to a job of four ranks.

    Attributes:
        what: In words.
        shapes: Hosts and ranks per host on which it is tried.
        do: Does it; None: nothing, the ranks have uneven data.
        hosted_by: Who hosts the job's store.
        delay_seconds: How late the store answers to all hosts but the first; None for not at all.
        stall_seconds: How late it does so now and then.
    """

    what: str
    shapes: tuple[Shape, ...]
    do: Callable[[HostsWatch], None] | None = None
    hosted_by: Literal["agent", "rank0"] = "agent"
    delay_seconds: float | None = None
    stall_seconds: float = 0.0


def cut(watch: HostsWatch, seconds: float) -> None:
    """Cuts host 1 off for a while."""
    watch.link_down(1)
    watch.let_run(seconds)
    watch.link_up(1)


def stop(watch: HostsWatch, seconds: float) -> None:
    """Stops both ranks of host 1 for a while."""
    for rank in (2, 3):
        watch.kill(rank, signal.SIGSTOP)
    watch.let_run(seconds)
    for rank in (2, 3):
        watch.kill(rank, signal.SIGCONT)


BOTH: tuple[Shape, ...] = ((2, 2), (4, 1))
LOSSES = {
    "uneven": Loss("rank 3 has one batch less", BOTH),
    "slow": Loss("the same, with a store that answers 30 ms late", BOTH, delay_seconds=0.03),
    "stalls": Loss("the same, and 3 s late now and then", BOTH, delay_seconds=0.03, stall_seconds=3.0),
    "killed": Loss("rank 3 is killed", BOTH, lambda watch: watch.kill(3)),
    "killed-0": Loss("rank 0 is killed", BOTH, lambda watch: watch.kill(0)),
    "killed-store": Loss("rank 0, with the store, is killed", BOTH, lambda watch: watch.kill(0), "rank0"),
    "power": Loss("host 1 loses its power", BOTH, lambda watch: watch.power_off(1)),
    "power-store": Loss("host 0, with the store, loses its power", BOTH, lambda watch: watch.power_off(0), "rank0"),
    "cut": Loss("host 1 is cut off for 8 s", ((2, 2),), lambda watch: cut(watch, 8)),
    "partition": Loss("host 1 is cut off for 60 s", ((2, 2),), lambda watch: cut(watch, 60)),
    "stopped": Loss("all ranks of host 1 are stopped for 60 s", ((2, 2),), lambda watch: stop(watch, 60)),
}


def logged(function: Callable[..., Any], *arguments: Any) -> None:
    """Runs a job on one rank, with countoff's log on the console: how soon every rank knew."""
    logging.basicConfig(level=logging.INFO)
    function(*arguments)


def said(results: Sequence[RankResult]) -> str:
    """The sentences of the survivors, each with the number of ranks that said it; "nothing" if none said anything."""
    sentences: dict[str, int] = {}
    for result in results:
        first = next((line for line in printed_lines(result) if line.startswith("countoff: ")), "nothing")
        sentence = re.sub(r" See the output of rank \d+\.$", "", first.removeprefix("countoff: "))
        sentences[sentence] = sentences.get(sentence, 0) + 1
    return "; ".join(f"{sentence} ({count}×)" for sentence, count in sentences.items())


def try_out(loss: Loss, framework: str, shape: Shape, directory: Path) -> tuple[str, str, str]:
    """Runs one job; returns what the survivors said, how soon, and the number of lines that they printed."""
    hosts, per_host = shape
    done: list[float] = []
    ended: list[float] = []

    def act(watch: HostsWatch) -> None:
        if loss.do is not None:
            wait_until_watched(watch)
            done.append(time.monotonic())
            loss.do(watch)
        elif loss.stall_seconds:
            watch.stall_now_and_then(loss.stall_seconds, every=2 * loss.stall_seconds)
        watch.finish()
        ended.append(time.monotonic())

    if loss.do is None:
        job: tuple[Any, ...] = (loops.uneven, SHORT) if framework == "plain" else (fit, Job(train=SHORT))
        call: tuple[Any, ...] = (logged, *job)
    else:
        call = JOBS[framework]
    try:
        results = run_hosts(
            *call,
            hosts=hosts,
            per_host=per_host,
            directory=directory,
            hosted_by=loss.hosted_by,
            delay_seconds=loss.delay_seconds,
            expect=None,
            while_running=act,
            deadline_seconds=150,
        )
    except RanksFailed as error:
        return f"FAILED: {str(error).splitlines()[0]}", "", ""
    survivors = [result for result in results if result.exit_code != -signal.SIGKILL]
    soon = "–"
    if done and any(result.exit_code for result in survivors):
        soon = f"{ended[0] - done[0]:.1f} s until the last one has ended"
    elif known := [float(each) for result in results for each in re.findall(_KNOWN, result.output)]:
        soon = f"{known[0]:.1f} ms until every rank knew"
    lines = sum(len(printed_lines(result)) for result in survivors)
    return said(survivors), soon, str(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the chosen losses and prints the table; 2 if this machine cannot make hosts."""
    parser = argparse.ArgumentParser(
        "python -m integration_tests.hosts_table", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--only", nargs="+", choices=LOSSES, default=list(LOSSES), help="which losses (default: all)")
    parser.add_argument("--frameworks", nargs="+", choices=JOBS, default=list(JOBS), help="which loops (default: all)")
    given = parser.parse_args(arguments)
    if reason := why_impossible():
        print(reason, file=sys.stderr)
        return 2
    print(f"torch {torch.__version__}, 4 ranks:\n")
    print("| what happens | hosts × ranks | loop | how soon | what survivors say | lines |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        for loss in map(LOSSES.__getitem__, given.only):
            for hosts, per_host in loss.shapes:
                for framework in given.frameworks:
                    words, soon, lines = try_out(loss, framework, (hosts, per_host), Path(directory))
                    row = (loss.what, f"{hosts} × {per_host}", framework, soon, words, lines)
                    print(f"| {' | '.join(row)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
