"""Where a finding is told besides the output: to the user's own function, a phone, the log, a cluster's page.

All of it is told after the finding was printed, on threads of its own. The end of the process waits for that for
`alerts.NOTIFY_SECONDS` at most. Nothing is told in a job without a finding.
"""
