"""A training run: steps that count once, saves behind them, and a drain when the GPU goes.

Rules of this file:
- A step is counted when its body has come to its end. Whatever leaves the body in another way leaves the step uncounted, and nothing
  of the state it half changed is saved.
- Steps are committed in spans, each with the state after it, the effects in it and the place in the data, in one transaction (S1, S3).
- One runner: the job is reserved under the lease before anything is restored. Whoever loses the lease can commit nothing more (S2).
- A save that fails leaves the head where it was, and training goes on: the next save holds the same steps. It goes on for a bounded
  time only: progress nobody can save is not progress.
- A store that is away is said once, and once that it is back. Nobody waits for it between steps, and a drain waits no longer than its deadline.
- What to save before a deadline is `core.drain`'s decision, how often is `core.cadence`'s.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import itertools
import json
import math
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, Protocol

from sublet.core.cadence import Cadence, Cost, Losses, best_interval
from sublet.core.checkpoint import Away
from sublet.core.drain import MARGIN_US, Behind, DrainPlan, Save, Speed, plan_drain
from sublet.core.effect import MOST_EFFECTS, MOST_TEXT, Done, Duplicate, Steps
from sublet.core.errors import (
    BadInput,
    Disconnected,
    EffectBusy,
    Fenced,
    FingerprintMismatch,
    HeadMoved,
    LeaseLost,
    NotDurable,
    NotFound,
    SubletError,
    Unsavable,
)
from sublet.core.exits import DRAINED_CODE
from sublet.core.lease import fence
from sublet.core.notice import Notice
from sublet.core.values import SECOND_US, format_duration, parse_duration
from sublet.ports.checkpoints import Checkpoints, SavedState, SaveUnderWay
from sublet.ports.clock import Clock
from sublet.ports.ledger import LeaseKey, Ledger
from sublet.ports.ranks import Ranks
from sublet.runtime.alarms import Alarms
from sublet.runtime.capture import Captured, put_random
from sublet.runtime.progress_line import ProgressLine

#: How long a run goes on while nothing can be saved.
SAVE_PATIENCE_US = 600 * SECOND_US
#: A save that failed is tried again after this, and twice as long each time, up to a minute.
RETRY_US = SECOND_US
LONGEST_RETRY_US = 60 * SECOND_US
#: Saves of fewer bytes say how long a save takes, not how fast the store is.
_ENOUGH_TO_MEASURE = 1 << 20
#: How long the end of a predecessor on this host is waited for. A warden sees the death of a process in milliseconds.
PREDECESSOR_US = 5 * SECOND_US
_RUNNER = "one runner at a time"
#: How soon a warning is heard while a save is waited for.
_LISTEN_SECONDS = 0.05
#: With so many effects in it a span is saved, whatever the cadence: a commit has room for twice as many.
_MANY_EFFECTS = MOST_EFFECTS // 2
#: After these the head is where it was, or it is written down that it moved.
_NOT_SAVED = (NotDurable, Disconnected, OSError)
#: Somebody made this step true before: a save this run gave up, or another holder.
_MOVED = (HeadMoved, FingerprintMismatch)
_NOT_WARNED = -(1 << 62)


class Preempted(SystemExit):
    """The run was told to leave, saved what it could and gave its lease back. The next start continues.

    It ends the program with exit code 85, and no `except Exception` on the way mistakes it for a failure.
    """

    def __init__(self, notice: Notice, *, step: int, committed: int, plan: str) -> None:
        super().__init__(DRAINED_CODE)
        self.notice = notice
        self.step = step
        self.committed = committed
        self.plan = plan

    def __str__(self) -> str:
        return f"{self.notice.reason}; committed up to step {self.committed}"


class Held(Protocol):
    """What a run needs of a lease, its own or the one it was started under."""

    @property
    def id(self) -> str: ...
    @property
    def epoch(self) -> int: ...
    @property
    def key(self) -> LeaseKey: ...
    @property
    def seconds_left(self) -> float: ...
    def check(self) -> None: ...
    def working(self) -> contextlib.AbstractContextManager[None]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a run is put together from. On ranks other than 0 there is no lease: rank 0 commits for all."""

    ledger: Ledger
    store: Checkpoints
    clock: Clock
    alarms: Alarms
    ranks: Ranks
    line: ProgressLine
    lease: Held | None
    losses: Losses = field(default_factory=Losses)
    report: Callable[[int, int], None] = lambda working_on, committed: None
    report_away: Callable[[str], None] = lambda reason: None  # why saves wait, or '' again
    release: Callable[[], None] = lambda: None  # the store and the lease, where they are the run's own


class Step:
    """One numbered unit of progress, while its body runs."""

    def __init__(self, run: Run, number: int) -> None:
        self._run = run
        self.number = number

    def log(self, **values: Any) -> None:
        """Numbers worth seeing: shown in the progress line, committed with the step."""
        for name, value in values.items():
            # A tensor is read when somebody looks, so that logging does not wait for the device; what it was computed from is let go.
            self._run._log[name] = value.detach() if getattr(value, "requires_grad", False) else value

    def effect(self, key: str, function: Callable[..., Any]) -> Any:
        """Do something outside the model once for this job: `step.effect("mail-epoch-1", send)`.

        It becomes true with the commit that makes this step true; asked again after that, its stored result is returned and the function
        is not called. If the process dies between the call and that commit, the function is called again by whoever repeats the step:
        give it a parameter without a default and it receives the key, so that whatever it talks to can tell a repeat.
        """
        return self._run._effect(self.number, key, function)

    def record(self, key: str, value: Any) -> Any:
        """A row of your own, committed with this step and readable afterwards: `sublet audit JOB --effects`."""
        return self._run._effect(self.number, key, lambda: value)

    def __repr__(self) -> str:
        return f"<Step {self.number} of {self._run.name}>"


@dataclass(slots=True)
class _Span:
    """Steps that are done and not yet in a save."""

    first: int
    compute_us: int = 0
    effects: list[Done] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _UnderWay:
    saving: SaveUnderWay
    step: int
    span: _Span
    stall_us: int


class Run:
    """What `sublet.train(...)` gives."""

    def __init__(
        self,
        name: str,
        captured: Captured,
        parts: Parts,
        *,
        cadence: Cadence,
        overlap: Any = None,
        save_patience_us: int = SAVE_PATIENCE_US,
    ) -> None:
        self.name = name
        self.step = 0  # the last one whose body came to its end
        self.committed = 0  # the last one that is safe
        self.version = 0
        self.resumed_at = 0
        self.preempted = False
        # How often it saves, and why, when that is the run's to decide.
        self.interval = best_interval(None, parts.losses) if cadence.auto else None
        self._captured = captured
        self._parts = parts
        self._cadence = cadence
        self._overlap = overlap
        self._patience_us = save_patience_us
        self._log: dict[str, Any] = {}
        self._done_effects: set[str] = set()  # and not committed yet
        self._random: Any = None
        self._span = _Span(1)
        self._behind: _UnderWay | None = None
        # Saves given up since the last commit, by their last step: how many of the span's effects were in it, and its compute time.
        self._given_up: dict[int, tuple[int, int]] = {}
        self._mark = f"run {secrets.token_hex(8)} save "  # in the ledger, of what this run committed
        self._tries = itertools.count(1)
        self._cost: Cost | None = None
        self._speed = Speed()
        self._last_bytes: int | None = None
        self._full_bytes = 0
        self._failed_since = 0
        self._failures = 0
        self._retry_at = 0
        self._told_every: dict[int, int] = {}
        # What was told of the store, since when, and the version then.
        self._away: tuple[Away, int, int] | None = None
        self._save_missed = False  # one was due while the store was away
        self._stopping = ""
        self._leaving_for: Notice | None = None
        self._iterating = False
        self._closed = False
        self._pid = os.getpid()
        now = parts.clock.monotonic_us()
        self._began_at = self._saved_at = now
        self._committed_at: int | None = None
        self._step_us: int | None = None
        self._useful_us = 0
        self._step_began = now
        self._working = contextlib.ExitStack()  # of steps begun by hand
        self._warned, self._left = threading.Event(), threading.Event()  # left: nothing is saved any more
        parts.alarms.on_notice(lambda _: self._warned.set())
        threading.Thread(target=self._end_saves_in_time, name="sublet-gives-up", daemon=True).start()

    # what the caller sees

    @property
    def notice(self) -> Notice | None:
        """The nearest warning that the GPU will go, or None."""
        return self._parts.alarms.notice

    @property
    def should_stop(self) -> bool:
        """Whether the loop will end before its next step."""
        return bool(self._stopping) or self.notice is not None

    @property
    def goodput(self) -> float:
        """Time in steps that are committed, of all the time since the run began."""
        elapsed = self._parts.clock.monotonic_us() - self._began_at
        return min(1.0, self._useful_us / elapsed) if elapsed else 0.0

    def every(self, what: int | str) -> bool:
        """True once every so many steps (`run.every(100)`) or every so often (`run.every("10m")`): `if run.every(100): evaluate()`."""
        number = self.step + 1 if self._iterating else self.step
        if isinstance(what, int):
            if what < 1:
                raise BadInput(f"every {what} steps is never: write 1 or more")
            return number % what == 0
        us = parse_duration(what, what="every")
        now = self._parts.clock.monotonic_us()
        if now - self._told_every.setdefault(us, self._began_at) < us:
            return False
        self._told_every[us] = now
        return True

    def stop(self, why: str = "the program said so") -> None:
        """End the loop after this step and commit it. `break` would leave the step uncounted."""
        self._stopping = why

    # beginning

    def resume(self) -> None:
        """Own the job, then put the committed state back. Called once, before anything else."""
        parts = self._parts
        if parts.lease is not None:
            self._own(parts.lease)
        head = parts.ledger.head(self.name) if parts.ranks.rank == 0 else None
        found = (head.version, head.step) if head is not None else (0, 0)
        at: tuple[int, int] = parts.ranks.share(found, patient=True)
        self.version, self.committed = at
        self.step = self.resumed_at = self.committed
        self._span = _Span(self.step + 1)
        if self.version:
            tree = parts.store.load(self.name, version=self.version if parts.ranks.rank else None)
            self._captured.put(tree, parts.ranks.rank, parts.ranks.world)
            self._random = self._captured.random_of(tree, parts.ranks.rank, parts.ranks.world)
            self._committed_at = parts.clock.monotonic_us()
            parts.line.say(f"resumes after step {self.step:,}, as committed at version {self.version}")
        parts.report(self.step, self.committed)

    def _own(self, lease: Held) -> None:
        effect = f"train {self.name}"  # no job's name has a space in it, and so no step's key or effect's
        self._see_it_free(effect, lease)
        try:
            self._parts.ledger.reserve(lease.key, effect=effect, job=self.name, fingerprint=_RUNNER)
        except EffectBusy as busy:
            raise EffectBusy(
                f"job {self.name} is being trained by another process ({busy.message}); nothing was started here",
                remedy="wait for it, end it with 'sublet revoke', or train under another name",
            ) from busy

    def _see_it_free(self, effect: str, lease: Held) -> None:
        """A predecessor that was just killed is believed alive until somebody has seen its end: its host's warden in a moment, or the
        end of its ttl when that host is gone too. Wait for it. One that renews meanwhile is alive."""
        ledger, clock = self._parts.ledger, self._parts.clock
        until, first = clock.monotonic_us() + PREDECESSOR_US, None
        while True:
            found = ledger.effect(effect)
            if found is None or found.owner == lease.id:
                return
            try:
                owner = ledger.look(found.owner)
            except NotFound:
                return
            if fence(owner.lease, found.epoch, owner.at):
                return
            if first is None:
                first = owner.lease
                if first.holder.host != ledger.look(lease.id).lease.holder.host:
                    left = first.ends_at - owner.at
                    until = clock.monotonic_us() + left + SECOND_US
                    self._parts.line.say(
                        f"waits for lease {first.id} of its predecessor on {first.holder.host} to end, within {format_duration(left)}"
                    )
            if owner.lease.expires_at > first.expires_at or clock.monotonic_us() >= until:
                return
            notice = self._parts.alarms.wait(0.02)
            if notice is not None:
                raise Preempted(notice, step=0, committed=0, plan="nothing was begun")

    # the loop

    def steps(self, total: int, *, on_notice: str = "exit") -> Iterator[Step]:
        """Steps `committed + 1` to `total`, each counted when its body ends; all of them committed when the loop ends.

        On any warning that the GPU will go the loop ends before its next step: what is done is saved if there is time, the lease is
        given back, and `Preempted` ends the program with exit code 85 (`on_notice="stop"`: the loop just ends, and `run.preempted` is
        True).
        """
        if on_notice not in ("exit", "stop"):
            raise BadInput(f"on_notice={on_notice!r} is unknown: use 'exit' or 'stop'")
        if isinstance(total, bool) or not isinstance(total, int) or total < 0:
            raise BadInput(f"steps({total!r}) is not a number of steps")
        self._may_begin()
        return self._steps(total, on_notice)

    def _may_begin(self) -> None:
        if self._closed:
            raise BadInput("this run is over; call sublet.train again", remedy="call sublet.train again")
        if self._iterating:
            raise BadInput("this run is being iterated already: one loop at a time")

    def _steps(self, total: int, on_notice: str) -> Iterator[Step]:
        self._may_begin()  # asked again: much may have happened between the call and the first step
        clock = self._parts.clock
        self._iterating = True
        if self._random is not None:
            put_random(self._random)  # whatever was drawn between the resume and here is not part of the run
            self._random = None
        working = self._parts.lease.working() if self._parts.lease is not None else contextlib.nullcontext()
        finished = False
        try:
            with working:
                leaving = self._boundary(total)
                while not leaving:
                    self._parts.report(self.step + 1, self.committed)
                    self._check()
                    self._step_began = clock.monotonic_us()
                    yield Step(self, self.step + 1)
                    if self._closed:  # in the body: everything was given back
                        return
                    self._be_the_runner()
                    self._count(clock.monotonic_us())
                    leaving = self._boundary(total)
                plan = self._leave(total, self._leaving_for)
            notice = self._leaving_for
            finished = True
            self.preempted = notice is not None
        finally:
            self._iterating = False
            # Who ends the program after a warning is deaf to further ones: a second signal must not change how it ends.
            self.close(finished=finished, listening=self.preempted and on_notice == "exit")
        if notice is not None and plan is not None and on_notice == "exit":
            raise Preempted(notice, step=self.step, committed=self.committed, plan=plan.reason)

    def _be_the_runner(self) -> None:
        if self._pid != os.getpid():
            raise LeaseLost(
                f"this is a forked child: job {self.name} goes on in process {self._pid}",
                remedy="end a forked child with os._exit, or use multiprocessing",
            )

    # steps by hand, for a loop that is somebody else's and whose end is not known

    def begin(self) -> None:
        """Everything but the random states is put back: these follow, and steps may begin. Again is harmless."""
        if self._iterating:
            return
        self._iterating = True
        if self._random is not None:
            put_random(self._random)
            self._random = None
        if self._parts.lease is not None:
            self._working.enter_context(self._parts.lease.working())
        self._leave_if_told()

    def begin_step(self) -> None:
        """What is begun and never ended is not counted."""
        self._parts.report(self.step + 1, self.committed)
        self._check()
        self._step_began = self._parts.clock.monotonic_us()

    def end_step(self) -> None:
        """Its body has come to its end. Saves when that is due; leaves with `Preempted` on a warning."""
        self._be_the_runner()
        self._count(self._parts.clock.monotonic_us())
        self._leave_if_told()

    def finish(self) -> None:
        """No step will follow: commit them all. The lease is held until `close`."""
        if self._closed:
            return
        self._leave_if_told()
        plan = self._leave(None, None)
        if self._leaving_for is not None:
            self._leave_told(self._leaving_for, plan)
        self._iterating = False

    def on_notice(self, callback: Callable[[Notice], None]) -> None:
        self._parts.alarms.on_notice(callback)

    def _leave_if_told(self) -> None:
        if self._boundary(None) != "notice":
            return
        notice = self._leaving_for
        assert notice is not None
        self._leave_told(notice, self._leave(None, notice))

    def _leave_told(self, notice: Notice, plan: DrainPlan | None) -> NoReturn:
        self._iterating, self.preempted = False, True
        self.close(listening=True)
        raise Preempted(notice, step=self.step, committed=self.committed, plan=plan.reason if plan else "")

    def _check(self) -> None:
        """No new work without a lease."""
        if self._parts.lease is not None:
            self._parts.lease.check()

    def _count(self, now: int) -> None:
        took = now - self._step_began
        self.step += 1
        self._span.compute_us += took
        self._step_us = took if self._step_us is None else (self._step_us * 7 + took) // 8

    def _boundary(self, total: int | None) -> str:
        """Between two steps: what came of the save behind, whether another is due, whether to leave. '' to go on."""
        now = self._parts.clock.monotonic_us()
        if self._behind is not None and self._behind.saving.done:
            self._collect()
        self._tell_of_the_store()
        if self._parts.line.due(now):
            self._show(now, total)
        over = (total is not None and self.step >= total) or bool(self._stopping)
        decides = self._parts.ranks.rank == 0  # which saves, and so knows when the next one is due
        due = decides and not over and self._due(now)
        notice = self.notice
        # The largest of each: so the time that is left is the least, of whoever was warned.
        left = _NOT_WARNED if notice is None else now - notice.deadline_us
        left_any, due_any, over_any, committed = self._parts.ranks.agree(
            (left, due, over, self.committed if decides else 0)
        )
        if not decides:
            self.committed = committed
        if left_any > _NOT_WARNED:
            if notice is None or left_any > left:
                # Another rank heard it, or has less time; this one leaves on the same step.
                why = "another rank was told to leave"
                notice = Notice(source="rank", reason=why, deadline_us=now - left_any)
                self._parts.alarms.raise_notice(notice)
            self._leaving_for = notice  # a lease may take its warning back; the ranks have agreed
            return "notice"
        if over_any:
            return "over"
        if due_any:
            self._leaving_for = self._warned_before_the_last_is_over()
            if self._leaving_for is not None:
                return "notice"
            if self._behind is None or self._behind.saving.done or self._parts.ranks.world > 1:
                self._save_behind()
        return ""

    # saving

    def _warned_before_the_last_is_over(self) -> Notice | None:
        """Saves do not overlap, and the one under way may take longer than a warning leaves time. Several ranks hear one at a boundary only."""
        behind, notice = self._behind, None
        if behind is not None and self._parts.ranks.world == 1:
            while notice is None and not behind.saving.wait(_LISTEN_SECONDS):
                notice = self.notice
                self._tell_of_the_store()
                away = self._parts.store.away
                if away is not None and away.saves_wait:
                    break  # nobody knows for how long: this save is made later, with more steps in it
        return notice

    def _due(self, now: int) -> bool:
        if self.step < self._span.first or now < self._retry_at:
            return False
        if self._failures or len(self._span.effects) >= _MANY_EFFECTS:
            return True
        if self._cadence.steps:
            if self.step % self._cadence.steps == 0:
                self._save_missed = True
            if self._save_missed and self._behind is not None and not self._behind.saving.done:
                # Saves do not overlap. A slow one is waited for; one that waits for a store that is away is not, and holds up nobody.
                return self._parts.store.away is None
            return self._save_missed
        if self._behind is not None:
            return False
        if self._cadence.us:
            return now - self._saved_at >= self._cadence.us
        assert self.interval is not None
        return now - self._saved_at >= self.interval.us

    def save(self) -> None:
        """Commit what is done so far, now. Between two steps only: inside a body the state is half changed."""
        if self._iterating:
            raise BadInput(
                "inside the loop the step is not finished: its state must not be saved",
                remedy="lower every= to save more often",
            )
        if self._closed and self.step >= self._span.first:
            raise BadInput(
                f"this run is over, and a step may have been left in the middle: step {self.committed} is committed",
                remedy="end a loop with run.stop() instead of break; what is done is then committed",
            )
        self._commit_now()

    def _said(self, span: _Span, step: int) -> Steps:
        outcome = {"compute_us": span.compute_us, "log": _stored(self._numbers())}
        return Steps(
            step=step,
            first=span.first,
            key=f"{self.name}:{step}",
            fingerprint=f"{self._mark}{next(self._tries)}",
            cursor=self._cursor(),
            outcome=json.dumps(outcome),
            effects=tuple(span.effects),
        )

    def _cursor(self) -> str:
        """Where each part that reads data stands, for whoever reads the ledger; the state itself has it too."""
        found = {}
        for name, part in self._captured.parts.items():
            cursor = getattr(part, "cursor", None)
            with contextlib.suppress(TypeError, ValueError):  # somebody's own, and not for us
                if isinstance(cursor, dict) and json.dumps(cursor):
                    found[name] = cursor
        text = json.dumps(found) if found else ""
        return text if len(text) <= MOST_TEXT else ""

    def _save_behind(self) -> None:
        began = self._parts.clock.monotonic_us()
        failures = self._failures
        self._collect()
        known = self._found_out() and self._failures == failures
        own = self._parts.ranks.gather(self._captured.take_own())
        lease = self._parts.lease
        if lease is None:
            self._span = _Span(self.step + 1)
            return
        if not known or self.step < self._span.first:
            return  # after a failure there is a pause; and what was committed after all needs no save
        span, self._span = self._span, _Span(self.step + 1)
        self._save_missed = False
        try:
            saving = self._parts.store.save_behind(
                self.name,
                self._captured.take(own),
                expected_version=self.version,
                lease=lease,
                steps=self._said(span, self.step),
                overlap=self._overlap,
            )
        except Unsavable as refused:
            raise self._captured.explained(refused) from refused
        except (*_NOT_SAVED, *_MOVED) as failure:
            self._not_saved(failure, self.step, span)
            return
        now = self._parts.clock.monotonic_us()
        self._saved_at = now
        self._behind = _UnderWay(saving, self.step, span, now - began)

    def _collect(self) -> None:
        """Wait for the save under way, if there is one, and see what became of it."""
        behind = self._behind
        if behind is None:
            return
        try:
            self._parts.store.settle()
            saved = behind.saving.result()
        except Exception as failure:  # interrupted, it is still under way
            self._behind = None
            if not isinstance(failure, (*_NOT_SAVED, *_MOVED)):
                raise
            self._not_saved(failure, behind.step, behind.span)
            return
        self._behind = None
        save_us = int(behind.saving.seconds * SECOND_US)
        self._measure(saved, behind.stall_us, save_us)
        self._committed_as(saved.version, behind.step, behind.span)

    def _not_saved(self, failure: Exception, step: int, span: _Span) -> None:
        """Training goes on, unless somebody else moved the head."""
        self._put_back(step, span)
        before = self.version
        if not self._found_out() or self.version > before:
            return
        if isinstance(failure, _MOVED):
            raise self._moved(failure)
        self._save_failed(failure)

    def _moved(self, failure: SubletError) -> HeadMoved:
        head = failure.version if isinstance(failure, HeadMoved) else self.version + 1
        return HeadMoved(
            f"somebody else moved job {self.name} beyond step {self.committed} (version {self.version}), the last that this run "
            f"committed: {failure.message}; nothing of it was overwritten",
            version=head,
            remedy="start again: it continues from where the job is now; give each job one runner",
        )

    def _found_out(self) -> bool:
        """Whether `_find_out` could; if not, it is asked again later."""
        try:
            self._find_out()
        except Disconnected as unread:
            self._save_failed(unread)
            return False
        return True

    def _put_back(self, step: int, span: _Span) -> None:
        """Its steps go into the next save."""
        self._given_up[step] = (len(span.effects), span.compute_us)
        span.compute_us += self._span.compute_us
        span.effects += self._span.effects
        self._span = span

    def _find_out(self) -> None:
        """The connection broke under a commit: what is written down decides (S5). Asked before every save until it could be read, because
        a head that was moved by a save this run gave up is not somebody else's."""
        for step, (effects, compute_us) in self._given_up.items():
            try:
                found = self._parts.ledger.effect(f"{self.name}:{step}")
            except (SubletError, OSError) as unread:
                raise Disconnected(
                    f"whether step {step} was committed could not be read: {unread}"
                ) from unread
            if found and found.completed and found.fingerprint.startswith(self._mark):
                whole = self._span
                self._span = _Span(step + 1, whole.compute_us - compute_us, whole.effects[effects:])
                self._committed_as(
                    found.version, step, _Span(whole.first, compute_us, whole.effects[:effects])
                )
                return

    def _save_failed(self, failure: BaseException) -> None:
        now = self._parts.clock.monotonic_us()
        self._failed_since = self._failed_since or now
        waited = now - self._failed_since
        if waited >= self._patience_us:
            raise NotDurable(
                f"nothing could be saved for {format_duration(waited)}: {failure}; step {self.committed} is committed, "
                f"steps after it are lost when this process ends",
                remedy="bring the replicas or the ledger back and start again: it resumes at the committed step",
            ) from failure
        self._retry_at = now + min(LONGEST_RETRY_US, RETRY_US << min(self._failures, 10))
        self._failures += 1
        self._tell_of_the_store()
        if self._away is None:  # it was said why, and will be said when that is over
            self._parts.line.say(
                f"not saved: {failure}. Step {self.committed:,} is committed; trying again in "
                f"{format_duration(self._retry_at - now)}"
            )

    def _tell_of_the_store(self) -> None:
        """One line when it is away, one when it is back: when a save that waited is committed, because a server that starts answers and fails in turn."""
        parts, away, told = self._parts, self._parts.store.away, self._away
        now = parts.clock.monotonic_us()
        if away is not None and (told is None or told[0].saves_wait != away.saves_wait):
            self._away = (away, *(told[1:] if told is not None else (now, self.version)))
            parts.line.say(f"{away.reason}. Step {self.committed:,} is committed")
            parts.report_away(away.reason)
        elif away is None and told is not None and (not told[0].saves_wait or self.version > told[2]):
            self._away = None
            gone = format_duration(max(SECOND_US, (now - told[1]) // SECOND_US * SECOND_US))
            parts.line.say(f"store {', '.join(told[0].replicas)} is back after {gone}: saves go on")
            parts.report_away("")

    @contextlib.contextmanager
    def _telling_meanwhile(self) -> Iterator[None]:
        """While this thread waits for a save, somebody else says what it waits for."""
        over = threading.Event()

        def tell() -> None:
            while not over.wait(_LISTEN_SECONDS):
                with contextlib.suppress(Exception):
                    self._tell_of_the_store()

        teller = threading.Thread(target=tell, name="sublet-tells", daemon=True)
        teller.start()
        try:
            yield
        finally:
            over.set()
            teller.join()

    def _end_saves_in_time(self) -> None:
        """In a thread of its own, from the first warning on: whatever a save waits for, this process leaves before its deadline. It is begun with
        the run: a script that is warned must hear of it before it goes on, and a thread takes a while to start."""
        ends = deadline = 0
        while self._warned.wait() and not self._left.wait(_LISTEN_SECONDS):
            self._warned.clear()
            notice, now = self._parts.alarms.notice, self._parts.clock.monotonic_us()
            if notice is None:  # a lease may have taken its warning back
                continue
            self._warned.set()
            if notice.deadline_us != deadline:
                deadline = notice.deadline_us
                ends = deadline - min(MARGIN_US, max(0, deadline - now) // 2)
            if now >= ends:
                # Again and again: a save that is begun after the first time would be waited for like any other.
                self._parts.store.give_up()

    def _committed_as(self, version: int, step: int, span: _Span) -> None:
        now = self._parts.clock.monotonic_us()
        told = self._away is not None
        if self._failures and not told:
            self._parts.line.say(f"saved again: step {step:,} is committed")
        self.version, self.committed, self._committed_at = version, step, now
        self._tell_of_the_store()
        self._failures, self._failed_since, self._retry_at = 0, 0, 0
        self._given_up.clear()
        self._useful_us += span.compute_us
        self._done_effects.difference_update(done.key for done in span.effects)
        self._parts.report(self.step, self.committed)

    def _measure(self, saved: SavedState, stall_us: int, save_us: int) -> None:
        before = self._cost
        if before is not None:  # half old, half new: one slow sync must not set the pace
            stall_us, save_us = (before.stall_us + stall_us) // 2, (before.save_us + save_us) // 2
        self._cost = Cost(stall_us=stall_us, save_us=save_us)
        if self._cadence.auto:
            self.interval = best_interval(self._cost, self._parts.losses)
        self._last_bytes = saved.bytes_written
        self._full_bytes = saved.bytes_written + saved.bytes_shared
        if saved.bytes_written >= _ENOUGH_TO_MEASURE:
            speed = max(1, saved.bytes_written * SECOND_US // max(1, save_us))
            self._speed = Speed(bytes_per_second=speed, latency_us=self._speed.latency_us)
        else:
            self._speed = Speed(bytes_per_second=self._speed.bytes_per_second or 1 << 30, latency_us=save_us)

    def _commit_now(self) -> None:
        """Everything that is done, durable and committed when it returns."""
        failed: Exception | None = None
        try:
            self._collect()
            self._find_out()
        except _NOT_SAVED as failure:
            failed = failure
        # Rank 0 says whether: after a save that failed only it knows that there is something to save.
        wanted = self._parts.ranks.share(failed is None and self.step >= self._span.first)
        if failed is not None:
            raise failed
        if not wanted:
            return
        own = self._parts.ranks.gather(self._captured.take_own())
        lease = self._parts.lease
        span, self._span = self._span, _Span(self.step + 1)
        if lease is None:
            return
        began = self._parts.clock.monotonic_us()
        steps = self._said(span, self.step)
        try:
            saved = self._parts.store.save(
                self.name, self._captured.take(own), expected_version=self.version, lease=lease, steps=steps
            )
        except Unsavable as refused:
            raise self._captured.explained(refused) from refused
        except (*_NOT_SAVED, *_MOVED) as failure:
            self._put_back(self.step, span)
            before = self.version
            self._find_out()
            if self.version == before and isinstance(failure, _MOVED):
                raise self._moved(failure) from failure
            if self.version == before:
                raise
            if self.step >= self._span.first:
                raise Disconnected(
                    f"an earlier save had happened; steps after {self.committed} are not saved yet"
                ) from failure
            return
        took = self._parts.clock.monotonic_us() - began
        self._measure(saved, took, took)
        self._committed_as(saved.version, self.step, span)

    # leaving

    def _leave(self, total: int | None, notice: Notice | None) -> DrainPlan | None:
        """The last save of this process. With a notice, only what is durable in time."""
        line, now = self._parts.line, self._parts.clock.monotonic_us()
        if notice is None:
            notice = self._leaving_for = self._save_to_the_end()
        if notice is None:
            self._wait_for_the_commit()
            line.say(
                f"{'stopped' if self._stopping else 'done'} at step {self.step:,}, committed as version {self.version}"
            )
            return None
        if line.wanted:
            self._show(now, total, notice.reason)
        plan = self._plan(notice, now)
        try:
            with self._telling_meanwhile():
                if plan.save in (Save.DELTA, Save.FULL):
                    self._commit_now()
                elif plan.save is Save.WAIT:
                    self._collect()
        except (*_NOT_SAVED, LeaseLost, Fenced) as failure:
            plan = replace(plan, save=Save.SKIP, reason=f"what was done since could not be saved: {failure}")
        self._wait_for_the_commit()
        line.say(
            f"leaves ({notice.reason}): {plan.reason}. Step {self.committed:,} is committed{self._unsaved()}"
        )
        return plan

    def _unsaved(self) -> str:
        first = self.committed + 1
        if self.step < first:
            return ""
        steps = f"step {first:,} is" if self.step == first else f"steps {first:,} to {self.step:,} are"
        return f"; {steps} not saved, and will be done again by the next start"

    def _wait_for_the_commit(self) -> None:
        """No rank ends before rank 0 has committed: a launcher ends them all when it sees one end."""
        self.version, self.committed = self._parts.ranks.share((self.version, self.committed))

    def _plan(self, notice: Notice, now: int) -> DrainPlan:
        """Decided by rank 0, which measured, for all of them: a gather that only some join would never end."""
        behind = None
        if self._behind is not None:
            left = self._last_bytes if self._last_bytes is not None else self._full_bytes
            behind = Behind(bytes_left=left, holds_all=self._behind.step == self.step)
        if self._parts.lease is not None:
            # A signal brings its own grace; what the lease has left may be less, and after it nothing can be committed.
            ends = now + int(self._parts.lease.seconds_left * SECOND_US)
            notice = replace(notice, deadline_us=min(notice.deadline_us, ends))
        plan = plan_drain(
            notice,
            now,
            uncommitted=self.step >= self._span.first,
            behind=behind,
            step_us=self._step_us,
            speed=self._speed,
            full_bytes=self._full_bytes,
            delta_bytes=self._last_bytes,
        )
        shared: DrainPlan = self._parts.ranks.share(plan)
        return shared

    def _save_to_the_end(self) -> Notice | None:
        """All steps are done: what cannot be saved now is tried again, for as long as the run would have gone on without, or until
        the warning that is returned."""
        while True:
            try:
                with self._telling_meanwhile():
                    self._commit_now()
                return None
            except _NOT_SAVED as failure:
                if self._parts.ranks.world > 1:
                    raise
                self._save_failed(failure)
                pause = max(0, self._retry_at - self._parts.clock.monotonic_us())
                notice = self._parts.alarms.wait(pause / SECOND_US)
                if notice is not None:
                    return notice
                self._check()

    def close(self, *, finished: bool = True, listening: bool = False) -> None:
        """Give everything back. What is committed is committed; a step that was not finished is not."""
        if self._pid != os.getpid():
            return  # a forked child: nothing of this is its own
        if self._closed:
            self._parts.alarms.close()
            return
        self._closed = True
        parts = self._parts
        try:
            if self._behind is not None:
                with contextlib.suppress(SubletError, OSError):
                    self._collect()
            if not finished and self.step >= self.resumed_at:
                at = self.step + 1
                parts.line.say(f"left in the middle of step {at:,}: step {self.committed:,} is committed")
        finally:
            self._left.set()
            self._warned.set()
            parts.ranks.close()
            self._working.close()
            parts.line.close()
            parts.report(self.step, self.committed)
            parts.report_away("")
            try:
                parts.release()
            finally:
                if not listening:
                    parts.alarms.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.close(finished=error[0] is None)

    # effects

    def _effect(self, number: int, key: str, function: Callable[..., Any]) -> Any:
        if not self._iterating or self._closed or number != self.step + 1:
            raise BadInput(
                f"step {number} is over: nothing would make effect {key!r} true",
                remedy="call it in the body of the loop, on the step that the loop gave",
            )
        lease = self._parts.lease
        if lease is None:
            return None  # rank 0 does it for all
        full = f"{self.name}#{key}"  # no job's name has a '#' in it: no two jobs have a key in common
        if full in self._done_effects:
            raise BadInput(
                f"effect {key!r} was done in a step that is not committed yet: use one key for one thing"
            )
        self._make_room()
        fingerprint = hashlib.sha256(f"{self.name}\n{number}\n{key}".encode()).hexdigest()
        reserved = self._parts.ledger.reserve(lease.key, effect=full, job=self.name, fingerprint=fingerprint)
        if isinstance(reserved, Duplicate):
            return json.loads(reserved.outcome)
        value = function(full) if _wants_the_key(function) else function()
        try:
            done = Done(key=full, fingerprint=fingerprint, outcome=json.dumps(value))
        except (TypeError, ValueError) as e:
            raise BadInput(
                f"what effect {key!r} returned cannot be stored: {e}",
                remedy="return numbers, texts, lists and dicts, or None",
            ) from e
        self._span.effects.append(done)
        self._done_effects.add(full)
        return json.loads(done.outcome)  # what a repeat will get: the first time must not differ

    def _make_room(self) -> None:
        """A commit takes so many effects: refused before one more is done than can become true."""
        if len(self._done_effects) >= MOST_EFFECTS:
            self._collect()
        if len(self._span.effects) >= MOST_EFFECTS:
            raise BadInput(
                f"{MOST_EFFECTS:,} effects are waiting for one commit, which takes no more",
                remedy="do several in one, or in several steps",
            )

    # showing

    def _show(self, now: int, total: int | None, notice: str = "") -> None:
        done = self.step - self.resumed_at
        elapsed = max(1, now - self._began_at)
        # Work not committed yet counts here: it is lost only if something happens.
        useful = (
            self._useful_us + self._span.compute_us + (self._behind.span.compute_us if self._behind else 0)
        )
        self._parts.line.show(
            now,
            step=self.step,
            total=total,
            committed=self.committed,
            committed_ago_us=None if self._committed_at is None else now - self._committed_at,
            steps_per_s=done * SECOND_US / elapsed,
            goodput=min(1.0, useful / elapsed),
            lease_s=self._parts.lease.seconds_left if self._parts.lease is not None else 0.0,
            log=self._numbers(),
            notice=notice,
        )

    def _numbers(self) -> dict[str, float]:
        return {name: value for name in self._log if (value := _number(self._log[name])) is not None}


def _number(value: Any) -> float | None:
    """What can be shown and stored of a logged value."""
    if hasattr(value, "item"):
        with contextlib.suppress(Exception):
            value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _stored(numbers: dict[str, float]) -> dict[str, float | str]:
    """The first of them, as many as an outcome has room for: too much logged must not keep steps from being committed."""
    stored: dict[str, float | str] = {}
    room = MOST_TEXT - 1024
    for name, value in numbers.items():
        room -= len(json.dumps(name)) + 32
        if room < 0:
            break
        stored[name] = value if math.isfinite(value) else str(value)
    return stored


def _wants_the_key(function: Callable[..., Any]) -> bool:
    """One that binds a value by a default (`lambda n=n: ...`) must get that value."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False  # written in C, and does not say
    return any(p.default is p.empty and p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in parameters)
