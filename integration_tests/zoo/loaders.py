"""Loaders of all kinds: classes of the user's own, streams, samplers, workers, and what changes from epoch to epoch."""

import itertools
from collections import UserList
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
    random_split,
)

from countoff.torch import Countoff
from integration_tests.digits import own_rank
from integration_tests.zoo.parts import (
    Bucketed,
    Listed,
    Prefetching,
    Shares,
    Unsized,
    dataset,
    ddp,
    loss_of,
    own_batches,
    sgd,
    sharded,
    tensors,
    train,
    train_on,
    with_workers,
)
from integration_tests.zoo.registry import healthy


class Stream(IterableDataset):
    """This rank's and this worker's share of some samples."""

    def __init__(self, samples=64):
        self.inputs, self.labels = tensors(samples)

    def __iter__(self):
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        for index in range(own_rank() * workers + number, len(self.inputs), 2 * workers):
            yield self.inputs[index], self.labels[index]


def _fit(loader, options, epochs=3, **more):
    model = ddp()
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options, **more) as countoff:
        counts = train(countoff, model, optimizer, loader, epochs)
    return counts, model


@healthy(even=True)
def class_with_getitem_only(options):
    """The loader has __getitem__ and __len__ beside __iter__, and the program indexes it too."""

    class Indexed(Listed):
        def __getitem__(self, index):
            return self.batches[index]

    loader = Indexed(own_batches(6))
    return _fit(loader, options), loader[2], loader[-1]


@healthy(even=True)
def class_with_slots(options):
    """The loader's class has slots, no dictionary, and no weak references."""

    class Slotted:
        __slots__ = ("batches",)

        def __init__(self, batches):
            self.batches = batches

        def __iter__(self):
            return iter(self.batches)

    model = ddp()
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        return train(countoff, model, optimizer, Slotted(own_batches(6))), model


@healthy(even=True)
def batch_sampler_without_its_base(options):
    """The batch sampler's class does without the constructor of its base class."""
    return _fit(DataLoader(dataset(), batch_sampler=Bucketed(64)), options)


@healthy(even=True)
def distributed_sampler_without_its_base(options):
    """The distributed sampler's class does without the constructor of its base class."""
    model = ddp()
    optimizer, loader = sgd(model), DataLoader(dataset(), batch_size=4, sampler=Shares(64))
    with Countoff(optimizer=optimizer, **options) as countoff:
        return [train_on(model, optimizer, batch) for _ in range(2) for batch in countoff.train(loader)], model


@healthy(even=True)
def data_loader_without_its_base(options):
    """The loader's class is a DataLoader around another one, and does without the constructor of its base class."""
    model = ddp()
    optimizer, loader = sgd(model), Prefetching(sharded())
    with Countoff(optimizer=optimizer, **options) as countoff:
        for batch in countoff.train(loader):
            train_on(model, optimizer, batch)
        return [loss_of(model.module, batch).item() for batch in countoff.eval(loader)], model


@healthy(even=True)
def class_that_forwards_all(options):
    """The loader forwards every attribute to the one inside it."""

    class Forwarding:
        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            if name == "inner":
                raise AttributeError(name)
            return getattr(self.inner, name)

        def __iter__(self):
            for inputs, labels in self.inner:
                yield inputs + 1, labels

    return _fit(Forwarding(sharded()), options)


@healthy(even=True)
def class_that_iterates_itself(options):
    """The loader is its own iterator, and begins again with each call of iter."""

    class Own:
        def __init__(self, batches):
            self.batches = batches

        def __iter__(self):
            self.at = 0
            return self

        def __next__(self):
            if self.at == len(self.batches):
                raise StopIteration
            self.at += 1
            return self.batches[self.at - 1]

    return _fit(Own(own_batches(6)), options)


@healthy(even=True)
def class_that_counts_its_epochs(options):
    """The loader shuffles by the number of its own passes."""

    class Counting:
        def __init__(self):
            self.epoch, (self.inputs, self.labels) = 0, tensors()

        def __iter__(self):
            generator = torch.Generator().manual_seed(self.epoch)
            self.epoch += 1
            for chosen in torch.randperm(64, generator=generator)[own_rank() :: 2].split(4):
                yield self.inputs[chosen], self.labels[chosen]

    return _fit(Counting(), options)


@healthy(even=True)
def subclass_of_a_list(options):
    """The loader is a UserList of batches."""
    return _fit(UserList(own_batches(6)), options)


@healthy(even=True)
def workers_that_persist(options):
    """The loader keeps its two workers over the epochs."""
    return _fit(sharded(64, num_workers=2, persistent_workers=True, prefetch_factor=3), options)


@healthy(even=True, nightly=True)
def workers_with_numpy_noise(options):
    """The workers draw random numbers of numpy and torch for each sample."""

    class Noisy(Dataset):
        def __init__(self):
            self.inputs, self.labels = tensors()

        def __len__(self):
            return 64

        def __getitem__(self, index):
            noise = torch.randn(8) + torch.from_numpy(np.random.randn(8)).float()
            return self.inputs[index] + 0.1 * noise, self.labels[index]

    data = Noisy()
    seeds = partial(_seed_numpy, own_rank())
    return _fit(sharded(data=data, num_workers=2, worker_init_fn=seeds), options)


def _seed_numpy(rank, worker):
    np.random.seed(1000 * rank + worker)


@healthy(even=True)
def stream_without_length(options):
    """An iterable dataset without a length gives each rank its share."""
    return _fit(with_workers(Stream(), batch_size=4), options)


@healthy(even=True)
def stream_over_workers(options):
    """The same with two workers."""
    return _fit(with_workers(Stream(), batch_size=4, num_workers=2), options)


@healthy(even=True)
def shuffled_by_an_own_generator(options):
    """The loader shuffles this rank's share by a generator of its own, and has workers."""
    inputs, labels = tensors()
    data = torch.utils.data.TensorDataset(inputs[own_rank() :: 2], labels[own_rank() :: 2])
    generator = torch.Generator().manual_seed(5 + own_rank())
    return _fit(with_workers(data, batch_size=4, shuffle=True, num_workers=2, generator=generator), options), (
        generator.get_state()
    )


@healthy(even=True)
def shuffled_by_the_global_generator(options):
    """The loader shuffles this rank's share by torch's global generator."""
    data = Subset(dataset(), range(own_rank(), 64, 2))
    return _fit(with_workers(data, batch_size=4, shuffle=True), options)


@healthy(even=True)
def weighted_draws_with_replacement(options):
    """Each rank draws from the whole dataset, with replacement, by weights and a generator of its own."""
    generator = torch.Generator().manual_seed(9 + own_rank())
    sampler = WeightedRandomSampler([0.1 + index / 64 for index in range(64)], 32, generator=generator)
    return _fit(with_workers(dataset(), batch_size=4, sampler=sampler), options)


@healthy(even=True)
def sampler_of_a_subset(options):
    """A SubsetRandomSampler draws this rank's own half of the indices."""
    generator = torch.Generator().manual_seed(3)
    sampler = SubsetRandomSampler(range(own_rank(), 64, 2), generator=generator)
    return _fit(with_workers(dataset(), batch_size=4, sampler=sampler), options)


@healthy(even=True)
def batch_sampler_by_hand(options):
    """A BatchSampler around a DistributedSampler makes the batches, and the last small one is dropped."""
    data = dataset(70)
    sampler = DistributedSampler(data)
    loader = with_workers(data, batch_sampler=BatchSampler(sampler, 4, drop_last=True))
    model = ddp()
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for epoch in range(2):
            sampler.set_epoch(epoch)
            train(countoff, model, optimizer, loader, 1)
    return model


@healthy(even=True)
def batches_of_like_length(options):
    """A batch sampler groups samples by length into batches of different sizes, equally many on each rank."""

    class Grouped(Sampler):
        sizes = (2, 6, 3, 5, 4, 4)

        def __iter__(self):
            own = iter(range(own_rank(), 64, 2))
            return iter([list(itertools.islice(own, size)) for size in self.sizes])

        def __len__(self):
            return len(self.sizes)

    return _fit(with_workers(dataset(), batch_sampler=Grouped()), options)


@healthy(even=True)
def no_automatic_batching(options):
    """The dataset itself gives whole batches, and the loader has batch_size=None."""
    return _fit(with_workers(own_batches(7), batch_size=None, num_workers=1), options)


@healthy(even=True)
def parts_that_are_joined(options):
    """The dataset is a concatenation of parts of a random split."""
    first, second, _ = random_split(dataset(80), [0.5, 0.3, 0.2], torch.Generator().manual_seed(1))
    return _fit(sharded(data=ConcatDataset([second, first])), options)


@healthy(even=True)
def chain_of_streams(options):
    """Two streams follow each other in one loader."""
    return _fit(with_workers(ChainDataset([Stream(32), Stream(24)]), batch_size=4), options)


@healthy(even=True)
def interleaved_loaders(options):
    """A loader of the user's own takes turns between two others by fixed probabilities."""

    class Mixed:
        def __init__(self, *loaders):
            self.loaders, self.epoch = loaders, 0

        def __iter__(self):
            turns = np.random.default_rng(self.epoch).permutation([0] * 8 + [1] * 4)
            self.epoch += 1
            iterators = [iter(loader) for loader in self.loaders]
            for turn in turns:
                yield next(iterators[turn])

    return _fit(Mixed(Listed(own_batches(8)), Listed(own_batches(4, seed=2))), options)


@healthy(even=True)
def growing_epochs(options):
    """A sampler gives more samples in each epoch, and its length is always right."""

    class Growing(Sampler):
        epoch = 0

        def __len__(self):
            return len(range(own_rank(), 16 * (self.epoch + 2), 2))

        def __iter__(self):
            return iter(range(own_rank(), 16 * (self.epoch + 2), 2))

    sampler = Growing()
    loader = with_workers(dataset(128), batch_size=4, sampler=sampler)
    model = ddp()
    optimizer = sgd(model)
    lengths = []
    with Countoff(optimizer=optimizer, **options) as countoff:
        for epoch in range(4):
            sampler.epoch = epoch
            lengths.append((len(loader), train(countoff, model, optimizer, loader, 1)))
    return model, lengths


@healthy()
def growing_dataset(options):
    """The dataset of this rank grows between the epochs, by as much on each rank."""
    samples = list(zip(*tensors(200), strict=True))
    data = samples[own_rank() : 64 : 2]
    loader = with_workers(data, batch_size=4)
    model = ddp()
    optimizer = sgd(model)
    lengths = []
    with Countoff(optimizer=optimizer, **options) as countoff:
        for epoch in range(3):
            lengths.append((len(loader), train(countoff, model, optimizer, loader, 1)))
            data += samples[64 + 16 * epoch + own_rank() : 80 + 16 * epoch : 2]
    return model, lengths


@healthy()
def batch_size_by_a_schedule(options):
    """A batch sampler doubles its batch size in each epoch, on all ranks."""
    data = dataset(64)
    sampler = BatchSampler(DistributedSampler(data, shuffle=False), 2, drop_last=False)
    loader = with_workers(data, batch_sampler=sampler)
    model = ddp()
    optimizer = sgd(model)
    lengths = []
    with Countoff(optimizer=optimizer, **options) as countoff:
        for _ in range(3):
            lengths.append((len(loader), train(countoff, model, optimizer, loader, 1)))
            sampler.batch_size *= 2
    return model, lengths


@healthy(even=True)
def empty_loader_in_one_epoch(options):
    """The second of three epochs has no batch on any rank."""

    class Emptied(Unsized):
        epoch = 0

        def __iter__(self):
            self.epoch += 1
            return iter([] if self.epoch == 2 else self.batches)

    return _fit(Emptied(own_batches(5)), options)


@healthy()
def position_of_its_iterator(options):
    """The loader's iterator tells its position, which the loop saves with each fourth batch."""

    class Positioned:
        def __init__(self, batches):
            self.batches, self.at = iter(batches), 0

        def __iter__(self):
            return self

        def __next__(self):
            batch = next(self.batches)
            self.at += 1
            return batch

        def get_state(self):
            return self.at

    class Source(Listed):
        def __iter__(self):
            return Positioned(self.batches)

    model, loader = ddp(), Source(own_batches(9))
    optimizer = sgd(model)
    numbers = []
    with Countoff(optimizer=optimizer, **options) as countoff:
        for _ in range(2):
            iterator = iter(loader)
            for number, batch in enumerate(countoff.train(iterator)):
                train_on(model, optimizer, batch)
                if number % 4 == 0:
                    numbers.append(iterator.get_state())
    return model, numbers


@healthy()
def closed_iterator(options):
    """The loop closes the iterator of a pass in the middle of an epoch."""
    model, loader = ddp(), Unsized(own_batches(8))
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for _ in range(2):
            iterator: Any = iter(countoff.train(loader))
            for _, batch in zip(range(4), iterator, strict=False):
                train_on(model, optimizer, batch)
            iterator.close()
    return model


@healthy(even=True)
def collate_with_a_closure(options):
    """The collate function is a closure that counts the samples of all its calls."""
    calls = []

    def collate(samples):
        calls.append(len(samples))
        return torch.stack([each for each, _ in samples]), torch.tensor([label for _, label in samples])

    return _fit(sharded(64, collate_fn=collate), options), sum(calls)


@healthy(even=True)
def buffer_that_is_filled_again(options):
    """The loader fills one pair of tensors again for each batch."""

    class Reusing(Listed):
        def __iter__(self):
            held = [torch.empty_like(each) for each in self.batches[0]]
            for batch in self.batches:
                for own, new in zip(held, batch, strict=True):
                    own.copy_(new)
                yield held

    return _fit(Reusing(own_batches(8)), options)


@healthy(even=True)
def last_batch_is_smaller(options):
    """The last batch has two samples, on each rank."""
    return _fit(sharded(60, 4), options)


@healthy(even=True)
def fewer_samples_than_a_batch(options):
    """Each rank has three samples, and batches of four."""
    return _fit(sharded(6, 4), options)


@healthy()
def sampler_replaced_between_epochs(options):
    """The sampler's order is drawn on rank 0 and broadcast in each epoch."""
    order = torch.empty(64, dtype=torch.long)

    class Broadcast(Sampler):
        def __len__(self):
            return 32

        def __iter__(self):
            if own_rank() == 0:
                order.copy_(torch.randperm(64))
            torch.distributed.broadcast(order, 0)
            return iter(order[own_rank() :: 2].tolist())

    return _fit(with_workers(dataset(), batch_size=4, sampler=Broadcast()), options)


@healthy(even=True)
def every_rank_reads_the_same_order(options):
    """Ranks read one shuffled order, and each takes every second batch of it."""

    class EverySecond:
        def __init__(self):
            generator = torch.Generator().manual_seed(4)
            sampler = RandomSampler(dataset(), generator=generator)
            self.inner = DataLoader(dataset(), batch_size=4, sampler=sampler)

        def __iter__(self):
            return itertools.islice(iter(self.inner), own_rank(), None, 2)

    return _fit(EverySecond(), options)


@healthy()
def skipped_at_a_resume(options):
    """The first epoch begins behind three batches, which islice skips on all ranks."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, start_step=3, **options) as countoff:
        loader.sampler.set_epoch(0)
        for batch in countoff.train(itertools.islice(loader, 3, None), position=3):
            train_on(model, optimizer, batch)
        train(countoff, model, optimizer, loader, 1, start=1)
    return model


@healthy(even=True)
def sequence_in_order(options):
    """Each rank reads its half of the dataset in order, in each epoch the same."""
    half = range(32 * own_rank(), 32 * own_rank() + 32)
    data = Subset(dataset(), half)
    return _fit(with_workers(data, batch_size=4, sampler=SequentialSampler(data)), options)


@healthy(even=True)
def share_counted_by_numpy(options):
    """The program sets the number of samples of its sampler, which numpy has computed."""
    data = dataset(66)
    sampler: Any = DistributedSampler(data, shuffle=False)
    sampler.num_samples = np.ceil(np.array(len(data)) / 2).astype(np.int64)
    return _fit(DataLoader(data, batch_size=4, sampler=sampler), options)


@healthy()
def loader_with_a_mesh_that_raises(options):
    """The loader looks attributes up in a dictionary, and raises a KeyError for those that it does not have."""

    class Keyed(Listed):
        def __getattr__(self, name):
            return {}[name]

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model, loader = ddp(), Keyed(own_batches(6))
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, mesh=mesh, **options) as countoff:
        return [train_on(model, optimizer, batch) for _ in range(2) for batch in countoff.train(loader)], model


@healthy(even=True)
def iterator_without_a_class(options):
    """The iterator of a DataLoader's subclass raises where it is asked for its class or for an attribute."""

    class Bare:
        def __init__(self, batches):
            self.batches = batches

        def __iter__(self):
            return self

        def __next__(self):
            return next(self.batches)

        def __getattr__(self, name):
            raise RuntimeError(name)

        @property
        def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            raise RuntimeError("no class")

    class Loader(DataLoader):
        def __iter__(self) -> Any:
            return Bare(super().__iter__())

    data = dataset()
    return _fit(Loader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False)), options)
