"""How countoff gets into a program that does not mention it: hooks that are placed before the program starts."""
