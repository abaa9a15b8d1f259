"""Where a verdict is told besides the output: a cluster's pages, a tracker, a phone.

Whatever is told here is told after the verdict was printed, on threads of its own, for `telling.TELL_SECONDS` at most.
A place that fails changes nothing but one line of the debug log. Nothing is told in a job without a finding.
"""
