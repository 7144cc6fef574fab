"""Proving from the ledger alone that a job's steps and effects were committed once each (S1-S4, S7).

Rules of this file:
- It knows nothing of how a commit is made. The journal tells a story, and the rows of heads, effects and
  leases must be exactly what that story ends with. Each difference is named: which row, which rule, what is
  wrong.
- Journal rows come in stored order and effects in the order of their versions, one at a time: memory grows
  with the leases, jobs and reservations that are open, not with the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from sublet.core.checkpoints.versions import REASONS, KeptVersion
from sublet.core.journal.chain import Chain, Entry, StrandEnd, job_strand
from sublet.core.journal.replay import (
    Flaw,
    FlawList,
    JournalReplay,
    LeaseRow,
    ReadAhead,
    RowBody,
    UnreadableRow,
    chain_flaws,
    differences,
    row_name,
)
from sublet.core.progress.effect import Effect, Head, said

#: Columns an audit cannot check, each with the reason. They say what was asked for, or what the schedule
#: looks at; no commit rests on them.
UNPROVEN: dict[str, dict[str, str]] = {
    "lease": {
        "job": "what the request called its work; a commit names its job itself",
        "asked_bytes": "what was asked for; what was granted is in the slices",
        "least_bytes": "what was asked for",
        "wants_offers": "what was asked for",
        "wait_us": "what was asked for",
        "only_host": "what was asked for",
        "hold_cap_us": "bounds later renewals; those that happened are in the journal",
        "host": "where the holder said it runs, for the warden",
        "pid": "which process the warden watches",
        "pid_started": "which process the warden watches",
        "secret_hash": "no secret is ever journalled, not even as a hash",
        "joined_at": "when it began to wait; no right follows from it",
        "busy": "the holder's last word on being at work",
        "active_at": "when work was last seen",
        "preemptions": "for choosing victims",
        "claimed": "for the schedule",
        "seen_at": "a waiter's sign of life",
        "wait_until": "for the schedule",
        "offer_until": "for the schedule",
    },
    "head": {"stored_bytes": "what a quota of storage counts, for commits to come"},
    "journal": {"id": "only the order counts, and a changed order is named"},
    "kept_version": {"at": "for listings"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What the ledger shows of one job. Proven when there is no flaw."""

    job: str
    tenant: str = ""
    version: int = 0
    digest: str = ""
    first: int = 0  # the first step of its own
    step: int = 0  # the last
    commits: int = 0  # that count
    undone: int = 0  # commits that a rollback took back
    moves: int = 0  # rollbacks, a fork, an import, a rebuild
    effects: int = 0  # of the user's own
    reserved: int = 0  # begun and not committed
    leases: int = 0
    epochs: tuple[int, int] = (0, 0)
    began_at: int = 0
    committed_at: int = 0
    rows: int = 0  # of its strand
    flaws: tuple[Flaw, ...] = ()

    @property
    def proven(self) -> bool:
        return not self.flaws


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRow:
    head: Head
    end: StrandEnd
    anchor: str


# --- what the journal tells ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Reservation:
    lease: str
    epoch: int
    fingerprint: str


@dataclass(slots=True)
class _Story:
    """One job, as the journal has told it so far."""

    job: str
    tenant: str = ""
    anchor: str = ""
    chain: Chain | None = None
    flaws: FlawList = field(default_factory=FlawList)
    version: int = 0
    step: int = 0
    digest: str = ""
    cursor: str = ""  # what `said` makes of it; '' when a move emptied it
    epoch: int = 0
    moved_at: int = 0
    floor: int = 0
    sweeps: int = 0
    began: int = 0
    began_at: int = 0
    rows: int = 0
    commits: int = 0
    undone: int = 0
    moves: int = 0
    effects: int = 0
    epochs: tuple[int, int] = (0, 0)
    leases: set[str] = field(default_factory=set)
    kept: dict[tuple[int, str], tuple[str, int]] = field(default_factory=dict)
    #: Row of the strand, and the version after which it forgot what was committed.
    forgets: list[tuple[int, int]] = field(default_factory=list)
    reserved: dict[str, _Reservation] = field(default_factory=dict)
    may_be_gone: set[str] = field(default_factory=set)  # reservations that a rollback may have dropped

    def survives(self, seq: int, version: int) -> bool:
        return not any(seq < at and version > after for at, after in self.forgets)


class StepAudit:
    """Takes every journal row, then a job's effects, head and leases; then gives the proof."""

    def __init__(self, *, gone_before: int = 0) -> None:
        """Rows of leases that were over before `gone_before` may have been pruned."""
        visits = {"effect.reserved": self._reserved, "job.started": self._started}
        self._replay = JournalReplay(visits, gone_before=gone_before)
        self._stories: dict[str, _Story] = {}

    @property
    def jobs(self) -> list[str]:
        """The jobs that committed something, or moved their head."""
        return sorted(job for job, story in self._stories.items() if story.anchor or story.rows)

    # the journal

    def see(self, entry: Entry) -> None:
        body = RowBody(entry)
        self._replay.see(entry, body)
        if entry.strand.startswith("job:"):
            self._see_job(entry, body)

    def end_main(self, end: StrandEnd) -> None:
        self._replay.end_main(end)

    def _story(self, job: str) -> _Story:
        return self._stories.setdefault(job, _Story(job))

    def _reserved(self, entry: Entry, body: RowBody) -> None:
        found = _Reservation(body.text("lease"), body.number("epoch"), body.text("fingerprint"))
        story = self._story(body.text("job"))
        if any(self._replay.unfenced(found.lease, found.epoch, entry.at)):
            what = f"effect {entry.subject} was reserved by lease {found.lease}, which was not held then"
            story.flaws.blame(row_name(entry), "S2", what)
        story.reserved[entry.subject] = found
        story.may_be_gone.discard(entry.subject)

    def _started(self, entry: Entry, body: RowBody) -> None:
        story = self._story(entry.subject)
        if story.anchor:
            story.flaws.blame(row_name(entry), "S7", "the job was started twice")
        story.anchor, story.tenant = entry.hash, entry.tenant
        story.chain = Chain(job_strand(entry.subject), entry.hash)
        story.began_at = entry.at

    # a job's strand

    def _see_job(self, entry: Entry, body: RowBody) -> None:
        story = self._story(entry.strand.removeprefix("job:"))
        if story.chain is None:
            story.flaws.blame(
                row_name(entry), "S7", "no row of the main strand says that this job was started"
            )
            story.chain = Chain(entry.strand, "")
        story.flaws.add(chain_flaws(story.chain.add(entry)))
        story.rows += 1
        if entry.tenant != story.tenant:
            story.flaws.blame(
                row_name(entry), "T1", f"it is of tenant {entry.tenant}, the job of {story.tenant}"
            )
        try:
            self._tell(story, entry, body)
        except UnreadableRow as e:
            story.flaws.blame(row_name(entry), "S7", str(e))

    def _tell(self, story: _Story, entry: Entry, body: RowBody) -> None:
        if entry.kind == "step.committed":
            self._committed(story, entry, body)
        elif entry.kind == "head.adopted":
            _adopted(story, entry, body)
        elif entry.kind == "versions.retained":
            floor = body.number("floor")
            if not story.floor <= floor <= story.version:
                story.flaws.blame(row_name(entry), "C5", f"the floor moved from {story.floor} to {floor}")
            story.floor, story.sweeps = floor, story.sweeps + 1
            story.kept = {at: row for at, row in story.kept.items() if at[1]} | _kept(body)
        elif entry.kind == "version.tagged":
            tag = body.text("tag")
            before = [at for at in story.kept if at[1] == tag]
            for at in before:
                del story.kept[at]
            story.sweeps += bool(before)
            story.kept[(body.number("version"), tag)] = (body.text("digest"), body.number("step"))
        elif entry.kind == "version.untagged":
            story.kept = {at: row for at, row in story.kept.items() if at[1] != body.text("tag")}
            story.sweeps += 1
        else:
            story.flaws.blame(
                row_name(entry), "S7", f"a job's strand has no rows of the kind {entry.kind[:40]!r}"
            )

    def _committed(self, story: _Story, entry: Entry, body: RowBody) -> None:
        row = row_name(entry)
        told = JournalCommit.of(entry, body)
        if told.version != story.version + 1:
            story.flaws.blame(
                row, "S3", f"version {told.version} was committed after version {story.version}"
            )
        begins = story.step + 1
        if told.first != begins and story.version:
            what = "were left out" if told.first > begins else "were committed before"
            story.flaws.blame(
                row, "S3", f"steps {min(told.first, begins)} to {max(told.first, begins) - 1} {what}"
            )
        if not 1 <= told.first <= told.step:
            story.flaws.blame(row, "S3", f"steps {told.first} to {told.step} are not a span")
        if told.epoch < story.epoch:
            story.flaws.blame(row, "S2", f"epoch {told.epoch} committed after epoch {story.epoch}")
        story.leases.add(told.lease)
        for rule, what in self._replay.unfenced(told.lease, told.epoch, entry.at, story.tenant):
            story.flaws.blame(row, rule, what)
        if not story.version:
            story.began = told.first
        story.version, story.step, story.digest = told.version, told.step, told.digest
        story.cursor, story.epoch, story.moved_at = told.cursor, max(story.epoch, told.epoch), entry.at
        least, most = story.epochs
        story.epochs = (min(least or told.epoch, told.epoch), max(most, told.epoch))
        for key in told.effects:
            story.reserved.pop(key, None)
            story.may_be_gone.discard(key)

    # the rows

    def match(
        self, job: str, entries: Iterable[Entry], effects: Iterable[Effect], open_effects: Iterable[Effect]
    ) -> None:
        """Compare the job's strand with its completed effects, by version and key, and its open ones (S1,
        S4)."""
        story = self._story(job)
        pending = ReadAhead(effects, lambda effect: effect.version)
        for entry in entries:
            if entry.kind != "step.committed":
                continue
            try:
                told = JournalCommit.of(entry, RowBody(entry))
            except UnreadableRow:
                continue  # named already
            for stray in pending.before(told.version):
                story.flaws.blame(
                    _effect_row(stray), "S1", f"no commit made version {stray.version} of it true"
                )
            if not story.survives(entry.seq, told.version):
                story.undone += 1
                continue
            story.commits += 1
            story.effects += len(told.effects) - 1
            found = {effect.key: effect for effect in pending.of(told.version)}
            for key, spoken in told.effects.items():
                story.flaws.add(_compare_effect(job, told, key, spoken, found.pop(key, None)))
            for stray in found.values():
                story.flaws.blame(_effect_row(stray), "S4", f"commit {entry.subject} does not name it")
        for stray in pending.before(None):
            story.flaws.blame(_effect_row(stray), "S1", f"no commit made version {stray.version} of it true")
        self._match_open(story, open_effects)

    def _match_open(self, story: _Story, effects: Iterable[Effect]) -> None:
        missing = dict(story.reserved)
        for effect in effects:
            reserved = missing.pop(effect.key, None)
            if reserved is None:
                story.flaws.blame(_effect_row(effect), "S4", "nobody reserved it, or it was committed")
                continue
            was = (
                effect.owner,
                effect.epoch,
                effect.fingerprint,
                effect.completed,
                effect.outcome,
                effect.version,
            )
            if was != (reserved.lease, reserved.epoch, reserved.fingerprint, False, "", 0):
                story.flaws.blame(_effect_row(effect), "S4", "it is not as it was reserved")
        for key in sorted(set(missing) - story.may_be_gone):
            story.flaws.blame(f"effect {key}", "S1", "it was reserved, and its row is missing")

    def wants_leases(self, job: str) -> list[str]:
        """The leases whose rows the proof rests on."""
        story = self._story(job)
        return sorted(story.leases | {r.lease for r in story.reserved.values()})

    def prove(
        self, job: str, head: HeadRow | None, kept: Sequence[KeptVersion], leases: Sequence[LeaseRow]
    ) -> Proof:
        story = self._story(job)
        flaws = [*self._replay.main_flaws.kept, *story.flaws.kept]
        flaws += self._replay.match_leases(self.wants_leases(job), leases)
        flaws += _compare_head(story, head)
        flaws += _compare_kept(story, kept)
        return Proof(
            job=job,
            tenant=story.tenant,
            version=story.version,
            digest=story.digest,
            first=story.began,
            step=story.step,
            commits=story.commits,
            undone=story.undone,
            moves=story.moves,
            effects=story.effects,
            reserved=len(story.reserved),
            leases=len(story.leases),
            epochs=story.epochs,
            began_at=story.began_at,
            committed_at=story.moved_at,
            rows=story.rows,
            flaws=tuple(flaws),
        )


def _adopted(story: _Story, entry: Entry, body: RowBody) -> None:
    row = row_name(entry)
    reason, before, version = body.text("reason"), body.number("before"), body.number("version")
    if reason not in REASONS:
        story.flaws.blame(row, "S3", f"a head does not move by {reason[:40]!r}")
    if before != story.version or version <= before:
        story.flaws.blame(
            row, "S3", f"the head moved from version {before} to {version}; it was at {story.version}"
        )
    forget_after = body.get("forget_after")
    if type(forget_after) is int:
        story.forgets.append((entry.seq, forget_after))
        story.may_be_gone.update(story.reserved)
    elif reason == "rollback":
        raise UnreadableRow("it does not say what it forgot, as rows of this version do")
    story.version, story.step, story.digest = version, body.number("step"), body.text("digest")
    story.cursor, story.moved_at, story.moves = "", entry.at, story.moves + 1
    story.epoch, story.floor = body.number("epoch"), body.number("floor")
    for at, kept in _kept(body).items():
        story.kept.setdefault(at, kept)
    if before == 0:
        story.began = story.step + 1


def _kept(body: RowBody) -> dict[tuple[int, str], tuple[str, int]]:
    try:
        return {(int(v), ""): (str(d), int(s)) for v, d, s in body.get("kept")}
    except (TypeError, ValueError):
        raise UnreadableRow("it does not say what it kept, as rows of this version do") from None


@dataclass(frozen=True, slots=True)
class JournalCommit:
    """What a row of the journal says was committed."""

    version: int
    first: int
    step: int
    digest: str
    cursor: str
    lease: str
    epoch: int
    effects: dict[str, str]  # key to what it said, the commit's own included

    @classmethod
    def of(cls, entry: Entry, body: RowBody) -> JournalCommit:
        joined = body.get("effects") or {}
        if not isinstance(joined, dict):
            raise UnreadableRow("its effects cannot be read")
        return cls(
            version=body.number("version"),
            first=body.number("first"),
            step=body.number("step"),
            digest=body.text("digest"),
            cursor=body.text("cursor"),
            lease=body.text("lease"),
            epoch=body.number("epoch"),
            effects={entry.subject: body.text("said"), **joined},
        )


# --- comparing rows -----------------------------------------------------------------------------------------


def _effect_row(effect: Effect) -> str:
    return f"effect {effect.key}"


def _compare_effect(
    job: str, told: JournalCommit, key: str, spoken: str, effect: Effect | None
) -> Iterator[Flaw]:
    row = f"effect {key}"
    if effect is None:
        yield Flaw(
            row,
            "S1",
            f"version {told.version} was committed with it, and it is missing or of another version",
        )
        return
    yield from differences(
        row,
        "S4",
        [("owner", effect.owner, told.lease), ("epoch", effect.epoch, told.epoch), ("job", effect.job, job)],
    )
    if said(effect.fingerprint, effect.outcome) != spoken:
        yield Flaw(row, "S4", "its fingerprint or outcome is not the one that was committed")


def _compare_head(story: _Story, row: HeadRow | None) -> Iterator[Flaw]:
    name = f"head {story.job}"
    if row is None:
        if story.anchor or story.rows:
            yield Flaw(name, "S1", "the job was started, and its head is missing")
        return
    head = row.head
    if not story.anchor:
        yield Flaw(name, "S7", "no row of the main strand says that this job was started")
    pairs: list[tuple[str, object, object]] = [
        ("tenant", head.tenant, story.tenant),
        ("version", head.version, story.version),
        ("step", head.step, story.step),
        ("digest", head.digest, story.digest),
        ("epoch", head.epoch, story.epoch),
        ("committed_at", head.committed_at, story.moved_at),
        ("floor", head.floor, story.floor),
        ("sweeps", head.sweeps, story.sweeps),
        ("strand_anchor", row.anchor, story.anchor),
    ]
    yield from differences(name, "S1", pairs)
    if (said("", head.cursor) if head.cursor or story.cursor else "") != story.cursor:
        yield Flaw(name, "S1", "its cursor is not the one that was committed")
    if story.chain is not None:
        for fault in story.chain.close(row.end):
            yield Flaw(name, "S7", fault.what)


def _compare_kept(story: _Story, kept: Sequence[KeptVersion]) -> Iterator[Flaw]:
    found = {(k.version, k.tag): (k.digest, k.step) for k in kept}
    for at in sorted(found.keys() | story.kept.keys()):
        name = f"kept version {at[0]} of {story.job}" + (f" as {at[1]}" if at[1] else "")
        if found.get(at) != story.kept.get(at):
            if at not in found:
                yield Flaw(name, "C5", "it was kept, and its row is missing")
            else:
                yield Flaw(name, "C5", "nothing in the journal kept it like this")
