"""`countoff plan --curve`: the drawing is that of the schedule, with its marks, its ticks and its table."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

import pytest

from countoff.cli.__main__ import main
from countoff.plan.job import Job
from countoff.plan.readers import read_job
from countoff.plan.schedules import Schedule, WarmupDecay
from tests.paths import ROOT

FILES = {
    "llama3.toml": """
        [optimizer]
        lr = 3e-4
        [lr_scheduler]
        warmup_steps = 200
        decay_ratio = 0.8
        decay_type = "cosine"
        min_lr_factor = 0.1
        [training]
        local_batch_size = 1
        seq_len = 8192
        steps = 1000
        """,
    "short.toml": """
        [lr_scheduler]
        warmup_steps = 10
        total_steps = 50
        [training]
        steps = 100
        """,
    "lingua.yaml": """
        steps: 60_000
        grad_acc_steps: 1
        optim: {lr: 3.0e-3, warmup: 5000, scheduler: wsd, decay_fraction: 0.2}
        data: {batch_size: 4, seq_len: 4096}
        """,
    "mpt.yaml": """
        max_seq_len: 2048
        global_train_batch_size: 256
        max_duration: 4800ba
        optimizer: {name: decoupled_adamw, lr: 6.0e-4}
        scheduler: {name: cosine_with_warmup, t_warmup: 100ba, t_max: 3000ba, alpha_f: 0.1}
        """,
    "long.toml": """
        [lr_scheduler]
        warmup_steps = 2000
        [training]
        steps = 10_000_000
        """,
}
# The dots of a braille character, from the lowest bit on: column and row, from the top left.
DOTS = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (1, 3)]


class Drawn(NamedTuple):
    """One drawing, read back from its text.

    Attributes:
        title: Its first line.
        letters: The letters above the drawing, each with its column.
        rows: The rows of the drawing, from the top, right of the axis.
        labels: The labels of the vertical axis, each with its row from the bottom.
        ticks: The columns of the ticks below.
        axes: The labels below the ticks, by the name of their line.
        table: The rows of the table, by the letter: what ends there, and its numbers.
        header: The names of the table's columns.
    """

    title: str
    letters: dict[str, int]
    rows: list[str]
    labels: dict[int, str]
    ticks: list[int]
    axes: dict[str, list[str]]
    table: dict[str, list[str]]
    header: list[str]

    def dots(self) -> dict[int, set[int]]:
        """The heights of the dots in each column of dots; two by four dots are one character."""
        found: dict[int, set[int]] = {}
        for row, text in enumerate(reversed(self.rows)):
            for column, character in enumerate(text):
                bits = ord(character) - 0x2800 if 0x2800 <= ord(character) <= 0x28FF else 0
                for bit, (right, down) in enumerate(DOTS):
                    if bits >> bit & 1:
                        found.setdefault(2 * column + right, set()).add(4 * row + 3 - down)
        return found


def parsed(text: str) -> list[Drawn]:
    """Every drawing in what a command has printed."""
    return [_parsed(part.splitlines()) for part in re.split(r"^(?=learning rate(?:,| \()[^(])", text, flags=re.M)[1:]]


def _parsed(lines: list[str]) -> Drawn:
    rows = [line for line in lines if re.match(r" *[-\d.e]* [┤│|]", line)]
    axis = next(line for line in lines if re.match(r" +[└|][┬─+-]+$", line))
    left = re.search(r"[└|]", axis)
    assert left is not None
    begin = left.start() + 1
    rows = [line for line in rows if line != axis]
    below = lines[lines.index(axis) + 1 :]
    header = next(line for line in below if re.match(r" +step .*(learning rate|factor)$", line))
    legend = [re.split(r"  +", line) for line in below if re.match(r"[WDE]  end of", line)]
    return Drawn(
        title=lines[0],
        letters={letter.group(): letter.start() - begin for letter in re.finditer(r"[WDE]", lines[1])},
        rows=[line[begin:] for line in rows],
        labels={
            len(rows) - 1 - index: line[: begin - 1].split()[0]
            for index, line in enumerate(rows)
            if line[begin - 1] in "┤" and line[: begin - 1].split()
        },
        ticks=[index - begin for index, character in enumerate(axis) if character in "┬+" and index >= begin],
        axes={
            line.split()[0]: line.split()[1:] for line in below[: below.index(header)] if line[:begin].split() and line
        },
        table={letter: [text, *numbers] for letter, text, *numbers in legend},
        header=re.split(r"  +", header.strip()),
    )


@pytest.fixture
def at_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(dedent(text))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("NO_COLOR", "1")


pytestmark = pytest.mark.usefixtures("at_files")


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = 0
    try:
        main(["plan", *arguments])
    except SystemExit as end:
        code = int(str(end.code or 0))
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def drawn(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[Drawn]:
    code, out, err = call(capsys, *arguments, "--curve")
    assert (code, err) == (0, "")
    return parsed(out)


def schedule_of(file: str, steps: int) -> Schedule:
    schedule = read_job(file).schedule
    assert schedule is not None
    return schedule.planned_for(steps)


@pytest.mark.parametrize(
    ("file", "steps", "last"),
    [("llama3.toml", 1000, 1000), ("lingua.yaml", 60_000, 60_000), ("mpt.yaml", 4800, 4800), ("short.toml", 100, 100)],
)
def test_the_curve_is_the_schedule_at_every_column(
    capsys: pytest.CaptureFixture[str], file: str, steps: int, last: int
) -> None:
    """Each column of dots has the factors of its steps, to a dot in height and width, and no others."""
    [drawing] = drawn(capsys, file, "--world-size", "8")
    schedule = schedule_of(file, steps)
    factors = [schedule.factor(step) for step in range(last)]
    lowest, highest = min(0.0, *factors), max(factors)
    assert len(drawing.rows) == 13
    columns = 2 * max(map(len, drawing.rows))
    heights: dict[int, set[int]] = {}
    for quarter in range(4 * (last - 1) + 1):  # where columns are more than steps, a line connects two steps
        before, part = factors[quarter // 4], quarter % 4 / 4
        factor = before + part * ((factors[quarter // 4 + 1] if part else before) - before)
        column = round(quarter / 4 / (last - 1) * (columns - 1))
        heights.setdefault(column, set()).add(round((factor - lowest) / (highest - lowest) * 51))
    dots = drawing.dots()
    assert set(dots) == set(range(columns))
    for column, drawn_at in dots.items():
        near = set.union(*(heights.get(other, set()) for other in (column - 1, column, column + 1)))
        assert min(near) - 1 <= min(drawn_at) <= max(drawn_at) <= max(near) + 1
        drawn_near = set.union(*(dots.get(other, set()) for other in (column - 1, column, column + 1)))
        assert min(drawn_near) - 1 <= min(heights[column]) <= max(heights[column]) <= max(drawn_near) + 1


def test_a_drawing_in_a_pipe_is_80_columns_wide_and_has_no_colour(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = call(capsys, "llama3.toml", "--world-size", "64", "--curve")
    picture = out[out.index("\nlearning rate") :]
    assert max(map(len, picture.splitlines())) in (79, 80)
    assert "\x1b" not in out
    assert "\u2800" not in out
    assert not re.search(r" $", picture, re.M)


def test_the_parts_end_where_their_letters_and_their_lines_are(capsys: pytest.CaptureFixture[str]) -> None:
    [drawing] = drawn(capsys, "mpt.yaml", "--world-size", "64", "--dataset-size", "500000")
    columns = max(map(len, drawing.rows))
    assert drawing.title == "learning rate, on 64 ranks"
    assert drawing.letters == {
        letter: round((step - 1) / 4799 * (2 * columns - 1)) // 2
        for letter, step in {"W": 101, "D": 3000, "E": 4800}.items()
    }
    for column in drawing.letters.values():
        below = [row[column] for row in drawing.rows if len(row) > column]
        assert all(character == "┊" or 0x2800 < ord(character) <= 0x28FF for character in below)
        assert below.count("┊") >= 5
    assert sum(row.count("┊") for row in drawing.rows) <= 3 * 13
    # 500,000 samples are filled up to 500,032: 1,954 steps, the last one of 64 samples.
    assert drawing.header == ["step", "epoch", "tokens", "learning rate"]
    assert drawing.table == {
        "W": ["end of the warm-up", "101", "0.05169", f"{101 * 256 * 2048:,}", "6e-4"],
        "D": ["end of the decay", "3,000", "1.535", f"{(3000 * 256 - 192) * 2048:,}", "6e-5"],
        "E": ["end of the run", "4,800", "2.456", f"{(4800 * 256 - 2 * 192) * 2048:,}", "6e-5"],
    }


def test_the_axes_have_round_steps_with_their_epochs_and_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    [drawing] = drawn(capsys, "mpt.yaml", "--world-size", "64", "--dataset-size", "500000")
    columns = max(map(len, drawing.rows))
    assert drawing.axes["step"] == ["1", "1,000", "2,000", "3,000", "4,000"]
    assert drawing.axes["epoch"] == ["0.000512", "0.512", "1.02", "1.54", "2.05"]
    assert drawing.axes["tokens"] == ["524K", "524M", "1.05B", "1.57B", "2.1B"]
    steps = [int(label.replace(",", "")) for label in drawing.axes["step"]]
    assert drawing.ticks == [round((step - 1) / 4799 * (2 * columns - 1)) // 2 for step in steps]
    assert drawing.labels == {0: "0", 3: "1.5e-4", 6: "3e-4", 9: "4.5e-4", 12: "6e-4"}


def test_a_rate_below_zero_is_drawn_below_zero(capsys: pytest.CaptureFixture[str]) -> None:
    [drawing] = drawn(capsys, "short.toml", "--world-size", "4")
    assert drawing.title == "learning rate, as a factor of the configured one, on 4 ranks"
    assert drawing.table["E"] == ["end of the run", "100", "6,553,600", "-1.225"]
    [zero] = [row for row, label in drawing.labels.items() if label == "0"]
    dots = drawing.dots()
    last = max(dots)
    begin = round(49 / 99 * last)
    assert abs(min(dots[begin]) - 4 * zero) <= 4
    assert max(dots[last]) <= 1
    assert drawing.labels[0] == "-1.225"


def test_a_schedule_that_is_longer_than_the_run_is_drawn_to_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    [drawing] = drawn(capsys, "mpt.yaml", "--world-size", "64", "--steps", "2000")
    assert [(letter, row[:2]) for letter, row in drawing.table.items()] == [
        ("W", ["end of the warm-up", "101"]),
        ("E", ["end of the run", "2,000"]),
        ("D", ["end of the decay", "3,000"]),
    ]
    assert drawing.letters["D"] == max(map(len, drawing.rows)) - 1
    assert float(drawing.table["E"][-1]) == pytest.approx(6e-4 * schedule_of("mpt.yaml", 2000).factor(1999), rel=1e-3)


def test_world_sizes_with_the_same_steps_share_a_drawing(capsys: pytest.CaptureFixture[str]) -> None:
    """What they do not have in common is a column for each in the table, and no axis."""
    [drawing] = drawn(capsys, "llama3.toml", "--world-size", "8,64")
    assert drawing.title == "learning rate, on 8 and 64 ranks"
    assert list(drawing.axes) == ["step"]
    assert drawing.header == ["step", "tokens, 8 ranks", "tokens, 64 ranks", "learning rate"]
    assert drawing.table["E"] == ["end of the decay and of the run", "1,000", "65,536,000", "524,288,000", "3e-5"]


def test_world_sizes_with_different_steps_have_a_drawing_each(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--dataset-size", "100000", "--epochs", "1"]
    drawings = drawn(capsys, "llama3.toml", "--world-size", "8,64,128", *flags)
    assert [(one.title, one.table["E"][1], one.axes["epoch"][-1]) for one in drawings] == [
        ("learning rate, on 8 ranks", "12,500", "0.96"),
        ("learning rate, on 64 ranks", "1,563", "0.96"),
        ("learning rate, on 128 ranks", "782", "0.767"),
    ]


def test_a_ramp_changes_the_tokens_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--global-batch-size", "32", "--world-size", "4", "--ramp", "8,8,100"]
    [drawing] = drawn(capsys, "llama3.toml", *flags)
    assert drawing.table["E"][2] == f"{(120 + 991 * 32) * 8192:,}"


def test_ten_million_steps_are_drawn_from_few_points(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from countoff.plan.schedules import TorchTitanSchedule

    computed: list[int] = []
    factor = TorchTitanSchedule.factor
    monkeypatch.setattr(TorchTitanSchedule, "factor", lambda self, step: computed.append(step) or factor(self, step))
    [drawing] = drawn(capsys, "long.toml", "--world-size", "4")
    assert len(computed) < 1200
    assert drawing.table["W"][1] == "2,000"
    assert max(drawing.dots()[0]) == 51
    assert drawing.axes["step"] == ["1", "2,000,000", "4,000,000", "6,000,000", "8,000,000"]


@pytest.mark.parametrize("columns", [1, 20, 40, 300])
def test_any_width_can_be_drawn(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    [drawing] = drawn(capsys, "mpt.yaml", "--world-size", "64")
    assert max(map(len, drawing.rows)) == max(columns - 6 - 3, 20)
    assert len(set(drawing.letters)) == 3
    assert drawing.axes["step"][0] == "1"


def test_where_steps_have_no_rate_the_curve_has_a_gap(capsys: pytest.CaptureFixture[str]) -> None:
    Path("gap.toml").write_text(dedent(FILES["short.toml"]).replace("total_steps", "decay_ratio = 0.0\ntotal_steps"))
    [drawing] = drawn(capsys, "gap.toml", "--world-size", "4")
    last = 2 * drawing.letters["E"] + 1
    assert max(drawing.dots()) == round(50 / 99 * last)
    assert drawing.table["E"][-1] == "–"
    curve = json.loads(call(capsys, "gap.toml", "--world-size", "4", "--curve", "--json")[1])["curve"]
    assert curve["points"][-1] == {"step": 100, "factor": None, "rate": None}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["ds.json"], "cannot draw ds.json on 4 ranks: it has no learning-rate schedule that countoff knows"),
        (["--batch-size", "2"], "draws the learning-rate schedule of a configuration: give CONFIG"),
        (
            ["llama3.toml", "--dataset-size", "3", "--epochs", "1", "--drop-last", "--batch-size", "9"],
            "cannot draw llama3.toml on 4 ranks: the run has 0 steps",
        ),
    ],
)
@pytest.mark.parametrize("json_too", [False, True])
def test_a_plan_without_a_curve_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str, json_too: bool
) -> None:
    Path("ds.json").write_text('{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {}}')
    flags = ["--world-size", "4", "--curve", *(["--json"] if json_too else [])]
    assert call(capsys, *arguments, *flags) == (2, "", f"countoff: --curve {reason}\n")


def test_a_schedule_as_long_as_an_unknown_run_asks_for_its_steps(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The schedule of a run in epochs has no length until the dataset has one."""
    unknown = Job(epochs=3, batch_size=2, schedule=WarmupDecay("linear", 0, 0, horizon_part=1.0))
    monkeypatch.setattr("countoff.plan.command.read_job", lambda *_, **__: unknown)
    flags = ["epochs.yaml", "--world-size", "4", "--curve"]
    assert call(capsys, *flags) == (
        2,
        "",
        "countoff: --curve cannot draw epochs.yaml on 4 ranks: how many steps it has is not known: give --steps N, or "
        "--dataset-size N\n",
    )
    monkeypatch.setattr("countoff.plan.command.read_job", lambda *_, **__: dataclasses.replace(unknown, epochs=None))
    assert call(capsys, *flags)[2].endswith("is not known: give --steps N\n")
    monkeypatch.setattr("countoff.plan.command.read_job", lambda *_, **__: unknown)
    [drawing] = parsed(call(capsys, *flags, "--dataset-size", "80")[1])
    assert drawing.table["E"][:3] == ["end of the decay and of the run", "30", "3"]


def test_json_has_the_points_and_the_marks(capsys: pytest.CaptureFixture[str]) -> None:
    shown = json.loads(call(capsys, "mpt.yaml", "--world-size", "64", "--curve", "--json")[1])
    curve = shown.pop("curve")
    assert shown == json.loads(call(capsys, "mpt.yaml", "--world-size", "64", "--json")[1])
    schedule = schedule_of("mpt.yaml", 4800)
    for point in curve["points"]:
        factor = schedule.factor(point["step"] - 1)
        assert (point["factor"], point["rate"]) == (factor, 6e-4 * factor)
    assert curve["marks"][0] == {
        "end_of": "warm-up",
        "step": 101,
        "factor": 1.0,
        "rate": 6e-4,
        "epoch": None,
        "tokens": 101 * 256 * 2048,
    }
    assert [(mark["end_of"], mark["step"]) for mark in curve["marks"]] == [
        ("warm-up", 101), ("decay", 3000), ("run", 4800)
    ]  # fmt: skip
    factors = json.loads(call(capsys, "short.toml", "--world-size", "4,8", "--curve", "--json")[1])
    assert [one["curve"]["points"][0] for one in factors] == [{"step": 1, "factor": 0.1, "rate": None}] * 2


def test_without_what_draws_it_is_one_line_and_the_plan_needs_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotille", None)
    arguments = ["llama3.toml", "--world-size", "4"]
    assert call(capsys, *arguments, "--curve") == (2, "", "countoff: --curve needs plotille: pip install plotille\n")
    assert call(capsys, *arguments)[0] == 0
    assert call(capsys, *arguments, "--curve", "--json")[0] == 0


def environment(**more: str) -> dict[str, str]:
    path = f"{ROOT / 'core'}{os.pathsep}{ROOT / 'plugins'}"
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "FORCE_COLOR")}
    return {**kept, "PYTHONPATH": path, **more}


COMMAND = [sys.executable, "-m", "countoff", "plan", "llama3.toml", "--world-size", "4", "--curve"]


def test_an_output_that_knows_only_ascii_gets_ascii() -> None:
    done = subprocess.run(
        COMMAND, capture_output=True, text=True, timeout=60, check=True, env=environment(PYTHONIOENCODING="ascii")
    )
    picture = done.stdout[done.stdout.index("\nlearning rate") :]
    assert done.stderr == ""
    assert picture.isascii()
    assert "?" not in picture
    [line] = [line for line in picture.splitlines() if line.startswith("   3e-4 |")]
    assert re.fullmatch(r"   3e-4 \| +\*+ +:", line)
    assert re.search(r"^ +\|\+-+\+", picture, re.M)


@pytest.mark.parametrize(("more", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_a_terminal_gives_its_width_and_gets_colour_unless_told_not_to(more: dict[str, str], coloured: bool) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 110, 0, 0))
    with subprocess.Popen(
        COMMAND, stdin=theirs, stdout=theirs, stderr=theirs, env=environment(TERM="xterm-256color", **more)
    ) as process:
        os.close(theirs)
        text = b""
        try:
            while piece := os.read(ours, 65536):
                text += piece
        except OSError:  # its end is closed
            pass
        os.close(ours)
        assert process.wait(timeout=60) == 0
    printed = text.decode().replace("\r\n", "\n")
    assert ("\x1b[36m" in printed) == coloured
    [drawing] = parsed(re.sub(r"\x1b\[[\d;]*m", "", printed))
    assert max(map(len, drawing.rows)) == 110 - 7 - 3


def test_a_plan_without_a_curve_does_not_import_what_draws() -> None:
    script = (
        "import sys; from countoff.cli.__main__ import main\n"
        "try: main()\n"
        "except SystemExit: print('plotille' in sys.modules)"
    )
    for more, imported in (([], False), (["--curve"], True)):
        arguments = [sys.executable, "-c", script, *COMMAND[3:-1], *more]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=True, env=environment())
        assert done.stdout.splitlines()[-1] == str(imported)
