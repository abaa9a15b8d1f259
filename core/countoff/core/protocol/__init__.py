"""The rules by which ranks compare their counts: pure values and functions, no I/O, no thread, no torch."""
