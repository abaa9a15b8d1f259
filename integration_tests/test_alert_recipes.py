"""The recipes of docs/alerts.md, each run as it stands there, with the real tracker. What that has stored is read back.

W&B, MLflow and TensorBoard are in an environment of their own, `.venv-trackers`: `make test-trackers`.
"""

import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from countoff.core import Finding, Verdict
from tests.receiver import receiving
from tests.test_docs import DOCS, blocks

ELSEWHERE = "trackers are in an environment of their own: make test-trackers"
FINDING = Finding(
    Verdict("UnevenBatches", "rank 1 ran out of data after 4 batches of train epoch 0; rank 0 has batch 5.", (1,)),
    "error",
)
WARNING = Finding(Verdict("Stalled", "no rank moves."), "warning")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """The trackers' own warnings are not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def recipe(name: str, **readers: Any) -> Callable[[Finding], object]:
    """The function of a recipe, which the block on the page makes from the reader's own names."""
    [block] = (each for each in blocks(DOCS / "alerts.md", "python") if f"def {name}(" in each)
    exec(block, readers)
    return readers[name]


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B has an alert of the run, and takes no longer title."""
    wandb = pytest.importorskip("wandb", reason=ELSEWHERE)
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb.init(project="countoff", mode="offline", dir=str(tmp_path))
    tell = recipe("to_wandb")
    tell(FINDING)
    tell(WARNING)
    wandb.finish()
    [path] = tmp_path.rglob("*.wandb")
    deadline = time.monotonic() + 30
    while b"WARN" not in (written := path.read_bytes()) and time.monotonic() < deadline:
        time.sleep(0.1)  # a process of W&B's own writes it, on a busy machine after `finish` has returned
    assert b"countoff: UnevenBatches: rank 1 ran out of data after 4 batches" in written
    assert (
        b"rank 1 ran out of data after 4 batches of train epoch 0; rank 0 has batch 5.\ncountoff ends the job."
        in written
    )
    assert b"ERROR" in written
    assert b"WARN" in written


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tags of the run have it."""
    mlflow: Any = pytest.importorskip("mlflow", reason=ELSEWHERE)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    with mlflow.start_run() as run:
        recipe("to_mlflow")(FINDING)
    tags = mlflow.MlflowClient().get_run(run.info.run_id).data.tags
    assert tags["countoff.UnevenBatches"] == FINDING.message


def test_tensorboard(tmp_path: Path) -> None:
    """The event file has it as a text."""
    pytest.importorskip("tensorboard", reason=ELSEWHERE)
    from tensorboard.backend.event_processing.event_accumulator import (  # pyright: ignore[reportMissingImports]
        EventAccumulator,
    )
    from torch.utils.tensorboard.writer import SummaryWriter

    recipe("to_tensorboard", writer=SummaryWriter(tmp_path))(FINDING)
    events: Any = EventAccumulator(str(tmp_path)).Reload()
    [text] = events.Tensors("countoff/text_summary")
    assert text.tensor_proto.string_val[0].decode() == FINDING.message.replace("\n", "  \n")


def test_webhook() -> None:
    with receiving() as receiver:
        recipe("to_webhook", webhook=receiver.url)(FINDING)
    assert receiver.bodies == [{"text": FINDING.message}]
