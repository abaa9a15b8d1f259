"""The remedies of the adapters: one sentence or more for each kind, and none that loses data in silence."""

import re
from collections.abc import Iterator
from dataclasses import fields

import pytest

from countoff._adapter.messages import Messages, data_remedies, uneven_remedies
from countoff.core.checks import KINDS, plan
from countoff.core.checks.uneven import EVALUATION, WHO_EVALUATES
from countoff.core.settings import Settings
from countoff.core.verdict import Remedies, Verdict, remedy_for
from tests.adapters import MESSAGES, ONLY

ALL = list(MESSAGES.values())


def sentences(remedies: Remedies) -> Iterator[str]:
    """All remedies, those of a kind's subjects too."""
    for remedy in remedies.values():
        yield from [remedy] if isinstance(remedy, str) else remedy.values()


def test_data_remedies_say_how_to_turn_the_check_off() -> None:
    remedies = data_remedies(shares="shard.", order="seed.", option="Countoff({})")
    assert set(remedies) == {"DuplicateData", "PeersDiffer", "SameOrder"}
    assert all("Countoff(compare_data=False)" in remedies[kind] for kind in ("DuplicateData", "PeersDiffer"))


def test_a_framework_that_shards_by_itself_has_remedies_for_what_it_deals_out() -> None:
    remedies = data_remedies(shares="shard.", order="seed.", option="Countoff({})", dealer="prepare()", undo="leave it")
    dealt: Remedies = {"DoubleSharded": remedies["DoubleSharded"], "StreamsDiffer": remedies["StreamsDiffer"]}
    assert all("prepare()" in each and "Countoff(compare_data=False)" in each for each in sentences(dealt))


def test_uneven_remedies_set_options_as_the_framework_does() -> None:
    remedies = uneven_remedies(train="shard.", option="Countoff({})")
    assert remedies[""].startswith("shard.\nlet the job go on: with Countoff(uneven_train='stop'), ")
    assert uneven_remedies(train="shard.", option="Countoff({})", goes_on=False)[""] == "shard."
    assert "Countoff(uneven_eval='allow')" in remedies[EVALUATION]
    assert "Countoff(uneven_eval='off')" in remedies[WHO_EVALUATES]
    assert remedies[WHO_EVALUATES].startswith("let all ranks evaluate after the same batch.\n")
    together = uneven_remedies(train="shard.", option="Countoff({})", together="Trainer(every=N)")
    assert together[WHO_EVALUATES].startswith("let all ranks evaluate after the same batch: Trainer(every=N).\n")


@pytest.mark.parametrize("words", ALL, ids=lambda words: words.framework)
def test_every_adapter_has_whole_sentences_for_known_kinds(words: Messages) -> None:
    remedies = words.remedies
    assert set(remedies) <= set(KINDS)
    assert "UnevenBatches" in remedies
    assert all(each.endswith(".") and "  " not in each for each in sentences(remedies))


@pytest.mark.parametrize("words", ALL, ids=lambda words: words.framework)
def test_a_remedy_names_the_subjects_of_its_kind(words: Messages) -> None:
    """A misspelt subject would never be found."""
    for kind, remedy in words.remedies.items():
        if not isinstance(remedy, str):
            assert set(remedy) <= {"", *KINDS[kind].causes}


@pytest.mark.parametrize("words", ALL, ids=lambda words: words.framework)
def test_no_remedy_reads_the_data_of_one_rank_only(words: Messages) -> None:
    """With `dispatch_batches`, rank 0 reads for all: the shares of the others, if each has its own, are never read."""
    remedies = [each.replace("dispatch_batches=False", "") for each in sentences(words.remedies)]
    assert not [each for each in remedies if "dispatch_batches" in each]


@pytest.mark.parametrize("words", ALL, ids=lambda words: words.framework)
def test_an_option_is_written_as_its_framework_takes_it(words: Messages) -> None:
    """Where a remedy tells to set an option of countoff's, it does so as `Messages.option` says."""
    options = "|".join(field.name for field in fields(Settings))
    for each in sentences(words.remedies):
        for found in re.finditer(rf"\bCountoff\([^()]*?((?:{options})=[^()]*)\)", each):
            assert found[0] == words.option.format(found[1])


@pytest.mark.parametrize("adapter", MESSAGES)
def test_an_adapter_says_why_it_cannot_report_a_kind(adapter: str) -> None:
    words = MESSAGES[adapter]
    assert ONLY[adapter].keys() <= set(words.kinds)
    assert not words.remedies.keys() & words.cannot.keys() - {"PeersDiffer"}  # of the shared ones
    assert all(len(why.split()) > 3 for why in words.cannot.values())


DECIDED_BY_THE_PROOF = {("WrongHorizon", ""), ("Truncated", "")}
"""Whoever finds these says what to do with numbers that only the proof has."""
LENGTHS = {("PlanMismatch", each) for each in (*plan.LENGTHS, "batches_between_evaluations")}
"""Of a loop that a person writes nothing is proved by these: it may leave its loader before the end."""


@pytest.mark.parametrize("adapter", MESSAGES)
def test_an_adapter_has_an_answer_to_every_cause(adapter: str) -> None:
    """Its own, or that of the check."""
    words = MESSAGES[adapter]
    without = {
        (kind.name, subject)
        for kind in KINDS.values()
        if kind.name in words.kinds
        for subject in kind.causes or ("",)
        if not remedy_for(Verdict(kind.name, "found.", subject=subject), words.remedies)
    }
    has_plan = adapter in ("lightning", "composer", "transformers")
    assert without <= DECIDED_BY_THE_PROOF | (set() if has_plan else LENGTHS)
