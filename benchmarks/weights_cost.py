"""Measures what a check of the weights costs the training thread: the hash of 100 million parameters on the CPU.

The same parameters are cloned, added up and put through sha256 in turns with it. Only the hash and the sum leave them
where they are: the bytes for sha256 would have to come from a GPU first.
"""

import hashlib
import timeit
from collections.abc import Iterator

import torch

from benchmarks.results import WALL_TIME, Table, compared, in_turns
from countoff._adapter.weight_hashes import hash_bits

HASHED = "the hashes of `weights_every`"


def parameters(dtype: torch.dtype, million: int) -> list[torch.Tensor]:
    """The parameters of a transformer of so many million, with small ones among them, as they are in models."""
    width = 768
    layer = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width), *[(width,)] * 8]
    layers = round(million * 1e6 / sum(torch.Size(shape).numel() for shape in layer))
    return [torch.rand(shape).to(dtype) for _ in range(layers) for shape in layer]


def tables(quick: bool) -> Iterator[Table]:
    """Yields the cost for float32 and for bfloat16, and for each its ratio to that of the peers."""
    torch.set_num_threads(1)
    million = 10 if quick else 100
    for dtype in (torch.float32, torch.bfloat16):
        held = parameters(dtype, million)
        functions = {
            HASHED: lambda held=held: torch.stack([hash_bits(each) for each in held]).tolist(),
            "`clone`": lambda held=held: [each.clone() for each in held],
            "`sum`": lambda held=held: torch.stack([each.sum(dtype=torch.float32) for each in held]).tolist(),
            "sha256": lambda held=held: [hashlib.sha256(memoryview(each.view(torch.uint8).numpy())) for each in held],
        }
        timers = {name: timeit.Timer(function) for name, function in functions.items()}
        title = (
            f"{million} million parameters of {str(dtype).removeprefix('torch.')} in {len(held)} tensors, {WALL_TIME}"
        )
        yield compared(title, "ms", in_turns(timers, 3 if quick else 15, 1), against=HASHED)
