"""Batches of odd types: what a loader returns belongs to the program, and nobody else may touch it."""

import collections
import dataclasses
import enum
import gc
import pathlib
import types
import weakref
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pack_sequence

from countoff.torch import Countoff
from integration_tests.digits import own_rank
from integration_tests.zoo.parts import Listed, Unsized, ddp, loss_of, own_batches, sgd, sharded, train_on
from integration_tests.zoo.registry import healthy


class Pair(NamedTuple):
    """A batch with names."""

    inputs: torch.Tensor
    labels: torch.Tensor


class Lazy(Mapping):
    """Draws noise whenever its inputs are read."""

    def __init__(self, inputs, labels):
        self.content = {"inputs": inputs, "labels": labels}

    def __getitem__(self, name):
        value = self.content[name]
        return value + 0.1 * torch.randn_like(value) if name == "inputs" else value

    def __iter__(self):
        return iter(self.content)

    def __len__(self):
        return len(self.content)


class Taken(Sequence):
    """Gives each item once."""

    def __init__(self, *items):
        self.items = list(items)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        item, self.items[index] = self.items[index], None
        if item is None:
            raise RuntimeError(f"item {index} was already taken")
        return item


def _fit(batches, options, pair=lambda batch: batch, epochs=2):
    """Trains on batches of any type: `pair` takes the inputs and the labels out of one."""
    model, loader = ddp(), Listed(batches)
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for _ in range(epochs):
            for batch in countoff.train(loader):
                train_on(model, optimizer, pair(batch))
    return model


@healthy()
def mapping_that_draws_on_access(options):
    """A batch is a mapping that draws random numbers whenever it is read."""
    return _fit([Lazy(*batch) for batch in own_batches()], options, lambda batch: (batch["inputs"], batch["labels"]))


@healthy(even=True)
def sequence_that_gives_once(options):
    """A batch is a sequence that gives each of its items once."""
    return _fit([Taken(*batch) for batch in own_batches()], options, lambda batch: (batch[0], batch[1]), epochs=1)


@healthy(even=True)
def named_tuple(options):
    """A batch is a named tuple."""
    return _fit([Pair(*batch) for batch in own_batches()], options)


@healthy(even=True)
def data_class(options):
    """A batch is a frozen data class with a weight and a path beside its tensors."""

    @dataclasses.dataclass(frozen=True)
    class Batch:
        inputs: torch.Tensor
        labels: torch.Tensor
        weight: float = 0.5
        path: pathlib.Path = pathlib.Path("/data")

    return _fit([Batch(*each) for each in own_batches()], options, lambda batch: (batch.inputs, batch.labels))


@healthy(even=True)
def user_dict(options):
    """A batch is a UserDict, as the output of a tokenizer is."""
    batches = [collections.UserDict(inputs=inputs, labels=labels) for inputs, labels in own_batches()]
    return _fit(batches, options, lambda batch: (batch["inputs"], batch["labels"]))


@healthy(even=True)
def user_string_beside_a_tensor(options):
    """A batch is a list whose first item is a UserString."""
    batches = [[collections.UserString("abc"), *batch] for batch in own_batches()]
    return _fit(batches, options, lambda batch: batch[1:])


@healthy(even=True)
def deep_nesting(options):
    """A batch is a tree of lists, tuples and mappings with None, an enum, a fraction and a set in it."""
    colour = enum.Enum("Colour", "RED")
    batches = [
        {"tree": [({"inputs": inputs}, None), [colour.RED, {1, 2}, Fraction(1, 3)]], "labels": (labels,)}
        for inputs, labels in own_batches()
    ]
    return _fit(batches, options, lambda batch: (batch["tree"][0][0]["inputs"], batch["labels"][0]))


@healthy(even=True)
def batch_that_contains_itself(options):
    """A batch is a list that contains itself."""
    batches: list[list[Any]] = [list(batch) for batch in own_batches()]
    for batch in batches:
        batch.append(batch)
    return _fit(batches, options, lambda batch: batch[:2])


@healthy(even=True)
def numpy_arrays(options):
    """A batch is a pair of numpy arrays, one of them with negative strides."""
    batches = [(inputs.numpy()[::-1], labels.numpy()) for inputs, labels in own_batches()]
    return _fit(batches, options, lambda batch: (torch.from_numpy(batch[0].copy()), torch.from_numpy(batch[1])))


@healthy(even=True)
def numpy_records(options):
    """A batch is a structured array, and another one an array of objects."""
    kind = np.dtype([("inputs", "f4", (8,)), ("label", "i8")])
    batches = []
    for inputs, labels in own_batches():
        records = np.empty(4, kind)
        records["inputs"], records["label"] = inputs.numpy(), labels.numpy()
        batches.append((records, np.array([object(), None, "x", 3], dtype=object)))
    return _fit(
        batches,
        options,
        lambda batch: (torch.from_numpy(batch[0]["inputs"].copy()), torch.from_numpy(batch[0]["label"].copy())),
    )


@healthy(even=True)
def plain_numbers(options):
    """A batch is one whole number: the index of tensors that the program holds."""
    held = own_batches()
    return _fit(range(len(held)), options, lambda number: held[number])


@healthy(even=True)
def strings_and_bytes(options):
    """A batch is a list of strings and bytes, of which the program makes numbers."""

    def parse(batch):
        text, raw = batch
        return torch.tensor([[float(digit) for digit in line] for line in text]), torch.tensor(list(raw))

    batches = [([f"{number + own_rank():08b}"] * 4, bytes([0, 1, 2, 3])) for number in range(8)]
    return _fit(batches, options, parse)


@healthy(even=True)
def nothing_as_a_batch(options):
    """Every second batch is None, which the program leaves out."""
    model, loader = ddp(), Unsized([each for batch in own_batches(5) for each in (batch, None)])
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for _ in range(2):
            for batch in countoff.train(loader):
                if batch is not None:
                    train_on(model, optimizer, batch)
    return model


@healthy(even=True)
def empty_containers(options):
    """Batches are empty: an empty list, an empty mapping, a tensor without elements."""
    loader = Listed([[], {}, (), torch.empty(0, 3), np.empty((0,)), ""] * 2)
    with Countoff(**options) as countoff:
        return [sum(1 for _ in countoff.train(loader)) for _ in range(2)]


@healthy(even=True)
def packed_sequences(options):
    """A batch is a packed sequence for a recurrent network."""
    recurrent = torch.nn.GRU(8, 4)
    batches = [pack_sequence([inputs[:3], inputs[:2]]) for inputs, _ in own_batches()]
    loader = Listed(batches)
    with Countoff(**options) as countoff:
        return [recurrent(batch)[1] for batch in countoff.train(loader)]


@healthy(even=True, needs="transformers")
def batch_encoding(options):
    """A batch is a BatchEncoding of transformers."""
    from transformers import BatchEncoding

    batches = [BatchEncoding({"inputs": inputs, "labels": labels}) for inputs, labels in own_batches()]
    return _fit(batches, options, lambda batch: (batch["inputs"], batch["labels"]))


@healthy(even=True)
def half_and_boolean_tensors(options):
    """A batch has tensors of bfloat16, booleans, complex numbers and eight-bit numbers."""
    batches = [
        (inputs.bfloat16(), labels, labels > 1, torch.complex(inputs, inputs), labels.to(torch.uint8))
        for inputs, labels in own_batches()
    ]
    return _fit(batches, options, lambda batch: (batch[0].float(), batch[1]))


@healthy(even=True)
def sparse_tensors(options):
    """The inputs are sparse tensors."""
    batches = [(inputs.relu().to_sparse(), labels) for inputs, labels in own_batches()]
    return _fit(batches, options, lambda batch: (batch[0].to_dense(), batch[1]))


@healthy(even=True)
def nested_tensors(options):
    """The inputs are nested tensors of rows of different lengths."""
    batches = [
        (torch.nested.nested_tensor([inputs[0], inputs[1, :3]], layout=torch.jagged), inputs, labels)
        for inputs, labels in own_batches()
    ]
    return _fit(batches, options, lambda batch: batch[1:])


@healthy(even=True)
def meta_tensors(options):
    """A batch has a tensor without storage beside its inputs."""
    return _fit([(torch.empty(4, device="meta"), *batch) for batch in own_batches()], options, lambda batch: batch[1:])


@healthy(even=True)
def subclass_of_tensor(options):
    """The inputs are of a subclass of Tensor that counts the operations on it."""

    class Counted(torch.Tensor):
        operations = 0

        @classmethod
        def __torch_function__(cls, function, kinds, args=(), kwargs=None):
            Counted.operations += 1
            return super().__torch_function__(function, kinds, args, kwargs)

    batches = [(inputs.as_subclass(Counted), labels) for inputs, labels in own_batches()]
    Counted.operations = 0
    model = _fit(batches, options, lambda batch: (torch.Tensor(batch[0].as_subclass(torch.Tensor)), batch[1]))
    return model, Counted.operations


@healthy(even=True)
def tensors_that_need_gradients(options):
    """The inputs require gradients, and the program reads these after each step."""
    model, loader = ddp(), Listed([(inputs.clone().requires_grad_(), labels) for inputs, labels in own_batches()])
    optimizer = sgd(model)
    gradients = []
    with Countoff(optimizer=optimizer, **options) as countoff:
        for inputs, labels in countoff.train(loader):
            train_on(model, optimizer, (inputs, labels))
            gradients.append(inputs.grad)
    return model, gradients


@healthy(even=True)
def batch_changed_in_place(options):
    """The loop adds noise to its batches in place."""
    model, loader = ddp(), sharded(64)
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for inputs, labels in countoff.train(loader):
            inputs.add_(torch.randn_like(inputs))
            train_on(model, optimizer, (inputs, labels))
    return model


@healthy()
def batch_dies_when_it_is_deleted(options):
    """A weak reference to a batch is dead as soon as the loop has deleted the batch."""
    model, loader = ddp(), sharded(32)
    optimizer = sgd(model)
    alive = 0
    with Countoff(optimizer=optimizer, **options) as countoff:
        for batch in countoff.train(loader):
            inputs, labels = batch
            reference, copied = weakref.ref(inputs), inputs.clone()
            del batch, inputs
            gc.collect()
            alive += reference() is not None
            train_on(model, optimizer, (copied, labels))
    return model, alive


@healthy(even=True)
def equality_that_is_forbidden(options):
    """A batch is an object that refuses to be compared, hashed, tested for truth, printed or measured."""

    class Shy:
        __hash__: Any = None

        def __init__(self, pair):
            self.pair = pair

        def refuse(self, *_):
            raise TypeError("leave me alone")

        __eq__ = __bool__ = __repr__ = __len__ = __iter__ = __getitem__ = refuse

    return _fit([Shy(batch) for batch in own_batches()], options, lambda batch: batch.pair)


@healthy(even=True)
def attributes_that_are_computed(options):
    """A batch is an object whose attributes are computed when they are read, and counted."""
    read = []

    class Computed:
        def __init__(self, pair):
            self._pair = pair

        def __getattr__(self, name):
            read.append(name)
            return 1

    model = _fit([Computed(batch) for batch in own_batches()], options, lambda batch: batch._pair)
    return model, read


@healthy(even=True)
def namespace_and_proxy(options):
    """A batch is a namespace, and the next one a read-only view of a mapping."""
    batches = []
    for number, (inputs, labels) in enumerate(own_batches()):
        content = {"inputs": inputs, "labels": labels}
        batches.append(types.SimpleNamespace(**content) if number % 2 else types.MappingProxyType(content))

    def pair(batch):
        content = vars(batch) if isinstance(batch, types.SimpleNamespace) else batch
        return content["inputs"], content["labels"]

    return _fit(batches, options, pair)


@healthy(even=True)
def generator_as_a_batch(options):
    """A batch is a generator of micro-batches, which can be read once."""

    def halves(inputs, labels):
        yield inputs[:2], labels[:2]
        yield inputs[2:], labels[2:]

    class Fresh(Unsized):
        def __iter__(self):
            return (halves(*batch) for batch in self.batches)

    model, loader = ddp(), Fresh(own_batches())
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for _ in range(2):
            for micro_batches in countoff.train(loader):
                for micro_batch in micro_batches:
                    loss_of(model, micro_batch).backward()
                optimizer.step()
                optimizer.zero_grad()
    return model
