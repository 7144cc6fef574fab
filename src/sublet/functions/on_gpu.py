"""What users call: `@sublet.on_gpu(...)`, a function that runs in a leased worker.

Rules of this file:
- It chooses the lease and who shares it; how a call travels and how a worker is kept warm is
  `processes.worker.warm_calls`.
- Every GPU kept warm is given back when the process ends.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

from sublet.core.errors import SubletError
from sublet.core.leasing.options import DEFAULT_TTL, DEFAULT_VRAM, Duration, Size
from sublet.leases.request import gpu
from sublet.ports.held_lease import HeldLease
from sublet.processes.sandbox.containment import contained
from sublet.processes.worker.warm_calls import OnGpu, Warm, on_gpu_decorator
from sublet.settings import load_settings, switched_on, variable

_lock = threading.Lock()
_warm: dict[tuple[object, ...], Warm] = {}

P = ParamSpec("P")
R = TypeVar("R")


@functools.cache
def _disabled_by_file() -> bool:
    return load_settings().disabled


def disabled() -> bool:
    """The variable counts at every call, as tests and debuggers set it; the file is read once, as a call must
    not cost that. Inside `sublet run` the process has its GPU already, and is contained like a worker."""
    if contained():
        return True
    said = variable("DISABLE")
    return switched_on(said) if said else _disabled_by_file()


@overload
def on_gpu(function: Callable[P, R], /) -> OnGpu[P, R]: ...
@overload
def on_gpu(
    function: None = None,
    /,
    *,
    vram: Size = ...,
    ttl: Duration | Callable[..., Duration] = ...,
    batch: int = ...,
    **options: Any,
) -> Callable[[Callable[P, R]], OnGpu[P, R]]: ...
def on_gpu(
    function: Callable[..., Any] | None = None,
    /,
    *,
    vram: Size = DEFAULT_VRAM,
    ttl: Duration | Callable[..., Duration] = DEFAULT_TTL,
    batch: int = 1,
    **options: Any,
) -> Any:
    """Run a function in a leased worker: `@sublet.on_gpu(vram="8GB", ttl="2m")`.

    The worker is kept warm between calls until the ttl runs out, and renewed while a call runs. `ttl` may be
    a function of the call's own arguments. `batch` sends up to so many calls in one trip, from `.map(items)`
    or from several threads. The other options are those of `sublet.gpu`. With SUBLET_DISABLE=1 it is a plain
    call.
    """

    def acquire(ttl_us: int) -> HeldLease:
        lease = gpu(vram, ttl_us / 1e6, holder="worker", **options).hold()
        _release_first()
        return lease

    def warm() -> Warm:
        # Also where it is leased: with another SUBLET_URL it is another GPU.
        where = tuple(variable(name) for name in ("URL", "TOKEN", "PLACEMENT"))
        key = (vram, where, *sorted((name, str(value)) for name, value in options.items()))
        with _lock:
            return _warm.setdefault(key, Warm(acquire))

    return on_gpu_decorator(function, warm, ttl, batch=batch, options=options, known=gpu, plainly=disabled)


def release_warm() -> None:
    """Give back every GPU kept warm for `on_gpu`."""
    with _lock:
        kept = list(_warm.values())
    for warm in kept:
        with warm.lock, contextlib.suppress(SubletError):
            warm.release()


@functools.cache
def _release_first() -> None:
    """Register after a placement has registered its own end of the process: what was registered last is done
    first."""
    atexit.register(release_warm)
