"""Measures what even passes cost: a small DDP step with `uneven_train` off and on, with `Join`, and with an all_reduce.

Real ranks with gloo and a store like torchrun's. All modes take turns within one process group, in a new order in each
round, and each ratio is that of two passes of one round. So other load on the machine affects all modes alike.

A batch is one step of a small DDP model. What is missing to the wanted length is either slept, as a thread waits for an
accelerator, or computed on the processor. It is tuned once, on a loop without any tool, and the same in all modes.

The loaders are iterable datasets without a length, so that no length is proven and credits are needed. How often and
how long the training thread waits for credits is counted here, around `EvenPass._wait`.
"""

import contextlib
import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from benchmarks.ranks import on_ranks
from benchmarks.results import Table, progress, quartiles
from countoff.core.session.threads.even_pass import EvenPass
from countoff.torch import Countoff
from integration_tests.constants import put
from tests.relay import slow_store

GOAL = 1.02
"""At `_GOAL_MS`, a pass may take so many times as long as with `uneven_train="raise"`."""
NOTHING, OFF, STOP, JOIN, FLAG = "nothing", "`raise` (off)", "`stop`", "`Join`", "all_reduce"
OFF_AGAIN = "off, once more"
"""The same as `OFF`: how far the two are apart is the machine's own noise."""
STOP_UNEVEN, STOP_PROVEN = "`stop`, uneven", "`stop`, proven lengths"
_COMPARED = {"nothing": NOTHING, "off": OFF}
EQUAL = NOTHING, OFF, OFF_AGAIN, STOP, JOIN, FLAG
ALL = *EQUAL, STOP_UNEVEN, STOP_PROVEN
SLEEPS, COMPUTES = "sleeps", "computes"
LOOKAHEADS = 2, 4, 8
DELAYS_MS = 0.0, 2.0, 10.0, 40.0
_GOAL_MS = 5
_MADE_EVEN = STOP, STOP_UNEVEN, STOP_PROVEN
_STEP_BATCHES = {1: 128, 5: 96, 50: 16}
_STEP_ROUNDS = {1: 5, 5: 8, 50: 3}
_WIDTH = 64
_UNEVEN_BY = 5
_WORKERS = 2
"""Of a loader that fetches ahead."""
_WARM_UP_STEPS = 256
_SETTINGS = (
    (2, 0, SLEEPS),
    (4, 0, SLEEPS),
    (2, _WORKERS, SLEEPS),
    (4, _WORKERS, SLEEPS),
    (2, 0, COMPUTES),
    (1, 0, SLEEPS),
)


@dataclass
class Waits:
    """The waits of a rank for credits.

    Attributes:
        count: How often the training thread waited in a pass.
        seconds: How long, in all.
        lookahead: Batches that it fetched ahead when the pass ended.
    """

    count: int = 0
    seconds: float = 0.0
    lookahead: int = 0


@dataclass
class Passes:
    """What was measured of one mode, one value for each round.

    Attributes:
        seconds: Of a batch of rank 0, over whole passes.
        batches: Of each batch of rank 0, from one to the next.
        waits: Those of the rank that waited most often.
        waited: Seconds that this rank waited.
        lookahead: Batches that rank 0 fetched ahead when the pass ended.
    """

    seconds: list[float] = field(default_factory=list[float])
    batches: list[float] = field(default_factory=list[float])
    waits: list[int] = field(default_factory=list[int])
    waited: list[float] = field(default_factory=list[float])
    lookahead: list[int] = field(default_factory=list[int])


@dataclass(frozen=True)
class Case:
    """What is measured in one process group.

    Attributes:
        modes: What takes turns.
        step_ms: Milliseconds that a step is tuned to.
        batches: Batches per pass.
        rounds: Passes with each mode; one more before them is the warm-up.
        workers: Workers of the loader.
        filling: Whether a batch sleeps or computes for the rest of its milliseconds.
        lookahead: Batches that each rank fetches ahead at first.
    """

    modes: Sequence[str]
    step_ms: float
    batches: int
    rounds: int
    workers: int = 0
    filling: str = SLEEPS
    lookahead: int = 4


class Unsized(IterableDataset[torch.Tensor]):
    """Batches of one rank, without a length; its workers share them."""

    def __init__(self, batches: torch.Tensor) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        begin, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for number in range(begin, len(self._batches), step):
            yield self._batches[number]


class Sized(Dataset[torch.Tensor]):
    """The same, with a length, which countoff proves."""

    def __init__(self, samples: torch.Tensor) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._samples[index]

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        """Returns a batch at once, so that it takes no longer than one of `Unsized`."""
        return self._samples[indices]


def _as_is(batch: Any) -> Any:
    return batch


class Steps:
    """The training of one rank.

    Args:
        case: Whose steps these are. Collective: every rank must call it, to agree on what fills a step.
    """

    def __init__(self, case: Case) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(7)
        self.model = DistributedDataParallel(torch.nn.Linear(_WIDTH, _WIDTH))
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self._operand = torch.randn(128, 128)
        self._seconds = 0.0  # that fill a step
        self._once = self._median(lambda: torch.mm(self._operand, self._operand)) if case.filling == COMPUTES else 0.0
        batch = torch.randn(8, _WIDTH)
        for _ in range(_WARM_UP_STEPS):  # the first steps, while other ranks still start, take longer
            self.train(batch)
        for _ in range(12):  # by half, because a step takes longer after a sleep than right after another step
            missing = case.step_ms / 1e3 - self._median(lambda: self.train(batch))
            self._seconds = max(0.0, self._seconds + missing / 2)

    def train(self, batch: torch.Tensor) -> None:
        """Trains on one batch."""
        self._optimizer.zero_grad()
        self.model(batch).square().mean().backward()
        self._optimizer.step()
        if self._once:
            for _ in range(round(self._seconds / self._once)):
                torch.mm(self._operand, self._operand)
        elif self._seconds:
            time.sleep(self._seconds)

    def _median(self, call: Callable[[], object]) -> float:
        """Returns the seconds of a call on rank 0: the median of 32. Collective."""
        seconds: list[float] = []
        for _ in range(32):
            began = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - began)
        agreed = torch.tensor([quartiles(seconds)[1]])
        dist.broadcast(agreed, 0)
        return agreed.item()


def measure(case: Case) -> dict[str, Passes]:
    """Returns what each mode took, over all rounds. Collective."""
    dist.init_process_group("gloo")
    steps, found, order = Steps(case), {mode: Passes() for mode in case.modes}, random.Random(7)
    loaders = {mode: loader_of(mode, case) for mode in case.modes}
    for number in range(case.rounds + 1):
        for mode in order.sample(case.modes, len(case.modes)):
            times, waits = one_pass(mode, case, loaders[mode], steps)
            told: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(told, waits)
            if number:
                most = max(told, key=lambda each: (each.count, each.seconds))
                passes = found[mode]
                passes.seconds.append((times[-1] - times[0]) / case.batches)
                passes.batches += [ended - began for began, ended in itertools.pairwise(times[1:-1])]
                passes.waits.append(most.count)
                passes.waited.append(most.seconds)
                passes.lookahead.append(waits.lookahead)
    return found


def loader_of(mode: str, case: Case) -> DataLoader[Any]:
    """Returns the loader of this rank. With every mode, each rank is to take `case.batches` batches."""
    rank, world_size, count = dist.get_rank(), dist.get_world_size(), case.batches
    if mode == STOP_UNEVEN:
        count += _UNEVEN_BY * (world_size - 1 - rank)
    data = torch.randn(count, 8, _WIDTH, generator=torch.Generator().manual_seed(rank))
    workers: dict[str, Any] = {"num_workers": case.workers}
    if case.workers:  # a rank of the harness would otherwise start a forkserver of its own
        workers |= {"persistent_workers": True, "multiprocessing_context": "fork"}
    if mode == STOP_PROVEN:
        samples = Sized(data.flatten(0, 1))
        sampler = DistributedSampler(samples, num_replicas=1, rank=0, shuffle=False)
        return DataLoader(samples, batch_size=8, sampler=sampler, collate_fn=_as_is, **workers)
    return DataLoader(Unsized(data), batch_size=None, **workers)


def one_pass(mode: str, case: Case, loader: DataLoader[Any], steps: Steps) -> tuple[list[float], Waits]:
    """Returns the waits of this rank in one pass, and when it began, when each batch was trained on, and the end.

    Collective.

    Raises:
        RuntimeError: If this rank took another number of batches than it is to take.
    """
    times: list[float] = []
    with counting_waits() as waits, equipped(mode, case, loader, steps) as (batches, before_batch):
        dist.barrier()
        times.append(time.perf_counter())
        for batch in batches:
            before_batch()
            steps.train(batch)
            times.append(time.perf_counter())
        times.append(time.perf_counter())
        dist.barrier()
    taken = len(times) - 2
    if taken != case.batches:
        raise RuntimeError(f"{taken} batches with {mode}, expected {case.batches}")
    return times, waits


@contextlib.contextmanager
def equipped(
    mode: str, case: Case, loader: DataLoader[Any], steps: Steps
) -> Iterator[tuple[Iterable[Any], Callable[[], object]]]:
    """Adds what the mode needs to the loop; yields what the loop iterates, and what it calls before each batch."""
    if mode == NOTHING:
        yield loader, _nothing
    elif mode == FLAG:
        yield loader, all_have_a_batch
    elif mode == JOIN:
        with steps.model.join():
            yield loader, _nothing
    else:
        put(LOOKAHEAD=case.lookahead)
        with Countoff(uneven_train="stop" if mode in _MADE_EVEN else "raise") as countoff:
            batches: Any = countoff.train(loader)
            if mode == STOP_PROVEN:
                len(batches)  # begins the fit with the loader, whose length it proves
            else:
                countoff.start()  # the roll call is not timed
            yield batches, _nothing


def _nothing() -> None:
    """Does nothing: the loop need not call this mode."""


def all_have_a_batch() -> bool:
    """Returns whether every rank has a batch: what loops do that tolerate uneven ranks by themselves. Collective."""
    flag = torch.ones(1)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())


@contextlib.contextmanager
def counting_waits() -> Iterator[Waits]:
    """Counts the waits for credits of this process."""
    waits, wait, end = Waits(), EvenPass._wait, EvenPass._end  # pyright: ignore[reportPrivateUsage]

    def timed(even: EvenPass) -> None:
        began = time.perf_counter()
        wait(even)
        waits.count += 1
        waits.seconds += time.perf_counter() - began

    def ended(even: EvenPass, total: int) -> None:
        waits.lookahead = even._credits.lookahead  # pyright: ignore[reportPrivateUsage]
        end(even, total)

    with mock.patch.object(EvenPass, "_wait", timed), mock.patch.object(EvenPass, "_end", ended):
        yield waits


def tables(quick: bool) -> Iterator[Table]:
    """Yields the tables of look-aheads and of slow stores, then one for each number of ranks and of workers."""
    yield look_aheads(quick)
    yield slow_stores(quick)
    yield from throughput(quick)


def throughput(quick: bool, settings: Sequence[tuple[int, int, str]] = ()) -> Iterator[Table]:
    """Yields a table for each number of ranks, number of workers, and what fills a batch."""
    for world_size, workers, filling in settings or _SETTINGS[: 1 if quick else None]:
        rows: list[dict[str, Any]] = []
        whole = not quick and (workers, filling) == (0, SLEEPS) and world_size > 1
        for step_ms in _STEP_BATCHES if whole else (_GOAL_MS,):
            progress(f"even: {world_size} ranks, {workers} workers, a batch of {step_ms} ms {filling}")
            modes = ALL if step_ms == _GOAL_MS else EQUAL
            batches, rounds = (16, 2) if quick else (_STEP_BATCHES[step_ms], _STEP_ROUNDS[step_ms])
            case = Case(modes, step_ms, batches, rounds, workers, filling)
            found = on_ranks(measure, world_size, case)[0]
            rows += rows_of(step_ms, found, credits=world_size > 1)
        title = f"Even passes, per batch, {world_size} ranks, loader workers: {workers}, a batch {filling}"
        notes = [
            "Each ratio is the median (quartiles) of the ratios of two passes of one round. A pass begins with the "
            f"loader's iterator and ends after the loop. {_batches_note(quick)} The median batch is that of all "
            "passes: other load on the machine moves it least, and what happens once per pass is not in it. "
            "Waits: of the rank that waited most often, the median and the most of all passes."
        ]
        yield Table(title, rows, notes)


def _batches_note(quick: bool) -> str:
    if quick:
        return "16 batches a pass, 2 rounds."
    of_each = (f"{_STEP_BATCHES[step]} batches at {step} ms ({_STEP_ROUNDS[step]} rounds)" for step in _STEP_BATCHES)
    return f"A pass has {', '.join(of_each)}."


def rows_of(step_ms: float, found: Mapping[str, Passes], *, credits: bool) -> list[dict[str, Any]]:
    """Returns a row for each mode.

    Args:
        step_ms: Milliseconds that a step was tuned to.
        found: What was measured.
        credits: Whether there are credits at all: not on one rank.
    """
    rows: list[dict[str, Any]] = []
    for mode, passes in found.items():
        low, middle, high = (value * 1e3 for value in quartiles(passes.seconds))
        row: dict[str, Any] = {"batch ms": step_ms, "mode": mode, "median ms": middle}
        row |= {"lower quartile": low, "upper quartile": high}
        row |= {f"÷ {name}": text_of_ratios(ratios(found, mode, to)) for name, to in _COMPARED.items() if to in found}
        of_batches = [quartiles(found[each].batches)[1] for each in (mode, OFF)]
        row |= {"median batch ÷ off": f"{of_batches[0] / of_batches[1]:.3f}"}
        if mode in _MADE_EVEN and credits:
            row |= {"waits": f"{quartiles(passes.waits)[1]:g}, most {max(passes.waits)}"}
            row |= {"waited ms": quartiles(passes.waited)[1] * 1e3, "goal": goal(step_ms, mode, found)}
        rows.append(row)
    return rows


def ratios(found: Mapping[str, Passes], mode: str, to: str) -> list[float]:
    """Returns, for each round, the seconds with a mode divided by those with another one."""
    return [one / other for one, other in zip(found[mode].seconds, found[to].seconds, strict=True)]


def text_of_ratios(values: Sequence[float]) -> str:
    low, middle, high = quartiles(values)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def goal(step_ms: float, mode: str, found: Mapping[str, Passes]) -> str:
    """Returns which of the goals a mode has met: its ratio to off, its place beside the others, and one wait.

    Where the quartiles of its ratio hold 1, it is not apart from off: the noise hides what it costs.
    """
    told: list[str] = []
    if step_ms == _GOAL_MS:
        low, middle, _ = quartiles(ratios(found, mode, OFF))
        told.append(f"≤ {GOAL} {'met' if middle <= GOAL else 'not apart from off' if low <= 1 else 'MISSED'}")
    for other in (name for name in (JOIN, FLAG) if name in found):
        low, _, high = quartiles(ratios(found, mode, other))
        told.append(f"{'ahead of' if high < 1 else 'BEHIND' if low > 1 else 'like'} {other}")
    told.append(f"one wait {'met' if quartiles(found[mode].waits)[1] <= 1 else 'MISSED'}")
    return ", ".join(told)


def look_aheads(quick: bool) -> Table:
    """Returns the cost of several look-aheads, on two ranks. Each has its own process group, with its own `raise`.

    The loaders have workers: no batch of any other loader is fetched ahead.
    """
    rows: list[dict[str, Any]] = []
    batches, rounds = (16, 2) if quick else (_STEP_BATCHES[_GOAL_MS], _STEP_ROUNDS[_GOAL_MS])
    for lookahead in LOOKAHEADS[:1] if quick else LOOKAHEADS:
        progress(f"even: look-ahead {lookahead}")
        case = Case((OFF, STOP), _GOAL_MS, batches, rounds, _WORKERS, lookahead=lookahead)
        found = on_ranks(measure, 2, case)[0]
        of_policies = [row for row in rows_of(_GOAL_MS, found, credits=True) if row["mode"] in _MADE_EVEN]
        rows += [{"lookahead": lookahead} | row for row in of_policies]
    return Table(
        f"Even passes: look-aheads at {_GOAL_MS} ms, 2 ranks, loader workers: {_WORKERS}, a batch sleeps", rows
    )


def slow_stores(quick: bool) -> Table:
    """Returns what a store costs whose answers are all late by the same time, on two ranks."""
    rows: list[dict[str, Any]] = []
    for workers, delay in itertools.product((0, _WORKERS), (DELAYS_MS[0], DELAYS_MS[2]) if quick else DELAYS_MS):
        progress(f"even: {workers} workers, a store that answers {delay:g} ms late")
        case = Case((OFF, STOP), _GOAL_MS, 32 if quick else _STEP_BATCHES[_GOAL_MS], 1 if quick else 3, workers)
        with slow_store() as store:
            store.delay_seconds = delay / 1e3
            found = on_ranks(measure, 2, case, env={"MASTER_PORT": str(store.port)})[0]
        passes = found[STOP]
        row: dict[str, Any] = {"loader workers": workers, "each answer late by, ms": delay}
        row |= {"÷ off": text_of_ratios(ratios(found, STOP, OFF))}
        row |= {"waits": f"{quartiles(passes.waits)[1]:g}, most {max(passes.waits)}"}
        row |= {"waited ms": quartiles(passes.waited)[1] * 1e3}
        rows.append(row | {"batches of a block at the end": f"{max(1.0, quartiles(passes.lookahead)[1] / 2):g}"})
    return Table(
        f"Even passes: a store that answers late, `stop`, {_GOAL_MS} ms, 2 ranks, a look-ahead of 4",
        rows,
        [
            f"With workers, a block begins with 2 batches, which take {2 * _GOAL_MS} ms, and may grow to 16. "
            "Without them, it has one batch."
        ],
    )
