"""Jobs for one GPU: pinned loaders in every adapter, batches that the loader yields on the GPU, and fingerprints."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from countoff._adapter.weight_hashes import hash_bits
from countoff.core import guard
from countoff.core.data.fingerprint import Fingerprint, PendingFingerprint, begin_fingerprint, fingerprint
from countoff.core.ending import nccl
from countoff.core.session.liveness import collectives
from countoff.core.waiting import until
from countoff.torch import Countoff
from integration_tests import composer_jobs, devices, fabric_jobs, lightning_jobs, sync_watch
from integration_tests.constants import taken
from integration_tests.digits import BATCH_SIZE, digits, weights

OPTIONS = {"TICK_BATCHES": 2}
"""Ticks, which read learning rates, often enough for a short job."""


def pinned(loader: Any) -> Any:
    """The same loader, with batches in pinned memory."""
    loader.pin_memory = True
    return loader


@dataclass(frozen=True)
class PinnedLightning(lightning_jobs.Job):
    """A job of Lightning's."""

    def train_loader(self) -> Any:
        return pinned(super().train_loader())


@dataclass(frozen=True)
class PinnedComposer(composer_jobs.Job):
    """A job of Composer's."""

    def train_loader(self) -> Any:
        return pinned(super().train_loader())


@dataclass(frozen=True)
class PinnedFabric(fabric_jobs.Script):
    """A script for Fabric."""

    def loaders(self) -> tuple[Any, Any]:
        train, val = super().loaders()
        return pinned(train), pinned(val)


def accelerate(samples: int) -> Any:
    """A loop with Accelerate, whose loader moves the batches to the device."""
    from integration_tests import accelerate_jobs

    class Pinned(accelerate_jobs.Loop):
        def train_loader(self, world_size: int) -> Any:
            return pinned(super().train_loader(world_size))

    return accelerate_jobs.run(Pinned(samples=samples, evals=[16], options=OPTIONS))


def transformers(samples: int) -> Any:
    """A job of the transformers Trainer."""
    from integration_tests import trainer_jobs

    return trainer_jobs.train(
        trainer_jobs.Job(samples=samples, evals=[16], args={"dataloader_pin_memory": True}, options=OPTIONS)
    )


def fabric(samples: int) -> Any:
    """A script for Fabric, with countoff by the flag."""
    taken(OPTIONS)
    return fabric_jobs.flagged("1", fabric_jobs.finetune, PinnedFabric(even=samples))


def lightning(samples: int) -> Any:
    """A job of Lightning's Trainer."""
    return lightning_jobs.fit(PinnedLightning(even=samples, val=[2] * int(os.environ["WORLD_SIZE"]), options=OPTIONS))


def composer(samples: int) -> Any:
    """A job of Composer's Trainer."""
    evals = [2] * int(os.environ["WORLD_SIZE"])
    return composer_jobs.fit(PinnedComposer(even=samples, evals=evals, options=OPTIONS))


class Moved:
    """A loader that hands out another's batches on this rank's device."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        yield from map(devices.moved, self._loader)


def plain(samples: int, same: bool = False, options: dict[str, Any] = OPTIONS) -> dict[str, Any]:
    """A plain loop whose loader hands out batches on the device, and which changes every batch in place.

    Args:
        samples: Samples of all ranks, or of each if all read the same.
        same: Whether all ranks read the same.
        options: Those of countoff.

    Returns:
        The final weights, and the kinds of what was warned of.
    """
    devices.join()
    torch.manual_seed(7)
    model = devices.ddp(torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = TensorDataset(*(each[:samples] for each in digits()))
    sampler = None if same else DistributedSampler(dataset, shuffle=False)
    loader = Moved(DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler, pin_memory=True))
    with Countoff(optimizer=optimizer, **taken(options)) as countoff:
        for _ in range(2):
            for images, labels in countoff.train(loader):
                images.mul_(2).sub_(1)
                torch.nn.functional.cross_entropy(model(images), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
    return {"weights": weights(model), "warned": sorted({notice.kind for notice in countoff.guard.notices})}


def even(samples: int) -> dict[str, Any]:
    """A plain loop whose ranks take the same number of batches, because countoff makes them."""
    return plain(samples, options={**OPTIONS, "uneven_train": "stop"})


ADAPTERS: dict[str, Callable[[int], Any]] = {
    "plain": plain,
    "even": even,
    "lightning": lightning,
    "fabric": fabric,
    "composer": composer,
    "accelerate": accelerate,
    "transformers": transformers,
}


def batches() -> dict[str, Any]:
    """Batches in the CPU's memory of every kind of which a copy could go wrong."""
    torch.manual_seed(7)
    return {
        "images": torch.rand(32, 3, 224, 224),
        "channels last": torch.rand(8, 3, 64, 64).contiguous(memory_format=torch.channels_last),
        "strided": torch.rand(3, 400_000)[:, ::2],
        "transposed": torch.arange(6000).reshape(60, 100).T,
        "bf16": torch.rand(300, 300).to(torch.bfloat16),
        "a single element": torch.tensor(3.0),
        "flags": torch.rand(100) > 0.5,
        "none": torch.zeros(0, 4),
        "a parameter": torch.nn.Parameter(torch.rand(40, 40)),
        "tokens": {name: torch.randint(0, 50_000, (8, 512)) for name in ("input_ids", "attention_mask", "labels")},
        "mixed": [torch.arange(100_000), {"text": ["a", "b"], "count": 3}, torch.rand(99_999), b"raw"],
    }


def on_device(value: Any, device: torch.device) -> Any:
    """The same batch on a device, with the strides that it has."""
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(on_device(value.detach(), device))
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device).copy_(value)
    if isinstance(value, dict):
        return {name: on_device(each, device) for name, each in value.items()}
    return [on_device(each, device) for each in value] if isinstance(value, list) else value


def change(value: Any) -> None:
    """Changes all tensors of a batch in place."""
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]:
        if isinstance(each, torch.Tensor):
            each.detach().zero_()


def fingerprints() -> dict[str, tuple[Fingerprint | None, Any]]:
    """Fingerprints of batches in the CPU's memory, and of the same on a GPU that is busy, changed in place at once."""
    device = devices.own_device()
    expected = {name: fingerprint(batch) for name, batch in batches().items()}
    moved = {name: on_device(batch, device) for name, batch in batches().items()}
    large = torch.rand(4096, 4096, device=device)
    begun: dict[str, Any] = {}
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(100):  # work that the copies have to wait for
            large = (large @ large).sigmoid_()
        for name, batch in moved.items():
            begun[name] = begin_fingerprint(batch)
            change(batch)
        for each in begun.values():
            if isinstance(each, PendingFingerprint):
                each.collect()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    found = {name: each.collect() if isinstance(each, PendingFingerprint) else each for name, each in begun.items()}
    return {name: (expected[name], found[name]) for name in expected}


def weight_hashes() -> list[tuple[int, int]]:
    """The hash of each of some parameters in the CPU's memory, and of the same on a GPU, for which nothing waits."""
    device, generator = devices.own_device(), torch.Generator().manual_seed(7)
    held = [torch.rand(shape, generator=generator) for shape in ((3, 5), (1000, 700), (16384 * 130 + 3,), (0,), ())]
    held += [held[1].t(), held[1].bfloat16(), (held[1] * 100).to(torch.int8), torch.tensor([float("nan"), -0.0])]
    moved = [each.to(device) for each in held]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [hash_bits(each) for each in moved]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [(int(hash_bits(one)), int(two)) for one, two in zip(held, found, strict=True)]


def reads_tensors() -> dict[str, tuple[str, str]]:
    """What happens to expressions that read a tensor on the GPU, in code of countoff and in other code, if watched."""
    tensor = torch.ones(1, device=devices.own_device())

    def outcome(expression: str, file: str) -> str:
        try:
            sync_watch.watched(eval(compile(f"lambda tensor: {expression}", file, "eval")), tensor)
        except RuntimeError as error:
            return str(error)
        return ""

    expressions = "tensor.item()", "bool(tensor)", "tensor.tolist()", "tensor.cpu()", "float(tensor)"
    return {each: (outcome(each, str(guard.__file__)), outcome(each, __file__)) for each in expressions}


def abort_of_one_rank() -> dict[str, Any]:
    """What is unfinished while the GPU is kept busy before a collective, and what a collective says after an abort."""
    total = torch.ones(8, device=devices.join())
    dist.all_reduce(total)
    torch.cuda.synchronize()
    # torch's watchdog looks ten times a second.
    finished = until(lambda: not collectives.unfinished(), time.monotonic() + 20)
    torch.cuda._sleep(4 * 10**9)  # cycles: two seconds or so
    dist.all_reduce(total)
    behind = until(lambda: bool(collectives.unfinished()), time.monotonic() + 1.5)
    torch.cuda.synchronize()
    abort = nccl.abort_communicators()
    while abort is not None and abort.under_way:
        time.sleep(0.01)
    found = {"before": not finished, "behind": behind}
    try:
        dist.all_reduce(total)
    except dist.DistBackendError:
        return {**found, "aborted": abort is not None}
    return {**found, "aborted": False}
