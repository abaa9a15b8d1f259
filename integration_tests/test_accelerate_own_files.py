"""Accelerate over files of each process's own, prepared as for a single process."""

import pytest

pytest.importorskip("accelerate")

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader

from countoff.accelerate import Countoff
from integration_tests.digits import own_rank, share_loader
from integration_tests.output import verdict_lines


def train_on_own_files(_: int) -> list[Any]:
    """The first pixels that this process trains on in each epoch of two, its steps, and those of its whole share."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(64, 10)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    share = share_loader((7, 5)[own_rank()])
    own = [float(images.sum()) for images, _ in share]
    loader = prepare_data_loader(
        share, accelerator.device, num_processes=1, process_index=0, put_on_device=True, dispatch_batches=False
    )
    found: list[Any] = []
    with Countoff(accelerator, uneven_train="stop") as countoff:
        for _ in range(2):
            seen, steps = [], 0
            for images, labels in countoff.train(loader):
                with accelerator.accumulate(model):
                    accelerator.backward(torch.nn.functional.cross_entropy(model(images), labels))
                    optimizer.step()
                    optimizer.zero_grad()
                seen.append(float(images.sum()))
                steps += accelerator.sync_gradients
            found.append((seen == own[:5], steps))
    return found


def test_each_process_keeps_its_own_files(run_ranks):
    """Every process trains on its own first batches, as many as the shortest has, and steps at the common end."""
    results = run_ranks(train_on_own_files, 2, 0, deadline_seconds=60)
    assert [result.value for result in results] == [[(True, 3)] * 2] * 2, results
    (headline,) = (line for line in verdict_lines(results[0]) if line.startswith("countoff: "))
    assert "Truncated: train epoch 0 stopped on every rank after 5 batches, where rank 1 ran out" in headline
    assert verdict_lines(results[1]) == []
