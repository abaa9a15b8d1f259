"""Measures what the protocol requests from the job's store with many ranks, on a real TCPStore.

See `simulated` for what is simulated. For each number of ranks: operations, bytes and the CPU time of the store's host
for a roll call, a sync point, a tick and a heartbeat; the time from a sync point until the last rank knows it; and how
each grows.
"""

import contextlib
import math
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from benchmarks import simulated
from benchmarks.results import Table, progress, quartiles
from countoff.core import Settings
from countoff.core.checks.plan import agreed_fields, judge_plans
from countoff.core.checks.rank_map import judge_dp_ranks
from countoff.core.session.liveness.heartbeats import seconds_between
from integration_tests.harness import _forkserver  # pyright: ignore[reportPrivateUsage]  (one for the whole process)

_GROUPS = 4  # processes of simulated ranks, beside that of rank 0
_PER_SYNC_POINT, _ALL_AT_ONCE = "sync point, one rank first", "sync point, all ranks at once"
_START, _SPAN, _TICK = "roll call at fit start", "sync point and roll call at a span's end", "tick"
_MEETING, _REGISTRATION = "rendezvous", "registration"
_HEARTBEAT, _EXIT = "heartbeat", "all exit without the fit's end"
_PLAN_COUNTS = (4096, 16_384, 100_000)
_SIZES = 64, 512, 4096, 32_768, 100_000
_REPEATS, _RANKS_IN_ALL = 7, 70_000


@dataclass
class Cost:
    """What one kind of event has cost, summed over its repetitions.

    Attributes:
        times: Number of repetitions.
        counts: Operations and bytes.
        host_seconds: CPU seconds of the store's process.
        first_rank_seconds: CPU seconds of rank 0's process.
        ranks_seconds: CPU seconds of all ranks' processes.
        wall_seconds: Wall seconds of each repetition.
    """

    times: int = 0
    counts: simulated.Counts = field(default_factory=dict)
    host_seconds: float = 0.0
    first_rank_seconds: float = 0.0
    ranks_seconds: float = 0.0
    wall_seconds: list[float] = field(default_factory=list)

    def total(self, column: int) -> float:
        """Returns operations (0), bytes sent (1) or bytes received (2) of all ranks together, per repetition."""
        return sum(values[column] for values in self.counts.values()) / self.times


class Simulation:
    """A store and several processes of ranks; rank 0, which gathers the records, has a process of its own.

    Args:
        world_size: Number of ranks.
        group_process: What runs a group of ranks.
        more: Its further arguments.

    Attributes:
        port: The store's port.
        costs: What each kind of event has cost.
        latencies: Seconds from one rank's sync point until the last rank knew.
    """

    def __init__(self, world_size: int, group_process: Any = simulated.group_process, *more: Any) -> None:
        self.world_size = world_size
        self._group_process, self._more = group_process, more
        self.port = 0
        self.costs: dict[str, Cost] = {}
        self.latencies: list[float] = []
        self._context: Any = _forkserver()
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []

    def __enter__(self) -> "Simulation":
        self._store = self._start(simulated.store_process)
        self.port = port = self._store.recv()
        self._groups = [
            self._start(self._group_process, ranks, self.world_size, port, *self._more) for ranks in self._shares()
        ]
        for group in self._groups:
            group.recv()
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in reversed(self._pipes):
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in reversed(self._processes):
            process.join(10)
            process.kill()

    def _shares(self) -> list[range]:
        """The ranks of each process: rank 0, and the others in turns."""
        return [range(1), *(range(1 + group, self.world_size, _GROUPS) for group in range(_GROUPS))]

    def _start(self, target: Any, *arguments: Any) -> Connection:
        ours, theirs = multiprocessing.Pipe()
        process = self._context.Process(target=target, args=(theirs, *arguments), daemon=True)
        process.start()
        theirs.close()
        self._pipes.append(ours)
        self._processes.append(process)
        return ours

    def call(self, method: str, *arguments: Any, groups: Sequence[Connection] | None = None) -> list[tuple[Any, float]]:
        """Calls a method of each group; returns, for each, its result and the CPU seconds that it took."""
        called = self._groups if groups is None else groups
        for group in called:
            group.send((method, *arguments))
        answers: list[tuple[Any, float]] = [group.recv() for group in called]
        for result, _ in answers:
            if isinstance(result, Exception):
                raise result
        return answers

    @contextlib.contextmanager
    def counting(self, name: str) -> Iterator[Cost]:
        """Adds the cost of what happens in the block under that name; the caller adds the CPU seconds of the ranks."""
        cost = self.costs.setdefault(name, Cost())
        self.call("take")
        host, began = self._host_seconds(), time.monotonic()
        yield cost
        cost.wall_seconds.append(time.monotonic() - began)
        cost.host_seconds += self._host_seconds() - host
        cost.counts = simulated.added(cost.counts, *(counts for counts, _ in self.call("take")))
        cost.times += 1

    def measure(self, name: str, method: str, *arguments: Any) -> None:
        """Calls a method of each group and adds its cost under that name."""
        with self.counting(name) as cost:
            self._add_seconds(cost, self.call(method, *arguments))

    def sync_point(self, name: str, method: str, *arguments: Any) -> None:
        """All ranks pass a sync point at once, with all readers waiting; returns when all records are gathered."""
        self.call("start_reader")
        with self.counting(name) as cost:
            self._add_seconds(cost, self.call("call", method, *arguments))
            self._add_seconds(cost, self.call("finish_polling"))
            self._add_seconds(cost, self.call("join_reader"))

    def sync_point_of_one(self, name: str, method: str, *arguments: Any) -> None:
        """One rank passes a sync point, which wakes all readers; the others pass it later."""
        self.call("start_reader")
        first, others = self._groups[1:2], [self._groups[0], *self._groups[2:]]
        with self.counting(name) as cost:
            [(began, seconds)] = self.call("call_first", method, *arguments, groups=first)
            answers = self.call("join_reader")
            self._add_seconds(cost, answers)
            cost.ranks_seconds += seconds
        self.latencies.append(max(received for received, _ in answers) - began)
        self.call("call_others", method, *arguments, groups=first)
        self.call("call", method, *arguments, groups=others)

    def count_off(self) -> None:
        """All ranks count off: they report, rank 0 compares, and then the others receive its answer."""
        with self.counting(_START) as cost:
            self._add_seconds(cost, self.call("count_off"))
            self._add_seconds(cost, self.call("finish_count_off", groups=self._groups[:1]))
            self._add_seconds(cost, self.call("finish_count_off", groups=self._groups[1:]), first=False)

    def exit(self, name: str) -> None:
        """All ranks say goodbye, with all readers waiting."""
        self.call("start_reader")
        with self.counting(name) as cost:
            self._add_seconds(cost, self.call("exit"))
            self._add_seconds(cost, self.call("join_reader"))

    def _host_seconds(self) -> float:
        self._store.send("?")
        return self._store.recv()

    def _add_seconds(self, cost: Cost, answers: Sequence[tuple[Any, float]], *, first: bool = True) -> None:
        if first:  # rank 0's process is among them
            cost.first_rank_seconds += answers[0][1]
        cost.ranks_seconds += sum(seconds for _, seconds in answers)


def measure(world_size: int, repeats: int) -> Simulation:
    """Runs a healthy fit with `repeats` epochs and heartbeats.

    Raises:
        RuntimeError: If a simulated rank has a verdict.
    """
    with Simulation(world_size) as simulation:
        simulation.measure(_MEETING, "meet", world_size)
        simulation.measure(_REGISTRATION, "register")
        simulation.count_off()
        simulation.sync_point(_ALL_AT_ONCE, "_pass", "fit_start", "the fit")
        simulation.call("heartbeat")  # not measured: with the first one, rank 0 looks whether all have sent theirs
        for epoch in range(repeats):
            progress(f"scale: {world_size} ranks, round {epoch + 1} of {repeats}")
            simulation.sync_point_of_one(_PER_SYNC_POINT, "train_start", epoch)
            simulation.measure(_TICK, "batches", 64)
            simulation.sync_point_of_one(_PER_SYNC_POINT, "eval_start", "validation")
            simulation.sync_point(_SPAN, "eval_end", "stopped")
            simulation.sync_point(_ALL_AT_ONCE, "eval_start", "validation again")
            simulation.sync_point(_SPAN, "eval_end", "stopped")
            simulation.sync_point(_SPAN, "train_end", "stopped")
            simulation.measure(_HEARTBEAT, "heartbeat")
        simulation.exit(_EXIT)
        verdicts = [verdict for of_group, _ in simulation.call("verdicts") for verdict in of_group]
    if verdicts:
        raise RuntimeError(f"healthy simulated ranks have a verdict: {verdicts[0]}")
    return simulation


def tables(quick: bool, sizes: Sequence[int] = ()) -> Iterator[Table]:
    """Yields the tables.

    Args:
        quick: Whether to take fewer and smaller numbers of ranks.
        sizes: Numbers of ranks; by default, those of the documentation.
    """
    sizes = sizes or (_SIZES[:2] if quick else _SIZES)
    measured: dict[int, Simulation] = {}
    for size in sizes:  # the largest take long: what is known is printed before
        measured[size] = measure(size, 2 if quick else repeats_of(size))
        yield costs(size, measured[size])
    yield by_operation(measured[max(measured)])
    yield heartbeats(measured)
    yield latencies(measured)
    if len(measured) > 1:
        yield growth(measured)
    yield comparisons(_PLAN_COUNTS[:1] if quick else _PLAN_COUNTS)


def repeats_of(size: int) -> int:
    """Returns how many epochs so many ranks have: fewer where an epoch takes a minute."""
    return max(1, min(_REPEATS, _RANKS_IN_ALL // size))


def costs(size: int, simulation: Simulation) -> Table:
    rows: list[dict[str, Any]] = []
    for name in (_MEETING, _REGISTRATION, _START, _ALL_AT_ONCE, _PER_SYNC_POINT, _SPAN, _TICK, _HEARTBEAT, _EXIT):
        cost = simulation.costs[name]
        row: dict[str, Any] = {"what": name, "ranks": size, "times": cost.times}
        row |= {"operations": round(cost.total(0)), "per rank": cost.total(0) / size}
        row |= {"bytes per rank": (cost.total(1) + cost.total(2)) / size}
        row |= {"host's CPU ms": cost.host_seconds / cost.times * 1e3}
        row |= {"host's µs per operation": cost.host_seconds / cost.times / cost.total(0) * 1e6}
        row |= {"rank 0's CPU ms": cost.first_rank_seconds / cost.times * 1e3}
        rows.append(row | {"wall ms": quartiles(cost.wall_seconds)[1] * 1e3})
    return Table(
        f"Scale: what each costs {size:,} ranks together, each time",
        rows,
        [
            "Bytes are keys and values, without the store's own framing. CPU time is that of the store's process, and "
            "of the process that simulates rank 0, with its two threads. Wall time is that of the simulation; most of "
            f"it is spent in the {_GROUPS + 1} Python processes that simulate all ranks."
        ],
    )


def heartbeats(simulations: dict[int, Simulation]) -> Table:
    """Returns what heartbeats cost in a second: they come less often where there are more ranks."""
    rows: list[dict[str, Any]] = []
    for size, simulation in simulations.items():
        cost, every = simulation.costs[_HEARTBEAT], seconds_between(size, Settings())
        row: dict[str, Any] = {"ranks": size, "seconds between two": every}
        row |= {"operations per second": round(cost.total(0) / every)}
        rows.append(row | {"host's CPU ms per second": cost.host_seconds / cost.times / every * 1e3})
    return Table("Scale: heartbeats in each second, with the default settings", rows)


def by_operation(simulation: Simulation) -> Table:
    rows: list[dict[str, Any]] = []
    for name, cost in simulation.costs.items():
        for operation, values in sorted(cost.counts.items()):
            each = [value / cost.times for value in values]
            per_rank = each[0] / simulation.world_size
            row = {"what": name, "operation": operation, "times": round(each[0]), "per rank": per_rank}
            rows.append(row | {"bytes each": (each[1] + each[2]) / each[0]})
    return Table(f"Scale: the operations of {simulation.world_size:,} ranks", rows)


def latencies(simulations: dict[int, Simulation]) -> Table:
    rows: list[dict[str, Any]] = []
    for size, simulation in simulations.items():
        low, middle, high = (value * 1e3 for value in quartiles(simulation.latencies))
        row = {"ranks": size, "sync points": len(simulation.latencies), "median ms": middle}
        rows.append(row | {"lower quartile": low, "upper quartile": high, "µs per rank": middle * 1e3 / size})
    return Table(
        "Scale: from the moment at which one rank passes a sync point until the last rank knows",
        rows,
        [
            f"{_GROUPS + 1} connections wait in the store. Each fetches the entry for its ranks, one after the other, "
            "and each rank receives it at once. Real ranks receive it at the same time as others, on their own "
            "processors."
        ],
    )


def growth(simulations: dict[int, Simulation]) -> Table:
    """Returns exponents of growth, from the smallest number of ranks to the largest."""
    small, large = min(simulations), max(simulations)
    rows: list[dict[str, Any]] = []
    for name in simulations[small].costs:
        one, many = simulations[small].costs[name], simulations[large].costs[name]
        pairs = {
            "operations": (one.total(0), many.total(0)),
            "bytes": (one.total(1) + one.total(2), many.total(1) + many.total(2)),
            "host's CPU": (one.host_seconds / one.times, many.host_seconds / many.times),
            "rank 0's CPU": (one.first_rank_seconds / one.times, many.first_rank_seconds / many.times),
        }
        row: dict[str, Any] = {"what": name, "from ranks": small, "to ranks": large}
        rows.append(row | {f"{what} ~ ranks^": exponent(*pair, large / small) for what, pair in pairs.items()})
    return Table("Scale: growth", rows, ["1 is linear, 2 quadratic."])


def exponent(small: float, large: float, factor: float) -> float:
    return math.log(large / small) / math.log(factor)


def comparisons(sizes: Sequence[int]) -> Table:
    """Returns what rank 0's comparison of all plans costs; neither a store nor simulated ranks are involved."""
    rows: list[dict[str, Any]] = []
    for size in sizes:
        plans = {rank: simulated.plan_of(rank, size).to_json() for rank in range(size)}
        began = time.process_time()
        judge_plans(plans)
        judged = time.process_time()
        judge_dp_ranks(plans)
        placed = time.process_time()
        agreed_fields(plans)
        row = {"ranks": size, "equal plans, ms": (judged - began) * 1e3, "dp_ranks, ms": (placed - judged) * 1e3}
        rows.append(row | {"fields that agree, ms": (time.process_time() - placed) * 1e3})
    return Table("Scale: rank 0's comparison of the plans, CPU time", rows)
