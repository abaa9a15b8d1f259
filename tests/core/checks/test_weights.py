"""Weights that must be equal: the judge, its records, and when a rank computes its hashes."""

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from countoff.core import Settings
from countoff.core.checks.check import FitStart
from countoff.core.checks.weights import (
    Exchange,
    Held,
    Question,
    Replicas,
    Weights,
    answer,
    divided,
    judge_weights,
    narrowed,
)
from countoff.core.protocol.actions import WriteEntry
from countoff.core.protocol.counters import SpanCounters
from countoff.core.protocol.records import RECORD_BYTES, FitPlan, verdict_to_json
from countoff.core.state import State
from countoff.core.store.channel import ChannelError, encode
from tests.fake_store import FakeSpeaker, FakeStore
from tests.other_ranks import KeptRecords

MANY = 5_000
LONG = "module.decoder.layers.127.mixture.experts.255.a_name_that_is_far_too_long_for_a_record." * 4


def replicas(hashes: Sequence[int], ranks: Sequence[int], name: str = "layer {}") -> Replicas:
    return Replicas(tuple(ranks), tuple(name.format(number) for number in range(len(hashes))), "0" * 16, hashes)


class Job:
    """Ranks with one store and one log."""

    def __init__(self, ranks: int) -> None:
        self.store = FakeStore()
        self.states = [State(rank, ranks, Settings(weights_every=2), {}) for rank in range(ranks)]
        self.speakers = [FakeSpeaker(state, self.store) for state in self.states]
        self.exchanges = [Exchange(state, speaker) for state, speaker in zip(self.states, self.speakers, strict=True)]
        self.questions: list[dict[str, Any]] = []
        for speaker in self.speakers:
            speaker.append = self.append  # pyright: ignore[reportAttributeAccessIssue]

    def append(self, entry: dict[str, Any], redundant: Any = lambda: False) -> Any:
        def job(channel: Any) -> None:
            del channel
            if not redundant():
                encode({**entry, "guard": 4000})
                self.questions.append(entry)

        return job

    def deliver(self) -> None:
        """Lets every rank receive the log, and gather answers, until nothing is left to do."""
        for _ in range(12):
            entries, self.questions = self.questions, []
            for entry in entries:
                for state in self.states:
                    state.receive(entry)
            for speaker in self.speakers:
                speaker.poll_once()


def noted(job: Job) -> list[str]:
    found: list[str] = []
    for state in job.states:
        while not state.outbox.empty():
            action = state.outbox.get()
            if isinstance(action, WriteEntry):
                encode({**action.entry, "guard": 4000})
                found.append(action.entry["verdict"]["sentence"])
    return found


def compare(job: Job, held: Sequence[Replicas], steps: int = 2) -> None:
    for exchange, each in zip(job.exchanges, held, strict=True):
        exchange.compare(Held(steps, "1.3", [each]))


@pytest.mark.parametrize("ranks", [2, 3, 64])
def test_equal_weights_leave_nothing_in_the_store(ranks: int) -> None:
    job = Job(ranks)
    compare(job, [replicas([1, -2, 3], range(ranks))] * ranks)
    job.deliver()
    assert (noted(job), job.store.values) == ([], {})


@pytest.mark.parametrize(("ranks", "odd", "who"), [
    (2, [1], "ranks 0 and 1 hold different weights"),
    (3, [0], "rank 0 holds other weights than ranks 1, 2"),
    (64, [7, 8], "ranks 7, 8 hold other weights than ranks 0–6, 9–63"),
])  # fmt: skip
@pytest.mark.parametrize(("parameters", "changed"), [(1, 0), (32, 31), (33, 32), (MANY, 4_123)])
def test_the_first_parameter_that_differs_is_found(
    ranks: int, odd: list[int], who: str, parameters: int, changed: int
) -> None:
    """Range by range, with records that fit into the store, and by as few ranks as there are."""
    ranks = min(ranks, 3 if parameters == MANY else 64)
    if max(odd) >= ranks:
        return
    job = Job(ranks)
    same, other = list(range(parameters)), list(range(parameters))
    other[changed] = other[-1] = -5
    compare(job, [replicas(other if rank in odd else same, range(ranks)) for rank in range(ranks)])
    job.deliver()
    found = noted(job)
    assert len(found) == 1
    assert found[0].endswith(f"; the first parameter that differs is layer {changed}.")
    assert found[0].startswith(f"after 2 optimizer steps, {who};")
    assert [key for key in job.store.values if not key.endswith("seen")] == []


def test_a_rank_that_has_not_got_so_far_answers_later() -> None:
    job = Job(3)
    held = [replicas([1, 2], range(3)), replicas([1, 5], range(3)), replicas([1, 2], range(3))]
    for exchange, each in list(zip(job.exchanges, held, strict=True))[:2]:
        exchange.compare(Held(2, "1.3", [each]))
    job.deliver()
    assert noted(job) == []
    job.exchanges[2].compare(Held(2, "1.3", [held[2]]))
    job.deliver()
    assert noted(job) == [
        "after 2 optimizer steps, rank 1 holds other weights than ranks 0, 2; the first parameter that differs is "
        "layer 1."
    ]


def test_ranks_of_other_groups_are_not_compared() -> None:
    job = Job(4)
    held = [replicas([rank % 2], (rank % 2, rank % 2 + 2)) for rank in range(4)]
    compare(job, held)
    compare(job, [each._replace(layout=f"{rank:016}", hashes=[rank]) for rank, each in enumerate(held)], steps=4)
    job.deliver()
    assert noted(job) == []


def test_only_one_difference_is_reported() -> None:
    job = Job(2)
    for steps in (2, 4):
        compare(job, [replicas([rank], (0, 1)) for rank in (0, 1)], steps)
    job.deliver()
    assert len(noted(job)) == 1
    assert job.exchanges[0].last_steps == 2


@pytest.mark.parametrize("ranks", [2, 8, 4096])
@pytest.mark.parametrize("classes", [2, 3, 4096])
def test_a_verdict_about_many_ranks_fits_into_the_store(ranks: int, classes: int) -> None:
    answers = {rank * 7: (f"{rank % classes:016x}",) * 32 for rank in range(ranks)}
    verdict = judge_weights(10**12, answers, LONG)
    entry = {"type": "notice", "verdict": verdict_to_json(verdict), "guard": 4000}
    assert len(encode(entry)) <= RECORD_BYTES
    assert verdict.sentence.startswith("after 1000000000000 optimizer steps, rank")


def test_of_two_halves_neither_is_right() -> None:
    verdict = judge_weights(1, {0: ("a",), 1: ("b",), 2: ("b",), 3: ("a",)}, "")
    assert verdict.sentence == "after 1 optimizer step, ranks 0, 3 hold other weights than ranks 1, 2."
    assert (verdict.ranks, verdict.standing) == ((0, 1, 2, 3), "differ")
    verdict = judge_weights(1, {rank: (str(rank),) for rank in range(4)}, "w")
    assert verdict.sentence.startswith("after 1 optimizer step, ranks 0–3 hold 4 different sets of weights; ")


QUESTION = Question(2, "1.3", "a" * 16, 0, 40, 1)


def test_a_question_comes_back_as_it_was() -> None:
    assert Question.from_json(QUESTION.to_json(), range(2)) == QUESTION


@pytest.mark.parametrize("wrong", [
    {"rank": 2}, {"rank": -1}, {"begin": 40}, {"end": True}, {"steps": "2"}, {"moment": 5}, {"key": "a" * 65},
    {"moment": None}, {"begin": 1 << 60},
])  # fmt: skip
def test_a_broken_question_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Question.from_json({**QUESTION.to_json(), **wrong}, range(2))


@pytest.mark.parametrize("wrong", [{}, {"digests": []}, {"digests": "a" * 32}, {"digests": [["a"]] * 2},
                                   {"digests": ["a" * 16, "b"]}, {"digests": [1, 2]}])  # fmt: skip
def test_broken_digests_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        answer(wrong, 0, 2)


def test_a_question_about_what_nobody_holds_changes_nothing() -> None:
    job = Job(2)
    for number in range(100):
        job.states[0].receive(QUESTION._replace(key=f"{number:016}").to_json())
    compare(job, [replicas([1], (0, 1))] * 2)
    assert (noted(job), job.store.values) == ([], {})


def test_a_foreign_record_is_no_verdict() -> None:
    job = Job(2)
    held = replicas([1], (0, 1))
    job.store.set(QUESTION._replace(key=held.key, end=1).name, {"digests": ["x"]})
    with pytest.raises((ChannelError, ValueError)):
        job.exchanges[0].compare(Held(2, "1.3", [held]))


def test_ranges_cover_everything_once() -> None:
    for begin, end in [(0, 1), (5, 37), (5, 38), (0, MANY)]:
        parts = divided(begin, end)
        assert [each for part in parts for each in range(*part)] == list(range(begin, end))
        assert len(parts) == min(32, end - begin)
    assert narrowed({0: ["a", "b"], 1: ["a", "b"]}, 0, 2) is None


@dataclasses.dataclass
class Hashes:
    """Hashes that arrive after so many looks; or an error of the device."""

    looks: int = 0
    fails: bool = False

    def collect(self) -> list[Replicas] | None:
        if self.fails:
            raise RuntimeError("CUDA error: device-side assert triggered")
        self.looks -= 1
        return [replicas([1], (0, 1))] if self.looks < 0 else None


class Training:
    """Steps of the first of two ranks, each with the batch after it.

    Args:
        every: As `weights_every`.
        begin: Begins to compute hashes.
    """

    def __init__(self, every: int, begin: Any = Hashes) -> None:
        self.store = FakeStore()
        self.state = State(0, 2, Settings(weights_every=every), {})
        self.check = Weights(self.state, begin)
        self.span = SpanCounters("train epoch 0", opened=1)
        self.check.fit_started(FitStart(FitPlan(), {}), KeptRecords(speaker=FakeSpeaker(self.state, self.store)))

    def step(self, steps: int) -> bool:
        """Tells that so many steps are applied; whether the check waits for the next batch now."""
        self.check.stepped(self.span, steps)
        return self.check.wants_batch

    def look(self, batch: int) -> bool:
        """Looks before this batch; whether the check waits for another one."""
        self.span.started = batch
        self.check.looked(self.span)
        return self.check.wants_batch

    @property
    def compared(self) -> list[str]:
        """The moments that were compared: their steps, the span and the batch."""
        return ["/".join(key.split("/")[1:3]) for key in self.store.values if key.endswith("/0-1")]


def test_a_check_is_due_after_every_nth_step_at_the_next_batch() -> None:
    training = Training(2)
    assert [training.step(steps) for steps in (1, 2)] == [False, True]
    assert training.compared == []
    assert not training.look(3)
    assert training.compared == ["2/1.3"]
    training.look(4)
    assert training.compared == ["2/1.3"]


def test_nothing_is_checked_behind_a_difference() -> None:
    training = Training(2)
    training.state.receive(QUESTION._replace(steps=3).to_json())
    training.step(4)
    assert not training.look(5)
    assert training.compared == []


def test_hashes_on_their_way_are_collected_later_and_not_waited_for() -> None:
    pending = iter([Hashes(looks=2), Hashes(fails=True)])
    training = Training(1, lambda: next(pending))
    assert training.step(1)
    assert [training.look(batch) for batch in (2, 3)] == [True, True]
    assert training.compared == []
    assert not training.look(4)
    assert training.compared == ["1/1.2"]
    assert training.step(2)
    assert not training.look(5)
    assert training.compared == ["1/1.2"]


def test_the_end_of_a_fit_compares_what_has_arrived() -> None:
    training = Training(1, lambda: Hashes(looks=1))
    training.step(1)
    training.look(2)
    training.check.fit_ending()
    assert training.compared == ["1/1.2"]


def test_only_the_thread_that_trains_computes_hashes() -> None:
    """A loop may fetch its batches on another thread, while the optimizer changes the weights."""
    training = Training(1)
    training.step(1)
    thread = threading.Thread(target=training.look, args=(2,))
    thread.start()
    thread.join()
    assert training.compared == []
    assert not training.check.wants_batch
