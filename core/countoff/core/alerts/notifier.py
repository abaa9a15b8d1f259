"""The process that sends notifications by apprise. It is started as a script, and imports nothing of countoff.

It reads one JSON object from its standard input: `path` (sys.path of the process that has started it), `addresses`,
`title`, `text`, `kind` and `seconds`. It writes a JSON list of booleans: which of the addresses have taken the message.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
from concurrent.futures import ThreadPoolExecutor


def main() -> None:
    """Sends one message."""
    message = json.load(sys.stdin)
    signal.alarm(message["seconds"])  # ends this process, also in a call that never returns
    sys.path[:] = message["path"]
    logging.disable()  # apprise logs what it was given
    import apprise

    def send(address: str) -> bool:
        service = apprise.Apprise.instantiate(address, suppress_exceptions=True)
        return service is not None and bool(
            service.notify(body=message["text"], title=message["title"], notify_type=message["kind"])
        )

    with ThreadPoolExecutor(len(message["addresses"])) as threads:
        taken = list(threads.map(send, message["addresses"]))
    print(json.dumps(taken))


if __name__ == "__main__":
    main()
