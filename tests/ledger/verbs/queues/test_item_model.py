"""Any sequence of verbs on items does in SQL what `core.queues.items` says, on both engines, in the one-call verbs and in the common ones."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sublet.core.errors import StaleDelivery
from sublet.core.leasing.lease import Holder
from sublet.core.queues.items import (
    Ack,
    ItemFacts,
    ItemState,
    Nack,
    NewItem,
    QueueTerms,
    decide_loss,
    decide_nack,
    has_it,
    refusal,
)
from sublet.ledger.verbs.queues import items as common
from sublet.ledger.verbs.queues.item_ledger import ItemVerbs
from tests.conftest import MORE_EXAMPLES
from tests.ledger.rig import HERE, SECOND, Rig, postgres_rig, sqlite_rig

TERMS = QueueTerms(tries=2, losses=2, backoff_us=4 * SECOND)
VISIBLE = 10 * SECOND
CONSUMERS = 3

verbs = st.one_of(
    st.tuples(
        st.just("publish"),
        st.integers(0, CONSUMERS - 1),
        st.lists(
            st.tuples(
                st.sampled_from(["", "", "a", "b"]),
                st.sampled_from([0, 0, 7]),
                st.sampled_from([0, 0, 3 * SECOND]),
            ),
            min_size=1,
            max_size=3,
        ),
    ),
    st.tuples(st.just("pull"), st.integers(0, CONSUMERS - 1), st.integers(1, 3)),
    st.tuples(st.just("complete"), st.integers(0, CONSUMERS - 1), st.integers(0, 30)),
    st.tuples(
        st.just("give_back"),
        st.integers(0, CONSUMERS - 1),
        st.integers(0, 30),
        st.booleans(),
        st.sampled_from([None, 0, SECOND]),
    ),
    st.tuples(st.just("extend"), st.integers(0, CONSUMERS - 1), st.integers(0, 30)),
    st.tuples(st.just("end_consumer"), st.integers(0, CONSUMERS - 1)),
    st.tuples(st.just("redrive")),
    st.tuples(st.just("advance"), st.sampled_from([SECOND, 5 * SECOND, VISIBLE])),
    st.tuples(st.just("concurrency"), st.sampled_from([0, 2])),
)


@dataclass
class Row:
    item: ItemFacts
    priority: int
    visible_at: int
    key: str = ""


class Model:
    """The queue as `core.queues.items` has it: rows in a dict, and no SQL."""

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}
        self.concurrency = 0
        self.stale = 0

    def publish(self, drafts: list[NewItem], numbers: list[int], now: int) -> None:
        for draft, number in zip(drafts, numbers, strict=True):
            state = ItemState.DELAYED if draft.delay_us else ItemState.READY
            due = now + draft.delay_us
            self.rows[number] = Row(
                ItemFacts(id=number, state=state, place=due), draft.priority, due, draft.key
            )

    def _back(self, row: Row, back: Any) -> None:
        row.visible_at = back.visible_at
        row.item = replace(
            row.item, state=back.state, place=back.place, failures=back.failures, losses=back.losses
        )

    def pull(self, consumer: int, most: int, now: int) -> list[int]:
        for row in self.rows.values():
            if row.visible_at > now:
                continue
            if row.item.state is ItemState.DELAYED:
                row.item = replace(row.item, state=ItemState.READY)
            elif row.item.state is ItemState.LEASED:
                self._back(row, decide_loss(row.item, TERMS, now))
        if self.concurrency:
            most = min(
                most, self.concurrency - sum(r.item.state is ItemState.LEASED for r in self.rows.values())
            )
        ready = [r for r in self.rows.values() if r.item.state is ItemState.READY]
        picked = sorted(ready, key=lambda r: (-r.priority, r.item.place, r.item.id))[: max(0, most)]
        for row in picked:
            row.visible_at = now + VISIBLE
            row.item = replace(
                row.item, state=ItemState.LEASED, owner=consumer, delivery=row.item.delivery + 1
            )
        return [row.item.id for row in picked]

    def complete(self, consumer: int, number: int, delivery: int) -> bool:
        row = self.rows.get(number)
        if row is not None and has_it(row.item, consumer, delivery):
            row.item = replace(row.item, state=ItemState.DONE)
            return True
        refused = refusal(row.item if row else None, consumer, delivery) is not None
        self.stale += refused
        return not refused

    def give_back(self, consumer: int, nack: Nack, now: int) -> bool:
        row = self.rows.get(nack.item)
        if row is None or not has_it(row.item, consumer, nack.delivery):
            return refusal(row.item if row else None, consumer, nack.delivery) is None
        self._back(row, decide_nack(row.item, nack, TERMS, now))
        return True

    def end_consumer(self, consumer: int, now: int) -> None:
        for row in self.rows.values():
            if row.item.state is ItemState.LEASED and row.item.owner == consumer:
                self._back(row, decide_loss(row.item, TERMS, now))

    def redrive(self, now: int) -> None:
        for row in self.rows.values():
            if row.item.state is ItemState.DEAD:
                row.visible_at = now
                row.item = replace(row.item, state=ItemState.READY, failures=0, losses=0, place=now)

    def shown(self, since: int) -> list[tuple[Any, ...]]:
        return sorted(
            (
                i.id,
                i.state.value,
                i.delivery,
                i.owner,
                i.failures,
                i.losses,
                r.priority,
                i.place - since,
                r.visible_at - since if i.state in (ItemState.DELAYED, ItemState.LEASED) else 0,
            )
            for r in self.rows.values()
            for i in [r.item]
        )


def told(rig: Rig, since: int) -> list[tuple[Any, ...]]:
    rows = rig.sql(
        "SELECT id, state, delivery, owner, failures, losses, priority, place, visible_at FROM item ORDER BY id"
    )
    return [(*r[:7], r[7] - since, r[8] - since if r[1] in ("delayed", "leased") else 0) for r in rows]


def close(a: list[tuple[Any, ...]], b: list[tuple[Any, ...]], slack: int) -> bool:
    return len(a) == len(b) and all(
        x[:7] == y[:7] and abs(x[7] - y[7]) <= slack and abs(x[8] - y[8]) <= slack
        for x, y in zip(a, b, strict=True)
    )


def play(rig: Rig, verb_list: list[tuple[Any, ...]], ledger: Any, slack: int) -> None:
    queue = ledger.open_queue("ada", "q", TERMS)
    consumers = [ledger.open_consumer(queue.id, Holder(host=HERE)) for _ in range(CONSUMERS)]
    batches = [itertools.count(1) for _ in consumers]
    seen: list[tuple[int, int]] = []  # every delivery there ever was
    model = Model()
    since = ledger.now()
    known: set[str] = set()
    for verb, *args in verb_list:
        now = ledger.now()
        consumer = (
            consumers[args[0]]
            if verb in ("publish", "pull", "complete", "give_back", "extend", "end_consumer")
            else 0
        )
        if verb == "publish":
            drafts = [NewItem(body="1", key=k, priority=p, delay_us=d) for k, p, d in args[1]]
            fresh = []
            for draft in drafts:
                if not draft.key or draft.key not in known:
                    fresh.append(draft)
                    known |= {draft.key} - {""}
            assert ledger.publish(consumer, next(batches[args[0]]), drafts).new == len(fresh)
            numbers = [r[0] for r in rig.sql("SELECT id FROM item ORDER BY id")][len(model.rows) :]
            model.publish(fresh, numbers, now)
        elif verb == "pull":
            got = ledger.pull(consumer, args[1], VISIBLE)
            assert [d.item for d in got] == model.pull(consumer, args[1], now)
            seen += [(d.item, d.delivery) for d in got]
        elif verb == "complete" and seen:
            number, delivery = seen[args[1] % len(seen)]
            (answer,) = ledger.complete(consumer, [Ack(item=number, delivery=delivery, result="1")])
            assert (answer is None) == model.complete(consumer, number, delivery)
            assert answer is None or isinstance(answer, StaleDelivery)
        elif verb == "give_back" and seen:
            number, delivery = seen[args[1] % len(seen)]
            nack = Nack(item=number, delivery=delivery, failed=args[2], error="no", delay_us=args[3])
            (answer,) = ledger.give_back(consumer, [nack])
            assert (answer is None) == model.give_back(consumer, nack, now)
        elif verb == "extend" and seen:
            number, delivery = seen[args[1] % len(seen)]
            lost = ledger.extend(consumer, [(number, delivery)], VISIBLE)
            mine = has_it(model.rows[number].item, consumer, delivery)
            assert (number not in lost) == mine
            if mine:
                model.rows[number].visible_at = now + VISIBLE
        elif verb == "end_consumer":
            ledger.end_consumer(consumer)
            model.end_consumer(consumer, now)
        elif verb == "redrive":
            ledger.redrive(queue.id, None, most=100, actor="test")
            model.redrive(now)
        elif verb == "advance":
            rig.advance(args[0])
        elif verb == "concurrency":
            ledger.open_queue("ada", "q", replace(TERMS, concurrency=args[0]))
            model.concurrency = args[0]
        assert close(told(rig, since), model.shown(since), slack), verb
    stats = ledger.queue_stats(queue.id)
    done = [r for r in model.rows.values() if r.item.state is ItemState.DONE]
    assert (stats.done, stats.completed, stats.stale) == (len(done), len(done), model.stale)
    assert rig.faults() == []


@given(st.lists(verbs, max_size=25))
@settings(
    max_examples=60 * MORE_EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_sqlite_does_what_core_says(
    tmp_path_factory: pytest.TempPathFactory, verb_list: list[tuple[Any, ...]]
) -> None:
    rig = sqlite_rig(tmp_path_factory.mktemp("model"))
    try:
        rig.tenant()
        play(rig, verb_list, rig.ledger, 0)
    finally:
        rig.close()


@pytest.mark.parametrize("hot", [True, False])
def test_postgres_does_what_core_says(postgres_server: Any, hot: bool) -> None:
    @given(st.lists(verbs, max_size=25))
    @settings(max_examples=12 * MORE_EXAMPLES, deadline=None)
    def check(verb_list: list[tuple[Any, ...]]) -> None:
        rig, schema = postgres_rig(postgres_server.url)
        try:
            rig.tenant()
            # The clock runs on meanwhile: far less than the second that verbs are apart, unless the machine is very busy.
            play(rig, verb_list, rig.ledger if hot else Common(rig.ledger), 900_000)
        finally:
            rig.close()
            schema.hand_on()

    check()


class Common:
    """The verbs written once for both engines, where PostgreSQL has faster ones."""

    def __init__(self, ledger: Any) -> None:
        self._ledger = ledger

    def __getattr__(self, name: str) -> Any:
        found = ItemVerbs.__dict__.get(name)
        return found.__get__(self._ledger) if found is not None else getattr(self._ledger, name)


def test_the_digest_a_journal_row_keeps_is_of_the_result() -> None:
    one, other = (common.told_done([Ack(item=1, delivery=1, result=r)], None) for r in ('"a"', '"b"'))
    assert one != other
