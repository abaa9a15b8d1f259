"""What the threads of a loop let countoff prove.

A framework's trainer takes its batches and its steps on one thread, and says so through its hooks. A loop that a person
writes may use several: one that prefetches, one that evaluates while the next epoch trains. Between two threads there
is no order, so counts of two threads must not be compared with one another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Evidence:
    """What one rank's threads do. The thread that makes it is the one that begins the fit.

    Attributes:
        home: The thread that has begun the fit.
        current: Returns the thread that calls it.
        optimizers_told: Whether the steps that are told are those of optimizers which the user or the framework has
            named; otherwise they are those of all optimizers of the process.
        own_loop: Whether a person writes the loop. Who evaluates is then no proof of harm, and a break may leave an
            epoch that goes on after a resume.
        steps_by_batch: Whether it is known after which batch each optimizer step was applied: batches and steps are on
            one thread.
    """

    home: int = field(default_factory=threading.get_ident)
    current: Callable[[], int] = threading.get_ident
    optimizers_told: bool = False
    own_loop: bool = False
    steps_by_batch: bool = True
    _taker: int | None = None
    _takers: set[int] = field(default_factory=set[int])
    _stepper: int | None = None
    _round: set[object] = field(default_factory=set[object])
    _optimizers: set[object] = field(default_factory=set[object])

    def has_order(self, *, evaluation: bool, thread: int) -> bool:
        """Whether a pass that begins has its place in the order of all passes of this rank.

        The train epochs have one: each ends the one before it. An evaluation has one on the thread of the train epochs;
        before the first of them, on the thread that has begun the fit.

        >>> evidence = Evidence(home=1)
        >>> evidence.takes(2)  # a thread that prefetches the train batches
        >>> [evidence.has_order(evaluation=True, thread=thread) for thread in (1, 2)]
        [False, True]
        """
        return not evaluation or thread == (self.home if self._taker is None else self._taker)

    def takes(self, thread: int) -> None:
        """The train batches are taken on this thread from here on.

        Away from the thread that has begun the fit, that thread is taken to apply the steps, until a step shows it.
        """
        self._taker = thread
        self._takers.add(thread)
        self.steps_by_batch = len(self._takers) == 1 and self.is_stepper(thread)

    def steps(self, thread: int) -> None:
        """An optimizer step was applied on this thread."""
        self._stepper = thread
        self.steps_by_batch = not self._takers or self._takers == {thread}

    def is_stepper(self, thread: int) -> bool:
        """Whether a thread applies the optimizer steps; until a step shows it, that is taken to be the fit's own."""
        return thread == self.trainer

    @property
    def trainer(self) -> int:
        """The thread that trains: it has applied the last step; before the first one, it has begun the fit."""
        return self.home if self._stepper is None else self._stepper

    def has_stepped(self, thread: int) -> bool:
        """Whether a thread has applied the last optimizer step: on another one, a scheduler may be in mid-step."""
        return thread == self._stepper

    def begins_round(self, optimizer: object, *, in_epoch: bool) -> bool:
        """Whether a step begins a new round of steps, in which each optimizer steps once.

        Where steps belong to no batch, rounds are counted. An optimizer that nobody has named, and that has never
        stepped while a train epoch was open, belongs to something else, as to a probe of one rank.

        >>> evidence = Evidence()
        >>> [evidence.begins_round(each, in_epoch=True) for each in ("critic", "critic", "actor", "critic")]
        [True, True, False, True]
        """
        if in_epoch or self.optimizers_told:
            self._optimizers.add(optimizer)
        elif optimizer not in self._optimizers:
            return False
        begins = not self._round or optimizer in self._round
        self._round = {optimizer} if begins else {*self._round, optimizer}
        return begins

    def knows_steps(self, *, in_epoch: bool) -> bool:
        """Whether the steps that are counted now can be compared with those of other ranks at the same point.

        On another thread than the one that applies them, or while that thread may still apply some, they cannot. Nor
        can they where it is not known which optimizers are those of the loop.
        """
        return self.steps_by_batch or (self.optimizers_told and not in_epoch and self.is_stepper(self.current()))
