"""A fit with any limits and intervals of Lightning's Trainer begins, and its plan has what can be compared."""

import logging
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader, TensorDataset

from countoff._lightning import lightning_fit
from countoff.core import FitPlan
from countoff.lightning import Countoff


class Module(BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch[0], batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return super().validation_step(batch[0], batch_idx)


def loader() -> DataLoader[Any]:
    """16 batches."""
    return DataLoader(TensorDataset(torch.randn(32, 32)), batch_size=2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("given", "compared"),
    [
        ({"val_check_interval": 4}, {"val_check_interval": 4, "check_val_every_n_epoch": 1}),
        ({"val_check_interval": 40, "check_val_every_n_epoch": None}, {"val_check_interval": 40}),
        ({"val_check_interval": 0.5}, {"check_val_every_n_epoch": 1}),
        ({"val_check_interval": timedelta(hours=1)}, {}),
        ({"val_check_interval": 4, "max_steps": 3}, {}),
        ({"check_val_every_n_epoch": 3}, {}),
        ({"limit_val_batches": 0, "val_check_interval": 4}, {}),
        ({"limit_train_batches": 0.5, "overfit_batches": 2}, {"check_val_every_n_epoch": 1}),
    ],
)
def test_only_intervals_in_whole_numbers_that_the_fit_gets_to_are_compared(
    given: dict[str, Any], compared: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    found: list[FitPlan] = []
    plan_of = lightning_fit.plan_of
    monkeypatch.setattr(lightning_fit, "plan_of", lambda *of: found.append(plan_of(*of)) or found[-1])
    arguments: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": [Countoff()],
    }
    trainer = pl.Trainer(**{**arguments, **given})
    trainer.fit(Module(), loader(), loader())
    assert [plan.evaluation_intervals for plan in found] == [compared]
