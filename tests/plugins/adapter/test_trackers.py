"""Which runs of trackers are found: with stand-ins, and without any tracker."""

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from countoff._adapter.trackers import mlflow_run, tensorboard_writer, trackio_run
from countoff._adapter.trackers.open_runs import open_runs
from countoff._adapter.trackers.words import values
from countoff.core.alerts.alert import Alert, NotTold
from countoff.core.verdict import Verdict

NAMES = ("wandb", "trackio.run", "mlflow.tracking.fluent", "comet_ml", "torch.utils.tensorboard.writer")
SHORT = Verdict("UnevenBatches", "rank 1 ran out of data.", why="It has less.", remedy="give it more.")


@pytest.fixture(autouse=True)
def _without_trackers(monkeypatch):
    for name in (*NAMES, "tensorboardX.writer"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.fixture
def imported(monkeypatch):
    """Puts a stand-in for a module where the program's imports are."""

    def put(name: str, **content: Any) -> Any:
        module = SimpleNamespace(**content)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return put


def test_where_nothing_is_imported_nothing_is_found_or_imported():
    """A program without trackers has no runs, and no tracker is imported to look."""
    before = set(sys.modules)
    assert open_runs() == []
    assert set(sys.modules) == before


def test_a_tracker_without_a_run_is_left_out(imported):
    """An imported tracker has no run by that alone; a disabled run of W&B records nothing, and an ended one neither."""
    wandb = imported("wandb", run=None)
    imported("trackio.run", Run=type("Run", (), {}))
    imported("mlflow.tracking.fluent", _active_run_stack=SimpleNamespace(get_all_thread_values=dict))
    comet = imported("comet_ml", get_running_experiment=lambda: None)
    imported("torch.utils.tensorboard.writer", SummaryWriter=type("SummaryWriter", (), {}))
    assert open_runs() == []
    wandb.run = SimpleNamespace(disabled=True)
    comet.get_running_experiment = lambda: SimpleNamespace(alive=False)
    assert open_runs() == []


def test_a_broken_tracker_hides_no_other_one(imported):
    """What one tracker raises, as of an unknown version, leaves the runs of the others."""
    imported("wandb", run=object())  # without `disabled`
    imported("mlflow.tracking.fluent")
    imported("comet_ml", get_running_experiment=lambda: SimpleNamespace(alive=True))
    assert [run.name for run in open_runs()] == ["Comet"]


def test_an_alert_of_wandb_has_a_short_title(imported):
    """W&B takes fewer than 64 characters, and three levels."""
    taken: list[dict[str, str]] = []
    imported("wandb", run=SimpleNamespace(disabled=False, alert=lambda **alert: taken.append(alert)))
    (run,) = open_runs()
    run.tell(Alert(SHORT, ends=True))
    run.tell(Alert(Verdict("UnevenBatches", "rank 1 ran out of data. " * 9), ends=False))
    assert taken[0]["title"] == "countoff: UnevenBatches: rank 1 ran out of data."
    assert [each["level"] for each in taken] == ["ERROR", "WARN"]
    assert taken[1]["title"] == "countoff: UnevenBatches: rank 1 ran out of data. ra…"


class Run:
    """Stands in for a run of Trackio: it has a thread as long as it is open."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.send)
        self.thread.start()

    def send(self) -> None:
        self.ended.wait()


def test_runs_of_trackio_are_found_by_their_threads(imported):
    """A run that another thread has opened is found until it is finished."""
    imported("trackio.run", Run=Run)
    run = Run()
    assert [each.run for each in trackio_run.find()] == [run]
    run.ended.set()
    run.thread.join()
    assert trackio_run.find() == []


def test_a_logger_of_mlflow_counts_once_it_has_a_run(imported):
    """A run that is known twice is told once; a logger that has begun none is left alone."""
    active = SimpleNamespace(info=SimpleNamespace(run_id="one"))
    stacks = SimpleNamespace(get_all_thread_values=lambda: {1: [active], 2: []})
    imported("mlflow.tracking.fluent", _active_run_stack=stacks)
    client = object()
    idle = SimpleNamespace(_mlflow_client=client, _initialized=False, _run_id=None)
    same = SimpleNamespace(_mlflow_client=client, _initialized=True, _run_id="one")
    other = SimpleNamespace(_mlflow_client=client, _initialized=True, _run_id="two")
    found = mlflow_run.find(lambda: [idle, same, other, SimpleNamespace()])
    assert [(each.run_id, each.client) for each in found] == [("one", client), ("two", client)]
    assert [(each.run_id, each.client) for each in mlflow_run.find()] == [("one", None)]


class Writer:
    """Stands in for a SummaryWriter."""

    def __init__(self) -> None:
        self.all_writers: Any = {"": self}
        self.written: list[Any] = []

    def add_text(self, tag: str, text: str) -> None:
        self.written.append((tag, text))

    def flush(self) -> None:
        self.written.append("flushed")


class Disguised:
    """Says that it is a SummaryWriter, to whom asks for its class."""

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise AssertionError("code of the program has run")


def test_open_writers_are_found_among_all_objects(imported):
    """Of a subclass too; not those that are closed or write to no file, and without running code of the program."""
    imported("tensorboardX.writer", SummaryWriter=Writer)
    disguised, writer, of_subclass = Disguised(), Writer(), type("Own", (Writer,), {})()
    closed, without_file = Writer(), Writer()
    closed.all_writers = None
    vars(without_file)["_write_to_disk"] = False
    assert {id(each) for each in tensorboard_writer.open_writers()} == {id(writer), id(of_subclass)}
    tensorboard_writer.SummaryWriters().tell(Alert(SHORT, ends=True))
    (tag, text), flushed = writer.written
    assert (tag, flushed) == ("countoff/verdict", "flushed")
    assert text.splitlines()[2] == "why: It has less.  "
    assert closed.written == without_file.written == []
    del disguised


def test_an_event_file_without_a_writer_is_not_told(imported):
    """Where something else writes event files, one line of the debug log says so."""
    imported("tensorboardX.writer", SummaryWriter=type("SummaryWriter", (), {}))
    with pytest.raises(NotTold, match="no SummaryWriter is open"):
        tensorboard_writer.SummaryWriters().tell(Alert(SHORT, ends=True))


def test_named_values_of_a_verdict_and_of_a_warning():
    """Those of warnings stand beside those of the verdict, and none is empty."""
    assert values(Alert(SHORT, ends=True)) == {
        "countoff.verdict": "UnevenBatches: rank 1 ran out of data.",
        "countoff.why": "It has less.",
        "countoff.remedy": "give it more.",
        "countoff.restart": "useless",
    }
    warning = values(Alert(Verdict("LostRank", "rank 2 is gone."), ends=False))
    assert list(warning) == ["countoff.warning.LostRank"]
    assert "This is a warning: the job goes on." in warning["countoff.warning.LostRank"]
