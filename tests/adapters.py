"""The words of all adapters, in the order of the table in docs/verdicts.md."""

from collections.abc import Mapping
from typing import Final

from countoff._accelerate.words import WORDS as ACCELERATE
from countoff._adapter.words import Words
from countoff._composer.words import WORDS as COMPOSER
from countoff._fabric.words import WORDS as FABRIC
from countoff._lightning.words import WORDS as LIGHTNING
from countoff._lingua.words import WORDS as LINGUA
from countoff._torch.words import WORDS as TORCH
from countoff._torchtitan.words import WORDS as TORCHTITAN
from countoff._transformers.words import WORDS as TRANSFORMERS

WORDS: Final[Mapping[str, Words]] = {
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
