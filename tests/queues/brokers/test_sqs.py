"""What only SQS does: ids of several kinds, limits of a request, queues that must exist."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import pytest

from sublet.core.errors import BadInput, Misconfigured, NotFound, TooLarge
from sublet.queues.brokers.sqs import MOST_BYTES, _batches, open_sqs
from tests.queues.brokers.servers import Places, Sqs
from tests.queues.brokers.test_contract import receive_all


@pytest.fixture
def server(places: Places, monkeypatch: pytest.MonkeyPatch) -> Sqs:
    found = cast(Sqs, places["sqs"])
    for name, value in found.environment.items():
        monkeypatch.setenv(name, value)
    return found


@contextlib.contextmanager
def opened(server: Sqs, queue: str, **options: Any) -> Iterator[Any]:
    broker = server.open(queue, **options)
    try:
        yield broker
    finally:
        broker.close()


def test_a_queue_must_exist(server: Sqs) -> None:
    with pytest.raises(NotFound) as e:
        server.open("nowhere")
    assert "aws sqs create-queue --queue-name nowhere" in e.value.remedy


def test_an_address_that_cannot_be_meant(server: Sqs, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match="credentials"):
        open_sqs("sqs://AKIA:canary@us-east-1", "q")
    with pytest.raises(BadInput, match="name"):
        server.open("no such.name")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(Misconfigured, match="region"):
        open_sqs("sqs://", "q")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(Misconfigured, match="credentials"):
        server.open("images")


def test_who_names_a_message(server: Sqs) -> None:
    queue = server.new_queue()
    server.foreign(queue, b"{}")
    server.foreign(queue, b"{}")
    with opened(server, queue) as broker:
        assert len({m.key for m in receive_all(broker, 2, settle=True)}) == 2, "Amazon's id"
    fifo = server.made(server.new_queue() + ".fifo", FifoQueue="true", ContentBasedDeduplication="true")
    server.foreign(fifo, b"1", MessageGroupId="g", MessageDeduplicationId="the-sender's")
    server.foreign(fifo, b"2", MessageGroupId="h")  # Amazon makes one of the body: no name
    server.foreign(fifo, b"3", "attribute", MessageGroupId="i", MessageDeduplicationId="other")
    with opened(server, fifo) as broker:
        keys = {m.body: m.key for m in receive_all(broker, 3, settle=True)}
        assert (keys[1], keys[3]) == ("the-sender's", "attribute")
        assert len(keys[2]) == 36, "a message id"
        broker.publish([("a", 1), ("b", 2), ("a", 1)])
        assert sorted(m.key for m in receive_all(broker, 2, settle=True)) == ["a", "b"], (
            "the same within minutes"
        )


def test_a_receipt_that_lapsed_is_no_error(server: Sqs) -> None:
    queue = server.new_queue()
    with opened(server, queue, visibility=1) as slow, opened(server, queue) as other:
        slow.publish([("a", 1)])
        old = receive_all(slow, 1)
        new = receive_all(other, 1)
        assert [m.key for m in new] == ["a"]
        assert new[0].redelivered
        slow.settle(old)
        slow.give_back(old)
        other.settle(new)


def test_requests_stay_within_what_amazon_takes(server: Sqs) -> None:
    key = {"key": {"StringValue": "k"}}
    sizes = [100, 200_000, 100_000, 50_000, *[1] * 25, MOST_BYTES * 2, 1]
    made = _batches([{"MessageBody": "x" * n, "MessageAttributes": key} for n in sizes])
    assert [len(e["MessageBody"]) for batch in made for e in batch] == sizes
    assert all(len(batch) <= 10 for batch in made)
    assert all(len(b) == 1 or sum(len(e["MessageBody"]) for e in b) <= MOST_BYTES for b in made)
    with opened(server, server.new_queue()) as broker:
        broker.publish([("a", "x" * 200_000), ("b", "y" * 200_000)])
        got = receive_all(broker, 2, settle=True)
        assert {m.key: m.body[0] for m in got} == {"a": "x", "b": "y"}
        with pytest.raises(TooLarge):
            broker.publish([("c", "z" * 3_000_000)])
