"""The ledger: the transactional truth of who holds which GPU until when, and what has been committed.

Rules of this port:
- Every writing verb is one transaction: load, decide (a pure function of `core`), apply, journal.
- A refusal by rule is a `SubletError` and is itself journalled. `Disconnected` means the outcome of nothing is
  assumed; verbs are idempotent by their key (lease id, effect key), so repeating one is the way to find out.
- Durable verbs return when the decision survives a crash: acquire, revoke, reserve, commit, settings. The others
  (renew, release, heartbeats) may be lost in a crash, which only ever makes a lease end sooner or later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sublet.core.admission import Wait
from sublet.core.device import Device
from sublet.core.effect import Commit, Committed, Duplicate, Effect, Head, Reserved
from sublet.core.errors import SubletError
from sublet.core.journal import Entry, Fault
from sublet.core.lease import EndReason, Holder, Lease, Request
from sublet.core.meter import Usage
from sublet.core.policy import Policy
from sublet.core.schedule import Instruction
from sublet.core.tenancy import Tenant
from sublet.ports.bell import Bell
from sublet.ports.processes import Receipt


@dataclass(frozen=True, slots=True)
class LeaseKey:
    """What proves the holder: the id says which, the epoch says which grant of it, the secret says who."""

    lease_id: str
    epoch: int
    secret: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A lease as it stands now. `wait` is set while it waits."""

    lease: Lease
    at: int  # the ledger's clock when it answered
    wait: Wait | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundDevice:
    """A device as a probe saw it."""

    id: str
    driver: str
    ordinal: int
    name: str
    capacity_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TickResult:
    at: int
    instructions: tuple[Instruction, ...]
    next_look_at: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostView:
    """What a warden must enforce and watch on its host."""

    at: int
    leases: tuple[Lease, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Teardown:
    """A Receipt with what it is the Receipt of."""

    lease_id: str
    tenant: str
    at: int
    devices: tuple[str, ...]
    receipt: Receipt


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    rows: int
    strands: int
    head: str
    faults: tuple[Fault, ...]


class Ledger(Protocol):
    # leases: called by the holder's runtime
    def acquire(self, lease_id: str, secret: str, request: Request, holder: Holder) -> Answer:
        """Grant, wait, offer or refuse. Repeating it with the same id returns what the first call did."""

    def attend(self, lease_id: str, secret: str, *, explain: bool = True) -> Answer:
        """A waiter's sign of life; where it stands now, with position and ETA when it wants them."""

    def accept(self, lease_id: str, secret: str) -> Answer:
        """Take the smaller slice that is on offer."""

    def decline(self, lease_id: str, secret: str) -> Answer:
        """Leave the offer and keep the place in the waitlist."""

    def renew(self, key: LeaseKey, *, busy: bool = True, patience_us: int | None = None) -> Answer:
        """Extend by the ttl, or raise why not. Also how a waiter takes up its grant."""

    def renew_many(
        self, keys: Sequence[tuple[LeaseKey, bool]], *, patience_us: int | None = None
    ) -> list[Answer | SubletError]:
        """One transaction for all leases of a process."""

    def mark(self, key: LeaseKey, *, busy: bool) -> None:
        """The holder began or stopped working; only this decides who is idle."""

    def release(
        self, lease_id: str, secret: str, *, torn_down: bool = True, patience_us: int | None = None
    ) -> bool:
        """Give it back, or leave the waitlist. False when it was over already: releasing twice is fine. `torn_down` False leaves
        the slices where they are until a warden has ended the holder and settled it."""

    def look(self, lease_id: str) -> Answer:
        """Read one lease, without a lock."""

    # leases: called by operators, wardens and listings
    def revoke(self, lease_id: str, *, reason: EndReason, detail: str, grace_us: int, actor: str) -> Answer:
        """Take it back at now + grace."""

    def end(self, lease_id: str, epoch: int, *, reason: EndReason, detail: str) -> bool:
        """A warden says the holder is gone. False when it ended otherwise."""

    def settle(self, lease_id: str, epoch: int, receipt: Receipt) -> bool:
        """The teardown is over: slices go back if it was proven, else their devices are withheld."""

    def receipts(self, *, tenant: str = "", limit: int = 200) -> list[Teardown]:
        """For listings and audits: how teardowns went, newest first."""

    def tick(self, host: str = "") -> TickResult:
        """Run the schedule once and apply it. `host` is the caller's, which is alive by definition."""

    def host_view(self, host: str) -> HostView:
        """Leases and waiters whose holder or device is on the host and that are not settled."""

    def leases(self, *, live_only: bool = True, tenant: str = "", limit: int = 1000) -> list[Answer]:
        """For listings, newest first; waiters carry position and reason."""

    # devices: called by wardens and operators
    def report_host(self, host: str, devices: Sequence[FoundDevice], *, complete: bool = True) -> None:
        """What the host has; known devices it does not name are lost, returning ones are ready again."""

    def beat_host(self, host: str) -> None:
        """The warden lives."""

    def devices(self, host: str = "") -> list[Device]:
        """All devices, or those of one host."""

    def set_device(self, device_id: str, *, state: str, note: str, actor: str) -> Device:
        """Quarantine, drain, or make ready again."""

    # tenants: called by operators
    def tenants(self) -> list[Tenant]: ...
    def tenant(self, name: str) -> Tenant: ...
    def add_tenant(self, tenant: Tenant, *, actor: str, exist_ok: bool = False) -> Tenant: ...
    def set_tenant(
        self,
        name: str,
        *,
        actor: str,
        weight: int | None = None,
        max_leases: int | None = None,
        max_vram_bytes: int | None = None,
        max_waiting: int | None = None,
    ) -> Tenant: ...
    def remove_tenant(self, name: str, *, actor: str) -> None: ...

    # progress: called by a step
    def reserve(self, key: LeaseKey, *, effect: str, job: str, fingerprint: str) -> Reserved | Duplicate:
        """Say that this holder is about to do it."""

    def commit(self, key: LeaseKey, commit: Commit) -> Committed | Duplicate:
        """The one commit point: fence, head, effect, journal, together or not at all."""

    def head(self, job: str) -> Head | None: ...
    def heads(self, *, tenant: str = "") -> list[Head]:
        """For listings and sweeps: every job that committed, by name."""

    def effect(self, key: str) -> Effect | None: ...

    # journal, meter, policy: called by listings, audits and operators
    def verify(self) -> Verification:
        """Hash chain and lease rules, over the whole journal."""

    def tail(self, *, after: int = -1, limit: int = 50) -> list[tuple[int, Entry]]:
        """Rows after a row's number, oldest first; without a number the newest ones."""

    def seal(self) -> str: ...
    def usage(self, *, tenant: str = "", since: int = 0) -> list[Usage]: ...
    def policy(self) -> Policy: ...
    def set_policy(self, policy: Policy, *, actor: str) -> None: ...

    # the engine: called by wiring, doctor and long-lived loops
    def now(self) -> int: ...
    def bell(self) -> Bell: ...
    def barrier(self) -> None:
        """Make sure that what was merely read is durable, before acting on it outside (a kill)."""

    def unstick(self) -> str:
        """Called by a warden whose ledger call hangs: free what a stopped process holds; '' or what was done."""

    def describe(self) -> dict[str, str]: ...
    def mark_restored(self, *, actor: str) -> int:
        """After a backup was put back: end what it thought was live, and jump the epoch past every old one."""

    def close(self) -> None: ...
