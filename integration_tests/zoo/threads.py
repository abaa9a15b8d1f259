"""Threads beside the training loop: those that read the loader, and those that do something else."""

import asyncio
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from countoff.torch import Countoff
from integration_tests.digits import own_rank
from integration_tests.zoo.parts import Listed, ddp, epochs_of, network, own_batches, sgd, sharded, train, train_on
from integration_tests.zoo.registry import healthy


def _fill(source, batches):
    for batch in source:
        batches.put(batch)
    batches.put(None)


@healthy(even=True)
def queue_filled_by_a_thread(options):
    """A thread reads the loader into a queue, which is longer on rank 1, and the main thread trains."""
    model, loader = ddp(), sharded(1120)
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for _ in epochs_of(loader):
            batches = queue.Queue(maxsize=4 + 3 * own_rank())
            thread = threading.Thread(target=_fill, args=(countoff.train(loader), batches))
            thread.start()
            while (batch := batches.get()) is not None:
                train_on(model, optimizer, batch)
            thread.join()
    return model


def _fill_until(stop, source, batches):
    for batch in source:
        time.sleep(0.02 * own_rank())  # so that less is ahead on rank 1
        while not stop.is_set():
            try:
                batches.put(batch, timeout=0.1)
                break
            except queue.Full:
                pass
        if stop.is_set():
            return


@healthy()
def epoch_that_a_limit_ends_before_its_thread(options):
    """A thread reads the loader into a queue, and the loop leaves after so many batches, which are fewer than read."""
    model, loader = ddp(), sharded(1120)
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for _ in epochs_of(loader):
            batches, stop = queue.Queue(maxsize=4), threading.Event()
            thread = threading.Thread(target=_fill_until, args=(stop, countoff.train(loader), batches))
            thread.start()
            for _ in range(12):
                train_on(model, optimizer, batches.get())
                time.sleep(0.01)
            stop.set()
            thread.join()
    return model


@healthy(even=True)
def whole_epoch_read_by_a_thread(options):
    """A thread reads the next epoch while the main thread trains on the one before."""
    model, loader = ddp(), sharded(generator=torch.Generator())
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff, ThreadPoolExecutor(1) as pool:
        reading = pool.submit(list, countoff.train(loader))
        for epoch in range(3):
            batches = reading.result()
            if epoch < 2:
                loader.sampler.set_epoch(epoch + 1)
                reading = pool.submit(list, countoff.train(loader))
            for batch in batches:
                train_on(model, optimizer, batch)
    return model


@healthy()
def two_threads_take_batches(options):
    """Two threads take batches of one iterator that is safe with threads."""

    class Shared:
        def __init__(self, batches):
            self.batches = batches

        def __iter__(self):
            self.waiting = queue.SimpleQueue()
            for batch in self.batches:
                self.waiting.put(batch)
            return self

        def __next__(self):
            try:
                return self.waiting.get_nowait()
            except queue.Empty:
                raise StopIteration from None

    loader = Shared(own_batches(16))
    taken = []
    with Countoff(**options) as countoff:
        iterator = iter(countoff.train(loader))
        first_taken = threading.Barrier(2)

        def work():
            taken.append(next(iterator))
            first_taken.wait()
            while (batch := next(iterator, None)) is not None:
                taken.append(batch)

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return len(taken), sorted(inputs.sum().item() for inputs, _ in taken)


@healthy(even=True)
def whole_training_in_a_thread(options):
    """The whole loop runs in a thread, and the main thread waits for it."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        thread = threading.Thread(target=train, args=(countoff, model, optimizer, loader))
        thread.start()
        thread.join()
    return model


@healthy(even=True)
def whole_fit_in_a_thread(options):
    """A thread makes the Countoff, trains, and closes it."""
    model, loader = ddp(), sharded()

    def work():
        optimizer = sgd(model)
        with Countoff(optimizer=optimizer, **options) as countoff:
            train(countoff, model, optimizer, loader)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()
    return model


@healthy()
def writer_in_a_thread(options):
    """A thread writes what the loop measures, and stops by a sentinel."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    lines, written = queue.Queue(), []
    thread = threading.Thread(target=lambda: written.extend(iter(lines.get, None)))
    thread.start()
    with Countoff(optimizer=optimizer, **options) as countoff:
        for epoch in epochs_of(loader):
            for batch in countoff.train(loader):
                lines.put((epoch, train_on(model, optimizer, batch)))
    lines.put(None)
    thread.join()
    return model, written


@healthy()
def other_training_in_a_thread(options):
    """A thread of rank 0 trains a small probe with its own optimizer while the loop runs."""
    model, loader, own = ddp(), sharded(), network(3).eval()
    optimizer = sgd(model)

    def probe():
        own_optimizer = sgd(own)
        for batch in own_batches(10):
            train_on(own, own_optimizer, batch)

    with Countoff(optimizer=optimizer, **options) as countoff:
        thread = threading.Thread(target=probe if own_rank() == 0 else int)
        thread.start()
        train(countoff, model, optimizer, loader)
        thread.join()
    return model, own


@healthy()
def optimizer_step_in_a_thread(options):
    """The backward pass and the optimizer's step are done by a thread, batch by batch."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff, ThreadPoolExecutor(1) as pool:
        for _ in epochs_of(loader):
            for batch in countoff.train(loader):
                pool.submit(train_on, model, optimizer, batch).result()
    return model


@healthy(even=True)
def asynchronous_loop(options):
    """The loop is a coroutine, which gives way to another one in each batch."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    beats = []

    async def beat():
        while len(beats) < 16:
            beats.append(len(beats))
            await asyncio.sleep(0)

    async def fit():
        for _ in epochs_of(loader):
            for batch in countoff.train(loader):
                train_on(model, optimizer, batch)
                await asyncio.sleep(0)

    async def both():
        await asyncio.gather(fit(), beat())

    with Countoff(optimizer=optimizer, **options) as countoff:
        asyncio.run(both())
    return model, beats


@healthy()
def asynchronous_source(options):
    """An asynchronous generator reads the loader in the threads of an executor."""
    model, loader = ddp(), Listed(own_batches(10))
    optimizer = sgd(model)

    async def batches():
        iterator = iter(countoff.train(loader))
        while (batch := await asyncio.to_thread(next, iterator, None)) is not None:
            yield batch

    async def fit():
        for _ in range(2):
            async for batch in batches():
                train_on(model, optimizer, batch)

    with Countoff(optimizer=optimizer, **options) as countoff:
        asyncio.run(fit())
    return model


@healthy()
def batches_over_a_pool(options):
    """A pool of threads maps over the loader, which one of them reads, and gives the batches in order."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff, ThreadPoolExecutor(3) as pool:
        for _ in epochs_of(loader):
            for batch in pool.map(lambda pair: (pair[0] * 2, pair[1]), countoff.train(loader)):
                train_on(model, optimizer, batch)
    return model


@healthy()
def iterator_made_by_another_thread(options):
    """A thread makes the iterator of each epoch, and the main thread takes the batches."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff, ThreadPoolExecutor(1) as pool:
        for _ in epochs_of(loader):
            for batch in pool.submit(iter, countoff.train(loader)).result():
                train_on(model, optimizer, batch)
    return model
