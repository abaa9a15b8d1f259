"""What else people do with Accelerate, a job each: resume, join, nest, end early, start alone, plan a schedule."""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard, prepare_data_loader
from accelerate.local_sgd import LocalSGD
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader

from countoff.accelerate import Countoff
from integration_tests.accelerate_jobs import (
    Loop,
    forward_and_back,
    map_loader,
    model_and_optimizer,
    run,
    stream_loader,
    weights,
)
from integration_tests.digits import BATCH_SIZE, digits, own_rank


def afresh(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function after other jobs of this process: a second Accelerator refuses another configuration."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    return function(*arguments)


def resumed(save_at: tuple[int, int], differently: bool = False) -> dict[str, Any]:
    """Trains through, then again in two halves with a checkpoint between; returns the outcome of both."""
    loop = Loop(samples=66, shuffle=True, epochs=3, accumulation=2, loader={"use_seedable_sampler": True})
    through = run(replace(loop, options=None))

    def begin(options: dict[str, Any]) -> tuple[Any, ...]:
        accelerator = loop.accelerator()
        model, raw = model_and_optimizer()
        model, optimizer, train = accelerator.prepare(model, raw, loop.train_loader(accelerator.num_processes))
        return accelerator, model, raw, optimizer, train, Countoff(accelerator, **options)

    def train_some(parts: tuple[Any, ...], first: tuple[int, int], last: tuple[int, int] | None) -> None:
        accelerator, model, _, optimizer, train, countoff = parts
        for epoch in range(first[0], loop.epochs):
            train.set_epoch(epoch)
            skip = first[1] if epoch == first[0] else 0
            loader = accelerator.skip_first_batches(train, skip) if skip else train
            for number, batch in enumerate(countoff.train(loader), start=skip + 1):
                forward_and_back(accelerator, model, optimizer, batch)
                if (epoch, number) == last:
                    accelerator.save_state("saved")
                    return

    parts = begin({})
    train_some(parts, (0, 0), save_at)
    parts[-1].close()
    parts[0].wait_for_everyone()
    saved = Path("saved")
    if differently and own_rank() == 1:  # an older one, from this host's own disk
        saved = Path(shutil.copytree(saved, "older"))
        for file in saved.glob("countoff_*.json"):
            file.write_text(json.dumps({**json.loads(file.read_text()), "epoch": 0, "batches": 9, "steps": 5}))
    parts = begin({})
    accelerator, model, raw, _, _, countoff = parts
    accelerator.load_state(str(saved))
    train_some(parts, save_at, None)
    found = {
        "through": through.weights,
        "resumed": weights(model),
        "steps": raw.applied,
        "counted": countoff.guard.steps,
        "epoch": countoff.state_dict()["epoch"],
        "batches": countoff.guard.train_batches,
    }
    countoff.close()
    return found


def skips_differently() -> None:
    """Rank 0 skips 5 batches of the epoch in which it resumes, rank 1 skips 6; both stay in their first batch."""
    accelerator = Accelerator(cpu=True)
    train = accelerator.prepare(map_loader(80))
    countoff = Countoff(accelerator)
    for _ in countoff.train(accelerator.skip_first_batches(train, 5 + own_rank())):
        while countoff.guard.verdict is None:  # the test's deadline ends it
            time.sleep(0.01)


def checkpoints_of_their_own() -> tuple[int, int]:
    """Each rank saves into a folder of its own, as on a host's own disk, and resumes from it within the epoch."""
    accelerator = Accelerator(cpu=True)
    _, optimizer = model_and_optimizer()
    train = accelerator.prepare(map_loader(40))
    folder = f"disk{own_rank()}"
    with Countoff(accelerator) as countoff:
        for number, _ in enumerate(countoff.train(train), start=1):
            optimizer.step()
            if number == 3:
                accelerator.save_state(folder)
                break
        accelerator.load_state(folder)
        for _ in countoff.train(accelerator.skip_first_batches(train, 3)):
            optimizer.step()
        record = countoff.state_dict()
        return record["epoch"], record["steps"]


def two_accelerators() -> list[tuple[int, int, int]]:
    """A loop, and another one after it, each with an Accelerator, a model and a Countoff of its own.

    Returns:
        Steps applied and counted, and batches counted, of each.
    """
    found: list[tuple[int, int, int]] = []
    iterate = DataLoaderShard.__iter__
    for samples in (48, 24):
        accelerator = Accelerator(cpu=True)
        model, raw = model_and_optimizer()
        model, optimizer, train = accelerator.prepare(model, raw, map_loader(samples))
        countoff = Countoff(accelerator)  # the second one ends the first
        for batch in countoff.train(train):
            forward_and_back(accelerator, model, optimizer, batch)
        found.append((raw.applied, countoff.guard.steps, countoff.guard.train_batches))
    countoff.close()
    assert DataLoaderShard.__iter__ is iterate
    return found


_kept: list[Any] = []
"""What lives until the interpreter ends, as the globals of a script do.

A model that goes right after `end_training()` has the last reference to the process group. torch 2.13 then waits
for the group's thread while it holds the interpreter's lock, and the thread may need that lock to end.
"""


def ends_training(before_close: bool) -> bool:
    """`end_training()` destroys the process group; countoff is closed before that or after it."""
    accelerator = Accelerator(cpu=True)
    model, raw = model_and_optimizer()
    model, optimizer, train = accelerator.prepare(model, raw, map_loader(40))
    _kept.append(model)
    countoff = Countoff(accelerator)
    for batch in countoff.train(train):
        forward_and_back(accelerator, model, optimizer, batch)
    if before_close:
        accelerator.end_training()
        countoff.close()
    else:
        countoff.close()
        accelerator.end_training()
    return countoff.guard.verdict is None


def leaves_it_to_the_exit() -> None:
    """Never closed: the end of the program is the end of the fit, and `end_training()` came first."""
    accelerator = Accelerator(cpu=True)
    model, raw = model_and_optimizer()
    model, optimizer, train = accelerator.prepare(model, raw, map_loader(40))
    _kept.append(model)
    countoff = Countoff(accelerator)
    for batch in countoff.train(train):
        forward_and_back(accelerator, model, optimizer, batch)
    accelerator.end_training()


def joined() -> str:
    accelerator = Accelerator(cpu=True)
    model, raw = model_and_optimizer()
    model, optimizer, train = accelerator.prepare(model, raw, map_loader(40))
    with Countoff(accelerator) as countoff, accelerator.join_uneven_inputs([model]):
        for batch in countoff.train(train):
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
    with Countoff(accelerator) as countoff:
        for epoch in range(2):
            with accelerator.join_uneven_inputs([model], even_batches=argument):
                for images, labels in countoff.train(train):
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
    countoff = Countoff(accelerator)
    for epoch in range(2):
        with accelerator.join_uneven_inputs([model]):
            for number, (images, labels) in enumerate(countoff.train(train), start=1):
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
    with Countoff(accelerator, enabled=counted) as countoff:
        for epoch in range(2):
            with LocalSGD(accelerator, model, local_sgd_steps=2, enabled=enabled) as local_sgd:
                for batch in countoff.train(train):
                    forward_and_back(accelerator, model, optimizer, batch)
                    local_sgd.step()
                    batches[epoch] += 1
    return batches, weights(model)


def averaged_without_and_with() -> list[tuple[list[int], str]]:
    """The same epochs inside `LocalSGD` without countoff and with it."""
    return [averaged_now_and_then(20, counted) for counted in (False, True)]


def overflows() -> tuple[int, int, bool]:
    """A gradient scaler that leaves one of five steps out; steps applied, counted, and whether one was skipped."""
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.GradScaler("cpu", init_scale=4.0)
    model, raw = model_and_optimizer()
    model, optimizer, train = accelerator.prepare(model, raw, map_loader(40))
    skipped = False
    with Countoff(accelerator) as countoff:
        for number, (images, labels) in enumerate(countoff.train(train)):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss * (float("inf") if number == 2 else 1.0))
            optimizer.step()
            skipped |= optimizer.step_was_skipped
            optimizer.zero_grad()
        return raw.applied, countoff.guard.steps, skipped


def joined_by_hand(batches: Sequence[int]) -> str:
    """Uneven streams inside torch's own Join, which Accelerate only enters on GPUs."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    model, raw = model_and_optimizer()
    loader = stream_loader(batches[own_rank()], accelerator.num_processes)
    model, optimizer, train = accelerator.prepare(model, raw, loader)
    countoff = Countoff(accelerator)
    for _ in range(2):
        with countoff.uncounted(), model.join():
            for batch in countoff.train(train):
                forward_and_back(accelerator, model, optimizer, batch)
    countoff.close()
    return weights(model)


def alone() -> int:
    """A CPU job without ACCELERATE_USE_CPU: each process trains for itself."""
    accelerator = Accelerator()
    model, raw = model_and_optimizer()
    model, optimizer, train = accelerator.prepare(model, raw, map_loader(40))
    with Countoff(accelerator) as countoff:
        for batch in countoff.train(train):
            forward_and_back(accelerator, model, optimizer, batch)
        return countoff.guard.steps


def loaders_of_any_kind() -> dict[str, tuple[int, int, int | None]]:
    """What may be given to `train`: batches read and counted, and the batches of an epoch that were foretold."""
    accelerator = Accelerator(cpu=True)
    half = map_loader(40, drop_last=True)
    alone = prepare_data_loader(
        map_loader(20), accelerator.device, num_processes=1, process_index=0, put_on_device=True, dispatch_batches=False
    )
    kinds = {
        "prepared": lambda: accelerator.prepare(map_loader(40)),
        "prepared as for one process": lambda: alone,
        "not prepared": lambda: half,
        "a generator": lambda: (batch for batch in half),
        "steps": lambda: range(7),
    }
    found: dict[str, tuple[int, int, int | None]] = {}
    for name, make in kinds.items():
        with Countoff(accelerator, compare_data=False) as countoff:
            read, foretold = 0, None
            for _ in countoff.train(make()):
                read, foretold = read + 1, countoff.progress().get("countoff/batches_per_epoch")
            found[name] = read, countoff.guard.train_batches, None if foretold is None else int(foretold)
    return found


def classes_during_and_after() -> dict[str, bool]:
    """Whether Accelerate's classes are its own while countoff is off, before a fit, in it, after it, and without it."""
    accelerator = Accelerator(cpu=True)
    model, train = accelerator.prepare(model_and_optimizer()[0], map_loader(40))

    def methods() -> list[Any]:
        return [DataLoaderShard.__iter__, Accelerator.backward]

    def around() -> list[Any]:
        return [Accelerator.save_state, Accelerator.load_state, Accelerator.join_uneven_inputs, LocalSGD.__enter__]

    before, outer = methods(), around()
    found: dict[str, bool] = {}
    off = Countoff(accelerator, enabled=False)
    found["read while it is off"] = [len(images) for images, _ in off.train(train)] == [BATCH_SIZE] * 5
    found["off"] = (methods(), around()) == (before, outer)
    countoff = Countoff(accelerator)
    found["before the fit"] = methods() == before
    for _ in countoff.train(train):
        found["the loader's class in it"] = methods()[0] is before[0] and type(train) is DataLoaderShard
    countoff.close()
    found["after it"] = methods() == before
    del countoff
    accelerator.save_state("saved")  # the first calls after the Countoff is gone
    accelerator.wait_for_everyone()
    accelerator.load_state("saved")
    with LocalSGD(accelerator, model, local_sgd_steps=2):
        pass
    found["when it is gone"] = around() == outer
    return found


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
    countoff = Countoff(accelerator)
    for epoch in range(2):
        for number, batch in enumerate(countoff.train(train), start=1):
            forward_and_back(accelerator, model, optimizer, (batch["images"], batch["labels"]))
            print(f"trained {epoch} {number}", flush=True)


def scheduled_by_epoch(epochs: int) -> float:
    """Trains with a prepared schedule that the loop steps once per epoch; the learning rate at the end."""
    accelerator = Accelerator(cpu=True)
    model, raw = model_and_optimizer()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(raw, T_max=epochs)
    model, optimizer, train, scheduler = accelerator.prepare(model, raw, map_loader(80), scheduler)
    with Countoff(accelerator, epochs=epochs) as countoff:
        for _ in range(epochs):
            for batch in countoff.train(train):
                forward_and_back(accelerator, model, optimizer, batch)
            scheduler.step()
    return float(raw.param_groups[0]["lr"])


def of_one_process() -> list[tuple[int, int, dict[str, float]]]:
    """Batches and samples that one process reads, for each of three ways to cut 70 samples, and what was foretold."""
    found = list[tuple[int, int, dict[str, float]]]()
    for even_batches, drop_last in ((True, False), (False, False), (True, True)):
        configuration = DataLoaderConfiguration(even_batches=even_batches)
        accelerator = Accelerator(cpu=True, dataloader_config=configuration)
        loader = accelerator.prepare(map_loader(70, drop_last=drop_last))
        sizes, foretold = list[int](), list[dict[str, float]]()
        with Countoff(accelerator) as countoff:
            for images, _ in countoff.train(loader):
                sizes.append(len(images))
                foretold.append(countoff.progress())
        found.append((len(sizes), sum(sizes), foretold[0]))
    return found
