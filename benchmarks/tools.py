"""Measures what a batch of a plain DDP loop costs on the training thread of two ranks, with each tool and with none."""

import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence

from benchmarks.ranks import on_ranks
from benchmarks.results import THREAD_TIME, WALL_TIME, Table, compared, progress
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

BATCHES = 64  # the batches between two ticks, so that each pass has one tick
_WORLD_SIZE = 2
_Seconds = dict[str, list[tuple[float, float]]]  # tool to (CPU seconds, wall seconds) of each pass


def in_turns(tools: Sequence[str], passes: int) -> _Seconds:
    """Returns CPU seconds of the training thread and wall seconds per batch, for each pass with each tool in turn."""
    measured: _Seconds = {tool: [] for tool in tools}
    with monitored(tools, timeout_seconds=3600) as send_heartbeat:
        training = begin(timeout_seconds=1800)
        for number in range(passes + 1):
            for tool in tools:
                seconds = one_pass(tool, training, send_heartbeat)
                if number:  # the first is the warm-up
                    measured[tool].append(seconds)
    return measured


def one_pass(tool: str, training: Training, send_heartbeat: Callable[[], None]) -> tuple[float, float]:
    """Returns the seconds per batch from the first batch until the loop ends, without the tool's set-up and end."""
    training.batches = training.steps = 0
    train = Batches(BATCHES)
    with equipped(tool, training, send_heartbeat) as equipment:
        cpu = wall = 0.0
        for number, batch in enumerate(equipment.train(train)):
            if number == 0:
                cpu, wall = time.thread_time(), time.perf_counter()
            training.backward(batch)
            training.step()
            training.optimizer.zero_grad()
            equipment.after_batch()
        cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
    return cpu / BATCHES, wall / BATCHES


def tables(quick: bool) -> Iterator[Table]:
    """Yields one table in CPU time of rank 0's training thread and one in wall time."""
    measured, missing = measure(rounds=1 if quick else 3, passes=3 if quick else 7)
    note = (
        f"A step of two {WIDTH}×{WIDTH} layers on {_WORLD_SIZE} ranks (gloo); {BATCHES} batches to a pass, each tool "
        "in turn. DETAIL is chosen when a process starts, so it has its own processes, between the others'."
    )
    for column, clock in enumerate([THREAD_TIME, WALL_TIME]):
        samples = {tool: [pair[column] for pair in pairs] for tool, pairs in measured.items()}
        table = compared(f"A plain DDP loop, per batch, {clock}", "ms", samples, against=NOTHING, notes=[note])
        rows = [*table.rows, *({"what": tool, "median ms": reason} for tool, reason in missing.items())]
        yield Table(table.title, rows, table.notes)


def measure(rounds: int, passes: int) -> tuple[_Seconds, dict[str, str]]:
    """Returns the samples of each tool, and for each tool without samples the reason."""
    missing: dict[str, str] = {}
    tools = [NOTHING, COUNTOFF, JOIN, COUNTERS]
    if not is_installed(HEARTBEAT):
        missing[HEARTBEAT] = "not installed here: pip install nvidia-resiliency-ext"
    else:
        tools.append(HEARTBEAT)
    measured: _Seconds = {}
    for number in range(rounds):
        progress(f"tools: round {number + 1} of {rounds}")
        for tool, pairs in on_ranks(in_turns, _WORLD_SIZE, tools, passes)[0].items():
            measured.setdefault(tool, []).extend(pairs)
        if DETAIL in missing:
            continue
        try:
            env = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
            pairs = on_ranks(in_turns, _WORLD_SIZE, [NOTHING], passes, env=env)[0][NOTHING]
            measured.setdefault(DETAIL, []).extend(pairs)
        except RanksFailed as failed:
            codes = ", ".join(str(result.exit_code) for result in failed.results)
            missing[DETAIL] = f"ends before the first batch: exit codes {codes}"
    return measured, missing


def is_installed(tool: str) -> bool:
    """Returns whether the package of the tool is installed; all tools but the heartbeat need only torch."""
    return tool != HEARTBEAT or importlib.util.find_spec("nvidia_resiliency_ext") is not None
