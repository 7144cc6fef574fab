"""The target that works on items, loaded in a leased process on a GPU; and the lease it runs under.

Rules of this file:
- The call to the worker is made in a thread of its own, so that the worker's own thread hears every Notice at
  once.
- Whether a worker died of its items or of its lease is judged by the ledger. While that cannot be asked, the
  lease is taken to be the cause, which is no failure of an item.
- Without a way to lease a GPU nothing is leased, and the target is called in this process.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sublet.core.errors import CallFailed, LeaseLost, NotPlaced, SubletError, WorkerLost
from sublet.core.leasing.lease import TAKEN, EndReason, LeaseState
from sublet.core.runs.drain import plan_batch
from sublet.core.values import SECOND_US, format_size
from sublet.leases.lease import Lease
from sublet.ports.ledger import Ledger
from sublet.processes.worker import target
from sublet.processes.worker.target import Processed, TargetNotReady
from sublet.queues.item import Item
from sublet.queues.patience import FIRST_PAUSE_US, GLANCE_US, LONGEST_PAUSE_US, Patience
from sublet.queues.queue import Queue
from sublet.queues.tally import WorkPlan, WorkTally

#: How long `teardown` may take when there is no deadline.
TEARDOWN_US = 30 * SECOND_US
#: How long a lost lease's slices may take to be free again.
SETTLE_US = 5 * SECOND_US
#: How long a worker whose lease is over may take to end, and its supervisor to report the cause.
LAST_WORDS_US = 5 * SECOND_US
#: Ends that are the lease's own, and no item's failure.
_LEASE_ENDS = (*TAKEN, EndReason.RELEASED)

#: Asks for a lease held by a worker. The argument is called now and then while it waits, and may raise.
LeaseFactory = Callable[[Callable[[], None]], Lease]


@dataclass(frozen=True, slots=True)
class LeaseTaken:
    """The lease ended under the batch."""

    why: str


@dataclass(frozen=True, slots=True)
class WorkerKilled:
    """The worker ended under the batch, and not because of its lease."""

    how: str


class _WorkerCall:
    """One call to the worker, in a thread of its own."""

    def __init__(self, wake: Callable[[], None], work: Callable[[], Any]) -> None:
        self._wake = wake
        self._work = work
        self._value: Any = None
        self._error: BaseException | None = None
        self.over = False
        self._thread = threading.Thread(target=self._run, name="sublet-work-call", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._work()
        except BaseException as e:
            self._error = e
        self.over = True
        self._wake()

    def value(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value


class LeasedTarget:
    """The target of one worker, with the lease it is loaded under while there is one."""

    def __init__(
        self,
        plan: WorkPlan,
        acquire_lease: LeaseFactory | None,
        ledger: Callable[[], Ledger],
        queues: Iterable[Queue],
        patience: Patience,
        tally: WorkTally,
    ) -> None:
        self._plan = plan
        self._acquire_lease = acquire_lease
        self._ledger = ledger
        self._queues = list(queues)
        self._patience = patience
        self._tally = tally
        self.lease: Lease | None = None
        self.loaded = False
        self.load_us = 0
        self.usual_us: dict[int, int] = {}  # by the number of items: how long a batch takes
        self._unsettled: Lease | None = None
        self._call: _WorkerCall | None = None  # the last one to the worker

    def _use(self, lease: Lease | None) -> None:
        self.lease = self._patience.lease = lease
        for queue in self._queues:
            queue.lease = lease

    # getting ready

    def make_ready(self, must_wait: Callable[[], None]) -> None:
        """Have a GPU with the target loaded on it. `must_wait` is called when none is available now."""
        while not self.loaded:
            lease = None
            if self._acquire_lease is not None:
                lease = self._acquired(self._acquire_lease, must_wait)
                self._tally.leases += 1
                self._patience.say(
                    f"lease {lease.id} (epoch {lease.epoch}): {format_size(lease.vram_bytes)} "
                    f"on {', '.join(lease.devices)}"
                )
            self._use(lease)
            self.loaded = self._load(lease)

    def _acquired(self, acquire_lease: LeaseFactory, must_wait: Callable[[], None]) -> Lease:
        patience = self._patience
        self._wait_until_settled()
        patience.doing = "waiting for a GPU"

        def still_wanted() -> None:
            patience.check_told()
            must_wait()
            patience.show()

        pause_us = FIRST_PAUSE_US
        while True:
            try:
                return patience.retry(lambda: acquire_lease(still_wanted), "the ledger")
            except (LeaseLost, NotPlaced) as e:
                # The lease was granted and taken again, its worker never began, or no node answers.
                if isinstance(e, NotPlaced) and self._tally.batches == 0:
                    raise  # nothing was done yet: the user sees the error
                must_wait()
                patience.say(f"{e.message}; asking again")
                patience.pause(pause_us)
                pause_us = min(LONGEST_PAUSE_US, 2 * pause_us)
                patience.check_told()

    def _wait_until_settled(self) -> None:
        """A worker that asks again before its old slice is free would stand in its own way."""
        lease, self._unsettled = self._unsettled, None
        give_up = self._patience.now() + SETTLE_US
        with contextlib.suppress(SubletError):
            while lease is not None and not self._ledger().look(lease.id).lease.settled_at:
                if self._patience.now() >= give_up or self._patience.notice is not None:
                    return
                time.sleep(0.005)

    def _load(self, lease: Lease | None) -> bool:
        """False when the lease was lost meanwhile."""
        name, batched = self._plan.target, self._plan.batch > 0
        self._patience.doing = f"loading {name}"
        begun = self._patience.now()
        if lease is None:
            trouble = target.load(name, batched)
        else:
            call = self._called(lambda: lease.run(target.load, name, batched))
            while not call.over:
                self._patience.check_told()
                self._patience.pause(GLANCE_US)
            try:
                trouble = call.value()
            except WorkerLost as lost:
                judged = self._judged(lease, lost)
                if isinstance(judged, WorkerKilled):
                    raise TargetNotReady(
                        f"loading {name} ended the worker: {judged.how}; no item was touched"
                    ) from lost
                self.lost_lease(judged.why)
                return False
            except LeaseLost as lost:
                self.lost_lease(lost.message)
                return False
        if trouble is not None:
            trace = f"\n{trouble.trace.rstrip()}" if trouble.trace else ""
            raise TargetNotReady(f"{trouble.sentence}; no item was touched{trace}")
        self.load_us = self._patience.now() - begun
        self._patience.doing = ""
        return True

    # a batch

    def run(self, items: Sequence[Item]) -> Processed | WorkerKilled | LeaseTaken:
        """Work on items until the target answers, its worker is lost, or the batch has to be ended."""
        patience = self._patience
        begun = patience.now()
        bodies = [item.body for item in items]
        lease = self.lease
        self._tally.batches += 1
        try:
            if lease is None:
                return self._here(bodies)
            call = self._called(lambda: lease.run(target.process, bodies))
            while not call.over:
                why = patience.must_end(lease, begun, self.usual_us.get(len(items)), LAST_WORDS_US)
                if why:
                    patience.check_told()
                    return LeaseTaken(why)
                patience.pause(GLANCE_US)
            answer = self._answer(call)
            # The slower batches are remembered, and forgotten slowly.
            took = patience.now() - begun
            self.usual_us[len(items)] = max(took, self.usual_us.get(len(items), 0) * 3 // 4)
            return answer
        except WorkerLost as lost:
            assert lease is not None
            return self._judged(lease, lost)
        except LeaseLost as lost:
            return LeaseTaken(lost.message)
        finally:
            took = patience.now() - begun
            self._tally.work_us += took
            for item in items:
                item.begun_us = patience.now() - took // len(items)  # each took an equal part of the time

    def _here(self, bodies: list[Any]) -> Processed:
        try:
            return target.process(bodies)
        except KeyboardInterrupt:  # the person at this terminal
            raise
        except BaseException as e:
            return Processed([], target.told(e))

    def _answer(self, call: _WorkerCall) -> Processed:
        """Whatever the items raise is theirs, also what is not an `Exception`, such as a cancelled
        coroutine's end, and an answer too large to send."""
        try:
            answer: Processed = call.value()
            return answer
        except BaseException as e:
            # What came from the worker has its traceback as the cause. Without one it is this process that
            # failed, such as at a closed standard output.
            from_there = not isinstance(e, Exception) or e.__cause__ is not None
            if not from_there or (isinstance(e, SubletError) and not isinstance(e, CallFailed)):
                raise
            return Processed([], target.told(e))

    def _called(self, work: Callable[[], Any]) -> _WorkerCall:
        self._call = _WorkerCall(self._patience.wake, work)
        return self._call

    def _judged(self, lease: Lease, lost: WorkerLost) -> WorkerKilled | LeaseTaken:
        """Judge whether the lease ended or the worker."""
        try:
            seen = self._ledger().look(lease.id)
        except SubletError as e:
            return LeaseTaken(e.message)
        row = seen.lease
        over = row.reason in _LEASE_ENDS if row.state is LeaseState.ENDED else row.ends_at <= seen.at
        over = over or row.state is LeaseState.REVOKING
        if over or not lost.begun or lost.with_host:
            return LeaseTaken(lost.message)
        how = lost.message.rpartition("the worker ended: ")[2]
        return WorkerKilled(how.removeprefix("it was killed by ").removeprefix("it "))

    # giving it up

    def check_lease(self) -> None:
        """A lease that ended, or is about to, is given up before the next batch begins."""
        lease = self.lease
        if lease is None or lease.status == "active":
            return
        why = lease.notice.reason if lease.notice is not None else "it was not renewed in time"
        self._count_lost(why)
        self.give_up()

    def lost_lease(self, why: str) -> None:
        self._count_lost(why)
        self.drop()

    def _count_lost(self, why: str) -> None:
        self._tally.lost_leases += 1
        self._patience.say(f"the lease is over: {why}; another is asked for when there is something to do")

    def lost_worker(self) -> None:
        self._tally.lost_workers += 1
        self.drop()

    def give_up(self) -> None:
        """Tear down what was set up, as far as the time allows, and release the lease."""
        patience, lease = self._patience, self.lease
        calling = self._call is not None and not self._call.over
        if self.loaded and lease is None:
            self._told_of_teardown(target.unload())
        elif self.loaded and lease is not None and lease.status != "ended" and not calling:
            until = patience.now() + TEARDOWN_US
            for notice in (patience.notice, lease.notice):
                if notice is not None:
                    plan = plan_batch(notice, patience.now(), begun_us=0, usual_us=None)
                    until = min(until, plan.end_at_us)
            call = self._called(lambda: lease.run(target.unload))
            while not call.over and patience.now() < until:
                patience.pause(GLANCE_US)
            if call.over:
                with contextlib.suppress(LeaseLost):
                    self._told_of_teardown(call.value())
            else:
                patience.say("teardown was cut short, because the time is over")
        self.drop()

    def _told_of_teardown(self, trace: str) -> None:
        if trace:
            self._patience.say(f"teardown failed; every result is stored all the same\n{trace.rstrip()}")

    def drop(self) -> None:
        """Release the lease; its worker ends with it."""
        lease, self.loaded = self.lease, False
        self._use(None)
        if lease is not None:
            with contextlib.suppress(SubletError):
                lease.release()
            self._unsettled = lease
