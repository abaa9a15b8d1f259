"""The process that sends notifications by apprise. It is started as a script, and imports nothing of countoff.

It reads one JSON object from its standard input: `path` (sys.path of the process that has started it), `addresses`,
`title`, `text`, `kind` and `seconds`. It writes a JSON list of booleans: which of the addresses have taken the message.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor, wait

_SPARE_SECONDS = 1


def main() -> None:
    """Sends one message."""
    message = json.load(sys.stdin)
    seconds = message["seconds"]
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # it may be ignored or blocked in the program
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    signal.alarm(seconds)  # ends this process, also in an import that never returns
    sys.path[:] = message["path"]
    logging.disable()  # apprise logs what it was given
    import apprise

    def send(address: str) -> bool:
        service = apprise.Apprise.instantiate(address, suppress_exceptions=True)
        return service is not None and bool(
            service.notify(body=message["text"], title=message["title"], notify_type=message["kind"])
        )

    threads = ThreadPoolExecutor(len(message["addresses"]))
    sent = [threads.submit(send, address) for address in message["addresses"]]
    wait(sent, seconds - _SPARE_SECONDS)
    print(json.dumps([each.done() and each.exception() is None and each.result() for each in sent]), flush=True)
    os._exit(0)  # a thread that waits for an answer would hold the exit


if __name__ == "__main__":
    main()
