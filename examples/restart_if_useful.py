"""Ends torchrun where its restarts are useless: the program, its configuration or its data is at fault.

    export COUNTOFF_VERDICT_FILE=verdict.json
    torchrun --standalone --nproc-per-node 2 --max-restarts 2 examples/restart_if_useful.py examples/torch_digits.py

torchrun starts this program on every rank, and it becomes the one that its arguments name. At a restart, the file tells
how the attempt before has ended. If a restart is useless, the first rank of each host ends torchrun there. The file of
another run, and a start without torchrun, change nothing. See docs/schedulers.md.
"""

import json
import os
import signal
import sys
import time


def main():
    try:
        with open(os.environ["COUNTOFF_VERDICT_FILE"], encoding="utf-8") as file:
            verdict = json.load(file)
    except (FileNotFoundError, ValueError):  # nothing has ended here; an empty file is no verdict
        verdict = {"restart": "unknown", "run": {}}
    run = os.environ.get("TORCHELASTIC_RUN_ID")  # the parent is torchrun only where this is set
    if verdict["restart"] == "useless" and run and verdict["run"].get("torchelastic_run_id") == run:
        if os.environ["LOCAL_RANK"] == "0":
            print(f"not started again: {verdict['kind']}: {verdict['sentence']}", file=sys.stderr, flush=True)
            os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(60)  # torchrun ends this rank before
        sys.exit(1)
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])


if __name__ == "__main__":
    main()
