"""What a loader's sampler shows: whether the data is sharded by rank, and what determines its order."""

from typing import Any

import pytest
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard
from torch.utils.data import DataLoader, IterableDataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from countoff._adapter.sampling import sampling_of
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
    first = of(loader).order
    assert first is not None
    assert of(loader).order == first
    loader.sampler.set_epoch(1)  # pyright: ignore[reportAttributeAccessIssue]
    assert of(loader).order != first
    assert of(distributed(seed=4)).order != first


def test_an_order_without_a_shuffle_or_by_a_custom_sampler_is_unknown():
    assert of(distributed(shuffle=False)).order is None
    own = CustomIteration(DATA, num_replicas=2, rank=1)
    assert of(DataLoader(DATA, sampler=own)) == Sampling(is_sharded=True)
    assert of(DataLoader(DATA, sampler=RandomSampler(DATA))).order is None


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
    assert of(batch_shard(1, 2, loader)).order == of(loader).order
