"""Reads what sessions used: their leases, which of their jobs commit steps, and the price list."""

from __future__ import annotations

from sublet.core.billing.price import PriceList
from sublet.core.leasing.lease import LeaseRecord
from sublet.core.studio.session import StudioSession
from sublet.core.studio.session_usage import SessionUsage
from sublet.core.studio.session_usage import used as sum_up
from sublet.ledger.rows import LEASE_COLUMNS, SELECT_SESSION, lease_of, of_table, session_of
from sublet.ledger.tx import Tx
from sublet.ledger.verbs.billing import prices

_LEASES = (
    f"SELECT x.session_id, {of_table('l', LEASE_COLUMNS)} FROM session_lease x JOIN lease l ON l.id = "
    "x.lease_id "
    "WHERE x.session_id = ? ORDER BY x.number"
)


def used(tx: Tx, tenant: str, session_id: str, since: int, limit: int) -> list[SessionUsage]:
    where, params = ["(s.ended_at = 0 OR s.ended_at >= ?)"], list[object]([since])
    for column, value in (("tenant", tenant), ("id", session_id)):
        if value:
            where.append(f"s.{column} = ?")
            params.append(value)
    found = [
        session_of(r)
        for r in tx.rows(
            f"{SELECT_SESSION} WHERE {' AND '.join(where)} ORDER BY s.opened_at DESC, s.id LIMIT ?",
            *params,
            limit,
        )
    ]
    if not found:
        return []
    listed, classes, now = PriceList(prices.list_prices(tx)), prices.classes(tx), tx.now

    def of(session: StudioSession) -> SessionUsage:
        leases: list[LeaseRecord] = [lease_of(r[1:]) for r in tx.rows(_LEASES, session.id)]
        job = session.request.job
        head = tx.row("SELECT version FROM head WHERE job = ?", job)
        committing = {job} if head is not None and head[0] else set()
        return sum_up(
            session, leases, committing, lambda lease: listed.tariff(lease, classes), since=since, now=now
        )

    return [of(session) for session in found]
