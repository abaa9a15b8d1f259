"""The counters of one rank in one span, and the hash of its steps."""

import functools

from countoff.core.protocol.counters import hash_step


def hash_of(*batches: int) -> int:
    """The hash of steps applied after these batches."""
    return functools.reduce(hash_step, batches, 0)


def test_step_hash_depends_on_batches_and_order() -> None:
    """Equal numbers of steps after other batches, or in another order, have other hashes, all below 2**48."""
    assert hash_of(2, 4) != hash_of(1, 4)
    assert hash_of(2, 4) != hash_of(4, 2)
    assert 0 <= hash_of(*range(10_000)) < 2**48
