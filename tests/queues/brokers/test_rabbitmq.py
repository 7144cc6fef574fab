"""What only RabbitMQ does."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest

from sublet.core.errors import BrokerDown, Misconfigured
from sublet.queues.brokers.rabbitmq import open_amqp
from tests.queues.brokers.servers import Places, RabbitMq, deaf
from tests.queues.brokers.test_contract import no_secret, receive_all
from tests.waiting import wait_until


@pytest.fixture
def rabbit(places: Places) -> RabbitMq:
    return cast(RabbitMq, places["amqp"])


@contextlib.contextmanager
def opened(rabbit: RabbitMq, queue: str, **options: Any) -> Iterator[Any]:
    broker = rabbit.open(queue, **options)
    try:
        yield broker
    finally:
        broker.close()


@pytest.mark.parametrize(
    "wrong", [{"password": "canary-wrong"}, {"user": "nobody"}, {"vhost": "nowhere"}], ids=str
)
def test_refused(rabbit: RabbitMq, wrong: dict[str, str]) -> None:
    vhost = wrong.pop("vhost", "")
    url = rabbit.url(**wrong).replace("/?", f"/{vhost}?")
    with pytest.raises(Misconfigured) as e:
        open_amqp(url, "q")
    no_secret(str(e.value), e.value.remedy, repr(e.value.__cause__))


def test_the_queue_and_its_messages_are_durable(rabbit: RabbitMq) -> None:
    queue = rabbit.new_queue()
    with opened(rabbit, queue) as broker, rabbit.channel() as channel:
        channel.queue_declare(
            queue, durable=True, auto_delete=False
        )  # would be refused if it were anything else
        broker.publish([("a", 1)])
        found = channel.basic_get(queue)
        assert found.properties["delivery_mode"] == 2
        assert found.properties["message_id"] == "a"
        assert found.properties["content_type"] == "application/json"


def test_a_quorum_queue(rabbit: RabbitMq) -> None:
    queue = rabbit.new_queue()
    with rabbit.channel() as channel:
        channel.queue_declare(queue, durable=True, auto_delete=False, arguments={"x-queue-type": "quorum"})
    with opened(rabbit, queue) as one, opened(rabbit, queue) as other:
        one.publish([(f"item-{n}", n) for n in range(20)])
        first, second = receive_all(one, 5), receive_all(other, 15)
        assert len({m.key for m in first + second}) == 20
        other.settle(second)
        one.give_back(first)
        assert {m.key for m in receive_all(other, 5, settle=True)} == {m.key for m in first}


def test_a_full_queue_refuses_and_that_is_heard(rabbit: RabbitMq) -> None:
    queue = rabbit.new_queue()
    with rabbit.channel() as channel:
        full = {"x-max-length": 2, "x-overflow": "reject-publish"}
        channel.queue_declare(queue, durable=True, auto_delete=False, arguments=full)
    with opened(rabbit, queue) as broker:
        broker.publish([("a", 1), ("b", 2)])
        with pytest.raises(BrokerDown, match="full"):
            broker.publish([("c", 3)])
        assert {m.key for m in receive_all(broker, 2, settle=True)} == {"a", "b"}
        broker.publish([("c", 3)])


def test_a_queue_that_is_deleted_is_made_again(rabbit: RabbitMq) -> None:
    """A message for a queue that is gone would be dropped and still be confirmed."""
    queue = rabbit.new_queue()
    with opened(rabbit, queue) as broker:
        for key in ("a", "b"):
            with rabbit.channel() as channel:
                channel.queue_delete(queue)
            broker.publish([(key, 1)])
            assert [m.key for m in receive_all(broker, 1, settle=True)] == [key]
        with rabbit.channel() as channel:
            channel.queue_delete(queue)
        assert broker.receive(1) == []


def test_a_connection_the_server_ends(rabbit: RabbitMq) -> None:
    """What was held comes again, an old receipt is worth nothing, and nobody has to open anything."""
    queue = rabbit.new_queue()
    with opened(rabbit, queue) as broker:
        broker.publish([("a", 1)])
        got = receive_all(broker, 1)
        broker._connection.sock.shutdown(2)
        again = receive_all(broker, 1)
        assert [m.key for m in again] == ["a"]
        assert again[0].redelivered
        broker.settle(got)  # its tag is the same as the new one's
        assert broker._unsettled
        broker.settle(again)
        wait_until(lambda: broker.depth() == 0)


def test_tls_with_somebody_who_never_answers() -> None:
    with deaf() as port:
        begun = time.monotonic()
        with pytest.raises(BrokerDown):
            open_amqp(f"amqps://127.0.0.1:{port}/?timeout=0.5", "q")
        assert time.monotonic() - begun < 30
