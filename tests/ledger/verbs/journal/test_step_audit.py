"""A proof of a job from its rows (S1-S4, S7), on both engines: an honest ledger is proven, and no row of the job can be edited unseen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from sublet.core.checkpoints.versions import Adoption, AdoptionSource, KeptVersion
from sublet.core.errors import NotFound
from sublet.core.journal.step_audit import UNPROVEN
from sublet.core.leasing.lease import EndReason
from sublet.core.progress.effect import Done
from tests.ledger.rig import SECOND, Rig

KEYS = {
    "head": ("job",),
    "effect": ("key",),
    "lease": ("id",),
    "journal": ("id",),
    "kept_version": ("job", "version", "tag"),
}


def _mail(key: str, outcome: str = "sent") -> Done:
    return Done(key=key, fingerprint=f"to {key}", outcome=outcome)


def _adopt(pool: Rig, version: int, step: int, forget_after: int | None, reason: str = "rollback") -> None:
    head = pool.ledger.head("train")
    pool.ledger.adopt(
        Adoption(
            job="train",
            tenant="ada",
            expected_version=head.version,
            version=version,
            digest=f"again-{version}",
            step=step,
            epoch=head.epoch,
            reason=reason,
            source=AdoptionSource(job="train", sweeps=head.sweeps),
            forget_after=forget_after,
        ),
        actor="test",
    )


@pytest.fixture
def told(rig: Rig) -> Rig:
    """A job with everything that can happen to one: three leases, renewals, a revoke, effects, a rollback, tags, retention."""
    rig.device(gb=80)
    rig.tenant()
    first = rig.ask(10, job="train")
    rig.ledger.reserve(rig.key(first), effect="train:train", job="train", fingerprint="one runner")
    rig.commit(first, 3, first=1, expected_version=0, effects=(_mail("mail:1"),))
    rig.later(SECOND)
    rig.ledger.renew(rig.key(first))
    rig.commit(first, 4, expected_version=1)
    rig.release(first)
    second = rig.ask(10, job="train")
    rig.ledger.reserve(rig.key(second), effect="train:train", job="train", fingerprint="one runner")
    rig.ledger.reserve(rig.key(second), effect="mail:2", job="train", fingerprint="to mail:2")
    rig.commit(second, 6, first=5, expected_version=2, effects=(_mail("mail:2"), _mail("row", "{}")))
    head = rig.ledger.head("train")
    rig.ledger.tag(
        "train",
        KeptVersion(version=1, digest="digest-3", step=3, tag="good"),
        expected_sweeps=head.sweeps,
        actor="t",
    )
    rig.ledger.tag(
        "train", KeptVersion(version=2, digest="digest-4", step=4, tag="good"), expected_sweeps=0, actor="t"
    )
    _adopt(rig, 4, 4, forget_after=2)
    rig.commit(second, 7, first=5, expected_version=4, effects=(_mail("mail:2"),))
    rig.ledger.retain(
        "train",
        expected_sweeps=1,
        floor=4,
        kept=[KeptVersion(version=1, digest="digest-3", step=3)],
        actor="t",
    )
    rig.ledger.revoke(
        second.lease.id, reason=EndReason.PREEMPTED, detail="somebody waits", grace_us=9 * SECOND, actor="t"
    )
    rig.later(SECOND)
    rig.commit(second, 8, expected_version=5)
    rig.release(second)
    third = rig.ask(10, job="train")
    rig.ledger.reserve(rig.key(third), effect="train:train", job="train", fingerprint="one runner")
    rig.commit(third, 10, first=9, expected_version=6)
    rig.ledger.reserve(rig.key(third), effect="mail:3", job="train", fingerprint="to mail:3")
    other = rig.ask(10, job="other")
    rig.commit(other, 42, starts=True, job="other", expected_version=0)
    return rig


def flaws(pool: Rig, job: str = "train") -> list[str]:
    (proof,) = pool.ledger.prove(job)
    return [f"{f.row}: {f.rule} {f.what}" for f in proof.flaws]


def test_an_honest_ledger_is_proven(told: Rig) -> None:
    train, other = told.ledger.prove("train", "other")
    assert train.flaws == ()
    assert (train.first, train.step, train.version) == (1, 10, 7)
    assert (train.commits, train.undone, train.moves, train.effects) == (5, 1, 1, 2)
    assert (train.leases, train.epochs, train.reserved) == (3, (1, 3), 2)
    assert (other.flaws, other.first, other.step, other.commits) == ((), 42, 42, 1)
    assert [p.job for p in told.ledger.prove()] == ["other", "train"]
    with pytest.raises(NotFound):
        told.ledger.prove("nothing")
    assert told.faults() == []


def _columns(pool: Rig, table: str) -> list[str]:
    if pool.engine == "sqlite":
        return [r[1] for r in pool.sql(f"PRAGMA table_info({table})")]
    found = pool.sql(
        "SELECT column_name FROM information_schema.columns WHERE table_name = ? AND table_schema = ? ORDER BY ordinal_position",
        table,
        pool.schema.name,
    )
    return [r[0] for r in found]


OTHERS = {
    "state": ["active", "revoking", "ended"],
    "reason": ["", "released", "expired", "preempted"],
    "tier": ["spot", "batch", "interactive"],
    "exclusivity": ["shared", "session"],
    "completed": [0, 1, 2],
    "kind": ["head.adopted", "step.committed", "lease.renewed", "nothing"],
}


def _edits(column: str, value: Any) -> Iterator[Any]:
    """What somebody might write there by hand."""
    yield from (other for other in OTHERS.get(column, []) if other != value)
    if column in OTHERS:
        return
    if isinstance(value, int):
        yield value + 1
        if value > 1:
            yield value - 1
    elif isinstance(value, str):
        yield value + "x" if value else "x"
        if column == "body":
            told = json.loads(value)
            for name in told:
                if isinstance(told[name], int):
                    yield json.dumps(told | {name: told[name] + 1})
                    break


def _rows_of_the_job(pool: Rig, table: str) -> list[tuple[Any, ...]]:
    if table == "lease":
        return pool.sql("SELECT * FROM lease WHERE job = 'train' ORDER BY id")
    if table == "journal":
        leases = [f"lease:{r[0]}" for r in pool.sql("SELECT id FROM lease WHERE job = 'train'")]
        rows = pool.sql("SELECT * FROM journal ORDER BY id")
        return [r for r in rows if r[1] in ("main", "job:train", *leases)]
    return pool.sql(f"SELECT * FROM {table} WHERE job = 'train'")


@pytest.mark.parametrize("table", list(KEYS))
def test_no_row_of_the_job_can_be_edited_unseen(told: Rig, table: str) -> None:
    """Each column of each row, one at a time; and each row taken away."""
    columns = _columns(told, table)
    unproven = UNPROVEN.get(table, {})
    assert set(unproven) <= set(columns), "a reason is given for a column that is not there"
    rows = _rows_of_the_job(told, table)
    assert len(rows) >= (1 if table == "head" else 2)
    unseen: list[str] = []
    met: set[object] = set()
    for row in rows:
        where = " AND ".join(f"{key} = ?" for key in KEYS[table])
        at = {key: row[columns.index(key)] for key in KEYS[table]}
        for column, value in zip(columns, row, strict=True):
            alike = table == "journal" and (row[columns.index("kind")], column) in met
            if column in unproven or (alike and column != "body"):
                continue
            met.add((row[columns.index("kind")], column) if table == "journal" else column)
            for other in _edits(column, value):
                told.sql(f"UPDATE {table} SET {column} = ? WHERE {where}", other, *at.values())
                if not flaws(told):
                    unseen.append(f"{table}.{column} of {tuple(at.values())}: {value!r} became {other!r}")
                changed = at | ({column: other} if column in at else {})
                told.sql(f"UPDATE {table} SET {column} = ? WHERE {where}", value, *changed.values())
        told.sql(f"DELETE FROM {table} WHERE {where}", *at.values())
        if not flaws(told):
            unseen.append(f"{table}: row {tuple(at.values())} was taken away")
        told.sql(f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})", *row)
    assert unseen == []
    assert flaws(told) == []


@pytest.mark.parametrize(
    ("table", "column"), [(t, c) for t, columns in UNPROVEN.items() for c in columns if t == "lease"]
)
def test_a_column_said_to_be_unproven_really_is(told: Rig, table: str, column: str) -> None:
    """The list must not grow old: what can be checked does not belong on it."""
    (value,) = told.sql(f"SELECT {column} FROM {table} WHERE job = 'train' ORDER BY id LIMIT 1")[0]
    other = (
        value + "x"
        if isinstance(value, str)
        else 1 - value
        if column in ("busy", "claimed", "wants_offers")
        else (value or 0) + 1
    )
    if column == "least_bytes":
        other = 1
    told.sql(
        f"UPDATE {table} SET {column} = ? WHERE id = (SELECT min(id) FROM lease WHERE job = 'train')", other
    )
    assert flaws(told) == []


def test_each_flaw_names_its_row_and_what_is_wrong(told: Rig) -> None:
    told.sql("UPDATE effect SET outcome = 'not sent' WHERE key = 'mail:1'")
    assert flaws(told) == ["effect mail:1: S4 its fingerprint or outcome is not the one that was committed"]
    told.sql("UPDATE effect SET outcome = 'sent' WHERE key = 'mail:1'")
    told.sql("UPDATE head SET step = 11 WHERE job = 'train'")
    assert flaws(told) == ["head train: S1 step is 11, the journal says 10"]
    assert flaws(told, "other") == []
    (proof,) = told.ledger.prove("train")
    assert "backup" in proof.flaws[0].remedy


def test_an_effect_that_no_commit_made_true_is_named(told: Rig) -> None:
    columns = "key, fingerprint, job, owner, epoch, completed, outcome, version"
    for version in (0, 1, 3, 7, 99):
        told.sql(f"INSERT INTO effect ({columns}) VALUES ('forged', 'f', 'train', 'L', 1, 1, '', ?)", version)
        found = flaws(told)
        assert len(found) == 1
        assert found[0].startswith("effect forged: S")
        told.sql("DELETE FROM effect WHERE key = 'forged'")


def test_the_effects_of_a_job_are_listed_page_by_page(told: Rig) -> None:
    keys = [e.key for e in told.ledger.effects("train")]
    assert keys == sorted(keys)
    assert {"mail:1", "mail:2", "mail:3"} <= set(keys)
    paged: list[str] = []
    while page := told.ledger.effects("train", after=paged[-1] if paged else "", limit=3):
        paged += [e.key for e in page]
    assert paged == keys
