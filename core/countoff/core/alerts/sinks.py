"""Sinks: where findings go. Each is called with the `Finding`; one that fails holds nothing else up."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points

from countoff.core import constants
from countoff.core.alerts.notifications import Notifications
from countoff.core.alerts.termination_log import TerminationLog
from countoff.core.finding import Finding
from countoff.core.settings import Settings

__all__ = ["GROUP", "AlertSink", "addresses", "of_host", "of_user"]

GROUP = "countoff.findings"
"""The group of entry points by which an installed package listens."""
_log = logging.getLogger("countoff")
# Without any handler, Python itself would print a finding on stderr, where it stands already.
_log.addHandler(logging.NullHandler())


@dataclass(frozen=True)
class AlertSink:
    """One sink.

    Attributes:
        name: What it is, without any secret: it is printed if it fails.
        tell: Tells it of a finding.
        is_users: Whether it is the user's own function.
    """

    name: str
    tell: Callable[[Finding], object]
    is_users: bool = False


def of_host(*, ends: bool) -> list[AlertSink]:
    """Returns those that each host has for itself: the log of the program, and of the container what has ended it.

    Args:
        ends: Whether the finding ends the job.
    """
    found = [AlertSink("logging", _write_record)]
    if ends and (log := TerminationLog(constants.TERMINATION_LOG)).exists:
        found.append(AlertSink("termination log", log.tell))
    return found


def of_user(settings: Settings) -> list[AlertSink]:
    """Returns the user's own: `on_finding`, and entry points, which are loaded only when they are told.

    Args:
        settings: The user's choices.
    """
    given, found = settings.on_finding, list[AlertSink]()
    if given is not None:
        found.append(AlertSink(f"on_finding={getattr(given, '__qualname__', type(given).__name__)}", given, True))
    for each in entry_points(group=GROUP):
        found.append(AlertSink(f"{each.name} of {GROUP}", lambda finding, each=each: each.load()(finding), True))
    return found


def addresses(settings: Settings) -> list[AlertSink]:
    """Returns the addresses of apprise that the user wants to be told at, as one sink.

    Args:
        settings: The user's choices.
    """
    return [AlertSink("notify", Notifications(settings.notify).tell)] if settings.notify else []


def _write_record(finding: Finding) -> None:
    """Writes one record of standard `logging`, which has the finding and its parts, for filters and for handlers."""
    level, hosts = logging.ERROR if finding.level == "error" else logging.WARNING, finding.verdict.hosts
    named = sorted({hosts[rank] for rank in finding.ranks if rank in hosts})
    more = {"finding": finding, "kind": finding.kind, "ranks": finding.ranks, "hosts": named}
    _log.log(level, "%s", finding.verdict.headline, extra=more)
