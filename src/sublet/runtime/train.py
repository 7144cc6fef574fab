"""A training run: steps that count once, saves behind them, and a drain when the GPU goes.

Rules of this file:
- A step is counted when its body has come to its end. Whatever leaves the body in another way leaves the step uncounted, and nothing
  of the state it half changed is saved.
- Who may run the job is `runtime.runner`'s, when and how it is saved is `runtime.saves`'s: the loop asks between two steps.
- Whoever loses the lease can commit nothing more (S2). On a warning the loop ends before its next step, on all ranks after the same one.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NoReturn

from sublet.core.cadence import Cadence, Interval
from sublet.core.drain import DrainPlan, Save
from sublet.core.effect import Done, Duplicate
from sublet.core.errors import BadInput, Fenced, LeaseLost, SubletError
from sublet.core.exits import DRAINED_CODE
from sublet.core.notice import Notice
from sublet.core.values import SECOND_US, parse_duration
from sublet.runtime.capture import Captured, put_random
from sublet.runtime.logged import Log
from sublet.runtime.run_parts import Held, Parts, Reached
from sublet.runtime.runner import become_the_runner
from sublet.runtime.saves import NOT_SAVED, SAVE_PATIENCE_US, Saves

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


class Step:
    """One numbered unit of progress, while its body runs."""

    def __init__(self, run: Run, number: int) -> None:
        self._run = run
        self.number = number

    def log(self, **values: Any) -> None:
        """Numbers worth seeing: shown in the progress line, committed with the step."""
        self._run._log.put(values)

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
        self.resumed_at = 0
        self.preempted = False
        self._captured = captured
        self._parts = parts
        self._reached = Reached()
        self._log = Log()
        self._saves = Saves(
            name,
            captured,
            parts,
            self._reached,
            self._log,
            cadence=cadence,
            overlap=overlap,
            patience_us=save_patience_us,
        )
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
        return self._reached.step

    @property
    def committed(self) -> int:
        """The last one that is safe."""
        return self._reached.committed

    @property
    def version(self) -> int:
        """Of the checkpoint that holds it."""
        return self._reached.version

    @property
    def interval(self) -> Interval | None:
        """How often it saves, and why, when that is the run's to decide."""
        return self._saves.interval

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
        return min(1.0, self._reached.useful_us / elapsed) if elapsed else 0.0

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
        reached = self._reached
        reached.version, reached.committed = at
        reached.step = self.resumed_at = reached.committed
        self._saves.begin_after(reached.step)
        if self.version:
            tree = parts.store.load(self.name, version=self.version if parts.ranks.rank else None)
            self._captured.put(tree, parts.ranks.rank, parts.ranks.world)
            self._random = self._captured.random_of(tree, parts.ranks.rank, parts.ranks.world)
            reached.committed_at = parts.clock.monotonic_us()
            parts.line.say(f"resumes after step {self.step:,}, as committed at version {self.version}")
        parts.report(self.step, self.committed)

    def _own(self, lease: Held) -> None:
        notice = become_the_runner(self.name, lease, self._parts)
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
        self._reached.step += 1
        self._saves.count(took)
        self._step_us = took if self._step_us is None else (self._step_us * 7 + took) // 8

    def _boundary(self, total: int | None) -> str:
        """Between two steps: what came of the save behind, whether another is due, whether to leave. '' to go on."""
        now = self._parts.clock.monotonic_us()
        self._saves.see_the_last()
        if self._parts.line.due(now):
            self._show(now, total)
        over = (total is not None and self.step >= total) or bool(self._stopping)
        decides = self._parts.ranks.rank == 0  # which saves, and so knows when the next one is due
        due = decides and not over and self._saves.due(now)
        notice = self.notice
        # The largest of each: so the time that is left is the least, of whoever was warned.
        left = _NOT_WARNED if notice is None else now - notice.deadline_us
        left_any, due_any, over_any, committed = self._parts.ranks.agree(
            (left, due, over, self.committed if decides else 0)
        )
        if not decides:
            self._reached.committed = committed
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
            self._leaving_for = self._saves.warned_before_the_last_is_over()
            if self._leaving_for is not None:
                return "notice"
            self._saves.save_behind()
        return ""

    def save(self) -> None:
        """Commit what is done so far, now. Between two steps only: inside a body the state is half changed."""
        if self._iterating:
            raise BadInput(
                "inside the loop the step is not finished: its state must not be saved",
                remedy="lower every= to save more often",
            )
        if self._closed and self._saves.uncommitted:
            raise BadInput(
                f"this run is over, and a step may have been left in the middle: step {self.committed} is committed",
                remedy="end a loop with run.stop() instead of break; what is done is then committed",
            )
        self._saves.commit_now()

    # leaving

    def _leave(self, total: int | None, notice: Notice | None) -> DrainPlan | None:
        """The last save of this process. With a notice, only what is durable in time."""
        line, now = self._parts.line, self._parts.clock.monotonic_us()
        if notice is None:
            notice = self._leaving_for = self._saves.commit_to_the_end(self._check)
        if notice is None:
            self._wait_for_the_commit()
            line.say(
                f"{'stopped' if self._stopping else 'done'} at step {self.step:,}, committed as version {self.version}"
            )
            return None
        if line.wanted:
            self._show(now, total, notice.reason)
        plan = self._saves.plan(notice, now, self._step_us)
        try:
            with self._saves.telling_meanwhile():
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
        reached = self._reached
        reached.version, reached.committed = self._parts.ranks.share((reached.version, reached.committed))

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
        if self._saves.has_effect(full):
            raise BadInput(
                f"effect {key!r} was done in a step that is not committed yet: use one key for one thing"
            )
        self._saves.make_room_for_an_effect()
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
        self._saves.add_effect(done)
        return json.loads(done.outcome)  # what a repeat will get: the first time must not differ

    # showing

    def _show(self, now: int, total: int | None, notice: str = "") -> None:
        done = self.step - self.resumed_at
        elapsed = max(1, now - self._began_at)
        committed_at = self._reached.committed_at
        # Work not committed yet counts here: it is lost only if something happens.
        useful = self._reached.useful_us + self._saves.waiting_us
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


def _wants_the_key(function: Callable[..., Any]) -> bool:
    """One that binds a value by a default (`lambda n=n: ...`) must get that value."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False  # written in C, and does not say
    return any(p.default is p.empty and p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in parameters)
