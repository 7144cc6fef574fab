"""The ledger: the transactional truth of who holds which GPU until when, and what has been committed.

Rules of this port:
- Every writing verb is one transaction: load, decide (a pure function of `core`), apply, journal.
- A refusal by rule is a `SubletError` and is itself journalled. After `Disconnected` the outcome is unknown:
  verbs are idempotent by their key (lease id, effect key), so repeat the verb to find out.
- Durable verbs return when the decision survives a crash: acquire, revoke, reserve, commit, settings. The
  others (renew, release, heartbeats) may be lost in a crash, which only ever makes a lease end sooner or
  later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from sublet.core.billing.allowance import Allowance
from sublet.core.billing.goodput import CommitUse, DayUse
from sublet.core.billing.meter import Usage
from sublet.core.billing.price import Price
from sublet.core.checkpoints.versions import Adoption, KeptVersion, Versions
from sublet.core.errors import NotIsolated, SubletError
from sublet.core.journal.chain import Entry, Fault
from sublet.core.journal.counters import Happened, LiveLease, Worked
from sublet.core.journal.step_audit import Proof
from sublet.core.leasing.block import BlockLease, BlockRequest
from sublet.core.leasing.gang import Seat
from sublet.core.leasing.lease import EndReason, Holder, LeaseRecord, Request
from sublet.core.leasing.policy import Policy
from sublet.core.leasing.tenancy import Tenant
from sublet.core.progress.effect import AlreadyCommitted, Commit, Committed, Effect, Head, Reserved
from sublet.core.scheduling.admission import Wait
from sublet.core.scheduling.device import Device
from sublet.core.scheduling.schedule import Instruction
from sublet.core.studio.session import SessionStatus, StudioSession, status, why
from sublet.core.studio.session_usage import SessionUsage as SessionUsage
from sublet.core.studio.token import Scope, Token
from sublet.ports.bell import Bell
from sublet.ports.items import ItemLedger
from sublet.ports.processes import Receipt

T = TypeVar("T")
Taken = Mapping[str, str]  # ids of devices that another ledger grants, with whose it is


@dataclass(frozen=True, slots=True)
class LeaseKey:
    """What proves the holder: the id says which, the epoch says which grant of it, the secret says who."""

    lease_id: str
    epoch: int
    secret: str

    @property
    def ticket(self) -> str:
        """The key as one word, to hand to a process that will be a member of a gang."""
        return f"{self.lease_id}:{self.epoch}:{self.secret}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A lease as it stands now. `wait` is set while it waits."""

    lease: LeaseRecord
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
    physical: str = ""  # its name for every user of the machine; empty where memory pretends to be a device


@dataclass(frozen=True, slots=True, kw_only=True)
class TickResult:
    at: int
    instructions: tuple[Instruction, ...]
    next_look_at: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostView:
    """What a warden must enforce and watch on its host."""

    at: int
    leases: tuple[LeaseRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TeardownRecord:
    """A Receipt and the lease it belongs to."""

    lease_id: str
    tenant: str
    at: int
    devices: tuple[str, ...]
    receipt: Receipt
    host: str = ""  # the seat's, in a gang


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionAnswer:
    """A studio session and its current lease as they stand now. `wait` is set on request, while the lease
    waits."""

    session: StudioSession
    lease: LeaseRecord | None
    at: int  # the ledger's clock when it answered
    wait: Wait | None = None

    @property
    def status(self) -> SessionStatus:
        return status(self.session, self.lease, self.at)

    @property
    def why(self) -> tuple[str, str]:
        """(reason, detail) of one that is over or about to be."""
        return why(self.session, self.lease, self.at)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockAnswer:
    """A block lease as it stands now."""

    block: BlockLease
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
    pruned_before: int = 0  # what came before was archived, and is part of this only if the archive was given


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """Journal rows visible at one moment, and which transactions may still fill a gap in their numbers: one
    that took its number before that moment is older than `begun_before`; all older than `running_from` are
    over."""

    at: int
    rows: tuple[tuple[int, Entry], ...]
    running_from: int
    begun_before: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Which ledger this is, so that it is not mistaken for another one."""

    id: str
    heads_current: bool  # False after a restore: the replicas may know newer versions than its heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    head: Head
    forgotten: int  # effects of later versions, whose steps may now run again


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTime:
    at: int  # the ledger's clock when it answered
    leases: tuple[LeaseRecord, ...]
    commits: tuple[CommitUse, ...]
    removed: tuple[DayUse, ...] = ()  # what leases used whose rows were pruned, by whole days
    pruned_before: int = 0  # 0: nothing ever was


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """What a prune removed, or would remove."""

    before: int
    rows: int = 0  # of the journal
    leases: int = 0
    items: int = 0
    sessions: int = 0
    files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MeterPage:
    """What happened after a row of the journal, for counters."""

    at: int  # the ledger's clock when it answered
    upto: int  # the next page begins after this row
    more: bool  # there are rows after it; only the last page has what follows
    happened: tuple[tuple[int, int, Happened], ...]  # (row, when, what), in the order of the rows
    held: tuple[LiveLease, ...] = ()
    sessions: tuple[SessionAnswer, ...] = ()  # the open ones
    stored: tuple[tuple[str, int], ...] = ()  # bytes of checkpoints by tenant
    stale_acks: int = 0  # of all queues, ever


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseHistory:
    at: int  # the ledger's clock when it answered
    leases: tuple[LeaseRecord, ...]
    work: tuple[Worked, ...]  # by tenant, in sessions that were open since then


class Ledger(ItemLedger, Protocol):
    # leases: called by the holder
    def acquire(self, lease_id: str, secret: str, request: Request, holder: Holder) -> Answer:
        """Grant, wait, offer or refuse. Repeating it with the same id returns what the first call did."""

    def attend(self, lease_id: str, secret: str, *, explain: bool = True) -> Answer:
        """A waiter's sign of life. Returns where it stands, with position and ETA if `explain`. A grant it
        reports survives any crash."""

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

    def seat(self, key: LeaseKey, holder: Holder, *, address: str = "") -> Answer:
        """Make this process the holder of a lease that was asked for by name. Called between the grant and
        the first work; repeating it is fine. In a gang each host's member is seated; `address` is where the
        others can reach it."""

    def stand_up(self, key: LeaseKey, member: Holder, *, failed: str = "") -> bool:
        """A gang's member is done and uses nothing any more, so it may end without ending the others. If it
        `failed`, the others end too. False when it was not seated."""

    def seats(self, lease_id: str) -> list[Seat]:
        """The seats of a gang in the order of ranks; none for a lease on one host. Read without a lock."""

    def mark(self, key: LeaseKey, *, busy: bool) -> None:
        """The holder began or stopped working; only this decides who is idle."""

    def release(
        self, lease_id: str, secret: str, *, torn_down: bool = True, patience_us: int | None = None
    ) -> bool:
        """Release the lease or leave the waitlist; False when it was over already. `torn_down` False keeps
        the slices until a warden has ended the holder and settled the lease."""

    def look(self, lease_id: str, *, patience_us: int | None = None) -> Answer:
        """Read one lease, without a lock."""

    def look_many(self, lease_ids: Sequence[str], *, patience_us: int | None = None) -> list[Answer]:
        """The leases that exist, as of one moment, so that a keeper of many looks at all in one read."""

    # leases: called by operators, wardens and listings
    def revoke(self, lease_id: str, *, reason: EndReason, detail: str, grace_us: int, actor: str) -> Answer:
        """Revoke the lease; it ends at now + grace."""

    def end(self, lease_id: str, epoch: int, *, reason: EndReason, detail: str, host: str = "") -> bool:
        """The warden of this host says the holder is gone. False when it ended otherwise."""

    def settle(self, lease_id: str, epoch: int, receipt: Receipt, *, host: str = "") -> bool:
        """The teardown on this host is over: slices are free again if it was proven, else their devices are
        withheld. In a gang this concerns the host's seat only."""

    def receipts(self, *, tenant: str = "", limit: int = 200) -> list[TeardownRecord]:
        """For listings and audits: how teardowns went, newest first."""

    def tick(self, host: str = "") -> TickResult:
        """Run the schedule once and apply it. `host` is the caller's, which is alive by definition."""

    def host_view(self, host: str) -> HostView:
        """Leases and waiters whose holder or device is on the host and that are not settled."""

    def leases(self, *, live_only: bool = True, tenant: str = "", limit: int = 1000) -> list[Answer]:
        """For listings, newest first; waiters carry position and reason."""

    # devices: called by wardens and operators
    def report_host(
        self, host: str, devices: Sequence[FoundDevice], *, complete: bool = True, taken: Taken | None = None
    ) -> None:
        """What the host has, and which of it is taken. Known devices it does not name are lost."""

    def beat_host(self, host: str) -> None:
        """The host's warden is alive."""

    def devices(self, host: str = "") -> list[Device]:
        """All devices, or those of one host."""

    def set_device(self, device_id: str, *, state: str, note: str, actor: str) -> Device:
        """Quarantine, drain, or make ready again."""

    # tenants: called by operators
    def tenants(self) -> list[Tenant]: ...
    def tenant(self, name: str) -> Tenant: ...
    def add_tenant(
        self, tenant: Tenant, *, actor: str, exist_ok: bool = False, returning: bool = False
    ) -> Tenant:
        """The name of a removed tenant is refused, unless it is `returning` to what it had."""

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
        max_sessions: int | None = None,
        max_storage_bytes: int | None = None,
    ) -> Tenant: ...
    def allowance(self, name: str) -> Allowance:
        """GPU time per day: what is left of it and when it is full again."""

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

    # studio sessions: called by the service, with the tenant of the caller's token
    def open_session(
        self,
        session_id: str,
        tenant: str,
        *,
        request: Request,
        warm_us: int,
        host: str,
        name: str = "",
        checkpoint: str = "",
        alone: NotIsolated | None = None,
    ) -> SessionAnswer:
        """Open a session, or `QuotaReached`. Repeating it with the same id and request returns what the first
        call did. `alone` is the refusal where another tenant has sessions, open or ended, and this host
        cannot keep the two apart."""

    def others_have_sessions(self, tenant: str) -> bool:
        """Called before a worker that is not kept apart is given to this tenant."""

    def look_session(self, session_id: str, tenant: str, *, explain: bool = False) -> SessionAnswer:
        """Called for each request: one statement, no lock. With `explain`, its place in the waitlist is
        included."""

    def token_and_session(
        self, keys: Sequence[tuple[str, str]]
    ) -> dict[tuple[str, str], tuple[Token, SessionAnswer | None]]:
        """Look up all concurrent requests, by (token id, session id or ''): the token, and the session if it
        belongs to the token's tenant. One statement, no lock. Unknown tokens are left out."""

    def sessions(self, *, tenant: str = "", open_only: bool = True, limit: int = 1000) -> list[SessionAnswer]:
        """For listings, newest first; '' means every tenant, for operators. Those that wait carry position
        and reason."""

    def touch_sessions(self, keys: Sequence[tuple[str, str]]) -> None:
        """Mark sessions as used, given as (session id, tenant), in one transaction. Unknown and ended ones
        are left out."""

    def answer_offer(self, session_id: str, tenant: str, *, accept: bool) -> SessionAnswer:
        """The user's answer to the offer of the current lease; the session host acts on it. `Stale` if
        nothing is offered."""

    def resume_session(self, session_id: str, tenant: str) -> SessionAnswer:
        """Ask for another lease for a suspended session. `Stale` if there is nothing to resume."""

    def end_session(self, session_id: str, tenant: str, *, detail: str, actor: str) -> SessionAnswer:
        """Ending twice is fine: the first time stands. The session host then releases its lease."""

    # studio sessions: called by the session host of their host
    def host_sessions(self, host: str) -> list[SessionAnswer]:
        """Sessions that are open, and those that ended while their lease still lives."""

    def bind_session(self, session_id: str, *, number: int, lease_id: str) -> SessionAnswer:
        """Called before the lease is acquired: it is the session's lease of that number. `Stale` unless it is
        the next one and wanted."""

    def note_session(
        self,
        session_id: str,
        *,
        calls: int = 0,
        errors: int = 0,
        launches: int = 0,
        checkpoint_bytes: int = 0,
    ) -> None:
        """Add to its counters. May be lost in a crash, is never counted twice."""

    def drop_sessions(self, before: int) -> int:
        """Delete sessions that ended before then. Returns how many."""

    # what sessions used, and what that costs: called by the service, reports and operators
    def session_usage(
        self, *, tenant: str = "", session_id: str = "", since: int = 0, limit: int = 1000
    ) -> list[SessionUsage]:
        """For each session that was open since then, newest first: the sum over its leases. '' means every
        tenant, for operators."""

    def prices(self) -> list[Price]:
        """Every price there was, oldest first; `core.billing.price.PriceList` knows which counts."""

    def set_price(self, device_class: str, micro_per_gpu_hour: int, *, actor: str, tier: str = "") -> Price:
        """Set a price from now on; what was granted before keeps its price."""

    def remove_price(self, device_class: str, *, actor: str, tier: str = "") -> None: ...
    def stored_bytes(self, tenant: str) -> int:
        """The bytes its checkpoints are charged for, against `max_storage_bytes`."""

    # progress: called by a step
    def reserve(
        self, key: LeaseKey, *, effect: str, job: str, fingerprint: str
    ) -> Reserved | AlreadyCommitted:
        """Record that this holder is about to produce the effect."""

    def commit(self, key: LeaseKey, commit: Commit) -> Committed | AlreadyCommitted:
        """The one commit point: fence, head, effect, journal, together or not at all."""

    def head(self, job: str) -> Head | None: ...
    def heads(self, *, tenant: str = "") -> list[Head]:
        """For listings and sweeps: every job that committed, by name."""

    def effect(self, key: str) -> Effect | None: ...
    def effects(self, job: str, *, after: str = "", limit: int = 1000) -> list[Effect]:
        """For listings: the effects of a job by key, beginning after this key."""

    def prove(self, *jobs: str, archived: Sequence[Path] = ()) -> list[Proof]:
        """For audits: what journal, heads, effects and leases show of these jobs, or of all. `NotFound` for a
        job that never committed, or if the journal was pruned and its archive is not given."""

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
        """Take over an existing block with a higher epoch, or `BlockHeld`. `dead_epoch`: the caller saw that
        the holder of that epoch is gone."""

    def renew_block(self, key: LeaseKey, *, patience_us: int | None = None) -> BlockAnswer:
        """Extend by the ttl, or raise why not."""

    def check_block(self, key: LeaseKey) -> BlockAnswer:
        """Called before a slot is written: raise unless a write would count now. Returns which checkpoint is
        recorded."""

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
        """Delete the content, unless somebody else holds it. False when it was removed already."""

    def sweep_blocks(self) -> list[str]:
        """Remove blocks that were kept long enough. Returns their ids; the caller deletes the files
        afterwards."""

    def look_block(self, block_id: str, tenant: str) -> BlockAnswer: ...
    def blocks(self, *, tenant: str = "", gone: bool = False, limit: int = 1000) -> list[BlockAnswer]:
        """For listings, newest first."""

    def removed_blocks(self, block_ids: Sequence[str]) -> set[str]:
        """Which of these were removed, so that their files may be deleted."""

    # versions: called by operators; none needs a lease, and a holder that saves later finds the head moved
    def versions(self, job: str) -> Versions: ...
    def all_versions(self) -> list[Versions]:
        """The versions of every job as of one moment, which a sweep must not touch."""

    def retain(
        self, job: str, *, expected_sweeps: int, floor: int, kept: Sequence[KeptVersion], actor: str
    ) -> Versions:
        """Drop every version below the floor that is neither in `kept` nor tagged. `HeadMoved` if others were
        dropped since."""

    def tag(self, job: str, kept: KeptVersion, *, expected_sweeps: int, actor: str) -> Versions: ...
    def untag(self, job: str, tag: str, *, actor: str) -> Versions: ...
    def adopt(self, adoption: Adoption, *, actor: str) -> Adopted:
        """Move a head to a state that is on the replicas already: rollback, fork, import, rebuild."""

    # journal, meter, policy: called by listings, audits and operators
    def verify(self, archived: Sequence[Path] = ()) -> Verification:
        """Verify hash chain and lease rules from where a prune left the journal, or with its archive from the
        first row."""

    def prune(self, *, keep_us: int, into: Path, actor: str, dry_run: bool = False) -> Pruned:
        """Archive older journal rows, and remove them with the leases, items and sessions that were over by
        then. Killed at any moment it leaves a consistent ledger, and the next call continues."""

    def tail(self, *, after: int = -1, limit: int = 50) -> list[tuple[int, Entry]]:
        """Rows after a row's number, oldest first; without a number the newest ones."""

    def follow(self, *, after: int, limit: int) -> Followed:
        """For readers that show every row once and in order: see `Followed` for missing numbers."""

    def seal(self) -> str: ...
    def usage(self, *, tenant: str = "", since: int = 0) -> list[Usage]: ...
    def held(self, *, tenant: str = "", job: str = "", since: int = 0) -> HeldTime:
        """For reports: leases that were held since then, and what was committed under them."""

    def metered(self, *, after: int, late_after: int, limit: int = 20_000) -> MeterPage:
        """For counters: what happened after a row, and again the steps from `late_after` on, because some may
        have appeared late."""

    def lease_history(self, *, since: int = 0) -> LeaseHistory:
        """Every lease that waited or was held since then, and the work done in sessions: who was in whose
        way."""

    def policy(self) -> Policy: ...
    def set_policy(self, policy: Policy, *, actor: str) -> None: ...

    # the engine: called by wiring, doctor and long-lived loops
    def at_once(self, work: Callable[[], T]) -> T:
        """All reading verbs called inside see one moment."""

    def now(self) -> int: ...
    def bell(self) -> Bell: ...
    def barrier(self) -> None:
        """Make sure that what was merely read is durable, before acting on it outside (a kill)."""

    def prove_write(self) -> None:
        """Write something that concerns nobody, down to the disk; raises if that does not succeed."""

    def unstick(self) -> str:
        """Called by a warden whose ledger call hangs: free what a stopped process holds. Returns what was
        done, or ''."""

    def describe(self) -> dict[str, str]: ...
    def keep_stamp(self, folder: Path) -> None:
        """Keep in this folder what is known to have been granted, where nothing beside the ledger says so."""

    def mark_restored(self, *, actor: str) -> int:
        """After a restore: end what the backup thought was live, and jump the epoch past every old one."""

    def identity(self) -> Identity: ...
    def mark_current(self, *, actor: str) -> None:
        """After a restore, when the heads have been compared with the replicas: sweeps may go on."""

    def close(self) -> None: ...
