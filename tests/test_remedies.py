"""The remedies of the adapters: one sentence or more for each kind, and none that loses data in silence."""

from collections.abc import Iterator
from importlib import import_module

import pytest

from countoff._adapter.remedies import data_remedies, uneven_remedies
from countoff.core.checks import KINDS
from countoff.core.checks.uneven import EVALUATION, WHO_EVALUATES
from countoff.core.verdict import Remedies

HOMES = [
    "countoff.torch",
    "countoff.fabric",
    "countoff.lingua",
    "countoff._accelerate.facts",
    "countoff._composer.messages",
    "countoff._lightning.trainer",
    "countoff._transformers.trainer",
]


def sentences(remedies: Remedies) -> Iterator[str]:
    """All remedies, those of a kind's subjects too."""
    for remedy in remedies.values():
        yield from [remedy] if isinstance(remedy, str) else remedy.values()


def test_data_remedies_say_how_to_turn_the_check_off() -> None:
    remedies = data_remedies(shares="shard.", order="seed.", off="attach(fingerprint_batches=0)")
    assert set(remedies) == {"DuplicateData", "PeersDiffer", "SameOrder"}
    assert all("attach(fingerprint_batches=0)" in remedies[kind] for kind in ("DuplicateData", "PeersDiffer"))


def test_a_framework_that_shards_by_itself_has_remedies_for_what_it_deals_out() -> None:
    remedies = data_remedies(shares="shard.", order="seed.", off="attach(off)", dealer="prepare()", undo="leave it")
    dealt: Remedies = {"DoubleSharded": remedies["DoubleSharded"], "StreamsDiffer": remedies["StreamsDiffer"]}
    assert all("prepare()" in each and "attach(off)" in each for each in sentences(dealt))


def test_uneven_remedies_set_options_as_the_framework_does() -> None:
    remedies = uneven_remedies(train="shard.", option="attach({})")
    assert remedies[""].startswith("shard. Or let the job go on: with attach(uneven_train='stop'), ")
    assert uneven_remedies(train="shard.", option="attach({})", goes_on=False)[""] == "shard."
    assert "attach(uneven_eval='allow')" in remedies[EVALUATION]
    assert "attach(eval_ranks=[0])" in remedies[WHO_EVALUATES]
    assert remedies[WHO_EVALUATES].endswith(" evaluate after the same batch.")
    together = uneven_remedies(train="shard.", option="attach({})", together="Trainer(every=N)")
    assert together[WHO_EVALUATES].endswith(" evaluate after the same batch: Trainer(every=N).")


@pytest.mark.parametrize("home", HOMES)
def test_every_adapter_has_whole_sentences_for_known_kinds(home: str) -> None:
    remedies = import_module(home).REMEDIES
    assert set(remedies) <= set(KINDS)
    assert "UnevenBatches" in remedies
    assert all(each.endswith(".") and "  " not in each for each in sentences(remedies))


@pytest.mark.parametrize("home", HOMES)
def test_a_remedy_names_the_subjects_of_its_kind(home: str) -> None:
    """A misspelt subject would never be found."""
    for kind, remedy in import_module(home).REMEDIES.items():
        if not isinstance(remedy, str):
            assert set(remedy) <= {"", *KINDS[kind].causes}


def test_a_loop_without_a_loader_is_not_told_to_change_one() -> None:
    """Of what such a loop can report about its training, nothing sends the reader to a DataLoader."""
    remedies = import_module("countoff.torch").WITHOUT_LOADER
    uneven = remedies["UnevenBatches"]
    assert not isinstance(uneven, str)
    for each in (uneven[""], remedies["DuplicateData"]):
        assert "loader" not in each.lower()
    assert "handle.counted(" in uneven[""]


@pytest.mark.parametrize("home", HOMES)
def test_no_remedy_reads_the_data_of_one_rank_only(home: str) -> None:
    """With `dispatch_batches`, rank 0 reads for all: the shares of the others, if each has its own, are never read."""
    remedies = [each.replace("dispatch_batches=False", "") for each in sentences(import_module(home).REMEDIES)]
    assert not [each for each in remedies if "dispatch_batches" in each]
