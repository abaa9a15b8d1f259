"""Writes the traces of simulated ranks: the real guard, recorder and writer of each, in simulated time.

The ranks, their store and their roll calls are those of `simulated`. These parts of a trace are simulated:

- Time: each rank has a clock of its own, which runs as fast as the machine can write. Hosts differ in theirs.
- The writer of a rank has no thread. It looks at its rank just when there is something to see, and not every 0.25 s.
- Batches and steps are counted 5 s at a time, and sync points are the only entries in the store: no tick of the
  protocol.
- The places of main threads, the names of hosts, and what the comparison of two hosts' clocks finds.

Every line of the files is what the real code makes of that.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from benchmarks import simulated
from benchmarks.scale import Simulation
from countoff.core import guard
from countoff.core.session.liveness.stacks import Place
from countoff.core.trace import recorder, writer
from countoff.core.trace.format import TICK_SECONDS

BEGAN = 1_750_000_000.0
"""When these jobs begin, in seconds since the epoch."""
SLOW_RANK = 5
"""Its loader is slow in every third epoch."""
BATCHES_PER_SECOND = 10
_EPOCH_SECONDS, _EVALUATION_SECONDS, _CHECKPOINT_SECONDS, _CLOCK_SECONDS = 1_680.0, 105.0, 15.0, 60.0
_CYCLE_SECONDS = _CHECKPOINT_SECONDS + _EPOCH_SECONDS + _EVALUATION_SECONDS
"""A train epoch begins with a checkpoint, and an evaluation follows it; half an hour in all."""
_LOOK_SECONDS = writer.LOOK_SECONDS
_COLLECTIVE = Place("collective", ("train.py:41 in step",))
_CODE = Place("code", ("checkpoint.py:17 in save",))


@dataclasses.dataclass
class _Present:
    """The rank that runs, as the modules that write traces see it.

    Attributes:
        seconds: Since the job began.
        ahead: Seconds that its host's clock is ahead of rank 0's.
        host: Its host's name.
        place: Where its main thread is.
    """

    seconds: float = 0.0
    ahead: float = 0.0
    host: str = ""
    place: Place = _COLLECTIVE

    def time(self) -> float:
        """Like `time.time`."""
        return BEGAN + self.seconds + self.ahead

    def monotonic(self) -> float:
        """Like `time.monotonic`."""
        return self.seconds


class _ThreadlessWriter(writer.Writer):
    """A writer that writes only when it is told to."""

    _file: Any = None

    def _join(self, source: writer.Source) -> None:
        self._sources.append(source)
        if self._file is None:
            self._file = writer._File(self._directory, self._rank)  # pyright: ignore[reportPrivateUsage]

    def turn(self) -> None:
        """Looks at the rank, and writes what there is to write."""
        self._turn(self._file)

    def _end(self) -> None:
        self.turn()
        self._file.close()
        self._over = True


def _replace(module: ModuleType, **values: Any) -> None:
    for name, value in values.items():
        setattr(module, name, value)


class TracedGroup(simulated.RankGroup):
    """The ranks of one process, which write traces."""

    def __init__(self, ranks: list[simulated.SimulatedRank], port: int) -> None:
        super().__init__(ranks, port)
        self._now = _Present()
        for module in (guard, recorder, writer):
            _replace(module, time=self._now)
        own_name, thread = (lambda: self._now.host), (lambda _: self._now.place)
        _replace(recorder, hosts=SimpleNamespace(own_name=own_name), stacks=SimpleNamespace(thread=thread))
        _replace(writer, Writer=_ThreadlessWriter, LOOK_SECONDS=0.0)

    def begin_traces(self, epochs: int) -> None:
        """Every rank begins its trace, as `Guard.fit_start` does before the roll call."""
        batches = int(_EPOCH_SECONDS * BATCHES_PER_SECOND) + 1  # one of them ends the checkpoint
        total = epochs * batches
        totals = {"countoff/total_steps": float(total), "countoff/reported_total_steps": float(total)}
        for rank in self.ranks:
            self._enter(rank, 0.02 * (rank.state.rank % 7))
            plan = simulated.plan_of(rank.state.rank, rank.state.world_size)
            plan = dataclasses.replace(plan, batches_per_epoch=batches, max_epochs=epochs)
            rank.guard.trace_totals(lambda: totals, lambda: total)
            rank.guard._trace(0)
            rank.begin(plan)
            self._turn_writer(rank)

    def sync_point(self, at: float, method: str, *arguments: Any) -> None:
        """Every rank passes a sync point at a time, a few milliseconds from the others."""
        for rank in self.ranks:
            self._enter(rank, at + 0.001 * (rank.state.rank * 7 % 13))
            getattr(rank.guard, method)(*arguments)
            self._turn_writer(rank)
            rank.turn(self.writer_channel)

    def run(self, begin: float, seconds: float, epoch: int, epochs: int, evaluation: bool) -> None:
        """Every rank reads batches for so long."""
        batches = int(TICK_SECONDS * BATCHES_PER_SECOND)
        for rank in self.ranks:
            number, state, span = rank.state.rank, rank.state, rank.guard.span
            tells_clock = number % simulated.RANKS_PER_HOST == 0 and number != 0
            share = 0.2 if number == SLOW_RANK and epoch % 3 == 0 and not evaluation else 0.02
            for tick in range(1, int(seconds / TICK_SECONDS) + 1):
                at = begin + tick * TICK_SECONDS
                self._enter(rank, at)
                span.started += batches
                if not evaluation:
                    state.steps += batches
                    trained = (epoch * _EPOCH_SECONDS + tick * TICK_SECONDS) / (epochs * _EPOCH_SECONDS)
                    rank.rate = 0.05 * (1 + math.cos(math.pi * trained))
                rank.guard.waited(share * TICK_SECONDS)
                if tells_clock and at % _CLOCK_SECONDS < TICK_SECONDS:
                    rank.state.observer._clocks_compared(self._now.ahead, 0.025)
                self._turn_writer(rank)

    def pause(self, begin: float, seconds: float) -> None:
        """Rank 0 writes a checkpoint, and all others wait for it in a collective."""
        for rank in self.ranks:
            self._now.place = _CODE if rank.state.rank == 0 else _COLLECTIVE
            for at in (begin, begin + 1.25, begin + seconds - _LOOK_SECONDS):
                self._enter(rank, at)
                self._turn_writer(rank)
            rank.guard.batch()  # it ends the pause
            rank.guard.step()
            self._enter(rank, begin + seconds)
            self._turn_writer(rank)

    def end(self, at: float) -> None:
        """Every rank ends its fit and closes its guard."""
        for rank in self.ranks:
            self._enter(rank, at)
            rank.guard.fit_end()
            rank.turn(self.writer_channel)
        for rank in self.ranks:
            self._enter(rank, at + 0.1)
            rank.guard.close()

    def _enter(self, rank: simulated.SimulatedRank, seconds: float) -> None:
        host = rank.state.rank // simulated.RANKS_PER_HOST
        self._now.seconds, self._now.host = seconds, f"node{host}"
        self._now.ahead = 0.25 * (host % 9)

    @staticmethod
    def _turn_writer(rank: simulated.SimulatedRank) -> None:
        rank.state.observer.writer.turn()


def group_process(commands: Connection, ranks: Sequence[int], world_size: int, port: int, directory: str) -> None:
    """Runs a group of ranks that write traces; see `simulated.serve`."""
    group = TracedGroup([simulated.SimulatedRank(rank, world_size, directory) for rank in ranks], port)
    simulated.serve(commands, group)


def write(directory: Path, ranks: int, epochs: int) -> int:
    """Writes the trace of a healthy job.

    Args:
        directory: Where to.
        ranks: Ranks of the job.
        epochs: Train epochs, of half an hour each with their evaluations.

    Returns:
        Its bytes.

    Raises:
        RuntimeError: If a simulated rank has a verdict.
    """
    with Simulation(ranks, group_process, str(directory)) as simulation:
        simulation.call("meet", ranks)
        simulation.call("register")
        simulation.call("begin_traces", epochs)
        simulation.count_off()
        simulation.call("sync_point", 1.0, "_pass", "fit_start", "the fit")
        for epoch in range(epochs):
            begin = 1.0 + epoch * _CYCLE_SECONDS
            trained = begin + _CHECKPOINT_SECONDS + _EPOCH_SECONDS
            simulation.call("sync_point", begin, "train_start", epoch)
            simulation.call("pause", begin, _CHECKPOINT_SECONDS)
            simulation.call("run", begin + _CHECKPOINT_SECONDS, _EPOCH_SECONDS, epoch, epochs, False)
            _close(simulation, trained, "train_end")
            simulation.call("sync_point", trained, "eval_start", "validation")
            simulation.call("run", trained, _EVALUATION_SECONDS, epoch, epochs, True)
            _close(simulation, begin + _CYCLE_SECONDS, "eval_end")
        simulation.call("end", 1.0 + epochs * _CYCLE_SECONDS)
        verdicts = [verdict for of_group, _ in simulation.call("verdicts") for verdict in of_group]
    if verdicts:
        raise RuntimeError(f"healthy simulated ranks have a verdict: {verdicts[0]}")
    return sum(file.stat().st_size for file in directory.iterdir())


def _close(simulation: Simulation, at: float, method: str) -> None:
    """All ranks close a span, and rank 0 gathers when each did."""
    simulation.call("sync_point", at, method, "exhausted")
    simulation.call("finish_polling")
