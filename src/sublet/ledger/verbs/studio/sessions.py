"""Studio sessions, as tenants use them and as the session host sees them.

Rules of this file:
- Every statement names the tenant, except those of the session host, which has the id from its own host's
  list. A session of somebody else and one that never was are the same `NotFound` (T1).
- The pool is locked first, then the session's row, then its lease is read. `touch` and `note` lock only
  session rows, in the order of their ids, and write no journal row: being used is not a decision.
- What may be done is `core.studio.session`'s. The row and its journal row are written in one transaction
  (A1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from sublet.core.errors import BadInput, NotFound, NotIsolated, Stale, SubletError
from sublet.core.journal.counters import work_of
from sublet.core.studio import session as rules
from sublet.core.studio.session import StudioSession
from sublet.ledger.rows import INSERT_SESSION, SELECT_SESSION, session_lease_of, session_of, session_values
from sublet.ledger.tx import Row, Tx, write_main
from sublet.ledger.verbs.journal.refusals import write_refusal
from sublet.ledger.verbs.leasing.slices import load_tenant, unknown_tenant
from sublet.ports.bell import session_topic
from sublet.ports.ledger import SessionAnswer

#: The hot read: one statement, by id and tenant.
LOOK = f"{SELECT_SESSION} WHERE s.id = ? AND s.tenant = ?"


def unknown(session_id: str) -> NotFound:
    """The same answer for a session that does not exist and for somebody else's."""
    which = session_id if rules.is_id(session_id) else "of that id"  # what is no id is not repeated
    return NotFound(
        f"there is no session {which}",
        remedy="list yours, or open a new one; its checkpoint is kept",
    )


def answer_of(row: Row, at: int) -> SessionAnswer:
    return SessionAnswer(session=session_of(row), lease=session_lease_of(row), at=at)


def look(tx: Tx, session_id: str, tenant: str) -> SessionAnswer | SubletError:
    row = tx.row(LOOK, session_id, tenant) if rules.is_id(session_id) else None
    return answer_of(row, tx.now) if row is not None else unknown(session_id)


def list_sessions(tx: Tx, tenant: str, open_only: bool, limit: int) -> list[SessionAnswer]:
    where, params = ["1 = 1"], []
    if open_only:
        where.append("s.ended_at = 0")
    if tenant:
        where.append("s.tenant = ?")
        params.append(tenant)
    found = tx.rows(
        f"{SELECT_SESSION} WHERE {' AND '.join(where)} ORDER BY s.opened_at DESC, s.id LIMIT ?",
        *params,
        limit,
    )
    return [answer_of(r, tx.now) for r in found]


def of_host(tx: Tx, host: str) -> list[SessionAnswer]:
    """Open sessions, and ended ones whose lease is still held."""
    found = tx.rows(f"{SELECT_SESSION} WHERE s.host = ? AND s.ended_at = 0 ORDER BY s.opened_at, s.id", host)
    found += tx.rows(
        f"{SELECT_SESSION} WHERE l.settled_at = 0 AND l.state <> 'ended' AND l.host = ? AND s.host = ? AND "
        "s.ended_at > 0 "
        "ORDER BY s.opened_at, s.id",
        host,
        host,
    )
    return [answer_of(r, tx.now) for r in found]


# --- opening ------------------------------------------------------------------------------------------------


def others_have(tx: Tx, tenant: str) -> bool:
    """Also ended ones: what they left can be reached where tenants are not kept apart."""
    return tx.row("SELECT 1 FROM studio_session WHERE tenant <> ? LIMIT 1", tenant) is not None


def open_session(tx: Tx, asked: StudioSession, alone: NotIsolated | None) -> SessionAnswer | SubletError:
    _ = tx.pool
    row = tx.row(f"{SELECT_SESSION} WHERE s.id = ?", asked.id)
    if row is not None:
        if rules.same_wish(session_of(row), asked):
            return answer_of(row, tx.now)
        # Nothing is said about it: it may be somebody else's.
        return BadInput(
            "that id cannot be used for a new session", remedy="leave it out, or make another one"
        )
    tenant = load_tenant(tx, asked.tenant)
    if tenant is None:
        return unknown_tenant(asked.tenant)
    count = tx.row("SELECT count(*) FROM studio_session WHERE tenant = ? AND ended_at = 0", asked.tenant)
    refusal: SubletError | None = alone if alone is not None and others_have(tx, asked.tenant) else None
    refusal = refusal or rules.over_sessions(tenant, int(count[0]) if count else 0)
    if refusal is not None:
        write_refusal(tx, "session.refused", asked.tenant, asked.id, refusal.code, refusal.message)
        return refusal
    session = replace(asked, opened_at=tx.now, active_at=tx.now)
    tx.run(INSERT_SESSION, *session_values(session))
    request = session.request
    _tell(
        tx,
        session,
        "session.opened",
        {
            "name": session.name,
            "asked_bytes": request.vram_bytes,
            "count": request.count,
            "tier": request.tier.value,
            "ttl_us": request.ttl_us,
            "warm_us": session.warm_us,
            "checkpoint": session.checkpoint,
            "host": session.host,
        },
    )
    return SessionAnswer(session=session, lease=None, at=tx.now)


def _tell(tx: Tx, session: StudioSession, kind: str, body: dict[str, object]) -> None:
    write_main(tx, kind, session.tenant, session.id, body)
    tx.rings.add(session_topic(session.host))


# --- changing -----------------------------------------------------------------------------------------------

Decision = Callable[[SessionAnswer], StudioSession | SubletError]


def _change(
    tx: Tx, row: Row | None, session_id: str, kind: str, decide: Decision, body: dict[str, object]
) -> SessionAnswer | SubletError:
    """Ask the rule, write what it answered, and journal it. The row is locked."""
    if row is None:
        return unknown(session_id)
    found = answer_of(row, tx.now)
    decision = decide(found)
    if isinstance(decision, SubletError):
        return decision
    if decision is found.session:
        return found
    _write(tx, decision, found.session.version)
    _tell(tx, decision, kind, body)
    return replace(found, session=decision)


def _write(tx: Tx, s: StudioSession, before: int) -> None:
    changed = tx.run(
        "UPDATE studio_session SET lease_id = ?, leases = ?, wanted = ?, answer = ?, active_at = ?, "
        "ended_at = ?, detail = ?, "
        "version = ? WHERE id = ? AND tenant = ? AND version = ?",
        s.lease_id,
        s.leases,
        s.wanted,
        s.answer.value,
        s.active_at,
        s.ended_at,
        s.detail,
        s.version,
        s.id,
        s.tenant,
        before,
    )
    assert changed == 1, "a session changed under its own lock"


def _own(tx: Tx, session_id: str, tenant: str) -> Row | None:
    _ = tx.pool
    return tx.locked(LOOK, session_id, tenant, of="s") if rules.is_id(session_id) else None


def answer_offer(tx: Tx, session_id: str, tenant: str, accept: bool) -> SessionAnswer | SubletError:
    row = _own(tx, session_id, tenant)
    now = tx.now
    body: dict[str, object] = {"answer": "accept" if accept else "decline", "lease": row[17] if row else ""}
    return _change(
        tx,
        row,
        session_id,
        "session.answered",
        lambda found: rules.answered(found.session, found.lease, accept, now),
        body,
    )


def resume(tx: Tx, session_id: str, tenant: str) -> SessionAnswer | SubletError:
    row = _own(tx, session_id, tenant)
    now = tx.now
    body: dict[str, object] = {"after": row[17] if row else ""}
    return _change(
        tx,
        row,
        session_id,
        "session.resumed",
        lambda found: rules.resumed(found.session, found.lease, now),
        body,
    )


def end(tx: Tx, session_id: str, tenant: str, detail: str, actor: str) -> SessionAnswer | SubletError:
    row = _own(tx, session_id, tenant)
    now = tx.now
    body: dict[str, object] = {"detail": detail, "lease": row[17] if row else "", "by": actor}
    if row is not None:  # its row is forgotten one day, and counters must not fall (core.journal.counters)
        work = asdict(work_of(session_of(row)))
        body["work"] = {name: count for name, count in work.items() if name != "tenant"}
    return _change(
        tx, row, session_id, "session.ended", lambda found: rules.ended(found.session, detail, now), body
    )


def bind(tx: Tx, session_id: str, number: int, lease_id: str) -> SessionAnswer | SubletError:
    """The session host names the lease it is about to ask for, so that nobody asks for another one."""
    _ = tx.pool
    row = tx.locked(f"{SELECT_SESSION} WHERE s.id = ?", session_id, of="s")
    if row is not None and row[17] != lease_id:
        taken = tx.row("SELECT session_id FROM session_lease WHERE lease_id = ?", lease_id)
        if taken is not None:
            return Stale(f"lease {lease_id} belongs to a session already", remedy="ask with a new lease id")
    body: dict[str, object] = {"lease": lease_id, "number": number}
    found = _change(
        tx,
        row,
        session_id,
        "session.bound",
        lambda found: rules.bound(found.session, number, lease_id),
        body,
    )
    if isinstance(found, SubletError):
        return found
    added = tx.run(
        "INSERT INTO session_lease (session_id, number, lease_id, bound_at) VALUES (?,?,?,?) "
        "ON CONFLICT (session_id, number) DO NOTHING",
        session_id,
        number,
        lease_id,
        tx.now,
    )
    # The row shows the lease before: the new one has no row until it is asked for.
    return replace(found, lease=None) if added else found


def after_restore(tx: Tx) -> None:
    """After a restore all leases are over. Sessions about to get one are suspended too, or ended if they
    never had any."""
    _ = tx.pool
    for row in tx.rows(f"{SELECT_SESSION} WHERE s.ended_at = 0 ORDER BY s.id"):
        found = answer_of(row, tx.now)
        session = rules.restored(found.session, found.lease, tx.now)
        if session is not found.session:
            kind = "session.ended" if session.ended_at else "session.suspended"
            _write(tx, session, found.session.version)
            _tell(tx, session, kind, {"detail": "the ledger was restored from a backup"})


# --- being used ---------------------------------------------------------------------------------------------


def touch(tx: Tx, keys: Sequence[tuple[str, str]]) -> None:
    now = tx.now
    tx.run_many(
        "UPDATE studio_session SET active_at = ? WHERE id = ? AND tenant = ? AND ended_at = 0 AND "
        "active_at < ?",
        [
            (now, session_id, tenant, now)
            for session_id, tenant in sorted(set(keys))
            if rules.is_id(session_id)
        ],
    )


def note(tx: Tx, session_id: str, calls: int, errors: int, launches: int, checkpoint_bytes: int) -> None:
    if tx.again:
        return  # it may have been added already, and nothing is counted twice
    tx.run(
        "UPDATE studio_session SET calls = calls + ?, errors = errors + ?, launches = launches + ?, "
        "checkpoint_bytes = checkpoint_bytes + ? WHERE id = ?",
        calls,
        errors,
        launches,
        checkpoint_bytes,
        session_id,
    )


# --- forgetting ---------------------------------------------------------------------------------------------


def drop(tx: Tx, before: int, tenant: str = "") -> int:
    """Delete sessions that ended before then and hold nothing any more, of one tenant or of all. Their leases
    stay."""
    _ = tx.pool
    where, params = "s.ended_at > 0 AND s.ended_at < ?", [before]
    found = tx.rows(
        f"SELECT s.id FROM studio_session s LEFT JOIN lease l ON l.id = s.lease_id WHERE {where} "
        f"AND (l.id IS NULL OR l.state = 'ended'){' AND s.tenant = ?' if tenant else ''} ORDER BY s.id",
        *params,
        *([tenant] if tenant else []),
    )
    if not found:
        return 0
    tx.run_many("DELETE FROM session_lease WHERE session_id = ?", found)
    tx.run_many("DELETE FROM studio_session WHERE id = ?", found)
    write_main(tx, "sessions.dropped", tenant, "sessions", {"before": before, "sessions": len(found)})
    return len(found)
