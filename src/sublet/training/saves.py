"""The saves of a training run: steps wait in a span, a background save takes them along, one commit makes
them true.

Rules of this file:
- Steps are committed in spans, each with the state after it, the effects in it and the place in the data, in
  one transaction (S1, S3).
- A save that fails leaves the head where it was, and its steps go into the next one. Whether a commit
  happened whose answer was lost is read from the ledger, never guessed (S5).
- Training goes on without saves for a bounded time only: progress that cannot be saved is not progress.
- Between steps nothing waits for a store that is away, and a drain waits no longer than its deadline.
- What to save before a deadline is `core.runs.drain`'s decision, how often is `core.progress.cadence`'s.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from sublet.core.errors import (
    BadInput,
    Disconnected,
    Fenced,
    FingerprintMismatch,
    HeadMoved,
    LeaseLost,
    NotDurable,
    SubletError,
    Unsavable,
)
from sublet.core.notice import Notice
from sublet.core.progress.cadence import Cadence, Cost, best_interval
from sublet.core.progress.effect import MOST_EFFECTS, MOST_TEXT, Done, Steps
from sublet.core.runs.drain import MARGIN_US, DrainPlan, SaveBehind, Speed, plan_drain
from sublet.core.values import SECOND_US, format_duration
from sublet.ports.store import SavedState, SaveUnderWay
from sublet.training.capture import Captured
from sublet.training.run_parts import LoggedValues, Parts, RunPosition
from sublet.training.store_news import LISTEN_SECONDS, StoreNews

#: How long a run goes on while nothing can be saved.
SAVE_PATIENCE_US = 600 * SECOND_US
#: A save that failed is tried again after this, and twice as long each time, up to a minute.
RETRY_US = SECOND_US
LONGEST_RETRY_US = 60 * SECOND_US
#: Saves of fewer bytes say how long a save takes, not how fast the store is.
_ENOUGH_TO_MEASURE = 1 << 20
#: A span with this many effects is saved, whatever the cadence: a commit has room for twice as many.
_MANY_EFFECTS = MOST_EFFECTS // 2
#: After these the head is where it was, or it is written down that it moved.
NOT_SAVED = (NotDurable, Disconnected, OSError)
#: This step was committed before: by a save this run gave up, or by another holder.
_MOVED = (HeadMoved, FingerprintMismatch)


@dataclass(slots=True)
class UnsavedSteps:
    """Steps that are done and not yet in a save."""

    first: int
    compute_us: int = 0
    effects: list[Done] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class UnderWay:
    saving: SaveUnderWay
    step: int
    span: UnsavedSteps
    stall_us: int


class Saves:
    """The saves of one run, one at a time. The loop's thread calls everything here but `_end_in_time`."""

    def __init__(
        self,
        name: str,
        captured: Captured,
        parts: Parts,
        position: RunPosition,
        log: LoggedValues,
        *,
        cadence: Cadence,
        overlap: Any,
        patience_us: int,
    ) -> None:
        # How often, and why, when that is the run's to decide.
        self.interval = best_interval(None, parts.losses) if cadence.auto else None
        self.under_way: UnderWay | None = None
        self._name = name
        self._captured = captured
        self._parts = parts
        self._position = position
        self._log = log
        self._cadence = cadence
        self._overlap = overlap
        self._patience_us = patience_us
        self._news = StoreNews(parts, position)
        self._span = UnsavedSteps(1)
        self._done_effects: set[str] = set()  # and not committed yet
        # Given up since the last commit, by their last step: how many of the span's effects were in it, and
        # its compute time.
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
        self._missed = False  # one was due while the store was away
        self._begun_at = parts.clock.monotonic_us()
        self._warned, self._over = threading.Event(), threading.Event()  # over: nothing is saved any more
        parts.notice_bus.on_notice(lambda _: self._warned.set())
        threading.Thread(target=self._end_in_time, name="sublet-gives-up", daemon=True).start()

    # what waits for a save

    @property
    def uncommitted(self) -> bool:
        """Whether steps were done that no save holds."""
        return self._position.step >= self._span.first

    @property
    def waiting_us(self) -> int:
        """Time in steps that are not committed yet: lost only if something happens."""
        return self._span.compute_us + (self.under_way.span.compute_us if self.under_way else 0)

    def begin_after(self, step: int) -> None:
        self._span = UnsavedSteps(step + 1)

    def count(self, took_us: int) -> None:
        self._span.compute_us += took_us

    def has_effect(self, key: str) -> bool:
        return key in self._done_effects

    def add_effect(self, done: Done) -> None:
        self._span.effects.append(done)
        self._done_effects.add(done.key)

    def make_room_for_an_effect(self) -> None:
        """A commit takes so many effects: refused before one more is done than can become true."""
        if len(self._done_effects) >= MOST_EFFECTS:
            self.collect()
        if len(self._span.effects) >= MOST_EFFECTS:
            raise BadInput(
                f"{MOST_EFFECTS:,} effects are waiting for one commit, which takes no more",
                remedy="do several in one, or in several steps",
            )

    # between two steps

    def see_the_last(self) -> None:
        """See what became of the last save, if that is known, and of the store."""
        if self.under_way is not None and self.under_way.saving.done:
            self.collect()
        self._news.tell()

    def due(self, now: int) -> bool:
        if not self.uncommitted or now < self._retry_at:
            return False
        if self._failures or len(self._span.effects) >= _MANY_EFFECTS:
            return True
        if self._cadence.steps:
            if self._position.step % self._cadence.steps == 0:
                self._missed = True
            if self._missed and self.under_way is not None and not self.under_way.saving.done:
                # Saves do not overlap. A slow one is waited for; one that waits for a store that is away is
                # not, and holds up nobody.
                return self._parts.store.away is None
            return self._missed
        if self.under_way is not None:
            return False
        if self._cadence.us:
            return now - self._begun_at >= self._cadence.us
        assert self.interval is not None
        return now - self._begun_at >= self.interval.us

    def warned_before_the_last_is_over(self) -> Notice | None:
        """Saves do not overlap, and the one under way may take longer than a warning leaves time. Several
        ranks hear one at a boundary only."""
        behind, notice = self.under_way, None
        if behind is not None and self._parts.ranks.world == 1:
            while notice is None and not behind.saving.wait(LISTEN_SECONDS):
                notice = self._parts.notice_bus.notice
                self._news.tell()
                away = self._parts.store.away
                if away is not None and away.saves_wait:
                    break  # it is unknown for how long: this save is made later, with more steps in it
        return notice

    def save_behind(self) -> None:
        """Begin a save, unless the last one is still under way."""
        if self.under_way is not None and not self.under_way.saving.done and self._parts.ranks.world == 1:
            return
        began = self._parts.clock.monotonic_us()
        failures = self._failures
        self.collect()
        known = self._found_out() and self._failures == failures
        own = self._parts.ranks.gather(self._captured.take_own())
        lease, step = self._parts.lease, self._position.step
        if lease is None:
            self._span = UnsavedSteps(step + 1)
            return
        if not known or not self.uncommitted:
            return  # after a failure there is a pause; and what was committed after all needs no save
        span, self._span = self._span, UnsavedSteps(step + 1)
        self._missed = False
        try:
            saving = self._parts.store.save_behind(
                self._name,
                self._captured.take(own, step),
                expected_version=self._position.version,
                lease=lease,
                steps=self._said(span, step),
                overlap=self._overlap,
            )
        except Unsavable as refused:
            raise self._captured.explained(refused) from refused
        except (*NOT_SAVED, *_MOVED) as failure:
            self._not_saved(failure, step, span)
            return
        now = self._parts.clock.monotonic_us()
        self._begun_at = now
        self.under_way = UnderWay(saving, step, span, now - began)

    def collect(self) -> None:
        """Wait for the save under way, if there is one, and see what became of it."""
        behind = self.under_way
        if behind is None:
            return
        try:
            self._parts.store.settle()
            saved = behind.saving.result()
        except Exception as failure:  # interrupted, it is still under way
            self.under_way = None
            if isinstance(failure, Fenced):
                raise _lost(failure) from failure
            if not isinstance(failure, (*NOT_SAVED, *_MOVED)):
                raise
            self._not_saved(failure, behind.step, behind.span)
            return
        self.under_way = None
        save_us = int(behind.saving.seconds * SECOND_US)
        self._measure(saved, behind.stall_us, save_us)
        self._committed_as(saved.version, behind.step, behind.span)

    # waited for

    def commit_now(self) -> None:
        """Make everything that is done durable and committed."""
        failed: Exception | None = None
        try:
            self.collect()
            self._find_out()
        except NOT_SAVED as failure:
            failed = failure
        # Rank 0 says whether: after a save that failed only it knows that there is something to save.
        wanted = self._parts.ranks.share(failed is None and self.uncommitted)
        if failed is not None:
            raise failed
        if not wanted:
            return
        own = self._parts.ranks.gather(self._captured.take_own())
        lease, step = self._parts.lease, self._position.step
        span, self._span = self._span, UnsavedSteps(step + 1)
        if lease is None:
            return
        began = self._parts.clock.monotonic_us()
        steps = self._said(span, step)
        before = self._position.version
        try:
            saved = self._parts.store.save(
                self._name, self._captured.take(own, step), expected_version=before, lease=lease, steps=steps
            )
        except Unsavable as refused:
            raise self._captured.explained(refused) from refused
        except Fenced as fenced:
            raise _lost(fenced) from fenced
        except (*NOT_SAVED, *_MOVED) as failure:
            self._put_back(step, span)
            self._find_out()
            if self._position.version == before and isinstance(failure, _MOVED):
                raise self._moved(failure) from failure
            if self._position.version == before:
                raise
            if self.uncommitted:
                raise Disconnected(
                    f"an earlier save had happened; steps after {self._position.committed} are not saved yet"
                ) from failure
            return
        took = self._parts.clock.monotonic_us() - began
        self._measure(saved, took, took)
        self._committed_as(saved.version, step, span)

    def commit_to_the_end(self, may_go_on: Callable[[], None]) -> Notice | None:
        """Commit after the last step: a save that fails is tried again for as long as a run may go on without
        saves, or until a warning, which is returned."""
        while True:
            try:
                with self._news.meanwhile():
                    self.commit_now()
                return None
            except NOT_SAVED as failure:
                if self._parts.ranks.world > 1:
                    raise
                self._failed(failure)
                pause = max(0, self._retry_at - self._parts.clock.monotonic_us())
                notice = self._parts.notice_bus.wait(pause / SECOND_US)
                if notice is not None:
                    return notice
                may_go_on()

    def reporting_outage(self) -> contextlib.AbstractContextManager[None]:
        return self._news.meanwhile()

    def plan(self, notice: Notice, now: int, step_us: int | None) -> DrainPlan:
        """What to save before the deadline. Decided by rank 0, which measured, for all of them: a gather that
        only some join would never end."""
        behind = None
        if self.under_way is not None:
            left = self._last_bytes if self._last_bytes is not None else self._full_bytes
            behind = SaveBehind(bytes_left=left, holds_all=self.under_way.step == self._position.step)
        if self._parts.lease is not None:
            # A signal brings its own grace; what the lease has left may be less, and after it nothing can be
            # committed.
            ends = now + int(self._parts.lease.seconds_left * SECOND_US)
            notice = replace(notice, deadline_us=min(notice.deadline_us, ends))
        plan = plan_drain(
            notice,
            now,
            uncommitted=self.uncommitted,
            behind=behind,
            step_us=step_us,
            speed=self._speed,
            full_bytes=self._full_bytes,
            delta_bytes=self._last_bytes,
        )
        shared: DrainPlan = self._parts.ranks.share(plan)
        return shared

    def close(self) -> None:
        """Save nothing more, so that nothing has to be given up."""
        self._over.set()
        self._warned.set()

    def _end_in_time(self) -> None:
        """In a thread of its own, from the first warning on: whatever a save waits for, this process leaves
        before its deadline. It is begun with the run: a script that is warned must hear of it before it goes
        on, and a thread takes a while to start."""
        ends = deadline = 0
        while self._warned.wait() and not self._over.wait(LISTEN_SECONDS):
            self._warned.clear()
            notice, now = self._parts.notice_bus.notice, self._parts.clock.monotonic_us()
            if notice is None:  # a lease may have taken its warning back
                continue
            self._warned.set()
            if notice.deadline_us != deadline:
                deadline = notice.deadline_us
                ends = deadline - min(MARGIN_US, max(0, deadline - now) // 2)
            if now >= ends:
                # Again and again: a save that is begun after the first time would be waited for like any
                # other.
                self._parts.store.give_up()

    # what one says, and what became of it

    def _said(self, span: UnsavedSteps, step: int) -> Steps:
        outcome = {"compute_us": span.compute_us, "log": self._log.stored()}
        return Steps(
            step=step,
            first=span.first,
            key=f"{self._name}:{step}",
            fingerprint=f"{self._mark}{next(self._tries)}",
            cursor=self._cursor(),
            outcome=json.dumps(outcome),
            effects=tuple(span.effects),
        )

    def _cursor(self) -> str:
        """Where each part that reads data stands, for whoever reads the ledger; the state itself has it
        too."""
        found = {}
        for name, part in self._captured.parts.items():
            cursor = getattr(part, "cursor", None)
            with contextlib.suppress(TypeError, ValueError):  # somebody's own, and not for us
                if isinstance(cursor, dict) and json.dumps(cursor):
                    found[name] = cursor
        text = json.dumps(found) if found else ""
        return text if len(text) <= MOST_TEXT else ""

    def _committed_as(self, version: int, step: int, span: UnsavedSteps) -> None:
        position = self._position
        now = self._parts.clock.monotonic_us()
        told = self._news.outage_reported
        if self._failures and not told:
            self._parts.line.say(f"saved again: step {step:,} is committed")
        position.version, position.committed, position.committed_at = version, step, now
        self._news.tell()
        self._failures, self._failed_since, self._retry_at = 0, 0, 0
        self._given_up.clear()
        position.useful_us += span.compute_us
        self._done_effects.difference_update(done.key for done in span.effects)
        self._parts.report(position.step, position.committed)

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

    def _not_saved(self, failure: Exception, step: int, span: UnsavedSteps) -> None:
        """Note a failed save. Training goes on, unless somebody else moved the head."""
        self._put_back(step, span)
        before = self._position.version
        if not self._found_out() or self._position.version > before:
            return
        if isinstance(failure, _MOVED):
            raise self._moved(failure)
        self._failed(failure)

    def _put_back(self, step: int, span: UnsavedSteps) -> None:
        """Its steps go into the next save."""
        self._given_up[step] = (len(span.effects), span.compute_us)
        span.compute_us += self._span.compute_us
        span.effects += self._span.effects
        self._span = span

    def _found_out(self) -> bool:
        """Whether `_find_out` could; if not, it is asked again later."""
        try:
            self._find_out()
        except Disconnected as unread:
            self._failed(unread)
            return False
        return True

    def _find_out(self) -> None:
        """The connection broke under a commit: what is written down decides (S5). Asked before every save
        until it could be read, because a head that was moved by a save this run gave up is not somebody
        else's."""
        for step, (effects, compute_us) in self._given_up.items():
            try:
                found = self._parts.ledger.effect(f"{self._name}:{step}")
            except (SubletError, OSError) as unread:
                raise Disconnected(
                    f"whether step {step} was committed could not be read: {unread}"
                ) from unread
            if found and found.completed and found.fingerprint.startswith(self._mark):
                whole = self._span
                self._span = UnsavedSteps(step + 1, whole.compute_us - compute_us, whole.effects[effects:])
                self._committed_as(
                    found.version, step, UnsavedSteps(whole.first, compute_us, whole.effects[:effects])
                )
                return

    def _moved(self, failure: SubletError) -> HeadMoved:
        position = self._position
        head = failure.version if isinstance(failure, HeadMoved) else position.version + 1
        return HeadMoved(
            f"somebody else moved job {self._name} beyond step {position.committed} (version "
            f"{position.version}), the last that this run "
            f"committed: {failure.message}; nothing of it was overwritten",
            version=head,
            remedy="start again: it continues from where the job is now; give each job one runner",
        )

    def _failed(self, failure: BaseException) -> None:
        now = self._parts.clock.monotonic_us()
        self._failed_since = self._failed_since or now
        waited = now - self._failed_since
        if waited >= self._patience_us:
            raise NotDurable(
                f"nothing could be saved for {format_duration(waited)}: {failure}; step "
                f"{self._position.committed} is committed, steps after it are lost when this process ends",
                remedy="bring the replicas or the ledger back and start again: it resumes at the committed "
                "step",
            ) from failure
        self._retry_at = now + min(LONGEST_RETRY_US, RETRY_US << min(self._failures, 10))
        self._failures += 1
        self._news.tell()
        if not self._news.outage_reported:
            self._parts.line.say(
                f"not saved: {failure}. Step {self._position.committed:,} is committed; trying again in "
                f"{format_duration(self._retry_at - now)}"
            )


def _lost(fenced: Fenced) -> LeaseLost:
    """What a refused commit means for a run: its lease has ended, and the ledger knew it first."""
    return LeaseLost(f"the lease of this run has ended: {fenced.message}")
