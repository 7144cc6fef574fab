"""Items on both engines: handed out in order, completed once, never by a stranger (S1, S4, S6)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from sublet.core.errors import BadInput, LeaseLost, NotFound, StaleDelivery
from sublet.core.leasing.lease import EndReason, Holder
from sublet.core.queues.items import Ack, ItemState, Nack, NewItem, QueueTerms
from sublet.machine import failpoints
from sublet.machine.failpoints import ConnectionDropped
from sublet.ports.bell import queue_topic
from sublet.ports.items import Delivery
from tests.ledger.rig import HERE, MINUTE, SECOND, Rig

VISIBLE = 60 * SECOND


class Desk:
    """A queue with consumers, and the few things a test does with them."""

    def __init__(self, rig: Rig, name: str = "images", **terms: int) -> None:
        self.rig = rig
        self.queue = rig.ledger.open_queue("ada", name, QueueTerms(**terms))
        self._batches: dict[int, int] = {}

    def consumer(self) -> int:
        return self.rig.ledger.open_consumer(self.queue.id, Holder(host=HERE, pid=1, started=1))

    def publish(self, consumer: int, *bodies: str, **over: Any) -> Any:
        self._batches[consumer] = self._batches.get(consumer, 0) + 1
        return self.rig.ledger.publish(
            consumer, self._batches[consumer], [NewItem(body=b, **over) for b in bodies]
        )

    def pull(self, consumer: int, most: int = 1, visibility: int = VISIBLE) -> list[Delivery]:
        return self.rig.ledger.pull(consumer, most, visibility)

    def one(self, consumer: int) -> Delivery:
        (given,) = self.pull(consumer)
        return given

    def done(self, consumer: int, given: Delivery, result: str = '"r"', **over: Any) -> Any:
        (answer,) = self.rig.ledger.complete(
            consumer, [Ack(item=given.item, delivery=given.delivery, result=result, work_us=5)], **over
        )
        return answer

    def back(self, consumer: int, given: Delivery, **over: Any) -> Any:
        nack = Nack(item=given.item, delivery=given.delivery, **{"failed": False, **over})
        (answer,) = self.rig.ledger.give_back(consumer, [nack])
        return answer

    def bodies(self, state: ItemState) -> list[str]:
        return [r.body for r in self.rig.ledger.items(self.queue.id, state)]

    @property
    def stats(self) -> Any:
        return self.rig.ledger.queue_stats(self.queue.id)


@pytest.fixture
def desk(rig: Rig) -> Iterator[Desk]:
    rig.tenant()
    made = Desk(rig, tries=3, losses=3)
    yield made
    assert rig.faults() == []


def test_an_item_is_handed_out_once_and_done_once(desk: Desk) -> None:
    a, b = desk.consumer(), desk.consumer()
    assert desk.publish(a, '"x"', '"y"').new == 2
    first, second = desk.one(a), desk.one(b)
    assert (first.body, second.body) == ('"x"', '"y"')
    assert desk.pull(a) == []
    assert desk.done(a, first, '{"n":1}') is None
    assert desk.done(b, second) is None
    stats = desk.stats
    assert (stats.ready, stats.leased, stats.done, stats.published, stats.completed) == (0, 0, 2, 2, 2)
    assert (stats.work_us, stats.workers) == (10, 0)
    assert stats.rate > 0
    results = desk.rig.ledger.items(desk.queue.id, ItemState.DONE)
    assert [(r.id, r.result, r.delivery) for r in results] == [
        (first.item, '{"n":1}', 1),
        (second.item, '"r"', 1),
    ]


def test_order_is_priority_then_place(desk: Desk) -> None:
    a = desk.consumer()
    desk.publish(a, '"old"', '"old2"')
    desk.rig.advance(SECOND)
    desk.publish(a, '"new"')
    desk.publish(a, '"urgent"', priority=5)
    desk.publish(a, '"never mind"', priority=-1)
    desk.publish(a, '"later"', delay_us=10 * SECOND)
    order = ['"urgent"', '"old"', '"old2"', '"new"', '"never mind"']
    assert desk.bodies(ItemState.READY) == order
    assert [d.body for d in desk.pull(a, 10)] == order
    assert desk.bodies(ItemState.DELAYED) == ['"later"']
    desk.rig.advance(10 * SECOND)
    assert [d.body for d in desk.pull(a, 10)] == ['"later"']


def test_who_was_only_given_up_keeps_its_place_and_who_failed_goes_to_the_end(desk: Desk) -> None:
    a = desk.consumer()
    desk.publish(a, '"1"', '"2"', '"3"')
    one, two = desk.pull(a, 2)
    desk.rig.advance(SECOND)
    assert desk.back(a, two) is None
    assert desk.back(a, one, failed=True, error="ValueError: no", delay_us=0) is None
    again = desk.pull(a, 3)
    assert [d.body for d in again] == ['"2"', '"3"', '"1"']
    assert [(d.failures, d.delivery) for d in again] == [(0, 2), (0, 1), (1, 2)]
    desk.rig.advance(VISIBLE)
    lapsed = desk.pull(a, 3)
    assert [d.body for d in lapsed] == ['"2"', '"3"', '"1"'], "a lost worker moved them"
    assert [d.losses for d in lapsed] == [1, 1, 1]


def test_a_key_is_published_once(desk: Desk) -> None:
    a, b = desk.consumer(), desk.consumer()
    assert desk.publish(a, '"x"', key="k").new == 1
    same = desk.publish(b, '"x"', key="k")
    assert (same.new, same.duplicates, same.conflicts) == (0, 1, ())
    ledger = desk.rig.ledger
    mixed = ledger.publish(
        b,
        2,
        [
            NewItem(body='"other"', key="k"),
            NewItem(body='"new"', key="n"),
            NewItem(body='"new"', key="n"),
            NewItem(body='"free"'),
        ],
    )
    assert (mixed.new, mixed.duplicates, mixed.conflicts) == (2, 1, ("k",))
    desk.done(a, desk.one(a))
    done = desk.rig.ledger.publish(b, 3, [NewItem(body='"x"', key="k")])
    assert (done.new, done.duplicates) == (0, 1), "a key that is done was published again"
    assert desk.rig.ledger.items_by_key(desk.queue.id, ["k", "n", "none"])[0].body == '"x"'
    assert desk.stats.published == 3


def test_a_batch_whose_answer_was_lost_is_not_published_twice(desk: Desk) -> None:
    a = desk.consumer()
    ledger = desk.rig.ledger
    drafts = [NewItem(body='"x"'), NewItem(body='"y"')]
    assert ledger.publish(a, 1, drafts).new == 2
    assert ledger.publish(a, 1, drafts).new == 2
    assert desk.stats.ready == 2


def test_only_the_newest_delivery_counts(desk: Desk) -> None:
    """S6."""
    zombie, heir = desk.consumer(), desk.consumer()
    desk.publish(zombie, '"x"')
    old = desk.one(zombie)
    desk.rig.advance(VISIBLE)
    new = desk.one(heir)
    assert new.delivery == old.delivery + 1
    refused = desk.done(zombie, old, '"stale"')
    assert isinstance(refused, StaleDelivery)
    assert "delivery 2" in str(refused)
    assert isinstance(desk.back(zombie, old, failed=True, error="boo"), StaleDelivery)
    assert desk.rig.ledger.extend(zombie, [(old.item, old.delivery)], MINUTE) == {old.item}
    assert desk.done(heir, new, '"fresh"') is None
    assert isinstance(desk.done(zombie, old, '"stale"'), StaleDelivery)
    (result,) = desk.rig.ledger.items(desk.queue.id, ItemState.DONE)
    assert (result.result, result.error) == ('"fresh"', "")
    assert (desk.stats.stale, desk.stats.completed, desk.stats.failed) == (2, 1, 0)


def test_a_consumer_that_is_late_but_was_not_replaced_may_complete(desk: Desk) -> None:
    a = desk.consumer()
    desk.publish(a, '"x"')
    given = desk.one(a)
    desk.rig.advance(10 * VISIBLE)
    assert desk.done(a, given) is None


def test_the_same_delivery_number_of_another_consumer_is_no_right(desk: Desk) -> None:
    """After a crash of the database's host a pull may be forgotten, and its number given again."""
    a, b = desk.consumer(), desk.consumer()
    desk.publish(a, '"x"')
    given = desk.one(a)
    assert isinstance(desk.done(b, given), StaleDelivery)
    assert desk.done(a, given) is None


def test_completing_again_is_answered_and_changes_nothing(desk: Desk) -> None:
    a = desk.consumer()
    desk.publish(a, '"x"')
    given = desk.one(a)
    desk.done(a, given, '"first"')
    before = desk.rig.dump(without=("pool", "consumer"))
    assert desk.done(a, given, '"second"') is None
    assert desk.rig.dump(without=("pool", "consumer")) == before
    assert (desk.stats.completed, desk.stats.stale) == (1, 0)


def test_one_stale_ack_does_not_hold_up_the_others(desk: Desk) -> None:
    a, b = desk.consumer(), desk.consumer()
    desk.publish(a, '"x"', '"y"', '"z"')
    mine = desk.pull(a, 3)
    desk.rig.sql("UPDATE item SET visible_at = 0 WHERE id = ?", mine[1].item)
    (stolen,) = desk.pull(b)
    acks = [Ack(item=d.item, delivery=d.delivery, result='"r"') for d in reversed(mine)]
    answers = desk.rig.ledger.complete(a, acks)
    assert [type(x) for x in answers] == [type(None), StaleDelivery, type(None)]
    assert desk.done(b, stolen) is None
    assert (desk.stats.done, desk.stats.stale) == (3, 1)
    journalled = desk.rig.sql("SELECT kind FROM journal WHERE strand = ? ORDER BY id", f"consumer:{a}")
    assert [k for (k,) in journalled] == ["items.published", "items.completed", "items.refused"]


def test_extending_keeps_it(desk: Desk) -> None:
    a, b = desk.consumer(), desk.consumer()
    desk.publish(a, '"x"')
    given = desk.one(a)
    for _ in range(3):
        desk.rig.advance(VISIBLE - SECOND)
        assert desk.rig.ledger.extend(a, [(given.item, given.delivery)], VISIBLE) == set()
        assert desk.pull(b) == []
    assert desk.done(a, given) is None


def test_after_its_tries_it_is_dead_with_its_last_error_and_others_are_not_delayed(desk: Desk) -> None:
    a = desk.consumer()
    desk.publish(a, '"poison"', '"fine"')
    for n in range(3):
        desk.rig.advance(10 * MINUTE)
        pulled = {d.body: d for d in desk.pull(a, 2)}
        if n == 0:
            desk.done(a, pulled['"fine"'])
        given = pulled['"poison"']
        assert given.failures == n
        desk.back(a, given, failed=True, error=f"Traceback\nValueError: try {n}")
        if n == 0:
            assert desk.pull(a) == [], "it came back without a backoff"
    desk.rig.advance(60 * MINUTE)
    assert desk.pull(a) == []
    (dead,) = desk.rig.ledger.items(desk.queue.id, ItemState.DEAD)
    assert (dead.error, dead.failures) == ("Traceback\nValueError: try 2", 3)
    assert (desk.stats.dead, desk.stats.failed) == (1, 3)
    assert desk.rig.ledger.redrive(desk.queue.id, None, most=100, actor="test") == 1
    again = desk.one(a)
    assert (again.body, again.failures, again.delivery) == ('"poison"', 0, 4)
    assert desk.done(a, again) is None


def test_after_its_losses_it_is_dead_and_says_why(desk: Desk) -> None:
    a = desk.consumer()
    desk.publish(a, '"killer"')
    for _ in range(3):
        desk.one(a)
        desk.rig.advance(VISIBLE)
    assert desk.pull(a) == []
    (dead,) = desk.rig.ledger.items(desk.queue.id, ItemState.DEAD)
    assert dead.error == "its worker was lost 3 times while it had this item"
    assert "items.dead" in desk.rig.kinds("images")


def test_a_consumer_that_is_gone_keeps_nothing(desk: Desk) -> None:
    dead, alive = desk.consumer(), desk.consumer()
    desk.publish(dead, '"x"', '"y"', '"z"')
    given = desk.pull(dead, 2)
    desk.done(dead, given[0])
    assert [c.id for c in desk.rig.ledger.consumers_at_work(desk.queue.id)] == [dead]
    assert desk.rig.ledger.end_consumer(dead) == 1
    assert [d.body for d in desk.pull(alive, 5)] == ['"y"', '"z"']
    assert isinstance(desk.done(dead, given[1]), StaleDelivery)


def test_a_paused_queue_hands_out_nothing(desk: Desk) -> None:
    a = desk.consumer()
    desk.publish(a, '"x"', '"y"')
    given = desk.one(a)
    ledger = desk.rig.ledger
    ledger.pause_queue(desk.queue.id, paused=True, actor="test")
    assert desk.pull(a) == []
    assert desk.done(a, given) is None
    ledger.pause_queue(desk.queue.id, paused=False, actor="test")
    assert desk.one(a).body == '"y"'


def test_a_queue_hands_out_no_more_than_its_concurrency(rig: Rig) -> None:
    rig.tenant()
    desk = Desk(rig, concurrency=2)
    a, b = desk.consumer(), desk.consumer()
    desk.publish(a, *(f'"{n}"' for n in range(5)))
    first = desk.pull(a, 10)
    assert len(first) == 2
    assert desk.pull(b) == []
    desk.done(a, first[0])
    assert len(desk.pull(b, 10)) == 1
    rig.advance(VISIBLE)
    assert len(desk.pull(b, 10)) == 2, "lapsed ones are not in anybody's hands"


def test_a_result_under_a_dead_lease_is_not_stored(desk: Desk) -> None:
    """S2."""
    desk.rig.device()
    lease = desk.rig.ask(10)
    a = desk.consumer()
    desk.publish(a, '"x"', '"y"')
    one, two = desk.pull(a, 2)
    assert desk.done(a, one, lease=desk.rig.key(lease)) is None
    assert desk.rig.look(lease).committed_at > 0
    body = desk.rig.sql("SELECT body FROM journal WHERE kind = 'items.completed'")[0][0]
    assert lease.lease.id in body
    desk.rig.ledger.revoke(lease.lease.id, reason=EndReason.REVOKED, detail="test", grace_us=0, actor="test")
    desk.rig.advance(SECOND)
    with desk.rig.only_journals(), pytest.raises(LeaseLost, match="no result was stored"):
        desk.done(a, two, lease=desk.rig.key(lease))
    assert desk.done(a, two) is None


def test_purged_numbers_are_nobody_elses(desk: Desk) -> None:
    a = desk.consumer()
    desk.publish(a, '"x"', '"y"')
    given = desk.pull(a, 2)
    desk.done(a, given[0])
    ledger = desk.rig.ledger
    assert ledger.purge(desk.queue.id, [ItemState.DONE, ItemState.READY], most=10, actor="test") == 1
    assert ledger.purge(desk.queue.id, [ItemState.LEASED], most=10, actor="test") == 1
    assert isinstance(desk.done(a, given[1]), StaleDelivery)
    assert desk.stats.purged == 2
    desk.publish(a, '"z"')
    assert desk.one(a).item > given[1].item
    with pytest.raises(NotFound):
        ledger.item(desk.queue.id, given[0].item)


def test_queues_are_their_tenants_own(rig: Rig) -> None:
    rig.tenant()
    rig.tenant("bob")
    mine = Desk(rig, "images")
    other = rig.ledger.open_queue("bob", "images", None)
    a = mine.consumer()
    mine.publish(a, '"secret"', key="k")
    (given,) = mine.pull(a)
    stranger = rig.ledger.open_consumer(other.id, Holder(host=HERE))
    assert rig.ledger.pull(stranger, 5, VISIBLE) == []
    (refused,) = rig.ledger.complete(stranger, [Ack(item=given.item, delivery=given.delivery, result="1")])
    assert isinstance(refused, StaleDelivery)
    assert rig.ledger.items_by_key(other.id, ["k"]) == []
    with pytest.raises(NotFound):
        rig.ledger.item(other.id, given.item)
    with pytest.raises(NotFound) as unknown:
        rig.ledger.queue("bob", "imges")
    assert unknown.value.remedy == "there are: images"


def test_terms_change_when_they_are_said(rig: Rig) -> None:
    rig.tenant()
    ledger = rig.ledger
    made = ledger.open_queue("ada", "q", None)
    assert made.terms == QueueTerms()
    assert ledger.open_queue("ada", "q", QueueTerms(tries=9)).terms.tries == 9
    assert ledger.open_queue("ada", "q", None).terms.tries == 9
    assert rig.kinds("q") == ["queue.made", "queue.set"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"tries": 0},
        {"losses": 0},
        {"visibility_us": 1},
        {"visibility_us": 10**15},
        {"backoff_us": -1},
        {"concurrency": -1},
    ],
)
def test_terms_nobody_means_are_refused(sqlite: Rig, wrong: dict[str, int]) -> None:
    with pytest.raises(BadInput):
        sqlite.ledger.open_queue("ada", "q", QueueTerms(**wrong))


@pytest.mark.parametrize("place", ["before_begin", "before_commit", "after_commit_before_reply"])
def test_a_lost_connection_at_any_place_publishes_pulls_and_completes_once(postgres: Rig, place: str) -> None:
    """S5: the verb is run again on a new connection, and finds out what the first one did."""
    postgres.tenant()
    desk = Desk(postgres)
    a = desk.consumer()

    def cut() -> None:
        failpoints.arm(place, lambda: _drop_once(place))

    cut()
    assert desk.publish(a, '"x"', '"y"').new == 2
    cut()
    given = desk.pull(a, 1)
    assert [d.body for d in given] == ['"x"'], "a lost answer left its item with nobody"
    assert desk.stats.leased == 1
    cut()
    assert desk.done(a, given[0]) is None
    stats = desk.stats
    assert (stats.ready, stats.leased, stats.done, stats.published, stats.completed) == (1, 0, 1, 2, 1)
    assert postgres.faults() == []


def test_a_lost_answer_takes_nothing_from_who_knows_what_it_has(postgres: Rig) -> None:
    postgres.tenant()
    desk = Desk(postgres)
    a = desk.consumer()
    desk.publish(a, '"x"', '"y"')
    first = desk.one(a)
    place = "after_commit_before_reply"
    failpoints.arm(place, lambda: _drop_once(place))
    assert [d.body for d in postgres.ledger.pull(a, 5, VISIBLE, [first.item])] == ['"y"']
    assert desk.done(a, first) is None


def test_whoever_counts_what_is_handed_out_waits_for_who_counts_already(postgres: Rig) -> None:
    """Two that pull at once must not both see the last place free."""
    postgres.tenant()
    desk = Desk(postgres, concurrency=1)
    a = desk.consumer()
    desk.publish(a, '"x"', '"y"')
    given: list[Delivery] = []
    engine: Any = postgres.ledger.engine
    with engine.connect() as other:
        with other.transaction():
            other.execute("SELECT id FROM queue WHERE id = %s FOR UPDATE", (desk.queue.id,))
            thread = threading.Thread(target=lambda: given.extend(desk.pull(a)))
            thread.start()
            thread.join(0.5)
            assert thread.is_alive(), "it counted without the lock"
        thread.join()
    assert len(given) == 1


def test_what_comes_back_rings(desk: Desk) -> None:
    a, b = desk.consumer(), desk.consumer()
    desk.publish(a, '"x"')
    bell = desk.rig.ledger.bell()
    try:
        bell.listen(queue_topic(desk.queue.id))
        while bell.wait(300_000):
            pass  # of publishing
        desk.back(a, desk.one(a))
        assert bell.wait(10 * SECOND), "given back"
        while bell.wait(300_000):
            pass
        desk.one(b)
        desk.rig.ledger.end_consumer(b)
        assert bell.wait(10 * SECOND), "its consumer is gone"
    finally:
        bell.close()


def test_purging_and_redriving_go_by_parts(desk: Desk) -> None:
    a = desk.consumer()
    desk.publish(a, *['"x"'] * 3)
    for _ in range(3):
        for given in desk.pull(a, 3):
            desk.back(a, given, failed=True, delay_us=0)
    ledger, queue = desk.rig.ledger, desk.queue.id
    assert desk.stats.dead == 3
    assert [ledger.redrive(queue, None, most=2, actor="test") for _ in range(3)] == [2, 1, 0]
    for given in desk.pull(a, 5):
        desk.done(a, given)
    desk.publish(a, *['"y"'] * 4)
    both = (ItemState.READY, ItemState.DONE)
    assert [ledger.purge(queue, both, most=3, actor="test") for _ in range(4)] == [3, 3, 1, 0]


def test_redriven_it_has_all_its_losses_again_and_its_error_until_it_is_done(desk: Desk) -> None:
    a = desk.consumer()
    desk.publish(a, '"x"')
    for _ in range(3):
        desk.one(a)
        desk.rig.ledger.end_consumer(a)
    (dead,) = desk.rig.ledger.items(desk.queue.id, ItemState.DEAD)
    assert desk.rig.ledger.redrive(desk.queue.id, [dead.id], most=1, actor="test") == 1
    for losses in (0, 1):
        assert desk.one(a).losses == losses
        desk.rig.ledger.end_consumer(a)
    desk.back(a, desk.one(a))
    assert desk.rig.ledger.item(desk.queue.id, dead.id).error == dead.error, (
        "a nack without an error keeps it"
    )


@pytest.mark.parametrize("place", ["before_begin", "before_commit", "after_commit_before_reply"])
@pytest.mark.parametrize("failed", [True, False])
def test_giving_back_over_a_lost_connection_is_answered_and_counted_once(
    postgres: Rig, place: str, failed: bool
) -> None:
    postgres.tenant()
    desk = Desk(postgres)
    a = desk.consumer()
    desk.publish(a, '"x"')
    given = desk.one(a)
    failpoints.arm(place, lambda: _drop_once(place))
    assert desk.back(a, given, failed=failed) is None
    assert (desk.stats.failed, desk.stats.leased) == (int(failed), 0)
    assert isinstance(desk.back(a, given, failed=failed), StaleDelivery), (
        "not a lost answer, but a second nack"
    )
    assert postgres.faults() == []


@pytest.mark.parametrize("verb", ["extend", "complete", "give_back"])
def test_items_are_locked_by_number_whatever_order_they_are_given_in(postgres: Rig, verb: str) -> None:
    """Extending runs beside completing: in another order the two would wait for each other, until the server ends one."""
    postgres.tenant()
    desk = Desk(postgres)
    a = desk.consumer()
    desk.publish(a, *['"x"'] * 40)
    given = desk.pull(a, 40)[::-1]
    held = [(one.item, one.delivery) for one in given]
    acks = [Ack(item=item, delivery=delivery, result="1") for item, delivery in held]
    nacks = [Nack(item=item, delivery=delivery, failed=False) for item, delivery in held]
    verbs = {
        "extend": lambda: postgres.ledger.extend(a, held, VISIBLE),
        "complete": lambda: postgres.ledger.complete(a, acks),
        "give_back": lambda: postgres.ledger.give_back(a, nacks),
    }
    engine: Any = postgres.ledger.engine
    with engine.connect() as other, engine.connect() as looking:
        with other.transaction():
            other.execute("SELECT id FROM item WHERE id = %s FOR UPDATE", (held[-1][0],))
            thread = threading.Thread(target=verbs[verb])
            thread.start()
            waits = (
                "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
            )
            until = time.monotonic() + 20
            while not looking.execute(waits).fetchall() and time.monotonic() < until:
                time.sleep(0.01)
            free = other.execute(
                "SELECT id FROM item WHERE id > %s FOR UPDATE SKIP LOCKED", (held[-1][0],)
            ).fetchall()
        thread.join()
    assert len(free) == 39


def test_what_is_no_number_is_refused_before_the_database_sees_it(desk: Desk) -> None:
    a = desk.consumer()
    desk.publish(a, '"x"')
    ledger, queue = desk.rig.ledger, desk.queue.id
    for wrong in (1 << 63, -1, 1.5, "1", True, None):
        for verb in (
            lambda n: ledger.item(queue, n),
            lambda n: ledger.items(queue, ItemState.READY, after=n),
            lambda n: ledger.items(queue, ItemState.READY, limit=n),
            lambda n: ledger.redrive(queue, [n], most=1, actor="test"),
            lambda n: ledger.pull(a, n, VISIBLE),
            lambda n: ledger.publish(a, 9, [NewItem(body="1", priority=n * (1 << 21) if n == -1 else n)]),
        ):
            with pytest.raises(BadInput):
                verb(wrong)
    assert desk.stats.published == 1


def _drop_once(place: str) -> None:
    failpoints.disarm()
    raise ConnectionDropped(place)


@pytest.mark.parametrize("place", ["after_items_published", "after_items_done", "before_commit"])
def test_a_verb_that_breaks_half_way_changed_nothing(sqlite: Rig, place: str) -> None:
    """S1: the items, the counts and the journal row come together or not at all."""
    sqlite.tenant()
    desk = Desk(sqlite)
    a = desk.consumer()
    desk.publish(a, '"x"')
    given = desk.one(a)
    before = sqlite.dump()
    failpoints.arm(place, "raise")
    with pytest.raises(failpoints.FailpointHit):
        desk.done(a, given) if place != "after_items_published" else sqlite.ledger.publish(
            a, 9, [NewItem(body="1")]
        )
    failpoints.disarm()
    assert sqlite.dump() == before
    assert desk.done(a, given) is None


def test_an_older_delivery_of_ones_own_does_not_count(desk: Desk) -> None:
    """Stopped past its visibility, it pulled the same item again: the answer of the first time is not the second's."""
    a = desk.consumer()
    desk.publish(a, '"x"')
    old = desk.one(a)
    desk.rig.advance(VISIBLE)
    new = desk.one(a)
    assert isinstance(desk.done(a, old, '"old"'), StaleDelivery)
    assert desk.done(a, new, '"new"') is None
    assert desk.rig.ledger.items(desk.queue.id, ItemState.DONE)[0].result == '"new"'


def test_the_rate_is_of_the_last_ten_seconds(desk: Desk) -> None:
    a = desk.consumer()
    desk.publish(a, *(f'"{n}"' for n in range(50)))
    desk.rig.advance(10 * SECOND - desk.rig.ledger.now() % (10 * SECOND))  # to where a slot begins
    for d in desk.pull(a, 40):
        desk.done(a, d)
    desk.rig.advance(8 * SECOND)
    assert desk.stats.rate == pytest.approx(4.0, abs=0.1)
    desk.rig.advance(2 * SECOND)
    desk.done(a, desk.one(a))
    assert 3.0 < desk.stats.rate < 4.2, "what was done in the slot before was forgotten"
    desk.rig.advance(20 * SECOND)
    assert desk.stats.rate == 0


def test_a_queue_that_just_grew_is_not_sorted_whole_to_pull_one(postgres: Rig) -> None:
    """Nobody has analysed the table yet: the planner thinks it is small, and must still go by the index."""
    postgres.tenant()
    desk = Desk(postgres)
    a = desk.consumer()
    desk.publish(a, *(f'"{n}"' for n in range(3000)))
    with postgres.ledger.engine.connect() as connection:
        plan = connection.execute(
            "EXPLAIN SELECT id FROM item WHERE queue = 1 AND state = 'ready' ORDER BY priority DESC, place, id LIMIT 10 FOR UPDATE SKIP LOCKED"
        ).fetchall()
    told = "\n".join(row[0] for row in plan)
    assert "Index Scan using item_ready" in told
    assert "Sort" not in told


def test_a_lease_of_another_tenant_stores_nothing(desk: Desk) -> None:
    desk.rig.device()
    desk.rig.tenant("bob")
    lease = desk.rig.ask(10, tenant="bob")
    a = desk.consumer()
    desk.publish(a, '"x"')
    given = desk.one(a)
    with desk.rig.only_journals(), pytest.raises(NotFound):
        desk.done(a, given, lease=desk.rig.key(lease))
