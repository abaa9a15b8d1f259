"""What the forkserver imports once, so that every rank starts with it: torch, countoff, the frameworks that are there.

Nothing here may start a thread (a fork would lose it): imports only, and no tensor is touched. A session that needs
few of the frameworks names them in PRELOAD, and saves the half minute that the others take.
"""

import contextlib
import gc
import importlib
import os
import signal
import sys

from integration_tests.rank import end_with_parent

end_with_parent()

# Composer takes over these two when it is imported, which is not for the other frameworks' tests.
handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

wanted = {*os.environ.get("PRELOAD", "").split()}
for name in (
    "pytest",
    "torch.distributed",
    "torch._dynamo",  # torch imports it with the first optimizer or DistributedDataParallel
    "lightning.pytorch",
    "lightning.fabric",
    "pytorch_lightning",
    "composer",
    "streaming",
    "accelerate",
    "deepspeed",  # accelerate imports it to unwrap a model
    "transformers.trainer",
    "comet_ml",
    "wandb",
    "mlflow",
    "countoff.torch",
    "countoff.lightning",
    "countoff.fabric",
    "countoff.composer",
    "countoff.accelerate",
    "countoff.transformers",
):
    if wanted and not {*name.split(".")} & wanted:  # of countoff, the adapters of those frameworks
        continue
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module(name)

importlib.import_module("integration_tests.digits").pixels()

if (environment := sys.modules.get("composer.utils.collect_env")) is not None:
    environment.get_cpu_model()  # else each process with a Trainer starts a program for it: 1 s of a core

for number, handler in handlers.items():
    signal.signal(number, handler)

gc.freeze()  # else every rank's collector visits, and so copies, all of it: 1 s of a core at each exit
