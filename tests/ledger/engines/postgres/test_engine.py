"""The shared engine by itself: hot verbs equal the generic ones, locks before clocks, lost connections, a server that is gone."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sublet.core.errors import (
    BadInput,
    Disconnected,
    Fenced,
    HeadMoved,
    LeaseLost,
    Misconfigured,
    NoCapacity,
    QuotaReached,
    SchemaMismatch,
    Stale,
    SubletError,
)
from sublet.core.leasing.lease import EndReason, LeaseState, Tier
from sublet.core.leasing.tenancy import Tenant
from sublet.core.progress.effect import Committed
from sublet.core.scheduling.device import Exclusivity
from sublet.ledger.ledger import SqlLedger
from sublet.machine import failpoints
from sublet.ports.ledger import LeaseKey
from sublet.ports.processes import Receipt
from sublet.processes.clock import HostClock
from sublet.testing.postgres import PostgresServer
from tests.conftest import MORE_EXAMPLES
from tests.homes import process_is_gone
from tests.ledger.rig import HERE, MINUTE, SECOND, PostgresSchema, Rig, a_step, postgres_rig, rig_on


@pytest.fixture
def ready(postgres: Rig) -> Rig:
    postgres.tenant("ada")
    postgres.tenant("bob", max_leases=3)
    postgres.devices({"gpu0": 100, "gpu1": 100})
    return postgres


# --- hot verbs are the generic verbs -------------------------------------------------------------------------

STILL = """
CREATE OR REPLACE FUNCTION sublet_now() RETURNS bigint LANGUAGE sql VOLATILE AS $$
    SELECT 1700000000000000 + coalesce(nullif(current_setting('sublet.skew_us', true), '')::bigint, 0)
$$
"""
#: Time stands still in both, so every instant, hash and reason must be the same. Only these may differ.
ANY = {"journal": {0}, "meta": None}

leases_drawn = st.integers(0, 5)
verbs = st.one_of(
    st.tuples(
        st.just("acquire"),
        st.fixed_dictionaries(
            {
                "vram": st.sampled_from([7, 30, 60, 100]),
                "tenant": st.sampled_from(["ada", "bob", "nobody"]),
                "exclusivity": st.sampled_from(list(Exclusivity)),
                "tier": st.sampled_from(list(Tier)),
                "count": st.sampled_from([1, 1, 1, 1, 2]),
                "wait_us": st.sampled_from([None, 0, 0, 20 * SECOND]),
                "hold_cap_us": st.sampled_from([None, None, 2 * MINUTE]),
                "least_bytes": st.sampled_from([0, 0, 5]),
                "job": st.sampled_from(["", "train"]),
                "pid": st.sampled_from([0, 7]),
            }
        ),
    ),
    st.tuples(
        st.just("renew"), leases_drawn, st.booleans(), st.sampled_from(["", "", "", "epoch", "secret"])
    ),
    st.tuples(st.just("renew_many"), st.lists(leases_drawn, max_size=4, unique=True)),
    st.tuples(st.just("release"), leases_drawn, st.sampled_from(["", "", "", "secret"])),
    st.tuples(
        st.just("commit"),
        leases_drawn,
        st.sampled_from(["train", "tune"]),
        st.sampled_from([0, 0, 0, 0, -1, 1]),
        st.sampled_from(["print", "print", 'pr"i\\nt']),
        st.sampled_from(["", "", "", "epoch", "secret"]),
    ),
    st.tuples(st.just("reserve"), leases_drawn, st.sampled_from(["train", "tune"])),
    st.tuples(st.just("revoke"), leases_drawn, st.sampled_from([0, 10 * SECOND])),
    st.tuples(st.just("settle"), leases_drawn, st.booleans()),
    st.tuples(st.just("advance"), st.sampled_from([1, 20 * SECOND, 3 * MINUTE])),
    st.tuples(st.just("tick")),
    st.tuples(st.just("strict"), st.booleans()),
)


class Twin:
    """One of two ledgers that are told the same."""

    def __init__(self, rig: Rig, ledger: SqlLedger) -> None:
        self.rig, self.ledger = rig, ledger
        rig.ledger = ledger
        rig.sql(STILL)
        rig.tenant("ada")
        rig.tenant("bob", max_leases=3)
        rig.devices({"gpu0": 100, "gpu1": 60})
        self.asked: list[str] = []
        self.keys: dict[str, LeaseKey] = {}

    def tell(self, number: int, verb: tuple[Any, ...]) -> str:
        """What came of it, in words."""
        try:
            return repr(self._tell(number, *verb))
        except SubletError as e:
            return f"{e.code}: {e.message} / {e.remedy}"

    def _key(self, index: int, wrong: str = "") -> LeaseKey:
        lease_id = self.asked[index % len(self.asked)] if self.asked else "nobody"
        rows = self.rig.sql("SELECT epoch FROM lease WHERE id = ?", lease_id)
        epoch = rows[0][0] if rows else 1
        return LeaseKey(lease_id, epoch + (wrong == "epoch"), "x" if wrong == "secret" else f"s-{lease_id}")

    def _tell(self, number: int, verb: str, *args: Any) -> Any:
        ledger = self.ledger
        if verb == "acquire":
            lease_id = f"lease-{number}"
            self.asked.append(lease_id)
            self.rig.secrets[lease_id] = f"s-{lease_id}"
            answer = self.rig.ask(lease_id=lease_id, ttl_us=2 * MINUTE, **args[0])
            return answer.at, answer.lease.epoch, answer.lease.slices, answer.wait
        if verb == "renew":
            answer = ledger.renew(self._key(args[0], args[2]), busy=args[1])
            return answer.at, answer.lease
        if verb == "renew_many":
            found = ledger.renew_many([(self._key(i), True) for i in args[0]]) if self.asked else []
            return [str(x) if isinstance(x, SubletError) else (x.at, x.lease) for x in found]
        if verb == "release":
            key = self._key(*args)
            return ledger.release(key.lease_id, key.secret)
        if verb == "commit":
            index, job, skip, print_, wrong = args
            head = ledger.head(job)
            step = max(1, (head.step if head else 0) + 1 + skip)
            return ledger.commit(self._key(index, wrong), a_step(step, job=job, fingerprint=print_))
        if verb == "reserve":
            head = ledger.head(args[1])
            step = (head.step if head else 0) + 1
            return ledger.reserve(
                self._key(args[0]), effect=f"{args[1]}:{step}", job=args[1], fingerprint="print"
            )
        if verb == "revoke":
            key = self._key(args[0])
            return ledger.revoke(
                key.lease_id, reason=EndReason.REVOKED, detail="asked", grace_us=args[1], actor="root"
            ).lease.deadline_at
        if verb == "settle":
            key = self._key(args[0])
            return ledger.settle(
                key.lease_id, key.epoch, Receipt(proven=args[1], ladder="kill", containment="none")
            )
        if verb == "advance":
            self.rig.advance(args[0])
            return ledger.beat_host(HERE)
        if verb == "strict":
            return self.rig.policy(strict_hold=args[0])
        return ledger.tick()

    def rows(self) -> dict[str, Any]:
        found = {}
        for table, rows in self.rig.dump().items():
            skip = ANY.get(table, set())
            if skip is not None:
                found[table] = [tuple(v for i, v in enumerate(r) if i not in skip) for r in rows]
        found["journal"].sort()
        return found


@pytest.fixture
def two_schemas(postgres_server: Any) -> Iterator[list[PostgresSchema]]:
    made = []
    for _ in range(2):
        rig, schema = postgres_rig(postgres_server.url)
        rig.close()
        made.append(schema)
    yield made
    for schema in made:
        schema.drop()


@settings(
    max_examples=12 * MORE_EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
@given(told=st.lists(verbs, min_size=10, max_size=40))
@example(
    told=[*[("acquire", {"vram": 7})] * 2, ("release", 0, ""), ("release", 1, ""), ("renew_many", [1, 0])]
)
def test_hot_verbs_equal_the_generic_ones(
    two_schemas: list[PostgresSchema], told: list[tuple[Any, ...]]
) -> None:
    """Same verbs, same clock: same answers, same words, same rows in every table, down to the hashes."""
    for schema in two_schemas:
        schema.empty()
    rigs = [rig_on(schema) for schema in two_schemas]
    try:
        hot = Twin(rigs[0], rigs[0].ledger)
        generic = Twin(rigs[1], SqlLedger(rigs[1].ledger.engine))
        assert type(hot.ledger) is not type(generic.ledger)
        for number, verb in enumerate(told):
            assert hot.tell(number, verb) == generic.tell(number, verb), verb
        mine, theirs = hot.rows(), generic.rows()
        for table in mine:
            assert mine[table] == theirs[table], table
        assert hot.rig.faults() == generic.rig.faults()
        assert not any("edited" in f or "missing" in f or "end" in f for f in hot.rig.faults())
    finally:
        for rig in rigs:
            rig.close()


def test_the_hot_path_is_taken(ready: Rig) -> None:
    """Or the test above compares the generic verbs with themselves."""
    generic: list[str] = []
    ready.ledger.engine.write = _watched(ready.ledger.engine.write, generic)
    held = ready.ask(10)
    ready.ledger.renew(ready.key(held))
    ready.ledger.renew_many([(ready.key(held), True)])
    assert generic == []
    ready.commit(held, 1)
    assert generic == ["write"]  # the first commit of a job
    ready.commit(held, 2)
    ready.release(held)
    assert generic == ["write"]


def _watched(call: Callable[..., Any], seen: list[str]) -> Callable[..., Any]:
    def watched(*args: Any, **options: Any) -> Any:
        seen.append("write")
        return call(*args, **options)

    return watched


@pytest.mark.parametrize("verb", ["renew", "commit"])
def test_a_server_whose_clock_is_behind_revives_nothing(ready: Rig, verb: str) -> None:
    held = ready.ask(10)
    ready.commit(held, 1)
    ready.advance(10 * MINUTE)
    ready.policy(grace_us=SECOND)  # any verb that locks the pool
    ready.advance(-10 * MINUTE)
    generic = SqlLedger(ready.ledger.engine)
    with pytest.raises(LeaseLost):
        generic.renew(ready.key(held))
    revive = {"renew": lambda: ready.ledger.renew(ready.key(held)), "commit": lambda: ready.commit(held, 2)}
    with pytest.raises(SubletError):
        revive[verb]()


# --- lock, then clock ----------------------------------------------------------------------------------------


class Blocked:
    """Another transaction holds a row for a while; a verb waits for it."""

    def __init__(self, rig: Rig, sql: str, *params: object) -> None:
        self.connection = rig.schema.connect()
        self.connection.execute("BEGIN")
        self.connection.execute(sql.replace("?", "%s"), params)
        self.rig = rig

    def during(self, verb: Callable[[], Any], hold_s: float) -> Any:
        result: list[Any] = []

        def run() -> None:
            try:
                result.append(verb())
            except BaseException as e:
                result.append(e)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        time.sleep(hold_s)
        assert not result, f"it did not wait for the lock: {result}"
        self.connection.execute("ROLLBACK")
        self.connection.close()
        thread.join(20)
        assert not thread.is_alive()
        return result[0]


LEASE_ROW = "SELECT 1 FROM lease WHERE id = ? FOR UPDATE"
SHORT = 400_000
LONG_ENOUGH = 0.6


@pytest.mark.parametrize("row", ["lease", "head"])
def test_a_commit_that_waited_past_expiry_is_refused(ready: Rig, row: str) -> None:
    """INVARIANTS fact 1, S2."""
    held = ready.ask(10, ttl_us=SHORT)
    ready.commit(held, 1)
    lock = (
        Blocked(ready, LEASE_ROW, held.lease.id)
        if row == "lease"
        else Blocked(ready, "SELECT 1 FROM head WHERE job = 'train' FOR UPDATE")
    )
    answer = lock.during(lambda: ready.commit(held, 2), LONG_ENOUGH)
    assert isinstance(answer, Fenced), answer
    assert ready.ledger.head("train").version == 1


def test_a_renewal_that_waited_past_expiry_is_refused(ready: Rig) -> None:
    """INVARIANTS fact 1, L3."""
    held = ready.ask(10, ttl_us=SHORT)
    answer = Blocked(ready, LEASE_ROW, held.lease.id).during(
        lambda: ready.ledger.renew(ready.key(held)), LONG_ENOUGH
    )
    assert isinstance(answer, LeaseLost), answer
    assert ready.look(held).expires_at == held.lease.expires_at


def test_a_release_that_waited_past_expiry_is_billed_to_the_expiry(ready: Rig) -> None:
    held = ready.ask(10, ttl_us=SHORT)
    Blocked(ready, LEASE_ROW, held.lease.id).during(lambda: ready.release(held), LONG_ENOUGH)
    [usage] = ready.ledger.usage()
    assert usage.to_at <= held.lease.expires_at


@pytest.mark.parametrize("verb", ["renew", "commit", "reserve"])
def test_a_generic_verb_that_waited_for_the_pool_past_expiry_is_refused(ready: Rig, verb: str) -> None:
    held = ready.ask(10, ttl_us=SHORT)
    answer = Blocked(ready, "SELECT 1 FROM pool FOR UPDATE").during(
        lambda: _generic(ready, verb, held), LONG_ENOUGH
    )
    assert isinstance(answer, LeaseLost | Stale), answer


@pytest.mark.parametrize("verb", ["renew", "commit", "reserve"])
def test_a_generic_verb_that_waited_for_the_lease_past_expiry_is_refused(ready: Rig, verb: str) -> None:
    held = ready.ask(10, ttl_us=SHORT)
    answer = Blocked(ready, LEASE_ROW, held.lease.id).during(lambda: _generic(ready, verb, held), LONG_ENOUGH)
    assert isinstance(answer, LeaseLost | Stale), answer


def _generic(rig: Rig, verb: str, held: Any) -> Any:
    ledger = SqlLedger(rig.ledger.engine)
    if verb == "renew":
        return ledger.renew(rig.key(held))
    if verb == "reserve":
        return ledger.reserve(rig.key(held), effect="train:1", job="train", fingerprint="p")
    return ledger.commit(rig.key(held), a_step(1))


def test_a_reaper_checks_again_under_the_lock(ready: Rig) -> None:
    """L5, INVARIANTS fact 5: a renewal lands between what the reaper read and what it writes."""
    held = ready.ask(10, ttl_us=MINUTE)
    ready.advance(2 * MINUTE)

    def renewed_meanwhile() -> None:
        ready.sql("UPDATE lease SET expires_at = expires_at + ? WHERE id = ?", 10 * MINUTE, held.lease.id)

    failpoints.arm("reaper_after_read", renewed_meanwhile, nth=1)
    result = ready.ledger.tick()
    assert result.instructions == ()
    assert ready.look(held).state is LeaseState.ACTIVE


def test_a_reaper_does_not_end_another_grant(ready: Rig) -> None:
    """L5: the epoch it read is the epoch it ends."""
    held = ready.ask(10, ttl_us=MINUTE)
    ready.advance(2 * MINUTE)
    failpoints.arm(
        "reaper_after_read", lambda: ready.sql("UPDATE lease SET epoch = epoch + 1") and None, nth=1
    )
    assert ready.ledger.tick().instructions == ()
    assert ready.look(held).state is LeaseState.ACTIVE


# --- many at once --------------------------------------------------------------------------------------------


def _at_once(works: list[Callable[[], Any]]) -> list[Any]:
    results: list[Any] = [None] * len(works)
    start = threading.Barrier(len(works))

    def run(n: int) -> None:
        start.wait()
        try:
            results[n] = works[n]()
        except BaseException as e:
            results[n] = e

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(t.is_alive() for t in threads)
    return results


def test_one_step_is_committed_by_one_of_many(ready: Rig) -> None:
    """S3: same version, same step, different keys; only the compare-and-swap decides."""
    held = [ready.ask(5) for _ in range(6)]
    ready.commit(held[0], 1)
    for step in range(2, 6):
        works = [
            lambda h=h, s=step: ready.ledger.commit(ready.key(h), a_step(s, key=f"{h.lease.id}:{s}"))
            for h in held
        ]
        results = _at_once(works)
        assert results.count(Committed(step)) == 1, results
        assert all(isinstance(r, Committed | HeadMoved | Fenced) for r in results), results
        held = [h for h in held if h.lease.epoch >= ready.ledger.head("train").epoch]
        if len(held) < 2:
            held += [ready.ask(5) for _ in range(4)]
    assert ready.faults() == []


def test_many_threads_share_a_pool(ready: Rig) -> None:
    """L2, T2 and the chain, under real concurrency."""

    def work(number: int) -> int:
        granted = 0
        for n in range(12):
            try:
                held = ready.ask(
                    30,
                    tenant="bob" if number % 2 else "ada",
                    wait_us=0,
                    lease_id=f"w{number}-{n}",
                    exclusivity=list(Exclusivity)[n % 3],
                )
            except (NoCapacity, QuotaReached):
                continue
            granted += 1
            ready.ledger.renew(ready.key(held))
            ready.release(held)
        return granted

    results = _at_once([lambda n=n: work(n) for n in range(8)])
    assert all(isinstance(r, int) for r in results), results
    assert sum(results) > 0
    assert [d.free_bytes for d in ready.ledger.devices()] == [100, 100]
    assert ready.sql("SELECT count(*) - count(DISTINCT epoch) FROM lease") == [(0,)]
    assert ready.faults() == []


def test_many_open_a_new_ledger_at_once(postgres: Rig) -> None:
    from sublet.ledger.engines.postgres.engine import open_ledger

    postgres.sql(f'DROP SCHEMA "{postgres.schema.name}" CASCADE')
    ledgers = _at_once([lambda: open_ledger(postgres.url, HostClock())] * 4)
    for ledger in ledgers:
        assert ledger.tenants() == []
        ledger.close()


# --- lost connections ----------------------------------------------------------------------------------------


def _end_backends(rig: Rig, where: str = "true") -> int:
    """Cut this ledger's own connections, at the server's side."""
    ours = [c.info.backend_pid for x in rig.ledger.engine._lending.values() for c in x.all if not c.closed]
    done = rig.sql(
        f"SELECT pg_terminate_backend(pid, 2000) FROM pg_stat_activity WHERE pid = ANY(?) AND {where}", ours
    )
    return len(done)


@pytest.mark.parametrize("step", [1, 2])
def test_a_commit_whose_connection_is_cut_is_done_once(ready: Rig, step: int) -> None:
    """S5: cut while it waits inside its transaction, run again on a new connection."""
    held = ready.ask(10)
    for done in range(1, step):
        ready.commit(held, done)
    lock = Blocked(ready, LEASE_ROW, held.lease.id)
    cut: list[int] = []

    def cut_soon() -> None:
        time.sleep(0.15)
        cut.append(_end_backends(ready, "wait_event_type = 'Lock'"))

    threading.Thread(target=cut_soon, daemon=True).start()
    assert lock.during(lambda: ready.commit(held, step), 0.4) == Committed(step)
    assert cut == [1]
    assert ready.ledger.head("train").version == step
    assert ready.sql("SELECT count(*) FROM journal WHERE strand = 'job:train'") == [(step,)]
    assert ready.faults() == []


def test_idle_connections_that_were_cut_are_replaced(ready: Rig) -> None:
    held = ready.ask(10, lease_id="kept")
    ready.ledger.renew(ready.key(held))
    assert _end_backends(ready) >= 2
    again = ready.ask(10, lease_id="kept")
    assert again.lease.epoch == held.lease.epoch
    _end_backends(ready)
    ready.ledger.renew(ready.key(held))
    _end_backends(ready)
    assert ready.release(held) is True
    assert ready.faults() == []


def test_a_client_that_stops_inside_a_transaction(ready: Rig) -> None:
    """The server ends its session, so that others go on; when it wakes, its verb is run again and done once."""
    held = ready.ask(10)
    stopped, go_on = threading.Event(), threading.Event()

    def stop() -> None:
        stopped.set()
        assert go_on.wait(60)

    failpoints.arm("after_lock", stop, nth=1)
    results: list[Any] = []

    def work() -> None:
        try:
            results.append(SqlLedger(ready.ledger.engine).commit(ready.key(held), a_step(1)))
        except BaseException as e:
            results.append(e)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert stopped.wait(60)
    ready.ask(10)  # while it sleeps: it is woken only now
    go_on.set()
    thread.join(60)
    assert results == [Committed(1)]
    assert ready.sql("SELECT count(*) FROM journal WHERE strand = 'job:train'") == [(1,)]
    assert ready.ledger.unstick() == ""


def test_a_slow_reader_of_much_is_not_cut_off(ready: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crowded machine takes seconds between two fetches of a long walk, such as `verify`."""
    monkeypatch.setattr("sublet.ledger.engines.postgres.engine.IDLE_IN_TRANSACTION", "100ms")
    ledger = ready.open()
    engine: Any = ledger.engine

    def slowly(tx: Any) -> int:
        read = 0
        for _ in tx.stream("SELECT id FROM journal ORDER BY id"):
            if not read:
                time.sleep(0.5)
            read += 1
        return read + len(tx.rows("SELECT 1"))

    assert engine.read(slowly, patience_us=0) > 1


def test_an_acquire_whose_answer_was_lost_is_granted_once(ready: Rig) -> None:
    failpoints.arm("after_commit_before_reply", "drop", nth=1)
    held = ready.ask(10)
    assert held.lease.state is LeaseState.ACTIVE
    assert ready.sql("SELECT count(*) FROM journal WHERE kind = 'lease.granted'") == [(1,)]
    assert ready.ledger.tenant("ada").live_leases == 1


@pytest.mark.parametrize("verb", ["add_tenant", "remove_tenant", "accept"])
def test_a_verb_whose_answer_was_lost_still_succeeds(ready: Rig, verb: str) -> None:
    ready.ask(100)
    ready.ask(60)
    offered = ready.ask(50, wants_offers=True)
    failpoints.arm("after_commit_before_reply", "drop", nth=1)
    if verb == "add_tenant":
        assert ready.ledger.add_tenant(Tenant(name="eve"), actor="root").name == "eve"
    elif verb == "remove_tenant":
        ready.ledger.remove_tenant("bob", actor="root")
    else:
        taken = ready.ledger.accept(offered.lease.id, ready.secret(offered))
        assert taken.lease.state is LeaseState.ACTIVE


def test_a_release_whose_answer_was_lost_gives_back_once(ready: Rig) -> None:
    held = ready.ask(10)
    failpoints.arm("after_commit_before_reply", "drop", nth=1)
    ready.release(held)
    assert ready.look(held).state is LeaseState.ENDED
    assert ready.ledger.devices()[0].free_bytes == 100
    assert len(ready.ledger.usage()) == 1


@pytest.fixture
def own_server(postgres_server: PostgresServer) -> Iterator[PostgresServer]:
    """One to crash, where the shared one could be started."""
    server = PostgresServer()
    server.start()
    yield server
    server.stop()


def test_a_crash_takes_every_process_of_the_server(own_server: PostgresServer) -> None:
    """The process of a connection outlives the first one for a moment, longer on a crowded machine; frozen, for ever."""
    import psycopg

    connection = psycopg.connect(own_server.url)
    pid = connection.info.backend_pid
    os.kill(pid, signal.SIGSTOP)
    try:
        own_server.crash()
        assert process_is_gone(pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        connection.close()


def test_a_server_that_is_gone(own_server: PostgresServer) -> None:
    """L7: within patience the answer is `Disconnected`; when the server is back everything committed is there."""
    rig, _ = postgres_rig(own_server.url)
    rig.tenant()
    rig.device()
    held = rig.ask(10)
    for step in range(1, 4):
        rig.commit(held, step)
    own_server.crash()
    for patience in (0, 300_000):
        began = time.monotonic()
        with pytest.raises(Disconnected):
            rig.ledger.renew(rig.key(held), patience_us=patience)
        assert time.monotonic() - began < patience / 1e6 + 1
    rig.ledger.engine.patience_us = 300_000
    for verb in (lambda: rig.commit(held, 4), lambda: rig.ask(10, lease_id="late"), lambda: rig.look(held)):
        with pytest.raises(Disconnected):
            verb()
    own_server.start()
    rig.ledger.engine.patience_us = 10_000_000
    assert rig.ledger.head("train").version == 3
    assert rig.commit(held, 4) == Committed(4)
    assert rig.ask(10, lease_id="late").lease.state is LeaseState.ACTIVE
    assert rig.ledger.verify().faults == ()
    rig.close()


def test_a_crash_in_the_middle_of_many_commits(own_server: PostgresServer) -> None:
    """S5, S6 of the engine: every acknowledged step is there after kill -9 of the server, none twice."""
    rig, _ = postgres_rig(own_server.url)
    rig.tenant()
    rig.device()
    held = rig.ask(10, ttl_us=60 * MINUTE)
    acknowledged = [0]
    stop = threading.Event()

    def work() -> None:
        step = 0
        while not stop.is_set():
            step += 1
            assert rig.commit(held, step) == Committed(step)
            acknowledged[0] = step

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    for _ in range(2):
        time.sleep(0.3)
        own_server.crash()
        own_server.start()
    time.sleep(0.3)
    stop.set()
    thread.join(20)
    assert not thread.is_alive()
    head = rig.ledger.head("train")
    assert acknowledged[0] > 10
    assert head.version == acknowledged[0]
    assert rig.ledger.verify().faults == ()
    rig.close()


@pytest.mark.parametrize("how", ["asked for", "waited for"])
def test_a_grant_that_a_crash_took_is_not_told(own_server: PostgresServer, how: str) -> None:
    """L1: a grant is committed before the disk has it. A server that dies just then forgets it, and would give its epoch and its memory again."""
    rig, _ = postgres_rig(own_server.url)
    rig.tenant()
    rig.device(gb=100)
    engine = rig.ledger.engine
    with (
        engine.connect() as connection
    ):  # what nobody waits for stays in memory for as long as the server may keep it there
        connection.execute("ALTER SYSTEM SET wal_writer_delay = '10s'")
        connection.execute("SELECT pg_reload_conf()")
    confirm, lost = engine.confirm, []
    if how == "waited for":
        holder = rig.ask(80, lease_id="holder")
        waiter = rig.ask(80, lease_id="mine")
        rig.release(holder)

    def after_a_crash(sql: str, *params: object) -> Any:
        if not lost:
            lost.append(engine.glance(sql, *params))
            own_server.crash()
            own_server.start()
        return confirm(sql, *params)

    engine.confirm = after_a_crash
    if how == "asked for":
        told = rig.ask(80, lease_id="mine")
    else:
        told = rig.ledger.attend("mine", rig.secret(waiter))
    [(_, granted_at)] = lost
    if told.lease.state is LeaseState.WAITING:  # the release was lost with it
        assert how == "waited for"
        assert rig.look(holder).state is LeaseState.ACTIVE
        rig.release(holder)
        told = rig.ledger.attend("mine", rig.secret(waiter))
    assert told.lease.granted_at > granted_at, "the server had written its log: nothing was lost"
    there = rig.look(told)
    assert (there.epoch, there.granted_at, there.slices) == (
        told.lease.epoch,
        told.lease.granted_at,
        told.lease.slices,
    )
    assert rig.ask(80, lease_id="other").lease.state is LeaseState.WAITING
    rig.commit(told, 1)
    assert rig.ledger.verify().faults == ()
    rig.close()


# --- opening -------------------------------------------------------------------------------------------------


def test_another_schema_is_refused(ready: Rig, next_release: None) -> None:
    from sublet.ledger.engines.postgres.engine import open_ledger

    for version, words in (("1", "needs"), ("99", "knows up to")):
        ready.sql("UPDATE meta SET value = ? WHERE key = 'schema_version'", version)
        with pytest.raises(SchemaMismatch, match=words):
            open_ledger(ready.url, HostClock())
    ready.sql("DROP TABLE slice")
    with pytest.raises(SchemaMismatch):
        ready.ask(1)


def test_bad_addresses(postgres_server: Any) -> None:
    from sublet.ledger.engines.postgres.engine import open_ledger

    with pytest.raises(BadInput):
        open_ledger(postgres_server.url + "&sublet_schema=Robert'); DROP", HostClock())
    with pytest.raises(Misconfigured):
        open_ledger(postgres_server.url + "&no_such_option=1", HostClock())
    with pytest.raises(Misconfigured):
        open_ledger(postgres_server.url.replace("/postgres?", "/nowhere?"), HostClock())


def test_text_the_server_cannot_store_is_bad_input(ready: Rig) -> None:
    held = ready.ask(10)
    with pytest.raises(SubletError):
        ready.commit(held, 1, cursor="a\x00b")
