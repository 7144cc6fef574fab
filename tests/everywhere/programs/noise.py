"""Writes more than any pipe holds, in both streams in turn, in bytes that are no text; and leaves with 7."""

import os
import random
import sys

made = random.Random(7)
for _ in range(int(sys.argv[1])):
    os.write(1, made.randbytes(made.randrange(1, 5000)))
    os.write(2, made.randbytes(made.randrange(1, 500)))
sys.exit(7)
