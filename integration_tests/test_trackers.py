"""Trackers are told of a verdict: the real ones, offline, on real ranks. What they have stored is read back.

They are in an environment of their own, `.venv-trackers`: `make test-trackers`.
"""

import json
import re
import sqlite3
import struct
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from integration_tests import tracker_jobs as jobs
from integration_tests.jobs import assert_named
from integration_tests.tracker_jobs import runs

for tracker in ("comet_ml", "mlflow", "tensorboard", "trackio", "wandb"):
    pytest.importorskip(tracker, reason="trackers are in an environment of their own: make test-trackers")

HEADLINE = "UnevenBatches: rank 1 ran out of data after 4 batches of train epoch 0"
ALL = {"wandb", "trackio", "mlflow", "comet", "tensorboard"}


@dataclass
class Told:
    """What the runs of one rank hold of countoff.

    Attributes:
        wandb: Level, title and text of each alert.
        trackio: The same.
        mlflow: The tags of the run.
        status: Its status; empty if there is no run.
        comet: What is logged as "other" of the experiment, and its tags.
        tensorboard: The texts, by tag.
        by: The trackers that hold anything.
    """

    wandb: list[tuple[str, str, str]] = field(default_factory=list)
    trackio: list[tuple[str, str, str]] = field(default_factory=list)
    mlflow: dict[str, str] = field(default_factory=dict)
    status: str = ""
    comet: dict[str, str] = field(default_factory=dict)
    tensorboard: dict[str, str] = field(default_factory=dict)

    @property
    def by(self) -> set[str]:
        return {name for name in ALL if getattr(self, name)}


def told(directory: Path, rank: int) -> Told:
    """Reads back what a rank's runs hold."""
    own = runs(directory, rank)
    tags, status = mlflow_run(own / "mlruns")
    return Told(
        wandb=[alert for path in own.rglob("*.wandb") for alert in wandb_alerts(path)],
        trackio=[alert for path in own.glob("trackio/*.db") for alert in trackio_alerts(path)],
        mlflow=tags,
        status=status,
        comet={name: text for path in own.glob("comet/*.zip") for name, text in comet_values(path)},
        tensorboard={tag: text for path in own.rglob("events.out.*") for tag, text in texts(path)},
    )


def wandb_alerts(path: Path) -> Iterator[tuple[str, str, str]]:
    """The alerts in a file of W&B: 7 bytes, then a log of LevelDB, whose records are messages of protobuf."""
    from wandb.proto import wandb_internal_pb2  # pyright: ignore[reportMissingImports]

    data, place, whole = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            if record.WhichOneof("record_type") == "alert":
                yield record.alert.level, record.alert.title, record.alert.text


def trackio_alerts(path: Path) -> list[tuple[str, str, str]]:
    with sqlite3.connect(path) as database:
        return database.execute("select level, title, text from alerts").fetchall()


def mlflow_run(store: Path) -> tuple[dict[str, str], str]:
    """The tags of countoff of the only run in a store, and its status; nothing if there is no run."""
    if not store.exists():
        return {}, ""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]

        client = MlflowClient(tracking_uri=store.as_uri())
        experiments = [each.experiment_id for each in client.search_experiments()]
        (run,) = client.search_runs(experiments)
    return {tag: text for tag, text in run.data.tags.items() if tag.startswith("countoff")}, run.info.status


def comet_values(path: Path) -> Iterator[tuple[str, str]]:
    with zipfile.ZipFile(path) as archive:
        if not archive.namelist():
            return
        for line in archive.read("messages.json").decode().splitlines():
            message = json.loads(line)
            if message["type"] == "log_other" and message["payload"]["key"].startswith("countoff"):
                yield message["payload"]["key"], message["payload"]["value"]
        for tag in json.loads(archive.read("experiment.json"))["tags"]:
            yield f"tag {tag}", ""


def texts(path: Path) -> Iterator[tuple[str, str]]:
    """The texts of countoff in an event file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing import event_accumulator  # pyright: ignore[reportMissingImports]

        events: Any = event_accumulator.EventAccumulator(str(path)).Reload()
    for tag in events.Tags()["tensors"]:
        if tag.startswith("countoff"):
            yield tag.removesuffix("/text_summary"), events.Tensors(tag)[0].tensor_proto.string_val[0].decode()


def assert_told(found: Told, *trackers: str) -> None:
    """These trackers, and no others, hold the verdict of a job whose rank 1 has a batch less."""
    assert found.by == set(trackers), found
    for level, title, text in found.wandb + found.trackio:
        assert level.upper() == "ERROR"
        assert title.startswith("countoff: UnevenBatches: rank 1 ran out of data")
        assert text.startswith(HEADLINE)
        assert "\ncountoff ends the job.\n" in text
        assert "\ndo: " in text
    assert {len(found.wandb), len(found.trackio)} <= {0, 1}
    if "wandb" in trackers:
        assert len(found.wandb[0][1]) < 64
    if "mlflow" in trackers:
        assert found.mlflow["countoff.verdict"].startswith(HEADLINE)
        assert found.mlflow["countoff.restart"] == "useless"
        assert found.mlflow["countoff.remedy"]
    if "comet" in trackers:
        assert found.comet["countoff.verdict"].startswith(HEADLINE)
        assert "tag countoff: UnevenBatches" in found.comet
    if "tensorboard" in trackers:
        assert list(found.tensorboard) == ["countoff/verdict"]
        assert found.tensorboard["countoff/verdict"].startswith(HEADLINE)


def test_the_run_of_the_first_rank_is_told(run_ranks, tmp_path):
    """Each tracker in which rank 0 has a run holds the verdict. Then MLflow's exit handler says that it finished."""
    results = run_ranks(jobs.plain, 2, str(tmp_path), [5, 4], [0], {}, expect=None)
    assert_named(results, "UnevenBatches", [1], "rank 1 ran out of data after 4 batches")
    found = told(tmp_path, 0)
    assert_told(found, *ALL)
    assert found.status == "FINISHED"
    assert not runs(tmp_path, 1).exists()


def test_the_run_of_the_last_rank_is_told(run_ranks, tmp_path):
    """Also where another rank than the first has the run, and has opened it after `attach`."""
    run_ranks(jobs.plain, 2, str(tmp_path), [5, 4], [1], {}, "late", expect=None)
    assert_told(told(tmp_path, 1), *ALL)


def test_one_run_of_many_is_told(run_ranks, tmp_path):
    """Where each rank has a run, there is one alert in the job."""
    run_ranks(jobs.plain, 2, str(tmp_path), [5, 4], [0, 1], {}, expect=None)
    assert_told(told(tmp_path, 0), *ALL)
    assert told(tmp_path, 1).by == set()


def test_a_healthy_job_tells_nothing(run_ranks, tmp_path):
    """The runs of a healthy job hold nothing of countoff."""
    run_ranks(jobs.plain, 2, str(tmp_path), [5, 5], [0], {})
    found = told(tmp_path, 0)
    assert found.by == set()
    assert found.status == "FINISHED"


def test_notify_off_tells_nothing(run_ranks, tmp_path):
    """With `notify=False` no tracker is told, and the verdict is printed all the same."""
    results = run_ranks(jobs.plain, 2, str(tmp_path), [5, 4], [0], {"notify": False}, expect=None)
    assert_named(results, "UnevenBatches", [1], "rank 1 ran out of data after 4 batches")
    assert told(tmp_path, 0).by == set()


def test_a_process_that_is_ended_hard_has_told(run_ranks, tmp_path):
    """A blocked rank exits with 87, without any exit handler, after its trackers have stored the verdict.

    Two need more than that while they are offline. Comet fills its archive in its exit handler. W&B writes its file
    every 15 s, and when the run ends.
    """
    options = {"grace_seconds": 1}
    results = run_ranks(jobs.plain, 2, str(tmp_path), [5, 4], [0], options, "blocked", expect=None)
    assert results[0].exit_code == 87
    found = told(tmp_path, 0)
    assert_told(found, *ALL - {"comet", "wandb"})
    assert found.status == "FAILED"


def test_a_tracker_that_hangs_delays_the_end_by_5_s(run_ranks, tmp_path):
    """The end waits 5 s for a tracker that never answers, and the others are told."""
    results = run_ranks(jobs.plain, 2, str(tmp_path), [5, 4], [0], {}, "hanging", expect=None)
    assert_told(told(tmp_path, 0), *ALL - {"wandb"})
    began, left = (re.search(rf"^{event} at (\S+)$", results[0].output, re.MULTILINE) for event in ("told", "left"))
    assert began is not None
    assert left is not None
    assert 4.9 < float(left[1]) - float(began[1]) < 5 + 5


def test_a_warning_is_told(run_ranks, tmp_path):
    """A warning is told as one, while the job goes on; the run ends as it would have. TensorBoard's files get none."""
    run_ranks(jobs.warned, 2, str(tmp_path))
    found = told(tmp_path, 0)
    assert found.by == ALL - {"tensorboard"}
    for level, title, text in found.wandb + found.trackio:
        assert level.upper() == "WARN"
        assert title.startswith("countoff: LearningRateMismatch: ")
        assert "\nThis is a warning: the job goes on.\n" in text
    assert set(found.mlflow) == {"countoff.warning.LearningRateMismatch"}
    assert set(found.comet) == {"countoff.warning.LearningRateMismatch", "tag countoff: LearningRateMismatch"}
    assert found.status == "FINISHED"
    assert told(tmp_path, 1).by == set()


def test_loggers_of_lightning_are_told(run_ranks, tmp_path):
    """WandbLogger, TensorBoardLogger and MLFlowLogger, which has no active run. It sets the status itself."""
    run_ranks(jobs.lightning, 2, str(tmp_path), expect=None)
    found = told(tmp_path, 0)
    assert_told(found, "wandb", "tensorboard", "mlflow")
    assert found.status == "FAILED"


def test_trackers_of_accelerate_are_told(run_ranks, tmp_path):
    """What `init_trackers` has opened."""
    run_ranks(jobs.accelerate, 2, str(tmp_path), expect=None)
    assert_told(told(tmp_path, 0), "wandb", "tensorboard", "mlflow", "trackio")


def test_trackers_of_the_trainer_are_told(run_ranks, tmp_path):
    """What `report_to` has opened."""
    run_ranks(jobs.transformers, 2, str(tmp_path), expect=None)
    assert_told(told(tmp_path, 0), "tensorboard", "wandb")
