"""What the fork server does before it forks anything: it imports what all ranks need.

Nothing else may import this module, because it makes the process that does so the demo's own.
"""

import faulthandler
import gc
import os
import sys

from countoff.demo.ranks import IMPORT_SECONDS, end_with_parent, server_file

end_with_parent()
server_file("pid").write_text(str(os.getpid()))
log = os.open(server_file("log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
os.dup2(log, 1)
os.dup2(log, 2)
faulthandler.dump_traceback_later(IMPORT_SECONDS, exit=True)
sys.path = [entry for entry in sys.path if entry]  # "" is the user's directory, which may have a lightning.py

try:
    from countoff.demo import job  # noqa: F401  # only here, so that what it prints is in the log
except ImportError as error:  # multiprocessing would pass over it, and fork ranks that cannot train
    raise RuntimeError("the job cannot be imported") from error

faulthandler.cancel_dump_traceback_later()
gc.freeze()  # otherwise each rank's garbage collector touches, and so copies, everything that was imported
