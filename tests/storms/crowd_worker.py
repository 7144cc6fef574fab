"""One process of a crowd on PostgreSQL: leases, steps and items in turn, at a pace or as fast as it goes.

`python -m tests.storms.crowd_worker URL NUMBER SECONDS PAUSE LOG`. PAUSE is the mean time between two lives of a lease; what was acknowledged is written
down, and how much memory it used at the beginning and at the end.
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import time
from pathlib import Path

from sublet.core.errors import LeaseLost, Refused
from sublet.core.leasing.lease import Holder, Request
from sublet.core.progress.effect import Commit, Committed
from sublet.core.queues.items import Ack, NewItem, QueueTerms
from sublet.ledger.engines.postgres.engine import open_ledger
from sublet.ports.ledger import LeaseKey
from sublet.processes.clock import HostClock

MINUTE = 60_000_000


class Member:
    def __init__(self, url: str, number: int) -> None:
        self.random = random.Random(number)
        self.name = f"c{number:03d}"
        self.ledger = open_ledger(url, HostClock())
        self.holder = Holder(host=f"node-{number % 4}")
        self.queue = self.ledger.open_queue("ada", f"q{number % 5}", QueueTerms()).id
        self.consumer = self.ledger.open_consumer(
            self.queue, Holder(host=self.holder.host, pid=os.getpid(), started=1)
        )
        self.steps = 0
        self.lives = 0
        self.batches = 0
        self.published = 0
        self.completed: list[int] = []

    def live(self) -> None:
        """One lease's life: what a worker does between asking for a GPU and giving it back."""
        self.lives += 1
        lease_id, secret = f"{self.name}-{os.getpid()}-{self.lives}", "only for this storm"
        request = Request(tenant=("ada", "bob")[self.lives % 2], vram_bytes=1 << 20, ttl_us=5 * MINUTE)
        lease = self.ledger.acquire(lease_id, secret, request, self.holder).lease
        key = LeaseKey(lease_id, lease.epoch, secret)
        self.ledger.renew(key)
        if request.tenant == "ada":
            self.commit(key)
            self.work(key)
        self.ledger.release(lease_id, secret)

    def commit(self, key: LeaseKey) -> None:
        step = self.steps + 1
        done = self.ledger.commit(
            key,
            Commit(
                job=f"job-{self.name}",
                key=f"{self.name}:{step}",
                step=step,
                fingerprint="f",
                expected_version=self.steps,
                digest=f"{step}",
            ),
        )
        assert isinstance(done, Committed), done
        assert done.version == step, "a lost update"
        self.steps = step

    def work(self, key: LeaseKey) -> None:
        self.batches += 1
        drafts = [NewItem(body=f'"{self.name}-{self.batches}-{n}"') for n in range(2)]
        self.published += self.ledger.publish(self.consumer, self.batches, drafts).new
        got = self.ledger.pull(self.consumer, 2, MINUTE)
        if got:
            acks = [Ack(item=d.item, delivery=d.delivery, result='"done"', work_us=1) for d in got]
            answers = self.ledger.complete(self.consumer, acks, lease=key)
            self.completed += [a.item for a, problem in zip(acks, answers, strict=True) if problem is None]


def resident_kib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 1024


def main() -> None:
    url, number, seconds, pause, log = (
        sys.argv[1],
        int(sys.argv[2]),
        float(sys.argv[3]),
        float(sys.argv[4]),
        sys.argv[5],
    )
    member = Member(url, number)
    told: dict[str, object] = {"refused": 0}
    began = time.monotonic()
    until = began + seconds
    early = 0
    # On a machine that is busy otherwise: until something was done, within reason.
    while time.monotonic() < until or (member.steps < 2 and time.monotonic() < until + 60):
        try:
            member.live()
        except (Refused, LeaseLost):
            told["refused"] = int(str(told["refused"])) + 1
        if member.lives == 10:
            early = resident_kib()
        if pause:
            time.sleep(member.random.expovariate(1 / pause))
    told |= {
        "lives": member.lives,
        "steps": member.steps,
        "published": member.published,
        "completed": member.completed,
        "early_kib": early,
        "late_kib": resident_kib(),
        "seconds": time.monotonic() - began,
    }
    Path(log).write_text(json.dumps(told))
    member.ledger.close()


if __name__ == "__main__":
    main()
