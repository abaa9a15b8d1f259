"""Do ranks that must hold the same weights hold the same ones? `WeightsDiffer`.

At the moments that all ranks have in common (after every n-th optimizer step) each rank has one hash per parameter.
The ranks that must hold the same ones compare the digests of a few ranges of parameters: the first of them to come
writes its own, later ones compare with it, and nobody waits. Only where two differ, all of them are asked, range by
range, until the first parameter that differs is known, and who holds which. In a healthy job, a check costs each rank
two calls to the store.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from countoff.core.checks.check import Check, FitStart, Others
from countoff.core.protocol.counters import SpanCounters
from countoff.core.protocol.records import Reason, Records, parse_count, parse_rank
from countoff.core.verdict import Cause, Standing, Verdict, VerdictKind
from countoff.core.words import clip, count_of, names_of, ranks_by

if TYPE_CHECKING:
    from countoff.core.state import State
    from countoff.core.store.channel import Channel
    from countoff.core.store.gathering import Gathering
    from countoff.core.threads.speaker import Speaker

__all__ = ["PendingHashes", "Question", "Replicas", "Weights", "answer", "judge_weights", "narrowed"]

WEIGHTS_DIFFER = VerdictKind(
    "WeightsDiffer",
    "ranks that must hold the same weights hold different ones; checked with `weights_every`",
    causes={
        "": Cause(
            "These ranks must hold the same bits. They may have differed before: they are compared every "
            "`weights_every` optimizer steps.",
            "look for what only some ranks do to that parameter: an assignment or an in-place change after the model "
            "was wrapped, a checkpoint loaded there, requires_grad set or a layer added after wrapping, an optimizer "
            "step or a backward() that is left out. Then load, on all ranks, a checkpoint that was written before "
            "that. Where ranks train apart on purpose: weights_every=0.",
        )
    },
)
_RANGES = 32
"""A record has digests of as many ranges at most: 700 bytes."""
_DIGEST_CHARACTERS = 16
_PENDING = 4
"""Checks that may be on their way from a device at the same time; a further one is left out."""
_KEPT = 32
"""Checks whose hashes are kept for a question of another rank, which may be as many optimizer steps behind."""
_UNANSWERED = 8
_SETTLE_SECONDS, _LAST_ANSWERS_SECONDS = 5.0, 3.0


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

    def digests(self, begin: int, end: int) -> list[str]:
        """The digest of each of the ranges into which a range of the parameters is divided, for a record."""
        return [
            hashlib.blake2b(
                b"".join(value.to_bytes(8, "little", signed=True) for value in self.hashes[first:last]), digest_size=8
            ).hexdigest()
            for first, last in divided(begin, end)
        ]


class Held(NamedTuple):
    """What one rank holds at one moment.

    Attributes:
        steps: Optimizer steps applied by then.
        moment: When that was, by the batches of this rank; ranks compare only where it is equal.
        replicas: What it holds in common with others.
    """

    steps: int
    moment: str
    replicas: Sequence[Replicas]


class PendingHashes(Protocol):
    """Hashes that are being computed."""

    def collect(self) -> Sequence[Replicas] | None:
        """Returns the hashes; None while some are on their way from a device. Must not wait."""
        ...


class Question(NamedTuple):
    """A question to all ranks that must hold the same weights, as an entry of the log: what do you hold in this range?

    Attributes:
        steps: Of the check: its optimizer steps.
        moment: Of the check: when it was.
        key: Of the replicas.
        begin: The first parameter of the range.
        end: The one behind the last.
        rank: The rank that asks.
    """

    steps: int
    moment: str
    key: str
    begin: int
    end: int
    rank: int

    @classmethod
    def from_json(cls, entry: Mapping[str, Any], ranks: Sequence[int]) -> Question:
        """Reads the log's entry of another rank.

        Raises:
            KeyError, TypeError, ValueError: If it is no such entry.
        """
        begin, end = parse_count(entry["begin"]), parse_count(entry["end"])
        moment, key = entry["moment"], entry["key"]
        if not (isinstance(moment, str) and len(moment) <= 64 and isinstance(key, str) and len(key) <= 64):
            raise ValueError(f"expected two short texts, got {moment!r:.80} and {key!r:.80}")
        if begin >= end:
            raise ValueError(f"expected a range of parameters, got {begin} to {end}")
        return cls(parse_count(entry["steps"]), moment, key, begin, end, parse_rank(entry["rank"], ranks))

    def to_json(self) -> dict[str, Any]:
        """The log's entry; `from_json` is its inverse."""
        return {"type": "weights", **self._asdict()}

    @property
    def name(self) -> str:
        """Under what the answers lie in the store; that of the whole range is where the first rank writes."""
        return f"weights/{self.steps}/{self.moment}/{self.key}/{self.begin}-{self.end}"


class Weights(Check):
    """Compares weights before the first train batch after every n-th optimizer step.

    By then an optimizer that shares its work out has put the results together, which it has not when the step of one of
    its parts is reported. The thread that makes this alone computes hashes.

    Args:
        state: This rank's state.
        begin: Begins to compute the hashes of the weights as they are; None where they are not compared.
    """

    def __init__(self, state: State, begin: Callable[[], PendingHashes] | None) -> None:
        self._state = state
        self._begin = begin
        self._thread = threading.get_ident()
        self._due: int | None = None
        self._pending: list[tuple[int, str, PendingHashes]] = []
        self._exchange: Exchange | None = None

    def fit_started(self, start: FitStart, others: Others | None) -> None:  # noqa: D102
        if others is not None and self._begin is not None and self._state.settings.weights_every:
            self._exchange, self.watches_steps = Exchange(self._state, others.speaker), True

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
        self._compare_what_is_there()

    def settle(self) -> None:  # noqa: D102
        if self._exchange is not None:
            self._exchange.settle()

    def _look(self, span: SpanCounters) -> None:
        """Begins the check that is due, and compares what is there of earlier ones."""
        steps, self._due = self._due, None
        last = None if self._exchange is None else self._exchange.last_steps
        if steps is not None and (last is None or steps <= last) and self._may_begin and self._begin is not None:
            with contextlib.suppress(Exception):  # as without memory, or without a process group any more
                # The moment is in the same words on all ranks.
                self._pending.append((steps, f"{span.opened}.{span.started}", self._begin()))
        self._compare_what_is_there()

    @property
    def _may_begin(self) -> bool:
        """Whether this is the right thread: a loop may fetch its batches on another than the one of the optimizer."""
        return threading.get_ident() == self._thread and len(self._pending) < _PENDING

    def _compare_what_is_there(self) -> None:
        for each in list(self._pending):
            steps, moment, pending = each
            try:
                replicas = pending.collect()
            except RuntimeError:  # of the program's own kernels: its next operation on the device raises it
                replicas = ()
            if replicas is not None:
                self._pending.remove(each)
                if self._exchange is not None:
                    self._exchange.compare(Held(steps, moment, replicas))
        self.wants_batch = bool(self._pending)


class Exchange:
    """The comparison of weights through the store, in the background: all of it on the speaker thread.

    Only where two ranks differ, one of them asks all that must hold the same, by an entry of the log, and each answers
    under a key of its own.

    Args:
        state: This rank's state.
        speaker: This rank's speaker.

    Attributes:
        last_steps: Optimizer steps of the check in which ranks differ; nothing is checked after that. None while no
            difference is known.
    """

    def __init__(self, state: State, speaker: Speaker) -> None:
        self.last_steps: int | None = None
        self._state = state
        self._speaker = speaker
        self._kept: dict[tuple[int, str, str], Replicas] = {}
        self._unanswered: list[Question] = []
        self._gatherings: list[Gathering] = []
        self._holders: dict[int, tuple[str, ...]] = {}
        self._decided = False
        state.readers["weights"] = self._asked

    def compare(self, held: Held) -> None:
        """Compares what this rank holds with what others hold. Waits for nothing.

        Args:
            held: What it holds.
        """
        self._speaker.hand(lambda channel: self._compare(channel, held))

    def settle(self) -> None:
        """Waits until the question that is open, if there is one, is decided and every rank knows; 5 s at most."""
        state, deadline = self._state, time.monotonic() + _SETTLE_SECONDS

        def worth_waiting() -> bool:
            alive = self._speaker.link.connected and state.end is None
            return alive and time.monotonic() < deadline

        self._speaker.catch_up_now(worth_waiting)  # the question of another rank may be in the log
        while self.last_steps is not None and not self._is_decided() and worth_waiting():
            for gathering in list(self._gatherings):  # of a rank that has left, no answer will come
                gathering.end_by(deadline - _SETTLE_SECONDS + _LAST_ANSWERS_SECONDS)
            time.sleep(0.01)

    def _is_decided(self) -> bool:
        return self._decided or any(notice.kind == "WeightsDiffer" for notice in self._state.notices)

    def _compare(self, channel: Channel, held: Held) -> None:
        state = self._state
        for replicas in held.replicas:
            self._kept[held.steps, held.moment, replicas.key] = replicas
            if not state.comparing or state.end is not None:
                continue
            asks = Question(held.steps, held.moment, replicas.key, 0, len(replicas.names), state.rank)
            own = replicas.digests(asks.begin, asks.end)
            standing = channel.claim(asks.name, {"rank": state.rank, "digests": own})
            if answer(standing, asks.begin, asks.end) != tuple(own):
                self._ask(channel, asks)
            seen = f"{asks.name}/seen"
            if channel.add(seen, 1) == len(replicas.ranks):
                channel.delete(asks.name)
                channel.delete(seen)
        waiting, self._unanswered = self._unanswered, []
        for question in waiting:
            self._answer(channel, question)
        for steps, moment, key in list(self._kept):
            if steps <= held.steps - _KEPT * max(1, state.settings.weights_every):
                del self._kept[steps, moment, key]

    def _ask(self, channel: Channel, question: Question) -> None:
        """Asks all ranks what they hold, unless another rank has asked first."""
        first = question.begin == 0 and not self._holders
        self._speaker.append(question.to_json(), lambda: first and self.last_steps is not None)(channel)

    def _asked(self, entry: Mapping[str, Any]) -> Callable[[], None]:
        """Reads the question of a rank; returns what it does. Called for each such entry of the log.

        Raises:
            KeyError, TypeError, ValueError: If it is no question.
        """
        question = Question.from_json(entry, self._state.ranks)

        def take() -> None:
            if self.last_steps is None:
                self.last_steps = question.steps
            self._speaker.hand(lambda channel: self._answer(channel, question))

        return take

    def _answer(self, channel: Channel, question: Question) -> None:
        replicas = self._kept.get((question.steps, question.moment, question.key))
        if replicas is None:  # another group of ranks, or this rank has not got so far
            self._unanswered = [*self._unanswered[-_UNANSWERED:], question]
            return
        if question.end > len(replicas.names):
            return
        own = replicas.digests(question.begin, question.end)
        channel.report(question.name, self._state.rank, {"digests": own})
        if question.rank != self._state.rank:
            return

        def gathered(records: Records, missing: list[int]) -> None:
            del missing  # the ranks that answered can be compared
            self._gatherings.remove(gathering)
            self._decide(question, replicas, records)

        deadline = time.monotonic() + self._state.settings.deadline_seconds
        gathering = self._speaker.gather(question.name, replicas.ranks, deadline, gathered)
        self._gatherings.append(gathering)

    def _decide(self, question: Question, replicas: Replicas, records: Records) -> None:
        """Gives the verdict once the first parameter that differs is known, or asks for a narrower range."""
        answers = {rank: answer(record, question.begin, question.end) for rank, record in records.items()}
        self._holders = self._holders or answers
        found = narrowed(answers, question.begin, question.end)
        if found is not None and found[1] - found[0] > 1:
            narrower = question._replace(begin=found[0], end=found[1])
            self._speaker.hand(lambda channel: self._ask(channel, narrower))
            return
        self._decided = True
        if len(set(self._holders.values())) > 1:
            parameter = "" if found is None else replicas.names[found[0]]
            self._state.find(judge_weights(question.steps, self._holders, parameter))


def divided(begin: int, end: int) -> list[tuple[int, int]]:
    """Returns the ranges, at most 32 and nearly equal, into which a range is divided.

    >>> divided(0, 3), len(divided(0, 1000))
    ([(0, 1), (1, 2), (2, 3)], 32)
    """
    count = min(_RANGES, end - begin)
    edges = [begin + (end - begin) * number // count for number in range(count + 1)]
    return list(itertools.pairwise(edges))


def answer(record: Mapping[str, Any], begin: int, end: int) -> tuple[str, ...]:
    """Reads the digests in another rank's record of a range.

    Raises:
        KeyError, ValueError: If it has others than that range has.
    """
    digests, count = record["digests"], len(divided(begin, end))
    if not isinstance(digests, list) or len(digests) != count:
        raise ValueError(f"expected {count} digests, got {digests!r:.80}")
    if not all(isinstance(each, str) and len(each) == _DIGEST_CHARACTERS for each in digests):
        raise ValueError(f"expected digests of {_DIGEST_CHARACTERS} characters, got {digests!r:.80}")
    return tuple(digests)


def narrowed(answers: Mapping[int, Sequence[str]], begin: int, end: int) -> tuple[int, int] | None:
    """Returns the first of the ranges in which ranks differ; None if they differ in none.

    Args:
        answers: The digests of each rank's ranges.
        begin: The first parameter of the whole range.
        end: The one behind the last.
    """
    for number, each in enumerate(divided(begin, end)):
        if len({digests[number] for digests in answers.values()}) > 1:
            return each
    return None


def judge_weights(steps: int, answers: Mapping[int, Sequence[str]], parameter: str) -> Verdict:
    """Returns the verdict about ranks of which not all hold the same weights.

    Args:
        steps: Optimizer steps after which they were compared.
        answers: By rank, digests of all parameters, of which two at least differ.
        parameter: Name of the first parameter that differs; empty if that is not known.

    Example:
        >>> print(judge_weights(20, {0: ["a"], 1: ["a"], 2: ["b"]}, "head.weight").sentence)
        after 20 optimizer steps, rank 2 holds other weights than ranks 0, 1; the first parameter that differs is \
head.weight.
    """
    holders = ranks_by({rank: tuple(digests) for rank, digests in answers.items()})
    # Of as many ranks, the group with the first rank is the first.
    groups = sorted((ranks for _, ranks in holders), key=lambda ranks: (-len(ranks), ranks))
    most = groups[0]
    odd = sorted(rank for group in groups[1:] for rank in group)
    named = tuple(odd)
    standing: Standing = "out of step"
    if 2 * len(most) > len(answers):
        verb = "holds" if len(odd) == 1 else "hold"
        who = f"{names_of(odd)} {verb} other weights than {names_of(most)}"
    else:
        named, standing = tuple(group[0] for group in groups), "differ"
        if len(answers) == 2:
            named = most[0], odd[0]
            who = f"ranks {most[0]} and {odd[0]} hold different weights"
        elif len(groups) == 2:
            named = tuple(sorted(answers))
            who = f"{names_of(most)} hold other weights than {names_of(odd)}"
        else:
            who = f"{names_of(sorted(answers))} hold {len(groups)} different sets of weights"
    first = f"; the first parameter that differs is {clip(parameter, 120)}" if parameter else ""
    sentence = f"after {count_of(steps, 'optimizer step')}, {who}{first}."
    return WEIGHTS_DIFFER.found(sentence, named, standing=standing)
