"""What files of TensorBoard and of W&B hold of the totals: frameworks' own loggers write them, and they are read back.

With trackers installed, frameworks report to them, so these are on the path of this run alone: `make test-trackers`.
"""

from typing import Any

import pytest

from integration_tests.test_alert_recipes import ELSEWHERE
from integration_tests.tracker_jobs import Stored, stored_by

LIGHTNING = {
    "countoff/num_training_batches": 11,
    "countoff/steps_per_epoch": 6,
    "countoff/estimated_stepping_batches": 18,
    "countoff/global_batch_size": 16,
    "countoff/samples_repeated": 1,
    "countoff/samples_dropped": 0,
    "countoff/eval_samples": 20,
    "countoff/eval_samples_repeated": 0,
    "countoff/eval_samples_dropped": 0,
}
TRANSFORMERS = {
    "train/countoff/len_dataloader": 9,
    "train/countoff/num_update_steps_per_epoch": 3,
    "train/countoff/max_steps": 6,
    "train/countoff/total_train_batch_size": 32,
    "train/countoff/samples_repeated": 2,
    "train/countoff/samples_dropped": 0,
    "train/countoff/eval_samples/0": 22,
    "train/countoff/eval_samples_repeated/0": 2,
    "train/countoff/eval_samples_dropped/0": 0,
}
COMPOSER = {
    "countoff/dataloader_len": 9,
    "countoff/steps_per_epoch": 9,
    "countoff/total_steps": 18,
    "countoff/global_train_batch_size": 8,
    "countoff/samples_repeated": 0,
    "countoff/samples_dropped": 0,
}
EXPECTED: dict[str, dict[str, dict[str, int]]] = {
    "lightning": {"scalars": LIGHTNING, "config": LIGHTNING, "history": {}},
    "transformers": {"scalars": TRANSFORMERS, "config": {}, "history": TRANSFORMERS},
    "composer": {"scalars": COMPOSER, "config": {}, "history": {}},
}


@pytest.mark.parametrize("framework", EXPECTED)
def test_files_hold_each_total_once(run_ranks: Any, framework: str) -> None:
    """Each number is there once, and all else that is there is what is there without countoff, or with totals="off"."""
    for package in ("wandb", "tensorboard", framework):
        pytest.importorskip(package, reason=ELSEWHERE)
    offline = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    options = [None, {"totals": "show"}, {"totals": "off"}]
    results = run_ranks(stored_by, 2, framework, options, env=offline, deadline_seconds=180)
    plain, show, off = results[0].value
    assert split(show, own=True) == {
        part: {name: [number] for name, number in expected.items()} for part, expected in EXPECTED[framework].items()
    }
    names = {part: set(stored) for part, stored in plain.items()}
    assert {part: set(stored) for part, stored in split(show, own=False).items()} == names
    assert {part: set(stored) for part, stored in off.items()} == names
    assert names["scalars"]


def split(stored: Stored, *, own: bool) -> Stored:
    """Returns countoff's names, or all others."""
    return {
        part: {name: values for name, values in names.items() if ("countoff/" in name) is own}
        for part, names in stored.items()
    }
