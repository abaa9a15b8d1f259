"""The variable ``COUNTOFF``, with which countoff is turned on or off without a change to the code.

This is read in processes that may never train, so the module imports nothing.
"""

from __future__ import annotations

import os

__all__ = ["FLAG", "FLAG_TEXTS", "turned_on"]

FLAG = "COUNTOFF"
"""The variable's name."""
FLAG_TEXTS = {"1": True, "true": True, "on": True, "yes": True, "0": False, "false": False, "off": False, "no": False}
"""What each of its values means, in lower case."""


def turned_on() -> bool:
    """Returns whether countoff should be added to a Trainer whose code does not mention it.

    Frameworks ask that for every Trainer, and an exception there would stop every training on the machine, so this
    raises nothing. ``COUNTOFF`` unset, empty or off gives False: installing countoff turns nothing on. A value that is
    neither on nor off gives True: the adapter is then made, resolves its settings and refuses the value in one line.
    With False the user would believe that countoff is on.

    Returns:
        True if ``COUNTOFF`` is set, not empty, and not one of the values for off.

    Example:
        >>> import os
        >>> os.environ["COUNTOFF"] = "off"
        >>> turned_on()
        False
        >>> del os.environ["COUNTOFF"]
    """
    text = os.environ.get(FLAG, "").strip().lower()
    return bool(text) and FLAG_TEXTS.get(text, True)
