"""The guard: what an adapter calls. Nothing else of countoff is needed to write one."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from countoff.core.data.identity import DataIdentity
from countoff.core.protocol.counters import SpanCounters, chain
from countoff.core.protocol.log import MarkKind, Reason
from countoff.core.protocol.marks import announcement, ask, next_alarm, own_mark
from countoff.core.protocol.state import NEVER, State
from countoff.core.protocol.ticks import tick
from countoff.core.runtime import shutdown
from countoff.core.runtime.roll_call import RollCall
from countoff.core.runtime.speaker import MARK_SECONDS, Speaker
from countoff.core.settings import Settings
from countoff.core.verdict import Verdict, clip

if TYPE_CHECKING:
    from countoff.core.protocol.truncation import UnusedBatches
    from countoff.core.runtime.monitor import Watch

_HOLD_SECONDS = 0.005
_numbers = itertools.count()


class Guard:
    """Counts one rank's batches and steps, and holds them against those of all other ranks.

    An adapter makes one guard per fit (and one per evaluation that stands alone) on **every** rank, in the same
    order, and translates its framework's hooks::

        guard = Guard(settings, rank=rank, world_size=world_size)
        guard.fit_start({"batches_per_epoch": len(loader), "batch_size": 32})    # every rank; waits for the others
        for epoch in range(epochs):
            guard.train_start(epoch)
            for batch in loader:
                guard.batch()                     # before the batch is trained on
                ...
                guard.step()                      # after an optimizer step was applied
            guard.train_end("exhausted")          # or "stopped": a limit, a break, early stopping
            guard.eval_start("validation")
            for batch in eval_loader:
                guard.batch()
            guard.eval_end("exhausted")
        guard.fit_end()
        guard.close()

    An exception that leaves the loop goes through `failed` first, so that the other ranks hear of it. Any method may
    raise `DivergenceError` (a leaf of it) while the guard is watching; none ever waits for another rank, and none
    calls the store: `fit_start` waits for the roll call at most `deadline_seconds`, every other method at most 50 ms.
    With one rank nothing is started and nothing is ever raised.

    Args:
        settings: The user's choices.
        rank: This rank.
        world_size: Ranks in the job.
        remedies: What to do about each kind of verdict, in the framework's own words.
        learning_rates: Returns the learning rates in force; asked every `tick_batches` batches.

    Attributes:
        data: Compares what the ranks read: while `guard.data.unread`, give it the train batches.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        rank: int,
        world_size: int,
        remedies: Mapping[str, str] | None = None,
        learning_rates: Callable[[], Sequence[float]] | None = None,
    ) -> None:
        self._settings = settings
        self._learning_rates = learning_rates
        self._watch: Watch | None = None
        self._roll_call: RollCall | None = None
        self._comparing = True
        self._closed = False
        self._tally = self._train = SpanCounters("before the first span", silent=True)
        self._state = State(rank, world_size, settings, remedies or {}, self._send, self._say)
        self.data = DataIdentity(self._state)

    def fit_start(self, plan: Mapping[str, Any], versions: Mapping[str, str] | None = None) -> None:
        """Begins a fit. Collective: every rank must call it; it waits for the others, at most `deadline_seconds`.

        Args:
            plan: What all ranks must agree on. Known names are `batches_per_epoch` (as this rank's framework believes;
                None: unknown), `batch_size` (samples per dp_rank and batch), `gradient_accumulation_steps`,
                `max_epochs`, `max_steps`, `position` (where a resumed run goes on), `dp_degree`, and, which differs,
                `dp_rank`: from 0 up to dp_degree, each of equally many ranks. JSON values.
            versions: Versions of what computes; a difference is a warning.

        Raises:
            PlanMismatch: If ranks differ in one of them.
            RankMapError: If their dp_ranks leave data unread, or let ranks read each other's.
        """
        if self._state.world_size > 1:
            from countoff.core.runtime.monitor import Watch  # torch is imported only where there is somebody to talk to

            self._watch = Watch(self._state, next(_numbers))
            self._watch.start()
            self._count_off({"plan": dict(plan), "versions": dict(versions or {})}, self._watch)
        self._pass("fit_start", "the fit")

    def train_start(self, epoch: int, position: int = 0) -> None:
        """Opens a train epoch.

        Args:
            epoch: Its number, from 0.
            position: Batches of it that were trained on before a checkpoint from which this rank resumes.
        """
        name = f"train epoch {epoch}"
        self._train = SpanCounters(name, started=position, prefetched=position, silent=not self._comparing)
        self._open("train_start", self._train)
        self.data.open(self._train)

    def batch(self, fetched: int = 0, *, last: bool = False) -> None:
        """Counts a batch that is about to be used, in the innermost open span.

        Args:
            fetched: Batches of this span that have certainly been taken from this rank's loader, this one included,
                where the framework looks ahead; 0 where it does not.
            last: Whether this is known to be the last one, because the loader has been seen to hold no more or the
                framework will take no more; never because of `len()`.

        Raises:
            DivergenceError: If ranks are known to be out of step.
        """
        tally = self._tally
        tally.started = started = tally.started + 1
        if fetched:
            tally.prefetched = fetched
        if last or started >= self._state.alarm:
            self._look(last)

    def last_batch(self) -> None:
        """Says of the batch counted last, once that is known, what `batch(last=True)` says where it is known before."""
        self._look(True)

    def batch_requested(self) -> None:
        """Says that this rank is about to ask its train loader for another batch, so it has not stopped at this one."""
        ask(self._state, self._tally)

    def step(self) -> None:
        """Counts an optimizer step that has been applied; several optimizers in one batch are one step."""
        state = self._state
        train = next((tally for tally in reversed(state.spans) if not tally.evaluation), None)
        if train is None or train.silent or (moment := (train.opened, train.started)) == state.last_step:
            return
        state.last_step = moment
        state.steps += 1
        state.chain = chain(state.chain, train.started)

    def report_unused(self, left: UnusedBatches) -> None:
        """Says, just before the innermost span is closed, what this rank's loader had beyond the batches used in it."""
        self._tally.left = left

    def waited(self, seconds: float) -> None:
        """Adds time that the training thread waited for its loader in the innermost open span."""
        self._tally.loader_seconds += seconds

    def eval_start(self, name: str, *, train_exhausted: bool = False) -> None:
        """Opens an evaluation, alone or in the middle of a train epoch.

        Args:
            name: Its name, equal on all ranks: ``validation``.
            train_exhausted: Whether the train loader around it has been seen to hold no more.
        """
        # Where not every rank owes these marks, none is compared.
        name = clip(name, 60)
        silent = self._settings.eval_ranks is not None or not self._comparing
        tally = SpanCounters(name, evaluation=True, opened=-1, silent=silent)
        self._open("eval_start", tally, reason="exhausted" if train_exhausted else "")

    def eval_loader(self, index: int) -> None:
        """Says that the next batches of this evaluation come from its loader number `index`, from 0."""
        counts = self._tally.counts
        while len(counts) < index:  # close the loaders before: each holds what the others have not
            counts.append(self._tally.started - sum(counts))

    def eval_end(self, reason: Literal["exhausted", "stopped"], *, may_raise: bool = True) -> None:
        """Closes the evaluation.

        Args:
            reason: Whether its loader was exhausted, or the pass stopped before that.
            may_raise: False where an exception would be lost, as in a generator's end; the next call raises it then.

        Raises:
            UnevenBatches: If ranks had different numbers of batches and `uneven_eval` is `raise`.
        """
        self._close_span("eval_end", reason, may_raise)

    def train_end(
        self, reason: Literal["exhausted", "stopped"], *, notice: Verdict | None = None, may_raise: bool = True
    ) -> None:
        """Closes the train epoch.

        Args:
            reason: Whether its loader was exhausted, or the pass stopped before that.
            notice: A warning that holds if all ranks have closed the epoch alike; it is given once they have.
            may_raise: As for `eval_end`.

        Raises:
            DivergenceError: If ranks are known to be out of step.
        """
        self._close_span("train_end", reason, may_raise, notice)

    def fit_end(self) -> None:
        """Ends the fit; from here on a lost store or peer is nobody's fault.

        Raises:
            DivergenceError: If another rank goes on.
        """
        self._pass("fit_end", "the fit", hold=MARK_SECONDS - _HOLD_SECONDS)
        self._state.finished = True

    def failed(self, error: BaseException) -> None:
        """Tells the others that this rank is about to die of an exception; never raises.

        A rank that fails because it lost a peer waits half a second for the better cause first, longer if the store is
        slow. The guard stays armed: if the way out blocks in a collective, the process ends after `grace_seconds`.
        """
        state = self._state
        if self._watch is None or self._closed or os.getpid() != state.pid:
            return
        if isinstance(error, SystemExit) and not error.code:
            self._leave_early()
            return
        where = f"in batch {self._tally.started} of {self._tally.name}"
        shutdown.report_failure(state, error, where, slow=self._watch.speaker.slow)

    def close(self) -> None:
        """Leaves. The second time nothing happens; rank 0 first hears the roll calls of the last spans."""
        if self._watch is not None and self._roll_call is not None and not (self._closed or self._watch.failure):
            self._roll_call.settle()
        self._closed = True
        if self._watch is not None:
            self._watch.close()

    @property
    def metrics(self) -> dict[str, float]:
        """What the roll calls have measured, for the framework's loggers: ``countoff/spread_seconds``, …; on rank 0."""
        return dict(self._roll_call.metrics) if self._roll_call is not None else {}

    @property
    def agreed(self) -> frozenset[str]:
        """Names of the plan's values that are the same on all ranks; none unless every rank has counted off."""
        return self._roll_call.agreed if self._roll_call is not None else frozenset()

    @property
    def verdict(self) -> Verdict | None:
        """What ended this guard, if anything has."""
        return self._state.end

    @property
    def notices(self) -> tuple[Verdict, ...]:
        """What was warned of, on any rank."""
        return tuple(self._state.notices)

    @property
    def open_span(self) -> str | None:
        """Name of the innermost open span."""
        return self._state.spans[-1].name if self._state.spans else None

    @property
    def steps(self) -> int:
        """Optimizer steps applied since the fit began, on this rank."""
        return self._state.steps

    @property
    def batches(self) -> int:
        """Batches started in the innermost open span, or in the last one, on this rank."""
        return self._tally.started

    @property
    def train_batches(self) -> int:
        """Batches started in the train epoch under way, or in the last one, on this rank."""
        return self._train.started

    def warn(self, verdict: Verdict) -> None:
        """Warns of something that ends nothing: rank 0 prints it, once for each kind."""
        self._state.note(verdict)

    def compare_spans(self, comparing: bool) -> None:
        """Whether spans opened from here on are compared; off inside `torch.distributed.algorithms.Join`.

        Every rank must call it at the same place.
        """
        self._comparing = comparing

    def _open(self, kind: MarkKind, tally: SpanCounters, reason: Reason = "") -> None:
        if tally.silent and tally.evaluation:
            self._state.spans.append(tally)
        else:
            self._pass(kind, tally.name, reason=reason, opens=tally)
        self._settle(tally)

    def _close_span(self, kind: MarkKind, reason: Reason, may_raise: bool, notice: Verdict | None = None) -> None:
        state, tally = self._state, self._tally
        if tally.counts:
            tally.counts.append(tally.started - sum(tally.counts))
        closed = time.time()
        if not tally.evaluation:
            self.data.close(tally)
        if tally.evaluation and tally.silent:
            state.close_span(reason)
        else:
            self._pass(kind, tally.name, reason=reason, hold=_HOLD_SECONDS, may_raise=may_raise)
        self._settle(state.spans[-1] if state.spans else tally)
        if self._watch is not None and self._roll_call is not None and not tally.silent:
            self._roll_call.span_closed(tally, closed, notice)
        elif notice is not None and self._state.world_size == 1:
            self._state.note(notice)

    def _leave_early(self) -> None:
        """Ends the fit where it is, as `sys.exit()` in its middle does; whoever goes on finds out by the marks."""
        while self._state.spans:
            self._close_span("eval_end" if self._state.spans[-1].evaluation else "train_end", "exited", False)
        self._pass("fit_end", "the fit", reason="exited", may_raise=False)
        self._state.finished = True

    def _settle(self, tally: SpanCounters) -> None:
        with self._state.lock:
            self._tally = tally
            self._arm()

    def _pass(
        self,
        kind: MarkKind,
        span: str,
        *,
        reason: Reason = "",
        hold: float = 0.0,
        opens: SpanCounters | None = None,
        may_raise: bool = True,
    ) -> None:
        """Passes a mark; holds the first rank there for a moment, so that an objection still finds it in Python."""
        self._leave_if_stopped()
        state = self._state
        mark = own_mark(state, self._tally, kind, span, reason)
        number = state.reach(mark, opens)
        if self._watch is not None and state.end is None and not state.ledger.stands(number):
            entry = {"type": "mark", "number": number, "mark": mark.to_json()}
            self._watch.speaker.write(entry, lambda: state.need_not_tell(number), hold)
        if may_raise and (state.proposed is not None or state.end is not None):
            shutdown.raise_verdict(state)

    def _look(self, last: bool) -> None:
        """The slow path of `batch`: a tick is due, others are ahead, the end is known, or this batch is the last."""
        self._leave_if_stopped()
        state, tally = self._state, self._tally
        if self._watch is None:
            return
        state.look(last)
        if last and not tally.silent and not state.ledger.announced(tally.opened):
            self._announce(tally, self._watch.speaker)
        if not (tally.evaluation or tally.silent) and tally.started % self._settings.tick_batches == 0:
            rates = self._learning_rates() if self._learning_rates is not None else ()
            self._watch.speaker.hand(tick(state, tally, rates))
        if state.proposed is not None or state.end is not None:
            shutdown.raise_verdict(state)
        with state.lock:
            self._arm()

    def _announce(self, tally: SpanCounters, speaker: Speaker) -> None:
        ledger, opened = self._state.ledger, tally.opened
        speaker.write(announcement(self._state, tally), lambda: ledger.announced(opened), _HOLD_SECONDS)

    def _arm(self) -> None:
        self._state.alarm = next_alarm(self._state, self._tally, watched=self._watch is not None)

    def _send(self, entry: dict[str, Any]) -> None:
        if self._watch is not None:
            speaker, state = self._watch.speaker, self._state
            speaker.hand(speaker.append(entry, lambda: entry["type"] == "notice" and state.heard(entry)))

    def _say(self, verdict: Verdict) -> None:
        if self._watch is None:
            shutdown.print_to_stderr(verdict, self._state.rank)
        else:
            self._watch.speaker.hand(lambda _: shutdown.print_to_stderr(verdict, self._state.rank))

    def _count_off(self, record: dict[str, Any], watch: Watch) -> None:
        """Holds the roll call of the fit's start; without a store this rank trains on by itself."""
        state, self._roll_call = self._state, RollCall(self._state, watch.speaker)
        self.data.begin(self._roll_call, record["plan"])
        watch.stand_by(self._roll_call.count_off(record))
        if state.proposed is not None or state.end is not None:
            shutdown.raise_verdict(state)
        self._leave_if_stopped()

    def _leave_if_stopped(self) -> None:
        if self._watch is not None and self._watch.failure:
            self._watch.leave()
            self._watch, self._state.alarm = None, NEVER
