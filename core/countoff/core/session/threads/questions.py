"""A question to some ranks, for a check that needs a second exchange once a first one has shown a difference.

The first question of its kind goes into the log, whoever asks. Each rank that has an answer reports it as soon as it
can. The rank that has asked gathers the answers and judges them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from countoff.core.protocol.records import Records, parse_count, parse_rank
from countoff.core.session.state import State
from countoff.core.session.store.gathering import Deleted, Gathering
from countoff.core.verdict import Verdict

if TYPE_CHECKING:
    from countoff.core.session.store.channel import Channel
    from countoff.core.session.threads.writer import Writer

_TEXT = 64
"""Characters of a text in a question, at most."""
_SETTLE_SECONDS, _LAST_ANSWERS_SECONDS, _LOOK_SECONDS = 5.0, 3.0, 0.02

Answer = Callable[[Mapping[str, Any]], "Mapping[str, Any] | None"]
Judge = Callable[[Records], "Verdict | None"]


class Questions:
    """The questions of one guard; see `countoff.core.checks.check.Others`.

    Args:
        state: This rank's state.
        writer: This rank's writer.
    """

    def __init__(self, state: State, writer: Writer) -> None:
        self._state = state
        self._writer = writer
        self._answers: dict[str, Answer] = {}
        self._own: dict[str, tuple[Sequence[int], Judge]] = {}
        self._open: dict[str, Gathering | None] = {}
        self._judged: set[str] = set()
        state.readers["question"] = self._read

    def ask(self, kind: str, question: Mapping[str, Any], group: Sequence[int], judge: Judge) -> None:
        """Asks ranks for a record each."""
        self._own.setdefault(kind, (group, judge))
        entry = {"type": "question", "kind": kind, "rank": self._state.rank, "asked": dict(question)}
        self._writer.submit(self._writer.append(entry, lambda: kind in self._open))

    def answer(self, kind: str, answer: Answer) -> None:
        """Registers what answers the question of a kind."""
        self._answers[kind] = answer

    def settle(self, kind: str, comparisons: Sequence[str] = ()) -> None:
        """Waits until the question of a kind, if one is open, is judged and all ranks know the verdict; 5 s at most."""
        state, deadline = self._state, time.monotonic() + _SETTLE_SECONDS

        def worth_waiting() -> bool:
            return self._writer.session.connected and state.end is None and time.monotonic() < deadline

        if comparisons:
            made = threading.Event()  # by all: the last rank of each deletes its key
            self._writer.poll(Deleted(comparisons, made.set), awaited=True)
            while not (kind in self._open or self._one_is_gone or made.wait(_LOOK_SECONDS)) and worth_waiting():
                pass
        self._writer.catch_up_now(worth_waiting)  # the question of another rank may be in the log
        while kind in self._open and not self._is_judged(kind) and worth_waiting():
            if (gathering := self._open[kind]) is not None:  # of a rank that has left, no answer will come
                gathering.end_by(deadline - _SETTLE_SECONDS + _LAST_ANSWERS_SECONDS)
            time.sleep(0.01)

    @property
    def _one_is_gone(self) -> bool:
        """Whether a rank has left in the middle, or its process has ended: it makes no comparison any more."""
        processes = list(self._writer.session.heartbeats.neighbours.values())
        return self._state.left is not None or any(each.state() == "gone" for each in processes)

    def _is_judged(self, kind: str) -> bool:
        return kind in self._judged or any(notice.kind == kind for notice in self._state.notices)

    def _read(self, entry: Mapping[str, Any]) -> Callable[[], None]:
        """Reads the question of a rank; returns what it does. Called for each such entry of the log.

        Raises:
            KeyError, TypeError, ValueError: If it is no question.
        """
        kind, rank = str(entry["kind"]), parse_rank(entry["rank"], self._state.ranks)
        question = {str(name): _parse(value) for name, value in dict(entry["asked"]).items()}

        def take() -> None:
            answer = self._answers.get(kind)
            if answer is None or kind in self._open:
                return
            self._open[kind] = self._gather(kind) if rank == self._state.rank and kind in self._own else None
            deadline = time.monotonic() + self._state.settings.deadline_seconds
            self._writer.poll(_Answering(kind, self._state.rank, lambda: answer(question), deadline))

        return take

    def _gather(self, kind: str) -> Gathering:
        group, judge = self._own[kind]

        def gathered(records: Records, missing: list[int]) -> None:
            del missing  # the ranks that answered can be compared
            self._judged.add(kind)
            if (verdict := judge(records)) is not None:
                self._state.find(verdict)

        deadline = time.monotonic() + self._state.settings.deadline_seconds
        return self._writer.gather(_name_of(kind), group, deadline, gathered)


class _Answering:
    """Answers a question as soon as this rank can; a rank of another group never can.

    Args:
        kind: The kind of the question.
        rank: This rank.
        answer: Returns its answer; None while there is none.
        deadline: Until when it may come, by `time.monotonic()`.
    """

    def __init__(self, kind: str, rank: int, answer: Callable[[], Mapping[str, Any] | None], deadline: float) -> None:
        self._kind = kind
        self._rank = rank
        self._answer = answer
        self._deadline = deadline

    def poll(self, channel: Channel) -> bool:
        """Looks once; True when it has answered, or when nobody waits any more."""
        if (record := self._answer()) is not None:
            channel.report_long(_name_of(self._kind), self._rank, record)
        return record is not None or time.monotonic() > self._deadline


def _name_of(kind: str) -> str:
    """Under what the answers lie in the store."""
    return f"answer/{kind}"


def _parse(value: object) -> int | str:
    """Reads a number or a short text of a question.

    Raises:
        ValueError: If it is something else.
    """
    if isinstance(value, str) and len(value) <= _TEXT:
        return value
    return parse_count(value)
