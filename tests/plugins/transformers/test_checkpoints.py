"""What a checkpoint of the Trainer holds of the callback."""

import pytest

from countoff.core import Settings

checkpoints = pytest.importorskip("countoff._transformers.checkpoints", exc_type=ImportError)


def test_the_settings_that_were_chosen_but_no_address() -> None:
    """A checkpoint may be shared, and an address may hold a secret."""
    state = checkpoints.state_of(Settings(notify=("slack://hunter2",), weights_every=8, on_finding=print), None, None)
    assert state == {"args": {"weights_every": 8}, "attributes": {}}
