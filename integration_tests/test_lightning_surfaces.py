"""The ways to turn countoff on in Lightning: either package, LightningCLI, the entry point; and real torchrun."""

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest

from integration_tests.digits import own_rank, share_loader
from integration_tests.lightning_jobs import Job, quiet
from integration_tests.output import assert_named


def fit_with_pytorch_lightning(batches: list[int], by_flag: bool) -> int:
    import pytorch_lightning
    import torch

    from countoff.pytorch_lightning import Countoff

    class Model(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(64, 10)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            images, labels = batch
            return torch.nn.functional.cross_entropy(self.layer(images), labels)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet()
    trainer = pytorch_lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[] if by_flag else [Countoff()],
    )
    trainer.fit(Model(), share_loader(batches[own_rank()]))
    return trainer.global_step


@pytest.mark.parametrize("by_flag", [False, True], ids=["callback", "flag"])
def test_pytorch_lightning_is_served_too(run_ranks, by_flag):
    """The `pytorch_lightning` package is served as well, by callback and by flag."""
    env = {"COUNTOFF": "1"} if by_flag else {}
    results = run_ranks(fit_with_pytorch_lightning, 2, [5, 4], by_flag, env=env, expect=None)
    assert_named(results, "UnevenBatches", [1], "rank 1 ran out of data after 4 batches")


def test_pytorch_lightning_trains_on_even_data(run_ranks):
    """A healthy job of `pytorch_lightning` trains to its end."""
    assert [result.value for result in run_ranks(fit_with_pytorch_lightning, 2, [5, 5], False)] == [10, 10]


def callbacks_of_trainers(cases: Sequence[tuple[dict[str, Any] | None, str | None]]) -> list[list[tuple[str, bool]]]:
    """countoff's callbacks of a Trainer with each of these options, and values of COUNTOFF."""
    found = list[list[tuple[str, bool]]]()
    for options, flag in cases:
        with mock.patch.dict(os.environ, {} if flag is None else {"COUNTOFF": flag}):
            found.append(callbacks_of_a_trainer(options))
    return found


def callbacks_of_a_trainer(options: dict[str, Any] | None) -> list[tuple[str, bool]]:
    from countoff._lightning.callback import CountoffCallback

    quiet()
    trainer: Any = Job(options=options).make_trainer(devices=1, strategy="auto")
    found = [each for each in trainer.callbacks if isinstance(each, CountoffCallback)]
    for each in found:
        each.setup(trainer, None, "fit")
    return [(type(each).__module__, each._is_active(trainer)) for each in found]


def test_the_entry_point_adds_nothing_unless_the_flag_is_on(run_ranks):
    """The entry point adds a callback only where COUNTOFF=1; beside one of the user's own, it does nothing."""
    (result,) = run_ranks(callbacks_of_trainers, 1, [(None, None), (None, "0"), (None, "1"), ({"totals": "fix"}, "1")])
    unset, off, on, beside_the_users_own = result.value
    assert unset == []
    assert off == []
    assert on == [("countoff.lightning", True)]
    assert beside_the_users_own == [("countoff.lightning", True), ("countoff.lightning", False)]


def configure_by_yaml(path: str) -> tuple[str, float]:
    from lightning.pytorch.cli import LightningCLI

    from countoff.lightning import Countoff
    from integration_tests.lightning_jobs import Classifier

    quiet()
    sys.argv = ["train.py"]
    cli = LightningCLI(Classifier, run=False, args=["--config", path], save_config_callback=None)
    trainer: Any = cli.trainer
    found = next(each for each in trainer.callbacks if isinstance(each, Countoff))
    return found.settings.uneven_eval, found.settings.stall_seconds


def test_lightning_cli_configures_it(run_ranks, tmp_path):
    """LightningCLI makes the callback from YAML with its options."""
    config = tmp_path / "config.yaml"
    config.write_text(
        "trainer:\n  accelerator: cpu\n  logger: false\n  callbacks:\n    - class_path: countoff.lightning.Countoff\n"
        "      init_args: {uneven_eval: allow, stall_seconds: 7}\n"
    )
    assert run_ranks(configure_by_yaml, 1, str(config))[0].value == ("allow", 7.0)


@pytest.mark.parametrize(
    ("module", "missing", "command"),
    [
        ("countoff.lightning", "lightning", "pip install 'countoff[lightning]'"),
        ("countoff.pytorch_lightning", "pytorch_lightning", "pip install pytorch-lightning"),
        ("countoff.torch", "torch", "pip install 'countoff[torch]'"),
        ("countoff.fabric", "torch", "pip install 'countoff[lightning]'"),
    ],
)
def test_a_missing_framework_is_one_line_with_the_command(module, missing, command):
    """The import without its framework fails with one line, which has the install command."""
    script = f"import sys; sys.modules[{missing!r}] = None\ntry:\n import {module}\nexcept ImportError as e: print(e)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert command in done.stdout
    assert len(done.stdout.splitlines()) == 1


UNDER_TORCHRUN = """
import os, sys
from integration_tests.lightning_jobs import Job, fit
fit(Job(train=[5, 4] if sys.argv[1] == "uneven" else [5, 5], val=[2, 2]))
print("rank", os.environ["RANK"], "is done")
"""


@pytest.mark.torchrun
@pytest.mark.nightly
def test_torchruns_root_cause_is_the_verdict(run_torchrun):
    """torchrun gives the verdict as the root cause, and every rank prints it."""
    run = run_torchrun(UNDER_TORCHRUN, 2, "uneven", deadline_seconds=240)
    assert run.exit_code != 0
    assert "Root Cause" in run.output, run.output
    cause = run.output[run.output.index("Root Cause") :]
    assert "countoff: UnevenBatches: rank 1 ran out of data after 4 batches of train epoch 0" in cause, run.output
    for rank in range(2):
        assert f"[rank {rank}] countoff: UnevenBatches: rank 1 ran out of data after 4 batches" in run.output


@pytest.mark.torchrun
@pytest.mark.nightly
def test_a_healthy_job_under_torchrun_prints_nothing(run_torchrun):
    """A healthy job under real torchrun trains to its end, and countoff prints nothing."""
    run = run_torchrun(UNDER_TORCHRUN, 2, "even", deadline_seconds=240)
    assert run.exit_code == 0, run.output
    assert "countoff:" not in run.output
    assert run.output.count("is done") == 2
    assert os.environ.get("COUNTOFF") is None
