"""A replica that exists in memory only, and what happens to disks: they refuse, lag, tear, forget and flip bits.

Rules of this file:
- It keeps the port's rules (create-only, a put that returned is there) unless a fault says otherwise; faults are decided before a
  save or load begins, because its threads may come in any order.
- Everything that was ever confirmed is remembered apart, so that a checker can tell what should be there from what is.
- A write under a name that is there with other bytes is refused and counted: C2 says nobody tries.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from sublet.core.checkpoints.checkpoint import ByteSpan
from sublet.core.errors import NotDurable
from sublet.testing.clock import VirtualClock

#: What may go wrong with one replica during one save or load.
WRITE_FAULTS = (
    "refuses",
    "fails_at_publish",
    "published_unheard",
    "torn",
    "manifest_refused",
    "manifest_unheard",
)
READ_FAULTS = ("unreachable",)


@dataclass(slots=True)
class Stored:
    data: bytes
    at: int  # when, by the world's clock


@dataclass(slots=True)
class SimReplica:
    """Implements `ports.store.Replica`."""

    name: str
    clock: VirtualClock
    lane: str = "one"
    near: bool = True
    fault: str = ""
    files: dict[tuple[str, str], Stored] = field(default_factory=dict)
    aside: dict[tuple[str, str], bytes] = field(default_factory=dict)
    confirmed: dict[tuple[str, str], bytes] = field(default_factory=dict)  # what it said it has, ever
    written_over: list[str] = field(default_factory=list)
    hits: int = 0

    @property
    def domain(self) -> str:
        return self.name

    def check(self) -> None:
        return

    def _hit(self, *faults: str) -> bool:
        if self.fault in faults:
            self.hits += 1
            return True
        return False

    def _asked(self) -> None:
        if self._hit("unreachable"):
            raise OSError(f"{self.name} does not answer")

    def begin_pack(self, size: int) -> _Draft:
        if self._hit("refuses", "unreachable"):
            raise NotDurable(f"{self.name}: no space left")
        return _Draft(self)

    def has_pack(self, pack: str) -> bool:
        self._asked()
        return ("pack", pack) in self.files

    def read_pack(self, pack: str, at: int, into: memoryview) -> bool:
        self._asked()
        found = self.files.get(("pack", pack))
        if found is None or at + len(into) > len(found.data):
            return False
        into[:] = found.data[at : at + len(into)]
        return True

    def put_manifest(self, digest: str, data: bytes) -> None:
        if self._hit("manifest_refused", "unreachable"):
            raise NotDurable(f"{self.name}: input/output error")
        self._put("manifest", digest, data)
        if self._hit("manifest_unheard"):
            raise NotDurable(f"{self.name}: timed out")
        self.confirmed[("manifest", digest)] = data

    def get_manifest(self, digest: str) -> bytes | None:
        self._asked()
        found = self.files.get(("manifest", digest))
        return found.data if found else None

    def _put(self, kind: str, name: str, data: bytes) -> None:
        found = self.files.get((kind, name))
        if found is None:
            self.files[(kind, name)] = Stored(data, self.clock.boot_us())
        elif found.data != data:
            if self.confirmed.get((kind, name), data) != data:
                self.written_over.append(f"{self.name} {kind} {name[:12]}")
            raise NotDurable(f"{self.name}: {kind} {name[:12]} is there with other bytes")

    def set_aside(self, kind: str, name: str) -> None:
        self._asked()
        found = self.files.pop((kind, name), None)
        if found is not None:
            self.aside[(kind, name)] = found.data

    def packs(self) -> Iterator[tuple[str, float, int]]:
        self._asked()
        now = self.clock.boot_us()
        return iter([(n, (now - s.at) / 1e6, len(s.data)) for (k, n), s in self.files.items() if k == "pack"])

    def manifests(self) -> Iterator[tuple[str, float]]:
        self._asked()
        now = self.clock.boot_us()
        return iter([(n, (now - s.at) / 1e6) for (k, n), s in self.files.items() if k == "manifest"])

    def remove(self, kind: str, name: str) -> None:
        self.files.pop((kind, name), None)
        self.confirmed.pop((kind, name), None)

    # what befalls it

    def damage(self, chance: random.Random) -> str:
        """One thing that happens to a file."""
        if not self.files:
            return ""
        # What was written lately is what will be read: most damage is done there.
        keys = list(self.files)
        key = chance.choice(keys[-5:] if chance.random() < 0.7 else keys)
        found = self.files[key]
        how = chance.choice(["flip", "truncate", "forget", "zeros"])
        data = bytearray(found.data)
        if how == "forget" or not data:
            del self.files[key]
            return "forget"
        if how == "flip":
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        elif how == "truncate":
            del data[chance.randrange(len(data)) :]
        else:
            at = chance.randrange(len(data))
            data[at : at + 64] = bytes(len(data[at : at + 64]))
        self.files[key] = Stored(bytes(data), found.at)
        return how

    def lose_everything(self) -> None:
        self.files.clear()


class _Draft:
    def __init__(self, replica: SimReplica) -> None:
        self._replica = replica
        self._parts: dict[int, bytes] = {}

    def write(self, at: int, data: memoryview) -> None:
        self._parts[at] = bytes(data)

    def publish(self, pack: str, pieces: Sequence[ByteSpan]) -> None:
        replica = self._replica
        if replica._hit("fails_at_publish"):
            raise NotDurable(f"{replica.name}: input/output error")
        end = max((p.end for p in pieces), default=0)
        data = bytearray(end)
        for at, part in self._parts.items():
            data[at : at + len(part)] = part[: max(0, end - at)]
        if replica._hit("torn"):
            # Power went off while it was published, and nothing was confirmed: some of it is there.
            replica._put("pack", pack, bytes(data[: len(data) // 2]))
            raise NotDurable(f"{replica.name}: the machine restarted")
        replica._put("pack", pack, bytes(data))
        if replica._hit("published_unheard"):
            raise NotDurable(f"{replica.name}: timed out")
        replica.confirmed[("pack", pack)] = bytes(data)

    def discard(self) -> None:
        return
