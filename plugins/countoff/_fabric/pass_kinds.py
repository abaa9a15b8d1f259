"""Which pass over a loader is a train epoch and which is an evaluation, where a script does not say it."""

from __future__ import annotations

import weakref
from typing import Any, Literal, NamedTuple

import torch

from countoff.core import Guard

__all__ = ["PassKinds"]


class _Assumed(NamedTuple):
    """A pass that is taken for an evaluation, and whether it began inside another pass."""

    loader: Any
    inside: bool


class PassKinds:
    """What the passes of a script are, as far as its gradients and its optimizer steps tell.

    A pass with gradients disabled is an evaluation, and the first other pass is a train epoch. From then on, a pass
    over another loader is taken for an evaluation until the script makes an optimizer step in it.

    Args:
        new_loaders_evaluate: Whether that is so outside of any other pass too. Otherwise such a pass is a train epoch.
    """

    def __init__(self, *, new_loaders_evaluate: bool) -> None:
        self._new_loaders_evaluate = new_loaders_evaluate
        self._trained: weakref.WeakSet[Any] = weakref.WeakSet()
        self._trained_last: weakref.ref[Any] | None = None
        self._beside: weakref.WeakSet[Any] = weakref.WeakSet()  # iterated together with a loader that is counted
        self._assumed: _Assumed | None = None

    @property
    def trained_last(self) -> Any:
        """The loader that was last trained on; None if there is none, or if it is gone."""
        return self._trained_last and self._trained_last()

    def begin(self, loader: Any, guard: Guard | None) -> Literal["train", "evaluation"] | None:
        """Returns what a pass that begins is, as far as that is known by now; None if it is not counted.

        Args:
            loader: The loader.
            guard: The guard of the fit; None while none goes on.
        """
        if loader in self._beside:
            return None
        if guard is None:  # an evaluation before training is not compared
            return "train" if torch.is_grad_enabled() else None
        if not torch.is_grad_enabled():
            return "evaluation"
        inside = guard.open_span is not None
        if loader in self._trained or not (inside or self._new_loaders_evaluate):
            return "train"
        self._assumed = _Assumed(loader, inside)
        return "evaluation"

    def train_on(self, loader: Any) -> None:
        """Takes a loader for the train loader from here on."""
        self._trained_last = weakref.ref(loader)
        self._trained.add(loader)

    def stepped(self) -> None:
        """Learns from an optimizer step that a pass is none of an evaluation."""
        assumed, self._assumed = self._assumed, None
        if assumed is not None and assumed.inside:
            self._beside.add(assumed.loader)
        elif assumed is not None:
            self._trained.add(assumed.loader)
            self._new_loaders_evaluate = False

    def end(self, loader: Any) -> None:
        """Takes note that a pass is over."""
        if self._assumed is not None and self._assumed.loader is loader:
            self._assumed = None
