"""Replicas together: how many must confirm a write, and where a read goes next when a copy is bad.

Rules of this file:
- A save counts when replicas in enough failure domains confirmed it (C1), else it is `QuorumNotReached`.
- Nothing is believed: every read is verified by digest before it is used (C3). A copy that does not verify is
  set aside, never used to repair another, and replaced from a good one.
- With no good copy left the error names the digest and every replica that was asked (C4). If one of them
  could not be reached and might still have it, the error says to come back.
- Reads go to the nearest, as `core.checkpoints.replica_order` says; while another can be asked nobody is
  waited for long. Writes and questions go to all at once and count as soon as enough have answered: who is
  slow, or away, costs nobody the others' answers.
"""

from __future__ import annotations

import mmap
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from sublet.core.checkpoints.checkpoint import (
    ALIGN,
    ByteSpan,
    ChunkEntry,
    Manifest,
    ReplicaPolicy,
    aligned,
    missing_for_quorum,
    read_manifest,
)
from sublet.core.checkpoints.replica_order import Choice, Known, Reach, hurried_us, reading_order
from sublet.core.errors import Damaged, Misconfigured, NotDurable, QuorumNotReached, SubletError, Unreached
from sublet.ports.store import PackDraft, Remote, Replica
from sublet.store.save.packing import PackOutcomes, digest, verify_pack

ASKERS = 16


@dataclass(slots=True)
class Health:
    """What reading found on the way."""

    set_aside: list[str] = field(default_factory=list)
    repaired: list[str] = field(default_factory=list)
    unreachable: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)  # no good copy of it is left
    wanting: set[str] = field(default_factory=set)  # packs that some replica lacks, or has a bad copy of

    def add(self, other: Health) -> None:
        self.set_aside += other.set_aside
        self.repaired += other.repaired
        self.unreachable += other.unreachable
        self.lost += other.lost


@dataclass(slots=True)
class SaveTimings:
    """Who confirmed a save when, in seconds from its beginning. Late replicas are added when they catch
    up."""

    begun: float = field(default_factory=time.monotonic)
    seconds: dict[str, float] = field(default_factory=dict)
    quorum_seconds: float = 0.0
    late: tuple[str, ...] = ()

    def confirm(self, name: str) -> None:
        self.seconds.setdefault(name, time.monotonic() - self.begun)

    @property
    def slowest(self) -> tuple[str, float] | None:
        """None as long as somebody is late."""
        if not self.seconds or any(name not in self.seconds for name in self.late):
            return None
        return max(self.seconds.items(), key=lambda known: known[1])


@dataclass(frozen=True, slots=True)
class PublishedManifest:
    """A manifest that enough replicas have."""

    name: str
    confirmed: list[str]
    late: tuple[str, ...]
    failed: dict[str, str]


class Replicas:
    def __init__(self, replicas: Sequence[Replica], policy: ReplicaPolicy, *, here: str = "") -> None:
        self.replicas = tuple(replicas)
        self.policy = policy
        self._here = here
        self._reach = {r.name: Reach() for r in replicas}
        self._by_name = {r.name: r for r in replicas}
        names = [r.name for r in replicas]
        if len(set(names)) != len(names) or len(names) != policy.replicas:
            raise Misconfigured(
                f"the policy is for {policy.replicas} replicas, and these are {', '.join(names)}",
                remedy="name each replica once, and as many as the policy says",
            )
        self._domains = dict(zip(names, policy.domains or [r.domain for r in replicas], strict=True))
        if not policy.single_node and len(set(self._domains.values())) < policy.write_quorum:
            raise Misconfigured(
                f"the replicas lie in {len(set(self._domains.values()))} failure domains, the write quorum "
                f"is {policy.write_quorum}",
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

    def enough(self, confirmed: Collection[str]) -> bool:
        """Whether these are a write quorum."""
        return not missing_for_quorum(self.policy, list(confirmed), self._domains)

    @property
    def domains(self) -> dict[str, str]:
        """What each replica fails with."""
        return dict(self._domains)

    @property
    def remote(self) -> list[Remote]:
        return [r for r in self.replicas if isinstance(r, Remote)]

    def put_manifest(self, data: bytes) -> tuple[str, list[str]]:
        """Returns its digest, and the replicas that have it."""
        spread = self.spread(data, SaveTimings())
        return spread.name, spread.confirmed

    def spread(self, data: bytes, account: SaveTimings) -> PublishedManifest:
        """Write to all at once. Replicas behind a network are not waited for once enough have it."""
        name = digest(data)
        outcomes = PackOutcomes(self.replicas, self.enough)

        def put(replica: Replica) -> None:
            try:
                self._put_manifest(replica, name, data)
                account.confirm(replica.name)
                outcomes.confirm(replica.name)
            except SubletError as e:
                outcomes.fail(replica.name, e.message)
            except BaseException as e:
                outcomes.broke(e)
            finally:
                outcomes.leave([replica])

        away = [r for r in self.replicas if not r.near]
        for replica in away:
            threading.Thread(target=put, args=(replica,), name="sublet-manifest", daemon=True).start()
        for replica in self.replicas:
            if replica.near:
                put(replica)
        try:
            outcomes.wait()
        finally:
            outcomes.close()
        confirmed = outcomes.confirmed
        self.require(confirmed, outcomes.failed, "the manifest")
        return PublishedManifest(name, confirmed, outcomes.late, dict(outcomes.failed))

    def _put_manifest(self, replica: Replica, name: str, data: bytes) -> None:
        """A bad copy from before under the same name is set aside: it must not keep the good one out."""
        try:
            replica.put_manifest(name, data)
            return
        except SubletError as failed:
            try:
                found = replica.get_manifest(name)
            except OSError:
                # it cannot be asked either: what it said first is what is wrong with it
                raise failed from None
            if found is None or digest(found) == name:
                raise
            try:
                replica.set_aside("manifest", name)
            except OSError as e:
                raise NotDurable(
                    f"{replica.name} has a bad copy that cannot be set aside: {e.strerror or e}"
                ) from e
        replica.put_manifest(name, data)

    def kept(self, packs: Collection[str], lacking: dict[str, set[str]] | None = None) -> set[str]:
        """The packs that a write quorum has (C1). `lacking` is told which replicas lack one."""
        asking = _Asking(self.replicas, packs, self.enough)
        found = asking.run()
        for name, pack in asking.lacking if lacking is not None else ():
            lacking.setdefault(name, set()).add(pack)  # type: ignore[union-attr]
        return found

    # reading

    def reading_order(self, size: int) -> list[Choice]:
        """Whom a read of so many bytes asks, in this order, and why."""
        if self.policy.placement != "near":
            return [Choice(name=r.name, reason="as listed") for r in self.replicas]
        known = [
            Known(name=r.name, near=r.near, domain=self._domains[r.name], reach=self._reach[r.name])
            for r in self.replicas
        ]
        return reading_order(known, here=self._here, size=size)

    def _asked_in_turn(self, size: int) -> Iterable[tuple[Replica, Replica]]:
        """Each replica, hurried at first because another may answer sooner; then remote ones again,
        patiently."""
        order = [self._by_name[choice.name] for choice in self.reading_order(size)]
        if len(order) == 1:
            yield order[0], order[0]
            return
        for replica in order:
            hurry = hurried_us(self._reach[replica.name], size) / 1e6
            yield replica, replica.hurried(hurry) if isinstance(replica, Remote) else replica
        for replica in order:
            if isinstance(replica, Remote):
                yield replica, replica

    def _measured(self, replica: Replica, size: int, began: float) -> None:
        if not replica.near:
            took = int((time.monotonic() - began) * 1e6)
            self._reach[replica.name] = self._reach[replica.name].after(size, took)

    def manifest(self, name: str, health: Health | None = None, *, mend: bool = True) -> Manifest:
        """Read it from a replica that has it right; with `mend`, the others are given it."""
        health = health or Health()
        bad: list[Replica] = []
        silent: dict[str, str] = {}
        for replica, data in self._manifests(name, silent):
            silent.pop(replica.name, None)
            if data is None:
                bad.append(replica)
                continue
            if digest(data) != name:
                if mend:
                    self._set_aside(replica, "manifest", name, health)
                bad.append(replica)
                continue
            health.unreachable += silent
            found = read_manifest(data)
            for other in bad if mend else ():
                self._repair_manifest(other, name, data, health)
            return found
        health.unreachable += silent
        raise self._nowhere(f"manifest {name}", silent)

    def _manifests(self, name: str, silent: dict[str, str]) -> Iterable[tuple[Replica, bytes | None]]:
        """Each replica's answer, until the caller stops. Asking all at once measures new ones."""
        order = self.reading_order(0)
        unmeasured = [c.name for c in order if self._reach[c.name].latency_us is None]
        distant = [self._by_name[n] for n in unmeasured if not self._by_name[n].near]
        near = [self._by_name[c.name] for c in order if self._by_name[c.name].near]
        chosen = self.policy.placement == "near" and not (
            self._here and any(self._domains[c.name] == self._here for c in order)
        )
        asked: set[str] = set()
        if chosen and not near and len(distant) > 1:
            for replica, data, error in self._race(name, distant):
                if error is None:
                    asked.add(replica.name)
                    yield replica, data
                else:
                    silent[replica.name] = str(error.strerror or error)
        for replica, through in self._asked_in_turn(0):
            if replica.name in asked:
                continue
            began = time.monotonic()
            try:
                data = through.get_manifest(name)
            except OSError as e:
                silent[replica.name] = str(e.strerror or e)
                continue
            self._measured(replica, 0, began)
            asked.add(replica.name)
            yield replica, data

    def _race(
        self, name: str, replicas: Sequence[Replica]
    ) -> Iterable[tuple[Replica, bytes | None, OSError | None]]:
        answers: queue.SimpleQueue[tuple[Replica, bytes | None, OSError | None]] = queue.SimpleQueue()

        def ask(replica: Replica) -> None:
            began = time.monotonic()
            hurry = hurried_us(Reach(), 0) / 1e6
            through = replica.hurried(hurry) if isinstance(replica, Remote) else replica
            try:
                data = through.get_manifest(name)
            except OSError as e:
                answers.put((replica, None, e))
                return
            except BaseException as e:
                answers.put((replica, None, OSError(str(e))))
                return
            self._measured(replica, 0, began)
            answers.put((replica, data, None))

        for replica in replicas:
            threading.Thread(target=ask, args=(replica,), name="sublet-race", daemon=True).start()
        for _ in replicas:
            yield answers.get()

    def _nowhere(self, what: str, silent: dict[str, str]) -> SubletError:
        asked = ", ".join(r.name for r in self.replicas)
        if not silent:
            return Damaged(f"{what} is on none of {asked} in good order")
        said = "; ".join(f"{name}: {why}" for name, why in sorted(silent.items()))
        others = [r.name for r in self.replicas if r.name not in silent]
        rest = f", and is on none of {', '.join(others)} in good order" if others else ""
        return Unreached(
            f"{what} could not be read{rest}; not reached: {said}",
            remedy="nothing is known to be lost: bring what was not reached back and try again; 'sublet "
            "doctor' tries each replica",
        )

    def _repair_manifest(self, replica: Replica, name: str, data: bytes, health: Health) -> None:
        try:
            replica.put_manifest(name, data)
            health.repaired.append(f"{replica.name} manifest {name[:12]}")
        except SubletError:
            health.unreachable.append(replica.name)

    def chunk(self, entry: ChunkEntry, into: memoryview, health: Health | None = None) -> None:
        """Fill `into` with the chunk's bytes, from whichever replica has them right."""
        health = health or Health()
        silent: dict[str, str] = {}
        answered: set[str] = set()
        for replica, through in self._asked_in_turn(into.nbytes):
            if replica.name in answered:
                continue
            began = time.monotonic()
            try:
                there = through.read_pack(entry.pack, entry.at, into)
            except OSError as e:
                silent[replica.name] = str(e.strerror or e)
                continue
            silent.pop(replica.name, None)
            answered.add(replica.name)
            if there and digest(into) == entry.digest:
                self._measured(replica, into.nbytes, began)
                health.unreachable += silent
                return
            health.wanting.add(entry.pack)
        health.unreachable += silent
        raise self._nowhere(f"chunk {entry.digest} (pack {entry.pack})", silent)

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
        """Give every replica every pack these manifests refer to, or those in `only`. No other manifest may
        refer to such a pack, because a rewritten one holds nothing else."""
        for pack, wanted in needed(manifests, only):
            self.repair_pack(pack, wanted, health)

    def repair_pack(self, pack: str, wanted: Sequence[ChunkEntry], health: Health) -> dict[str, str]:
        """Copy each chunk from a copy that verified. Nothing is set aside before its chunks were read,
        because bad packs may be made whole from each other. Returns what each had."""
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
        # A chunk that no replica has makes all of them bad, and no copy better than another.
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
        drafts: dict[str, PackDraft] = {}
        last = chunks[-1]

        def left_behind(replica: Replica) -> None:
            health.unreachable.append(replica.name)
            if replica.name in drafts:
                drafts.pop(replica.name).discard()

        # Aligned for direct I/O. It goes with its last view: whoever catches an error may still hold one.
        view = memoryview(mmap.mmap(-1, aligned(max(c.span.size for c in chunks), ALIGN)))
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
            pieces = [ByteSpan(c.at, c.span.size) for c in chunks]
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

    # giving one of them what it lacks

    def has_pack(self, name: str, pack: str) -> bool:
        return self._by_name[name].has_pack(pack)

    def give_manifest(self, name: str, digest_of: str, data: bytes) -> None:
        self._put_manifest(self._by_name[name], digest_of, data)

    def give_pack(self, name: str, pack: str, chunks: Sequence[ChunkEntry], health: Health) -> None:
        """Copy the whole pack from those that have it. Raises `NotDurable` unless the replica has it then."""
        replica = self._by_name[name]
        if isinstance(replica, Remote) and replica.away:
            raise NotDurable(f"{name} is away: {replica.away}")
        ordered = sorted(chunks, key=lambda c: c.at)
        self._write_anew(pack, ordered, [replica], {name: "missing"}, health)
        if not health.repaired:
            raise NotDurable(f"{name} did not take pack {pack[:12]}")

    def inspect(self, manifests: Sequence[Manifest]) -> list[tuple[str, str, str]]:
        """The state of each replica's copy of each pack these manifests need: 'good', 'missing' or 'bad'."""
        return [
            (
                replica.name,
                pack,
                verify_pack(
                    replica, pack, [c.digest for c in chunks], [ByteSpan(c.at, c.span.size) for c in chunks]
                ),
            )
            for pack, chunks in needed(manifests)
            for replica in self.replicas
        ]

    def spread_manifest(self, name: str, health: Health) -> None:
        """Give it to every replica, byte by byte. A copy that does not verify is set aside."""
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


class _Asking:
    """Asks all replicas side by side which packs they have, until every pack is decided."""

    def __init__(
        self, replicas: Sequence[Replica], packs: Collection[str], enough: Callable[[Collection[str]], bool]
    ) -> None:
        self._replicas = replicas
        self._enough = enough
        self._changed = threading.Condition()
        self._having: dict[str, list[str]] = {pack: [] for pack in packs}
        self._answers = dict.fromkeys(packs, 0)  # also of those who could not say
        self._kept: set[str] = set()
        self._open = set(packs)
        self.lacking: list[tuple[str, str]] = []

    def run(self) -> set[str]:
        # Side by side: to a bucket each is a round trip, and a state may lie in hundreds of packs.
        workers = max(1, min(ASKERS // max(1, len(self._replicas)), len(self._having)))
        for replica in self._replicas:
            left = deque(self._having)
            for _ in range(workers):
                threading.Thread(
                    target=self._ask, args=(replica, left), name="sublet-asks", daemon=True
                ).start()
        with self._changed:
            self._changed.wait_for(lambda: not self._open)
            return set(self._kept)

    def _ask(self, replica: Replica, left: deque[str]) -> None:
        while self._open:
            try:
                pack = left.popleft()
            except IndexError:
                return
            has: bool | None = None
            try:
                has = replica.has_pack(pack)
            except Exception:  # it cannot say
                has = None
            with self._changed:
                self._answers[pack] += 1
                if has:
                    self._having[pack].append(replica.name)
                    if pack in self._open and self._enough(self._having[pack]):
                        self._kept.add(pack)
                        self._open.discard(pack)
                elif has is False:
                    self.lacking.append((replica.name, pack))
                if self._answers[pack] == len(self._replicas):
                    self._open.discard(pack)
                if not self._open:
                    self._changed.notify_all()


class KnownPacks:
    """What one save found out about the packs of those before it. Each is asked about once."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._known: dict[str, bool] = {}
        self.lacking: dict[str, set[str]] = {}  # by replica: what it was found not to have

    def among(self, packs: Iterable[str]) -> set[str]:
        wanted = set(packs)
        new = wanted - self._known.keys()
        if new:
            found = self._replicas.kept(new, self.lacking)
            self._known.update((pack, pack in found) for pack in new)
        return {pack for pack in wanted if self._known[pack]}


__all__ = ["Health", "KnownPacks", "Replicas", "digest", "needed", "verify_pack"]


def needed(
    manifests: Iterable[Manifest], only: Collection[str] | None = None
) -> list[tuple[str, list[ChunkEntry]]]:
    """Every pack they refer to, or those in `only`, with what they want of it in its order."""
    by_pack: dict[str, dict[int, ChunkEntry]] = {}
    for manifest in manifests:
        for chunk in manifest.chunks:
            if only is None or chunk.pack in only:
                by_pack.setdefault(chunk.pack, {})[chunk.at] = chunk
    return [(pack, [places[at] for at in sorted(places)]) for pack, places in sorted(by_pack.items())]
