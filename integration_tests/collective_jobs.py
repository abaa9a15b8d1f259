"""Loops in which one rank issues other collectives than its peers, or may; each returns what was warned of."""

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from countoff.core.liveness import collectives
from countoff.torch import attach
from integration_tests import devices
from integration_tests.constants import put
from integration_tests.jobs import own_rank
from integration_tests.loops import even_loader, model_and_optimizer, train_on

AT = 41
"""The batch in which something is done once."""
BATCHES, TICK = 104, 8
_SAMPLES_PER_BATCH = 4


class Program:
    """What ranks issue in each batch besides the all_reduce of the gradients.

    Attributes:
        metric: As large as the gradients' one bucket, so that it can pair with that.
        odd: Whether this is the rank that does otherwise, if one does.
    """

    def __init__(self, group: Any) -> None:
        self.metric = torch.zeros(650)
        self.odd = own_rank() == dist.get_world_size() - 1
        self.threads: list[threading.Thread] = []
        self._group = group

    def nothing(self, number: int) -> None:
        """Nothing more."""

    def metric_each_batch(self, number: int) -> None:
        """A metric of all ranks."""
        dist.all_reduce(self.metric)

    def metric_left_out_once(self, number: int) -> None:
        """One rank leaves the metric out once: its all_reduce pairs with the gradients of the others from there on."""
        if not (self.odd and number == AT):
            dist.all_reduce(self.metric)
        if self.odd and number == BATCHES:  # what a longer program would issue next
            dist.all_reduce(self.metric)

    def barrier_too_many(self, number: int) -> None:
        """One rank waits twice, and nothing else is exchanged: its second barrier meets the next one of the others."""
        dist.barrier()
        if (self.odd and number == AT) or (number == BATCHES and not self.odd):
            dist.barrier()

    def message_each_batch(self, number: int) -> None:
        """One rank sends to another one, as in a pipeline."""
        self._gather_by_messages([1])

    def messages_once(self, number: int) -> None:
        """All ranks send something to the first one, once."""
        if number == AT:
            self._gather_by_messages(range(1, dist.get_world_size()))

    def message_of_two_ranks_once(self, number: int) -> None:
        """Two of the ranks exchange something, once."""
        if number == AT:
            self._gather_by_messages([1])

    def _gather_by_messages(self, senders: Sequence[int]) -> None:
        if own_rank() == 0:
            for sender in senders:
                dist.recv(self.metric, sender)
        elif own_rank() in senders:
            dist.send(self.metric, 0)

    def early_once(self, number: int) -> None:
        """One rank joins a collective two batches before the others do, and before a tick."""
        if number == (6 * TICK - 1 if self.odd else 6 * TICK + 1):
            work = dist.all_reduce(self.metric, group=self._group, async_op=True)
            assert work is not None
            self.threads.append(threading.Thread(target=work.wait))
            self.threads[-1].start()

    def thread_now_and_then(self, number: int) -> None:
        """A thread of each rank issues its own collective, each at another time, as one that writes checkpoints."""
        if number % 40 == 1:
            self.threads.append(threading.Thread(target=self._after_a_while, args=[own_rank() * 0.02]))
            self.threads[-1].start()

    def _after_a_while(self, seconds: float) -> None:
        time.sleep(seconds)
        dist.all_reduce(torch.zeros(3), group=self._group)

    def two_ranks_of_a_group(self, number: int) -> None:
        """Two ranks issue collectives in a group of their own, once in a while."""
        if number in (AT, AT + 50) and own_rank() < 2:
            dist.all_reduce(self.metric, group=self._pair)

    @property
    def _pair(self) -> Any:
        return self._group if dist.get_world_size() == 2 else _pairs[0]

    def join(self) -> None:
        """Ends what is still under way."""
        for thread in self.threads:
            thread.join()


_pairs: list[Any] = []
"""A group of the first two of more ranks: all ranks make it."""


NAMED = ("metric_left_out_once", "barrier_too_many")
"""Programs of which there is something to say."""


def train(programs: Sequence[str], options: dict[str, Any] | None = None) -> list[dict[str, str]]:
    """Trains with one program after the other on the same ranks; returns what was warned of in each."""
    put(TICK_BATCHES=TICK)
    devices.join()
    group = dist.new_group()
    if dist.get_world_size() > 2:
        _pairs.append(dist.new_group([0, 1]))
    found: list[dict[str, str]] = []
    for name in programs:
        program = Program(group)
        model, optimizer = model_and_optimizer()
        loader = even_loader(BATCHES * _SAMPLES_PER_BATCH * dist.get_world_size())
        handle = attach(train=loader, optimizer=optimizer, compare_data=False, **(options or dict[str, Any]()))
        for number, batch in enumerate(loader, 1):
            train_on(model.module if name == "barrier_too_many" else model, optimizer, batch)
            getattr(program, name)(number)
        program.join()
        while name in NAMED and options is None and own_rank() == 0 and not handle.guard.notices:
            time.sleep(0.01)  # a busy machine may take longer to answer than the job to end
        dist.barrier()
        handle.detach()
        found.append({each.kind: each.sentence for each in handle.guard.notices})
    return found


def train_until_warned(name: str) -> dict[str, Any]:
    """As `train`, but ends once the first rank has the warning; returns it, and how often torch's recorder was read."""
    put(TICK_BATCHES=TICK)
    devices.join()
    group = dist.new_group()
    if dist.get_world_size() > 2:
        _pairs.append(dist.new_group([0, 1]))
    program, reads = Program(group), _count_reads()
    model, optimizer = model_and_optimizer()
    loader = even_loader(BATCHES * _SAMPLES_PER_BATCH * dist.get_world_size())
    handle = attach(train=loader, optimizer=optimizer, compare_data=False)
    for number, batch in enumerate(loader, 1):
        train_on(model.module if name == "barrier_too_many" else model, optimizer, batch)
        getattr(program, name)(number)
        while number == BATCHES and name in NAMED and own_rank() == 0 and not handle.guard.notices:
            time.sleep(0.01)
    dist.barrier()
    handle.detach()
    return {"warned": {each.kind: each.sentence for each in handle.guard.notices}, "reads": len(reads)}


def _count_reads() -> list[bool]:
    """A list that grows with each read of torch's recorder."""
    reads: list[bool] = []
    read = getattr(collectives, "_dump_with_lines")  # noqa: B009  (private)

    def counting() -> Any:
        reads.append(True)
        return read()

    setattr(collectives, "_dump_with_lines", counting)  # noqa: B010
    return reads


def train_locally() -> dict[str, str]:
    """Local SGD: ranks average their weights every ten batches."""
    put(TICK_BATCHES=TICK)
    devices.join()
    model, optimizer = model_and_optimizer()
    loader = even_loader(BATCHES * _SAMPLES_PER_BATCH * dist.get_world_size())
    handle = attach(train=loader, optimizer=optimizer, compare_data=False)
    for number, batch in enumerate(loader, 1):
        train_on(model.module, optimizer, batch)
        if number % 10 == 0:
            for parameter in model.module.parameters():
                dist.all_reduce(parameter.data)
                parameter.data /= dist.get_world_size()
    dist.barrier()
    handle.detach()
    return {each.kind: each.sentence for each in handle.guard.notices}
