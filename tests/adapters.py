"""The messages of all adapters, in the order of the table in docs/verdicts.md, and what that table says besides."""

from collections.abc import Mapping
from typing import Final

from countoff._accelerate.messages import MESSAGES as ACCELERATE
from countoff._adapter.messages import Messages
from countoff._composer.messages import MESSAGES as COMPOSER
from countoff._fabric.messages import MESSAGES as FABRIC
from countoff._lightning.messages import MESSAGES as LIGHTNING
from countoff._lingua.messages import MESSAGES as LINGUA
from countoff._torch.messages import MESSAGES as TORCH
from countoff._torchtitan.messages import MESSAGES as TORCHTITAN
from countoff._transformers.messages import MESSAGES as TRANSFORMERS

MESSAGES: Final[Mapping[str, Messages]] = {
    "torch": TORCH,
    "accelerate": ACCELERATE,
    "transformers": TRANSFORMERS,
    "lightning": LIGHTNING,
    "fabric": FABRIC,
    "composer": COMPOSER,
    "torchtitan": TORCHTITAN,
    "lingua": LINGUA,
}
"""By adapter: its public module's name."""

EVEN = "with `uneven_train`"
"""When an adapter whose framework leaves uneven ranks to countoff reports a `Truncated`."""
ONLY: Final[Mapping[str, Mapping[str, str]]] = {
    "torch": {
        "LearningRateMismatch": "with `model=` and `optimizer=`",
        "RankMapError": "with `mesh=`",
        "Truncated": EVEN,
        "DoubleSharded": "behind a DistributedSampler",
        "StreamsDiffer": "behind a DistributedSampler",
        "NotReadOnce": "behind a DistributedSampler",
        "SplitLeak": "behind a DistributedSampler",
        "PeersDiffer": "with `mesh=`",
        "ResumeMismatch": "with `countoff.state_dict()`",
        "WeightsDiffer": "with `model=`",
        "ShortRun": "with `epochs=`",
        "WrongHorizon": "with `scheduler=` and `epochs=` or `max_steps=`",
    },
    "accelerate": {
        "Truncated": EVEN,
        "DuplicateData": "loaders that are not sharded",
        "NotReadOnce": "map-style datasets",
        "ShortRun": "with `epochs=`",
        "WrongTotal": "with gradient accumulation",
        "WrongHorizon": "prepared schedulers",
    },
    "transformers": {
        "Truncated": EVEN,
        "DuplicateData": "loaders that are not sharded",
        "NotReadOnce": "map-style datasets",
        "SplitLeak": "the first evaluation",
    },
    "lightning": {
        "Truncated": EVEN,
        "DoubleSharded": "map-style datasets",
        "StreamsDiffer": "map-style datasets",
        "NotReadOnce": "map-style datasets",
        "SplitLeak": "map-style datasets",
        "WeightsDiffer": "with `weights_every=`",
        "ShortRun": "automatic optimization",
        "WrongHorizon": "automatic optimization",
    },
    "fabric": {
        "LearningRateMismatch": "with `model=` and `optimizer=`",
        "RankMapError": "with a mesh",
        "Truncated": EVEN,
        "DoubleSharded": "map-style datasets",
        "StreamsDiffer": "map-style datasets",
        "NotReadOnce": "map-style datasets",
        "PeersDiffer": "with a mesh",
        "ResumeMismatch": "with `countoff.state_dict()` in the checkpoint",
        "WeightsDiffer": "with `model=`",
        "ShortRun": "with `epochs=`",
        "WrongHorizon": "with `scheduler=` and `epochs=` or `max_steps=`",
    },
    "composer": {
        "DoubleSharded": "behind a DistributedSampler",
        "StreamsDiffer": "behind a DistributedSampler",
        "NotReadOnce": "behind a DistributedSampler",
        "SplitLeak": "behind a DistributedSampler",
        "WeightsDiffer": "with `weights_every=`",
        "ShortRun": "durations in epochs",
        "WrongHorizon": "durations in epochs or batches",
    },
    "torchtitan": {
        "WeightsDiffer": "with `weights_every=`",
        "WrongHorizon": "the configuration's",
    },
    "lingua": {
        "LearningRateMismatch": "with `model=` and `optimizer=`",
        "WeightsDiffer": "with `weights_every=` and `model=`",
    },
}
"""By adapter and kind of verdict, when it can report the kind, if that is not always."""
