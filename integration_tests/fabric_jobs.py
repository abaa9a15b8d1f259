"""Scripts for Fabric as people write them, each with the lines of countoff's in it."""

import importlib
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

from countoff.fabric import Countoff
from integration_tests import devices
from integration_tests.digits import BATCH_SIZE, digits, own_rank, share_loader, weights


class Cycle:
    """Iterates again and again over what a function returns, as litgpt's `CycleIterator` over a loader."""

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self._begin = begin
        self._iterator: Any = None

    def __iter__(self) -> "Cycle":
        return self

    def __next__(self) -> Any:
        if self._iterator is None:
            self._iterator = iter(self._begin())
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(self._begin())
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
    countoff = Countoff(fabric, optimizer=optimizer, gradient_accumulation_steps=script.accumulate)
    validate(model, countoff.eval(val), limit=1)
    for number, (images, labels) in enumerate(Cycle(lambda: countoff.train(train)), 1):
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
            validate(model, countoff.eval(val))
            fabric.barrier()
    return outcome(countoff, model)


def finetune(script: Script) -> dict[str, Any]:
    """Loaders before the model, epochs with a `for` each, a validation after each."""
    fabric = importlib.import_module(script.package).Fabric(**devices.lightning(), strategy="ddp")
    fabric.launch()
    fabric.seed_everything(7, verbose=False)
    train, val = fabric.setup_dataloaders(*script.loaders())
    model = torch.nn.Linear(64, 10)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    countoff = Countoff(fabric, optimizer=optimizer, epochs=2)
    for _ in range(2):
        for batch in countoff.train(train):
            step_on(fabric, model, optimizer, batch)
        validate(model, countoff.eval(val))
    return outcome(countoff, model)


def validate_inside(script: Script) -> dict[str, Any]:
    """Disables gradients inside the validation's loop, and validates in the middle of an epoch too."""
    fabric, model, optimizer = start()
    train, val = fabric.setup_dataloaders(*script.loaders())
    countoff = Countoff(fabric, optimizer=optimizer)
    for _ in range(3):
        for number, batch in enumerate(countoff.train(train)):
            step_on(fabric, model, optimizer, batch)
            if number == 2:
                for images, _ in countoff.eval(val):
                    with torch.no_grad():
                        model(images)
        for images, _ in countoff.eval(val):
            with torch.no_grad():
                model(images)
    return outcome(countoff, model)


def train_on_new_loaders(script: Script) -> dict[str, Any]:
    """Sets up another loader for each epoch."""
    fabric, model, optimizer = start()
    countoff = Countoff(fabric, optimizer=optimizer)
    for _ in range(4):
        for batch in countoff.train(fabric.setup_dataloaders(script.loaders()[0])):
            step_on(fabric, model, optimizer, batch)
    return outcome(countoff, model)


def train_on_two_loaders(script: Script) -> dict[str, Any]:
    """Iterates two loaders together."""
    fabric, model, optimizer = start()
    one, other = fabric.setup_dataloaders(script.loaders()[0], script.loaders()[0])
    countoff = Countoff(fabric, optimizer=optimizer)
    for _ in range(3):
        for batch, _ in zip(countoff.train(one), other, strict=False):
            step_on(fabric, model, optimizer, batch)
    return outcome(countoff, model)


def train_on_own_loaders(script: Script) -> dict[str, Any]:
    """Iterates loaders that Fabric has not set up."""
    fabric, model, optimizer = start()
    train, val = script.loaders()
    countoff = Countoff(fabric, optimizer=optimizer)
    for _ in range(2):
        for batch in countoff.train(train):
            step_on(fabric, model, optimizer, batch)
        validate(model, map(fabric.to_device, countoff.eval(val)))
    return outcome(countoff, model)


def train_without_a_loader(script: Script) -> dict[str, Any]:
    """Draws each batch from a function, as reinforcement learning does."""
    fabric, model, optimizer = start()
    images, labels = digits()
    generator = torch.Generator().manual_seed(own_rank())

    def draw(_: int) -> Any:
        chosen = torch.randint(len(images), (BATCH_SIZE,), generator=generator)
        return images[chosen], labels[chosen]

    countoff = Countoff(fabric, optimizer=optimizer)
    for batch in countoff.train(map(draw, range(script.iterations))):
        step_on(fabric, model, optimizer, batch)
    return outcome(countoff, model)


def outcome(countoff: Countoff, model: Any) -> dict[str, Any]:
    """Final weights, as a hash of their bits, and what countoff has counted, if it is on."""
    record = countoff.state_dict()
    counted = None
    if record:
        counted = {"epochs": record["epoch"], "batches": countoff.guard.train_batches, "steps": record["steps"]}
    return {"weights": weights(model), "counted": counted}


Job = tuple[Callable[[Any], dict[str, Any]], Any]


def without_and_with(jobs: Mapping[str, Job]) -> dict[str, list[dict[str, Any]]]:
    """Runs each script with countoff off and on, by the flag, one after the other in one process."""
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


def objects_of_a_script(script: Script) -> dict[str, bool]:
    """Whether Fabric's objects are as without countoff in a pass, also where its batches are made even."""
    from lightning.fabric.wrappers import _FabricDataLoader

    fabric, model, optimizer = start()
    train: Any = fabric.setup_dataloaders(even_loader(16))
    attributes = vars(fabric).keys(), vars(train).keys()
    inner, iterate = train._dataloader, _FabricDataLoader.__iter__
    countoff = Countoff(fabric, optimizer=optimizer, uneven_train="stop")
    found: dict[str, bool] = {}
    for batch in countoff.train(train):
        step_on(fabric, model, optimizer, batch)
        found["pickled loader"] = type(pickle.loads(pickle.dumps(train))) is _FabricDataLoader
        found["attributes"] = (vars(fabric).keys(), vars(train).keys()) == attributes
        found["loader"] = train._dataloader is inner and type(train) is _FabricDataLoader
        found["class"] = _FabricDataLoader.__iter__ is iterate
    countoff.close()
    found["counted"] = countoff.guard.train_batches == script.train[own_rank()]
    return found
