"""The remedies of the adapters: common ones, an adapter's own in their place, one sentence for each kind."""

from importlib import import_module
from typing import get_args

import pytest

from countoff._adapter.remedies import data_remedies, with_common_remedies
from countoff.core.verdict import Kind

HOMES = [
    "countoff.torch",
    "countoff.fabric",
    "countoff.lingua",
    "countoff._accelerate.facts",
    "countoff._composer.messages",
    "countoff._lightning.trainer",
    "countoff._transformers.trainer",
]


def test_an_adapters_own_remedy_replaces_the_common_one() -> None:
    remedies = with_common_remedies({"StepMismatch": "call optimizers.step() on every rank."})
    assert remedies["StepMismatch"] == "call optimizers.step() on every rank."
    assert remedies["LostRank"] == "read that rank's own output first; the others only lost their peer."


def test_the_last_of_two_own_remedies_holds() -> None:
    assert with_common_remedies({"WrongLength": "a."}, {"WrongLength": "b."})["WrongLength"] == "b."


def test_data_remedies_say_how_to_turn_the_check_off() -> None:
    remedies = data_remedies(shares="shard.", order="seed.", off="attach(fingerprint_batches=0)")
    assert set(remedies) == {"DuplicateData", "PeersDiffer", "SameOrder"}
    assert all("attach(fingerprint_batches=0)" in remedies[kind] for kind in ("DuplicateData", "PeersDiffer"))


@pytest.mark.parametrize("home", HOMES)
def test_every_adapter_has_whole_sentences_for_known_kinds(home: str) -> None:
    remedies = import_module(home).REMEDIES
    assert set(remedies) <= set(get_args(Kind))
    assert {"UnevenBatches", "PlanMismatch", "StepMismatch", "LearningRateMismatch", "LostRank"} <= set(remedies)
    assert all(sentence.endswith(".") and "  " not in sentence for sentence in remedies.values())
