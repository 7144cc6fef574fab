"""Upkeep: what is done with checkpoints when nobody is saving: history, rollback, fork, tags, sweep, scrub,
rebuild.

Rules of this file:
- Each verb is one call; what it means is in the module of its noun.
- None needs a lease. What moves a head or drops a version is a transaction of the ledger, with whoever did it
  in the journal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sublet.core.checkpoints.checkpoint import Manifest
from sublet.core.checkpoints.retention import Retention
from sublet.core.checkpoints.versions import Versions
from sublet.core.values import DAY_US
from sublet.ports.ledger import Ledger
from sublet.ports.store import Replica
from sublet.store.replicas.quorum import Health, Replicas
from sublet.store.upkeep.lineage import Lineage, MovedHead
from sublet.store.upkeep.rebuild import Rebuild, Rebuilding
from sublet.store.upkeep.scrubbing import Scrub, Scrubbed
from sublet.store.upkeep.sweeping import Progress, Sweep, Swept, quiet


class Upkeep:
    def __init__(self, replicas: Replicas, ledger: Callable[[], Ledger]) -> None:
        self._replicas = replicas
        self._ledger = ledger
        self.health = Health()
        self.lineage = Lineage(replicas, ledger, self.health)

    @property
    def replicas(self) -> tuple[Replica, ...]:
        return self._replicas.replicas

    def versions(self, name: str) -> Versions:
        """The head, and what retention or a tag keeps."""
        return self.lineage.versions(name)

    def manifest(self, name: str, version: int | str | None = None) -> Manifest:
        return self.lineage.find(name, version).manifest

    def read_manifest(self, digest: str) -> Manifest:
        """Read a manifest by its digest, without mending a replica that lacks it."""
        return self._replicas.manifest(digest, Health(), mend=False)

    def history(self, name: str) -> Iterator[Manifest]:
        """From the head back: the chain, then what retention or a tag kept."""
        return (found.manifest for found in self.lineage.history(name))

    def rollback(self, name: str, version: int | str, *, actor: str = "operator") -> MovedHead:
        """A new version with the state of an old one; the steps after it will run again."""
        return self.lineage.rollback(name, version, actor=actor)

    def fork(
        self, name: str, new_name: str, version: int | str | None = None, *, actor: str = "operator"
    ) -> MovedHead:
        """A new job that begins with a version of this one. No bytes are copied."""
        return self.lineage.fork(name, new_name, version, actor=actor)

    def tag(self, name: str, version: int | str, tag: str, *, actor: str = "operator") -> None:
        """Keep this version under a name, which `load` takes for a version."""
        self.lineage.tag(name, version, tag, actor=actor)

    def untag(self, name: str, tag: str, *, actor: str = "operator") -> None:
        self.lineage.untag(name, tag, actor=actor)

    # keeping order

    def verify(self, name: str) -> list[tuple[str, str, str]]:
        """Look at every copy of every pack its versions need: replica, pack, and 'good', 'missing' or
        'bad'."""
        return self._replicas.inspect(list(self.history(name)))

    def sweep(
        self,
        name: str | None = None,
        *,
        keep: Retention | None = None,
        older_than_us: int = DAY_US,
        nobody_is_saving: bool = False,
        dry_run: bool = False,
        actor: str = "operator",
        progress: Progress = quiet,
    ) -> Swept:
        """Drop versions `keep` does not keep (of one name, or of all), and delete what nobody needs and is
        old enough."""
        ledger = self._ledger()
        return Sweep(self._replicas.replicas, ledger, self.lineage, actor).run(
            name=name,
            rule=keep or Retention(),
            older_than_us=older_than_us,
            nobody_is_saving=nobody_is_saving,
            dry_run=dry_run,
            progress=progress,
        )

    def scrub(
        self,
        name: str | None = None,
        *,
        repair: bool = False,
        bytes_per_second: int = 0,
        progress: Progress = quiet,
    ) -> Scrubbed:
        """Read every copy of everything that is needed, and replace what is bad if asked to."""
        return Scrub(self._replicas, self._ledger()).run(
            name=name, repair=repair, bytes_per_second=bytes_per_second, progress=progress
        )

    def rebuild(
        self,
        *,
        dry_run: bool = False,
        forward: bool = False,
        take_over: bool = False,
        heads_are_right: bool = False,
        tenant: str = "default",
        actor: str = "operator",
        progress: Progress = quiet,
    ) -> Rebuilding:
        """The heads of a lost ledger, from what is on the replicas."""
        return Rebuild(self._replicas, self._ledger(), tenant=tenant, actor=actor).run(
            dry_run=dry_run,
            forward=forward,
            seize=take_over,
            heads_are_right=heads_are_right,
            progress=progress,
        )

    def repair(self, name: str) -> Health:
        """Give every replica a good copy of everything its versions need; what was done."""
        health = Health()
        packs: set[str] = set()
        for found in self.lineage.history(name):
            self._replicas.spread_manifest(found.digest, health)
            packs.update(found.manifest.packs)
        self._replicas.repair(self.lineage.everything(), health, only=packs)
        return health
