"""The other ranks, as the checks of one guard reach them: to compare a record, to report, to ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from countoff.core.levels import effect
from countoff.core.protocol.records import verdict_entry
from countoff.core.session.state import State
from countoff.core.session.threads.questions import Questions
from countoff.core.session.threads.roll_call import RollCall
from countoff.core.verdict import Verdict

if TYPE_CHECKING:
    from countoff.core.session.store.channel import Channel
    from countoff.core.session.threads.writer import Writer

__all__ = ["OtherRanks", "find_at_once"]


class OtherRanks:
    """The other ranks, as the checks of one guard reach them; see `countoff.core.checks.check.Others`.

    Args:
        state: This rank's state.
        writer: The guard's writer.
        roll_call: The guard's roll calls.
    """

    def __init__(self, state: State, writer: Writer, roll_call: RollCall) -> None:
        self._state, self._writer = state, writer
        questions = Questions(state, writer)
        self.report, self.settle_report = roll_call.report, roll_call.settle_report
        self.ask, self.answer, self.settle_question = questions.ask, questions.answer, questions.settle

    def compare(
        self,
        key: str,
        record: Callable[[], Mapping[str, Any]],
        judge: Callable[[Mapping[str, Any]], Verdict | None],
        *,
        ranks: int = 0,
    ) -> None:
        """Compares a record with that of the rank that wrote first under the same key."""
        state, writer = self._state, self._writer

        def compare(channel: Channel) -> None:
            if (verdict := judge(channel.compare_and_set(key, dict(record())))) is not None:
                find_at_once(state, writer, channel, verdict)
            if ranks:
                writer.submit(count)  # behind what the judge may have asked: without the key, nothing more comes

        def count(channel: Channel) -> None:
            if channel.add(f"{key}/seen", 1) == ranks:
                channel.delete(key)
                channel.delete(f"{key}/seen")

        writer.submit(compare)

    def entries_read(self) -> int:
        """Returns how many entries of the log this rank needs no more."""
        return self._writer.session.passed

    def all_have_read(self, entries: int) -> None:
        """Tells that no rank needs the first entries of the log any more."""
        self._writer.session.heartbeats.all_have_read(entries)


def find_at_once(state: State, writer: Writer, channel: Channel, verdict: Verdict) -> None:
    """Writes what a comparison has found, and not behind the later ones that wait.

    Otherwise another rank could find the same by one of these first. Runs on the writer thread.

    Args:
        state: This rank's state.
        writer: The guard's writer.
        channel: The guard's channel.
        verdict: The finding.
    """
    state.find(verdict)
    level = effect(verdict, state.settings.levels)
    if state.comparing and level != "off":
        entry = verdict_entry("end" if level == "raise" else "notice", verdict)
        writer.append(entry, lambda: state.is_written(entry))(channel)
