"""What else people do with Accelerate, a job each: resume, join, nest, end early, start alone, plan a schedule."""

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from accelerate.local_sgd import LocalSGD
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup

from countoff.accelerate import attach
from integration_tests.accelerate_jobs import (
    Loop,
    forward_and_back,
    map_loader,
    model_and_optimizer,
    run,
    stream_loader,
    weights,
)
from integration_tests.jobs import BATCH_SIZE, digits, own_rank


def resumed(save_at: tuple[int, int], differently: bool = False) -> dict[str, Any]:
    """Trains through, then again in two halves with a checkpoint between; returns the outcome of both."""
    loop = Loop(samples=66, shuffle=True, epochs=3, accumulation=2, loader={"use_seedable_sampler": True})
    through = run(replace(loop, options=None))

    def begin(options: dict[str, Any]) -> tuple[Any, ...]:
        accelerator = loop.accelerator()
        model, raw = model_and_optimizer()
        model, optimizer, train = accelerator.prepare(model, raw, loop.train_loader(accelerator.num_processes))
        return accelerator, model, raw, optimizer, train, attach(accelerator, train=train, **options)

    def train_some(parts: tuple[Any, ...], first: tuple[int, int], last: tuple[int, int] | None) -> None:
        accelerator, model, _, optimizer, train, _ = parts
        for epoch in range(first[0], loop.epochs):
            train.set_epoch(epoch)
            skip = first[1] if epoch == first[0] else 0
            loader = accelerator.skip_first_batches(train, skip) if skip else train
            for number, batch in enumerate(loader, start=skip + 1):
                forward_and_back(accelerator, model, optimizer, batch)
                if (epoch, number) == last:
                    accelerator.save_state("saved")
                    return

    parts = begin({})
    train_some(parts, (0, 0), save_at)
    parts[-1].detach()
    parts[0].wait_for_everyone()
    saved = Path("saved")
    if differently and own_rank() == 1:  # an older one, from this host's own disk
        saved = Path(shutil.copytree(saved, "older"))
        for file in saved.glob("countoff_*.json"):
            file.write_text(json.dumps({**json.loads(file.read_text()), "epoch": 0, "batches": 9, "steps": 5}))
    parts = begin({})
    accelerator, model, raw, _, _, handle = parts
    accelerator.load_state(str(saved))
    train_some(parts, save_at, None)
    found = {
        "through": through.weights,
        "resumed": weights(model),
        "steps": raw.applied,
        "counted": handle.guard.steps,
        "epoch": handle.loop.passes.epoch,
        "batches": handle.guard.train_batches,
    }
    handle.detach()
    return found


def skips_differently() -> None:
    """Rank 0 skips 5 batches of the epoch in which it resumes, rank 1 skips 6; both stay in their first batch."""
    accelerator = Accelerator(cpu=True)
    train = accelerator.prepare(map_loader(80))
    handle = attach(accelerator, train=train)
    for _ in accelerator.skip_first_batches(train, 5 + own_rank()):
        while handle.guard.verdict is None:  # the test's deadline ends it
            time.sleep(0.01)


def checkpoints_of_their_own() -> tuple[int, int, int]:
    """Each rank saves into a folder of its own, as on a host's own disk, and resumes from it within the epoch."""
    accelerator = Accelerator(cpu=True)
    _, optimizer = model_and_optimizer()
    train = accelerator.prepare(map_loader(40))
    folder = f"disk{own_rank()}"
    with attach(accelerator, train=train) as handle:
        for number, _ in enumerate(train, start=1):
            optimizer.step()
            if number == 3:
                accelerator.save_state(folder)
                break
        accelerator.load_state(folder)
        for _ in accelerator.skip_first_batches(train, 3):
            optimizer.step()
        return handle.loop.passes.epoch, handle.guard.train_batches, handle.loop.fit.steps_before


def two_accelerators() -> list[tuple[int, int, int]]:
    """A loop within a loop, each with an Accelerator, a model and a handle of its own; steps applied and counted."""
    sides: list[tuple[Any, ...]] = []
    for samples in (48, 24):
        accelerator = Accelerator(cpu=True)
        model, raw = model_and_optimizer()
        model, optimizer, train = accelerator.prepare(model, raw, map_loader(samples))
        sides.append((accelerator, model, raw, optimizer, train, attach(accelerator, train=train)))
    outer, inner = sides
    for number, batch in enumerate(outer[4]):
        forward_and_back(outer[0], outer[1], outer[3], batch)
        if number % 3 == 0:
            for small in inner[4]:
                forward_and_back(inner[0], inner[1], inner[3], small)
    found = [(side[2].applied, side[5].guard.steps, side[5].guard.train_batches) for side in sides]
    outer[5].detach()  # the first that came: the second goes on
    for small in inner[4]:
        forward_and_back(inner[0], inner[1], inner[3], small)
    found.append((inner[2].applied, inner[5].guard.steps, inner[5].guard.train_batches))
    inner[5].detach()
    assert "countoff" not in DataLoaderShard.__iter__.__qualname__
    return found


_kept: list[Any] = []
"""What lives until the interpreter ends, as the globals of a script do.

A model that goes right after `end_training()` has the last reference to the process group. torch 2.13 then waits
for the group's thread while it holds the interpreter's lock, and the thread may need that lock to end.
"""


def ends_training(before_detach: bool) -> bool:
    """`end_training()` destroys the process group; the handle is let go of before that or after it."""
    accelerator = Accelerator(cpu=True)
    model, raw = model_and_optimizer()
    model, optimizer, train = accelerator.prepare(model, raw, map_loader(40))
    _kept.append(model)
    handle = attach(accelerator, train=train)
    for batch in train:
        forward_and_back(accelerator, model, optimizer, batch)
    if before_detach:
        accelerator.end_training()
        handle.detach()
    else:
        handle.detach()
        accelerator.end_training()
    return handle.guard.verdict is None


def leaves_it_to_the_exit() -> None:
    """Never detached: the end of the program is the end of the fit, and `end_training()` came first."""
    accelerator = Accelerator(cpu=True)
    model, raw = model_and_optimizer()
    model, optimizer, train = accelerator.prepare(model, raw, map_loader(40))
    _kept.append(model)
    attach(accelerator, train=train)
    for batch in train:
        forward_and_back(accelerator, model, optimizer, batch)
    accelerator.end_training()


def joined() -> str:
    accelerator = Accelerator(cpu=True)
    model, raw = model_and_optimizer()
    model, optimizer, train = accelerator.prepare(model, raw, map_loader(40))
    with attach(accelerator, train=train), accelerator.join_uneven_inputs([model]):
        for batch in train:
            forward_and_back(accelerator, model, optimizer, batch)
    return weights(model)


class AsOnGpus(Accelerator):
    """Enters `Join`, which Accelerate otherwise does on GPUs only; on a CPU it works as well."""

    multi_device = True  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]


def joined_in_earnest(configured: bool, argument: bool | None) -> list[int]:
    """Uneven batches inside a Join that `join_uneven_inputs` has really entered, by either way of saying so."""
    accelerator = AsOnGpus(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=configured))
    model, raw = model_and_optimizer()
    model = torch.nn.parallel.DistributedDataParallel(model)
    train = accelerator.prepare(map_loader(28))
    batches = [0, 0]
    with attach(accelerator, train=train):
        for epoch in range(2):
            with accelerator.join_uneven_inputs([model], even_batches=argument):
                for images, labels in train:
                    torch.nn.functional.cross_entropy(model(images), labels).backward()
                    raw.step()
                    raw.zero_grad()
                    batches[epoch] += 1
    assert "join_uneven_inputs" not in vars(accelerator)
    return batches


def joined_without_effect(batches: Sequence[int]) -> None:
    """Uneven streams inside `join_uneven_inputs`, which leaves its Join off as `even_batches` is on."""
    accelerator = AsOnGpus(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    model, raw = model_and_optimizer()
    model = torch.nn.parallel.DistributedDataParallel(model)
    train = accelerator.prepare(stream_loader(batches[own_rank()], accelerator.num_processes))
    attach(accelerator, train=train)
    for epoch in range(2):
        with accelerator.join_uneven_inputs([model]):
            for number, (images, labels) in enumerate(train, start=1):
                torch.nn.functional.cross_entropy(model(images), labels).backward()
                raw.step()
                raw.zero_grad()
                print(f"trained {epoch} {number}", flush=True)


def averaged_now_and_then(samples: int, counted: bool, enabled: bool = True) -> tuple[list[int], str]:
    """Epochs of different lengths inside `LocalSGD`; this rank's batches, and the weights."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    model, raw = model_and_optimizer()
    model, optimizer, train = accelerator.prepare(model, raw, map_loader(samples))
    batches = [0, 0]
    with attach(accelerator, train=train, enabled=counted):
        for epoch in range(2):
            with LocalSGD(accelerator, model, local_sgd_steps=2, enabled=enabled) as local_sgd:
                for batch in train:
                    forward_and_back(accelerator, model, optimizer, batch)
                    local_sgd.step()
                    batches[epoch] += 1
    return batches, weights(model)


def averaged_without_and_with() -> list[tuple[list[int], str]]:
    """The same epochs inside `LocalSGD` without countoff and with it, which leaves its class as it was."""
    enter, leave = LocalSGD.__enter__, LocalSGD.__exit__
    found = [averaged_now_and_then(20, counted) for counted in (False, True)]
    assert (LocalSGD.__enter__, LocalSGD.__exit__) == (enter, leave)
    return found


def overflows() -> tuple[int, int, bool]:
    """A gradient scaler that leaves one of five steps out; steps applied, counted, and whether one was skipped."""
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.GradScaler("cpu", init_scale=4.0)
    model, raw = model_and_optimizer()
    model, optimizer, train = accelerator.prepare(model, raw, map_loader(40))
    skipped = False
    with attach(accelerator, train=train) as handle:
        for number, (images, labels) in enumerate(train):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss * (float("inf") if number == 2 else 1.0))
            optimizer.step()
            skipped |= optimizer.step_was_skipped
            optimizer.zero_grad()
        return raw.applied, handle.guard.steps, skipped


def joined_by_hand(batches: Sequence[int]) -> str:
    """Uneven streams inside torch's own Join, which Accelerate only enters on GPUs."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    model, raw = model_and_optimizer()
    loader = stream_loader(batches[own_rank()], accelerator.num_processes)
    model, optimizer, train = accelerator.prepare(model, raw, loader)
    handle = attach(accelerator, train=train)
    for _ in range(2):
        with handle.uncounted(), model.join():
            for batch in train:
                forward_and_back(accelerator, model, optimizer, batch)
    handle.detach()
    return weights(model)


def alone() -> int:
    """A CPU job without ACCELERATE_USE_CPU: each process trains for itself."""
    accelerator = Accelerator()
    model, raw = model_and_optimizer()
    model, optimizer, train = accelerator.prepare(model, raw, map_loader(40))
    with attach(accelerator, train=train) as handle:
        for batch in train:
            forward_and_back(accelerator, model, optimizer, batch)
        return handle.guard.steps


def refusals() -> list[str]:
    """The errors of attach() on loaders that it cannot watch; it leaves Accelerate's classes alone if it is off."""
    accelerator = Accelerator(cpu=True)
    original, plain = DataLoaderShard.__iter__, map_loader(40)
    prepared = accelerator.prepare(plain)
    said: list[str] = []
    wrong: list[dict[str, Any]] = [{"train": plain}, {"train": prepared, "eval": {"digits": plain}}, {"train": [1]}, {}]
    for arguments in wrong:
        try:
            attach(accelerator, **arguments)
        except TypeError as error:
            said.append(str(error))
    off = attach(accelerator, train=prepared, enabled=False)
    assert DataLoaderShard.__iter__ is original
    off.detach()
    on = attach(accelerator, train=prepared)
    assert DataLoaderShard.__iter__ is not original
    on.detach()
    assert DataLoaderShard.__iter__ is original
    return said


def sharded_hub_stream(shards: int) -> None:
    """A streaming data set of Hugging Face's `datasets`, whose shards Accelerate assigns to the ranks."""
    import datasets

    def samples(numbers: list[int]) -> Iterator[dict[str, Any]]:
        images, labels = digits()
        for shard in numbers:
            for number in range(3 * BATCH_SIZE):
                yield {"images": images[shard * 100 + number].numpy(), "labels": int(labels[shard * 100 + number])}

    data = datasets.IterableDataset.from_generator(samples, gen_kwargs={"numbers": list(range(shards))})
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    model, raw = model_and_optimizer()
    loader = DataLoader(data.with_format("torch"), batch_size=BATCH_SIZE)  # pyright: ignore[reportArgumentType]
    model, optimizer, train = accelerator.prepare(model, raw, loader)
    attach(accelerator, train=train)
    for epoch in range(2):
        for number, batch in enumerate(train, start=1):
            forward_and_back(accelerator, model, optimizer, (batch["images"], batch["labels"]))
            print(f"trained {epoch} {number}", flush=True)


def scheduled(
    horizon: int, epochs: int | None, run_epochs: int, samples: int = 80, warmup: int = 0, **options: Any
) -> list[float]:
    """Trains with a schedule of so many ticks that Accelerate has prepared; the learning rate after each step.

    Args:
        horizon: The ticks for which the schedule is made.
        epochs: The epochs of the run that countoff is told; None: nothing.
        run_epochs: The epochs of the run.
        samples: Samples of an epoch; a batch has 4, and one that is not full is dropped.
        warmup: Ticks of the warm-up, of a schedule of transformers.
        options: Of the Accelerator.
    """
    accelerator = Accelerator(cpu=True, **options)
    model, raw = model_and_optimizer()
    if warmup:
        scheduler: Any = get_linear_schedule_with_warmup(raw, warmup, horizon)
    else:
        scheduler = torch.optim.lr_scheduler.LinearLR(raw, 1.0, 0.0, total_iters=horizon)
    loader = map_loader(samples, drop_last=True)
    model, optimizer, train, scheduler = accelerator.prepare(model, raw, loader, scheduler)
    rates: list[float] = []
    with attach(accelerator, train=train, epochs=epochs):
        for _ in range(run_epochs):
            for images, labels in train:
                accelerator.backward(torch.nn.functional.cross_entropy(model(images), labels))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                rates.append(float(raw.param_groups[0]["lr"]))
    return rates


def scheduled_by_epoch(epochs: int, ticks: int) -> float:
    """Trains with a prepared schedule that the loop steps once per epoch; the learning rate at the end."""
    accelerator = Accelerator(cpu=True)
    model, raw = model_and_optimizer()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(raw, T_max=ticks)
    model, optimizer, train, scheduler = accelerator.prepare(model, raw, map_loader(80), scheduler)
    with attach(accelerator, train=train, epochs=epochs):
        for _ in range(epochs):
            for batch in train:
                forward_and_back(accelerator, model, optimizer, batch)
            scheduler.step()
    return float(raw.param_groups[0]["lr"])


def scheduled_with(horizon: int, options: dict[str, Any]) -> list[float]:
    return scheduled(horizon, 2, 2, **options)


def of_one_process() -> list[tuple[int, int, dict[str, float]]]:
    """Batches and samples that one process reads, for each of three ways to cut 70 samples, and what was foretold."""
    found = list[tuple[int, int, dict[str, float]]]()
    for even_batches, drop_last in ((True, False), (False, False), (True, True)):
        configuration = DataLoaderConfiguration(even_batches=even_batches)
        accelerator = Accelerator(cpu=True, dataloader_config=configuration)
        loader = accelerator.prepare(map_loader(70, drop_last=drop_last))
        with attach(accelerator, train=loader) as watched:
            foretold = watched.progress()
            sizes = [len(batch[0]) for batch in loader]
        found.append((len(sizes), sum(sizes), foretold))
    return found
