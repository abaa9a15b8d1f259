"""Reads what a loader's objects declare about the stream that its framework deals out to the ranks.

A framework that deals one stream out assumes that it is the same on every rank. An object that is one rank's share of
the data says otherwise: a stream of `datasets` after `split_dataset_by_node`, a DistributedSampler inside a prepared
loader, a pipeline of webdataset with `split_by_node`, a StreamingDataset of mosaicml-streaming. Nothing is iterated,
and no `__getitem__` of the user's called.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Subset, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from countoff._adapter.torch_facts import is_data_loader, reported_length
from countoff.core.checks.data import DataIdentity
from countoff.core.checks.streams import (
    DIGEST,
    STREAMING,
    FirstElements,
    StreamFacts,
    column_digest,
    judge_streams,
)
from countoff.core.data.plain import ABSENT, attribute_of, bases_of, in_class, items_of, module_of
from countoff.core.data.unobserved import unobserved
from countoff.core.verdict import Verdict

__all__ = ["chosen_rows", "indices_seen", "sampler_inside", "sampler_of", "stream_facts", "streamed_twice"]

_SPLIT, _SAMPLER, _WEBDATASET = "split_dataset_by_node", "DistributedSampler", "webdataset's split_by_node"
_DEALS_ITSELF = ("__iter__", "_get_work", "_each_sample_id")
"""Methods of a StreamingDataset that divide its samples among the ranks."""
_ROWS, _COLUMNS, _DEPTH = 4, 4, 32
_LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")


def stream_facts(loader: Any, data: DataIdentity) -> StreamFacts | None:
    """Returns what is known of the stream that is dealt out to this rank; None if none is. Raises nothing.

    Args:
        loader: Any loader, after its pass has begun.
        data: The guard's `data`.
    """
    if not is_data_loader(loader) or data.elements is None:
        return None
    try:
        return _prepared(loader, data, data.elements) or _distributed(loader, data)
    except Exception:  # a class of the user's may raise anything
        return None


def streamed_twice(loader: Any, data: DataIdentity, epoch: int) -> Verdict | None:
    """Returns a warning if a loader's framework deals out a StreamingDataset, which deals itself out; raises nothing.

    It is proven before the first batch, and there may be none: rank 0 waits forever where it alone reads that dataset.

    Args:
        loader: Any loader.
        data: The guard's `data`.
        epoch: Number of the first train epoch.
    """
    if not is_data_loader(loader):
        return None
    try:
        facts = _prepared(loader, data, FirstElements())
    except Exception:  # a class of the user's may raise anything
        return None
    if facts is None or facts.said_by != STREAMING:
        return None
    return judge_streams(f"train epoch {epoch}", {data.dp_rank: facts})


def indices_seen(dataset: Any) -> Any:
    """Returns a function from an element of a batch sampler to the indices it stands for.

    Args:
        dataset: What they are indices of; those of a Subset are translated.
    """
    if type(dataset) is Subset:
        return lambda batch: chosen_rows(dataset.indices, _indices_in(batch))
    return _indices_in


def _indices_in(batch: Any) -> list[int]:
    """The indices of a batch that stores them.

    Raises:
        TypeError: If it may compute them, as an iterator does, or if they are no integers.
    """
    found = items_of(batch)
    if found is None:
        raise TypeError(f"a {type(batch)} may compute its items")
    return [_whole(index) for index in found]


def chosen_rows(indices: Any, places: Sequence[int]) -> list[int]:
    """Returns the indices of a Subset at some places.

    Args:
        indices: Those of the Subset.
        places: The places.

    Raises:
        TypeError: If the Subset's own are of a class that may compute them, or are no integers.
    """
    numpy = sys.modules.get("numpy")
    if type(indices) is torch.Tensor or (numpy is not None and type(indices) is numpy.ndarray):
        with unobserved():
            return [int(indices[place]) for place in places]
    found = items_of(indices)
    if found is None:
        raise TypeError(f"a {type(indices)} may compute its items")
    return [_whole(found[place]) for place in places]


def _whole(index: Any) -> int:
    numpy = sys.modules.get("numpy")
    if type(index) is int or (numpy is not None and type(index) is numpy.int64):
        return int(index)
    raise TypeError(f"expected an integer, got a {type(index)}")


def sampler_of(sampler: Any) -> Any:
    """Returns what a sampler or a batch sampler takes its indices from; None if that is nothing, or is computed."""
    for name in ("batch_sampler", "sampler"):
        inner = attribute_of(sampler, name)  # not asked for its truth: its length may raise
        if inner is not ABSENT and inner is not None:
            return inner
    return None


def sampler_inside(batch_sampler: Any) -> Any:
    """Returns the sampler of a batch sampler, inside of what Accelerate wraps around it."""
    for _ in range(_DEPTH):
        inner = attribute_of(batch_sampler, "batch_sampler")
        if inner is ABSENT or inner is None:
            break
        batch_sampler = inner
    inside = attribute_of(batch_sampler, "sampler")
    return None if inside is ABSENT else inside


def _prepared(loader: Any, data: DataIdentity, elements: FirstElements) -> StreamFacts | None:
    """The facts of a loader that Accelerate has prepared."""
    accelerate = sys.modules.get("accelerate.data_loader")
    if accelerate is None or not isinstance(loader, (accelerate.DataLoaderShard, accelerate.DataLoaderDispatcher)):
        return None
    if isinstance(loader, accelerate.DataLoaderDispatcher):
        facts = StreamFacts("Accelerate", loader.state.num_processes, first_only=True)
        if facts.ways == 1:
            return None
        return _declared(_contents(facts, loader.dataset), loader.dataset, sampler_inside(loader.batch_sampler))
    dataset = loader.dataset
    if isinstance(dataset, accelerate.IterableDatasetShard):
        facts = StreamFacts("Accelerate", dataset.num_processes)
        return _declared(_stream(facts, dataset.dataset, elements), dataset.dataset, None)
    if isinstance(dataset, IterableDataset):
        # Of a stream of `datasets`, `Accelerator.prepare` takes whole shards, and leaves no other mark than this. A
        # loader that was prepared for a single process has no mark, and is not sharded.
        if not _is_hub_stream(dataset) or not getattr(loader, "_is_accelerate_prepared", False):
            return None
        facts = StreamFacts("Accelerate", data.dp_degree, seed=_seed(dataset))
        return _declared(facts, dataset, None) if facts.ways > 1 else None
    shard = _outermost(loader)
    while shard is not ABSENT and not isinstance(shard, accelerate.BatchSamplerShard):
        shard = attribute_of(shard, "batch_sampler")
    if shard is ABSENT:
        return None
    sampler = sampler_inside(shard)
    facts = _indices(StreamFacts("Accelerate", shard.num_processes), dataset, sampler, elements)
    return _declared(facts, dataset, sampler)


def _distributed(loader: DataLoader[Any], data: DataIdentity) -> StreamFacts | None:
    """The facts of a loader whose DistributedSampler deals out what it was given."""
    inside = sampler_inside(_outermost(loader))  # not asked for its truth, as above
    sampler = loader.sampler if inside is None else inside
    if not isinstance(sampler, DistributedSampler) or (sampler.rank, sampler.num_replicas) != (
        data.dp_rank,
        data.dp_degree,
    ):
        return None
    dealt: Any = sampler.dataset
    inner = attribute_of(dealt, "_sampler")  # Lightning deals out what a sampler of the user's own yields
    if inner is ABSENT or module_of(type(dealt)).partition(".")[0] not in _LIGHTNING:
        facts = StreamFacts("DistributedSampler", sampler.num_replicas)
        return _contents(facts, dealt) if facts.ways > 1 else None
    first = FirstElements()
    seen = indices_seen(loader.dataset)
    list(itertools.islice(first.follow(iter([dealt._sampler_list or []]), seen), 1))
    facts = StreamFacts("Lightning's DistributedSamplerWrapper", sampler.num_replicas)
    return _declared(_indices(facts, loader.dataset, inner, first), loader.dataset, inner)


def _outermost(loader: Any) -> Any:
    sampler = loader.sampler
    return sampler if isinstance(sampler, torch.utils.data.BatchSampler) else loader.batch_sampler


def _declared(facts: StreamFacts, dataset: Any, sampler: Any) -> StreamFacts:
    """Adds what the dataset or its sampler says about being a share."""
    split = getattr(dataset, "_distributed", None) if _is_hub_stream(dataset) else None
    if split is not None:
        return facts._replace(shares=int(split.world_size), said_by=_SPLIT)
    if isinstance(sampler, DistributedSampler) and attribute_of(sampler.dataset, "_sampler") is ABSENT:
        return facts._replace(shares=sampler.num_replicas, said_by=_SAMPLER)
    if (shares := streaming_shares(dataset)) > 1:
        return facts._replace(shares=shares, said_by=STREAMING)
    if _splits_by_node(dataset):
        return facts._replace(shares=torch.distributed.get_world_size(), said_by=_WEBDATASET)
    return facts


def _stream(facts: StreamFacts, dataset: Any, elements: FirstElements) -> StreamFacts:
    """Adds what is known of an iterable dataset whose samples are dealt out."""
    if _resamples(dataset):
        return facts
    seeds = _shuffle_seeds(dataset)
    seed = _digest(repr(seeds)) if seeds else _seed(dataset)
    return facts._replace(prints=elements.prints, parts=elements.parts, seed=seed)


def _indices(facts: StreamFacts, dataset: Any, sampler: Any, elements: FirstElements) -> StreamFacts:
    """Adds what is known of indices that are dealt out."""
    facts = _contents(facts, dataset)._replace(sampler=True)
    if isinstance(sampler, WeightedRandomSampler) or (isinstance(sampler, RandomSampler) and sampler.replacement):
        return facts  # drawn with replacement, indices need not be those of the other ranks
    facts = facts._replace(prints=elements.prints, shuffled=isinstance(sampler, RandomSampler))
    length = reported_length(sampler)
    whole = reported_length(dataset.dataset if type(dataset) is Subset else dataset)
    return facts if facts.contents else facts._replace(length=length, whole=whole)


def _contents(facts: StreamFacts, dataset: Any) -> StreamFacts:
    """Adds digests of some indices of a Subset or a map-style dataset of `datasets`, or of some rows of the latter."""
    if type(dataset) is Subset:
        length = len(dataset)
        indices = chosen_rows(dataset.indices, _places(length))
        return facts._replace(contents=column_digest(indices), length=length, whole=reported_length(dataset.dataset))
    hub = sys.modules.get("datasets")
    if hub is None or not isinstance(dataset, hub.Dataset):
        return facts
    table, chosen = dataset._data, dataset._indices
    if chosen is not None:
        indices = [chosen.column(0)[place].as_py() for place in _places(len(chosen))]
        return facts._replace(contents=column_digest(indices), length=len(chosen), whole=len(table))
    whole = _rows_as_loaded(dataset)
    if whole is None:
        return facts._replace(begin=_first_row(table), length=len(table))
    if len(table) >= whole:
        return facts
    rows = [table.fast_slice(place, 1).to_pydict() for place in _places(len(table))]
    names = sorted(rows[0])[:_COLUMNS] if rows else []
    contents = "".join(column_digest([row[name][0] for row in rows]) for name in names)
    return facts._replace(contents=contents, length=len(table), whole=whole)


def _first_row(table: Any) -> int | None:
    """The place of a table's first row in the memory that its columns are a part of; None if that is not one piece.

    A slice of a table shares the memory of the whole. What `map` has written has memory of its own.
    """
    begins = {tuple(chunk.offset for chunk in column.chunks) for column in table.table.columns}
    (begin,) = begins if len(begins) == 1 else [()]
    return begin[0] if len(begin) == 1 else None


def _rows_as_loaded(dataset: Any) -> int | None:
    """The rows of the split that a dataset of `datasets` was loaded from; None unless it still reads that one's files.

    What `map` has written is in other files. It may have changed the rows at random, on each rank in another way.
    """
    split = str(dataset.split)
    files = [str(each["filename"]) for each in dataset.cache_files]
    loaded = re.compile(rf"-{re.escape(split)}(-\d+-of-\d+)?\.arrow$")
    known = (dataset.info.splits or {}).get(split)
    return known.num_examples if known and files and all(map(loaded.search, files)) else None


def _places(length: int) -> list[int]:
    """Some rows, from the first to the last."""
    return [number * (length - 1) // (_ROWS - 1) for number in range(_ROWS)] if length else []


def _is_hub_stream(dataset: Any) -> bool:
    hub = sys.modules.get("datasets")
    return hub is not None and isinstance(dataset, hub.IterableDataset)


def _seed(dataset: Any) -> str:
    """A digest of the generator by which a stream of `datasets` shuffles; nothing if it does not."""
    steps: Any = getattr(dataset, "_ex_iterable", None) if _is_hub_stream(dataset) else None
    for _ in range(_DEPTH):
        if steps is None:
            break
        if type(steps).__name__ == "BufferShuffledExamplesIterable":
            return _digest(repr(steps.generator.bit_generator.state))
        steps = getattr(steps, "ex_iterable", None)
    return ""


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=DIGEST // 2).hexdigest()


def _shuffle_seeds(dataset: Any) -> list[int]:
    """The seeds by which the stages of a pipeline of webdataset shuffle, where given."""
    stages = [stage for stage in _pipeline(dataset) if "shuffle" in _name_of(stage)]
    found = [getattr(stage, "kw", {}).get("seed") for stage in stages]
    return [seed for seed in found if isinstance(seed, int)]


def _name_of(stage: Any) -> str:
    """The name of a stage's function, or of its class."""
    return getattr(getattr(stage, "f", stage), "__name__", type(stage).__name__).lower()


def _pipeline(dataset: Any) -> list[Any]:
    """The stages of a pipeline of webdataset."""
    web = sys.modules.get("webdataset")
    return list(dataset.pipeline) if web is not None and isinstance(dataset, web.DataPipeline) else []


def streaming_shares(dataset: Any) -> int:
    """The shares into which a StreamingDataset deals itself out; 0 for anything else, as one that reads in its way."""
    base = getattr(sys.modules.get("streaming.base.dataset"), STREAMING, None)
    kind = type(dataset)
    if base is None or base not in bases_of(kind):
        return 0
    if any(in_class(kind, name) is not in_class(base, name) for name in _DEALS_ITSELF):
        return 0
    shares = attribute_of(attribute_of(dataset, "_parallel_rank_world"), "num_ranks")
    return shares if type(shares) is int else 0


def _splits_by_node(dataset: Any) -> bool:
    web, stages = sys.modules.get("webdataset"), _pipeline(dataset)
    return web is not None and any(stage is web.split_by_node for stage in stages)


def _resamples(dataset: Any) -> bool:
    """Whether each rank draws shards at random, with replacement: its stream need not be that of the others."""
    return any(type(stage).__name__ == "ResampledShards" for stage in _pipeline(dataset))
