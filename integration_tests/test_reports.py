"""Public reports of data that is read wrongly: of the wrong programs countoff says so, of the right ones nothing."""

import pytest

from integration_tests.reports.__main__ import main
from integration_tests.reports.cases import REPORTS
from integration_tests.reports.runner import Outcome, Said


def test_what_is_not_as_it_should_be():
    """So is another kind than that of the case, nothing, a word too early, and a word about the right program."""
    report = next(report for report in REPORTS if report.kind == "ResumeMismatch" and report.stages == 2)
    due, other = (Said(kind, "…", "3 batches of train epoch 1") for kind in (report.kind, "SameOrder"))
    assert Outcome(report, ((), (due,)), ((), ())).faults == []
    assert len(Outcome(report, ((), (other, due)), ((), ())).faults) == 1
    assert len(Outcome(report, ((), ()), ((), ())).faults) == 1
    assert len(Outcome(report, ((due,), (due,)), ((), ())).faults) == 1
    assert len(Outcome(report, ((), (due,)), ((), (due,))).faults) == 1


@pytest.mark.nightly
def test_all_reports(capsys):
    code = main([])
    assert code == 0, capsys.readouterr().out
