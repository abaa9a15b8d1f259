"""A pytest plugin that ends a run with a table for an issue report: the machine, and what became of each test.

python -m pytest integration_tests -m gpu -p integration_tests.gpu_report
"""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import version
from torch.cuda import nccl

from countoff.core import __version__
from integration_tests import devices

_DRIVER: Final = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
_OUTCOMES: Final = ("passed", "skipped", "failed")  # from the best to the worst: a test's is the worst of its phases


@dataclass(frozen=True)
class Machine:
    """Where the tests ran.

    Attributes:
        gpus: The name of each GPU.
        driver: Version of NVIDIA's driver, "unknown" if nobody knows it.
        cuda: Version of CUDA that torch was built with, "none" for a build without it.
        nccl: Version of NCCL, "none" for a build without it.
        torch: Version of torch.
        countoff: Version of countoff.
    """

    gpus: tuple[str, ...]
    driver: str
    cuda: str
    nccl: str
    torch: str
    countoff: str


@dataclass
class Result:
    """What became of one test.

    Attributes:
        test: Its file, name and parameters.
        ranks: Numbers of ranks of its jobs.
        backends: The backends of its jobs.
        outcome: ``passed``, ``failed`` or ``skipped``.
        reason: Why it failed or was skipped, in one line.
    """

    test: str
    ranks: tuple[int, ...] = ()
    backends: tuple[str, ...] = ()
    outcome: str = "passed"
    reason: str = ""

    def add(self, report: pytest.TestReport) -> None:
        """Adds what one phase of the test (set-up, call or tear-down) has reported."""
        self.ranks = tuple(sorted({int(str(value)) for name, value in report.user_properties if name == "ranks"}))
        self.backends = tuple(sorted({str(value) for name, value in report.user_properties if name == "backend"}))
        if _OUTCOMES.index(report.outcome) > _OUTCOMES.index(self.outcome):
            self.outcome, self.reason = report.outcome, _reason(report.longrepr)


class Reporter:
    """Collects the results of a run, and prints them at its end."""

    def __init__(self) -> None:
        self._results: dict[str, Result] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Takes note of one phase of one test."""
        name = report.nodeid.removeprefix("integration_tests/")
        self._results.setdefault(report.nodeid, Result(name)).add(report)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Prints the table."""
        terminalreporter.section("for an issue report")
        terminalreporter.write_line(markdown(this_machine(), list(self._results.values())))


def pytest_configure(config: pytest.Config) -> None:
    """Adds the reporter to a run of pytest."""
    config.pluginmanager.register(Reporter())


def markdown(machine: Machine, results: Sequence[Result]) -> str:
    """The machine, each test, and how many passed, failed and were skipped."""
    gpus = ", ".join(f"{count} × {name}" for name, count in Counter(machine.gpus).items())
    facts = [
        ("GPUs", gpus or "none"),
        ("driver", machine.driver),
        ("CUDA", machine.cuda),
        ("NCCL", machine.nccl),
        ("torch", machine.torch),
        ("countoff", machine.countoff),
    ]
    tests = [
        (each.test, _listed(each.ranks), _listed(each.backends), each.outcome, each.reason.replace("|", "\\|"))
        for each in results
    ]
    counts = Counter(each.outcome for each in results)
    return "\n\n".join(
        [
            _table(("machine", ""), facts),
            _table(("test", "ranks", "backend", "outcome", "reason"), tests),
            ", ".join(f"{counts[outcome]} {outcome}" for outcome in _OUTCOMES),
        ]
    )


def this_machine() -> Machine:
    """What torch and NVIDIA's own tool say of this machine."""
    with_nccl = dist.is_nccl_available() and version.cuda is not None
    return Machine(
        gpus=tuple(_name(number) for number in range(devices.count_gpus())),
        driver=_driver(),
        cuda=version.cuda or "none",
        nccl=".".join(map(str, nccl.version())) if with_nccl else "none",
        torch=torch.__version__,
        countoff=str(__version__),
    )


def _name(number: int) -> str:
    try:
        return torch.cuda.get_device_name(number)
    except (
        RuntimeError,
        AssertionError,
        Warning,
    ) as error:  # CUDA does not start: the report must say so, and not end there
        return f"unknown ({str(error).strip().partition(chr(10))[0]})"


def _driver() -> str:
    try:
        printed = subprocess.run(_DRIVER, capture_output=True, text=True, timeout=30, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return printed[0] if printed else "unknown"  # the same for each GPU


def _reason(longrepr: Any) -> str:
    """The reason in one line: of a skip, as the test gives it; of a failure, the first line of the exception."""
    if isinstance(longrepr, tuple):
        return str(longrepr[-1]).removeprefix("Skipped: ")
    crash = getattr(longrepr, "reprcrash", None)
    return str(longrepr if crash is None else crash.message).strip().partition("\n")[0]


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values)) or "-"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows])
