"""The messages of the adapter for a plain PyTorch loop."""

from __future__ import annotations

from countoff._adapter.messages import LOCAL_STEPS, Messages, data_remedies, uneven_remedies

__all__ = ["MESSAGES"]

_OPTION = "Countoff(..., {})"

MESSAGES = Messages(
    framework="PyTorch",
    option=_OPTION,
    remedies={
        "UnevenBatches": uneven_remedies(
            train=(
                "give every rank the same number of batches. If each rank's dataset holds all of the data: "
                "DataLoader(sampler=DistributedSampler(dataset)).\n"
                "if each holds a part, or is iterable: for batch in countoff.train(itertools.islice(loader, n)), with "
                "n batches that every rank has; what is beyond them is not read."
            ),
            option=_OPTION,
        ),
        "WeightsDiffer": LOCAL_STEPS,
        **data_remedies(
            shares=(
                "give every rank its own share: DataLoader(sampler=DistributedSampler(dataset)), or every "
                "world_size-th sample of an iterable dataset.\n"
                "where ranks share a batch, say which: Countoff(mesh=…)."
            ),
            order="call loader.sampler.set_epoch(epoch) on every rank before every pass over the train loader.",
            option=_OPTION,
            dealer="DistributedSampler",
            undo="leave out the DistributedSampler",
        ),
    },
    cannot={
        "WrongLength": "a length is asked for only where torch's own classes compute it",
        "WrongTotal": "a plain loop tells no total of its own",
        "NotDistributed": "Countoff() raises a RuntimeError where torch.distributed is not initialised",
    },
)
