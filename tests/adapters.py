"""The messages of all adapters, in the order of the table in docs/verdicts.md."""

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
