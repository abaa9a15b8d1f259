"""A store in memory and a writer on it, for tests that start no thread and open no connection."""

from collections.abc import Mapping, Sequence
from typing import Any

from countoff.core.session.state import State
from countoff.core.session.store.channel import Channel, decode, encode
from countoff.core.session.store.gathering import Pollable
from countoff.core.session.threads.writer import Job, Writer


class FakeStore(Channel):
    """Behaves as a TCPStore does behind a `Channel`; `test_channel.py` compares the two.

    All ranks of a test share one object. Records pass through `encode` and `decode`, as on their way to the real store.
    A call that would block for ever on the real store raises `KeyError` here.

    Attributes:
        values: What the store holds, by key.
    """

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._whole = None

    def set(self, key: str, record: Mapping[str, Any]) -> None:
        self.values[key] = encode(record).encode()

    def compare_and_set(self, key: str, record: Mapping[str, Any]) -> dict[str, Any]:
        return decode(self.values.setdefault(key, encode(record).encode()))

    def has(self, *keys: str) -> bool:
        return all(key in self.values for key in keys)

    def get(self, key: str) -> dict[str, Any]:
        return decode(self.values[key])

    def get_many(self, keys: Sequence[str]) -> list[dict[str, Any]]:
        return [decode(self.values[key]) for key in keys]

    def add(self, key: str, amount: int) -> int:
        total = int(self.values.get(key, b"0")) + amount
        self.values[key] = str(total).encode()
        return total

    def own_address(self) -> str:
        return "192.0.2.1"

    def store_address(self) -> str:
        return "192.0.2.1"

    def is_over(self) -> bool:
        return False

    def be_patient(self, seconds: float) -> None:
        pass

    def keep_alive(self, seconds: float) -> None:
        del seconds

    def delete(self, key: str) -> None:
        self.values.pop(key, None)


class FakeWriter(Writer):
    """Runs each job at once, on the calling thread. Actions stay in the outbox of the state, where a test reads them.

    Attributes:
        store: The store that jobs and polls get.
        pollables: What waits to be polled.
    """

    def __init__(self, state: State, store: FakeStore) -> None:
        super().__init__(state)
        self.store = store
        self.pollables: list[Pollable] = []

    def submit(self, job: Job | None) -> None:
        if job is not None:
            job(self.store)

    def poll(self, pollable: Pollable, *, awaited: bool = False) -> None:
        del awaited
        self.pollables.append(pollable)

    def poll_once(self) -> bool:
        """Polls everything that waits, once; whether nothing waits any more."""
        self.pollables = [pollable for pollable in self.pollables if not pollable.poll(self.store)]
        return not self.pollables
