"""The warden: the host's enforcing loop.

Rules of this file:
- It reports the host's devices, runs the schedule, watches every holder by pidfd, and at a deadline ends what
  is left.
- Enforcement never waits for the ledger: one thread watches and kills by local monotonic deadlines, another
  talks to the ledger. When the ledger is silent at a deadline, the holder dies anyway (K2) and the books are
  made up later.
- A lease looked at too long ago may have been renewed since: before killing, the ledger is asked once more,
  for a moment.
- A teardown is `leases/warden/teardown.py`'s, each in a thread of its own: one wedged device must not hold up
  the others.
- Hosts look after each other: leases of a silent host are ended at their deadline by any other host's
  schedule.
- A warden sees only its own host's seat of a gang: the member there, the slices there. The deadline and the
  end are the whole gang's.
- A draining warden gives its host back: it grants nothing more, warns every lease, and leaves when the last
  of them is settled.
- It keeps nothing it cannot read again: a new warden rebuilds the same picture from rows (K3).
- Each loop says at each turn that it turned; `processes.loop_watch` ends the process when one does not (I4).
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from sublet.core.errors import LeaseLost, SubletError
from sublet.core.leasing.lease import EndReason, Holder, LeaseRecord, LeaseState
from sublet.core.scheduling.device import Device, DeviceState
from sublet.core.values import SECOND_US
from sublet.leases.warden.teardown import DeviceMemory, Scrub, Teardown
from sublet.ports.bell import SCHEDULE_TOPIC, host_topic
from sublet.ports.clock import Clock
from sublet.ports.device import DeviceClaims, NoClaims
from sublet.ports.ledger import FoundDevice, Ledger
from sublet.ports.processes import Processes, Receipt
from sublet.processes.loop_watch import LoopBeats

POLL_US = SECOND_US
BEAT_US = 5 * SECOND_US
PROBE_US = 60 * SECOND_US
#: How often a warden without leases of its own looks at other hosts' deadlines.
NEIGHBOURS_US = 5 * SECOND_US
#: How long a draining warden waits for the last Receipts, after the grace.
SETTLE_US = 10 * SECOND_US
#: How long the ledger may take to say that a lease due now was renewed after all.
CONFIRM_US = 300_000
#: TERM to KILL at the deadline. The grace is over by then; this is for a last line in a log.
TERM_WAIT_US = 200_000
#: A ledger call this long overdue hangs.
STUCK_US = 2 * SECOND_US
#: How often a teardown that failed is tried before its devices are withheld, and the pause between.
TEARDOWN_TRIES = 3
TEARDOWN_PAUSE_S = 1.0
BELL_WAIT_US = 5 * SECOND_US
ENFORCING, LEDGER, BELL = "enforcing", "ledger", "bell"


@dataclass(slots=True)
class _Watched:
    lease: LeaseRecord
    deadline_us: int  # monotonic
    fd: int | None = None
    gone: bool = False
    ending: bool = False
    asked_at: int = 0  # when the ledger was asked whether it is really due
    told: bool = False  # the ledger knows that the holder is gone
    below: tuple[Holder, ...] = ()  # the holder and its descendants, as last seen


@dataclass(slots=True)
class _Settlement:
    """A teardown whose Receipt still has to reach the ledger."""

    lease: LeaseRecord
    reason: EndReason
    detail: str
    receipt: Receipt


@dataclass(frozen=True, slots=True)
class _LeavingLease:
    why: str
    tell_until_us: int  # monotonic: the end of the grace


@dataclass(slots=True)
class _Shared:
    watched: dict[str, _Watched] = field(default_factory=dict)
    unsettled: dict[str, _Settlement] = field(default_factory=dict)
    devices: dict[str, Device] = field(default_factory=dict)


class Warden:
    def __init__(
        self,
        ledger: Ledger,
        processes: Processes,
        clock: Clock,
        host: str,
        probe: Callable[[], Sequence[FoundDevice]],
        memory: DeviceMemory,
        scrub: Scrub,
        *,
        idle_exit_us: int | None = None,
        needed: Callable[[], bool] = lambda: False,
        beats: LoopBeats | None = None,
        claims: DeviceClaims | None = None,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._ledger = ledger
        self._processes = processes
        self._clock = clock
        self._host = host
        self._probe = probe
        self._memory = memory
        self._teardown = Teardown(processes, memory, scrub)
        self._idle_exit_us = idle_exit_us
        self._needed = needed  # by others than its leases
        self._beats = beats or LoopBeats(clock)
        self._claims = claims or NoClaims()
        self._log = log
        self._lock = threading.Lock()
        self._shared = _Shared()
        self._inbox: queue.Queue[str] = queue.Queue()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._stopping = False
        self._leaving: _LeavingLease | None = None
        self._found: frozenset[str] = frozenset()  # devices, as last reported
        self._ledger_busy_since = 0
        self._next_look_at: int | None = None  # monotonic
        self._walked_at = 0
        self._beat_at = self._probe_at = self._neighbours_at = 0  # monotonic: when each is due again

    # life

    def report(self) -> None:
        swept = self._processes.sweep()
        if swept:
            self._log(f"ended pids {swept}, whose supervisor was gone")
        found = [] if self._leaving else list(self._probe())
        with self._beats.asking_ledger(LEDGER):
            taken = self._claims.claim(found)
            self._ledger.report_host(self._host, found, taken=taken)
            self._found = frozenset(d.id for d in found if d.id not in taken)
            view = self._ledger.host_view(self._host)
            devices = {d.id: d for d in self._ledger.devices(self._host)}
        leased = self._pids_of(x.holder for x in view.leases)
        for device in devices.values():
            self._memory.note_baseline(device, leased)
        with self._lock:
            self._shared.devices = devices

    def _pids_of(self, holders: Iterable[Holder]) -> frozenset[int]:
        trees = self._processes.trees(holder for holder in holders if holder.pid)
        return frozenset(process.pid for tree in trees.values() for process in tree)

    def _neighbours(self, lease_id: str) -> frozenset[int]:
        """Processes of every other lease on this host."""
        with self._lock:
            holders = [
                w.lease.holder for i, w in self._shared.watched.items() if i != lease_id and not w.gone
            ]
        return self._pids_of(holders)

    def _former_holders(self) -> frozenset[int]:
        """Holders that gave their lease back and live on, maybe with a context open: memory they use was not
        left by this lease."""
        with contextlib.suppress(SubletError):
            ended = [a.lease for a in self._ledger.leases(live_only=False, limit=500)]
            return self._pids_of(
                x.holder for x in ended if x.holder.host == self._host and x.reason is EndReason.RELEASED
            )
        return frozenset()

    def run(self) -> None:
        """Until `stop`, or until nothing has been leased here for the idle time."""
        threads = [
            threading.Thread(target=self._ledger_loop, name="sublet-warden-ledger", daemon=True),
            threading.Thread(target=self._bell_loop, name="sublet-warden-bell", daemon=True),
        ]
        for thread in threads:
            thread.start()
        try:
            self._enforce_loop()
        finally:
            self._stopping = True
            self._inbox.put("stop")
            threads[0].join(timeout=2)

    def has_deadlines(self) -> bool:
        """Whether it has a holder to end that a successor would not know of without the ledger."""
        with self._lock:
            return any(w.lease.holder.pid and not w.ending for w in self._shared.watched.values())

    def leave(self, why: str, deadline_us: int) -> None:
        """Give the host back: nothing more is granted, leases are told to go by `deadline_us` (monotonic),
        and `run` ends when they are settled. Said again, the nearer deadline stands."""
        said = self._leaving
        if said is None or deadline_us < said.tell_until_us:
            self._leaving = _LeavingLease(why, deadline_us)
            self._inbox.put("leave")

    def stop(self) -> None:
        self._stopping = True
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wake_write, b"!")

    # enforcing: this thread never calls the ledger

    def _enforce_loop(self) -> None:
        while not self._stopping:
            self._beats.turn(ENFORCING)
            poller = select.poll()
            poller.register(self._wake_read, select.POLLIN)
            by_fd: dict[int, _Watched] = {}
            with self._lock:
                now = self._clock.monotonic_us()
                wake_at = now + POLL_US
                for watched in self._shared.watched.values():
                    if watched.fd is not None and not watched.gone:
                        poller.register(watched.fd, select.POLLIN)
                        by_fd[watched.fd] = watched
                    wake_at = min(wake_at, self._enforce(watched, now))
            self._unstick(now)
            for fd, _ in poller.poll(max(1, (wake_at - self._clock.monotonic_us()) // 1000 + 1)):
                if fd == self._wake_read:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                    continue
                with self._lock:
                    by_fd[fd].gone = True
        self._beats.over(ENFORCING)

    def _enforce(self, watched: _Watched, now: int) -> int:
        """Act on one lease if it is due; when to come back."""
        if watched.ending or watched.lease.holder.pid == 0:
            return now + POLL_US
        if watched.gone:  # it ended by itself: no ttl to wait for
            self._begin_ending(watched)
            self._inbox.put("gone")
            return now + POLL_US
        if watched.lease.state is LeaseState.ENDED:
            self._begin_ending(watched)
            return now + POLL_US
        if watched.lease.state is LeaseState.WAITING:
            return now + POLL_US
        if now < watched.deadline_us:
            return watched.deadline_us
        if not watched.asked_at:
            watched.asked_at = now
            self._inbox.put("due")
        if now < watched.asked_at + CONFIRM_US:
            return watched.asked_at + CONFIRM_US
        self._log(
            f"lease {watched.lease.id}: the ledger is silent at its deadline; ending pid "
            f"{watched.lease.holder.pid}"
        )
        self._begin_ending(watched)
        return now + POLL_US

    def _begin_ending(self, watched: _Watched) -> None:
        watched.ending = True
        threading.Thread(target=self._tear_down, args=(watched,), daemon=True).start()

    def _tear_down(self, watched: _Watched) -> None:
        lease = watched.lease
        with self._lock:
            devices = dict(self._shared.devices)
        receipt = self._torn_down(watched, devices)
        self._log(
            f"lease {lease.id}: pid {lease.holder.pid} {receipt.ladder}, proven={receipt.proven} "
            f"{receipt.detail}"
        )
        if watched.gone and lease.state is not LeaseState.ENDED:
            reason, detail = EndReason.HOLDER_LOST, _lost(lease)
        else:
            reason, detail = lease.reason or EndReason.EXPIRED, lease.detail or "ended at its deadline"
        with self._lock:
            self._shared.unsettled[lease.id] = _Settlement(lease, reason, detail, receipt)
        self._inbox.put("settle")

    def _torn_down(self, watched: _Watched, devices: dict[str, Device]) -> Receipt:
        """Its Receipt, also when the teardown itself fails: without one the lease would never be settled, and
        nobody would say so."""
        lease = watched.lease
        for left in reversed(range(TEARDOWN_TRIES)):
            try:
                return self._teardown.run(
                    lease.holder,
                    lease.slices,
                    devices,
                    lambda: self._neighbours(lease.id),
                    self._former_holders,
                    TERM_WAIT_US,
                    also=watched.below[1:],
                )
            except Exception as e:
                problem = f"its teardown failed: {type(e).__name__}: {e}"
                self._log(f"lease {lease.id}: {problem}")
            if left:
                time.sleep(TEARDOWN_PAUSE_S)
        return Receipt(proven=False, ladder="unproven", containment="unknown", detail=problem)

    def _unstick(self, now: int) -> None:
        since = self._ledger_busy_since
        if since and now - since > STUCK_US:
            done = self._ledger.unstick()
            if done:
                self._log(done)

    # the ledger's side

    def _bell_loop(self) -> None:
        """Without a bell the ledger's loop still looks once a second, so what fails here is tried again."""
        while not self._stopping:
            self._beats.turn(BELL)
            try:
                with self._beats.asking_ledger(BELL):
                    self._hear_bell()
            except (SubletError, OSError) as e:
                self._log(f"bell: {type(e).__name__}: {e}")
                time.sleep(POLL_US / 1e6)
        self._beats.over(BELL)

    def _hear_bell(self) -> None:
        with contextlib.closing(self._ledger.bell()) as bell:
            for topic in (host_topic(self._host), SCHEDULE_TOPIC):
                bell.listen(topic)
            while not self._stopping:
                self._beats.turn(BELL)
                if bell.wait(BELL_WAIT_US):
                    self._inbox.put("rang")

    def _ledger_loop(self) -> None:
        idle_since = self._clock.monotonic_us()
        pause = 0
        while not self._stopping:
            with contextlib.suppress(queue.Empty):
                self._inbox.get(timeout=pause / 1e6)
                while True:
                    self._inbox.get_nowait()
            now = self._clock.monotonic_us()
            self._beats.turn(LEDGER)
            try:
                self._ledger_busy_since = now
                with self._beats.asking_ledger(LEDGER):
                    self._talk_to_ledger(now)
                if self._probe_at and (now >= self._probe_at or self._taken_for_lost()):
                    self.report()
                if now >= self._probe_at:
                    self._probe_at = now + PROBE_US
            except SubletError as e:
                self._log(f"ledger: {e.code}: {e.message}")
            except Exception as e:  # the loop must outlive anything: it is what keeps the host honest
                self._log(f"ledger: {type(e).__name__}: {e}")
            finally:
                self._ledger_busy_since = 0
            self._wake()
            now = self._clock.monotonic_us()
            with self._lock:
                if self._shared.watched or self._shared.unsettled or self._needed():
                    idle_since = now
            if self._idle_exit_us is not None and now - idle_since >= self._idle_exit_us:
                self._log("nothing leased here for a while: leaving")
                self.stop()
            pause = POLL_US
            if self._next_look_at is not None:
                pause = max(1000, min(POLL_US, self._next_look_at - now))
        self._beats.over(LEDGER)

    def _talk_to_ledger(self, now: int) -> None:
        if now >= self._beat_at:  # first: during an outage of the ledger no host was heard
            self._ledger.beat_host(self._host)
            self._beat_at = now + BEAT_US
            if self._probe_at and self._claims.changed():
                self._probe_at = now
        self._end_lost()
        self._settle()
        self._refresh()
        if self._leaving is not None and self._left(self._leaving):
            self.stop()
            return
        if now >= self._neighbours_at:
            self._look_after_neighbours()
            self._neighbours_at = now + NEIGHBOURS_US

    def _taken_for_lost(self) -> bool:
        """We were silent, and others have said so: requests here are refused until the devices are reported
        again."""
        with self._lock:
            return any(
                d.state is DeviceState.LOST and d.id in self._found for d in self._shared.devices.values()
            )

    def _look_after_neighbours(self) -> None:
        """Run the schedule even without leases here. A warden with leases does so anyway, for all hosts;
        where none has any, a dead host's leases would never be ended."""
        if any(d.host != self._host for d in self._ledger.devices()):
            self._ledger.tick(self._host)

    def _left(self, leaving: _LeavingLease) -> bool:
        """One step of leaving; True when nothing is left here, or cannot be waited for any longer."""
        now = self._clock.monotonic_us()
        if self._found:
            self._log(f"leaving: {leaving.why}")
            self.report()
        view = self._ledger.host_view(self._host)
        for lease in view.leases:
            left_us = max(0, leaving.tell_until_us - now)
            due = view.at + left_us
            if lease.state is LeaseState.ENDED or (
                lease.state is LeaseState.REVOKING and lease.deadline_at <= due + SECOND_US
            ):
                continue
            with contextlib.suppress(LeaseLost):  # it ended between the look and this
                self._ledger.revoke(
                    lease.id,
                    reason=EndReason.DEVICE_LOST,
                    detail=f"host {self._host} is given back: {leaving.why}",
                    grace_us=left_us,
                    actor="warden",
                )
        if view.leases and now < leaving.tell_until_us + SETTLE_US:
            return False
        self._log(f"left with {len(view.leases)} lease(s) not settled" if view.leases else "left clean")
        return True

    def _end_lost(self) -> None:
        """A lease whose holder is gone is over now, so that whoever continues its job need not wait for the
        proof that nothing of it is left. Its slices do: they are free when that proof is settled."""
        with self._lock:
            lost = [w for w in self._shared.watched.values() if w.gone and w.ending and not w.told]
        for watched in lost:
            lease = watched.lease
            if lease.state is not LeaseState.ENDED:
                self._ledger.end(
                    lease.id,
                    lease.epoch,
                    reason=EndReason.HOLDER_LOST,
                    detail=_lost(lease),
                    host=self._host,
                )
            watched.told = True

    def _settle(self) -> None:
        with self._lock:
            pending = list(self._shared.unsettled.values())
        for settlement in pending:
            lease = settlement.lease
            self._ledger.end(
                lease.id,
                lease.epoch,
                reason=settlement.reason,
                detail=settlement.detail,
                host=self._host,
            )
            self._ledger.settle(lease.id, lease.epoch, settlement.receipt, host=self._host)
            self._processes.forget(lease.holder)
            with self._lock:
                self._shared.unsettled.pop(lease.id, None)
                # Forget what was known of it. If the row says otherwise by now (a waiter that died was
                # granted meanwhile), the next look starts afresh instead of believing that it was dealt with.
                watched = self._shared.watched.pop(lease.id, None)
            if watched is not None:
                self._drop(watched)

    def _refresh(self) -> None:
        """Run the schedule if there is anything to schedule, then read what this host must enforce."""
        sent_at = self._clock.monotonic_us()
        view = self._ledger.host_view(self._host)
        if any(x.state is not LeaseState.ENDED for x in view.leases):
            result = self._ledger.tick(self._host)
            for instruction in result.instructions:
                self._log(
                    f"schedule: {type(instruction).__name__} {instruction.lease_id}: {instruction.reason}"
                )
            look = result.next_look_at
            self._next_look_at = None if look is None else sent_at + look - result.at + 1000
            sent_at = self._clock.monotonic_us()
            view = self._ledger.host_view(self._host)
        else:
            self._next_look_at = None
        if any(x.state is LeaseState.ENDED for x in view.leases):
            # About to act outside on something merely read.
            self._ledger.barrier()
        self._note_cleared({d.id: d for d in self._ledger.devices(self._host)}, view.leases)
        with self._lock:
            current = {x.id: x for x in view.leases}
            for lease_id in [i for i in self._shared.watched if i not in current]:
                self._drop(self._shared.watched.pop(lease_id))
            for lease in current.values():
                if lease.id in self._shared.unsettled:
                    continue
                deadline = sent_at + lease.ends_at - view.at
                watched = self._shared.watched.get(lease.id)
                if watched is not None and watched.lease.holder != lease.holder and not watched.ending:
                    self._drop(watched)  # somebody sat down, or left, since the last look
                    watched = None
                if watched is not None:
                    watched.lease, watched.deadline_us = lease, deadline
                    if deadline > self._clock.monotonic_us():
                        watched.asked_at = 0
                    continue
                watched = _Watched(lease, deadline)
                self._shared.watched[lease.id] = watched
                if lease.holder.pid:
                    watched.fd = self._processes.watch(lease.holder)
                    watched.gone = watched.fd is None
        self._walk(sent_at)

    def _note_cleared(self, devices: dict[str, Device], leases: Sequence[LeaseRecord]) -> None:
        """A device an operator has cleared is clean as it is now: that is its new baseline."""
        with self._lock:
            before, self._shared.devices = self._shared.devices, devices
        for device in devices.values():
            old = before.get(device.id)
            if old is not None and old.state is DeviceState.QUARANTINED and device.state is DeviceState.READY:
                self._memory.forget(device.id)
                self._memory.note_baseline(device, self._pids_of(x.holder for x in leases))

    def _walk(self, now: int) -> None:
        """Note each holder's descendants now and then, so that the orphans of one that dies are known."""
        if now - self._walked_at < POLL_US:
            return
        self._walked_at = now
        with self._lock:
            living = {w.lease.holder: w for w in self._shared.watched.values() if not w.gone and w.fd}
        for holder, tree in self._processes.trees(living).items():
            living[holder].below = tree

    def _drop(self, watched: _Watched) -> None:
        if watched.fd is not None:
            os.close(watched.fd)
            watched.fd = None


def _lost(lease: LeaseRecord) -> str:
    if lease.seats:  # the ledger names the seat
        return f"process {lease.holder.pid} ended without leaving it"
    return f"its holder, process {lease.holder.pid}, ended without releasing it"
