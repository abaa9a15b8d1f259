"""Compares the weights of ranks through the store, in the background: all of it on the speaker thread.

In a healthy job, a check costs each rank two calls to the store. Only where two ranks differ, one of them asks all that
must hold the same, by an entry of the log, and each answers under a key of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from countoff.core.data.weights import Question, Replicas, WeightCheck, answer, judge_weights, narrowed
from countoff.core.protocol.records import Records
from countoff.core.protocol.state import State
from countoff.core.store.gathering import Gathering

if TYPE_CHECKING:
    from countoff.core.store.channel import Channel
    from countoff.core.threads.speaker import Speaker

_KEPT = 32
"""Checks whose hashes are kept for a question of another rank, which may be as many optimizer steps behind."""
_UNANSWERED = 8
_SETTLE_SECONDS, _LAST_ANSWERS_SECONDS = 5.0, 3.0


class WeightExchange:
    """The comparison of weights of one guard.

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
        state.asked = self._asked

    def compare(self, check: WeightCheck) -> None:
        """Compares what this rank holds with what others hold. Waits for nothing.

        Args:
            check: What it holds.
        """
        self._speaker.hand(lambda channel: self._compare(channel, check))

    def settle(self) -> None:
        """Waits until the question that is open, if there is one, is decided and every rank knows; 5 s at most."""
        state, deadline = self._state, time.monotonic() + _SETTLE_SECONDS
        caught_up = threading.Event()

        def worth_waiting() -> bool:
            alive = self._speaker.line.connected and state.end is None
            return alive and time.monotonic() < deadline

        def catch_up(channel: Channel) -> None:
            self._speaker.catch_up(channel)  # the question of another rank may be in the log
            caught_up.set()

        self._speaker.hand(catch_up)
        while not caught_up.wait(0.02) and worth_waiting():
            pass
        while self.last_steps is not None and not self._is_decided() and worth_waiting():
            for gathering in list(self._gatherings):  # of a rank that has left, no answer will come
                gathering.end_by(deadline - _SETTLE_SECONDS + _LAST_ANSWERS_SECONDS)
            time.sleep(0.01)

    def _is_decided(self) -> bool:
        return self._decided or any(notice.kind == "WeightsDiffer" for notice in self._state.notices)

    def _compare(self, channel: Channel, check: WeightCheck) -> None:
        state = self._state
        for replicas in check.replicas:
            self._kept[check.steps, check.moment, replicas.key] = replicas
            if not state.comparing or state.end is not None:
                continue
            asks = Question(check.steps, check.moment, replicas.key, 0, len(replicas.names), state.rank)
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
            if steps <= check.steps - _KEPT * max(1, state.settings.weights_every):
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
        channel.set(f"{question.name}/{self._state.rank}", {"digests": own})
        if question.rank != self._state.rank:
            return

        def gathered(records: Records, missing: list[int]) -> None:
            del missing  # the ranks that answered can be compared
            self._gatherings.remove(gathering)
            self._decide(question, replicas, records)

        deadline = time.monotonic() + self._state.settings.deadline_seconds
        gathering = Gathering(question.name, replicas.ranks, deadline, gathered)
        self._gatherings.append(gathering)
        self._speaker.poll(gathering)

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
            self._state.note(judge_weights(question.steps, self._holders, parameter))
