"""Loops whose ranks hold the same weights, or should and do not; each returns what was warned of and its weights."""

import contextlib
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from countoff.core import SettingsError
from countoff.torch import Countoff
from integration_tests import devices
from integration_tests.digits import BATCH_SIZE, digits, own_rank
from integration_tests.loops import counted, train_on

AT_THE_END = 20
"""The last batch of a training."""


@dataclass(frozen=True)
class Training:
    """A plain loop over a model that ranks hold in common.

    Attributes:
        wrapped: How: `ddp`; `zero` (the same, with an optimizer that shares its work out); `fsdp` (sharded); `hsdp`
            (sharded over pairs of ranks); `tp` (tensor parallel); `local` (DDP whose gradients are averaged by a hook
            of the user's own, which is none of torch's).
        changed: The parameter that is changed by the last bit of its first element; empty: none.
        at: The batch of both epochs before which it is changed.
        ranks: The ranks on which.
        ignored: Parameters that the wrapper leaves alone, and that each rank then changes in its own way.
        uncounted: Whether ranks train apart on purpose.
        late: The rank that comes to the end of the last batch a third of a second after the other ranks.
        options: Those of countoff; None: no countoff.
    """

    wrapped: str = "ddp"
    changed: str = ""
    at: int = 3
    ranks: tuple[int, ...] = (1,)
    ignored: tuple[str, ...] = ()
    uncounted: bool = False
    late: int | None = None
    options: dict[str, Any] | None = field(default_factory=lambda: {"weights_every": 2})


def build() -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 32), torch.nn.LayerNorm(32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
    )


def _sharded(model: torch.nn.Module, *shape: int) -> torch.nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    fully_shard(model[0], mesh=mesh)  # pyright: ignore[reportIndexIssue]
    fully_shard(model, mesh=mesh)
    return model


def average(state: Any, bucket: dist.GradBucket):  # pyright: ignore[reportPrivateImportUsage]  # torch checks it
    """A hook of the user's own, of which nobody knows what it does."""
    del state
    work: Any = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(_first)


def _first(future: Any) -> Any:
    return future.value()[0]


def wrap(kind: str, model: torch.nn.Module, ignored: tuple[str, ...]) -> torch.nn.Module:
    match kind:
        case "fsdp":
            return _sharded(model, dist.get_world_size())
        case "hsdp":
            return _sharded(model, dist.get_world_size() // 2, 2)
        case "tp":
            return _parallel_block()
        case _:
            if ignored:
                DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(ignored))
            wrapped = devices.ddp(model)
            if kind == "local":
                wrapped.register_comm_hook(None, average)
            return wrapped


class Block(torch.nn.Module):
    """Two layers that are sharded, and a norm that is replicated."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(64)
        self.up = torch.nn.Linear(64, 32)
        self.down = torch.nn.Linear(32, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.norm(images))))


def _parallel_block() -> torch.nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    torch.manual_seed(7)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {
        "norm": SequenceParallel(sequence_dim=0),
        "up": ColwiseParallel(input_layouts=Shard(0)),
        "down": RowwiseParallel(),
    }
    return parallelize_module(Block(), mesh, plan)


def change(model: torch.nn.Module, name: str) -> None:
    """Changes the first element of a parameter's values on this rank by the last bit."""
    parameter: Any = dict(model.named_parameters())[name]
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    with torch.no_grad():
        flat = local.detach().view(-1)
        flat[:1] = torch.nextafter(flat[:1], torch.full_like(flat[:1], torch.inf))


def train(training: Training) -> dict[str, Any]:
    if not dist.is_initialized():
        devices.join()
    model = wrap(training.wrapped, build(), training.ignored)
    made: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "foreach": False}
    optimizer: Any = torch.optim.SGD(model.parameters(), **made)
    if training.wrapped == "zero":
        with warnings.catch_warnings():  # newer versions of torch deprecate what that package uses
            warnings.simplefilter("ignore")
            from torch.distributed.optim import ZeroRedundancyOptimizer
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, **made)
    images, labels = digits()
    dataset = TensorDataset(images[:80], labels[:80])
    replicas: dict[str, Any] = {"num_replicas": 1, "rank": 0} if training.wrapped == "tp" else {}
    loader = DataLoader(dataset, BATCH_SIZE, sampler=DistributedSampler(dataset, **replicas))
    countoff = None
    if training.options is not None:
        options: dict[str, Any] = {"compare_data": False, **training.options}
        countoff = Countoff(optimizer=optimizer, model=model, **options)
    with countoff.uncounted() if training.uncounted and countoff is not None else contextlib.nullcontext():
        _epochs(training, model, optimizer, loader, countoff)
    if countoff is not None:
        countoff.close()
    warned = {} if countoff is None else {each.kind: each.sentence for each in countoff.guard.notices}
    local = [each.to_local() if hasattr(each, "to_local") else each for each in model.state_dict().values()]
    return {"warned": warned, "weights": [each.tolist() for each in local], "random": torch.rand(1).item()}


def _epochs(training: Training, model: Any, optimizer: Any, loader: Any, countoff: Any) -> None:
    inner = getattr(model, "module", model)
    number = 0
    for _ in range(2):
        for batch in counted(countoff, loader):
            number += 1
            if number == training.at and training.changed and own_rank() in training.ranks:
                change(inner, training.changed)
            if training.ignored:
                parameters = dict(inner.named_parameters())
                with torch.no_grad():
                    parameters[training.ignored[0]] += own_rank()
            if training.wrapped == "hsdp":  # gloo cannot average the gradients of replicas of shards
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                dist.barrier()  # as an average would
                optimizer.step()
            elif training.wrapped == "tp":  # each rank normalises a part of the samples
                images, labels = batch
                train_on(model, optimizer, (images.chunk(dist.get_world_size())[own_rank()], labels))
            else:
                train_on(model, optimizer, batch)
            if number == AT_THE_END and own_rank() == training.late:
                time.sleep(0.3)


def train_each(trainings: list[Training]) -> list[dict[str, Any]]:
    """Trains one after the other on the same ranks."""
    return [train(training) for training in trainings]


def without_model() -> str | None:
    """Asks for weights to be compared without a model, and returns the error."""
    devices.join()
    dist.barrier()  # else this rank ends before the other one has connected to it
    try:
        Countoff(weights_every=2).close()
    except SettingsError as error:
        return str(error)
    return None


def fit_fabric(changed: Sequence[bool | None]) -> list[dict[str, Any]]:
    """Trains with Fabric, once for each: with a weight that is changed on rank 1, without, and (None) bare."""
    from lightning.fabric import Fabric

    from countoff.fabric import Countoff as FabricCountoff

    found: list[dict[str, Any]] = []
    for change_it in changed:
        fabric = Fabric(**devices.lightning(), strategy="ddp")
        fabric.launch()
        bare = build()
        model, optimizer = fabric.setup(bare, torch.optim.SGD(bare.parameters(), lr=0.1))
        images, labels = digits()
        loader = fabric.setup_dataloaders(DataLoader(TensorDataset(images[:64], labels[:64]), BATCH_SIZE))
        told: dict[str, Any] = {"optimizer": optimizer, "model": model}
        countoff = None if change_it is None else FabricCountoff(fabric, weights_every=2, **told)
        for number, batch in enumerate(counted(countoff, loader)):
            if change_it and number == 3 and own_rank() == 1:
                change(bare, "0.weight")
            images_here, labels_here = batch
            fabric.backward(torch.nn.functional.cross_entropy(model(images_here), labels_here))
            optimizer.step()
            optimizer.zero_grad()
        if countoff is not None:
            countoff.close()
        warned = {} if countoff is None else {each.kind: each.sentence for each in countoff.guard.notices}
        found.append({"warned": warned, "weights": [each.tolist() for each in model.state_dict().values()]})
    return found


def fit_frameworks(kinds: Sequence[str]) -> list[bool]:
    """Trains a healthy job of each framework without countoff, and with a check after every step; whether all is equal.

    The jobs and what is compared are those of the soak.
    """
    from integration_tests import soak

    options = {"weights_every": 1, "uneven_eval": "raise"}
    jobs: dict[str, Any] = {
        "accelerate": lambda: soak.accelerate_jobs.Loop(samples=64, evals=(13,), accumulation=2, options=options),
        "transformers": lambda: _trainer_job(options),
        "lightning": lambda: soak.LightningJob(even=64, val=[2, 2], options=options),
        "composer": lambda: soak.composer_jobs.Job(even=64, evals=[2, 2], options=options),
    }
    return [fit.same and not fit.threads for kind in kinds for fit in soak.fit_twice(kind, [jobs[kind]()])]


def _trainer_job(options: dict[str, Any]) -> Any:
    from integration_tests.trainer_jobs import Job

    return Job(samples=64, evals=(13,), args={"eval_strategy": "epoch"}, options=options)


def hold_models(wrapped: str, cases: Sequence[str]) -> list[dict[str, str]]:
    """Reads a loader once for each case, and trains nothing; the last rank's model is then not that of the others.

    Args:
        wrapped: How the model is wrapped; see `Training`.
        cases: What the last rank does after that: `frozen` or `dtype`; what it does before that: `renamed`, by a module
            around the model; what all ranks do before that: `alike`; or nothing (an empty text). With `allowed` at the
            end, ranks are to differ.
    """
    devices.join()
    images, labels = digits()
    found: list[dict[str, str]] = []
    for case in cases:
        bare = build()
        if case == "alike":
            dict(bare.named_parameters())["3.bias"].requires_grad_(False)
        odd = own_rank() == dist.get_world_size() - 1
        if case == "renamed" and odd:
            bare = torch.nn.Sequential(bare)
        model = wrap(wrapped, bare, ())
        if odd:
            if case.startswith("frozen"):
                dict(getattr(model, "module", model).named_parameters())["3.bias"].requires_grad_(False)
            elif case == "dtype":
                model.to(torch.bfloat16)
        dataset = TensorDataset(images[:80], labels[:80])
        loader = DataLoader(dataset, BATCH_SIZE, sampler=DistributedSampler(dataset))
        levels: dict[str, Any] = {"PlanMismatch": "off"} if case.endswith("allowed") else {}
        with Countoff(model=model, levels=levels) as countoff:
            for _ in countoff.train(loader):
                pass
        found.append({each.kind: each.sentence for each in countoff.guard.notices})
    return found


@dataclass(frozen=True)
class Accumulation:
    """A plain loop of two epochs of 18 batches that steps after every fourth one, and after the last of each epoch.

    Attributes:
        outside: Which micro-batches of a step run outside of `no_sync()`: `last`, `first`, or `fourth` (not the last
            one of an epoch, which is the second of its step); empty: none.
        averages: What the loop averages by itself: `gradients` before each step, `weights` after each step that has a
            micro-batch outside, or `late` (weights, before the next batch); empty: nothing.
        passes_more: Whether a pass without a backward pass follows inside of `no_sync()`, before gradients are clipped.
        inner: Whether another optimizer steps by each micro-batch inside, and its steps are taken back.
        uncounted: Whether ranks train apart on purpose.
        compiled: Whether torch.compile compiles the model inside of DDP.
        warms_up: How many steps at the beginning have a learning rate of 0.
        halves: Whether another optimizer has the last layers, and steps first.
        framework: Whose loop it is: `torch`, `accelerate` or `fabric`.
        counted: Whether countoff is there.
    """

    outside: str = "last"
    averages: str = ""
    passes_more: bool = False
    inner: bool = False
    uncounted: bool = False
    compiled: bool = False
    warms_up: int = 0
    halves: bool = False
    framework: str = "torch"
    counted: bool = True


class _Accumulating:
    """The model, the optimizer and what counts, of one accumulating loop."""

    def __init__(self, each: Accumulation) -> None:
        self.model: Any = build()
        if each.compiled:
            self.model = torch.compile(self.model, backend="aot_eager")
        first, last = list(self.model.parameters()), []
        if each.halves:
            first, last = first[:2], first[2:]
        self.optimizer: Any = torch.optim.SGD(first, lr=0.0 if each.warms_up else 0.05)
        self.optimizers = [torch.optim.SGD(last, lr=0.05)] if last else []
        self.steps = 0
        self.inner = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.countoff: Any = None
        if each.framework == "accelerate":
            from accelerate import Accelerator

            from countoff.accelerate import Countoff as AccelerateCountoff

            accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
            self.model, self.optimizer = accelerator.prepare(self.model, self.optimizer)
            self.countoff = AccelerateCountoff(accelerator)
        elif each.framework == "fabric":
            from lightning.fabric import Fabric

            from countoff.fabric import Countoff as FabricCountoff

            fabric = Fabric(**devices.lightning(), strategy="ddp")
            fabric.launch()
            self.model, self.optimizer = fabric.setup(self.model, self.optimizer)
            of: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
            self.countoff = FabricCountoff(fabric, gradient_accumulation_steps=4, **of)
        else:
            self.model = devices.ddp(self.model)
            if each.counted:
                of = {"model": self.model, "optimizer": self.optimizer}
                self.countoff = Countoff(gradient_accumulation_steps=4, **of)
        self.ddp = next(part for part in self.model.modules() if isinstance(part, DistributedDataParallel))

    def pass_over(self, batch: Any, each: Accumulation, *, outside: bool) -> None:
        images, labels = devices.moved(batch)
        with contextlib.nullcontext() if outside else self.ddp.no_sync():
            torch.nn.functional.cross_entropy(self.model(images), labels).backward()
            if each.passes_more and outside:
                with self.ddp.no_sync():
                    self.model(images)
        if each.inner and not outside:
            before = [parameter.detach().clone() for parameter in self.model.parameters()]
            self.inner.step()
            with torch.no_grad():
                for parameter, kept in zip(self.model.parameters(), before, strict=True):
                    parameter.copy_(kept)

    def average(self, *, gradients: bool = False) -> None:
        for parameter in self.model.parameters():
            values = parameter.grad if gradients else parameter.data
            dist.all_reduce(values)
            values /= dist.get_world_size()

    def step(self, each: Accumulation, *, averaged: bool) -> None:
        if each.averages == "gradients":
            self.average(gradients=True)
        if each.passes_more:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in (*self.optimizers, self.optimizer):
            optimizer.step()
            optimizer.zero_grad()
        self.steps += 1
        self.optimizer.param_groups[0]["lr"] = 0.0 if self.steps < each.warms_up else 0.05
        if each.averages == "weights" and averaged:
            self.average()


def accumulate(each: Accumulation) -> dict[str, Any]:
    if not dist.is_initialized():
        devices.join()
    loop, averages = _Accumulating(each), False
    images, labels = digits()
    dataset = TensorDataset(images[:144], labels[:144])
    loader = DataLoader(dataset, 4, sampler=DistributedSampler(dataset, shuffle=False))
    with loop.countoff.uncounted() if each.uncounted and loop.countoff is not None else contextlib.nullcontext():
        for _ in range(2):
            averaged = False
            for number, batch in enumerate(counted(loop.countoff, loader)):
                if each.averages == "late" and averages:
                    loop.average()
                steps = number % 4 == 3 or number == 17
                outside = {"last": steps, "first": number % 4 == 0, "fourth": number % 4 == 3}.get(each.outside, False)
                loop.pass_over(batch, each, outside=outside)
                averaged |= outside
                if steps:
                    loop.step(each, averaged=averaged)
                    averaged = False
                averages = steps
    if loop.countoff is not None:
        loop.countoff.close()
    assert not loop.ddp._forward_pre_hooks
    assert not any(parameter._post_accumulate_grad_hooks for parameter in loop.ddp.parameters())
    warned = {} if loop.countoff is None else {notice.kind: notice.sentence for notice in loop.countoff.guard.notices}
    return {"warned": warned, "weights": [values.tolist() for values in loop.model.state_dict().values()]}


def accumulate_each(cases: list[Accumulation]) -> list[dict[str, Any]]:
    """Trains one after the other on the same ranks."""
    return [accumulate(each) for each in cases]
