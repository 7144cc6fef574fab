"""The attendant's process: looks at what the ledger wants for its host, and does it.

Rules of this file:
- It looks when the bell rings and once a second. Every look does what is missing, so nothing has to be remembered between two.
- It never opens what a worker sends. It keeps the tenants apart by a user of their own where it can.
- It leaves when it has held nothing for a while. What it holds when it is ended goes with it: workers end when it is gone.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import threading
import time
from typing import Any

from sublet.core.attendance import Errand, Todo, errands
from sublet.core.errors import Disconnected, InvariantBroken, NotFound, SubletError
from sublet.core.session import StudioSession
from sublet.core.values import DAY_US
from sublet.hosting.single import Taken, held, say_ready
from sublet.hosting.tenant_numbers import TenantNumbers
from sublet.ports.ledger import Ledger, SessionAnswer
from sublet.ports.topics import session_topic
from sublet.ports.worker import Worker
from sublet.settings import Settings, load_settings
from sublet.studio.attendant import finding
from sublet.studio.attendant.serving import Server
from sublet.studio.attendant.stay import Stay
from sublet.wiring import open_ledger, tenant_workers

LOOK_EVERY_US = 1_000_000
IDLE_EXIT_SECONDS = 600.0
#: Ended sessions are kept so long for listings and bills.
KEPT_US = 30 * DAY_US
SWEEP_SECONDS = 3600.0


def _log(line: str) -> None:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S")
    print(f"{stamp} attendant[{os.getpid()}] {line!r}"[:2000], file=sys.stderr, flush=True)


class Attendant:
    def __init__(self, settings: Settings, ledger: Ledger) -> None:
        self._settings = settings
        self._ledger = ledger
        self._numbers = TenantNumbers(settings.home / "tenant-numbers.json")
        self._stays: dict[str, Stay] = {}
        self._lock = threading.Lock()
        self._stopping = False
        self._swept_at = 0.0

    def stop(self) -> None:
        self._stopping = True

    def run(self, idle_exit: float = IDLE_EXIT_SECONDS) -> None:
        bell = self._ledger.bell()
        with contextlib.suppress(OSError):
            bell.listen(session_topic(self._settings["host"]))
        held_at = time.monotonic()
        while not self._stopping:
            try:
                self.look()
            except (Disconnected, OSError) as e:
                _log(f"the ledger cannot be reached: {e}")
            except InvariantBroken:
                raise
            except Exception as e:  # one look that failed must not cost every session of the host its GPU
                _log(f"a look failed: {type(e).__name__}: {e}")
            now = time.monotonic()
            self._tidy(now)
            if any(stay.busy for stay in self._stays.values()):
                held_at = now
            elif now - held_at > idle_exit:
                return
            bell.wait(LOOK_EVERY_US)

    def look(self) -> None:
        found = self._ledger.host_sessions(self._settings["host"])
        by_id = {answer.session.id: answer for answer in found}
        for stay in list(self._stays.values()):
            stay.look_after()
        holding = {session_id: stay.held for session_id, stay in self._stays.items()}
        for errand in errands([(a.session, a.lease) for a in found], holding):
            try:
                self._do(errand, by_id.get(errand.session_id))
            except Disconnected:
                raise
            except SubletError as e:  # somebody else was faster: the next look sees what is so
                _log(f"{errand.todo.value} {errand.session_id}: {e.message}")

    def _do(self, errand: Errand, answer: SessionAnswer | None) -> None:
        stay = self._stays.get(errand.session_id)
        if errand.todo is Todo.CLOSE:
            if stay is not None:
                stay.close(errand.reason)
                with self._lock:
                    self._stays.pop(errand.session_id, None)
            return
        assert answer is not None  # the others are errands of sessions that were looked at
        session = answer.session
        if errand.todo is Todo.RESUME:
            self._ledger.resume_session(session.id, session.tenant)
        elif errand.todo is Todo.OPEN:
            self._open(session, errand.number)
        elif stay is not None and errand.todo is Todo.ANSWER:
            stay.answer(session.answer)
        elif stay is not None and errand.todo is Todo.TOUCH:
            stay.touch(session.active_at)

    def _open(self, session: StudioSession, number: int) -> None:
        stay = self._stays.get(session.id)
        if stay is None:
            stay = Stay(self._settings, self._ledger, session, self._start, _log)
            with self._lock:
                self._stays[session.id] = stay
        stay.open(session, number)

    def _start(self, session: StudioSession) -> Worker:
        return tenant_workers(self._settings, self._numbers.of(session.tenant)).start()

    def stay(self, session_id: str, tenant: str) -> Stay:
        with self._lock:
            stay = self._stays.get(session_id)
        if stay is None or stay.session.tenant != tenant:
            self._ledger.look_session(session_id, tenant)  # NotFound, or it is on its way
            raise NotFound(
                f"session {session_id[:40]} is not open here yet",
                remedy="wait until its status is active",
            )
        return stay

    def _tidy(self, now: float) -> None:
        for stay in list(self._stays.values()):
            stay.forget_old(now)
        if now - self._swept_at > SWEEP_SECONDS:
            self._swept_at = now
            with contextlib.suppress(SubletError):
                self._ledger.drop_sessions(self._ledger.now() - KEPT_US)


def _allow_many_files() -> None:
    """Each session has some eight descriptors here; what a login allows is often enough for a hundred of them."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main() -> int:
    settings = load_settings()
    _allow_many_files()
    try:
        with held(finding.lock_path(settings)) as fd:
            ledger = open_ledger(settings)
            attendant = Attendant(settings, ledger)

            def leave(*_: Any) -> None:
                attendant.stop()

            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, leave)
            server = Server(settings.home / "run", finding.socket_name(settings), attendant, _log)
            server.start()
            say_ready(fd)
            _log(f"attending sessions of {settings['host']}")
            attendant.run()
    except Taken:
        return 0  # somebody else's start won
    _log("left")
    os._exit(0)  # threads wait in calls of workers that end with this process
