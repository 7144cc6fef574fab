"""Pure rules: no I/O, no clock, no randomness, no thread, no third party.

`now` is always an argument, instants are integer microseconds, sizes are integer bytes, and every
decision carries a reason a user can read. The live system and the simulator call the same functions.
"""
