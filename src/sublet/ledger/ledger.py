"""The ledger's face: every verb of the port, as one transaction on whichever engine stands behind it.

Rules of this file:
- A verb is one line: which transaction function, durable or not. What it means is in the module of its noun.
- Inputs are checked before a lock is taken, so bad input never waits and never writes.
- A refusal comes back as a value, is committed with its journal row, and is raised here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from sublet.core import meter
from sublet.core.admission import Wait, in_order, why_waiting
from sublet.core.allowance import LEAST_PER_DAY_US, MOST_PER_DAY_US, Allowance
from sublet.core.block import BlockRequest, check_locator, check_times
from sublet.core.device import Device
from sublet.core.effect import Commit, Committed, Duplicate, Effect, Head, Reserved, check_key
from sublet.core.errors import BadInput, SubletError
from sublet.core.gang import Seat
from sublet.core.journal import Entry
from sublet.core.lease import HOLDING, EndReason, Holder, Lease, LeaseState, Request
from sublet.core.meter import Usage
from sublet.core.policy import Policy
from sublet.core.price import Price, check_class, check_micro, check_tier
from sublet.core.proof import Proof
from sublet.core.session import check_detail, opened
from sublet.core.spread import Spread
from sublet.core.tenancy import Tenant
from sublet.core.token import Scope, Token, check_digest, check_id, check_note
from sublet.core.values import MAX_DURATION_US, check_job, check_name
from sublet.core.versions import Adoption, Kept, Versions, check_tag
from sublet.ledger import (
    blocks,
    devices,
    gangs,
    goodput,
    journal,
    leases,
    meters,
    prices,
    progress,
    proof,
    pruning,
    receipts,
    restored,
    session_usage,
    sessions,
    storage,
    tenants,
    ticking,
    tokens,
    versions,
    waitlist,
)
from sublet.ledger.archive import Archive
from sublet.ledger.credentials import unknown
from sublet.ledger.engine import raised
from sublet.ledger.item_verbs import ItemVerbs
from sublet.ledger.rows import SELECT_LEASE, lease_of
from sublet.ledger.tx import Tx, policy_of, write_main
from sublet.ports.bell import Bell
from sublet.ports.ledger import (
    Adopted,
    Answer,
    BlockAnswer,
    BlockRecord,
    Followed,
    FoundDevice,
    HeldTime,
    HostView,
    Identity,
    LeaseKey,
    MeterPage,
    Pruned,
    SessionAnswer,
    SessionUsage,
    Stays,
    Teardown,
    TickResult,
    Verification,
)
from sublet.ports.processes import Receipt

T = TypeVar("T")
#: Parameters of one statement.
LOOKED_AT_ONCE = 500


class SqlLedger(ItemVerbs):
    """Implements `ports.ledger.Ledger`."""

    # leases, by their holder

    def acquire(self, lease_id: str, secret: str, request: Request, holder: Holder) -> Answer:
        check_request(lease_id, request, holder)
        return self._write(lambda tx: waitlist.acquire(tx, lease_id, secret, request, holder), durable=True)  # type: ignore[no-any-return]

    def attend(self, lease_id: str, secret: str, *, explain: bool = True) -> Answer:
        while True:
            answer: Answer = self._write(
                lambda tx: waitlist.attend(tx, lease_id, secret, explain), durable=False
            )
            # Somebody else's release granted it, and a release need not survive a crash. Who only waits does not wait for the disk.
            if answer.lease.state not in HOLDING or self._outlives_a_crash(answer.lease):
                return answer

    def _outlives_a_crash(self, lease: Lease) -> bool:
        """Before a holder is told of a grant that was committed without waiting for the disk: were it lost, the same epoch and the same memory
        would be granted again while this holder works. False when a crash of the ledger's server has already taken it."""
        found = self.engine.confirm("SELECT epoch, granted_at FROM lease WHERE id = ?", lease.id)
        return found is not None and tuple(found) == (lease.epoch, lease.granted_at)

    def accept(self, lease_id: str, secret: str) -> Answer:
        return self._write(lambda tx: waitlist.accept(tx, lease_id, secret), durable=True)  # type: ignore[no-any-return]

    def decline(self, lease_id: str, secret: str) -> Answer:
        return self._write(lambda tx: waitlist.decline(tx, lease_id, secret), durable=False)  # type: ignore[no-any-return]

    def renew(self, key: LeaseKey, *, busy: bool = True, patience_us: int | None = None) -> Answer:
        return self._write(  # type: ignore[no-any-return]
            lambda tx: leases.renew(tx, key, busy), durable=False, patience_us=patience_us
        )

    def renew_many(
        self, keys: Sequence[tuple[LeaseKey, bool]], *, patience_us: int | None = None
    ) -> list[Answer | SubletError]:
        def work(tx: Tx) -> list[Answer | SubletError]:
            # Locked in one order, so that two processes cannot wait for each other; answered in the order asked.
            order = sorted(range(len(keys)), key=lambda i: keys[i][0].lease_id)
            answers = {i: leases.renew(tx, *keys[i]) for i in order}
            return [answers[i] for i in range(len(keys))]

        return self.engine.write(work, durable=False, patience_us=patience_us)

    def seat(self, key: LeaseKey, holder: Holder, *, address: str = "") -> Answer:
        check_name(holder.host, what="host")
        if len(address) > 300 or not address.isascii() or any(ord(c) <= 32 for c in address):
            raise BadInput("an address is host:port, without spaces")
        return self._write(lambda tx: leases.seat(tx, key, holder, address), durable=True)  # type: ignore[no-any-return]

    def stand_up(self, key: LeaseKey, member: Holder, *, failed: str = "") -> bool:
        return self._write(  # type: ignore[no-any-return]
            lambda tx: leases.stand_up(tx, key, member, failed), durable=True
        )

    def seats(self, lease_id: str) -> list[Seat]:
        return self.engine.read(lambda tx: list(gangs.load(tx, lease_id)))

    def mark(self, key: LeaseKey, *, busy: bool) -> None:
        self._write(lambda tx: leases.mark(tx, key, busy), durable=False)

    def release(
        self, lease_id: str, secret: str, *, torn_down: bool = True, patience_us: int | None = None
    ) -> bool:
        return self._write(  # type: ignore[no-any-return]
            lambda tx: leases.release(tx, lease_id, secret, torn_down), durable=False, patience_us=patience_us
        )

    def look(self, lease_id: str, *, patience_us: int | None = None) -> Answer:
        def read(tx: Tx) -> Answer | SubletError:
            row = tx.row(f"{SELECT_LEASE} WHERE id = ?", lease_id)
            if row is None:
                return unknown(lease_id)
            return Answer(lease=lease_of(row), at=tx.now)

        return raised(self.engine.read(read, patience_us=patience_us))

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
        return self._write(  # type: ignore[no-any-return]
            lambda tx: leases.revoke(tx, lease_id, reason, detail, grace_us, actor), durable=True
        )

    def end(self, lease_id: str, epoch: int, *, reason: EndReason, detail: str, host: str = "") -> bool:
        return self._write(  # type: ignore[no-any-return]
            lambda tx: leases.end(tx, lease_id, epoch, reason, detail, host), durable=True
        )

    def settle(self, lease_id: str, epoch: int, receipt: Receipt, *, host: str = "") -> bool:
        return self._write(  # type: ignore[no-any-return]
            lambda tx: leases.settle(tx, lease_id, epoch, receipt, host), durable=False
        )

    def receipts(self, *, tenant: str = "", limit: int = 200) -> list[Teardown]:
        return self.engine.read(lambda tx: receipts.newest(tx, tenant=tenant, limit=limit))

    def tick(self, host: str = "") -> TickResult:
        return self.engine.write(lambda tx: ticking.tick(tx, host), durable=True)

    def host_view(self, host: str) -> HostView:
        return self.engine.read(lambda tx: ticking.host_view(tx, host, tx.now))

    def leases(self, *, live_only: bool = True, tenant: str = "", limit: int = 1000) -> list[Answer]:
        def read(tx: Tx) -> list[Answer]:
            found = leases.list_leases(tx, live_only=live_only, tenant=tenant, limit=limit)
            return (
                [Answer(lease=x, at=tx.now, wait=waits.get(x.id)) for x in found]
                if (waits := _waits(tx, found))
                else [Answer(lease=x, at=tx.now) for x in found]
            )

        return self.engine.read(read)

    # devices

    def report_host(self, host: str, found: Sequence[FoundDevice], *, complete: bool = True) -> None:
        check_name(host, what="host")
        self._write(lambda tx: devices.report_host(tx, host, found, complete), durable=True)

    def beat_host(self, host: str) -> None:
        self._write(lambda tx: devices.beat_host(tx, host), durable=False)

    def devices(self, host: str = "") -> list[Device]:
        return self.engine.read(lambda tx: devices.list_devices(tx, host))

    def set_device(self, device_id: str, *, state: str, note: str, actor: str) -> Device:
        if len(note) > 500 or not (note.isprintable() or not note):
            raise BadInput("a note is one line of at most 500 printable characters")
        return self._write(lambda tx: devices.set_device(tx, device_id, state, note, actor), durable=True)  # type: ignore[no-any-return]

    # tenants

    def tenants(self) -> list[Tenant]:
        return self.engine.read(tenants.list_tenants)

    def tenant(self, name: str) -> Tenant:
        return raised(self.engine.read(lambda tx: tenants.get_tenant(tx, name)))

    def add_tenant(self, tenant: Tenant, *, actor: str, exist_ok: bool = False) -> Tenant:
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
        return self._write(lambda tx: tenants.add_tenant(tx, tenant, actor, exist_ok), durable=True)  # type: ignore[no-any-return]

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
        return self._write(lambda tx: tenants.set_tenant(tx, name, changes, actor), durable=True)  # type: ignore[no-any-return]

    def allowance(self, name: str) -> Allowance:
        return raised(self.engine.read(lambda tx: tenants.get_allowance(tx, name)))

    def remove_tenant(self, name: str, *, actor: str) -> None:
        self._write(lambda tx: tenants.remove_tenant(tx, name, actor), durable=True)

    # tokens

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
    ) -> Token:
        check_name(tenant, what="tenant")
        check_id(token_id)
        check_digest(digest)
        check_note(note)
        if not 0 <= lifetime_us <= MAX_DURATION_US:
            raise BadInput("a token expires after at most a year; 0: never")
        return self._write(  # type: ignore[no-any-return]
            lambda tx: tokens.add(tx, token_id, digest, tenant, scope, lifetime_us, note, actor), durable=True
        )

    def tokens(self, tenant: str = "") -> list[Token]:
        return self.engine.read(lambda tx: tokens.list_tokens(tx, tenant))

    def look_token(self, token_id: str) -> Token | None:
        return tokens.token_of(self.engine.glance(tokens.BY_ID, token_id))

    def rotate_token(
        self, token_id: str, new_id: str, digest: str, *, actor: str, overlap_us: int = 0
    ) -> Token:
        check_id(token_id)
        check_id(new_id)
        check_digest(digest)
        if not 0 <= overlap_us <= MAX_DURATION_US:
            raise BadInput("an overlap is at most a year; 0: the old token is refused at once")
        return self._write(  # type: ignore[no-any-return]
            lambda tx: tokens.rotate(tx, token_id, new_id, digest, overlap_us, actor), durable=True
        )

    def revoke_token(self, token_id: str, *, actor: str) -> Token:
        check_id(token_id)
        return self._write(lambda tx: tokens.revoke(tx, token_id, actor), durable=True)  # type: ignore[no-any-return]

    # studio sessions

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
    ) -> SessionAnswer:
        asked = opened(
            session_id,
            tenant,
            request=request,
            warm_us=warm_us,
            name=name,
            checkpoint=checkpoint,
            host=host,
        )
        return self._write(lambda tx: sessions.open_session(tx, asked), durable=True)  # type: ignore[no-any-return]

    def look_session(self, session_id: str, tenant: str, *, explain: bool = False) -> SessionAnswer:
        if not explain:
            return raised(self.engine.read(lambda tx: sessions.look(tx, session_id, tenant)))

        def read(tx: Tx) -> SessionAnswer | SubletError:
            found = sessions.look(tx, session_id, tenant)
            if isinstance(found, SubletError) or found.lease is None:
                return found
            return replace(found, wait=waitlist.explained(tx, found.lease))

        return raised(self.engine.read(read))

    def look_visits(
        self, keys: Sequence[tuple[str, str]]
    ) -> dict[tuple[str, str], tuple[Token, SessionAnswer | None]]:
        def read(tx: Tx) -> dict[tuple[str, str], tuple[Token, SessionAnswer | None]]:
            visits: dict[tuple[str, str], tuple[Token, SessionAnswer | None]] = {}
            for token_id, session_id in keys:
                token = tokens.look(tx, token_id)
                if token is not None:
                    found = sessions.look(tx, session_id, token.tenant)
                    session = None if isinstance(found, SubletError) else found
                    visits[(token_id, session_id)] = (token, session)
            return visits

        return self.engine.read(read)

    def sessions(self, *, tenant: str = "", open_only: bool = True, limit: int = 1000) -> list[SessionAnswer]:
        def read(tx: Tx) -> list[SessionAnswer]:
            found = sessions.list_sessions(tx, tenant, open_only, limit)
            waits = _waits(tx, [x.lease for x in found if x.lease is not None])
            return [replace(x, wait=waits.get(x.lease.id)) if x.lease is not None else x for x in found]

        return self.engine.read(read)

    def touch_sessions(self, keys: Sequence[tuple[str, str]]) -> None:
        if keys:
            self.engine.write(lambda tx: sessions.touch(tx, keys), durable=False)

    def answer_offer(self, session_id: str, tenant: str, *, accept: bool) -> SessionAnswer:
        return self._write(  # type: ignore[no-any-return]
            lambda tx: sessions.answer_offer(tx, session_id, tenant, accept), durable=True
        )

    def resume_session(self, session_id: str, tenant: str) -> SessionAnswer:
        return self._write(lambda tx: sessions.resume(tx, session_id, tenant), durable=True)  # type: ignore[no-any-return]

    def end_session(self, session_id: str, tenant: str, *, detail: str, actor: str) -> SessionAnswer:
        check_detail(detail)
        return self._write(  # type: ignore[no-any-return]
            lambda tx: sessions.end(tx, session_id, tenant, detail, actor), durable=True
        )

    def host_sessions(self, host: str) -> list[SessionAnswer]:
        return self.engine.read(lambda tx: sessions.of_host(tx, host))

    def bind_session(self, session_id: str, *, number: int, lease_id: str) -> SessionAnswer:
        check_name(lease_id, what="lease id")
        return self._write(lambda tx: sessions.bind(tx, session_id, number, lease_id), durable=True)  # type: ignore[no-any-return]

    def note_session(
        self,
        session_id: str,
        *,
        calls: int = 0,
        errors: int = 0,
        launches: int = 0,
        checkpoint_bytes: int = 0,
    ) -> None:
        counts = (calls, errors, launches, checkpoint_bytes)
        if any(count < 0 for count in counts):
            raise BadInput("a count is never negative")
        if any(counts):
            self.engine.write(lambda tx: sessions.note(tx, session_id, *counts), durable=False)

    def drop_sessions(self, before: int) -> int:
        return self.engine.write(lambda tx: sessions.drop(tx, before), durable=False)

    # what sessions used, and what that costs

    def session_usage(
        self, *, tenant: str = "", session_id: str = "", since: int = 0, limit: int = 1000
    ) -> list[SessionUsage]:
        return self.engine.read(lambda tx: session_usage.used(tx, tenant, session_id, since, limit))

    def prices(self) -> list[Price]:
        return self.engine.read(prices.list_prices)

    def set_price(self, device_class: str, micro_per_gpu_hour: int, *, actor: str, tier: str = "") -> Price:
        check_class(device_class)
        check_tier(tier)
        check_micro(micro_per_gpu_hour)
        return self.engine.write(
            lambda tx: prices.put(tx, device_class, tier, micro_per_gpu_hour, actor), durable=True
        )

    def remove_price(self, device_class: str, *, actor: str, tier: str = "") -> None:
        self._write(lambda tx: prices.remove(tx, device_class, tier, actor), durable=True)

    def stored_bytes(self, tenant: str) -> int:
        return self.engine.read(lambda tx: storage.stored_bytes(tx, tenant))

    # progress

    def reserve(self, key: LeaseKey, *, effect: str, job: str, fingerprint: str) -> Reserved | Duplicate:
        check_job(job)
        check_key(effect)
        check_key(fingerprint, what="fingerprint")
        return self._write(  # type: ignore[no-any-return]
            lambda tx: progress.reserve(tx, key, effect, job, fingerprint), durable=True
        )

    def commit(self, key: LeaseKey, commit: Commit) -> Committed | Duplicate:
        check_job(commit.job)
        return self._write(lambda tx: progress.commit(tx, key, commit), durable=True)  # type: ignore[no-any-return]

    def head(self, job: str) -> Head | None:
        return self.engine.read(lambda tx: progress.load_head(tx, job))

    def heads(self, *, tenant: str = "") -> list[Head]:
        return self.engine.read(lambda tx: progress.load_heads(tx, tenant))

    def effect(self, key: str) -> Effect | None:
        return self.engine.read(lambda tx: progress.load_effect(tx, key))

    def effects(self, job: str, *, after: str = "", limit: int = 1000) -> list[Effect]:
        return self.engine.read(lambda tx: proof.list_effects(tx, job, after, limit))

    def prove(self, *jobs: str, archived: Sequence[Path] = ()) -> list[Proof]:
        archive = Archive(archived)
        return raised(self.engine.read(lambda tx: proof.prove(tx, jobs, archive)))

    # block leases

    def grant_block(self, block_id: str, secret: str, request: BlockRequest, holder: Holder) -> BlockAnswer:
        check_locator(block_id)
        check_name(request.tenant, what="tenant")
        check_name(holder.host, what="host")
        return self._write(lambda tx: blocks.grant(tx, block_id, secret, request, holder), durable=True)  # type: ignore[no-any-return]

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
        check_locator(block_id)
        check_name(holder.host, what="host")
        check_times(ttl_us, keep_us)
        return self._write(  # type: ignore[no-any-return]
            lambda tx: blocks.attach(tx, block_id, secret, tenant, holder, ttl_us, keep_us, dead_epoch),
            durable=True,
        )

    def renew_block(self, key: LeaseKey, *, patience_us: int | None = None) -> BlockAnswer:
        return self._write(lambda tx: blocks.renew(tx, key), durable=False, patience_us=patience_us)  # type: ignore[no-any-return]

    def check_block(self, key: LeaseKey) -> BlockAnswer:
        return self._write(lambda tx: blocks.check(tx, key), durable=False)  # type: ignore[no-any-return]

    def record_block(self, key: LeaseKey, done: BlockRecord) -> BlockAnswer:
        return self._write(lambda tx: blocks.record(tx, key, done), durable=True)  # type: ignore[no-any-return]

    def release_block(self, block_id: str, secret: str, *, patience_us: int | None = None) -> bool:
        return self._write(  # type: ignore[no-any-return]
            lambda tx: blocks.release(tx, block_id, secret), durable=False, patience_us=patience_us
        )

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
        check_locator(block_id)
        return self._write(  # type: ignore[no-any-return]
            lambda tx: blocks.remove(tx, block_id, tenant, holder, secret, dead_epoch, actor), durable=True
        )

    def sweep_blocks(self) -> list[str]:
        return self.engine.write(blocks.sweep, durable=True)

    def look_block(self, block_id: str, tenant: str) -> BlockAnswer:
        check_locator(block_id)
        return raised(self.engine.read(lambda tx: blocks.look(tx, block_id, tenant)))

    def blocks(self, *, tenant: str = "", gone: bool = False, limit: int = 1000) -> list[BlockAnswer]:
        return self.engine.read(lambda tx: blocks.list_blocks(tx, tenant=tenant, gone=gone, limit=limit))

    def removed_blocks(self, block_ids: Sequence[str]) -> set[str]:
        return self.engine.read(lambda tx: blocks.removed(tx, list(block_ids)))

    # versions

    def versions(self, job: str) -> Versions:
        return raised(self.engine.read(lambda tx: versions.load(tx, job)))

    def all_versions(self) -> list[Versions]:
        return self.engine.read(versions.load_all)

    def retain(
        self, job: str, *, expected_sweeps: int, floor: int, kept: Sequence[Kept], actor: str
    ) -> Versions:
        versions.check_kept(kept)
        return self._write(  # type: ignore[no-any-return]
            lambda tx: versions.retain(tx, job, expected_sweeps, floor, kept, actor), durable=True
        )

    def tag(self, job: str, kept: Kept, *, expected_sweeps: int, actor: str) -> Versions:
        check_tag(kept.tag)
        return self._write(lambda tx: versions.tag(tx, job, expected_sweeps, kept, actor), durable=True)  # type: ignore[no-any-return]

    def untag(self, job: str, tag: str, *, actor: str) -> Versions:
        check_tag(tag)
        return self._write(lambda tx: versions.untag(tx, job, tag, actor), durable=True)  # type: ignore[no-any-return]

    def adopt(self, adoption: Adoption, *, actor: str) -> Adopted:
        return self._write(lambda tx: versions.adopt(tx, adoption, actor), durable=True)  # type: ignore[no-any-return]

    # journal, meter, policy

    def verify(self, archived: Sequence[Path] = ()) -> Verification:
        archive = Archive(archived)
        return self.engine.read(lambda tx: journal.verify(tx, archive))

    def prune(self, *, keep_us: int, into: Path, actor: str, dry_run: bool = False) -> Pruned:
        return pruning.prune(self.engine, keep_us=keep_us, into=into, actor=actor, dry_run=dry_run)

    def tail(self, *, after: int = -1, limit: int = 50) -> list[tuple[int, Entry]]:
        return self.engine.read(lambda tx: journal.tail(tx, after, limit))

    def follow(self, *, after: int, limit: int) -> Followed:
        return self.engine.read(lambda tx: journal.follow(tx, after, limit))

    def seal(self) -> str:
        return self.engine.write(journal.seal, durable=True)

    def usage(self, *, tenant: str = "", since: int = 0) -> list[Usage]:
        def read(tx: Tx) -> list[Usage]:
            where, params = "granted_at > 0 AND state = 'ended' AND ended_at >= ?", [since]
            if tenant:
                where, params = f"tenant = ? AND {where}", [tenant, since]  # type: ignore[list-item]
            found = tx.rows(f"{SELECT_LEASE} WHERE {where} ORDER BY ended_at, id", *params)
            return [meter.of_ended(lease_of(row)) for row in found]

        return self.engine.read(read)

    def held(self, *, tenant: str = "", job: str = "", since: int = 0) -> HeldTime:
        return self.engine.read(lambda tx: goodput.held(tx, tenant, job, since))

    def metered(self, *, after: int, late_after: int, limit: int = 20_000) -> MeterPage:
        def read(tx: Tx) -> MeterPage:
            # As a writer: what is held is counted up to now, and one that is just ending it would end it before that, and the sum would fall.
            _ = tx.pool
            return meters.page(tx, after, late_after, limit)

        return self.engine.write(read, durable=False)

    def stays(self, *, since: int = 0) -> Stays:
        return self.engine.read(lambda tx: meters.stays(tx, since))

    def policy(self) -> Policy:
        def read(tx: Tx) -> Policy:
            row = tx.row("SELECT policy FROM pool WHERE id = 1")
            assert row is not None
            return policy_of(row[0])

        return self.engine.read(read)

    def set_policy(self, policy: Policy, *, actor: str) -> None:
        def work(tx: Tx) -> None:
            tx.pool.policy_text, tx.pool._policy, tx.pool.dirty = policy.to_text(), policy, True
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

    def unstick(self) -> str:
        return self.engine.unstick()

    def describe(self) -> dict[str, str]:
        return self.engine.describe()

    def mark_restored(self, *, actor: str) -> int:
        return self.engine.write(lambda tx: restored.mark_restored(tx, actor), durable=True)

    def identity(self) -> Identity:
        return self.engine.read(restored.identity)

    def mark_current(self, *, actor: str) -> None:
        self.engine.write(lambda tx: restored.mark_current(tx, actor), durable=True)

    def close(self) -> None:
        self.engine.close()


def check_request(lease_id: str, request: Request, holder: Holder) -> None:
    """Every name in a request, before it reaches a statement, a journal row or a file name."""
    check_name(request.tenant, what="tenant")
    check_name(lease_id, what="lease id")
    check_name(holder.host, what="host")
    if request.host:
        check_name(request.host, what="host")
    if request.job:
        check_job(request.job)
    if request.spread is Spread.OK and request.count > 1 and holder.pid:
        raise BadInput(
            "devices that may be of several hosts are asked for by name: no process is on all of them",
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


def _waits(tx: Tx, found: list[Lease]) -> dict[str, Wait]:
    """Position and reason of every waiter, in one pass."""
    if not any(x.state is LeaseState.WAITING for x in found):
        return {}
    view = waitlist.load_view(tx, with_leases=False)
    return {
        w.id: Wait(position=i, eta_us=None, reason=why_waiting(w, view, tx.now))
        for i, w in enumerate(in_order(view, tx.now), 1)
    }
