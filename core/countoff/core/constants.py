"""Numbers that no user needs to set. A test reads and changes them as ``constants.NAME``, before the guard is made."""

TICK_BATCHES = 64
"""Batches from one comparison of steps and learning rates to the next, within a train epoch."""
KEPT_TICKS = 256
"""Comparisons whose records stay in the store. A rank that is further behind is compared with nobody."""
FINGERPRINT_BATCHES = 2
"""Batches at the start of each train epoch whose data is compared. One proves nothing."""
LOOKAHEAD = 4
"""Batches that a rank takes ahead of its loop at first, from a loader with workers, where ranks are kept even."""
GRACE_SECONDS = 3.0
"""From a verdict until a process whose main thread cannot be reached is ended."""
TERMINATION_LOG = "/dev/termination-log"
"""Kubernetes' default for a container's `terminationMessagePath`."""
