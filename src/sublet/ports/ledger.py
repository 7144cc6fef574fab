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
from sublet.core.allowance import Allowance
from sublet.core.block import Block, BlockRequest
from sublet.core.device import Device
from sublet.core.effect import Commit, Committed, Duplicate, Effect, Head, Reserved
from sublet.core.errors import SubletError
from sublet.core.goodput import Commitment
from sublet.core.journal import Entry, Fault
from sublet.core.lease import EndReason, Holder, Lease, Request
from sublet.core.meter import Usage
from sublet.core.policy import Policy
from sublet.core.proof import Proof
from sublet.core.schedule import Instruction
from sublet.core.tenancy import Tenant
from sublet.core.token import Scope, Token
from sublet.core.versions import Adoption, Kept, Versions
from sublet.ports.bell import Bell
from sublet.ports.items import ItemLedger
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
class BlockAnswer:
    """A block lease as it stands now."""

    block: Block
    at: int  # the ledger's clock when it answered


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRecord:
    """A checkpoint that lies durably in one of the block's slots."""

    sequence: int
    digest: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    rows: int
    strands: int
    head: str
    faults: tuple[Fault, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Which ledger this is, to whoever must not take it for another one."""

    id: str
    heads_current: bool  # False after a restore: the replicas may know newer versions than its heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    head: Head
    forgotten: int  # effects of later versions, whose steps may now run again


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTime:
    at: int  # the ledger's clock when it answered
    leases: tuple[Lease, ...]
    commits: tuple[Commitment, ...]


class Ledger(ItemLedger, Protocol):
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

    def look(self, lease_id: str, *, patience_us: int | None = None) -> Answer:
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
        gpu_us_per_day: int | None = None,
    ) -> Tenant: ...
    def allowance(self, name: str) -> Allowance:
        """GPU time by the day: what is left of it and when it is full again."""

    def remove_tenant(self, name: str, *, actor: str) -> None: ...

    # tokens: made and ended by operators; `digest` is the secret's, which never comes here
    def add_token(
        self,
        token_id: str,
        digest: str,
        tenant: str,
        *,
        actor: str,
        scope: Scope = Scope.USER,
        lifetime_us: int = 0,
        note: str = "",
    ) -> Token: ...
    def tokens(self, tenant: str = "") -> list[Token]:
        """For listings: a tenant's, or all."""

    def look_token(self, token_id: str) -> Token | None:
        """Called for each request that shows one; writes nothing."""

    def rotate_token(
        self, token_id: str, new_id: str, digest: str, *, actor: str, overlap_us: int = 0
    ) -> Token:
        """A successor with a secret of its own; the old one is revoked now, or expires after the overlap."""

    def revoke_token(self, token_id: str, *, actor: str) -> Token: ...

    # progress: called by a step
    def reserve(self, key: LeaseKey, *, effect: str, job: str, fingerprint: str) -> Reserved | Duplicate:
        """Say that this holder is about to do it."""

    def commit(self, key: LeaseKey, commit: Commit) -> Committed | Duplicate:
        """The one commit point: fence, head, effect, journal, together or not at all."""

    def head(self, job: str) -> Head | None: ...
    def heads(self, *, tenant: str = "") -> list[Head]:
        """For listings and sweeps: every job that committed, by name."""

    def effect(self, key: str) -> Effect | None: ...
    def effects(self, job: str, *, after: str = "", limit: int = 1000) -> list[Effect]:
        """For listings: those of a job, by key, from the one after this key on."""

    def prove(self, *jobs: str) -> list[Proof]:
        """For audits: what journal, heads, effects and leases show of these jobs, or of all. `NotFound` for one that never committed."""

    # block leases: called by the block's holder; the id in its key is the block's
    def grant_block(self, block_id: str, secret: str, request: BlockRequest, holder: Holder) -> BlockAnswer:
        """A new block. Repeating it with the same id and secret returns what the first call did."""

    def attach_block(
        self,
        block_id: str,
        secret: str,
        tenant: str,
        holder: Holder,
        *,
        ttl_us: int | None = None,
        keep_us: int | None = None,
        dead_epoch: int = 0,
    ) -> BlockAnswer:
        """Take over an old one with a higher epoch, or `BlockHeld`. `dead_epoch`: the caller saw that epoch's holder to be gone."""

    def renew_block(self, key: LeaseKey, *, patience_us: int | None = None) -> BlockAnswer:
        """Extend by the ttl, or raise why not."""

    def check_block(self, key: LeaseKey) -> BlockAnswer:
        """Called before a slot is written: raise unless a write would count now; which checkpoint is recorded."""

    def record_block(self, key: LeaseKey, done: BlockRecord) -> BlockAnswer:
        """Called when a slot is durable: from here on it is the block's value (C6)."""

    def release_block(self, block_id: str, secret: str, *, patience_us: int | None = None) -> bool:
        """End the lease and keep the content. False when it was over already."""

    # block leases: called by holders, listings and sweeps
    def remove_block(
        self,
        block_id: str,
        tenant: str,
        holder: Holder,
        *,
        actor: str,
        secret: str = "",
        dead_epoch: int = 0,
    ) -> bool:
        """Give up the content, unless somebody else holds it. False when it was removed already."""

    def sweep_blocks(self) -> list[str]:
        """Remove what was kept long enough; which. The caller deletes the files afterwards."""

    def look_block(self, block_id: str, tenant: str) -> BlockAnswer: ...
    def blocks(self, *, tenant: str = "", gone: bool = False, limit: int = 1000) -> list[BlockAnswer]:
        """For listings, newest first."""

    def removed_blocks(self, block_ids: Sequence[str]) -> set[str]:
        """Which of these were removed, so that their files may be deleted."""

    # versions: called by operators; none needs a lease, and a holder that saves later finds the head moved
    def versions(self, job: str) -> Versions: ...
    def all_versions(self) -> list[Versions]:
        """Of every job, as of one moment: what a sweep must not touch."""

    def retain(
        self, job: str, *, expected_sweeps: int, floor: int, kept: Sequence[Kept], actor: str
    ) -> Versions:
        """Drop every version below the floor that is neither in `kept` nor tagged. `HeadMoved` if others were dropped since."""

    def tag(self, job: str, kept: Kept, *, expected_sweeps: int, actor: str) -> Versions: ...
    def untag(self, job: str, tag: str, *, actor: str) -> Versions: ...
    def adopt(self, adoption: Adoption, *, actor: str) -> Adopted:
        """Move a head to a state that is on the replicas already: rollback, fork, import, rebuild."""

    # journal, meter, policy: called by listings, audits and operators
    def verify(self) -> Verification:
        """Hash chain and lease rules, over the whole journal."""

    def tail(self, *, after: int = -1, limit: int = 50) -> list[tuple[int, Entry]]:
        """Rows after a row's number, oldest first; without a number the newest ones."""

    def seal(self) -> str: ...
    def usage(self, *, tenant: str = "", since: int = 0) -> list[Usage]: ...
    def held(self, *, tenant: str = "", job: str = "", since: int = 0) -> HeldTime:
        """For reports: leases that were held since then, and what was committed under them."""

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

    def identity(self) -> Identity: ...
    def mark_current(self, *, actor: str) -> None:
        """After a restore, when the heads have been compared with the replicas: sweeps may go on."""

    def close(self) -> None: ...
