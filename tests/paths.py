"""Where the checkout is, and its files that tests read."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
GOLDEN = ROOT / "tests" / "golden"
