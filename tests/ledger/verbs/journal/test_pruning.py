"""Pruning: what goes, what stays right without it, and that it may die at any moment (S7, T4)."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from sublet.core.billing.goodput import accounts, stretches
from sublet.core.errors import BadInput, JournalBroken, NotFound
from sublet.core.leasing.lease import EndReason, Holder
from sublet.core.queues.items import Ack, NewItem, QueueTerms
from sublet.ledger.verbs.journal import pruning
from sublet.machine import failpoints
from sublet.machine.failpoints import FailpointHit
from sublet.ports.processes import Receipt
from tests import forked
from tests.ledger.rig import HERE, MINUTE, Rig

HOUR = 60 * MINUTE
KEEP = 30 * HOUR


@pytest.fixture
def lived(rig: Rig) -> Rig:
    """A ledger with sixty hours behind it: half of what happened is older than what is kept, and some of it goes on."""
    rig.tenant("ada")
    rig.tenant("bob")
    rig.devices({"gpu0": 100, "gpu1": 100})
    rig.ledger.set_price("host", 400_000, actor="root")
    rig.long = rig.ask(10, lease_id="long", ttl_us=168 * HOUR)
    rig.commit(rig.long, 1, job="endless", outcome=json.dumps({"compute_us": 1_000_000}))
    rig.queue_id = rig.ledger.open_queue("ada", "images", QueueTerms()).id
    rig.consumer = rig.ledger.open_consumer(rig.queue_id, Holder(host=HERE, pid=1, started=1))
    for day in range(6):
        _a_day(rig, day)
        rig.later(10 * HOUR)
    return rig


def _a_day(rig: Rig, day: int) -> None:
    for number, tenant in enumerate(("ada", "bob", "ada")):
        held = rig.ask(10, lease_id=f"d{day}-{number}", tenant=tenant, ttl_us=MINUTE)
        # One that several leases work at on the same day, so that their sums meet.
        job, step = (f"job-{day}-{number}", 1) if number != 1 else ("shared", day + 1)
        rig.later(MINUTE // 4)
        rig.commit(held, step, job=job, outcome=json.dumps({"compute_us": 5_000_000}))
        rig.ledger.renew(rig.key(held))
        rig.later(MINUTE // 4)
        if number == 2:
            rig.ledger.end(held.lease.id, held.lease.epoch, reason=EndReason.HOLDER_LOST, detail="gone")
            rig.ledger.settle(
                held.lease.id, held.lease.epoch, Receipt(proven=True, ladder="kill", containment="none")
            )
        else:
            rig.release(held)
    rig.commit(rig.long, day + 2, job="endless", outcome=json.dumps({"compute_us": 1_000_000}))
    rig.ledger.publish(rig.consumer, day + 1, [NewItem(body=f'"{day}-{n}"') for n in range(3)])
    held_items = rig.ledger.pull(rig.consumer, 2, MINUTE)
    rig.ledger.complete(
        rig.consumer, [Ack(item=d.item, delivery=d.delivery, result='"ok"', work_us=7) for d in held_items]
    )


def prune(rig: Rig, into: Path, **over: Any) -> Any:
    return rig.ledger.prune(**{"keep_us": KEEP, "into": into, "actor": "root", **over})


def report(rig: Rig, by: str = "tenant") -> dict[str, Any]:
    """What a report adds up to, to the microsecond; what is still held is counted up to a moment that does not move."""
    found = rig.ledger.held()
    leases = [x for x in found.leases if x.id != "long"]
    groups, total = accounts(
        stretches(leases, found.commits, since=0, now=found.at),
        lambda part: getattr(part, by),
        400_000,
        removed=found.removed,
        unlisted_micro=400_000,
    )
    return {
        a.name: (
            a.held_us,
            a.useful_us,
            a.overhead_us,
            a.wasted_us,
            a.other_us,
            a.refund_us,
            a.commits,
            a.steps,
            a.lease_count,
            dict(a.losses),
            a.noticed,
        )
        for a in [*groups, total]
    }


def long_lease(rig: Rig) -> list[tuple[int, int]]:
    found = rig.ledger.held()
    [lease] = [x for x in found.leases if x.id == "long"]
    parts = stretches([lease], found.commits, since=0, now=lease.granted_at + 50 * HOUR)
    return [(p.until, p.useful_us) for p in parts]


def test_what_goes_and_what_stays(lived: Rig, tmp_path: Path) -> None:
    before, by_job, long_before = report(lived), report(lived, "job"), long_lease(lived)
    rows = lived.sql("SELECT count(*) FROM journal")[0][0]
    would = prune(lived, tmp_path / "a", dry_run=True)
    assert lived.sql("SELECT count(*) FROM journal") == [(rows,)]
    done = prune(lived, tmp_path / "a")
    assert (done.leases, done.items) == (would.leases, would.items) == (12, 8)
    assert 0 < done.rows <= would.rows
    assert len(list((tmp_path / "a").iterdir())) == len(done.files) == 1
    assert lived.sql("SELECT count(*) FROM lease") == [(7,)]
    assert lived.sql("SELECT count(*) FROM item WHERE state = 'done'") == [(4,)]
    assert lived.sql("SELECT count(*) FROM leaving") == [(0,)]
    assert lived.sql("SELECT count(*) FROM journal")[0][0] < rows
    # T4: to the microsecond, by tenant and by job, and for the lease that goes on.
    assert report(lived) == before
    assert report(lived, "job") == by_job
    assert long_lease(lived) == long_before
    # S7, from where it was cut and from the first row.
    assert lived.faults() == []
    whole = lived.ledger.verify([tmp_path / "a"])
    assert whole.faults == ()
    assert whole.rows >= rows
    assert lived.ledger.verify().pruned_before == done.before


def test_everything_goes_on_after_it(lived: Rig, tmp_path: Path) -> None:
    prune(lived, tmp_path)
    lived.ledger.renew(lived.key(lived.long))
    lived.commit(lived.long, 8, job="endless")
    assert lived.commit(lived.long, 8, job="endless").version == 8
    fresh = lived.ask(10)
    assert fresh.lease.epoch > lived.long.lease.epoch
    lived.commit(fresh, 1, job="new")
    lived.ledger.seal()
    before = report(lived)
    for _ in range(2):
        lived.later(20 * HOUR)
        prune(lived, tmp_path)
        assert lived.faults() == []
    assert lived.ledger.verify([tmp_path]).faults == ()
    lived.release(lived.long)
    lived.later(40 * HOUR)
    prune(lived, tmp_path)
    assert lived.sql("SELECT count(*) FROM lease WHERE id = 'long'") == [(0,)]
    assert lived.faults() == []
    assert lived.ledger.verify([tmp_path]).faults == ()
    assert {name: told for name, told in report(lived).items() if name == "bob"} == {"bob": before["bob"]}
    total = report(lived)["total"]
    assert total[7] == before["total"][7] + 8, "the steps of the long lease are in the sums"


def test_audits_say_that_it_was_pruned_and_prove_with_the_archive(lived: Rig, tmp_path: Path) -> None:
    assert all(p.proven for p in lived.ledger.prove())
    assert lived.ledger.prove_queue(lived.queue_id).proven
    prune(lived, tmp_path)
    for verb in (lived.ledger.prove, lambda: lived.ledger.prove_queue(lived.queue_id)):
        with pytest.raises(NotFound, match="pruned before 20") as told:
            verb()
        assert "--archive" in told.value.remedy
    for proof in lived.ledger.prove(archived=[tmp_path]):
        assert proof.flaws == ()
    assert lived.ledger.prove_queue(lived.queue_id, [tmp_path]).flaws == ()


def test_a_removal_that_was_no_prune_is_named(lived: Rig, tmp_path: Path) -> None:
    """S7"""
    prune(lived, tmp_path)
    first = lived.sql("SELECT min(seq) FROM journal WHERE strand = 'main'")[0][0]
    lived.sql("DELETE FROM journal WHERE strand = 'main' AND seq = ?", first)
    assert any("missing" in fault for fault in lived.faults())


def test_a_journal_cut_off_by_hand_is_named(lived: Rig, tmp_path: Path) -> None:
    """As a prune would leave it, with everything but the row of the main strand that says so."""
    [(upto, seq, digest)] = lived.sql(
        "SELECT id, seq, hash FROM journal WHERE strand = 'main' ORDER BY id LIMIT 1"
    )
    lived.sql("DELETE FROM journal WHERE id <= ?", upto)
    lived.sql("INSERT INTO pruned VALUES ('main', ?, ?)", seq, digest)
    lived.sql("INSERT INTO meta VALUES ('pruned_upto', ?)", str(upto))
    assert any("no prune says so" in fault for fault in lived.faults())


@pytest.mark.parametrize(
    "what", ["where a strand goes on", "the archive", "a file is missing", "a row of the archive"]
)
def test_what_was_left_cannot_be_edited(lived: Rig, tmp_path: Path, what: str) -> None:
    [name] = prune(lived, tmp_path).files
    if what == "where a strand goes on":
        lived.sql("UPDATE pruned SET seq = seq + 1 WHERE strand = 'job:endless'")
        assert any("what the last prune left" in fault for fault in lived.faults())
        return
    file = Path(name)
    if what == "a file is missing":
        other = tmp_path / "other"
        other.mkdir()
        lived.later(20 * HOUR)
        prune(lived, other)
        faults = lived.ledger.verify([other]).faults
        assert any("was not given" in f.what for f in faults)
        return
    text = file.read_text()
    file.write_text(
        text.replace('"lease.granted"', '"lease.renewed"', 1)
        if what == "a row of the archive"
        else f"{text}\n"
    )
    if what == "the archive":
        with pytest.raises(BadInput, match="cannot be read"):
            lived.ledger.verify([tmp_path])
        return
    whats = [f.what for f in lived.ledger.verify([tmp_path]).faults]
    assert any("edited" in w for w in whats)
    assert lived.faults() == []  # what is in the ledger is not touched by it


def test_a_journal_that_does_not_verify_is_not_pruned(lived: Rig, tmp_path: Path) -> None:
    lived.sql(
        "UPDATE journal SET body = '{}' WHERE kind = 'lease.renewed' AND id = (SELECT min(id) FROM journal WHERE kind = 'lease.renewed')"
    )
    rows = lived.dump()
    with pytest.raises(JournalBroken, match="nothing was pruned"):
        prune(lived, tmp_path)
    assert lived.dump()["journal"][: len(rows["journal"])] == rows["journal"] or lived.sql(
        "SELECT count(*) FROM journal"
    )[0][0] >= len(rows["journal"])
    assert lived.sql("SELECT count(*) FROM pruned") == [(0,)]


def test_what_is_young_is_never_pruned(lived: Rig, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="hour"):
        prune(lived, tmp_path, keep_us=MINUTE)
    assert prune(lived, tmp_path, keep_us=1000 * HOUR).rows == 0
    assert not list(tmp_path.glob("journal-*"))


def test_sessions_that_are_kept_keep_their_leases(rig: Rig, tmp_path: Path) -> None:
    from tests.ledger.verbs.studio.test_sessions import lease_for, open_one

    rig.tenant("ada")
    rig.device()
    session = open_one(rig)
    held = lease_for(rig, session)
    rig.later(MINUTE)
    rig.release(held)
    other = rig.ask(5, ttl_us=MINUTE)
    rig.release(other)
    rig.later(60 * HOUR)
    [used] = rig.ledger.session_usage()
    assert used.gpu_us > 0
    assert prune(rig, tmp_path).leases == 1
    assert rig.ledger.session_usage()[0].gpu_us == used.gpu_us
    assert rig.faults() == []
    rig.ledger.end_session(session.session.id, "ada", detail="over", actor="root")
    rig.later(60 * HOUR)
    done = prune(rig, tmp_path)
    assert (done.sessions, done.leases) == (1, 1)
    assert rig.faults() == []
    assert rig.ledger.verify([tmp_path]).faults == ()


# --- killed --------------------------------------------------------------------------------------------------


def test_failed_at_any_transaction_it_is_consistent_and_goes_on(
    lived: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each transaction, before and after its commit: the journal verifies, reports are right, and the next prune finishes it."""
    monkeypatch.setattr(pruning, "ROWS_A_ROUND", 40)
    monkeypatch.setattr(pruning, "ROWS_A_BATCH", 15)
    monkeypatch.setattr(pruning, "LEASES_A_BATCH", 2)
    monkeypatch.setattr(pruning, "ITEMS_A_BATCH", 2)
    before, by_job, long_before = report(lived), report(lived, "job"), long_lease(lived)
    hits = 0
    while True:
        place = ("before_commit", "after_commit_before_reply")[hits % 2]
        failpoints.arm(place, "raise", nth=1 + hits // 2)
        try:
            prune(lived, tmp_path)
        except FailpointHit:
            hits += 1
        else:
            break
        finally:
            failpoints.disarm()
        assert lived.faults() == []
        assert report(lived) == before
        assert long_lease(lived) == long_before
        assert hits < 200
    failpoints.disarm()
    prune(lived, tmp_path)
    assert hits > 10
    assert report(lived, "job") == by_job
    assert lived.sql("SELECT count(*) FROM lease") == [(7,)]
    assert lived.ledger.verify([tmp_path]).faults == ()
    assert all(p.proven for p in lived.ledger.prove(archived=[tmp_path]))


CHILD = """
import sys
from pathlib import Path
from sublet.machine import failpoints
from sublet.processes.clock import HostClock
from sublet.ledger.verbs.journal import pruning
from sublet.testing.clock import VirtualClock

url, skew, into, nth = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
if url.startswith("sqlite:"):
    from sublet.ledger.engines.sqlite.engine import open_ledger
    clock = VirtualClock()
    clock.advance(skew)
    ledger = open_ledger(url, clock)
else:
    from sublet.ledger.engines.postgres.engine import open_ledger
    ledger = open_ledger(url, HostClock())
    ledger.engine.skew_us = skew
pruning.ROWS_A_BATCH, pruning.LEASES_A_BATCH, pruning.ITEMS_A_BATCH = 15, 2, 2
failpoints.arm("before_commit", "kill", nth=nth)
ledger.prune(keep_us=30 * 3_600_000_000, into=into, actor="child")
"""


@pytest.mark.parametrize("nth", [2, 7, 9, 12])
def test_killed_in_a_batch_the_next_one_finishes_it(lived: Rig, tmp_path: Path, nth: int) -> None:
    before, total = report(lived), lived.sql("SELECT count(*) FROM lease")[0][0]
    skew = lived.ledger.engine.skew_us if lived.engine == "postgres" else 61 * HOUR
    done = forked.run(
        [sys.executable, "-c", CHILD, lived.url, str(skew), str(tmp_path), str(nth)],
        timeout=60,
        env={**os.environ, "SUBLET_FAILPOINTS": ""},
    )
    assert done.returncode == -9, done.stderr
    assert lived.faults() == []
    assert report(lived) == before
    prune(lived, tmp_path)
    assert report(lived) == before
    assert lived.sql("SELECT count(*) FROM lease")[0][0] == total - 12
    assert lived.sql("SELECT count(*) FROM leaving") == [(0,)]
    assert lived.faults() == []
    assert lived.ledger.verify([tmp_path]).faults == ()
