"""The runs that trackers have open in this process, each a `Place` that is told of findings: one module per tracker.

No tracker is imported: what the program has not imported has no run. Nothing here is called in a healthy job.
"""
