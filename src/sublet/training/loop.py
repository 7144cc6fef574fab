"""A training run: steps that count once, saves behind them, and a drain when the GPU goes.

Rules of this file:
- A step is counted when its body reaches its end. A body left in any other way leaves the step uncounted, and
  the state it half changed is not saved.
- Who may run the job is `training.single_runner`'s, when and how it is saved is `training.saves`'s: the loop
  asks between two steps.
- Whoever loses the lease can commit nothing more (S2). On a warning the loop ends before its next step, on
  all ranks after the same one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NoReturn

from sublet.core.errors import BadInput, Fenced, LeaseLost, SubletError
from sublet.core.notice import Notice
from sublet.core.progress.cadence import Cadence, Interval
from sublet.core.runs.drain import DrainPlan, Save
from sublet.core.runs.exits import DRAINED_CODE
from sublet.core.values import SECOND_US, parse_duration
from sublet.training.capture import Captured, put_random, step_of
from sublet.training.effects import Effects, Step
from sublet.training.left_out import looking_at_the_loop
from sublet.training.resume_check import (
    PartDiffers,
    RepeatedSteps,
    RepeatOnceMore,
    ResumeChecks,
    resume_differs,
)
from sublet.training.run_parts import LoggedValues, Parts, RunLease, RunPosition
from sublet.training.saves import NOT_SAVED, SAVE_PATIENCE_US, Saves
from sublet.training.single_runner import become_the_runner

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
        checks: ResumeChecks | None = None,
    ) -> None:
        self.name = name
        self.resumed_at = 0
        self.preempted = False
        self._captured = captured
        self._parts = parts
        self._position = RunPosition()
        self._log = LoggedValues()
        self._saves = Saves(
            name,
            captured,
            parts,
            self._position,
            self._log,
            cadence=cadence,
            overlap=overlap,
            patience_us=save_patience_us,
        )
        self._effects = Effects(name, parts, self._saves)
        self._checks = checks
        self._repeated: RepeatedSteps | None = None  # what this resume repeats, until it is compared
        self._random: Any = None
        self._told_every: dict[int, int] = {}
        self._stopping = ""
        self._leaving_for: Notice | None = None
        self._iterating = False
        self._closed = False
        self._pid = os.getpid()
        self._began_at = self._step_began = parts.clock.monotonic_us()
        self._step_us: int | None = None
        self._working = contextlib.ExitStack()  # of steps begun by hand

    # what the caller sees

    @property
    def step(self) -> int:
        """The last one whose body came to its end."""
        return self._position.step

    @property
    def committed(self) -> int:
        """The last one that is safe."""
        return self._position.committed

    @property
    def repeats(self) -> bool:
        """Whether it does steps again that are committed, to see that they come out the same."""
        return self._repeated is not None

    @property
    def version(self) -> int:
        """Of the checkpoint that holds it."""
        return self._position.version

    @property
    def interval(self) -> Interval | None:
        """How often it saves, and why, when that is the run's to decide."""
        return self._saves.interval

    @property
    def notice(self) -> Notice | None:
        """The nearest warning that the GPU will go, or None."""
        return self._parts.notice_bus.notice

    @property
    def begun(self) -> int:
        """The step under way, or the last one if none is."""
        return self.step + 1 if self._iterating else self.step

    @property
    def should_stop(self) -> bool:
        """Whether the loop will end before its next step."""
        return bool(self._stopping) or self.notice is not None

    @property
    def goodput(self) -> float:
        """Time in steps that are committed, of all the time since the run began."""
        elapsed = self._parts.clock.monotonic_us() - self._began_at
        return min(1.0, self._position.useful_us / elapsed) if elapsed else 0.0

    def every(self, what: int | str) -> bool:
        """True once every so many steps (`run.every(100)`) or every so often (`run.every("10m")`): `if
        run.every(100): evaluate()`."""
        number = self.begun
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
        position = self._position
        position.version, position.committed = at
        self._saves.begin_after(position.committed)
        position.step = position.committed
        if self.version:
            self._put_back(self._tree_to_begin_with())
            position.committed_at = parts.clock.monotonic_us()
            self._say_where_it_resumes()
        self.resumed_at = position.step
        parts.report(self.step, self.committed)

    def _put_back(self, tree: Any) -> None:
        """But for the random states, which follow when steps begin."""
        ranks = self._parts.ranks
        self._captured.put(tree, ranks.rank, ranks.world)
        self._random = self._captured.random_of(tree, ranks.rank, ranks.world)

    def repeat_nothing(self) -> None:
        """Begin with the last save: no step is left to be made, or they would not come out alike."""
        assert self._checks is not None
        self._checks.given_up()
        self._put_back(self._parts.store.load(self.name, version=self.version))
        self._repeated, self._position.step = None, self.committed

    def _tree_to_begin_with(self) -> Any:
        """The last save; or the one before it, if this resume is checked."""
        parts, position = self._parts, self._position
        if self._checks is not None and parts.ranks.world == 1:
            self._repeated = self._checks.begin(self.version, position.committed)
        if self._repeated is not None:
            try:
                tree = parts.store.load(self.name, version=self._repeated.from_version)
                position.step = step_of(tree)
                if 0 < position.step < position.committed:
                    return tree
            except (SubletError, OSError):
                pass  # it was swept, or cannot be read: the last one can
            assert self._checks is not None
            self._checks.given_up()
            self._repeated, position.step = None, position.committed
        return parts.store.load(self.name, version=self.version if parts.ranks.rank else None)

    def _say_where_it_resumes(self) -> None:
        line = self._parts.line
        if self._repeated is None:
            line.say(f"resumes after step {self.step:,}, as committed at version {self.version}")
            return
        line.say(
            f"resumes after step {self.step:,} and repeats up to step {self.committed:,}, to see that it "
            f"comes out the same: {self._repeated.reason}"
        )

    def repeat_from(self, version: int, why: str) -> None:
        """The next start begins there, and repeats what was done since."""
        if self._checks is not None:
            self._checks.begin_next_at(version, why)

    def _compare_if_it_is_there(self) -> None:
        """Compare, once the program is where it was saved: a step may be saved at its end, or behind it."""
        repeated = self._repeated
        if repeated is None or self.step < repeated.to_step:
            return
        saved = self._parts.store.load(self.name, version=repeated.to_version)
        if self._captured.is_where(saved) or self.step > repeated.to_step:
            self._compare_what_was_repeated(saved)

    def _compare_what_was_repeated(self, saved: Any = None) -> None:
        repeated, self._repeated = self._repeated, None
        assert repeated is not None
        assert self._checks is not None
        steps, now = repeated.words(self.resumed_at), None
        if saved is None or self.step != repeated.to_step:
            found: list[Any] = [f"it did not come to where step {repeated.to_step:,} was saved"]
        else:
            now = self._captured.take(self._parts.ranks.gather(self._captured.take_own()))
            found = self._captured.differences(saved, now)
        varies = set[str]()
        if found and isinstance(found[0], PartDiffers):
            try:
                found, varies = self._checks.telling(found, repeated.from_version)
            except RepeatOnceMore as again:
                reason = f"{steps} came out differently when repeated: {again.message}"
                now_us = self._parts.clock.monotonic_us()
                self._leaving_for = Notice(source="resume check", reason=reason, deadline_us=now_us)
                return
        if found:
            raise resume_differs(self._parts, self.name, repeated, steps, found, now)
        self._checks.was_equal(varies)
        if not varies:
            self._parts.line.say(f"{steps} came out the same when repeated")
            return
        self._put_back(saved)
        put_random(self._random)
        self._random = None
        self._parts.line.say(
            f"{steps} came out differently each time they were repeated, and are as they were committed. Not "
            f"compared any more: {', '.join(sorted(varies)[:6])}"
        )

    def _own(self, lease: RunLease) -> None:
        notice = become_the_runner(self.name, lease, self._parts)
        if notice is not None:
            raise Preempted(notice, step=0, committed=0, plan="nothing was begun")

    # the loop

    def steps(self, total: int, *, on_notice: str = "exit") -> Iterator[Step]:
        """Steps `committed + 1` to `total`, each counted when its body ends; committed when the loop ends.

        On any warning that the GPU will go the loop ends before its next step: what is done is saved if there
        is time, the lease is given back, and `Preempted` ends the program with exit code 85
        (`on_notice="stop"`: the loop just ends, and `run.preempted` is True).
        """
        if on_notice not in ("exit", "stop"):
            raise BadInput(f"on_notice={on_notice!r} is unknown: use 'exit' or 'stop'")
        if isinstance(total, bool) or not isinstance(total, int) or total < 0:
            raise BadInput(f"steps({total!r}) is not a number of steps")
        self._may_begin()
        return looking_at_the_loop(self._steps(total, on_notice), self._captured.parts, self.name)

    def _may_begin(self) -> None:
        if self._closed:
            raise BadInput("this run is over; call sublet.train again", remedy="call sublet.train again")
        if self._iterating:
            raise BadInput("this run is being iterated already: one loop at a time")

    def _steps(self, total: int, on_notice: str) -> Iterator[Step]:
        self._may_begin()  # asked again: much may have happened between the call and the first step
        if self._repeated is not None and total <= self.committed:
            self.repeat_nothing()
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
                    yield Step(self.name, self.begun, self._log.put, self._effect)
                    if self._closed:  # the body called `close`
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
            # A program that is ended by a warning ignores further ones: a second signal must not change how
            # it ends.
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
        """Put back the random states, which `resume` left out; steps may begin. Repeating it is harmless."""
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
        """Begin a step; one that is never ended is not counted."""
        self._parts.report(self.step + 1, self.committed)
        self._check()
        self._step_began = self._parts.clock.monotonic_us()

    def end_step(self) -> None:
        """Count the step. Saves when that is due; leaves with `Preempted` on a warning."""
        self._be_the_runner()
        self._count(self._parts.clock.monotonic_us())
        self._leave_if_told()

    def save_now(self) -> None:
        """Commit what is done, between two steps: what follows may take long."""
        self._leave_if_told()
        self._compare_if_it_is_there()
        self._saves.commit_now()

    def finish(self) -> None:
        """Commit all steps, because none will follow. The lease is held until `close`."""
        if self._closed:
            return
        self._leave_if_told()
        plan = self._leave(None, None)
        if self._leaving_for is not None:
            self._leave_told(self._leaving_for, plan)
        self._iterating = False

    def mark(self, tag: str) -> None:
        """Keep the last save under this tag."""
        self._parts.store.tag(self.name, self.version, tag, actor=self.name)

    def is_marked(self, tag: str) -> bool:
        """Whether the last save has this tag."""
        if not self.version:
            return False
        kept = self._parts.ledger.versions(self.name).tags.get(tag)
        return kept is not None and kept.version == self.version

    def seconds_to(self, notice: Notice) -> float:
        """How long is left until its deadline."""
        return (notice.deadline_us - self._parts.clock.monotonic_us()) / SECOND_US

    def on_notice(self, callback: Callable[[Notice], None]) -> None:
        self._parts.notice_bus.on_notice(callback)

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
        self._position.step += 1
        if self._repeated is None:
            self._saves.count(took)
        self._step_us = took if self._step_us is None else (self._step_us * 7 + took) // 8

    def _boundary(self, total: int | None) -> str:
        """Between two steps: look at the last save, begin one if it is due, decide whether to leave. '' to go
        on."""
        now = self._parts.clock.monotonic_us()
        self._compare_if_it_is_there()
        if self._leaving_for is not None:
            return "notice"
        self._saves.see_the_last()
        if self._parts.line.due(now):
            self._show(now, total)
        over = (total is not None and self.step >= total) or bool(self._stopping)
        decides = self._parts.ranks.rank == 0  # rank 0 saves, and so knows when the next save is due
        due = decides and not over and self._saves.due(now)
        notice = self.notice
        # The largest of each: so the time that is left is the least, of whoever was warned.
        left = _NOT_WARNED if notice is None else now - notice.deadline_us
        left_any, due_any, over_any, committed = self._parts.ranks.agree(
            (left, due, over, self.committed if decides else 0)
        )
        if not decides:
            self._position.committed = committed
        if left_any > _NOT_WARNED:
            if notice is None or left_any > left:
                # Another rank heard it, or has less time; this one leaves on the same step.
                why = "another rank was told to leave"
                notice = Notice(source="rank", reason=why, deadline_us=now - left_any)
                self._parts.notice_bus.raise_notice(notice)
            self._leaving_for = notice  # a lease may take its warning back; the ranks have agreed
            return "notice"
        if over_any:
            return "over"
        if due_any:
            self._leaving_for = self._saves.warned_before_the_last_is_over()
            if self._leaving_for is not None:
                return "notice"
            self._saves.save_behind()
        return ""

    def save(self, *, as_one: bool = False) -> None:
        """Commit what is done so far, now, between two steps. `as_one`: it was a step that nobody saw."""
        if self._iterating:
            raise BadInput(
                "inside the loop the step is not finished: its state must not be saved",
                remedy="lower every= to save more often",
            )
        if self._closed and self._saves.uncommitted:
            raise BadInput(
                f"this run is over, and a step may have been left in the middle: step {self.committed} is "
                "committed",
                remedy="end a loop with run.stop() instead of break; what is done is then committed",
            )
        self._position.step += as_one
        self._saves.commit_now()

    # leaving

    def _leave(self, total: int | None, notice: Notice | None) -> DrainPlan | None:
        """The last save of this process. With a notice, only what is durable in time."""
        line, now = self._parts.line, self._parts.clock.monotonic_us()
        if notice is None and self._repeated is not None:
            self._compare_what_was_repeated()
        if notice is None:
            notice = self._leaving_for = self._saves.commit_to_the_end(self._check)
        if notice is None:
            self._wait_for_the_commit()
            if self._checks is not None:
                self._checks.finished(self.version)
            line.say(
                f"{'stopped' if self._stopping else 'done'} at step {self.step:,}, committed as version "
                f"{self.version}"
            )
            return None
        if line.wanted:
            self._show(now, total, notice.reason)
        plan = self._saves.plan(notice, now, self._step_us)
        try:
            with self._saves.reporting_outage():
                if plan.save in (Save.DELTA, Save.FULL):
                    self._saves.commit_now()
                elif plan.save is Save.WAIT:
                    self._saves.collect()
        except (*NOT_SAVED, LeaseLost, Fenced) as failure:
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
        position = self._position
        position.version, position.committed = self._parts.ranks.share((position.version, position.committed))

    def close(self, *, finished: bool = True, listening: bool = False) -> None:
        """Give everything back. What is committed is committed; a step that was not finished is not."""
        if self._pid != os.getpid():
            return  # a forked child: nothing of this is its own
        if self._closed:
            self._parts.notice_bus.close()
            return
        self._closed = True
        parts = self._parts
        try:
            with contextlib.suppress(SubletError, OSError):
                self._saves.collect()
            if not finished and self.step >= self.resumed_at:
                at = self.step + 1
                parts.line.say(f"left in the middle of step {at:,}: step {self.committed:,} is committed")
        finally:
            self._saves.close()
            parts.ranks.close()
            self._working.close()
            parts.line.close()
            parts.report(self.step, self.committed, unfinished=listening)
            parts.report_away("")
            try:
                parts.release()
            finally:
                if not listening:
                    parts.notice_bus.close()

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
        return self._effects.do(number, key, function)

    # showing

    def _show(self, now: int, total: int | None, notice: str = "") -> None:
        done = self.step - self.resumed_at
        elapsed = max(1, now - self._began_at)
        committed_at = self._position.committed_at
        # Work not committed yet counts here: it is lost only if something happens.
        useful = self._position.useful_us + self._saves.waiting_us
        self._parts.line.show(
            now,
            step=self.step,
            total=total,
            committed=self.committed,
            committed_ago_us=None if committed_at is None else now - committed_at,
            steps_per_s=done * SECOND_US / elapsed,
            goodput=min(1.0, useful / elapsed),
            lease_s=self._parts.lease.seconds_left if self._parts.lease is not None else 0.0,
            log=self._log.numbers(),
            notice=notice,
        )
