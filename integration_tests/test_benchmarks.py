"""One small part of the benchmarks, run: eight simulated ranks on a real store."""

import json

from benchmarks import scale
from benchmarks.results import report


def test_the_benchmark_counts_every_operation_of_the_store(tmp_path, capsys):
    """Eight simulated ranks pass their marks on a real store, and each operation is in the table."""
    tables = report(scale.tables(quick=True, sizes=[8]), tmp_path / "found.json")
    costs = {row["what"]: row for row in tables[0].rows}
    assert costs["tick"]["operations"] == 8  # one compare-and-set of each rank
    assert costs["mark, one rank first"]["operations"] == 1 + 2 * 8  # the writer's, then each rank's wait and get
    assert len(json.loads((tmp_path / "found.json").read_text())["tables"]) == len(tables)
    assert "| tick | 8 |" in capsys.readouterr().out
