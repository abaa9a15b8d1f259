"""Of two faults in the ranks' plans, the cause is named first, and the other one too."""

import pytest

from integration_tests import causes
from integration_tests.composer_jobs import needs_composer

FRAMEWORKS = [pytest.param(name, marks=needs_composer if name == "composer" else ()) for name in causes.FRAMEWORKS]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_cause_is_named_first(run_ranks, framework):
    first, _ = run_ranks(causes.run, 2, framework, deadline_seconds=180)
    found = dict(zip(causes.pairs_of(framework), first.value, strict=True))
    assert len(found) > 2
    assert {pair: said for pair, said in found.items() if not causes.names(pair, *said)} == {}
