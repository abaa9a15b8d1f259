import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOTS = [ROOT / "core", ROOT / "plugins"]
HEAVY = {"torch", "numpy", "lightning", "pytorch_lightning", "composer", "accelerate", "transformers"}


def packages_imported_by(statement: str) -> set[str]:
    """The top-level packages that a fresh interpreter has loaded after the statement."""
    path = [str(root) for root in ROOTS]
    script = f"import sys; sys.path[:0] = {path}\n{statement}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    return set(run.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("root", ROOTS, ids=lambda root: root.name)
def test_no_source_root_has_an_init_that_would_close_the_namespace(root: Path) -> None:
    assert (root / "countoff").is_dir()
    assert not (root / "countoff" / "__init__.py").exists()


def test_no_module_lies_in_both_source_roots() -> None:
    core, plugins = ({path.name for path in (root / "countoff").iterdir()} for root in ROOTS)
    assert core & plugins <= {"__pycache__"}


def test_importing_the_core_imports_no_torch_and_no_framework() -> None:
    packages = packages_imported_by(
        "from countoff.core import *; import countoff.core.job, countoff.core.ranks, countoff.core.totals"
    )
    assert "countoff" in packages
    assert not packages & HEAVY


def test_the_command_line_starts_without_torch() -> None:
    start = "import contextlib, countoff.core.cli.__main__ as cli; sys.argv = ['countoff', '--help']"
    packages = packages_imported_by(f"{start}\nwith contextlib.suppress(SystemExit): cli.main()")
    assert not packages & HEAVY
