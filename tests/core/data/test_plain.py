"""Batches of any class are read without calling their code, and unseen by the program's torch modes and profiler."""

import collections
import contextlib
import dataclasses
import enum
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

from countoff._adapter.dealt_streams import indices_seen
from countoff._adapter.torch_facts import learning_rates
from countoff._adapter.weight_hashes import hash_bits
from countoff.core.checks.streams import FirstElements
from countoff.core.data.fingerprint import begin_fingerprint, fingerprint
from countoff.core.data.plain import ABSENT, attribute_of
from countoff.core.data.unobserved import unobserved

CALLED: list[str] = []
"""Which methods of a class of `hostile` were called."""
SILENT = ("__new__", "__init__", "__init_subclass__", "__class_getitem__", "__subclasshook__", "__dir__", "__del__")


def noted(name: str, original: Any = None) -> Callable[..., Any]:
    """A method that notes its call, and returns what the original does."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        CALLED.append(name)
        if original is not None:
            return original(self, *args, **kwargs)
        raise AttributeError(name)

    return method


def hostile(base: type, *names: str) -> Any:
    """A subclass whose every special method, and every method of these names, notes that it was called."""
    meta = type("Meta", (type(base),), {"__getattribute__": noted("metaclass", type.__getattribute__)})
    own = {
        name: getattr(base, name, None) for name in dir(base) if name.startswith("__") and callable(getattr(base, name))
    }
    methods: dict[str, Any] = {name: noted(name, original) for name, original in own.items() if name not in SILENT}
    methods |= {name: noted(name, getattr(base, name, None)) for name in names}
    methods["__class__"] = property(noted("__class__", type))
    methods["__getattr__"] = noted("__getattr__")
    return meta("Hostile", (base,), methods)


class Lazy(Mapping[str, torch.Tensor]):
    """A mapping that augments on access."""

    def __init__(self) -> None:
        self.stored = {"x": torch.ones(3)}

    def __getitem__(self, key: str) -> torch.Tensor:
        CALLED.append(key)
        return self.stored[key] + torch.rand(3)

    def __iter__(self) -> Iterator[str]:
        CALLED.append("iter")
        return iter(self.stored)

    def __len__(self) -> int:
        CALLED.append("len")
        return 1


class Taken(Sequence[int]):
    """A sequence that hands each item out once."""

    def __init__(self) -> None:
        self.items: list[int | None] = [1, 2]

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: Any) -> Any:
        CALLED.append("taken")
        value, self.items[index] = self.items[index], None
        return value


@dataclasses.dataclass
class Computed:
    """A dataclass of which one field is computed."""

    given: int

    @property
    def loaded(self) -> int:
        CALLED.append("loaded")
        return random.randrange(100)

    loaded_: int = 0


Computed.__dataclass_fields__["loaded"] = dataclasses.field(default=0)
Computed.__dataclass_fields__["loaded"]._field_type = dataclasses._FIELD  # pyright: ignore[reportAttributeAccessIssue]


class Wrapped(torch.Tensor):
    """A tensor whose operations are the user's."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        CALLED.append(str(func))
        return super().__torch_function__(func, types, args, kwargs or {})


class Name(str):
    """A key that computes."""

    __hash__ = noted("hash", str.__hash__)  # pyright: ignore[reportAssignmentType]
    __eq__ = noted("eq", str.__eq__)  # pyright: ignore[reportAssignmentType]
    __repr__ = noted("repr", str.__repr__)  # pyright: ignore[reportAssignmentType]
    encode = noted("encode", str.encode)  # pyright: ignore[reportAssignmentType]


class Colour(enum.IntEnum):
    RED = 1

    def __repr__(self) -> str:
        CALLED.append("repr")
        return "red"


UNREADABLE: dict[str, Callable[[], Any]] = {
    "a mapping that computes": Lazy,
    "a sequence that hands out once": Taken,
    "a dataclass that computes": lambda: Computed(1),
    "a tensor of the user's": lambda: torch.rand(3).as_subclass(Wrapped),
    "any object": lambda: hostile(object)(),
    "a list of the user's": lambda: hostile(list)([1, 2]),
    "a tuple of the user's": lambda: hostile(tuple)((1, 2)),
    "a dict of the user's": lambda: hostile(dict, "items", "keys", "values", "get")(a=1),
    "a UserDict of the user's": lambda: hostile(collections.UserDict, "items", "keys", "get")(a=1),
    "an array of the user's": lambda: numpy.arange(3).view(hostile(numpy.ndarray, "tobytes", "reshape")),
    "a dict of objects": lambda: {"x": hostile(object)()},
}
READABLE: dict[str, tuple[Callable[[], Any], Any]] = {
    "an integer of the user's": (lambda: hostile(int)(3), 3),
    "text of the user's": (lambda: hostile(str, "encode")("a"), "a"),
    "bytes of the user's": (lambda: hostile(bytes)(b"a"), b"a"),
    "keys of the user's": (lambda: {Name("a"): 1, Name("b"): 2}, {"a": 1, "b": 2}),
    "an enumeration": (lambda: [Colour.RED], [1]),
    "an ordered dict": (lambda: collections.OrderedDict(b=1, a=2), {"a": 2, "b": 1}),
    "a dict with attributes": (lambda: type("Box", (dict,), {"__getattr__": noted("__getattr__")})(a=1), {"a": 1}),
    "a counter": (lambda: collections.Counter("a"), {"a": 1}),
    "a list with a method": (lambda: type("Boxes", (list,), {"area": noted("area")})([1]), [1]),
}


def calls_of(work: Callable[[], Any]) -> list[str]:
    """Which methods of the user's this calls."""
    CALLED.clear()
    work()
    return list(CALLED)


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_may_compute_is_not_read(name):
    """No method of it is called, neither for the batch nor for a sample or the indices of a stream."""
    value = UNREADABLE[name]()
    found: list[Any] = []

    def read() -> None:
        found.append(begin_fingerprint(value))
        found.append(fingerprint([torch.rand(2), value]))
        list(FirstElements().follow(iter([value])))
        list(FirstElements().follow(iter([value]), seen=indices_seen(None)))

    assert calls_of(read) == []
    assert found == [None, None]


@pytest.mark.parametrize("name", READABLE)
def test_what_stores_is_read_from_its_storage(name):
    """It has the fingerprint of the plain value, and no method of it is called."""
    make, plain = READABLE[name]
    value, found = make(), list[Any]()
    assert calls_of(lambda: found.append(fingerprint(value))) == []
    assert found == [fingerprint(plain)]


def test_the_mappings_of_transformers_are_read():
    transformers = pytest.importorskip("transformers")
    expected = fingerprint({"input_ids": torch.arange(4)})
    assert fingerprint(transformers.BatchEncoding({"input_ids": torch.arange(4)})) == expected
    assert fingerprint(transformers.BatchFeature({"input_ids": torch.arange(4)})) == expected
    assert fingerprint(transformers.modeling_outputs.BaseModelOutput(torch.zeros(2))) == fingerprint(
        {"last_hidden_state": torch.zeros(2)}
    )


def test_the_tensors_of_torchvision_are_read():
    vision = pytest.importorskip("torchvision.tv_tensors")
    assert fingerprint(vision.Image(torch.ones(3, 4, 4))) == fingerprint(torch.ones(3, 4, 4))


def test_a_packed_sequence_is_read():
    packed = torch.nn.utils.rnn.pack_sequence([torch.arange(3), torch.arange(2)])
    assert fingerprint(packed) == fingerprint(tuple(packed))


def test_memory_that_was_given_back_is_not_read():
    tensor = torch.rand(100)
    part = tensor[10:]
    tensor.untyped_storage().resize_(0)
    assert fingerprint([tensor]) is None
    assert fingerprint([part]) is None


def test_an_attribute_is_found_only_where_it_is_stored():
    class Slotted:
        __slots__ = ("a", "b")

    slotted = Slotted()
    slotted.a = 1
    assert attribute_of(slotted, "a") == 1
    assert attribute_of(slotted, "b") is ABSENT
    assert attribute_of(Computed(1), "loaded") is ABSENT
    assert attribute_of(Computed(1), "given") == 1
    assert attribute_of(hostile(object)(), "a") is ABSENT


class Dispatched(TorchDispatchMode):
    """Counts the operations of its thread."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    """Counts the calls of torch's functions on its thread."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


BATCH = {
    "images": torch.rand(4, 3, 100, 300),
    "last": torch.rand(4, 3, 8, 8).contiguous(memory_format=torch.channels_last),
    "half": torch.rand(5, 7, dtype=torch.bfloat16).mT,
    "weight": torch.nn.Parameter(torch.rand(3)),
    "labels": [torch.tensor(1), True, "a"],
}


@pytest.mark.parametrize(
    "context",
    [
        torch.inference_mode,
        lambda: torch.device("meta"),
        FakeTensorMode,
        lambda: torch.autocast("cpu"),
        Dispatched,
        Called,
        lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    ],
    ids=["inference", "default device", "fake tensors", "autocast", "dispatch", "functions", "anomaly"],
)
def test_a_fingerprint_is_the_same_under_any_mode(context):
    expected = fingerprint(BATCH)
    assert expected is not None
    with context():
        assert fingerprint(BATCH) == expected


def test_no_mode_sees_a_fingerprint():
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=torch.tensor(0.5))  # pyright: ignore[reportArgumentType]
    with Dispatched() as dispatched, Called() as called:
        assert fingerprint(BATCH) is not None
        list(FirstElements().follow(iter([BATCH] * 2)))
        assert learning_rates([optimizer]) == [0.5]
        with unobserved():
            hash_bits(torch.rand(3))
        assert (dispatched.seen, called.seen) == ([], [])
        torch.zeros(1)
    assert len(dispatched.seen) == len(called.seen) == 1


def test_no_profiler_sees_a_fingerprint():
    with profile() as profiler:
        fingerprint(BATCH)
    assert [event.key for event in profiler.key_averages() if event.key.startswith("aten::")] == []


def test_a_mode_is_there_again_after_an_exception():
    with Dispatched() as dispatched:
        with contextlib.suppress(ValueError), unobserved():
            raise ValueError
        torch.zeros(1)
    assert len(dispatched.seen) == 1
