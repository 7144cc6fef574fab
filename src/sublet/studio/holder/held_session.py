"""One session as the session host holds it: its lease, its worker, and the call that runs.

Rules of this file:
- A lease is bound to the session before it is requested, so the ledger knows every lease of a session.
- One call runs at a time. A call that began goes on whether or not anybody listens, and a call id is run
  once.
- A worker's output is bytes and is never opened here. What the user saves is stored as the bytes it came as.
- A lease released for lack of use leaves the session suspended. Only its user, an operator or its end removes
  the session.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any
from weakref import WeakValueDictionary

from sublet.core.errors import (
    BadInput,
    LeaseLost,
    Misconfigured,
    NotDurable,
    Refused,
    Stale,
    SubletError,
    TooMany,
    WaitTimedOut,
)
from sublet.core.leasing.lease import EndReason, LeaseState
from sublet.core.studio import frames
from sublet.core.studio.session import OfferAnswer, StudioSession
from sublet.core.studio.session_reconcile import HostedSession
from sublet.leases.acquire import new_id
from sublet.leases.lease import WATCHDOG_US, Lease
from sublet.leases.request import GpuRequest
from sublet.leases.sessions import opening_of
from sublet.ports.ledger import Answer, Ledger
from sublet.ports.worker import HasScratch, Worker
from sublet.processes.channel.sealed_caller import SilentSink
from sublet.settings import Settings
from sublet.store.checkpoints import CheckpointStore
from sublet.studio.holder.admission import admitted
from sublet.studio.holder.call_queue import CallQueue
from sublet.studio.holder.call_record import CHUNK_BYTES, Bytes, CallRecord
from sublet.studio.routes.state import load_state, save_state
from sublet.wiring import checkpoints, placement, short_of_disk, spill_room

#: How often to check whether a question still needs an answer.
LOOK_SECONDS = 0.25
#: Ids of calls that were run, so that none is run again.
REMEMBERED_CALLS = 1000
OPEN_LOOK_SECONDS = 0.1
FREE_THE_DISK = "try again later, and tell the operator that the disk of this host is nearly full"
#: Of what waits on disk for one session.
WAITING_MOST_BYTES = 4 << 30
#: Of one call.
LAUNCHES_MOST = 1 << 32
SET_OPENINGS = "sublet.leases.current:set_openings_sealed"
TARGETS = {name: f"sublet.processes.worker.sealed_calls:{name}" for name in ("pickled", "code")}


class HeldSession:
    def __init__(
        self,
        settings: Settings,
        ledger: Ledger,
        session: StudioSession,
        start: Callable[[StudioSession], Worker],
        log: Callable[[str], None],
    ) -> None:
        self.session = session
        self._settings = settings
        self._ledger = ledger
        self._start = start
        self._log = log
        self._lock = threading.Lock()
        self._calls = CallQueue()
        #: What clients send and load is kept here while it waits.
        self.room = spill_room(settings, WAITING_MOST_BYTES)
        self._loaded: WeakValueDictionary[int, memoryview] = WeakValueDictionary()
        self._lease: Lease | None = None
        self._worker: Worker | None = None
        self._given_up: Lease | None = None
        self._stopped: Worker | None = None
        self._opening = False
        self._opened = threading.Event()
        self._number = 0
        self._active_at = session.active_at
        self._answer = OfferAnswer.NONE
        self._answered = threading.Event()
        self._closed = ""  # why
        self._why_not = "it has no GPU yet"  # while there is no lease
        self._records: OrderedDict[str, CallRecord | None] = OrderedDict()
        self._questions: dict[tuple[str, int], list[Any]] = {}
        self._told = threading.Condition()
        self._store: CheckpointStore | None = None
        self._saving = threading.Lock()

    @property
    def hosted(self) -> HostedSession:
        """What this host holds of the session: nothing once its lease is over, or if it never came."""
        number = self._number if self.busy else 0
        return HostedSession(number=number, active_at=self._active_at, answer=self._answer)

    @property
    def busy(self) -> bool:
        """Whether it has a lease or waits for one."""
        lease = self._lease
        return self._opening or (lease is not None and lease.status != "ended")

    def look_after(self) -> None:
        """Called at every look. Gives up a lease whose host is gone, so that the ledger decides about the
        session."""
        lease = self._lease
        if lease is None or self._opening or lease is self._given_up or not lease.host_lost:
            return
        self._given_up = lease
        self._log(f"session {self.session.id}: {lease.host_lost}")
        threading.Thread(target=self._give_up, args=(lease,), name="gives-up", daemon=True).start()

    @staticmethod
    def _give_up(lease: Lease) -> None:
        with contextlib.suppress(SubletError):
            lease.release()

    # what the ledger wants done

    def open(self, session: StudioSession, number: int) -> None:
        with self._lock:
            if self._opening:
                return
            self._opening = True
            self._opened.clear()
            self._lease = None
            self.session = session
            self._answer, self._closed = session.answer, ""
            self._answered.clear()
        threading.Thread(
            target=self._open, args=(session, number), name=f"opens-{session.id}", daemon=True
        ).start()

    @property
    def scratch(self) -> tuple[str, int] | None:
        """The folder of its worker's files, and the worker's supervisor."""
        worker = self._worker
        if not isinstance(worker, HasScratch) or not worker.scratch:
            return None
        return worker.scratch, worker.holder.pid

    def stop(self, why: str) -> None:
        """Ends its worker and its lease, and says why in both. It can be resumed, with a new worker."""
        lease, worker = self._lease, self._worker
        if worker is None or worker is self._stopped:
            return
        self._stopped = worker
        self._log(f"session {self.session.id} is stopped: {why}")

        def end() -> None:
            with contextlib.suppress(SubletError):  # a ledger that cannot be written to must not keep it
                if lease is not None:
                    self._ledger.revoke(
                        lease.id, reason=EndReason.REVOKED, detail=why, grace_us=0, actor="session host"
                    )
            worker.end(why)

        threading.Thread(target=end, name="stops", daemon=True).start()

    def answer(self, said: OfferAnswer) -> None:
        """Answers the current offer, and any other that comes while this lease waits."""
        self._answer = said
        self._answered.set()

    def touch(self, active_at: int) -> None:
        self._active_at = active_at
        lease = self._lease
        if lease is not None:
            with contextlib.suppress(LeaseLost):
                lease.touch()

    def close(self, why: str) -> None:
        """Returns at once; the lease is released in the background."""
        self._closed = why or "the session ended"
        self._answered.set()
        for record in list(self._records.values()):
            if record is not None:
                record.give_up()
        threading.Thread(target=self._let_go, name=f"closes-{self.session.id}", daemon=True).start()

    def _let_go(self) -> None:
        lease = self._lease
        if lease is not None:
            with contextlib.suppress(SubletError):
                lease.release()
        store, self._store = self._store, None
        if store is not None:
            with contextlib.suppress(SubletError):
                store.close()

    # the lease

    def _open(self, session: StudioSession, number: int) -> None:
        try:
            lease_id = session.lease_id
            if number > session.leases:
                lease_id = new_id()
                session = self._ledger.bind_session(session.id, number=number, lease_id=lease_id).session
            self.session, self._number = session, number
            self._lease = self._acquired(session, lease_id)
            self._active_at = max(self._active_at, session.active_at)
        except Stale as e:
            self._log(f"session {session.id}: {e.message}")
        except SubletError as e:
            self._why_not = e.message
            self._refused(session, e)
        except Exception as e:
            self._log(f"session {session.id}: opening it failed: {type(e).__name__}: {e}")
            self._refused(
                session, Refused("the session could not be opened on its host; no GPU time was used")
            )
        finally:
            self._opening = False
            self._opened.set()
            if self._closed:
                self._let_go()

    def _acquired(self, session: StudioSession, lease_id: str) -> Lease:
        placed = placement(self._settings)
        why = short_of_disk(self._settings)
        if why:
            raise Refused(why, remedy=FREE_THE_DISK)
        request = GpuRequest(
            self._settings,
            replace(session.request, host="" if placed is not None else self._settings["host"]),
            holder="worker",
            placed=placed,
            place=lambda host: self._placed_on(host, session),
            on_wait=None,
            on_offer=self._offered if session.request.wants_offers else None,
            start=lambda: self._started(session),
            still_wanted=self._still_wanted,
            lease_id=lease_id,
            record_next_id=self._bound_again,
        )
        lease = request.hold()
        try:
            openings = [opening_of(self._settings, lease, i, WATCHDOG_US) for i in range(len(lease.devices))]
            fields = json.dumps([asdict(opening) for opening in openings]).encode()
            lease.run_sealed(SET_OPENINGS, [fields], SilentSink())
        except BaseException as e:
            if isinstance(e, SubletError):
                self._refused(session, e)  # first: with only its lease given back it would look idle
            lease.release()
            raise
        lease.warm_us = session.warm_us
        lease.on_notice(lambda notice: self._warn(lease))
        lease.keep_warm(lambda: None)
        return lease

    def _started(self, session: StudioSession) -> Worker:
        self._worker = self._start(session)
        return self._worker

    def _bound_again(self) -> str:
        """Binds another lease after the host of the first could not take it and it was given back."""
        session = self._ledger.resume_session(self.session.id, self.session.tenant).session
        lease_id, number = new_id(), session.leases + 1
        self.session = self._ledger.bind_session(session.id, number=number, lease_id=lease_id).session
        self._number = number
        return lease_id

    def _placed_on(self, host: str, session: StudioSession) -> Worker:
        placed = placement(self._settings)
        assert placed is not None
        worker = placed.start(host, session.tenant)
        self._worker = admitted(self._settings, self._ledger, worker, session.tenant)
        return self._worker

    def _warn(self, lease: Lease) -> None:
        if lease.status == "revoking":
            lease.warn_worker()

    def _still_wanted(self) -> None:
        if self._closed:
            raise _NotWanted(self._closed)

    def _offered(self, offer: Answer) -> bool:
        """Waits until the user answers or the offer runs out."""
        left_us = offer.lease.offer_until - offer.at
        if self._answer is OfferAnswer.NONE:
            self._answered.wait(max(0.0, left_us / 1e6 - 0.5))
        self._still_wanted()
        return self._answer is OfferAnswer.ACCEPT

    def _refused(self, session: StudioSession, error: SubletError) -> None:
        """Ends a session that got no lease, with the reason in its detail."""
        if isinstance(error, _NotWanted):
            return
        if isinstance(error, Misconfigured):  # the operator's to correct, who reads the log
            self._log(f"session {session.id}: {error.code}: {error.message}; {error.remedy}")
        if isinstance(error, LeaseLost) and not isinstance(error, WaitTimedOut):
            self._log(f"session {session.id}: {error.message}")
            return  # granted and lost before it began: the ledger has the reason, and it can be resumed
        with contextlib.suppress(SubletError):
            self._ledger.end_session(
                session.id,
                session.tenant,
                detail=f"{error.code}: {error.message}"[:500],
                actor="session host",
            )

    # calls

    def call(self, call: str, target: str, parts: Sequence[Bytes], *, attach: bool) -> CallRecord:
        """The record of this call: begun now, running already, or over."""
        if target not in TARGETS:
            raise BadInput(f"there is no way to call {target[:40]!r}: use code or pickled")
        if not attach:
            self._wait_for_worker()
        with self._lock:
            if call in self._records:
                found = self._records[call]
                if found is None:
                    raise Stale(
                        f"call {call} was made and is over; its answer is not kept any more",
                        remedy="make a new call with a new id",
                    )
                return found
            if attach:
                raise Stale(
                    f"call {call} was never made, or belongs to a lease that is over; nothing runs under "
                    "this id",
                    remedy="make a new call with a new id",
                )
            record = CallRecord(call)
            self._calls.enter(record)
            self._records[call] = record
            if len(self._records) > REMEMBERED_CALLS:
                del self._records[next(c for c, r in self._records.items() if r is None or r.over)]
        runs = threading.Thread(
            target=self._run, args=(record, target, parts), name=f"calls-{self.session.id}", daemon=True
        )
        try:
            runs.start()
        except RuntimeError:  # no room for another thread
            self._calls.leave(record)
            with self._lock:
                del self._records[call]
            raise TooMany("the host has no room for another call now; nothing was begun") from None
        return record

    def check_room(self, call: str) -> None:
        """Called before the parts of a call are read; raises `TooMany` when it would have to wait, and enough
        others do."""
        if call not in self._records:
            self._calls.check_room()

    def _wait_for_worker(self) -> None:
        """Waits for the worker of a granted lease, which is active in the ledger a moment before its worker
        can be called. Does not wait for a lease."""
        while self._opening and not self._closed:
            lease = self._ledger.look_session(self.session.id, self.session.tenant).lease
            if lease is None or lease.state is LeaseState.WAITING:
                return
            self._opened.wait(OPEN_LOOK_SECONDS)

    def _check(self) -> Lease:
        """The lease, if a call may begin now; raises `LeaseLost` otherwise."""
        lease = self._lease
        if self._closed:
            raise LeaseLost(f"session {self.session.id} has ended: {self._closed}")
        if lease is None:
            raise LeaseLost(
                f"session {self.session.id} has no GPU: {self._why_not}",
                remedy="wait until its status is active, or resume it",
            )
        if lease.status == "revoking":
            why = lease.notice.reason if lease.notice is not None else "revoked"
            raise LeaseLost(f"the session's GPU is going away ({why}), so nothing new is begun on it")
        lease.check()
        return lease

    def _run(self, record: CallRecord, target: str, parts: Sequence[Bytes]) -> None:
        began = time.monotonic()
        try:
            with self._calls.turn(record):
                errors, launches = self._run_now(record, target, parts, began)
        except Stale as e:
            record.say(frames.FAIL, frames.packed_head(told(e)), last=True)
            return
        with contextlib.suppress(SubletError):
            self._ledger.note_session(self.session.id, calls=1, errors=errors, launches=launches)

    def _run_now(
        self, record: CallRecord, target: str, parts: Sequence[Bytes], began: float
    ) -> tuple[int, int]:
        """Runs a call whose turn it is; returns the errors and launches to count."""
        self._forget_others(record)
        errors = launches = 0
        try:
            lease = self._check()
            before = lease.launches
            fine, answer = lease.run_sealed(TARGETS[target], parts, _HostedCallSink(self, record))
            errors = int(not fine)
            # The worker is the user's and counts its own launches: bound the number before the ledger
            # adds it.
            launches = min(max(0, lease.launches - before), LAUNCHES_MOST)
            head = {
                "ok": fine,
                "parts": len(answer),
                "launches": launches,
                "seconds": round(time.monotonic() - began, 6),
            }
            record.say(frames.DONE, frames.packed_head(head), answer, last=True)
        except SubletError as e:
            errors = 1
            record.say(frames.FAIL, frames.packed_head(told(e)), last=True)
        except Exception as e:
            errors = 1
            self._log(f"session {self.session.id}: a call failed: {type(e).__name__}: {e}")
            record.say(frames.FAIL, frames.packed_head(told(SubletError("the call failed"))), last=True)
        return errors, launches

    def _forget_others(self, record: CallRecord) -> None:
        """Drops the records of earlier calls, which are kept until the next call begins."""
        with self._lock:
            for call, other in self._records.items():
                if other is not None and other is not record and other.over:
                    self._records[call] = None

    def forget_old(self, now: float) -> None:
        with self._lock:
            for call, record in self._records.items():
                if record is not None and record.forget_old(now):
                    self._records[call] = None

    def interrupt(self, call: str) -> None:
        """Interrupts the running call or the named one; one that has not begun stops as it begins."""
        worker = self._worker
        with self._lock:
            running = self._calls.running
            going = [r for r in (running, *self._records.values()) if r is not None and not r.over]
        meant = next((r for r in going if call in ("", r.call)), None)
        if worker is None or meant is None:
            raise Stale("no such call runs", remedy="nothing to do: it is over")
        meant.interrupted = True
        if meant is self._calls.running:
            worker.interrupt()

    # questions

    def ask(
        self, record: CallRecord, number: int, head: Mapping[str, Any], parts: Sequence[Bytes]
    ) -> tuple[bool, list[Bytes]]:
        """Answers a question that the call asks its caller or its checkpoints."""
        what = head.get("ask")
        if what == "save":
            return self._answered_here(lambda: self._save_for_call(parts))
        if what == "load":
            return self._answered_here(self._load_for_call)
        key = (record.call, number)
        with self._told:
            self._questions[key] = []
        body = {**head, "number": number, "parts": len(parts)}
        record.say(frames.ASK, frames.packed_head(body), parts)
        try:
            with self._told:
                while not self._questions[key]:
                    self._told.wait(LOOK_SECONDS)
                    lease = self._lease
                    if self._closed or lease is None or lease.status == "ended":
                        return False, []
                said: tuple[bool, list[Bytes]] = self._questions[key][0]
                return said
        finally:
            with self._told:
                del self._questions[key]

    def tell(self, call: str, number: int, fine: bool, parts: list[Bytes]) -> None:
        with self._told:
            waiting = self._questions.get((call, number))
            if waiting is None:
                raise Stale("nobody waits for this answer any more", remedy="nothing to do")
            if not waiting:  # a second answer to the same question changes nothing
                waiting.append((fine, parts))
                self._told.notify_all()

    @staticmethod
    def _answered_here(work: Callable[[], list[Bytes]]) -> tuple[bool, list[Bytes]]:
        try:
            return True, work()
        except SubletError as e:
            return False, [frames.packed_head(told(e))]

    # what the user saves

    def save(self, data: Bytes) -> tuple[int, int]:
        """Saves a state; returns its version and the bytes written."""
        self._wait_for_worker()
        lease = self._check_saving()
        why = short_of_disk(self._settings, memoryview(data).nbytes)
        if why:
            raise NotDurable(f"nothing was saved: {why}; the save before is untouched", remedy=FREE_THE_DISK)
        with self._turn_of_store() as store:
            saved = save_state(store, self._ledger, self.job, data, lease)
        with contextlib.suppress(SubletError):
            self._ledger.note_session(self.session.id, checkpoint_bytes=saved.bytes_written)
        return saved.version, saved.bytes_written

    def load(self, version: int | None) -> Bytes | None:
        """The saved bytes. Those who load the same version at the same time share one copy, on disk when it
        is large."""
        with self._turn_of_store() as store:
            head = self._ledger.head(self.job)
            if head is None:
                return None
            version = version or head.version
            kept = self._loaded.get(version)
            if kept is None:
                found = load_state(store, self._ledger, self.job, version)
                if found is None:
                    return None
                self._loaded[version] = kept = self.room.put(found)
            return kept

    @property
    def job(self) -> str:
        return self.session.request.job

    def _check_saving(self) -> Lease:
        lease = self._lease
        if lease is None or lease.status == "ended":
            raise NotDurable(
                f"session {self.session.id} has no GPU any more, so nothing was saved; the save before is "
                "untouched",
                remedy="resume the session, and save again",
            )
        return lease

    @contextlib.contextmanager
    def _turn_of_store(self) -> Iterator[CheckpointStore]:
        with self._saving:
            if self._store is None:
                self._store = checkpoints(settings=self._settings)
            yield self._store

    def _save_for_call(self, parts: Sequence[Bytes]) -> list[Bytes]:
        if len(parts) != 1:
            raise BadInput("a state is one part")
        version, written = self.save(parts[0])
        return [frames.packed_head({"version": version, "bytes_written": written})]

    def _load_for_call(self) -> list[Bytes]:
        found = self.load(None)
        return [] if found is None else [found]


class _NotWanted(SubletError):
    """The session ended while it waited for a lease."""


class _HostedCallSink:
    """Implements `ports.worker.CallSink`: what a call says goes into its record."""

    def __init__(self, held: HeldSession, record: CallRecord) -> None:
        self._session, self._record = held, record
        self._asked = 0

    @property
    def interrupted(self) -> bool:
        return self._record.interrupted

    def text(self, stream: str, text: str) -> None:
        kind = frames.OUT if stream == "stdout" else frames.ERR
        for at in range(0, len(text), CHUNK_BYTES):
            self._record.text(kind, text[at : at + CHUNK_BYTES].encode("utf-8", "replace"))

    def show(self, display: bytes) -> None:
        self._record.text(frames.SHOW, display)

    def ask(self, head: Mapping[str, Any], parts: Sequence[memoryview]) -> tuple[bool, Sequence[Bytes]]:
        self._asked += 1
        return self._session.ask(self._record, self._asked, head, parts)


def told(error: SubletError) -> dict[str, str]:
    return {"code": error.code, "message": error.message, "remedy": error.remedy}
