"""Fingerprints: equal for equal batches, different for different ones, without side effects."""

import dataclasses
import random
import string
import warnings
from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from countoff.core.checks.data import ENOUGH_BYTES
from countoff.core.data import device_copy
from countoff.core.data import fingerprint as module
from countoff.core.data.fingerprint import (
    LEAF_BYTES,
    Fingerprint,
    PendingFingerprint,
    begin_fingerprint,
    distinct_bytes,
    fingerprint,
)
from tests.fake_gpu import FakeCopy, tensors_on_a_gpu

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


def tensors(dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    count = int(numpy.prod(shape))
    return (torch.arange(count) * 37 % 101).reshape(shape).to(dtype)


class Pair(NamedTuple):
    images: Any
    labels: Any


@dataclasses.dataclass
class Output:
    logits: Any
    text: str


@given(st.sampled_from(DTYPES), st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_equal_data_has_one_fingerprint_whatever_its_strides(dtype, shape, data):
    tensor = tensors(dtype, shape)
    order = data.draw(st.permutations(range(len(shape))))
    back = [order.index(dim) for dim in range(len(shape))]
    strided = tensor.permute(order).contiguous().permute(back)
    assert fingerprint(strided) == fingerprint(tensor)
    padded = torch.zeros([2 * length for length in shape], dtype=dtype)
    window = padded[tuple(slice(1, 2 * length, 2) for length in shape)]
    window.copy_(tensor)
    assert fingerprint(window) == fingerprint(tensor)


@given(st.sampled_from(DTYPES[:-1]), st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_a_changed_element_changes_the_fingerprint(dtype, shape, data):
    tensor = tensors(dtype, shape)
    changed = tensor.clone()
    position = tuple(data.draw(st.integers(0, length - 1)) for length in shape)
    changed[position] += 1
    assert fingerprint(changed) != fingerprint(tensor)


@settings(max_examples=25)
@given(st.sampled_from([(700_000,), (32, 3, 100, 100), (3, 400_000), (200_000, 3), (1, 1, 700_000)]), st.data())
def test_a_large_tensor_has_one_fingerprint(shape, data):
    """A tensor too large to be read whole has one fingerprint, whatever its strides."""
    tensor = torch.arange(int(numpy.prod(shape))).reshape(shape)
    order = data.draw(st.permutations(range(len(shape))))
    back = [order.index(dim) for dim in range(len(shape))]
    assert tensor.nbytes > LEAF_BYTES
    assert fingerprint(tensor.permute(order).contiguous().permute(back)) == fingerprint(tensor)
    assert fingerprint(tensor + 1) != fingerprint(tensor)


@pytest.mark.parametrize("place", [0, -1])
def test_both_ends_of_a_large_tensor_are_read(place):
    tensor = torch.arange(700_000)
    changed = tensor.clone()
    changed[place] += 1
    assert fingerprint(changed) != fingerprint(tensor)


def test_every_row_of_a_batch_of_images_is_read():
    images = torch.zeros(32, 3, 224, 224)
    for row in range(len(images)):
        changed = images.clone()
        changed[row] += 1
        assert fingerprint(changed) != fingerprint(images), row


def test_shape_and_type_count():
    zeros = torch.zeros(2, 3)
    others = [zeros.reshape(3, 2), zeros.int(), zeros.double(), zeros.numpy(), zeros[None], [zeros], (zeros, zeros)]
    prints = [fingerprint(each) for each in (zeros, *others)]
    assert None not in prints
    assert len({each.digest for each in prints if each is not None}) == len(prints)


NESTED = [
    {"ids": torch.arange(6), "mask": [True, False], "text": ["a", "ä", "\ud800"]},
    Pair(torch.rand(2, 2), numpy.arange(3)),
    [{"x": (1, 2.5, None, 1j)}, b"raw", bytearray(b"raw")],
    Output(torch.zeros(0, 4), "yes"),
    UserDict(input_ids=torch.arange(4), position=numpy.float32(2)),
    torch.tensor(3.0),
    torch.nn.Parameter(torch.rand(3)),
    numpy.asfortranarray(numpy.arange(12).reshape(3, 4)),
    numpy.array(["2026-01-01"], dtype="datetime64[D]"),
    {(0, "a"): torch.arange(3), (0, "b"): torch.arange(4)},
]


@pytest.mark.parametrize("batch", NESTED, ids=lambda batch: type(batch).__name__)
def test_nested_batches_have_a_fingerprint(batch):
    first = fingerprint(batch)
    assert first is not None
    assert fingerprint(batch) == first


class Hostile:
    """Raises on every access to an attribute."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


class Shown:
    """An object whose text is that of a tensor on a device: to make it waits for the device."""

    def __repr__(self) -> str:
        raise AssertionError("it was made")


def endless() -> Any:
    """A list that contains itself."""
    circle: list[Any] = []
    circle.append(circle)
    return circle


def quantized() -> torch.Tensor:
    """A quantized tensor; newer versions of torch warn that there will be none any more."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.rand(3), 0.1, 0, torch.qint8)


@pytest.mark.parametrize(
    "batch",
    [
        torch.eye(3).to_sparse(),
        torch.rand(3, device="meta"),
        torch.rand(3, dtype=torch.complex64).conj(),
        quantized(),
        numpy.array([object()]),
        [torch.rand(2), object()],
        {1, 2},
        Hostile(),
        endless(),
        {Shown(): 1},
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_unknown_types_have_no_fingerprint(batch):
    """A batch that holds anything that cannot be read safely has no fingerprint."""
    assert fingerprint(batch) is None


def test_a_fingerprint_changes_nothing_in_the_batch():
    """No iterator is advanced, and no tensor is changed."""
    source, tensor = iter([1, 2]), torch.rand(4, requires_grad=True)
    before = tensor.detach().clone()
    assert fingerprint([tensor, source]) is None
    assert list(source) == [1, 2]
    assert torch.equal(tensor, before)
    assert tensor.requires_grad


def test_no_random_number_is_drawn():
    state = torch.get_rng_state()
    fingerprint([torch.arange(10**6), {"labels": torch.arange(4)}])
    assert torch.equal(torch.get_rng_state(), state)


def test_a_long_list_costs_no_more_than_a_short_one():
    """At most 256 items of a list are read."""
    numbers = list(range(100_000))
    few = [number * len(numbers) // 256 for number in range(256)]
    assert fingerprint([number if number in few else -1 for number in numbers[:1000]]) is not None
    changed = [number if number in set(few) else -1 for number in numbers]
    assert fingerprint(changed) == fingerprint(numbers)


def excerpt(batch: Any) -> bytes:
    found = fingerprint(batch)
    assert isinstance(found, Fingerprint)
    return found.excerpt


def labels(number: int) -> torch.Tensor:
    return torch.tensor([number, 1, number + 1, 0, 1, 0, 2, number])


@pytest.mark.parametrize(
    "poor",
    [
        lambda number: torch.zeros(32, 3, 64, 64),
        lambda number: torch.full((4, 64), float(number)),
        labels,
        lambda number: [torch.zeros(8, 512), labels(number)],
        lambda number: [torch.rand(8, 512, generator=torch.Generator().manual_seed(0)), labels(number)],
        lambda number: {"position_ids": torch.arange(512).repeat(8, 1), "label": labels(number)},
        lambda number: {"label": number},
    ],
    ids=["zeros", "constants", "labels", "zeros and labels", "one image and labels", "positions and labels", "numbers"],
)
def test_constants_and_labels_hold_too_few_bytes(poor):
    """Batches of constants and of labels hold too few bytes to prove that two ranks read the same data."""
    assert distinct_bytes([excerpt(poor(number)) for number in range(2)]) < ENOUGH_BYTES


@pytest.mark.parametrize(
    "rich",
    [
        lambda: torch.rand(4, 64),
        lambda: torch.randint(0, 50_000, (8, 512)),
        lambda: torch.nn.functional.pad(torch.randint(0, 50_000, (8, 128)), (384, 0)),
        lambda: torch.nn.functional.pad(torch.randint(0, 50_000, (8, 128)), (0, 384)),
        lambda: {"attention_mask": torch.ones(8, 512).long(), "input_ids": torch.randint(0, 50_000, (8, 512))},
        lambda: {"text": ["".join(random.sample(string.ascii_letters, 50)) for _ in range(4)]},
        lambda: numpy.random.default_rng().integers(0, 255, (2, 32, 32, 3), numpy.uint8),
    ],
    ids=["floats", "tokens", "padded on the left", "padded on the right", "masked", "texts", "pixels"],
)
def test_real_data_holds_enough_bytes(rich):
    assert distinct_bytes([excerpt(rich()), excerpt(rich())]) >= ENOUGH_BYTES


def change_in_place(value: Any) -> None:
    """Changes every tensor and array of a batch, as training may do."""
    if isinstance(value, (torch.Tensor, numpy.ndarray)):
        value[...] = 0
    elif isinstance(value, (dict, UserDict)):
        for each in value.values():
            change_in_place(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            change_in_place(each)


def fingerprint_by_copies(batch: Any, which: Callable[[torch.Tensor], bool] = lambda tensor: True) -> tuple[Any, int]:
    """The fingerprint of a batch that is changed in place at once, some tensors on a GPU; the number of copies."""
    with tensors_on_a_gpu(which) as copies:
        begun = begin_fingerprint(batch)
        if not isinstance(begun, PendingFingerprint):
            return begun, len(copies)
        with torch.no_grad():
            change_in_place(batch)
        for copy in reversed(copies):  # the first is the last to arrive
            assert begun.collect() is begun
            copy.arrived = True
        return begun.collect(), len(copies)


LEAVES = st.one_of(
    st.none(),
    st.integers(),
    st.text(max_size=8),
    st.binary(max_size=8),
    st.builds(tensors, st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)),
    st.builds(
        lambda *of: tensors(*of).mT, st.sampled_from(DTYPES), st.lists(st.integers(1, 4), min_size=2, max_size=3)
    ),
    st.builds(lambda count: numpy.arange(count), st.integers(0, 9)),
    st.builds(lambda count: torch.arange(count * 10_000), st.integers(4, 9)),
)


WHICH: dict[str, Callable[[torch.Tensor], bool]] = {
    "all": lambda tensor: True,
    "some": lambda tensor: tensor.ndim != 1,
    "others": lambda tensor: tensor.ndim == 1,
}


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(WHICH)),
    st.recursive(
        LEAVES, lambda each: st.lists(each, max_size=4) | st.dictionaries(st.text(max_size=3), each), max_leaves=8
    ),
)
def test_a_batch_on_a_gpu_has_the_fingerprint_of_the_cpu(which, batch):
    """A batch on a GPU has the fingerprint of the same batch on the CPU, also if training changes it at once."""
    expected = fingerprint(batch)
    assert expected is not None
    found, _ = fingerprint_by_copies(batch, which=WHICH[which])
    assert found == expected


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.rand(32, 3, 224, 224),
        lambda: torch.rand(32, 3, 64, 64).contiguous(memory_format=torch.channels_last),
        lambda: torch.rand(700_000).to(torch.bfloat16),
        lambda: torch.rand(3, 400_000)[:, ::2],
        lambda: torch.nn.Parameter(torch.rand(300, 300)),
        lambda: [torch.zeros(0, 4), torch.tensor(3), *(torch.arange(100_000) + number for number in range(6))],
    ],
    ids=["images", "channels last", "bf16", "strided", "parameter", "over the budget of a batch"],
)
def test_large_tensors_on_a_gpu_have_the_fingerprint_of_the_cpu(make):
    batch = make()
    expected = fingerprint(batch)
    found, copies = fingerprint_by_copies(batch)
    assert expected is not None
    assert found == expected
    assert copies == (7 if isinstance(batch, list) else 1)


def test_a_copy_that_never_arrives_is_not_waited_for():
    """A fingerprint stays pending while its copy is on its way, and is dropped if the device reports an error."""
    with tensors_on_a_gpu() as (copies):
        pending = begin_fingerprint([torch.arange(3), torch.arange(4)])
        assert isinstance(pending, PendingFingerprint)
        copies[0].arrived = True
        assert pending.collect() is pending
        copies[1].broken = True
        assert pending.collect() is None


def test_a_batch_without_a_tensor_waits_for_no_device():
    with tensors_on_a_gpu() as copies:
        assert begin_fingerprint({"ids": numpy.arange(4)}) == fingerprint({"ids": numpy.arange(4)})
    assert copies == []


@pytest.mark.parametrize(
    "why", ["another device", "a subclass", "a CUDA graph is captured", "a fingerprint on the CPU"]
)
def test_what_cannot_be_copied_from_a_device_has_no_fingerprint(monkeypatch, why):
    """No copy is begun from a device of an unknown kind, of a subclass's tensor, and into a CUDA graph."""
    copies: list[Any] = []

    def begin(parts: Any) -> FakeCopy:
        copies.append(parts)
        return FakeCopy([])

    monkeypatch.setattr(module, "DeviceCopy", begin)
    monkeypatch.setattr(device_copy, "is_capturing", lambda: why == "a CUDA graph is captured")
    if why != "another device":
        monkeypatch.setattr(device_copy, "is_on_gpu", lambda tensor: tensor.device.type == "meta")
    tensor = torch.rand(3, device="meta")
    if why == "a subclass":
        tensor = tensor.as_subclass(type("Subclass", (torch.Tensor,), {}))
    assert (fingerprint if why == "a fingerprint on the CPU" else begin_fingerprint)(tensor) is None
    assert copies == []


def test_a_copy_is_gathered_before_it_leaves_the_device(monkeypatch):
    """A copy's steps in their order, on stand-ins for CUDA's streams; a change behind the first one is not read."""
    calls: list[str] = []
    empty = torch.empty

    class Stream:
        def __init__(self, device: Any) -> None:
            self.name = f"side stream of {device}"

        def wait_stream(self, other: Any) -> None:
            calls.append(f"the {self.name} waits for the {other}")

        def record_event(self) -> Any:
            calls.append(f"event on the {self.name}")
            return SimpleNamespace(query=lambda: len(calls) > 6)

    @contextmanager
    def on_stream(stream: Stream) -> Iterator[None]:
        calls.append(f"copy on the {stream.name}")
        yield

    def allocate(size: int, *, dtype: torch.dtype, device: Any, pin_memory: bool = False) -> torch.Tensor:
        calls.append(f"{'pinned ' * pin_memory}memory of {device}")
        return empty(size, dtype=dtype, device=device)

    monkeypatch.setattr(device_copy, "side_streams", {})
    monkeypatch.setattr(torch, "empty", allocate)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"current stream of {device}")
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda _, stream: calls.append(f"kept for the {stream.name}"), raising=False
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    parts = [torch.arange(4, dtype=torch.uint8), torch.arange(7, 9, dtype=torch.uint8)]
    copy = device_copy.DeviceCopy(parts)
    parts[0].zero_()
    assert calls == [
        "memory of cpu",
        "pinned memory of cpu",
        "the side stream of cpu waits for the current stream of cpu",
        "copy on the side stream of cpu",
        "kept for the side stream of cpu",
        "event on the side stream of cpu",
    ]
    assert not copy.has_arrived()
    calls.append("the device goes on")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not copy.has_arrived()  # to ask would end the capture of a CUDA graph
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert copy.has_arrived()
    assert [bytes(part) for part in copy.parts()] == [bytes(range(4)), bytes([7, 8])]


@dataclasses.dataclass(frozen=True)
class Key:
    name: Any


@pytest.mark.parametrize("key", [1, "a", ("a", 1), numpy.int64(1), Key("a"), Key(("a", numpy.int64(1)))], ids=repr)
def test_a_mapping_is_read_in_the_order_of_its_keys(key: Any) -> None:
    """Whatever key has a text that asks no device for anything."""
    found = fingerprint({key: [1], "b": [2]})
    assert found is not None
    assert found == fingerprint({"b": [2], key: [1]})


def test_a_key_that_holds_a_tensor_is_not_read() -> None:
    assert fingerprint({Key(torch.ones(1)): [1], "b": [2]}) is None
