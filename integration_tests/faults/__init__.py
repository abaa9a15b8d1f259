"""The fault matrix: every way for ranks to fall out of step, in every framework, and what countoff makes of it.

`python -m integration_tests.faults` runs it and prints a table; test_fault_matrix.py runs what CI has time for.
"""
