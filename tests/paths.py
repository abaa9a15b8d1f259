"""Where the checkout is, and its files that tests read."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE_ROOTS = [ROOT / name for name in ("core", "plugins", "tools")]
"""The folders that hold the parts of the namespace `countoff`."""
SOURCE_PATH = os.pathsep.join(map(str, SOURCE_ROOTS))
"""The same for `PYTHONPATH`."""
DOCS = ROOT / "docs"
GOLDEN = ROOT / "tests" / "golden"
USER_PROGRAM = ROOT / "tests" / "user_program.py"
"""What a user may write, for type checkers."""
