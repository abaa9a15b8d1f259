"""What commands print on a terminal, wrapped at words and with colours, and in a pipe, for grep."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from countoff.cli.__main__ import main
from countoff.report.reader import read
from countoff.report.text import print_facts
from tests import example_traces
from tests.terminal import Terminal

CONFIG = """
[training]
batch_size = 2
seq_len = 2048
steps = 100
[lr_scheduler]
warmup_steps = 10
total_steps = 50
"""
NO_STEP = ("--dataset-size", "4", "--drop-last", "--epochs", "1")
STYLE = re.compile(r"\x1b\[[0-9;]*m")
COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-9][0-9;]*m")
Printed = Callable[..., str]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "bad.toml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Printed:
    """Runs a command; returns what it prints on a terminal of so many columns, or in a pipe."""

    def run(*arguments: str | Path, columns: int | None = None, colours: bool = True) -> str:
        for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
            monkeypatch.delenv(name, raising=False)
        if columns is not None:
            monkeypatch.setenv("COLUMNS", str(columns))
            monkeypatch.setenv("FORCE_COLOR", "1")  # what is captured counts as a terminal
            monkeypatch.setenv("TERM", "xterm")
        if not colours:
            monkeypatch.setenv("NO_COLOR", "1")
        if arguments[0] == "report":
            print_facts(read(list(map(str, arguments[1:]))))
        else:
            with pytest.raises(SystemExit) as ended:
                main(list(map(str, arguments)))
            assert ended.value.code in (0, 1)
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("command", ["plan", "check"])
def test_what_is_wrong_is_in_colour_on_a_terminal_only(printed: Printed, config: Path, command: str) -> None:
    asked = (command, config, "--world-size", "4", *NO_STEP)
    assert "\x1b" not in printed(*asked)
    assert not COLOUR.search(printed(*asked, columns=80, colours=False))
    assert re.search(r"\x1b\[1;31msilent *\x1b\[0m length: ", printed(*asked, columns=80))


def test_a_trace_as_text_is_in_colour_on_a_terminal_only(printed: Printed, tmp_path: Path) -> None:
    example_traces.uneven(tmp_path)
    assert "\x1b" not in printed("report", tmp_path)
    assert not COLOUR.search(printed("report", tmp_path, columns=80, colours=False))
    shown = printed("report", tmp_path, columns=80)
    assert shown.startswith("\x1b[1;31mcountoff: UnevenBatches: rank 2 ran out of data")
    assert "\x1b[33m≠ 90 batches, 90 steps\x1b[0m" in shown


@pytest.mark.parametrize("more", [("plan",), ("check",), ("explain", "UnevenBatches"), ("top",)])
@pytest.mark.parametrize(
    ("variables", "coloured"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False)],
)
def test_no_color_is_heeded(
    config: Path, tmp_path: Path, more: tuple[str, ...], variables: dict[str, str], coloured: bool
) -> None:
    """On a real terminal, by each command that has colours; it wins over FORCE_COLOR."""
    command, *options = more
    given = {"explain": [], "top": [str(tmp_path / "trace")]}.get(command, [str(config), "--world-size", "4", *NO_STEP])
    example_traces.uneven(tmp_path / "trace")
    with Terminal([command, *options, *given], environment=variables) as terminal:
        terminal.wait()
        assert bool(COLOUR.search(terminal.output)) == coloured, terminal.output


def test_rows_for_a_program_have_no_colours(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """JSON has none, also with FORCE_COLOR."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    example_traces.uneven(tmp_path)
    with pytest.raises(SystemExit):
        main(["top", "--json", str(tmp_path)])
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize("columns", [40, 60, 80])
@pytest.mark.parametrize("command", ["plan", "check"])
def test_lines_are_wrapped_at_words(printed: Printed, config: Path, command: str, columns: int) -> None:
    shown = STYLE.sub("", printed(command, config, "--world-size", "4", columns=columns))
    assert max(map(len, shown.splitlines())) <= columns
    words = printed(command, config, "--world-size", "4").split()
    assert sorted(shown.split()) == sorted(words)


@pytest.mark.parametrize("columns", [40, 80])
def test_a_trace_as_text_keeps_to_the_terminal(printed: Printed, tmp_path: Path, columns: int) -> None:
    """No cell is cut off."""
    example_traces.uneven(tmp_path)
    shown = STYLE.sub("", printed("report", tmp_path, columns=columns))
    assert max(map(len, shown.splitlines())) <= columns
    assert "…" not in shown


def test_a_plan_of_many_world_sizes_has_whole_numbers(printed: Printed, config: Path) -> None:
    """On a narrow terminal the columns stand below one another; in a pipe, all are side by side."""
    sizes = [2**power for power in range(2, 11)]
    asked = ("plan", config, "--world-size", ",".join(map(str, sizes)))
    tokens = [f"{4096 * size:,}" for size in sizes]
    rows = [line for line in printed(*asked).splitlines() if line.startswith("tokens per step")]
    assert [row.split()[3:] for row in rows] == [tokens]
    lines = STYLE.sub("", printed(*asked, columns=80)).splitlines()
    rows = [line.split()[3:] for line in lines if line.startswith("tokens per step ")]
    assert [cell for row in rows for cell in row] == tokens
    assert len(rows) == 3
    assert max(map(len, lines)) <= 80


def test_a_line_in_a_pipe_stays_whole(printed: Printed, config: Path, tmp_path: Path) -> None:
    directory = tmp_path / "trace"
    example_traces.uneven(directory)
    asked = ("plan", config, "--world-size=4", *NO_STEP)
    assert "silent  length: the run has 0 steps: --dataset-size 4 gives one of 4 data ranks 1 sample" in printed(*asked)
    shown = printed("report", directory)
    assert "rank 2: 90 batches; ranks 0, 1, 3–7: 91 batches\n" in shown
    assert "waited longest for its loader  it waited" in shown
