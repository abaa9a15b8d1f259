"""Loops over Accelerate's loaders that attach nothing; each in a process group of all ranks.

`run_all` runs each job, with a line between what they print, and returns what each has begun.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from unittest import mock

from accelerate.local_sgd import LocalSGD
from torch.utils.data import DataLoader

from countoff._accelerate import accelerator as reading
from countoff._adapter.observed_loop import active_loops
from countoff.accelerate import attach
from integration_tests import devices
from integration_tests.jobs import own_rank
from integration_tests.unattached import begun, counting_prepared, read_by_thread, run_each
from integration_tests.zoo.accelerate_loops import SizedStream, accelerator, fit, prepared, shuffled, step
from integration_tests.zoo.parts import loss_of, network, sgd


def trained() -> list[str]:
    """A plain loop."""
    own = accelerator()
    fit(own, *prepared(own, shuffled()))
    return begun()


def attached() -> list[str]:
    own = accelerator()
    model, optimizer, loader = prepared(own, shuffled())
    attach(own, train=loader)
    fit(own, model, optimizer, loader)
    return begun()


def asked_to_make_even() -> list[str]:
    with mock.patch.dict(os.environ, COUNTOFF_UNEVEN_TRAIN="stop"):
        return trained()


def of_another_version() -> list[str]:
    with mock.patch.object(reading, "train_facts", side_effect=AttributeError("no gradient_state")):
        return trained()


def in_local_sgd() -> list[str]:
    own = accelerator()
    model, optimizer, loader = prepared(own, shuffled())
    with LocalSGD(accelerator=own, model=model, local_sgd_steps=4) as local:
        for batch in loader:
            step(own, model, optimizer, batch)
            local.step()
    return begun()


def by_a_thread() -> list[str]:
    own = accelerator()
    model, optimizer, loader = prepared(own, shuffled())
    for batch in read_by_thread(loader):
        step(own, model, optimizer, batch)
    return begun()


def of_a_bare_model() -> list[str]:
    """Its ranks do not meet in a step."""
    own, model = accelerator(), network(seed=7)
    optimizer, loader = own.prepare(sgd(model), shuffled())
    for batch in loader:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return begun()


def over_two_loaders() -> list[str]:
    own = accelerator()
    model, optimizer, short, long = prepared(own, shuffled(), shuffled(96))
    fit(own, model, optimizer, short)
    lengths = [loop.fit.epoch_batches for loop in active_loops()]
    fit(own, model, optimizer, long)
    return [*begun(), f"of {lengths} and {[loop.fit.epoch_batches for loop in active_loops()]} batches"]


class Asked(SizedStream):
    """A stream that counts how often it is asked for its length."""

    times = 0

    def __len__(self) -> int:
        self.times += 1
        return super().__len__()


def of_a_stream() -> list[str]:
    """Accelerate itself asks for the length in each pass, also in those that do not train."""
    own, trained, read = accelerator(dispatch_batches=False), Asked(), Asked()
    loaders = DataLoader(trained, batch_size=4), DataLoader(read, batch_size=4)
    model, optimizer, loader, other = prepared(own, *loaders)
    passes = [sum(1 for _ in other) for _ in range(2)]
    assert fit(own, model, optimizer, loader) == passes
    return [*begun(), f"asked {trained.times - read.times} times more"]


JOBS: dict[str, Callable[[], list[str]]] = {
    "as it is": trained,
    "attached": attached,
    "asked to make ranks even": asked_to_make_even,
    "of another version of Accelerate": of_another_version,
    "inside of LocalSGD": in_local_sgd,
    "read by a thread": by_a_thread,
    "of a model that is not prepared": of_a_bare_model,
    "over two loaders": over_two_loaders,
    "over a stream that knows its length": of_a_stream,
}


def of_two_rates() -> None:
    """Trains with another learning rate on each rank."""
    devices.join()
    with counting_prepared():
        own = accelerator()
        model, optimizer, loader = prepared(own, shuffled())
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + own_rank())
        fit(own, model, optimizer, loader)


def run_all() -> dict[str, list[str]]:
    """Runs each job; returns the loops that were active at its end, by its name."""
    devices.join()
    logging.basicConfig(level=logging.INFO)
    return run_each(JOBS, counting_prepared)
