"""What a person's loop does with `countoff.train` and `countoff.eval`, on one rank."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import pickle
import types
import weakref
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from countoff._adapter.counted_loop import active_loops
from countoff.core import SettingsError
from countoff.torch import Countoff

DATA: Any = list(range(6))


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    for each in active_loops():
        each.end()


def loader() -> DataLoader[Any]:
    """Three batches."""
    return DataLoader(DATA, batch_size=2)


def take(passed: Iterator[Any], batches: int) -> None:
    """Takes some batches, as a loop with a break does."""
    for _ in itertools.islice(passed, batches):
        pass


@pytest.mark.parametrize(
    "iterate",
    [
        list,
        lambda passed: [batch for _, batch in enumerate(passed)],
        lambda passed: [batch for batch, _ in zip(passed, itertools.count(), strict=False)],
        lambda passed: [batch for _, batch in zip(range(9), passed, strict=False)],
        lambda passed: list(itertools.islice(passed, 9)),
        lambda passed: list(map(torch.Tensor.clone, iter(passed))),
        lambda passed: list(iter(lambda: next(passed, None), None)),
        lambda passed: [*iter(iter(passed))],
    ],
    ids=["for", "enumerate", "zip", "zip behind", "islice", "map", "next", "iter twice"],
)
def test_a_pass_under_any_loop_is_one_epoch(iterate: Any) -> None:
    countoff = Countoff()
    for epoch in range(2):
        batches = iterate(countoff.train(loader()))
        assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3], [4, 5]]
        assert (countoff.guard.train_batches, countoff.guard.open_span) == (3, None)
        assert countoff.state_dict()["epoch"] == epoch + 1  # where the run goes on


@pytest.mark.parametrize(
    "source",
    [
        lambda: range(3),
        lambda: iter([7, 8, 9]),
        lambda: (each for each in "abc"),
        lambda: iter(iter([1, 2, 3, 0]).__next__, 0),
        lambda: {"a": 1, "b": 2, "c": 3},
        lambda: itertools.islice(itertools.count(), 3),
    ],
    ids=["range", "iterator", "generator", "function", "dict", "islice"],
)
def test_anything_that_can_be_iterated_is_counted(source: Any) -> None:
    countoff = Countoff()
    assert list(countoff.train(source())) == list(source())
    assert countoff.guard.train_batches == 3
    take(countoff.train(range(1)), 1)
    counts = [countoff.guard.batches for _ in countoff.eval(source())]
    assert counts == [1, 2, 3]


def test_what_cannot_be_iterated_is_refused_as_by_the_loop_itself() -> None:
    countoff, nothing = Countoff(), object()
    with pytest.raises(TypeError, match="'object' object is not iterable"):
        for _ in countoff.train(nothing):  # pyright: ignore[reportArgumentType, reportUnknownVariableType]
            pass
    assert active_loops() == []


def test_the_fit_begins_with_the_first_train_batch() -> None:
    """An evaluation before that is not counted, and a pass that is given out is none."""
    countoff = Countoff()
    assert len(list(countoff.eval(loader()))) == 3
    countoff.train(loader())
    iter(countoff.train(loader()))
    assert (active_loops(), countoff.guard.batches, countoff.state_dict()) == ([], 0, {})
    passed = countoff.train(loader())
    next(passed)
    assert (len(active_loops()), countoff.guard.open_span) == (1, "train epoch 0")
    assert [countoff.guard.batches for _ in countoff.eval(loader())] == [1, 2, 3]


def test_the_loaders_own_iterator_is_made_where_the_loop_asks_for_it() -> None:
    """As `for` does, and only once."""
    made: list[str] = []

    class Loader:
        def __iter__(self) -> Iterator[int]:
            made.append("iter")
            return iter(range(2))

    countoff = Countoff()
    passed = countoff.train(Loader())
    assert made == []
    iter(passed)
    assert made == ["iter"]
    assert list(passed) == [0, 1]
    assert made == ["iter"]


@pytest.mark.parametrize("how", ["a break", "a return", "the name", "another pass"])
def test_a_pass_that_the_loop_leaves_is_closed_at_the_next_call(how: str) -> None:
    countoff = Countoff()

    def until_the_second() -> Any:
        for number, batch in enumerate(countoff.train(loader())):
            if number == 1:
                return batch
        return None

    if how == "a break":
        for _ in countoff.train(loader()):
            break
    elif how == "a return":
        until_the_second()
    else:
        passed = countoff.train(loader())
        next(passed)
        if how == "the name":
            del passed
    following = countoff.train(loader())
    next(following)
    assert (countoff.guard.open_span, countoff.guard.train_batches) == ("train epoch 1", 1)


@pytest.mark.parametrize("call", ["progress", "state_dict", "uncounted", "a step", "an evaluation", "close"])
def test_each_call_closes_a_pass_that_was_left(call: str) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    countoff = Countoff(optimizer=optimizer)
    take(countoff.train(loader()), 1)
    assert countoff.guard.open_span == "train epoch 0"
    if call == "uncounted":
        with countoff.uncounted():
            pass
    elif call == "a step":
        optimizer.step()
    elif call == "an evaluation":
        list(countoff.eval(loader()))
    else:
        getattr(countoff, call)()
    assert countoff.guard.open_span is None


def test_a_pass_that_is_closed_by_hand_counts_nothing_more() -> None:
    """As an iterator that another library closes. What it has left is handed on."""
    countoff = Countoff()
    passed: Any = countoff.train(range(5))
    next(passed)
    passed.close()
    countoff.progress()
    assert countoff.guard.open_span is None
    assert list(passed) == [1, 2, 3, 4]
    assert countoff.guard.train_batches == 1


def test_an_evaluation_inside_of_an_epoch_is_its_own_span() -> None:
    countoff = Countoff()
    seen: list[tuple[str | None, int]] = []
    for number, _ in enumerate(countoff.train(loader())):
        if number == 1:
            for batch in countoff.eval(range(5), "held out"):
                seen.append((countoff.guard.open_span, countoff.guard.batches))
                if batch == 1:
                    break
        seen.append((countoff.guard.open_span, countoff.guard.train_batches))
    assert seen == [
        ("train epoch 0", 1),
        ("held out", 1),
        ("held out", 2),
        ("held out", 2),  # dropped, and closed with the next batch
        ("train epoch 0", 3),
    ]


def test_an_exception_of_the_loaders_is_the_programs() -> None:
    """The next pass goes on with the epoch, and nothing was told."""
    countoff = Countoff()

    class Torn:
        fails = True

        def __iter__(self) -> Iterator[int]:
            yield 0
            if self.fails:
                self.fails = False
                raise ValueError("torn")
            yield 1

    torn = Torn()
    with pytest.raises(ValueError, match="torn"):
        list(countoff.train(torn))
    assert (countoff.guard.open_span, countoff.guard.notices) == ("train epoch 0", ())
    assert list(countoff.train(torn)) == [0, 1]
    assert (countoff.guard.train_batches, countoff.guard.open_span) == (3, None)
    take(countoff.train(torn), 1)
    assert countoff.guard.open_span == "train epoch 1"


def test_an_exception_of_the_loops_own_is_a_pass_that_was_left() -> None:
    """It may be a fault of one batch, after which the program goes on with the next epoch."""
    countoff = Countoff()
    with contextlib.suppress(KeyError):
        for _ in countoff.train(loader()):
            raise KeyError
    next(countoff.train(loader()))
    assert countoff.guard.open_span == "train epoch 1"


def test_a_with_block_ends_the_fit() -> None:
    with Countoff() as countoff:
        list(countoff.train(loader()))
        assert len(active_loops()) == 1
    assert active_loops() == []
    with contextlib.suppress(KeyError), Countoff() as countoff:
        list(countoff.train(loader()))
        raise KeyError
    assert active_loops() == []


def test_epochs_have_the_numbers_that_the_loop_gives() -> None:
    countoff = Countoff()
    found: list[Any] = []
    for epoch in (3, None, 7, None):
        for _ in countoff.train(loader(), epoch=epoch):
            found.append(countoff.guard.open_span)
            break
    assert found == [f"train epoch {number}" for number in (3, 4, 7, 8)]


def test_a_pass_goes_on_at_a_position() -> None:
    """The batches before the checkpoint are counted, and not asked for."""
    countoff = Countoff()
    counts = [countoff.guard.train_batches for _ in countoff.train(loader(), epoch=1, position=4)]
    assert counts == [5, 6, 7]
    take(countoff.train(loader(), position=4), 2)
    record = countoff.state_dict()
    assert (record["epoch"], record["batches"]) == (2, 6)  # where the loop has left it
    passed = countoff.train(loader(), position=4)
    next(passed)
    record = countoff.state_dict()
    assert (record["epoch"], record["batches"]) == (3, 5)


def test_a_record_tells_the_next_fit_its_epoch() -> None:
    countoff = Countoff()
    for _ in range(2):
        list(countoff.train(loader()))
    record = countoff.state_dict()
    countoff.close()
    resumed = Countoff()
    resumed.load_state_dict(record)
    assert resumed.state_dict() == record
    next(resumed.train(loader()))
    assert resumed.guard.open_span == f"train epoch {record['epoch']}"
    given = Countoff()
    given.load_state_dict(record)
    next(given.train(loader(), epoch=5))
    assert given.guard.open_span == "train epoch 5"


def test_a_fit_may_begin_before_its_first_batch() -> None:
    countoff = Countoff()
    countoff.start()
    assert len(active_loops()) == 1
    guard = countoff.guard
    countoff.start()
    assert [countoff.guard.batches for _ in countoff.eval(loader())] == [1, 2, 3]
    list(countoff.train(loader()))
    assert countoff.guard is guard
    assert countoff.progress()["countoff/epoch_progress"] == 1


def test_a_closed_countoff_begins_another_fit() -> None:
    countoff = Countoff()
    countoff.close()
    list(countoff.train(loader()))
    guard = countoff.guard
    countoff.close()
    countoff.close()
    assert active_loops() == []
    assert countoff.state_dict()["epoch"] == 1
    list(countoff.train(loader()))
    assert countoff.guard is not guard
    assert (countoff.guard.train_batches, len(active_loops())) == (3, 1)


def test_a_pass_of_a_fit_that_has_ended_is_handed_on() -> None:
    countoff = Countoff()
    passed = countoff.train(loader())
    next(passed)
    countoff.close()
    assert len(list(passed)) == 2
    assert (countoff.guard.open_span, active_loops()) == (None, [])


def test_another_countoff_ends_the_fit_of_the_one_before() -> None:
    """Its program has gone on, and says no word of the end. Until its first batch, the other one goes on."""
    first, second = Countoff(), Countoff()
    list(first.train(loader()))
    list(second.eval(loader()))
    list(first.train(loader()))
    assert first.guard.train_batches == 3
    list(second.train(loader()))
    assert [each.guard for each in active_loops()] == [second.guard]


def test_what_is_the_users_is_held_weakly() -> None:
    """Also in the middle of the fit, and after it."""

    class Loader(DataLoader[Any]):
        pass

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    train, held_out = Loader(DATA, batch_size=2), Loader(DATA, batch_size=3)
    countoff = Countoff(optimizer=optimizer, scheduler=scheduler, model=model, epochs=2)
    for _ in countoff.train(train):
        list(countoff.eval(held_out))
        optimizer.step()
        scheduler.step()
    objects = [weakref.ref(each) for each in (model, optimizer, scheduler, train, held_out)]
    del model, optimizer, scheduler, train, held_out
    gc.collect()
    assert [each() for each in objects] == [None] * 5
    list(countoff.train(range(2)))
    assert countoff.progress()
    countoff.close()


def test_a_dropped_countoff_counts_on_until_another_one_begins() -> None:
    """The passes that it has given out are counted, and its fit ends with the program."""
    passed = Countoff().train(loader())
    gc.collect()
    assert len(list(passed)) == 3
    (loop,) = active_loops()
    assert loop.guard.train_batches == 3


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda held: pickle.loads(pickle.dumps(held))])
def test_what_holds_a_countoff_can_be_copied(copied: Any) -> None:
    """The copy hands its batches on and counts nothing, and the fit of the original goes on."""
    held = {"countoff": Countoff(), "model": torch.nn.Linear(1, 1)}
    counted = held["countoff"].train(range(3))
    next(counted)
    again = copied(held)["countoff"] if copied is not copy.copy else copied(held["countoff"])
    assert list(again.train(range(2))) == [0, 1]
    assert (again.guard.train_batches, again.progress(), again.state_dict()) == (0, {}, {})
    with again.uncounted():
        again.start()
    again.micro_batch()
    again.close()
    assert list(counted) == [1, 2]
    assert held["countoff"].guard.train_batches == 3


def test_a_batch_is_not_kept() -> None:
    class Batch:
        pass

    countoff, seen = Countoff(), list[Any]()
    for batch in countoff.train(Batch() for _ in range(3)):
        assert [each() for each in seen] == [None] * len(seen)
        seen.append(weakref.ref(batch))
        del batch
    assert len(seen) == 3


class Jealous:
    """A loader whose length, truth, attributes and comparison are not to be asked for."""

    __slots__ = ("__weakref__",)

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def _refuse(self, *arguments: Any) -> NoReturn:
        raise AssertionError(f"asked for {arguments}")

    __len__ = __bool__ = __getattr__ = __eq__ = __hash__ = _refuse  # pyright: ignore


class JealousStream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def __len__(self) -> int:
        raise AssertionError("asked for its length")


class JealousData(Dataset[int]):
    """Of which a sampler of the user's own knows enough."""

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        raise AssertionError("asked for its length")


class JealousSampler(Sampler[Any]):
    def __init__(self, gives: list[Any]) -> None:
        self.gives = gives

    def __iter__(self) -> Iterator[Any]:
        return iter(self.gives)

    def __len__(self) -> int:
        raise AssertionError("asked for its length")


class JealousLoader(DataLoader[Any]):
    """Torch itself sets and reads its attributes, but for its length."""

    def __len__(self) -> int:
        raise AssertionError("asked for its length")


@pytest.mark.parametrize(
    "make",
    [
        Jealous,
        lambda: DataLoader(JealousStream(), batch_size=1),
        lambda: JealousLoader(DATA, batch_size=2),
        lambda: DataLoader(JealousData(), sampler=JealousSampler([4, 0, 2])),
        lambda: DataLoader(JealousData(), batch_sampler=JealousSampler([[4, 0], [2], [1]])),
        lambda: DataLoader(JealousData(), batch_size=None, sampler=JealousSampler([4, 0, 2])),
    ],
    ids=["own", "a stream", "a DataLoader", "a sampler", "a batch sampler", "a sampler without batches"],
)
@pytest.mark.parametrize("uneven", ["raise", "stop"])
def test_nothing_of_the_users_is_called_that_the_loop_does_not_call(make: Any, uneven: Any) -> None:
    source = make()
    with Countoff(uneven_train=uneven, uneven_eval="stop" if uneven == "stop" else "raise") as countoff:
        for _ in range(2):
            for _ in countoff.train(source):
                countoff.state_dict()
            assert countoff.guard.train_batches == 3
            assert len([batch for batch in countoff.eval(source)]) == 3  # noqa: C416  # `list` asks for a length
            take(countoff.eval(source), 1)
            take(countoff.train(source), 1)
        countoff.progress()


def test_the_length_of_a_pass_is_that_of_its_loader() -> None:
    countoff = Countoff()
    passed: Any = countoff.train(loader())
    assert (len(passed), len(countoff.eval(range(7)))) == (3, 7)  # pyright: ignore[reportArgumentType]
    assert active_loops() == []
    next(passed)
    assert len(passed) == 3
    for source in (iter(range(3)), DataLoader(JealousStream(), batch_size=None)):
        with pytest.raises((TypeError, AssertionError)):
            len(countoff.train(source))  # pyright: ignore[reportArgumentType]


class Stream(IterableDataset[Any]):
    """As many samples per pass as it is told, and perhaps a length."""

    def __init__(self, *samples: int) -> None:
        self.samples = list(samples)

    def __iter__(self) -> Iterator[int]:
        yield from range(self.samples.pop(0) if len(self.samples) > 1 else self.samples[0])


class Claiming(DataLoader[Any]):
    """A loader that says how many batches it has, rightly or not."""

    claims = 16

    def __len__(self) -> int:
        return self.claims


def bar_totals(passes: list[Any]) -> list[int | None]:
    """What tqdm shows as the total of each pass, which it then iterates."""
    tqdm = pytest.importorskip("tqdm").tqdm
    found: list[int | None] = []
    for each in passes:
        with open("/dev/null", "w") as nowhere:
            bar = tqdm(each(), file=nowhere)
            found.append(bar.total)
            list(bar)
    return found


def test_a_bar_has_the_total_that_epochs_have_shown() -> None:
    """tqdm shows no total in the first epoch of a stream, and that of the epochs before in the next ones."""
    source: Any = DataLoader(Stream(12), batch_size=2)
    countoff = Countoff()
    assert bar_totals([lambda: countoff.train(source)] * 3) == [None, 6, 6]
    assert len(countoff.train(source, position=2)) == 4  # pyright: ignore[reportArgumentType]
    assert bar_totals([lambda: countoff.eval(source)] * 2) == [None, 6]
    other: Any = DataLoader(Stream(12), batch_size=2)
    assert bar_totals([lambda: countoff.train(other), lambda: countoff.eval(other)]) == [None, None]
    assert bar_totals([lambda: countoff.train(loader())] * 2) == [3, 3]
    off = Countoff(totals="off")
    assert bar_totals([lambda: off.train(source)] * 3) == [None] * 3


def test_a_bar_has_no_total_of_epochs_that_differ() -> None:
    source: Any = DataLoader(Stream(12, 8, 12), batch_size=2)
    countoff = Countoff()
    assert bar_totals([lambda: countoff.train(source)] * 4) == [None, 6, None, None]


def test_a_wrong_length_is_corrected_as_long_as_it_is_the_same() -> None:
    """A loader that has said a wrong number is believed again once it says another one."""
    source = Claiming(Stream(12), batch_size=2)
    countoff = Countoff()
    assert bar_totals([lambda: countoff.train(source)] * 2) == [16, 6]
    source.claims = 20
    assert bar_totals([lambda: countoff.train(source)] * 2) == [20, 6]
    assert bar_totals([lambda: countoff.eval(source)] * 2) == [20, 6]


def test_totals_are_told_in_words() -> None:
    """Nothing is known before the first batch; of a stream, its length once an epoch has ended."""
    countoff = Countoff(epochs=2, gradient_accumulation_steps=2)
    assert countoff.totals == "Nothing is known yet."
    list(countoff.train(loader()))
    assert countoff.totals.splitlines() == [
        "An epoch has 3 batches on each rank and 1 optimizer step; the run has 2 steps.",
        "A step has 4 samples over all ranks.",
        "In an epoch, 0 samples are read again, and 0 samples are not read.",
    ]
    stream: Any = DataLoader(Stream(12), batch_size=2)
    take(countoff.train(stream), 1)
    assert "How many batches an epoch has is not known yet: " in countoff.totals
    list(countoff.train(stream))
    assert countoff.totals.startswith("An epoch has 6 batches on each rank and 3 optimizer steps; the run has 6 steps.")


class GrowingList(list[int]):
    """A list that can be referred to weakly."""


def test_a_length_that_grows_rightly_stays() -> None:
    """A loader that has more batches in each epoch, and says so, is believed however often a program asks."""
    source, countoff = GrowingList([0] * 4), Countoff()
    found: list[int] = []
    evaluated: list[int] = []
    for _ in range(3):
        for begin, lengths in ((countoff.train, found), (countoff.eval, evaluated)):
            first, passed = begin(source), begin(source)
            lengths += [len(first), len(passed), len(passed)]  # pyright: ignore[reportArgumentType]
            for _ in passed:
                lengths[-1] = len(passed)  # pyright: ignore[reportArgumentType]
        source += [0, 0]
    assert found == evaluated == [4] * 3 + [6] * 3 + [8] * 3


def test_what_differs_from_epoch_to_epoch_is_said_to_differ() -> None:
    source: Any = DataLoader(Stream(12, 10), batch_size=2)
    countoff = Countoff()
    for _ in range(2):
        list(countoff.train(source))
    assert countoff.totals.endswith("How many batches an epoch has is not known yet: it has differed between epochs.")


@pytest.mark.parametrize("settings", [{"enabled": False}, {"uneven_train": "stop", "uneven_eval": "stop"}])
def test_a_length_has_no_effect_on_one_rank(settings: Any) -> None:
    countoff = Countoff(**settings)
    assert len(countoff.train(loader())) == len(list(countoff.train(loader()))) == 3  # pyright: ignore


def test_a_loop_is_the_same_where_countoff_is_off() -> None:
    source = loader()
    with Countoff(enabled=False, weights_every=8) as countoff:
        countoff.start()
        countoff.load_state_dict({"epoch": 3})
        for _ in range(2):
            assert len(list(countoff.train(source, epoch=4, position=2))) == 3
            take(countoff.train(source), 1)
            assert len(list(countoff.eval(source, "held out"))) == 3
        with countoff.uncounted():
            countoff.micro_batch()
        assert (active_loops(), countoff.state_dict(), countoff.guard.steps) == ([], {}, 0)
        assert countoff.progress() == {}
    countoff.close()


def test_bad_arguments_are_refused_at_once() -> None:
    sgd = torch.optim.SGD(torch.nn.Linear(1, 1).parameters())
    cases: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"uneven_train": "halt"}, SettingsError),
        ({"gradient_accumulation_steps": 0}, ValueError),
        ({"model": 5}, TypeError),
        ({"optimizer": types.SimpleNamespace(optimizer=sgd)}, TypeError),
    ]
    for refused, error in cases:
        with pytest.raises(error):
            Countoff(**refused)
    assert active_loops() == []


def test_steps_of_the_named_optimizers_are_counted() -> None:
    model, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    own, foreign = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, other))
    countoff = Countoff(optimizer=own, start_step=10)
    for _ in countoff.train(loader()):
        own.step()
        foreign.step()
    assert countoff.guard.steps == 3
    assert countoff.state_dict()["steps"] == 13
    unnamed = Countoff()
    for _ in unnamed.train(loader()):
        own.step()
    assert unnamed.guard.steps == 3


def test_steps_before_a_checkpoint_are_those_of_the_record_or_those_that_are_told() -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)

    def steps_after(record: Any, start_step: int = 0) -> Any:
        countoff = Countoff(optimizer=optimizer, start_step=start_step)
        countoff.load_state_dict(record)
        for _ in countoff.train(loader()):
            optimizer.step()
        return countoff.state_dict()

    record = steps_after({}, start_step=10)
    assert record["steps"] == 13
    assert steps_after(record)["steps"] == steps_after(record, start_step=13)["steps"] == 16


def test_a_number_of_steps_that_is_not_the_checkpoints_is_warned_of(capfd: pytest.CaptureFixture[str]) -> None:
    first = Countoff()
    for _ in first.train(loader()):
        pass
    record = {**first.state_dict(), "steps": 20}
    for told, warned in ((20, 0), (7, 1)):
        countoff = Countoff(start_step=told)
        countoff.load_state_dict(record)
        list(countoff.train(loader()))
        assert capfd.readouterr().err.count("goes on after 7 optimizer steps, and the checkpoint was written") == warned


def test_what_is_inside_of_uncounted_is_no_micro_batch() -> None:
    countoff = Countoff()
    list(countoff.train(loader()))
    with contextlib.suppress(KeyError), countoff.uncounted():
        assert len(list(countoff.train(loader()))) == 3
        countoff.micro_batch()
        raise KeyError
    assert len(list(countoff.train(loader()))) == 3
    assert countoff.state_dict()["epoch"] == 3


def test_an_evaluations_totals_have_its_name() -> None:
    """But for the default name, which the metrics have had before."""
    countoff = Countoff()
    take(countoff.train(loader()), 1)
    list(countoff.eval(loader()))
    list(countoff.eval(loader(), "held out"))
    names = [name for name in countoff.progress() if "eval" in name]
    assert names
    assert {"held out" in name for name in names} == {True, False}
