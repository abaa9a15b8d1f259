"""What a loader's sampler shows: whether the data is sharded by rank, what determines its order, and its length."""

from typing import Any

import pytest
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard, SeedableRandomSampler
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from countoff._adapter.sampling import known_length, sampling_of
from countoff.core.checks.data import UNKNOWN, Sampling

DATA: Any = list(range(20))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(DATA)


class Replicated(Stream):
    replication = 2


class CustomIteration(DistributedSampler[Any]):
    def __iter__(self) -> Any:
        return iter(range(3))


def distributed(rank: int = 1, replicas: int = 2, **options: Any) -> DataLoader[Any]:
    sampler = DistributedSampler(DATA, num_replicas=replicas, rank=rank, **options)
    return DataLoader(DATA, batch_size=2, sampler=sampler)


def of(loader: Any) -> Sampling:
    """The sampling as the second of two data ranks reads it."""
    return sampling_of(loader, dp_rank=1, dp_degree=2)


@pytest.mark.parametrize("loader", [DATA, DataLoader(DATA), DataLoader(Stream()), DataLoader(DATA, shuffle=True)])
def test_nothing_is_known_of_a_loader_without_a_distributed_sampler(loader):
    assert of(loader) == UNKNOWN


@pytest.mark.parametrize(
    ("rank", "replicas", "is_sharded"), [(1, 2, True), (0, 2, False), (0, 1, False), (1, 4, False)]
)
def test_data_is_sharded_for_the_rank_that_the_sampler_names(rank, replicas, is_sharded):
    assert of(distributed(rank, replicas)).is_sharded is is_sharded


def test_the_order_follows_from_seed_and_epoch():
    loader = distributed(seed=3)
    first = of(loader).shuffled
    assert first is not None
    assert of(loader).shuffled == first
    loader.sampler.set_epoch(1)  # pyright: ignore[reportAttributeAccessIssue]
    assert of(loader).shuffled != first
    assert of(distributed(seed=4)).shuffled != first


def test_a_sampler_of_accelerates_that_has_none_left_has_not_begun_its_next_epoch():
    """Workers may have fetched all of a short epoch before the loop has its first batch."""
    sampler = SeedableRandomSampler(DATA, data_seed=7)
    loader = DataLoader(DATA, sampler=sampler)
    assert of(loader).shuffled == (0, len(DATA), 7)
    batches = iter(loader)
    assert [(next(batches), of(loader).shuffled)[1] for _ in DATA] == [(0, len(DATA), 7)] * len(DATA)
    list(batches)
    assert (sampler.epoch, of(loader).shuffled) == (1, (0, len(DATA), 7))
    next(iter(loader))
    assert of(loader).shuffled == (1, len(DATA), 7)
    sampler.set_epoch(5)
    assert of(loader).shuffled == (5, len(DATA), 7)


def test_an_order_without_a_shuffle_or_by_a_custom_sampler_is_unknown():
    assert of(distributed(shuffle=False)).shuffled is None
    own = CustomIteration(DATA, num_replicas=2, rank=1)
    assert of(DataLoader(DATA, sampler=own)) == Sampling(is_sharded=True)
    assert of(DataLoader(DATA, sampler=RandomSampler(DATA))).shuffled is None


def batch_shard(process: int, processes: int, loader: DataLoader[Any]) -> DataLoader[Any]:
    batches: Any = BatchSamplerShard(loader.batch_sampler, num_processes=processes, process_index=process)  # pyright: ignore[reportArgumentType]
    return DataLoader(DATA, batch_sampler=batches)


def stream_shard(process: int, processes: int) -> DataLoader[Any]:
    shard: Any = IterableDatasetShard(Stream(), batch_size=2, num_processes=processes, process_index=process)  # pyright: ignore[reportArgumentType]
    return DataLoader(shard, batch_size=2)


def test_accelerates_shards_are_sharded():
    assert of(batch_shard(1, 2, DataLoader(DATA, batch_size=2))) == Sampling(is_sharded=True)
    assert of(stream_shard(1, 2)) == Sampling(is_sharded=True)


def test_ranks_are_not_compared_where_accelerates_shards_differ():
    assert not of(batch_shard(0, 1, DataLoader(DATA, batch_size=2))).comparable
    assert not of(stream_shard(0, 4)).comparable


def test_ranks_are_not_compared_where_the_data_set_replicates():
    assert not of(DataLoader(Replicated())).comparable


def test_a_sampler_inside_a_shard_determines_the_order():
    loader = distributed(rank=0, replicas=1)
    assert of(batch_shard(1, 2, loader)).shuffled == of(loader).shuffled


class Own(Sampler[int]):
    """A sampler of the user's own, which may compute its length."""

    def __iter__(self) -> Any:
        return iter(DATA)

    def __len__(self) -> int:
        raise AssertionError("asked for its length")


class OwnShare(DistributedSampler[Any]):
    def __len__(self) -> int:
        raise AssertionError("asked for its length")


class OwnBatches(BatchSampler):
    def __len__(self) -> int:
        raise AssertionError("asked for its length")


class OwnLength(DataLoader[Any]):
    def __len__(self) -> int:
        raise AssertionError("asked for its length")


class OwnPass(DataLoader[Any]):
    def __iter__(self) -> Any:
        return map(abs, super().__iter__())


class Named(DataLoader[Any]):
    """Differs from torch's in its name only."""


class SizedStream(Stream):
    def __len__(self) -> int:
        raise AssertionError("asked for its length")


class OwnList(list[int]):
    def __len__(self) -> int:
        raise AssertionError("asked for its length")


@pytest.mark.parametrize(
    ("loader", "length"),
    [
        ([1, 2], 2),
        ((1, 2), 2),
        (range(9), 9),
        (DataLoader(DATA, batch_size=8), 3),
        (DataLoader(DATA, batch_size=8, drop_last=True), 2),
        (DataLoader(DATA, batch_size=8, shuffle=True), 3),
        (DataLoader(DATA, batch_size=None), 20),
        (Named(DATA, batch_size=8), 3),
        (distributed(), 5),
        (DataLoader(DATA, sampler=SubsetRandomSampler([1, 2])), 2),
        (DataLoader(DATA, sampler=WeightedRandomSampler([1.0], 7)), 7),
        (DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 6, drop_last=False)), 4),
        (batch_shard(1, 2, DataLoader(DATA, batch_size=2)), 5),
    ],
)
def test_a_length_is_known_where_only_torchs_and_accelerates_classes_are_asked(loader: Any, length: int) -> None:
    assert known_length(loader) == length


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's own call, with torch 2.13
@pytest.mark.parametrize("known", [{}, {"shuffle": True}, {"sampler": SubsetRandomSampler([1, 2])}])
def test_the_length_of_torchdatas_loader_is_known_as_torchs(known: dict[str, Any]) -> None:
    """It has samplers of its own."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    assert known_length(stateful(DATA, batch_size=8, **known)) == len(DataLoader(DATA, batch_size=8, **known))
    assert known_length(stateful(DATA, sampler=Own())) is None


@pytest.mark.parametrize(
    "loader",
    [
        None,
        iter(DATA),
        {1: 2},
        OwnList(DATA),
        Stream(),
        DataLoader(Stream()),
        DataLoader(SizedStream()),
        DataLoader(SizedStream(), batch_size=None),
        stream_shard(1, 2),
        OwnLength(DATA),
        OwnPass(DATA),
        DataLoader(DATA, sampler=Own()),
        DataLoader(DATA, batch_size=None, sampler=Own()),
        DataLoader(DATA, sampler=OwnShare(DATA, 2, 0)),
        DataLoader(DATA, batch_sampler=OwnBatches(SequentialSampler(DATA), 2, drop_last=False)),
        DataLoader(DATA, batch_sampler=BatchSampler(Own(), 2, drop_last=False)),
    ],
)
def test_no_length_is_asked_for_that_may_be_the_users_own_code(loader: Any) -> None:
    assert known_length(loader) is None
