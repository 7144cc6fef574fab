"""Reading what a report adds up: leases that were held, and the commits under them."""

from __future__ import annotations

import json
from collections.abc import Iterator

from sublet.core.goodput import Commitment
from sublet.ledger.rows import SELECT_LEASE, lease_of
from sublet.ledger.tx import Tx
from sublet.ports.ledger import HeldTime

#: A commit's own effect has what it computed. One that a rollback took back has none, or one of a later version.
_COMMITS = (
    "SELECT j.strand, j.at, j.body, e.outcome, e.version FROM journal j "
    "LEFT JOIN effect e ON e.key = j.subject AND e.completed = 1 "
    "WHERE j.kind = 'step.committed' AND j.at >= ? ORDER BY j.id"
)


def held(tx: Tx, tenant: str, job: str, since: int) -> HeldTime:
    where, params = "granted_at > 0 AND (state <> 'ended' OR ended_at >= ?)", [since]
    found = [lease_of(r) for r in tx.rows(f"{SELECT_LEASE} WHERE {where} ORDER BY granted_at, id", *params)]
    commits = tuple(_commits(tx, since))
    of_job = {c.lease for c in commits if c.job == job}
    wanted = tuple(
        lease
        for lease in found
        if (not tenant or lease.tenant == tenant)
        and (not job or lease.request.job == job or lease.id in of_job)
    )
    return HeldTime(at=tx.now, leases=wanted, commits=commits)


def _commits(tx: Tx, since: int) -> Iterator[Commitment]:
    for strand, at, body, outcome, version in tx.stream(_COMMITS, since):
        told = json.loads(body)
        yield Commitment(
            lease=told["lease"],
            job=strand.removeprefix("job:"),
            at=at,
            steps=told["step"] - told["first"] + 1,
            compute_us=compute_us(outcome) if version == told["version"] else 0,
        )


def compute_us(outcome: str | None) -> int:
    """Whoever commits without saying how long it computed has an outcome of its own making."""
    try:
        said = json.loads(outcome or "")
        found = said.get("compute_us", 0) if isinstance(said, dict) else 0
    except ValueError:
        return 0
    return found if type(found) is int and found > 0 else 0
