"""The words of a finding."""

import json
import sys

import pytest

from countoff.core.finding import Finding
from countoff.core.verdict import Verdict


def test_the_text_says_which_job_and_where_its_files_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments of the program may hold secrets, so they are left out."""
    monkeypatch.setattr(sys, "argv", ["/home/me/train.py", "--api-key", "hunter2"])
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # torchrun's default
    verdict = Verdict("LostRank", "rank 2 is gone.", why="It was killed.", remedy="Look.", world_size=8)
    lines = Finding(verdict, "error", files=("/runs/verdict.json", "/runs/trace")).message.splitlines()
    assert lines[:4] == ["LostRank: rank 2 is gone.", "countoff ends the job.", "why: It was killed.", "do:  Look."]
    assert lines[4].startswith("job: train.py, 8 ranks, Slurm job 4711, on ")
    assert lines[5] == "files: /runs/verdict.json, /runs/trace"


def test_each_alternative_of_a_remedy_has_a_line() -> None:
    lines = Finding(Verdict("LostRank", "rank 2 is gone.", remedy="Look.\nWait."), "error").message.splitlines()
    assert lines[2:4] == ["do:  Look.", "or:  Wait."]


def test_a_warning_says_that_the_job_is_not_ended() -> None:
    message = Finding(Verdict("Stalled", "no rank moves."), "warning").message
    assert message.splitlines()[1] == "This is a warning: the job is not ended."


def test_a_long_title_is_cut() -> None:
    title = Finding(Verdict("LostRank", "rank 2 " * 99), "error").title
    assert len(title) <= 120
    assert title.endswith("…")


def test_no_control_characters() -> None:
    """A sentence may quote an exception of any text."""
    assert "\x1b" not in Finding(Verdict("LostRank", "raised \x1b[31m", why="\x1b", remedy="\x1b"), "error").message


def test_it_is_written_as_json() -> None:
    """A handler of `logging`, or a webhook, sends it as it is."""
    found = json.loads(json.dumps(Finding(Verdict("LostRank", "rank 2 is gone.", (2,)), "error").to_dict()))
    assert (found["level"], found["kind"], found["ranks"], found["restart"]) == ("error", "LostRank", [2], "unknown")
