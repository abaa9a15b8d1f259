"""Weights that must be equal: the judge, its records, and when a rank computes its hashes."""

import dataclasses
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from countoff.core import Settings
from countoff.core.checks.check import FitStart
from countoff.core.checks.weights import Replicas, Weights, digests_of, judge_weights
from countoff.core.messages import clip
from countoff.core.protocol.actions import WriteEntry
from countoff.core.protocol.counters import SpanCounters
from countoff.core.protocol.records import RECORD_BYTES, FitPlan, verdict_to_json
from countoff.core.session.state import State
from countoff.core.session.store.channel import ChannelError, encode
from countoff.core.session.threads.other_ranks import OtherRanks
from tests.fake_store import FakeStore, FakeWriter

MANY = 5_000
LONG = "module.decoder.layers.127.mixture.experts.255.a_name_that_is_far_too_long_for_a_record." * 4


def replicas(hashes: Sequence[int], ranks: Sequence[int], name: str = "layer {}") -> Replicas:
    return Replicas(tuple(ranks), tuple(name.format(number) for number in range(len(hashes))), "0" * 16, hashes)


class Job:
    """Ranks with one store and one log."""

    def __init__(self, ranks: int) -> None:
        self.store = FakeStore()
        self.states = [State(rank, ranks, Settings(weights_every=2), {}) for rank in range(ranks)]
        self.writers = [FakeWriter(state, self.store) for state in self.states]
        self.pending: list[Any] = [None] * ranks
        self.checks = [Weights(state, lambda rank=state.rank: self.pending[rank]) for state in self.states]
        self.questions: list[dict[str, Any]] = []
        for state, writer, check in zip(self.states, self.writers, self.checks, strict=True):
            writer.append = self.append  # pyright: ignore[reportAttributeAccessIssue]
            call: Any = SimpleNamespace(report=None, settle_report=None)
            check.fit_started(FitStart(FitPlan(), {}), OtherRanks(state, writer, call))

    def append(self, entry: dict[str, Any], redundant: Any = lambda: False) -> Any:
        def job(channel: Any) -> None:
            del channel
            if not redundant():
                encode({**entry, "guard": 4000})
                self.questions.append(entry)

        return job

    def compare(self, rank: int, held: Replicas, steps: int) -> None:
        """Lets a rank compare what it holds after that many steps, in the third batch."""
        self.pending[rank] = SimpleNamespace(collect=lambda: [held])
        span = SpanCounters("train epoch 0", opened=1, started=3)
        self.checks[rank].stepped(span, steps)
        self.checks[rank].looked(span)

    def deliver(self) -> None:
        """Lets every rank receive the log, and gather answers, until nothing is left to do."""
        for _ in range(3):
            entries, self.questions = self.questions, []
            for entry in entries:
                for state in self.states:
                    state.receive(entry)
            for writer in self.writers:
                writer.poll_once()


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
    for rank, each in enumerate(held):
        job.compare(rank, each, steps)


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
@pytest.mark.parametrize(("parameters", "changed", "named"), [
    (1, [0], "parameter that differs is layer 0"),
    (300, [7, 299], "parameters that differ are layer 7, layer 299"),
    (300, [7, 8, 9, 10], "parameters that differ are layer 7, layer 8, layer 9, …"),
    (301, [300], "parameter that differs is layer 300"),
    (MANY, [4_123], "parameter that differs is one of layer 4114 to layer 4130"),
])  # fmt: skip
def test_the_first_parameters_that_differ_are_found(
    ranks: int, odd: list[int], who: str, parameters: int, changed: list[int], named: str
) -> None:
    """In one record of each rank, which tells those of a large model by ranges."""
    job = Job(ranks)
    same, other = list(range(parameters)), list(range(parameters))
    for each in changed:
        other[each] = -5
    compare(job, [replicas(other if rank in odd else same, range(ranks)) for rank in range(ranks)])
    job.deliver()
    assert noted(job) == [f"after 2 optimizer steps, {who}; the first {named}."]
    assert [key for key in job.store.values if not key.startswith("answer/")] == []


def test_a_rank_that_has_not_got_so_far_answers_later() -> None:
    job = Job(3)
    held = [replicas([1, 2], range(3)), replicas([1, 5], range(3)), replicas([1, 2], range(3))]
    for rank in (0, 1):
        job.compare(rank, held[rank], 2)
    job.deliver()
    assert noted(job) == []
    job.compare(2, held[2], 2)
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


def suspect(job: Job, rank: int, value: int, moment: str, unaveraged: int = 1) -> None:
    """Lets a rank compare what it holds inside of the third batch, because of that step."""
    span = SpanCounters("train epoch 0", opened=1, started=3)
    pending: Any = SimpleNamespace(collect=lambda: [replicas([value], (0, 1))])
    job.checks[rank].suspect(span, unaveraged, moment, lambda: pending)


def test_comparisons_of_one_batch_are_kept_apart() -> None:
    """As of two models of one shape: one rank may have compared one of them before the other rank has."""
    job = Job(2)
    for rank in (0, 0, 1, 1):
        suspect(job, rank, 1, "ddp0.1")
        suspect(job, rank, 2, "ddp1.1")
        suspect(job, rank, 3, "ddp0.2")
    job.deliver()
    assert noted(job) == []


def test_a_difference_names_the_step_of_its_own_comparison() -> None:
    """And none where it is found after every n-th step, whatever was compared before."""
    inside = "; the last backward pass before step {} ran inside no_sync()."
    for later, named in {7: inside.format(7), 0: "."}.items():
        job = Job(2)
        for rank in (0, 1):
            suspect(job, rank, 1, "ddp0.1", unaveraged=5)
            if later:
                suspect(job, rank, rank, "ddp0.2", unaveraged=later)
            else:
                job.compare(rank, replicas([rank], (0, 1)), 2)
        job.deliver()
        [found] = noted(job)
        assert found.endswith(f"the first parameter that differs is layer 0{named}")


def test_only_one_difference_is_reported() -> None:
    job = Job(2)
    for steps in (2, 4):
        compare(job, [replicas([rank], (0, 1)) for rank in (0, 1)], steps)
    job.deliver()
    compare(job, [replicas([rank], (0, 1)) for rank in (0, 1)], 6)
    job.deliver()
    [found] = noted(job)
    assert found.startswith("after 2 optimizer steps, ")
    assert not any("weights/6" in key for key in job.store.values)


@pytest.mark.parametrize("ranks", [2, 8, 4096])
@pytest.mark.parametrize("classes", [2, 3, 4096])
def test_a_verdict_about_many_ranks_fits_into_the_store(ranks: int, classes: int) -> None:
    answers = {rank * 7: (f"{rank % classes:016x}",) * 32 for rank in range(ranks)}
    verdict = judge_weights(10**12, answers, [clip(LONG, 60)] * 6)
    entry = {"type": "notice", "verdict": verdict_to_json(verdict), "guard": 4000}
    assert len(encode(entry)) <= RECORD_BYTES
    assert verdict.sentence.startswith("after 1000000000000 optimizer steps, rank")


def test_of_two_halves_neither_is_right() -> None:
    verdict = judge_weights(1, {0: ("a",), 1: ("b",), 2: ("b",), 3: ("a",)}, [])
    assert verdict.sentence == "after 1 optimizer step, ranks 0, 3 hold other weights than ranks 1, 2."
    assert (verdict.ranks, verdict.standing) == ((0, 1, 2, 3), "differ")
    verdict = judge_weights(1, {rank: (str(rank),) for rank in range(4)}, ["w"])
    assert verdict.sentence.startswith("after 1 optimizer step, ranks 0–3 hold 4 different sets of weights; ")


def question(**changed: Any) -> dict[str, Any]:
    asked = {"steps": 2, "moment": "1.3", "key": "a" * 16, **changed.pop("asked", {})}
    return {"type": "question", "kind": "WeightsDiffer", "rank": 1, "asked": asked, **changed}


@pytest.mark.parametrize("wrong", [
    {"rank": 2}, {"rank": -1}, {"asked": {"steps": -1}}, {"asked": {"steps": 1 << 60}}, {"asked": {"moment": [5]}},
    {"asked": {"key": "a" * 65}}, {"asked": {"moment": None}}, {"asked": {"steps": True}},
])  # fmt: skip
def test_a_broken_question_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Job(2).states[0].receive(question(**wrong))


@pytest.mark.parametrize("wrong", [{}, {"parts": ""}, {"parts": 5}, {"parts": "a" * 9}, {"digest": 5},
                                   {"digest": "a" * 17}])  # fmt: skip
def test_broken_digests_are_refused(wrong: dict[str, Any]) -> None:
    known = {"digest": "a" * 16, "parts": "a" * 6}
    assert digests_of(known, 6) == ("a" * 16, "aaa", "aaa")
    with pytest.raises((KeyError, TypeError, ValueError)):
        digests_of({**known, **wrong} if wrong else {}, 6)


def test_a_question_about_what_nobody_holds_changes_nothing() -> None:
    """And only the first one is heard."""
    job = Job(2)
    for number in range(100):
        for state in job.states:
            state.receive(question(asked={"key": f"{number:016}"}))
    compare(job, [replicas([1], (0, 1))] * 2)
    job.deliver()
    assert (noted(job), job.store.values) == ([], {})


def test_a_foreign_record_is_no_verdict() -> None:
    job = Job(2)
    held = replicas([1], (0, 1))
    job.store.set(f"weights/2/1.3/{held.key}", {"x": 1})
    with pytest.raises((ChannelError, KeyError)):
        job.compare(0, held, 2)


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
        self.writer, call = FakeWriter(self.state, self.store), SimpleNamespace(report=None, settle_report=None)
        self.check.fit_started(FitStart(FitPlan(), {}), OtherRanks(self.state, self.writer, call))  # pyright: ignore[reportArgumentType]

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
        return ["/".join(key.split("/")[1:3]) for key in self.store.values if key.count("/") == 3]


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
    training.state.receive(question(asked={"steps": 3}))
    training.writer.poll_once()
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


def test_the_end_of_a_fit_waits_for_what_is_on_its_way() -> None:
    training = Training(1, lambda: Hashes(looks=4))
    training.step(1)
    training.look(2)
    training.check.fit_ending()
    assert training.compared == []
    training.check.settle()
    assert training.compared == ["1/1.2"]


def test_a_fit_that_is_left_waits_for_nothing() -> None:
    """As by an exception, or the key of an operator: the hashes, and the ranks that have yet to compare."""
    training, asked = Training(1, lambda: Hashes(looks=2)), list[Any]()
    others: Any = SimpleNamespace(settle_question=lambda *question: asked.append(question))
    training.step(1)
    training.look(2)
    training.check._others = others
    training.check.settle()
    assert (training.compared, asked) == ([], [("WeightsDiffer", ())])


def test_only_the_thread_that_trains_computes_hashes() -> None:
    """A loop may fetch its batches on another thread, while the optimizer changes the weights."""
    training = Training(1)
    training.step(1)
    thread = threading.Thread(target=training.look, args=(2,))
    thread.start()
    thread.join()
    assert training.compared == []
    assert not training.check.wants_batch
