"""Stands in for a GPU: copies of tensors from it arrive when a test says so."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from countoff.core.data import device_copy, fingerprint


class FakeCopy:
    """Stands in for a copy from a GPU: what it holds is there when `arrived` is set, or never."""

    def __init__(self, parts: list[torch.Tensor]) -> None:
        self._parts = [bytes(part.numpy()) for part in parts]
        assert all(part.dtype == torch.uint8 and part.is_contiguous() and part.ndim == 1 for part in parts)
        self.arrived = False
        self.broken = False

    def has_arrived(self) -> bool:
        if self.broken:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return self.arrived

    def parts(self) -> Iterator[memoryview]:
        assert self.arrived
        yield from map(memoryview, self._parts)


@contextmanager
def tensors_on_a_gpu(which: Callable[[torch.Tensor], bool] = lambda tensor: True) -> Iterator[list[FakeCopy]]:
    """A context in which tensors of the CPU are taken for tensors on a GPU; a list of the copies that have begun.

    Args:
        which: Returns whether a tensor is taken for one; all are by default.
    """
    begun: list[FakeCopy] = []

    class Copy(FakeCopy):
        def __init__(self, parts: list[torch.Tensor]) -> None:
            super().__init__(parts)
            begun.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_copy, "is_on_gpu", which)
        patch.setattr(fingerprint, "DeviceCopy", Copy)
        yield begun
