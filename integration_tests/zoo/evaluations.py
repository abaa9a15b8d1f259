"""Evaluations at odd times and in odd places."""

import copy
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from countoff.torch import Countoff
from integration_tests.digits import own_rank
from integration_tests.zoo.parts import (
    Listed,
    ddp,
    epochs_of,
    evaluate,
    network,
    own_batches,
    sgd,
    sharded,
    train,
    train_on,
)
from integration_tests.zoo.registry import healthy


def _start(batches=8, evaluation_samples=32):
    model = ddp()
    return model, sgd(model), sharded(8 * batches), sharded(evaluation_samples, seed=4)


@healthy(even=True)
def evaluation_in_a_thread(options):
    """A copy of the model is evaluated in a thread while the next epoch is trained."""
    model, optimizer, loader, _ = _start()
    evaluation = sharded(32, seed=4, generator=torch.Generator())
    with Countoff(optimizer=optimizer, **options) as countoff, ThreadPoolExecutor(1) as pool:
        running = []
        for epoch in range(3):
            train(countoff, model, optimizer, loader, 1, start=epoch)
            running.append(pool.submit(evaluate, copy.deepcopy(model.module), countoff.eval(evaluation)))
        losses = [each.result() for each in running]
    return model, losses


@healthy(even=True)
def evaluation_before_training(options):
    """The model is evaluated before its first step."""
    model, optimizer, loader, evaluation = _start()
    with Countoff(optimizer=optimizer, **options) as countoff:
        before = evaluate(model.module, countoff.eval(evaluation))
        return (
            before,
            train(countoff, model, optimizer, loader),
            evaluate(model.module, countoff.eval(evaluation)),
            model,
        )


@healthy(even=True)
def evaluation_within_an_epoch(options):
    """Every third batch is followed by an evaluation."""
    model, optimizer, loader, evaluation = _start()
    losses = []
    with Countoff(optimizer=optimizer, **options) as countoff:
        for _ in epochs_of(loader):
            for number, batch in enumerate(countoff.train(loader)):
                train_on(model, optimizer, batch)
                if number % 3 == 2:
                    losses.append(evaluate(model.module, countoff.eval(evaluation)))
    return model, losses


@healthy()
def part_of_an_evaluation(options):
    """Each evaluation takes two batches of the loader, by a break on all ranks."""
    model, optimizer, loader, evaluation = _start()
    losses = []
    with Countoff(optimizer=optimizer, **options) as countoff:
        for epoch in range(3):
            train(countoff, model, optimizer, loader, 1, start=epoch)
            for number, batch in enumerate(countoff.eval(evaluation)):
                losses.append(evaluate(model.module, [batch]))
                if number == 1:
                    break
    return model, losses


@healthy()
def evaluation_on_the_first_rank(options):
    """Rank 0 alone evaluates, with a loader that is not counted, and the others wait."""
    model, optimizer, loader, _ = _start()
    evaluation = DataLoader(sharded(40, seed=4).dataset, batch_size=4)
    losses = []
    with Countoff(optimizer=optimizer, **options) as countoff:
        for epoch in range(3):
            train(countoff, model, optimizer, loader, 1, start=epoch)
            if own_rank() == 0:
                losses.append(evaluate(model.module, evaluation))
            dist.barrier()
    return model, losses


@healthy()
def evaluation_on_ranks_that_are_told(options):
    """Rank 1 alone evaluates, which is counted, with uneven_eval="off"."""
    model, optimizer, loader, _ = _start()
    evaluation = DataLoader(sharded(40, seed=4).dataset, batch_size=4)
    losses = []
    told: dict[str, Any] = {**options, "uneven_eval": "off"}
    with Countoff(optimizer=optimizer, **told) as countoff:
        for epoch in range(3):
            train(countoff, model, optimizer, loader, 1, start=epoch)
            if own_rank() == 1:
                losses.append(evaluate(model.module, countoff.eval(evaluation)))
            dist.barrier()
    return model, losses


@healthy()
def several_evaluations(options):
    """Three loaders are evaluated in another order after each epoch."""
    model, optimizer, loader, _ = _start()
    evaluations = {name: sharded(samples, seed=4) for name, samples in (("news", 16), ("code", 24), ("talk", 40))}
    losses = []
    with Countoff(optimizer=optimizer, **options) as countoff:
        for epoch, names in enumerate(itertools.islice(itertools.permutations(evaluations), 3)):
            train(countoff, model, optimizer, loader, 1, start=epoch)
            losses += [evaluate(model.module, countoff.eval(evaluations[name], name)) for name in names]
    return model, losses


@healthy()
def two_evaluations_in_turn(options):
    """The loop takes a batch of each of two evaluation loaders in turn."""
    model, optimizer, loader, first = _start()
    second = sharded(32, seed=9)
    losses = []
    with Countoff(optimizer=optimizer, **options) as countoff:
        for epoch in range(2):
            train(countoff, model, optimizer, loader, 1, start=epoch)
            losses += [
                evaluate(model.module, pair)
                for pair in zip(countoff.eval(first, "first"), countoff.eval(second, "second"), strict=True)
            ]
    return model, losses


@healthy()
def evaluation_in_an_evaluation(options):
    """Each batch of one evaluation is compared with all batches of another one."""
    model, optimizer, loader, queries = _start(4, 16)
    gallery = sharded(24, seed=9)
    distances = []
    with Countoff(optimizer=optimizer, **options) as countoff:
        train(countoff, model, optimizer, loader, 1)
        for inputs, _ in countoff.eval(queries, "queries"):
            distances += [torch.cdist(inputs, others).min() for others, _ in countoff.eval(gallery, "gallery")]
    return model, distances


@healthy()
def train_loader_is_evaluated_on(options):
    """The train loader is read again after each epoch, without gradients, for the statistics of a norm."""
    model, optimizer, loader, _ = _start()
    losses = []
    with Countoff(optimizer=optimizer, compare_data=False, **options) as countoff:
        for epoch in range(2):
            train(countoff, model, optimizer, loader, 1, start=epoch)
            losses.append(evaluate(model.module, countoff.eval(loader, "train")))
    return model, losses


@healthy()
def uneven_evaluation_that_is_allowed(options):
    """Ranks evaluate three and four batches, and the program allows it."""
    model, optimizer, loader, _ = _start()
    evaluation = Listed(own_batches(3 + own_rank()))
    losses = []
    with Countoff(optimizer=optimizer, uneven_eval="allow", **options) as countoff:
        for epoch in range(2):
            train(countoff, model, optimizer, loader, 1, start=epoch)
            losses.append(evaluate(model.module, countoff.eval(evaluation)))
    return model, losses


@healthy()
def gathered_predictions(options):
    """The predictions of each batch are gathered from all ranks."""
    model, optimizer, loader, evaluation = _start()
    gathered = []
    with Countoff(optimizer=optimizer, **options) as countoff:
        train(countoff, model, optimizer, loader)
        model.eval()
        for inputs, _ in countoff.eval(evaluation):
            own = model.module(inputs).detach()
            others = [torch.empty_like(own) for _ in range(2)]
            dist.all_gather(others, own)
            gathered += others
    return gathered


@healthy()
def no_training_at_all(options):
    """The program evaluates only, twice."""
    model, _, _, evaluation = _start()
    with Countoff(**options) as countoff:
        return [evaluate(model.module, countoff.eval(evaluation)) for _ in range(2)]


@healthy()
def evaluation_that_fails_and_is_left_out(options):
    """The second evaluation raises on all ranks, which the program catches."""
    model, optimizer, loader, evaluation = _start()
    failures = 0
    with Countoff(optimizer=optimizer, **options) as countoff:
        for epoch in range(3):
            train(countoff, model, optimizer, loader, 1, start=epoch)
            try:
                for number, batch in enumerate(countoff.eval(evaluation)):
                    evaluate(model.module, [batch])
                    if (epoch, number) == (1, 2):
                        raise ZeroDivisionError("no positive sample")
            except ZeroDivisionError:
                failures += 1
    return model, failures


@healthy()
def generated_text_of_different_lengths(options):
    """In an evaluation, each rank runs another number of forward passes per batch."""
    model, optimizer, loader, evaluation = _start()
    decoder = network(3).eval()
    with Countoff(optimizer=optimizer, model=model, **options) as countoff:
        for epoch in range(2):
            train(countoff, model, optimizer, loader, 1, start=epoch)
            for inputs, _ in countoff.eval(evaluation):
                for _ in range(1 + 3 * own_rank()):
                    decoder(inputs)
    return model


@healthy()
def evaluation_in_a_context_uncounted(options):
    """Ranks read different parts of the train loader inside of uncounted, to choose a threshold."""
    model, optimizer, loader, _ = _start()
    with Countoff(optimizer=optimizer, **options) as countoff:
        for epoch in range(2):
            train(countoff, model, optimizer, loader, 1, start=epoch)
            with countoff.uncounted():
                list(itertools.islice(countoff.train(loader), 1 + own_rank()))
    return model
