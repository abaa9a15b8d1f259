"""Do ranks that must hold the same weights hold the same ones? `WeightsDiffer`.

At the moments that all ranks have in common (after every n-th optimizer step) each rank has one hash per parameter.
The ranks that must hold the same ones compare one digest of them all: the first of them to come writes its own, later
ones compare with it, and nobody waits. Only where two differ, all of them are asked once for the digests of their
parameters. In a healthy job, a check costs each rank two calls to the store.

They are also compared where an optimizer has stepped by gradients that DDP has not averaged: such a step is right in a
program that averages the weights by itself, so that the weights alone prove a fault.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from base64 import urlsafe_b64encode
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from countoff.core.checks.check import Check, FitStart, Others, RankState
from countoff.core.messages import clip, count_of, names_of, ranks_by
from countoff.core.protocol.counters import SpanCounters
from countoff.core.protocol.records import Reason, Records
from countoff.core.verdict import Cause, Standing, Verdict, VerdictKind
from countoff.core.waiting import until

__all__ = ["GRADIENTS", "OUTSIDE", "PendingHashes", "Replicas", "Weights", "digests_of", "judge_weights"]

GRADIENTS = "gradients"
"""The subject where a step has used gradients that DDP has not averaged."""
OUTSIDE = (
    "run the last forward and backward pass before each optimizer.step() outside of no_sync(), also at the end of an "
    "epoch. Then load, on all ranks, a checkpoint that was written before that step."
)
"""What to do about that."""
WEIGHTS_DIFFER = VerdictKind(
    "WeightsDiffer",
    "ranks that must hold the same weights hold different ones; checked with `weights_every`, and where an optimizer "
    "has stepped by gradients of `no_sync()`",
    causes={
        "": Cause(
            "These ranks must hold the same bits. They may have differed before: they are compared every "
            "`weights_every` optimizer steps.",
            "look for what only some ranks do to that parameter: an assignment or an in-place change after the model "
            "was wrapped, a checkpoint loaded there, requires_grad set or a layer added after wrapping, an optimizer "
            "step or a backward() that is left out, a step whose last backward() is inside no_sync(). Then load, on "
            "all ranks, a checkpoint that was written before that.\n"
            "where ranks train apart on purpose: weights_every=0.",
        ),
        GRADIENTS: Cause(
            "Inside no_sync(), DDP averages no gradients. So each rank has stepped by gradients of its own data, and "
            "its weights may have differed from those of the others since.",
            f"{OUTSIDE}\nwhere ranks train apart on purpose: levels={{'WeightsDiffer': 'off'}}.",
        ),
    },
)
"""**Cause.** Something has changed a parameter, or has synchronised its gradient, on some ranks only: for example a
checkpoint that rank 0 alone loads after the model was wrapped.

**Fix.** Find it, and load a checkpoint from before it on all ranks. See [data
identity](data-identity.md#weights-that-drift-apart).

### Gradients that are not averaged

Inside `no_sync()`, `DistributedDataParallel` averages no gradients: it is for all micro-batches of a step but the last.
A condition that is shifted by one batch (`i % 4` for `(i + 1) % 4`), or a step after the last batch of an epoch, leaves
each rank's own gradients in the step. After the first, second, fourth, eighth such step and so on, countoff compares
the weights, once DDP has averaged gradients again. A DDP whose passes are all inside `no_sync()`, or that torch.compile
compiles, is not checked.
"""
_DIGITS, _MOST_DIGESTS = 3, 300
"""Digits of the digest of a parameter, of 6 bits each, and how many a record has room for. Of a model with more
parameters, each is of several."""
_PENDING = 4
"""Checks that may be on their way from a device at the same time; a further one is left out."""
_KEPT = 32
"""Checks whose hashes are kept for a question of another rank, which may be as many optimizer steps behind."""
_DEVICE_SECONDS = 1.0
"""So long at most, the end of a fit waits for hashes that are on their way from a device."""
_MOST_NAMED, _NAME = 3, 60


class Replicas(NamedTuple):
    """Parameters that several ranks must hold alike, as one of them holds them.

    Attributes:
        ranks: These ranks, ascending.
        names: Names of the parameters.
        layout: Digest of their names, shapes and types, in hexadecimal digits. Where two ranks differ in it, nothing
            of these parameters is compared between them.
        hashes: Hash of the values of each, as a signed integer of 64 bits.
    """

    ranks: tuple[int, ...]
    names: tuple[str, ...]
    layout: str
    hashes: Sequence[int]

    @property
    def key(self) -> str:
        """What all of these ranks have in common, in 16 hexadecimal digits."""
        return hashlib.blake2b(f"{self.ranks} {self.layout}".encode(), digest_size=8).hexdigest()

    @property
    def digest(self) -> str:
        """The digest of all values, in 16 hexadecimal digits."""
        return _digest(self.hashes).hexdigest()

    def answer(self) -> dict[str, Any]:
        """What is told where they differ from those of another rank: a digest of each parameter, or of a few."""
        each = self._each
        parts = [self.hashes[first : first + each] for first in range(0, len(self.hashes), each)]
        return {
            "digest": self.digest,
            "parts": "".join(urlsafe_b64encode(_digest(part).digest()).decode()[:_DIGITS] for part in parts),
        }

    def named(self, part: int) -> str:
        """The parameters of a digest, in words."""
        names = [clip(name, _NAME) for name in self.names[part * self._each :][: self._each]]
        return names[0] if len(names) == 1 else f"one of {names[0]} to {names[-1]}"

    @property
    def _each(self) -> int:
        return max(1, -(-len(self.hashes) // _MOST_DIGESTS))


class PendingHashes(Protocol):
    """Hashes that are being computed."""

    def collect(self) -> Sequence[Replicas] | None:
        """Returns the hashes; None while some are on their way from a device. Must not wait."""
        ...


class Weights(Check):
    """Compares weights before the first train batch after every n-th optimizer step.

    By then an optimizer that shares its work out has put the results together, which it has not when the step of one of
    its parts is reported. The thread that makes this alone computes hashes.

    Args:
        state: This rank's state.
        begin: Begins to compute the hashes of the weights as they are; None where they are not compared.
    """

    def __init__(self, state: RankState, begin: Callable[[], PendingHashes] | None) -> None:
        self._state = state
        self._begin = begin
        self._thread = threading.get_ident()
        self._due: int | None = None
        self._pending: list[tuple[int, str, int, PendingHashes]] = []
        self._others: Others | None = None
        self._kept: dict[tuple[int, str, str], Replicas] = {}
        self._last: list[str] = []
        self._ends_in_order = False
        self._last_steps: int | None = None
        self._compares = bool(state.settings.weights_every)

    def fit_started(self, start: FitStart, others: Others | None) -> None:  # noqa: D102
        if others is not None and self._begin is not None:
            self._others, self.watches_steps = others, self._compares
            others.answer(WEIGHTS_DIFFER.name, self._answer)

    def suspect(self, span: SpanCounters, unaveraged: int, moment: str, begin: Callable[[], PendingHashes]) -> None:
        """Compares weights as they are now, because an optimizer has stepped by gradients of `no_sync()`.

        Args:
            span: The innermost open span.
            unaveraged: The number of that step in this fit, from 1.
            moment: What tells this comparison from every other one of the same batch, in the same words on all ranks.
            begin: Begins to compute the hashes of the weights.
        """
        if span.compared and self._state.evidence.steps_by_batch:
            # Not under the key of the comparison before the same batch, which may be due as well.
            named = f"{span.opened}.{span.started}.{moment}"
            self._compare_as_they_are(self._state.steps, named, begin, unaveraged)

    def stepped(self, span: SpanCounters, steps: int) -> None:  # noqa: D102
        # On another thread, the weights would be read while a step changes them.
        if steps % self._state.settings.weights_every == 0 and self._state.evidence.steps_by_batch:
            self._due, self.wants_batch = steps, True

    def looked(self, span: SpanCounters) -> None:  # noqa: D102
        if self.wants_batch and span.compared:
            self._look(span)

    def span_closing(self, span: SpanCounters, reason: Reason, *, orderly: bool) -> None:  # noqa: D102
        if orderly and not span.evaluation:  # otherwise an optimizer's step may be half done
            self.looked(span)

    def fit_ending(self) -> None:  # noqa: D102
        self._ends_in_order = True
        self._compare_what_is_there()

    def settle(self) -> None:  # noqa: D102
        if self._others is None or not self._compares:
            return
        waits = self._ends_in_order and self._state.end is None
        if waits:
            until(self._all_have_come, time.monotonic() + _DEVICE_SECONDS)
        self._others.settle_question(WEIGHTS_DIFFER.name, self._last if waits else ())

    def _all_have_come(self) -> bool:
        """Whether no hashes are on their way from a device any more; those that have come are compared."""
        self._compare_what_is_there()
        return not self._pending

    def _look(self, span: SpanCounters) -> None:
        """Begins the check that is due, and compares what is there of earlier ones."""
        steps, self._due = self._due, None
        if steps is None or self._begin is None:
            self._compare_what_is_there()
        else:
            self._compare_as_they_are(steps, f"{span.opened}.{span.started}", self._begin)

    def _compare_as_they_are(
        self, steps: int, moment: str, begin: Callable[[], PendingHashes], unaveraged: int = 0
    ) -> None:
        """Begins a check, and compares what is there.

        Args:
            steps: Optimizer steps of this rank.
            moment: The moment, in the same words on all ranks.
            begin: Begins to compute the hashes.
            unaveraged: The number of the step because of which they are compared; 0 for every n-th step.
        """
        last = self._last_steps
        self._compares = True
        if (last is None or steps <= last) and self._may_begin:
            with contextlib.suppress(Exception):  # as without memory, or without a process group any more
                self._pending.append((steps, moment, unaveraged, begin()))
        self._compare_what_is_there()

    @property
    def _may_begin(self) -> bool:
        """Whether this is the right thread: a loop may fetch its batches on another than the one of the optimizer."""
        return threading.get_ident() == self._thread and len(self._pending) < _PENDING

    def _compare_what_is_there(self) -> None:
        for each in list(self._pending):
            steps, moment, unaveraged, pending = each
            try:
                replicas = pending.collect()
            except RuntimeError:  # of the program's own kernels: its next operation on the device raises it
                replicas = ()
            if replicas is not None:
                self._pending.remove(each)
                if self._others is not None:
                    self._last = [self._compare(self._others, steps, moment, unaveraged, held) for held in replicas]
        self.wants_batch = bool(self._pending)

    def _compare(self, others: Others, steps: int, moment: str, unaveraged: int, replicas: Replicas) -> str:
        """Compares what this rank holds with other ranks; returns the key of the comparison."""
        asked = {"steps": steps, "moment": moment, "key": replicas.key}

        def record() -> dict[str, Any]:
            self._keep(steps, moment, replicas)
            return {"digest": replicas.digest}

        def judge(logged: Mapping[str, Any]) -> None:
            if logged["digest"] != replicas.digest:
                judges = partial(_judge, steps, replicas, unaveraged)
                others.ask(WEIGHTS_DIFFER.name, asked, replicas.ranks, judges)

        key = f"weights/{steps}/{moment}/{replicas.key}"
        others.compare(key, record, judge, ranks=len(replicas.ranks))
        return key

    def _keep(self, steps: int, moment: str, replicas: Replicas) -> None:
        self._kept[steps, moment, replicas.key] = replicas
        oldest = steps - _KEPT * max(1, self._state.settings.weights_every)
        for key in [each for each in self._kept if each[0] <= oldest]:
            del self._kept[key]

    def _answer(self, question: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Answers the question of a rank that has found a difference. Nothing later is checked after that."""
        if self._last_steps is None:
            self._last_steps = int(question["steps"])
        replicas = self._kept.get((question["steps"], question["moment"], question["key"]))
        return None if replicas is None else replicas.answer()  # of other ranks, or this rank has not got so far


def _judge(steps: int, replicas: Replicas, unaveraged: int, records: Records) -> Verdict | None:
    answers = {rank: digests_of(record, len(replicas.answer()["parts"])) for rank, record in records.items()}
    if len(set(answers.values())) < 2:
        return None
    parts = zip(*(parts for _, *parts in answers.values()), strict=True)
    differ = [number for number, digests in enumerate(parts) if len(set(digests)) > 1]
    names = [replicas.named(part) for part in differ[:_MOST_NAMED]] + (["…"] if len(differ) > _MOST_NAMED else [])
    return judge_weights(steps, answers, names, unaveraged)


def digests_of(record: Mapping[str, Any], length: int) -> tuple[str, ...]:
    """Reads the digests in another rank's answer: that of all parameters, and those of each or of a few.

    Args:
        record: The answer.
        length: Digits of the latter in all.

    Raises:
        KeyError, ValueError: If it has others than that.
    """
    whole, parts = record["digest"], record["parts"]
    if not (isinstance(whole, str) and len(whole) <= 16 and isinstance(parts, str) and len(parts) == length):
        raise ValueError(f"expected {length} digits, got {parts!r:.80}")
    return (whole, *(parts[first : first + _DIGITS] for first in range(0, length, _DIGITS)))


def _digest(hashes: Sequence[int]) -> Any:
    return hashlib.blake2b(b"".join(value.to_bytes(8, "little", signed=True) for value in hashes), digest_size=8)


def judge_weights(
    steps: int, answers: Mapping[int, Sequence[str]], parameters: Sequence[str], unaveraged: int = 0
) -> Verdict:
    """Returns the verdict about ranks of which not all hold the same weights.

    Args:
        steps: Optimizer steps after which they were compared.
        answers: By rank, digests of all parameters, of which two at least differ.
        parameters: Names of the first parameters that differ, as far as that is known.
        unaveraged: The number of an optimizer step by gradients of `no_sync()`, from 1; 0 if none is known.

    Example:
        >>> print(judge_weights(20, {0: ["a"], 1: ["a"], 2: ["b"]}, ["head.weight"]).sentence)
        after 20 optimizer steps, rank 2 holds other weights than ranks 0, 1; the first parameter that differs is \
head.weight.
    """
    holders = ranks_by({rank: tuple(digests) for rank, digests in answers.items()})
    # Of as many ranks, the group with the first rank is the first.
    groups = sorted((ranks for _, ranks in holders), key=lambda ranks: (-len(ranks), ranks))
    most = groups[0]
    outliers = sorted(rank for group in groups[1:] for rank in group)
    named = tuple(outliers)
    standing: Standing = "out of step"
    if 2 * len(most) > len(answers):
        verb = "holds" if len(outliers) == 1 else "hold"
        who = f"{names_of(outliers)} {verb} other weights than {names_of(most)}"
    else:
        named, standing = tuple(group[0] for group in groups), "differ"
        if len(answers) == 2:
            named = most[0], outliers[0]
            who = f"ranks {most[0]} and {outliers[0]} hold different weights"
        elif len(groups) == 2:
            named = tuple(sorted(answers))
            who = f"{names_of(most)} hold other weights than {names_of(outliers)}"
        else:
            who = f"{names_of(sorted(answers))} hold {len(groups)} different sets of weights"
    verb = "parameter that differs is" if len(parameters) == 1 else "parameters that differ are"
    first = f"; the first {verb} {', '.join(parameters)}" if parameters else ""
    inside = f"; the last backward pass before step {unaveraged} ran inside no_sync()" if unaveraged else ""
    sentence = f"after {count_of(steps, 'optimizer step')}, {who}{first}{inside}."
    return WEIGHTS_DIFFER.found(sentence, named, standing=standing, subject=GRADIENTS if unaveraged else "")
