"""The words of the adapter for a plain PyTorch loop, with a loader and without one."""

from __future__ import annotations

from dataclasses import replace

from countoff._adapter.words import EVEN, LENGTH_OF_ONE_RANK, Words, data_remedies, uneven_remedies

__all__ = ["WITHOUT_LOADER", "WORDS"]

_OPTION = "attach(..., {})"

WORDS = Words(
    framework="PyTorch",
    option=_OPTION,
    remedies={
        "UnevenBatches": uneven_remedies(
            train=(
                "give every rank the same number of batches. If each rank's dataset holds all of the data: "
                "DataLoader(sampler=DistributedSampler(dataset)). If each holds a part, or is iterable: "
                "for batch in itertools.islice(loader, n), with n batches that every rank has; what is beyond them is "
                "not read."
            ),
            option=_OPTION,
        ),
        "UnseenLoader": (
            "attach the very loader that the loop iterates, again where it makes a new one; without a loader, leave "
            "out train= and take the batches from handle.counted(…)."
        ),
        "WrongLength": LENGTH_OF_ONE_RANK,
        **data_remedies(
            shares=(
                "give every rank its own share: DataLoader(sampler=DistributedSampler(dataset)), or every "
                "world_size-th sample of an iterable dataset; where ranks share a batch, say which: attach(mesh=…)."
            ),
            order="call loader.sampler.set_epoch(epoch) before every pass over the train loader.",
            option=_OPTION,
            dealer="DistributedSampler",
            undo="leave out the DistributedSampler",
        ),
    },
    only={
        "LearningRateMismatch": "with `optimizer=`",
        "RankMapError": "with `mesh=`",
        **EVEN,
        "DoubleSharded": "behind a DistributedSampler",
        "StreamsDiffer": "behind a DistributedSampler",
        "SplitLeak": "behind a DistributedSampler",
        "PeersDiffer": "with `mesh=`",
        "ResumeMismatch": "with `handle.state_dict()`",
        "WeightsDiffer": "with `weights_every=` and `model=`",
        "ShortRun": "with `epochs=`",
        "WrongHorizon": "with `scheduler=` and `epochs=` or `max_steps=`",
    },
    cannot={
        "WrongTotal": "a plain loop tells no total of its own",
        "NotDistributed": "attach() raises a RuntimeError where torch.distributed is not initialised",
    },
)

WITHOUT_LOADER = replace(
    WORDS,
    remedies={
        **WORDS.remedies,
        "UnevenBatches": uneven_remedies(
            train=(
                "give every rank the same number of batches: handle.counted(itertools.islice(batches, n)), with n "
                "batches that every rank has; what is beyond them is not read."
            ),
            option=_OPTION,
        ),
        "UnseenLoader": (
            "take the train batches from handle.counted(…); if the loop iterates a loader, attach(train=loader) "
            "instead."
        ),
        "DuplicateData": (
            "seed by rank where samples are drawn at random: seed + rank. Otherwise give every rank its own share: "
            "every world_size-th sample, or files of its own; where ranks share a batch, say which: attach(mesh=…). If "
            "equal data is what you want: attach(..., compare_data=False)."
        ),
    },
)
"""What to do in a loop without a loader: `attach` without `train`."""
