"""The other ranks, for a check that is tested by itself."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from countoff.core.protocol.records import Records
from countoff.core.verdict import Verdict


class OthersThatKeep:
    """Keeps what a check reports to them, and says nothing.

    Args:
        reported: Where the records go.
    """

    speaker: Any = None

    def __init__(self, reported: list[Any]) -> None:
        self.reported = reported

    def compare(
        self, key: str, record: Callable[[], Mapping[str, Any]], judge: Callable[[Mapping[str, Any]], Verdict | None]
    ) -> None:
        del key, judge
        self.reported.append(record())

    def report(
        self,
        name: str,
        record: Mapping[str, Any],
        judge: Callable[[Records], Iterable[Verdict | None]],
        *,
        owed: bool = True,
    ) -> None:
        del name, judge, owed
        self.reported.append(dict(record))
