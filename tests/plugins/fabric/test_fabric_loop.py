"""A loop with Fabric on one rank: which loader is known, and that Fabric's own is iterated as it is."""

from __future__ import annotations

import gc
import importlib
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from countoff._adapter.counted_loop import active_loops
from countoff.core import SettingsError
from countoff.fabric import Countoff

DATA: Any = torch.arange(12.0).view(6, 2)


@pytest.fixture(params=["lightning.fabric", "lightning_fabric"])
def fabric(request: pytest.FixtureRequest) -> Any:
    pytest.importorskip(request.param)
    return importlib.import_module(request.param).Fabric(accelerator="cpu", devices=1)


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    for each in active_loops():
        each.end()


def test_loaders_of_fabric_and_others_are_counted(fabric: Any) -> None:
    model, optimizer = fabric.setup(net := torch.nn.Linear(2, 1), torch.optim.SGD(net.parameters(), lr=0.1))
    own = DataLoader(DATA, batch_size=2)
    train = fabric.setup_dataloaders(own)
    before = type(train), type(own), dict(vars(train))
    with Countoff(fabric, optimizer=optimizer, model=model, epochs=2) as countoff:
        for _ in range(2):
            for batch in countoff.train(train):
                fabric.backward(model(batch).sum())
                optimizer.step()
            assert (countoff.guard.train_batches, countoff.guard.open_span) == (3, None)
            for source in (train, own, range(3)):
                counts = [countoff.guard.batches for _ in countoff.eval(source)]
                assert counts == [1, 2, 3]
        assert countoff.guard.steps == 6
        assert countoff.progress()["countoff/epoch_progress"] == 1
        assert len(countoff.train(train)) == 3  # pyright: ignore[reportArgumentType]
    changed = {name: value for name, value in vars(train).items() if value is not before[2].get(name)}
    assert (type(train), type(own)) == before[:2]
    assert changed.keys() <= {"_num_iter_calls"}  # Fabric's own


def test_the_length_of_the_loader_inside_is_known(fabric: Any) -> None:
    """By that the run's length is: Fabric's loader tells none that is sure to be torch's."""
    countoff = Countoff(fabric, epochs=3)
    next(countoff.train(fabric.setup_dataloaders(DataLoader(DATA, batch_size=2))))
    values = countoff.progress()
    assert (values["countoff/batches_per_epoch"], values["countoff/total_steps"]) == (3, 9)


def test_no_loader_and_no_fabric_is_kept(fabric: Any) -> None:
    train = fabric.setup_dataloaders(DataLoader(DATA, batch_size=2))
    countoff = Countoff(fabric)
    for _ in countoff.train(train):
        pass
    gone = weakref.ref(train), weakref.ref(train._dataloader)
    del train
    gc.collect()
    assert [each() for each in gone] == [None, None]
    assert countoff.progress()


def test_a_mesh_of_fabric_tells_which_ranks_share_their_data() -> None:
    """One that does not show it is refused with the way to say it."""
    with pytest.raises(ValueError, match="data_dims"):
        Countoff(SimpleNamespace(strategy=SimpleNamespace(device_mesh=torch_mesh(("one", "two")))))


def torch_mesh(names: tuple[str, ...]) -> Any:
    return SimpleNamespace(
        mesh_dim_names=names, mesh=torch.zeros((1,) * len(names)), get_coordinate=lambda: [0] * len(names)
    )


def test_bad_options_are_refused_at_once() -> None:
    with pytest.raises(SettingsError, match="did you mean uneven_train"):
        Countoff(SimpleNamespace(strategy=None), unevn_train="stop")  # pyright: ignore[reportCallIssue]
