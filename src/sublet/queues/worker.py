"""A worker takes items of its queues, has the leased target work on them, and completes them.

Rules of this file:
- An item that was taken is completed, failed with its own traceback, or given back before this process
  leaves. Leaving a batch by whatever exception gives back what is not over.
- A failure is what an item's own processing raised, a result that cannot be stored, or that it ended the
  worker while it was alone there. A lease that was taken, a process told to leave, a ledger, sink or broker
  that is down: these are no item's failure, and the item keeps its place.
- A batch of several that raised, or that ended its worker, is tried again item by item under the same
  delivery, so that only the poisonous one fails.
- The GPU is asked for when there is something to do, and given back after some time without work. A worker
  that must wait for a GPU holds no items meanwhile.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from sublet.core.errors import BadInput, Disconnected, LeaseLost, Refused, SubletError
from sublet.core.queues.items import ItemState, in_turn
from sublet.core.runs.exits import TERMINATED_CODE, Outcome, exit_code
from sublet.core.values import SECOND_US, format_duration
from sublet.leases.progress_line import WorkLine
from sublet.ports.bell import Bell, queue_topic
from sublet.ports.clock import Clock
from sublet.ports.ledger import Ledger
from sublet.processes.worker.target import Processed
from sublet.queues.item import Item
from sublet.queues.leased_target import LeasedTarget, LeaseFactory, LeaseTaken, WorkerKilled
from sublet.queues.patience import FIRST_PAUSE_US, GLANCE_US, Patience, ToldToLeave, WorkerNotices
from sublet.queues.queue import LOOK_US, Queue
from sublet.queues.tally import WorkerExit, WorkPlan, WorkTally

#: The pause between two questions to a broker, which waits a moment itself.
BROKER_PAUSE_US = 10_000
#: A broker that gives nothing for this long counts as empty.
BROKER_QUIET_US = 2 * SECOND_US


class QueueWorker:
    def __init__(
        self,
        queues: Sequence[Queue],
        plan: WorkPlan,
        acquire_lease: LeaseFactory | None,
        ledger: Callable[[], Ledger],
        notices: WorkerNotices,
        clock: Clock,
        line: WorkLine,
    ) -> None:
        """Without `acquire_lease` nothing is leased: the target is called in this process."""
        self.queues = {queue.name: queue for queue in queues}
        self.tally = WorkTally()
        self.bell: Bell | None = None  # opened when there is nothing more to take
        self._brokered = any(queue.waits_at_a_broker for queue in queues)
        self._plan = plan
        self._ledger = ledger
        self._patience = Patience(notices, clock, line, self.tally, queues)
        self.target = LeasedTarget(plan, acquire_lease, ledger, queues, self._patience, self.tally)
        self._tries: dict[str, int] = {}
        self._served = ""
        self._left_behind = False

    # life

    def go(self) -> WorkerExit:
        """Work until there is a reason to leave. A target that cannot be loaded and a queue that does not
        exist raise."""
        self._patience.listen()
        try:
            for name, queue in self.queues.items():
                self._tries[name] = queue.record().terms.tries
            try:
                reason = self._loop()
                self.target.give_up()
                return self._leave(Outcome.DONE, reason)
            except ToldToLeave:
                notice = self._patience.notice
                assert notice is not None
                self.target.give_up()
                outcome = Outcome.STOPPED if self._left_behind else Outcome.PREEMPTED
                return self._leave(outcome, notice.reason)
            except Refused as e:
                return self._leave(Outcome.NO_LEASE, e.message)
        finally:
            self.target.drop()
            for queue in self.queues.values():
                with contextlib.suppress(SubletError):
                    queue.close()
            if self.bell is not None:
                self.bell.close()
            self._patience.close()

    def _leave(self, outcome: Outcome, reason: str) -> WorkerExit:
        code = exit_code(outcome, TERMINATED_CODE, self._plan.profile)
        return WorkerExit(outcome=outcome, exit_code=code, reason=reason, tally=self.tally)

    def _loop(self) -> str:
        plan, patience = self._plan, self._patience
        idle_since = patience.now()
        while True:
            patience.check_told()
            self.target.check_lease()
            if plan.most and self.tally.handled >= plan.most:
                return f"{self.tally.handled} items were worked on"
            taken = self._next_batch()
            if taken is not None:
                patience.doing = ""
                self._work_off(*taken)
                idle_since = patience.now()
                continue
            idle_us = patience.now() - idle_since
            quiet = not self._brokered or idle_us >= BROKER_QUIET_US
            if plan.until_empty and quiet and self._all_empty():
                return "nothing is left"
            if plan.idle_us is not None and idle_us >= plan.idle_us:
                return f"there was nothing to do for {format_duration(idle_us)}"
            if self.target.lease is not None and idle_us >= max(plan.rest_us, self.target.load_us):
                patience.say("there is nothing to do: the GPU is given back until there is")
                self.target.give_up()
            patience.doing = "idle"
            self._wait_for_items(idle_since)

    # taking items

    def _wanted(self) -> int:
        most = self._plan.batch or 1
        return min(most, self._plan.most - self.tally.handled) if self._plan.most else most

    def _next_batch(self) -> tuple[Queue, list[Item]] | None:
        for name in in_turn(list(self.queues), self._served):
            queue = self.queues[name]
            # Without a GPU one item is enough to know that there is work: the rest stays for others until
            # this worker is ready.
            cold = not self.target.loaded
            items = self._take(queue, 1 if cold else self._wanted())
            if not items:
                continue
            self._served = name
            if cold:
                with self._in_hand(queue, items):
                    self.target.make_ready(partial(self._hand_back, queue, items))
                    items = [item for item in items if not item.over]
                    items += self._take(queue, self._wanted() - len(items))
                    if not self.target.loaded:  # lost again while the others were taken
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
            return self._patience.retry(
                lambda: queue.take(most, visibility_us=self._plan.visibility_us), f"queue {queue.name}"
            )
        except LeaseLost as lost:  # while acknowledging results the sink had already
            self.target.lost_lease(lost.message)
            return []

    def _all_empty(self) -> bool:
        """Nothing is available now or later, and other workers have nothing that they might give back."""
        retry = self._patience.retry
        if any(
            retry(partial(queue.peek, 1, state=state), f"queue {queue.name}")
            for queue in self.queues.values()
            for state in (ItemState.READY, ItemState.DELAYED, ItemState.LEASED)
        ):
            return False
        # Between two looks an item may have moved to a state that was checked before, so only one look at all
        # states counts.
        return not any(retry(queue.stats, f"queue {queue.name}").depth for queue in self.queues.values())

    def _wait_for_items(self, idle_since: int) -> None:
        patience = self._patience
        if self._brokered:
            patience.pause(BROKER_PAUSE_US)  # items are waited for there
            return
        if self.bell is None:
            bell = patience.retry(lambda: self._ledger().bell(), "the ledger")
            for queue in self.queues.values():
                bell.listen(queue_topic(queue.record().id))
            self.bell = bell
            return  # something may have come before we listened
        until = patience.now() + LOOK_US
        if self._plan.idle_us is not None:
            until = min(until, idle_since + self._plan.idle_us)
        while patience.now() < until and patience.notice is None:
            patience.show()
            if self.bell.wait(min(GLANCE_US, max(1000, until - patience.now()))):
                return

    # a batch

    @contextlib.contextmanager
    def _in_hand(self, queue: Queue, items: list[Item]) -> Iterator[None]:
        """If this is left by an exception, the items that are not over are available again at once."""
        try:
            yield
        except BaseException:
            self._hand_back(queue, items)
            raise

    def _work_off(self, queue: Queue, items: list[Item]) -> None:
        with self._in_hand(queue, items):
            outcome = self.target.run(items)
            if isinstance(outcome, Processed) and not outcome.raised:
                self._finish(queue, items, outcome)
            elif isinstance(outcome, LeaseTaken):
                self._lost_lease(queue, items, outcome.why)
            elif len(items) == 1:
                self._fail_alone(queue, items[0], outcome)
            else:
                self._one_by_one(queue, items, outcome)

    def _one_by_one(self, queue: Queue, items: list[Item], first: Processed | WorkerKilled) -> None:
        if isinstance(first, WorkerKilled):
            self.target.lost_worker()
            self._patience.say(
                f"a batch of {len(items)} ended the worker ({first.how}): its items are tried one by one"
            )
        for item in items:
            if item.lost:
                continue  # another worker has it by now
            self._patience.check_told()
            self.target.check_lease()
            # Held while a GPU is waited for: another consumer of such a batch would lose its worker too.
            self.target.make_ready(lambda: None)
            outcome = self.target.run([item])
            if isinstance(outcome, LeaseTaken):
                self._lost_lease(queue, items, outcome.why)
                return
            if isinstance(outcome, WorkerKilled) or outcome.raised:
                self._fail_alone(queue, item, outcome)
            else:
                self._finish(queue, [item], outcome)

    def _lost_lease(self, queue: Queue, items: Sequence[Item], why: str) -> None:
        self._hand_back(queue, items)
        self.target.lost_lease(why)

    # how items end

    def _fail_alone(self, queue: Queue, item: Item, outcome: Processed | WorkerKilled) -> None:
        if isinstance(outcome, WorkerKilled):
            self.target.lost_worker()
            self._fail(queue, [(item, f"it ended the worker: {outcome.how}")])
        else:
            self._fail(queue, [(item, outcome.raised)])

    def _finish(self, queue: Queue, items: Sequence[Item], outcome: Processed) -> None:
        pairs = list(zip(items, outcome.results, strict=True))
        self._deliver(queue, [(item, text) for item, (fine, text) in pairs if fine])
        self._fail(queue, [(item, text) for item, (fine, text) in pairs if not fine])

    def _deliver(self, queue: Queue, results: list[tuple[Item, str]]) -> None:
        """Results are kept and tried again while the sink or the ledger is down; nothing else is taken
        meanwhile."""
        if not results:
            return
        items = [item for item, _ in results]
        lease = self.target.lease
        busy = lease.working() if lease is not None else contextlib.nullcontext()
        try:
            with busy:
                answers = self._patience.retry(
                    lambda: queue.complete_written(results), f"queue {queue.name}", lease=lease, keeping=True
                )
        except LeaseLost as lost:
            self._lost_lease(queue, items, lost.message)
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
        self._patience.retry(lambda: queue.give_back(nacks), f"queue {queue.name}", keeping=True)
        for item, error in failures:
            if item.lost:
                self.tally.refused += 1
                continue
            self.tally.failed += 1
            dead = item.failures + 1 >= self._tries[queue.name]
            self.tally.dead += dead
            last = (error.strip().splitlines() or [""])[-1][:200]
            after = "it is dead now, kept with its traceback" if dead else f"failure {item.failures + 1}"
            self._patience.say(f"item {item.id} failed: {last} ({after})")

    def _hand_back(self, queue: Queue, items: Iterable[Item]) -> None:
        """Give items back untouched: they are available again at once, at their old place."""
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
            self._left_behind = True  # they are handed out again when their visibility runs out
