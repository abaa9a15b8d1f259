"""Loaders of other libraries: torchdata, datasets, webdataset, streaming."""

import importlib
import io
import os
import tarfile
from typing import Any

import numpy as np
import torch

from countoff.torch import Countoff
from integration_tests.digits import own_rank
from integration_tests.zoo.parts import dataset, ddp, epochs_of, own_batches, sgd, tensors, train, train_on
from integration_tests.zoo.registry import healthy


def _columns(batch):
    return torch.as_tensor(np.array(batch["inputs"])).float(), torch.as_tensor(np.array(batch["label"])).long()


def _pair(batch):
    return _columns(dict(zip(("inputs", "label"), batch, strict=True)))


def _rows(samples=64):
    inputs, labels = tensors(samples)
    return {"inputs": inputs.tolist(), "label": labels.tolist()}


def _fit(loader, options, pair=lambda batch: batch, epochs=2, **more):
    model = ddp()
    optimizer = sgd(model)
    counts = []
    with Countoff(optimizer=optimizer, **options, **more) as countoff:
        for _ in epochs_of(loader, epochs):
            counts.append(0)
            for batch in countoff.train(loader):
                train_on(model, optimizer, pair(batch))
                counts[-1] += 1
    return counts, model


@healthy(even=True, needs="torchdata")
def stateful_loader(options):
    """A StatefulDataLoader's state is saved in the middle of each epoch."""
    from torch.utils.data import DistributedSampler
    from torchdata.stateful_dataloader import StatefulDataLoader

    data = dataset()
    loader = StatefulDataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    model = ddp()
    optimizer = sgd(model)
    taken = []
    with Countoff(optimizer=optimizer, **options) as countoff:
        for _ in epochs_of(loader):
            for number, batch in enumerate(countoff.train(loader)):
                train_on(model, optimizer, batch)
                if number == 3:
                    taken.append(loader.state_dict()["_num_yielded"])
    return model, taken


@healthy(needs="torchdata")
def stateful_loader_that_resumes(options):
    """A StatefulDataLoader goes on behind its third batch, so that its first epoch has five batches."""
    from torch.utils.data import DistributedSampler
    from torchdata.stateful_dataloader import StatefulDataLoader

    data = dataset()

    def made():
        return StatefulDataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False))

    before = made()
    for _, _ in zip(range(3), before, strict=False):
        pass
    loader = made()
    loader.load_state_dict(before.state_dict())
    return _fit(loader, options, start_step=3)


@healthy(even=True, needs="torchdata")
def nodes_of_torchdata(options):
    """A pipeline of torchdata's nodes maps and batches in a thread of its own."""
    from torchdata.nodes import Batcher, IterableWrapper, Loader, ParallelMapper

    data = dataset()
    source = IterableWrapper([data[index] for index in range(own_rank(), 64, 2)])
    mapped = ParallelMapper(source, _doubled, num_workers=2, method="thread")
    return _fit(Loader(Batcher(mapped, 4)), options, torch.utils.data.default_collate)


def _doubled(sample):
    return sample[0] * 2, sample[1]


@healthy(even=True, needs="datasets")
def table_of_datasets(options):
    """A shard of a Dataset in torch's format is read by a DataLoader with shuffling."""
    from datasets import Dataset

    table: Any = Dataset.from_dict(_rows()).shard(2, own_rank()).with_format("torch")
    generator = torch.Generator().manual_seed(3)
    loader = torch.utils.data.DataLoader(table, batch_size=4, shuffle=True, generator=generator)
    return _fit(loader, options, _columns)


@healthy(even=True, needs="datasets")
def table_iterated_by_itself(options):
    """A Dataset's own iter gives batches of plain lists."""
    from datasets import Dataset

    table = Dataset.from_dict(_rows()).shard(2, own_rank())

    class Batched:
        def __iter__(self):
            return table.iter(batch_size=4)

    return _fit(Batched(), options, _columns)


@healthy(even=True, needs="datasets")
def streamed_table(options):
    """An IterableDataset is split by node, shuffled by a buffer and mapped."""
    from datasets import Dataset
    from datasets.distributed import split_dataset_by_node

    stream = Dataset.from_dict(_rows()).to_iterable_dataset(num_shards=4).shuffle(seed=3, buffer_size=16)
    share: Any = split_dataset_by_node(stream, own_rank(), 2).with_format("torch")
    return _fit(torch.utils.data.DataLoader(share, batch_size=4), options, _columns)


@healthy(even=True, needs="datasets")
def generator_of_datasets(options):
    """An IterableDataset is made from a generator of the program, and told the epoch."""
    from datasets import IterableDataset

    def rows():
        for inputs, labels in own_batches():
            yield {"inputs": inputs.numpy(), "label": labels.numpy()}

    stream = IterableDataset.from_generator(rows)
    model = ddp()
    optimizer = sgd(model)

    class Streamed:
        def __iter__(self):
            return iter(stream)

    loader = Streamed()
    with Countoff(optimizer=optimizer, **options) as countoff:
        for epoch in range(2):
            stream.set_epoch(epoch)
            for batch in countoff.train(loader):
                train_on(model, optimizer, _columns(batch))
    return model


def _shards(directory, shards=4, samples=16):
    """Writes tar files of samples, and returns their paths."""
    os.makedirs(directory, exist_ok=True)
    inputs, labels = tensors(shards * samples)
    paths = []
    for shard in range(shards):
        paths.append(os.path.join(directory, f"{shard}.tar"))
        with tarfile.open(paths[-1], "w") as archive:
            for index in range(shard * samples, (shard + 1) * samples):
                content = io.BytesIO()
                np.save(content, inputs[index].numpy())
                for name, raw in (("inputs.npy", content.getvalue()), ("cls", str(labels[index].item()).encode())):
                    member = tarfile.TarInfo(f"{index:04}.{name}")
                    member.size = len(raw)
                    archive.addfile(member, io.BytesIO(raw))
    return paths


@healthy(even=True, needs="webdataset")
def web_dataset(options):
    """A WebDataset reads its rank's tar files, and batches by itself."""
    webdataset: Any = importlib.import_module("webdataset")  # it names its classes at run time

    paths = _shards(f"tars{own_rank()}")
    pipeline = (
        webdataset.WebDataset(paths, shardshuffle=False, nodesplitter=webdataset.split_by_node)
        .decode()
        .to_tuple("inputs.npy", "cls")
        .batched(4)
    )
    return _fit(webdataset.WebLoader(pipeline, batch_size=None), options, _pair)


@healthy(even=True, needs="webdataset")
def web_dataset_with_epochs(options):
    """A WebDataset repeats its tar files for ever, and with_epoch ends each pass after five batches."""
    webdataset: Any = importlib.import_module("webdataset")  # it names its classes at run time

    paths = _shards(f"tars{own_rank()}")
    pipeline = (
        webdataset.WebDataset(paths[own_rank() :: 2], shardshuffle=False, nodesplitter=None)
        .decode()
        .to_tuple("inputs.npy", "cls")
        .batched(4)
        .repeat()
    )
    loader = webdataset.WebLoader(pipeline, batch_size=None).with_epoch(5)
    return _fit(loader, options, _pair)


@healthy(even=True, alone=True, needs="streaming", nightly=True)
def streaming_dataset(options):
    """A StreamingDataset is read by its own loader, whose state is saved in the middle of each epoch."""
    from integration_tests.composer_parts import streaming_loader

    loader = streaming_loader([64], False, 0, {"shuffle": True})
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 10))
    optimizer = sgd(model)
    taken = []
    with Countoff(optimizer=optimizer, **options) as countoff:
        for _ in range(2):
            for number, batch in enumerate(countoff.train(loader)):
                train_on(model, optimizer, batch)
                if number == 3:
                    taken.append(loader.state_dict()["sample_in_epoch"])
    return model, taken


@healthy(even=True, needs="sklearn")
def folds_of_scikit_learn(options):
    """Each fold of a cross-validation makes a loader and a model, which are counted by themselves."""
    from sklearn.model_selection import KFold

    from integration_tests.zoo.parts import evaluate, sharded

    data = dataset(60)
    results = []
    for chosen, rest in KFold(3, shuffle=True, random_state=1).split(range(60)):
        model = ddp()
        optimizer = sgd(model)
        loader = sharded(data=torch.utils.data.Subset(data, chosen.tolist()))
        evaluation = sharded(data=torch.utils.data.Subset(data, rest.tolist()))
        with Countoff(optimizer=optimizer, **options) as countoff:
            results += [
                train(countoff, model, optimizer, loader),
                evaluate(model.module, countoff.eval(evaluation)),
                model,
            ]
    return results


@healthy(even=True, needs="torchvision", nightly=True)
def augmented_images(options):
    """Workers of the loader augment images at random, and a repeated-augmentation sampler gives each twice."""
    from torchvision.transforms import v2

    from integration_tests.zoo.parts import with_workers

    transform = v2.Compose([v2.RandomHorizontalFlip(), v2.RandomCrop(4, padding=1)])
    images = torch.arange(32 * 16, dtype=torch.float32).reshape(32, 1, 4, 4) / 512

    class Images(torch.utils.data.Dataset):
        def __len__(self):
            return 32

        def __getitem__(self, index):
            return transform(images[index]).flatten(), index % 4

    class Repeated(torch.utils.data.Sampler):
        epoch = 0

        def __len__(self):
            return 24

        def __iter__(self):
            generator = torch.Generator().manual_seed(self.epoch)
            self.epoch += 1
            twice = torch.randperm(32, generator=generator).repeat_interleave(2)
            return iter(twice[own_rank() :: 2][:24].tolist())

    loader = with_workers(Images(), batch_size=4, sampler=Repeated(), num_workers=2)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 4))
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        return train(countoff, model, optimizer, loader), model
