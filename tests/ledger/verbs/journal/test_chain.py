"""The journal against somebody with a SQL prompt: every edit, removal and swap is named (S7), and no secret is in it (A1)."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from sublet.core.errors import SubletError
from sublet.core.journal.chain import entry_hash
from sublet.core.leasing.lease import EndReason
from sublet.ports.ledger import Answer, LeaseKey
from tests.ledger.rig import MINUTE, TABLES, Rig, a_step


@pytest.fixture
def busy(rig: Rig) -> Rig:
    """A ledger with all kinds of strands: main, a living lease, an ended one, a job of four steps."""
    rig.tenant("ada")
    rig.device("gpu0", 80)
    living = rig.ask(10, lease_id="living")
    ended = rig.ask(10, lease_id="ended")
    for _ in range(3):
        rig.ledger.renew(rig.key(living))
        rig.ledger.renew(rig.key(ended))
    rig.release(ended)
    for step in range(1, 5):
        rig.commit(living, step)
    assert rig.faults() == []
    return rig


def row(rig: Rig, strand: str, seq: int) -> int:
    [(number,)] = rig.sql("SELECT id FROM journal WHERE strand = ? AND seq = ?", strand, seq)
    return int(number)


STRANDS = ["main", "lease:living", "lease:ended", "job:train"]


@pytest.mark.parametrize("strand", STRANDS)
@pytest.mark.parametrize("column", ["body", "kind", "tenant", "subject", "at", "hash"])
def test_an_edited_row_is_named(busy: Rig, strand: str, column: str) -> None:
    value: object = 12345 if column == "at" else '{"epoch":9}' if column == "body" else "edited"
    busy.sql(f"UPDATE journal SET {column} = ? WHERE id = ?", value, row(busy, strand, 2))
    faults = busy.ledger.verify().faults
    assert any(f.strand == strand and f.seq in (2, 3) for f in faults), faults


@pytest.mark.parametrize("strand", STRANDS)
def test_a_row_missing_in_the_middle_is_named(busy: Rig, strand: str) -> None:
    busy.sql("DELETE FROM journal WHERE id = ?", row(busy, strand, 2))
    assert f"{strand}#2: rows 2 to 2 are missing" in busy.faults()


@pytest.mark.parametrize("strand", STRANDS)
def test_a_row_missing_at_the_end_is_named(busy: Rig, strand: str) -> None:
    [(last,)] = busy.sql("SELECT max(seq) FROM journal WHERE strand = ?", strand)
    busy.sql("DELETE FROM journal WHERE id = ?", row(busy, strand, last))
    assert any(f.startswith(f"{strand}#{last}: it ends at row {last - 1}") for f in busy.faults())


@pytest.mark.parametrize("strand", STRANDS)
def test_a_missing_first_row_is_named(busy: Rig, strand: str) -> None:
    busy.sql("DELETE FROM journal WHERE id = ?", row(busy, strand, 1))
    assert f"{strand}#1: rows 1 to 1 are missing" in busy.faults()


@pytest.mark.parametrize("strand", STRANDS)
def test_two_swapped_rows_are_named(busy: Rig, strand: str) -> None:
    """Their places in the table, with everything in them left as it was."""
    one, two = row(busy, strand, 1), row(busy, strand, 2)
    for old, new in ((one, -1), (two, one), (-1, two)):
        busy.sql("UPDATE journal SET id = ? WHERE id = ?", new, old)
    assert any(f.startswith(f"{strand}#") for f in busy.faults())


def test_two_swapped_bodies_are_named(busy: Rig) -> None:
    one, two = row(busy, "job:train", 2), row(busy, "job:train", 3)
    bodies = dict(busy.sql("SELECT id, body FROM journal WHERE id IN (?, ?)", one, two))
    busy.sql("UPDATE journal SET body = ? WHERE id = ?", bodies[two], one)
    busy.sql("UPDATE journal SET body = ? WHERE id = ?", bodies[one], two)
    assert "job:train#2: the row was edited, or does not follow the one before it" in busy.faults()


def test_an_inserted_row_is_named(busy: Rig) -> None:
    columns = "strand, at, kind, tenant, subject, body, hash"
    busy.sql(
        f"INSERT INTO journal (seq, {columns}) SELECT seq + 1, {columns} FROM journal "
        "WHERE strand = 'job:train' AND seq = 4"
    )
    assert any(f.startswith("job:train#5") for f in busy.faults())


@pytest.mark.parametrize("lease_id", ["living", "ended"])
def test_a_deleted_lease_is_named(busy: Rig, lease_id: str) -> None:
    busy.sql("DELETE FROM lease WHERE id = ?", lease_id)
    assert f"lease:{lease_id}#0: its owner is missing" in busy.faults()
    busy.sql("DELETE FROM journal WHERE strand = ?", f"lease:{lease_id}")
    assert f"lease:{lease_id}#0: the lease was granted, its row is missing" in busy.faults()


def test_renewals_removed_after_the_end_are_named(busy: Rig) -> None:
    """The strand and its owner agree again, the row that ended the lease does not."""
    busy.sql("DELETE FROM journal WHERE strand = 'lease:ended' AND seq = 3")
    [(hash_,)] = busy.sql("SELECT hash FROM journal WHERE strand = 'lease:ended' AND seq = 2")
    busy.sql("UPDATE lease SET strand_seq = 2, strand_hash = ? WHERE id = 'ended'", hash_)
    assert busy.faults() == ["lease:ended#2: it changed after the lease ended"]


def test_a_moved_anchor_is_named(busy: Rig) -> None:
    busy.sql("UPDATE head SET strand_anchor = 'f00d'")
    assert "job:train#0: the row of the main strand it began at is missing or was edited" in busy.faults()


def test_the_pools_end_is_checked(busy: Rig) -> None:
    busy.sql("UPDATE pool SET journal_hash = 'f00d'")
    assert any(f.startswith("main#") and "stored end names" in f for f in busy.faults())


def _cut(rig: Rig, keep: int) -> None:
    """A careful intruder: takes steps away and makes the head agree."""
    rig.sql("DELETE FROM journal WHERE strand = 'job:train' AND seq > ?", keep)
    [(hash_,)] = rig.sql("SELECT hash FROM journal WHERE strand = 'job:train' AND seq = ?", keep)
    rig.sql(
        "UPDATE head SET version = ?, step = ?, strand_seq = ?, strand_hash = ? WHERE job = 'train'",
        keep,
        keep,
        keep,
        hash_,
    )


def test_a_job_cut_short_after_a_seal_is_named(busy: Rig) -> None:
    busy.ledger.seal()
    _cut(busy, 2)
    assert busy.faults() == ["job:train#4: it is shorter than it was when sealed"]


def test_a_sealed_job_that_went_on_is_fine(busy: Rig) -> None:
    busy.ledger.seal()
    busy.ledger.commit(busy.key(busy.look("living")), a_step(5))
    busy.ledger.seal()
    assert busy.faults() == []


def test_a_job_rewritten_after_a_seal_is_named(busy: Rig) -> None:
    busy.ledger.seal()
    [(previous,)] = busy.sql("SELECT strand_anchor FROM head WHERE job = 'train'")
    columns = "id, strand, seq, at, kind, tenant, subject, body"
    for number, *fields in busy.sql(f"SELECT {columns} FROM journal WHERE strand = 'job:train' ORDER BY id"):
        body = json.loads(fields[-1]) | {"digest": "forged"}
        fields[-1] = json.dumps(body, sort_keys=True, separators=(",", ":"))
        previous = entry_hash(previous, *fields)
        busy.sql("UPDATE journal SET body = ?, hash = ? WHERE id = ?", fields[-1], previous, number)
    busy.sql("UPDATE head SET strand_hash = ?, digest = 'forged' WHERE job = 'train'", previous)
    assert busy.faults() != []


def test_a_job_that_vanished_is_named(busy: Rig) -> None:
    busy.sql("DELETE FROM head")
    busy.sql("DELETE FROM journal WHERE strand = 'job:train'")
    assert any(f.startswith("job:train#") for f in busy.faults())


def test_a_job_that_vanished_after_a_seal_is_named(busy: Rig) -> None:
    busy.ledger.seal()
    busy.sql("DELETE FROM head")
    busy.sql("DELETE FROM journal WHERE strand = 'job:train'")
    assert "job:train#4: it is shorter than it was when sealed" in busy.faults()


def test_no_secret_is_stored_anywhere(rig: Rig) -> None:
    """A1: every verb is given the canary, and after each no table has it, not even in part."""
    canary = "canary5ecret0123456789abcdef"
    rig.secrets = _Always(canary)
    rig.tenant("ada")
    rig.device("gpu0", 80)
    holder = rig.ask(60, job="train", pid=4)
    key = rig.key(holder)
    offered = rig.ask(40, wants_offers=True, lease_id="offered")
    waiter = rig.ask(80, lease_id="waiter")
    verbs = [
        lambda: rig.ledger.attend(waiter.lease.id, canary),
        lambda: rig.ledger.accept(offered.lease.id, canary),
        lambda: rig.ledger.decline(waiter.lease.id, canary),
        lambda: rig.ledger.renew(key),
        lambda: rig.ledger.renew_many([(key, True)]),
        lambda: rig.ledger.mark(key, busy=False),
        lambda: rig.ledger.reserve(key, effect="train:1", job="train", fingerprint="print-1"),
        lambda: rig.commit(holder, 1),
        lambda: rig.commit(holder, 2),
        lambda: rig.ledger.seal(),
        lambda: rig.release(waiter),
        lambda: rig.ledger.revoke(
            holder.lease.id, reason=EndReason.REVOKED, detail="x", grace_us=MINUTE, actor="root"
        ),
        lambda: _refused(canary, lambda: rig.ledger.renew(key)),
        lambda: _refused(canary, lambda: rig.commit(holder, 9)),
        lambda: _refused(canary, lambda: rig.ledger.renew(LeaseKey("nobody", 1, canary))),
        lambda: _refused(canary, lambda: rig.ask(500)),
        lambda: rig.release(holder),
        lambda: rig.ledger.tick(),
    ]
    for verb in [lambda: None, *verbs]:
        verb()
        text = repr([(table, rig.sql(f"SELECT * FROM {table}")) for table in TABLES])
        for part in (canary, canary[:12], canary[-12:]):
            assert part not in text
    assert holder.lease.id in text
    assert rig.faults() == []


def _refused(canary: str, verb: Callable[[], object]) -> None:
    with pytest.raises(SubletError) as raised:
        verb()
    assert canary not in f"{raised.value} {raised.value.remedy}"


class _Always(dict[str, str]):
    def __init__(self, value: str) -> None:
        super().__init__()
        self._value = value

    def __missing__(self, _: str) -> str:
        return self._value

    def setdefault(self, key: str, default: str = "") -> str:
        return self._value


def test_the_files_of_a_ledger_hold_no_secret(sqlite: Rig) -> None:
    sqlite.tenant()
    sqlite.device()
    sqlite.secrets["seen"] = "canary-on-disk-0123456789"
    held = sqlite.ask(10, lease_id="seen")
    sqlite.ledger.renew(sqlite.key(held))
    path = Path(sqlite.url.removeprefix("sqlite:"))
    for file in path.parent.glob(f"{path.name}*"):
        if file.is_file():
            assert b"canary-on-disk" not in file.read_bytes()


def test_rows_are_not_kept_while_they_are_verified(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal may have more rows than fit into memory."""
    monkeypatch.setattr("sublet.ledger.engines.postgres.transaction.STREAMED_ROWS", 100)
    rig.tenant("ada")
    rig.device("gpu0", 80)
    held = rig.ask(10)

    def peak_with(rows: int) -> int:
        while True:
            found = rig.ledger.renew_many([(rig.key(held), True)] * min(100, rows))
            assert all(isinstance(answer, Answer) for answer in found)
            rows -= len(found)
            if rows <= 0:
                break
        tracemalloc.start()
        try:
            assert rig.ledger.verify().faults == ()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak_with(300)  # whatever is made once
    few, many = peak_with(100), peak_with(4000)
    assert many < few + 200_000
