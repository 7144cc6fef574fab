"""A run: one command under a lease, told of every Notice, and started again after every loss it did not
cause.

Rules of this file:
- What happens next is `core.runs.requeue.decide`; this file carries it out, and writes down every step where
  others can read it.
- The notice file is written before the command is signalled: whoever looks when the signal comes finds the
  reason there.
- Whoever asks the run to stop is remembered beside the lease's own warnings: the nearer deadline counts, but
  only one of them ends the run.
- `exit.json` is the last thing a run writes, and it is always written.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from sublet.core.errors import Disconnected, LeaseLost, NeverFits, NotPlaced, Refused, SubletError, WorkerLost
from sublet.core.leasing.lease import TAKEN, LeaseState
from sublet.core.notice import Notice, merge
from sublet.core.runs.exits import INTERRUPTED_CODE, TERMINATED_CODE, Outcome, exit_code
from sublet.core.runs.requeue import Attempt, Cause, Leave, Restart, RestartLimits, RestartTally, decide
from sublet.core.values import SECOND_US, format_duration, format_size
from sublet.leases.lease import Lease
from sublet.machine.run_folder import RunFolder
from sublet.ports.clock import Clock
from sublet.ports.ledger import Ledger
from sublet.ports.worker import Command, CommandExit

#: How often cancellations are looked for even when no pipe wakes us, while the command runs and while it
#: drains.
LOOK_US = SECOND_US
LOOK_DRAINING_US = 100_000
#: Between two questions to a ledger that does not answer, when a lease was lost already.
RETRY_US = SECOND_US
#: How long a pool that once had room for the command may report none before that is believed: a host that was
#: silent gets its devices back within a few beats of its warden.
BACK_WITHIN_US = 60 * SECOND_US
#: For the warden to see that everything is gone. It takes milliseconds, or there is no warden.
SETTLE_US = 3 * SECOND_US


class RunNotices(Protocol):
    """What a run needs of `notice_bus/bus.py`, which carries every warning but the lease's."""

    @property
    def notice(self) -> Notice | None: ...
    def fileno(self) -> int: ...
    def heard(self) -> Notice | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What was asked for."""

    grace_us: int
    time_us: int = 0  # the command's own time, over all restarts; 0: no limit
    wait_us: int | None = None
    limits: RestartLimits = RestartLimits()  # noqa: RUF009  # frozen
    profile: str = "default"
    environment: Mapping[str, str]  # without what a lease adds


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """What `exit.json` says."""

    outcome: Outcome
    exit_code: int
    reason: str
    own_code: int | None  # the command's
    committed_step: int
    step: int
    restarts: int
    preemptions: int
    lease: str
    epoch: int
    wasted_steps: int
    started_at: float
    ended_at: float

    def to_json(self) -> dict[str, Any]:
        facts = {name: getattr(self, name) for name in self.__slots__}
        return facts | {"outcome": self.outcome.value}


class RunStopped(Exception):
    """The run is to end, and there is no command to tell."""


#: Asks for a lease whose holder is a new command, ready to begin. The first argument is called now and then
#: while it waits, and may raise; the second says what the command will see, when the lease is there.
Borrow = Callable[[Callable[[], None], Callable[[Lease, Command], Mapping[str, str]]], tuple[Lease, Command]]


class CommandRun:
    def __init__(
        self,
        folder: RunFolder,
        terms: RunPlan,
        borrow: Borrow,
        ledger: Callable[[], Ledger],
        warnings: RunNotices,
        clock: Clock,
        say: Callable[[str], None],
    ) -> None:
        self._folder = folder
        self._terms = terms
        self._borrow = borrow
        self._ledger = ledger
        self._warnings = warnings
        self._clock = clock
        self._say = say
        self._seed = int.from_bytes(folder.id.encode()[-8:], "big")
        self._tally = RestartTally()
        self._stop: tuple[Cause, Notice] | None = None  # who ends the run
        self._kill_now = False
        self._ran_us = 0
        self._started_at = time.time()
        self._lease: Lease | None = None
        self._step = self._committed = self._wasted = 0

    # life

    def go(self) -> Exit:
        """Run the command until the run is over."""
        self._folder.record(state="waiting", started_at=self._started_at, restarts=0, preemptions=0)
        own: int | None = None
        try:
            while True:
                ended = self._attempt()
                own = ended.code
                decision = decide(ended, self._tally, self._terms.limits, self._seed)
                self._tally = decision.tally
                if isinstance(decision, Leave):
                    return self._leave(decision.outcome, decision.reason, own)
                self._pause(decision)
        except RunStopped:
            assert self._stop is not None
            notice = self._stop[1]
            # What was drained before this wait is committed all the same.
            outcome = Outcome.PREEMPTED if own in self._terms.limits.drained_codes else Outcome.STOPPED
            if self._stop[0] is Cause.TIME:
                outcome = Outcome.TIME_LIMIT
            asked = INTERRUPTED_CODE if "SIGINT" in notice.reason else TERMINATED_CODE
            return self._leave(outcome, f"{notice.reason}; nothing was running", asked)
        except Refused as e:
            self._say(e.message)
            return self._leave(Outcome.NO_LEASE, e.message, own)
        except SubletError as e:
            self._leave(Outcome.NO_LEASE if self._lease is None else Outcome.FAILED, e.message, own)
            raise
        except KeyboardInterrupt:
            return self._leave(Outcome.STOPPED, "interrupted twice: it was killed", INTERRUPTED_CODE)
        except BaseException as e:
            self._leave(Outcome.FAILED, f"{type(e).__name__}: {e}", own)
            raise

    def _leave(self, outcome: Outcome, reason: str, own: int | None) -> Exit:
        left = Exit(
            outcome=outcome,
            exit_code=exit_code(outcome, own, self._terms.profile),
            reason=reason,
            own_code=own,
            committed_step=self._committed,
            step=self._step,
            restarts=self._tally.restarts,
            preemptions=self._tally.preemptions,
            lease=self._lease.id if self._lease else "",
            epoch=self._lease.epoch if self._lease else 0,
            wasted_steps=self._wasted,
            started_at=self._started_at,
            ended_at=time.time(),
        )
        with contextlib.suppress(OSError):
            self._folder.withdraw_key()
            self._folder.leave(run=self._folder.id, **left.to_json())
        self._note(state="ended", reason=reason)
        return left

    def _note(self, **facts: Any) -> None:
        """Write the state for `sublet ps --runs`. A failure to write it must not end the command."""
        with contextlib.suppress(OSError):
            self._folder.record(**facts)

    def _pause(self, restart: Restart) -> None:
        self._say(restart.reason)
        self._note(
            state="waiting",
            reason=restart.reason,
            restarts=self._tally.restarts,
            preemptions=self._tally.preemptions,
            committed_step=self._committed,
            step=self._step,
            wasted_steps=self._wasted,
        )
        self._sleep(restart.pause_us)

    def _sleep(self, pause_us: int) -> None:
        until = self._clock.monotonic_us() + pause_us
        poller = select.poll()
        poller.register(self._warnings.fileno(), select.POLLIN)
        while True:
            self._check()
            left = until - self._clock.monotonic_us()
            if left <= 0:
                return
            poller.poll(min(left, LOOK_US) // 1000 + 1)

    # a lease

    def _check(self) -> None:
        """Called where there is no command to tell."""
        left = self._time_left_us()
        self._look_for_stop(None if left is None or left > 0 else 0)
        if self._stop is not None:
            raise RunStopped

    def _granted(self) -> tuple[Lease, Command]:
        first_asked = self._clock.monotonic_us()
        again = self._tally.restarts > 0

        def still_wanted() -> None:
            nonlocal again
            again = True  # the ledger has us on its list: the request can be served
            self._check()

        while True:
            self._check()
            try:
                return self._borrow(still_wanted, self._set_up_environment)
            except (Disconnected, NotPlaced, LeaseLost, NeverFits) as e:
                # The first time whoever typed the command is told. Later a job is at stake: ledgers, nodes
                # and devices come back, and a place on the list, or a grant that was not taken up, is only
                # lost because nobody could be heard.
                waited = self._clock.monotonic_us() - first_asked
                gone = isinstance(e, NeverFits) and (self._lease is None or waited >= BACK_WITHIN_US)
                if not again or gone or isinstance(e, WorkerLost):
                    raise
                if self._terms.wait_us is not None and waited >= self._terms.wait_us:
                    raise Refused(f"there was no answer within --wait: {e.message}") from e
                self._say(f"{e.message}; asking again")
                self._sleep(RETRY_US)

    def _set_up_environment(self, lease: Lease, command: Command) -> Mapping[str, str]:
        """Write the files of this lease; return the environment of its command, which does not run yet."""
        self._folder.withdraw_notice()
        command.entrust(lease.key)
        holder = [command.holder.pid, command.holder.started]
        # A pid of another machine means nothing here, and nobody may take it for one of this.
        where = {"supervisor": holder} if command.here else {"placed": [command.holder.host, *holder]}
        self._folder.record(
            state="running",
            reason="",
            lease=lease.id,
            epoch=lease.epoch,
            devices=list(lease.devices),
            containment=command.containment,
            **where,
        )
        return dict(self._terms.environment) | {
            "SUBLET_RESTART_COUNT": str(self._tally.restarts),
            "SUBLET_NOTICE_FILE": str(self._folder.notice_file),
        }

    # one start of the command

    def _attempt(self) -> Attempt:
        try:
            lease, command = self._granted()
        except WorkerLost as e:
            if self._lease is None and self._tally.restarts == 0:
                raise
            return Attempt(code=None, cause=Cause.LEASE, why=e.message)
        self._lease = lease
        self._say(
            f"lease {lease.id} (epoch {lease.epoch}): {format_size(lease.vram_bytes)} on "
            f"{', '.join(lease.devices)}; "
            f"grace {format_duration(self._terms.grace_us)}"
        )
        begun_us = self._clock.monotonic_us()
        with lease:  # given back, and the command ended, however this is left
            left, told = self._watch(lease, command, begun_us)
            over = self._lease_over(lease, left)
        self._ran_us += self._clock.monotonic_us() - begun_us
        self._wait_until_settled(lease)
        return self._judge(command, left, told, over)

    def _wait_until_settled(self, lease: Lease) -> None:
        """Wait until the warden has seen everything gone and freed the slices: asking earlier would wait
        behind them."""
        give_up = self._clock.monotonic_us() + SETTLE_US
        with contextlib.suppress(SubletError):
            while not self._ledger().look(lease.id).lease.settled_at and self._clock.monotonic_us() < give_up:
                time.sleep(0.005)

    def _judge(self, command: Command, left: CommandExit, told: Notice | None, over: str) -> Attempt:
        working_on, committed = command.steps()
        progressed = committed > self._committed
        self._step, self._committed = max(self._step, working_on), max(self._committed, committed)
        if left.code != 0:
            self._wasted += max(0, working_on - committed)
        cause, why = Cause.NOBODY, left.why
        self._look_for_stop()  # `cancel --now` goes past us
        if self._stop is not None and (told is not None or left.why):
            cause, why = self._stop[0], self._stop[1].reason
        elif told is not None:
            cause, why = Cause.LEASE, told.reason
        elif over:
            cause, why = Cause.LEASE, over
        return Attempt(
            code=left.code,
            cause=cause,
            why=why,
            killed=left.killed,
            progressed=progressed,
            unfinished=command.unfinished(),
        )

    def _lease_over(self, lease: Lease, left: CommandExit) -> str:
        """Why the lease ended under the command, if it did, because perhaps nobody reported it."""
        if left.lease_over:
            return left.why or "its lease ran out"
        if left.code is None:
            # One that ended because its supervisor died was not taken from it.
            with contextlib.suppress(SubletError):
                row = self._ledger().look(lease.id).lease
                if row.state is LeaseState.ENDED:
                    return f"{row.reason.value}: {row.detail}" if row.reason in TAKEN else ""
        return (left.why or "its lease ran out") if lease.seconds_left <= 0 else ""

    def _watch(self, lease: Lease, command: Command, begun_us: int) -> tuple[CommandExit, Notice | None]:
        """Wait until the command has left; return its exit and the notice it was given, if any."""
        rung, ring = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        from_lease: deque[Notice] = deque()

        closing, closed = threading.Lock(), False

        def on_notice(notice: Notice) -> None:
            from_lease.append(notice)
            with closing:
                if not closed:
                    os.write(ring, b"!")

        time_up_us = None if self._time_left_us() is None else begun_us + (self._time_left_us() or 0)
        told: Notice | None = None
        poller = select.poll()
        for fd in (command.fileno(), self._warnings.fileno(), rung):
            poller.register(fd, select.POLLIN)
        lease.on_notice(on_notice)
        try:
            while True:
                # Before the look: a lease that ended because its supervisor died was not taken from it.
                heard = [from_lease.popleft() for _ in range(len(from_lease))]
                left = command.left()
                if left is not None:
                    return left, told
                self._look_for_stop(time_up_us)
                told = self._tell(command, told, heard)
                now = self._clock.monotonic_us()
                pause = LOOK_US if told is None else LOOK_DRAINING_US
                if time_up_us is not None and time_up_us > now:
                    pause = min(pause, time_up_us - now)
                try:
                    ready = poller.poll(pause // 1000 + 1)
                except KeyboardInterrupt:  # the second Ctrl-C: the first was a Notice
                    self._kill_now = True
                    continue
                for fd, _ in ready:
                    if fd == rung:
                        with contextlib.suppress(BlockingIOError):
                            os.read(rung, 4096)
                    elif fd == self._warnings.fileno():
                        self._warnings.heard()
        finally:
            with closing:
                closed = True
            os.close(rung)
            os.close(ring)

    def _tell(self, command: Command, told: Notice | None, heard: list[Notice]) -> Notice | None:
        """Write the nearest notice, then warn the command; return what it has been told by now."""
        nearest = told
        now = self._clock.monotonic_us()
        for notice in [*heard, *([self._stop[1]] if self._stop else [])]:
            # The grace counts from when we heard of it, however far away the deadline is.
            bounded = Notice(
                source=notice.source,
                reason=notice.reason,
                deadline_us=min(notice.deadline_us, now + self._grace_us()),
            )
            if nearest is None or notice.deadline_us < nearest.deadline_us:
                nearest = merge(nearest, bounded)
        if self._kill_now and nearest is not None:
            nearest = merge(nearest, Notice(source=nearest.source, reason=nearest.reason, deadline_us=now))
        if nearest is None or nearest is told:
            return told
        with contextlib.suppress(OSError):  # a full disk must not keep it from being told
            self._folder.write_notice(nearest, now, self._clock.wall_us())
        command.drain(nearest)
        if told is None:
            self._say(
                f"{nearest.reason}; the command has {format_duration(max(0, nearest.deadline_us - now))} to "
                "leave"
            )
            self._note(state="draining", reason=nearest.reason)
        return nearest

    # who ends the run

    def _grace_us(self) -> int:
        asked = self._folder.cancelled().get("grace_us") if self._stop else None
        return self._terms.grace_us if asked is None else int(asked)

    def _look_for_stop(self, time_up_us: int | None = None) -> None:
        cancel = self._folder.cancelled()
        now = self._clock.monotonic_us()
        if cancel.get("now"):
            self._kill_now = True
        if self._stop is not None:
            return
        warning = self._warnings.notice
        if cancel:
            grace = self._terms.grace_us if cancel.get("grace_us") is None else int(cancel["grace_us"])
            self._stop = Cause.STOP, Notice(source="cancel", reason="cancelled", deadline_us=now + grace)
        elif warning is not None:
            self._stop = _cause_of(warning), warning
        elif time_up_us is not None and now >= time_up_us:
            reason = f"the time limit of {format_duration(self._terms.time_us)} is reached"
            ends = time_up_us + self._last_words_us()
            self._stop = Cause.TIME, Notice(source="wall_time", reason=reason, deadline_us=ends)

    def _last_words_us(self) -> int:
        """How long before the time limit to announce it: one grace, but at most half of a short limit."""
        return min(self._terms.grace_us, self._terms.time_us // 2)

    def _time_left_us(self) -> int | None:
        """Time until the command must be told."""
        if not self._terms.time_us:
            return None
        return max(0, self._terms.time_us - self._last_words_us() - self._ran_us)


def _cause_of(warning: Notice) -> Cause:
    if warning.source == "signal":
        return Cause.STOP
    return Cause.TIME if warning.source == "wall_time" else Cause.MACHINE
