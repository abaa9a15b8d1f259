"""Kubernetes' termination log: `kubectl describe pod` shows what a container has written there before it ended.

https://kubernetes.io/docs/tasks/debug/debug-application/determine-reason-pod-failure/
"""

from __future__ import annotations

import contextlib
import os

from countoff.core.finding import Finding

__all__ = ["TerminationLog"]

_MOST_BYTES = 4096
"""The kubelet reads no more of it."""
_OWN = b"countoff"


class TerminationLog:
    """The termination log of this container.

    Args:
        path: Where it lies; the container's `terminationMessagePath`.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    @property
    def exists(self) -> bool:
        """Whether this process runs in a pod that has one. The kubelet makes it, an empty file, before it starts."""
        return bool(os.environ.get("KUBERNETES_SERVICE_HOST")) and os.path.isfile(self._path)

    def clear(self, before: float) -> None:
        """Empties it of what an earlier attempt in this container has written: this one may succeed.

        Args:
            before: When this process began, in seconds since the epoch.
        """
        with contextlib.suppress(OSError):
            if self.exists and os.stat(self._path).st_mtime < before and self._begins_with() == _OWN:
                os.truncate(self._path, 0)

    def _begins_with(self) -> bytes:
        with open(self._path, "rb") as file:
            return file.read(len(_OWN))

    def tell(self, finding: Finding) -> None:
        """Writes what has ended the job. What another program has written there stays: it is the better reason."""
        if self._begins_with() not in (b"", _OWN):
            return
        with open(self._path, "wb") as file:  # in place: it is mounted, so no other file can be put there
            file.write(shortened(f"countoff: {finding.message}\n"))


def shortened(text: str) -> bytes:
    """A text in at most as many bytes as the kubelet reads, cut between two characters.

    >>> len(shortened("é" * 4096)), shortened("a short one")
    (4095, b'a short one')
    """
    whole = text.encode()
    if len(whole) <= _MOST_BYTES:
        return whole
    end = "…".encode()
    return whole[: _MOST_BYTES - len(end)].decode(errors="ignore").encode() + end
