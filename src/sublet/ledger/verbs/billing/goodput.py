"""Reading what a report adds up: leases that were held, and the commits under them."""

from __future__ import annotations

import json
from collections.abc import Iterator

from sublet.core.billing.goodput import CommitUse, DayUse, day_of
from sublet.ledger.rows import SELECT_LEASE, lease_of
from sublet.ledger.tx import Tx
from sublet.ports.ledger import HeldTime

#: A commit's own effect has what it computed. One that a rollback took back has none, or one of a later
#: version.
_COMMITS = (
    "SELECT j.strand, j.at, j.body, e.outcome, e.version FROM journal j "
    "LEFT JOIN effect e ON e.key = j.subject AND e.completed = 1 "
    "WHERE j.kind = 'step.committed' AND "
)


def held(tx: Tx, tenant: str, job: str, since: int) -> HeldTime:
    from sublet.ledger.verbs.journal import pruning  # which reads commits through this module

    mark = pruning.mark_of(tx)
    where = (
        "granted_at > 0 AND (state <> 'ended' OR ended_at >= ?) "
        "AND NOT EXISTS (SELECT 1 FROM leaving x WHERE x.lease_id = lease.id AND x.upto <= ?)"
    )
    found = [
        lease_of(r)
        for r in tx.rows(f"{SELECT_LEASE} WHERE {where} ORDER BY granted_at, id", since, mark.upto)
    ]
    commits = (*_carried(tx, "at >= ?", since), *_read(tx, "j.id > ? AND j.at >= ?", mark.upto, since))
    first_day = day_of(since)
    removed = [
        *pruning.day_uses_of(tx, tenant, job, first_day),
        *(
            use
            for use in _leaving(tx, mark.upto)
            if use.day >= first_day and (not tenant or use.tenant == tenant)
        ),
    ]
    of_job = {c.lease for c in commits if c.job == job}
    wanted = tuple(
        lease
        for lease in found
        if (not tenant or lease.tenant == tenant)
        and (not job or lease.request.job == job or lease.id in of_job)
    )
    return HeldTime(
        at=tx.now,
        leases=wanted,
        commits=commits,
        removed=tuple(use for use in removed if not job or use.job == job),
        pruned_before=mark.before,
    )


def commits_between(tx: Tx, after: int, upto: int) -> Iterator[CommitUse]:
    """Commits in the journal's rows after one number and up to another."""
    return _read(tx, "j.id > ? AND j.id <= ?", after, upto)


def carried_commits(tx: Tx, lease: str) -> Iterator[CommitUse]:
    """Commits whose journal rows were pruned before their lease was over."""
    return _carried(tx, "lease_id = ?", lease)


def _carried(tx: Tx, where: str, value: object) -> Iterator[CommitUse]:
    for row in tx.rows(
        f"SELECT lease_id, job, at, steps, compute_us FROM pruned_commit WHERE {where} ORDER BY at", value
    ):
        yield CommitUse(lease=row[0], job=row[1], at=row[2], steps=row[3], compute_us=row[4])


def _leaving(tx: Tx, upto: int) -> Iterator[DayUse]:
    """What leases used that the prune has removed, whether or not their rows are gone yet."""
    for (text,) in tx.rows("SELECT used FROM leaving WHERE upto <= ?", upto):
        yield from (DayUse(**told) for told in json.loads(text))


def _read(tx: Tx, where: str, *params: object) -> Iterator[CommitUse]:
    for strand, at, body, outcome, version in tx.stream(f"{_COMMITS}{where} ORDER BY j.id", *params):
        told = json.loads(body)
        yield CommitUse(
            lease=told["lease"],
            job=strand.removeprefix("job:"),
            at=at,
            steps=told["step"] - told["first"] + 1,
            compute_us=compute_us(outcome) if version == told["version"] else 0,
        )


def compute_us(outcome: str | None) -> int:
    """0 when the outcome is one of the user's own, which does not say how long the steps computed."""
    try:
        said = json.loads(outcome or "")
        found = said.get("compute_us", 0) if isinstance(said, dict) else 0
    except ValueError:
        return 0
    return found if type(found) is int and found > 0 else 0
