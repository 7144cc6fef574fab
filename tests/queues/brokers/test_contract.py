"""One contract, every broker: what was not settled comes again, with the same key, and nothing is held that was not returned (S6)."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sublet.core.errors import BrokerDown, MissingExtra, NotJson, SubletError
from sublet.ports.broker import BrokerMessage
from tests.conftest import repository
from tests.queues.brokers.servers import (
    KINDS,
    PASSWORD,
    PLAIN_PASSWORD,
    Place,
    Places,
    deaf,
    free_port,
    holding,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.filterwarnings("ignore:The return_immediately flag")
SECOND_US = 1_000_000
LONG_US = 30 * SECOND_US
Open = Callable[..., Any]


@pytest.fixture(params=list(KINDS))
def place(request: pytest.FixtureRequest, places: Places, monkeypatch: pytest.MonkeyPatch) -> Place:
    found = places[request.param]
    for name, value in found.environment.items():
        monkeypatch.setenv(name, value)
    return found


@pytest.fixture
def opened(place: Place) -> Iterator[Open]:
    """Opens brokers of the place, and closes them."""
    with contextlib.ExitStack() as stack:

        def open_one(queue: str, /, **options: Any) -> Any:
            broker = place.open(queue, **options)
            stack.callback(broker.close)
            return broker

        yield open_one


def receive_all(broker: Any, count: int, *, settle: bool = False) -> list[BrokerMessage]:
    """Brokers may hand over fewer than there are."""
    got: list[BrokerMessage] = []
    give_up = time.monotonic() + 60
    while len(got) < count and time.monotonic() < give_up:
        some = broker.receive(count - len(got), wait_us=SECOND_US)
        assert len(some) <= count - len(got)
        got += some
        if settle:
            broker.settle(some)
    assert len(got) == count
    return got


def test_published_received_settled_gone(place: Place, opened: Open) -> None:
    queue = place.new_queue()
    broker = opened(queue)
    bodies = [{"path": "cats/1.png", "n": [1, 2.5, None, True]}, "plain text", 7, ["ü", "🐈", "\x00"], None]
    broker.publish([(f"item-{n}", body) for n, body in enumerate(bodies)])
    got = receive_all(broker, len(bodies))
    assert {m.key: m.body for m in got} == {f"item-{n}": body for n, body in enumerate(bodies)}
    broker.settle(got)
    broker.settle(got)  # a second time is no error
    broker.settle([])
    assert broker.receive(10) == []
    broker.close()
    assert opened(queue).receive(10, wait_us=SECOND_US // 5) == []


def test_keys_of_every_kind(place: Place, opened: Open) -> None:
    """Long ones, strange ones, none."""
    broker = opened(place.new_queue())
    given = ["k" * 512, "ü🐈" * 256, "a b/c:{d}", "x"]
    broker.publish([(key, 1) for key in given])
    assert sorted(m.key for m in receive_all(broker, 4, settle=True)) == sorted(given)
    broker.publish([("", "same"), ("", "same")])
    assert len({m.key for m in receive_all(broker, 2, settle=True)}) == 2, "the broker names each"
    for bad in ("two\nlines", "k" * 513):
        with pytest.raises(SubletError):
            broker.publish([("good", 1), (bad, 1)])
    with pytest.raises(NotJson):
        broker.publish([("good", 1), ("bad", object())])
    assert broker.receive(1, wait_us=SECOND_US // 5) == [], "all or nothing"


def test_killed_before_settling(place: Place, opened: Open) -> None:
    queue = place.new_queue()
    broker = opened(queue)
    broker.publish([(f"item-{n}", n) for n in range(3)])
    with holding(place, queue, 3, **place.brief) as held:
        pass
    assert held
    time.sleep(place.asleep_s)
    again = receive_all(broker, 3)
    assert {m.key for m in again} == {"item-0", "item-1", "item-2"} >= set(held)
    assert {m.body for m in again} == {0, 1, 2}
    broker.settle(again)


def test_given_back_is_there_at_once(place: Place, opened: Open) -> None:
    queue = place.new_queue()
    one, other = opened(queue), opened(queue)
    one.publish([("a", 1), ("b", 2)])
    got = receive_all(one, 2)
    begun = time.monotonic()
    one.give_back([m for m in got if m.key == "a"])
    (again,) = receive_all(other, 1)
    assert again.key == "a"
    assert again.body == 1
    assert time.monotonic() - begun < 8, "not after its visibility"
    one.settle([m for m in got if m.key == "a"])  # no longer one's own: changes nothing
    other.give_back([again])
    assert [m.key for m in receive_all(one, 1)] == ["a"]


def test_what_can_never_be_an_item_is_put_aside(place: Place, opened: Open) -> None:
    queue = place.new_queue()
    one, other = opened(queue), opened(queue)
    one.publish([("huge", 1), ("fine", 2)])
    got = {m.key: m for m in receive_all(one, 2)}
    with pytest.warns(RuntimeWarning, match=r"message huge .* is refused \(too large\)"):
        one.put_aside(got["huge"], "too large")
    one.give_back([got["huge"]])  # not its any more: changes nothing
    one.settle([got["fine"]])
    assert other.receive(10, wait_us=SECOND_US // 5) == []
    one.close()
    assert other.receive(10, wait_us=SECOND_US // 5) == []


def test_two_consumers_share_nothing_and_hold_nothing_more(place: Place, opened: Open) -> None:
    queue = place.new_queue()
    one, other = opened(queue), opened(queue)
    one.publish([(f"item-{n}", n) for n in range(10)])
    first = receive_all(one, 3)
    second = receive_all(other, 7)  # would not come if `one` had fetched ahead
    keys = [m.key for m in first + second]
    assert sorted(keys) == sorted(f"item-{n}" for n in range(10))
    assert one.receive(10) == other.receive(10) == []
    one.settle(first)
    other.settle(second)


def test_a_hundred(place: Place, opened: Open) -> None:
    queue = place.new_queue()
    broker = opened(queue)
    broker.publish([(f"item-{n}", {"n": n}) for n in range(place.many)])
    assert broker.receive(0) == []
    seen: set[str] = set()
    while len(seen) < place.many:
        seen |= {m.key for m in receive_all(broker, min(100, place.many - len(seen)), settle=True)}
    assert seen == {f"item-{n}" for n in range(place.many)}


def test_part_of_a_batch_settled(place: Place, opened: Open) -> None:
    """Every second one is settled, the last included: the others are still there when it closes."""
    queue = place.new_queue()
    broker = opened(queue)
    broker.publish([(f"item-{n}", n) for n in range(10)])
    got = sorted(receive_all(broker, 10), key=lambda m: int(m.body))
    broker.settle([m for m in got if m.body % 2])
    broker.close()
    left = receive_all(opened(queue), 5)
    assert {m.body for m in left} == {0, 2, 4, 6, 8}


def test_waits_for_the_first_and_not_longer(place: Place, opened: Open) -> None:
    queue = place.new_queue()
    broker, sender = opened(queue), opened(queue)
    begun = time.monotonic()
    assert broker.receive(5) == []
    assert broker.receive(5, wait_us=SECOND_US // 2) == []
    assert time.monotonic() - begun < 40
    later = threading.Timer(0.3, lambda: sender.publish([("late", 1)]))
    later.start()
    begun = time.monotonic()
    got = broker.receive(5, wait_us=LONG_US)
    assert [m.key for m in got] == ["late"]
    assert time.monotonic() - begun < LONG_US / 1e6
    later.join()


def test_programs_that_know_nothing_of_us(place: Place, opened: Open) -> None:
    queue = place.new_queue()
    place.foreign(queue, b'{"image": "cat.png"}')
    place.foreign(queue, "just wörds".encode())
    place.foreign(queue, b'{"n": NaN}')
    place.foreign(queue, b'{"image": "dog.png"}', "from-the-sender")
    broker = opened(queue)
    got = receive_all(broker, 4)
    bodies = [m.body for m in got]
    for body in ({"image": "cat.png"}, "just wörds", '{"n": NaN}', {"image": "dog.png"}):
        assert body in bodies
    assert "from-the-sender" in {m.key for m in got}
    keys = {m.key: m.body for m in got}
    assert len(keys) == 4
    broker.give_back(got)
    assert {m.key: m.body for m in receive_all(broker, 4, settle=True)} == keys, "a key outlives redelivery"


def test_what_is_no_text_is_put_aside(place: Place, opened: Open) -> None:
    if not place.bytes_too:
        pytest.skip("its messages are text by definition")
    queue = place.new_queue_with_aside()
    place.foreign(queue, b"\xff\xfe\x00broken")
    place.foreign(queue, b'"good"')
    broker = opened(queue)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        got = receive_all(broker, 1)
        assert [m.body for m in got] == ["good"]
        assert broker.receive(5, wait_us=SECOND_US // 5) == []
        broker.settle(got)
        broker.close()
        assert opened(queue).receive(5, wait_us=SECOND_US // 2) == []
    assert len([w for w in said if queue in str(w.message)]) == 1, "it is named, and does not come again"
    assert wait_until(lambda: place.put_aside(queue)) == b"\xff\xfe\x00broken"


def test_close_gives_back(place: Place, opened: Open) -> None:
    queue = place.new_queue()
    one, other = opened(queue), opened(queue)
    one.publish([("a", 1), ("b", 2)])
    got = receive_all(one, 2)
    one.settle(got[:1])
    begun = time.monotonic()
    one.close()
    one.close()
    assert [m.key for m in receive_all(other, 1)] == [got[1].key]
    assert time.monotonic() - begun < 8, "not after its visibility"


def test_depth(place: Place, opened: Open) -> None:
    broker = opened(place.new_queue())
    assert broker.depth() in (0, None)
    broker.publish([("a", 1), ("b", 2)])
    if broker.depth() is not None:
        wait_until(lambda: broker.depth() == 2)


def test_nobody_there(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    place.point_at(port, monkeypatch)
    begun = time.monotonic()
    with pytest.raises(BrokerDown) as e:
        place.open("images", port=port, timeout=1)
    assert time.monotonic() - begun < 30
    no_secret(str(e.value), e.value.remedy)


def test_somebody_there_who_never_answers(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with deaf() as port:
        place.point_at(port, monkeypatch)
        begun = time.monotonic()
        with pytest.raises(BrokerDown) as e:
            place.open("images", port=port, timeout=0.5).receive(1)
        assert time.monotonic() - begun < 30
        no_secret(str(e.value))


def test_a_server_that_freezes(place: Place, opened: Open) -> None:
    """Silence in the middle of a connection is found out too."""
    queue = place.new_queue()
    broker = opened(queue, timeout=1)
    broker.publish([("a", 1)])
    got = receive_all(broker, 1)
    begun = time.monotonic()
    with place.frozen():
        for ask in (
            lambda: broker.receive(1, wait_us=SECOND_US // 2),
            lambda: broker.publish([("b", 2)]),
        ):
            with pytest.raises(BrokerDown) as e:
                ask()
            no_secret(str(e.value))
    assert time.monotonic() - begun < 40
    with contextlib.suppress(BrokerDown):  # it may still be waking
        broker.settle(got)
    other = opened(queue)
    other.publish([("c", 3)])
    wait_until(lambda: "c" in {m.key for m in other.receive(10, wait_us=SECOND_US)})


def test_the_server_dies_between_receive_and_settle(place: Place, opened: Open) -> None:
    if not place.restarts:
        pytest.skip("an emulator keeps nothing")
    queue = place.new_queue()
    broker = opened(queue, timeout=2, **place.brief)
    broker.publish([("a", {"n": 1}), ("b", 2)])
    got = receive_all(broker, 2)
    broker.settle([m for m in got if m.key == "b"])
    assert broker.receive(1) == []
    place.kill()
    with contextlib.suppress(BrokerDown):  # either way it is not lost
        broker.settle(got)
    begun = time.monotonic()
    for ask in (lambda: broker.receive(1), lambda: broker.publish([("c", 3)]), broker.depth):
        with pytest.raises(BrokerDown) as e:
            ask()
        no_secret(str(e.value))
    assert time.monotonic() - begun < 30
    place.start()
    again = receive_all(broker, 1)  # the same object, on a new connection
    broker.settle(got + again)
    again += broker.receive(
        5, wait_us=SECOND_US // 2
    )  # an ack may be forgotten in a crash, a message may not
    assert ("a", {"n": 1}) in [(m.key, m.body) for m in again]
    assert {m.key for m in again} <= {"a", "b"}
    broker.settle(again)
    broker.publish([("c", 3)])
    assert [m.key for m in receive_all(broker, 1, settle=True)] == ["c"]


def test_what_it_shows_has_no_secret(place: Place, opened: Open) -> None:
    broker = opened(place.new_queue())
    shown = broker.describe()
    assert set(shown) == {"kind", "place", "queue"}
    assert all(isinstance(v, str) and v for v in shown.values())
    no_secret(str(shown), repr(broker), repr(getattr(broker, "_address", "")))


def test_another_name_at_the_broker(place: Place, opened: Open) -> None:
    queue = place.new_queue()
    opened(queue).publish([("a", 1)])
    broker = opened("ours", queue=queue)
    assert broker.describe()["queue"] == queue
    assert [m.key for m in receive_all(broker, 1, settle=True)] == ["a"]


def test_what_is_not_installed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    opener = place.opener()
    monkeypatch.setitem(sys.modules, place.library, None)
    with pytest.raises(MissingExtra) as e:
        opener(place.url(), "q")
    assert f"pip install 'sublet[{place.extra}]'" in e.value.remedy


def no_secret(*texts: str) -> None:
    for text in texts:
        assert PASSWORD not in text
        assert PLAIN_PASSWORD not in text
        assert "canary" not in text


def test_each_is_an_entry_point() -> None:
    import tomllib

    project = tomllib.loads(repository("pyproject.toml").read_text())["project"]
    offered = project["entry-points"]["sublet.brokers"]
    assert set(KINDS) <= set(offered)
    for kind, cls in KINDS.items():
        opener = cls.opener(cls.__new__(cls))
        assert offered[kind] == f"{opener.__module__}:{opener.__name__}"
