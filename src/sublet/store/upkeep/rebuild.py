"""Rebuild: the heads of a lost ledger, read off the replicas.

Rules of this file:
- Every manifest on every replica is read and verified; what is remembered of each is small.
- The head is the newest version whose every chunk is there in good order. One that is another's parent was
  certainly committed; the newest one may have been saved and not committed, and is then said to be so.
- A head that is there is never moved back, never moved at all unless asked, and only along its own line.
- Tags were in the ledger alone, and are not rebuilt. What a replica has of older versions is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from sublet.core.checkpoints.checkpoint import MARK, Manifest, read_manifest
from sublet.core.checkpoints.versions import Adoption, KeptVersion, Versions
from sublet.core.errors import BadInput, Damaged, Misconfigured, SubletError
from sublet.core.leasing.tenancy import Tenant
from sublet.core.values import check_job, check_name
from sublet.ports.ledger import Ledger
from sublet.store.replicas.ownership import owner_of, take_over
from sublet.store.replicas.quorum import Replicas
from sublet.store.save.packing import digest
from sublet.store.upkeep.sweeping import Progress, quiet


@dataclass(frozen=True, slots=True, kw_only=True)
class _KnownManifest:
    """What is remembered of a manifest."""

    digest: str
    name: str
    tenant: str
    version: int
    step: int
    epoch: int
    parent: str
    stored_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilt:
    """What was found of one job, and what was done about it."""

    name: str
    tenant: str
    version: int  # the newest whole one; 0: none is
    step: int
    digest: str
    action: str  # 'adopted', 'forwarded', 'as it was', 'newer', 'diverged', 'tenant removed' or 'lost'
    certain: bool  # it was committed: another one names it as its parent, or the ledger knows it
    versions: tuple[int, ...] = ()  # that can be loaded now
    passed_over: tuple[int, ...] = ()  # newer ones that are not whole


@dataclass(slots=True)
class Rebuilding:
    jobs: list[Rebuilt] = field(default_factory=list)
    manifests: int = 0
    unreadable: int = 0  # manifests that did not verify anywhere
    unreachable: dict[str, str] = field(default_factory=dict)  # replicas, and what they said
    tenants: list[str] = field(default_factory=list)  # made anew, with default limits
    heads_current: bool = True


class Rebuild:
    def __init__(self, replicas: Replicas, ledger: Ledger, *, tenant: str, actor: str) -> None:
        """`tenant`: whose a job is taken to be if its manifests do not say."""
        self._replicas = replicas
        self._ledger = ledger
        self._tenant = tenant
        self._actor = actor

    def run(
        self,
        *,
        dry_run: bool,
        forward: bool,
        seize: bool = False,
        heads_are_right: bool = False,
        progress: Progress = quiet,
    ) -> Rebuilding:
        identity = self._ledger.identity()
        done = Rebuilding()
        if not seize:
            self._check_owner(identity.id, done)
        known = self._survey(done, progress)
        if done.unreachable and not dry_run:
            where = "; ".join(f"{name}: {why}" for name, why in sorted(done.unreachable.items()))
            raise Misconfigured(
                f"not every replica can be read, and what only that one has would be forgotten ({where}); "
                "nothing was changed",
                remedy="bring it back, or leave it out of SUBLET_STORE if it is lost for good",
            )
        heads = {v.head.job: v for v in self._ledger.all_versions()}
        tenants = {t.name for t in self._ledger.tenants()}
        for name in sorted({k.name for k in known.values()}):
            job, adoption = self._judge(name, known, heads.get(name), forward, progress)
            done.jobs.append(job)
            if adoption is None:
                continue
            if adoption.tenant not in tenants:
                if not self._has_name(adoption.tenant, dry_run):
                    done.jobs[-1] = replace(job, action="tenant removed")
                    continue
                tenants.add(adoption.tenant)
                done.tenants.append(adoption.tenant)
            if not dry_run:
                self._ledger.adopt(adoption, actor=self._actor)
                self._forget_swept(name, known)
        done.heads_current = heads_are_right or not any(j.action in ("newer", "diverged") for j in done.jobs)
        if not dry_run:
            if seize:
                # Last: until everything was adopted, a sweep must find the mark of the old ledger.
                for replica in self._replicas.replicas:
                    try:
                        take_over(replica, identity.id)
                    except (OSError, SubletError) as e:
                        done.unreachable[replica.name] = str(e)
            if done.heads_current and not identity.heads_current:
                self._ledger.mark_current(actor=self._actor)
        return done

    def _has_name(self, tenant: str, dry_run: bool) -> bool:
        """Make the tenant with default limits; False if one of that name was removed on purpose."""
        if not dry_run:
            try:
                self._ledger.add_tenant(Tenant(name=tenant), actor=self._actor, exist_ok=True)
            except BadInput:
                return False
        return True

    def _check_owner(self, ledger_id: str, done: Rebuilding) -> None:
        for replica in self._replicas.replicas:
            try:
                owner = owner_of(replica)
            except OSError as e:
                done.unreachable[replica.name] = e.strerror or str(e)
                continue
            if owner is not None and owner != ledger_id:
                raise Misconfigured(
                    f"{replica.name} belongs to another ledger; nothing was changed",
                    remedy="if that ledger is lost for good, say --take-over; otherwise use it, or another "
                    "replica",
                )

    def _forget_swept(self, name: str, known: dict[str, _KnownManifest]) -> None:
        """Drop versions that a backup names but a later sweep removed; otherwise nothing could ever be swept
        again."""
        versions = self._ledger.versions(name)
        gone = [k for k in versions.kept if k.digest not in known]
        for row in gone:
            if row.tag:
                versions = self._ledger.untag(name, row.tag, actor=self._actor)
        if gone:
            self._ledger.retain(
                name,
                expected_sweeps=versions.head.sweeps,
                floor=versions.head.floor,
                kept=[k for k in versions.kept if not k.tag and k.digest in known],
                actor=self._actor,
            )

    # reading

    def _survey(self, done: Rebuilding, progress: Progress) -> dict[str, _KnownManifest]:
        known: dict[str, _KnownManifest] = {}
        bad: set[str] = set()
        for replica in self._replicas.replicas:
            try:
                for name, _ in replica.manifests():
                    if name == MARK or name in known:
                        continue
                    found = self._read(replica.get_manifest(name), name)
                    if found is None:
                        bad.add(name)
                    else:
                        known[name] = found
                    progress(f"reading {replica.name}", len(known), 0)
            except OSError as e:
                done.unreachable[replica.name] = e.strerror or str(e)
        done.manifests, done.unreadable = len(known), len(bad - known.keys())
        return known

    def _read(self, data: bytes | None, name: str) -> _KnownManifest | None:
        if data is None or digest(data) != name:
            return None
        try:
            m = read_manifest(data)
            check_job(m.name)
            check_name(m.tenant or self._tenant, what="tenant")
        except (Damaged, BadInput):
            return None
        if m.version < 1:
            return None
        return _KnownManifest(
            digest=name,
            name=m.name,
            tenant=m.tenant or self._tenant,
            version=m.version,
            step=m.step,
            epoch=m.epoch,
            parent=m.parent,
            stored_bytes=m.stored_bytes,
        )

    def _whole(self, manifest: Manifest, progress: Progress) -> bool:
        buffer = memoryview(bytearray(max((c.span.size for c in manifest.chunks), default=0)))
        for number, chunk in enumerate(manifest.chunks, 1):
            try:
                self._replicas.chunk(chunk, buffer[: chunk.span.size])
            except Damaged:
                return False
            progress(f"verifying {manifest.name}", number, len(manifest.chunks))
        return True

    def _there(self, manifest: Manifest) -> bool:
        """A cheaper check for old versions: some replica has each of its packs."""

        def has(pack: str) -> bool:
            for replica in self._replicas.replicas:
                try:
                    if replica.has_pack(pack):
                        return True
                except OSError:
                    continue
            return False

        return all(has(pack) for pack in manifest.packs)

    # deciding

    def _judge(
        self,
        name: str,
        known: dict[str, _KnownManifest],
        versions: Versions | None,
        forward: bool,
        progress: Progress,
    ) -> tuple[Rebuilt, Adoption | None]:
        mine = [k for k in known.values() if k.name == name]
        parents = {k.parent for k in mine}
        head = versions.head if versions is not None else None
        if head is not None:
            mine = [k for k in mine if k.tenant == head.tenant]
        order = sorted(mine, key=lambda k: (k.version, k.digest in parents, k.epoch, k.digest), reverse=True)
        passed: list[int] = []
        tip: _KnownManifest | None = None
        for candidate in order:
            if head is not None and candidate.version <= head.version:
                break
            if self._whole(self._replicas.manifest(candidate.digest, mend=False), progress):
                tip = candidate
                break
            passed.append(candidate.version)
        if tip is None:
            return self._nothing_newer(name, versions, order, passed), None
        certain = tip.digest in parents
        chain = self._chain(tip, known)

        def told(action: str, loadable: Sequence[int] = ()) -> Rebuilt:
            return Rebuilt(
                name=name,
                tenant=tip.tenant,
                version=tip.version,
                step=tip.step,
                digest=tip.digest,
                action=action,
                certain=certain,
                versions=tuple(loadable),
                passed_over=tuple(passed),
            )

        floor = chain[-1].version
        if head is not None:
            if floor <= head.version and head.digest not in {k.digest for k in chain}:
                return told("diverged"), None
            if not forward:
                return told("newer"), None
            floor = max(floor, head.floor)
        before = {k.digest for k in versions.kept} if versions is not None else set()
        kept = self._kept([k for k in order if k.digest not in before], floor, tip.tenant)
        adoption = Adoption(
            job=name,
            tenant=tip.tenant,
            expected_version=head.version if head is not None else 0,
            version=tip.version,
            digest=tip.digest,
            step=tip.step,
            epoch=tip.epoch,
            reason="rebuild",
            floor=floor,
            kept=kept,
            new_bytes=tip.stored_bytes,
            whole_bytes=tip.stored_bytes,
        )
        loadable = [k.version for k in chain] + [k.version for k in kept]
        return told("adopted" if head is None else "forwarded", loadable), adoption

    def _nothing_newer(
        self, name: str, versions: Versions | None, order: Sequence[_KnownManifest], passed: Sequence[int]
    ) -> Rebuilt:
        if versions is None:
            tenant = order[0].tenant
            return Rebuilt(
                name=name, tenant=tenant, version=0, step=0, digest="", action="lost", certain=False,
                passed_over=tuple(passed),
            )  # fmt: skip
        head = versions.head
        return Rebuilt(
            name=name, tenant=head.tenant, version=head.version, step=head.step, digest=head.digest,
            action="as it was", certain=True, passed_over=tuple(passed),
        )  # fmt: skip

    def _chain(self, tip: _KnownManifest, known: dict[str, _KnownManifest]) -> list[_KnownManifest]:
        """The tip and what is behind it, as far as manifests are present and numbers fall."""
        chain = [tip]
        while (before := known.get(chain[-1].parent)) is not None:
            if before.name != tip.name or before.version >= chain[-1].version:
                break
            chain.append(before)
        return chain

    def _kept(self, order: Sequence[_KnownManifest], floor: int, tenant: str) -> tuple[KeptVersion, ...]:
        """Older versions that are linked to nothing any more, one of each number."""
        kept: dict[int, KeptVersion] = {}
        for k in order:  # those that were certainly committed come first
            if k.version < floor and k.tenant == tenant and k.version not in kept:
                try:
                    manifest = self._replicas.manifest(k.digest, mend=False)
                except Damaged:
                    continue
                if self._there(manifest):
                    kept[k.version] = KeptVersion(version=k.version, digest=k.digest, step=k.step)
        return tuple(kept.values())
