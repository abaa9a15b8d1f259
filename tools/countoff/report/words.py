"""Numbers as a person says them."""

from __future__ import annotations

from datetime import datetime, timezone


def duration(seconds: float) -> str:
    """Seconds as a person says them, in at most two units.

    >>> duration(4321), duration(59.4), duration(0.25), duration(200_000)
    ('1 h 12 min', '59 s', '0.25 s', '2 d 7 h')
    """
    if seconds < 10:
        return f"{seconds:.2g} s" if seconds >= 0.1 or not seconds else f"{1000 * seconds:.2g} ms"
    whole = round(seconds)
    for above, unit, below, lower in ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= above:
            rest = whole % above // below
            return f"{whole // above} {unit}" + (f" {rest} {lower}" if rest else "")
    return f"{whole} s"


def number(value: float | None) -> str:
    """A number with separators, or a dash where there is none.

    >>> number(1234567.0), number(0.25), number(None)
    ('1,234,567', '0.25', '–')
    """
    return "–" if value is None else f"{value:,.10g}"


def moment(seconds: float) -> str:
    """A time in UTC with its date; empty if no calendar has it.

    >>> moment(1_750_000_000)
    '2025-06-15 15:06:40'
    """
    return _in_utc(seconds, "%Y-%m-%d %H:%M:%S")


def clock(seconds: float, step: float = 1.0) -> str:
    """A time of day in UTC, as exact as labels need that are so many seconds apart; or a day.

    >>> clock(1_750_000_000.25), clock(1_750_000_000.25, 0.1), clock(1_750_000_000, 43_200), clock(0, 86_400)
    ('15:06:40', '15:06:40.2', '15 Jun 15:06', '01 Jan')
    """
    if step >= 6 * 3_600:
        return _in_utc(seconds, "%d %b %H:%M" if step < 86_400 else "%d %b")
    digits = 0 if step >= 1 else 1 if step >= 0.1 else 3
    return _in_utc(seconds, "%H:%M:%S.%f")[: 8 + bool(digits) + digits]


def _in_utc(seconds: float, pattern: str) -> str:
    try:
        return datetime.fromtimestamp(round(seconds, 3), timezone.utc).strftime(pattern)
    except (OverflowError, ValueError, OSError):
        return ""
