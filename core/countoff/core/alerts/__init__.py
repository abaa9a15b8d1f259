"""Where a verdict is told besides the output: a cluster's pages, a tracker, a phone.

All of it is told after the verdict was printed, on threads of its own. The end of the process waits for that for
`telling.TELL_SECONDS` at most.
A place that fails changes nothing but one line of the debug log. Nothing is told in a job without a finding.
"""
