"""Every remedy of the golden messages has a job that applies it, or a reason why not."""

from collections import Counter

from tests.remedies import APPLIED, golden


def test_every_remedy_has_a_job_or_a_reason_why_not() -> None:
    """A new or a changed remedy needs an entry in tests/golden/remedies.yaml."""
    known = Counter(remedy for entry in APPLIED for remedy in entry.remedies)
    assert golden() - set(known) == set()
    assert set(known) - golden() == set()
    assert set(known.values()) == {1}


def test_every_entry_says_one_thing() -> None:
    assert all(sum(map(bool, (entry.jobs, entry.tests, entry.because))) == 1 for entry in APPLIED)
