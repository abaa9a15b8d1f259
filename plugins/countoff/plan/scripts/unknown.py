"""What a script does not show, such as ``$1`` or ``$(hostname)``, inside words whose other parts are known.

It stands in a word as its own text in characters for private use: none of them is a blank or has a meaning in bash, so
such a word can be split, joined and read again like any other.
"""

from __future__ import annotations

import re

__all__ = ["as_written", "is_unknown", "unknown", "unknown_parts"]

_BEGIN = "\ue0ff"
_HIDDEN = {**{code: 0xE000 + code for code in range(128)}, ord("…"): 0xE080}
_SHOWN = {hidden: code for code, hidden in _HIDDEN.items()}
_UNKNOWN = re.compile(f"{_BEGIN}([\ue000-\ue080]*)")
_LONGEST = 40


def unknown(text: str) -> str:
    """Returns a value that is not known; ``text`` is what the script has in its place.

    Example:
        >>> word = unknown("$HOME") + "/data"
        >>> is_unknown(word), unknown_parts(word), as_written(word)
        (True, '$HOME', '$HOME/data')
    """
    shown = " ".join(text.split())
    shown = shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 1]}…"
    return _BEGIN + re.sub("[^\0-\x7f…]", "?", shown).translate(_HIDDEN)


def is_unknown(word: str) -> bool:
    """Whether a part of the word is not known."""
    return _BEGIN in word


def unknown_parts(word: str) -> str:
    """Returns what is not known in a word, as the script has it."""
    return ", ".join(dict.fromkeys(part.translate(_SHOWN) for part in _UNKNOWN.findall(word)))


def as_written(word: str) -> str:
    """Returns a word with what is not known in it as the script has it."""
    return word.replace(_BEGIN, "").translate(_SHOWN)
