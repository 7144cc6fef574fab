"""What objects of flax keep of JAX: in which trace they were made. Between two steps it is that of no trace,
which each process has anew."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from sublet.training.program_state.kinds import Unknown
from sublet.training.program_state.live import MadeByCall


def is_trace_state(cls: type) -> bool:
    return cls.__name__ == "OpaqueTraceState" and cls.__module__.startswith("jax.")


def no_trace() -> Any:
    return import_module("jax.extend.core").get_opaque_trace_state(convention="nnx")


def _reduced(thing: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    if "jax.extend.core" not in sys.modules or thing != no_trace():
        raise Unknown(thing, "an object that was made inside a function that JAX follows")
    return no_trace, ()


TRACE_STATE = MadeByCall(_reduced)
