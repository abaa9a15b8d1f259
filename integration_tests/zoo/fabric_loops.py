"""Loops with Fabric."""

import itertools
from typing import Any

import torch
from lightning.fabric import Fabric

from countoff.fabric import Countoff
from integration_tests import devices
from integration_tests.digits import own_rank
from integration_tests.lightning_jobs import quiet
from integration_tests.zoo.parts import dataset, loss_of, network, sgd, with_workers
from integration_tests.zoo.registry import healthy


def _start(*samples, **more):
    quiet()
    fabric = Fabric(**devices.lightning(), strategy="ddp")
    fabric.launch()
    network_of_it = network()
    model, optimizer = fabric.setup(network_of_it, sgd(network_of_it))
    loaders = [with_workers(dataset(count), batch_size=4, shuffle=True, **more) for count in samples]
    set_up = fabric.setup_dataloaders(*loaders)
    return fabric, model, optimizer, *(set_up if isinstance(set_up, list) else [set_up])


def _step(fabric, model, optimizer, batch):
    fabric.backward(loss_of(model, batch))
    optimizer.step()
    optimizer.zero_grad()


@healthy(even=True)
def epochs_of_fabric(options):
    """Epochs over a loader that Fabric has set up."""
    fabric, model, optimizer, loader = _start(64)
    countoff = Countoff(fabric, optimizer=optimizer, **options)
    for _ in range(3):
        for batch in countoff.train(loader):
            _step(fabric, model, optimizer, batch)
    countoff.close()
    return model


@healthy(even=True)
def steps_of_fabric(options):
    """A cycle over the loader is trained for a number of steps, with an evaluation in between."""
    fabric, model, optimizer, loader, evaluation = _start(48, 16)
    countoff = Countoff(fabric, optimizer=optimizer, **options)
    batches = (batch for _ in itertools.count() for batch in countoff.train(loader))
    losses = []
    for number in range(15):
        _step(fabric, model, optimizer, next(batches))
        if number % 6 == 5:
            with torch.no_grad():
                losses += [loss_of(model, batch) for batch in countoff.eval(evaluation)]
    countoff.close()
    return losses, model


@healthy()
def accumulation_of_fabric(options):
    """Three batches are accumulated without synchronisation, with a remainder."""
    fabric, model, optimizer, loader = _start(64)
    countoff = Countoff(fabric, optimizer=optimizer, **options)
    for _ in range(2):
        for number, batch in enumerate(countoff.train(loader), 1):
            last = number % 3 == 0 or number == len(loader)
            with fabric.no_backward_sync(model, enabled=not last):
                fabric.backward(loss_of(model, batch))
            if last:
                optimizer.step()
                optimizer.zero_grad()
    countoff.close()
    return model


@healthy()
def looks_at_a_batch_first(options):
    """The first batch of the train loader is taken for a look, and the evaluation runs before training."""
    fabric, model, optimizer, loader, evaluation = _start(64, 16)
    countoff = Countoff(fabric, optimizer=optimizer, **options)
    inputs, _ = next(iter(loader))
    with torch.no_grad():
        losses = [loss_of(model, batch) for batch in countoff.eval(evaluation)]
    for batch in countoff.train(loader):
        _step(fabric, model, optimizer, batch)
    countoff.close()
    return inputs, losses, model


@healthy()
def work_on_rank_zero_of_fabric(options):
    """Rank 0 alone evaluates on a loader that Fabric does not know, and the others wait."""
    fabric, model, optimizer, loader = _start(64)
    countoff = Countoff(fabric, optimizer=optimizer, **options)
    losses = []
    for _ in range(2):
        for batch in countoff.train(loader):
            _step(fabric, model, optimizer, batch)
        if fabric.is_global_zero:
            with torch.no_grad():
                losses += [loss_of(model.module, batch) for batch in with_workers(dataset(20), batch_size=4)]
        fabric.barrier()
    countoff.close()
    return losses, model


@healthy()
def evaluation_of_rank_zero_in_fabric(options):
    """Rank 0 alone evaluates with a loader that Fabric has set up, and uneven_eval="off"."""
    fabric, model, optimizer, loader, evaluation = _start(64, 16)
    declared: dict[str, Any] = {**options, "uneven_eval": "off"}
    countoff = Countoff(fabric, optimizer=optimizer, **declared)
    losses = []
    for _ in range(2):
        for batch in countoff.train(loader):
            _step(fabric, model, optimizer, batch)
        if fabric.is_global_zero:
            with torch.no_grad():
                losses += [loss_of(model.module, batch) for batch in countoff.eval(evaluation)]
        fabric.barrier()
    countoff.close()
    return losses, model


@healthy()
def saved_and_loaded_by_fabric(options):
    """The state is saved and loaded between epochs."""
    fabric, model, optimizer, loader = _start(48)
    countoff = Countoff(fabric, optimizer=optimizer, **options)
    for epoch in range(3):
        for batch in countoff.train(loader):
            _step(fabric, model, optimizer, batch)
        fabric.save(f"{epoch}.ckpt", {"model": model, "optimizer": optimizer})
    fabric.load("2.ckpt", {"model": model, "optimizer": optimizer})
    countoff.close()
    return model


@healthy()
def adversaries_of_fabric(options):
    """Two models train in turn with two optimizers, as in the examples for images."""
    fabric, first, slow, loader = _start(64)
    other = network(2)
    second, fast = fabric.setup(other, torch.optim.Adam(other.parameters(), 1e-3))
    countoff = Countoff(fabric, optimizer=[slow, fast], **options)
    for _ in range(2):
        for inputs, labels in countoff.train(loader):
            _step(fabric, second, fast, (inputs, labels))
            _step(fabric, second, fast, (inputs + 0.1, labels))
            _step(fabric, first, slow, (inputs, labels))
    countoff.close()
    return first, second


@healthy()
def rollouts_of_fabric(options):
    """Samplers cut a rollout into batches, without a loader, in the manner of policy optimization."""
    from torch.utils.data import BatchSampler, RandomSampler

    fabric, model, optimizer, _ = _start(16)
    countoff = Countoff(fabric, optimizer=optimizer, **options)
    inputs, labels = dataset(64).tensors
    for _ in range(2):
        own = range(own_rank(), 64, 2)
        for chosen in countoff.train(BatchSampler(RandomSampler(own), 4, drop_last=True)):
            _step(fabric, model, optimizer, (inputs[chosen], labels[chosen]))
    countoff.close()
    return model
