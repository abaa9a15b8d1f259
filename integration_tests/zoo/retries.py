"""Errors that are caught: by the loop, around the loop, or around the whole fit."""

import contextlib
import time

import torch
from torch.utils.data import Dataset, DistributedSampler

from countoff.torch import Countoff
from integration_tests.digits import own_rank
from integration_tests.zoo.parts import (
    Listed,
    ddp,
    epochs_of,
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


class PartlyCorrupt(Dataset):
    """Samples of which some cannot be read."""

    def __init__(self, corrupt):
        self.inputs, self.labels = tensors()
        self.corrupt = corrupt

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        if index in self.corrupt:
            raise ValueError(f"sample {index} is corrupt")
        return self.inputs[index], self.labels[index]


def _ordered(data, **more):
    return with_workers(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False), **more)


def _skipping(iterator, *errors):
    """Yields what an iterator gives, and asks again where it raises one of some errors."""
    while True:
        try:
            yield next(iterator)
        except StopIteration:
            return
        except errors:
            continue


@healthy(even=True)
def corrupt_batch_left_out(options):
    """The loop asks for the next batch again where one cannot be read, which happens once on each rank."""
    model, loader = ddp(), _ordered(PartlyCorrupt({10, 11}))
    optimizer = sgd(model)
    count = 0
    with Countoff(optimizer=optimizer, **options) as countoff:
        for _ in range(2):
            for batch in _skipping(iter(countoff.train(loader)), ValueError):
                train_on(model, optimizer, batch)
                count += 1
    return model, count


@healthy(even=True)
def corrupt_batch_of_a_worker(options):
    """The same, where a worker of the loader raises the error."""
    model, loader = ddp(), _ordered(PartlyCorrupt({10, 11}), num_workers=2)
    optimizer = sgd(model)
    count = 0
    with Countoff(optimizer=optimizer, **options) as countoff:
        for batch in _skipping(iter(countoff.train(loader)), ValueError):
            train_on(model, optimizer, batch)
            count += 1
    return model, count


@healthy(even=True)
def storage_that_is_asked_twice(options):
    """An iterator of the user's own raises TimeoutError once per epoch, and goes on when it is asked again."""

    class Slow:
        def __init__(self, batches):
            self.batches = batches

        def __iter__(self):
            self.asked = 0
            return self

        def __next__(self):
            self.asked += 1
            if self.asked == 4:
                raise TimeoutError("slow storage, ask again")
            if self.asked > len(self.batches):
                raise StopIteration
            return self.batches[self.asked - 1]

    model, loader = ddp(), Slow(own_batches(9))
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for _ in range(2):
            for batch in _skipping(iter(countoff.train(loader)), TimeoutError):
                train_on(model, optimizer, batch)
    return model


@healthy(even=True)
def error_in_each_body(options):
    """The body of the loop raises and catches an error of its own in each batch."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for _ in epochs_of(loader):
            for batch in countoff.train(loader):
                with contextlib.suppress(KeyError):
                    train_on(model, optimizer, batch)
                    raise KeyError("no such metric")
    return model


@healthy(even=True)
def epoch_begun_again_after_an_error(options):
    """All ranks leave an epoch by the same error, catch it, and begin the epoch again."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    tries = 0
    with Countoff(optimizer=optimizer, **options) as countoff:
        for epoch in range(2):
            while True:
                try:
                    loader.sampler.set_epoch(epoch + 10 * tries)
                    for number, batch in enumerate(countoff.train(loader)):
                        train_on(model, optimizer, batch)
                        if number == 3 and tries < 2:
                            raise FloatingPointError("the loss is not finite")
                    break
                except FloatingPointError:
                    tries += 1
    return model, tries


@healthy(even=True)
def fit_repeated_with_smaller_batches(options):
    """An error leaves the context on all ranks, is caught, and the fit begins again with a smaller batch."""
    for batch_size in (16, 8, 4):
        model, loader = ddp(), sharded(64, batch_size)
        optimizer = sgd(model)
        try:
            with Countoff(optimizer=optimizer, **options) as countoff:
                for batch in countoff.train(loader):
                    if batch_size > 4:
                        raise RuntimeError("CUDA out of memory.")
                    train_on(model, optimizer, batch)
                return model
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
    return None


@healthy()
def fit_repeated_later_on_one_rank(options):
    """The same, where one rank runs out of memory three seconds after the other."""
    for batch_size in (8, 4):
        model, loader = network(), sharded(64, batch_size)
        optimizer = sgd(model)
        try:
            with Countoff(optimizer=optimizer, **options) as countoff:
                for number, batch in enumerate(countoff.train(loader)):
                    if batch_size > 4 and number == 1:
                        time.sleep(3 * own_rank())
                        raise MemoryError("out of memory")
                    train_on(model, optimizer, batch)
                return model
        except MemoryError:
            continue
    return None


@healthy()
def fit_left_by_a_caught_exit(options):
    """The loop of the first fit calls for an end by SystemExit on all ranks, which the program catches."""
    outcome = []
    for fit in range(2):
        model, loader = ddp(fit), sharded()
        optimizer = sgd(model)
        try:
            with Countoff(optimizer=optimizer, **options) as countoff:
                for number, batch in enumerate(countoff.train(loader)):
                    train_on(model, optimizer, batch)
                    if fit == 0 and number == 2:
                        raise SystemExit("enough")
        except SystemExit as ending:
            outcome.append(str(ending))
        outcome.append(model)
    return outcome


@healthy()
def keyboard_interrupt_caught(options):
    """All ranks raise KeyboardInterrupt after the same batch, catch it, and save their weights."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    countoff = Countoff(optimizer=optimizer, **options)
    try:
        for number, batch in enumerate(countoff.train(loader)):
            train_on(model, optimizer, batch)
            if number == 4:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        torch.save(model.state_dict(), f"interrupted{own_rank()}.pt")
    countoff.close()
    return torch.load(f"interrupted{own_rank()}.pt")


@healthy(even=True)
def stop_iteration_out_of_a_body(options):
    """The body of the loop calls next on a finished iterator, and catches that."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    extras = iter([1, 2, 3])
    left_out = 0
    with Countoff(optimizer=optimizer, **options) as countoff:
        for batch in countoff.train(loader):
            try:
                next(extras)
            except StopIteration:
                left_out += 1
            train_on(model, optimizer, batch)
    return model, left_out


@healthy()
def non_finite_step_left_out_by_all(options):
    """All ranks leave out an optimizer step, because the loss of one is not a number."""
    model, loader = network(), Listed(own_batches(8))
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for number, batch in enumerate(countoff.train(loader)):
            loss = loss_of(model, batch)
            loss.backward()
            if number != 3:
                optimizer.step()
            optimizer.zero_grad()
    return model


@healthy(even=True)
def generator_thrown_into(options):
    """The loop throws an error into a generator around the loader, which catches it and gives the next batch."""

    def patient():
        for batch in countoff.train(loader):
            while True:
                try:
                    yield batch
                    break
                except ValueError:
                    continue

    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        batches = patient()
        for number, batch in enumerate(batches):
            train_on(model, optimizer, batch)
            if number == 3:
                train_on(model, optimizer, batches.throw(ValueError("this one again")))
    return model


@healthy(even=True)
def first_batch_read_until_it_works(options):
    """The first call of next fails on each rank, and a new iterator is made after it."""

    class Flaky(Listed):
        fails = 2

        def __iter__(self):
            if self.fails:
                self.fails -= 1
                raise ConnectionError("storage is not there yet")
            return super().__iter__()

    model, loader = ddp(), Flaky(own_batches(6))
    optimizer = sgd(model)
    tries = 0
    with Countoff(optimizer=optimizer, **options) as countoff:
        while True:
            try:
                counts = train(countoff, model, optimizer, loader, 2)
                break
            except ConnectionError:
                tries += 1
    return model, counts, tries
