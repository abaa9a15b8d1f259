"""`python -m countoff`: the command line, where its console script is not on the path."""

from countoff.cli.__main__ import main

main(program="python -m countoff")
