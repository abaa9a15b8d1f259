"""The words of an alert."""

import sys

import pytest

from countoff.core.alerts.alert import Alert
from countoff.core.verdict import Verdict


def test_the_text_says_which_job_and_where_its_files_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments of the program may hold secrets, so they are left out."""
    monkeypatch.setattr(sys, "argv", ["/home/me/train.py", "--api-key", "hunter2"])
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # torchrun's default
    verdict = Verdict("LostRank", "rank 2 is gone.", why="It was killed.", remedy="Look.", world_size=8)
    lines = Alert(verdict, ends=True, files=("/runs/verdict.json", "/runs/trace")).text.splitlines()
    assert lines[:4] == ["LostRank: rank 2 is gone.", "countoff ends the job.", "why: It was killed.", "do:  Look."]
    assert lines[4].startswith("job: train.py, 8 ranks, Slurm job 4711, on ")
    assert lines[5] == "files: /runs/verdict.json, /runs/trace"


def test_a_warning_says_that_the_job_goes_on() -> None:
    assert "This is a warning: the job goes on." in Alert(Verdict("Stalled", "no rank moves."), ends=False).text


def test_a_long_title_is_cut() -> None:
    title = Alert(Verdict("LostRank", "rank 2 " * 99), ends=True).title
    assert len(title) <= 120
    assert title.endswith("…")


def test_no_control_characters() -> None:
    """A sentence may quote an exception of any text."""
    assert "\x1b" not in Alert(Verdict("LostRank", "raised \x1b[31m", why="\x1b", remedy="\x1b"), ends=True).text
