"""Programs that do not mention countoff, under real launchers, with countoff in front of them."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from integration_tests.harness import NAME_LOOKUPS, python_path

PROGRAM = str(Path(__file__).with_name("unchanged.py"))
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
COMPOSER = [sys.executable, "-m", "composer.cli.launcher", "-n", "2"]
RUN, MODULE = [sys.executable, "-m", "countoff", "run"], ["-m", "countoff.run"]
SHORT = "rank 1 ran out of data after 5 batches of train epoch 0; rank 0 "
WEIGHS = re.compile(r"rank \d weighs [0-9a-f]{16}")
NOT_COMPARED = "countoff: nothing was compared"
NOT_COUNTED = "countoff: the ranks' batches were not compared: "


def start(command: Sequence[str], directory: Path, **more: str) -> tuple[int, str]:
    """Runs a command; returns its exit code and all that it and its ranks have printed."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("COUNTOFF")}
    fixed = {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", **NAME_LOOKUPS}
    done = subprocess.run(
        command,
        cwd=directory,
        env={**inherited, **fixed, **more},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=180,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    "command",
    [
        pytest.param([*TORCHRUN, *MODULE, PROGRAM], marks=pytest.mark.nightly),
        [*RUN, "--report", "--trace-dir", "trace", "--", *TORCHRUN, PROGRAM],
    ],
    ids=["in front of the script", "in front of the launcher"],
)
def test_a_short_rank_is_named_in_a_program_as_it_is(command, tmp_path):
    """The first fit is healthy and silent; in the next one a rank is short."""
    code, output = start([*command, "lightning", str(tmp_path)], tmp_path)
    assert code != 0, output
    healthy, _, uneven = output.partition("rank 0 weighs ")
    assert "countoff: " not in healthy, output
    for rank in (0, 1):
        assert f"[rank {rank}] countoff: UnevenBatches: {SHORT}" in uneven, output
    assert NOT_COMPARED not in output
    if "--report" in command:
        assert SHORT.partition(";")[0] in (tmp_path / "trace.html").read_text()


@pytest.mark.parametrize(
    ("framework", "command", "ended"),
    [
        pytest.param(
            "transformers",
            [*RUN, "--uneven-train", "stop", "--", *TORCHRUN, PROGRAM],
            "stopped",
            marks=pytest.mark.nightly,
        ),
        pytest.param("composer", [*COMPOSER, *MODULE, PROGRAM], "ended", marks=pytest.mark.nightly),
    ],
)
def test_uneven_ranks_finish_in_a_program_as_it_is(framework, command, ended, tmp_path):
    """Where a setting says so, as in Composer always, all ranks end with the shortest one, and the loss is said."""
    pytest.importorskip(framework)
    code, output = start([*command, framework, str(tmp_path)], tmp_path)
    assert code == 0, output
    healthy, _, uneven = output.partition("rank 0 weighs ")
    assert "countoff: " not in healthy, output
    assert f"[rank 0] countoff: Truncated: train epoch 0 {ended} on every rank after 5 batches" in uneven, output
    assert len({line.split()[-1] for line in WEIGHS.findall(output)}) == 2, output


@pytest.mark.nightly  # tests/tools/run/test_last_line.py has the words at each merge
@pytest.mark.parametrize(
    ("framework", "made"),
    [
        ("torch", "countoff = Countoff(model=model, optimizer=optimizer) after init_process_group"),
        ("accelerate", "countoff = Countoff(accelerator) after prepare()"),
        ("fabric", "countoff = Countoff(fabric, optimizer=optimizer) after fabric.setup()"),
    ],
)
def test_a_loop_of_its_own_hears_at_its_end_what_to_add(framework, made, tmp_path):
    """It trains to the same bits as without, and rank 0 says it once."""
    if framework != "torch":
        pytest.importorskip("lightning" if framework == "fabric" else framework)
    without = start([*TORCHRUN, PROGRAM, framework, str(tmp_path)], tmp_path)
    code, output = start([*RUN, "--", *TORCHRUN, PROGRAM, framework, str(tmp_path)], tmp_path)
    assert (code, without[0]) == (0, 0), output
    assert sorted(WEIGHS.findall(output)) == sorted(WEIGHS.findall(without[1]))
    (line,) = [line for line in output.splitlines() if "countoff" in line]
    assert line.startswith(NOT_COUNTED), output
    assert f"make {made}, and iterate countoff.train(loader): from countoff.{framework} import Countoff." in line


@pytest.mark.nightly
def test_a_program_of_one_process_hears_nothing(tmp_path):
    """It has nothing to compare."""
    torchrun = [*TORCHRUN[:-1], "--nproc-per-node=1"]
    code, output = start([*RUN, "--", *torchrun, PROGRAM, "torch", str(tmp_path)], tmp_path)
    assert code == 0, output
    assert "countoff" not in output


SPAWNS = """
import sys, torch.distributed, torch.multiprocessing

def train(rank):
    torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=rank, world_size=2)
    torch.distributed.barrier()
    if "serves" not in sys.argv:
        torch.optim.SGD(torch.nn.Linear(1, 1).parameters()).step()
    if "raise" in sys.argv:
        raise ValueError("torn shard")
    torch.distributed.destroy_process_group()

if __name__ == "__main__":
    torch.multiprocessing.spawn(train, nprocs=2)
"""


@pytest.mark.parametrize(
    ("way", "code", "times"),
    [
        ("trains", 0, 1),
        *(pytest.param(*each, marks=pytest.mark.nightly) for each in (("raise", 1, 0), ("serves", 0, 0))),
    ],
)
def test_ranks_of_multiprocessing_hear_it_too(way, code, times, tmp_path):
    """Such a rank skips what is registered for its end. One that fails, or trains nothing, hears nothing."""
    (tmp_path / "train.py").write_text(SPAWNS)
    ended, output = start([sys.executable, *MODULE, "train.py", str(tmp_path), way], tmp_path)
    assert (ended, output.count(NOT_COUNTED)) == (code, times), output
