"""Scripts for Fabric as people write them: none of them mentions countoff, unless its name says so."""

import contextlib
import gc
import importlib
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

from integration_tests import devices
from integration_tests.jobs import BATCH_SIZE, digits, own_rank, share_loader, weights


class Cycle:
    """Iterates a loader again and again, as litgpt's `CycleIterator`."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._iterator: Any = None

    def __iter__(self) -> "Cycle":
        return self

    def __next__(self) -> Any:
        if self._iterator is None:
            self._iterator = iter(self._loader)
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(self._loader)
            return next(self._iterator)


@dataclass(frozen=True)
class Script:
    """What a test varies. Tuples hold one value per rank.

    Attributes:
        train: Batches of each rank's train loader.
        val: Batches of each rank's validation loader.
        iterations: Batches that each rank trains on.
        accumulate: Batches per optimizer step.
        even: Use a map-style dataset of so many samples instead, which Fabric shards.
        package: The package whose Fabric `finetune` uses.
    """

    train: tuple[int, ...] = (5, 5)
    val: tuple[int, ...] = (2, 2)
    iterations: int = 13
    accumulate: int = 1
    even: int = 0
    package: str = "lightning.fabric"

    def loaders(self) -> tuple[Any, Any]:
        if self.even:
            return even_loader(self.even), even_loader(16)
        return share_loader(self.train[own_rank()]), share_loader(self.val[own_rank()])


def even_loader(samples: int) -> Any:
    """A loader over a map-style dataset, shuffled."""
    images, labels = digits()
    return DataLoader(TensorDataset(images[:samples], labels[:samples]), batch_size=BATCH_SIZE, shuffle=True)


def start() -> tuple[Fabric, Any, Any]:
    """A launched Fabric with its model and optimizer."""
    fabric = Fabric(**devices.lightning(), strategy="ddp")
    fabric.launch()
    fabric.seed_everything(7, verbose=False)
    model = fabric.setup(torch.nn.Linear(64, 10))
    return fabric, model, fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))


def step_on(fabric: Fabric, model: Any, optimizer: Any, batch: Any) -> None:
    images, labels = fabric.to_device(batch)  # of a loader that Fabric has not set up, too
    fabric.backward(torch.nn.functional.cross_entropy(model(images), labels))
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def validate(model: Any, loader: Any, limit: int = 10) -> None:
    """litgpt's: called before training and in the middle of an epoch."""
    model.eval()
    for number, (images, _) in enumerate(loader):
        if number >= limit:
            break
        model(images)
    model.train()


def pretrain(script: Script) -> dict[str, Any]:
    """litgpt's pretraining: accumulation without synchronisation, validation in mid-epoch, epochs without an end."""
    fabric, model, optimizer = start()
    train, val = fabric.setup_dataloaders(*script.loaders())
    validate(model, val, limit=1)
    for number, (images, labels) in enumerate(Cycle(train), 1):
        if number > script.iterations:
            break
        accumulating = number % script.accumulate != 0
        with fabric.no_backward_sync(model, enabled=accumulating):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            fabric.backward(loss / script.accumulate)
        if not accumulating:
            optimizer.step()
            optimizer.zero_grad()
        if number % 4 == 0:
            validate(model, val)
            fabric.barrier()
    return outcome(fabric, model)


def finetune(script: Script) -> dict[str, Any]:
    """Loaders before the model, epochs with a `for` each, a validation after each."""
    fabric = importlib.import_module(script.package).Fabric(**devices.lightning(), strategy="ddp")
    fabric.launch()
    fabric.seed_everything(7, verbose=False)
    train, val = fabric.setup_dataloaders(*script.loaders())
    model = torch.nn.Linear(64, 10)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        for batch in train:
            step_on(fabric, model, optimizer, batch)
        validate(model, val)
    return outcome(fabric, model)


def validate_with_gradients(script: Script) -> dict[str, Any]:
    """Disables gradients inside the validation's loop, and validates in the middle of an epoch too."""
    fabric, model, optimizer = start()
    train, val = fabric.setup_dataloaders(*script.loaders())
    for _ in range(3):
        for number, batch in enumerate(train):
            step_on(fabric, model, optimizer, batch)
            if number == 2:
                for images, _ in val:
                    with torch.no_grad():
                        model(images)
        for images, _ in val:
            with torch.no_grad():
                model(images)
    return outcome(fabric, model)


def train_on_new_loaders(script: Script) -> dict[str, Any]:
    """Sets up another loader for each epoch."""
    fabric, model, optimizer = start()
    for _ in range(4):
        for batch in fabric.setup_dataloaders(script.loaders()[0]):
            step_on(fabric, model, optimizer, batch)
    return outcome(fabric, model)


def train_on_two_loaders(script: Script) -> dict[str, Any]:
    """Iterates two loaders together."""
    fabric, model, optimizer = start()
    one, other = fabric.setup_dataloaders(script.loaders()[0], script.loaders()[0])
    for _ in range(3):
        for batch, _ in zip(one, other, strict=False):
            step_on(fabric, model, optimizer, batch)
    return outcome(fabric, model)


def call_hooks(script: Script) -> dict[str, Any]:
    """Calls Fabric's hooks, for other callbacks, over loaders that Fabric has set up."""
    fabric, model, optimizer = start()
    train, val = fabric.setup_dataloaders(*script.loaders())
    fabric.call("on_train_start")
    for _ in range(2):
        fabric.call("on_train_epoch_start")
        for number, batch in enumerate(train):
            fabric.call("on_train_batch_start", batch, number)
            step_on(fabric, model, optimizer, batch)
        fabric.call("on_train_epoch_end")
        fabric.call("on_validation_start")
        with torch.no_grad():
            for batch in val:
                fabric.call("on_validation_batch_start", batch, 0)
        fabric.call("on_validation_end")
    counted = outcome(fabric, model)
    fabric.call("on_train_end")
    return counted


def call_hooks_over_other_loaders(script: Script) -> dict[str, Any]:
    """Calls Fabric's hooks over a train loader that Fabric has not set up, though it has set up another."""
    fabric, model, optimizer = start()
    train, val = script.loaders()
    val = fabric.setup_dataloaders(val)
    for _ in range(2):
        fabric.call("on_train_epoch_start")
        for number, batch in enumerate(train):
            fabric.call("on_train_batch_start", batch, number)
            step_on(fabric, model, optimizer, batch)
        fabric.call("on_train_epoch_end")
    counted = outcome(fabric, model)
    fabric.call("on_train_end")
    return counted


def train_on_a_bare_loader(steps: int) -> dict[str, Any]:
    """Gives countoff nothing to count: the loop iterates a loader that Fabric has not set up."""
    fabric, model, optimizer = start()
    train = share_loader(steps)
    for batch in train:
        step_on(fabric, model, optimizer, batch)
    return outcome(fabric, model)


def train_without_a_loader(steps: int, is_counted: bool) -> int | None:
    """Draws each batch from a function, as reinforcement learning does; returns the batches that a handle counts."""
    from countoff.torch import attach

    fabric, model, optimizer = start()
    images, labels = digits()
    generator = torch.Generator().manual_seed(own_rank())

    def draw() -> Any:
        chosen = torch.randint(len(images), (BATCH_SIZE,), generator=generator)
        return images[chosen], labels[chosen]

    handle = attach() if is_counted else None
    take = draw if handle is None else handle.counted(draw)
    for _ in range(steps):
        drawn, wanted = take()
        fabric.backward(torch.nn.functional.cross_entropy(model(drawn), wanted))
        optimizer.step()
        optimizer.zero_grad()
    return None if handle is None else handle.guard.train_batches


def attach_by_hand(script: Script) -> dict[str, Any]:
    """Attaches countoff to the train loader by itself, though it is also on by the flag."""
    from countoff.torch import attach

    fabric, model, optimizer = start()
    train, _ = fabric.setup_dataloaders(*script.loaders())
    with attach(train=train, optimizer=optimizer.optimizer) as handle:
        for _ in range(14):
            for batch in train:
                step_on(fabric, model, optimizer, batch)
        return {**outcome(fabric, model), "attached": handle.guard.train_batches}


def outcome(fabric: Fabric, model: Any) -> dict[str, Any]:
    """Final weights, as a hash of their bits, and what countoff's callback has counted, if there is one."""
    found: dict[str, Any] = {"weights": weights(model), "counted": None}
    for callback in fabric._callbacks:
        if (guard := getattr(callback, "guard", None)) is not None:
            loop = callback._loaders.loop
            epochs = callback._epoch if loop is None else loop.passes.epoch
            found["counted"] = {"epochs": epochs, "batches": guard.train_batches, "steps": guard.steps}
    return found


Job = tuple[Callable[[Any], dict[str, Any]], Any]


def without_and_with(jobs: Mapping[str, Job]) -> dict[str, list[dict[str, Any]]]:
    """Runs each script without countoff and with it, by the flag, one after the other in one process."""
    return {name: [flagged(value, *job) for value in ("0", "1")] for name, job in jobs.items()}


def cut_and_even(jobs: Mapping[str, Job]) -> dict[str, list[dict[str, Any]]]:
    """Runs each script with loaders cut to the shortest rank's, without countoff, and then as it is, with countoff."""
    return {
        name: [
            flagged("0", function, replace(script, train=(min(script.train),) * 2, val=(min(script.val),) * 2)),
            flagged("1", function, script),
        ]
        for name, (function, script) in jobs.items()
    }


def flagged(value: str, function: Callable[[Any], Any], argument: Any) -> Any:
    """Runs a script with a value of COUNTOFF."""
    os.environ["COUNTOFF"] = value
    try:
        return function(argument)
    finally:
        del os.environ["COUNTOFF"]


@contextlib.contextmanager
def _flag() -> Iterator[None]:
    os.environ["COUNTOFF"] = "1"
    yield
    del os.environ["COUNTOFF"]


def objects_of_a_script(script: Script) -> dict[str, Any]:
    """What a script finds of countoff on Fabric's objects: in a pass, after it, and when the Fabric is gone."""
    from lightning.fabric.wrappers import _FabricDataLoader

    def loader_of(fabric: Fabric) -> Any:
        return fabric.setup_dataloaders(even_loader(16))

    plain, _, _ = start()
    attributes, keys = sorted(vars(plain)), sorted(vars(loader_of(plain)))
    found: dict[str, Any] = {}
    with _flag():
        fabric, model, optimizer = start()
        train = loader_of(fabric)
        (callback,) = fabric._callbacks
        for number, batch in enumerate(train):
            step_on(fabric, model, optimizer, batch)
            if number == 1:
                found["copied"] = vars(pickle.loads(pickle.dumps(callback))).keys() == {"settings", "_loaders"}
                found["pickled loader"] = type(pickle.loads(pickle.dumps(train))) is _FabricDataLoader
                found["fabric"] = sorted(vars(fabric)) == attributes
                found["loader"] = sorted(vars(train)) == keys and type(train) is _FabricDataLoader
        fabric.call("on_train_end")
        found["ended"] = callback.guard is None
        del fabric, model, optimizer, train, callback
    gc.collect()
    changed = [Fabric.setup_dataloaders, _FabricDataLoader.__iter__]
    found["restored"] = [hasattr(each, "__wrapped__") for each in changed] == [False, False]
    return found
