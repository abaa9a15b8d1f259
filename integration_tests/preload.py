"""What the forkserver imports once, so that every rank starts with it: torch, and the frameworks that are there.

Nothing here may start a thread (a fork would lose it): imports only, and no tensor is touched.
"""

import contextlib
import gc
import importlib
import signal

# Composer takes over these two when it is imported, which is not for the other frameworks' tests.
handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

for name in (
    "pytest",
    "torch.distributed",
    "lightning.pytorch",
    "lightning.fabric",
    "pytorch_lightning",
    "composer",
    "streaming",
    "accelerate",
    "transformers.trainer",
):
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module(name)

for number, handler in handlers.items():
    signal.signal(number, handler)

gc.freeze()  # else every rank's collector visits, and so copies, all of it: 1 s of a core at each exit
