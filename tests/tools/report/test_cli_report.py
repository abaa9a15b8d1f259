"""`countoff report`: the page, the same facts as text, and errors of one line."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from countoff.cli.__main__ import main
from tests import example_traces
from tests.example_traces import HOSTILE, RankWriter
from tests.tools.report.test_trace_reader import GARBAGE, KINDS


def call(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """Runs `countoff report`; returns its exit code and what it printed."""
    code = 0
    try:
        main(["report", *map(str, arguments)])
    except SystemExit as error:
        code = int(str(error.code or 0))
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def test_it_writes_a_page_and_says_what_happened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example_traces.uneven(tmp_path / "trace")
    page = tmp_path / "page.html"
    code, out, err = call(capsys, tmp_path / "trace", "-o", page)
    assert (code, err) == (0, "")
    assert "UnevenBatches: rank 2 ran out of data" in out
    assert out.endswith(f"wrote {page}\n")
    text = page.read_text("utf-8")
    sentence = "Rank 2 ran out of data in train epoch 0 after 90 batches; all other ranks have more."
    facts = ["Ranks that behaved alike", "Who is slow", "Counts", "Hosts", "Learning rate", "Stacks"]
    assert re.findall(r"<h[12][^>]*>([^<]*)</h[12]>", text) == [sentence, "Ranks over time", *facts]
    assert not re.search(r"""(?:src|href)\s*=\s*["']?\w*:?//""", text)


def test_a_directory_whose_name_is_no_text_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    example_traces.uneven(directory)
    assert call(capsys, directory, "-o", tmp_path / "page.html")[0] == 0
    assert "Rank 2 ran out of data" in (tmp_path / "page.html").read_text("utf-8")


def test_the_page_is_named_after_the_trace_and_is_opened_on_demand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.chdir(tmp_path)
    example_traces.healthy(tmp_path / "runs" / "today.2", ranks=2)
    code, out, _ = call(capsys, "runs/today.2/", "--open")
    assert code == 0
    assert out == "finished: 3 epochs, 2 ranks, 3 min 30 s\nwrote today.2.html\n"
    assert opened == [(tmp_path / "today.2.html").as_uri()]
    monkeypatch.chdir(tmp_path / "runs" / "today.2")
    assert call(capsys, ".")[1].endswith("\nwrote today.2.html\n")


def test_an_unnamed_page_replaces_only_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    example_traces.healthy(tmp_path / "runs" / "today", ranks=2)
    example_traces.uneven(tmp_path / "other" / "today")
    page = tmp_path / "today.html"
    assert call(capsys, "runs/today")[0] == 0
    assert call(capsys, "other/today")[0] == 0
    assert "Rank 2 ran out of data" in page.read_text("utf-8")
    what_to_do = "name another file with -o, or replace it with --force"
    refused = (2, "", f"countoff: today.html is there and is no page of countoff report: {what_to_do}\n")
    page.write_text("<title>a page of the user's own</title>")
    assert call(capsys, "runs/today") == refused
    assert page.read_text() == "<title>a page of the user's own</title>"
    assert call(capsys, "runs/today", "--force")[0] == 0
    assert "finished: " in page.read_text("utf-8")
    page.unlink()
    os.mkfifo(page)
    assert call(capsys, "runs/today") == refused


def test_a_named_page_replaces_only_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where a file for Perfetto is asked for: nothing is written then."""
    example_traces.healthy(tmp_path / "trace", ranks=2)
    script, perfetto = tmp_path / "train.py", tmp_path / "job.pftrace"
    script.write_text("import torch")
    code, out, err = call(capsys, tmp_path / "trace", "-o", script, "--perfetto", perfetto)
    what_to_do = "name another file, or replace it with --force"
    assert (code, out, err) == (
        2,
        "",
        f"countoff: {script} is there and is no page of countoff report: {what_to_do}\n",
    )
    assert (script.read_text(), perfetto.exists()) == ("import torch", False)
    assert call(capsys, tmp_path / "trace", "-o", script, "--force")[0] == 0
    assert script.read_text("utf-8").startswith("<!DOCTYPE html>")
    assert call(capsys, tmp_path / "trace", "-o", script)[0] == 0  # a page by now
    assert call(capsys, tmp_path / "trace", "-o", "/dev/null")[0] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_no_field_of_any_line_becomes_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    for index, value in enumerate(GARBAGE):
        writer = RankWriter(tmp_path, index, len(GARBAGE), begin=None)
        for field in KINDS[kind]:
            for other, values in KINDS.items():
                writer.time += 0.1
                writer.line(other, **(values | ({field: value} if other == kind else {})))
        if kind in ("verdict", "warning"):
            for name in example_traces.verdict():
                writer.line(kind, verdict=example_traces.verdict() | {name: value})
        writer.save()
    page = tmp_path / "page.html"
    code, _, err = call(capsys, tmp_path, "-o", page)
    assert (code, err) == (0, "")
    assert not re.search(r"<(?:script|img|b)\s|<script|onerror=\"|<b>'", page.read_text("utf-8"))


def text_of(capsys: pytest.CaptureFixture[str], directory: Path) -> str:
    """What `countoff report --text` prints."""
    code, out, err = call(capsys, "--text", directory)
    assert (code, err) == (0, "")
    return out


def test_as_text_it_prints_the_facts_of_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    example_traces.uneven(tmp_path / "first")
    example_traces.healthy(tmp_path / "second", ranks=8, loader={2: 0.4})
    out = text_of(capsys, tmp_path / "first")
    for fact in [
        "UnevenBatches: rank 2 ran out of data",
        "the ranks' counts begin to differ in train epoch 0: rank 2: 90 batches; ranks 0, 1, 3–7: 91 batches",
        "named by the verdict; other counts",
        "≠ 90 batches, 90 steps",
        "Learning rate\nConstant: 0.1",
        "train.py:41 in step",
    ]:
        assert fact in out
    out = text_of(capsys, tmp_path / "second")
    assert {path.name for path in tmp_path.iterdir()} == {"first", "second"}
    assert out.startswith("finished: 3 epochs, 8 ranks, 3 min 30 s; rank 2 waited ")
    assert "rank 2" in out
    assert "24 s ≠" in out


def test_a_stall_has_its_warning_its_pauses_and_its_stacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example_traces.stalled(tmp_path)
    out = text_of(capsys, tmp_path)
    assert out.startswith(
        "stalled: no rank has made progress for 60 s; rank 3 is at data.py:9 in __getitem__, in its own code; until "
    )
    assert "countoff: Stalled: no rank has made progress for 60 s; rank 3 is in its code." in out
    assert "rank 3: code\n  data.py:9 in __getitem__" in out
    assert re.search(
        r"rank 3 +node0 +the others wait for it; last seen in code +train epoch 0, 120 batches; .* no end",
        out,
    )


def without_a_stack(directory: Path) -> None:
    writer = RankWriter(directory)
    writer.open("train epoch 0")
    writer.line("stacks", state="code", frames=[])
    writer.save()


def test_the_text_says_that_a_stack_could_not_be_had(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    without_a_stack(tmp_path)
    out = text_of(capsys, tmp_path)
    assert "rank 0: code\n  no stack: it could not be had\n" in out
    assert "could not be read" not in out


def test_the_page_says_that_a_stack_could_not_be_had(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    without_a_stack(tmp_path / "trace")
    assert call(capsys, tmp_path / "trace", "-o", tmp_path / "page.html")[0] == 0
    text = (tmp_path / "page.html").read_text("utf-8")
    assert "<h3>rank 0: code</h3><pre>no stack: it could not be had</pre>" in text
    assert "could not be read" not in text
    assert "<h2>Counts</h2>" not in text  # the rank was gone before its first tick


def test_the_text_tells_where_a_run_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example_traces.resumed(tmp_path)
    out = text_of(capsys, tmp_path)
    assert "run 1 of 2: 2 ranks, 1 min 30 s\n" in out
    assert "run 2 of 2: 2 ranks, 2 min\nIt resumes after optimizer step 120." in out
    assert "The schedule would have ended at step 360." in out
    assert "0.0639 at first, 0.0639 at most, 0 at last" in out


def test_the_text_tells_the_learning_rates_of_each_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example_traces.different_rates(tmp_path)
    out = text_of(capsys, tmp_path)
    assert re.search(r"The ranks' learning rates differ\nranks .*\nrank 3 +≠ 0.0375 +≠ 0.025 *\nranks 0–2 ", out)
    assert "rank 3: 0.1 at first, 0.1 at most, 0.025 at last\nranks 0–2: 0.1 at first" in out


def test_the_text_tells_what_has_ended_a_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = RankWriter(tmp_path)
    writer.line("end", how="failed", what="RuntimeError: out of memory")
    writer.save()
    out = text_of(capsys, tmp_path)
    assert out.startswith("no verdict: 0 epochs, 1 rank, 0 s; rank 0 failed: RuntimeError: out of memory\n")
    assert re.search(r"rank 0 +node0 .* failed: RuntimeError: out of memory", out)


@pytest.mark.parametrize(("how", "good"), [("finished", 1), ("failed", 0), (None, 0)])
def test_the_heading_is_green_only_where_all_ranks_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str | None, good: int
) -> None:
    writer = RankWriter(tmp_path)
    if how:
        writer.line("end", how=how)
    writer.save()
    assert call(capsys, tmp_path, "-o", tmp_path / "page.html")[0] == 0
    assert (tmp_path / "page.html").read_text("utf-8").count('<h1 class="good">') == good


def test_the_text_has_no_control_character_and_no_markup_of_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, text in enumerate([*HOSTILE, "[red]red[/red]", "[/]"]):
        writer = RankWriter(tmp_path, rank, 9, begin={"host": text})
        writer.open(text)
        writer.tick(5, 1, lr=[0.1])
        writer.line("verdict", verdict=example_traces.verdict(sentence=text, why=text))
        writer.line("stacks", state=text, frames=[text])
        writer.save()
    out = text_of(capsys, tmp_path)
    assert all(character.isprintable() or character == "\n" for character in out)
    assert "[red]red[/red]" in out


def facts(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    """What `countoff report --json` prints."""
    code, out, err = call(capsys, "--json", *arguments)
    assert (code, err) == (0, "")
    return json.loads(out)


def test_json_has_the_facts_of_the_page_and_no_page_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    example_traces.uneven(tmp_path / "trace")
    found = facts(capsys, "trace")
    assert [path.name for path in tmp_path.iterdir()] == ["trace"]
    assert found["headline"].startswith("UnevenBatches: rank 2 ran out of data in train epoch 0 after 90 batches")
    assert (found["healthy"], found["verdict"]["ranks"], found["stall"]) == (False, [2], None)
    (only,) = found["runs"]
    assert [rank["batches"] for rank in only["ranks"]] == [91, 91, 90, 91, 91, 91, 91, 91]
    assert only["ranks"][2]["unlike_most"] == ["named by the verdict", "other counts"]
    assert only["ranks"][0]["end"]["how"] == "verdict"
    (divergence,) = only["divergences"]
    assert (divergence["span"], divergence["counts"]) == ("train epoch 0", "batch")
    assert divergence["groups"][0] == {"count": 90, "ranks": [2]}
    short, others = only["spans"][0]["counts"]
    assert (short["ranks"], short["batches"], short["outlier"]) == ([2], 90, True)
    assert (others["batches"], others["outlier"]) == (91, False)
    assert only["stacks"][0] == {"ranks": [2], "state": "code", "frames": ["train.py:60 in main"]}


def test_json_names_the_slow_rank_and_the_stall(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example_traces.healthy(tmp_path / "slow", ranks=8, loader={2: 0.4}, hosts=2)
    found = facts(capsys, tmp_path / "slow")
    assert (found["healthy"], found["verdict"]) == (True, None)
    train, evaluation = found["runs"][0]["spans"][:2]
    assert (train["loader"]["rank"], train["loader"]["slow"]) == (2, [2])
    assert (evaluation["evaluation"], evaluation["loader"]) == (True, None)
    assert [each["host"] for each in found["runs"][0]["hosts"]] == ["node0", "node1"]
    totals = {"ranks": [0], "true": {"steps": 360.0}, "reported": {"steps": 360.0}, "measured": []}
    assert found["runs"][0]["totals"] == [totals]
    example_traces.stalled(tmp_path / "stalled")
    stalled = facts(capsys, tmp_path / "stalled")
    assert stalled["stall"]["sentence"] == "no rank has made progress for 60 s; rank 3 is in its code."
    assert [rank["end"] for rank in stalled["runs"][0]["ranks"]] == [None] * 4


def test_json_writes_a_page_on_demand_and_says_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example_traces.healthy(tmp_path / "trace", ranks=2)
    page = tmp_path / "page.html"
    assert facts(capsys, tmp_path / "trace", "-o", page)["headline"].startswith("finished: 3 epochs")
    assert page.read_text("utf-8").startswith("<!DOCTYPE html>")
    page.write_text("a text of the user's own")
    assert call(capsys, "--json", tmp_path / "trace", "-o", page)[:2] == (2, "")


def test_json_of_hostile_texts_is_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank, text in enumerate(HOSTILE):
        writer = RankWriter(tmp_path, rank, len(HOSTILE), begin={"host": text})
        writer.open(text)
        writer.line("verdict", verdict=example_traces.verdict(sentence=text, why=text))
        writer.line("stacks", state=text, frames=[text])
        writer.save()
    assert len(facts(capsys, tmp_path)["runs"][0]["ranks"]) == len(HOSTILE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: DIR (see countoff report --help)"),
        (["{nowhere}"], "{nowhere} cannot be read: No such file or directory"),
        (
            ["{empty}"],
            "there is no trace in {empty}: expected files like rank-00000.jsonl, which a job with "
            'trace_dir="…" writes',
        ),
        (["--text", "--json"], "argument --json: not allowed with argument --text (see countoff report --help)"),
        (["{empty}", "--opne"], "there is no argument --opne; did you mean --open?"),
        (["{empty}", "--perfeto"], "there is no argument --perfeto; did you mean --perfetto?"),
    ],
)  # fmt: skip
def test_a_bad_call_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    (tmp_path / "empty").mkdir()
    places = {"nowhere": tmp_path / "nowhere", "empty": tmp_path / "empty"}
    code, out, err = call(capsys, *(each.format(**places) for each in arguments))
    assert (code, out, err) == (2, "", f"countoff: {message.format(**places)}\n")


def test_a_page_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example_traces.healthy(tmp_path, ranks=1, epochs=1)
    code, _, err = call(capsys, tmp_path, "-o", tmp_path / "nowhere" / "page.html")
    assert (code, err) == (2, f"countoff: {tmp_path}/nowhere/page.html cannot be written: No such file or directory\n")


def test_its_help_shows_how_to_call_it(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "--help")
    assert code == 0
    for part in ["countoff report runs/today", "-o FILE", "--open", "Exit code", "pip install 'countoff[perfetto]'"]:
        assert part in out
