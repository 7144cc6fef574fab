"""A store on real folders and a real ledger, with the few things a test does to them again and again."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sublet.core.checkpoints.checkpoint import ReplicaPolicy
from sublet.ports.ledger import LeaseKey
from sublet.store.checkpoints import CheckpointStore
from sublet.store.replicas.directory import DirectoryReplica
from sublet.store.replicas.quorum import Replicas
from tests.forked import Forked
from tests.ledger.rig import Rig, sqlite_rig

JOB = "team/job"


@dataclass(slots=True)
class Held:
    """A lease as a save sees it."""

    key: LeaseKey

    def check(self) -> None:
        return


class Shelf:
    """N folders and a ledger with one active lease."""

    def __init__(
        self,
        folder: Path,
        replicas: int = 3,
        domains: tuple[str, ...] = (),
        *,
        disks: Path | None = None,
        kind: type[DirectoryReplica] = DirectoryReplica,
        **policy: Any,
    ) -> None:
        self._opened: list[CheckpointStore] = []
        self.rig: Rig = sqlite_rig(folder)
        self.rig.tenant()
        self.rig.device()
        self.answer = self.rig.ask(10, lease_id="holder")
        self.lease = Held(self.rig.key(self.answer))
        self.policy = ReplicaPolicy(replicas=replicas, domains=domains, **policy)
        self.folders = [(disks or folder) / f"replica{i}" for i in range(replicas)]
        self.replicas = [kind(path) for path in self.folders]
        for replica in self.replicas:
            replica.check()
        self.store = self.open()

    def open(self) -> CheckpointStore:
        """Another store on the same folders and ledger, as another process would have."""
        ledger = self.rig.open()
        store = CheckpointStore(Replicas(self.replicas, self.policy), lambda: ledger)
        self._opened.append(store)
        return store

    def close(self) -> None:
        for store in self._opened:
            store.close()
        self.rig.close()

    def save(self, state: Any, version: int, **over: Any) -> Any:
        return self.store.save(JOB, state, **{"expected_version": version, "lease": self.lease, **over})

    def load(self, **over: Any) -> Any:
        """As a new process would."""
        return self.open().load(JOB, **over)

    def files(self, folder: str = "*") -> list[Path]:
        return sorted(p for root in self.folders for p in root.glob(f"{folder}/*") if p.is_file())

    def published(self) -> list[Path]:
        return self.files("packs") + self.files("manifests")

    def lose(self, number: int) -> None:
        shutil.rmtree(self.folders[number])

    @property
    def version(self) -> int:
        head = self.rig.ledger.head(JOB)
        return head.version if head is not None else 0


def damage(path: Path, rng: random.Random) -> str:
    """One thing that happens to files."""
    data = bytearray(path.read_bytes())
    what = rng.choice(["flip", "truncate", "delete", "empty", "garbage", "longer", "zeros"])
    if what == "delete":
        path.unlink()
        return what
    if what == "flip":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif what == "truncate":
        del data[rng.randrange(len(data)) :]
    elif what == "empty":
        data.clear()
    elif what == "garbage":
        data = bytearray(rng.randbytes(len(data)))
    elif what == "longer":
        data.insert(rng.randrange(len(data)), 7)
    else:
        at = rng.randrange(len(data))
        data[at : at + 512] = bytes(len(data[at : at + 512]))
    path.unlink()
    path.write_bytes(data)
    return what


CHILD = """
import os
import sys
import numpy as np
from pathlib import Path
from sublet.machine import failpoints
from sublet.core.checkpoints.checkpoint import ReplicaPolicy
from sublet.ledger.engines.sqlite.engine import open_ledger
from sublet.ports.ledger import LeaseKey
from sublet.store.checkpoints import CheckpointStore
from sublet.store.replicas.directory import DirectoryReplica
from sublet.store.replicas.quorum import Replicas
from sublet.testing.clock import VirtualClock

url, epoch, secret, fill, version, *folders = sys.argv[1:]

class Held:
    key = LeaseKey("holder", int(epoch), secret)
    def check(self): pass

ledger = open_ledger(url, VirtualClock())
store = CheckpointStore(Replicas([DirectoryReplica(Path(f)) for f in folders], ReplicaPolicy(replicas=len(folders))), lambda: ledger)
state = {"a": np.full(3 << 20, 1, np.uint8), "b": np.full(100, int(fill), np.uint8)}
sys.stdin.readline()
os.environ["SUBLET_FAILPOINTS"] = os.environ["ARMED"]  # not before: opening the ledger passes some of them
failpoints.arm_from_environment()
print(store.save("team/job", state, expected_version=int(version), lease=Held()).version, flush=True)
"""


def saver(shelf: Shelf, fill: int, version: int, failpoints: str = "") -> subprocess.Popen[str]:
    """A process that saves once, when it is told to."""
    key = shelf.lease.key
    return Forked(
        [sys.executable, "-c", CHILD,
         shelf.rig.url, str(key.epoch), key.secret, str(fill), str(version), *map(str, shelf.folders)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "SUBLET_FAILPOINTS": "", "ARMED": failpoints},
    )  # fmt: skip
