"""Jobs with runs of trackers, for `integration_tests.test_trackers`. A tracker is imported only by a rank that has one.

Each rank keeps its runs below a directory of its own, `runs(directory, rank)`.
"""

import atexit
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from countoff.core.waiting import until
from countoff.torch import attach
from integration_tests import devices
from integration_tests.jobs import Classifier, own_rank, quiet, share_loader
from integration_tests.jobs import Job as LightningJob
from integration_tests.loops import model_and_optimizer, train_on


def runs(directory: str | Path, rank: int) -> Path:
    """Where a rank keeps its runs."""
    return Path(directory) / f"rank{rank}"


def prepare(directory: str) -> Path:
    """Points all trackers to this rank's directory, offline. To be called before trackio is imported."""
    own = runs(directory, own_rank())
    own.mkdir(parents=True)
    os.environ.update(
        WANDB_MODE="offline",
        WANDB_SILENT="true",
        WANDB_DIR=str(own),
        TRACKIO_DIR=str(own / "trackio"),
        MLFLOW_ALLOW_FILE_STORE="true",
        MLFLOW_TRACKING_URI=(own / "mlruns").as_uri(),
        COMET_OFFLINE_DIRECTORY=str(own / "comet"),
        COMET_LOGGING_CONSOLE="CRITICAL",
    )
    quiet()
    return own


def open_runs(directory: str) -> None:
    """Opens a run of each tracker."""
    own = prepare(directory)
    import comet_ml  # pyright: ignore[reportMissingImports]
    import mlflow  # pyright: ignore[reportMissingImports]
    import trackio  # pyright: ignore[reportMissingImports]
    import wandb  # pyright: ignore[reportMissingImports]
    from torch.utils.tensorboard.writer import SummaryWriter

    wandb.init(project="countoff")
    mlflow.start_run()
    comet_ml.OfflineExperiment(
        project_name="countoff",
        log_code=False,
        log_graph=False,
        log_env_details=False,
        auto_output_logging=False,
    )
    trackio.init(project="countoff", auto_log_cpu=False, auto_log_gpu=False)
    writer = SummaryWriter(own / "tensorboard")
    writer.add_scalar("loss", 1.0)
    globals()["kept"] = writer


def let_wandb_hang() -> None:
    """Lets the run of W&B take an alert for ever. Prints when that begins, and when the exit handlers run."""
    import wandb  # pyright: ignore[reportMissingImports]

    def hang(**_: str) -> None:
        write_time("told")
        time.sleep(600)

    wandb.run.alert = hang
    atexit.register(write_time, "left")


def write_time(event: str) -> None:
    """Prints when something happens, in one write: other threads print too."""
    sys.stdout.write(f"\n{event} at {time.monotonic()}\n")


def plain(
    directory: str, batches: Sequence[int], opening: Sequence[int], options: Mapping[str, Any], special: str = ""
) -> None:
    """A plain loop.

    Args:
        directory: Where runs are kept.
        batches: Batches of each rank.
        opening: The ranks that open runs.
        options: Options of `attach`.
        special: ``late``: runs are opened after `attach`; ``blocked``: the fifth batch takes for ever;
            ``hanging``: W&B takes the alert for ever.
    """
    devices.join()
    model, optimizer = model_and_optimizer()
    loader, opens = share_loader(batches[own_rank()]), own_rank() in opening
    if opens and special != "late":
        open_runs(directory)
    if opens and special == "hanging":
        let_wandb_hang()
    attach(train=loader, optimizer=optimizer, **options)
    if opens and special == "late":
        open_runs(directory)
    for number, batch in enumerate(loader):
        if number == 4:
            Path("begun").touch()
            if special == "blocked":
                time.sleep(600)
        train_on(model, optimizer, batch)
        if number == 3 and own_rank() == 1:  # it runs out after the other one has begun its fifth batch
            until(Path("begun").exists, time.monotonic() + 20, 0.01)


def warned(directory: str) -> None:
    """Rank 1 trains with a learning rate of its own, which is a warning here; ends once that is told."""
    devices.join()
    model, optimizer = model_and_optimizer()
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + own_rank())
    loader = share_loader(10)
    open_runs(directory)
    attach(train=loader, optimizer=optimizer, tick_batches=2, levels={"LearningRateMismatch": "warn"})
    for batch in loader:
        train_on(model, optimizer, batch)
    if own_rank() == 0:
        until(lambda: bool(alerts()), time.monotonic() + 20, 0.01)
        for each in alerts():
            each.join()


def alerts() -> list[threading.Thread]:
    """The threads that tell an alert now."""
    return [each for each in threading.enumerate() if each.name == "countoff alert"]


def lightning(directory: str) -> None:
    """A fit of Lightning with three of its loggers; rank 1 has a batch less."""
    own = prepare(directory)
    from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger

    loggers = [
        WandbLogger(project="countoff", offline=True, save_dir=own),
        TensorBoardLogger(own / "tensorboard"),
        MLFlowLogger(tracking_uri=(own / "mlruns").as_uri()),
    ]
    job = LightningJob(train=[5, 4])
    trainer = job.make_trainer(logger=loggers)
    trainer.fit(Classifier(), job.train_loader())


def accelerate(directory: str) -> None:
    """A loop of Accelerate with four of its trackers; rank 1 has a batch less."""
    own = prepare(directory)
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    from countoff.accelerate import attach as attach_accelerate
    from integration_tests import accelerate_jobs

    accelerator = Accelerator(
        cpu=devices.framework_uses_cpu(),
        dataloader_config=DataLoaderConfiguration(dispatch_batches=False),
        log_with=["tensorboard", "mlflow", "trackio", "wandb"],
        project_dir=own / "tensorboard",
    )
    accelerator.init_trackers("countoff")
    loader = accelerate_jobs.stream_loader([5, 4][own_rank()], accelerator.num_processes)
    model, optimizer, train = accelerator.prepare(*accelerate_jobs.model_and_optimizer(), loader)
    attach_accelerate(accelerator, train=train)
    for batch in train:
        accelerate_jobs.forward_and_back(accelerator, model, optimizer, batch)


def transformers(directory: str) -> None:
    """A Trainer that reports to TensorBoard and W&B; rank 1 has a batch less."""
    own = prepare(directory)
    from integration_tests.trainer_jobs import Job

    args = {
        "report_to": ["tensorboard", "wandb"],
        "accelerator_config": {"dispatch_batches": False},
        "max_steps": 1000,
    }
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(own / "tensorboard")
    trainer, *_ = Job(batches=[5, 4], args=args).trainer()
    trainer.train()
