"""The benchmarks' entry point and their one shape of result."""

import pytest

from benchmarks.__main__ import PARTS, main
from benchmarks.results import Table, compared


def test_the_help_names_every_part(capsys):
    with pytest.raises(SystemExit) as ending:
        main(["--help"])
    assert ending.value.code == 0
    told = capsys.readouterr().out
    assert [name for name, (group, *_) in PARTS.items() if name not in told or group not in told] == []


def test_an_unknown_part_is_refused_with_the_names_of_the_known_ones(capsys):
    with pytest.raises(SystemExit) as ending:
        main(["--only", "speed"])
    assert ending.value.code == 2
    assert "rollcall" in capsys.readouterr().err


def test_a_comparison_has_medians_quartiles_and_ratios():
    table = compared("t", "ms", {"bare": [0.001, 0.002, 0.003], "with": [0.004]}, against="bare")
    bare, with_ = table.rows
    assert (bare["median ms"], bare["lower quartile"], bare["upper quartile"]) == (2.0, 1.5, 2.5)
    assert (with_["÷ bare"], with_["minus it, ms"]) == (2.0, 2.0)


def test_a_table_is_markdown_with_the_columns_of_all_rows():
    text = Table("Costs", [{"what": "a", "ms": 0.12345}, {"what": "b", "note": "none"}]).markdown()
    assert text.splitlines()[2:] == ["| what | ms | note |", "|---|---|---|", "| a | 0.123 |  |", "| b |  | none |"]
