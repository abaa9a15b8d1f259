"""Weights that must be equal: when ranks compare them, as hashes, and what follows from a difference.

At the moments that all ranks have in common (after every n-th optimizer step) each rank has one hash per parameter.
The ranks that must hold the same ones compare the digests of a few ranges of parameters: the first of them to come
writes its own, later ones compare with it, and nobody waits. Only where two differ, all of them are asked, range by
range, until the first parameter that differs is known, and who holds which.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from countoff.core.protocol.records import clip, parse_count, parse_rank
from countoff.core.verdict import Standing, Verdict, count_of, names_of

__all__ = ["PendingHashes", "Question", "Replicas", "WeightCheck", "WeightWatch", "answer", "judge_weights", "narrowed"]

_RANGES = 32
"""A record has digests of as many ranges at most: 700 bytes."""
_DIGEST_CHARACTERS = 16
_PENDING = 4
"""Checks that may be on their way from a device at the same time; a further one is left out."""


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


class WeightCheck(NamedTuple):
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


class WeightWatch:
    """When this rank computes its hashes: before the first train batch after every n-th optimizer step.

    By then an optimizer that shares its work out has put the results together, which it has not when the step of one of
    its parts is reported. Made by the training thread, which alone computes hashes.

    Args:
        every: Optimizer steps from one check to the next, at least 1.
        begin: Begins to compute the hashes of the weights as they are.
    """

    def __init__(self, every: int, begin: Callable[[], PendingHashes]) -> None:
        self._every = every
        self._begin = begin
        self._seen = 0
        self._thread = threading.get_ident()
        self._due: int | None = None
        self._pending: list[tuple[int, str, PendingHashes]] = []

    @property
    def is_busy(self) -> bool:
        """Whether the next train batch has something to do for it."""
        return self._due is not None or bool(self._pending)

    def stepped(self, steps: int) -> bool:
        """Takes note of an optimizer step; returns whether a check is due after it.

        Args:
            steps: Optimizer steps since the fit began.
        """
        if steps == self._seen:  # a further optimizer in the same batch
            return False
        self._seen = steps
        if steps % self._every:
            return False
        self._due = steps
        return True

    def look(self, moment: str, last_steps: int | None) -> list[WeightCheck]:
        """Begins the check that is due, and returns those whose hashes are there.

        Args:
            moment: What moment this is, in the same words on all ranks.
            last_steps: Optimizer steps after which nothing is checked any more, because a difference is known.
        """
        steps, self._due = self._due, None
        wanted = steps is not None and (last_steps is None or steps <= last_steps)
        # A loop may fetch its batches on a thread of its own, while an optimizer changes the weights on another.
        if steps is not None and wanted and threading.get_ident() == self._thread and len(self._pending) < _PENDING:
            with contextlib.suppress(Exception):  # as without memory, or without a process group any more
                self._pending.append((steps, moment, self._begin()))
        return self.collect()

    def collect(self) -> list[WeightCheck]:
        """Returns the checks whose hashes are there."""
        found: list[WeightCheck] = []
        for each in list(self._pending):
            steps, moment, pending = each
            try:
                replicas = pending.collect()
            except RuntimeError:  # of the program's own kernels: its next operation on the device raises it
                replicas = ()
            if replicas is not None:
                self._pending.remove(each)
                found.append(WeightCheck(steps, moment, replicas))
        return found


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
    holders: dict[tuple[str, ...], list[int]] = {}
    for rank, digests in sorted(answers.items()):
        holders.setdefault(tuple(digests), []).append(rank)
    groups = sorted(holders.values(), key=len, reverse=True)  # of as many ranks, the one with the first rank first
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
    why = (
        "These ranks must hold the same bits. They may have differed before: they are compared every `weights_every` "
        "optimizer steps."
    )
    return Verdict("WeightsDiffer", sentence, named, why=why, time=time.time(), standing=standing)
