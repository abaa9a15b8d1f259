"""Odd, legal, healthy programs, in which countoff must not say a word and must not change one bit.

    python -m integration_tests.zoo
    python -m integration_tests.zoo --only threads loaders
    python -m integration_tests.zoo --programs queue_filled_by_a_thread --modes off on

Each program is one function with the decorator `healthy` in the module of its family. It takes the options of countoff
and returns what it has trained. It runs with countoff off, with countoff on and, if it is marked `even`, with
`uneven_train="stop"`. What must be equal: all that it returns, to the bit; the state of each random generator; the exit
code. What must be absent: any line of countoff's on stderr, and any thread of it at the end.
"""
