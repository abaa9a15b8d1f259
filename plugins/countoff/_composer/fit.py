"""One fit of Composer, or one evaluation that stands alone, from its roll call on until it is left."""

from __future__ import annotations

import contextlib
from typing import Any

from countoff._adapter.exit_hooks import ExitHooks
from countoff._adapter.loader_observer import LoaderObserver
from countoff._adapter.torch_facts import learning_rates, on_optimizer_step, rank_and_world_size, versions
from countoff._composer.evaluations import Evaluations
from countoff._composer.loader_report import LoaderReport, batches_when_resumed, read_loader, report_unused
from countoff._composer.messages import REMEDIES
from countoff._composer.state import length_of, plan_of, position_of, what_ended_it
from countoff.core import DivergenceError, Guard, Settings


class Watched:
    """What is watched from a roll call on until it is left.

    Args:
        state: Composer's State.
        settings: The user's choices.
        train: Whether a fit begins; False for an evaluation outside of one.
        corrected: The length that countoff has set before for this train loader; None if it has not.

    Attributes:
        guard: The guard underneath.
        evaluations: The evaluations in it.
        train: What was read off the train loader.
        opens: Whether the next train batch is the first of its pass.
    """

    def __init__(self, state: Any, settings: Settings, *, train: bool, corrected: int | None = None) -> None:
        self._settings = settings
        self._corrected = corrected
        self._rank, self._world_size = rank_and_world_size()
        self._shares = position_of(state, rank=self._rank, world_size=self._world_size)
        self.guard = Guard(
            settings,
            rank=self._rank,
            world_size=self._world_size,
            remedies=REMEDIES,
            learning_rates=lambda: learning_rates(state.optimizers),
        )
        self.opens = True
        self.train: LoaderReport | None = None
        self._fetches: LoaderObserver | None = None
        self._position = 0
        self._replaced = False
        self._epoch_batches: int | None = None
        self._undo = contextlib.ExitStack()
        self._finished = self._left = False
        if train:
            self._read_train(state, None if corrected is not None else length_of(state))
        self.evaluations = Evaluations(state, self.guard, self._rank, self._shares[1])

    def begin(self, state: Any) -> None:
        """Counts off. Collective: every rank must call it.

        Raises:
            PlanMismatch: If ranks begin with different plans.
        """
        self._undo.callback(on_optimizer_step(self.guard.step).remove)
        departure = ExitHooks(self.guard.failed, lambda: self.leave(what_ended_it()))
        self._undo.callback(departure.cancel)
        if self.train is not None:
            self._observe_train(state)
        plan = plan_of(state, self.train, self.evaluations.reads, position=self._shares)
        self.guard.fit_start(plan, versions("mosaicml", "mosaicml-streaming"))
        departure.listen_at_exit()  # after the guard's own, so that it runs before it

    def mend(self, state: Any, *, quiet: bool) -> int | None:
        """Says what is wrong with the train loader; sets its length if that is wanted and proven on all ranks alike.

        Returns:
            The length that holds from here on, if countoff has set it.
        """
        read, length = self.train, self._corrected
        if read is None:
            return None
        if length is None and self._may_mend("proven_batches_per_epoch"):
            length = read.mended_length
        for warning in () if quiet else read.warnings(length):
            self.guard.warn(warning)
        if length is not None:
            read.set_length(state, length)
        return length

    def epoch_start(self, state: Any) -> None:
        """Opens a train epoch."""
        if self._fetches is not None and self._fetches.loader is not state.train_dataloader:
            self._observe_train(state)
        self.opens, self._position = True, 0
        self._epoch_batches = self.train.totals.plan.batches_per_epoch if self.train is not None else None
        if self._fetches is not None and self.train is not None and "train" not in state.dataset_resumption:
            self._fetches.expected = self.train.own_batches if self.train.streaming is not None else None
        self.guard.train_start(int(state.timestamp.epoch))

    def first_batch(self, state: Any) -> None:
        """Looks at the pass that has begun; opens the epoch in whose middle a run resumes."""
        self.opens = False
        if self.guard.open_span is None and self.train is not None:
            self._position = int(state.timestamp.batch_in_epoch)
            self._epoch_batches = batches_when_resumed(state, self.train, self._rank)
            self.guard.train_start(int(state.timestamp.epoch), self._position)
        if self._fetches is not None and (this := self._fetches.begun) is not None:
            self._fetches.used = this
            this.skipped = this.batches - 1

    def progress(self) -> float | None:
        """How much of the train epoch this rank has done, from 0 to 1; None while nobody can know."""
        return min(1.0, self.guard.train_batches / self._epoch_batches) if self._epoch_batches else None

    def epoch_end(self, state: Any) -> int | None:
        """Closes the train epoch, and learns its length where nothing proves it.

        Returns:
            The length that holds from here on, if countoff has set it.
        """
        read, guard = self.train, self.guard
        if guard.open_span is None or read is None:
            return None
        fetched = None if self._fetches is None else self._fetches.begun if self.opens else self._fetches.used
        position, limit, notice, length = self._position, length_of(state), None, None
        used = guard.train_batches - position
        before = position if fetched is None or fetched.skipped == position else None
        left = report_unused(read, fetched, used, before=before, length=limit)
        if left is not None:
            guard.report_unused(left)
        if before is not None and (limit is None or guard.train_batches < limit):
            # Composer ends an epoch before its length only when a rank has run out, and all ranks at the same batch.
            may_set = not position and not self._replaced and self._may_mend("batches_per_epoch")
            notice, length = read.learn(state, guard.train_batches, may_set=may_set)
        if length is not None and notice is not None:
            guard.warn(notice)
            notice = None
        # "stopped" would say that no rank can have asked for another batch.
        asked = fetched is not None and (fetched.exhausted or fetched.batches - fetched.skipped > used)
        if fetched is not None:
            fetched.last = None
        guard.train_end("exhausted" if asked else "stopped", notice=notice)
        return length

    def eval_start(self, state: Any) -> None:
        """Opens an evaluation, and sets its length if that is wanted and proven on all ranks alike."""
        self.evaluations.start(state, may_mend=self._may_mend("evaluations"))

    def finish(self) -> None:
        """Closes what is open and ends the fit.

        Raises:
            DivergenceError: If another rank goes on, or ranks are known to be out of step.
        """
        while (span := self.guard.open_span) is not None:
            end = self.guard.train_end if span.startswith("train") else self.guard.eval_end
            end("stopped")
        self._finished = True
        self.guard.fit_end()

    def leave(self, error: BaseException | None = None) -> None:
        """Gives everything back as it was. The second time nothing happens.

        Args:
            error: What ends it before its time; None where another fit begins in its place.
        """
        if self._left:
            return
        self._left = True
        if self._fetches is not None:
            self._fetches.release()
        self.evaluations.release()
        self._undo.close()
        if error is not None and not self._finished:
            self.guard.failed(error)
        elif not self._finished:
            with contextlib.suppress(DivergenceError):
                self.finish()
        self.guard.close()

    def _may_mend(self, name: str) -> bool:
        return self._settings.totals == "fix" and (self._world_size == 1 or name in self.guard.agreed)

    def _read_train(self, state: Any, length: int | None) -> None:
        self.train = read_loader(
            state.train_dataloader,
            length=length,
            rank=self._rank,
            dp_degree=self._shares[1],
            duration=state.max_duration,
        )

    def _observe_train(self, state: Any) -> None:
        """Reads and observes the train loader, the first one or another that has taken its place."""
        if self._fetches is not None:
            self._fetches.release()
            self._replaced = True
            self._read_train(state, length_of(state))
        self._fetches = LoaderObserver(
            state.train_dataloader, self.guard.waited, self.guard.failed, batch_requested=self.guard.batch_requested
        )
