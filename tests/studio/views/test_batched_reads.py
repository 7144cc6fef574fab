"""Requests that ask the ledger together: each gets what was read after it asked, and nothing of anybody
else's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from sublet.core.errors import Disconnected
from sublet.studio.views.batched_reads import MOST, BatchedReads
from tests.studio.running import Running, add_session


class Source:
    """Answers when it is let, with what is true then."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.value = "old"
        self.begun = threading.Semaphore(0)
        self.let = threading.Semaphore(0)
        self.error: Exception | None = None

    def read(self, keys: Sequence[str]) -> dict[str, str]:
        self.asked.append(list(keys))
        value = self.value
        self.begun.release()
        assert self.let.acquire(timeout=20)
        if self.error is not None:
            raise self.error
        return {key: f"{key} {value}" for key in keys if key != "nobody"}

    async def has_begun(self) -> None:
        assert await asyncio.to_thread(self.begun.acquire, timeout=20)


def test_what_comes_while_one_is_under_way_is_asked_after_it() -> None:
    """A token that is revoked while a statement is under way is not let in by that statement's answer."""
    source = Source()

    async def main() -> None:
        with ThreadPoolExecutor(1) as threads:
            together = BatchedReads(threads, source.read, 1)
            first = asyncio.ensure_future(together.ask("a"))
            await source.has_begun()
            source.value = "new"
            later = [asyncio.ensure_future(together.ask(key)) for key in ("a", "b", "a", "nobody")]
            source.let.release()
            assert await first == "a old"
            source.let.release()
            assert await asyncio.gather(*later) == ["a new", "b new", "a new", None]
        assert source.asked == [["a"], ["a", "b", "nobody"]]

    asyncio.run(main())


def test_so_many_statements_at_once_and_no_more() -> None:
    source = Source()

    async def main() -> None:
        with ThreadPoolExecutor(4) as threads:
            together = BatchedReads(threads, source.read, 2)
            asked = []
            for key in ("a", "b"):
                asked.append(asyncio.ensure_future(together.ask(key)))
                await source.has_begun()
            asked += [asyncio.ensure_future(together.ask(f"k{n}")) for n in range(MOST + 1)]
            await asyncio.sleep(0)
            for _ in range(4):
                source.let.release()
            assert await asyncio.gather(*asked) == ["a old", "b old", *(f"k{n} old" for n in range(MOST + 1))]
        assert [len(keys) for keys in source.asked] == [1, 1, MOST, 1]

    asyncio.run(main())


def test_an_error_is_everybodys_and_the_next_is_asked_again() -> None:
    source = Source()

    async def main() -> None:
        with ThreadPoolExecutor(1) as threads:
            together = BatchedReads(threads, source.read, 1)
            source.error = Disconnected("away")
            source.let.release()
            gone = asyncio.ensure_future(together.ask("c"))
            waiting = asyncio.gather(together.ask("a"), together.ask("b"), return_exceptions=True)
            await asyncio.sleep(0)
            gone.cancel()  # a client that left takes nobody along
            assert [type(e) for e in await waiting] == [Disconnected, Disconnected]
            source.error = None
            source.let.release()
            assert await together.ask("a") == "a old"
        with pytest.raises(Disconnected, match="leaving"):
            await together.ask("a")

    asyncio.run(main())


def test_many_at_once(studio: Running) -> None:
    """T1 and threat 4, on each engine: own sessions are found, others' are not, and a token counts until it
    is revoked and not a request longer."""
    tokens = {name: studio.token(name) for name in ("ann", "bob")}
    owned = {name: add_session(studio.ledger, name) for name in tokens}
    anns = studio.ledger.tokens("ann")[0].id
    revoked = threading.Event()
    wrong: list[object] = []
    counts = {200: 0, 404: 0, 401: 0}

    def asked(name: str, number: int) -> None:
        was_revoked = name == "ann" and revoked.is_set()
        whose = ("ann", "bob")[number % 2]
        path = f"/v1/sessions/{owned[whose]}"
        method, path = ("POST", f"{path}/touch") if number % 3 else ("GET", path)
        said = studio.ask(method, path, tokens[name])
        counts[said.status] += 1
        if was_revoked or (said.status == 401 and name == "ann"):
            right = said.status == 401
        elif whose == name:
            right = said.status == 200 and said.json["id"] == owned[name]
        else:
            right = said.status == 404
        if not right:
            wrong.append((name, was_revoked, said))

    def ann(_: int) -> None:
        number, left = 0, 12
        while left:
            left -= revoked.is_set()
            asked("ann", number)
            number += 1

    def bob(_: int) -> None:
        for number in range(24):
            asked("bob", number)
        studio.ledger.revoke_token(anns, actor="test")  # the first time stands
        revoked.set()
        asked("bob", 1)

    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(who, n) for n in range(4) for who in (ann, bob)]:
            done.result()
    assert wrong == []
    assert all(counts.values()), counts
