"""lingua's loop on one rank: its data has no end, and it goes on at the step of its checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from countoff._adapter.counted_loop import active_loops
from countoff.core import SettingsError
from countoff.lingua import Countoff

ARGS = SimpleNamespace(data=SimpleNamespace(batch_size=2, seq_len=8), grad_acc_steps=2, steps=100)
MESH = SimpleNamespace(mesh=torch.zeros(1, dtype=torch.int64), mesh_dim_names=("dp_shard",), get_coordinate=lambda: [0])


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    for each in active_loops():
        each.end()


def made(**more: Any) -> Countoff:
    given: dict[str, Any] = {"dp_rank": 0, "dp_degree": 1, **more}
    return Countoff(ARGS, mesh=MESH, **given)


def test_the_data_is_one_epoch_that_goes_on_at_the_checkpoints_step() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with made(optimizer=optimizer, start_step=5) as countoff:
        loader = iter(countoff.train(itertools.count()))
        for _ in range(4):
            assert next(loader) >= 0
        optimizer.step()
        assert (countoff.guard.open_span, countoff.guard.train_batches) == ("train epoch 0", 14)
        assert countoff.guard.steps == 1
        assert countoff.progress()
    assert active_loops() == []
    assert next(loader) == 4


def test_the_log_has_the_tokens_of_a_step_and_of_the_run(caplog: pytest.LogCaptureFixture) -> None:
    """Rank 0 writes one line when the fit begins, at the level of lingua's own lines; none with totals="off"."""
    said = "The run has 100 steps and 3200 tokens. A step has 4 samples and 32 tokens over all ranks."
    for options, expected in (({}, [said]), ({"totals": "off"}, [])):
        caplog.clear()
        with caplog.at_level("INFO"), made(**options) as countoff:
            next(iter(countoff.train(itertools.count())))
        assert [record.message for record in caplog.records if record.name == "countoff"] == expected


def test_another_dp_degree_than_the_meshs_is_refused() -> None:
    with pytest.raises(ValueError, match="dp_degree is 2, and the mesh has 1 data ranks"):
        made(dp_degree=2)


@pytest.mark.parametrize("option", ["uneven_train", "uneven_eval"])
def test_ranks_are_not_made_even(option: str) -> None:
    with pytest.raises(SettingsError, match="lingua"):
        made(**{option: "stop"})
