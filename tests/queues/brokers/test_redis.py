"""What only Redis does: visibility by the server's clock, and receipts that lapse."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest

from sublet.core.errors import BadInput, BrokerDown, Misconfigured
from sublet.queues.brokers.redis_list import open_redis
from tests.queues.brokers.servers import Places, Redis, deaf
from tests.queues.brokers.test_contract import SECOND_US, no_secret, receive_all


@pytest.fixture
def server(places: Places) -> Redis:
    return cast(Redis, places["redis"])


@contextlib.contextmanager
def opened(server: Redis, queue: str, **options: Any) -> Iterator[Any]:
    broker = server.open(queue, **options)
    try:
        yield broker
    finally:
        broker.close()


@pytest.mark.parametrize("password", ["canary-wrong", ""])
def test_refused(server: Redis, password: str) -> None:
    with pytest.raises(Misconfigured) as e:
        open_redis(server.url(password=password), "q")
    no_secret(str(e.value), e.value.remedy)


def test_a_receipt_that_lapsed_settles_nothing(server: Redis) -> None:
    """S6: whoever was too slow cannot make the broker forget what somebody else has now."""
    queue = server.new_queue()
    with opened(server, queue, visibility=1) as slow, opened(server, queue) as other:
        slow.publish([("a", 1)])
        old = receive_all(slow, 1)
        assert other.receive(1) == [], "it is somebody's"
        new = receive_all(other, 1)
        assert new[0].key == "a"
        slow.settle(old)
        slow.give_back(old)
        slow.close()
        assert other.receive(1) == [], "it is the other's, and in the list no second time"
        other.give_back(new)
        other.settle(receive_all(other, 1))
        assert server.client().keys(f"{queue}*") == [f"{queue}.deliveries".encode()]


def test_in_the_list_or_held_and_never_neither(server: Redis) -> None:
    queue = server.new_queue()
    with opened(server, queue) as broker:
        broker.publish([(f"item-{n}", n) for n in range(2500)])
        got = receive_all(broker, 1500)
        client = server.client()
        assert (client.llen(queue), client.hlen(f"{queue}.held"), client.zcard(f"{queue}.due")) == (
            1000,
            1500,
            1500,
        )
        broker.settle(got)
        assert (client.llen(queue), client.hlen(f"{queue}.held"), client.zcard(f"{queue}.due")) == (
            1000,
            0,
            0,
        )


def test_waiting_finds_what_lapses_meanwhile(server: Redis) -> None:
    queue = server.new_queue()
    with opened(server, queue, visibility=1) as one, opened(server, queue) as other:
        one.publish([("a", 1)])
        receive_all(one, 1)
        assert [m.key for m in other.receive(1, wait_us=30 * SECOND_US)] == ["a"]


def test_equal_messages_without_an_id_have_one_key(server: Redis) -> None:
    queue = server.new_queue()
    server.foreign(queue, b'{"n": 1}')
    server.foreign(queue, b'{"n": 1}')
    server.foreign(queue, b'{"n": 2}')
    server.foreign(queue, b'{"sublet.key": 7, "body": 1}')  # not ours, whatever it looks like
    with opened(server, queue) as broker:
        got = receive_all(broker, 4, settle=True)
    assert len({m.key for m in got}) == 3
    assert {"sublet.key": 7, "body": 1} in [m.body for m in got]


def test_not_a_list(server: Redis) -> None:
    queue = server.new_queue()
    server.client().set(queue, "x")
    with pytest.raises(BadInput, match="not a list"):
        server.open(queue)
    with pytest.raises(BadInput, match="database"):
        open_redis("redis://127.0.0.1/db", "q")


def test_a_connection_that_breaks(server: Redis) -> None:
    """The receipt is as good on the next one."""
    queue = server.new_queue()
    with opened(server, queue) as broker:
        broker.publish([("a", 1)])
        got = receive_all(broker, 1)
        for found in server.client().client_list():
            if found["cmd"] != "client|list":
                with contextlib.suppress(Exception):
                    server.client().client_kill_filter(_id=found["id"])
        broker.settle(got)
        assert server.client().hlen(f"{queue}.held") == 0


def test_tls_with_somebody_who_never_answers() -> None:
    with deaf() as port:
        begun = time.monotonic()
        with pytest.raises(BrokerDown):
            open_redis(f"rediss://127.0.0.1:{port}/?timeout=0.5", "q")
        assert time.monotonic() - begun < 30
