"""Where the tests begin their random choices: at the same place each time, so that a red test is about the change that was made.

`SUBLET_SEED=N` begins elsewhere. `SUBLET_SEED=random`, as in `make proof`, draws a number for each process and prints it, and Hypothesis
looks for new cases then.
"""

from __future__ import annotations

import os
import random

_ASKED = os.environ.get("SUBLET_SEED", "4")
#: Whether cases are wanted that nobody has tried.
NEW_CASES = _ASKED == "random"
SEED = random.SystemRandom().randrange(1, 10**6) if NEW_CASES else int(_ASKED)
if NEW_CASES:
    print(f"SUBLET_SEED={SEED}", flush=True)
