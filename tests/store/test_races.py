"""Writers that expect the same version (S3, C6): in every round one wins, and the others are told which version it is now.

Real processes and threads; 15 rounds each here, `SUBLET_RACES` in `make proof`.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest

from sublet.core.errors import HeadMoved
from sublet.ports.ledger import LeaseKey
from tests.forked import Forked
from tests.in_memory import in_memory
from tests.store.rig import JOB, Held, Shelf

ROUNDS = int(os.environ.get("SUBLET_RACES", "15"))

pytestmark = pytest.mark.timeout(120 + ROUNDS)

RACER = """
import json, sys, time
from pathlib import Path
from sublet.core.checkpoints.checkpoint import ReplicaPolicy
from sublet.core.errors import HeadMoved
from sublet.ledger.engines.sqlite.engine import open_ledger
from sublet.store.checkpoints import CheckpointStore
from sublet.store.replicas.directory import DirectoryReplica
from sublet.store.replicas.quorum import Replicas
from sublet.testing.clock import VirtualClock
from tests.store.test_races import a_state, held

url, key, behind, *folders = sys.argv[1:]
ledger = open_ledger(url, VirtualClock())
store = CheckpointStore(Replicas([DirectoryReplica(Path(f)) for f in folders], ReplicaPolicy(replicas=3)), lambda: ledger)
lease = held(json.loads(key))
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    version, fill, at = json.loads(line)
    while time.monotonic() < at:
        pass
    try:
        if int(behind):
            saved = store.save_behind("team/job", a_state(fill), expected_version=version, lease=lease).result(60)
        else:
            saved = store.save("team/job", a_state(fill), expected_version=version, lease=lease)
        print(json.dumps(["won", saved.version]), flush=True)
    except HeadMoved as e:
        try:
            store.settle()
        except HeadMoved:
            pass
        print(json.dumps(["moved", e.version]), flush=True)
"""


def a_state(fill: int) -> dict[str, Any]:
    rng = random.Random(fill)
    return {"w": np.frombuffer(rng.randbytes(70_000), np.uint8), "same": np.ones(20_000), "n": fill}


def held(key: list[Any]) -> Held:
    return Held(LeaseKey(*key))


def which(state: dict[str, Any]) -> int:
    wanted = a_state(state["n"])
    assert np.array_equal(state["w"], wanted["w"])
    assert np.array_equal(state["same"], wanted["same"])
    return int(state["n"])


def test_processes() -> None:
    import time

    with in_memory() as folder:
        shelf = Shelf(folder)
        key = shelf.lease.key
        racers = [
            Forked(
                [sys.executable, "-c", RACER, shelf.rig.url, json.dumps([key.lease_id, key.epoch, key.secret]), str(int(n == 2)),
                 *map(str, shelf.folders)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for n in range(3)
        ]  # fmt: skip

        def said(racer: subprocess.Popen[str]) -> Any:
            assert racer.stdout is not None
            return json.loads(racer.stdout.readline())

        assert [said(r) for r in racers] == ["ready"] * 3
        winners: Counter[int] = Counter()
        for version in range(ROUNDS):
            at = time.monotonic() + 0.005
            for n, racer in enumerate(racers):
                assert racer.stdin is not None
                racer.stdin.write(json.dumps([version, 10 * version + n, at]) + "\n")
                racer.stdin.flush()
            answers = [said(r) for r in racers]
            won = [n for n, (word, _) in enumerate(answers) if word == "won"]
            assert len(won) == 1, f"round {version}: {answers}"
            assert all(number == version + 1 for _, number in answers), f"round {version}: {answers}"
            assert which(shelf.load()) == 10 * version + won[0]
            winners[won[0]] += 1
        for racer in racers:
            racer.communicate(timeout=30)
        assert [m.version for m in shelf.store.history(JOB)] == list(range(ROUNDS, 0, -1))
        assert shelf.files("drafts") == []
        assert shelf.rig.faults() == []
        shelf.close()
    print(dict(winners))


def test_threads() -> None:
    with in_memory() as folder:
        shelf = Shelf(folder)
        stores = [shelf.open() for _ in range(3)]
        for version in range(ROUNDS):
            start = threading.Barrier(3)
            answers: dict[int, Any] = {}

            def race(
                n: int, version: int = version, start: threading.Barrier = start, answers: Any = answers
            ) -> None:
                start.wait()
                try:
                    answers[n] = (
                        stores[n]
                        .save(JOB, a_state(10 * version + n), expected_version=version, lease=shelf.lease)
                        .version
                    )
                except HeadMoved as e:
                    answers[n] = e
                except BaseException as e:
                    answers[n] = e
                    raise

            threads = [threading.Thread(target=race, args=(n,)) for n in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            won = [n for n, answer in answers.items() if answer == version + 1]
            assert len(won) == 1, f"round {version}: {answers}"
            assert [a.version for a in answers.values() if isinstance(a, HeadMoved)] == [version + 1] * 2
            assert which(shelf.load()) == 10 * version + won[0]
        assert [m.version for m in shelf.store.history(JOB)] == list(range(ROUNDS, 0, -1))
        assert shelf.rig.faults() == []
        shelf.close()
