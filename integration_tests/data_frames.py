"""The same mistakes in the frameworks' own loops: each job returns what was warned of and its final weights."""

import hashlib
import os
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from countoff.lightning import Countoff
from integration_tests.digits import BATCH_SIZE, own_rank
from integration_tests.identity_jobs import Whole, digits_set
from integration_tests.lightning_jobs import Classifier, Job, quiet
from integration_tests.loops import counted


class Forgetful(DistributedSampler[Any]):
    """Does not heed the call."""

    def set_epoch(self, epoch: int) -> None:
        del epoch


def loader_of(data: str) -> DataLoader[Any]:
    """A train loader.

    Args:
        data: `digits`, for the framework to shard; `same`: sharded, and every rank takes the first share; `whole`: a
            stream that nobody shards; `forgetful`: shuffled, by a sampler whose epoch never changes; `right`: by one
            whose epoch does.
    """
    if data == "whole":
        return DataLoader(Whole(), batch_size=BATCH_SIZE)
    dataset, sampler = digits_set(), None
    world_size = int(os.environ["WORLD_SIZE"])
    if data == "same":
        sampler = DistributedSampler(dataset, num_replicas=world_size, rank=0, shuffle=False)
    elif data in ("forgetful", "right"):
        kind = Forgetful if data == "forgetful" else DistributedSampler
        sampler = kind(dataset, num_replicas=world_size, rank=own_rank(), shuffle=True)
    return DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler)


def told(guard: Any, parameters: Any) -> dict[str, Any]:
    bits = b"".join(each.detach().numpy().tobytes() for each in parameters)
    notices = () if guard is None else guard.notices
    return {"weights": hashlib.sha256(bits).hexdigest(), "warned": {each.kind: each.sentence for each in notices}}


class Seen(pl.Callback):
    """Keeps the guard, which is gone when `fit` returns."""

    guard: Any = None

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.guard = next((each.guard for each in trainer.callbacks if isinstance(each, Countoff)), None)  # pyright: ignore[reportAttributeAccessIssue]


def in_lightning(data: str, countoff: bool = True) -> dict[str, Any]:
    """Lightning, which replaces samplers unless `use_distributed_sampler` is off."""
    quiet()
    job = Job(trainer={"use_distributed_sampler": data == "digits"}, options={} if countoff else None)
    seen = Seen()
    trainer, model = job.make_trainer(callbacks=[seen]), Classifier()
    trainer.fit(model, loader_of(data))
    return told(seen.guard, model.parameters())


def in_composer(data: str, countoff: bool = True) -> dict[str, Any]:
    """Composer, which adds no sampler of its own."""
    from integration_tests.composer_jobs import Job as ComposerJob

    job = ComposerJob(options={} if countoff else None)
    trainer = job.make_trainer(train_dataloader=loader_of(data))
    trainer.fit()
    guards = [each.guard for each in trainer.state.callbacks if hasattr(each, "guard")]
    trainer.close()
    return told(guards[0] if guards else None, trainer.state.model.parameters())


def in_accelerate(data: str, countoff: bool = True) -> dict[str, Any]:
    """Accelerate, of whose loaders `prepare()` shards every one that it understands."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    from countoff.accelerate import Countoff

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    torch.manual_seed(7)
    model = torch.nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader_of(data))
    fit = Countoff(accelerator) if countoff else None
    for _ in range(3):
        for images, labels in counted(fit, loader):
            accelerator.backward(torch.nn.functional.cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()
    if fit is not None:
        fit.close()
    return told(fit and fit.guard, model.parameters())


def all_of(framework: str, cases: list[tuple[str, bool]]) -> list[dict[str, Any]]:
    """One training after the other in the same process."""
    job = {"lightning": in_lightning, "composer": in_composer, "accelerate": in_accelerate}[framework]
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return [job(*case) for case in cases]
