"""Measures the seconds from a fault until every rank knows, for each tool, and whether the rank at fault is named.

A plain DDP loop of two epochs, each followed by an evaluation whose metric is reduced after every batch. The last rank
is at fault. A rank knows when an exception reaches its main thread, or when it ends by a signal or with an exit code.
With countoff, a rank also knows when it has received the verdict; its main thread may be blocked then, and the process
ends after 3 s.
"""

import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.results import Table, progress, quartiles
from benchmarks.tool_jobs import (
    COUNTERS,
    COUNTOFF,
    DETAIL,
    HEARTBEAT,
    JOIN,
    NOTHING,
    Batches,
    Equipment,
    begin,
    equipped,
    monitored,
)
from benchmarks.tools import is_installed
from countoff.torch import Countoff
from integration_tests.harness import RankResult, RanksTimedOut, Watch, run_ranks

FAULTS = {
    "F1": "a rank is a batch short in training",
    "F2": "a rank is a batch short in evaluation",
    "F8": "a rank evaluates a step early",
    "F12": "a rank skips an optimizer step",
}
_TRAIN_BATCHES, _EVAL_BATCHES, _FAULT_BATCH = 100, 20, 50
_TIMEOUT_SECONDS = 5.0
_NO_MESSAGE = "–"
_OWN_PREFIX = re.compile(r"^\[?rank ?\d+\]?:?|^\[Rank \d+\]", re.IGNORECASE | re.MULTILINE)


def loop(fault: str, tool: str) -> None:
    """Trains as one rank, with its part of the fault; records when the fault happens and when this rank knows."""
    with monitored([tool], _TIMEOUT_SECONDS) as send_heartbeat:
        train_on(fault, tool, send_heartbeat)


def train_on(fault: str, tool: str, send_heartbeat: Callable[[], None]) -> None:
    """Runs the training loop."""
    training = begin(_TIMEOUT_SECONDS)
    at_fault = training.rank == training.world_size - 1
    own_fault = fault if at_fault else ""
    train = Batches(_TRAIN_BATCHES - 1, lambda: note("fault")) if own_fault == "F1" else Batches(_TRAIN_BATCHES)
    evals = Batches(_EVAL_BATCHES - 1, lambda: note("fault")) if own_fault == "F2" else Batches(_EVAL_BATCHES)

    def evaluate(equipment: Equipment) -> None:
        for batch in equipment.evaluate(evals):
            loss = training.model.module(batch).square().mean().detach()
            dist.all_reduce(loss)

    def run() -> None:
        for _ in range(2):
            with equipped(tool, training, send_heartbeat) as equipment:
                note_verdict(equipment.countoff)
                for number, batch in enumerate(equipment.train(train)):
                    if fault == "F8" and number == _FAULT_BATCH + (not at_fault):
                        if at_fault:
                            note("fault")
                        evaluate(equipment)
                    training.backward(batch)
                    if own_fault == "F12" and number == _FAULT_BATCH:
                        note("fault")
                    else:
                        training.step()
                    training.optimizer.zero_grad()
                    equipment.after_batch()
                evaluate(equipment)

    try:
        run()
    except BaseException:
        note("knows")
        raise


def note(event: str) -> None:
    """Appends the event and its time to this rank's file; all processes of this machine share the clock."""
    with open(f"events-{dist.get_rank()}", "a", encoding="utf-8") as file:
        file.write(f"{event} {time.monotonic()}\n")


def note_verdict(countoff: Countoff | None) -> None:
    """Records when this rank receives a verdict of countoff's, even if its main thread is blocked."""
    if countoff is None:
        return
    state = countoff.guard.state

    def wait() -> None:
        state.ended.wait()
        note("knows")

    threading.Thread(target=wait, daemon=True).start()


@dataclass(frozen=True)
class Ending:
    """How one run ended.

    Attributes:
        seconds: From the fault until every rank knew; None if one never did.
        named: Number of ranks whose output names the rank at fault.
        codes: Exit codes; None for a rank that hung.
        results: Output and exit code of every rank.
    """

    seconds: float | None
    named: int
    codes: Sequence[int | None]
    results: Sequence[RankResult] = field(repr=False)


def run_once(fault: str, tool: str, world_size: int) -> Ending:
    """Runs the loop on real ranks and reads the times that they recorded."""
    watches: list[Watch] = []
    env = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"} if tool == DETAIL else {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        try:
            results = run_ranks(
                loop, world_size, fault, tool, directory=directory, env=env, expect=None,
                deadline_seconds=60, while_running=watches.append,
            )  # fmt: skip
        except RanksTimedOut as late:
            results = late.results
        notes = [events_of(path) for path in sorted(directory.glob("*/events-*"))]
    known = [moment_of(result, notes, watches[0]) for result in results]
    fault_at = min((at for events in notes for event, at in events if event == "fault"), default=None)
    reached = [at for at in known if at is not None]
    seconds = max(reached) - fault_at if fault_at is not None and len(reached) == world_size else None
    named = sum(names(result.output, world_size - 1) for result in results)
    return Ending(seconds, named, [result.exit_code for result in results], results)


def events_of(path: Path) -> list[tuple[str, float]]:
    lines = [line.split() for line in path.read_text().splitlines()]
    return [(f"{event}-{path.name.partition('-')[2]}" if event == "knows" else event, float(at)) for event, at in lines]


def moment_of(result: RankResult, notes: Sequence[Sequence[tuple[str, float]]], watch: Watch) -> float | None:
    """Returns when this rank knew: the time that it recorded, or else its failure; None if it never knew."""
    noted = [at for events in notes for event, at in events if event == f"knows-{result.rank}"]
    if noted:
        return min(noted)
    if result.exit_code in (0, None):
        return None
    return watch._started_at + result.seconds  # pyright: ignore[reportPrivateUsage]


def names(output: str, rank: int) -> bool:
    """Returns whether a message names the rank, apart from the start of a line, which names the rank that prints it."""
    text = _OWN_PREFIX.sub("", output)
    return re.search(rf"\branks? (?:\d+, )*{rank}\b", text, re.IGNORECASE) is not None


def tables(quick: bool) -> Iterator[Table]:
    """Yields one table for each fault, with a row for each tool and number of ranks."""
    tools = [NOTHING, COUNTOFF, JOIN, COUNTERS, DETAIL, HEARTBEAT]
    sizes, repeats = ((2,), 1) if quick else ((2, 4), 3)
    note = (
        f"The last rank is at fault. The timeout of the process group is {_TIMEOUT_SECONDS:g} s here, and so is that "
        "of the heartbeat; gloo's default is 30 min, that of nvidia-resiliency-ext 45 min. Message: ✓ every rank's "
        f"names the rank at fault, (✓) the messages of some ranks do, ✗ none does, {_NO_MESSAGE} there is none. "
        "Countoff compares steps every 64 batches."
    )
    for fault, description in FAULTS.items():
        rows = [row_of(fault, tool, size, repeats) for tool in tools for size in sizes]
        yield Table(f"Time to detection, {fault}: {description}", rows, [note])


def row_of(fault: str, tool: str, world_size: int, repeats: int) -> dict[str, Any]:
    row: dict[str, Any] = {"fault": fault, "tool": tool, "ranks": world_size}
    columns = "seconds (median)", "lower quartile", "upper quartile", "message", "ranks naming it", "exit codes"
    if tool == HEARTBEAT and not is_installed(HEARTBEAT):
        return row | dict.fromkeys(columns) | {"seconds (median)": "not installed here"}
    endings: list[Ending] = []
    for number in range(repeats):
        progress(f"detection: {fault}, {tool}, {world_size} ranks, {number + 1} of {repeats}")
        endings.append(run_once(fault, tool, world_size))
    return row | dict(zip(columns, cells_of(tool, endings, world_size), strict=True))


def cells_of(tool: str, endings: Sequence[Ending], world_size: int) -> tuple[Any, ...]:
    codes = sorted({code for ending in endings for code in ending.codes}, key=str)
    listed = ", ".join("hung" if code is None else str(code) for code in codes)
    times = [ending.seconds for ending in endings if ending.seconds is not None]
    if not times:
        if codes == [0]:
            return "never", None, None, _NO_MESSAGE, None, listed
        reason = "ends before the fault" if tool == DETAIL else "not every rank"
        return reason, None, None, "✗", f"0 of {world_size}", listed
    low, middle, high = quartiles(times)
    named = min(ending.named for ending in endings)
    timed_out = middle >= 0.9 * _TIMEOUT_SECONDS
    seconds = f"30 min by default (not measured); {middle:.1f} with {_TIMEOUT_SECONDS:g} s" if timed_out else middle
    message = "✓" if named == world_size else "(✓)" if named else "✗"
    return seconds, low, high, message, f"{named} of {world_size}", listed
