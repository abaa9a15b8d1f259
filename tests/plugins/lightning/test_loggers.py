"""Which of Lightning's loggers get the true totals."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from countoff._lightning.trainer import log


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_loggers_of_both_packages_get_metrics(package: str, tmp_path: Path) -> None:
    """Their methods may be those of Fabric's loggers."""
    pytest.importorskip(package)
    logger = importlib.import_module(f"{package}.loggers").CSVLogger(tmp_path, name="", version="")
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(_batches_that_stepped=7))
    trainer = SimpleNamespace(is_global_zero=True, global_step=7, fit_loop=loop, loggers=[logger])
    log(trainer, {"countoff/a": 3.0}, constant=False)
    logger.save()
    assert (tmp_path / "metrics.csv").read_text().splitlines() == ["countoff/a,step", "3.0,7"]
