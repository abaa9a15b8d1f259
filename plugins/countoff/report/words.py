"""Numbers as a person says them."""

from __future__ import annotations


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
