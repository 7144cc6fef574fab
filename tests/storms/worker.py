"""One process of a storm: random verbs on the real ledger, each acknowledged durable answer written down.

`python -m tests.storms.worker URL SEED SECONDS LOG [COMMITS]`, with how often it commits beside what else it does. What it writes down must be found in the ledger afterwards.
"""

from __future__ import annotations

import os
import random
import secrets
import sys
import time

from sublet.core.errors import (
    Disconnected,
    EffectBusy,
    Fenced,
    HeadMoved,
    LeaseLost,
    NotFound,
    Refused,
    Stale,
    SubletError,
)
from sublet.core.leasing.lease import EndReason, LeaseState, Request, Tier
from sublet.core.progress.effect import Commit, Committed
from sublet.core.scheduling.device import Exclusivity
from sublet.ports.ledger import LeaseKey
from sublet.processes.clock import HostClock
from sublet.processes.ladder import HostProcesses
from sublet.wiring import plug_in

EXPECTED = (Refused, LeaseLost, Stale, Fenced, HeadMoved, EffectBusy, NotFound)


class Worker:
    def __init__(self, url: str, seed: int, log: str, commits: int = 25) -> None:
        self.weights = [30, 25, 25, 3, commits, 4, 2]
        self.random = random.Random(seed)
        self.seed = seed
        self.committed = 0
        scheme = url.split(":", 1)[0]
        self.ledger = plug_in("sublet.ledgers", scheme)(url, HostClock())
        self.holder = HostProcesses("storm").identify(os.getpid())
        self.log = open(log, "a", buffering=1)  # noqa: SIM115
        self.held: list[LeaseKey] = []
        self.versions: dict[str, int] = {}
        self.counts: dict[str, int] = {}

    def note(self, *words: object) -> None:
        self.log.write(" ".join(map(str, words)) + "\n")

    def step(self) -> None:
        verb = self.random.choices(
            ["acquire", "renew", "release", "revoke", "commit", "tick", "look"], self.weights
        )[0]
        self.counts[verb] = self.counts.get(verb, 0) + 1
        try:
            getattr(self, verb)()
        except EXPECTED:
            pass
        except Disconnected:
            self.note("disconnected")

    def acquire(self) -> None:
        if len(self.held) >= 4:
            return self.release()
        request = Request(
            tenant=self.random.choice(["ada", "bob", "eve"]),
            vram_bytes=self.random.choice([1, 2, 4, 8]) << 30,
            ttl_us=self.random.choice([300_000, 1_000_000, 5_000_000]),
            count=self.random.choice([1, 1, 1, 2]),
            exclusivity=self.random.choice(list(Exclusivity)),
            tier=self.random.choice(list(Tier)),
            wait_us=self.random.choice([0, 0, 200_000]),
            host="storm",
        )
        lease_id, secret = "L" + secrets.token_hex(10), secrets.token_hex(8)
        answer = self.ledger.acquire(lease_id, secret, request, self.holder)
        give_up = time.monotonic() + 0.3
        while answer.lease.state is LeaseState.WAITING and time.monotonic() < give_up:
            time.sleep(0.01)
            answer = self.ledger.attend(lease_id, secret, explain=False)
        if answer.lease.state is LeaseState.ACTIVE:
            self.note("granted", lease_id, answer.lease.epoch)
            self.held.append(LeaseKey(lease_id, answer.lease.epoch, secret))
        else:
            self.ledger.release(lease_id, secret)
        return None

    def pick(self) -> LeaseKey | None:
        return self.random.choice(self.held) if self.held else None

    def renew(self) -> None:
        key = self.pick()
        if key is None:
            return
        try:
            self.ledger.renew(key)
        except LeaseLost:
            self.held.remove(key)

    def release(self) -> None:
        key = self.pick()
        if key is not None:
            self.held.remove(key)
            self.ledger.release(key.lease_id, key.secret)

    def revoke(self) -> None:
        live = [a.lease for a in self.ledger.leases(limit=20) if a.lease.state is LeaseState.ACTIVE]
        if live:
            victim = self.random.choice(live)
            self.ledger.revoke(
                victim.id,
                reason=EndReason.REVOKED,
                detail="storm",
                grace_us=self.random.choice([0, 50_000]),
                actor="storm",
            )

    def commit(self) -> None:
        key = self.pick()
        if key is None:
            return
        job = f"job{self.random.randrange(4)}"
        head = self.ledger.head(job)
        version = head.version if head else 0
        done = self.ledger.commit(
            key,
            Commit(
                job=job,
                key=f"{job}:{version + 1}",
                step=version + 1,
                fingerprint=f"{self.seed}",
                expected_version=version,
                digest=f"{key.lease_id}",
            ),
        )
        if isinstance(done, Committed):
            self.committed += 1
            self.note("committed", job, done.version, key.lease_id)

    def tick(self) -> None:
        self.ledger.tick("storm")

    def look(self) -> None:
        key = self.pick()
        if key is not None:
            self.ledger.look(key.lease_id)


def main() -> None:
    url, seed, seconds, log = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
    worker = Worker(url, seed, log, *map(int, sys.argv[5:]))
    until = time.monotonic() + seconds
    # On a machine that is busy otherwise: until something was done, within reason.
    at_most = until + 60
    try:
        while time.monotonic() < until or (worker.committed < 2 and time.monotonic() < at_most):
            worker.step()
    except SubletError as e:
        worker.note("ERROR", type(e).__name__, e.message)
        raise
    except Exception as e:
        worker.note("ERROR", type(e).__name__, str(e).replace("\n", " "))
        raise
    worker.note("done", sum(worker.counts.values()), time.monotonic() - until)


if __name__ == "__main__":
    main()
