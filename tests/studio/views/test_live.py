"""The live stream: every row once and in order, one's own only, resumed where it was left, ended with its
token."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sublet.core.journal.chain import Entry
from sublet.core.studio.token import Credential, Scope
from sublet.ports.ledger import Followed
from sublet.settings import load_settings
from sublet.studio.views.live import SETTLE_SECONDS, EventListener, JournalOrder, event_bytes
from tests.homes import wait_until
from tests.ledger.rig import Rig
from tests.studio.running import Running, add_session, running, settings_of


def entry(number: int) -> Entry:
    return Entry("main", number, 0, "lease.granted", "ann", "L1", "{}", "h")


def seen(rows: Sequence[int], running_from: int = 0, begun_before: int = 0) -> Followed:
    return Followed(
        at=0, rows=tuple((n, entry(n)) for n in rows), running_from=running_from, begun_before=begun_before
    )


def numbers(found: Iterator[tuple[int, Entry]]) -> list[int]:
    return [n for n, _ in found]


def caught_up(studio: Running) -> None:
    """What was arranged is not news any more."""
    wait_until(lambda: studio.service.live.reached >= studio.ledger.tail(limit=1)[-1][0])


class Ear:
    """Reads a stream in a thread of its own."""

    def __init__(self, studio: Running, token: str, after: int | None = None, *, query: bool = False) -> None:
        self.sock = socket.create_connection(("127.0.0.1", studio.port), timeout=60)
        head = f"Last-Event-ID: {after}\r\n" if after is not None and not query else ""
        path = f"/v1/events?after={after}" if query else "/v1/events"
        self.sock.sendall(
            f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n{head}\r\n".encode()
        )
        self.text = b""
        self.over = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        wait_until(lambda: b": sublet" in self.text)

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while piece := self.sock.recv(65536):
                self.text += piece
                if piece.endswith(b"0\r\n\r\n"):
                    break
        self.over.set()

    @property
    def events(self) -> list[dict[str, Any]]:
        plain = re.sub(rb"\r\n[0-9a-f]+\r\n", b"", self.text)
        return [json.loads(line) for line in re.findall(rb"^data: (\{\"id\".*\})$", plain, re.M)]

    @property
    def ids(self) -> list[int]:
        return [e["id"] for e in self.events]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


# --- the order ---


def test_a_gap_holds_back_what_follows_until_it_is_filled() -> None:
    order = JournalOrder(0)
    assert numbers(order.advance(seen([1, 3, 4], 10, 20), 0.0)) == [1]
    assert numbers(order.advance(seen([3, 4], 10, 25), 100.0)) == []  # whoever has number 2 may still run
    assert numbers(order.advance(seen([2, 3, 4], 10, 25), 100.0)) == [2, 3, 4]


def test_a_gap_is_passed_when_nobody_can_fill_it_any_more() -> None:
    order = JournalOrder(0)
    assert numbers(order.advance(seen([1, 3], 10, 20), 0.0)) == [1]
    assert numbers(order.advance(seen([3, 5], 19, 30), 100.0)) == []
    assert numbers(order.advance(seen([3, 5], 20, 30), SETTLE_SECONDS / 2)) == []  # seen too shortly before
    assert numbers(order.advance(seen([3, 5], 20, 30), 100.0)) == [3]
    assert order.blocked  # 4 is another gap, with its own writers
    assert numbers(order.advance(seen([5], 30, 30), 200.0)) == [5]


@given(st.permutations(range(1, 9)), st.sets(st.integers(1, 8), max_size=3), st.data())
def test_whatever_order_they_come_in_they_leave_once_and_in_order(
    commits: list[int], rolled_back: set[int], data: st.DataObject
) -> None:
    """Transaction n takes number n; they commit in any order, some never."""
    order, visible, out, now = JournalOrder(0), set[int](), list[int](), 0.0
    running = set(range(1, 9))
    for number in commits:
        running.discard(number)
        if number not in rolled_back:
            visible.add(number)
        for _ in range(data.draw(st.integers(0, 2))):
            now += 1
            oldest = min(running, default=9)
            out += numbers(
                order.advance(seen(sorted(n for n in visible if n > order.reached), oldest, 9), now)
            )
    for _ in range(12):
        now += 1
        out += numbers(order.advance(seen(sorted(n for n in visible if n > order.reached), 9, 9), now))
    assert out == sorted(visible)


def test_an_event_is_one_block_whatever_its_body_says() -> None:
    found = Entry("main", 1, 5_000_000, "lease.ended", "ann", "L1", '{"detail":"a\\nb\\r\\n\\nid: 9"}', "h")
    text = event_bytes(7, found).decode()
    assert text.count("\n\n") == 1
    assert text.splitlines()[0] == "id: 7"
    assert json.loads(text.splitlines()[2].removeprefix("data: ")) == {
        "id": 7, "at": 5.0, "kind": "lease.ended", "tenant": "ann", "subject": "L1", "body": {"detail": "a\nb\r\n\nid: 9"},
    }  # fmt: skip


# --- the stream ---


def test_one_hears_ones_own_and_an_operator_everything(studio: Running) -> None:
    ann, bob, operator = studio.token("ann"), studio.token("bob"), studio.operator
    caught_up(studio)
    ears = {name: Ear(studio, token) for name, token in (("ann", ann), ("bob", bob), ("operator", operator))}
    mine = add_session(studio.ledger, "ann")
    theirs = add_session(studio.ledger, "bob")
    wait_until(lambda: {mine, theirs} <= {e["subject"] for e in ears["operator"].events})
    wait_until(lambda: ears["ann"].events and ears["bob"].events)
    assert {e["tenant"] for e in ears["ann"].events} == {"ann"}
    assert {e["tenant"] for e in ears["bob"].events} == {"bob"}
    assert [e["subject"] for e in ears["ann"].events] == [mine]
    for ear in ears.values():
        ear.close()


@pytest.mark.parametrize("query", [False, True])
def test_it_goes_on_where_it_was_left(studio: Running, query: bool) -> None:
    token = studio.token("ann")
    caught_up(studio)
    ear = Ear(studio, token)
    for _ in range(5):
        add_session(studio.ledger, "ann")
    wait_until(lambda: len(ear.events) == 5)
    ear.close()
    studio.token("bob")
    for _ in range(5):
        add_session(studio.ledger, "ann")
        add_session(studio.ledger, "bob")
    again = Ear(studio, token, ear.ids[-1], query=query)
    add_session(studio.ledger, "ann")
    wait_until(lambda: len(again.events) == 6)
    rows = [
        n
        for n, e in studio.ledger.tail(after=0, limit=1000)
        if e.tenant == "ann" and e.kind == "session.opened"
    ]
    assert ear.ids + again.ids == rows
    again.close()


def test_cuts_lose_and_repeat_nothing(studio: Running) -> None:
    """Cut and taken up again and again while rows are written by several threads."""
    token = studio.token("ann")
    caught_up(studio)
    first = Ear(studio, token)
    stop = threading.Event()
    threads = [
        threading.Thread(
            target=lambda: [
                add_session(studio.ledger, "ann")
                for _ in itertools.takewhile(lambda _: not stop.is_set(), itertools.count())
            ]
        )
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    heard: list[int] = []
    ear = first
    for _ in range(6):
        wait_until(lambda: len(ear.events) >= 5)  # noqa: B023
        ear.close()
        ear.over.wait(60)
        heard += ear.ids
        ear = Ear(studio, token, heard[-1])
    stop.set()
    for thread in threads:
        thread.join()
    rows = [n for n, e in studio.ledger.tail(after=heard[0] - 1, limit=100_000) if e.tenant == "ann"]
    wait_until(lambda: len(heard) + len(ear.ids) >= len(rows), 30)
    assert heard + ear.ids == rows
    ear.close()


def test_a_transaction_held_open_is_waited_for(postgres: Rig, tmp_path: Any) -> None:
    """Its row has a lower number than rows that are visible before it: nobody hears those first."""
    (tmp_path / "home").mkdir()
    with running(
        postgres.ledger, settings_of(load_settings(), postgres.url, str(tmp_path / "home"))
    ) as studio:
        token = studio.token("ann")
        caught_up(studio)
        ear = Ear(studio, token)
        engine = postgres.ledger.engine
        stack = contextlib.ExitStack()
        slow = stack.enter_context(engine.connect())
        slow.execute("SET idle_in_transaction_session_timeout = 0")
        slow.execute("BEGIN")
        slow.execute(
            "INSERT INTO journal (strand, seq, at, kind, tenant, subject, body, hash) "
            "VALUES ('job:held', 1, 1, 'step.committed', 'ann', 'held', '{}', 'x')"
        )
        lost = stack.enter_context(engine.connect())
        lost.execute("BEGIN")
        lost.execute(
            "INSERT INTO journal (strand, seq, at, kind, tenant, subject, body, hash) "
            "VALUES ('job:lost', 1, 1, 'step.committed', 'ann', 'lost', '{}', 'x')"
        )
        later = [add_session(studio.ledger, "ann") for _ in range(3)]
        lost.execute("ROLLBACK")
        time.sleep(4 * SETTLE_SECONDS)
        assert ear.events == []
        slow.execute("COMMIT")
        wait_until(lambda: len(ear.events) == 4)
        assert [e["subject"] for e in ear.events] == ["held", *later]
        assert ear.ids == sorted(ear.ids)
        ear.close()
        stack.close()


def test_a_revoked_token_ends_its_streams(studio: Running) -> None:
    token = studio.token("ann")
    ear, other = Ear(studio, token), Ear(studio, studio.token("bob"))
    studio.ledger.revoke_token(token.split("_")[1], actor="test")
    assert ear.over.wait(60)
    assert b"event: token_revoked" in ear.text
    assert not other.over.is_set()
    other.close()
    wait_until(lambda: studio.service.streams.count() == 0)


def test_events_that_wait_are_counted_by_their_bytes_too() -> None:
    who = Credential(token_id="t", tenant="ann", scope=Scope.USER)
    ear = EventListener(who, 1000, 10_000)
    for number in range(1, 4):
        ear.put(number, b"x" * 3000)
    assert ear.ended == ""
    ear.put(4, b"x" * 3000)
    assert ear.ended == "gap"
    large = EventListener(who, 1000, 10_000)
    large.put(1, b"x" * 50_000)  # one event comes, however large it is
    assert large.ended == ""


def test_who_is_too_far_behind_is_told_of_the_gap(
    studio_here: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sublet.studio.views.live.BACKLOG_ROWS", 10)
    token = studio_here.token("ann")
    for _ in range(30):
        add_session(studio_here.ledger, "ann")
    wait_until(lambda: studio_here.service.live.reached >= studio_here.ledger.tail(limit=1)[-1][0])
    ear = Ear(studio_here, token, 1)
    wait_until(lambda: len(ear.events) == 10)
    assert b"event: gap" in ear.text
    ahead = Ear(studio_here, token, 10**9)
    wait_until(lambda: b"event: gap" in ahead.text)
    add_session(studio_here.ledger, "ann")
    wait_until(lambda: ahead.events)
    ear.close()
    ahead.close()


def test_the_stream_beats(studio_here: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sublet.studio.views.live.BEAT_SECONDS", 0.3)
    ear = Ear(studio_here, studio_here.token("ann"))
    wait_until(lambda: ear.text.count(b": beat") >= 2)
    ear.close()
