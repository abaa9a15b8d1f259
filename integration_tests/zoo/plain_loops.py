"""Loops of plain PyTorch: the many ways in which a program takes batches out of a loader."""

import itertools
import json
import time
from collections import deque
from functools import partial
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from countoff.torch import Countoff
from integration_tests.digits import own_rank
from integration_tests.zoo.parts import (
    Listed,
    agreed,
    ddp,
    epochs_of,
    evaluate,
    loss_of,
    network,
    own_batches,
    sgd,
    sharded,
    tensors,
    train,
    train_on,
    with_workers,
)
from integration_tests.zoo.registry import healthy


@healthy(even=True)
def iterator_by_hand(options):
    """The loop holds the iterator and calls next with a sentinel."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for _ in epochs_of(loader):
            iterator = iter(countoff.train(loader))
            while (batch := next(iterator, None)) is not None:
                train_on(model, optimizer, batch)
    return model


@healthy(even=True)
def steps_without_epochs(options):
    """A number of steps is trained, and the iterator is made anew whenever it ends."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, max_steps=21, **options) as countoff:
        iterator, epoch = iter(countoff.train(loader)), 0
        for _ in range(21):
            try:
                batch = next(iterator)
            except StopIteration:
                epoch += 1
                loader.sampler.set_epoch(epoch)
                iterator = iter(countoff.train(loader))
                batch = next(iterator)
            train_on(model, optimizer, batch)
    return model


@healthy(even=True)
def endless_generator(options):
    """A generator goes over the loader for ever, and islice takes some batches of it."""

    def forever():
        for epoch in itertools.count():
            loader.sampler.set_epoch(epoch)
            yield from countoff.train(loader)

    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for batch in itertools.islice(forever(), 19):
            train_on(model, optimizer, batch)
    return model


@healthy(even=True)
def some_batches_of_each_epoch(options):
    """Every epoch takes five of eight batches by islice."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for _ in epochs_of(loader, 3):
            for batch in itertools.islice(countoff.train(loader), 5):
                train_on(model, optimizer, batch)
    return model


@healthy(even=True)
def same_steps_over_unequal_shares(options):
    """Ranks have five and four batches, and every epoch takes three of them by islice."""
    model, loader = ddp(), Listed(own_batches(5 - own_rank()))
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for _ in range(3):
            for batch in itertools.islice(countoff.train(loader), 3):
                train_on(model, optimizer, batch)
    return model


@healthy(even=True)
def break_that_all_ranks_agree_on(options):
    """All ranks leave the epoch after the same batch, because one of them has asked for it."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for epoch in epochs_of(loader, 3):
            for number, batch in enumerate(countoff.train(loader)):
                train_on(model, optimizer, batch)
                if agreed(own_rank() == 1 and number == 2 + epoch):
                    break
    return model


@healthy(even=True)
def return_out_of_two_loops(options):
    """A function returns out of the second epoch, on all ranks after the same step."""

    def fit():
        steps = 0
        for _ in epochs_of(loader, 9):
            for batch in countoff.train(loader):
                train_on(model, optimizer, batch)
                steps += 1
                if steps == 13:
                    return

    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        fit()
        fit()
    return model


@healthy()
def two_passes_in_step(options):
    """The loop takes pairs of batches from two passes over one loader at once, and counts both."""
    model, loader = ddp(), with_workers(own_batches(8), batch_size=None, shuffle=True)
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for _ in range(2):
            for first, second in zip(countoff.train(loader), countoff.train(loader), strict=True):
                (loss_of(model, first) + loss_of(model, second)).backward()
                optimizer.step()
                optimizer.zero_grad()
    return model


@healthy(even=True)
def labelled_and_unlabelled(options):
    """The counted pass is zipped with a longer loader, which is not counted."""
    model, loader, more = ddp(), sharded(64), sharded(160, seed=3)
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for _ in epochs_of(loader):
            for labelled, (extra, _) in zip(countoff.train(loader), more, strict=False):
                (loss_of(model, labelled) + model(extra).square().mean()).backward()
                optimizer.step()
                optimizer.zero_grad()
    return model


@healthy(even=True)
def all_batches_in_a_list(options):
    """The loader is read into a list at the start of each epoch, and the list is trained on in reverse."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for _ in epochs_of(loader):
            for batch in reversed(list(countoff.train(loader))):
                train_on(model, optimizer, batch)
    return model


@healthy(even=True)
def read_once_and_trained_often(options):
    """The loader is read once, and many epochs are trained on the copy."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        batches = list(loader)
        for _ in range(3):
            for batch in countoff.train(batches):
                train_on(model, optimizer, batch)
    return model


@healthy(even=True)
def prefetcher_of_one_batch(options):
    """A class holds the next batch while the present one is trained on, as prefetchers to the GPU do."""

    class Prefetcher:
        def __init__(self, source):
            self.source = iter(source)
            self.fetch()

        def fetch(self):
            self.held = next(self.source, None)

        def next(self):
            batch = self.held
            if batch is not None:
                self.fetch()
            return batch

    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for _ in epochs_of(loader):
            prefetcher = Prefetcher(countoff.train(loader))
            while (batch := prefetcher.next()) is not None:
                train_on(model, optimizer, batch)
    return model


@healthy(even=True)
def window_of_batches(options):
    """A deque holds the last three batches, and each step trains on all of them."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for _ in epochs_of(loader):
            window = deque(maxlen=3)
            for batch in countoff.train(loader):
                window.append(batch)
                sum(loss_of(model.module, each) for each in list(window)[:-1])
                train_on(model, optimizer, batch)
    return model


def _doubled(batch):
    return batch[0] * 2, batch[1]


@healthy(even=True)
def batches_through_map(options):
    """The loop iterates a lazy map over the loader, which moves and scales each batch."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for _ in epochs_of(loader):
            for batch in map(_doubled, countoff.train(loader)):
                train_on(model, optimizer, batch)
    return model


@healthy(even=True)
def progress_bar_around_the_loader(options):
    """A class of the user's own iterates the loader and asks its length, as a progress bar does."""

    class Bar:
        def __init__(self, source):
            self.source, self.total, self.shown = source, len(source), 0

        def __iter__(self):
            for item in self.source:
                yield item
                self.shown += 1

    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    shown = []
    with Countoff(optimizer=optimizer, **options) as countoff:
        for _ in epochs_of(loader):
            bar = Bar(countoff.train(loader))
            for batch in bar:
                train_on(model, optimizer, batch)
            shown.append((bar.shown, bar.total))
    return model, shown


@healthy(even=True)
def iterator_asked_after_its_end(options):
    """The iterator is asked again after its end, and ends again."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    ends = 0
    with Countoff(optimizer=optimizer, **options) as countoff:
        for _ in epochs_of(loader):
            iterator = iter(countoff.train(loader))
            for batch in iterator:
                train_on(model, optimizer, batch)
            for _ in range(3):
                ends += next(iterator, None) is None
    return model, ends


@healthy()
def length_of_the_iterator(options):
    """The program asks the iterator for its length."""
    loader = sharded()
    with Countoff(**options) as countoff:
        iterator = iter(countoff.train(loader))
        return [len(iterator), sum(1 for _ in iterator)]


@healthy(even=True)
def iterator_of_an_iterator(options):
    """The loop calls iter on an iterator that has already given two batches."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for _ in epochs_of(loader):
            iterator = iter(countoff.train(loader))
            train_on(model, optimizer, next(iterator))
            train_on(model, optimizer, next(iterator))
            for batch in iter(iterator):
                train_on(model, optimizer, batch)
    return model


@healthy()
def no_optimizer_at_all(options):
    """Features are extracted with gradients disabled, and nothing is trained."""
    model, loader = network().eval(), sharded()
    with Countoff(**options) as countoff, torch.no_grad():
        return [model(inputs) for _ in range(2) for inputs, _ in countoff.train(loader)]


@healthy()
def no_epoch_at_all(options):
    """The run has nothing left to train: its loop has no epoch."""
    model, loader = ddp(), sharded()
    with Countoff(optimizer=sgd(model), epochs=0, **options) as countoff:
        train(countoff, model, sgd(model), loader, 0)
    return model


@healthy(even=True)
def phases_with_loaders_of_their_own(options):
    """Three phases follow each other, each with a loader, an optimizer and a Countoff of its own."""
    model = ddp()
    counts = []
    for phase in range(3):
        loader, optimizer = sharded(32 + 16 * phase, 4, seed=phase), sgd(model, 0.1 / (1 + phase))
        with Countoff(optimizer=optimizer, **options) as countoff:
            counts += train(countoff, model, optimizer, loader)
    return model, counts


@healthy()
def trains_on_after_the_end(options):
    """The fit is closed in the middle of an epoch, and ranks then read different numbers of batches."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    countoff = Countoff(optimizer=optimizer, **options)
    train(countoff, model, optimizer, loader)
    loader.sampler.set_epoch(2)
    for number, batch in enumerate(countoff.train(loader)):
        train_on(model, optimizer, batch)
        if number == 3:
            countoff.close()
    extra = [batch for _, batch in zip(range(1 + own_rank()), loader, strict=False)]
    return model, len(extra)


@healthy()
def counted_from_the_second_epoch(options):
    """The first epoch is trained before anything is counted."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    for batch in loader:
        train_on(model, optimizer, batch)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for epoch in epochs_of(loader, start=1):
            for batch in countoff.train(loader, epoch=epoch):
                train_on(model, optimizer, batch)
    return model


@healthy()
def loader_made_for_each_epoch(options):
    """Every epoch makes a loader and a Countoff."""
    model = ddp()
    optimizer = sgd(model)
    for epoch in range(3):
        loader = sharded(64, seed=epoch)
        with Countoff(optimizer=optimizer, **options) as countoff:
            for batch in countoff.train(loader, epoch=epoch):
                train_on(model, optimizer, batch)
    return model


@healthy()
def counted_generator(options):
    """The batches come from a generator."""
    model = ddp()
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for batch in countoff.train(batch for batch in own_batches(9)):
            train_on(model, optimizer, batch)
    return model


@healthy(even=True)
def counted_list(options):
    """The batches are a plain list, and each pass over it is an epoch."""
    model = ddp()
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        batches = own_batches(7)
        for _ in range(3):
            for batch in countoff.train(batches):
                train_on(model, optimizer, batch)
    return model


@healthy()
def counted_function(options):
    """A function that returns the next batch is called for each of four micro-batches of a step."""
    model = ddp()
    optimizer = sgd(model)
    source = itertools.cycle(own_batches(24))
    with Countoff(optimizer=optimizer, gradient_accumulation_steps=4, batch_size=4, **options) as countoff:
        batches = countoff.train(iter(partial(next, source), None))
        for _ in range(6):
            for _ in range(4):
                loss_of(model, next(batches)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


@healthy(even=True)
def one_slow_rank(options):
    """Rank 1 sleeps in each batch, and no collective holds the ranks together."""
    model, loader = network(), sharded(48)
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for _ in epochs_of(loader):
            for batch in countoff.train(loader):
                train_on(model, optimizer, batch)
                time.sleep(0.05 * own_rank())
    return model


@healthy(even=True, nightly=True)
def many_tiny_batches(options):
    """An epoch has three thousand batches of one sample, most of which are not trained on."""
    model, loader = ddp(), Listed(own_batches(50) * 60)
    optimizer = sgd(model, 0.01)
    count = 0
    with Countoff(optimizer=optimizer, **options) as countoff:
        for batch in countoff.train(loader):
            count += 1
            if count % 30 == 0:
                train_on(model, optimizer, batch)
    return model, count


@healthy()
def rank_with_smaller_batches(options):
    """A slower rank has smaller batches, each rank weights its loss by its samples, and the program says so."""
    inputs, labels = tensors(64)
    mine = slice(0, 48) if own_rank() == 0 else slice(48, 64)
    loader = DataLoader(TensorDataset(inputs[mine], labels[mine]), batch_size=6 if own_rank() == 0 else 2)
    model = ddp()
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, levels={"PlanMismatch": "off"}, **options) as countoff:
        for _ in range(2):
            for batch in countoff.train(loader):
                (loss_of(model, batch) * len(batch[0]) / 4).backward()
                optimizer.step()
                optimizer.zero_grad()
    return model


@healthy()
def barrier_in_each_batch(options):
    """The ranks wait for each other in each batch, and gather objects at the end of each epoch."""
    model, loader = ddp(), sharded(32)
    optimizer = sgd(model)
    gathered = []
    with Countoff(optimizer=optimizer, **options) as countoff:
        for _ in epochs_of(loader):
            for batch in countoff.train(loader):
                train_on(model, optimizer, batch)
                dist.barrier()
            everything = [None, None]
            dist.all_gather_object(everything, {"rank": own_rank()})
            gathered.append(everything)
    return model, gathered


@healthy(ranks=3)
def three_ranks(options):
    """Three ranks share a dataset that three does not divide."""
    model, loader = ddp(), sharded(64)
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        return train(countoff, model, optimizer, loader), model


@healthy()
def optimizer_with_a_step_of_zero(options):
    """The learning rate is zero in the first epoch, so that the weights do not move."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model, 0.0)
    with Countoff(optimizer=optimizer, **options) as countoff:
        train(countoff, model, optimizer, loader, 1)
        optimizer.param_groups[0]["lr"] = 0.1
        train(countoff, model, optimizer, loader, 1, start=1)
    return model


@healthy()
def range_without_a_length(options):
    """The loop counts its steps by a range that is longer than any length of Python, and breaks out of it."""
    model, batches = ddp(), own_batches()
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for number in countoff.train(range(10**20)):
            if number == len(batches):
                break
            train_on(model, optimizer, batches[number])
    return model


@healthy()
def numbers_of_numpy(options):
    """Epochs and positions are numbers of numpy, evaluations are named by numbers, and the state is kept as JSON."""
    model, loader, first = ddp(), sharded(), cast("Any", np.int64(2))
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for epoch in np.arange(3):
            loader.sampler.set_epoch(int(epoch))
            batches = itertools.islice(loader, 2, None) if epoch == 0 else loader
            for batch in countoff.train(batches, epoch=epoch, position=first * (epoch == 0)):
                train_on(model, optimizer, batch)
                json.dumps(countoff.state_dict())
            for number, evaluated in enumerate([loader, own_batches(3)]):
                evaluate(model, countoff.eval(evaluated, cast("Any", number)))
    return model
