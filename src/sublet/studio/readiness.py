"""Whether this service can do its work: the checks of `/readyz`.

Rules of this file:
- A check is "ok", or says in words what is wrong, without a path or an address: anybody may read it.
- The ledger is proven by a write that is on its disk, because a full disk still reads. The write is shared by
  all who ask within `WRITE_SECONDS`, so that nobody can make work for the disk by asking.
- A warden that was ended is replaced within seconds. Readiness gives it `WARDEN_SECONDS`; one whose loops
  hang is named at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from sublet.core.errors import LedgerFromThePast, NotDurable, SubletError
from sublet.leases.warden.warden_process import warden_health
from sublet.processes.loop_watch import ProcessHealth
from sublet.settings import Settings
from sublet.wiring import places

if TYPE_CHECKING:
    from sublet.studio.service import Service

OK, UNREACHABLE = "ok", "unreachable"
READY_SECONDS = 3.0
WRITE_SECONDS = 1.0
WARDEN_SECONDS = 15.0


def host_warden(settings: Settings) -> ProcessHealth | None:
    """None where work is placed elsewhere: the wardens there are looked after by whoever places it."""
    return None if places(settings) else warden_health(settings)


class Readiness:
    def __init__(self, service: Service, warden: Callable[[], ProcessHealth | None]) -> None:
        self._service = service
        self._warden = warden
        self._no_warden_since: float | None = None
        self._write: asyncio.Task[str] | None = None
        self._written_at = 0.0

    async def checks(self) -> dict[str, str]:
        service = self._service
        found = {"serving": "leaving" if service.leaving else OK}
        found["ledger"] = await self._checked(lambda: OK if service.ledger.now() > 0 else UNREACHABLE)
        found["ledger_writes"] = await self._ledger_writes()
        found["session_host"] = await self._checked(service.relay.problem)
        found["warden"] = await self._checked(self._warden_state)
        return found

    async def _checked(self, look: Callable[[], str]) -> str:
        try:
            return await self._service.checked(look, READY_SECONDS) or OK
        except (SubletError, TimeoutError, OSError):
            return UNREACHABLE

    async def _ledger_writes(self) -> str:
        """A write that hangs is not begun a second time."""
        now = time.monotonic()
        if self._write is None or (self._write.done() and now - self._written_at >= WRITE_SECONDS):
            self._written_at = now
            self._write = asyncio.create_task(self._try_to_write())
        try:
            async with asyncio.timeout(READY_SECONDS):
                return await asyncio.shield(self._write)
        except TimeoutError:
            return f"a write has taken longer than {READY_SECONDS:.0f} s"

    async def _try_to_write(self) -> str:
        try:
            await self._service.work_aside(self._service.ledger.prove_write)
        except NotDurable:
            return "a write was refused: its disk is full or fails"
        except LedgerFromThePast:
            return "a write was refused: the ledger went back in time, or is not the one that was here"
        except (SubletError, OSError):
            return UNREACHABLE
        return OK

    def _warden_state(self) -> str:
        found = self._warden()
        if found is None or not found.problem:
            self._no_warden_since = None
            return OK
        if found.late:
            return found.problem
        now = time.monotonic()
        if self._no_warden_since is None:
            self._no_warden_since = now
        return OK if now - self._no_warden_since < WARDEN_SECONDS else found.problem
