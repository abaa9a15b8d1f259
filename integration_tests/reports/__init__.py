"""Public reports about data that is read wrongly, each as a small training program, wrong and right.

`python -m integration_tests.reports` runs them and prints a table; test_reports.py runs what CI has time for.

A program is a module with `train(wrong, stage, folder)`, on every rank. A stage is one launch: the later ones resume
from the checkpoint that the one before has left in the folder. Where an installed framework has been mended, the
program does what the release of the report did, in a line that says so.
"""
