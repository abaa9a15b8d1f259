"""countoff for ``pytorch_lightning``: ``Trainer(callbacks=[Countoff()])``."""

from __future__ import annotations

from countoff._adapter.requirements import needs

with needs("pytorch_lightning", facade="countoff.pytorch_lightning", install="pytorch-lightning"):
    from pytorch_lightning.callbacks import Callback
from countoff._lightning.callback import CountoffCallback

__all__ = ["Countoff"]


class Countoff(CountoffCallback, Callback):  # noqa: D101  # one text for both packages
    __doc__ = CountoffCallback.__doc__
