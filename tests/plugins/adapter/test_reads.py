"""What one rank tells of a train epoch, as a real loader of torch is read."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from countoff._adapter.reads import Reads
from countoff.core.checks.once import Reading

BATCH_SIZE = 4


def reading(rows: int, batches: int) -> Reading:
    """What the first of two ranks tells of its first batches."""
    dataset = TensorDataset(torch.arange(rows))
    loader = DataLoader(dataset, BATCH_SIZE, sampler=DistributedSampler(dataset, 2, 0))
    facts = SimpleNamespace(dataset_size=rows)
    plan: Any = SimpleNamespace(
        facts=facts,
        samples_repeated=rows % 2,
        samples_dropped=0,
        batches_per_epoch=len(loader),
        uneven_batches=None,
    )
    once = SimpleNamespace(position=0, reads=None)
    guard: Any = SimpleNamespace(once=once, resumes=SimpleNamespace(look_at_order=lambda: None))
    recorded = Reads(0, 2)
    recorded.expect(loader)
    iterator = iter(loader)
    list(itertools.islice(iterator, batches))
    recorded.begin(guard, plan, iterator)
    found: Any = once.reads
    told = found.reading(batches)()
    recorded.release()
    return told[0]


@pytest.mark.parametrize(("rows", "batches", "is_summed"), [(16, 2, True), (16, 1, False), (15, 2, False)])
def test_the_hashes_of_a_share_are_summed_up_only_where_the_sums_tell_all(rows, batches, is_summed):
    """Of a part of an epoch, or with repeated samples, they tell nothing; of a large share that takes seconds."""
    assert (reading(rows, batches).difference != 0) is is_summed
