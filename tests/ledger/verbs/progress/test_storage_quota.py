"""What a tenant's checkpoints take, on both engines: counted in the commit, held under concurrency, given back by retention (T2)."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest

from sublet.core.checkpoints.versions import Adoption, KeptVersion
from sublet.core.errors import BadInput, QuotaReached
from sublet.core.progress.effect import Committed
from sublet.ledger.ledger import SqlLedger
from sublet.machine import failpoints
from sublet.ports.ledger import Answer
from tests.ledger.rig import Rig, a_step


@pytest.fixture
def pool(rig: Rig) -> Rig:
    rig.device(gb=10_000)
    rig.tenant("ada")
    rig.tenant("bob")
    return rig


def save(rig: Rig, lease: Answer, version: int, new: int, whole: int, job: str = "train") -> Any:
    return rig.commit(lease, version, job=job, new_bytes=new, whole_bytes=whole)


def stored(rig: Rig, tenant: str = "ada") -> int:
    """As the verb says, which is as the rows of the versions say."""
    said = rig.ledger.stored_bytes(tenant)
    [(summed,)] = rig.sql(
        "SELECT coalesce(sum(v.charged_bytes), 0) FROM stored_version v JOIN head h ON h.job = v.job WHERE h.tenant = ?",
        tenant,
    )
    assert said == summed
    return said


def test_each_version_counts_with_what_it_added(pool: Rig) -> None:
    mine, theirs = pool.ask(10), pool.ask(10, tenant="bob")
    for version, new in enumerate((100, 10, 0, 5), 1):
        save(pool, mine, version, new, 100 + version)
        assert save(pool, mine, version, new, 100 + version) == Committed(version)  # the answer was lost
    save(pool, mine, 1, 7, 7, job="other")
    save(pool, theirs, 1, 1000, 1000, job="his")
    pool.commit(mine, 5, whole_bytes=0)  # kept elsewhere
    assert (stored(pool), stored(pool, "bob")) == (122, 1000)
    with pytest.raises(BadInput):
        a_step(1, new_bytes=2, whole_bytes=1)
    assert pool.faults() == []


def test_a_commit_over_the_quota_moves_nothing_and_is_in_the_journal(pool: Rig) -> None:
    pool.ledger.set_tenant("ada", max_storage_bytes=100, actor="op")
    lease = pool.ask(10)
    save(pool, lease, 1, 60, 60)
    save(pool, lease, 2, 40, 90)
    for new in (1, 100):
        with (
            pool.only_journals("step.refused"),
            pytest.raises(QuotaReached, match="100B of 100B in checkpoints"),
        ):
            save(pool, lease, 3, new, 120)
    save(pool, lease, 3, 0, 90)  # what adds nothing is not too much
    assert (pool.ledger.head("train").version, stored(pool)) == (3, 100)  # type: ignore[union-attr]
    save(pool, pool.ask(10, tenant="bob"), 1, 1000, 1000, job="his")
    pool.ledger.set_tenant("ada", max_storage_bytes=101, actor="op")
    save(pool, lease, 4, 1, 90)
    pool.ledger.set_tenant("ada", max_storage_bytes=0, actor="op")
    save(pool, lease, 5, 10_000, 10_000)
    assert pool.faults() == []


def test_the_quota_holds_when_many_jobs_commit_at_once(pool: Rig) -> None:
    pool.ledger.set_tenant("ada", max_storage_bytes=100, actor="op")
    _all_at_once(pool, [(f"job-{n}", 30) for n in range(8)])
    assert stored(pool) == 90


def _all_at_once(pool: Rig, jobs: list[tuple[str, int]], beside: Any = None) -> None:
    leases = [(pool.ask(10), job, size) for job, size in jobs]
    ready = threading.Barrier(len(jobs) + (beside is not None))
    errors: list[BaseException] = []

    def commit(lease: Answer, job: str, size: int) -> None:
        ledger = pool.open()
        ready.wait()
        try:
            for version in (1, 2, 3):
                step = a_step(version, job=job, new_bytes=size, whole_bytes=10_000)
                ledger.commit(pool.key(lease), step)
        except QuotaReached:
            pass
        except BaseException as e:
            errors.append(e)

    def other() -> None:
        ready.wait()
        beside()

    threads = [threading.Thread(target=commit, args=each) for each in leases]
    threads += [threading.Thread(target=other)] if beside is not None else []
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert pool.faults() == []


def test_a_first_quota_lets_no_commit_slip_through_that_saw_none(pool: Rig) -> None:
    """Whatever was committed before it stands; from then on nothing is added beyond it."""
    ledger = pool.open()
    seen: list[int] = []

    def limit() -> None:
        ledger.set_tenant("ada", max_storage_bytes=1, actor="op")
        seen.append(ledger.stored_bytes("ada"))

    _all_at_once(pool, [(f"job-{n}", 30) for n in range(6)], limit)
    assert stored(pool) == seen[0]


def test_a_commit_that_is_under_way_is_counted_before_the_first_quota(postgres: Rig) -> None:
    """The one-call commit has looked and not committed yet: giving the quota waits for it."""
    postgres.device(gb=1000)
    postgres.tenant("ada")
    lease = postgres.ask(10)
    save(postgres, lease, 1, 50, 50)
    slow = postgres.schema.connect()  # type: ignore[attr-defined]
    slow.autocommit = False
    k = postgres.key(lease)
    from sublet.ledger.verbs.leasing.credentials import secret_hash

    slow.execute(
        "SELECT sublet_commit(%s,%s,%s,'train','train:2',2,2,'print-2',1,'digest-2','','',40,90)",
        (k.lease_id, k.epoch, secret_hash(k.secret)),
    )
    given = threading.Event()

    def limit() -> None:
        postgres.ledger.set_tenant("ada", max_storage_bytes=60, actor="op")
        given.set()

    thread = threading.Thread(target=limit)
    thread.start()
    assert not given.wait(0.3)
    slow.commit()
    slow.close()
    thread.join(30)
    assert given.is_set()
    assert stored(postgres) == 90
    with pytest.raises(QuotaReached):
        save(postgres, lease, 3, 1, 91)


def test_dropped_versions_give_back_what_nobody_needs(pool: Rig) -> None:
    lease = pool.ask(10)
    for version, (new, whole) in enumerate([(100, 100), (10, 105), (10, 100), (10, 100)], 1):
        save(pool, lease, version, new, whole)
    assert stored(pool) == 130
    pool.ledger.tag(
        "train", KeptVersion(version=1, digest="digest-1", step=1, tag="good"), expected_sweeps=0, actor="op"
    )
    pool.ledger.retain("train", expected_sweeps=0, floor=4, kept=[], actor="op")
    assert stored(pool) == 100 + 30  # 2 and 3 may live on in 4
    with pool.only_journals():
        pool.ledger.retain("train", expected_sweeps=0, floor=4, kept=[], actor="op")  # a lost answer
    pool.ledger.untag("train", "good", actor="op")
    assert stored(pool) == 100  # all that 4 can be
    assert pool.faults() == []


def test_what_an_operator_adopts_is_counted_and_never_refused(pool: Rig) -> None:
    pool.ledger.set_tenant("ada", max_storage_bytes=10, actor="op")
    wish = Adoption(
        job="fork",
        tenant="ada",
        expected_version=0,
        version=1,
        digest="digest-1",
        step=1,
        epoch=0,
        reason="import",
        new_bytes=50,
        whole_bytes=50,
    )
    for _ in range(2):
        pool.ledger.adopt(wish, actor="op")
        assert stored(pool) == 50
    with pytest.raises(QuotaReached):
        save(pool, pool.ask(10), 1, 1, 1)


@pytest.mark.parametrize("place", ["after_cas", "after_effect", "before_commit", "after_commit_before_reply"])
@pytest.mark.parametrize("limit", [0, 1000])
def test_killed_around_the_commit_it_is_counted_with_it_or_not_at_all(
    pool: Rig, place: str, limit: int
) -> None:
    pool.ledger.set_tenant("ada", max_storage_bytes=limit, actor="op")
    lease = pool.ask(10)
    save(pool, lease, 1, 10, 10)
    generic = SqlLedger(pool.ledger.engine)
    step = a_step(2, new_bytes=5, whole_bytes=15)
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        try:
            failpoints.arm(place, "kill")
            generic.commit(pool.key(lease), step)
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    assert stored(pool) == (15 if place == "after_commit_before_reply" else 10)
    assert pool.open().commit(pool.key(lease), step) == Committed(2)
    assert stored(pool) == 15
    assert pool.faults() == []
