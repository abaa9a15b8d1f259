"""Frameworks that train models in shards (FSDP) on the CPU, whose ranks may run different numbers of forward passes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from integration_tests import devices
from integration_tests.constants import taken
from integration_tests.digits import BATCH_SIZE, own_rank, share_loader, weights
from integration_tests.lightning_jobs import quiet
from integration_tests.loops import counted
from integration_tests.micro_jobs import wait_for_notice
from integration_tests.sharded_jobs import BATCHES, PASSES, Net, Sharded

EVALS = 2


class Model(torch.nn.Module):
    """A model that runs several passes of its body for each batch, and more of them where a case says so.

    Args:
        case: The case. If the body is frozen, it is sharded and the head is not; else all of it is.
        guard: Returns countoff's guard, if there is one.
    """

    def __init__(self, case: Sharded, guard: Callable[[], Any]) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.body = Net("", outputs=32).requires_grad_(not case.frozen)
        self.head = torch.nn.Linear(32, 10)
        self._case, self._guard, self._batches = case, guard, 0

    def shard(self, mesh: Any) -> Model:
        """Shards what is to be sharded; returns this model."""
        fully_shard(self.body.first, mesh=mesh)
        fully_shard(self.body, mesh=mesh)
        if not self._case.frozen:
            fully_shard(self, mesh=mesh)
        return self

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        images = images.flatten(1)
        if self.training:
            self._batches += 1
            if self._case.differs and self._batches == BATCHES + 2:
                guard = self._guard()
                if guard is not None:
                    wait_for_notice(guard)
            if self._batches in self._case.extra.get(own_rank(), ()):
                with torch.no_grad():
                    self.body(images)
            elif self._case.aside == "gathered" and any(self._batches in each for each in self._case.extra.values()):
                self._gather()
        return self.head(torch.stack([self.body(images) for _ in range(PASSES)]).sum(0))

    def _gather(self) -> None:
        """Gathers what a pass of the frozen body does, whose outermost unit stays whole; for a rank that runs none."""
        first: Any = self.body.first
        first.unshard()
        first.reshard()

    def trained(self) -> list[torch.nn.Parameter]:
        """The parameters that an optimizer gets."""
        return [each for each in self.parameters() if each.requires_grad]

    def found(self, guard: Any) -> dict[str, Any]:
        """What a fit has left behind."""
        hooks = [each._forward_hooks for each in self.modules()] + [each._forward_pre_hooks for each in self.modules()]
        kept = [each for found in hooks for each in found.values() if type(each).__module__.startswith("countoff")]
        local: list[Any] = [getattr(each, "_local_tensor", each) for each in self.parameters()]
        return {
            "said": [] if guard is None else [notice.sentence for notice in guard.notices],
            "counted": guard is not None and guard.state.micro_batches.sharded,
            "hooks": len(kept),
            "weights": weights(torch.nn.ParameterList(each.detach() for each in local)),
        }


def loss_of(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(outputs, labels)


def world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


_meshes: list[Any] = []


def first_mesh(mesh: Any = None) -> Any:
    """The mesh of this process's first case, over all ranks: torch takes equal meshes of later cases for one another.

    Args:
        mesh: The framework's mesh; None: one is made.
    """
    if not _meshes:
        _meshes.append(init_device_mesh("cpu", (world_size(),)) if mesh is None else mesh["data_parallel"])
    return _meshes[0]


def in_lightning(case: Sharded) -> dict[str, Any]:
    """A model that `configure_model` shards, with an evaluation after each epoch."""
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import ModelParallelStrategy

    from countoff.lightning import Countoff

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Model(case, lambda: guards[-1] if guards else None)

        def configure_model(self) -> None:
            self.net.shard(first_mesh(self.device_mesh))

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            return loss_of(self.net(batch[0]), batch[1])

        def validation_step(self, batch: Any, number: int) -> None:
            self.net(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net.trained(), lr=0.1)

    class Keeps(pl.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            guards.extend(each.guard for each in trainer.callbacks if isinstance(each, Countoff))

    guards: list[Any] = []
    quiet()
    off: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        **devices.lightning(),
        strategy=ModelParallelStrategy(data_parallel_size=world_size(), tensor_parallel_size=1),
        max_epochs=2,
        callbacks=[*([] if case.options is None else [Countoff(**taken(case.options))]), Keeps()],
        enable_model_summary=False,
        **off,
    )
    module = Module()
    trainer.fit(module, share_loader(BATCHES), share_loader(EVALS))
    return module.net.found(guards[-1] if guards else None)


def in_fabric(case: Sharded) -> dict[str, Any]:
    """A model that Fabric's strategy shards."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies.model_parallel import ModelParallelStrategy

    from countoff.fabric import Countoff

    quiet()
    countoff: Any = None
    strategy = ModelParallelStrategy(
        lambda model, mesh: model.shard(first_mesh(mesh)),
        data_parallel_size=world_size(),
        tensor_parallel_size=1,
    )
    fabric = Fabric(**devices.lightning(), strategy=strategy)
    fabric.launch()
    net = Model(case, lambda: countoff and countoff.guard)
    model = fabric.setup_module(net)
    optimizer: Any = fabric.setup_optimizers(torch.optim.SGD(net.trained(), lr=0.1))
    loader: Any = fabric.setup_dataloaders(share_loader(BATCHES))
    if case.options is not None:
        countoff = Countoff(fabric, optimizer=optimizer, model=model, **taken(case.options))
    for _ in range(2):
        for images, labels in counted(countoff, loader):
            fabric.backward(loss_of(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()
    if countoff is not None:
        countoff.close()
    return net.found(countoff and countoff.guard)


def in_accelerate(case: Sharded) -> dict[str, Any]:
    """A model that the script has sharded. On the CPU, Accelerate would wrap it in DDP unless it is told not to."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    from countoff.accelerate import Countoff
    from integration_tests.accelerate_jobs import map_loader

    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator = Accelerator(cpu=devices.framework_uses_cpu())
    countoff: Any = None
    net = Model(case, lambda: countoff and countoff.guard)
    accelerator.prepare_model(net.shard(first_mesh()), evaluation_mode=True)
    optimizer, loader = accelerator.prepare(
        torch.optim.SGD(net.trained(), lr=0.1), map_loader(BATCH_SIZE * BATCHES * world_size())
    )
    if case.options is not None:
        countoff = Countoff(accelerator, **taken(case.options))
    for _ in range(2):
        for images, labels in counted(countoff, loader):
            accelerator.backward(loss_of(net(images), labels))
            optimizer.step()
            optimizer.zero_grad()
    if countoff is not None:
        countoff.close()
    return net.found(countoff and countoff.guard)


def in_transformers(case: Sharded) -> dict[str, Any]:
    """A model that the script has sharded, marked as prepared: on the CPU, Accelerate would wrap it in DDP."""
    from accelerate.state import AcceleratorState, GradientState
    from transformers import Trainer, TrainingArguments

    from countoff.transformers import Countoff
    from integration_tests.trainer_jobs import Digits, collate

    class Wrapped(torch.nn.Module):
        def __init__(self, net: Model) -> None:
            super().__init__()
            self.net = net

        def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": loss_of(self.net(images), labels)}

    AcceleratorState._reset_state()
    GradientState._reset_state()
    arguments = TrainingArguments(
        output_dir="out",
        use_cpu=devices.framework_uses_cpu(),
        report_to="none",
        per_device_train_batch_size=BATCH_SIZE,
        num_train_epochs=2,
        max_grad_norm=0,
        average_tokens_across_devices=False,
        save_strategy="no",
        disable_tqdm=True,
        logging_strategy="no",
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )
    countoff = None if case.options is None else Countoff(**taken(case.options))
    net = Model(case, lambda: countoff and countoff.guard)
    wrapped: Any = Wrapped(net.shard(first_mesh()))
    wrapped._is_accelerate_prepared = True
    Trainer(
        wrapped,
        arguments,
        collate,
        train_dataset=Digits(BATCH_SIZE * BATCHES * world_size()),
        optimizers=(torch.optim.SGD(net.trained(), lr=0.1), None),
        callbacks=[] if countoff is None else [countoff],
    ).train()
    return net.found(countoff and countoff.guard)


def in_composer(case: Sharded) -> dict[str, Any]:
    """A model that the script has sharded."""
    from composer import Trainer
    from composer.models import ComposerModel

    from countoff.composer import Countoff
    from integration_tests.composer_parts import share_loader, start

    class Classifier(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.net = Model(case, lambda: countoff and countoff.guard)

        def forward(self, batch: Any) -> torch.Tensor:
            return self.net(batch[0])

        def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
            return loss_of(outputs, batch[1])

    start()
    countoff = None if case.options is None else Countoff(**taken(case.options))
    model = Classifier()
    model.net.shard(first_mesh())
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.net.trained(), lr=0.1),
        train_dataloader=share_loader(BATCHES, BATCHES),
        device=devices.accelerator(),
        precision="fp32",
        max_duration="2ep",
        progress_bar=False,
        callbacks=[] if countoff is None else [countoff],
    )
    trainer.fit()
    trainer.close()
    return model.net.found(countoff and countoff.guard)


FRAMEWORKS: dict[str, Callable[[Sharded], dict[str, Any]]] = {
    "lightning": in_lightning,
    "fabric": in_fabric,
    "accelerate": in_accelerate,
    "transformers": in_transformers,
    "composer": in_composer,
}


def train(framework: str, cases: Sequence[Sharded]) -> list[dict[str, Any]]:
    """Trains with each case; returns what each has found."""
    return [FRAMEWORKS[framework](case) for case in cases]
