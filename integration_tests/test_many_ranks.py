"""24 real ranks on one host: as many as a message must stay readable for, and a roll call quick."""

import pytest

from integration_tests import loops
from integration_tests.output import assert_named, printed_lines, whole_message

RANKS = 24


@pytest.mark.alone
def test_twenty_four_ranks_print_one_message_and_a_line_each(run_ranks):
    """The short rank is named. Rank 0 prints the message with a table that fits, every other rank one line."""
    batches = [5] * RANKS
    batches[17] = 4
    results = run_ranks(loops.uneven, RANKS, batches, expect=None, deadline_seconds=120)
    assert_named(results, "UnevenBatches", [17], "rank 17 ran out of data after 4 batches of train epoch 0")
    text = whole_message(results).splitlines()
    assert any(line.startswith("  17 ") for line in text)
    assert sum(len(printed_lines(result)) for result in results) == len(text) + RANKS - 1
    assert len(text) < 16
