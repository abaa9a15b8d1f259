"""Which passes of a script are train epochs and which are evaluations."""

import pytest
import torch

from countoff._fabric.pass_kinds import PassKinds
from countoff.core import FitPlan, Guard, Settings


class Loader:
    pass


@pytest.fixture
def guard() -> Guard:
    """The guard of a fit that has begun; no span of it is open."""
    return Guard(Settings(), rank=0, world_size=1)


def test_gradients_tell_an_evaluation(guard: Guard) -> None:
    """Before a fit, one is not counted, and any other pass is a train epoch."""
    kinds, loader, other = PassKinds(new_loaders_evaluate=True), Loader(), Loader()
    with torch.no_grad():
        assert kinds.begin(other, None) is None
    assert kinds.begin(loader, None) == "train"
    kinds.train_on(loader)
    with torch.no_grad():
        assert kinds.begin(loader, guard) == "evaluation"
    assert kinds.begin(loader, guard) == "train"
    assert kinds.trained_last is loader


def test_a_step_in_a_pass_tells_that_it_trains(guard: Guard) -> None:
    """Another loader is taken for an evaluation's until then; from there on a new one is taken for a train loader."""
    kinds, loader, second, third = PassKinds(new_loaders_evaluate=True), Loader(), Loader(), Loader()
    kinds.train_on(loader)
    assert kinds.begin(second, guard) == "evaluation"
    kinds.end(second)
    kinds.stepped()
    assert kinds.begin(second, guard) == "evaluation"
    kinds.stepped()
    kinds.end(second)
    assert kinds.begin(second, guard) == "train"
    assert kinds.begin(third, guard) == "train"


def test_a_loader_beside_the_one_that_is_counted_is_not_counted(guard: Guard) -> None:
    """As in `zip(loader, beside)`: its pass begins inside that of the train loader, and a step comes in both."""
    kinds, loader, beside = PassKinds(new_loaders_evaluate=True), Loader(), Loader()
    kinds.train_on(loader)
    guard.fit_start(FitPlan())
    guard.train_start(0)
    assert kinds.begin(beside, guard) == "evaluation"
    kinds.stepped()
    assert kinds.begin(beside, guard) is None
    assert kinds.begin(beside, None) is None
    guard.train_end("stopped")
    guard.fit_end()
    guard.close()


def test_where_ranks_are_made_even_a_pass_outside_of_any_other_trains(guard: Guard) -> None:
    """A train epoch that is taken for an evaluation would not be made even."""
    kinds, loader, other = PassKinds(new_loaders_evaluate=False), Loader(), Loader()
    kinds.train_on(loader)
    assert kinds.begin(other, guard) == "train"


def test_no_loader_is_kept_alive() -> None:
    """The script's loaders are its own."""
    kinds = PassKinds(new_loaders_evaluate=True)
    kinds.train_on(Loader())
    assert kinds.trained_last is None
