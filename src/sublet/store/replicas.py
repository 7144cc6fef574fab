"""Replicas together: how many must confirm a write, and where a read goes next when a copy is bad.

Rules of this file:
- A save counts when replicas in enough failure domains confirmed it (C1). Fewer is `QuorumNotReached`, naming who is missing.
- Nothing is believed: every read is verified by digest before it is used (C3). A copy that does not verify is set aside, never
  used to repair another, and replaced from a good one.
- With no good copy left the error names the digest and every replica that was asked (C4). Never a part of a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sublet.core.checkpoint import (
    ALIGN,
    ChunkEntry,
    Manifest,
    ReplicaPolicy,
    Span,
    aligned,
    missing_for_quorum,
    read_manifest,
)
from sublet.core.errors import Damaged, NotDurable, QuorumNotReached, SubletError
from sublet.ports.store import Replica
from sublet.store.packing import digest, pack_name


@dataclass(slots=True)
class Health:
    """What reading found on the way."""

    set_aside: list[str] = field(default_factory=list)
    repaired: list[str] = field(default_factory=list)
    unreachable: list[str] = field(default_factory=list)


class Replicas:
    def __init__(self, replicas: Sequence[Replica], policy: ReplicaPolicy) -> None:
        self.replicas = tuple(replicas)
        self.policy = policy
        self._domains = {r.name: r.domain for r in replicas}

    def require(self, confirmed: Sequence[str], failed: dict[str, str], what: str) -> None:
        missing = missing_for_quorum(self.policy, confirmed, self._domains)
        if missing:
            silent = (
                "; ".join(f"{name}: {why}" for name, why in sorted(failed.items())) or "no replica answered"
            )
            raise QuorumNotReached(
                f"{what} was confirmed by {len(confirmed)} of {self.policy.replicas} replicas, "
                f"{self.policy.write_quorum} are needed ({silent})"
            )

    def put_manifest(self, data: bytes) -> tuple[str, list[str]]:
        """Its digest, and who has it."""
        name = digest(data)
        confirmed: list[str] = []
        failed: dict[str, str] = {}
        for replica in self.replicas:
            try:
                replica.put_manifest(name, data)
                confirmed.append(replica.name)
            except SubletError as e:
                failed[replica.name] = e.message
        self.require(confirmed, failed, "the manifest")
        return name, confirmed

    # reading

    def manifest(self, name: str, health: Health | None = None) -> Manifest:
        health = health or Health()
        asked: list[str] = []
        bad: list[Replica] = []
        for replica in self.replicas:
            asked.append(replica.name)
            try:
                data = replica.get_manifest(name)
            except OSError:
                health.unreachable.append(replica.name)
                continue
            if data is None:
                bad.append(replica)
                continue
            if digest(data) != name:
                replica.set_aside("manifest", name)
                health.set_aside.append(f"{replica.name} manifest {name[:12]}")
                bad.append(replica)
                continue
            found = read_manifest(data)
            for other in bad:
                self._repair_manifest(other, name, data, health)
            return found
        raise Damaged(f"manifest {name} is on none of {', '.join(asked)} in good order")

    def _repair_manifest(self, replica: Replica, name: str, data: bytes, health: Health) -> None:
        try:
            replica.put_manifest(name, data)
            health.repaired.append(f"{replica.name} manifest {name[:12]}")
        except SubletError:
            health.unreachable.append(replica.name)

    def chunk(self, entry: ChunkEntry, into: memoryview, health: Health | None = None) -> None:
        """Fill `into` with the chunk's bytes, from whichever replica has them right."""
        health = health or Health()
        asked: list[str] = []
        for replica in self.replicas:
            asked.append(replica.name)
            try:
                there = replica.read_pack(entry.pack, entry.at, into)
            except OSError:
                health.unreachable.append(replica.name)
                continue
            if there and digest(into) == entry.digest:
                return
            if there:
                health.set_aside.append(f"{replica.name} pack {entry.pack[:12]}")
        raise Damaged(
            f"chunk {entry.digest} (pack {entry.pack}) is on none of {', '.join(asked)} in good order"
        )

    # repairing

    def verify_pack(self, replica: Replica, pack: str, chunks: Sequence[ChunkEntry]) -> str:
        """'good', 'missing' or 'bad'."""
        buffer = memoryview(bytearray(max((c.span.size for c in chunks), default=0)))
        for chunk in chunks:
            part = buffer[: chunk.span.size]
            try:
                if not replica.read_pack(pack, chunk.at, part):
                    return "bad" if replica.has_pack(pack) else "missing"
            except OSError:
                return "missing"
            if digest(part) != chunk.digest:
                return "bad"
        return "good"

    def repair(self, manifests: Sequence[Manifest], health: Health) -> None:
        """Every replica gets every pack these manifests refer to. A bad copy is set aside first, and never copied from."""
        needed: dict[str, dict[int, ChunkEntry]] = {}
        for manifest in manifests:
            for chunk in manifest.chunks:
                needed.setdefault(chunk.pack, {})[chunk.at] = chunk
        for pack, by_place in sorted(needed.items()):
            chunks = [by_place[at] for at in sorted(by_place)]
            states = {r.name: self.verify_pack(r, pack, chunks) for r in self.replicas}
            for replica in self.replicas:
                if states[replica.name] == "bad":
                    replica.set_aside("pack", pack)
                    health.set_aside.append(f"{replica.name} pack {pack[:12]}")
            good = [r for r in self.replicas if states[r.name] == "good"]
            wanting = [r for r in self.replicas if states[r.name] != "good"]
            if wanting:
                self._copy_pack(pack, chunks, good, wanting, health)

    def _copy_pack(
        self,
        pack: str,
        chunks: Sequence[ChunkEntry],
        good: Sequence[Replica],
        wanting: Sequence[Replica],
        health: Health,
    ) -> None:
        """From whatever good copies of its chunks there are, under the same name. A pack some of whose chunks no manifest wants any
        more cannot be made whole, and is then written with what is wanted at the same places."""
        size = max(c.at + aligned(c.span.size, ALIGN) for c in chunks)
        data = memoryview(bytearray(size))
        for chunk in chunks:
            self.chunk(chunk, data[chunk.at : chunk.at + chunk.span.size], health)
        pieces = [Span(c.at, c.span.size) for c in chunks]
        for replica in wanting:
            try:
                draft = replica.begin_pack(size)
                try:
                    draft.write(0, data)
                    draft.publish(pack, pieces)
                finally:
                    draft.discard()
                health.repaired.append(f"{replica.name} pack {pack[:12]}")
            except (NotDurable, OSError):
                health.unreachable.append(replica.name)


__all__ = ["Health", "Replicas", "digest", "pack_name"]
