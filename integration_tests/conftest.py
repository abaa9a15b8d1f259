"""Fixtures that bind the harness to the test's own directory, and the `ranks` mark."""

import fcntl
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from integration_tests import devices, harness, hosts, torchrun

# Not for the search for doctests: one imports every framework, the others what may not be there.
collect_ignore = ["preload.py", "trl_jobs.py", "composer_parts.py", "titan_job.py", "faults"]


harness.ask_no_name_server()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes `ranks` once for each count in its `ranks` mark; with no mark, for 2."""
    if "ranks" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("ranks")
        counts = mark.args if mark else (2,)
        nightly = mark.kwargs.get("nightly", ()) if mark else ()
        slow = [pytest.param(count, marks=pytest.mark.nightly) for count in nightly]
        metafunc.parametrize("ranks", [*counts, *slow], ids=lambda count: f"{count}ranks")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked `gpu` where there is none. The report of one with `nccl` has its ranks and where they are."""
    mark = item.get_closest_marker("gpu")
    if mark is None:
        return
    if devices.count_gpus() == 0:
        pytest.skip("needs a GPU, found 0")
    if mark.kwargs.get("nccl"):
        ranks = item.callspec.params["ranks"]  # pyright: ignore[reportAttributeAccessIssue]
        item.user_properties += [("ranks", ranks), ("backend", devices.described("cuda", ranks))]


@pytest.fixture
def one_streaming_job() -> Iterator[None]:
    """Lets a test that reads a StreamingDataset run while no other one on this machine does, of any test session.

    mosaicml-streaming numbers the names of its shared memory by what it finds in /dev/shm when a job begins. Two jobs
    that begin or end at the same time take the same number, or their ranks find different ones.
    """
    with harness.STREAMING_TURN.open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        yield


@pytest.fixture
def run_ranks(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> Callable[..., list[harness.RankResult]]:
    """`harness.run_ranks`, below the test's own directory. The report of the test has its ranks and backend."""

    def run(
        function: Callable[..., Any], world_size: int, *args: Any, device: devices.Placement = "cpu", **how: Any
    ) -> list[harness.RankResult]:
        if device != "cpu":  # CUDA, NCCL and the first kernels take long to start
            how.setdefault("deadline_seconds", 180)
        record_property("ranks", world_size)
        record_property("backend", devices.described(device, world_size))
        return harness.run_ranks(function, world_size, *args, directory=tmp_path, device=device, **how)

    return run


@pytest.fixture
def _hosts() -> None:
    """Skips the test where hosts cannot be made."""
    if reason := hosts.why_impossible():
        pytest.skip(reason)


@pytest.fixture
def run_hosts(_hosts: None, tmp_path: Path) -> Callable[..., list[harness.RankResult]]:
    """`hosts.run_hosts`, below the test's own directory."""
    return functools.partial(hosts.run_hosts, directory=tmp_path)


@pytest.fixture
def run_torchrun_on_hosts(_hosts: None, tmp_path: Path) -> Callable[..., list[torchrun.CompletedRun]]:
    """`hosts.run_torchrun_on_hosts`, in the test's own directory."""
    return functools.partial(hosts.run_torchrun_on_hosts, directory=tmp_path)


@pytest.fixture
def run_torchrun(tmp_path: Path) -> Callable[..., torchrun.CompletedRun]:
    """`torchrun.run_torchrun`, in the test's own directory."""
    return functools.partial(torchrun.run_torchrun, directory=tmp_path)
