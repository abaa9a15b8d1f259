"""What docs/compatibility.md promises: files of 0.1 are read by the readers of today, those of a newer format are not.

tests/data_0_1/README.md says what wrote these files.
"""

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from countoff.cli.__main__ import main
from countoff.core import FitPlan, Guard, Settings, Verdict, formats
from countoff.core.ending import verdict_file
from countoff.core.protocol.resume_record import ResumeRecord
from countoff.report.reader import read
from tests.paths import ROOT

DATA = ROOT / "tests" / "data_0_1"
COMMANDS: dict[str, list[str]] = json.loads((DATA / "commands.json").read_text())
VARIES = {"age_seconds", "environment", "hooked", "job", "time", "version"}
"""Values of an output that follow from the machine or the time."""
MESSAGES = {"headline", "identity", "meaning", "remedy", "sentence", "state", "text", "unlike_most", "why"}
"""Values that are texts for people, which may have other words in every version."""


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    """What a command prints, and its errors."""
    with contextlib.suppress(SystemExit):
        main(list(arguments))
    out, err = capsys.readouterr()
    return out, err


def check_same(old: Any, new: Any, place: str = "") -> None:
    """Checks that a program which reads the old value can read the new one."""
    if isinstance(old, dict):
        for key, value in old.items():
            assert key in new, f"{place} has no {key}"
            if key not in VARIES:
                check_same(value, new[key], f"{place}.{key}")
    elif isinstance(old, list):
        assert len(new) >= len(old), place
        for number, (one, other) in enumerate(zip(old, new, strict=False)):
            check_same(one, other, f"{place}[{number}]")
    elif isinstance(old, str) and place.rpartition(".")[2].partition("[")[0] in MESSAGES:
        assert isinstance(new, str), place
    elif old is not None:  # null says that it was not known
        assert new == old, place


def test_the_page_has_the_numbers_of_the_formats() -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text()
    numbers = [int(number) for number in re.findall(r"^\| .* \| .* \| (\d+) \|$", page, re.MULTILINE)]
    assert numbers == [formats.TRACE, formats.VERDICT_FILE, formats.RESUME_RECORD, formats.JSON_OUTPUT]


@pytest.mark.parametrize("name", COMMANDS)
def test_an_output_has_the_keys_and_the_numbers_that_it_had(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(DATA)
    out, err = printed(capsys, *COMMANDS[name])
    assert err == ""
    check_same(json.loads((DATA / "outputs" / f"{name}.json").read_text()), json.loads(out))


def test_a_trace_is_read_whole() -> None:
    """Each kind of line that it has is read: none is skipped, and what it says is there."""
    trace = read([str(DATA / "trace")])
    assert (trace.skipped, trace.problems) == (0, [])
    [run] = trace.runs
    first, other = run.fits.values()
    assert (run.world_size, run.missing, run.steps_before) == (2, [], 9)
    assert (first.host, first.framework) == ("node-0", "PyTorch")
    assert [(span.name, span.batches, span.steps) for span in first.spans] == [
        ("train epoch 1", 6, 15),
        ("validation", 2, 15),
        ("train epoch 2", 5, 19),
    ]
    assert [(span.name, span.batches, span.why) for span in other.spans if not span.is_evaluation] == [
        ("train epoch 1", 6, "exhausted"),
        ("train epoch 2", 4, "exhausted"),
    ]
    assert [pause.where for pause in (*first.pauses, *other.pauses)] == ["collective", "code"]
    assert [len(span.ticks) for span in first.spans] == [2, 1, 0]
    assert (first.spans[0].points[0].learning_rates, first.learning_rates) == ((0.1,), (0.094,))
    assert first.rolls[0].last == (0,)
    assert (first.true_totals["global_batch_size"], first.reported_totals["batches_per_epoch"]) == (4, 6)
    assert [each.kind for each in run.warnings] == ["ResumeMismatch", "ResumeMismatch"]
    assert run.verdict is not None
    assert (run.verdict.kind, run.verdict.ranks, len(run.verdict.rows)) == ("UnevenBatches", (1, 0), 2)
    assert [fit.ending.how for fit in run.fits.values() if fit.ending] == ["verdict", "verdict"]
    assert [stack.state for fit in run.fits.values() for stack in fit.stacks] == ["code", "code"]


def test_an_incident_is_read() -> None:
    [incident] = read([str(DATA / "trace")]).incidents
    assert incident.verdict is not None
    assert (incident.verdict.kind, incident.verdict.standing) == ("UnevenBatches", "ran out first")
    assert [(ranks, state, frames[0]) for ranks, state, frames in incident.stacks] == [
        ((0,), "code", "write.py:65 in train"),
        ((1,), "code", "write.py:58 in train"),
    ]


def test_a_verdict_file_is_compared_with_the_verdict_of_the_next_attempt(tmp_path: Path) -> None:
    assert after_an_attempt(tmp_path, lambda _: None) == "batch 2 of validation, ranks 1, 0"


def test_a_verdict_file_of_a_newer_format_is_replaced_and_not_compared(tmp_path: Path) -> None:
    assert after_an_attempt(tmp_path, lambda written: written.update(format=2)) == ""
    assert json.loads((tmp_path / "verdict.json").read_text())["format"] == formats.VERDICT_FILE


def after_an_attempt(directory: Path, change: Callable[[dict[str, Any]], None]) -> str:
    """Where the attempt before has ended with the same verdict, by its file of 0.1; writes that of the next attempt."""
    path = directory / "verdict.json"
    written = json.loads((DATA / "verdict.json").read_text())
    change(written)
    path.write_text(json.dumps(written))
    before = time.time() - 86_400
    os.utime(path, (before, before))
    verdict_file.clear(Settings(verdict_file=str(path)), 0)
    names = ("kind", "sentence", "rows", "world_size", "standing")
    verdict = Verdict(ranks=tuple(written["ranks"]), **{name: written[name] for name in names})
    again = verdict_file.seen_again(str(path), verdict)
    assert verdict_file.write(str(path), verdict, 0) == ""
    return again


def resumed(record: Any) -> None:
    """A loop that resumes from a record in epoch 1, and begins that again with the first of its batches."""
    from tests.data_0_1.write import loader_of

    guard = Guard(Settings(), rank=0, world_size=1, learning_rates=lambda: [0.091])
    guard.fit_start(FitPlan(batch_size=2, dp_degree=2, dp_rank=0))
    guard.resumes.restore(record)
    guard.train_start(1)
    for batch in loader_of(0):
        guard.batch()
        if guard.data.fingerprints_due:
            guard.data.read(batch)
        guard.step()
    guard.train_end("exhausted")


def test_a_resume_record_is_compared_with_the_batches_of_today(capsys: pytest.CaptureFixture[str]) -> None:
    """Its fingerprints are those of the same batches today; else a loop that begins its epoch again is not seen."""
    record = json.loads((DATA / "resume.json").read_text())
    check_same(record, ResumeRecord.from_json(record).to_json())
    resumed(record)
    assert "train epoch 1 begins again with its first batch" in capsys.readouterr().err


def test_a_resume_record_of_a_newer_version_is_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    record = json.loads((DATA / "resume.json").read_text())
    resumed({**record, "of a later 0.x": 1, "version": 2})
    assert "(ValueError: its version is 2, and this countoff reads version 1)" in capsys.readouterr().err


def test_keys_and_kinds_of_a_later_version_are_passed_over(tmp_path: Path) -> None:
    """They come without a new number."""
    trace = newer_trace(tmp_path, lambda line: line.update({"of a later 0.x": [1]}))
    with (trace / "rank-00000.jsonl").open("a") as file:
        file.write(json.dumps({"k": "of a later 0.x", "t": time.time()}) + "\n")
    found = read([str(trace)])
    assert (found.skipped, found.problems, found.verdict) == (0, [], read([str(DATA / "trace")]).verdict)


def newer_trace(directory: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """The trace of 0.1 with each line `begin` as a later version might write it."""
    shutil.copytree(DATA / "trace", directory / "trace")
    for path in (directory / "trace").glob("*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            if line["k"] == "begin":
                change(line)
        path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    return directory / "trace"


@pytest.mark.parametrize("command", ["report", "top"])
def test_a_trace_of_a_newer_format_is_refused_in_one_line(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = newer_trace(tmp_path, lambda line: line.update(v=2))
    (trace / "incident.json").unlink()
    out, err = printed(capsys, command, str(trace), "--json")
    assert out == ""
    assert "it is in format 2 of a newer countoff, and this one reads format 1: install the newer one" in err
    assert err.count("\n") == 1


def test_runs_of_a_newer_format_leave_those_of_this_one(tmp_path: Path) -> None:
    """A job was started again with a newer version: what the older one has written is still shown."""
    trace = newer_trace(tmp_path, lambda line: line.update(v=2))
    for path in (DATA / "trace").glob("*.jsonl"):
        later = (trace / path.name).read_text()
        (trace / path.name).write_text(path.read_text() + later)
    found = read([str(trace)])
    assert (found.skipped, len(found.runs), len(found.problems)) == (0, 1, 1)
    assert found.problems[0].startswith(f"{trace}: it is in format 2")


def test_an_incident_of_a_newer_format_is_a_problem(tmp_path: Path) -> None:
    trace = newer_trace(tmp_path, lambda _: None)
    path = trace / "incident.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))
    found = read([str(trace)])
    assert (found.incidents, len(found.problems)) == ([], 1)
    assert found.problems[0].startswith(f"{path}: it is in format 2")
