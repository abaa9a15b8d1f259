"""Kills a rank of real torchrun jobs by SIGKILL, and prints how often the others named it, as markdown.

    python -m integration_tests.killed_table
    python -m integration_tests.killed_table --ranks 2 4 8 --repeat 20 --only torch lightning --moments batch start

torchrun ends the others within a tenth of a second. They are to print `LostRank` with the killed rank, and to write the
verdict file, the incident and their traces before that, each time. The exit code is 1 where they did not.
"""

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from integration_tests.killed_script import MOMENTS, RUNS
from integration_tests.torchrun import TorchrunTimedOut, run_torchrun

SCRIPT = Path(__file__).with_name("killed_script.py")


@dataclass(frozen=True)
class Outcome:
    """What a job left behind in which one rank was killed.

    Attributes:
        wrong: What is not as it should be, in words; nothing if all is well.
        whole: How often the whole message was printed.
        seconds: How long the job took.
        output: What torchrun and its ranks printed.
    """

    wrong: tuple[str, ...]
    whole: int
    seconds: float
    output: str


def kill_one(adapter: str, moment: str, ranks: int, directory: Path) -> Outcome:
    """Runs one job, in which rank 1 is killed, and looks at what it left behind.

    Args:
        adapter: One of `RUNS`.
        moment: One of `MOMENTS`.
        ranks: Ranks of the job.
        directory: An empty one, for the job's files.
    """
    verdict, trace = directory / "verdict.json", directory / "trace"
    env = {"COUNTOFF_VERDICT_FILE": str(verdict), "COUNTOFF_TRACE_DIR": str(trace)}
    began = time.monotonic()
    try:
        run = run_torchrun(SCRIPT, ranks, adapter, moment, "1", directory=directory, env=env)
    except TorchrunTimedOut as error:
        return Outcome(("it did not end",), 0, time.monotonic() - began, str(error))
    wrong: list[str] = []
    if not re.search(r"^\[rank \d+\] countoff: LostRank: rank 1 ", run.output, re.MULTILINE):
        wrong.append("rank 1 is not named")
    if "exitcode  : -9" not in run.output:
        wrong.append("torchrun does not say that it was killed")
    if "forcefully exiting" in run.output:
        wrong.append("torchrun had to kill another rank")
    if not verdict.exists():
        wrong.append("no verdict file")
    elif (said := json.loads(verdict.read_text()))["kind"] != "LostRank" or said["ranks"] != [1]:
        wrong.append(f"the verdict file says {said['kind']} of ranks {said['ranks']}")
    if not (trace / "incident.json").exists():
        wrong.append("no incident")
    traces = {rank: trace / f"rank-{rank:05d}.jsonl" for rank in range(ranks)}
    # A rank that is killed as it begins may have no trace yet.
    endless = [rank for rank, path in traces.items() if not path.exists() or '"k":"end"' not in _last_line(path)]
    if endless != [1]:
        wrong.append(f"the traces of ranks {endless} have no end")
    # torchrun may print it once more, as the content of the rank's error file.
    whole = len(re.findall(r"^\[rank \d+\] .*countoff explain LostRank", run.output, re.MULTILINE))
    return Outcome(tuple(wrong), whole, time.monotonic() - began, run.output)


def _last_line(path: Path) -> str:
    lines = path.read_text().splitlines()
    return lines[-1] if lines else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the chosen jobs and prints the table; 1 if a rank was not named in one of them."""
    parser = argparse.ArgumentParser(
        "python -m integration_tests.killed_table", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), help="which adapters (default: all)")
    parser.add_argument("--moments", nargs="+", choices=MOMENTS, default=list(MOMENTS), help="when (default: all)")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2], help="ranks of a job (default: 2)")
    parser.add_argument("--repeat", type=int, default=1, help="how often each job runs (default: 1)")
    parser.add_argument("--output", type=Path, help="a directory for the output of jobs in which something was wrong")
    given = parser.parse_args(arguments)
    print(f"torch {torch.__version__}:\n")
    print("| adapter | killed in | ranks | named | whole messages per job | seconds | wrong |")
    print("|---|---|---|---|---|---|---|", flush=True)
    failed = False
    for ranks in given.ranks:
        for adapter in given.only:
            for moment in given.moments:
                outcomes: list[Outcome] = []
                for _ in range(given.repeat):
                    with tempfile.TemporaryDirectory() as directory:
                        outcomes.append(kill_one(adapter, moment, ranks, Path(directory)))
                    if outcomes[-1].wrong and given.output is not None:
                        given.output.mkdir(exist_ok=True)
                        name = f"{adapter}-{moment}-{ranks}-{len(outcomes)}.txt"
                        (given.output / name).write_text(f"{outcomes[-1].wrong}\n{outcomes[-1].output}")
                print(_row(adapter, moment, ranks, outcomes), flush=True)
                failed |= any(outcome.wrong for outcome in outcomes)
    return int(failed)


def _row(adapter: str, moment: str, ranks: int, outcomes: Sequence[Outcome]) -> str:
    good = sum(not outcome.wrong for outcome in outcomes)
    wrong = sorted({each for outcome in outcomes for each in outcome.wrong})
    whole = statistics.mean(outcome.whole for outcome in outcomes)
    seconds = statistics.median(outcome.seconds for outcome in outcomes)
    cells = (adapter, moment, ranks, f"{good} of {len(outcomes)}", f"{whole:.1f}", f"{seconds:.0f}", "; ".join(wrong))
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    sys.exit(main())
