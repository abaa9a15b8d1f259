"""`countoff demo`: a real job with uneven ranks. It drifts and hangs, then countoff names the rank, then it is fixed.

Importing this package imports neither torch nor Lightning; only the process from which the ranks are forked does.
"""

from countoff.demo.devices import DeviceError
from countoff.demo.ranks import DemoFailed
from countoff.demo.runner import run_demo
from countoff.demo.traces import TraceDirError

__all__ = ["DemoFailed", "DeviceError", "TraceDirError", "run_demo"]
