"""A pytest plugin that writes the outcome of each test as a line of JSON, for each rank in a file of its own.

With ``COUNTOFF=1`` it also turns countoff on in the suite that ``SUITE_NAME`` names.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from integration_tests.suites import counted


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Hides transformers from Composer's conftest, which would download tokenizers for it before the first test."""
    if os.environ["SUITE_NAME"] == "composer":
        modules: dict[str, Any] = sys.modules
        modules["transformers"] = None


def pytest_configure() -> None:
    """Turns countoff on where Lightning's entry point does not."""
    if os.environ.get("COUNTOFF") == "1":
        turn_on = {"composer": counted.count_in_composer, "accelerate": counted.count_in_accelerate}
        turn_on.get(os.environ["SUITE_NAME"], lambda: None)()


def pytest_runtest_teardown() -> None:
    """Ends the fit that a test has left."""
    counted.close_all()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Writes what became of a test: of its call, or of a phase around it that did not pass."""
    if report.when != "call" and report.passed:
        return
    path = Path(f"{os.environ['SUITE_REPORT']}.{os.environ.get('RANK', '0')}")
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"test": report.nodeid, "outcome": report.outcome, **_details(report)}) + "\n")


def _details(report: pytest.TestReport) -> dict[str, Any]:
    crash = getattr(report.longrepr, "reprcrash", None)
    message = str(crash.message).partition("\n")[0] if crash is not None and not report.skipped else ""
    words = [line for line in (report.capstderr + report.capstdout).splitlines() if "] countoff: " in line]
    return {"message": message[:200], "words": words[:3]}
