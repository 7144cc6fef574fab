"""The line to PostgreSQL is cut at each statement of each verb, before the server heard it and after it did it (S1, S5).

Whichever it was, the verb finds out on a new connection: it succeeds, and what it does was done once. Every cut is at new objects of one
ledger, so that at the end its sums and its whole journal must be right too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from sublet.core.leasing.lease import EndReason, Holder, Request
from sublet.core.leasing.tenancy import Tenant
from sublet.core.queues.items import Ack, Nack, NewItem, QueueTerms
from sublet.ledger.engines.postgres.engine import open_ledger
from sublet.ledger.ledger import SqlLedger
from sublet.ports.ledger import LeaseKey
from sublet.ports.processes import Receipt
from sublet.processes.clock import HostClock
from sublet.testing.postgres import PostgresServer
from tests.ledger.postgres_proxy import Proxy
from tests.ledger.rig import HERE, MINUTE, SECOND, Rig, a_step, postgres_rig

#: More statements than any verb has: a cut that is never reached is a test that never ends.
MOST_STATEMENTS = 60
_numbers = itertools.count(1)


class Line:
    """One ledger twice: past the proxy, to arrange and to look; and through it, for the verb."""

    def __init__(self, server: PostgresServer) -> None:
        self.rig, self.schema = postgres_rig(server.url)
        self.proxy = Proxy(server.folder)
        self.rig.tenant("ada")
        self.rig.devices({"gpu0": 1_000_000, "gpu1": 1_000_000})
        self.queue = self.rig.ledger.open_queue("ada", "images", QueueTerms()).id
        self.consumer = self.rig.ledger.open_consumer(self.queue, Holder(host=HERE, pid=1, started=1))
        self.batches = itertools.count(1)
        self.ledger: SqlLedger = open_ledger(self.proxy.url(self.schema.url), HostClock())
        # Wake-ups go over the line at a moment of their own, and would be counted among a verb's statements.
        self.ledger.engine.ring = lambda topics: None  # type: ignore[method-assign]

    def told(self, kind: str, subject: str) -> int:
        [(count,)] = self.rig.sql(
            "SELECT count(*) FROM journal WHERE kind = ? AND subject = ?", kind, subject
        )
        return int(count)

    def hang_up(self) -> None:
        for lending in self.ledger.engine._lending.values():  # type: ignore[attr-defined]
            lending.drop_free()

    def close(self) -> None:
        self.ledger.close()
        self.rig.close()
        self.proxy.close()
        self.schema.drop()


class Case:
    """New objects for one cut."""

    def __init__(self, line: Line) -> None:
        self.line, self.ledger, self.rig = line, line.ledger, line.rig
        self.name = f"n{next(_numbers):05d}"
        # What the consumer still has in hand, a pull whose answer was lost would give it again.
        self.rig.sql("DELETE FROM item WHERE state <> 'done'")

    def held(self) -> LeaseKey:
        return self.rig.key(self.rig.ask(10, lease_id=self.name))

    def training(self) -> LeaseKey:
        key = self.held()
        self.rig.ledger.commit(key, a_step(1, job=self.name))
        return key

    def publish(self, ledger: SqlLedger, batch: int) -> Any:
        return ledger.publish(
            self.line.consumer, batch, [NewItem(body=f'"{n}"', key=f"{self.name}-{n}") for n in range(2)]
        )

    def in_hand(self) -> list[Any]:
        self.publish(self.rig.ledger, next(self.line.batches))
        return self.rig.ledger.pull(self.line.consumer, 2, MINUTE)

    def items(self) -> list[tuple[Any, ...]]:
        return self.rig.sql(
            "SELECT state, failures, owner FROM item WHERE key LIKE ? ORDER BY id", f"{self.name}-%"
        )

    def told(self, kind: str, subject: str = "") -> int:
        return self.line.told(kind, subject or self.name)

    def request(self, **over: Any) -> Request:
        return Request(**{"tenant": "ada", "vram_bytes": 5, "ttl_us": 60 * MINUTE, **over})


@dataclass(frozen=True)
class Verb:
    begin: Callable[[Case], Any]
    run: Callable[[Case, Any], Any]
    once: Callable[[Case, Any], bool]


def _nothing(case: Case) -> None:
    return None


def _granted_once(case: Case, answer: Any) -> bool:
    return case.told("lease.granted") == 1 and answer.lease.epoch == case.rig.look(case.name).epoch


def _ended(case: Case) -> LeaseKey:
    key = case.held()
    case.rig.ledger.end(case.name, key.epoch, reason=EndReason.HOLDER_LOST, detail="gone")
    return key


def _committed(step: int) -> Callable[[Case, Any], bool]:
    def once(case: Case, answer: Any) -> bool:
        head = case.rig.ledger.head(case.name)
        rows = [case.told("step.committed", f"{case.name}:{n}") for n in range(1, step + 1)]
        return bool(answer.version == step == head.version == head.step) and rows == [1] * step  # type: ignore[union-attr]

    return once


def _acks(held: list[Any]) -> list[Ack]:
    return [Ack(item=d.item, delivery=d.delivery, result='"ok"') for d in held]


VERBS: dict[str, Verb] = {
    "acquire": Verb(
        _nothing,
        lambda c, _: c.ledger.acquire(c.name, "secret", c.request(), Holder(host=HERE)),
        _granted_once,
    ),
    "acquire two": Verb(
        _nothing,
        lambda c, _: c.ledger.acquire(c.name, "secret", c.request(count=2), Holder(host=HERE)),
        _granted_once,
    ),
    "renew": Verb(
        Case.held,
        lambda c, key: c.ledger.renew(key),
        # Renewed twice is renewed: its answer has the expiry that counts.
        lambda c, answer: answer.lease.expires_at == c.rig.look(c.name).expires_at,
    ),
    "release": Verb(
        Case.held,
        lambda c, key: c.ledger.release(c.name, key.secret),
        lambda c, _: c.told("lease.ended") == 1 and c.rig.look(c.name).settled_at > 0,
    ),
    "revoke": Verb(
        Case.held,
        lambda c, _: c.ledger.revoke(
            c.name, reason=EndReason.REVOKED, detail="asked", grace_us=60 * SECOND, actor="root"
        ),
        lambda c, answer: (
            c.told("lease.revoked") == 1 and answer.lease.deadline_at == c.rig.look(c.name).deadline_at
        ),
    ),
    "settle": Verb(
        _ended,
        lambda c, key: c.ledger.settle(
            c.name, key.epoch, Receipt(proven=True, ladder="kill", containment="none")
        ),
        lambda c, _: c.told("lease.settled") == 1,
    ),
    "reserve": Verb(
        Case.training,
        lambda c, key: c.ledger.reserve(key, effect=f"{c.name}:2", job=c.name, fingerprint="p"),
        lambda c, _: (
            c.rig.sql("SELECT owner, completed FROM effect WHERE key = ?", f"{c.name}:2") == [(c.name, 0)]
        ),
    ),
    "first commit": Verb(
        Case.held, lambda c, key: c.ledger.commit(key, a_step(1, job=c.name)), _committed(1)
    ),
    "commit": Verb(Case.training, lambda c, key: c.ledger.commit(key, a_step(2, job=c.name)), _committed(2)),
    "commit through core": Verb(
        Case.training,
        lambda c, key: SqlLedger(c.ledger.engine).commit(key, a_step(2, job=c.name)),
        _committed(2),
    ),
    "publish": Verb(
        lambda c: next(c.line.batches),
        lambda c, batch: c.publish(c.ledger, batch),
        lambda c, answer: answer.new == 2 and len(c.items()) == 2,
    ),
    "pull": Verb(
        lambda c: c.publish(c.rig.ledger, next(c.line.batches)),
        lambda c, _: c.ledger.pull(c.line.consumer, 2, MINUTE),
        lambda c, answer: len(answer) == 2 and [i[0] for i in c.items()] == ["leased"] * 2,
    ),
    "complete": Verb(
        Case.in_hand,
        lambda c, held: c.ledger.complete(c.line.consumer, _acks(held)),
        lambda c, answer: answer == [None, None] and [i[0] for i in c.items()] == ["done"] * 2,
    ),
    "complete under a lease": Verb(
        lambda c: (c.in_hand(), c.held()),
        lambda c, had: c.ledger.complete(c.line.consumer, _acks(had[0]), lease=had[1]),
        lambda c, answer: answer == [None, None] and [i[0] for i in c.items()] == ["done"] * 2,
    ),
    "give back": Verb(
        Case.in_hand,
        lambda c, held: c.ledger.give_back(
            c.line.consumer,
            [Nack(item=d.item, delivery=d.delivery, error="no", failed=True) for d in held],
        ),
        lambda c, _: [i[1] for i in c.items()] == [1, 1],
    ),
    "add tenant": Verb(
        _nothing,
        lambda c, _: c.ledger.add_tenant(Tenant(name=c.name), actor="root"),
        lambda c, answer: answer.name == c.name and c.told("tenant.added") == 1,
    ),
}


@pytest.fixture(scope="module")
def line(postgres_server: PostgresServer) -> Iterator[Line]:
    line = Line(postgres_server)
    yield line
    line.close()


def sums_are_right(rig: Rig) -> bool:
    """L2, T4: what devices and tenants say is held is what the slices say."""
    return rig.sql(
        "SELECT (SELECT sum(capacity_bytes - free_bytes) FROM device), (SELECT sum(live_bytes) FROM tenant), "
        "(SELECT count(DISTINCT lease_id) FROM slice)"
    ) == rig.sql(
        "SELECT coalesce(sum(vram_bytes), 0), coalesce(sum(vram_bytes), 0), "
        "(SELECT sum(live_leases) FROM tenant) FROM slice"
    )


@pytest.mark.parametrize("connected", ["connected", "not connected"])
@pytest.mark.parametrize("name", VERBS)
def test_a_verb_cut_anywhere_is_done_once(line: Line, name: str, connected: str) -> None:
    """As in a process that has run for a while; and in one that has yet to connect and to prepare its statements, which can be cut too."""
    verb, proxy = VERBS[name], line.proxy
    for side in ("before", "after"):
        for number in itertools.count(1):
            assert number <= MOST_STATEMENTS
            if connected == "not connected":
                line.hang_up()
            case = Case(line)
            had = verb.begin(case)
            proxy.cut(number, side)
            assert verb.once(case, verb.run(case, had)), f"{name}, {side} statement {number}"
            if not proxy.cuts:  # it has fewer
                assert number > 1, "nothing was cut"
                break
    proxy.cut(0, "")
    assert sums_are_right(line.rig)


def test_after_all_cuts_the_journal_verifies(line: Line) -> None:
    assert line.rig.faults() == []
    [(completed, told)] = line.rig.sql(
        "SELECT (SELECT sum(completed) FROM consumer), (SELECT count(*) FROM item WHERE state = 'done')"
    )
    assert completed == told


def test_the_proxy_cuts(line: Line) -> None:
    """Or the tests above show nothing: without a second try a cut is an error, and what the server did depends on its side."""
    for side, version in (("before", 2), ("after", 3)):
        case = Case(line)
        key = case.training()
        line.ledger.commit(key, a_step(2, job=case.name))  # connected, and its statement is prepared
        patience, line.ledger.engine.patience_us = line.ledger.engine.patience_us, 0  # type: ignore[attr-defined]
        line.proxy.cut(1, side)
        with pytest.raises(Exception, match="does not answer"):
            line.ledger.commit(key, a_step(3, job=case.name))
        line.ledger.engine.patience_us = patience  # type: ignore[attr-defined]
        assert line.rig.ledger.head(case.name).version == version  # type: ignore[union-attr]
