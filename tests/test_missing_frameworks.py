"""A façade whose framework is not installed raises one line with the command that installs it."""

import json
import subprocess
import sys

import pytest

from countoff._adapter.requirements import needs
from tests.paths import SOURCE_ROOTS

ROOTS = list(map(str, SOURCE_ROOTS))
LINES = {
    "accelerate": "countoff.accelerate needs Accelerate: pip install 'countoff[accelerate]'",
    "composer": "countoff.composer needs Composer: pip install 'countoff[composer]'",
    "fabric": "countoff.fabric needs Lightning Fabric: pip install 'countoff[lightning]'",
    "lightning": "countoff.lightning needs Lightning: pip install 'countoff[lightning]'",
    "lingua": "countoff.lingua needs PyTorch: pip install 'countoff[torch]'",
    "pytorch_lightning": "countoff.pytorch_lightning needs pytorch_lightning: pip install pytorch-lightning",
    "torch": "countoff.torch needs PyTorch: pip install 'countoff[torch]'",
    "torchtitan": "countoff.torchtitan needs TorchTitan: pip install torchtitan",
    "transformers": "countoff.transformers needs transformers: pip install 'countoff[transformers]'",
}
SCRIPT = """
import importlib, json, sys
sys.path[:0] = json.loads(sys.argv[1])
blocked, facades = json.loads(sys.argv[2]), json.loads(sys.argv[3])
sys.modules.update(dict.fromkeys(blocked))
lines = {}
for facade in facades:
    try:
        importlib.import_module(f"countoff.{facade}")
        lines[facade] = "imported"
    except ImportError as error:
        lines[facade] = str(error)
        if not error.__suppress_context__ or error.__cause__ is not None:
            lines[facade] += " (below another traceback)"
print(json.dumps(lines))
"""


def lines_without(blocked: list[str], facades: list[str]) -> dict[str, str]:
    """What each façade's import raises in an interpreter without these packages."""
    arguments = [json.dumps(each) for each in (ROOTS, blocked, facades)]
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, check=True, timeout=120
    )
    return json.loads(run.stdout.splitlines()[-1])


def test_every_facade_names_its_command_without_any_framework() -> None:
    frameworks = ["torch", "lightning", "pytorch_lightning", "composer", "accelerate", "transformers", "torchtitan"]
    assert lines_without(frameworks, sorted(LINES)) == LINES


def test_fabric_needs_its_framework_and_not_only_torch() -> None:
    """The adapter imports neither package of Fabric, because it serves both."""
    assert lines_without(["lightning", "lightning_fabric"], ["fabric"]) == {"fabric": LINES["fabric"]}


def test_every_facade_names_its_command_without_torch() -> None:
    # Without torch, a framework that imports it is as good as missing.
    facades = [name for name in LINES if name not in ("lightning", "pytorch_lightning")]
    assert lines_without(["torch"], facades) == {name: LINES[name] for name in facades}


def test_the_mesh_needs_no_torch_to_be_imported() -> None:
    assert lines_without(["torch"], ["mesh"]) == {"mesh": "imported"}


def test_the_cause_of_a_broken_installation_is_kept() -> None:
    with (
        pytest.raises(ImportError, match=r"countoff\.lightning needs Lightning: pip install lightning") as caught,
        needs("Lightning", facade="countoff.lightning", install="lightning"),
    ):
        raise ImportError("cannot import name 'Callback'")
    assert str(caught.value.__cause__) == "cannot import name 'Callback'"
