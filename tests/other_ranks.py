"""The other ranks, for a check that is tested by itself."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from countoff.core.protocol.records import Records
from countoff.core.verdict import Verdict


class KeptRecords:
    """Keeps what a check sends to the other ranks, and what it finds in their records.

    Args:
        standing: What the rank that wrote first has written, wherever records are compared; None: this rank is first.
        speaker: The guard's speaker, for a check that uses it.

    Attributes:
        reported: The records of this rank.
        found: What the check found.
    """

    def __init__(self, standing: Mapping[str, Any] | None = None, speaker: Any = None) -> None:
        self.speaker = speaker
        self.reported: list[Any] = []
        self.found: list[Verdict] = []
        self._standing = standing

    def compare(
        self, key: str, record: Callable[[], Mapping[str, Any]], judge: Callable[[Mapping[str, Any]], Verdict | None]
    ) -> None:
        del key
        self.reported.append(dict(record()))
        if self._standing is not None and (verdict := judge(self._standing)) is not None:
            self.found.append(verdict)

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
