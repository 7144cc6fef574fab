"""Addresses, bodies and keys: no server needed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublet.core.errors import BadInput, NotJson
from sublet.core.progress.effect import check_key
from sublet.queues.brokers.address import read_address
from sublet.queues.brokers.message import UnreadableBody, body_of, json_of, key_of, sendable
from tests.conftest import MORE_EXAMPLES
from tests.forked import SOURCE

FEW = settings(max_examples=40 * MORE_EXAMPLES, deadline=None)

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner),
    max_leaves=10,
)


@FEW
@given(JSON)
def test_what_is_sent_is_what_is_read(body: object) -> None:
    assert body_of(json_of(body).encode()) == body


@FEW
@given(st.binary(max_size=200))
def test_any_bytes_are_a_body_or_unreadable(data: bytes) -> None:
    try:
        body = body_of(data)
    except UnreadableBody:
        with pytest.raises(UnicodeDecodeError):
            data.decode()
        return
    json.dumps(body, allow_nan=False, ensure_ascii=False).encode()  # what a ledger will do


@pytest.mark.parametrize(
    "text", ["NaN", "-Infinity", "1e999", '"\\ud800"', '{"a": "\\udfff"}', "[" * 100_000, "9" * 5000, "{", ""]
)
def test_what_is_no_good_json_is_its_text(text: str) -> None:
    assert body_of(text.encode()) == text


def test_a_pair_of_surrogates_is_a_character() -> None:
    assert body_of(b'"\\ud83d\\ude00"') == "😀"


@FEW
@given(st.text(), st.text(), st.binary())
def test_every_key_is_one(sender: str, broker: str, data: bytes) -> None:
    assert check_key(key_of(data, sender, broker)) == key_of(data, sender, broker)


def test_who_names_a_message() -> None:
    assert key_of(b"x", "sender", "broker") == "sender"
    assert key_of(b"x", "", "broker") == key_of(b"x", None, "broker") == "broker"
    assert key_of(b"x") == key_of(b"x") != key_of(b"y")
    assert key_of(b"x", "k" * 512) == "k" * 512
    long, longer = key_of(b"x", "k" * 513), key_of(b"x", "k" * 514)
    assert long != longer
    assert long.startswith("id:")


def test_nothing_is_sent_before_all_of_it_was_looked_at() -> None:
    for bad in (object(), float("nan"), {1: {2}}, b"bytes"):
        with pytest.raises(NotJson):
            sendable([("a", 1), ("b", bad)])
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(NotJson):
        sendable([("a", deep)])


def test_an_address() -> None:
    found = read_address("amqp://me:a%40b%2Fc@[::1]:99/v%2Fh?queue=other&timeout=2", "ours", port=5672)
    assert (found.user, found.password, found.host, found.port) == ("me", "a@b/c", "::1", 99)
    assert (found.path, found.queue, found.timeout_seconds) == ("v/h", "other", 2.0)
    assert found.place == "amqp://[::1]:99"
    assert "a@b/c" not in repr(found)
    plain = read_address("redis://host", "ours", port=6379, options=("visibility",))
    assert (plain.queue, plain.port, plain.visibility_seconds) == ("ours", 6379, 60)


@pytest.mark.parametrize(
    "url",
    [
        "amqp://u:canary#x@host/",
        "amqp://u:can@ary@host/",
        "amqp://u:can/ary@host/",
        "amqp://:12/canary@host/",
        "amqp://u:can?ary@host/",
        "amqp://u:canary@host:port/",
        "amqp://u:canary@[host/",
        "amqp://u:canary@host:99999/",
        "host/canary",
        "amqp:canary",
        "",
        "redis://h?visibilty=3",
        "redis://h?visibility=0",
        "redis://h?timeout=soon",
        "redis://h?timeout=nan",
    ],
)
def test_an_address_that_cannot_be_meant(url: str) -> None:
    with pytest.raises(BadInput) as e:
        read_address(url, "q", options=("visibility",))
    assert "canary" not in f"{e.value} {e.value.remedy} {e.value.__cause__!r}"
    assert "ary@" not in f"{e.value}"


def test_nothing_is_imported_before_it_is_used() -> None:
    names = [p.stem for p in (SOURCE / "sublet" / "queues" / "brokers").glob("[a-z]*.py")]
    code = (
        f"import sys\nfor name in {names!r}: __import__('sublet.queues.brokers.' + name)\n"
        "heavy = {'amqp', 'kombu', 'redis', 'boto3', 'botocore', 'google.cloud', 'grpc'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(SOURCE)})
