"""Notifications: a finding to a phone, a chat or a mailbox, by apprise.

apprise runs in a process of its own (`notifier.py`), which gets the addresses through a pipe. So an address that hangs
holds nothing back here, none appears in this process's log or in the list of processes, and the message may still go
out when the process that has sent it is gone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from countoff.core.finding import Finding
from countoff.core.flag import FLAG

__all__ = ["NotTold", "Notifications"]

SEND_SECONDS = 15
"""After so long the process that sends is ended, whatever a receiver does. The job's end does not wait so long for it,
but apprise takes two seconds to be imported on an idle machine."""


class NotTold(Exception):
    """A message was not taken somewhere. The text is one line without a secret: it stands in the debug log."""


class Notifications:
    """The addresses that the user wants to be told at.

    Args:
        addresses: Addresses of apprise, as ``slack://…``. They hold secrets.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses

    def tell(self, finding: Finding) -> None:
        """Sends a finding to all of them.

        Raises:
            NotTold: If some of them have not taken it; the message has no secret of theirs.
        """
        failed = self.send(finding.title, finding.message, kind="failure" if finding.level == "error" else "warning")
        if failed:
            raise NotTold(f"not taken by {', '.join(failed)}")

    def send(self, title: str, text: str, *, kind: str) -> list[str]:
        """Sends a message to all addresses, and waits for that, for about `SEND_SECONDS` at most.

        Args:
            title: Its title.
            text: Its text.
            kind: What apprise is to show it as: ``info``, ``warning`` or ``failure``.

        Returns:
            The addresses that have not taken it, without their secrets, as ``address 2 (slack)``.

        Raises:
            NotTold: If it cannot be sent: this program is no Python, or the process that sends has hung.
        """
        if not sys.executable or getattr(sys, "frozen", False):  # the program itself would be started
            raise NotTold("there is no Python to send it with")
        message = {
            "path": [each for each in sys.path if isinstance(each, str)],  # pyright: ignore[reportUnnecessaryIsInstance]  # a program may add a Path
            "addresses": self._addresses,
            "title": title,
            "text": text,
            "kind": kind,
            "seconds": SEND_SECONDS,
        }
        environment = {name: value for name, value in os.environ.items() if not name.startswith(FLAG)}
        sender = subprocess.Popen(
            # Isolated: no code of the user's runs there, as a sitecustomize.
            [sys.executable, "-I", "-S", str(Path(__file__).with_name("notifier.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # a launcher that ends this process group does not end the message
        )
        try:
            told, _ = sender.communicate(json.dumps(message).encode(), timeout=2 * SEND_SECONDS)
        except subprocess.TimeoutExpired:  # it could not even set its alarm
            sender.kill()
            raise NotTold("the process that sends has not ended in time") from None
        taken = json.loads(told) if sender.returncode == 0 else [False] * len(self._addresses)
        names = [_name(place, each) for place, each in enumerate(self._addresses, 1)]
        return [name for name, ok in zip(names, taken, strict=True) if not ok]


def _name(place: int, address: str) -> str:
    """An address without its secret: where it stands among the others, and the part before its ``://``.

    >>> _name(2, "mailto://user:secret@example.org")
    'address 2 (mailto)'
    """
    return f"address {place} ({address.partition('://')[0]})"
