"""What one rank of the matrix runs: the framework's training script, watched from outside of countoff."""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import warnings

from integration_tests import devices
from integration_tests.faults.rank_behavior import RankBehavior
from integration_tests.faults.ranks_left import stamp_verdicts, watch_own_leaving


def train(adapter: str, behavior: RankBehavior) -> None:
    """Trains one rank of a job, with or without a fault."""
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    os.environ.update(ACCELERATE_USE_CPU=str(devices.framework_uses_cpu()).lower(), HF_HUB_OFFLINE="1", NODE_RANK="0")
    multiprocessing.set_start_method("fork", force=True)  # for loaders' workers, as in a script
    devices.join()  # every framework takes the group that is there
    stamp_verdicts()
    watch_own_leaving()
    importlib.import_module(f"integration_tests.faults.{adapter}_script").train(behavior)
