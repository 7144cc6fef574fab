"""A notebook's GPU: the lease its cells share, and one cell on it.

Rules of this file:
- The lease outlives the cell: it is renewed while a cell computes, kept warm until its ttl runs out, and the
  next cell takes a new one. Whatever ends it, the notebook's own process and its variables stay.
- A cell that found its lease gone before it began runs on a new one. A cell that lost it while running is not
  run again: only its author knows whether that is safe.
- The ledger decides what is billed: each cell's line ends at its clock, and the lines of a lease add up to
  its usage.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from sublet.core.cells.costs import CellCost, NotebookCosts
from sublet.core.errors import (
    BadInput,
    Disconnected,
    GpuSessionEnded,
    GpuUnavailable,
    LeaseLost,
    NotDurable,
    SubletError,
    WorkerLost,
)
from sublet.core.leasing.lease import EndReason, LeaseState
from sublet.core.notice import Notice
from sublet.leases.lease import EXPLAIN_PATIENCE_US, RELEASE_PATIENCE_US
from sublet.notebook.cells import process_state
from sublet.notebook.cells.keep import KeptState, KeptValues
from sublet.notebook.cells.messages import RESULT, CellOrder, CellReport, SaveAnswer, Snapshot
from sublet.notebook.cells.process_state import NotebookSurroundings, surroundings
from sublet.notebook.cells.variable_sync import (
    CellPayload,
    SyncedVariables,
    module_or_late,
    pack_there,
    unpack_values,
)
from sublet.notebook.options import CellOptions
from sublet.ports.clock import Clock
from sublet.ports.held_lease import HeldLease, LeaseLook
from sublet.ports.ledger import Answer
from sublet.ports.worker import Screen

#: How long an unreachable ledger is asked before the cell gives up, and the pause between two questions. One
#: question is itself patient.
GIVE_UP_SECONDS = 3.0
PAUSE_SECONDS = 0.2
#: After a loss: how long to wait for a save that was under way to say whether it counted.
SETTLE_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSource:
    """A cell as the notebook has it."""

    body: str
    header: str
    count: int
    reads: tuple[str, ...]
    front: str
    name: str
    texts: Callable[[Iterable[str]], Mapping[str, tuple[int, str]]]  # of the notebook's cells, by file name
    colors: str = ""


@dataclass(slots=True, kw_only=True)
class CellOutcome:
    """The outcome of a cell, for display."""

    report: CellReport | None = None
    line: CellCost | None = None
    kept: KeptValues | None = None
    result: Any = None
    stayed: dict[str, str]
    before: str = ""  # why the session before it ended, when this cell had to take a new one
    error: SubletError | None = None  # lost, or not saved; what the cell itself raised is in the report


@dataclass(frozen=True, slots=True, kw_only=True)
class _CellRun:
    """One run of a cell, and the state before it."""

    wish: CellOptions
    source: CellSource
    space: MutableMapping[str, Any]
    lease: HeldLease
    before: str
    began: int
    kept_before: KeptValues | None
    written_before: int


class TakesLease(Protocol):
    """Leases a GPU for these options, held by a worker and renewed; may wait for one, or refuse."""

    def __call__(self, wish: CellOptions) -> HeldLease: ...


class NotebookLease:
    """The lease of one notebook, and the cells that run on it."""

    def __init__(
        self,
        take: TakesLease,
        look: LeaseLook,
        clock: Clock,
        kept: KeptState,
        run_inside: Callable[[CellOrder], CellReport],
    ) -> None:
        self._take = take
        self._look = look
        self._clock = clock
        self.kept = kept
        self._run_inside = run_inside
        self._place: tuple[object, ...] = ()
        self._synced = SyncedVariables()
        self._unsettled: dict[str, None] = {}  # leases whose end is not in the account yet
        self._lost_names: dict[str, str] = {}
        self._drawn: Mapping[str, bytes] = {}  # the notebook's random states when both sides had the same
        self._offered: Mapping[str, bytes] = {}  # those the cell begins with
        self._random_there: Mapping[str, bytes] = {}
        self._around = NotebookSurroundings()  # as the worker was last told
        self._pid = os.getpid()
        self._screen: Screen | None = None  # of the cell that runs
        self.lease: HeldLease | None = None
        self.account = NotebookCosts()
        self.on_change: Callable[[], None] = lambda: None  # called from any thread

    # the lease

    def _serves(self, wish: CellOptions) -> bool:
        lease = self.lease
        if lease is None:
            return False
        if self._pid != os.getpid():
            self.lease, self._pid = None, os.getpid()  # in a forked child it is the parent's
            return False
        if lease.status != "active" or self._place != wish.place:
            self.release()
            return False
        return True

    def _lease_for(self, wish: CellOptions) -> HeldLease:
        give_up = time.monotonic() + GIVE_UP_SECONDS
        while True:
            self._around = surroundings()  # a worker begins with them
            try:
                lease = self._take(wish)
                break
            except Disconnected as e:
                if time.monotonic() >= give_up:
                    raise GpuUnavailable(f"GPU unavailable: {e.message}. Nothing was run.") from e
                time.sleep(PAUSE_SECONDS)
        self.lease, self._place = lease, wish.place
        self.account.begin(
            lease.id,
            granted_at=lease.granted_at,
            device=", ".join(lease.devices),
            devices=len(lease.devices),
            vram_bytes=lease.vram_bytes,
        )
        self._unsettled[lease.id] = None
        lease.on_notice(lambda notice: self._heard(lease, notice))
        lease.keep_warm(lambda: self.on_change())
        return lease

    def release(self, *, patience_us: int = RELEASE_PATIENCE_US) -> None:
        """Releases the GPU now. The notebook's variables stay; values that were only in the worker are
        lost."""
        lease, self.lease = self.lease, None
        if lease is not None:
            self._lost_names.update(dict.fromkeys(self._synced.stayed, lease.id))
            self._synced = SyncedVariables()
            with contextlib.suppress(SubletError):
                lease.release(patience_us=patience_us)
        self.settle_account()
        self.on_change()

    @property
    def computing(self) -> bool:
        """Whether a cell is running."""
        return self._screen is not None

    @property
    def only_there(self) -> tuple[str, ...]:
        """Names whose values could not come back and exist only in the worker."""
        return tuple(sorted(self._synced.stayed)) if self.lease is not None else ()

    def settle_account(self) -> None:
        """Enters the ends of finished leases into the account."""
        for lease_id in list(self._unsettled):
            if self.lease is not None and self.lease.id == lease_id and self.lease.status == "active":
                continue
            try:
                row = self.look(lease_id).lease
            except Disconnected:
                return  # the others will not be found either, and a later call does it
            except SubletError:
                continue
            else:
                if row.state is LeaseState.ENDED:
                    self.account.lease_ended(lease_id, row.ended_at)
                    del self._unsettled[lease_id]

    def look(self, lease_id: str) -> Answer:
        """Looks a lease up with little patience, because the line under a cell must not wait."""
        return self._look(lease_id, patience_us=EXPLAIN_PATIENCE_US)

    # one cell

    def run(
        self, wish: CellOptions, source: CellSource, space: MutableMapping[str, Any], screen: Screen
    ) -> CellOutcome:
        before = ""
        while True:
            last = self.lease
            warm = self._serves(wish)
            if last is not None and not warm:
                before = self._why_ended(last)
            step = self._synced if warm else SyncedVariables()
            # Before anything is leased: a variable that cannot travel must not cost a GPU-second.
            taken = source.reads if wish.takes is None else wish.takes
            payload = step.payload(space, (*taken, *wish.keep), alone=wish.by_name)
            lease = self.lease if warm else self._lease_for(wish)
            assert lease is not None
            if wish.warm_us is not None:
                lease.warm_us = wish.warm_us
            self._synced = step
            trip = _CellRun(
                wish=wish,
                source=source,
                space=space,
                lease=lease,
                before=before,
                began=self._clock.monotonic_us(),
                kept_before=self.kept.last,
                written_before=self.kept.bytes_written,
            )
            try:
                report = self._go(trip, payload, screen, fresh=not warm)
            except LeaseLost as lost:
                begun = isinstance(lost, WorkerLost) and lost.begun
                if warm and not begun:
                    self.release()
                    continue
                return self._loss(trip, lost.reason if isinstance(lost, WorkerLost) else lost.message)
            except BaseException:
                # Interrupted twice, or its output could not be shown: the worker's state is unknown.
                self._enter(CellOutcome(stayed={}), trip, 0)
                self.release()
                raise
            step.took(payload, watched=not wish.by_name)
            return self._after(trip, report)

    def _go(self, trip: _CellRun, payload: CellPayload, screen: Screen, *, fresh: bool) -> CellReport:
        wish, source, lease, around = trip.wish, trip.source, trip.lease, surroundings()
        order = CellOrder(
            source=source.body,
            header=source.header,
            name=source.name,
            texts=source.texts(payload.files),
            count=source.count,
            front=source.front,
            colors=source.colors,
            values=payload.values,
            forget=payload.forget,
            watch=tuple(name for name in payload.watch if not wish.by_name or name in wish.keep),
            out=wish.gives,
            keep=wish.keep,
            every_us=wish.every_us,
            random=self._random(fresh),
            moved=around.since(self._around) if lease.here else None,
        )
        self._screen = screen
        try:
            self.on_change()
            report = lease.run_shown(
                self._run_inside, (order,), screen, lambda asked: self._answer(asked, lease)
            )
            assert isinstance(report, CellReport)
            self._around = around
            if report.random is None:
                self._drawn = self._offered
            return report
        finally:
            self._screen = None

    def _random(self, fresh: bool) -> Mapping[str, bytes] | None:
        """The random states to send, if they changed: a seed set in a normal cell counts in the next `%%gpu`
        cell."""
        here = self._offered = process_state.take_random_states()
        if not fresh and here == self._drawn:
            return None
        # States of libraries this process does not use, or has no device for, are only passed on.
        return {**self._random_there, **here}

    def _put_random(self, states: Mapping[str, bytes]) -> None:
        self._random_there = process_state.put_what_is_in_use(states)
        self._drawn = process_state.take_random_states()

    def _heard(self, lease: HeldLease, notice: Notice) -> None:
        """Called from a thread of the keeper when the GPU will go, or the ledger does not answer."""
        if lease.status == "revoking":
            lease.warn_worker()
        left = notice.seconds_left(self._clock.monotonic_us())
        screen = self._screen
        if screen is not None and left > 0:
            ends = "ends" if lease.status == "revoking" else "may end"
            with contextlib.suppress(Exception):
                screen.text("stderr", f"GPU session {ends} in {left:.0f} s ({notice.reason}).\n")
        self.on_change()

    def _answer(self, asked: Any, lease: HeldLease) -> SaveAnswer:
        """Saves a snapshot from inside the cell. When the GPU is going it is saved at once, and the cell ends
        there."""
        assert isinstance(asked, Snapshot)
        try:
            values, random = unpack_values(asked.values), asked.random
            if lease.status == "revoking":
                self.kept.save(values, random, lease)
                return SaveAnswer(stop=lease.notice.reason if lease.notice else "revoked")
            return SaveAnswer(failed=self.kept.save_behind(values, random, lease))
        except Exception as e:
            return SaveAnswer(failed=e.message if isinstance(e, SubletError) else f"{type(e).__name__}: {e}")

    # after it

    def _after(self, trip: _CellRun, report: CellReport) -> CellOutcome:
        ran = CellOutcome(report=report, stayed=dict(report.stayed), before=trip.before)
        if report.stopped:
            ran.error = self._ended(report.stopped, trip)
            self._go_on_from_kept(trip)
        else:
            try:
                report, values = self._made_here(report, trip.lease)
                ran.report, ran.stayed = report, dict(report.stayed)
                ran.result = self._bring_back(report, values, trip.space)
            except BaseException:
                # Interrupted or lost in the middle: the notebook lacks what the worker has, and nobody knows
                # what that is.
                self._enter(ran, trip, report.launches)
                self.release()
                raise
            ran.error = self._keep(trip, report) if trip.wish.keep else None
        failed = self.kept.settle()
        if failed and ran.error is None:
            ran.error = NotDurable(f"what --keep names was not saved: {failed}")
        self._enter(ran, trip, report.launches)
        if trip.wish.release or trip.lease.status != "active":
            self.release()
            ran.line = self.account.line(trip.lease.id, trip.source.count)
        self.on_change()
        return ran

    def _loss(self, trip: _CellRun, why: str) -> CellOutcome:
        self.kept.settle(SETTLE_SECONDS)
        ran = CellOutcome(stayed={}, before=trip.before, error=self._ended(why, trip))
        self._go_on_from_kept(trip)
        self._enter(ran, trip, 0)
        self.release(patience_us=EXPLAIN_PATIENCE_US)
        ran.line = self.account.line(trip.lease.id, trip.source.count)
        return ran

    def _made_here(self, report: CellReport, lease: HeldLease) -> tuple[CellReport, dict[str, Any]]:
        """Unpacks the report. A value whose module exists only in the worker stays there; all others come
        back."""
        try:
            return report, unpack_values(report.values)
        except Exception as e:
            stayed, fine = dict(report.stayed), []
            try:
                alone = lease.run(pack_there, [(name,) for name in report.names])
                for name, packed in zip(report.names, alone, strict=True):
                    try:
                        unpack_values(packed)
                        fine.append(name)
                    except Exception as of_one:
                        stayed[name] = f"it cannot be made here: {type(of_one).__name__}: {of_one}"
                values = unpack_values(lease.run(pack_there, [fine])[0])
            except SubletError:
                raise BadInput(
                    f"what the cell made cannot be brought back: {type(e).__name__}: {e}",
                    remedy="install here what it needs, or bring back something plainer with --out",
                ) from e
            return replace(report, names=tuple(fine), stayed=stayed, result=False), values

    def _bring_back(self, report: CellReport, values: dict[str, Any], space: MutableMapping[str, Any]) -> Any:
        result = values.pop(RESULT, None)
        values.update({name: module_or_late(module) for name, module in report.modules.items()})
        for name, value in values.items():
            space[name] = value
            self._lost_names.pop(name, None)
        self._synced.came_back(values)
        for name in report.gone:
            space.pop(name, None)
        if report.random is not None:
            self._put_random(report.random)
        self._synced.forgets(report.gone)
        self._synced.stays(report.stayed, space)
        return result

    def _keep(self, trip: _CellRun, report: CellReport) -> SubletError | None:
        """After the cell. One that failed may have left things half done: its last point is what counts."""
        if report.failure is not None or report.random is None:
            return None
        keep, space = trip.wish.keep, trip.space
        missing = [name for name in keep if name not in space]
        if missing:
            return NotDurable(
                f"--keep names {', '.join(missing)}, which neither the notebook nor the cell has defined; "
                "nothing was saved",
                remedy="define it, or leave it out of --keep",
            )
        only_there = [f"{name} ({report.stayed[name]})" for name in keep if name in report.stayed]
        if only_there:  # what the notebook has under the name is from before the cell
            return NotDurable(
                f"the cell ran, but what --keep names was not saved: {', '.join(only_there)} is only in the "
                "GPU worker",
                remedy="keep something that can come back to the notebook: tensors, arrays, numbers, texts, "
                "what has a state_dict",
            )
        try:
            self.kept.save({name: space[name] for name in keep}, report.random, trip.lease)
        except SubletError as e:
            return NotDurable(
                f"the cell ran, but what --keep names was not saved: {e.message}", remedy=e.remedy
            )
        return None

    def _go_on_from_kept(self, trip: _CellRun) -> None:
        """The kept names are what was last saved: what the next cell goes on from."""
        last = self.kept.last
        if last is not None and last is not trip.kept_before:
            trip.space.update(last.values)
            self._put_random(last.random)

    def _why_ended(self, lease: HeldLease) -> str:
        """Of a session between two cells, in words; '' when it was given back on purpose."""
        if lease.yielded:
            return lease.yielded
        with contextlib.suppress(SubletError):
            row = self.look(lease.id).lease
            if row.reason is not None and row.reason is not EndReason.RELEASED:
                return f"{row.reason.value}: {row.detail}"
        return ""

    def _ended(self, why: str, trip: _CellRun) -> GpuSessionEnded:
        last = self.kept.last
        if last is None:
            saved = "Nothing was kept."
        else:
            ago = max(0.0, time.time() - last.saved_at)
            when = time.strftime("%H:%M:%S", time.localtime(last.saved_at))
            which = "" if last is not trip.kept_before else ", before this cell"
            saved = (
                f"Saved: {last.names} at {when} ({ago:.0f} s ago{which}), version {last.version} of "
                f"{self.kept.job}."
            )
        return GpuSessionEnded(f"GPU session ended ({why}). Rerun this cell to reacquire. {saved}")

    def _enter(self, ran: CellOutcome, trip: _CellRun, launches: int) -> None:
        """Enters the cell's line into the account, at the ledger's clock."""
        ran.kept = self.kept.last if self.kept.last is not trip.kept_before else None
        try:
            found = self.look(trip.lease.id)
        except SubletError:
            return  # the rest is entered when the lease's end is known
        row = found.lease
        ran.line = self.account.cell_ended(
            trip.lease.id,
            row.ended_at if row.state is LeaseState.ENDED else found.at,
            cell=trip.source.count,
            busy_us=self._clock.monotonic_us() - trip.began,
            launches=launches,
            checkpoint_bytes=self.kept.bytes_written - trip.written_before,
        )

    def hint(self, name: str) -> str:
        """Why a name that the cell did not find may be missing, or ''."""
        lease_id = self._lost_names.get(name)
        return (
            f"{name} was only in the worker of lease {lease_id}, which is over; make it again"
            if lease_id
            else ""
        )
