"""The other ranks, for a check that is tested by itself."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from countoff.core.protocol.records import Records
from countoff.core.verdict import Verdict


class KeptRecords:
    """Keeps what a check sends to the other ranks, and what it finds in their records.

    Args:
        logged: What the rank that wrote first has written, wherever records are compared; None: this rank is first.

    Attributes:
        reported: The records of this rank.
        found: What the check found.
    """

    def __init__(self, logged: Mapping[str, Any] | None = None) -> None:
        self.reported: list[Any] = []
        self.found: list[Verdict] = []
        self._logged = logged

    def compare(
        self,
        key: str,
        record: Callable[[], Mapping[str, Any]],
        judge: Callable[[Mapping[str, Any]], Verdict | None],
        *,
        ranks: int = 0,
    ) -> None:
        del key, ranks
        self.reported.append(dict(record()))
        if self._logged is not None and (verdict := judge(self._logged)) is not None:
            self.found.append(verdict)

    def ask(
        self, kind: str, question: Mapping[str, Any], group: Sequence[int], judge: Callable[[Records], Verdict | None]
    ) -> None:
        raise AssertionError(f"{kind} asked for a second exchange")

    def answer(self, kind: str, answer: Callable[[Mapping[str, Any]], Mapping[str, Any] | None]) -> None:
        """Nobody asks here."""

    def settle_question(self, kind: str, comparisons: Sequence[str] = ()) -> None:
        """Nobody asks here."""

    def settle_report(self, name: str) -> None:
        """Nobody judges here."""

    def entries_read(self) -> int:
        return 0

    def all_have_read(self, entries: int) -> None:
        """There is no log here."""

    def report(
        self,
        name: str,
        record: Callable[[], Mapping[str, Any]],
        judge: Callable[[Records], Iterable[Verdict | None]],
        *,
        owed: bool = True,
        after: Sequence[str] = (),
    ) -> None:
        del name, judge, owed, after
        self.reported.append(dict(record()))
