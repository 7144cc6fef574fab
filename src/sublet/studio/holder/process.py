"""The session host's process: it reads what the ledger wants for its host, and does it.

Rules of this file:
- It looks when the bell rings and once a second. Every look does what is missing, so nothing is remembered
  between looks.
- It never opens what a worker sends. It runs each tenant as a user of its own where it can.
- It exits after holding nothing for a while. When it is ended, its workers end with it.
- It ends itself when one of its loops has died or hangs, and when its home is gone (I4).
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
import time
from typing import Any

from sublet.core.errors import Disconnected, InvariantBroken, NotFound, SubletError
from sublet.core.studio.scratch_quota import scratch_limit
from sublet.core.studio.session import StudioSession
from sublet.core.studio.session_reconcile import ActionKind, SessionAction, session_actions
from sublet.core.values import DAY_US
from sublet.machine.process_log import ProcessLog
from sublet.ports.bell import session_topic
from sublet.ports.ledger import Ledger, SessionAnswer
from sublet.ports.worker import Worker
from sublet.processes import pid_lock
from sublet.processes.loop_watch import LoopBeats, LoopWatch
from sublet.processes.sandbox.tenant_numbers import TenantNumbers
from sublet.settings import Settings, load_settings
from sublet.studio.holder import finding
from sublet.studio.holder.admission import admitted
from sublet.studio.holder.held_session import HeldSession
from sublet.studio.holder.scratch_watch import ScratchWatch
from sublet.studio.holder.serving import SessionHostServer
from sublet.wiring import CLOCK, open_ledger, tenant_workers

LOOK_EVERY_US = 1_000_000
IDLE_EXIT_SECONDS = 600.0
#: Ended sessions are kept so long for listings and bills.
KEPT_US = 30 * DAY_US
SWEEP_SECONDS = 3600.0


_log = ProcessLog("session-host")
LOOKS = "looks"


class SessionHost:
    def __init__(self, settings: Settings, ledger: Ledger, beats: LoopBeats) -> None:
        self._beats = beats
        self._settings = settings
        self._ledger = ledger
        self._numbers = TenantNumbers(settings.home / "tenant-numbers.json")
        self._sessions: dict[str, HeldSession] = {}
        self._lock = threading.Lock()
        self._stopping = False
        self._swept_at = 0.0

    def stop(self) -> None:
        self._stopping = True

    def holds_leases(self) -> bool:
        with self._lock:
            return any(held.busy for held in self._sessions.values())

    def run(self, idle_exit: float = IDLE_EXIT_SECONDS) -> None:
        bell = self._ledger.bell()
        with contextlib.suppress(OSError):
            bell.listen(session_topic(self._settings["host"]))
        held_at = time.monotonic()
        while not self._stopping:
            self._beats.turn(LOOKS)
            try:
                with self._beats.asking_ledger(LOOKS):
                    self.look()
            except (Disconnected, OSError) as e:
                _log(f"the ledger cannot be reached: {e}")
            except InvariantBroken:
                raise
            except Exception as e:  # one look that failed must not cost every session of the host its GPU
                _log(f"a look failed: {type(e).__name__}: {e}")
            now = time.monotonic()
            self._tidy(now)
            if self.holds_leases():
                held_at = now
            elif now - held_at > idle_exit:
                break
            try:
                bell.wait(LOOK_EVERY_US)
            except (SubletError, OSError) as e:
                _log(f"the bell cannot be heard: {type(e).__name__}: {e}")
                time.sleep(LOOK_EVERY_US / 1e6)
        self._beats.over(LOOKS)

    def look(self) -> None:
        found = self._ledger.host_sessions(self._settings["host"])
        by_id = {answer.session.id: answer for answer in found}
        for held in list(self._sessions.values()):
            held.look_after()
        holding = {session_id: held.hosted for session_id, held in self._sessions.items()}
        for action in session_actions([(a.session, a.lease) for a in found], holding):
            try:
                self._do(action, by_id.get(action.session_id))
            except Disconnected:
                raise
            except SubletError as e:  # another process was faster: the next look sees the new state
                _log(f"{action.todo.value} {action.session_id}: {e.message}")

    def _do(self, action: SessionAction, answer: SessionAnswer | None) -> None:
        held = self._sessions.get(action.session_id)
        if action.todo is ActionKind.CLOSE:
            if held is not None:
                held.close(action.reason)
                with self._lock:
                    self._sessions.pop(action.session_id, None)
            return
        assert answer is not None  # the others are actions of sessions that were looked at
        session = answer.session
        if action.todo is ActionKind.RESUME:
            self._ledger.resume_session(session.id, session.tenant)
        elif action.todo is ActionKind.OPEN:
            self._open(session, action.number)
        elif held is not None and action.todo is ActionKind.ANSWER:
            held.answer(session.answer)
        elif held is not None and action.todo is ActionKind.TOUCH:
            held.touch(session.active_at)

    def _open(self, session: StudioSession, number: int) -> None:
        held = self._sessions.get(session.id)
        if held is None:
            held = HeldSession(self._settings, self._ledger, session, self._start, _log)
            with self._lock:
                self._sessions[session.id] = held
        held.open(session, number)

    def _start(self, session: StudioSession) -> Worker:
        worker = tenant_workers(self._settings, self._numbers.of(session.tenant)).start()
        return admitted(self._settings, self._ledger, worker, session.tenant)

    def sessions(self) -> list[HeldSession]:
        with self._lock:
            return list(self._sessions.values())

    def held_session(self, session_id: str, tenant: str) -> HeldSession:
        with self._lock:
            held = self._sessions.get(session_id)
        if held is None or held.session.tenant != tenant:
            self._ledger.look_session(session_id, tenant)  # NotFound, or it is on its way
            raise NotFound(
                f"session {session_id[:40]} is not open here yet",
                remedy="wait until its status is active",
            )
        return held

    def _tidy(self, now: float) -> None:
        for held in list(self._sessions.values()):
            held.forget_old(now)
        if now - self._swept_at > SWEEP_SECONDS:
            self._swept_at = now
            with contextlib.suppress(SubletError):
                self._ledger.drop_sessions(self._ledger.now() - KEPT_US)


def _allow_many_files() -> None:
    """Raises the limit of open files: a session needs about eight, and the default is often enough for a
    hundred."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main() -> int:
    settings = load_settings()
    _allow_many_files()
    try:
        path, beats = finding.lock_path(settings), LoopBeats(CLOCK)
        with pid_lock.held(path) as fd:
            ledger = open_ledger(settings)
            session_host = SessionHost(settings, ledger, beats)

            def leave(*_: Any) -> None:
                session_host.stop()

            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, leave)
            server = SessionHostServer(
                settings.home / "run", finding.socket_name(settings), session_host, beats, _log
            )
            server.start()
            ScratchWatch(
                session_host.sessions,
                settings.home,
                scratch_limit(settings["scratch_limit"]),
                settings["disk_reserve"],
                beats,
                _log,
            ).start()
            watch = LoopWatch(beats, fd, path, settings.home, _log, has_deadlines=session_host.holds_leases)
            with watch:
                watch.say_ready()
                _log(f"holding the sessions of {settings['host']}")
                session_host.run()
    except pid_lock.LockTaken:
        return 0  # somebody else's start won
    _log("left")
    os._exit(0)  # threads wait in calls of workers that end with this process
