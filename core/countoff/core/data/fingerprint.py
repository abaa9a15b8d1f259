"""Fingerprints: a batch as a few bytes that two ranks can compare.

Requirements that shaped it:

- It runs on the training thread, a few times per epoch, because training may change a batch in place afterwards. So
  its cost is bounded, and of a large tensor it reads evenly spread pieces.
- It never waits for a device. The same pieces of a tensor on a GPU are copied to the host in the background, and the
  fingerprint is complete once they are there: it is that of the same batch in the CPU's memory. A tensor on a device of
  another kind has no fingerprint.
- Equal data has equal fingerprints, whatever its strides.
- A batch with a part of an unknown type has no fingerprint at all, because equality without that part proves nothing.
- It calls no code of the user's, so what computes on access is of an unknown type (`plain`). No mode and no profiler of
  the user's sees it read a tensor in the CPU's memory: it calls no operation of torch for that.

torch and numpy are not imported: where a batch holds a tensor or an array, they have been already.
"""

from __future__ import annotations

import hashlib
import sys
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from countoff.core.data import device_copy
from countoff.core.data.device_copy import DeviceCopy
from countoff.core.data.plain import fields_of, items_of, module_of, pairs_of
from countoff.core.data.unobserved import unobserved

__all__ = [
    "Begun",
    "Fingerprint",
    "PendingFingerprint",
    "begin_fingerprint",
    "distinct_bytes",
    "fingerprint",
    "parts_of",
]

LEAF_BYTES = 256 * 1024
"""A tensor up to this size is hashed whole, a larger one by as many bytes of it."""
_BATCH_BYTES = 1024 * 1024
_PIECE_BYTES = 8192
_MOST_ITEMS = 256
_EXCERPT_BYTES = 12 * 1024
_CHUNKS, _CHUNK_BYTES = 32, 64
_NUMBERS = (bool, int, float, complex)
_WORDS = {1: "|u1", 2: "|u2", 4: "|u4", 8: "|u8"}


class Fingerprint(NamedTuple):
    """What one batch was found to hold.

    Attributes:
        digest: Equal for equal batches, in 16 hexadecimal digits. Different digests prove different batches. Equal ones
            prove equal batches where no tensor is over `LEAF_BYTES`; of larger ones, that the pieces are equal.
        excerpt: Some of the bytes, to tell data from padding.
    """

    digest: str
    excerpt: bytes


def fingerprint(batch: Any) -> Fingerprint | None:
    """Returns the fingerprint of a batch in the CPU's memory; None if a part cannot be read or is not understood.

    It reads tensors in the CPU's memory, numpy arrays, numbers, strings and bytes, in dicts, lists, tuples,
    dataclasses, and what stores its items in one of these. It copies only pieces of tensors that are not contiguous,
    changes nothing, advances no iterator, and calls no code of the user's. It never raises, whatever the batch is.

    Args:
        batch: What a loader has returned.

    Example:
        >>> fingerprint({"ids": [1, 2], "text": "a"}) == fingerprint({"text": "a", "ids": [1, 2]})
        True
        >>> fingerprint([1, 2]) == fingerprint([1, 3]), fingerprint(iter([1]))
        (False, None)
    """
    digest = _read(batch, from_devices=False)
    return None if digest is None else digest.fingerprint()


def begin_fingerprint(batch: Any) -> Begun | None:
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
            with unobserved():
                arrived = self._digest.take_in()
        except RuntimeError:  # of the program's own kernels: torch raises it again where the program uses the device
            return None
        return self._digest.fingerprint() if arrived else self


Begun = Fingerprint | PendingFingerprint
"""A fingerprint that is complete, or on its way from a device."""


def parts_of(sample: Any) -> list[Any]:
    """Returns the fields of a sample, in an order that is equal on all ranks; nothing if it has none.

    Raises:
        ValueError: If they have no such order.

    Example:
        >>> parts_of({"b": 1, "a": 2}), parts_of((3, 4)), parts_of("text")
        ([2, 1], [3, 4], [])
    """
    try:
        if (pairs := pairs_of(sample)) is not None:
            return [value for _, value in sorted(pairs, key=_name)]
    except _Unreadable:
        raise ValueError("the keys have no order") from None
    return list(items_of(sample) or ())


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


def _read(batch: Any, *, from_devices: bool) -> _Digest | None:
    """What one walk over a batch reads; None if a part of it cannot be read."""
    reading = _Reading(from_devices=from_devices)
    try:
        with unobserved():
            reading.take(batch)
    except Exception:  # as for a list that contains itself, or one that another thread changes
        return None
    return reading.digest


class _Reading:
    """One walk over one batch."""

    def __init__(self, *, from_devices: bool) -> None:
        self.digest = _Digest()
        self._from_devices = from_devices
        self._left = _BATCH_BYTES

    def take(self, value: Any) -> None:
        kind = type(value)  # not `isinstance`, which asks an object of another class for its `__class__`
        if value is None or issubclass(kind, _NUMBERS):
            self._say(_text_of_number(value))
        elif issubclass(kind, str):
            self._bytes("str", str.encode(value, "utf-8", "surrogatepass"))
        elif issubclass(kind, bytes):
            self._bytes("bytes", bytes.__getitem__(value, slice(None)))
        elif issubclass(kind, bytearray):
            self._bytes("bytes", bytes(bytearray.__getitem__(value, slice(None))))
        elif (array := _array_kind(value, from_devices=self._from_devices)) is not None:
            self._array(value, array)
        elif (pairs := pairs_of(value)) is not None:
            self._say(f"mapping {len(pairs)}")
            for key, item in _spread(sorted(pairs, key=_name)):
                self.take(key)
                self.take(item)
        elif (items := items_of(value)) is not None:
            self._say(f"sequence {len(items)}")
            for item in _spread(items):
                self.take(item)
        elif (fields := fields_of(value)) is not None:
            self._say("fields")
            for name, item in fields:
                self._say(name)
                self.take(item)
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
        if kind == "tensor" and array.numel() and device_copy.is_on_gpu(array):
            pieces = [_flat(piece) for piece in _pieces(array.detach(), budget)]
            self._left -= sum(map(len, pieces))
            self.digest.add_copy(DeviceCopy(pieces), max(1, _CHUNKS // len(pieces)))
            return
        pieces = list(_pieces(_as_array(array) if kind == "tensor" else array, budget))
        for piece in pieces:
            content = _content(piece)
            self._left -= len(content)
            self.digest.add(content, max(1, _CHUNKS // len(pieces)))


def _text_of_number(value: Any) -> str:
    """The text of a number or of None, as the number's own type of Python writes it."""
    return next((base.__repr__(value) for base in _NUMBERS if issubclass(type(value), base)), repr(None))


def _array_kind(value: Any, *, from_devices: bool) -> str | None:
    """``tensor`` or ``array``, if it is one whose memory can be read; None if it is something else.

    Raises:
        _Unreadable: If it is one whose memory cannot be read.
    """
    torch, numpy, kind = sys.modules.get("torch"), sys.modules.get("numpy"), type(value)
    if torch is not None and issubclass(kind, torch.Tensor):
        if not _is_plain_tensor(kind) or value.layout != torch.strided or value.is_nested:
            raise _Unreadable
        if value.is_quantized or value.is_conj() or value.is_neg():
            raise _Unreadable
        if value.device.type != "cpu" and not (from_devices and _can_be_copied(value)):
            raise _Unreadable
        return "tensor"
    if numpy is not None and issubclass(kind, (numpy.ndarray, numpy.generic)):
        if not _is_of_numpy(kind) or value.dtype.hasobject:
            raise _Unreadable
        return "array"
    return None


def _is_plain_tensor(kind: Any) -> bool:
    """Whether tensors of a class are their memory, and nothing of it is computed."""
    torch = sys.modules["torch"]
    return kind is torch.Tensor or kind is torch.nn.Parameter or module_of(kind).startswith("torchvision.tv_tensors.")


def _is_of_numpy(kind: Any) -> bool:
    numpy = sys.modules["numpy"]
    is_scalar = issubclass(kind, numpy.generic) and module_of(kind) == "numpy"
    return is_scalar or kind is numpy.ndarray or kind is numpy.memmap


def _can_be_copied(tensor: Any) -> bool:
    """Whether a tensor outside of the CPU's memory can be copied from there."""
    return device_copy.is_on_gpu(tensor) and not device_copy.is_capturing()


class _Memory:
    """The memory of a tensor as numpy's protocol describes it; it keeps the tensor alive.

    `Tensor.numpy` would call operations, which a profiler sees, and it knows no bfloat16.
    """

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, tensor: Any) -> None:
        shape, size = tuple(tensor.shape), tensor.element_size()
        strides = tensor.stride()
        last = tensor.storage_offset() + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        if tensor.untyped_storage().nbytes() < (last + 1) * size:
            raise _Unreadable  # its memory was given back
        self._tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), True),
            "shape": shape,
            "strides": tuple(stride * size for stride in strides),
            "typestr": _WORDS.get(size, f"|V{size}"),
        }


def _as_array(tensor: Any) -> Any:
    """A tensor in the CPU's memory as an array of numpy over the same memory, of words of its elements' size."""
    numpy = sys.modules["numpy"]
    return numpy.asarray(_Memory(tensor)) if tensor.numel() else numpy.empty(tuple(tensor.shape), numpy.uint8)


def _content(piece: Any) -> Any:
    """The bytes of an array, in the order of its elements."""
    numpy = sys.modules["numpy"]
    if not piece.nbytes or not issubclass(type(piece), numpy.ndarray):
        return piece.tobytes()
    return memoryview(numpy.ascontiguousarray(piece).reshape(-1).view(numpy.uint8))


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


def _name(pair: tuple[Any, Any]) -> str:
    """What the pairs of a mapping are sorted by."""
    return _name_of_key(pair[0])


def _name_of_key(key: Any) -> str:
    """The text of a key; that of any other object could be made by code of the user's.

    Raises:
        _Unreadable: If the key is of an unknown type.
    """
    kind = type(key)
    if key is None or issubclass(kind, _NUMBERS):
        return _text_of_number(key)
    for base in (str, bytes):
        if issubclass(kind, base):
            return base.__repr__(key)
    if (items := items_of(key)) is not None:
        return ",".join(map(_name_of_key, items))
    if (fields := fields_of(key)) is not None:
        return ",".join(_name_of_key(value) for _, value in fields)
    numpy = sys.modules.get("numpy")
    if numpy is not None and issubclass(kind, numpy.generic) and _is_of_numpy(kind):
        return repr(key)
    raise _Unreadable


def _spread(items: Sequence[Any]) -> Iterator[Any]:
    """All items, or so many of them that a long list costs no more than a short one."""
    count = len(items)
    shown = min(count, _MOST_ITEMS)
    for number in range(shown):
        yield items[number * count // shown]
