"""Scrub: every copy of everything that is needed is read and compared with its digest, and replaced if it is
bad.

Rules of this file:
- Everything that any job needs of a pack is known before a copy of it is replaced: a new copy holds that and
  nothing else.
- One chunk is in memory at a time, and no more is read in a second than was allowed: training comes first.
- Without `repair` nothing is changed, also no manifest on the way.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from sublet.core.checkpoints.checkpoint import ChunkEntry, Manifest
from sublet.core.errors import Damaged, NotFound
from sublet.ports.ledger import Ledger
from sublet.ports.store import Replica
from sublet.store.replicas.quorum import Health, Replicas, needed
from sublet.store.save.packing import digest
from sublet.store.upkeep.lineage import Lineage
from sublet.store.upkeep.sweeping import Progress, quiet


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One replica's copy of something, found to be bad or missing."""

    replica: str
    kind: str  # 'manifest' or 'pack'
    name: str
    state: str  # 'missing', 'bad' or 'unreachable'


@dataclass(slots=True)
class Scrubbed:
    copies: int = 0  # looked at
    bytes: int = 0  # read
    found: list[Copy] = field(default_factory=list)  # not good when they were looked at
    left: list[Copy] = field(default_factory=list)  # not good afterwards
    unreadable: list[str] = field(default_factory=list)  # versions no replica has a good manifest of
    health: Health = field(default_factory=Health)

    @property
    def whole(self) -> bool:
        return not (self.left or self.unreadable or self.health.lost)


class _Pace:
    def __init__(self, bytes_per_second: int) -> None:
        self._rate = bytes_per_second
        self._begun = time.monotonic()
        self.bytes = 0

    def spend(self, size: int) -> None:
        self.bytes += size
        if self._rate:
            early = self.bytes / self._rate - (time.monotonic() - self._begun)
            if early > 0:
                time.sleep(early)


class Scrub:
    def __init__(self, replicas: Replicas, ledger: Ledger) -> None:
        self._replicas = replicas
        self._ledger = ledger

    def run(
        self, *, name: str | None, repair: bool, bytes_per_second: int = 0, progress: Progress = quiet
    ) -> Scrubbed:
        scrubbed, pace = Scrubbed(), _Pace(bytes_per_second)
        wanted: set[str] = set()  # packs of the job that is scrubbed
        digests: list[str] = []
        manifests = self._manifests(name, scrubbed, wanted, digests)
        packs = needed(manifests)
        if name is not None:
            packs = [(pack, chunks) for pack, chunks in packs if pack in wanted]
        for digest_ in digests:
            self._scrub_manifest(digest_, repair, scrubbed, pace)
        total = sum(c.span.size for _, chunks in packs for c in chunks) * len(self._replicas.replicas)
        for pack, chunks in packs:
            self._scrub_pack(pack, chunks, repair, scrubbed, pace, progress, total)
        scrubbed.bytes = pace.bytes
        return scrubbed

    def _manifests(
        self, name: str | None, scrubbed: Scrubbed, wanted: set[str], digests: list[str]
    ) -> list[Manifest]:
        """What every job needs. The packs and digests of the jobs being scrubbed are set aside."""
        lineage = Lineage(self._replicas, lambda: self._ledger, scrubbed.health, mend=False)
        everything = self._ledger.all_versions()
        if name is not None and not any(v.head.job == name for v in everything):
            raise NotFound(f"nothing was saved as {name}", remedy="'sublet checkpoint ls' lists what was")

        def unreadable(job: str, error: Damaged) -> None:
            if name is None or job == name:
                scrubbed.unreadable.append(f"{job}: {error.message}")

        found = []
        for job, digest_, manifest in lineage.reachable(everything, set(), set(), unreadable):
            found.append(manifest)
            if name is None or job == name:
                wanted.update(manifest.packs)
                digests.append(digest_)
        return found

    # manifests

    def _scrub_manifest(self, name: str, repair: bool, scrubbed: Scrubbed, pace: _Pace) -> None:
        for again in (False, True):
            states = {r.name: self._manifest_state(r, name, pace) for r in self._replicas.replicas}
            bad = [
                Copy(replica=r, kind="manifest", name=name, state=s) for r, s in states.items() if s != "good"
            ]
            if not again:
                scrubbed.copies += len(states)
                scrubbed.found += bad
                if bad and repair:
                    self._replicas.spread_manifest(name, scrubbed.health)
                    continue
            scrubbed.left += bad
            return

    def _manifest_state(self, replica: Replica, name: str, pace: _Pace) -> str:
        try:
            data = replica.get_manifest(name)
        except OSError:
            return "unreachable"
        if data is None:
            return "missing"
        pace.spend(len(data))
        return "good" if digest(data) == name else "bad"

    # packs

    def _scrub_pack(
        self,
        pack: str,
        chunks: Sequence[ChunkEntry],
        repair: bool,
        scrubbed: Scrubbed,
        pace: _Pace,
        progress: Progress,
        total: int,
    ) -> None:
        bad = []
        for replica in self._replicas.replicas:
            state = self._pack_state(replica, pack, chunks, pace)
            scrubbed.copies += 1
            if state != "good":
                bad.append(Copy(replica=replica.name, kind="pack", name=pack, state=state))
            progress(f"scrubbing {replica.name}", min(pace.bytes, total), total)
        scrubbed.found += bad
        if bad and repair:
            self._replicas.repair_pack(pack, chunks, scrubbed.health)
            by_name = {r.name: r for r in self._replicas.replicas}
            after = [(c, self._pack_state(by_name[c.replica], pack, chunks, pace)) for c in bad]
            bad = [
                Copy(replica=c.replica, kind="pack", name=pack, state=state)
                for c, state in after
                if state != "good"
            ]
        scrubbed.left += bad

    def _pack_state(self, replica: Replica, pack: str, chunks: Sequence[ChunkEntry], pace: _Pace) -> str:
        buffer = memoryview(bytearray(max(c.span.size for c in chunks)))
        try:
            for chunk in chunks:
                part = buffer[: chunk.span.size]
                if not replica.read_pack(pack, chunk.at, part):
                    return "bad" if replica.has_pack(pack) else "missing"
                pace.spend(part.nbytes)
                if digest(part) != chunk.digest:
                    return "bad"
        except OSError:
            return "unreachable"
        return "good"
