"""What the protocol asks of the job's store with many ranks, counted and timed on a real TCPStore.

See `simulated` for what is simulated. For each size: operations, bytes and the host's processor time of a roll call, a
mark, a tick and a beat; the time from a mark to the last rank's knowing it; how each grows; and what that makes of
100,000 ranks.
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
from countoff.core.arithmetic.dp_ranks import judge_dp_ranks
from countoff.core.runtime import roll_call
from integration_tests.harness import _forkserver  # pyright: ignore[reportPrivateUsage]  (a session has but one)

_CREWS = 4
_FAR = 100_000
_PER_MARK, _ALL_AT_ONCE = "mark, one rank first", "mark, all ranks at once"
_START, _SPAN, _TICK, _BEAT = "roll call at fit start", "mark and roll call at a span's end", "tick", "beat"
_LEAVE, _LEAVING_RANKS = "all leave without the fit's end", 512
_PLANS = (4096, 16_384, 100_000)


@dataclass
class Cost:
    """What one thing has cost, over the times it was done.

    Attributes:
        times: How often it was done.
        counts: Operations and bytes, over all times.
        host_seconds: Processor seconds of the store's process, over all times.
        first_rank_seconds: Processor seconds of rank 0's process, over all times.
        ranks_seconds: Processor seconds of all ranks' processes, over all times.
        wall_seconds: One each time.
    """

    times: int = 0
    counts: simulated.Counts = field(default_factory=dict)
    host_seconds: float = 0.0
    first_rank_seconds: float = 0.0
    ranks_seconds: float = 0.0
    wall_seconds: list[float] = field(default_factory=list)

    def total(self, column: int) -> float:
        """Operations (0), bytes sent (1) or received (2) by all ranks together, each time."""
        return sum(values[column] for values in self.counts.values()) / self.times


class Simulation:
    """A store and some processes full of ranks; rank 0, which gathers, has a process for itself.

    Args:
        world_size: How many ranks.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.costs: dict[str, Cost] = {}
        self.latencies: list[float] = []
        self._context: Any = _forkserver()
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []

    def __enter__(self) -> "Simulation":
        self._store = self._start(simulated.store_process)
        port = self._store.recv()
        shares = [range(0, 1), *(range(1 + crew, self.world_size, _CREWS) for crew in range(_CREWS))]
        self._crews = [
            self._start(simulated.crew_process, list(share), self.world_size, port) for share in shares if len(share)
        ]
        for crew in self._crews:
            crew.recv()
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in reversed(self._pipes):
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in reversed(self._processes):
            process.join(10)
            process.kill()

    def _start(self, target: Any, *arguments: Any) -> Connection:
        ours, theirs = multiprocessing.Pipe()
        process = self._context.Process(target=target, args=(theirs, *arguments), daemon=True)
        process.start()
        theirs.close()
        self._pipes.append(ours)
        self._processes.append(process)
        return ours

    def ask(self, method: str, *arguments: Any, crews: Sequence[Connection] | None = None) -> list[tuple[Any, float]]:
        """What the method returned in each process, and the processor seconds that it took there."""
        asked = self._crews if crews is None else crews
        for crew in asked:
            crew.send((method, *arguments))
        answers: list[tuple[Any, float]] = [crew.recv() for crew in asked]
        for result, _ in answers:
            if isinstance(result, Exception):
                raise result
        return answers

    @contextlib.contextmanager
    def counting(self, name: str) -> Iterator[Cost]:
        """Adds what happens inside to the cost of that name; the caller adds the ranks' seconds."""
        cost = self.costs.setdefault(name, Cost())
        self.ask("take")
        host, began = self._host_seconds(), time.monotonic()
        yield cost
        cost.wall_seconds.append(time.monotonic() - began)
        cost.host_seconds += self._host_seconds() - host
        cost.counts = simulated.added(cost.counts, *(counts for counts, _ in self.ask("take")))
        cost.times += 1

    def do(self, name: str, method: str, *arguments: Any) -> None:
        """Has all ranks do something, and adds it to the cost of that name."""
        with self.counting(name) as cost:
            self._add_seconds(cost, self.ask(method, *arguments))

    def mark(self, name: str, method: str, *arguments: Any) -> None:
        """All ranks pass a mark at once, with everybody listening, until all is gathered."""
        self.ask("listen")
        with self.counting(name) as cost:
            self._add_seconds(cost, self.ask("call", method, *arguments))
            self._add_seconds(cost, self.ask("settle"))
            self._add_seconds(cost, self.ask("heard"))

    def mark_of_one(self, name: str, method: str, *arguments: Any) -> None:
        """One rank passes a mark, which wakes all; the others pass it later."""
        self.ask("listen")
        leader, others = self._crews[1:2], [self._crews[0], *self._crews[2:]]
        with self.counting(name) as cost:
            [(began, seconds)] = self.ask("lead", method, *arguments, crews=leader)
            answers = self.ask("heard")
            self._add_seconds(cost, answers)
            cost.ranks_seconds += seconds
        self.latencies.append(max(heard for heard, _ in answers) - began)
        self.ask("follow", method, *arguments, crews=leader)
        self.ask("call", method, *arguments, crews=others)

    def _host_seconds(self) -> float:
        self._store.send("?")
        return self._store.recv()

    def _add_seconds(self, cost: Cost, answers: Sequence[tuple[Any, float]]) -> None:
        cost.first_rank_seconds += answers[0][1]
        cost.ranks_seconds += sum(seconds for _, seconds in answers)


def measure(world_size: int, repeats: int) -> Simulation:
    """Runs a healthy fit of so many ranks, `repeats` epochs and beats of it."""
    with Simulation(world_size) as simulation:
        simulation.ask("introduce")
        simulation.do(_START, "count_off")
        simulation.mark(_ALL_AT_ONCE, "_pass", "fit_start", "the fit")
        for _ in range(2):  # in the first beats, ranks still look for one another
            simulation.ask("beat")
        for epoch in range(repeats):
            progress(f"scale: {world_size} ranks, round {epoch + 1} of {repeats}")
            simulation.mark_of_one(_PER_MARK, "train_start", epoch)
            simulation.do(_TICK, "batches", 64)
            simulation.mark_of_one(_PER_MARK, "eval_start", "validation")
            simulation.mark(_SPAN, "eval_end", "stopped")
            simulation.mark(_ALL_AT_ONCE, "eval_start", "validation again")
            simulation.mark(_SPAN, "eval_end", "stopped")
            simulation.mark(_SPAN, "train_end", "stopped")
            simulation.do(_BEAT, "beat")
        if world_size <= _LEAVING_RANKS:
            simulation.do(_LEAVE, "leave")
        found = [verdict for verdicts, _ in simulation.ask("verdicts") for verdict in verdicts]
    if found:
        raise RuntimeError(f"healthy simulated ranks have found {found[0]}")
    return simulation


def tables(quick: bool, sizes: Sequence[int] = ()) -> Iterator[Table]:
    """The tables of all sizes."""
    sizes = sizes or ((64, 512) if quick else (64, 512, 4096))
    found = {size: measure(size, 2 if quick else 7) for size in sizes}
    yield operations(found)
    yield by_operation(found[max(found)])
    yield latencies(found)
    if len(found) > 1:
        yield growth(found)
        yield far(found)
    yield comparisons(_PLANS[:1] if quick else _PLANS)


def operations(found: dict[int, Simulation]) -> Table:
    rows: list[dict[str, Any]] = []
    for name in (_START, _ALL_AT_ONCE, _PER_MARK, _SPAN, _TICK, _BEAT, _LEAVE):
        for size, simulation in found.items():
            if name not in simulation.costs:
                continue
            cost = simulation.costs[name]
            row: dict[str, Any] = {"what": name, "ranks": size}
            row |= {"operations": round(cost.total(0)), "per rank": cost.total(0) / size}
            row |= {"KiB to the store": cost.total(1) / 1024, "KiB from it": cost.total(2) / 1024}
            row |= {"bytes per rank": (cost.total(1) + cost.total(2)) / size}
            row |= {"host's CPU ms": cost.host_seconds / cost.times * 1e3}
            row |= {"host's µs per operation": cost.host_seconds / cost.times / cost.total(0) * 1e6}
            row |= {"rank 0's CPU ms": cost.first_rank_seconds / cost.times * 1e3}
            row |= {"wall ms": quartiles(cost.wall_seconds)[1] * 1e3}
            rows.append(row)
    return Table(
        "Scale: what each costs all ranks together, each time",
        rows,
        [
            "Bytes are keys and values, without the store's own framing. CPU is processor time: of the store's "
            "process, and of rank 0's simulated process, its two threads together. Wall is the simulation's own time, "
            f"most of it spent in the {_CREWS + 1} Python processes that stand for all ranks."
        ],
    )


def by_operation(simulation: Simulation) -> Table:
    rows: list[dict[str, Any]] = []
    for name, cost in simulation.costs.items():
        for operation, values in sorted(cost.counts.items()):
            each = [value / cost.times for value in values]
            per_rank = each[0] / simulation.world_size
            row = {"what": name, "operation": operation, "times": round(each[0]), "per rank": per_rank}
            rows.append(row | {"bytes each": (each[1] + each[2]) / each[0]})
    return Table(f"Scale: the operations of {simulation.world_size:,} ranks", rows)


def latencies(found: dict[int, Simulation]) -> Table:
    rows: list[dict[str, Any]] = []
    for size, simulation in found.items():
        low, middle, high = (value * 1e3 for value in quartiles(simulation.latencies))
        row = {"ranks": size, "marks": len(simulation.latencies), "median ms": middle}
        row |= {"lower quartile": low, "upper quartile": high, "µs per rank": middle * 1e3 / size}
        rows.append(row)
    return Table(
        "Scale: from one rank's passing a mark until the last rank knows",
        rows,
        [f"{_CREWS + 1} connections wait in the store; each then hears for its ranks, one after the other."],
    )


def growth(found: dict[int, Simulation]) -> Table:
    """Exponents of growth from the smallest to the largest size that did it: 1 is linear, 2 is quadratic."""
    small = min(found)
    rows: list[dict[str, Any]] = []
    for name in found[small].costs:
        large = max(size for size, simulation in found.items() if name in simulation.costs)
        one, many = found[small].costs[name], found[large].costs[name]
        pairs = {
            "operations": (one.total(0), many.total(0)),
            "bytes": (one.total(1) + one.total(2), many.total(1) + many.total(2)),
            "host's CPU": (one.host_seconds / one.times, many.host_seconds / many.times),
            "rank 0's CPU": (one.first_rank_seconds / one.times, many.first_rank_seconds / many.times),
        }
        row: dict[str, Any] = {"what": name, "from ranks": small, "to ranks": large}
        row |= {f"{what} ~ ranks^": exponent(*pair, large / small) for what, pair in pairs.items()}
        rows.append(row)
    return Table("Scale: growth", rows, ["1 is linear, 2 quadratic."])


def exponent(small: float, large: float, factor: float) -> float:
    return math.log(large / small) / math.log(factor)


def far(found: dict[int, Simulation]) -> Table:
    """The constants of the largest size, per rank, times 100,000: a lower bound for what grows faster."""
    size = max(found)
    rows: list[dict[str, Any]] = []
    for name, cost in found[size].costs.items():
        factor = _FAR / size
        row: dict[str, Any] = {"what": name, "operations": round(cost.total(0) * factor)}
        row |= {"MB": (cost.total(1) + cost.total(2)) * factor / 1e6}
        row |= {"host's CPU s": cost.host_seconds / cost.times * factor}
        row |= {"rank 0's CPU s": cost.first_rank_seconds / cost.times * factor}
        rows.append(row)
    return Table(f"Scale: {_FAR:,} ranks, if each cost what it costs with {size:,}", rows, ["Computed, not measured."])


def comparisons(sizes: Sequence[int]) -> Table:
    """What rank 0 does with the plans of all ranks once it has them; no store and no simulation in it."""
    rows: list[dict[str, Any]] = []
    for size in sizes:
        plans = {rank: simulated.plan_of(rank, size) for rank in range(size)}
        began = time.process_time()
        roll_call.judge_plans(plans, roll_call._PROOF_FIELDS)  # pyright: ignore[reportPrivateUsage]
        judged = time.process_time()
        judge_dp_ranks(plans)
        placed = time.process_time()
        roll_call._agreed(plans)  # pyright: ignore[reportPrivateUsage]
        row = {"ranks": size, "equal plans, ms": (judged - began) * 1e3, "dp_ranks, ms": (placed - judged) * 1e3}
        rows.append(row | {"what all agree on, ms": (time.process_time() - placed) * 1e3})
    return Table("Scale: rank 0's comparison of the plans, processor time", rows)
