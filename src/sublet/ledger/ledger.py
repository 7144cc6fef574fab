"""The ledger: every verb of the port as one transaction, on either engine.

Rules of this file:
- A verb is one line: which transaction function, durable or not. What it means is in the module of its noun.
- Inputs are checked before a lock is taken, so bad input never waits and never writes.
- A refusal comes back as a value, is committed with its journal row, and is raised here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from sublet.core.billing import meter
from sublet.core.billing.allowance import LEAST_PER_DAY_US, MOST_PER_DAY_US, Allowance
from sublet.core.billing.meter import Usage
from sublet.core.checkpoints.versions import Adoption, KeptVersion, Versions, check_tag
from sublet.core.errors import BadInput, SubletError
from sublet.core.journal.chain import Entry
from sublet.core.journal.step_audit import Proof
from sublet.core.leasing.gang import Seat
from sublet.core.leasing.lease import HOLDING, EndReason, Holder, LeaseRecord, Request
from sublet.core.leasing.policy import Policy
from sublet.core.leasing.tenancy import Tenant
from sublet.core.progress.effect import AlreadyCommitted, Commit, Committed, Effect, Head, Reserved, check_key
from sublet.core.scheduling.device import Device
from sublet.core.scheduling.spread import Spread
from sublet.core.values import check_job, check_name
from sublet.ledger.rows import SELECT_LEASE, lease_of
from sublet.ledger.tx import Tx, policy_of, write_main
from sublet.ledger.verbs.billing import goodput, tenants
from sublet.ledger.verbs.journal import chain, counters, pruning, step_audit, write_proof
from sublet.ledger.verbs.journal.archive import Archive
from sublet.ledger.verbs.leasing import (
    after_restore,
    devices,
    gangs,
    leases,
    receipts,
    schedule_tick,
    waitlist,
)
from sublet.ledger.verbs.leasing.block_ledger import BlockVerbs
from sublet.ledger.verbs.leasing.credentials import unknown
from sublet.ledger.verbs.progress import commit as progress
from sublet.ledger.verbs.progress import storage_quota, versions
from sublet.ledger.verbs.queues.item_ledger import ItemVerbs
from sublet.ledger.verbs.studio.studio_ledger import StudioVerbs
from sublet.ports.bell import Bell
from sublet.ports.ledger import (
    Adopted,
    Answer,
    Followed,
    FoundDevice,
    HeldTime,
    HostView,
    Identity,
    LeaseHistory,
    LeaseKey,
    MeterPage,
    Pruned,
    Taken,
    TeardownRecord,
    TickResult,
    Verification,
)
from sublet.ports.processes import Receipt

T = TypeVar("T")
#: Parameters of one statement.
LOOKED_AT_ONCE = 500


class SqlLedger(BlockVerbs, StudioVerbs, ItemVerbs):
    """Implements `ports.ledger.Ledger`."""

    # leases, by their holder

    def acquire(self, lease_id: str, secret: str, request: Request, holder: Holder) -> Answer:
        check_request(lease_id, request, holder)
        return self._write(lambda tx: waitlist.acquire(tx, lease_id, secret, request, holder), durable=True)

    def attend(self, lease_id: str, secret: str, *, explain: bool = True) -> Answer:
        while True:
            answer: Answer = self._write(
                lambda tx: waitlist.attend(tx, lease_id, secret, explain), durable=False
            )
            # Somebody else's release granted it, and a release need not survive a crash.
            if answer.lease.state not in HOLDING or self._outlives_a_crash(answer.lease):
                return answer

    def _outlives_a_crash(self, lease: LeaseRecord) -> bool:
        """Sync a grant that was committed without waiting for the disk before its holder is told: if it were
        lost, the same epoch and memory would be granted again. False when a crash of the server has already
        taken it."""
        found = self.engine.confirm("SELECT epoch, granted_at FROM lease WHERE id = ?", lease.id)
        return found is not None and tuple(found) == (lease.epoch, lease.granted_at)

    def accept(self, lease_id: str, secret: str) -> Answer:
        return self._write(lambda tx: waitlist.accept(tx, lease_id, secret), durable=True)

    def decline(self, lease_id: str, secret: str) -> Answer:
        return self._write(lambda tx: waitlist.decline(tx, lease_id, secret), durable=False)

    def renew(self, key: LeaseKey, *, busy: bool = True, patience_us: int | None = None) -> Answer:
        return self._write(lambda tx: leases.renew(tx, key, busy), durable=False, patience_us=patience_us)

    def renew_many(
        self, keys: Sequence[tuple[LeaseKey, bool]], *, patience_us: int | None = None
    ) -> list[Answer | SubletError]:
        def work(tx: Tx) -> list[Answer | SubletError]:
            # Locked in one order, so that two processes cannot wait for each other; answered in the order
            # asked.
            order = sorted(range(len(keys)), key=lambda i: keys[i][0].lease_id)
            answers = {i: leases.renew(tx, *keys[i]) for i in order}
            return [answers[i] for i in range(len(keys))]

        return self.engine.write(work, durable=False, patience_us=patience_us)

    def seat(self, key: LeaseKey, holder: Holder, *, address: str = "") -> Answer:
        check_name(holder.host, what="host")
        if len(address) > 300 or not address.isascii() or any(ord(c) <= 32 for c in address):
            raise BadInput("an address is host:port, without spaces")
        return self._write(lambda tx: leases.seat(tx, key, holder, address), durable=True)

    def stand_up(self, key: LeaseKey, member: Holder, *, failed: str = "") -> bool:
        return self._write(lambda tx: leases.stand_up(tx, key, member, failed), durable=True)

    def seats(self, lease_id: str) -> list[Seat]:
        return self.engine.read(lambda tx: list(gangs.load(tx, lease_id)))

    def mark(self, key: LeaseKey, *, busy: bool) -> None:
        self._write(lambda tx: leases.mark(tx, key, busy), durable=False)

    def release(
        self, lease_id: str, secret: str, *, torn_down: bool = True, patience_us: int | None = None
    ) -> bool:
        return self._write(
            lambda tx: leases.release(tx, lease_id, secret, torn_down), durable=False, patience_us=patience_us
        )

    def look(self, lease_id: str, *, patience_us: int | None = None) -> Answer:
        def read(tx: Tx) -> Answer | SubletError:
            row = tx.row(f"{SELECT_LEASE} WHERE id = ?", lease_id)
            if row is None:
                return unknown(lease_id)
            return Answer(lease=lease_of(row), at=tx.now)

        return self._read(read, patience_us=patience_us)

    def look_many(self, lease_ids: Sequence[str], *, patience_us: int | None = None) -> list[Answer]:
        def read(tx: Tx) -> list[Answer]:
            found: list[Answer] = []
            for at in range(0, len(lease_ids), LOOKED_AT_ONCE):
                part = lease_ids[at : at + LOOKED_AT_ONCE]
                marks = ",".join("?" * len(part))
                rows = tx.rows(f"{SELECT_LEASE} WHERE id IN ({marks})", *part)
                found += [Answer(lease=lease_of(row), at=tx.now) for row in rows]
            return found

        return self.engine.read(read, patience_us=patience_us)

    # leases, by wardens, operators and listings

    def revoke(self, lease_id: str, *, reason: EndReason, detail: str, grace_us: int, actor: str) -> Answer:
        if grace_us < 0:
            raise BadInput("grace must not be negative")
        if len(detail) > 500 or any(ord(c) < 32 for c in detail):
            raise BadInput("a reason is one line of at most 500 characters")
        return self._write(
            lambda tx: leases.revoke(tx, lease_id, reason, detail, grace_us, actor), durable=True
        )

    def end(self, lease_id: str, epoch: int, *, reason: EndReason, detail: str, host: str = "") -> bool:
        return self._write(lambda tx: leases.end(tx, lease_id, epoch, reason, detail, host), durable=True)

    def settle(self, lease_id: str, epoch: int, receipt: Receipt, *, host: str = "") -> bool:
        return self._write(lambda tx: leases.settle(tx, lease_id, epoch, receipt, host), durable=False)

    def receipts(self, *, tenant: str = "", limit: int = 200) -> list[TeardownRecord]:
        return self.engine.read(lambda tx: receipts.newest(tx, tenant=tenant, limit=limit))

    def tick(self, host: str = "") -> TickResult:
        return self.engine.write(lambda tx: schedule_tick.tick(tx, host), durable=True)

    def host_view(self, host: str) -> HostView:
        return self.engine.read(lambda tx: schedule_tick.host_view(tx, host, tx.now))

    def leases(self, *, live_only: bool = True, tenant: str = "", limit: int = 1000) -> list[Answer]:
        def read(tx: Tx) -> list[Answer]:
            found = leases.list_leases(tx, live_only=live_only, tenant=tenant, limit=limit)
            return (
                [Answer(lease=x, at=tx.now, wait=waits.get(x.id)) for x in found]
                if (waits := waitlist.waits(tx, found))
                else [Answer(lease=x, at=tx.now) for x in found]
            )

        return self.engine.read(read)

    # devices

    def report_host(
        self,
        host: str,
        found: Sequence[FoundDevice],
        *,
        complete: bool = True,
        taken: Taken | None = None,
    ) -> None:
        check_name(host, what="host")
        self._write(lambda tx: devices.report_host(tx, host, found, complete, taken or {}), durable=True)

    def beat_host(self, host: str) -> None:
        self._write(lambda tx: devices.beat_host(tx, host), durable=False)

    def devices(self, host: str = "") -> list[Device]:
        return self.engine.read(lambda tx: devices.list_devices(tx, host))

    def set_device(self, device_id: str, *, state: str, note: str, actor: str) -> Device:
        if len(note) > 500 or not (note.isprintable() or not note):
            raise BadInput("a note is one line of at most 500 printable characters")
        return self._write(lambda tx: devices.set_device(tx, device_id, state, note, actor), durable=True)

    # tenants

    def tenants(self) -> list[Tenant]:
        return self.engine.read(tenants.list_tenants)

    def tenant(self, name: str) -> Tenant:
        return self._read(lambda tx: tenants.get_tenant(tx, name))

    def add_tenant(
        self, tenant: Tenant, *, actor: str, exist_ok: bool = False, returning: bool = False
    ) -> Tenant:
        check_name(tenant.name, what="tenant")
        _check_limits(
            tenant.weight,
            tenant.max_leases,
            tenant.max_vram_bytes,
            tenant.max_waiting,
            tenant.max_sessions,
            tenant.max_storage_bytes,
        )
        _check_per_day(tenant.gpu_us_per_day)
        return self._write(
            lambda tx: tenants.add_tenant(tx, tenant, actor, exist_ok, returning), durable=True
        )

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
    ) -> Tenant:
        wanted = {
            "weight": weight,
            "max_leases": max_leases,
            "max_vram_bytes": max_vram_bytes,
            "max_waiting": max_waiting,
            "gpu_us_per_day": gpu_us_per_day,
            "max_sessions": max_sessions,
            "max_storage_bytes": max_storage_bytes,
        }
        _check_limits(
            weight if weight is not None else 1,
            max_leases,
            max_vram_bytes,
            max_waiting,
            max_sessions,
            max_storage_bytes,
        )
        _check_per_day(gpu_us_per_day)
        changes = {column: value for column, value in wanted.items() if value is not None}
        return self._write(lambda tx: tenants.set_tenant(tx, name, changes, actor), durable=True)

    def allowance(self, name: str) -> Allowance:
        return self._read(lambda tx: tenants.get_allowance(tx, name))

    def remove_tenant(self, name: str, *, actor: str) -> None:
        self._write(lambda tx: tenants.remove_tenant(tx, name, actor), durable=True)

    # progress

    def reserve(
        self, key: LeaseKey, *, effect: str, job: str, fingerprint: str
    ) -> Reserved | AlreadyCommitted:
        check_job(job)
        check_key(effect)
        check_key(fingerprint, what="fingerprint")
        done = self.engine.write(lambda tx: progress.reserve(tx, key, effect, job, fingerprint), durable=True)
        if isinstance(done, SubletError):
            raise done
        return done

    def commit(self, key: LeaseKey, commit: Commit) -> Committed | AlreadyCommitted:
        check_job(commit.job)
        done = self.engine.write(lambda tx: progress.commit(tx, key, commit), durable=True)
        if isinstance(done, SubletError):
            raise done
        return done

    def head(self, job: str) -> Head | None:
        return self.engine.read(lambda tx: progress.load_head(tx, job))

    def heads(self, *, tenant: str = "") -> list[Head]:
        return self.engine.read(lambda tx: progress.load_heads(tx, tenant))

    def effect(self, key: str) -> Effect | None:
        return self.engine.read(lambda tx: progress.load_effect(tx, key))

    def effects(self, job: str, *, after: str = "", limit: int = 1000) -> list[Effect]:
        return self.engine.read(lambda tx: step_audit.list_effects(tx, job, after, limit))

    def prove(self, *jobs: str, archived: Sequence[Path] = ()) -> list[Proof]:
        archive = Archive(archived)
        return self._read(lambda tx: step_audit.prove(tx, jobs, archive))

    def stored_bytes(self, tenant: str) -> int:
        return self.engine.read(lambda tx: storage_quota.stored_bytes(tx, tenant))

    # versions

    def versions(self, job: str) -> Versions:
        return self._read(lambda tx: versions.load(tx, job))

    def all_versions(self) -> list[Versions]:
        return self.engine.read(versions.load_all)

    def retain(
        self, job: str, *, expected_sweeps: int, floor: int, kept: Sequence[KeptVersion], actor: str
    ) -> Versions:
        versions.check_kept(kept)
        return self._write(
            lambda tx: versions.retain(tx, job, expected_sweeps, floor, kept, actor), durable=True
        )

    def tag(self, job: str, kept: KeptVersion, *, expected_sweeps: int, actor: str) -> Versions:
        check_tag(kept.tag)
        return self._write(lambda tx: versions.tag(tx, job, expected_sweeps, kept, actor), durable=True)

    def untag(self, job: str, tag: str, *, actor: str) -> Versions:
        check_tag(tag)
        return self._write(lambda tx: versions.untag(tx, job, tag, actor), durable=True)

    def adopt(self, adoption: Adoption, *, actor: str) -> Adopted:
        return self._write(lambda tx: versions.adopt(tx, adoption, actor), durable=True)

    # journal, meter, policy

    def verify(self, archived: Sequence[Path] = ()) -> Verification:
        archive = Archive(archived)
        return self.engine.read(lambda tx: chain.verify(tx, archive))

    def prune(self, *, keep_us: int, into: Path, actor: str, dry_run: bool = False) -> Pruned:
        return pruning.prune(self.engine, keep_us=keep_us, into=into, actor=actor, dry_run=dry_run)

    def tail(self, *, after: int = -1, limit: int = 50) -> list[tuple[int, Entry]]:
        return self.engine.read(lambda tx: chain.tail(tx, after, limit))

    def follow(self, *, after: int, limit: int) -> Followed:
        return self.engine.read(lambda tx: chain.follow(tx, after, limit))

    def seal(self) -> str:
        return self.engine.write(chain.seal, durable=True)

    def usage(self, *, tenant: str = "", since: int = 0) -> list[Usage]:
        def read(tx: Tx) -> list[Usage]:
            where: str = "granted_at > 0 AND state = 'ended' AND ended_at >= ?"
            params: list[object] = [since]
            if tenant:
                where, params = f"tenant = ? AND {where}", [tenant, since]
            found = tx.rows(f"{SELECT_LEASE} WHERE {where} ORDER BY ended_at, id", *params)
            return [meter.of_ended(lease_of(row)) for row in found]

        return self.engine.read(read)

    def held(self, *, tenant: str = "", job: str = "", since: int = 0) -> HeldTime:
        return self.engine.read(lambda tx: goodput.held(tx, tenant, job, since))

    def metered(self, *, after: int, late_after: int, limit: int = 20_000) -> MeterPage:
        def read(tx: Tx) -> MeterPage:
            # As a writer: held time is counted up to now. A lease that ends at the same moment would end
            # before that, and the sum would fall.
            _ = tx.pool
            return counters.page(tx, after, late_after, limit)

        return self.engine.write(read, durable=False)

    def lease_history(self, *, since: int = 0) -> LeaseHistory:
        return self.engine.read(lambda tx: counters.lease_history(tx, since))

    def policy(self) -> Policy:
        def read(tx: Tx) -> Policy:
            row = tx.row("SELECT policy FROM pool WHERE id = 1")
            assert row is not None
            return policy_of(row[0])

        return self.engine.read(read)

    def set_policy(self, policy: Policy, *, actor: str) -> None:
        def work(tx: Tx) -> None:
            tx.pool.set_policy(policy)
            write_main(tx, "policy.set", "", "policy", {"policy": policy.to_text(), "by": actor})

        self.engine.write(work, durable=True)

    # the engine

    def at_once(self, work: Callable[[], T]) -> T:
        return self.engine.at_once(work)

    def now(self) -> int:
        return self.engine.now()

    def bell(self) -> Bell:
        return self.engine.bell()

    def barrier(self) -> None:
        self.engine.barrier()

    def prove_write(self) -> None:
        self._write(write_proof.prove_write, durable=True)

    def unstick(self) -> str:
        return self.engine.unstick()

    def describe(self) -> dict[str, str]:
        return self.engine.describe()

    def keep_stamp(self, folder: Path) -> None:
        self.engine.keep_stamp(folder)

    def mark_restored(self, *, actor: str) -> int:
        return self.engine.write_restored(lambda tx, epoch: after_restore.mark_restored(tx, actor, epoch))

    def identity(self) -> Identity:
        return self.engine.read(after_restore.identity)

    def mark_current(self, *, actor: str) -> None:
        self.engine.write(lambda tx: after_restore.mark_current(tx, actor), durable=True)

    def close(self) -> None:
        self.engine.close()


def check_request(lease_id: str, request: Request, holder: Holder) -> None:
    """Check every name in a request before it reaches a statement, a journal row or a file name."""
    check_name(request.tenant, what="tenant")
    check_name(lease_id, what="lease id")
    check_name(holder.host, what="host")
    if request.host:
        check_name(request.host, what="host")
    if request.job:
        check_job(request.job)
    if request.spread is Spread.OK and request.count > 1 and holder.pid:
        raise BadInput(
            "devices that may be on several hosts are asked for by name: no process runs on all of them",
            remedy="seat a member on each host when it is granted",
        )


def _check_limits(weight: int | None, *limits: int | None) -> None:
    if weight is not None and not 1 <= weight <= 1_000_000:
        raise BadInput(f"weight {weight} is out of range: use 1 to 1000000, 100 is usual")
    if any(limit is not None and limit < 0 for limit in limits):
        raise BadInput("a quota must not be negative: use 0 for no limit")


def _check_per_day(us: int | None) -> None:
    if us and not LEAST_PER_DAY_US <= us <= MOST_PER_DAY_US:
        raise BadInput("GPU time per day is out of range: use at least a second, or 0 for no limit")
