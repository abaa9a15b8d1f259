"""countoff for ``lightning.pytorch``: ``Trainer(callbacks=[Countoff()])``."""

from __future__ import annotations

try:
    from lightning.pytorch.callbacks import Callback
except ImportError as error:
    raise ImportError("countoff.lightning needs Lightning: pip install 'countoff[lightning]'") from error

from countoff._lightning.callback import CountoffCallback

__all__ = ["Countoff"]


class Countoff(CountoffCallback, Callback):  # noqa: D101  # one text for both packages
    __doc__ = CountoffCallback.__doc__
