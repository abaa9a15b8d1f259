"""`countoff demo`: a real job with uneven ranks that drifts and hangs, is named by countoff, and is mended.

Importing it imports neither torch nor Lightning: only the process that the ranks are forked from does.
"""

from countoff.demo.launcher import DemoFailed
from countoff.demo.runner import run_demo

__all__ = ["DemoFailed", "run_demo"]
