"""Whether JAX is just following a function, to compile it or to take its gradient.

Such a run of a function makes no step: its arrays stand for any numbers, and it is not run again.
"""

from __future__ import annotations

import sys


def is_traced() -> bool:
    clean = getattr(sys.modules.get("jax._src.core"), "trace_state_clean", None)
    return clean is not None and not clean()
