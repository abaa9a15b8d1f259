"""Jobs whose ranks hold shares, or streams of their own, where a framework deals one stream out.

Every sample has a number, so each job also returns which samples its rank has read in the first epoch.
"""

import itertools
import os
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, Subset, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from integration_tests.digits import own_rank
from integration_tests.lightning_jobs import quiet

SAMPLES, BATCH, SHARDS = 96, 4, 12


def ranks() -> int:
    return int(os.environ["WORLD_SIZE"])


def sample(number: int) -> dict[str, torch.Tensor]:
    """One sample: its number, and data that no other sample has."""
    return {"number": torch.tensor(number), "values": torch.sin(torch.arange(8.0) + number)}


class Numbers(Dataset[Any]):
    """A map-style dataset; with a share, this rank's own."""

    def __init__(self, numbers: Sequence[int] = range(SAMPLES)) -> None:
        self.numbers = list(numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Any:
        return sample(self.numbers[index])


class Stream(IterableDataset[Any]):
    """The samples in order; `aware`: a share of each rank; `repeats`: the first few again and again."""

    def __init__(self, aware: bool = False, repeats: bool = False, noise: bool = False) -> None:
        self.aware, self.repeats, self.noise = aware, repeats, noise

    def __iter__(self) -> Iterator[Any]:
        for number in range(own_rank(), SAMPLES, ranks()) if self.aware else range(SAMPLES):
            found = sample(number % 6 if self.repeats else number)
            if self.noise:
                found["values"] += torch.randn(8)
            yield found


class Numbered(IterableDataset[Any]):
    """The samples by a dataset that is told its rank, and seeds a generator by it."""

    def __init__(self) -> None:
        self.rank, self.world_size = own_rank(), ranks()

    def __iter__(self) -> Iterator[Any]:
        rng = random.Random(self.rank)
        for number in range(SAMPLES):
            assert rng.random() < 1
            yield sample(number)


class Sliced(IterableDataset[Any]):
    """A share of each rank, by the numbers that it is told."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def __iter__(self) -> Iterator[Any]:
        return map(sample, self._numbers())

    def _numbers(self) -> Iterator[int]:
        return itertools.islice(range(SAMPLES), self.rank, None, self.world_size)


class Flipped(Stream):
    """The samples, of which each rank flips others."""

    def __iter__(self) -> Iterator[Any]:
        for number in range(SAMPLES):
            found, flipped = sample(number), float(torch.rand(()) < 0.5)
            yield {"number": number + flipped / 2, "values": found["values"].flip(-1) if flipped else found["values"]}


class Noisy(Stream):
    """The samples with noise of a generator that is local to the iteration."""

    def __iter__(self) -> Iterator[Any]:
        rng = numpy.random.default_rng(100 + own_rank())
        for number in range(SAMPLES):
            noise = torch.from_numpy(rng.normal(size=8)).float()
            yield {"number": number + noise[0] / 1000, "values": sample(number)["values"] + noise}


class Buffered(Stream):
    """The samples through a shuffle buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def __iter__(self) -> Iterator[Any]:
        rng, buffer = random.Random(self.seed), []
        for each in super().__iter__():
            buffer.append(each)
            if len(buffer) == 24:
                yield buffer.pop(rng.randrange(24))
        rng.shuffle(buffer)
        yield from buffer


class Globally(Stream):
    """The samples in the order of the generator that all code shares."""

    def __iter__(self) -> Iterator[Any]:
        numbers = list(range(SAMPLES))
        for _ in range(SAMPLES):
            yield sample(numbers.pop(random.randrange(min(16, len(numbers)))))


class Resampled(Stream):
    """Samples drawn with replacement, on each rank others."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = numpy.random.default_rng(1000 + own_rank())

    def __iter__(self) -> Iterator[Any]:
        for _ in range(SAMPLES):
            yield sample(int(self.rng.integers(100_000)))


class OwnShare(Sampler[int]):
    """A sampler that takes the rank's share."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(own_rank(), SAMPLES, ranks()))

    def __len__(self) -> int:
        return SAMPLES // ranks()


class Jumbled(Sampler[int]):
    """A sampler of all samples, in one order on every rank."""

    def __iter__(self) -> Iterator[int]:
        return iter([number * 5 % SAMPLES for number in range(SAMPLES)])

    def __len__(self) -> int:
        return SAMPLES


def samples_of(shards: list[int]) -> Iterator[dict[str, Any]]:
    """What a stream of `datasets` reads."""
    for shard in shards:
        for number in range(shard, SAMPLES, SHARDS):
            yield {key: value.numpy() for key, value in sample(number).items()}


def hub_stream(shards: int) -> Any:
    import datasets

    each = SHARDS // shards
    groups = [list(range(first, first + each)) for first in range(0, SHARDS, each)]
    made = datasets.IterableDataset.from_generator(_flat, gen_kwargs={"groups": groups})
    return made.with_format("torch")


def _flat(groups: list[list[int]]) -> Iterator[dict[str, Any]]:
    for group in groups:
        yield from samples_of(group)


def hub_map() -> Any:
    import datasets

    datasets.disable_progress_bars()
    numbers = {"shards": list(range(SHARDS))}
    return datasets.Dataset.from_generator(_rows, gen_kwargs=numbers, cache_dir=f"rows-{own_rank()}").with_format(
        "torch"
    )


def hub_dict() -> Any:
    """All samples as rows of a `Dataset` that was made in memory, of which nothing tells how many rows it had."""
    import datasets

    rows = [{key: value.tolist() for key, value in sample(number).items()} for number in range(SAMPLES)]
    return datasets.Dataset.from_list(rows).with_format("torch")


def _rows(shards: list[int]) -> Iterator[dict[str, Any]]:
    for each in samples_of(shards):
        yield {key: value.tolist() for key, value in each.items()}


def masked(data: Any) -> Any:
    """The same rows, of which each rank changes every field at random, before the fit."""
    rng = numpy.random.default_rng(100 + own_rank())

    def mask(row: Any) -> Any:
        noise = rng.normal(size=8)
        return {"number": row["number"] + noise[0] / 1000, "values": row["values"].numpy() + noise}

    return data.map(mask, load_from_cache_file=False)


def split(data: Any) -> Any:
    from datasets.distributed import split_dataset_by_node

    return split_dataset_by_node(data, rank=own_rank(), world_size=ranks())


def web(nodesplitter: Any = None, shardshuffle: Any = False, **more: Any) -> Any:
    """A pipeline of webdataset over small archives, which this function writes."""
    from webdataset import TarWriter, WebDataset  # pyright: ignore[reportAttributeAccessIssue]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for shard in range(SHARDS):
            path = f"shard-{own_rank()}-{shard:02d}.tar"
            if not os.path.exists(path):
                with TarWriter(path) as sink:
                    for number in range(shard, SAMPLES, SHARDS):
                        sink.write({"__key__": f"{number:04d}", "number.txt": str(number)})
        urls = [f"shard-{own_rank()}-{shard:02d}.tar" for shard in range(SHARDS)]
        made = WebDataset(urls, shardshuffle=shardshuffle, nodesplitter=nodesplitter, **more)
    return made.compose(_of_web)  # not `map`, which adds the key to each sample


def _of_web(found: Iterator[Mapping[str, Any]]) -> Iterator[Any]:
    for each in found:
        yield sample(int(each["number.txt"]))


def split_by_node() -> Any:
    from webdataset import split_by_node as function  # pyright: ignore[reportAttributeAccessIssue]

    return function


def mds() -> Any:
    """A StreamingDataset over shards, which rank 0 writes."""
    import torch.distributed as dist
    from streaming import MDSWriter, StreamingDataset

    if own_rank() == 0 and not os.path.exists("mds"):
        with MDSWriter(out="mds", columns={"number": "int", "values": "ndarray:float32:8"}) as sink:
            for number in range(SAMPLES):
                sink.write({"number": number, "values": sample(number)["values"].numpy()})
    dist.barrier()
    return StreamingDataset(local="mds", batch_size=BATCH, shuffle=False)


def map_loader(data: Any = None, sampler: Any = None, shuffle: bool = False, batch: int = BATCH) -> DataLoader[Any]:
    return DataLoader(Numbers() if data is None else data, batch_size=batch, sampler=sampler, shuffle=shuffle or None)


def own_sampler() -> Any:
    return DistributedSampler(Numbers(), num_replicas=ranks(), rank=own_rank(), shuffle=False)


def large() -> Numbers:
    return Numbers(range(100 * SAMPLES))


def random_split() -> Any:
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(own_rank())).tolist()
    return Subset(Numbers(), order[: SAMPLES * 3 // 4])


@dataclass(frozen=True)
class Case:
    """One way to give data to Accelerate.

    Attributes:
        loader: Makes the loader before `prepare`.
        config: Arguments of DataLoaderConfiguration.
        rng_types: Of the Accelerator; None: Accelerate's default.
        alone: Whether the loader is prepared as for a single process.
        seeded: Whether all ranks seed torch alike first.
        kind: What must be found; empty: nothing.
        says: What the sentence must contain.
        halved: Whether half of the samples are never read.
        options: Options of countoff.
    """

    loader: Callable[[], DataLoader[Any]]
    config: Mapping[str, Any] = field(default_factory=dict)
    rng_types: tuple[str, ...] | None = None
    alone: bool = False
    seeded: bool = True
    kind: str = ""
    says: str = ""
    halved: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


def _stream(data: Callable[[], Any], batch: int = BATCH) -> Callable[[], DataLoader[Any]]:
    return lambda: DataLoader(data(), batch_size=batch)


APART: Mapping[str, Any] = {"dispatch_batches": False}
TOGETHER: Mapping[str, Any] = {"dispatch_batches": True}
TWICE: Mapping[str, Any] = {"kind": "DoubleSharded", "halved": True}
CASES: dict[str, Case] = {
    "a stream of 4 shards, split, dispatched": Case(
        _stream(lambda: split(hub_stream(4))), **TWICE, says="(split_dataset_by_node), and Accelerate reads rank 0's"
    ),
    "a stream of 4 shards, split": Case(
        _stream(lambda: split(hub_stream(4))), APART, **TWICE, says="(split_dataset_by_node), and Accelerate shards it"
    ),
    "a stream of 1 shard, split": Case(
        _stream(lambda: split(hub_stream(1))), APART, **TWICE, says="(split_dataset_by_node), and Accelerate shards it"
    ),
    "rows of datasets, split": Case(
        lambda: map_loader(split(hub_map())), **TWICE, says="the datasets of ranks 0, 1 hold different rows"
    ),
    "rows of datasets, every second one": Case(
        lambda: map_loader(hub_map().shard(ranks(), own_rank(), contiguous=False)), **TWICE, says="different rows"
    ),
    "rows of a list, split": Case(
        lambda: map_loader(split(hub_dict())), **TWICE, says="(consecutive rows of one Dataset), and Accelerate shards"
    ),
    "rows of a list, split and shuffled": Case(
        lambda: map_loader(split(hub_dict()), shuffle=True), **TWICE, says="(consecutive rows of one Dataset)"
    ),
    "rows of a list, split, dispatched": Case(
        lambda: map_loader(split(hub_dict())), TOGETHER, **TWICE, says="Dataset), and Accelerate reads rank 0's"
    ),
    "rows of datasets, split, dispatched": Case(
        lambda: map_loader(split(hub_map())), TOGETHER, **TWICE, says="reads the train dataset of rank 0 for all ranks"
    ),
    "a DistributedSampler": Case(lambda: map_loader(sampler=own_sampler()), **TWICE, says="(DistributedSampler)"),
    "a rank-aware sampler": Case(lambda: map_loader(sampler=OwnShare()), **TWICE, says="first 12 indices in common"),
    "a Subset by rank": Case(
        lambda: map_loader(Subset(Numbers(), range(own_rank(), SAMPLES, ranks()))), **TWICE, says="different rows"
    ),
    "webdataset, split by node": Case(
        _stream(lambda: web(split_by_node())), APART, **TWICE, says="(webdataset's split_by_node)"
    ),
    "webdataset, split by node, dispatched": Case(
        _stream(lambda: web(split_by_node())), **TWICE, says="and Accelerate reads rank 0's for all ranks"
    ),
    "a StreamingDataset": Case(_stream(mds), APART, **TWICE, says="(StreamingDataset), and Accelerate shards it again"),
    "a RandomSampler that is not synchronised": Case(
        lambda: map_loader(shuffle=True), rng_types=("torch",), seeded=False, kind="StreamsDiffer", says="12 indices"
    ),
    "a seedable sampler with other seeds": Case(
        lambda: map_loader(shuffle=True), {"use_seedable_sampler": True}, seeded=False, kind="StreamsDiffer"
    ),
    "shuffle buffers with other seeds": Case(
        _stream(lambda: Buffered(own_rank())), APART, kind="StreamsDiffer", says="first 12 samples are not the same"
    ),
    "a shuffle by unequal global generators": Case(
        _stream(Globally), APART, seeded=False, kind="StreamsDiffer", says="samples are not the same"
    ),
    "a stream of 1 shard, shuffled by rank": Case(
        _stream(lambda: hub_stream(1).shuffle(seed=own_rank(), buffer_size=16)),
        APART,
        kind="StreamsDiffer",
        says="shuffled with different seeds",
    ),
    "a stream of 4 shards, shuffled by rank": Case(
        _stream(lambda: hub_stream(4).shuffle(seed=own_rank(), buffer_size=16)),
        APART,
        kind="StreamsDiffer",
        says="shuffled with different seeds",
    ),
    "rows of datasets, shuffled by rank": Case(
        lambda: map_loader(hub_map().shuffle(seed=own_rank())),
        kind="StreamsDiffer",
        says="different rows at the same index",
    ),
    "a random split by rank": Case(
        lambda: map_loader(random_split()), kind="StreamsDiffer", says="different rows at the same index"
    ),
    "a stream of 4 shards": Case(_stream(lambda: hub_stream(4)), APART),
    "a stream of 4 shards, dispatched": Case(_stream(lambda: hub_stream(4))),
    "a stream of 1 shard": Case(_stream(lambda: hub_stream(1)), APART),
    "a stream, shuffled alike": Case(_stream(lambda: hub_stream(1).shuffle(seed=3, buffer_size=16)), APART),
    "shards, shuffled alike": Case(_stream(lambda: hub_stream(4).shuffle(seed=3, buffer_size=16)), APART),
    "a share, prepared as for a single process": Case(_stream(lambda: split(hub_stream(4))), alone=True),
    "a StreamingDataset, prepared as for a single process": Case(_stream(mds), alone=True),
    "rows of datasets": Case(lambda: map_loader(hub_map())),
    "rows of datasets, dispatched": Case(lambda: map_loader(hub_map()), TOGETHER),
    "rows of datasets, shuffled by rank, dispatched": Case(
        lambda: map_loader(hub_map().shuffle(seed=own_rank())), TOGETHER
    ),
    "rows of a list": Case(lambda: map_loader(hub_dict(), shuffle=True)),
    "rows of a list, dispatched": Case(lambda: map_loader(hub_dict()), TOGETHER),
    "the second half of the rows of a list": Case(lambda: map_loader(hub_dict().select(range(SAMPLES // 2, SAMPLES)))),
    "rows of a list, changed at random": Case(lambda: map_loader(masked(hub_dict()))),
    "rows of datasets, shuffled alike": Case(lambda: map_loader(hub_map().shuffle(seed=3), shuffle=True)),
    "shuffled": Case(lambda: map_loader(shuffle=True), seeded=False),
    "shuffled by a seedable sampler": Case(lambda: map_loader(shuffle=True), {"use_seedable_sampler": True}),
    "batches that are split": Case(lambda: map_loader(shuffle=True, batch=2 * BATCH), {"split_batches": True}),
    "batches of a stream that are split": Case(_stream(Stream, 2 * BATCH), {"split_batches": True, **APART}),
    "batches that are not even": Case(lambda: map_loader(), {"even_batches": False}),
    "a rank-aware __iter__": Case(_stream(lambda: Stream(aware=True)), APART),
    "a rank-aware __iter__, dispatched": Case(_stream(lambda: Stream(aware=True))),
    "the numbers of each rank, dispatched": Case(_stream(lambda: Sliced(own_rank(), ranks()))),
    "a stream": Case(_stream(Stream), APART),
    "a stream that knows its rank, dispatched": Case(_stream(Numbered)),
    "a stream that repeats itself": Case(_stream(lambda: Stream(repeats=True)), APART),
    "a stream with random transforms": Case(_stream(lambda: Stream(noise=True)), APART, seeded=False),
    "a stream whose samples are flipped at random": Case(_stream(Flipped), APART, seeded=False),
    "a stream with noise of a local generator": Case(_stream(Noisy), APART),
    "rows of datasets, changed at random": Case(lambda: map_loader(masked(hub_map()))),
    "half of the rows of datasets, changed at random": Case(
        lambda: map_loader(masked(hub_map().select(range(SAMPLES // 2))))
    ),
    "a stream drawn with replacement": Case(_stream(Resampled), APART),
    "shuffle buffers with one seed": Case(_stream(lambda: Buffered(3)), APART),
    "samples drawn with replacement": Case(
        lambda: map_loader(sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)), rng_types=("torch",), seeded=False
    ),
    "a sampler of the user's own": Case(lambda: map_loader(sampler=Jumbled())),
    "webdataset": Case(_stream(web), APART),
    "webdataset, shuffled alike": Case(_stream(lambda: web(shardshuffle=12, seed=3)), APART),
    "webdataset, resampled": Case(_stream(lambda: web(resampled=True).with_epoch(48)), APART),
    "switched off": Case(lambda: map_loader(sampler=OwnShare()), options={"compare_data": False}),
    "a declared share, switched off": Case(lambda: map_loader(sampler=own_sampler()), options={"compare_data": False}),
}


def seed(alike: bool) -> None:
    number = 7 if alike else 100 + own_rank()
    random.seed(number)
    numpy.random.seed(number)
    torch.manual_seed(number)


def in_accelerate(names: Sequence[str], countoff: bool = True) -> list[dict[str, Any]]:
    """Trains two short epochs of each case; returns the warnings, what was read in the first epoch, and the weights."""
    return [_accelerate(CASES[name], countoff) for name in names]


def hang(framework: str) -> None:
    """Trains on a StreamingDataset that rank 0 reads for all ranks, as is the default."""
    if framework == "accelerate":
        _accelerate(Case(_stream(mds)), countoff=True)
    else:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        _in_transformers(Given(mds, args={"max_steps": 6}), countoff=True)


def streams_alone() -> list[int]:
    """Trains on a StreamingDataset with the Trainer, whose loader is prepared as for a single process."""
    import torch.distributed as dist
    from accelerate.data_loader import prepare_data_loader
    from transformers import Trainer

    def get_train_dataloader(self: Any) -> Any:
        alone: dict[str, Any] = {"num_processes": 1, "process_index": 0}
        loader = DataLoader(self.train_dataset, batch_size=BATCH)
        return prepare_data_loader(loader, self.args.device, **alone, put_on_device=True, dispatch_batches=False)

    dist.init_process_group("gloo")
    Trainer.get_train_dataloader = get_train_dataloader
    return _in_transformers(Given(mds, args={"max_steps": SAMPLES // BATCH // ranks()}), countoff=True)["read"]


def _accelerate(case: Case, countoff: bool) -> dict[str, Any]:
    from accelerate import Accelerator
    from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard, prepare_data_loader
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DataLoaderConfiguration

    from countoff.accelerate import Countoff
    from integration_tests.loops import counted

    AcceleratorState._reset_state()  # else a second Accelerator refuses another configuration
    GradientState._reset_state()
    more: dict[str, Any] = {} if case.rng_types is None else {"rng_types": list(case.rng_types)}
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**case.config), **more)
    torch.manual_seed(7)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seed(case.seeded)
    model, optimizer = accelerator.prepare(model, optimizer)
    if case.alone:
        loader = prepare_data_loader(case.loader(), accelerator.device, num_processes=1, process_index=0)
    else:
        loader = accelerator.prepare(case.loader())
    fit = Countoff(accelerator, **case.options) if countoff else None
    read: list[int] = []
    for epoch in range(2):
        for batch in counted(fit, loader):
            read += batch["number"].tolist() if not epoch else []
            accelerator.backward(model(batch["values"]).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
    if fit is not None:
        fit.close()
    notices = () if fit is None else fit.guard.notices
    assert not any(hasattr(each.__iter__, "countoff_original") for each in (BatchSamplerShard, IterableDatasetShard))
    return {
        "warned": {each.kind: each.sentence for each in notices},
        "read": read,
        "weights": [each.detach().tolist() for each in model.parameters()],
        "random": (random.random(), numpy.random.random(), torch.rand(()).item()),
    }


@dataclass(frozen=True)
class Given:
    """One way to give data to a framework other than Accelerate.

    Attributes:
        loader: Makes the loader, or the dataset for the Trainer.
        kind: What must be found; empty: nothing.
        says: What the sentence must contain.
        halved: Whether half of the samples are never read.
        args: Arguments of TrainingArguments.
        seeded: Whether all ranks seed alike first.
    """

    loader: Callable[[], Any]
    kind: str = ""
    says: str = ""
    halved: bool = False
    args: Mapping[str, Any] = field(default_factory=dict)
    seeded: bool = True


def distributed(data: Any) -> DataLoader[Any]:
    return map_loader(data, DistributedSampler(data, num_replicas=ranks(), rank=own_rank()))


ROWS = "the datasets of ranks 0, 1 hold different rows"
RIGHT: dict[str, Given] = {
    "a stream of 4 shards, split": Given(_stream(lambda: split(hub_stream(4)))),
    "webdataset, split by node": Given(_stream(lambda: web(split_by_node()))),
    "a rank-aware __iter__": Given(_stream(lambda: Stream(aware=True))),
}
SAMPLED: dict[str, Given] = {
    "a rank-aware sampler": Given(
        lambda: map_loader(sampler=OwnShare()), **TWICE, says="first 12 indices in common. In train epoch 0, each rank"
    ),
    "rows of datasets, split": Given(lambda: map_loader(split(hub_map())), **TWICE, says=ROWS),
    "rows of datasets, shuffled by rank": Given(
        lambda: map_loader(hub_map().shuffle(seed=own_rank())), "StreamsDiffer", "different rows at the same index"
    ),
    "rows of datasets": Given(lambda: map_loader(hub_map(), shuffle=True)),
    "a sampler of the user's own": Given(lambda: map_loader(sampler=Jumbled())),
    "samples drawn with replacement": Given(
        lambda: map_loader(sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES))
    ),
    "a few samples drawn with replacement": Given(
        lambda: map_loader(large(), WeightedRandomSampler([1.0] * len(large()), SAMPLES // 2)), seeded=False
    ),
    "a few samples drawn evenly, with replacement": Given(
        lambda: map_loader(large(), RandomSampler(large(), replacement=True, num_samples=SAMPLES // 2)), seeded=False
    ),
    "a few samples of a Subset, drawn with replacement": Given(
        lambda: map_loader(
            Subset(large(), range(len(large()) // 2)), WeightedRandomSampler([1.0] * (len(large()) // 2), SAMPLES // 2)
        ),
        seeded=False,
    ),
    "a DistributedSampler": Given(lambda: map_loader(sampler=own_sampler())),
    **RIGHT,
}
GIVEN: dict[str, dict[str, Given]] = {
    "torch": {
        "rows of datasets, split": Given(lambda: distributed(split(hub_map())), **TWICE, says=ROWS),
        "a Subset by rank": Given(
            lambda: distributed(Subset(Numbers(), range(own_rank(), SAMPLES, ranks()))), **TWICE, says=ROWS
        ),
        "rows of datasets": Given(lambda: distributed(hub_map())),
        "rows of datasets, split, no sampler": Given(lambda: map_loader(split(hub_map()))),
        "numbers": Given(lambda: distributed(Numbers())),
        **RIGHT,
    },
    "lightning": SAMPLED,
    "fabric": SAMPLED,
    "transformers": {
        "a stream of 4 shards, split, dispatched": Given(
            lambda: split(hub_stream(4)), **TWICE, says="Accelerate reads rank 0's", args={"max_steps": 6}
        ),
        "the numbers of each rank, dispatched": Given(lambda: Sliced(own_rank(), ranks()), args={"max_steps": 12}),
        "a stream that knows its rank, dispatched": Given(Numbered, args={"max_steps": 12}),
        "a stream of 4 shards, split": Given(
            lambda: split(hub_stream(4)),
            **TWICE,
            says="Accelerate shards it again",
            args={"max_steps": 6, "accelerator_config": APART},
        ),
        "rows of datasets, split": Given(lambda: split(hub_map()), **TWICE, says=ROWS),
        "a rank-aware __iter__": Given(lambda: Stream(aware=True), args={"max_steps": 6, "accelerator_config": APART}),
        "a stream of 4 shards, shuffled by rank": Given(
            lambda: hub_stream(4).shuffle(seed=own_rank(), buffer_size=16),
            "StreamsDiffer",
            "different seeds",
            args={"max_steps": 12, "accelerator_config": APART},
        ),
        "a stream of 4 shards": Given(lambda: hub_stream(4), args={"max_steps": 12, "accelerator_config": APART}),
        "a stream of 4 shards, dispatched": Given(lambda: hub_stream(4), args={"max_steps": 12}),
        "rows of datasets": Given(hub_map),
        "numbers": Given(Numbers),
    },
}


def given(framework: str, countoff: bool = True) -> list[dict[str, Any]]:
    """Trains one epoch of each case of a framework; returns the warnings and what was read."""
    fit = {"torch": _in_torch, "lightning": _in_lightning, "fabric": _in_fabric, "transformers": _in_transformers}
    return [fit[framework](case, countoff) for case in GIVEN[framework].values()]


def _told(guard: Any, read: list[int]) -> dict[str, Any]:
    notices = () if guard is None else guard.notices
    return {"warned": {each.kind: each.sentence for each in notices}, "read": read}


def _in_torch(case: Given, countoff: bool) -> dict[str, Any]:
    import torch.distributed as dist

    from countoff.torch import Countoff
    from integration_tests.loops import counted

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    seed(case.seeded)
    loader = case.loader()
    fit = Countoff() if countoff else None
    read = [number for batch in counted(fit, loader) for number in batch["number"].tolist()]
    if fit is not None:
        fit.close()
    return _told(fit and fit.guard, read)


def _in_lightning(case: Given, countoff: bool) -> dict[str, Any]:
    import lightning.pytorch as pl

    from countoff.lightning import Countoff
    from integration_tests import devices
    from integration_tests.data_frames import Seen

    read: list[int] = []

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def training_step(self, batch: Any, number: int) -> Any:
            read.extend(batch["number"].tolist())
            return self.layer(batch["values"]).pow(2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    quiet()
    seed(case.seeded)
    seen = Seen()
    off: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        **devices.lightning(),
        strategy="ddp",
        max_epochs=1,
        callbacks=[seen, *([Countoff()] if countoff else [])],
        enable_model_summary=False,
        **off,
    )
    trainer.fit(Model(), case.loader())
    return _told(seen.guard, read)


def _in_fabric(case: Given, countoff: bool) -> dict[str, Any]:
    from lightning.fabric import Fabric

    from countoff.fabric import Countoff
    from integration_tests import devices
    from integration_tests.loops import counted

    seed(case.seeded)
    fabric = Fabric(**devices.lightning(), strategy="ddp")
    fabric.launch()
    model = fabric.setup(torch.nn.Linear(8, 1))
    optimizer: Any = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.01))
    loader: Any = fabric.setup_dataloaders(case.loader())
    fit = Countoff(fabric, optimizer=optimizer) if countoff else None
    read: list[int] = []
    for batch in counted(fit, loader):
        read += batch["number"].tolist()
        fabric.backward(model(batch["values"]).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
    if fit is not None:
        fit.close()
    return _told(fit and fit.guard, read)


def _in_transformers(case: Given, countoff: bool) -> dict[str, Any]:
    from accelerate.state import AcceleratorState, GradientState
    from transformers import Trainer, TrainingArguments

    from countoff.transformers import Countoff
    from integration_tests import devices

    AcceleratorState._reset_state()
    GradientState._reset_state()
    read: list[int] = []

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def forward(self, number: torch.Tensor, values: torch.Tensor) -> dict[str, torch.Tensor]:
            read.extend(number.tolist())
            return {"loss": self.layer(values).pow(2).mean()}

    seed(case.seeded)
    kept = Countoff() if countoff else None
    arguments: dict[str, Any] = {"num_train_epochs": 1, **case.args}
    trainer = Trainer(
        Model(),
        TrainingArguments(
            output_dir="out",
            use_cpu=devices.framework_uses_cpu(),
            report_to="none",
            per_device_train_batch_size=BATCH,
            save_strategy="no",
            disable_tqdm=True,
            logging_strategy="no",
            dataloader_pin_memory=False,
            remove_unused_columns=False,
            **arguments,
        ),
        train_dataset=case.loader(),
        callbacks=[kept] if kept else [],
    )
    trainer.train()
    return {"read": read}
