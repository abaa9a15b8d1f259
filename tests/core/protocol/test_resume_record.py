"""The record in a checkpoint: it is read back as it was written, and whatever it holds, it is refused or read."""

import json
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from countoff.core.protocol.resume_record import UNREADABLE, ResumeRecord
from tests.situations import RESUME_RECORD


def test_a_record_is_the_same_after_json():
    assert ResumeRecord.from_json(json.loads(json.dumps(RESUME_RECORD.to_json()))) == RESUME_RECORD


@given(
    st.sampled_from(sorted(RESUME_RECORD.to_json())),
    st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.integers() | st.text()) | st.floats(),
)
def test_a_record_that_is_wrong_is_refused_or_read(name: str, value: Any):
    """A value of another kind is an error of the three that are caught, or is read as what it stands for."""
    try:
        found = ResumeRecord.from_json({**RESUME_RECORD.to_json(), name: value})
    except UNREADABLE:
        return
    assert isinstance(found.epoch, int)
    assert isinstance(found.steps, int)


def test_a_record_of_a_run_that_had_resumed_is_the_same_after_json():
    record = replace(RESUME_RECORD, since=("b2", "b3"), since_batches=5)
    assert ResumeRecord.from_json(record.to_json()) == record


def test_a_record_without_what_was_added_later_is_read():
    record = replace(RESUME_RECORD, since=("b2", "b3"), since_batches=5)
    older = {
        name: value for name, value in record.to_json().items() if name not in ("since", "since_batches", "issued")
    }
    assert ResumeRecord.from_json(older) == replace(record, since=(), since_batches=0)
