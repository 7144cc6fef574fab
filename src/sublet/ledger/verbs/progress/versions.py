"""Versions behind a head: retention, tags, and heads that an operator moves.

Rules of this file:
- Each verb locks the pool, then the head rows it needs in the order of their names, then decides, then
  writes, and is journalled on the job's strand in the same transaction. None needs a lease: a holder that
  saves later finds the head moved (S2).
- What may take a version away counts `sweeps` up; what was read under an older count is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from sublet.core.checkpoints.versions import Adoption, KeptVersion, Versions, decide_adopt, decide_retain
from sublet.core.errors import BadInput, HeadMoved, NotFound, SubletError
from sublet.core.journal.chain import StrandEnd, job_strand
from sublet.ledger.rows import EFFECT_COLUMNS, HEAD_COLUMNS, effect_of, head_of
from sublet.ledger.tx import Row, Tx, write_main, write_strand
from sublet.ledger.verbs.progress import storage_quota
from sublet.ledger.verbs.progress.commit import effect_owner_alive
from sublet.machine.failpoints import failpoint
from sublet.ports.ledger import Adopted

_KEPT = "version, digest, step, tag"


def _kept(tx: Tx, job: str) -> tuple[KeptVersion, ...]:
    rows = tx.rows(f"SELECT {_KEPT} FROM kept_version WHERE job = ? ORDER BY version DESC, tag", job)
    return tuple(KeptVersion(version=r[0], digest=r[1], step=r[2], tag=r[3]) for r in rows)


def load(tx: Tx, job: str) -> Versions | SubletError:
    row = tx.row(f"SELECT {HEAD_COLUMNS} FROM head WHERE job = ?", job)
    if row is None:
        return NotFound(f"nothing was committed as {job}", remedy="'sublet checkpoint ls' lists what was")
    return Versions(head=head_of(row), kept=_kept(tx, job))


def load_all(tx: Tx) -> list[Versions]:
    """The versions of every job as of one moment, which a sweep must not touch."""
    kept: dict[str, list[KeptVersion]] = {}
    for r in tx.rows(f"SELECT job, {_KEPT} FROM kept_version ORDER BY job, version DESC, tag"):
        kept.setdefault(r[0], []).append(KeptVersion(version=r[1], digest=r[2], step=r[3], tag=r[4]))
    heads = [head_of(r) for r in tx.rows(f"SELECT {HEAD_COLUMNS} FROM head ORDER BY job")]
    return [Versions(head=h, kept=tuple(kept.get(h.job, ()))) for h in heads]


def _locked(tx: Tx, job: str) -> Row | None:
    return tx.locked(f"SELECT {HEAD_COLUMNS} FROM head WHERE job = ?", job)


def _journal(tx: Tx, row: Row, kind: str, body: dict[str, object]) -> StrandEnd:
    end = write_strand(tx, job_strand(row[0]), StrandEnd(row[8], row[9]), kind, row[1], row[0], body)
    tx.run("UPDATE head SET strand_seq = ?, strand_hash = ? WHERE job = ?", end.seq, end.hash, row[0])
    return end


def _refuse(tx: Tx, job: str, tenant: str, actor: str, error: SubletError) -> SubletError:
    body: dict[str, object] = {"code": error.code, "reason": error.message, "by": actor}
    write_main(tx, "head.refused", tenant, job, body)
    return error


def _put(tx: Tx, job: str, kept: Sequence[KeptVersion]) -> None:
    for k in kept:
        tx.run(
            "INSERT INTO kept_version (job, version, tag, digest, step, at) VALUES (?,?,?,?,?,?) "
            "ON CONFLICT (job, version, tag) DO NOTHING",
            job,
            k.version,
            k.tag,
            k.digest,
            k.step,
            tx.now,
        )


def _told(kept: Sequence[KeptVersion]) -> list[list[object]]:
    """The versions as the journal keeps them, so that an edited row is noticed."""
    return [[k.version, k.digest, k.step] for k in sorted(kept, key=lambda k: k.version)]


def retain(
    tx: Tx, job: str, expected_sweeps: int, floor: int, kept: Sequence[KeptVersion], actor: str
) -> Versions | SubletError:
    _ = tx.pool
    row = _locked(tx, job)
    if row is None:
        return NotFound(f"nothing was committed as {job}")
    found = Versions(head=head_of(row), kept=_kept(tx, job))
    survivors = {(k.version, k.digest) for k in kept}
    untagged = {(k.version, k.digest) for k in found.kept if not k.tag}
    if (found.head.sweeps, found.head.floor, untagged) == (expected_sweeps + 1, floor, survivors):
        return found  # asked again after a lost answer
    refusal = decide_retain(found, expected_sweeps, floor, kept)
    if refusal is not None:
        return _refuse(tx, job, found.head.tenant, actor, refusal)
    tx.run("DELETE FROM kept_version WHERE job = ? AND tag = ''", job)
    _put(tx, job, kept)
    tx.run("UPDATE head SET floor = ?, sweeps = sweeps + 1 WHERE job = ?", floor, job)
    body: dict[str, object] = {"floor": floor, "kept": _told(kept), "by": actor}
    storage_quota.trim(tx, job)
    _journal(tx, row, "versions.retained", body)
    return _now(tx, job)


def _now(tx: Tx, job: str) -> Versions:
    found = load(tx, job)
    assert isinstance(found, Versions)
    return found


def tag(tx: Tx, job: str, expected_sweeps: int, kept: KeptVersion, actor: str) -> Versions | SubletError:
    """Give a version a name; the name leaves the version it was at before."""
    _ = tx.pool
    row = _locked(tx, job)
    if row is None:
        return NotFound(f"nothing was committed as {job}")
    found = Versions(head=head_of(row), kept=_kept(tx, job))
    before = found.tags.get(kept.tag)
    if before == kept:
        return found
    head = found.head
    if head.sweeps != expected_sweeps:
        moved = HeadMoved(f"versions of {job} were dropped meanwhile: look again", version=head.version)
        return _refuse(tx, job, head.tenant, actor, moved)
    known = {(k.version, k.digest) for k in found.kept}
    if not (max(head.floor, 1) <= kept.version <= head.version or (kept.version, kept.digest) in known):
        return NotFound(f"{job} has no version {kept.version}", remedy=f"'sublet checkpoint show {job}'")
    if before is not None:
        tx.run("DELETE FROM kept_version WHERE job = ? AND tag = ?", job, kept.tag)
        tx.run("UPDATE head SET sweeps = sweeps + 1 WHERE job = ?", job)
    _put(tx, job, [kept])
    storage_quota.trim(tx, job)
    body: dict[str, object] = {
        "tag": kept.tag,
        "version": kept.version,
        "digest": kept.digest,
        "step": kept.step,
        "by": actor,
    }
    _journal(tx, row, "version.tagged", body)
    return _now(tx, job)


def untag(tx: Tx, job: str, name: str, actor: str) -> Versions | SubletError:
    _ = tx.pool
    row = _locked(tx, job)
    if row is None:
        return NotFound(f"nothing was committed as {job}")
    if not tx.run("DELETE FROM kept_version WHERE job = ? AND tag = ?", job, name):
        if tx.again:
            return _now(tx, job)
        return NotFound(f"{job} has no tag {name}", remedy=f"'sublet checkpoint show {job}' lists its tags")
    tx.run("UPDATE head SET sweeps = sweeps + 1 WHERE job = ?", job)
    storage_quota.trim(tx, job)
    _journal(tx, row, "version.untagged", {"tag": name, "by": actor})
    return _now(tx, job)


def adopt(tx: Tx, wanted: Adoption, actor: str) -> Adopted | SubletError:
    pool = tx.pool
    names = {wanted.job} | ({wanted.source.job} if wanted.source else set())
    rows = {name: _locked(tx, name) for name in sorted(names)}
    row = rows[wanted.job]
    source_row = rows[wanted.source.job] if wanted.source else None
    head = head_of(row) if row else None
    decision = decide_adopt(wanted, head, head_of(source_row) if source_row else None)
    if isinstance(decision, SubletError):
        return _refuse(tx, wanted.job, wanted.tenant, actor, decision)
    if head is not None and decision is head:
        return Adopted(head=head, forgotten=0)
    if tx.row("SELECT name FROM tenant WHERE name = ?", wanted.tenant) is None:
        return NotFound(f"there is no tenant {wanted.tenant}", remedy="'sublet tenant add' makes one")
    if row is None:
        body: dict[str, object] = {"reason": wanted.reason, "by": actor}
        anchor = write_main(tx, "job.started", wanted.tenant, wanted.job, body)
        tx.run(
            f"INSERT INTO head ({HEAD_COLUMNS}, strand_anchor) VALUES (?,?,0,0,'','',0,0,0,?,0,0,?)",
            wanted.job,
            wanted.tenant,
            anchor,
            anchor,
        )
        row = _locked(tx, wanted.job)
        assert row is not None
    failpoint("adopt_before_head")
    forgotten = _forget(tx, wanted)
    _put(tx, wanted.job, wanted.kept)
    if decision.epoch > pool.epoch:
        # Of a ledger that was lost: whoever leases next must be newer than whoever saved this.
        pool.epoch, pool.dirty = decision.epoch, True
    tx.run(
        "UPDATE head SET version = ?, step = ?, digest = ?, cursor_text = '', epoch = ?, committed_at = ?, "
        "floor = ? "
        "WHERE job = ?",
        decision.version,
        decision.step,
        decision.digest,
        decision.epoch,
        tx.now,
        decision.floor,
        wanted.job,
    )
    storage_quota.charge(tx, wanted.job, wanted.version, wanted)
    storage_quota.trim(tx, wanted.job)
    _journal(
        tx,
        row,
        "head.adopted",
        {
            "reason": wanted.reason,
            "version": wanted.version,
            "before": wanted.expected_version,
            "digest": wanted.digest,
            "step": wanted.step,
            "epoch": decision.epoch,
            "floor": decision.floor,
            "kept": _told(wanted.kept),
            "source": wanted.source.job if wanted.source else "",
            "forget_after": wanted.forget_after,
            "forgotten": forgotten,
            "by": actor,
        },
    )
    return Adopted(head=_now(tx, wanted.job).head, forgotten=forgotten)


def _forget(tx: Tx, wanted: Adoption) -> int:
    """Delete the effects of later versions, so that their steps can run again. A reservation goes too unless
    its owner still lives: two holders must not work on one effect at a time."""
    if wanted.forget_after is None:
        return 0
    done = tx.run(
        "DELETE FROM effect WHERE job = ? AND completed = 1 AND version > ?", wanted.job, wanted.forget_after
    )
    for r in tx.rows(f"SELECT {EFFECT_COLUMNS} FROM effect WHERE job = ? AND completed = 0", wanted.job):
        effect = effect_of(r)
        if not effect_owner_alive(tx, effect, tx.now):
            done += tx.run("DELETE FROM effect WHERE key = ? AND completed = 0", effect.key)
    return done


def check_kept(kept: Sequence[KeptVersion]) -> None:
    if len({k.version for k in kept}) != len(kept):
        raise BadInput("a version is kept once")
