"""Sweep: versions that retention drops, and what nobody needs any more.

Rules of this file:
- Order: drop versions in the ledger, read every head and kept version of every job, mark what they refer to,
  delete what is unmarked and old.
- What was unmarked at an age of twice the longest save can never be needed again: names are never used twice,
  and a save refers only to packs of its parent, which is marked, or to those its process wrote lately (C5).
  It is looked for once more before it is deleted all the same.
- A manifest that does not read could refer to anything: nothing is deleted then, on any replica.
- Manifests go before packs: a sweep that dies leaves packs nobody refers to, and never a version that looks
  whole and is not.
- A replica that belongs to another ledger, or a ledger whose heads are those of a backup, is not swept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from sublet.core.checkpoints.checkpoint import LONGEST_SAVE_US, MARK
from sublet.core.checkpoints.retention import Retention, Verdict, floor_of, judge
from sublet.core.checkpoints.versions import KeptVersion, Versions
from sublet.core.errors import BadInput, Damaged, HeadMoved, Misconfigured, NotFound, SubletError
from sublet.core.values import DAY_US, format_duration
from sublet.machine.failpoints import failpoint
from sublet.ports.ledger import Ledger
from sublet.ports.store import Replica, Untidy
from sublet.store.replicas.ownership import require_own
from sublet.store.upkeep.lineage import TRIES, Lineage, is_digest

LEAST_AGE_US = 2 * LONGEST_SAVE_US
#: What did not verify is kept for whoever looks into it.
ASIDE_US = 7 * DAY_US
#: Between two looks at the heads while deleting.
LOOK_AGAIN = 64

Progress = Callable[[str, int, int], None]


def quiet(what: str, done: int, total: int) -> None:
    return


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbage:
    replica: str
    kind: str  # 'manifest', 'pack', 'drafts' or 'aside'
    name: str
    bytes: int
    age_us: int


@dataclass(slots=True)
class Swept:
    verdicts: dict[str, list[Verdict]] = field(default_factory=dict)  # by job, of the jobs retention was for
    removed: list[Garbage] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # replicas that were not swept, and why
    manifests: int = 0  # that are needed
    packs: int = 0

    @property
    def bytes(self) -> int:
        return sum(g.bytes for g in self.removed)


class Sweep:
    def __init__(self, replicas: Sequence[Replica], ledger: Ledger, lineage: Lineage, actor: str) -> None:
        self._replicas = replicas
        self._ledger = ledger
        self._lineage = lineage
        self._actor = actor
        self._walked: set[str] = set()  # manifests on a chain
        self._kept: set[str] = set()  # manifests that a row keeps
        self._packs: set[str] = set()
        self._seen: list[Versions] = []

    def run(
        self,
        *,
        name: str | None,
        rule: Retention,
        older_than_us: int,
        nobody_is_saving: bool,
        dry_run: bool,
        progress: Progress = quiet,
        least_age_us: int = LEAST_AGE_US,
    ) -> Swept:
        if older_than_us < least_age_us and not nobody_is_saving:
            raise BadInput(
                f"a save under way may refer to what is younger than {format_duration(least_age_us)}",
                remedy="sweep what is older, or say --nobody-is-saving if that is so",
            )
        identity = self._ledger.identity()
        if not identity.heads_current:
            raise Misconfigured(
                "the ledger was restored from a backup: what was saved since would be taken for garbage; "
                "nothing was deleted",
                remedy="run 'sublet checkpoint rebuild --forward' first",
            )
        swept = Swept()
        mine = []
        for replica in self._replicas:
            try:
                require_own(replica, identity.id)
                mine.append(replica)
            except (OSError, SubletError) as e:
                if isinstance(e, Misconfigured):
                    raise
                swept.skipped[replica.name] = _words(e)
        everything = self._retain(name, rule, dry_run, swept)
        if not dry_run:
            everything = self._ledger.all_versions()
        self._mark(everything, progress)
        failpoint("sweep_after_mark")
        limit, aside = older_than_us, older_than_us if nobody_is_saving else max(older_than_us, ASIDE_US)
        for replica in mine:
            try:
                garbage = list(self._garbage(replica, limit, aside))
            except OSError as e:
                swept.skipped[replica.name] = _words(e)
                continue
            self._remove(replica, garbage, dry_run, swept, progress)
        swept.manifests, swept.packs = len(self._walked | self._kept), len(self._packs)
        return swept

    # versions

    def _retain(self, name: str | None, rule: Retention, dry_run: bool, swept: Swept) -> list[Versions]:
        """What retention leaves of each job. With a `name`, only that job is thinned out."""
        everything = []
        for versions in self._ledger.all_versions():
            job = versions.head.job
            if (name is None or name == job) and (is_digest(versions.head.digest) or versions.kept):
                for left in range(TRIES - 1, -1, -1):
                    try:
                        versions, swept.verdicts[job] = self._thin_out(versions, rule, dry_run)
                        break
                    except HeadMoved:
                        if not left:
                            raise
                        versions = self._ledger.versions(job)
            everything.append(versions)
        if name is not None and name not in swept.verdicts:
            raise NotFound(f"nothing was saved as {name}", remedy="'sublet checkpoint ls' lists what was")
        return everything

    def _thin_out(self, versions: Versions, rule: Retention, dry_run: bool) -> tuple[Versions, list[Verdict]]:
        head = versions.head
        try:
            chain = {
                m.version: KeptVersion(version=m.version, digest=d, step=m.step)
                for d, m in self._lineage.chain(versions)
            }
        except Damaged as e:
            now = self._ledger.versions(head.job).head
            if now.sweeps != head.sweeps:
                raise HeadMoved("another sweep dropped it", version=now.version) from e
            raise Damaged(f"{head.job}: {e.message}; no version was dropped and nothing was deleted") from e
        loose = {k.version: replace(k, tag="") for k in versions.kept}
        tags: dict[int, list[str]] = {}
        for row in versions.kept:
            if row.tag:
                tags.setdefault(row.version, []).append(row.tag)
        verdicts = judge(chain.keys() | loose.keys(), tags, rule)
        keep = {v.version for v in verdicts if v.keep}
        floor = max(floor_of(chain, keep), head.floor)
        untagged = {k.version for k in versions.kept if not k.tag}
        # What a rule keeps stays when its tag goes; what only a tag keeps does not.
        ruled = (
            untagged
            if rule.keeps_all
            else {v.version for v in judge(chain.keys() | loose.keys(), {}, rule) if v.keep}
        )
        survivors = [
            row
            for version, row in sorted({**loose, **chain}.items())
            if version in keep and version < floor and (version in ruled or version not in tags)
        ]
        if floor == max(head.floor, min(chain, default=0)) and {k.version for k in survivors} == untagged:
            return versions, verdicts  # nothing to drop
        if dry_run:
            tagged = tuple(k for k in versions.kept if k.tag)
            return Versions(head=replace(head, floor=floor), kept=(*tagged, *survivors)), verdicts
        done = self._ledger.retain(
            head.job, expected_sweeps=head.sweeps, floor=floor, kept=survivors, actor=self._actor
        )
        return done, verdicts

    # marking

    def _mark(self, everything: Iterable[Versions], progress: Progress = quiet) -> None:
        self._seen = list(everything)
        for left in range(TRIES - 1, -1, -1):
            try:
                for count, (job, _, manifest) in enumerate(
                    self._lineage.reachable(self._seen, self._walked, self._kept), 1
                ):
                    self._packs.update(manifest.packs)
                    progress(f"marking {job}", count, 0)
                return
            except Damaged:
                # Another sweep may have dropped and deleted it since we read the heads; nothing else may.
                now = self._ledger.all_versions()
                if not left or _drops(now) == _drops(self._seen):
                    raise
                self._seen = now

    def _needed(self, kind: str, name: str) -> bool:
        if kind == "manifest":
            return name == MARK or name in self._walked or name in self._kept
        return kind == "pack" and name in self._packs

    def _look_again(self) -> None:
        """Mark what was saved, forked or rolled back since. It should refer to nothing unmarked; if it does,
        that is kept."""
        now = self._ledger.all_versions()
        if now != self._seen:
            self._mark(now)

    # deleting

    def _garbage(self, replica: Replica, limit_us: int, aside_us: int) -> Iterator[Garbage]:
        def found(kind: str, name: str, age: float, size: int, limit: int) -> Iterator[Garbage]:
            if age * 1e6 >= limit and not self._needed(kind, name):
                yield Garbage(replica=replica.name, kind=kind, name=name, bytes=size, age_us=int(age * 1e6))

        for name, age in replica.manifests():
            yield from found("manifest", name, age, 0, limit_us)
        for name, age, size in replica.packs():
            yield from found("pack", name, age, size, limit_us)
        if isinstance(replica, Untidy):
            for kind, name, age, size in replica.leftovers():
                yield from found(kind, name, age, size, aside_us if kind == "aside" else limit_us)

    def _remove(
        self,
        replica: Replica,
        garbage: Sequence[Garbage],
        dry_run: bool,
        swept: Swept,
        progress: Progress,
    ) -> None:
        for number, item in enumerate(garbage):
            if not dry_run:
                if number % LOOK_AGAIN == 0:
                    self._look_again()
                    failpoint("sweep_before_delete")
                if self._needed(item.kind, item.name):
                    continue
                try:
                    replica.remove(item.kind, item.name)
                except (OSError, SubletError) as e:
                    swept.skipped[replica.name] = _words(e)
                    return
                failpoint("sweep_between_deletes")
            swept.removed.append(item)
            progress(f"sweeping {replica.name}", number + 1, len(garbage))


def _drops(everything: Iterable[Versions]) -> dict[str, int]:
    return {v.head.job: v.head.sweeps for v in everything}


def _words(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error)
