"""Simulated ranks: the real guard, log view, writer and roll call of each, moved by hand over a store in memory.

A rank has three actors, as in a process: its training loop, its writer and its reader. `play` moves each of them at a
pace of its own, so entries of the log reach every rank in order but after a random delay.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal
from unittest import mock

from countoff.core import FitPlan, Guard, Settings, Verdict, constants
from countoff.core.checks.check import FitStart
from countoff.core.checks.framework import WRONG_LENGTH
from countoff.core.ending.table import publish_table, with_table
from countoff.core.session.threads.even_pass import EvenPass
from countoff.core.session.threads.registration import Registration
from tests.fake_store import FakeStore

WAITS = "waits"
_SYNC = "sync"
_TRAINER, _READER = 1, 2
"""Two threads of a rank: one trains, the other one reads the loader for it."""
_TURNS_PER_HEARTBEAT = 50


@dataclass(frozen=True)
class Epoch:
    """What one rank reads and does in one train epoch.

    Attributes:
        batches: Batches trained on, those before a resumed position included.
        steps: The batches after which an optimizer step is applied.
        evaluations: Batches of each loader of the evaluation, by the train batch after which it runs; 0: it runs after
            the epoch.
        spare: Batches that the loader holds beyond those, where a limit or a break ends the epoch; 0: the loader is
            exhausted.
        position: Batches trained on before the checkpoint from which the rank resumes.
        joined: Whether the epoch is inside `Join`, where ranks may differ.
        extra: The batches in which it runs two micro-batches, and not one.
        leaves: Where ranks are made even: the batch after which this rank leaves the loop; None: it does not.
    """

    batches: int
    steps: frozenset[int] = frozenset()
    evaluations: Mapping[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    spare: int = 0
    position: int = 0
    joined: bool = False
    extra: frozenset[int] = frozenset()
    leaves: int | None = None


@dataclass(frozen=True)
class Program:
    """What one rank does in a job.

    Attributes:
        epochs: Its train epochs.
        plan: The plan that it reports at the start of the fit.
        sanity: Batches per loader of an evaluation before the first epoch; empty: there is no such evaluation.
        eval_spare: Unused batches in the loaders of evaluations; a limit then stops the evaluations.
        evaluates: Whether it evaluates.
        ahead: Batches that it fetches ahead; 0: it does not fetch ahead.
        rate: Its learning rate.
        impatient: Whether it does not wait for the result of the roll call, as after its deadline.
        warns: Numbers of the batches, counted through all epochs, at which it warns.
        prefetches: Whether its loaders fetch ahead by themselves, where ranks are made even.
        proven: Batches that its loaders are proven to have, where ranks are made even; None: that is not proven.
        reader: A seed for how far a thread that reads the loader is ahead of the steps, which another thread applies;
            None: one thread does both.
        ends: Number of the batch, counted through all spans, before which it raises or exits (`sys.exit`), and
            which of the two; None: it does neither.
    """

    epochs: tuple[Epoch, ...]
    plan: FitPlan = field(default_factory=FitPlan)
    sanity: tuple[int, ...] = ()
    eval_spare: int = 0
    evaluates: bool = True
    ahead: int = 0
    rate: float = 0.1
    impatient: bool = False
    warns: frozenset[int] = frozenset()
    prefetches: bool = True
    proven: int | None = None
    reader: int | None = None
    ends: tuple[int, Literal["raise", "exit"]] | None = None


@dataclass(frozen=True)
class Job:
    """One job: the program of every rank, and what they have in common.

    Attributes:
        programs: One for each rank.
        synced: Whether every batch has a collective of the model, in which each rank waits for all others.
        uneven_eval: As in the settings.
        tick_batches: `constants.TICK_BATCHES`.
        uneven_train: As in the settings.
        lookahead: `constants.LOOKAHEAD`.
    """

    programs: tuple[Program, ...]
    synced: bool = False
    uneven_eval: Literal["raise", "warn", "allow", "off", "stop"] = "raise"
    tick_batches: int = 3
    uneven_train: Literal["raise", "stop"] = "raise"
    lookahead: int = 4


class _LoopEnded(Exception):
    """An exception or an exit has ended the training loop early."""


class Rank:
    """One simulated rank."""

    def __init__(self, job: Job, rank: int, store: FakeStore) -> None:
        self.program = job.programs[rank]
        chosen = Settings(
            uneven_train=job.uneven_train,
            uneven_eval=job.uneven_eval,
            deadline_seconds=1e6,
            levels={"VersionMismatch": "off"},  # all ranks are of this host
        )
        object.__setattr__(chosen, "on_divergence", "warn")  # raising waits for the printed table
        self._settings = chosen
        rates = (self.program.rate,)
        self.guard = Guard(chosen, rank=rank, world_size=len(job.programs), learning_rates=lambda: rates)
        self.state = self.guard.state
        self.state.printed.set()  # a failure waits for the printed table
        self.registration = Registration(self.state)  # never started: no thread, no connection
        self.writer = self.registration.writer
        self.writer.session.busy_since = 1.0  # the store is slow: sync points do not wait for it
        self.store = store
        self.taken: list[list[int]] = []
        self.collectives = 0
        self.over = False
        self._blocked = False
        self._batches = 0
        self._turns = 0
        self._trained = 0
        self._owed, self._thread = 0, _READER
        self._chance = None if self.program.reader is None else random.Random(self.program.reader)
        self._synced = job.synced
        self._script = self._run()
        self.writer.submit(self.writer.session.heartbeats.register)

    def train(self, ranks: Sequence["Rank"]) -> bool:
        """Makes one step in the training loop, unless a verdict has ended it or a collective waits for other ranks.

        Returns:
            Whether this rank made progress.
        """
        if self.over or self.state.proposed is not None or self.state.end is not None:
            return False
        if self._blocked and min(other.collectives for other in ranks) < self.collectives:
            return False
        try:
            did = next(self._script, None)
        except _LoopEnded:
            did = None
        self.over, self._blocked = did is None, did == _SYNC
        self.collectives += self._blocked
        return did != WAITS

    def run_writer(self) -> bool:
        """Runs one turn of the writer; whether it made progress."""
        writer, pending = self.writer, len(self.writer.pending)
        queued = not self.state.outbox.empty()
        self._turns += 1
        heartbeat_due = self._turns % _TURNS_PER_HEARTBEAT == 1
        if not (queued or pending or heartbeat_due):
            return False
        writer.turn(self.store)
        writer.look(self.store)
        if heartbeat_due:
            writer.session.heartbeats.send(self.store, writer.session.passed)
            writer.session.heartbeats.report_silence(self.store, self.state)
        writer.session.heartbeats.prune(self.store)
        return queued or len(writer.pending) != pending

    def run_reader(self) -> bool:
        """Receives the next entry of the log; whether there was one."""
        line = self.writer.session
        index = line.read
        if self.state.end is not None or not self.store.has(f"log/{index}"):
            return False
        line.receive(index, self.store.get(f"log/{index}"))
        return True

    def _run(self) -> Iterator[str]:
        """A plain training loop that calls the guard; between any two of its calls, other ranks may act."""
        program, guard = self.program, self.guard
        yield from self._count_off()
        if self._chance is not None:
            evidence = guard.evidence
            evidence.home, evidence.optimizers_told, evidence.current = _TRAINER, True, lambda: self._thread
            evidence.takes(_READER)
        if program.sanity:
            yield from self._evaluate(program.sanity)
        for number, epoch in enumerate(program.epochs):
            guard.compare_spans(not epoch.joined)
            guard.train_start(number, epoch.position)
            yield "train_start"
            if self._settings.uneven_train != "raise":
                yield from self._even(epoch)
                continue
            for batch in range(epoch.position + 1, epoch.batches + 1):
                yield from self._batch(batch, epoch.batches + epoch.spare, synced=not epoch.joined)
                for _ in range(1 + (batch in epoch.extra)):
                    guard.micro_batch()
                if batch in epoch.steps:
                    yield from self._step()
                yield from self._warn()
                if batch in epoch.evaluations:
                    exhausted = bool(program.ahead) and batch == epoch.batches and not epoch.spare
                    yield from self._evaluate(epoch.evaluations[batch], exhausted)
            guard.train_end("stopped" if epoch.spare else "exhausted")
            yield "train_end"
            guard.compare_spans(True)
            if 0 in epoch.evaluations:
                yield from self._evaluate(epoch.evaluations[0])
        yield from self._apply_owed(all_of_them=True)
        self._thread = _TRAINER
        guard.fit_end()
        yield "fit_end"

    def _step(self) -> Iterator[str]:
        """Applies a step, or leaves it to the thread that applies them, which may be some batches behind."""
        if self._chance is None:
            self.guard.step()
            yield "step"
            return
        self._owed += 1
        yield from self._apply_owed()

    def _apply_owed(self, *, all_of_them: bool = False) -> Iterator[str]:
        while self._owed and (all_of_them or (self._chance is not None and self._chance.random() < 0.5)):
            self._owed -= 1
            self._thread = _TRAINER
            self.guard.step("optimizer")
            self._thread = _READER
            yield "step"

    def _even(self, epoch: Epoch) -> Iterator[str]:
        """An epoch in which ranks take the same number of batches, whatever the loader of each holds."""
        loader = iter(range(epoch.position, epoch.batches))
        proven, prefetches = self.program.proven is not None, self.program.prefetches
        even, number = self.guard.even(loader, prefetches=prefetches, proven=proven), epoch.position
        assert isinstance(even, EvenPass)
        self.taken.append([])
        while number != epoch.leaves:
            while not even.is_ready():
                yield WAITS
            if self.state.proposed is not None or self.state.end is not None:
                return
            batch = next(even, None)
            if batch is None:
                break
            number += 1
            self.taken[-1].append(batch)
            yield from self._batch(number, 0, synced=True)
            if number in epoch.steps:
                self.guard.step()
                yield "step"
            if number in epoch.evaluations:
                yield from self._evaluate(epoch.evaluations[number])
        self.guard.train_end("exhausted" if number != epoch.leaves else "stopped")
        yield "train_end"

    def _count_off(self) -> Iterator[str]:
        guard, proven = self.guard, self.program.proven
        holders = tuple(guard.state.ranks)
        start = FitStart(self.program.plan, {"torch": "2"}, own_batches=proven, holders=holders)
        guard._own_batches = proven
        answered = guard.meet(self.registration, start).count_off(start)
        yield "counted off"
        while not (answered.is_set() or self.program.impatient):
            yield WAITS
        guard.started()
        yield "fit_start"

    def _batch(self, batch: int, held: int, *, synced: bool) -> Iterator[str]:
        if self.program.ends is not None and self._batches == self.program.ends[0]:
            self.guard.failed(ValueError("torn shard") if self.program.ends[1] == "raise" else SystemExit(0))
            raise _LoopEnded
        self._batches += 1
        ahead = self.program.ahead
        self.guard.batch(min(batch + ahead, held) if ahead else 0, last=bool(ahead) and batch == held)
        yield "batch"
        if synced and self._synced:
            yield _SYNC

    def _warn(self) -> Iterator[str]:
        self._trained += 1
        if self._trained in self.program.warns:
            self.guard.warn(WRONG_LENGTH.found("it is too long.", subject=f"loader {self._trained}"))
            yield "warning"

    def _evaluate(self, loaders: tuple[int, ...], train_exhausted: bool = False) -> Iterator[str]:
        if not self.program.evaluates:
            return
        spare = self.program.eval_spare
        self.guard.eval_start("validation", train_exhausted=train_exhausted)
        yield "eval_start"
        for loader, batches in enumerate(loaders):
            if len(loaders) > 1:
                self.guard.eval_loader(loader)
            for batch in range(1, batches + 1):
                if len(loaders) == 1:
                    yield from self._batch(batch, batches + spare, synced=self.guard._settings.uneven_eval != "off")
                else:  # only the end of a single loader is the end of the evaluation
                    self.guard.batch()
                    yield "batch"
        self.guard.eval_end("stopped" if spare else "exhausted")
        yield "eval_end"


def play(job: Job, seed: int) -> list[Rank]:
    """Runs the job until no rank can make progress. Each rank and each of its threads has a pace of its own."""
    with mock.patch.multiple(constants, TICK_BATCHES=job.tick_batches, LOOKAHEAD=job.lookahead):
        return _play(job, seed)


def _play(job: Job, seed: int) -> list[Rank]:
    store, chance = FakeStore(), random.Random(seed)
    ranks = [Rank(job, rank, store) for rank in range(len(job.programs))]
    actors = [
        actor for rank in ranks for actor in (lambda rank=rank: rank.train(ranks), rank.run_writer, rank.run_reader)
    ]
    pace = [chance.choice((1, 30, 1000)) for _ in actors]
    moving = True
    while moving:
        for actor in chance.choices(actors, pace, k=len(actors) * chance.choice((1, 20))):
            actor()
        moving = sum(actor() for actor in actors) > 0  # every actor gets a turn
    return ranks


def verdict_with_table(ranks: Sequence[Rank]) -> Verdict:
    """The verdict as it is printed, with the table of what every rank had counted when it received the verdict."""
    verdict, store = ranks[0].state.end, ranks[0].store
    assert verdict is not None
    rows = {rank.state.rank: rank.state.final_row() for rank in ranks}
    publish_table(store, verdict, rows, complete=True)
    return with_table(store, verdict, {}, len(ranks))
