"""A worker: takes items of its queues, works on them in a leased process that keeps the model loaded, and completes them.

Rules of this file:
- An item that was taken is completed, failed with its own traceback, or given back before this process leaves. Leaving a batch by whatever exception gives back what is not
  over.
- A failure is what an item's own processing raised, a result that cannot be stored, or that it ended the worker while it was alone there. A lease that was taken, a
  process told to leave, a ledger, sink or broker that is down: nobody's failure, and the item keeps its place.
- A batch of several that raised, or that ended its worker, is tried again item by item under the same delivery: only the poisonous one fails.
- The GPU is asked for when there is something to do, and given back when there has not been for a while. Who must wait for it holds no items meanwhile.
- The call to the worker is made in a thread of its own, so that this one hears every Notice at once; everything else happens in this one.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from sublet.core.drain import BatchPlan, plan_batch
from sublet.core.errors import (
    BadInput,
    CallFailed,
    Disconnected,
    LeaseLost,
    NotPlaced,
    Refused,
    SubletError,
    WorkerLost,
)
from sublet.core.exits import TERMINATED_CODE, Outcome, exit_code
from sublet.core.items import ItemState, in_turn
from sublet.core.lease import EndReason, LeaseState
from sublet.core.notice import Notice
from sublet.core.values import SECOND_US, format_duration, format_size
from sublet.ports.bell import Bell
from sublet.ports.clock import Clock
from sublet.ports.items import QueueStats
from sublet.ports.ledger import Ledger
from sublet.ports.topics import queue_topic
from sublet.runtime import target
from sublet.runtime.holding import Lease
from sublet.runtime.progress_line import WorkLine
from sublet.runtime.pull import Item
from sublet.runtime.queues import LOOK_US, Queue
from sublet.runtime.target import Processed, TargetNotReady

#: An idle GPU is given back after this, or after as long as the model took to load, whichever is more: loading it again costs that.
REST_US = 10 * SECOND_US
#: Whoever is idle looks this often whether it is told to leave.
GLANCE_US = 200_000
#: Between two questions to a broker, which waits a moment itself; and how long one says nothing before its queue counts as empty.
BREATH_US = 10_000
QUIET_US = 2 * SECOND_US
#: Between two tries of what is down.
FIRST_PAUSE_US = 100_000
LONGEST_PAUSE_US = 15 * SECOND_US
#: For `teardown` when nobody is in a hurry.
TEARDOWN_US = 30 * SECOND_US
#: For a lost lease's slices to be free again.
SETTLE_US = 5 * SECOND_US
#: For a worker whose lease is over to be gone, and its supervisor to say what it died of.
LAST_WORDS_US = 5 * SECOND_US
#: The queues' numbers are asked for this often, and never for more than a twentieth of the time.
COUNT_US = 2 * SECOND_US
#: The lease's own ends, which are nobody's failure.
_TAKEN = {
    EndReason.EXPIRED,
    EndReason.RELEASED,
    EndReason.REVOKED,
    EndReason.PREEMPTED,
    EndReason.HOLD_CAP,
    EndReason.IDLE,
    EndReason.QUOTA,
    EndReason.DEVICE_LOST,
}

T = TypeVar("T")


class Warnings(Protocol):
    """What tells this process to leave."""

    @property
    def notice(self) -> Notice | None: ...
    def on_notice(self, callback: Callable[[Notice], None]) -> None: ...


#: Asks for a lease held by a worker. The argument is called now and then while it waits, and may raise.
Borrow = Callable[[Callable[[], None]], Lease]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What was asked for."""

    target: str
    batch: int = 0  # 0: the target takes one item at a time, not a list
    visibility_us: int | None = None  # None: the queue's own
    until_empty: bool = False
    most: int = 0  # 0: no limit
    idle_us: int | None = None  # leave after so long without work; None: never
    rest_us: int = REST_US
    profile: str = "default"


@dataclass(slots=True)
class Tally:
    """What this worker did."""

    done: int = 0
    failed: int = 0
    dead: int = 0
    refused: int = 0  # results of items that somebody else had by then
    given_back: int = 0
    leases: int = 0
    lost_leases: int = 0
    lost_workers: int = 0
    batches: int = 0
    work_us: int = 0

    @property
    def handled(self) -> int:
        return self.done + self.failed + self.refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """How it ended."""

    outcome: Outcome
    exit_code: int
    reason: str
    tally: Tally

    def to_json(self) -> dict[str, Any]:
        counts = {name: getattr(self.tally, name) for name in self.tally.__slots__}
        return {"outcome": self.outcome.value, "exit_code": self.exit_code, "reason": self.reason, **counts}


class _Leaving(Exception):
    """This process is told to leave. Whatever is in hand is given back on the way out."""


@dataclass(frozen=True, slots=True)
class _Taken:
    """The lease ended under the batch."""

    why: str


@dataclass(frozen=True, slots=True)
class _Killed:
    """The worker ended under the batch, and not because of its lease."""

    how: str


class _Call:
    """One call to the worker, in a thread of its own."""

    def __init__(self, stir: Callable[[], None], work: Callable[[], Any]) -> None:
        self._stir = stir
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
        self._stir()

    def value(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value


@dataclass(slots=True)
class _Outage:
    """Something that is down, told once."""

    what: str = ""
    pause_us: int = field(default=FIRST_PAUSE_US)


class Work:
    def __init__(
        self,
        queues: Sequence[Queue],
        terms: Terms,
        borrow: Borrow | None,
        ledger: Callable[[], Ledger],
        warnings: Warnings,
        clock: Clock,
        line: WorkLine,
    ) -> None:
        """Without `borrow` nothing is leased: the target is called in this process."""
        self._queues = {queue.name: queue for queue in queues}
        self._brokered = any(queue.waits_at_a_broker for queue in queues)
        self._terms = terms
        self._borrow = borrow
        self._ledger = ledger
        self._warnings = warnings
        self._clock = clock
        self._line = line
        self.tally = Tally()
        self._stirred = threading.Event()
        self._tries: dict[str, int] = {}
        self._served = ""
        self._lease: Lease | None = None
        self._loaded = False
        self._load_us = 0
        self._unsettled: Lease | None = None
        self._call: _Call | None = None  # the last one to the worker
        self._bell: Bell | None = None
        self._usual_us: dict[int, int] = {}  # by the number of items: how long a batch takes
        self._plans: dict[Notice, BatchPlan] = {}
        self._outage = _Outage()
        self._left_behind = False
        self._doing = ""
        self._counted: tuple[int, int, list[QueueStats]] = (0, 0, [])  # next at, cost, numbers

    # life

    def go(self) -> Left:
        """Until there is a reason to leave. What cannot be loaded, and a queue that is not there, raise."""
        self._warnings.on_notice(lambda _: self._stirred.set())
        try:
            for name, queue in self._queues.items():
                self._tries[name] = queue.record().terms.tries
            try:
                reason = self._loop()
                self._give_up_lease("nothing more to do")
                return self._leave(Outcome.DONE, reason)
            except _Leaving:
                notice = self._warnings.notice
                assert notice is not None
                self._give_up_lease(notice.reason)
                outcome = Outcome.STOPPED if self._left_behind else Outcome.PREEMPTED
                return self._leave(outcome, notice.reason)
            except Refused as e:
                return self._leave(Outcome.NO_LEASE, e.message)
        finally:
            self._drop_lease()
            for queue in self._queues.values():
                with contextlib.suppress(SubletError):
                    queue.close()
            if self._bell is not None:
                self._bell.close()
            self._line.close()

    def _leave(self, outcome: Outcome, reason: str) -> Left:
        code = exit_code(outcome, TERMINATED_CODE, self._terms.profile)
        return Left(outcome=outcome, exit_code=code, reason=reason, tally=self.tally)

    def _loop(self) -> str:
        idle_since = self._now()
        while True:
            self._check_told()
            self._look_after_lease()
            if self._terms.most and self.tally.handled >= self._terms.most:
                return f"{self.tally.handled} items were worked on"
            taken = self._next_batch()
            if taken is not None:
                self._doing = ""
                self._work_off(*taken)
                idle_since = self._now()
                continue
            idle_us = self._now() - idle_since
            if self._terms.until_empty and (not self._brokered or idle_us >= QUIET_US) and self._all_empty():
                return "nothing is left"
            if self._terms.idle_us is not None and idle_us >= self._terms.idle_us:
                return f"there was nothing to do for {format_duration(idle_us)}"
            if self._lease is not None and idle_us >= max(self._terms.rest_us, self._load_us):
                self._line.say("nothing to do: the GPU is given back until there is")
                self._give_up_lease("nothing to do")
            self._doing = "idle"
            self._wait_for_items(idle_since)

    def _now(self) -> int:
        return self._clock.monotonic_us()

    def _check_told(self) -> None:
        if self._warnings.notice is not None:
            raise _Leaving

    # taking items

    def _wanted(self) -> int:
        most = self._terms.batch or 1
        return min(most, self._terms.most - self.tally.handled) if self._terms.most else most

    def _next_batch(self) -> tuple[Queue, list[Item]] | None:
        for name in in_turn(list(self._queues), self._served):
            queue = self._queues[name]
            # Without a GPU one is enough to know that there is work: the rest stays for others until this worker is ready.
            cold = not self._loaded
            items = self._take(queue, 1 if cold else self._wanted())
            if not items:
                continue
            self._served = name
            if cold:
                with self._in_hand(queue, items):
                    self._make_ready(partial(self._hand_back, queue, items))
                    items = [item for item in items if not item.over]
                    items += self._take(queue, self._wanted() - len(items))
                    if not self._loaded:  # lost again while the others were taken
                        self._hand_back(queue, items)
                        items = []
                if not items:
                    continue
            return queue, items
        return None

    def _take(self, queue: Queue, most: int) -> list[Item]:
        if most <= 0:
            return []
        try:
            return self._patiently(
                lambda: queue.take(most, visibility_us=self._terms.visibility_us), f"queue {queue.name}"
            )
        except LeaseLost as lost:  # acknowledging what the sink had already
            self._lost_lease(None, [], _Taken(lost.message))
            return []

    def _all_empty(self) -> bool:
        """Nothing to be had now or later, and nothing in the hands of others, who might yet give it back."""
        if any(
            self._patiently(partial(queue.peek, 1, state=state), f"queue {queue.name}")
            for queue in self._queues.values()
            for state in (ItemState.READY, ItemState.DELAYED, ItemState.LEASED)
        ):
            return False
        # Between two of these looks an item may have gone back where was looked before: only one look at all of them counts.
        return not any(
            (now := self._patiently(queue.stats, f"queue {queue.name}")).ready or now.delayed or now.leased
            for queue in self._queues.values()
        )

    def _wait_for_items(self, idle_since: int) -> None:
        if self._brokered:
            self._pause(BREATH_US)  # items are waited for there
            return
        if self._bell is None:
            bell = self._patiently(lambda: self._ledger().bell(), "the ledger")
            for queue in self._queues.values():
                bell.listen(queue_topic(queue.record().id))
            self._bell = bell
            return  # something may have come before we listened
        until = self._now() + LOOK_US
        if self._terms.idle_us is not None:
            until = min(until, idle_since + self._terms.idle_us)
        while self._now() < until and self._warnings.notice is None:
            self._show()
            if self._bell.wait(min(GLANCE_US, max(1000, until - self._now()))):
                return

    # a batch

    @contextlib.contextmanager
    def _in_hand(self, queue: Queue, items: list[Item]) -> Iterator[None]:
        """However this is left by an exception, what is not over is to be had again at once."""
        try:
            yield
        except BaseException:
            self._hand_back(queue, items)
            raise

    def _work_off(self, queue: Queue, items: list[Item]) -> None:
        with self._in_hand(queue, items):
            outcome = self._run(items)
            if isinstance(outcome, Processed) and not outcome.raised:
                self._finish(queue, items, outcome)
            elif isinstance(outcome, _Taken):
                self._lost_lease(queue, items, outcome)
            elif len(items) == 1:
                self._fail_alone(queue, items[0], outcome)
            else:
                self._one_by_one(queue, items, outcome)

    def _one_by_one(self, queue: Queue, items: list[Item], first: Processed | _Killed) -> None:
        if isinstance(first, _Killed):
            self._lost_worker(first)
            self._line.say(
                f"a batch of {len(items)} ended the worker ({first.how}): its items are tried one by one"
            )
        for item in items:
            if item.lost:
                continue  # somebody else has it by now
            self._check_told()
            self._look_after_lease()
            # Held while a GPU is waited for: whoever takes such a batch next would lose a worker to it too.
            self._make_ready(lambda: None)
            outcome = self._run([item])
            if isinstance(outcome, _Taken):
                self._lost_lease(queue, items, outcome)
                return
            if isinstance(outcome, _Killed) or outcome.raised:
                self._fail_alone(queue, item, outcome)
            else:
                self._finish(queue, [item], outcome)

    def _fail_alone(self, queue: Queue, item: Item, outcome: Processed | _Killed) -> None:
        if isinstance(outcome, _Killed):
            self._lost_worker(outcome)
            self._fail(queue, [(item, f"it ended the worker: {outcome.how}")])
        else:
            self._fail(queue, [(item, outcome.raised)])

    def _run(self, items: Sequence[Item]) -> Processed | _Killed | _Taken:
        """In the worker, until it answers, is lost, or has to be ended."""
        begun = self._now()
        bodies = [item.body for item in items]
        lease = self._lease
        self.tally.batches += 1
        try:
            if lease is None:
                return self._here(bodies)
            call = self._called(lambda: lease.run(target.process, bodies))
            while not call.over:
                why = self._must_end(lease, begun, len(items))
                if why:
                    self._check_told()
                    return _Taken(why)
                self._pause(GLANCE_US)
            answer = self._answer(call)
            self._measure(len(items), self._now() - begun)
            return answer
        except WorkerLost as lost:
            return self._judged(lease, lost)
        except LeaseLost as lost:
            return _Taken(lost.message)
        finally:
            took = self._now() - begun
            self.tally.work_us += took
            for item in items:
                item.begun_us = self._now() - took // len(items)  # each had its part of the time

    def _here(self, bodies: list[Any]) -> Processed:
        try:
            return target.process(bodies)
        except KeyboardInterrupt:  # whoever sits here
            raise
        except BaseException as e:
            return Processed([], target.told(e))

    def _answer(self, call: _Call) -> Processed:
        """What the items raised is theirs, also what is no Exception, such as a cancelled coroutine's end, and an answer too large to be sent."""
        try:
            answer: Processed = call.value()
            return answer
        except BaseException as e:
            # What came from there has its traceback as the cause. Without one it is this process that failed, such as at a closed standard output.
            from_there = not isinstance(e, Exception) or e.__cause__ is not None
            if not from_there or (isinstance(e, SubletError) and not isinstance(e, CallFailed)):
                raise
            return Processed([], target.told(e))

    def _called(self, work: Callable[[], Any]) -> _Call:
        self._call = _Call(self._stirred.set, work)
        return self._call

    def _is_calling(self) -> bool:
        return self._call is not None and not self._call.over

    def _measure(self, size: int, took_us: int) -> None:
        """The slower ones are remembered, and forgotten slowly."""
        self._usual_us[size] = max(took_us, self._usual_us.get(size, 0) * 3 // 4)

    def _must_end(self, lease: Lease, begun: int, size: int) -> str:
        """Why the batch that runs must be ended now; '' while it may go on."""
        now = self._now()
        told, own = self._warnings.notice, lease.notice
        notices = [] if told is None else [told]
        if own is not None and own.source == "lease":
            if lease.status == "ended":
                # Its worker ends with it, or ended before it, and then says how in a moment: that is worth waiting for.
                self._plans.setdefault(own, BatchPlan(now + LAST_WORDS_US, ""))
            notices.append(own)
        for notice in notices:
            plan = self._plans.get(notice)
            if plan is None:
                usual = self._usual_us.get(size)
                plan = self._plans[notice] = plan_batch(notice, now, begun_us=begun, usual_us=usual)
                self._doing = f"LEAVING: {notice.reason}" if notice is told else notice.reason
                self._line.say(f"{notice.reason}; {plan.reason}")
            if now >= plan.end_at_us:
                return notice.reason
        return ""

    def _judged(self, lease: Lease | None, lost: WorkerLost) -> _Killed | _Taken:
        """Did the lease end, or did the worker? The ledger knows; while it cannot be asked it is nobody's failure."""
        assert lease is not None
        try:
            seen = self._ledger().look(lease.id)
        except SubletError as e:
            return _Taken(e.message)
        row = seen.lease
        over = row.reason in _TAKEN if row.state is LeaseState.ENDED else row.ends_at <= seen.at
        over = over or row.state is LeaseState.REVOKING
        if over or not lost.begun or lost.with_host:
            return _Taken(lost.message)
        how = lost.message.rpartition("the worker ended: ")[2]
        return _Killed(how.removeprefix("it was killed by ").removeprefix("it "))

    # how items end

    def _finish(self, queue: Queue, items: Sequence[Item], outcome: Processed) -> None:
        pairs = list(zip(items, outcome.results, strict=True))
        self._deliver(queue, [(item, text) for item, (fine, text) in pairs if fine])
        self._fail(queue, [(item, text) for item, (fine, text) in pairs if not fine])

    def _deliver(self, queue: Queue, results: list[tuple[Item, str]]) -> None:
        """Kept and tried again while the sink or the ledger is down: nothing is acknowledged, nothing else is taken."""
        if not results:
            return
        items = [item for item, _ in results]
        lease = self._lease
        busy = lease.working() if lease is not None else contextlib.nullcontext()
        try:
            with busy:
                answers = self._patiently(
                    lambda: queue.complete_written(results), f"queue {queue.name}", lease=lease, keeping=True
                )
        except LeaseLost as lost:
            self._lost_lease(queue, items, _Taken(lost.message))
            return
        except BadInput as refused:  # the sink will never take it
            if len(results) > 1:
                for one in results:
                    self._deliver(queue, [one])
            else:
                self._fail(queue, [(items[0], f"{type(refused).__name__}: {refused.message}")])
            return
        for refusal in answers:
            if refusal is None:
                self.tally.done += 1
            else:
                self.tally.refused += 1

    def _fail(self, queue: Queue, failures: list[tuple[Item, str]]) -> None:
        if not failures:
            return
        nacks = [(item, item.failed(error)) for item, error in failures]
        self._patiently(lambda: queue.give_back(nacks), f"queue {queue.name}", keeping=True)
        for item, error in failures:
            if item.lost:
                self.tally.refused += 1
                continue
            self.tally.failed += 1
            dead = item.failures + 1 >= self._tries[queue.name]
            self.tally.dead += dead
            last = (error.strip().splitlines() or [""])[-1][:200]
            after = "it is dead now, kept with its traceback" if dead else f"failure {item.failures + 1}"
            self._line.say(f"item {item.id} failed: {last} ({after})")

    def _hand_back(self, queue: Queue, items: Iterable[Item]) -> None:
        """Untouched, at once to be had again, at its old place."""
        back = [(item, item.untouched()) for item in items if not item.over]
        for pause_us in (FIRST_PAUSE_US, 5 * FIRST_PAUSE_US, 0):
            try:
                queue.give_back(back)
                self.tally.given_back += len(back)
                return
            except Disconnected:
                time.sleep(pause_us / 1e6)
            except SubletError:
                break
        if back:
            self._left_behind = True  # when their visibility runs out they are handed out again

    # the lease

    def _look_after_lease(self) -> None:
        """One that ended, or is about to, is not begun with again."""
        lease = self._lease
        if lease is None:
            return
        if lease.status == "active":
            return
        why = lease.notice.reason if lease.notice is not None else "it was not renewed in time"
        self.tally.lost_leases += 1
        self._line.say(f"the lease is over: {why}; another is asked for when there is something to do")
        self._give_up_lease(why)

    def _make_ready(self, must_wait: Callable[[], None]) -> None:
        """A GPU, and the target loaded on it. `must_wait` is called when there is none to be had now."""
        while not self._loaded:
            lease = None
            if self._borrow is not None:
                lease = self._borrowed(must_wait)
                self._lease = lease
                self.tally.leases += 1
                self._line.say(
                    f"lease {lease.id} (epoch {lease.epoch}): {format_size(lease.vram_bytes)} on {', '.join(lease.devices)}"
                )
            for queue in self._queues.values():
                queue.lease = lease
            self._loaded = self._load(lease)

    def _borrowed(self, must_wait: Callable[[], None]) -> Lease:
        assert self._borrow is not None
        borrow = self._borrow
        self._wait_until_settled()
        self._doing = "waiting for a GPU"

        def still_wanted() -> None:
            self._check_told()
            must_wait()
            self._show()

        pause_us = FIRST_PAUSE_US
        while True:
            try:
                return self._patiently(lambda: borrow(still_wanted), "the ledger")
            except (
                LeaseLost,
                NotPlaced,
            ) as e:  # granted and taken again; its worker never began; no node answers
                if isinstance(e, NotPlaced) and self.tally.batches == 0:
                    raise  # nothing was ever done: whoever typed the command is told
                must_wait()
                self._line.say(f"{e.message}; asking again")
                self._pause(pause_us)
                pause_us = min(LONGEST_PAUSE_US, 2 * pause_us)
                self._check_told()

    def _load(self, lease: Lease | None) -> bool:
        """False when the lease was lost meanwhile."""
        terms = self._terms
        self._doing = f"loading {terms.target}"
        begun = self._now()
        if lease is None:
            trouble = target.load(terms.target, terms.batch > 0)
        else:
            call = self._called(lambda: lease.run(target.load, terms.target, terms.batch > 0))
            while not call.over:
                self._check_told()
                self._pause(GLANCE_US)
            try:
                trouble = call.value()
            except WorkerLost as lost:
                judged = self._judged(lease, lost)
                if isinstance(judged, _Killed):
                    raise TargetNotReady(
                        f"loading {terms.target} ended the worker: {judged.how}; no item was touched"
                    ) from lost
                self._lost_lease(None, [], judged)
                return False
            except LeaseLost as lost:
                self._lost_lease(None, [], _Taken(lost.message))
                return False
        if trouble is not None:
            trace = f"\n{trouble.trace.rstrip()}" if trouble.trace else ""
            raise TargetNotReady(f"{trouble.sentence}; no item was touched{trace}")
        self._load_us = self._now() - begun
        self._doing = ""
        return True

    def _lost_lease(self, queue: Queue | None, items: Sequence[Item], taken: _Taken) -> None:
        if queue is not None:
            self._hand_back(queue, items)
        self.tally.lost_leases += 1
        self._line.say(f"the lease is over: {taken.why}; another is asked for when there is something to do")
        self._drop_lease()

    def _lost_worker(self, killed: _Killed) -> None:
        self.tally.lost_workers += 1
        self._drop_lease()

    def _give_up_lease(self, why: str) -> None:
        """In order: what was set up is taken down first, if the time is there."""
        lease = self._lease
        if self._loaded and lease is None:
            self._told_of_teardown(target.unload())
        elif self._loaded and lease is not None and lease.status != "ended" and not self._is_calling():
            until = self._now() + TEARDOWN_US
            for notice in (self._warnings.notice, lease.notice):
                if notice is not None:
                    until = min(until, plan_batch(notice, self._now(), begun_us=0, usual_us=None).end_at_us)
            call = self._called(lambda: lease.run(target.unload))
            while not call.over and self._now() < until:
                self._pause(GLANCE_US)
            if call.over:
                with contextlib.suppress(LeaseLost):
                    self._told_of_teardown(call.value())
            else:
                self._line.say("teardown was cut short: the time is over")
        self._drop_lease()

    def _told_of_teardown(self, trace: str) -> None:
        if trace:
            self._line.say(f"teardown failed; every result is stored all the same\n{trace.rstrip()}")

    def _drop_lease(self) -> None:
        """Its worker ends with it."""
        lease, self._lease, self._loaded = self._lease, None, False
        for queue in self._queues.values():
            queue.lease = None
        if lease is not None:
            with contextlib.suppress(SubletError):
                lease.release()
            self._unsettled = lease

    def _wait_until_settled(self) -> None:
        """Who asks again before its old slice is free stands in its own way."""
        lease, self._unsettled = self._unsettled, None
        give_up = self._now() + SETTLE_US
        with contextlib.suppress(SubletError):
            while lease is not None and not self._ledger().look(lease.id).lease.settled_at:
                if self._now() >= give_up or self._warnings.notice is not None:
                    return
                time.sleep(0.005)

    # what is down

    def _patiently(
        self, work: Callable[[], T], what: str, *, lease: Lease | None = None, keeping: bool = False
    ) -> T:
        """Again and again while something it needs is down. `keeping`: there is something in hand that is worth trying until the last moment."""
        while True:
            try:
                value = work()
            except Disconnected as e:
                self._bear(e, what, lease, keeping)
                continue
            if self._outage.what:
                self._line.say(f"{self._outage.what} answers again")
                self._outage, self._doing = _Outage(), ""
            return value

    def _bear(self, down: Disconnected, what: str, lease: Lease | None, keeping: bool) -> None:
        if self.tally.batches == 0 and not keeping:
            raise down  # nothing was ever done: whoever typed the command is told
        if not self._outage.what:
            held = "; the results are kept and nothing else is taken" if keeping else ""
            self._line.say(f"{down.message}{held}; trying again")
            self._outage = _Outage(what=what)
            self._doing = f"{what} does not answer"
        until = self._now() + self._outage.pause_us
        self._outage.pause_us = min(LONGEST_PAUSE_US, self._outage.pause_us * 2)
        while (now := self._now()) < until:
            notice = self._warnings.notice
            if notice is not None:
                if not keeping:
                    raise _Leaving
                plan = self._plans.setdefault(notice, plan_batch(notice, now, begun_us=now, usual_us=None))
                if now >= plan.end_at_us:
                    raise _Leaving
            if lease is not None:
                lease.check()
            self._pause(min(GLANCE_US, until - now))

    # showing

    def _pause(self, most_us: int) -> None:
        """Until something happens, or so long."""
        self._show()
        if self._stirred.wait(most_us / 1e6):
            self._stirred.clear()

    def _show(self) -> None:
        now = self._now()
        if not self._line.due(now):
            return
        next_at, cost, numbers = self._counted
        if now >= next_at and not self._outage.what:
            with contextlib.suppress(SubletError):
                numbers = [queue.stats() for queue in self._queues.values()]
                cost = self._now() - now
            self._counted = (now + max(COUNT_US, 20 * cost), cost, numbers)
        self._line.show(
            now,
            here=self.tally.done,
            done=sum(n.done for n in numbers),
            depth=sum(n.ready + n.delayed + n.leased for n in numbers),
            per_s=sum(n.rate for n in numbers),
            failed=self.tally.failed,
            dead=sum(n.dead for n in numbers),
            refused=self.tally.refused,
            lease_s=self._lease.seconds_left if self._lease is not None else 0.0,
            doing=self._doing,
        )
