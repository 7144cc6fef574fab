"""One concurrent client: random operations on shared heads, effects and locks, each written down before it is begun and when it is answered.

`python -m proof.linear.client URL NAME SEED SECONDS LOG`. It may be killed at any moment: what it had begun is then an operation without an answer.
"""

from __future__ import annotations

import os
import random
import sys
import time
from typing import Any

from sublet.core.errors import (
    Disconnected,
    EffectBusy,
    Fenced,
    FingerprintMismatch,
    HeadMoved,
    LeaseLost,
    NotFound,
    Refused,
)
from sublet.core.leasing.lease import Holder, LeaseState, Request
from sublet.core.progress.effect import Commit, Committed
from sublet.core.scheduling.device import Exclusivity
from sublet.ports.ledger import LeaseKey
from sublet.processes.clock import HostClock
from sublet.wiring import plug_in

JOBS = 3
LOCKS = 3
HOUR_US = 3_600_000_000


class Client:
    def __init__(self, url: str, name: str, seed: int, log: str) -> None:
        self.name = name
        self.chance = random.Random(seed)
        self.ledger = plug_in("sublet.ledgers", url.split(":", 1)[0])(url, HostClock())
        self.log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.number = 0
        self.versions = [0] * JOBS
        self.held: dict[int, LeaseKey] = {}
        self.over: list[tuple[int, LeaseKey]] = []
        # To commit under: shares a large device with all the others.
        lease_id = f"c-{name}"
        answer = self.ledger.acquire(
            lease_id,
            "s",
            Request(tenant="ada", vram_bytes=1, ttl_us=HOUR_US, host="shared"),
            Holder(host="shared"),
        )
        self.key = LeaseKey(lease_id, answer.lease.epoch, "s")

    def begin(self, *words: Any) -> int:
        self.number += 1
        os.write(self.log, f"c {self.number} {time.monotonic_ns()} {' '.join(map(str, words))}\n".encode())
        return self.number

    def end(self, number: int, *words: Any) -> None:
        os.write(self.log, f"r {number} {time.monotonic_ns()} {' '.join(map(str, words))}\n".encode())

    def step(self) -> None:
        what = self.chance.random()
        try:
            if what < 0.25:
                self.commit()
            elif what < 0.45:
                self.read_head()
            elif what < 0.55:
                self.read_effect()
            else:
                self.use_lock()
        except Disconnected:
            pass  # without an answer, as if it had died

    def commit(self) -> None:
        job = self.chance.randrange(JOBS)
        version = self.versions[job]
        shared = self.chance.random() < 0.5
        key = f"job{job}:{version + 1}" + ("" if shared else f":{self.name}.{self.number}")
        number = self.begin("commit", f"job{job}", version, key, self.key.lease_id)
        try:
            answer = self.ledger.commit(
                self.key,
                Commit(
                    job=f"job{job}",
                    key=key,
                    step=version + 1,
                    fingerprint="same",
                    expected_version=version,
                    digest=self.key.lease_id,
                ),
            )
        except HeadMoved as e:
            self.end(number, "moved", e.version)
            self.versions[job] = e.version
            return
        except (Fenced, EffectBusy, FingerprintMismatch, LeaseLost) as e:
            # The epoch of somebody younger has committed: this client needs a younger lease.
            self.end(number, "refused", e.code)
            self.renew_lease()
            return
        self.end(number, "ok" if isinstance(answer, Committed) else "done", answer.version)
        self.versions[job] = answer.version

    def renew_lease(self) -> None:
        lease_id = f"c-{self.name}-{self.number}"
        answer = self.ledger.acquire(
            lease_id,
            "s",
            Request(tenant="ada", vram_bytes=1, ttl_us=HOUR_US, host="shared"),
            Holder(host="shared"),
        )
        self.ledger.release(self.key.lease_id, "s")
        self.key = LeaseKey(lease_id, answer.lease.epoch, "s")

    def read_head(self) -> None:
        job = self.chance.randrange(JOBS)
        number = self.begin("head", f"job{job}")
        head = self.ledger.head(f"job{job}")
        self.versions[job] = head.version if head else 0
        self.end(number, self.versions[job])

    def read_effect(self) -> None:
        job = self.chance.randrange(JOBS)
        key = f"job{job}:{max(1, self.versions[job] + self.chance.choice([0, 0, 1]))}"
        number = self.begin("effect", key)
        effect = self.ledger.effect(key)
        self.end(number, effect.owner if effect is not None and effect.completed else "-")

    def use_lock(self) -> None:
        lock = self.chance.randrange(LOCKS)
        key = self.held.get(lock)
        if key is None:
            if self.over and self.chance.random() < 0.2:
                lock, key = self.chance.choice(self.over[-5:])
                self.look(lock, key)
                return
            lease_id = f"l-{self.name}-{self.number}"
            number = self.begin("acquire", f"lock{lock}", lease_id)
            try:
                answer = self.ledger.acquire(
                    lease_id,
                    "s",
                    Request(
                        tenant="ada",
                        vram_bytes=1,
                        ttl_us=HOUR_US,
                        host=f"lock{lock}",
                        exclusivity=Exclusivity.DEVICE,
                        wait_us=0,
                    ),
                    Holder(host=f"lock{lock}"),
                )
            except Refused:
                self.end(number, "refused")
                return
            self.end(number, "granted")
            self.held[lock] = LeaseKey(lease_id, answer.lease.epoch, "s")
        elif self.chance.random() < 0.4:
            number = self.begin("release", f"lock{lock}", key.lease_id)
            released = self.ledger.release(key.lease_id, "s")
            self.end(number, "yes" if released else "no")
            self.over.append((lock, self.held.pop(lock)))
        else:
            self.look(lock, key)

    def look(self, lock: int, key: LeaseKey) -> None:
        if self.chance.random() < 0.5:
            number = self.begin("look", f"lock{lock}", key.lease_id)
            state = self.ledger.look(key.lease_id).lease.state
            self.end(number, "held" if state is LeaseState.ACTIVE else "over")
            return
        number = self.begin("renew", f"lock{lock}", key.lease_id)
        try:
            self.ledger.renew(key)
            self.end(number, "held")
        except (LeaseLost, NotFound):
            self.end(number, "over")


def main() -> None:
    url, name, seed, seconds, log = sys.argv[1:]
    client = Client(url, name, int(seed), log)
    until = time.monotonic() + float(seconds)
    while time.monotonic() < until:
        for _ in range(20):
            client.step()


if __name__ == "__main__":
    main()
