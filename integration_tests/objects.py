"""What can be seen of a framework's objects from outside, and jobs that look before, during and after a fit."""

import contextlib
import copy
import gc
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from countoff.core import DivergenceError
from countoff.torch import Countoff
from integration_tests.digits import own_rank, share_loader

UNEVEN = (4, 5)
"""Batches of the two ranks in the fits that end with a verdict."""


def outcome(function: Callable[[Any], Any], thing: Any) -> str:
    """Whether a copy can be made, with the class of the copy, or the error."""
    try:
        made = function(thing)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return type(made).__qualname__


def seen(thing: Any) -> dict[str, Any]:
    """What a framework or a user can see of an object, except for its type."""
    return {
        "class": thing.__class__,
        "attributes": sorted(vars(thing)),
        "pickle": outcome(lambda each: pickle.loads(pickle.dumps(each)), thing),
        "deep copy": outcome(copy.deepcopy, thing),
    }


def trace(things: Mapping[str, Any], methods: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What is seen of several objects, their types, and what is there once per process.

    Args:
        things: The objects, by name.
        methods: Methods of a framework's classes that countoff may replace.
    """
    return {
        **{name: (type(thing), seen(thing)) for name, thing in things.items()},
        "excepthook": sys.excepthook,
        "step hooks": list(sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks.values()),
        "methods": dict(methods or {}),
    }


def threads() -> list[str]:
    """Names of countoff's threads."""
    return [each.name for each in threading.enumerate() if each.name.startswith("countoff")]


def assert_gone(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Asserts that nothing differs and that no thread of countoff runs."""
    found = differences(before, after), threads()
    assert found == ({}, []), found


def assert_gone_soon(before: Mapping[str, Any], things: Callable[[], Mapping[str, Any]]) -> None:
    """Asserts the same of a fit that an exception has ended, once countoff has seen that the exception is over."""
    deadline = time.monotonic() + 10
    while (differences(before, things()), threads()) != ({}, []) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert_gone(before, things())


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that are not the same after, with both values."""
    return {name: (value, after.get(name)) for name, value in before.items() if after.get(name) != value}


def until_the_verdict(train: Callable[[], object]) -> None:
    """Trains again and again, until the ranks are known to be out of step."""
    until = time.monotonic() + 30
    with contextlib.suppress(DivergenceError):
        while time.monotonic() < until:
            train()
        raise TimeoutError("no verdict came")


def of_torch() -> list[str]:
    """A plain loop: closed, left by an exception, ended by a verdict, refused before its first batch."""
    dist.init_process_group("gloo")
    model = torch.nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(loader: Any, look: Callable[[int], object] = lambda number: None) -> None:
        for number, (images, labels) in enumerate(loader):
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            look(number)

    def things(loader: Any) -> dict[str, Any]:
        return trace({"loader": loader, "model": model, "optimizer": optimizer})

    loader = share_loader(4)
    train(loader)  # an optimizer has its own attributes from its first step on
    before, bare = things(loader), {"loader": seen(loader), "optimizer": seen(optimizer)}
    during = list[Any]()
    countoff = Countoff(optimizer=optimizer)
    train(countoff.train(loader), lambda number: during.append({"loader": seen(loader), "optimizer": seen(optimizer)}))
    assert during == [bare] * 4
    assert bare["loader"]["pickle"] == bare["loader"]["deep copy"] == "DataLoader"
    assert type(loader) is type(share_loader(4))
    countoff.close()
    assert_gone(before, things(loader))

    def fail(number: int) -> None:
        if number == 2:
            raise ArithmeticError("out of luck")

    with contextlib.suppress(ArithmeticError, DivergenceError), Countoff(optimizer=optimizer) as countoff:
        train(countoff.train(loader), fail)
    assert_gone_soon(before, lambda: things(loader))

    uneven = share_loader(UNEVEN[own_rank()])
    before = things(uneven)
    countoff = Countoff(optimizer=optimizer)
    until_the_verdict(lambda: train(countoff.train(uneven)))
    found = [str(countoff.guard.verdict and countoff.guard.verdict.kind)]
    after = things(uneven)
    assert (after["loader"], after["step hooks"]) == (before["loader"], before["step hooks"])
    with contextlib.suppress(DivergenceError):
        countoff.close()
    assert_gone(before, things(uneven))

    refused = share_loader(4)
    before = things(refused)
    try:
        next(Countoff(optimizer=optimizer, batch_size=4 + own_rank()).train(refused))
    except DivergenceError as error:
        found.append(error.verdict.kind)
    assert things(refused) == before
    return found


def of_accelerate() -> list[str]:
    """A loop of Accelerate's: closed after a checkpoint, left by an exception, ended by a verdict."""
    from accelerate import Accelerator
    from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
    from accelerate.local_sgd import LocalSGD
    from accelerate.utils import DataLoaderConfiguration

    from countoff.accelerate import Countoff as AccelerateCountoff
    from integration_tests.accelerate_jobs import map_loader, model_and_optimizer, stream_loader

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    model, raw = model_and_optimizer()
    uneven = stream_loader(UNEVEN[own_rank()], accelerator.num_processes)
    optimizer, loader, uneven = accelerator.prepare(raw, map_loader(40), uneven)
    objects = {"accelerator": accelerator, "optimizer": optimizer, "loader": loader, "uneven": uneven}

    def train(loader: Any, look: Callable[[int], object] = lambda number: None) -> None:
        for number, (images, labels) in enumerate(loader):
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            look(number)

    def methods(*names: str) -> dict[str, Any]:
        classes = (DataLoaderShard, DataLoaderDispatcher, Accelerator, LocalSGD)
        return {f"{each.__name__}.{name}": vars(each).get(name) for each in classes for name in names}

    def things() -> dict[str, Any]:
        return {**trace(objects, methods("__iter__", "backward")), "hooks": hooks()}

    def hooks() -> tuple[list[Any], list[Any]]:
        return list(accelerator._save_model_state_pre_hook), list(accelerator._load_model_state_pre_hook)

    def looks() -> dict[str, Any]:
        return {**{name: (type(each), seen(each)) for name, each in objects.items()}, "hooks": hooks()}

    bare, during = list[Any](), list[Any]()
    train(uneven)  # a loader has all of its attributes from its first pass on
    train(loader, lambda number: bare.append(looks()))
    before, bare_after = things(), looks()
    own_methods = methods("save_state", "load_state")
    countoff: Any = AccelerateCountoff(accelerator)
    train(countoff.train(loader), lambda number: during.append(looks()))
    assert during == bare
    assert looks() == bare_after
    assert bare_after["accelerator"][1]["pickle"] == "Accelerator"  # which it is not inside a loop, by its own state
    accelerator.save_state("saved")
    accelerator.wait_for_everyone()
    accelerator.load_state("saved")
    assert (looks()["accelerator"], hooks()) == (before["accelerator"], before["hooks"])
    countoff.close()
    assert_gone(before, things())
    assert os.listdir("saved").count(f"countoff_{own_rank()}.json") == 1
    assert not [name for name in os.listdir("saved") if name.startswith(".")]

    def fail(number: int) -> None:
        if number == 2:
            raise ArithmeticError("out of luck")

    with contextlib.suppress(ArithmeticError):
        train(loader, fail)
    before = things()  # Accelerate keeps a reference to a loader whose loop was left, and is not pickled from then on
    with contextlib.suppress(ArithmeticError, DivergenceError), AccelerateCountoff(accelerator) as countoff:
        train(countoff.train(loader), fail)
    assert_gone_soon(before, things)

    countoff = AccelerateCountoff(accelerator)
    until_the_verdict(lambda: train(countoff.train(uneven)))
    found = [str(countoff.guard.verdict and countoff.guard.verdict.kind)]
    with contextlib.suppress(DivergenceError):
        countoff.close()
    assert_gone(before, things())
    countoff = None  # it might have begun another fit: what it has put on the class goes with the first call after it
    gc.collect()
    accelerator.save_state("saved again")
    assert methods("save_state", "load_state") == own_methods
    return found
