"""The Trainer's evaluation interval, as its plan has it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from countoff import transformers as adapter
from countoff.core import FitPlan


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.tensor([float(index)])}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(x).square().mean()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("strategy", "steps", "compared"),
    [("steps", 2, {"eval_steps": 2}), ("steps", 9, {}), ("epoch", 2, {}), ("no", 2, {})],
)
def test_an_interval_of_steps_that_training_gets_to_is_compared(
    strategy: str, steps: int, compared: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The strategy may be a text: the Trainer takes one that was set after its arguments were made."""
    found: list[FitPlan] = []
    plan_of = adapter.plan_of
    monkeypatch.setattr(adapter, "plan_of", lambda *of: found.append(plan_of(*of)) or found[-1])
    args = TrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        per_device_train_batch_size=4,
        num_train_epochs=1,
        eval_steps=steps,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    setattr(args, "eval_strategy", strategy)  # noqa: B010  (declared as an enum, which is a text too)
    data = Numbers()
    Trainer(model=Model(), args=args, train_dataset=data, eval_dataset=data, callbacks=[adapter.Countoff()]).train()
    assert [plan.evaluation_intervals for plan in found] == [compared]
