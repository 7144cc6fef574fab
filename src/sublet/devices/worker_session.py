"""A GpuSession whose operations run in the lease's worker.

Rules of this file:
- The upper half runs in the user's process and only forwards calls; the lower half runs in the worker, where
  the session and all its checks live. Handles are plain records and mean something only there.
- Bytes travel as buffers: written and read data crosses through shared memory.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from sublet.core.errors import InvariantBroken, LeaseLost
from sublet.core.progress.kernel_arguments import Scalar
from sublet.devices.opening import Opening, open_device
from sublet.devices.session import Buffer, LocalGpuSession, Module, SessionTally
from sublet.machine import lease_environment

Run = Callable[..., Any]


class WorkerGpuSession:
    """Implements `ports.device.GpuSession`."""

    def __init__(self, run: Run, wanted: Opening) -> None:
        self._run = run
        self._number: int = run(_open, wanted)
        self.device_id = wanted.device_id
        self.tally = SessionTally()
        self._closed = False

    @property
    def used_bytes(self) -> int:
        return int(self._do("used_bytes"))

    def alloc(self, size: int) -> Buffer:
        return self._do("alloc", size)  # type: ignore[no-any-return]

    def free(self, buffer: Buffer) -> None:
        self._do("free", buffer)

    def write(self, buffer: Buffer, data: bytes | bytearray | memoryview, offset: int = 0) -> None:
        # Never a buffer of a memoryview: see `notebook/cells/content_digest.packed`.
        owner = bytes(data) if isinstance(data, memoryview) else data
        self._do("write", buffer, pickle.PickleBuffer(owner), offset)

    def read(self, buffer: Buffer, size: int | None = None, offset: int = 0) -> bytes:
        return bytes(self._do("read", buffer, size, offset))

    def load(self, source: str | bytes) -> Module:
        return self._do("load", source)  # type: ignore[no-any-return]

    def unload(self, module: Module) -> None:
        self._do("unload", module)

    def launch(
        self,
        module: Module,
        kernel: str,
        *,
        grid: tuple[int, ...] | int = (1,),
        block: tuple[int, ...] | int = (1,),
        args: Sequence[Scalar | Buffer] = (),
    ) -> None:
        self._do("launch", module, kernel, grid=grid, block=block, args=list(args))

    def sync(self) -> int:
        return int(self._do("sync"))

    def close(self) -> SessionTally:
        """The worker's end closes the session too, so a lease that is gone leaves nothing to do."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(LeaseLost):
                self.tally = self._run(_close, self._number)
        return self.tally

    def _do(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        return self._run(_operate, self._number, verb, args, kwargs)

    def __enter__(self) -> WorkerGpuSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# --- in the worker ---

_sessions: dict[int, LocalGpuSession] = {}
_numbers = itertools.count(1)


def _open(wanted: Opening) -> int:
    process_lease = lease_environment.process_lease()
    if process_lease is None:
        raise InvariantBroken("a device was to be opened in a process that is no worker")
    number = next(_numbers)
    _sessions[number] = open_device(wanted, process_lease)
    return number


def _operate(number: int, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    done = getattr(_sessions[number], verb)
    if verb == "used_bytes":
        return done
    result = done(*args, **kwargs)
    return pickle.PickleBuffer(result) if verb == "read" else result


def _close(number: int) -> SessionTally:
    return _sessions.pop(number).close()
