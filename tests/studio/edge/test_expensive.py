"""One tenant's long reads do not slow down the others (I2): by themselves, and over HTTP beside somebody who asks for little."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import apsw
import pytest

from sublet.settings import load_settings
from sublet.studio.edge.expensive import ExpensiveReads
from sublet.studio.edge.limits import EdgeLimits
from sublet.studio.edge.wire import TooManyNow
from sublet.studio.service import Service
from tests.ledger.rig import MINUTE, Rig
from tests.studio.running import Running, running, settings_of

LEASES = 20_000


def test_what_a_read_took_is_charged_to_its_tenant_alone() -> None:
    """I2: it is told when to come back, and nobody else is."""

    async def main() -> None:
        reads = ExpensiveReads(EdgeLimits(read_share=0.05, read_burst_seconds=0.1))

        def long() -> str:
            time.sleep(0.12)
            return "read"

        assert await reads.read("bob", 1, long) == "read"
        with pytest.raises(TooManyNow, match="bob has used its part") as refused:
            await reads.read("bob", 2, long)
        assert 0 < refused.value.seconds <= 2
        assert await reads.read("bob", 1, lambda: "again") == "read", "the same question costs nothing"
        assert await reads.read("ann", 1, lambda: "hers") == "hers", "and is each tenant's own"
        reads.close()

    asyncio.run(main())


def test_one_at_a_time_of_each_tenant() -> None:
    """I2: however many it sends, one thread is busy with them."""

    async def main() -> None:
        reads = ExpensiveReads(EdgeLimits(read_share=0))
        now, most, lock = 0, 0, threading.Lock()

        def long() -> None:
            nonlocal now, most
            with lock:
                now += 1
                most = max(most, now)
            time.sleep(0.01)
            with lock:
                now -= 1

        await asyncio.gather(*(reads.read("bob", n, long) for n in range(10)))
        assert most == 1
        reads.close()

    asyncio.run(main())


def made(rig: Rig) -> None:
    """A tenant with many leases, written straight into the table."""
    rig.tenant("bob")
    rig.device("gpu0", 1000)
    lease = rig.ask(1, tenant="bob", lease_id="first")
    rig.advance(MINUTE)
    rig.release(lease)
    db = apsw.Connection(rig.url.removeprefix("sqlite:"))
    names = [row[1] for row in db.execute("PRAGMA table_info(lease)")]
    copied = ", ".join("'x' || n" if name == "id" else name for name in names)
    db.execute(
        f"WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c WHERE n < {LEASES}) "
        f"INSERT INTO lease ({', '.join(names)}) SELECT {copied} FROM lease, c WHERE id = 'first'"
    )
    db.close()


def latencies(studio: Running, token: str, seconds: float) -> list[float]:
    found = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        begun = time.perf_counter()
        assert studio.ask("GET", "/v1/me", token).status == 200
        found.append(time.perf_counter() - begun)
        time.sleep(0.02)
    return found


@contextmanager
def flood(studio: Running) -> Iterator[list[int]]:
    """Bob asks for a year of usage from four threads, each time for another one."""
    bob = studio.token("bob")
    stop = threading.Event()
    said: list[int] = []

    def ask(by: str) -> None:
        for days in range(366, 1, -1):
            if stop.wait(0.02):
                return
            said.append(studio.ask("GET", f"/v1/usage?days={days}&by={by}", bob, timeout=60).status)

    threads = [threading.Thread(target=ask, args=(by,)) for by in ("tenant", "tier", "day", "job")]
    for thread in threads:
        thread.start()
    time.sleep(1)  # what may come at once is over
    yield said
    stop.set()
    for thread in threads:
        thread.join(60)


class _WithAllOthers:
    """How it would be without a lane and a price: in the threads that serve everybody."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def read(self, tenant: str, question: Hashable, verb: Callable[[], Any]) -> Any:
        return await self._service.work(verb)

    def close(self) -> None:
        return


def test_a_neighbour_does_not_notice_somebody_who_asks_for_a_year(sqlite: Rig, tmp_path: Path) -> None:
    """I2: in one run, with the lane and the price its median beside the flood is a fraction of what it is without them."""
    made(sqlite)
    settings = settings_of(load_settings(), sqlite.url, str(tmp_path / "home"))
    with running(sqlite.ledger, settings, EdgeLimits(tenant_rate=0, read_burst_seconds=0.5)) as studio:
        ann = studio.token("ann")
        with flood(studio) as said:
            priced = median(latencies(studio, ann, 2))
        assert 200 in said
        assert 429 in said, said
        studio.service.expensive = _WithAllOthers(studio.service)  # type: ignore[assignment]
        with flood(studio) as said:
            unpriced = median(latencies(studio, ann, 2))
        assert set(said) == {200}
    print(f"{priced * 1e3:.1f} ms beside the flood, {unpriced * 1e3:.1f} without a price")
    assert priced < unpriced / 3
