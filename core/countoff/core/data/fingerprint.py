"""Fingerprints: a batch as a few bytes that two ranks can compare.

Requirements that shaped it:

- It runs on the training thread, a few times per epoch, because training may change a batch in place afterwards. So
  its cost is bounded, and of a large tensor it reads evenly spread pieces.
- It never waits for a device. The same pieces of a tensor on a GPU are copied to the host in the background, and the
  fingerprint is complete once they are there: it is that of the same batch in the CPU's memory. A tensor on a device of
  another kind has no fingerprint.
- Equal data has equal fingerprints, whatever its strides.
- A batch with a part of an unknown type has no fingerprint at all, because equality without that part proves nothing.

torch and numpy are not imported: where a batch holds a tensor or an array, they have been already.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from countoff.core.data import device_copy
from countoff.core.data.device_copy import DeviceCopy

__all__ = ["Fingerprint", "PendingFingerprint", "begin_fingerprint", "distinct_bytes", "fingerprint"]

LEAF_BYTES = 256 * 1024
"""A tensor up to this size is hashed whole, a larger one by as many bytes of it."""
_BATCH_BYTES = 1024 * 1024
_PIECE_BYTES = 8192
_MOST_ITEMS = 256
_EXCERPT_BYTES = 12 * 1024
_CHUNKS, _CHUNK_BYTES = 32, 64


class Fingerprint(NamedTuple):
    """What one batch was found to hold.

    Attributes:
        digest: Equal for equal batches, in 16 hexadecimal digits. Different digests prove different batches. Equal ones
            prove equal batches where no tensor is over `LEAF_BYTES`; of larger ones, that the pieces are equal.
        excerpt: Some of the bytes, to tell data from padding.
    """

    digest: str
    excerpt: bytes


def fingerprint(batch: Any, *, plain: bool = False) -> Fingerprint | None:
    """Returns the fingerprint of a batch in the CPU's memory; None if a part cannot be read or is not understood.

    It reads tensors in the CPU's memory, numpy arrays, numbers, strings and bytes, in mappings, sequences and
    dataclasses. It copies only pieces of tensors that are not contiguous, changes nothing and advances no iterator. It
    never raises, whatever the batch is.

    Args:
        batch: What a loader has returned.
        plain: Whether mappings and sequences other than dicts, lists and tuples, and dataclasses, cannot be read:
            reading a field of these may call code of the user's.

    Example:
        >>> fingerprint({"ids": [1, 2], "text": "a"}) == fingerprint({"text": "a", "ids": [1, 2]})
        True
        >>> fingerprint([1, 2]) == fingerprint([1, 3]), fingerprint(iter([1]))
        (False, None)
    """
    digest = _read(batch, from_devices=False, plain=plain)
    return None if digest is None else digest.fingerprint()


def begin_fingerprint(batch: Any) -> Fingerprint | PendingFingerprint | None:
    """Returns the fingerprint of a batch as `fingerprint` does, or begins it where the batch has tensors on a GPU.

    It waits for no device. The batch may be changed as soon as this has returned.

    Args:
        batch: What a loader has returned.

    Returns:
        The fingerprint; a pending one, which is equal to that of the same batch in the CPU's memory; None if a part
        cannot be read or is not understood.
    """
    digest = _read(batch, from_devices=True)
    if digest is None:
        return None
    return PendingFingerprint(digest) if digest.waits else digest.fingerprint()


class PendingFingerprint:
    """The fingerprint of a batch of which parts are still on their way from a device.

    Args:
        digest: What was read of the batch.
    """

    def __init__(self, digest: _Digest) -> None:
        self._digest = digest

    def collect(self) -> Fingerprint | PendingFingerprint | None:
        """Returns the fingerprint if everything has arrived, else this object. Never waits, and never raises.

        None if the device has reported an error; the program's next operation on it raises that.
        """
        try:
            arrived = self._digest.take_in()
        except Exception:  # of the program's own kernels: torch raises it again where the program uses the device
            return None
        return self._digest.fingerprint() if arrived else self


def distinct_bytes(excerpts: Sequence[bytes]) -> int:
    """Returns how many bytes all batches but the first add to it, as zlib compresses their excerpts.

    Constants add nothing and a few labels add a few bytes: two ranks may well have the same ones by chance.

    Args:
        excerpts: Excerpts of one rank's batches, in order.

    Example:
        >>> distinct_bytes([bytes(512), bytes(512)]) < 16
        True
        >>> distinct_bytes([bytes(512), b"The quick brown fox jumps over it"]) > 16
        True
    """
    return len(zlib.compress(b"".join(excerpts))) - len(zlib.compress(b"".join(excerpts[:1])))


class _Unreadable(Exception):
    """A part of the batch cannot be fingerprinted."""


class _Digest:
    """The hash and the excerpt of what a walk reads, in its order.

    Everything behind a copy that is still on its way from a device waits for that copy.

    Attributes:
        waits: Whether there is such a copy.
    """

    def __init__(self) -> None:
        self.waits = False
        self._hash = hashlib.blake2b(digest_size=8)
        self._excerpt = bytearray()
        self._waiting: list[tuple[bytes | DeviceCopy, int]] = []

    def fingerprint(self) -> Fingerprint:
        return Fingerprint(self._hash.hexdigest(), bytes(self._excerpt))

    def add(self, content: Any, chunks: int = 0) -> None:
        """Adds bytes, and excerpts from them where `chunks` is not 0; training may change them afterwards."""
        if self.waits:
            self._waiting.append((bytes(content), chunks))
        else:
            self._take(content, chunks)

    def add_copy(self, copy: DeviceCopy, chunks: int) -> None:
        """Adds the parts of a copy, each with its own excerpts."""
        self.waits = True
        self._waiting.append((copy, chunks))

    def take_in(self) -> bool:
        """Takes in what waits, if all of it has arrived; returns whether it has."""
        copies = [content for content, _ in self._waiting if isinstance(content, DeviceCopy)]
        if not all(copy.has_arrived() for copy in copies):
            return False
        for content, chunks in self._waiting:
            for part in content.parts() if isinstance(content, DeviceCopy) else (content,):
                self._take(part, chunks)
        self._waiting.clear()
        self.waits = False
        return True

    def _take(self, content: Any, chunks: int) -> None:
        view = memoryview(content)
        self._hash.update(view)
        if not chunks:
            return
        step = max(_CHUNK_BYTES, len(view) // chunks)
        for number, start in enumerate(range(0, len(view), step)):
            if len(self._excerpt) < _EXCERPT_BYTES:
                # Not at the beginning of each: rows may begin with padding, all of them.
                start += (step - _CHUNK_BYTES) * (number * 5 % 8) // 8
                self._excerpt += view[start : start + _CHUNK_BYTES]


def _read(batch: Any, *, from_devices: bool, plain: bool = False) -> _Digest | None:
    """What one walk over a batch reads; None if a part of it cannot be read."""
    reading = _Reading(from_devices=from_devices, plain=plain)
    try:
        reading.take(batch)
    except Exception:  # a class of the user's may raise anything: there is no fingerprint then
        return None
    return reading.digest


class _Reading:
    """One walk over one batch."""

    def __init__(self, *, from_devices: bool, plain: bool) -> None:
        self.digest = _Digest()
        self._from_devices, self._plain = from_devices, plain
        self._left = _BATCH_BYTES

    def take(self, value: Any) -> None:
        if value is None or isinstance(value, (bool, int, float, complex)):
            self._say(repr(value))
        elif isinstance(value, str):
            self._bytes("str", value.encode(errors="surrogatepass"))
        elif isinstance(value, (bytes, bytearray)):
            self._bytes("bytes", bytes(value))
        elif (kind := _array_kind(value, from_devices=self._from_devices)) is not None:
            self._array(value, kind)
        elif self._plain and type(value) not in (dict, list, tuple):
            raise _Unreadable
        elif isinstance(value, Mapping):
            self._say(f"mapping {len(value)}")
            for key in _spread(sorted(value, key=_name)):
                self.take(key)
                self.take(value[key])
        elif isinstance(value, Sequence):
            self._say(f"sequence {len(value)}")
            for item in _spread(value):
                self.take(item)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            self._say("fields")
            for field in dataclasses.fields(value):
                self._say(field.name)
                self.take(getattr(value, field.name))
        else:
            raise _Unreadable

    def _say(self, text: str) -> None:
        self.digest.add(f"{text};".encode())

    def _bytes(self, kind: str, content: bytes) -> None:
        self._say(f"{kind} {len(content)}")
        self.digest.add(content[:LEAF_BYTES], _CHUNKS)

    def _array(self, array: Any, kind: str) -> None:
        shape = tuple(int(length) for length in array.shape)
        self._say(f"{kind} {array.dtype} {shape}")
        budget = max(_PIECE_BYTES, min(LEAF_BYTES, self._left))
        if kind == "tensor":
            array = array.detach()
        pieces = list(_pieces(array, budget))
        chunks = max(1, _CHUNKS // len(pieces))
        if kind == "tensor" and array.numel() and device_copy.is_on_gpu(array):
            parts = [_flat(piece) for piece in pieces]
            self._left -= sum(len(part) for part in parts)
            self.digest.add_copy(DeviceCopy(parts), chunks)
            return
        for piece in pieces:
            content = _content(piece, kind)
            self._left -= len(content)
            self.digest.add(content, chunks)


def _array_kind(value: Any, *, from_devices: bool) -> str | None:
    """``tensor`` or ``array``, if it is one whose memory can be read; None if it is something else.

    Raises:
        _Unreadable: If it is one whose memory cannot be read.
    """
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        plain = value.layout == torch.strided and not value.is_nested
        if not plain or value.is_quantized or value.is_conj() or value.is_neg():
            raise _Unreadable
        if value.device.type != "cpu" and not (from_devices and _can_be_copied(value)):
            raise _Unreadable
        return "tensor"
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        if value.dtype.hasobject:
            raise _Unreadable
        return "array"
    return None


def _can_be_copied(tensor: Any) -> bool:
    """Whether a tensor outside of the CPU's memory can be copied from there.

    A slice of a subclass such as DTensor may need a collective.
    """
    torch = sys.modules["torch"]
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return plain and device_copy.is_on_gpu(tensor) and not device_copy.is_capturing()


def _content(piece: Any, kind: str) -> Any:
    """The bytes of a piece in the CPU's memory, in the order of its elements."""
    if kind == "array":
        return piece.tobytes()
    return memoryview(_flat(piece).numpy()) if piece.numel() else b""


def _flat(piece: Any) -> Any:
    """The bytes of a detached tensor, which must not be empty, as a tensor of one dimension."""
    # As bytes, because numpy has no bfloat16; that wants a stride of 1 even of a single element.
    flat = piece.contiguous().reshape(-1)
    return flat.as_strided(flat.shape, (1,)).view(sys.modules["torch"].uint8)


def _pieces(array: Any, budget: int) -> Iterator[Any]:
    """Parts of a tensor or array of at most about `budget` bytes together, spread evenly over it."""
    size = int(array.nbytes)
    if size <= budget or not array.shape:
        yield array
        return
    rows = int(array.shape[0])
    row_bytes = size // rows
    parts = max(1, min(rows, budget // _PIECE_BYTES))
    share = budget // parts
    taken = max(1, share // row_bytes) if row_bytes else rows
    for number in range(parts):
        # From the first to the last row; a single part from the middle, because an image's border may be empty.
        start = (rows - taken) * number // (parts - 1) if parts > 1 else (rows - taken) // 2
        part = array[start : start + taken]
        if row_bytes > share:
            yield from _pieces(part[0], share)
        else:
            yield part


def _name(key: Any) -> str:
    """What the keys of a mapping are sorted by. The text of any other object could hold that of a tensor on a device.

    Raises:
        _Unreadable: If the key is of an unknown type.
    """
    if key is None or isinstance(key, (str, bytes, int, float)):
        return repr(key)
    if isinstance(key, tuple):
        return ",".join(map(_name, key))
    if dataclasses.is_dataclass(key) and not isinstance(key, type):
        return ",".join(_name(getattr(key, field.name)) for field in dataclasses.fields(key))
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(key, numpy.generic):
        return repr(key)
    raise _Unreadable


def _spread(items: Sequence[Any]) -> Iterator[Any]:
    """All items, or so many of them that a long list costs no more than a short one."""
    count = len(items)
    shown = min(count, _MOST_ITEMS)
    for number in range(shown):
        yield items[number * count // shown]
