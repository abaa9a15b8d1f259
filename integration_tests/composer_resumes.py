"""Composer's checkpoints, written in one launch and loaded in another; some of the resumes are wrong."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from integration_tests.composer_jobs import Job, outcome
from integration_tests.digits import BATCH_SIZE, digits, own_rank

BATCHES = 6


def positioned(kind: str) -> Any:
    """A loader whose data set Composer saves and restores: "right", "one behind", or "from the start" again."""
    from torch.utils.data import DataLoader, IterableDataset

    class Positioned(IterableDataset[Any]):
        start = 0

        def __len__(self) -> int:
            return BATCHES * BATCH_SIZE

        def __iter__(self) -> Iterator[Any]:
            images, labels = digits()
            start, self.start = self.start, 0
            for number in range(start, BATCHES * BATCH_SIZE):
                index = (number * 7 + own_rank() * 31) % len(images)
                yield images[index], labels[index]

        def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
            return {"samples": num_samples}

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            samples = state["samples"] // int(os.environ["WORLD_SIZE"]) % (BATCHES * BATCH_SIZE)
            behind = {"right": 0, "one behind": BATCH_SIZE, "from the start": samples}[kind]
            self.start = samples - behind

    return DataLoader(Positioned(), batch_size=BATCH_SIZE)


@dataclass(frozen=True)
class Resume:
    """A run that writes checkpoints, and one that goes on from one of them.

    Attributes:
        job: What both train; by default, six batches per epoch on two ranks.
        loader: Another loader of both, as `positioned` names it; "" for none.
        schedule: The schedule: "torch", which counts by itself, "composer", which goes by the time, or "" for none.
        every_batch: Whether torch's is stepped for every batch, or at the end of every epoch.
        batch: Batches after which the checkpoint was written from which the second run goes on.
        saves: How often the first run writes one.
        until: Arguments of the first Trainer.
        then: Arguments of the second Trainer.
        fits: Arguments of the second Trainer's fit.
        moves: Epochs by which the second run's time is set forward after Composer has restored it.
        autoresume: Whether both runs have the same arguments, and Composer finds the latest checkpoint by itself.
        rate: The second run's learning rate.
    """

    job: Job = field(default_factory=lambda: Job(even=BATCHES * BATCH_SIZE * 2))
    loader: str = ""
    schedule: str = "torch"
    every_batch: bool = True
    batch: int = 3
    saves: str = "1ba"
    until: Mapping[str, Any] = field(default_factory=dict)
    then: Mapping[str, Any] = field(default_factory=dict)
    fits: Mapping[str, Any] = field(default_factory=dict)
    moves: int = 0
    autoresume: bool = False
    rate: float = 0.1

    def saving(self, folder: str, interval: str = "1ba") -> dict[str, Any]:
        """Arguments of a Trainer that writes checkpoints."""
        arguments = {"save_folder": folder, "save_filename": "{batch}.pt", "save_interval": interval}
        if not self.autoresume:
            return {**arguments, "save_latest_filename": None}
        return {**arguments, "autoresume": True, "run_name": "run", "save_latest_filename": "latest.pt"}

    def trainer(self, rate: float = 0.1, **more: Any) -> Any:
        from composer.optim import LinearWithWarmupScheduler
        from torch.optim import SGD
        from torch.optim.lr_scheduler import CosineAnnealingLR

        from integration_tests.composer_parts import Classifier

        if self.loader:
            more["train_dataloader"] = positioned(self.loader)
        model = Classifier()
        optimizer = SGD(model.parameters(), lr=rate, momentum=0.9)
        schedules = {
            "torch": {"schedulers": CosineAnnealingLR(optimizer, T_max=40)},
            "composer": {"schedulers": LinearWithWarmupScheduler(t_warmup="4ba")},
        }
        every = {"step_schedulers_every_batch": self.every_batch} if self.schedule == "torch" else {}
        parts = {"model": model, "optimizers": optimizer, **schedules.get(self.schedule, {}), **every}
        return self.job.make_trainer(**{**parts, **more})


def write(resumes: Sequence[Resume], folder: str) -> None:
    """Trains each job, and writes its checkpoints."""
    for place, each in enumerate(resumes):
        print(f"--- job {place}", flush=True)
        trainer = each.trainer(**{**each.saving(f"{folder}/{place}", each.saves), **each.until})
        trainer.fit()
        trainer.close()


def resume(resumes: Sequence[Resume], folder: str, again: str = "") -> list[dict[str, Any]]:
    """Goes on with each job from its checkpoint; writes checkpoints again where `again` is a folder."""
    return resume_at(resumes, range(len(resumes)), folder, again)


def resume_at(resumes: Sequence[Resume], places: Sequence[int], folder: str, again: str = "") -> list[dict[str, Any]]:
    """The same for checkpoints that stand at these places of the folder."""
    results = []
    for place, each in zip(places, resumes, strict=True):
        print(f"--- job {place}", flush=True)
        saves = each.saving(f"{again}/{place}") if again else {}
        found = {"load_path": f"{folder}/{place}/{each.batch}.pt"}
        if each.autoresume:
            saves, found = each.saving(f"{folder}/{place}"), {}
        trainer = each.trainer(each.rate, **{"max_duration": "3ep", **found, **saves, **each.then})
        for _ in range(each.moves):
            trainer.state.timestamp = trainer.state.timestamp.to_next_epoch()
        trainer.fit(**each.fits)
        results.append(outcome(trainer))
        trainer.close()
    return results


def resume_sharded(folder: str) -> list[Any]:
    """Trains with sharded parameters, and goes on from a sharded checkpoint in mid-epoch; what both runs came to."""
    from composer.utils.parallelism import FSDP2Config

    each, found = Resume(schedule=""), []
    writes = {**each.saving(folder, "4ba"), "save_filename": "rank{rank}.pt", "max_duration": "4ba"}
    runs: list[dict[str, Any]] = [writes, {"load_path": f"{folder}/ep0-ba4"}]
    for arguments in runs:
        trainer = each.trainer(**arguments, parallelism_config={"fsdp": FSDP2Config()})
        sharded = trainer.state.fsdp_sharded_state_dict_enabled
        trainer.fit()
        found.append((sharded, int(trainer.state.timestamp.batch)))
        trainer.close()
    return found
