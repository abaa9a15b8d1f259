"""Copies parts of tensors from a GPU to the memory of the host, and waits for no kernel and no copy.

CUDA only, which is ROCm's name in torch too. torch is not imported: where there is such a tensor, it has been already.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["DeviceCopy", "is_capturing", "is_on_gpu"]

side_streams: dict[Any, Any] = {}
"""By device: the stream on which its copies leave it."""


class DeviceCopy:
    """A copy of parts of one tensor, on its way to the host.

    The parts are first gathered in a buffer on the device, on the current stream. Training that changes the tensor in
    place does so behind that on the same stream, so it cannot change what is copied. The buffer then goes to pinned
    memory of the host on a side stream, for which the current stream need not wait.

    Args:
        parts: The bytes of each part: contiguous tensors of one dimension and of uint8, on one device, at least one.
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        torch = sys.modules["torch"]
        device, self._sizes = parts[0].device, [len(part) for part in parts]
        gathered = torch.empty(sum(self._sizes), dtype=torch.uint8, device=device)
        torch.cat(list(parts), out=gathered)
        # The device is named, because the program may have set another default.
        self._host = torch.empty(len(gathered), dtype=torch.uint8, device="cpu", pin_memory=True)
        side = _side_stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            self._host.copy_(gathered, non_blocking=True)
        gathered.record_stream(side)  # else its memory could be given to another tensor before it is copied
        self._event = side.record_event()

    def has_arrived(self) -> bool:
        """Whether it is in the memory of the host; does not wait.

        Raises:
            RuntimeError: If an earlier operation on the device has failed.
        """
        return not is_capturing() and self._event.query()  # a query during a capture would end it

    def parts(self) -> Iterator[memoryview]:
        """Yields the bytes of each part, once `has_arrived`."""
        content, start = memoryview(self._host.numpy()), 0
        for size in self._sizes:
            yield content[start : start + size]
            start += size


def is_on_gpu(tensor: Any) -> bool:
    """Whether a tensor is on a device from which it can be copied."""
    return tensor.device.type == "cuda"


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured: what is queued then is not done, but becomes a part of the graph."""
    return sys.modules["torch"].cuda.is_current_stream_capturing()


def _side_stream(device: Any) -> Any:
    if device not in side_streams:
        side_streams[device] = sys.modules["torch"].cuda.Stream(device)
    return side_streams[device]
