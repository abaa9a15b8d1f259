"""Reads which parameters several ranks must hold alike, and reduces each to a 64-bit hash on its own device.

What must be equal is taken from what keeps it equal: the process group of a DistributedDataParallel, and the mesh and
the placements of a DTensor (`fully_shard`, tensor parallel). Of any other parameter nothing is proved, so it is not
read. Nothing here calls a collective, draws a random number, or waits for a device.
"""

from __future__ import annotations

import gc
import hashlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from countoff.core.checks.weights import Replicas
from countoff.core.data.device_copy import DeviceCopy, is_capturing, is_on_gpu
from countoff.core.data.plain import attributes_of, bases_of
from countoff.core.data.unobserved import unobserved
from countoff.core.protocol.fit_records import SharedModel

__all__ = ["PendingReplicas", "Wrappers", "hash_bits", "shared_models"]

_BLOCK = 16384
"""Words of 8 bytes that are added up with one another first. It is a part of the hash: ranks must have the same."""
BLOCKS_ON_CPU, _BLOCKS_ON_GPU = 8, 128
"""Blocks that are hashed at once: more need more memory, fewer more calls. Twice their bytes are allocated."""
_ROWS = 8
"""A tensor that is not contiguous is copied in multiples of so many rows: whole words, whatever its type."""
_OWN_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks."


def _signed(number: int) -> int:
    """An unsigned number of 64 bits as the signed one of the same bits."""
    return number - (1 << 64) if number >> 63 else number


_STEP, _BLOCK_STEP = _signed(0x9E3779B97F4A7C15), _signed(0xD1B54A32D192ED03)
_FACTOR = _signed(0xBF58476D1CE4E5B9)
_ramps: dict[Any, torch.Tensor] = {}
"""By device: what tells the words of a block apart by their place."""


class PendingReplicas:
    """The hashes of what this rank holds in common with others, as the parameters are now.

    They are computed on the parameters' device. From a GPU one small copy goes to the host, and nothing waits for it.

    Args:
        models: Modules that the rank trains.
    """

    def __init__(self, models: Iterable[Any]) -> None:
        self._replicas: list[Replicas] = []
        self._copies: list[tuple[DeviceCopy, list[tuple[list[int], int]]]] = []
        by_ranks: dict[tuple[int, ...], list[tuple[str, torch.Tensor]]] = {}
        by_device: dict[Any, tuple[list[tuple[list[int], int]], list[torch.Tensor]]] = {}
        with unobserved(), torch.no_grad():
            for ranks, name, values, _ in held_in_common(models):
                by_ranks.setdefault(ranks, []).append((name, values))
            for ranks, found in sorted(by_ranks.items()):
                hashes = [0] * len(found)
                layout = repr([(name, tuple(values.shape), str(values.dtype)) for name, values in found])
                digest = hashlib.blake2b(layout.encode(errors="replace"), digest_size=8).hexdigest()
                self._replicas.append(Replicas(ranks, tuple(name for name, _ in found), digest, hashes))
                for number, (_, values) in enumerate(found):
                    places, computed = by_device.setdefault(values.device, ([], []))
                    places.append((hashes, number))
                    computed.append(hash_bits(values))
            for device, (places, computed) in by_device.items():
                gathered = torch.stack(computed)
                if device.type == "cpu":
                    _fill(places, gathered.tolist())
                else:
                    self._copies.append((DeviceCopy([gathered.view(torch.uint8)]), places))
        _ramps.clear()  # nothing stays on a device when the fit is over

    def collect(self) -> list[Replicas] | None:
        """Returns the hashes; None while some are on their way from a device. Never waits.

        Raises:
            RuntimeError: If an earlier operation on the device has failed.
        """
        if not all(copy.has_arrived() for copy, _ in self._copies):
            return None
        with unobserved():
            for copy, places in self._copies:
                for part in copy.parts():
                    _fill(places, part.cast("q").tolist())
        self._copies.clear()
        return self._replicas


def shared_models(models: Iterable[Any]) -> list[SharedModel]:
    """Returns the parameters that this rank must hold alike with others, by the ranks that do.

    Args:
        models: Modules that the rank trains.
    """
    by_ranks: dict[tuple[int, ...], list[list[tuple[int, str, bool]]]] = {}
    with unobserved(), torch.no_grad():
        for model in models:
            own: dict[tuple[int, ...], list[tuple[int, str, bool]]] = {}
            for ranks, _, values, needs_gradient in held_in_common([model]):
                form = f"{tuple(values.shape)} {values.dtype}"
                own.setdefault(ranks, []).append((values.numel(), form, needs_gradient))
            for ranks, parameters in own.items():
                by_ranks.setdefault(ranks, []).append(parameters)
    # Several models are in an order that all ranks have: a framework may have them in one of its own on each.
    return [
        SharedModel.of_ranks(ranks, [each for parameters in sorted(held) for each in parameters], len(held))
        for ranks, held in sorted(by_ranks.items())
    ]


def hash_bits(values: torch.Tensor) -> torch.Tensor:
    """Returns a 64-bit hash of a tensor's bits in the order of its elements, as a tensor on its device.

    Strides do not matter, nor does the device. NaNs are equal if their bits are. Shape and type are not in the hash.

    Args:
        values: A dense tensor without a gradient.
    """
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    unfinished, begun = total, 0  # the sum of the block that is not complete yet; words before it and in it
    for words in _words(values):
        inside = begun % _BLOCK
        head = min(len(words), (_BLOCK - inside) % _BLOCK)
        if head:
            unfinished = unfinished + _sums(words[:head].view(1, -1), inside)[0]
            if inside + head == _BLOCK:
                total, unfinished = total + _placed(unfinished.view(1), begun // _BLOCK), torch.zeros_like(total)
        whole = (len(words) - head) // _BLOCK * _BLOCK
        if whole:
            sums = _sums(words[head : head + whole].view(-1, _BLOCK), 0)
            total = total + _placed(sums, (begun + head) // _BLOCK)
        if head + whole < len(words):
            unfinished = _sums(words[head + whole :].view(1, -1), 0)[0]
        begun += len(words)
    return total + _placed(unfinished.view(1), begun // _BLOCK) if begun % _BLOCK else total


class Wrappers:
    """Finds the DistributedDataParallel around each of some models, where a framework gives only the models.

    A model does not refer to what wraps it, so this looks through all objects of the process, once for each model.

    Args:
        models: Returns the models.
    """

    def __init__(self, models: Callable[[], Iterable[Any]]) -> None:
        self._models = models
        self._known: list[tuple[weakref.ref[Any], weakref.ref[Any]]] = []

    def __call__(self) -> list[Any]:
        """Returns what wraps each model: the model itself if nothing does."""
        models, known = list(self._models()), [(own(), wrapper()) for own, wrapper in self._known]
        if len(models) == len(known) and all(
            model is own and wrapper is not None for model, (own, wrapper) in zip(models, known, strict=True)
        ):
            return [wrapper for _, wrapper in known]
        objects: list[Any] = gc.get_objects()
        kinds = {id(kind): kind for kind in map(type, objects)}  # thousands, of millions of objects
        wrapping = {key for key, kind in kinds.items() if DistributedDataParallel in bases_of(kind)}
        wrappers = [each for each in objects if id(type(each)) in wrapping] if wrapping else []
        del objects
        found = [next((each for each in wrappers if _inside(each) is model), model) for model in models]
        self._known = [(weakref.ref(model), weakref.ref(each)) for model, each in zip(models, found, strict=True)]
        return found


def _fill(places: list[tuple[list[int], int]], computed: list[int]) -> None:
    for (hashes, number), value in zip(places, computed, strict=True):
        hashes[number] = value


def _words(values: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the bits of a tensor as 64-bit words, in pieces of about a megabyte on the CPU."""
    if not values.numel():
        return
    if values.is_contiguous():
        yield from _words_of_bytes(bytes_of(values))
        return
    rows = len(values) if values.shape else 1
    if rows > _ROWS:
        eight = values[:_ROWS].numel() * values.element_size()
        rows = _ROWS * max(1, _BLOCK * 8 * BLOCKS_ON_CPU // max(1, eight))
    for start in range(0, len(values) if values.shape else 1, rows):
        part = values[start : start + rows] if values.shape else values
        yield from _words_of_bytes(bytes_of(part.contiguous()))


def bytes_of(values: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor; a single element has any stride, and its bytes need one of 1."""
    return values.as_strided((values.numel(),), (1,)).view(torch.uint8)


def _words_of_bytes(content: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields contiguous bytes as words; the last one is filled up with zeros."""
    aligned = content.storage_offset() % 8 == 0 and content.data_ptr() % 8 == 0
    at_once = BLOCKS_ON_CPU if content.device.type == "cpu" else _BLOCKS_ON_GPU
    for start in range(0, len(content), _BLOCK * 8 * at_once):
        piece = content[start : start + _BLOCK * 8 * at_once]
        if not aligned or len(piece) % 8:
            filled = torch.zeros(-(-len(piece) // 8) * 8, dtype=torch.uint8, device=piece.device)
            filled[: len(piece)] = piece
            piece = filled
        yield piece.view(torch.int64)


def _sums(rows: torch.Tensor, inside: int) -> torch.Tensor:
    """The sum of the words of each row, in which the place of each word counts; the first one is `inside` its block.

    Integer arithmetic modulo 2⁶⁴: the same bits on every device, in whatever order a device adds.
    """
    return _mixed(rows + _ramp(rows.device)[inside : inside + rows.shape[1]]).sum(dim=1)


def _placed(sums: torch.Tensor, first: int) -> torch.Tensor:
    """The sum of the sums of complete blocks, in which the place of each block counts."""
    numbers = torch.arange(first + 1, first + 1 + len(sums), dtype=torch.int64, device=sums.device)
    return _mixed(sums + numbers * _BLOCK_STEP).sum()


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """Mixes the bits of each word, in place: otherwise two differences in high bits could cancel each other."""
    shifted = words >> 32
    words ^= shifted
    words *= _FACTOR
    torch.bitwise_right_shift(words, 29, out=shifted)
    words ^= shifted
    return words


def _ramp(device: torch.device) -> torch.Tensor:
    if device not in _ramps:
        with torch.inference_mode(False):
            _ramps[device] = torch.arange(1, _BLOCK + 1, dtype=torch.int64, device=device) * _STEP
    return _ramps[device]


def held_in_common(models: Iterable[Any]) -> Iterator[tuple[tuple[int, ...], str, torch.Tensor, bool]]:
    """Yields each parameter that other ranks must hold too: all ranks that do, and its name here.

    With its values, and whether it needs a gradient.
    """
    known: set[int] = set()
    for model in models:
        wrappers = [(path, each) for path, each in modules_of(model) if isinstance(each, DistributedDataParallel)]
        for path, wrapper in wrappers:
            group: Any = wrapper.process_group
            ranks = tuple(sorted(dist.get_process_group_ranks(group)))
            prefix = f"{path}." if len(wrappers) > 1 and path else ""
            apart = synchronises_in_its_own_way(wrapper)
            for name, parameter in parameters_of(_inside(wrapper)):
                known_before, ignored = id(parameter) in known, is_ignored(wrapper, name)
                known.add(id(parameter))
                if len(ranks) > 1 and not (known_before or ignored or apart) and _is_readable(parameter):
                    yield ranks, prefix + name, parameter.detach(), parameter.requires_grad
        for name, parameter in parameters_of(model):
            if id(parameter) in known or (ranks := _holders(parameter)) is None:
                continue
            known.add(id(parameter))
            local: Any = parameter
            values = local.to_local()
            if len(ranks) > 1 and _is_readable(values):
                yield ranks, name, values.detach(), parameter.requires_grad


def _inside(wrapper: Any) -> Any:
    """The module that a DistributedDataParallel wraps; None if it is not made yet."""
    return _stored(wrapper, "_modules").get("module")


def modules_of(model: Any, path: str = "", known: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """Yields what `named_modules` does, from what modules store: a program may have a method of its own there."""
    known = set[int]() if known is None else known
    if model is None or id(model) in known:
        return
    known.add(id(model))
    yield path, model
    for name, module in _stored(model, "_modules").items():
        yield from modules_of(module, f"{path}.{name}" if path else name, known)


def parameters_of(model: Any) -> Iterator[tuple[str, Any]]:
    """Yields what `named_parameters` does, likewise."""
    known: set[int] = set()
    for path, module in modules_of(model):
        for name, parameter in _stored(module, "_parameters").items():
            if parameter is not None and id(parameter) not in known:
                known.add(id(parameter))
                yield f"{path}.{name}" if path else name, parameter


def _stored(module: Any, name: str) -> Mapping[str, Any]:
    found = attributes_of(module).get(name)
    return found if isinstance(found, dict) else {}


def is_ignored(wrapper: DistributedDataParallel, name: str) -> bool:
    ignored: Any = getattr(wrapper, "parameters_to_ignore", ())
    return name in ignored or f".{name}" in ignored  # a parameter of the wrapped module itself may have either name


def synchronises_in_its_own_way(wrapper: DistributedDataParallel) -> bool:
    """Whether gradients go through a hook of which nothing proves that all ranks get the same from it.

    torch's own hooks give all ranks the same, but for the one of post-local SGD.
    """
    hooks: Any = getattr(wrapper, "_comm_hooks", ())
    for hook, _ in hooks:
        name = getattr(hook, "__qualname__", "")
        own = str(getattr(hook, "__module__", "")).startswith(_OWN_HOOKS)
        if not own or "<locals>" in name or name == "post_localSGD_hook":
            return True
    return False


def _holders(parameter: Any) -> tuple[int, ...] | None:
    """The ranks that hold the same shard of a DTensor as this one; None for anything else."""
    # torch 2.4 has the class below the second name only.
    modules = [sys.modules.get(f"torch.distributed.{name}") for name in ("tensor", "_tensor")]
    if not any(isinstance(parameter, getattr(module, "DTensor", ())) for module in modules):
        return None
    mesh = parameter.device_mesh
    position = mesh.get_coordinate()
    if position is None or any(placement.is_partial() for placement in parameter.placements):
        return None
    index = tuple(
        slice(None) if placement.is_replicate() else place
        for placement, place in zip(parameter.placements, position, strict=True)
    )
    return tuple(sorted(mesh.mesh[index].flatten().tolist()))


def _is_readable(values: torch.Tensor) -> bool:
    """Whether the bits of a tensor can be read without waiting for its device.

    Asked before any operation: here even a tensor of a subclass would be taken for a plain one (`unobserved`).
    """
    plain = type(values) in (torch.Tensor, torch.nn.Parameter) and values.layout == torch.strided
    if not plain or values.is_quantized or values.is_conj() or values.is_neg():
        return False
    return values.device.type == "cpu" or (is_on_gpu(values) and not is_capturing())
