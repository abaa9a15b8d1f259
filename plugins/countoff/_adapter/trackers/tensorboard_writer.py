"""TensorBoard: a text in the event file of each `SummaryWriter`, of torch or of tensorboardX.

No list of open writers exists. Each has a thread that writes its file, which tells cheaply that there is one. The
writers themselves are looked for among all objects, but only by an alert, on its own thread.
"""

from __future__ import annotations

import gc
import sys
import threading
from typing import Any

from countoff.core.alerts.alert import Alert, NotTold

__all__ = ["SummaryWriters", "find"]

_CLASSES = ("torch.utils.tensorboard.writer", "tensorboardX.writer")
_THREADS = ("tensorboard.summary.writer.event_file_writer", "tensorboardX.event_file_writer")


class SummaryWriters:
    """The writers that are open in this process."""

    name = "TensorBoard"

    def tell(self, alert: Alert) -> None:
        """Writes a text by each writer, and waits until it is in the file.

        Only of what ends the job: to look for the writers keeps everything in memory for as long as that takes.

        Raises:
            NotTold: If the files are written by other objects than a `SummaryWriter`.
        """
        if not alert.ends:
            return
        writers = open_writers()
        if not writers:
            raise NotTold("no SummaryWriter is open")
        for writer in writers:
            writer.add_text("countoff/verdict", alert.text.replace("\n", "  \n"))  # a line of its own, in Markdown
            writer.flush()


def find() -> list[SummaryWriters]:
    """Returns the writers if one is open, as a single place."""
    threads = {type(thread).__module__ for thread in threading.enumerate()}
    return [SummaryWriters()] if threads.intersection(_THREADS) else []


def open_writers() -> list[Any]:
    """Looks through all objects that the garbage collector knows: seconds where there are tens of millions.

    Types are compared by their ids, so no code of the program runs, as `isinstance` or a hash might.
    """
    classes = [module.SummaryWriter for name in _CLASSES if (module := sys.modules.get(name)) is not None]
    for each in classes:
        classes += type.__subclasses__(each)
    ids = {id(each) for each in classes}
    writers = [each for each in gc.get_objects() if id(type(each)) in ids]
    return [each for each in writers if vars(each).get("all_writers") and vars(each).get("_write_to_disk", True)]
