"""What the iterator of one pass does with the batches, and with iterators of every kind."""

import queue
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from countoff._adapter.passes import Passes
from countoff.core import FitPlan, Guard
from countoff.core.settings import Settings


class Batch:
    pass


class OwnIterator:
    """A loader that is its own iterator: each `__iter__` begins again."""

    def __iter__(self) -> "OwnIterator":
        self.left = 3
        return self

    def __next__(self) -> Batch:
        if not self.left:
            raise StopIteration
        self.left -= 1
        return Batch()


class OnlyNext:
    """An iterator without `__iter__`, which a `for` over its loader does not need."""

    def __init__(self) -> None:
        self.left = 3

    def __next__(self) -> Batch:
        return OwnIterator.__next__(self)  # pyright: ignore[reportArgumentType]


def new_passes(**settings: Any) -> Passes:
    guard = Guard(Settings(**settings), rank=0, world_size=1)
    guard.fit_start(FitPlan())
    return Passes(guard, epoch=0, exhausted=lambda: None, diverged=lambda: None)


@pytest.fixture
def passes() -> Passes:
    return new_passes()


@pytest.mark.parametrize("batches", [OwnIterator, OnlyNext])
def test_any_iterator_is_read_by_its_next_alone(passes: Passes, batches: Any) -> None:
    """What a loader returns is asked for batches, and never for another iterator."""
    loader = batches()
    if batches is OwnIterator:
        iter(loader)
        next(loader)
    assert len(list(passes.follow(loader, None))) == (2 if batches is OwnIterator else 3)
    assert passes.guard.train_batches == (2 if batches is OwnIterator else 3)


def test_a_batch_lives_no_longer_than_in_the_loop(passes: Passes) -> None:
    """Once the loop has let go of a batch, the next one is fetched without it in memory."""
    seen: list[weakref.ref[Batch]] = []
    alive: list[bool] = []

    def batches() -> Iterator[Batch]:
        for _ in range(3):
            alive.append(any(each() is not None for each in seen))
            yield Batch()

    for batch in passes.follow(batches(), None):
        seen.append(weakref.ref(batch))
        del batch
    assert alive == [False, False, False]


def test_a_pass_counts_its_own_batches(passes: Passes) -> None:
    """A pass that resumes after an evaluation was abandoned goes on with its own count, not the evaluation's."""
    train, evaluation = passes.follow(iter(range(5)), None), passes.follow(iter(range(5)), "validation")
    taken = [next(each) for each in (train, evaluation, evaluation, train)]
    assert taken == [0, 0, 1, 1]
    assert passes.guard.train_batches == 2
    assert passes.guard.batches == 2
    assert len(list(train)) == 3
    assert passes.guard.train_batches == 5
    assert next(evaluation) == 2  # closed by now: handed on, and not counted
    assert passes.guard.open_span is None


class Sized(OnlyNext):
    """An iterator with a length and a state, and one batch that fails at first."""

    fails = True

    def __len__(self) -> int:
        return self.left

    def get_state(self) -> int:
        return self.left

    def __next__(self) -> Batch:
        if self.left == 2 and self.fails:
            self.fails = False
            raise ValueError("torn")
        return super().__next__()


def test_the_loop_asks_its_iterator_what_it_would_ask_the_loaders_own(passes: Passes) -> None:
    batches: Any = passes.follow(Sized(), None)  # pyright: ignore[reportArgumentType]
    assert (len(batches), batches.get_state(), isinstance(batches, Sized)) == (3, 3, True)
    next(batches)
    assert (len(batches), batches.get_state()) == (2, 2)
    with pytest.raises(AttributeError, match="seek"):
        batches.seek(1)
    with pytest.raises(TypeError):
        len(passes.follow(OnlyNext(), "validation"))  # pyright: ignore[reportArgumentType]


def test_an_exception_that_the_loop_catches_is_no_end(passes: Passes) -> None:
    """The loop asks for the next batch, and gets it; the exception counts as no batch."""
    batches: Any = passes.follow(Sized(), None)  # pyright: ignore[reportArgumentType]
    next(batches)
    with pytest.raises(ValueError, match="torn"):
        next(batches)
    assert passes.guard.open_span == "train epoch 0"
    assert len(list(batches)) == 2
    assert passes.guard.train_batches == 3
    assert passes.guard.open_span is None


def test_an_exception_out_of_the_loader_leaves_the_epoch_open(passes: Passes) -> None:
    """What becomes of it is not known yet: the message about it says in which batch this rank is."""
    with pytest.raises(ValueError, match="torn"):
        for _ in passes.follow(Sized(), None):  # pyright: ignore[reportArgumentType]
            pass
    passes.settle()
    assert passes.guard.open_span == "train epoch 0"


@pytest.mark.parametrize(
    ("name", "epoch", "same"), [(None, None, True), (None, 0, True), (None, 1, False), ("validation", None, False)]
)
def test_the_next_pass_goes_on_with_the_epoch_whose_loader_has_failed(
    passes: Passes, name: str | None, epoch: int | None, same: bool
) -> None:
    """The program has caught the exception and begins its loader again. Another epoch is another one."""
    with pytest.raises(ValueError, match="torn"):
        list(passes.follow(Sized(), None))  # pyright: ignore[reportArgumentType]
    following = passes.follow(iter(range(3)), name, epoch=epoch)
    assert next(following) == 0
    assert passes.guard.open_span == ("train epoch 0" if same else "validation" if name else "train epoch 1")
    assert passes.guard.batches == (2 if same else 1)
    assert list(following) == [1, 2]
    if name is not None:
        passes.close_stale(everything=True)
    assert (passes.guard.open_span, passes.epoch) == (None, 1 if same or name else 2)


def test_a_pass_that_is_over_hands_on_what_the_loader_still_gives(passes: Passes) -> None:
    source = iter([1, 2])
    batches = passes.follow(source, None)
    assert (list(batches), next(batches, None), passes.guard.train_batches) == ([1, 2], None, 2)


def test_a_dropped_pass_is_closed_by_the_next_call(passes: Passes) -> None:
    """The garbage collector may drop it at any moment, so that only queues it."""
    for _ in passes.follow(iter(range(3)), None):
        break
    assert (passes.guard.open_span, passes.unsettled) == ("train epoch 0", True)
    passes.settle()
    assert (passes.guard.open_span, passes.unsettled) == (None, False)
    assert list(passes.follow(iter(range(2)), None)) == [0, 1]
    assert passes.epoch == 2


def test_a_dropped_pass_is_closed_before_the_next_one_begins(passes: Passes) -> None:
    told: list[tuple[str, int]] = []
    passes.abandoned = lambda: told.append(("left", passes.epoch))
    passes.began = lambda epoch: told.append(("began", epoch))
    for _ in range(2):
        next(passes.follow(iter(range(3)), None))
    passes.settle()
    assert told == [("began", 0), ("left", 1), ("began", 1), ("left", 2)]


def test_a_pass_may_be_dropped_inside_of_another_ones_batch(passes: Passes) -> None:
    """As where the garbage collector runs while a loader makes its batch."""
    kept = [passes.follow(iter(range(5)), "validation")]

    def batches() -> Iterator[int]:
        yield 0
        kept.clear()
        yield 1

    train = passes.follow(batches(), None)
    next(train)
    next(kept[0])
    assert list(train) == [1]
    assert (passes.guard.train_batches, passes.guard.open_span, passes.epoch) == (2, None, 1)


def test_a_pass_may_be_dropped_on_another_thread(passes: Passes) -> None:
    kept = [passes.follow(iter(range(5)), None)]
    next(kept[0])
    thread = threading.Thread(target=kept.clear)
    thread.start()
    thread.join(60)
    assert passes.guard.open_span == "train epoch 0"
    passes.settle()
    assert passes.guard.open_span is None


def test_a_pass_that_was_asked_for_no_batch_is_none(passes: Passes) -> None:
    for _ in range(2):
        passes.follow(iter(range(3)), None)
    assert (passes.guard.open_span, passes.epoch, passes.unsettled) == (None, 0, False)


def test_a_pass_that_has_ended_is_not_dropped(passes: Passes) -> None:
    list(passes.follow(iter(range(3)), None))
    assert not passes.unsettled


@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_pass_that_is_let_go_of_frees_the_loaders_own_iterator(passes: Passes, how: str) -> None:
    """Its workers end then, and a generator runs its last lines where it is closed."""
    ran: list[str] = []

    def batches() -> Iterator[int]:
        try:
            yield from range(3)
        finally:
            ran.append("closed")

    own = batches()
    gone = weakref.ref(own)
    taken: Any = passes.follow(own, None)
    next(taken)
    if how == "close":
        taken.close()
        assert ran == ["closed"]
    del own, taken
    passes.settle()
    assert (gone(), ran) == (None, ["closed"])


class Queued:
    """An iterator that threads may share."""

    def __init__(self, batches: int) -> None:
        self.queue: queue.SimpleQueue[int] = queue.SimpleQueue()
        for batch in range(batches):
            self.queue.put(batch)

    def __next__(self) -> int:
        try:
            return self.queue.get_nowait()
        except queue.Empty:
            raise StopIteration from None


def test_threads_may_share_an_iterator_that_they_may_share_without_countoff(passes: Passes) -> None:
    """Every batch is given out and counted once, and the pass ends once."""
    source = Queued(400)
    batches: Any = passes.follow(source, None)  # pyright: ignore[reportArgumentType]
    got: list[int] = []
    both = threading.Barrier(2)

    def take() -> None:
        both.wait(60)
        while (batch := next(batches, None)) is not None:
            got.append(batch)

    threads = [threading.Thread(target=take) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(got) == list(range(400))
    assert passes.guard.train_batches == 400
    assert passes.guard.open_span is None


def test_a_deleted_part_of_a_batch_is_gone(passes: Passes) -> None:
    """The loop lets go of a tensor in its batch: nothing else holds it."""
    for first, second in passes.follow(((Batch(), each) for each in range(2)), None):
        there = weakref.ref(first)
        assert passes.batch == (first, second)
        del first
        assert there() is None
        assert passes.batch is None


def test_an_evaluation_beside_the_training_is_no_span_of_it(passes: Passes) -> None:
    """On another thread than the train epochs, it neither closes them nor counts in them."""
    train = passes.follow(iter(range(3)), None)
    next(train)
    seen: list[int] = []
    evaluation = threading.Thread(target=lambda: seen.extend(passes.follow(iter(range(5)), "validation")))
    evaluation.start()
    evaluation.join(60)
    assert (seen, passes.guard.open_span, passes.guard.batches) == ([0, 1, 2, 3, 4], "train epoch 0", 1)
    assert list(train) == [1, 2]
    assert list(passes.follow(iter(range(2)), "validation")) == [0, 1]  # on the thread of the training: a span
    assert passes.guard.batches == 2


class Ahead:
    """Knows its last batch, as a loader of Accelerate's that fetches one ahead."""

    end_of_dataloader = True


@pytest.mark.parametrize("at_end", [True, False])
def test_a_loop_that_stops_at_the_last_batch_has_exhausted_its_loader(passes: Passes, at_end: bool) -> None:
    told: list[str] = []
    passes.abandoned = lambda: told.append("abandoned")
    ahead = Ahead()
    ahead.end_of_dataloader = at_end
    for _ in passes.follow(iter(range(2)), None, ahead=ahead):
        break
    passes.settle()
    assert told == ([] if at_end else ["abandoned"])


@pytest.mark.parametrize(("taken", "position", "told"), [(3, 0, [3]), (2, 0, [None]), (3, 2, list[Any]())])
def test_an_evaluation_tells_what_it_has_read_of_the_whole_loader(
    passes: Passes, taken: int, position: int, told: list[Any]
) -> None:
    """Where the loop has left it, or a part was read before, nothing is known of the whole."""
    ended: list[Any] = []
    passes.evaluated = lambda name, loader, batches: ended.append((name, loader, batches))
    batches = passes.follow(iter(range(3)), "validation", loader="loader", position=position)
    for _ in range(taken):
        next(batches)
    if taken == 3:
        assert list(batches) == []
    del batches
    passes.settle()
    assert ended == [("validation", "loader", batches) for batches in told]


def test_the_last_batch_of_a_pass_is_not_that_of_an_evaluation_inside_of_it(
    passes: Passes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop may keep the iterator of its evaluation, and take some batches of it after each train batch."""
    told: list[str | None] = []
    monkeypatch.setattr(passes.guard, "last_batch", lambda: told.append(passes.guard.open_span))
    train = passes.follow(iter(range(2)), None, ahead=Ahead())
    next(train)
    evaluation = passes.follow(iter(range(5)), "validation")
    next(evaluation)
    next(train)
    assert told == ["train epoch 0"]
