"""What a batch of one plain DDP loop costs on the training thread, bare and with each tool of today, on two ranks."""

import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence

from benchmarks.ranks import on_ranks
from benchmarks.results import Table, compared, progress
from benchmarks.tool_jobs import (
    COUNTERS,
    COUNTOFF,
    DETAIL,
    HEARTBEAT,
    JOIN,
    NOTHING,
    WIDTH,
    Batches,
    Training,
    begin,
    equipped,
    monitored,
)
from integration_tests.harness import RanksFailed

BATCHES = 64  # as many as lie between two ticks, so that each pass has one
_WORLD_SIZE = 2
_Seconds = dict[str, list[tuple[float, float]]]


def in_turns(tools: Sequence[str], passes: int) -> _Seconds:
    """Seconds per batch of the training thread's processor and of the wall, for each pass with each tool, in turns."""
    found: _Seconds = {tool: [] for tool in tools}
    with monitored(tools, patience_seconds=3600) as beat:
        training = begin(timeout_seconds=1800)
        for number in range(passes + 1):
            for tool in tools:
                seconds = one_pass(tool, training, beat)
                if number:  # the first warms up
                    found[tool].append(seconds)
    return found


def one_pass(tool: str, training: Training, beat: Callable[[], None]) -> tuple[float, float]:
    """Timed from the first batch to after the last; what a tool does before and after a pass is not in it."""
    training.batches = training.steps = 0
    train = Batches(BATCHES)
    with equipped(tool, training, train, beat=beat) as after_batch:
        processor = wall = 0.0
        for number, batch in enumerate(train):
            if number == 0:
                processor, wall = time.thread_time(), time.perf_counter()
            training.backward(batch)
            training.step()
            training.optimizer.zero_grad()
            after_batch()
        processor, wall = time.thread_time() - processor, time.perf_counter() - wall
    return processor / BATCHES, wall / BATCHES


def tables(quick: bool) -> Iterator[Table]:
    """One table in processor time of rank 0's training thread, one by the wall."""
    found, missing = measure(rounds=1 if quick else 3, passes=3 if quick else 7)
    note = (
        f"A step of two {WIDTH}×{WIDTH} layers on {_WORLD_SIZE} ranks (gloo); {BATCHES} batches to a pass, every tool "
        "in turn. DETAIL is chosen when a process starts, so it has processes of its own, between the others'."
    )
    for column, clock in enumerate(["processor time of the training thread", "by the wall"]):
        samples = {tool: [pair[column] for pair in pairs] for tool, pairs in found.items()}
        table = compared(f"A plain DDP loop, per batch, {clock}", "ms", samples, against=NOTHING, notes=[note])
        rows = [*table.rows, *({"what": tool, "median ms": reason} for tool, reason in missing.items())]
        yield Table(table.title, rows, table.notes)


def measure(rounds: int, passes: int) -> tuple[_Seconds, dict[str, str]]:
    """Samples by tool, and why there are none of the others."""
    missing: dict[str, str] = {}
    tools = [NOTHING, COUNTOFF, JOIN, COUNTERS]
    if not is_installed(HEARTBEAT):
        missing[HEARTBEAT] = "not installed here: pip install nvidia-resiliency-ext"
    else:
        tools.append(HEARTBEAT)
    found: _Seconds = {}
    for number in range(rounds):
        progress(f"tools: round {number + 1} of {rounds}")
        for tool, pairs in on_ranks(in_turns, _WORLD_SIZE, tools, passes)[0].items():
            found.setdefault(tool, []).extend(pairs)
        if DETAIL in missing:
            continue
        try:
            env = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
            pairs = on_ranks(in_turns, _WORLD_SIZE, [NOTHING], passes, env=env)[0][NOTHING]
            found.setdefault(DETAIL, []).extend(pairs)
        except RanksFailed as failed:
            codes = ", ".join(str(result.exit_code) for result in failed.results)
            missing[DETAIL] = f"ends before the first batch: exit codes {codes}"
    return found, missing


def is_installed(tool: str) -> bool:
    """Whether what the tool needs is there; all but one need nothing but torch."""
    return tool != HEARTBEAT or importlib.util.find_spec("nvidia_resiliency_ext") is not None
