"""Training loops without a loader, as nanoGPT has one: a function draws a random batch, and only steps are counted."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from countoff.torch import Countoff
from integration_tests.digits import BATCH_SIZE, digits, own_rank, weights
from integration_tests.loops import model_and_optimizer, train_on


@dataclass(frozen=True)
class Run:
    """What a test varies, each with one value per rank.

    Attributes:
        steps: Optimizer steps of each rank.
        batch_size: Samples that each rank says it draws.
        start_step: The step from which each rank says it resumes.
        accumulation: Batches per optimizer step.
    """

    steps: tuple[int, int] = (6, 6)
    batch_size: tuple[int, int] = (BATCH_SIZE, BATCH_SIZE)
    start_step: tuple[int, int] = (0, 0)
    accumulation: int = 2


def get_batch(generator: torch.Generator) -> Any:
    images, labels = digits()
    drawn = torch.randint(len(images), (BATCH_SIZE,), generator=generator)
    return images[drawn], labels[drawn]


def plain(run: Run) -> str:
    """The loop as its author wrote it; it draws the next batch while the model works on this one."""
    generator = torch.Generator().manual_seed(own_rank())
    model, optimizer = model_and_optimizer()
    batch = get_batch(generator)
    for _ in range(run.steps[own_rank()]):
        for micro_step in range(run.accumulation):
            images, labels = batch
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            batch = get_batch(generator)
            loss.backward()
            if micro_step == run.accumulation - 1:
                optimizer.step()
                optimizer.zero_grad()
    return weights(model)


def counted(run: Run) -> tuple[str, int, int]:
    """The same loop with two lines more, and `next(batches)` in place of `get_batch(generator)`."""
    generator = torch.Generator().manual_seed(own_rank())
    model, optimizer = model_and_optimizer()
    countoff = Countoff(
        optimizer=optimizer,
        batch_size=run.batch_size[own_rank()],
        start_step=run.start_step[own_rank()],
        gradient_accumulation_steps=run.accumulation,
    )
    before = run.start_step[own_rank()] * run.accumulation
    batches = countoff.train(iter(lambda: get_batch(generator), None), position=before)
    batch = next(batches)
    for _ in range(run.steps[own_rank()]):
        for micro_step in range(run.accumulation):
            images, labels = batch
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            batch = next(batches)
            loss.backward()
            if micro_step == run.accumulation - 1:
                optimizer.step()
                optimizer.zero_grad()
    return weights(model), countoff.guard.train_batches, countoff.guard.steps


def plain_and_counted(run: Run) -> tuple[str, tuple[str, int, int]]:
    dist.init_process_group("gloo")
    return plain(run), counted(run)


def only_counted(run: Run) -> tuple[str, int, int]:
    dist.init_process_group("gloo")
    return counted(run)


def stream(batches: int) -> Iterator[Any]:
    generator = torch.Generator().manual_seed(own_rank())
    for _ in range(batches):
        yield get_batch(generator)


def over_iterables() -> list[Any]:
    """Epochs over a list of batches, then one over a generator."""
    dist.init_process_group("gloo")
    model, optimizer = model_and_optimizer()
    found: list[Any] = []
    with Countoff(optimizer=optimizer) as countoff:
        batches = list(stream(3))
        sized: Any = countoff.train(batches)
        found.append(len(sized))
        for _ in range(2):
            for batch in countoff.train(batches):
                train_on(model, optimizer, batch)
            found.append(countoff.guard.train_batches)
        several = countoff.train(stream(4))
        train_on(model, optimizer, next(several))
        for batch in several:
            train_on(model, optimizer, batch)
        found += [countoff.guard.train_batches, countoff.state_dict()["epoch"]]
    return found


def uneven_iterables(batches: tuple[int, int]) -> None:
    dist.init_process_group("gloo")
    model, optimizer = model_and_optimizer()
    countoff = Countoff(optimizer=optimizer)
    for _ in range(3):
        for batch in countoff.train(stream(batches[own_rank()])):
            train_on(model, optimizer, batch)
