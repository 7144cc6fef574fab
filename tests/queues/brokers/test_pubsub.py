"""What only Pub/Sub does: topics and subscriptions."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any, cast

import pytest

from sublet.core.errors import BadInput
from sublet.queues.brokers.pubsub import MOST_BYTES, _batches, open_pubsub
from tests.queues.brokers.servers import Place, Places, PubSub
from tests.queues.brokers.test_contract import receive_all

pytestmark = pytest.mark.filterwarnings("ignore:The return_immediately flag")


@pytest.fixture
def server(places: Places, monkeypatch: pytest.MonkeyPatch) -> PubSub:
    found = cast(PubSub, places["pubsub"])
    for name, value in found.environment.items():
        monkeypatch.setenv(name, value)
    return found


@contextlib.contextmanager
def opened(server: PubSub, queue: str, **options: Any) -> Iterator[Any]:
    broker = server.open(queue, **options)
    try:
        yield broker
    finally:
        broker.close()


def test_topic_and_subscription_are_made(server: PubSub) -> None:
    """Before anything is published: a topic without a subscription forgets."""
    queue = Place.new_queue(server)
    with opened(server, queue) as sender:
        sender.publish([("a", 1)])
    found = server.clients[1].get_subscription(subscription=f"projects/tests/subscriptions/{queue}")
    assert found.ack_deadline_seconds == 10
    assert found.expiration_policy.ttl.total_seconds() == 0, "never"
    with opened(server, queue) as broker:
        assert [m.key for m in receive_all(broker, 1, settle=True)] == ["a"]


def test_a_subscription_of_another_topic(server: PubSub) -> None:
    """Many subscriptions of one topic: what we publish goes to the topic of ours."""
    topic, queue = server.new_queue(), Place.new_queue(server)
    with opened(server, queue, topic=topic):
        pass  # made, at that topic
    with opened(server, queue) as broker:
        broker.publish([("a", 1)])
        assert [m.key for m in receive_all(broker, 1, settle=True)] == ["a"]
    with opened(server, topic) as other:
        assert [m.key for m in receive_all(other, 1, settle=True)] == ["a"]


def test_who_names_a_message(server: PubSub) -> None:
    queue = server.new_queue()
    server.foreign(queue, b"{}")
    server.foreign(queue, b"{}")
    with opened(server, queue) as broker:
        assert len({m.key for m in receive_all(broker, 2, settle=True)}) == 2, "Google's id"


def test_what_is_no_text_and_has_nowhere_to_go(server: PubSub) -> None:
    queue = server.new_queue()
    server.foreign(queue, b"\xff")
    server.foreign(queue, b"1")
    with opened(server, queue) as broker, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", RuntimeWarning)
        assert [m.body for m in receive_all(broker, 1, settle=True)] == [1]
        broker.receive(1, wait_us=500_000)
    assert [w for w in said if "dropped" in str(w.message)]


@pytest.mark.parametrize(
    "url", ["pubsub://", "pubsub://u:canary@project", "pubsub://UPPER?x=1", "pubsub://a_b"]
)
def test_an_address_that_cannot_be_meant(url: str) -> None:
    with pytest.raises(BadInput) as e:
        open_pubsub(url, "images")
    assert "canary" not in str(e.value)


def test_requests_stay_within_what_google_takes() -> None:
    sizes = [MOST_BYTES // 2, MOST_BYTES // 3, MOST_BYTES // 3, *[1] * 2500, MOST_BYTES * 2, 1]
    made = _batches([{"data": bytes(n), "attributes": {"key": "k"}} for n in sizes])
    assert [len(m["data"]) for batch in made for m in batch] == sizes
    assert all(len(batch) <= 1000 for batch in made)
    assert all(len(b) == 1 or sum(len(m["data"]) for m in b) <= MOST_BYTES for b in made)
