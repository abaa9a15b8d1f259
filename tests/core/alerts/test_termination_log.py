"""Kubernetes' termination log: a file in its place."""

from pathlib import Path

import pytest

from countoff.core.alerts.termination_log import TerminationLog
from countoff.core.finding import Finding
from countoff.core.verdict import Verdict

FINDING = Finding(Verdict("LostRank", "rank 2 is gone (pid 41).", why="It was killed.", remedy="Look."), "error")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    path = tmp_path / "termination-log"
    path.touch()
    return path


def test_headline_cause_and_remedy(path: Path) -> None:
    TerminationLog(str(path)).tell(FINDING)
    lines = path.read_text("utf-8").splitlines()
    assert lines[0] == "countoff: LostRank: rank 2 is gone (pid 41)."
    assert {"why: It was killed.", "do:  Look."} <= set(lines)


def test_it_exists_in_a_pod_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where the file is not, nor where the variable is not: a file of that name may be anybody's."""
    assert TerminationLog(str(path)).exists
    assert not TerminationLog(str(path.with_name("other"))).exists
    assert not TerminationLog(str(path.parent)).exists
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    assert not TerminationLog(str(path)).exists


def test_no_more_than_the_kubelet_reads(path: Path) -> None:
    TerminationLog(str(path)).tell(Finding(Verdict("LostRank", "é" * 5000), "error"))
    written = path.read_bytes()
    assert 4090 < len(written) <= 4096
    assert written.decode().endswith("é…")


def test_an_earlier_one_of_this_container_is_replaced(path: Path) -> None:
    """The launcher may have started the ranks again in the same container."""
    TerminationLog(str(path)).tell(Finding(Verdict("LostRank", "x" * 3000), "error"))
    TerminationLog(str(path)).tell(FINDING)
    assert path.read_text("utf-8").startswith("countoff: LostRank: rank 2 is gone (pid 41).\n")
    assert "xxx" not in path.read_text("utf-8")


def test_the_reason_of_another_program_stays(path: Path) -> None:
    path.write_text("out of quota")
    TerminationLog(str(path)).tell(FINDING)
    assert path.read_text() == "out of quota"


def test_what_an_earlier_attempt_has_written_is_removed(path: Path) -> None:
    """The attempt that begins may succeed. What was written since then, and another program's text, stay."""
    log = TerminationLog(str(path))
    log.tell(FINDING)
    log.clear(before=path.stat().st_mtime - 1)
    assert path.read_text("utf-8")
    log.clear(before=path.stat().st_mtime + 1)
    assert path.read_text("utf-8") == ""
    path.write_text("out of quota")
    log.clear(before=path.stat().st_mtime + 1)
    assert path.read_text("utf-8") == "out of quota"
