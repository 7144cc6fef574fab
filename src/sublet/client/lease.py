"""A lease that a studio holds for this process: what `with studio.gpu(...) as lease` gives.

Rules of this file:
- The surface of `leases.lease.Lease`. The studio's session host holds the lease and renews it; this object
  has only what the studio reports.
- One lease is one session with one GPU: when it is lost the session is over, and a new one is asked for.
- A `with` block is work: the session is touched while the block runs. Outside of one it is used by calls and
  by `touch`.
- A watcher asks for the lease's state, and is answered when it changes: a notice, a revoke, its end.
- Releasing twice is fine; leaving the `with` block always releases. What this process forgot is released when
  it exits.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, TypeVar

from sublet.client.facts import Facts, read_lease
from sublet.client.http import Client
from sublet.client.request import END_PATIENCE_SECONDS, LOOK_SECONDS, end_session, look
from sublet.client.worker import RemoteWorker
from sublet.core import notice as notices
from sublet.core.errors import BadInput, Disconnected, LeaseLost, NotFound, SubletError, WorkerLost
from sublet.core.notice import Notice
from sublet.devices.opening import leased_opening
from sublet.devices.worker_session import WorkerGpuSession
from sublet.ports.device import GpuSession
from sublet.ports.ledger import Answer
from sublet.ports.worker import Call, Screen

#: The longest a kernel may run before its session is given up.
WATCHDOG_US = 600_000_000
#: Patience to learn why something was lost.
EXPLAIN_PATIENCE_SECONDS = 1.0
#: The shortest pause between two touches of a session, and between two looks.
_SHORTEST_LOOK = 0.25

T = TypeVar("T")

_held: weakref.WeakSet[RemoteLease] = weakref.WeakSet()


class RemoteLease:
    """Also what cells ask of a lease: `ports.held_lease.HeldLease`."""

    #: The worker is on another machine: this one's folder, path and environment mean nothing there.
    here = False

    def __init__(self, client: Client, facts: Facts) -> None:
        self._client = client
        self._facts = facts
        self._granted_at = facts.granted_at
        self._looked_at = time.monotonic()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._worker = RemoteWorker(client, facts.id, facts.lease_id)
        self._notice: Notice | None = None
        self._callbacks: list[Callable[[Notice], None]] = []
        self._in_flight = 0
        self._idle_since = time.monotonic()
        self._over = ""  # why, once it is over
        self._on_yield: Callable[[], None] | None = None
        self.warm_us = facts.warm_us or facts.ttl_us
        self.yielded = ""
        self._sessions: list[GpuSession] = []
        _held.add(self)
        self._watcher = threading.Thread(
            target=_watch, args=(weakref.ref(self),), name=f"watches-{facts.id}", daemon=True
        )
        self._watcher.start()

    # what it is

    @property
    def id(self) -> str:
        return self._facts.lease_id

    @property
    def session_id(self) -> str:
        """What the studio's page, and `studio.find`, know it by."""
        return self._facts.id

    @property
    def epoch(self) -> int:
        return self._facts.epoch

    @property
    def devices(self) -> tuple[str, ...]:
        return self._facts.devices

    @property
    def vram_bytes(self) -> int:
        """Per device. Less than asked for when a smaller slice was accepted."""
        return self._facts.granted_bytes

    @property
    def ttl_us(self) -> int:
        return self._facts.ttl_us

    @property
    def tenant(self) -> str:
        return self._facts.tenant

    @property
    def expires_at(self) -> datetime:
        """When the studio's ledger ends it unless it is renewed, as of the last look."""
        return datetime.fromtimestamp(self._facts.expires_at, UTC)

    @property
    def granted_at(self) -> int:
        return self._granted_at

    @property
    def launches(self) -> int:
        """Kernels that its calls have launched so far."""
        return self._worker.launches

    @property
    def key(self) -> Any:
        raise BadInput(
            f"lease {self.id} is held by the studio, and only it can write under it",
            remedy="save with lease.save(state), or sublet.save(state) in the session's own code",
        )

    @property
    def notice(self) -> Notice | None:
        """The nearest warning of coming loss, or None."""
        return self._notice

    @property
    def seconds_left(self) -> float:
        """Until it must have been renewed, or is taken, as of the last look."""
        return (
            max(0.0, self._facts.seconds_left - (time.monotonic() - self._looked_at))
            if not self._over
            else 0.0
        )

    @property
    def seconds_to_go(self) -> float:
        """Seconds until it ends if nobody uses it and nobody asks for it."""
        if self._on_yield is None or self._in_flight or self.status != "active":
            return self.seconds_left
        return max(0.0, self._idle_since + self.warm_us / 1e6 - time.monotonic())

    @property
    def status(self) -> str:
        """'active', 'revoking' or 'ended', as far as this process knows."""
        if self._over or self._pid != os.getpid() or self._worker.ending:
            return "ended"
        return "revoking" if self._facts.status == "revoking" else "active"

    def __repr__(self) -> str:
        where = ", ".join(self.devices)
        return f"<Lease {self.id} {self.status} epoch={self.epoch} on {where} of {self._client.address}>"

    def __reduce__(self) -> Any:
        raise TypeError("a lease cannot be pickled: it belongs to the process that asked for it")

    def look(self, lease_id: str = "", *, patience_us: int | None = None) -> Answer:
        """The row of this lease, or of another of the tenant's, as the studio's ledger has it."""
        patience = None if patience_us is None else patience_us / 1e6
        return read_lease(self._client.get(f"/v1/leases/{lease_id or self.id}", patience_seconds=patience))

    # what may be done with it

    def check(self) -> None:
        """Raise `LeaseLost` unless new work may be started now."""
        if self._pid != os.getpid():
            raise LeaseLost(f"lease {self.id} belongs to the parent process")
        if self._over:
            raise LeaseLost(f"lease {self.id} has ended: {self._over}")

    def touch(self) -> None:
        """Say that the GPU is in use; an untouched session outside a `with` block counts as idle."""
        self.check()
        self._idle_since = time.monotonic()
        self._touch()

    def _touch(self) -> None:
        self._client.post(f"/v1/sessions/{self.session_id}/touch")

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Work in flight: the lease counts as used until the block ends."""
        self.begin_work()
        try:
            yield
        finally:
            self.end_work()

    def begin_work(self) -> None:
        """As `working()`, for work that does not end in the block it began in."""
        with self._changed:
            self._in_flight += 1
            self._changed.notify_all()

    def end_work(self) -> None:
        with self._lock:
            self._in_flight -= 1
            self._idle_since = time.monotonic()

    def open(self, device: int = 0, *, watchdog_us: int = WATCHDOG_US) -> GpuSession:
        """A GpuSession on one of the lease's devices; a gang lease opens one for each. Closed with the lease
        at the latest."""
        self.check()
        if not 0 <= device < len(self.devices):
            raise BadInput(f"device {device} is not one of this lease's {len(self.devices)}")
        session = WorkerGpuSession(self.run, self.run(leased_opening, device, watchdog_us))
        self._sessions.append(session)
        return session

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call it in the session: what it prints appears here, what it returns or raises comes back."""
        return self._in_worker(lambda worker: worker.call(function, args, kwargs))

    def run_shown(
        self, function: Callable[..., Any], args: Sequence[Any], screen: Screen, answer: Callable[[Any], Any]
    ) -> Any:
        """Call it in the session with its output on a screen; `answer` is what it may ask meanwhile."""
        return self._in_worker(lambda worker: worker.call_shown(function, args, screen, answer))

    def run_many(self, function: Callable[..., Any], calls: list[Call]) -> list[tuple[bool, Any]]:
        """Several calls in one trip: (True, result) or (False, exception) each."""
        return self._in_worker(lambda worker: worker.call_many(function, calls))

    def run_code(self, text: str, *, screen: Screen | None = None) -> None:
        """Run source in the session: its names stay there for the next."""
        self._in_worker(lambda worker: worker.run_code(text, screen))

    def _in_worker(self, work: Callable[[RemoteWorker], T]) -> T:
        self.check()
        self.begin_work()
        try:
            return work(self._worker)
        except WorkerLost as lost:
            raise self._explained(lost) from lost.__cause__
        except LeaseLost as lost:
            self._lost(self._why_lost() or lost.message)
            raise
        finally:
            self.end_work()

    def _explained(self, lost: WorkerLost) -> WorkerLost:
        """The session knows that its worker ended; the ledger knows why."""
        taken = self._why_lost()
        why = (
            f"GPU session ended ({taken}); {lost.message}"
            if taken and taken not in lost.message
            else lost.message
        )
        self._lost(why)
        return WorkerLost(why, begun=lost.begun, reason=taken or lost.reason)

    def _why_lost(self) -> str:
        with contextlib.suppress(SubletError):
            facts = look(self._client, self.session_id, patience_seconds=EXPLAIN_PATIENCE_SECONDS)
            if facts.status in ("suspended", "ended", "revoking"):
                return facts.why
        return ""

    # what the session keeps

    def save(self, state: Any) -> Any:
        """Under the session's checkpoint name, durable when it returns."""
        from sublet.client.state import put_state

        self.check()
        return put_state(self._client, self.session_id, state)

    def saved(self, version: int = 0) -> Any:
        """What was saved last, or None."""
        from sublet.client.state import get_state

        return get_state(self._client, self.session_id, version)

    # warnings

    def on_notice(self, callback: Callable[[Notice], None]) -> None:
        """Called once per new warning, from a thread of sublet's; set a flag there and return."""
        self._callbacks.append(callback)
        if self._notice is not None:
            callback(self._notice)

    def keep_warm(self, then: Callable[[], None] = lambda: None) -> None:
        """Keep it between calls until nobody has used it for `warm_us`. The studio gives it back then; `then`
        is called when it did."""
        with self._changed:
            self._on_yield = then
            self._changed.notify_all()

    def warn_worker(self) -> None:
        """Do nothing: the session host has warned the worker already."""

    def _warn(self, warning: Notice) -> None:
        merged = notices.merge(self._notice, warning)
        if merged is self._notice or merged == self._notice:
            return
        self._notice = merged
        for callback in list(self._callbacks):
            with contextlib.suppress(Exception):
                callback(merged)

    def _lost(self, why: str) -> None:
        with self._lock:
            if self._over:
                return
            self._over = why
            idle = not self._in_flight
        self._warn(Notice(source="lease", reason=why, deadline_us=_now_us()))
        if idle and self._on_yield is not None:
            self.yielded = why
            with contextlib.suppress(Exception):
                self._on_yield()

    # the watcher's

    def _seen(self, facts: Facts) -> None:
        if self._over:
            return
        self._facts, self._looked_at = facts, time.monotonic()
        if self._notice is not None and self._notice.source == "keeper":
            self._notice = None
        if facts.status in ("suspended", "ended") or (
            facts.lease_id and facts.lease_id != self._worker.lease_id
        ):
            self._lost(facts.why)
        elif facts.status == "revoking":
            self._warn(
                Notice(
                    source="lease", reason=facts.why, deadline_us=_now_us() + int(facts.seconds_left * 1e6)
                )
            )

    def _out_of_reach(self, error: Disconnected) -> None:
        """Untouched it is given back after a while, and whether it was is not to be seen from here."""
        ends_us = int((self._looked_at + self.warm_us / 1e6) * 1e6)
        self._warn(Notice(source="keeper", reason=error.message, deadline_us=ends_us))

    @property
    def _look_seconds(self) -> float:
        """Often enough to see a revoke of a short lease, and to touch one in use before it counts as idle."""
        shortest = min(self._facts.warm_us or self.warm_us, self.warm_us, self.ttl_us or self.warm_us) / 4e6
        return max(_SHORTEST_LOOK, min(LOOK_SECONDS, shortest))

    def _keeps_it(self) -> bool:
        """Whether it is used now, or is to be kept for longer than the studio would keep it."""
        if self._in_flight:
            return True
        longer = self.warm_us > (self._facts.warm_us or self.warm_us)
        return self._on_yield is not None and longer and self.seconds_to_go > 0

    def _is_cold(self) -> bool:
        """Whether nobody used it for as long as it was to be kept, while the studio would keep it longer."""
        return self._on_yield is not None and not self._in_flight and self.seconds_to_go <= 0

    def turn(self) -> bool:
        """One look of the watcher; whether there is more to watch."""
        if self._over or self._pid != os.getpid():
            return False
        try:
            if self._keeps_it():
                self._touch()
            self._seen(
                look(self._client, self.session_id, wait=self._look_seconds, version=self._facts.version)
            )
        except Disconnected as e:
            self._out_of_reach(e)
        except NotFound as e:
            self._lost(e.message)
        except SubletError:
            time.sleep(self._look_seconds)  # the next call reports what is wrong
        if self._is_cold() and not self._over:
            self.yielded = f"nobody used it for {self.warm_us / 1e6:g} s"
            self.release()
            if self._on_yield is not None:
                self._on_yield()
        return not self._over

    # the end

    def release(self, *, patience_us: int | None = None) -> None:
        """Give it back. Safe to call at any time, any number of times."""
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._over == "released":
                return
            was_over, self._over = self._over, "released"
        if not was_over:
            for session in reversed(self._sessions):
                with contextlib.suppress(SubletError):
                    session.close()
        patience = END_PATIENCE_SECONDS if patience_us is None else patience_us / 1e6
        end_session(self._client, self.session_id, patience_seconds=patience)
        _held.discard(self)

    def __enter__(self) -> RemoteLease:
        self.begin_work()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _watch(found: weakref.ref[RemoteLease]) -> None:
    """Watch until it is over, or nobody refers to it any more."""
    while True:
        lease = found()
        if lease is None or not lease.turn():
            return
        del lease


def _now_us() -> int:
    return time.monotonic_ns() // 1000


@atexit.register
def _release_forgotten() -> None:
    for lease in list(_held):
        with contextlib.suppress(Exception):
            lease.release(patience_us=1_000_000)
