"""A fit of Lightning's Trainer that an exception has left."""

from types import SimpleNamespace
from typing import Any

from countoff._lightning.lightning_fit import UntilTeardown


class Left:
    """Counts how often a fit is left."""

    def __init__(self) -> None:
        self.times = 0

    def leave(self) -> None:
        self.times += 1


class Loop:
    """Lightning's loop, as far as it is taken down."""

    def teardown(self) -> None: ...


def test_a_fit_is_left_once_where_lightning_takes_its_loop_down() -> None:
    left, loop = Left(), Loop()
    around = UntilTeardown(SimpleNamespace(_active_loop=loop), as_left(left))
    assert left.times == 0
    loop.teardown()
    around.remove()
    assert (left.times, vars(loop)) == (1, {})


def test_a_fit_is_left_where_lightning_does_not_take_its_loop_down() -> None:
    """As after another callback's error in `on_exception`; the program may fit again."""
    left, loop = Left(), Loop()
    UntilTeardown(SimpleNamespace(_active_loop=loop), as_left(left)).remove()
    loop.teardown()
    assert (left.times, vars(loop)) == (1, {})


def test_a_fit_is_left_at_once_where_lightning_does_not_show_its_loop() -> None:
    left = Left()
    UntilTeardown(SimpleNamespace(), as_left(left))
    assert left.times == 1


def as_left(left: Left) -> Any:
    return left
