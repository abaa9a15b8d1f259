"""Jobs whose hosts do not run the same: another variable, another library."""

import ctypes
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from countoff.torch import Countoff
from integration_tests import devices, loops
from integration_tests.digits import own_rank, share_loader


@dataclass(frozen=True)
class Case:
    """How the last host differs from the others.

    Attributes:
        variables: What is set there.
        common: What is set on all hosts; ``{}`` stands for the rank.
        plugin: The name of the net plugin that it loads; empty: that of the others.
        off: Whether hosts may differ.
    """

    variables: tuple[tuple[str, str], ...] = ()
    common: tuple[tuple[str, str], ...] = ()
    plugin: str = ""
    off: bool = False


def train_each(cases: Sequence[Case], framework: str = "plain") -> list[dict[str, str]]:
    """Trains once for each case in one process, and returns the warnings of each."""
    devices.join()
    return [_train(case, f"case{number}", framework) for number, case in enumerate(cases)]


def _train(case: Case, name: str, framework: str) -> dict[str, str]:
    odd = own_rank() >= int(os.environ["WORLD_SIZE"]) - int(os.environ["LOCAL_WORLD_SIZE"])
    set_here = dict(case.common) | (dict(case.variables) if odd else {})
    os.environ.update({key: value.format(own_rank()) for key, value in set_here.items()})
    if case.plugin:
        _load_plugin(f"{name}-{case.plugin}" if odd else f"{name}-usual")
    try:
        return _fit(framework, {"VersionMismatch": "off"} if case.off else {})
    finally:
        for key in set_here:
            os.environ.pop(key, None)


def _load_plugin(name: str) -> None:
    """Loads a library as NCCL loads its net plugin; it can do nothing."""
    source = next(Path(torch.__file__).parent.glob("lib/libshm.so"))
    path = Path(f"rank{own_rank()}", f"libnccl-net-{name}.so").resolve()
    path.parent.mkdir(exist_ok=True)
    shutil.copy(source, path)
    ctypes.CDLL(str(path))


def _fit(framework: str, levels: dict[str, Any]) -> dict[str, str]:
    if framework == "accelerate":
        return _fit_accelerate(levels)
    model, optimizer = loops.model_and_optimizer()
    loader = share_loader(3)
    with Countoff(optimizer=optimizer, levels=levels) as countoff:
        for batch in countoff.train(loader):
            loops.train_on(model, optimizer, batch)
    return {each.kind: each.sentence for each in countoff.guard.notices}


def _fit_accelerate(levels: dict[str, Any]) -> dict[str, str]:
    from countoff import accelerate
    from integration_tests import accelerate_jobs

    job = accelerate_jobs.Loop(samples=32)
    accelerator = job.accelerator()
    loader = job.train_loader(accelerator.num_processes)
    model, optimizer, train = accelerator.prepare(*accelerate_jobs.model_and_optimizer(), loader)
    with accelerate.Countoff(accelerator, levels=levels) as countoff:
        for batch in countoff.train(train):
            accelerate_jobs.forward_and_back(accelerator, model, optimizer, batch)
    return {each.kind: each.sentence for each in countoff.guard.notices}
