"""The one rule, mark by mark, and the whole protocol on any interleaving of up to sixteen ranks, without a process."""

import dataclasses
import itertools
import json
import queue
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from countoff.core import Guard, Settings
from countoff.core.ledger import Finding, Ledger, Mark, compare
from countoff.core.tally import Tally
from countoff.core.watch import Watch

EPOCH = "train epoch 0"


def opened(*spans: Tally, number: int = 0) -> Ledger:
    """A ledger that has passed marks 0 to `number`, the last of which opened the innermost of the spans."""
    ledger = Ledger()
    for passed in range(number + 1):
        mark = Mark("train_start", spans[-1].name)
        ledger.reach(mark)
        assert ledger.receive_mark(passed, mark, ()) is None
    return ledger


def told(own: Tally, mark: Mark) -> Finding | None:
    """What a rank with these counts in an open span finds when it hears another rank's next mark."""
    return opened(own).receive_mark(1, mark, [own])


def closing(at: int, how: Literal["exhausted", "stopped"] = "exhausted", **counts: Any) -> Mark:
    return Mark("train_end", EPOCH, at=at, how=how, rank=1, **counts)


# The one rule -----------------------------------------------------------------------------------------------------


def test_a_rank_that_has_as_many_batches_as_the_closing_has_not_diverged() -> None:
    assert told(Tally(EPOCH, started=4), closing(4)) is None


def test_a_rank_that_is_still_on_its_way_to_the_closing_has_not_diverged() -> None:
    assert told(Tally(EPOCH, started=1, fetched=2), closing(4)) is None


def test_a_rank_that_has_started_more_than_the_closing_has_diverged() -> None:
    assert told(Tally(EPOCH, started=5), closing(4)) == Finding("UnevenBatches", closing(4), 5)


def test_a_batch_fetched_beyond_an_exhausted_loader_proves_it_before_it_starts() -> None:
    assert told(Tally(EPOCH, started=4, fetched=5), closing(4)) == Finding("UnevenBatches", closing(4), 5)


def test_a_batch_fetched_beyond_a_pass_that_was_stopped_proves_nothing() -> None:
    assert told(Tally(EPOCH, started=4, fetched=5), closing(4, "stopped")) is None


def test_a_batch_started_beyond_a_pass_that_was_stopped_proves_it() -> None:
    own = Tally(EPOCH, started=5, fetched=6)
    assert told(own, closing(4, "stopped")) == Finding("UnevenBatches", closing(4, "stopped"), 5)


def test_the_rule_is_applied_again_as_the_counters_grow() -> None:
    own = Tally(EPOCH, started=4)
    ledger = opened(own)
    assert ledger.receive_mark(1, closing(4), [own]) is None
    own.started = 5
    assert ledger.prove([own]) == Finding("UnevenBatches", closing(4), 5)


def test_an_evaluation_that_others_began_earlier_is_proved_by_the_next_batch() -> None:
    early = Mark("eval_start", "validation", at=4, rank=1)
    assert told(Tally(EPOCH, started=4, fetched=5), early) is None
    assert told(Tally(EPOCH, started=5), early) == Finding("UnevenBatches", early, 5)


def test_an_evaluation_at_the_end_of_an_exhausted_loader_is_proved_by_a_batch_in_hand() -> None:
    early = Mark("eval_start", "validation", at=4, how="exhausted", rank=1)
    assert told(Tally(EPOCH, started=4, fetched=5), early) == Finding("UnevenBatches", early, 5)


def test_an_evaluation_that_this_rank_skips_is_proved_by_its_next_batch() -> None:
    own, evaluation = Tally(EPOCH, started=2), Mark("eval_start", "validation", at=2, rank=1)
    ledger = opened(own)
    assert ledger.receive_mark(1, evaluation, [own]) is None
    own.started = 3
    assert ledger.prove([own]) == Finding("UnevenBatches", evaluation, 3)


def test_an_evaluation_that_another_rank_skips_is_proved_by_the_mark_in_its_place() -> None:
    own = Tally(EPOCH, started=2)
    ledger = opened(own)
    assert ledger.receive_mark(1, closing(4), [own]) is None
    mine = Mark("eval_start", "validation", at=2)
    assert ledger.reach(mine)[1] == Finding("UnevenBatches", closing(4), 2, mine)


def test_a_mark_of_a_later_place_says_nothing_yet() -> None:
    own = Tally(EPOCH, started=5)
    assert opened(own).receive_mark(2, closing(4), [own]) is None


def test_a_batch_of_the_evaluation_is_not_held_against_the_train_span_around_it() -> None:
    spans = [Tally(EPOCH, started=2), Tally("validation", evaluation=True, opened=1, started=9)]
    ledger = opened(*spans, number=1)
    assert ledger.receive_mark(2, Mark("eval_end", "validation", at=9, how="exhausted"), spans) is None
    assert ledger.receive_mark(3, closing(2), spans) is None


def test_a_longer_evaluation_is_found_as_an_evaluation() -> None:
    spans = [Tally(EPOCH, started=2), Tally("validation", evaluation=True, opened=1, started=4)]
    shorter = Mark("eval_end", "validation", at=3, how="exhausted", rank=1)
    found = opened(*spans, number=1).receive_mark(2, shorter, spans)
    assert found == Finding("UnevenBatches", shorter, 4, evaluation=True)


def test_a_silent_span_is_never_held_against_anything() -> None:
    own = Tally(EPOCH, started=50, fetched=60, silent=True)
    ledger = opened(own)
    assert ledger.receive_mark(1, closing(4), [own]) is None
    assert ledger.receive_announcement(0, closing(4), [own]) is None


def test_a_train_span_is_compared_while_a_silent_evaluation_is_open_in_it() -> None:
    spans = [Tally(EPOCH, started=5), Tally("validation", evaluation=True, opened=-1, started=1, silent=True)]
    assert opened(*spans).receive_mark(1, closing(4), spans) == Finding("UnevenBatches", closing(4), 5)


# Announcements ----------------------------------------------------------------------------------------------------


def test_an_announced_end_is_proved_wrong_by_a_batch_in_hand() -> None:
    own = Tally(EPOCH, started=4, fetched=5)
    assert opened(own).receive_announcement(0, closing(4), [own]) == Finding("UnevenBatches", closing(4), 5)


def test_an_announced_end_holds_for_the_train_span_while_an_evaluation_is_open_in_it() -> None:
    spans = [Tally(EPOCH, started=5), Tally("validation", evaluation=True, opened=1)]
    ledger = opened(*spans, number=1)
    assert ledger.receive_announcement(0, closing(4), spans) == Finding("UnevenBatches", closing(4), 5)


def test_an_announcement_for_another_span_says_nothing() -> None:
    own = Tally("train epoch 1", opened=1, started=5, fetched=6)
    assert opened(own, number=1).receive_announcement(0, closing(4), [own]) is None


def test_the_first_announcement_for_a_span_stands() -> None:
    own = Tally(EPOCH, started=4)
    ledger = opened(own)
    ledger.receive_announcement(0, closing(4), [own])
    ledger.receive_announcement(0, closing(9), [own])
    own.started = 5
    assert ledger.prove([own]) == Finding("UnevenBatches", closing(4), 5)


def test_an_announcement_that_an_early_stop_overtakes_is_no_fault() -> None:
    own = Tally(EPOCH, started=3, fetched=4)
    ledger = opened(own)
    assert ledger.receive_announcement(0, closing(4), [own]) is None
    assert ledger.receive_mark(1, closing(3, "stopped"), [own]) is None
    assert ledger.reach(closing(3, "stopped"))[1] is None


def test_an_announced_end_makes_every_batch_of_that_span_a_possible_proof() -> None:
    own = Tally(EPOCH, started=1)
    ledger = opened(own)
    assert not ledger.is_behind([own])
    ledger.receive_announcement(0, closing(4), [own])
    assert ledger.announced(0)
    assert ledger.is_behind([own])


# Marks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["own", "standing"])
@pytest.mark.parametrize(("theirs", "proved"), [(closing(4), None), (closing(5), "UnevenBatches")])
def test_marks_are_compared_whichever_comes_first(first: str, theirs: Mark, proved: str | None) -> None:
    own, ledger = Tally(EPOCH, started=4), opened(Tally(EPOCH))
    if first == "own":
        assert ledger.reach(closing(4))[1] is None
        found = ledger.receive_mark(1, theirs, [own])
    else:
        assert ledger.receive_mark(1, theirs, [own]) is None
        found = ledger.reach(closing(4))[1]
    assert (found.kind if found else None) == proved


def test_the_first_mark_in_a_place_stands() -> None:
    ledger = opened(Tally(EPOCH))
    ledger.receive_mark(1, closing(4), ())
    ledger.receive_mark(1, closing(5), ())
    assert ledger.reach(closing(4))[1] is None


def test_a_mark_is_compared_once() -> None:
    ledger = opened(Tally(EPOCH))
    ledger.receive_mark(1, closing(5), ())
    assert ledger.reach(closing(4))[1] is not None
    assert ledger.receive_mark(1, closing(5), ()) is None


def test_a_mark_stands_once_anybody_has_written_it() -> None:
    ledger = Ledger()
    ledger.reach(Mark("fit_start", "the fit"))
    assert not ledger.stands(0)
    ledger.receive_mark(0, Mark("fit_start", "the fit"), ())
    assert ledger.stands(0)
    ledger.reach(Mark("train_start", EPOCH))
    assert ledger.stands(0)
    assert not ledger.stands(1)


def test_a_rank_is_behind_while_others_stand_at_its_next_mark() -> None:
    ledger = opened(Tally(EPOCH))
    assert not ledger.is_behind(())
    ledger.receive_mark(1, closing(4), ())
    assert ledger.is_behind(())
    ledger.reach(closing(4))
    assert not ledger.is_behind(())


def test_a_long_job_keeps_no_marks_and_few_announcements() -> None:
    ledger = Ledger()
    for number in range(1000):
        mark = Mark("train_start", EPOCH)
        ledger.reach(mark)
        ledger.receive_mark(number, mark, ())
        ledger.receive_announcement(number, closing(4), ())
    assert len(ledger._standing) + len(ledger._pending) + len(ledger._announced) < 16


def test_a_muted_evaluation_is_found_no_more_but_the_next_one_is() -> None:
    first = Tally("validation", evaluation=True, opened=0, started=4)
    ledger = opened(first)
    shorter = Mark("eval_end", "validation", at=3, how="exhausted", rank=1)
    assert ledger.receive_mark(1, shorter, [first]) is not None
    ledger.mute([first])
    assert ledger.prove([first]) is None
    assert ledger.receive_announcement(0, shorter, [first]) is None
    second = Tally("validation", evaluation=True, opened=2, started=4)
    ledger.reach(dataclasses.replace(shorter, at=4))
    ledger.reach(Mark("eval_start", "validation"))
    assert ledger.receive_mark(3, shorter, [second]) is not None


def test_muting_leaves_train_spans_alone() -> None:
    own = Tally(EPOCH, started=5)
    ledger = opened(own)
    ledger.mute([own])
    assert ledger.receive_mark(1, closing(4), [own]) is not None


def test_equal_marks_of_different_ranks_at_different_times_agree() -> None:
    assert compare(closing(4, time=1.0), dataclasses.replace(closing(4, time=2.0), rank=7)) is None


def test_a_pass_that_was_stopped_where_another_was_exhausted_agrees() -> None:
    assert compare(closing(4, "stopped"), closing(4)) is None


@pytest.mark.parametrize("other", [Mark("train_end", "train epoch 1", at=4), Mark("eval_start", EPOCH, at=4)])
def test_another_mark_in_the_same_place_is_uneven_whatever_its_counts(other: Mark) -> None:
    assert compare(closing(4), other) == Finding("UnevenBatches", closing(4), 4, other)


def test_unequal_batches_come_before_unequal_steps() -> None:
    own = closing(5, steps=5, chain=8)
    assert compare(closing(4, steps=4, chain=7), own) == Finding("UnevenBatches", closing(4, steps=4, chain=7), 5, own)


@pytest.mark.parametrize("own", [closing(4, steps=1, chain=7), closing(4, steps=2, chain=8)])
def test_other_steps_or_steps_at_other_batches_are_a_step_mismatch(own: Mark) -> None:
    standing = closing(4, steps=2, chain=7)
    assert compare(standing, own) == Finding("StepMismatch", standing, own.steps, own)


def test_several_loaders_of_one_evaluation_are_compared_one_by_one() -> None:
    standing = Mark("eval_end", "validation", at=5, counts=(3, 2))
    own = Mark("eval_end", "validation", at=5, counts=(2, 3))
    assert compare(standing, standing) is None
    assert compare(standing, own) == Finding("UnevenBatches", standing, 5, own, evaluation=True)


def test_a_mark_survives_the_wire() -> None:
    mark = Mark("eval_end", "validation", 5, "stopped", 7, 2**48 - 1, (3, 2), 15, 1700000000.25)
    assert Mark.from_json(json.loads(json.dumps(mark.to_json()))) == mark


# The protocol, on any interleaving ----------------------------------------------------------------------------------


class Store:
    """What all ranks share: the first value of a key stands, and goes through JSON as it does on the wire."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def claim(self, key: str, record: dict[str, Any]) -> dict[str, Any]:
        return json.loads(self.values.setdefault(key, json.dumps(record)))


@dataclass(frozen=True)
class Share:
    """What one rank finds and does in one epoch: batches trained on, evaluations, and the batches after a step."""

    batches: int
    steps: frozenset[int]
    evaluations: dict[int, tuple[int, ...]]
    """Batches of each loader of the evaluation after that train batch; after batch 0 comes the one between epochs."""


@dataclass(frozen=True)
class Job:
    """One job: for every rank, its share of every epoch."""

    shares: list[list[Share]]
    uneven_eval: Literal["raise", "warn", "allow"] = "raise"
    look_ahead: bool = False
    spare: int = 0
    """Batches that the loaders hold beyond a limit at which the framework stops; 0: they are exhausted."""
    eval_ranks: tuple[int, ...] | None = None
    joined: frozenset[int] = frozenset()
    """Epochs inside `Join`, in which ranks may differ."""

    def run(self, guard: Guard, rank: int) -> Iterator[None]:
        """A plain training loop, in the guard's words; between any two of its calls other ranks may act."""
        yield guard._pass("fit_start", "the fit")
        for epoch, share in enumerate(self.shares[rank]):
            guard.compare_spans(epoch not in self.joined)
            yield guard.train_start(epoch)
            for batch in range(1, share.batches + 1):
                yield self._batch(guard, batch, share.batches, self.spare)
                if batch in share.steps:
                    yield guard.step()
                yield from self._evaluate(guard, rank, share, batch)
            yield guard.train_end("stopped" if self.spare else "exhausted")
            guard.compare_spans(True)
            yield from self._evaluate(guard, rank, share, 0)
        yield guard.fit_end()

    def _batch(self, guard: Guard, batch: int, batches: int, spare: int = 0) -> None:
        if self.look_ahead:
            guard.batch(min(batch + 1, batches + spare), last=batch == batches + spare)
        else:
            guard.batch()

    def _evaluate(self, guard: Guard, rank: int, share: Share, batch: int) -> Iterator[None]:
        if batch not in share.evaluations or not (self.eval_ranks is None or rank in self.eval_ranks):
            return
        yield guard.eval_start("validation")
        loaders = share.evaluations[batch]
        for loader, batches in enumerate(loaders):
            guard.eval_loader(loader)
            for each in range(1, batches + 1):
                # Only a single loader's own end is the evaluation's.
                yield self._batch(guard, each, batches) if len(loaders) == 1 else guard.batch()
        yield guard.eval_end("exhausted")


class Rank:
    """One simulated rank: a real guard and a real speaker, moved by hand instead of by three threads."""

    def __init__(self, job: Job, rank: int, store: Store) -> None:
        chosen = Settings(
            on_divergence="warn", uneven_eval=job.uneven_eval, eval_ranks=job.eval_ranks, tick_batches=3
        )  # warn, because raising waits for the printed table
        self.guard = Guard(chosen, rank=rank, world_size=len(job.shares))
        self.state = self.guard._state
        self.guard._watch = watch = Watch(self.state, 0)  # never started: no thread, no connection
        self._speaker = watch.speaker
        self._speaker.busy_since = 1.0  # the store is slow: marks do not wait for it
        self._script = job.run(self.guard, rank)
        self._store = cast(Any, store)

    def train(self) -> bool:
        """Does the next thing in the training loop, unless an exception would have left it."""
        if self.state.proposed is not None or self.state.end is not None:
            return False
        return next(self._script, "over") is None

    def speak(self) -> bool:
        """Does the oldest thing that the training thread has handed to the speaker."""
        try:
            work = self._speaker._jobs.get_nowait()
        except queue.Empty:
            return False
        assert work is not None
        work(self._store)
        return True

    def hear(self) -> bool:
        """Reads the next entry of the log."""
        value = self._store.values.get(f"log/{self.state.ledger.read}")
        if value is None or self.state.end is not None:
            return False
        self.state.receive(self.state.ledger.read, json.loads(value))
        return True


def play(job: Job, seed: int) -> list[Rank]:
    """Runs the job to its end, each rank and each of its threads at a pace of its own."""
    store, chance = Store(), random.Random(seed)
    ranks = [Rank(job, rank, store) for rank in range(len(job.shares))]
    actors = [actor for rank in ranks for actor in (rank.train, rank.speak, rank.hear)]
    pace = [chance.choice((1, 30, 1000)) for _ in actors]
    moving = True
    while moving:
        for actor in chance.choices(actors, pace, k=len(actors) * chance.choice((1, 20))):
            actor()
        moving = sum(actor() for actor in actors) > 0  # each of them has its turn
    return ranks


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Jobs whose ranks agree, where they have to."""
    accumulation = draw(st.integers(1, 3))
    evaluate_after = draw(st.sets(st.integers(0, 6)))
    loaders = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
    epochs: list[Share] = []
    for batches in draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)):
        steps = frozenset(batch for batch in range(1, batches + 1) if batch % accumulation == 0 or batch == batches)
        epochs.append(Share(batches, steps, {batch: loaders for batch in evaluate_after if batch <= batches}))
    return Job(
        [list(epochs) for _ in range(draw(st.integers(2, 16)))],
        look_ahead=draw(st.booleans()),
        spare=draw(st.sampled_from([0, 1, 3])),
    )


@st.composite
def legitimately_different(draw: st.DrawFn) -> Job:
    """Jobs whose ranks differ only where they may: in joined epochs, and in who evaluates."""
    job = draw(jobs())
    world_size, epochs = len(job.shares), len(job.shares[0])
    joined = draw(st.frozensets(st.integers(0, epochs - 1)))
    for rank, epoch in itertools.product(range(world_size), sorted(joined)):
        share = job.shares[rank][epoch]
        mine = Share(share.batches + rank % 3, share.steps, share.evaluations)
        job.shares[rank][epoch] = mine
    eval_ranks = draw(st.none() | st.lists(st.integers(0, world_size - 1), min_size=1, unique=True).map(tuple))
    return dataclasses.replace(job, joined=joined, eval_ranks=eval_ranks)


@dataclass(frozen=True)
class Fault:
    """One rank of a job that differs from all others."""

    job: Job
    rank: int
    kind: str = field(default="UnevenBatches")


@st.composite
def faults(draw: st.DrawFn, what: str) -> Fault:
    """Jobs in one epoch of which one rank does something else than the others."""
    job = draw(jobs().filter(lambda job: what not in ("eval", "skip") or bool(job.shares[0][0].evaluations)))
    rank = draw(st.integers(0, len(job.shares) - 1))
    able = [epoch for epoch, share in enumerate(job.shares[0]) if _able(what, share)]
    if not able:
        able = [0]
        job.shares[:] = [[Share(3, frozenset({2, 3}), {}), *shares[1:]] for shares in job.shares]
    epoch = draw(st.sampled_from(able))
    job.shares[rank][epoch] = _faulty(draw, what, job.shares[rank][epoch])
    return Fault(job, rank, "StepMismatch" if what.endswith("step") else "UnevenBatches")


def _able(what: str, share: Share) -> bool:
    return bool(share.evaluations) if what in ("eval", "skip") else what != "shifted step" or 1 < len(share.steps) < 6


def _faulty(draw: st.DrawFn, what: str, share: Share) -> Share:
    if what == "train":
        return dataclasses.replace(share, batches=share.batches + draw(st.sampled_from([1, -1])))
    if what == "missed step":
        return dataclasses.replace(share, steps=share.steps - {draw(st.sampled_from(sorted(share.steps)))})
    if what == "shifted step":
        idle = sorted(set(range(1, share.batches + 1)) - share.steps)
        taken = draw(st.sampled_from(sorted(share.steps)))
        return dataclasses.replace(share, steps=share.steps - {taken} | set(idle[:1]))
    after = draw(st.sampled_from(sorted(share.evaluations)))
    others = {batch: loaders for batch, loaders in share.evaluations.items() if batch != after}
    if what == "skip":
        return dataclasses.replace(share, evaluations=others)
    first, *rest = share.evaluations[after]
    loaders = (first + draw(st.sampled_from([1, -1])), *rest)
    return dataclasses.replace(share, evaluations={**others, after: loaders})


seeds = st.integers(0, 2**32 - 1)
many = settings(deadline=None, max_examples=60)


@many
@given(jobs(), seeds)
def test_ranks_that_agree_never_get_a_verdict(job: Job, seed: int) -> None:
    for rank in play(job, seed):
        assert rank.guard.verdict is rank.state.proposed is None
        assert rank.guard.notices == ()
        assert rank.state.finished


@many
@given(legitimately_different(), seeds)
def test_ranks_that_differ_only_where_they_may_never_get_a_verdict(job: Job, seed: int) -> None:
    assert [rank.state.proposed for rank in play(job, seed)] == [None] * len(job.shares)


@pytest.mark.parametrize("what", ["train", "eval", "skip", "missed step", "shifted step"])
def test_one_rank_that_differs_is_always_found(what: str) -> None:
    @many
    @given(faults(what), seeds)
    def always(fault: Fault, seed: int) -> None:
        ranks = play(fault.job, seed)
        verdict = ranks[0].guard.verdict
        assert verdict is not None
        assert [rank.guard.verdict for rank in ranks] == [verdict] * len(ranks)
        assert verdict.kind == fault.kind
        assert len(set(verdict.ranks)) == 2
        assert fault.rank in verdict.ranks

    always()


@pytest.mark.parametrize(("policy", "notices"), [("warn", 1), ("allow", 0)])
def test_an_uneven_evaluation_that_is_no_error_is_noted_once_everywhere_and_ends_nothing(
    policy: Literal["warn", "allow"], notices: int
) -> None:
    @many
    @given(faults("eval"), seeds)
    def never(fault: Fault, seed: int) -> None:
        ranks = play(dataclasses.replace(fault.job, uneven_eval=policy), seed)
        assert [rank.state.proposed for rank in ranks] == [None] * len(ranks)
        assert [len(rank.guard.notices) for rank in ranks] == [notices] * len(ranks)
        assert all(fault.rank in notice.ranks for rank in ranks for notice in rank.guard.notices)

    never()
