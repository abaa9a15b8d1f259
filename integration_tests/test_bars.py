"""The table of what progress bars show, as it stands in the documentation."""

import subprocess
import sys

import pytest

from tests.paths import ROOT


@pytest.mark.alone  # tqdm draws by its own clock
@pytest.mark.nightly
def test_bars_show_what_the_page_says() -> None:
    for framework in ("lightning", "composer", "transformers"):
        pytest.importorskip(framework)
    command = [sys.executable, "-m", "integration_tests.bars"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stderr
    # DeepSpeed logs to the same stream.
    table = "".join(line for line in ran.stdout.splitlines(keepends=True) if line.startswith("|"))
    assert table.count("\n") > 2
    assert table in (ROOT / "benchmarks" / "README.md").read_text()
