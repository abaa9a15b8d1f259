"""Loops with Accelerate: its ways of sharding, its own contexts, and its retries."""

import itertools
import queue
import threading
import time

import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.local_sgd import LocalSGD
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import GradientAccumulationPlugin, find_executable_batch_size
from torch.utils.data import DataLoader, IterableDataset

from countoff.accelerate import Countoff
from integration_tests.digits import own_rank
from integration_tests.zoo.parts import Bucketed, dataset, loss_of, network, sgd, tensors, with_workers
from integration_tests.zoo.registry import healthy


class Stream(IterableDataset):
    """Samples in order, alike on all ranks."""

    def __init__(self, samples=64):
        self.inputs, self.labels = tensors(samples)

    def __iter__(self):
        return zip(self.inputs, self.labels, strict=True)


class SizedStream(Stream):
    """A stream that knows its length."""

    def __len__(self):
        return len(self.inputs)


def accelerator(accumulation=1, **sharding):
    """An Accelerator of a program that has had none before."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    return Accelerator(
        cpu=True,
        gradient_accumulation_steps=accumulation,
        dataloader_config=DataLoaderConfiguration(**sharding),
    )


def shuffled(samples=64, batch_size=4, **more):
    """A loader over so many samples of all ranks together."""
    return with_workers(dataset(samples), batch_size=batch_size, shuffle=True, **more)


def fit(countoff, accelerator, model, optimizer, loader, epochs=2):
    """Trains, which is counted; returns the number of batches of each epoch."""
    counts = []
    for _ in range(epochs):
        counts.append(0)
        for batch in countoff.train(loader):
            step(accelerator, model, optimizer, batch)
            counts[-1] += 1
    return counts


def step(accelerator, model, optimizer, batch):
    """One batch, accumulated as the accelerator is told."""
    with accelerator.accumulate(model):
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()


def prepared(accelerator, *loaders, seed=7):
    """A network and its optimizer, prepared with loaders."""
    model = network(seed)
    return accelerator.prepare(model, sgd(model), *loaders)


def _simple(options, loader, accumulation=1, **sharding):
    own = accelerator(accumulation, **sharding)
    model, optimizer, loader = prepared(own, loader)
    with Countoff(own, **options) as countoff:
        return fit(countoff, own, model, optimizer, loader), model


@healthy(even=True)
def sharded_by_default(options):
    """Accelerate shards a shuffled loader in its own way, and pads the last batch."""
    return _simple(options, shuffled(66))


@healthy(even=True)
def batch_sampler_of_the_users_prepared(options):
    """The batch sampler's class does without the constructor of its base class."""
    return _simple(options, DataLoader(dataset(), batch_sampler=Bucketed(64, divides=False)), even_batches=False)


@healthy(even=True)
def split_batches(options):
    """Each batch is split between the ranks."""
    return _simple(options, shuffled(66, 8), split_batches=True)


@healthy(even=True)
def dispatched_batches(options):
    """Rank 0 reads, and sends each rank its batch."""
    return _simple(options, shuffled(66), dispatch_batches=True)


@healthy(even=True)
def dispatched_and_split(options):
    """Rank 0 reads, and splits each batch between the ranks."""
    return _simple(options, shuffled(66, 8), dispatch_batches=True, split_batches=True)


@healthy(even=True)
def seedable_sampler(options):
    """The sampler is seeded by the epoch."""
    return _simple(options, shuffled(66), use_seedable_sampler=True, data_seed=7)


@healthy(even=True)
def stateful_configuration(options):
    """Loaders are torchdata's, with a state."""
    return _simple(options, shuffled(64), use_stateful_dataloader=True)


@healthy(even=True)
def stream_that_is_sharded(options):
    """An iterable dataset is divided by Accelerate."""
    return _simple(options, DataLoader(Stream(), batch_size=4), dispatch_batches=False)


@healthy(even=True)
def stream_that_is_dispatched(options):
    """An iterable dataset is read by rank 0."""
    return _simple(options, DataLoader(Stream(), batch_size=4))


@healthy(even=True)
def workers_and_own_generator(options):
    """The loader has a worker and a generator of its own, and accumulates two batches."""
    loader = shuffled(66, num_workers=1, generator=torch.Generator().manual_seed(3))
    return _simple(options, loader, accumulation=2)


@healthy(even=True)
def accumulation_with_a_short_end(options):
    """Three batches are accumulated, and the last step of an epoch has two."""
    return _simple(options, shuffled(60), accumulation=3)


@healthy()
def accumulation_across_epochs(options):
    """The accumulation goes on over the end of the epoch."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    plugin = GradientAccumulationPlugin(num_steps=3, sync_with_dataloader=False)
    own = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    model, optimizer, loader = prepared(own, shuffled(64))
    with Countoff(own, epochs=3, **options) as countoff:
        return fit(countoff, own, model, optimizer, loader, 3), model


@healthy()
def first_batches_skipped(options):
    """The first epoch skips three batches by the accelerator's function, the second two by the other one."""
    own = accelerator()
    model, optimizer, loader = prepared(own, shuffled(64))
    counts = []
    with Countoff(own, **options) as countoff:
        counts += fit(countoff, own, model, optimizer, own.skip_first_batches(loader, 3), 1)
        counts += fit(countoff, own, model, optimizer, skip_first_batches(loader, 2), 1)
        counts += fit(countoff, own, model, optimizer, loader, 1)
    return counts, model


@healthy()
def passes_inside_a_pass(options):
    """In the middle of each epoch, the same prepared loader is read once more, for the accuracy on its samples."""
    own = accelerator()
    model, optimizer, loader = prepared(own, shuffled(64))
    counts = []
    with Countoff(own, **options) as countoff:
        for _ in range(2):
            for number, batch in enumerate(countoff.train(loader)):
                step(own, model, optimizer, batch)
                if number == 2:
                    counts.append(sum(len(labels) for _, labels in loader))
    return counts, model


@healthy()
def several_prepares(options):
    """Three models are prepared and trained one after the other, and one fit is never closed."""
    own = accelerator()
    outcome = []
    for number in range(3):
        model, optimizer, loader = prepared(own, shuffled(40 + 8 * number), seed=number)
        countoff = Countoff(own, **options)
        outcome += [fit(countoff, own, model, optimizer, loader), model]
        if number != 1:
            countoff.close()
        own.free_memory()
    return outcome


@healthy()
def batch_size_that_fits(options):
    """The batch size is halved until it fits, with a Countoff inside of the function, and no context."""
    own = accelerator()

    @find_executable_batch_size(starting_batch_size=16)
    def attempt(batch_size):
        own.free_memory()
        model, optimizer, loader = prepared(own, shuffled(64, batch_size))
        countoff = Countoff(own, **options)
        for number, batch in enumerate(countoff.train(loader)):
            if batch_size > 4 and number == 1:
                raise RuntimeError("CUDA out of memory.")
            step(own, model, optimizer, batch)
        return model

    return attempt()  # pyright: ignore[reportCallIssue]  (the decorator gives the batch size)


@healthy(nightly=True)
def batch_size_that_fits_in_a_context(options):
    """The same with the Countoff as a context, which the error leaves, a little later on rank 1."""
    own = accelerator()

    @find_executable_batch_size(starting_batch_size=16)
    def attempt(batch_size):
        own.free_memory()
        model, optimizer, loader = prepared(own, shuffled(64, batch_size))
        with Countoff(own, **options) as countoff:
            for number, batch in enumerate(countoff.train(loader)):
                if batch_size > 4 and number == 1:
                    time.sleep(0.4 * own_rank())
                    raise RuntimeError("CUDA out of memory.")
                step(own, model, optimizer, batch)
        return model

    return attempt()  # pyright: ignore[reportCallIssue]  (the decorator gives the batch size)


@healthy(nightly=True)
def batch_size_that_fits_seconds_later(options):
    """The same where rank 1 is four seconds behind rank 0."""
    own = accelerator()

    @find_executable_batch_size(starting_batch_size=8)
    def attempt(batch_size):
        own.free_memory()
        model, optimizer, loader = prepared(own, shuffled(64, batch_size))
        with Countoff(own, **options) as countoff:
            for number, batch in enumerate(countoff.train(loader)):
                if batch_size > 4 and number == 1:
                    time.sleep(4 * own_rank())
                    raise RuntimeError("CUDA out of memory.")
                step(own, model, optimizer, batch)
        return model

    return attempt()  # pyright: ignore[reportCallIssue]  (the decorator gives the batch size)


@healthy()
def local_sgd(options):
    """The ranks train apart, and their weights are averaged every three steps."""
    own = accelerator()
    model, optimizer, loader = prepared(own, shuffled(64))
    with (
        Countoff(own, **options) as countoff,
        LocalSGD(accelerator=own, model=model, local_sgd_steps=3, enabled=True) as averaging,
    ):
        for batch in countoff.train(loader):
            step(own, model, optimizer, batch)
            averaging.step()
    return model


@healthy()
def trigger_that_ends_an_epoch(options):
    """Rank 1 sets a trigger, and all ranks leave the epoch."""
    own = accelerator()
    model, optimizer, loader = prepared(own, shuffled(64))
    with Countoff(own, **options) as countoff:
        for epoch in range(3):
            for number, batch in enumerate(countoff.train(loader)):
                step(own, model, optimizer, batch)
                if (own_rank(), epoch, number) == (1, 1, 4):
                    own.set_trigger()
                if own.check_trigger():
                    break
    return model


@healthy()
def gathered_metrics(options):
    """Evaluations gather what belongs to the metric, with a padded last batch, before and after training."""
    own = accelerator()
    model, optimizer, loader, evaluation = prepared(own, shuffled(64), DataLoader(dataset(30), batch_size=4))
    labels = []
    with Countoff(own, **options) as countoff:
        for epoch in range(2):
            labels += [own.gather_for_metrics(batch[1]) for batch in countoff.eval(evaluation)]
            fit(countoff, own, model, optimizer, loader, 1)
            del epoch
    return torch.cat(labels), model


@healthy()
def probe_on_the_main_process(options):
    """The main process reads the data again and trains a probe after each epoch."""
    own = accelerator()
    model, optimizer, loader = prepared(own, shuffled(64))
    with Countoff(own, **options) as countoff:
        for _ in range(2):
            fit(countoff, own, model, optimizer, loader, 1)
            if own.is_main_process:
                list(DataLoader(dataset(64), batch_size=4))
                probe = torch.nn.Linear(8, 4)
                for _ in range(9):
                    sgd(probe).step()
            own.wait_for_everyone()
    return model


@healthy()
def prepared_loader_in_a_thread(options):
    """A thread reads the prepared loader into a queue, which is longer on rank 1."""
    own = accelerator()
    model, optimizer, loader = prepared(own, shuffled(1120))

    def work(batches):
        for batch in countoff.train(loader):
            batches.put(batch)
        batches.put(None)

    with Countoff(own, **options) as countoff:
        for _ in range(2):
            batches = queue.Queue(3 + 2 * own_rank())
            thread = threading.Thread(target=work, args=(batches,))
            thread.start()
            while (batch := batches.get()) is not None:
                own.backward(loss_of(model, batch))
                optimizer.step()
                optimizer.zero_grad()
            thread.join()
    return model


@healthy()
def loaders_of_two_lengths_in_turn(options):
    """Trains on short samples first and on long ones later: two loaders, of other lengths and batch sizes."""
    own = accelerator(dispatch_batches=False)
    streams = DataLoader(SizedStream(), batch_size=4), DataLoader(SizedStream(48), batch_size=2)
    model, optimizer, short, long = prepared(own, *streams)
    with Countoff(own, **options) as countoff:
        return [fit(countoff, own, model, optimizer, loader, epochs=2) for loader in (short, long, short)], model


@healthy()
def two_models_in_turn(options):
    """A generator and a discriminator are prepared together, and one of them steps twice per batch."""
    own = accelerator()
    first, second = network(1), network(2)
    first, second, slow, fast, loader = own.prepare(first, second, sgd(first), sgd(second, 0.01), shuffled(64))
    with Countoff(own, **options) as countoff:
        for _ in range(2):
            for number, batch in enumerate(countoff.train(loader)):
                for _ in range(2):
                    own.backward(loss_of(second, batch))
                    fast.step()
                    fast.zero_grad()
                if number % 3 == 2:
                    own.backward(loss_of(first, batch))
                    slow.step()
                    slow.zero_grad()
    return first, second


@healthy()
def steps_over_an_endless_loader(options):
    """The loop counts steps over a cycle of the prepared loader, and evaluates every five."""
    own = accelerator()
    model, optimizer, loader, evaluation = prepared(own, shuffled(48), DataLoader(dataset(16), batch_size=4))
    losses = []
    with Countoff(own, max_steps=17, **options) as countoff:
        batches = (batch for _ in itertools.count() for batch in countoff.train(loader))
        for number in range(17):
            step(own, model, optimizer, next(batches))
            if number % 5 == 4:
                with torch.no_grad():
                    losses += [loss_of(model, batch) for batch in countoff.eval(evaluation)]
    return losses, model


@healthy()
def state_saved_and_loaded(options):
    """The accelerator's state is saved and loaded after each epoch."""
    own = accelerator()
    model, optimizer, loader = prepared(own, shuffled(48))
    with Countoff(own, **options) as countoff:
        for epoch in range(2):
            fit(countoff, own, model, optimizer, loader, 1)
            own.save_state(f"saved{epoch}")
        own.wait_for_everyone()  # one process has written the files
        own.load_state("saved1")
        fit(countoff, own, model, optimizer, loader, 1)
    return model


@healthy()
def schedule_of_the_examples(options):
    """A linear schedule has the length of the loader before prepare times the epochs, as the examples do."""
    own = accelerator()
    loader = shuffled(120)
    model = network()
    optimizer = sgd(model)
    total = len(loader) * 3
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: max(0.0, 1 - number / total))
    model, optimizer, loader, scheduler = own.prepare(model, optimizer, loader, scheduler)
    with Countoff(own, **options) as countoff:
        for _ in range(3):
            for batch in countoff.train(loader):
                step(own, model, optimizer, batch)
                scheduler.step()
    return model, scheduler.get_last_lr()


@healthy()
def parts_of_each_batch_by_torch_alone(options):
    """Each batch is cut into four parts, which are one step, and the backward passes are torch's, not Accelerate's."""
    own = accelerator(4)
    model, optimizer, loader = prepared(own, shuffled(128))
    countoff = Countoff(own, **options)
    for _ in range(2):
        for inputs, labels in countoff.train(loader):
            for part in zip(inputs.chunk(4), labels.chunk(4), strict=True):
                with own.accumulate(model):
                    (loss_of(model, part) / 4).backward()
                    optimizer.step()
                    optimizer.zero_grad()
    countoff.close()
    return model


@healthy()
def several_passes_over_each_batch(options):
    """As in reinforcement learning, each batch is gone over four times in parts, and four parts are a step."""
    own = accelerator(4)
    own.gradient_state.plugin_kwargs["sync_with_dataloader"] = False
    model, optimizer, loader = prepared(own, shuffled(128))
    countoff = Countoff(own, **options)
    for _ in range(2):
        for inputs, labels in countoff.train(loader):
            for _ in range(4):
                for part in zip(inputs.chunk(4), labels.chunk(4), strict=True):
                    step(own, model, optimizer, part)
    countoff.close()
    return model


@healthy()
def accumulation_that_grows_of_accelerate(options):
    """The first batches of the first epoch are a step each, and later ones four together."""
    own = accelerator(4)
    model, optimizer, loader = prepared(own, shuffled(128))
    countoff, done = Countoff(own, **options), 0
    for _ in range(2):
        for batch in countoff.train(loader):
            own.gradient_accumulation_steps = 1 if done < 12 else 4
            step(own, model, optimizer, batch)
            done += 1
    countoff.close()
    return model


@healthy()
def two_models_that_accumulate_together(options):
    """A discriminator steps twice where the generator steps once, with a backward pass for each."""
    own = accelerator(4)
    first, slow, loader = prepared(own, shuffled(128))
    second, fast = prepared(own, seed=8)
    countoff = Countoff(own, **options)
    for _ in range(2):
        for batch in countoff.train(loader):
            with own.accumulate(first, second):
                for model, optimizer in ((second, fast), (second, fast), (first, slow)):
                    own.backward(loss_of(model, batch))
                    optimizer.step()
                    optimizer.zero_grad()
    countoff.close()
    return first, second


@healthy()
def optimizers_that_hold_something_else(options):
    """One optimizer of the user's own holds itself as its optimizer, another one the name of its algorithm."""

    class Own(torch.optim.SGD):
        @property
        def optimizer(self):
            return self

    class Named(torch.optim.SGD):
        optimizer = "sgd"

    models = []
    for kind in (Own, Named):
        own, model = accelerator(), network()
        model, optimizer, loader = own.prepare(model, kind(model.parameters(), lr=0.1), shuffled())
        with Countoff(own, **options) as countoff:
            fit(countoff, own, model, optimizer, loader)
        models.append(model)
    return models


@healthy()
def optimizer_without_its_base(options):
    """The optimizer's class has no groups, does without the constructor of its base class, and its state is saved."""

    class Around(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner = inner

        def step(self, closure=None):
            return self.inner.step(closure)

        def zero_grad(self, set_to_none=True):
            self.inner.zero_grad(set_to_none)

        def state_dict(self):
            return self.inner.state_dict()

        def load_state_dict(self, state_dict):
            self.inner.load_state_dict(state_dict)

    own, model = accelerator(), network()
    model, optimizer, loader = own.prepare(model, Around(sgd(model)), shuffled())
    with Countoff(own, **options) as countoff:
        counts = fit(countoff, own, model, optimizer, loader)
        own.save_state("around")
    return counts, model
