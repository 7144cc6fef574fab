"""Replicas together: how many must confirm a write, and where a read goes next when a copy is bad.

Rules of this file:
- A save counts when replicas in enough failure domains confirmed it (C1). Fewer is `QuorumNotReached`, naming who is missing.
- Nothing is believed: every read is verified by digest before it is used (C3). A copy that does not verify is set aside, never
  used to repair another, and replaced from a good one.
- With no good copy left the error names the digest and every replica that was asked (C4). Never a part of a state.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from sublet.core.errors import Damaged, Misconfigured, NotDurable, QuorumNotReached, SubletError
from sublet.ports.store import Draft, Replica
from sublet.store.packing import digest, verify_pack

ASKERS = 16


@dataclass(slots=True)
class Health:
    """What reading found on the way."""

    set_aside: list[str] = field(default_factory=list)
    repaired: list[str] = field(default_factory=list)
    unreachable: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)  # no good copy of it is left
    wanting: set[str] = field(default_factory=set)  # packs a replica has not, or not in good order

    def add(self, other: Health) -> None:
        self.set_aside += other.set_aside
        self.repaired += other.repaired
        self.unreachable += other.unreachable
        self.lost += other.lost


class Replicas:
    def __init__(self, replicas: Sequence[Replica], policy: ReplicaPolicy) -> None:
        self.replicas = tuple(replicas)
        self.policy = policy
        near_first = policy.placement == "near"
        self._to_read = tuple(sorted(replicas, key=lambda r: near_first and not r.near))
        names = [r.name for r in replicas]
        if len(set(names)) != len(names) or len(names) != policy.replicas:
            raise Misconfigured(
                f"the policy is for {policy.replicas} replicas, and these are {', '.join(names)}",
                remedy="name each replica once, and as many as the policy says",
            )
        self._domains = dict(zip(names, policy.domains or [r.domain for r in replicas], strict=True))
        if not policy.single_node and len(set(self._domains.values())) < policy.write_quorum:
            raise Misconfigured(
                f"the replicas lie in {len(set(self._domains.values()))} failure domains, the write quorum is {policy.write_quorum}",
                remedy="spread them, or say single_node=True",
            )

    def require(self, confirmed: Sequence[str], failed: dict[str, str], what: str) -> None:
        missing = missing_for_quorum(self.policy, confirmed, self._domains)
        if missing:
            silent = (
                "; ".join(f"{name}: {why}" for name, why in sorted(failed.items())) or "no replica answered"
            )
            raise QuorumNotReached(
                f"{what} was confirmed by {len(confirmed)} of {self.policy.replicas} replicas, "
                f"{self.policy.write_quorum} in different failure domains are needed ({silent})"
            )

    def put_manifest(self, data: bytes) -> tuple[str, list[str]]:
        """Its digest, and who has it."""
        name = digest(data)
        confirmed: list[str] = []
        failed: dict[str, str] = {}
        for replica in self.replicas:
            try:
                self._put_manifest(replica, name, data)
                confirmed.append(replica.name)
            except SubletError as e:
                failed[replica.name] = e.message
        self.require(confirmed, failed, "the manifest")
        return name, confirmed

    def _put_manifest(self, replica: Replica, name: str, data: bytes) -> None:
        """A bad copy from before under the same name is set aside: it must not keep the good one out."""
        try:
            replica.put_manifest(name, data)
            return
        except SubletError as failed:
            try:
                found = replica.get_manifest(name)
            except OSError:
                raise failed from None  # it cannot be asked either: what it said first is what is wrong with it
            if found is None or digest(found) == name:
                raise
            try:
                replica.set_aside("manifest", name)
            except OSError as e:
                raise NotDurable(
                    f"{replica.name} has a bad copy that cannot be set aside: {e.strerror or e}"
                ) from e
        replica.put_manifest(name, data)

    def kept(self, packs: Collection[str]) -> set[str]:
        """Those that as many failure domains have as must confirm a write: only they may be referred to again (C1)."""
        having: dict[str, list[str]] = {pack: [] for pack in packs}

        def ask(pack: str, replica: Replica) -> None:
            with contextlib.suppress(OSError):
                if replica.has_pack(pack):
                    having[pack].append(replica.name)

        # Side by side: to a bucket each is a round trip, and a state may lie in hundreds of packs.
        with ThreadPoolExecutor(ASKERS) as pool:
            for asked in [pool.submit(ask, pack, r) for pack in having for r in self.replicas]:
                asked.result()
        return {pack for pack in having if not missing_for_quorum(self.policy, having[pack], self._domains)}

    # reading

    def manifest(self, name: str, health: Health | None = None, *, mend: bool = True) -> Manifest:
        """From whichever replica has it right; the others are given it on the way, unless nothing may be changed."""
        health = health or Health()
        asked: list[str] = []
        bad: list[Replica] = []
        for replica in self._to_read:
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
                if mend:
                    self._set_aside(replica, "manifest", name, health)
                bad.append(replica)
                continue
            found = read_manifest(data)
            for other in bad if mend else ():
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
        for replica in self._to_read:
            asked.append(replica.name)
            try:
                there = replica.read_pack(entry.pack, entry.at, into)
            except OSError:
                health.unreachable.append(replica.name)
                continue
            if there and digest(into) == entry.digest:
                return
            health.wanting.add(entry.pack)
        raise Damaged(
            f"chunk {entry.digest} (pack {entry.pack}) is on none of {', '.join(asked)} in good order"
        )

    # repairing

    def _set_aside(self, replica: Replica, kind: str, name: str, health: Health) -> None:
        try:
            replica.set_aside(kind, name)
            health.set_aside.append(f"{replica.name} {kind} {name[:12]}")
        except (SubletError, OSError):  # it may not be written to, and must not keep us from the good copies
            health.unreachable.append(replica.name)

    def repair(
        self, manifests: Iterable[Manifest], health: Health, *, only: Collection[str] | None = None
    ) -> None:
        """Every replica gets every pack these manifests refer to, or of them those in `only`. They must be all that refer to such a
        pack: one that is written anew holds what was asked for and nothing else."""
        for pack, wanted in needed(manifests, only):
            self.repair_pack(pack, wanted, health)

    def repair_pack(self, pack: str, wanted: Sequence[ChunkEntry], health: Health) -> dict[str, str]:
        """Each chunk is copied from a copy of it that verified, one at a time; a pack that is bad on every replica may still be made
        whole that way, so nothing is set aside before its chunks were read. What each replica had: 'good', 'missing' or 'bad'."""
        good = {r.name: {c.at for c in wanted if self._has_chunk(r, c)} for r in self.replicas}
        found = [c for c in wanted if any(c.at in places for places in good.values())]
        for chunk in wanted:
            if not any(chunk.at in places for places in good.values()):
                asked = ", ".join(r.name for r in self.replicas)
                health.lost.append(f"chunk {chunk.digest} (pack {pack}) is on none of {asked} in good order")
        states = {r.name: self._state(r, pack, len(good[r.name]) == len(found)) for r in self.replicas}
        wanting = [r for r in self.replicas if states[r.name] != "good"]
        if wanting and found:
            self._write_anew(pack, found, wanting, states, health)
        # A chunk that no replica has makes each of them bad to whoever wants it, and no copy better than another.
        return states if len(found) == len(wanted) else {r.name: "bad" for r in self.replicas}

    def _has_chunk(self, replica: Replica, chunk: ChunkEntry) -> bool:
        buffer = memoryview(bytearray(chunk.span.size))
        try:
            return replica.read_pack(chunk.pack, chunk.at, buffer) and digest(buffer) == chunk.digest
        except OSError:
            return False

    def _state(self, replica: Replica, pack: str, whole: bool) -> str:
        if whole:
            return "good"
        try:
            return "bad" if replica.has_pack(pack) else "missing"
        except OSError:
            return "missing"

    def _write_anew(
        self,
        pack: str,
        chunks: Sequence[ChunkEntry],
        wanting: Sequence[Replica],
        states: dict[str, str],
        health: Health,
    ) -> None:
        """At the same places as before; what nobody wants any more is left out."""
        drafts: dict[str, Draft] = {}
        last = chunks[-1]

        def left_behind(replica: Replica) -> None:
            health.unreachable.append(replica.name)
            if replica.name in drafts:
                drafts.pop(replica.name).discard()

        buffer = mmap.mmap(-1, aligned(max(c.span.size for c in chunks), ALIGN))  # aligned for direct I/O
        view = memoryview(buffer)
        try:
            for replica in wanting:
                try:
                    drafts[replica.name] = replica.begin_pack(last.at + aligned(last.span.size, ALIGN))
                except (SubletError, OSError):
                    left_behind(replica)
            for chunk in chunks:
                size = chunk.span.size
                self.chunk(chunk, view[:size], health)
                view[size : aligned(size, ALIGN)] = bytes(aligned(size, ALIGN) - size)
                for replica in wanting:
                    if replica.name in drafts:
                        try:
                            drafts[replica.name].write(chunk.at, view[: aligned(size, ALIGN)])
                        except (SubletError, OSError):
                            left_behind(replica)
            pieces = [Span(c.at, c.span.size) for c in chunks]
            for replica in wanting:
                if replica.name not in drafts:
                    continue
                if states[replica.name] == "bad":
                    self._set_aside(replica, "pack", pack, health)
                try:
                    drafts[replica.name].publish(pack, pieces)
                    health.repaired.append(f"{replica.name} pack {pack[:12]}")
                except (SubletError, OSError):
                    left_behind(replica)
        finally:
            for draft in drafts.values():
                draft.discard()
            view.release()
            buffer.close()

    def inspect(self, manifests: Sequence[Manifest]) -> list[tuple[str, str, str]]:
        """Each replica's copy of each pack these manifests need: 'good', 'missing' or 'bad'. Changes nothing."""
        return [
            (
                replica.name,
                pack,
                verify_pack(
                    replica, pack, [c.digest for c in chunks], [Span(c.at, c.span.size) for c in chunks]
                ),
            )
            for pack, chunks in needed(manifests)
            for replica in self.replicas
        ]

    def spread_manifest(self, name: str, health: Health) -> None:
        """Every replica gets it, byte by byte as its digest has it. A copy that does not verify is set aside."""
        data: bytes | None = None
        wanting: list[Replica] = []
        for replica in self.replicas:
            try:
                found = replica.get_manifest(name)
            except OSError:
                health.unreachable.append(replica.name)
                continue
            if found is not None and digest(found) == name:
                data = found
                continue
            if found is not None:
                self._set_aside(replica, "manifest", name, health)
            wanting.append(replica)
        for replica in wanting if data is not None else ():
            self._repair_manifest(replica, name, data or b"", health)


class Kept:
    """What one save found out about the packs of those before it. Each is asked about once."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._known: dict[str, bool] = {}

    def among(self, packs: Iterable[str]) -> set[str]:
        wanted = set(packs)
        new = wanted - self._known.keys()
        if new:
            found = self._replicas.kept(new)
            self._known.update((pack, pack in found) for pack in new)
        return {pack for pack in wanted if self._known[pack]}


__all__ = ["Health", "Kept", "Replicas", "digest", "needed", "verify_pack"]


def needed(
    manifests: Iterable[Manifest], only: Collection[str] | None = None
) -> list[tuple[str, list[ChunkEntry]]]:
    """Every pack they refer to, or of them those in `only`, with what they want of it in its order."""
    by_pack: dict[str, dict[int, ChunkEntry]] = {}
    for manifest in manifests:
        for chunk in manifest.chunks:
            if only is None or chunk.pack in only:
                by_pack.setdefault(chunk.pack, {})[chunk.at] = chunk
    return [(pack, [places[at] for at in sorted(places)]) for pack, places in sorted(by_pack.items())]
