"""Which Trainers get the callback: each in a process of its own, because the hooks stay on the framework's class."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from countoff._run.environment import with_hooks
from tests.paths import SOURCE_PATH

TRANSFORMERS = """
import sys, tempfile
import torch, transformers
from transformers import Trainer, TrainingArguments

def trainer(**more):
    arguments = TrainingArguments(tempfile.mkdtemp(), use_cpu=True, report_to=[])
    return Trainer(torch.nn.Linear(1, 1), arguments, **more)

def counts(trainer):
    return [each for each in trainer.callback_handler.callbacks if type(each).__name__ == "Countoff"]

sys.modules["countoff.transformers"] = None
assert counts(trainer()) == counts(trainer()) == []
del sys.modules["countoff.transformers"]
assert len(counts(trainer())) == 1
from countoff.transformers import Countoff
own = Countoff(weights_every=8)
assert counts(trainer(callbacks=[own])) == [own]
class Unhashable(transformers.TrainerCallback):
    __hash__ = None
later = trainer(callbacks=[Unhashable()])
later.add_callback(own)
assert counts(later) == [own]
assert transformers.trainer.__spec__.loader is transformers.trainer.__loader__
print(type(transformers.trainer.__loader__).__name__)
"""
COMPOSER = """
import collections.abc
import sys
import torch
from composer import ComposerModel, Trainer
from composer.callbacks import SpeedMonitor

class Model(ComposerModel):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def forward(self, batch): return self.layer(batch)
    def loss(self, outputs, batch): return outputs.sum()

def counts(**more):
    trainer = Trainer(model=Model(), device="cpu", progress_bar=False, **more)
    return [each for each in trainer.state.callbacks if type(each).__name__ == "Countoff"]

sys.modules["countoff.composer"] = None
assert counts() == []
del sys.modules["countoff.composer"]
assert len(counts()) == len(counts(callbacks=SpeedMonitor())) == len(counts(callbacks=[SpeedMonitor()])) == 1
from countoff.composer import Countoff
own = Countoff(weights_every=8)
assert counts(callbacks=own) == counts(callbacks=(own,)) == [own]
class Some(collections.abc.Sequence):
    def __len__(self): return 1
    def __getitem__(self, place): return (own,)[place]
assert counts(callbacks=Some()) == [own]
print("SourceFileLoader")
"""


@pytest.mark.parametrize(
    ("script", "framework", "package"),
    [(TRANSFORMERS, "transformers' Trainer", "transformers"), (COMPOSER, "Composer's Trainer", "composer")],
    ids=["transformers", "composer"],
)
def test_a_trainer_gets_the_callback_unless_it_has_one(script: str, framework: str, package: str) -> None:
    """Where our own module cannot be imported, the Trainer is made all the same, and that is said once."""
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed here")
    environment = with_hooks({**os.environ, "PYTHONPATH": SOURCE_PATH})
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "SourceFileLoader"
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("countoff")]
    assert line.startswith(f"countoff: {framework} is not observed: ")
