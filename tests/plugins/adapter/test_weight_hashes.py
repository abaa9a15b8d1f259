"""The hash of a parameter: its bits in the order of its elements, and nothing else."""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from countoff._adapter import weight_hashes as weights
from countoff._adapter.weight_hashes import PendingReplicas, Wrappers, hash_bits, held_in_common
from countoff.core.protocol.fit_records import SharedModel

TYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.uint8,
    torch.int16, torch.int64, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip
SHAPES = st.lists(st.integers(0, 9), min_size=0, max_size=4)


def drawn(shape: list[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A tensor of random bits, NaNs among them."""
    generator = torch.Generator().manual_seed(seed)
    element = torch.empty((), dtype=dtype).element_size()
    count = torch.Size(shape).numel()
    high = 2 if dtype == torch.bool else 256
    bits = torch.randint(0, high, (count * element,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def hashed(values: torch.Tensor) -> int:
    return int(hash_bits(values))


@given(SHAPES, st.sampled_from(TYPES), st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_equal_bits_have_equal_hashes(shape: list[int], dtype: torch.dtype, seed: int) -> None:
    """Whatever the strides and the place in memory are, and NaNs too."""
    values = drawn(shape, dtype, seed)
    expected = hashed(values)
    assert hashed(values.clone()) == expected
    order = list(range(values.ndim))[::-1]
    permuted = values.permute(order).contiguous().permute(order)
    assert torch.Size(shape) == permuted.shape
    assert hashed(permuted) == expected
    inside = torch.zeros([*shape, 3], dtype=torch.uint8).to(dtype)
    inside[..., 1] = values
    assert hashed(inside[..., 1]) == expected
    if values.numel():
        shifted = torch.empty(values.numel() + 1, dtype=dtype)
        shifted[1:] = values.reshape(-1)
        assert hashed(shifted[1:].view(shape)) == expected


@given(st.integers(1, 60), st.sampled_from(TYPES), st.data())
@settings(max_examples=200, deadline=None)
def test_any_change_gives_another_hash(length: int, dtype: torch.dtype, data: st.DataObject) -> None:
    values = drawn([length], dtype)
    as_bytes = values.clone().view(torch.uint8)
    at = data.draw(st.integers(0, len(as_bytes) - 1))
    as_bytes[at] ^= 1 if dtype == torch.bool else 1 << data.draw(st.integers(0, 7))
    assert hashed(as_bytes.view(dtype)) != hashed(values)


@given(st.permutations(range(12)), st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.complex64]))
@settings(max_examples=100, deadline=None)
def test_the_order_of_elements_counts(order: list[int], dtype: torch.dtype) -> None:
    values = torch.arange(12).to(dtype)
    assert (hashed(values[order]) == hashed(values)) == (order == list(range(12)))


def test_two_signs_do_not_cancel_each_other() -> None:
    """A difference in two high bits is one, as where two weights are negated."""
    values = torch.randn(64, generator=torch.Generator().manual_seed(1))
    found = {hashed(values)}
    for one in range(64):
        for two in range(one):
            changed = values.clone()
            changed[[one, two]] *= -1
            found.add(hashed(changed))
    assert len(found) == 1 + 64 * 63 // 2


@pytest.mark.parametrize(
    "shape", [[16384 * 2], [16384 * 16 + 4], [3, 100_003], [100_003, 3], [515, 7, 91], [9, 70_001]]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_pieces_do_not_matter(shape: list[int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, more is read at once than on a CPU."""
    values = drawn(shape, dtype)
    transposed = values.transpose(0, -1).contiguous().transpose(0, -1)
    expected = hashed(values)
    assert hashed(transposed) == expected
    for blocks in (1, 128):
        monkeypatch.setattr(weights, "BLOCKS_ON_CPU", blocks)
        assert hashed(values) == hashed(transposed) == expected


def test_blocks_that_are_exchanged_give_another_hash() -> None:
    values = torch.arange(16384 * 4, dtype=torch.int64)
    assert hashed(values.view(4, -1)[[1, 0, 2, 3]].reshape(-1)) != hashed(values)


def test_only_a_part_of_a_large_tensor_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[int] = []
    original: Callable[[torch.Tensor], torch.Tensor] = weights.bytes_of

    def measured(values: torch.Tensor) -> torch.Tensor:
        pieces.append(values.numel() * values.element_size())
        return original(values)

    values = torch.zeros(512, 4099).t()
    monkeypatch.setattr(weights, "bytes_of", measured)
    hashed(values)
    assert sum(pieces) == values.numel() * 4
    assert max(pieces) <= 1 << 20


def test_hashing_draws_no_random_number_and_changes_nothing() -> None:
    values = drawn([1000, 7], torch.float32)
    before, state = values.clone(), torch.get_rng_state()
    hashed(values)
    hashed(values.t())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(values.view(torch.int32), before.view(torch.int32))


def test_what_nothing_keeps_equal_is_not_read() -> None:
    """A model without a wrapper, and no model at all."""
    assert PendingReplicas([torch.nn.Linear(2, 2)]).collect() == []
    assert PendingReplicas([]).collect() == []
    model = torch.nn.Linear(2, 2)
    assert Wrappers(lambda: [model])() == [model]


# On torch 2.4, which does not know its random numbers on CPUs.
@pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support")
def test_shards_that_only_this_rank_holds_are_not_read(real_group: None) -> None:
    """They are known by their class, which not every torch has in the same place."""
    model = parallelize_module(torch.nn.Linear(2, 2), init_device_mesh("cpu", (1,)), ColwiseParallel())
    assert type(model.weight.data).__name__ == "DTensor"
    assert list(held_in_common([model])) == []


def test_a_model_does_not_live_longer_because_its_wrapper_was_looked_for() -> None:
    models = [torch.nn.Linear(2, 2)]
    wrappers = Wrappers(lambda: models)
    assert wrappers() == models
    model = weakref.ref(models.pop())
    assert model() is None
    assert wrappers() == []


class Tied(torch.nn.Module):
    """A module with a parameter and a module that it has twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
        self.again, self.nothing = self.inner, None
        self.tied = self.inner[0].weight


class Guarded(Tied):
    """The same, with methods of the program's own."""

    def named_parameters(self, *_: Any, **__: Any) -> Any:
        raise AssertionError

    named_modules = named_parameters


def test_parameters_are_found_as_torch_finds_them_but_not_by_the_programs_methods() -> None:
    found = [(name, tuple(each.shape)) for name, each in weights.parameters_of(Guarded())]
    assert found == [(name, tuple(each.shape)) for name, each in Tied().named_parameters()]
    assert [path for path, _ in weights.modules_of(Guarded())] == [path for path, _ in Tied().named_modules()]


def told(monkeypatch: pytest.MonkeyPatch, *models: list[tuple[str, torch.Tensor]]) -> SharedModel:
    """What is told of models that ranks 0 and 1 must hold alike, with these parameters."""

    def held(models: list[list[tuple[str, torch.Tensor]]]) -> Iterator[tuple[Any, ...]]:
        yield from (((0, 1), name, values, True) for name, values in models[0])

    monkeypatch.setattr(weights, "held_in_common", held)
    [found] = weights.shared_models(models)
    return found


def test_several_models_are_told_in_an_order_that_all_ranks_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """An actor and a critic with the same names, set up in either order."""
    actor, critic = [("net.0.weight", torch.zeros(6, 64))], [("net.0.weight", torch.zeros(1, 64))]
    found = told(monkeypatch, actor, critic)
    assert found == told(monkeypatch, critic, actor)
    assert (found.parameters, found.numbers, found.trained) == (2, 448, 2)
    assert found.of != told(monkeypatch, actor).of


def test_names_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may wrap its modules in a way of its own: gradients are averaged by the order of the parameters."""
    one, other = ([(name, torch.zeros(6, 64))] for name in ("net.0.weight", "inner.net.0.weight"))
    assert told(monkeypatch, one) == told(monkeypatch, other)
    assert told(monkeypatch, one) != told(monkeypatch, [("net.0.weight", torch.zeros(6, 64, dtype=torch.half))])
