"""A drill: run a command undisturbed, run it again under losses, and compare what the two ledgers and stores
ended with.

Rules of this file:
- Both runs have a home, ledger, store and host name of their own in a scratch folder: nothing of the user's
  is touched.
- Decisions (when a fault strikes, what counts as different) are in `core.runs.drill`. This file acts: start,
  watch, strike, start again.
- The seed decides kinds and shares; the moments follow from the steps the undisturbed run made and the time
  it was measured to take.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import re
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sublet.core.checkpoints.checkpoint import content_digest
from sublet.core.errors import BadInput, LeaseLost, NotFound, SubletError
from sublet.core.journal.step_audit import Proof
from sublet.core.leasing.lease import HOLDING, EndReason, LeaseRecord
from sublet.core.leasing.tenancy import Tenant
from sublet.core.runs.drill import PPM, DrillFault, DrillLoss, EndState, delay_us, differences, place
from sublet.core.values import SECOND_US
from sublet.leases.warden.warden_process import warden_state
from sublet.machine import lease_environment
from sublet.ports.ledger import Ledger
from sublet.runs.drilled_command import DrilledCommand, last_lines
from sublet.settings import Settings, load_settings
from sublet.store.load.comparing import differing
from sublet.store.upkeep.lineage import is_digest
from sublet.wiring import checkpoints, open_ledger

#: How often a run's page and its process are looked at.
LOOK_SECONDS = 0.003
#: One fault in so many falls while the run still starts.
EARLY_ONE_IN = 5
GRACE_US = 5 * SECOND_US
#: A stopped run is left alone until its lease is over, but not for longer than this: then the lease is taken
#: from it.
LONGEST_STOP_SECONDS = 12.0
#: How long a run that was struck may take to end.
LEAVING_SECONDS = 45.0
WARDEN_LEAVES_SECONDS = 5.0
#: A run that fails by itself so often without a step in between will not finish.
MOST_FAILURES = 8
#: The most parts to name of a state that differs.
MOST_PARTS = 5
#: The part of a state that holds the random generators the program did not make itself.
_RANDOM = re.compile(r"ranks\.\d+\.random(\.|$)")
_HANDED_DOWN = ("SUBLET_PRELOAD", "SUBLET_TENANT", "SUBLET_GRACE_SECONDS", "SUBLET_DISABLE")

Say = Callable[[str], None]


def draw(seed: int, kills: int, kinds: Sequence[str]) -> list[DrillFault]:
    """Draw the faults of a drill, each kind about equally often."""
    chance = random.Random(seed)
    order: list[str] = []
    while len(order) < kills:
        order += chance.sample(list(kinds), len(kinds))
    graces = [0, GRACE_US]
    chance.shuffle(graces)
    found = []
    for number, kind in enumerate(order[:kills]):
        early = chance.randrange(EARLY_ONE_IN) == 0
        share = chance.randrange(PPM)
        grace = graces[order[:number].count("revoke") % 2] if kind == "revoke" else 0
        found.append(DrillFault(kind=kind, early=early, share_ppm=share, grace_us=grace))
    return found


class _DrillHome:
    """A home for one of the two runs, and what is known of the run in it."""

    def __init__(self, folder: Path, base: Settings) -> None:
        folder.mkdir(parents=True)
        self.log = folder / "output.log"
        self.settings = load_settings(
            home=str(folder / "home"),
            ledger=f"sqlite:{folder}/home/ledger.db",
            store=f"dir:{folder}/home/store",
            devices=base["devices"],
            # Devices and their memory are found machine-wide, by the host's name.
            host=f"{base['host'][:40]}-{secrets.token_hex(3)}",
        )
        steps = folder / "steps"
        self.page = lease_environment.open_page(steps, create=True)
        environment = {
            k: v for k, v in os.environ.items() if not k.startswith("SUBLET_") or k in _HANDED_DOWN
        }
        for name in ("home", "ledger", "store", "devices", "host", "tenant"):
            environment[f"SUBLET_{name.upper()}"] = self.settings[name]
        # The drill compares the ends: that no resume stops the command before leaves it to say what is lost.
        environment["SUBLET_VERIFY"] = "never"
        self.environment = environment | {lease_environment.STEPS_VARIABLE: str(steps)}
        self.ledger.add_tenant(Tenant(name=self.settings["tenant"]), actor="drill", exist_ok=True)

    @property
    def ledger(self) -> Ledger:
        return open_ledger(self.settings)

    def start(self, command: Sequence[str]) -> DrilledCommand:
        lease_environment.write_steps(self.page, 0, 0)
        return DrilledCommand(command, self.environment, self.log)

    def held(self) -> list[LeaseRecord]:
        return [a.lease for a in self.ledger.leases() if a.lease.state in HOLDING]

    def stepped(self) -> bool:
        """Whether this process, since its start, began a step."""
        working_on, committed = lease_environment.read_steps(self.page)
        return working_on > committed

    def ends(self) -> dict[str, EndState]:
        found: dict[str, EndState] = {}
        with checkpoints(settings=self.settings) as store:
            for head in self.ledger.heads():
                content = head.digest
                if is_digest(head.digest):
                    # A digest need not be of a checkpoint: whoever commits by hand may put there what it
                    # likes.
                    with contextlib.suppress(NotFound, SubletError):
                        content = content_digest(store.read_manifest(head.digest))
                found[head.job] = EndState(step=head.step, content=content)
        return found

    def close(self) -> None:
        """Its warden leaves before its folder does."""
        self.page.close()
        deadline = time.monotonic() + WARDEN_LEAVES_SECONDS
        pid = warden_state(self.settings)[2]
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        while warden_state(self.settings)[0] and time.monotonic() < deadline:
            time.sleep(0.02)


@dataclass(slots=True)
class Drilled:
    """What a drill found."""

    seed: int
    wanted: int
    losses: list[DrillLoss] = field(default_factory=list)
    undisturbed_us: int = 0
    disturbed_us: int = 0
    start_us: int = 0
    jobs: dict[str, EndState] = field(default_factory=dict)
    different: dict[str, str] = field(default_factory=dict)
    parts: dict[str, list[str]] = field(default_factory=dict)  # of a job whose state is different
    unseeded: list[str] = field(default_factory=list)  # jobs alike in everything but random generators
    proofs: list[Proof] = field(default_factory=list)

    @property
    def alike(self) -> bool:
        return not self.different

    @property
    def proven(self) -> bool:
        return all(proof.proven for proof in self.proofs)


def drill(
    command: Sequence[str],
    folder: Path,
    *,
    kills: int,
    seed: int,
    kinds: Sequence[str],
    timeout_us: int,
    say: Say,
) -> Drilled:
    """Both runs, and the comparison. `BadInput` when the command cannot be drilled at all."""
    base = load_settings()
    quiet, rough = _DrillHome(folder / "undisturbed", base), _DrillHome(folder / "disturbed", base)
    found = Drilled(seed=seed, wanted=kills)
    try:
        _undisturbed(quiet, command, found, timeout_us, say)
        _Storm(rough, command, found, draw(seed, kills, kinds), timeout_us, say).run()
        _compare(quiet, rough, found)
    finally:
        for place in (quiet, rough):
            place.close()
    return found


def _undisturbed(
    place: _DrillHome, command: Sequence[str], found: Drilled, timeout_us: int, say: Say
) -> None:
    say("undisturbed run …")
    began = time.monotonic()
    run = place.start(command)
    first = 0.0
    try:
        for now in _looking(began, timeout_us, run, place, "undisturbed"):
            if not first and place.stepped():
                first = now
    finally:
        code = run.exit_code
        run.end()
    ended = time.monotonic()
    if code:
        raise BadInput(
            f"the command failed with exit code {code}, undisturbed:\n{last_lines(place.log)}",
            remedy="a drill needs a command that finishes by itself; run it alone first",
        )
    found.jobs = place.ends()
    if not found.jobs:
        raise BadInput(
            "the command committed nothing: there is nothing a loss could take back, and nothing to compare",
            remedy="use sublet.train (or sublet.run_step) in it; the drill sets SUBLET_HOME, which it "
            "must not override",
        )
    found.undisturbed_us = _us(ended - began)
    # A command that does not report its steps counts as working from its first moment.
    found.start_us = _us(first - began) if first else 0
    steps = ", ".join(f"{job} at step {end.step}" for job, end in found.jobs.items())
    say(f"undisturbed run done in {(ended - began):.1f} s: {steps}")


def _us(seconds: float) -> int:
    return int(seconds * SECOND_US)


def _looking(
    began: float, timeout_us: int, run: DrilledCommand, place: _DrillHome, what: str
) -> Iterator[float]:
    """Yield the time again and again while the command runs."""
    while run.exit_code is None:
        now = time.monotonic()
        if now - began > timeout_us / SECOND_US:
            raise BadInput(
                f"the {what} run did not finish within {timeout_us // SECOND_US} s:\n{last_lines(place.log)}",
                remedy="give it longer with --timeout, or less to do",
            )
        yield now
        time.sleep(LOOK_SECONDS)


@dataclass(slots=True)
class _Aim:
    """When a fault strikes: at an instant, or so long after a step began."""

    at: float | None = None
    step: int = 0
    wait: float = 0.0

    def is_due(self, now: float, page: mmap.mmap) -> bool:
        if self.at is None and lease_environment.read_steps(page)[0] >= self.step:
            self.at = now + self.wait
        return self.at is not None and now >= self.at


class _Storm:
    """The disturbed run: lives that follow each other, each ended by a fault, until one comes to its end."""

    def __init__(
        self,
        at: _DrillHome,
        command: Sequence[str],
        found: Drilled,
        faults: Sequence[DrillFault],
        timeout_us: int,
        say: Say,
    ) -> None:
        self._place, self._command, self._found = at, command, found
        self._faults = list(faults)
        self._timeout_us, self._say = timeout_us, say
        self._lost_at = 0.0
        self._failures = 0

    def run(self) -> None:
        self._say(f"disturbed run, {len(self._faults)} faults …")
        began = time.monotonic()
        run: DrilledCommand | None = None
        try:
            while True:
                if run is None:
                    run = self._place.start(self._command)
                struck = self._live(run, began)
                if not struck and run.exit_code is None:
                    continue  # it lost its lease and went on under another
                code = run.exit_code
                run.end()
                if code == 0 and (not struck or self._finished()):
                    break
                run = None
                if not struck:
                    self._failed(code)
        finally:
            if run is not None:
                self._free(run)
        self._found.disturbed_us = _us(time.monotonic() - began)

    def _live(self, run: DrilledCommand, began: float) -> bool:
        """Wait until it ends by itself (False) or by a fault (True). False while it runs: it went on under
        another lease."""
        born, stepped = time.monotonic(), False
        aim: _Aim | None = None
        for now in _looking(began, self._timeout_us, run, self._place, "disturbed"):
            if not stepped and self._place.stepped():
                stepped = True
                self._failures = 0
                self._is_back(now)
            if not self._faults:
                continue
            fault = self._faults[0]
            if aim is None and (fault.early or stepped or not self._found.start_us):
                aim = self._aim(fault, now if stepped else born)
            late = fault.early and stepped  # it started faster than the one that was measured
            if aim is not None and (late or aim.is_due(now, self._place.page)):
                leases = self._place.held()
                if fault.kind in ("revoke", "stop") and not leases:
                    continue  # nothing to lose yet
                return self._strike(run, fault, leases)
        return False

    def _aim(self, fault: DrillFault, since: float) -> _Aim:
        ends, left = self._found.jobs, len(self._faults)
        work_us = max(0, self._found.undisturbed_us - self._found.start_us)
        working_on, _ = lease_environment.read_steps(self._place.page)
        if len(ends) == 1 and working_on and not fault.early:
            (end,) = ends.values()
            step, part = place(fault, done=working_on - 1, last=end.step, faults_left=left)
            return _Aim(step=step, wait=work_us * part / (PPM * SECOND_US * max(1, end.step)))
        done = {head.job: head.step for head in self._place.ledger.heads()}
        undone = sum(max(0, end.step - done.get(job, 0)) for job, end in ends.items())
        wait_us = delay_us(
            fault,
            start_us=self._found.start_us,
            work_us=work_us,
            left_ppm=undone * PPM // max(1, sum(end.step for end in ends.values())),
            faults_left=left,
        )
        return _Aim(at=since + wait_us / SECOND_US)

    def _finished(self) -> bool:
        steps = {head.job: head.step for head in self._place.ledger.heads()}
        return all(steps.get(job, 0) >= end.step for job, end in self._found.jobs.items())

    # striking

    def _strike(self, run: DrilledCommand, fault: DrillFault, leases: Sequence[LeaseRecord]) -> bool:
        holders = [lease.holder.pid for lease in leases if lease.holder.pid]
        self._lost_at = time.monotonic()
        gone = {lease.id for lease in leases}
        if fault.kind == "kill":
            run.signal(signal.SIGKILL, holders)
        elif fault.kind == "term":
            run.signal(signal.SIGTERM, holders)
        elif fault.kind == "revoke":
            self._revoke(leases, fault.grace_us)
        else:
            run.signal(signal.SIGSTOP, holders)
            try:
                self._outlast(leases)
            finally:
                run.signal(signal.SIGCONT, holders)
        ended = self._await_end(run, fault, gone)
        if ended and run.exit_code == 0 and self._finished():
            return True  # it was done before the fault came
        self._faults.pop(0)
        self._note(fault, run.exit_code if ended else None)
        return ended

    def _revoke(self, leases: Sequence[LeaseRecord], grace_us: int) -> None:
        for lease in leases:
            with contextlib.suppress(LeaseLost):
                self._place.ledger.revoke(
                    lease.id, reason=EndReason.REVOKED, detail="drill", grace_us=grace_us, actor="drill"
                )

    def _outlast(self, leases: Sequence[LeaseRecord]) -> None:
        """Wait until the leases of the stopped run are over; those that would last too long are revoked."""
        deadline = time.monotonic() + LONGEST_STOP_SECONDS
        now = self._place.ledger.now()
        if any(lease.expires_at - now > LONGEST_STOP_SECONDS * SECOND_US for lease in leases):
            self._revoke(leases, 0)
        ids = {lease.id for lease in leases}
        while time.monotonic() < deadline and any(lease.id in ids for lease in self._place.held()):
            time.sleep(LOOK_SECONDS * 5)
        time.sleep(0.1)

    def _await_end(self, run: DrilledCommand, fault: DrillFault, gone: set[str]) -> bool:
        """True when the command ended; False when it lives on under other leases than those it lost."""
        deadline = time.monotonic() + LEAVING_SECONDS
        while run.exit_code is None:
            held = {lease.id for lease in self._place.held()}
            if held and not held & gone:
                lease_environment.write_steps(self._place.page, 0, 0)
                return False
            if time.monotonic() > deadline:
                self._say(f"{fault.kind}: it did not leave within {LEAVING_SECONDS:.0f} s, and is killed")
                self._free(run)
                break
            time.sleep(LOOK_SECONDS)
        return True

    def _free(self, run: DrilledCommand) -> None:
        run.signal(signal.SIGKILL, [lease.holder.pid for lease in self._place.held() if lease.holder.pid])
        run.end()

    def _note(self, fault: DrillFault, code: int | None) -> None:
        working_on, committed = lease_environment.read_steps(self._place.page)
        heads = self._place.ledger.heads()
        if len(heads) == 1:
            committed = heads[0].step  # what the process did not live to report
        loss = DrillLoss(
            kind=fault.kind,
            grace_us=fault.grace_us,
            working_on=working_on,
            committed=committed,
            exit_code=code,
        )
        self._found.losses.append(loss)
        grace = (
            f" with {fault.grace_us / SECOND_US:.0f} s" if fault.kind == "revoke" and fault.grace_us else ""
        )
        if working_on > committed:
            where = f"in step {working_on}"
        else:
            where = "between steps" if working_on else "while it started"
        self._say(
            f"{len(self._found.losses):>3}/{self._found.wanted} {fault.kind}{grace} "
            f"{where}: step {committed} is committed, {loss.wasted} wasted"
        )

    def _is_back(self, now: float) -> None:
        losses = self._found.losses
        if losses and losses[-1].back_us is None:
            last = losses[-1]
            losses[-1] = replace(last, back_us=_us(now - self._lost_at))

    def _failed(self, code: int | None) -> None:
        """Count a failure of its own: the lease before may not be over yet, or the command cannot run."""
        self._failures += 1
        if self._failures >= MOST_FAILURES:
            raise BadInput(
                f"the command failed {self._failures} times in a row with exit code {code}, though nobody "
                "struck it:\n"
                f"{last_lines(self._place.log)}",
                remedy="a command that is drilled must be able to start again after a loss",
            )
        time.sleep(0.2 * self._failures)


def _compare(quiet: _DrillHome, rough: _DrillHome, found: Drilled) -> None:
    ended = rough.ends()
    found.different = differences(found.jobs, ended)
    found.proofs = rough.ledger.prove()
    for job in list(found.different):
        quiet_end, rough_end = found.jobs.get(job), ended.get(job)
        if quiet_end is None or rough_end is None or quiet_end.step != rough_end.step:
            continue
        with checkpoints(settings=quiet.settings) as one, checkpoints(settings=rough.settings) as other:
            try:
                _look_closer(found, job, one.load(job), other.load(job))
            except SubletError as e:
                found.parts[job] = [e.message]


def _look_closer(found: Drilled, job: str, one: Any, other: Any) -> None:
    """Compare two states whose digests differ. A different layout is no difference, and neither are
    generators the program never seeded: anything drawn from them would differ too."""
    random_only = False
    shown: list[str] = []
    for part in differing(one, other):
        if _RANDOM.match(part.path):
            random_only = True
            continue
        shown.append(str(part))
        if len(shown) == MOST_PARTS:
            break
    if shown:
        found.parts[job] = shown
        return
    del found.different[job]
    if random_only:
        found.unseeded.append(job)
