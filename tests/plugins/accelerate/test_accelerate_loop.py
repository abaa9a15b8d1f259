"""A loop with Accelerate in one process: which passes are counted, and what is put on Accelerate's classes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from torch.utils.data import DataLoader

from countoff._adapter.counted_loop import active_loops
from countoff.accelerate import Countoff

DATA: Any = torch.arange(12.0).view(6, 2)
OWN = Accelerator.save_state, Accelerator.load_state


@pytest.fixture
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    for each in active_loops():
        each.end()


def prepared(accelerator: Accelerator, batch_size: int = 2) -> Any:
    return accelerator.prepare(DataLoader(DATA, batch_size=batch_size))


def test_prepared_loaders_and_others_are_counted(accelerator: Accelerator) -> None:
    model = torch.nn.Linear(2, 1)
    model, optimizer, train = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(DATA, batch_size=2)
    )
    own_class = vars(DataLoaderShard).copy()
    with Countoff(accelerator, epochs=2) as countoff:
        for _ in range(2):
            for batch in countoff.train(train):
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch).sum())
                    optimizer.step()
                    optimizer.zero_grad()
            assert (countoff.guard.train_batches, countoff.guard.open_span) == (3, None)
            for source in (prepared(accelerator), DataLoader(DATA, batch_size=2), range(3)):
                counts = [countoff.guard.batches for _ in countoff.eval(source)]
                assert counts == [1, 2, 3]
        assert countoff.guard.steps == 6
        assert countoff.progress()["countoff/total_steps"] == 6
        assert vars(DataLoaderShard) == own_class
    assert type(train) is DataLoaderShard


def test_a_loop_that_stops_at_the_last_batch_has_exhausted_its_loader(accelerator: Accelerator) -> None:
    """The loader looks one batch ahead, and so knows its last one."""
    countoff = Countoff(accelerator)
    train = prepared(accelerator)
    for number, _ in enumerate(countoff.train(train), 1):
        if number == 3:
            break
    assert countoff.state_dict()["epoch"] == 1
    next(countoff.train(train))
    assert countoff.guard.open_span == "train epoch 1"


def test_a_pass_that_skips_batches_goes_on_at_their_number(accelerator: Accelerator) -> None:
    countoff = Countoff(accelerator)
    rest = accelerator.skip_first_batches(prepared(accelerator), 2)
    counts = [countoff.guard.train_batches for _ in countoff.train(rest, epoch=4)]
    assert counts == [3]
    for _ in countoff.train(prepared(accelerator), position=1):
        assert countoff.guard.train_batches == 2
        break


def test_a_checkpoint_has_the_record_and_begins_the_next_fit(accelerator: Accelerator, tmp_path: Path) -> None:
    countoff = Countoff(accelerator)
    train = prepared(accelerator)
    for _ in range(2):
        list(countoff.train(train))
    accelerator.save_state(str(tmp_path))
    assert (tmp_path / "countoff_0.json").exists()
    countoff.close()
    resumed = Countoff(accelerator)
    accelerator.load_state(str(tmp_path))
    assert active_loops() == []
    next(resumed.train(train))
    assert resumed.guard.open_span == "train epoch 2"


def test_a_countoff_that_is_gone_writes_no_record(accelerator: Accelerator, tmp_path: Path) -> None:
    """What it has put on Accelerate's class is taken back at the next call."""
    countoff = Countoff(accelerator)
    next(countoff.train(prepared(accelerator)))
    countoff.close()
    del countoff
    gc.collect()
    for _ in range(2):
        accelerator.save_state(str(tmp_path))
    assert not list(tmp_path.glob("countoff*"))
    assert (Accelerator.save_state, Accelerator.load_state) == OWN


@pytest.mark.parametrize("closes", [True, False])
def test_no_loader_of_the_users_is_kept(accelerator: Accelerator, closes: bool) -> None:
    countoff = Countoff(accelerator)
    train, evaluated = DataLoader(DATA, batch_size=2), DataLoader(DATA, batch_size=3)
    gone = [weakref.ref(each) for each in (train, evaluated)]
    for _ in countoff.train(train):
        list(countoff.eval(evaluated))
    if closes:
        countoff.close()
    del train, evaluated
    gc.collect()
    assert [each() for each in gone] == [None, None]


def test_a_loop_is_the_same_where_countoff_is_off(accelerator: Accelerator, tmp_path: Path) -> None:
    countoff = Countoff(accelerator, enabled=False)
    train = prepared(accelerator)
    assert len(list(countoff.train(train))) == len(countoff.train(train)) == 3  # pyright: ignore
    assert len(list(countoff.eval(train))) == 3
    accelerator.save_state(str(tmp_path))
    assert not list(tmp_path.glob("countoff*"))
    assert (Accelerator.save_state, Accelerator.load_state) == OWN
    assert (active_loops(), countoff.state_dict()) == ([], {})
