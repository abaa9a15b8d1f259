"""What the forkserver imports once, so that every rank starts with it: torch, and the frameworks that are there.

Nothing here may start a thread (a fork would lose it): imports only, and no tensor is touched.
"""

import contextlib
import gc
import importlib

for name in ("pytest", "torch.distributed", "lightning.pytorch", "lightning.fabric", "pytorch_lightning"):
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module(name)

gc.freeze()  # else every rank's collector visits, and so copies, all of it: 1 s of a core at each exit
