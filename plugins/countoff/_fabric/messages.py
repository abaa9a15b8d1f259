"""The messages of the adapter for Fabric."""

from __future__ import annotations

from countoff._adapter.messages import LOCAL_STEPS, Messages, data_remedies, uneven_remedies
from countoff.core.checks.resume import AGAIN, RATE

__all__ = ["MESSAGES"]

_OPTION = "Countoff(fabric, {})"

MESSAGES = Messages(
    framework="Fabric",
    option=_OPTION,
    remedies={
        "UnevenBatches": uneven_remedies(
            train=(
                "give every rank the same number of batches. If each rank's dataset holds all of the data, "
                "fabric.setup_dataloaders(loader) does it.\n"
                "if each holds a part, or is iterable: end the loop after as many batches on every rank; what is "
                "beyond them is not read."
            ),
            option=_OPTION,
        ),
        "RankMapError": (
            "let fabric.setup_dataloaders add the DistributedSampler.\n"
            "give your own the size and this rank's number of the mesh's data dim."
        ),
        "ResumeMismatch": {
            AGAIN: (
                "skip the batches that were trained on before the checkpoint. Fabric counts the sampler's epochs from "
                "0 in every process: resume with DistributedSampler(dataset, seed=seed + epochs that are done).\n"
                'save and load the state of a loader that has one: fabric.save(path, {"loader": train_loader, …}).'
            ),
            RATE: (
                'save and load the scheduler with the rest: fabric.load(path, {"scheduler": scheduler, …}).\n'
                "if you have begun a new schedule on purpose, ignore this."
            ),
        },
        "WeightsDiffer": LOCAL_STEPS,
        **data_remedies(
            shares=(
                "leave fabric.setup_dataloaders(use_distributed_sampler=True).\n"
                "give your own sampler the num_replicas and rank of this rank's share; an iterable dataset must take "
                "its share by itself."
            ),
            order="let Fabric call set_epoch(epoch): your sampler must be the loader's own, and follow the call.",
            option=_OPTION,
            dealer="fabric.setup_dataloaders()",
            undo="pass use_distributed_sampler=False to it",
        ),
    },
    cannot={
        "WrongLength": "a length is asked for only where torch's own classes compute it",
        "WrongTotal": "Fabric tells no total",
        "NotDistributed": "Fabric launches the processes, or joins them, by itself",
    },
)
