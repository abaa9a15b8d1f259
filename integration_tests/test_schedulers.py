"""The verdict's file on real ranks, and what schedulers do with it: torchrun, and the scripts of the page."""

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from integration_tests import loops
from integration_tests.harness import RankResult, Watch
from integration_tests.hosts import Network
from integration_tests.lightning_jobs import Job, fit
from integration_tests.output import verdict_lines
from integration_tests.test_faults import fail_at, long_job
from integration_tests.torchrun import Torchrun

ROOT = Path(__file__).parents[1]
WRAPPER = ROOT / "examples" / "restart_if_useful.py"
ELASTIC = """
import os, pathlib, sys, time
import torch.distributed as dist
from countoff.torch import Countoff
from integration_tests import loops
from integration_tests.digits import share_loader

def pace(number):
    if number == 12:
        pathlib.Path(os.environ["DIRECTORY"], f"training-{os.environ['GROUP_RANK']}").touch()
    time.sleep(0.01)

dist.init_process_group("gloo")
model, optimizer = loops.model_and_optimizer()
loader = share_loader(5000 if dist.get_world_size() == 2 else 5, before=pace)
countoff = Countoff(optimizer=optimizer)
trained = 0
for batch in countoff.train(loader):
    loops.train_on(model, optimizer, batch)
    trained += 1
print(f"trained {trained} batches on {dist.get_world_size()} rank", flush=True)
"""


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def remove(directory: Path, number: int) -> None:
    """Removes the verdict's directory, once training has begun."""
    if number == 12:
        shutil.rmtree(directory, ignore_errors=True)


def assert_ended(results: Sequence[RankResult], exit_codes: Sequence[int]) -> None:
    assert [result.exit_code for result in results] == exit_codes, "\n".join(map(str, results))


def test_the_file_of_an_uneven_job(run_ranks, tmp_path):
    """It takes the place of an earlier run's, has the table, and is alone in its directory."""
    path = tmp_path / "end" / "verdict.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"format": 1, "kind": "LostRank", "sentence": "of another run.", "restart": "unknown"}))
    env = {"COUNTOFF_VERDICT_FILE": str(path)}
    assert_ended(run_ranks(loops.uneven, 4, [5, 5, 5, 4], expect=None, env=env), [1] * 4)
    verdict = read(path)
    assert (verdict["kind"], verdict["restart"], verdict["ranks"][0]) == ("UnevenBatches", "useless", 3)
    assert verdict["sentence"].startswith("rank 3 ran out of data after 4 batches of train epoch 0")
    [(where, batches)] = [(row["where"], row["batches"]) for row in verdict["rows"] if row["rank"] == 3]
    assert (where, batches) == ("train epoch 0", 4) or where == "train epoch 1"  # it may have gone on until it knew
    assert (verdict["world_size"], verdict["hosts"], verdict["leave_out"]) == (4, {}, [])
    assert {"countoff", "python", "torch"} == verdict["versions"].keys()
    assert os.listdir(path.parent) == ["verdict.json"]
    assert abs(verdict["time"] - time.time()) < 600


@pytest.mark.parametrize("fault", ["killed", "raised"])
def test_a_lost_rank_says_whether_a_restart_may_help(run_ranks, tmp_path, fault):
    """A killed process may have had bad luck; an exception may come again."""

    def kill(watch: Watch) -> None:
        if fault == "killed":
            watch.wait_for(1, "training")
            watch.kill(1)

    job = long_job(2) if fault == "killed" else Job(train=[5, 5], before=partial(fail_at, 1, 9))
    env = {"COUNTOFF_VERDICT_FILE": str(tmp_path / "verdict.json")}
    results = run_ranks(fit, 2, job, expect=None, env=env, while_running=kill, deadline_seconds=40)
    assert_ended(results, [1, -signal.SIGKILL if fault == "killed" else 1])
    verdict = read(tmp_path / "verdict.json")
    assert (verdict["kind"], verdict["ranks"]) == ("LostRank", [1])
    assert verdict["restart"] == ("may_help" if fault == "killed" else "unknown")


def test_a_directory_that_is_gone_changes_no_exit(run_ranks, tmp_path):
    """A file that can no longer be written is one line, and the job ends with its verdict as it would have."""
    path = tmp_path / "gone" / "verdict.json"
    path.parent.mkdir()
    job = Job(train=[9, 8], before=partial(remove, path.parent))
    results = run_ranks(fit, 2, job, expect=None, env={"COUNTOFF_VERDICT_FILE": str(path)}, deadline_seconds=40)
    assert_ended(results, [1, 1])
    for result in results:
        assert "UnevenBatches" in "\n".join(verdict_lines(result)), result
    assert f"[rank 0] countoff: the verdict is not in '{path}': No such file or directory" in results[0].output
    assert not path.parent.exists()


def test_what_is_not_countoffs_is_refused_before_the_first_batch(run_ranks, tmp_path):
    """All ranks end at the start, with one line, and the file stays as it is."""
    path = tmp_path / "verdict.json"
    path.write_text("mine")
    results = run_ranks(loops.uneven, 2, [5, 5], expect=1, env={"COUNTOFF_VERDICT_FILE": str(path)})
    for result in results:
        assert f"SettingsError: verdict_file='{path}' exists, and countoff has not written it" in result.output
        assert result.seconds < 30, result
    assert path.read_text() == "mine"


def test_a_healthy_job_leaves_no_file(run_ranks, tmp_path):
    """It removes that of an earlier run, and prints nothing."""
    path = tmp_path / "verdict.json"
    path.write_text(json.dumps({"format": 1, "kind": "LostRank", "sentence": "of another run.", "restart": "unknown"}))
    results = run_ranks(loops.uneven, 2, [5, 5], env={"COUNTOFF_VERDICT_FILE": str(path)})
    assert [verdict_lines(result) for result in results] == [[], []]
    assert not path.exists()


@pytest.mark.torchrun
@pytest.mark.nightly
def test_torchrun_does_not_repeat_what_is_useless(run_torchrun, tmp_path):
    """With the wrapper, torchrun ends with restarts left, and says why; the job has run once."""
    arguments = [str(ROOT / "examples" / "torch_digits.py")]
    env = {"COUNTOFF_VERDICT_FILE": "verdict.json"}
    run = run_torchrun(WRAPPER, 2, *arguments, options=["--max-restarts=2"], env=env)
    assert run.exit_code == 1, run.output
    assert run.output.count("[rank 1] countoff: UnevenBatches: ") == 1, run.output
    assert run.output.count("not started again: UnevenBatches: rank 1 ran out of data") == 1, run.output
    assert read(tmp_path / "verdict.json")["run"]["torchelastic_restart_count"] == "0"


RAISES = "from integration_tests.loops import raises_in_the_loop\nraises_in_the_loop()"


@pytest.mark.nightly
@pytest.mark.torchrun
def test_torchrun_does_not_repeat_what_has_come_again(run_torchrun, tmp_path):
    """An exception may be bad luck. After the second one in the same batch, no third attempt is made."""
    train = tmp_path / "train.py"
    train.write_text(RAISES)
    env = {"COUNTOFF_VERDICT_FILE": "verdict.json", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    run = run_torchrun(WRAPPER, 2, str(train), options=["--max-restarts=3"], env=env)
    assert run.exit_code == 1, run.output
    verdict = read(tmp_path / "verdict.json")
    assert (verdict["kind"], verdict["restart"], verdict["ranks"]) == ("LostRank", "useless", [1]), run.output
    assert verdict["run"]["torchelastic_restart_count"] == "1", run.output
    said = f"] \\s+again: the same happened in the attempt before \\({verdict['again']}\\): a restart has not helped."
    assert len(re.findall(said, run.output)) == 1, run.output
    assert run.output.count("not started again: LostRank: ") == 1, run.output


@pytest.mark.torchrun
@pytest.mark.nightly
@pytest.mark.parametrize("files", ["shared", "of each host"])
def test_torchrun_of_no_host_repeats_what_is_useless(run_torchrun_on_hosts, tmp_path, files):
    """The torchruns of both hosts end after one attempt, whether the hosts share the file or each has its own."""
    name = "verdict.json" if files == "shared" else "verdict-{socket.gethostname()}.json"
    train, path = tmp_path / "train.py", tmp_path / name
    train.write_text("from integration_tests.loops import uneven\nuneven([5, 5, 5, 4])")
    script = (
        f"import os, socket, sys\nos.environ['COUNTOFF_VERDICT_FILE'] = f{str(path)!r}\n"
        f"os.execv(sys.executable, [sys.executable, {str(WRAPPER)!r}, {str(train)!r}])\n"
    )
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    runs = run_torchrun_on_hosts(
        script, hosts=2, per_host=2, options=["--max-restarts=2"], env=env, deadline_seconds=300
    )
    for run in runs:
        assert run.exit_code == 1, run.output
        verdicts = [line for line in run.output.splitlines() if "] countoff: UnevenBatches: rank 3 on node-1 " in line]
        assert 0 < len(verdicts) <= 2, run.output  # at most one of each rank
    assert any("not started again: UnevenBatches: " in run.output for run in runs), runs
    assert len(list(tmp_path.glob("verdict*.json"))) == (1 if files == "shared" else 2)
    assert list(tmp_path.glob(".verdict*")) == []


@pytest.mark.torchrun
@pytest.mark.nightly
def test_torchrun_goes_on_without_a_lost_host(run_torchrun_on_hosts, tmp_path):
    """After a host has lost its power, the other one starts the job again and finishes it alone."""

    path = tmp_path / "verdict.json"
    seen: list[dict[str, Any]] = []

    def wait_for(file: Path, torchrun: Torchrun) -> None:
        deadline = time.monotonic() + 120
        while not file.exists():
            assert time.monotonic() < deadline, torchrun.output()
            time.sleep(0.1)

    def power_off(network: Network, torchruns: Sequence[Torchrun]) -> None:
        wait_for(tmp_path / "training-1", torchruns[0])
        network.power_off(1)
        wait_for(path, torchruns[0])  # torchrun waits 10 s for another host before the next fit removes it
        seen.append(read(path))

    train = tmp_path / "train.py"
    train.write_text(ELASTIC)
    env = {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "COUNTOFF_VERDICT_FILE": str(path),
        "DIRECTORY": str(tmp_path),
        "COUNTOFF_STALL_SECONDS": "30",
    }
    options = ["--nnodes=1:2", "--max-restarts=2", "--rdzv-conf=last_call_timeout=10"]
    run, _ = run_torchrun_on_hosts(
        WRAPPER,
        str(train),
        hosts=2,
        per_host=1,
        options=options,
        env=env,
        deadline_seconds=400,
        while_running=power_off,
    )
    assert run.exit_code == 0, run.output
    assert "trained 5 batches on 1 rank" in run.output, run.output
    assert [(verdict["kind"], verdict["restart"], verdict["leave_out"]) for verdict in seen] == [
        ("LostRank", "may_help", ["node-1"])
    ]
    assert not path.exists()
