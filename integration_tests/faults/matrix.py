"""One cell of the matrix: a job with a fault, run on real ranks, and its outcome."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from integration_tests.constants import environment
from integration_tests.devices import Placement
from integration_tests.faults.cases import Case
from integration_tests.faults.rank_script import train
from integration_tests.faults.ranks_left import left_behind, shared_memory
from integration_tests.harness import RankResult, RanksFailed, Watch, run_ranks
from integration_tests.hosts import run_hosts
from integration_tests.output import behind_ranks, named_ranks, ranks_in, verdict_lines

_DEADLINE_SECONDS = 120.0
_GOOD_ENDS = (1, 87)  # an exception's, and countoff's own for a main thread that is blocked


@dataclass
class Row:
    """The outcome of one fault in one framework with so many ranks.

    Attributes:
        fault, adapter, ranks, device, hosts: Which cell.
        kind: The verdict that was given, "" for none.
        named: The ranks that it names.
        milliseconds: From when it could be known until it was, on the last rank; None where nothing was due.
        since: What the milliseconds count from: the `proof`, or the `fault`.
        exit_codes: By rank; None for one that had to be killed.
        same_words: Whether every rank that had to print a verdict printed the same.
        left: What was left behind.
        wrong: What is not as it should be, in words; nothing if all is well.
        output: What the ranks printed, where something is wrong.
        seconds: How long the job ran.
    """

    fault: str
    adapter: str
    ranks: int
    device: Placement = "cpu"
    hosts: int = 1
    kind: str = ""
    named: tuple[int, ...] = ()
    milliseconds: float | None = None
    since: str = ""
    exit_codes: list[int | None] = field(default_factory=list)
    same_words: bool = True
    left: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    output: str = ""
    seconds: float = 0.0


def run_cell(
    case: Case, adapter: str, ranks: int, directory: Path, device: Placement = "cpu", *, hosts: int = 1
) -> Row:
    """Runs one job and judges it.

    Args:
        case: The fault.
        adapter: The framework: the name of its training script.
        ranks: Ranks in the job, at least the case's `least_ranks`.
        directory: Where the run's files go.
        device: Where the ranks train.
        hosts: Hosts with equally many of the ranks each, as namespaces of this machine where there are several. They
            train on the CPU.

    Raises:
        HostsError: If this machine cannot make hosts.
    """
    row = Row(case.name, adapter, ranks, device, hosts)
    directory = Path(tempfile.mkdtemp(prefix=f"{case.name}-{adapter}-{ranks}-", dir=directory))
    before, began = shared_memory(), time.monotonic()
    pids: list[int] = []
    stamps: dict[str, float] = {}
    culprits = case.culprits(ranks)
    _, ending = case.due(adapter)

    def drive(watch: Watch) -> None:
        pids.extend(watch.pid(rank) for rank in range(ranks))
        if case.hosted_apart:
            watch.wait_for(0, "training", _DEADLINE_SECONDS)
            stamps["fault-store"] = time.time()
            watch.kill_store()
        elif case.fault == "F6":
            for rank in set(range(ranks)) - set(culprits):
                watch.wait_for_end(rank, _DEADLINE_SECONDS)
            watch.kill(culprits[0])
        elif ending == "held":
            watch.wait_for(0, "verdict", _DEADLINE_SECONDS)
            for pid in pids:
                os.killpg(pid, signal.SIGKILL)  # with a loader's worker, which never returns

    how: dict[str, Any] = {
        "directory": directory,
        "deadline_seconds": _DEADLINE_SECONDS,
        "hosted_by": "apart" if case.hosted_apart else "agent",
        "expect": None,
        "while_running": drive,
        "finalise": True,
        "env": environment(**case.constants),
    }
    try:
        if hosts > 1:
            results = run_hosts(train, adapter, case.job(ranks), hosts=hosts, per_host=ranks // hosts, **how)
        else:
            results = run_ranks(train, ranks, adapter, case.job(ranks), device=device, **how)
    except RanksFailed as error:
        results = error.results
        row.wrong.append(str(error).splitlines()[0])
    row.seconds = time.monotonic() - began
    (place,) = directory.iterdir()
    row.left = left_behind(place, pids, before)
    for pattern in ("said-*", "fault-*", "spread-*"):
        stamps.update({file.name: float(file.read_text()) for file in place.glob(pattern)})
    judge(row, case, results, stamps)
    return row


def judge(row: Row, case: Case, results: Sequence[RankResult], stamps: dict[str, float]) -> None:
    """Compares a job's outcome with what is due, and fills in the row.

    Args:
        row: Which cell, with what was left behind.
        case: The fault.
        results: How each rank ended.
        stamps: When something happened, in seconds since the epoch: `fault-RANK`, `said-RANK`. And `spread-RANK`: the
            seconds from the proof until every rank knew, as that rank's verdict has it.
    """
    kind, ending = case.due(row.adapter)
    texts = [_verdict(result) for result in results]
    row.exit_codes = [result.exit_code for result in results]
    everybody = tuple(range(row.ranks))
    killed = everybody if ending == "held" else case.culprits(row.ranks) if case.fault in ("F5", "F6") else ()
    ended = case.culprits(row.ranks) if row.adapter in case.ended_in else ()
    survivors = tuple(rank for rank in everybody if rank not in (*killed, *ended))
    reporters = {"silence": (), "warning": (0,), "held": (0,), "raised": survivors}[ending]
    said = {texts[rank] for rank in reporters}
    row.same_words = len(said) <= 1
    text = next((text for text in texts if text), "")
    found = re.search(r"^countoff: (\w+): (.*)$", text, re.MULTILINE)
    row.kind = found[1] if found else ""
    row.named = _named(text, found[2] if found else "")
    _measure(row, reporters, stamps)
    wrong, words = row.wrong, (row.hosts > 1 and case.words_on_hosts) or case.words
    if row.kind != kind:
        wrong.append(f"said {row.kind or 'nothing'}, expected {kind or 'nothing'}")
    elif not row.same_words or "" in said:
        wrong.append("not the same sentence on every rank")
    elif words not in text:
        wrong.append(f"does not say {words!r}")
    elif kind not in ("", "Truncated") and not case.are_named(row.named, row.ranks, behind_ranks(text)):
        wrong.append(f"names ranks {sorted(row.named)}, the culprits are {sorted(case.culprits(row.ranks))}")
    if [text for rank, text in enumerate(texts) if text and rank not in (*reporters, *killed, *ended)]:
        wrong.append("said on a rank that had nothing to say")
    for result in (each for each in results if each.rank not in ended):
        wrong += _wrong_end(result, ending, result.rank in killed)
    wrong += [f"left: {each}" for each in row.left]
    if wrong:
        row.output = "\n".join(map(str, results))


def _wrong_end(result: RankResult, ending: str, killed: bool) -> list[str]:
    """What is wrong with how a rank ended."""
    if killed:
        good: tuple[int, ...] = (-signal.SIGKILL,)
    else:
        good = _GOOD_ENDS if ending == "raised" else (0,)
    wrong = [] if result.exit_code in good else [f"rank {result.rank}: exit code {result.exit_code}, expected {good}"]
    if ending == "raised" and not killed and "countoff " not in result.error_file:
        wrong.append(f"rank {result.rank}: no verdict where torchrun looks for it")
    return wrong


def _verdict(result: RankResult) -> str:
    """All that countoff printed on this rank, without progress lines: on a busy machine a rank may arrive late."""
    return "\n".join(line for line in verdict_lines(result) if not line.endswith("(waiting)"))


def _named(text: str, sentence: str) -> tuple[int, ...]:
    """The ranks that a verdict names."""
    return tuple(named_ranks(text) or _listed(sentence))


def _listed(sentence: str) -> list[int]:
    """The ranks that a sentence names first; those of both sides where it gives two of one size, each with its number.

    >>> _listed("the model has 3 parameters on rank 3, 2 parameters on ranks 0–2"), _listed("ranks 0 and 2 differ")
    ([3], [0, 2])
    >>> _listed("rank 0 on node-0 and rank 3 on node-1 read identical data")
    [0, 3]
    """
    sentence = re.sub(r"rank (\d+) on node-\d+ and rank (\d+) on node-\d+", r"ranks \1 and \2", sentence)
    groups = re.findall(r"ranks? ([\d–]+(?:(?:, | and )[\d–]+\b(?! on | parameter| row))*)", sentence)
    sides = [ranks_in(group.replace(" and ", ", ")) for group in groups]
    if len(sides) == 2 and len(sides[0]) == len(sides[1]) and sentence.count(" on rank") == 2:
        return sides[0] + sides[1]
    return sides[0] if sides else []


def _measure(row: Row, reporters: Sequence[int], stamps: dict[str, float]) -> None:
    """The milliseconds from when it could be known until the last rank knew."""
    spread = [seconds for name, seconds in stamps.items() if name.startswith("spread-")]
    if spread:
        row.milliseconds, row.since = max(spread) * 1000, "proof"
        return
    faults = [at for name, at in stamps.items() if name.startswith("fault-")]
    said = [stamps[f"said-{rank}"] for rank in reporters if f"said-{rank}" in stamps]
    if faults and said:
        row.milliseconds, row.since = (max(said) - max(faults)) * 1000, "fault"
