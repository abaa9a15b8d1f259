"""countoff for ``pytorch_lightning``: ``Trainer(callbacks=[Countoff()])``."""

from __future__ import annotations

try:
    from pytorch_lightning.callbacks import Callback
except ImportError as error:
    raise ImportError("countoff.pytorch_lightning needs it: pip install pytorch-lightning") from error

from countoff._lightning.callback import CountoffCallback

__all__ = ["Countoff"]


class Countoff(CountoffCallback, Callback):  # noqa: D101  # one text for both packages
    __doc__ = CountoffCallback.__doc__
