"""The table that `make test-gpu` ends with."""

import warnings
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from integration_tests import devices
from integration_tests.gpu_report import Machine, Result, markdown, this_machine

EIGHT = Machine(
    gpus=("NVIDIA H100", "NVIDIA H100", "NVIDIA A100"),
    driver="550.54.15",
    cuda="12.6",
    nccl="2.26.2",
    torch="2.7.0+cu126",
    countoff="0.1.0",
)
PROPERTIES: list[tuple[str, object]] = [("ranks", 4), ("backend", "nccl"), ("ranks", 4), ("backend", "nccl")]


def phase(
    when: Literal["setup", "call", "teardown"], outcome: Literal["passed", "failed", "skipped"], longrepr: Any = None
) -> pytest.TestReport:
    """What pytest reports of one phase of a test with four ranks."""
    return pytest.TestReport(
        "integration_tests/test_x.py::test_x", ("test_x.py", 1, "test_x"), {}, outcome, longrepr, when, (), 0.0, 0, 0,
        PROPERTIES,
    )  # fmt: skip


def crashed(message: str) -> Any:
    """How pytest describes an exception."""
    return SimpleNamespace(reprcrash=SimpleNamespace(message=message))


def test_the_table_has_the_machine_and_every_test() -> None:
    results = [
        Result("test_a.py::test_a[2ranks]", (2,), ("nccl",)),
        Result("test_b.py::test_b", (1, 2), ("gloo", "nccl"), "failed", "a | b"),
        Result("test_c.py::test_c", outcome="skipped", reason="needs 8 GPUs, found 3"),
    ]
    assert (
        markdown(EIGHT, results)
        == """\
| machine |  |
| --- | --- |
| GPUs | 2 × NVIDIA H100, 1 × NVIDIA A100 |
| driver | 550.54.15 |
| CUDA | 12.6 |
| NCCL | 2.26.2 |
| torch | 2.7.0+cu126 |
| countoff | 0.1.0 |

| test | ranks | backend | outcome | reason |
| --- | --- | --- | --- | --- |
| test_a.py::test_a[2ranks] | 2 | nccl | passed |  |
| test_b.py::test_b | 1, 2 | gloo, nccl | failed | a \\| b |
| test_c.py::test_c | - | - | skipped | needs 8 GPUs, found 3 |

1 passed, 1 skipped, 1 failed"""
    )


@pytest.mark.parametrize(
    ("phases", "outcome", "reason"),
    [
        ([phase("setup", "passed"), phase("call", "passed"), phase("teardown", "passed")], "passed", ""),
        (
            [phase("setup", "skipped", ("conftest.py", 41, "Skipped: needs 4 GPUs, found 0"))],
            "skipped",
            "needs 4 GPUs, found 0",
        ),
        (
            [
                phase("call", "failed", crashed("RanksFailed: exit codes [1, 0]\n--- rank 0")),
                phase("teardown", "passed"),
            ],
            "failed",
            "RanksFailed: exit codes [1, 0]",
        ),
        ([phase("call", "passed"), phase("teardown", "failed", "OSError: full")], "failed", "OSError: full"),
    ],
)
def test_a_test_is_as_bad_as_its_worst_phase(phases: list[pytest.TestReport], outcome: str, reason: str) -> None:
    result = Result("test_x.py::test_x")
    for each in phases:
        result.add(each)
    assert result == Result("test_x.py::test_x", (4,), ("nccl",), outcome, reason)


def test_a_machine_without_nvidias_tool_has_an_unknown_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is raised where there is no GPU, and no NCCL in torch."""
    monkeypatch.setenv("PATH", "")
    machine = this_machine()
    assert machine.driver == "unknown"
    assert machine.torch
    assert machine.countoff


@pytest.mark.parametrize("error", [RuntimeError("no driver\nat all"), UserWarning("no driver")])
def test_a_cuda_that_does_not_start_is_in_the_report(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(number: int) -> str:
        raise error

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", fail)
    assert this_machine().gpus == ("unknown (no driver)",) * 2


def test_a_library_that_only_warns_counts_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def count() -> int:
        warnings.warn("Can't initialize NVML", stacklevel=1)
        return 0

    monkeypatch.setattr(torch.cuda, "device_count", count)
    assert devices.count_gpus() == 0
