"""What the generator of one pass does with the batches, and with iterators of every kind."""

import queue
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from countoff._adapter.loader_passes import LoaderPasses
from countoff._adapter.torch_facts import have_no_gradients
from countoff.core import FitPlan, Guard
from countoff.core.protocol.evidence import SHARED_PASS
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


def new_passes(**settings: Any) -> LoaderPasses:
    guard = Guard(Settings(**settings), rank=0, world_size=1)
    guard.fit_start(FitPlan())
    return LoaderPasses(guard, epoch=0, exhausted=lambda: None, diverged=lambda: None)


@pytest.fixture
def passes() -> LoaderPasses:
    return new_passes()


@pytest.mark.parametrize("batches", [OwnIterator, OnlyNext])
def test_any_iterator_is_read_by_its_next_alone(passes: LoaderPasses, batches: Any) -> None:
    """What a loader returns is asked for batches, and never for another iterator."""
    loader = batches()
    if batches is OwnIterator:
        iter(loader)
        next(loader)
    assert len(list(passes.follow(loader, None))) == (2 if batches is OwnIterator else 3)
    assert passes.guard.train_batches == (2 if batches is OwnIterator else 3)


def test_a_batch_lives_no_longer_than_in_the_loop(passes: LoaderPasses) -> None:
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


def test_a_pass_counts_its_own_batches(passes: LoaderPasses) -> None:
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


def test_the_loop_asks_its_iterator_what_it_would_ask_the_loaders_own(passes: LoaderPasses) -> None:
    batches: Any = passes.follow(Sized(), None)  # pyright: ignore[reportArgumentType]
    assert (len(batches), batches.get_state(), isinstance(batches, Sized)) == (3, 3, True)
    next(batches)
    assert (len(batches), batches.get_state()) == (2, 2)
    with pytest.raises(AttributeError, match="seek"):
        batches.seek(1)
    with pytest.raises(TypeError):
        len(passes.follow(OnlyNext(), "validation"))  # pyright: ignore[reportArgumentType]


def test_an_exception_that_the_loop_catches_is_no_end(passes: LoaderPasses) -> None:
    """The loop asks for the next batch, and gets it; the exception counts as no batch."""
    batches: Any = passes.follow(Sized(), None)  # pyright: ignore[reportArgumentType]
    next(batches)
    with pytest.raises(ValueError, match="torn"):
        next(batches)
    assert passes.guard.open_span == "train epoch 0"
    assert len(list(batches)) == 2
    assert passes.guard.train_batches == 3
    assert passes.guard.open_span is None


def test_an_exception_out_of_the_loader_leaves_the_epoch_open(passes: LoaderPasses) -> None:
    """What becomes of it is not known yet: the message about it says in which batch this rank is."""
    with pytest.raises(ValueError, match="torn"):
        for _ in passes.follow(Sized(), None):  # pyright: ignore[reportArgumentType]
            pass
    assert passes.guard.open_span == "train epoch 0"
    assert len(list(passes.follow(OnlyNext(), None))) == 3  # pyright: ignore[reportArgumentType]
    assert passes.guard.open_span is None


def test_a_pass_that_is_over_hands_on_what_the_loader_still_gives(passes: LoaderPasses) -> None:
    source = iter([1, 2])
    batches = passes.follow(source, None)
    assert (list(batches), next(batches, None), passes.guard.train_batches) == ([1, 2], None, 2)


def look_at(passes: LoaderPasses, batches: int) -> None:
    taken = passes.follow(iter(range(12)), None)
    for _ in range(batches):
        next(taken)


def test_a_look_before_anything_is_trained_is_no_epoch(passes: LoaderPasses) -> None:
    passes.is_untrained = lambda: True
    look_at(passes, 1)
    kept = passes.follow(iter(range(12)), None)
    next(kept)
    assert passes.position == (0, 1)
    assert len(list(passes.follow(iter(range(12)), None))) == 12
    assert (passes.guard.train_batches, passes.epoch, passes.guard.open_span) == (12, 1, None)
    assert next(kept) == 1  # handed on, and not counted
    assert passes.guard.train_batches == 12


def test_a_look_is_no_place_of_a_checkpoint_and_holds_no_batch(passes: LoaderPasses) -> None:
    passes.is_untrained = lambda: True
    look_at(passes, 1)
    assert (passes.position, passes.batch) == ((0, 0), None)


def test_the_data_of_an_epoch_is_that_of_its_training_and_not_of_a_look() -> None:
    def batches(first: int) -> Iterator[torch.Tensor]:
        return iter([torch.arange(number, number + 9) for number in (first, first + 10)])

    prints: list[tuple[str, ...]] = []
    for looks in (0, 1):
        passes = new_passes()
        passes.is_untrained = lambda: True
        for _ in range(looks):
            next(passes.follow(batches(40), None))
        for _ in passes.follow(batches(50), None):
            pass
        prints.append(passes.guard.data.prints)
    assert prints[0] == prints[1] != ()


@pytest.mark.parametrize("what", ["a step", "two batches", "another place", "a gradient"])
def test_a_pass_that_trained_or_that_others_may_know_of_is_an_epoch(what: str) -> None:
    passes = new_passes()
    passes.is_untrained = lambda: what != "a gradient"
    if what == "a step":
        for _ in passes.follow(iter(range(3)), None):
            passes.guard.step()
            break
    else:
        look_at(passes, 2 if what == "two batches" else 1)
    list(passes.follow(iter(range(3)), None, position=2 * (what == "another place")))
    assert passes.epoch == 2


def test_a_gradient_shows_that_something_was_trained_on() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    assert have_no_gradients([optimizer])
    weight.sum().backward()
    assert not have_no_gradients([optimizer])
    assert not have_no_gradients([])


@pytest.mark.parametrize("next_one", ["an evaluation", "the end of the fit"])
def test_a_look_that_no_training_follows_is_a_pass_that_was_left(passes: LoaderPasses, next_one: str) -> None:
    passes.is_untrained = lambda: True
    look_at(passes, 1)
    assert passes.guard.open_span == "train epoch 0"
    if next_one == "an evaluation":
        list(passes.follow(iter(range(3)), "validation"))
    else:
        passes.close_stale(everything=True)
    assert passes.guard.open_span is None


def test_the_iterator_of_a_look_is_freed_with_it(passes: LoaderPasses) -> None:
    """Its workers end then."""
    passes.is_untrained = lambda: True
    own = OnlyNext()
    gone = weakref.ref(own)
    taken = passes.follow(own, None)  # pyright: ignore[reportArgumentType]
    next(taken)
    del own, taken
    assert gone() is None


class Queued:
    """An iterator that threads may share."""

    def __init__(self, batches: int) -> None:
        self.queue: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.both = threading.Barrier(2)
        self.of_thread = threading.local()
        for batch in range(batches):
            self.queue.put(batch)

    def __next__(self) -> int:
        if not hasattr(self.of_thread, "came"):
            self.of_thread.came = True
            self.both.wait(60)  # so that two threads are in it at the same time
        try:
            return self.queue.get_nowait()
        except queue.Empty:
            raise StopIteration from None


def test_threads_may_share_an_iterator_that_they_may_share_without_countoff(passes: LoaderPasses) -> None:
    """Every batch is given out and counted once, and the pass ends once; what is found there is a guess."""
    source = Queued(400)
    batches: Any = passes.follow(source, None)  # pyright: ignore[reportArgumentType]
    got: list[int] = []

    def take() -> None:
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
    assert passes.guard.span.guess == SHARED_PASS


def test_a_deleted_part_of_a_batch_is_gone(passes: LoaderPasses) -> None:
    """The loop lets go of a tensor in its batch: nothing else holds it."""
    for first, second in passes.follow(((Batch(), each) for each in range(2)), None):
        there = weakref.ref(first)
        assert passes.batch == (first, second)
        del first
        assert there() is None
        assert passes.batch is None


def test_an_evaluation_beside_the_training_is_no_span_of_it(passes: LoaderPasses) -> None:
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


def test_the_last_batch_of_a_pass_is_not_that_of_an_evaluation_inside_of_it(
    passes: LoaderPasses, monkeypatch: pytest.MonkeyPatch
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
