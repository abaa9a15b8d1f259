"""Other projects' own tests, run without countoff and with it: what differs must be expected.

    python -m integration_tests.suites accelerate
    python -m integration_tests.suites lightning CHECKOUT --parts callbacks loops

Nothing is fetched. CHECKOUT is a directory that the user has cloned, at about the version that is installed here.
"""
