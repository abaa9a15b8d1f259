"""Loops whose ranks run micro-batches: several forward and backward passes for one optimizer step.

Ranks with different numbers of them go on after the warning, so that one launch trains many.
"""

import contextlib
import copy
import functools
import os
import pickle
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from integration_tests import devices
from integration_tests.constants import put, taken
from integration_tests.digits import digits, own_rank, share_loader, weights
from integration_tests.lightning_jobs import Job, quiet
from integration_tests.loops import counted

BATCHES, MICRO_BATCHES = 10, 4


@dataclass(frozen=True)
class Micro:
    """What a test varies.

    Attributes:
        extra: Batches of train epoch 0, from 1, in each of which one rank runs a micro-batch more; of rank 1.
        missed: Batch of train epoch 1, from 1, after which rank 1 leaves out the optimizer step; 0: none.
        every: Batches per optimizer step.
        model: How the model is made: ``""``, ``checkpoint``, ``reentrant``, ``compiled``, ``compiled inside``,
            ``recursive``.
        aside: What else rank 1 alone does in every batch: ``eval``, ``no_grad``, ``uncounted``; ``raises``: a forward
            pass that raises and is caught; ``preview``: a forward pass in training mode. Empty: nothing.
        copies: Whether every rank copies and pickles its model during the fit.
        start_epoch: The first epoch, as of a resumed run.
        options: Options of countoff; None: no countoff.
    """

    extra: Sequence[int] = ()
    missed: int = 0
    every: int = 1
    model: str = ""
    aside: str = ""
    copies: bool = False
    start_epoch: int = 0
    options: dict[str, Any] | None = field(default_factory=dict)

    def micro_batches(self, batch: int) -> int:
        """Micro-batches of this rank in a batch, from 1."""
        return MICRO_BATCHES + (own_rank() == 1 and batch in self.extra)

    def wait_for_warning(self, guard: Any, epoch: int, batch: int) -> None:
        """Waits in batch 2 of train epoch 1, from 1, until this rank has received a warning, where one is due."""
        if guard is not None and (epoch, batch) == (1, 2) and (self.extra or self.aside == "preview"):
            wait_for_notice(guard)


def wait_for_notice(guard: Any) -> None:
    """Waits until this rank has received a warning, at most 20 s."""
    deadline = time.monotonic() + 20
    while not guard.notices and time.monotonic() < deadline:
        time.sleep(0.01)


class Net(torch.nn.Module):
    """Three layers, with what a model can do with its own forward passes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first = torch.nn.Linear(64, 64)
        self.middle = torch.nn.Linear(64, 64)
        self.last = torch.nn.Linear(64, 10)

    def forward(self, images: torch.Tensor, depth: int = 0) -> torch.Tensor:
        if not images.numel():
            raise ValueError("an empty batch")
        if self.kind == "recursive" and depth < 2:
            return self(images, depth + 1)
        hidden: Any = self.first(images)
        if self.kind in ("checkpoint", "reentrant"):
            hidden = checkpoint(self.middle, hidden, use_reentrant=self.kind == "reentrant")
        else:
            hidden = self.middle(hidden)
        return self.last(hidden.relu())


def plain(cases: Sequence[Micro]) -> list[dict[str, Any]]:
    """Trains plain loops one after the other; returns what was found and the weights of each."""
    devices.join()
    return [_train_plain(case) for case in cases]


def hang() -> None:
    """Synchronises every micro-batch; rank 1 runs one more in the epoch's last batch, and no other rank joins in."""
    from countoff.torch import Countoff

    devices.join()
    case = Micro(extra=(BATCHES,))
    ddp = devices.ddp(torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    loader = share_loader(BATCHES)
    countoff = Countoff(optimizer=optimizer, model=ddp, stall_seconds=2)
    for number, batch in enumerate(countoff.train(loader), start=1):
        images, labels = devices.moved(batch)
        for _ in range(case.micro_batches(number)):
            torch.nn.functional.cross_entropy(ddp(images), labels).backward()
        optimizer.step()
    dist.barrier()


def _train_plain(case: Micro) -> dict[str, Any]:
    from countoff.torch import Countoff

    torch.manual_seed(7)
    net = Net(case.model)
    ddp = devices.ddp(net)
    model: Any = torch.compile(ddp, backend="eager") if case.model.startswith("compiled") else ddp
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    loader, countoff = share_loader(BATCHES), None
    if case.options is not None:
        # Here the model is observed itself too: its wrapper calls it once, and cannot be copied.
        observed = ddp if case.model == "compiled inside" else model
        if case.model == "recursive" or case.copies:
            observed = [ddp, net]
        steps = BATCHES * case.start_epoch
        countoff = Countoff(optimizer=optimizer, model=observed, start_step=steps, **taken(case.options))
    for epoch in range(case.start_epoch, 2):
        for number, batch in enumerate(loader if countoff is None else countoff.train(loader, epoch=epoch), start=1):
            images, labels = devices.moved(batch)
            case.wait_for_warning(countoff and countoff.guard, epoch, number)
            _aside(case.aside, model, images, countoff)
            count = case.micro_batches(number) if not epoch else MICRO_BATCHES
            for micro_batch in range(count):
                last = micro_batch == count - 1 and not number % case.every
                with contextlib.nullcontext() if last else ddp.no_sync():
                    torch.nn.functional.cross_entropy(model(images), labels).backward()
            if not number % case.every:
                if (own_rank(), epoch, number) != (1, 1, case.missed):
                    optimizer.step()
                optimizer.zero_grad()
        if case.copies:
            pickled = pickle.dumps(net)
            assert b"countoff" not in pickled
            for each in (copy.deepcopy(net), pickle.loads(pickled)):
                assert weights(each) == weights(net)
                each(devices.moved([digits()[0][:4]])[0])
    found = _found(countoff)
    hooks = [each for module in (model, ddp, net) for each in (*module._forward_hooks, *module._forward_pre_hooks)]
    return {**found, "weights": weights(ddp), "hooks": len(hooks)}


def _aside(kind: str, model: Any, images: torch.Tensor, countoff: Any) -> None:
    """What rank 1 alone does beside its training; every rank draws nothing at random, and no rank waits for it."""
    if own_rank() != 1 or not kind:
        return
    if kind == "eval":
        model.eval()
        model.module(images)
        with model.no_sync():
            model(images)
        model.train()
    elif kind == "no_grad":
        with torch.no_grad():
            model(images)
    elif kind == "preview":
        with model.no_sync():
            model(images)
    elif kind == "raises":
        with contextlib.suppress(ValueError), model.no_sync():
            model(images[:0])
    elif kind == "uncounted":
        with contextlib.nullcontext() if countoff is None else countoff.uncounted(), model.no_sync():
            model(images)


def _found(countoff: Any) -> dict[str, Any]:
    """Ends a fit; returns the sentence of its verdict and those of its warnings."""
    if countoff is not None:
        countoff.close()
    return {"said": said(countoff and countoff.guard)}


def said(guard: Any) -> list[str]:
    """The sentence of a guard's verdict and those of its warnings."""
    if guard is None:
        return []
    verdict = [] if guard.verdict is None else [f"the verdict: {guard.verdict.sentence}"]
    return [*verdict, *(notice.sentence for notice in guard.notices)]


def accelerated(cases: Sequence[Micro]) -> list[dict[str, Any]]:
    """The same with Accelerate's `accumulate`."""
    return [_train_accelerated(case) for case in cases]


def _train_accelerated(case: Micro) -> dict[str, Any]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    from countoff.accelerate import Countoff
    from integration_tests.accelerate_jobs import map_loader

    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator = Accelerator(cpu=devices.framework_uses_cpu(), gradient_accumulation_steps=case.every)
    torch.manual_seed(7)
    model = Net(case.model)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), map_loader(4 * BATCHES * accelerator.num_processes)
    )
    countoff = None if case.options is None else Countoff(accelerator, **taken(case.options))
    for epoch in range(2):
        for number, (images, labels) in enumerate(counted(countoff, loader), start=1):
            case.wait_for_warning(countoff and countoff.guard, epoch, number)
            if own_rank() == 1 and number in case.extra and not epoch:
                with accelerator.no_sync(model):
                    accelerator.backward(torch.nn.functional.cross_entropy(model(images), labels))
            with accelerator.accumulate(model):
                accelerator.backward(torch.nn.functional.cross_entropy(model(images), labels))
                optimizer.step()
                optimizer.zero_grad()
    found = _found(countoff)
    accelerator.wait_for_everyone()
    return {**found, "weights": weights(model), "hooks": "backward" not in vars(Accelerator)}


class Gan(pl.LightningModule):
    """Two models with an optimizer each, of which the second one is trained twice per batch, by hand."""

    def __init__(self, case: Micro) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(7)
        self.one, self.other = torch.nn.Linear(64, 10), torch.nn.Linear(64, 10)
        self._case = case

    def training_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        trainer: Any = self.trainer
        self._case.wait_for_warning(_guard_of(trainer), self.current_epoch, batch_idx + 1)
        optimizers: Any = self.optimizers()
        for optimizer, net, times in zip(optimizers, (self.one, self.other), (1, 2), strict=True):
            for _ in range(times):
                self.manual_backward(torch.nn.functional.cross_entropy(net(images), labels))
            if own_rank() == 1 and batch_idx + 1 in self._case.extra and not self.current_epoch:
                wrapper: Any = self.trainer.model
                with wrapper.no_sync():
                    self.manual_backward(torch.nn.functional.cross_entropy(net(images), labels))
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.one(batch[0])

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(net.parameters(), lr=0.1) for net in (self.one, self.other)]


def _guard_of(trainer: Any) -> Any:
    return next((each.guard for each in trainer.callbacks if hasattr(each, "guard")), None)


class Listens(pl.Callback):
    """Keeps the sentences of a fit."""

    said: Sequence[str] = ()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.said = said(_guard_of(trainer))


def by_hand(cases: Sequence[Micro]) -> list[dict[str, Any]]:
    """The same with Lightning's manual optimization."""
    quiet()
    found: list[dict[str, Any]] = []
    for case in cases:
        job, listens, model = Job(options=case.options), Listens(), Gan(case)
        arguments = {"strategy": "ddp_find_unused_parameters_true", "callbacks": [listens]}
        job.make_trainer(**arguments).fit(model, share_loader(BATCHES), share_loader(2))
        found.append({"said": list(listens.said), "weights": weights(model), "hooks": 0})
    return found


def with_trainer(cases: Sequence[Micro]) -> list[dict[str, Any]]:
    """The same with the transformers Trainer."""
    from integration_tests import trainer_jobs

    found: list[dict[str, Any]] = []
    for case in cases:
        job = trainer_jobs.Job(samples=4 * BATCHES * int(os.environ["WORLD_SIZE"]), options=case.options)
        made, _, countoff, _ = job.trainer()
        trainer: Any = made
        trainer.training_step = functools.partial(_step_of_trainer, case, trainer, countoff, trainer.training_step)
        trainer.train()
        found.append({"said": said(countoff and countoff.guard), "weights": weights(trainer.model), "hooks": 0})
    return found


def _step_of_trainer(case: Micro, trainer: Any, countoff: Any, own: Any, model: Any, *inputs: Any) -> Any:
    epoch, number = divmod(trainer.state.global_step, BATCHES)
    case.wait_for_warning(countoff and countoff.guard, epoch, number + 1)
    if own_rank() == 1 and number + 1 in case.extra and not epoch:
        with model.no_sync():
            own(model, *inputs)
    return own(model, *inputs)


def with_fabric(cases: Sequence[Micro]) -> list[dict[str, Any]]:
    """The same with Fabric."""
    return [_train_with_fabric(case) for case in cases]


def _train_with_fabric(case: Micro) -> dict[str, Any]:
    from lightning.fabric import Fabric

    from countoff.fabric import Countoff

    fabric = Fabric(**devices.lightning(), strategy="ddp")
    fabric.launch()
    torch.manual_seed(7)
    net = Net("")
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    loader: Any = fabric.setup_dataloaders(share_loader(BATCHES))
    told: dict[str, Any] = {"optimizer": optimizer, "model": model}
    countoff = None if case.options is None else Countoff(fabric, **told, **taken(case.options))
    for epoch in range(2):
        for number, (images, labels) in enumerate(counted(countoff, loader), start=1):
            case.wait_for_warning(countoff and countoff.guard, epoch, number)
            if own_rank() == 1 and number in case.extra and not epoch:
                with fabric.no_backward_sync(model):
                    fabric.backward(torch.nn.functional.cross_entropy(model(images), labels))
            fabric.backward(torch.nn.functional.cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()
    return {**_found(countoff), "weights": weights(net), "hooks": 0}


def found_at_two_ticks() -> list[str]:
    """Both of two ticks differ, and each rank is the second one at one of them; returns what is warned of.

    Rank 1 finds the first difference. It writes its second tick first, and only then rank 0 does, while rank 1 writes
    nothing more.
    """
    from countoff.core import FitPlan, Guard, Settings

    dist.init_process_group("gloo")
    put(TICK_BATCHES=2)
    guard = Guard(Settings(), rank=own_rank(), world_size=2)
    guard.fit_start(FitPlan())
    guard.train_start(0)
    registration: Any = guard.registration
    writer = registration.writer

    def train(batches: Sequence[int]) -> None:
        for batch in batches:
            guard.batch()
            for _ in range(Micro(extra=(7, 8)).micro_batches(batch)):
                guard.micro_batch()
            guard.step()

    def wait_for_the_writer() -> None:
        done = threading.Event()
        writer.submit(lambda _: done.set())
        assert done.wait(20)

    if own_rank() == 0:
        train(range(1, 9))
        wait_for_the_writer()
        dist.barrier()
        dist.barrier()
        train(range(9, 11))
    else:
        dist.barrier()
        busy = threading.Event()
        writer.submit(lambda _: busy.wait(20))
        train(range(1, 11))
        written = threading.Event()
        writer.submit(lambda _: written.set())
        writer.submit(lambda _: wait_for_notice(guard))
        busy.set()
        assert written.wait(20)
        dist.barrier()
    wait_for_notice(guard)
    said = [notice.sentence for notice in guard.notices]
    dist.barrier()
    guard.train_end("exhausted")
    guard.fit_end()
    guard.close()
    return said
