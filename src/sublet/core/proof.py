"""Proving from the ledger alone that a job's steps and effects were committed once each (S1-S4, S7).

Rules of this file:
- It knows nothing of how a commit is made. The journal tells a story; the rows of heads, effects and leases must be what that story ends
  with, no more and no less. Whatever differs is named: which row, which rule, what is wrong.
- Journal rows come in stored order and effects in the order of their versions, one at a time: memory grows with the leases, jobs and
  reservations that are open, not with the rows.
- A row that cannot be read proves nothing, and is a flaw of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sublet.core.effect import Effect, Head, said
from sublet.core.journal import GENESIS, MAIN, Chain, Entry, Fault, StrandEnd, job_strand, lease_strand
from sublet.core.lease import Lease
from sublet.core.versions import REASONS, Kept

#: Columns an audit cannot check, each with the reason. They say what was asked for, or what the schedule looks at; no commit rests on them.
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


@dataclass(frozen=True, slots=True)
class Flaw:
    """One thing that keeps a job from being proven."""

    row: str
    rule: str
    what: str

    @property
    def remedy(self) -> str:
        return _REMEDIES.get(self.row.split(" ", 1)[0], _REMEDIES["journal"])


_REMEDIES = {
    "journal": "the history itself was changed: keep this ledger as evidence and put a backup back ('sublet migrate --restore')",
    "head": "the journal says where the job stands: put a backup back, or roll back to a version you trust ('sublet checkpoint rollback')",
    "effect": "do not rely on this effect's outcome: put a backup back ('sublet migrate --restore')",
    "lease": "the row was changed outside sublet: put a backup back ('sublet migrate --restore')",
    "kept": "tag the version again, or put a backup back ('sublet migrate --restore')",
    "queue": "the journal says what was done with its items: put a backup back ('sublet migrate --restore')",
    "clerk": "the row was changed outside sublet: put a backup back ('sublet migrate --restore')",
    "item": "do not rely on this item's result: put a backup back ('sublet migrate --restore')",
    "checkpoint": "look at its copies with 'sublet checkpoint verify', then 'sublet checkpoint repair'",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRow:
    """A lease's row; None when nothing can be made of it."""

    id: str
    lease: Lease | None
    end: StrandEnd
    anchor: str


# --- what the journal tells ----------------------------------------------------------------------------------


class Unreadable(ValueError):
    """Why a row of the journal proves nothing."""


class Body:
    """A row's body, whose fields are what they should be or the row is unreadable."""

    def __init__(self, entry: Entry) -> None:
        try:
            found = json.loads(entry.body)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise Unreadable("its body cannot be read")
        self._fields: dict[str, Any] = found

    def number(self, name: str) -> int:
        value = self._fields.get(name)
        if type(value) is not int:
            raise Unreadable(f"it does not say its {name}, as rows of this version do")
        return value

    def text(self, name: str) -> str:
        value = self._fields.get(name)
        if type(value) is not str:
            raise Unreadable(f"it does not say its {name}, as rows of this version do")
        return value

    def kept(self) -> dict[tuple[int, str], tuple[str, int]]:
        try:
            return {(int(v), ""): (str(d), int(s)) for v, d, s in self._fields["kept"]}
        except (KeyError, TypeError, ValueError):
            raise Unreadable("it does not say what it kept, as rows of this version do") from None

    def get(self, name: str) -> Any:
        return self._fields.get(name)


@dataclass(slots=True)
class _Held:
    """One lease, as told so far."""

    chain: Chain
    anchor: str
    tenant: str
    epoch: int
    granted_at: int
    expires_at: int
    ttl_us: int
    tier: str
    exclusivity: str
    slices: str
    detail: str
    seats: int = 0
    state: str = "active"
    reason: str = ""
    deadline_at: int = 0
    ended_at: int = 0
    settled_at: int = 0
    committed_at: int = 0
    used: bool = False  # a proof rests on it

    def refusal(self, at: int) -> str:
        """'' when a write counts at this moment (S2)."""
        if at < self.granted_at:
            return "before it was granted"
        if self.state == "ended":
            return f"after it ended ({self.reason})"
        if self.state == "revoking":
            return "" if at < self.deadline_at else "after its grace was over"
        return "" if at < self.expires_at else "after it expired"


@dataclass(frozen=True, slots=True)
class _Reservation:
    lease: str
    epoch: int
    fingerprint: str


@dataclass(slots=True)
class _Story:
    """One job, as told so far."""

    job: str
    tenant: str = ""
    anchor: str = ""
    chain: Chain | None = None
    flaws: list[Flaw] = field(default_factory=list)
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

    def blame(self, row: str, rule: str, what: str) -> None:
        self.flaws.append(Flaw(row, rule, what))

    def survives(self, seq: int, version: int) -> bool:
        return not any(seq < at and version > after for at, after in self.forgets)


def _row(entry: Entry) -> str:
    return f"journal {entry.strand} #{entry.seq}"


class Replay:
    """Give it every journal row, then the effects, heads and leases; then ask for the proof."""

    def __init__(self, *, gone_before: int = 0) -> None:
        """`gone_before`: rows of leases that were over before it may have been pruned."""
        self._gone_before = gone_before
        self._main = Chain(MAIN, GENESIS)
        self._main_flaws: list[Flaw] = []
        self._leases: dict[str, _Held] = {}
        self._lease_flaws: dict[str, list[Flaw]] = {}
        self._stories: dict[str, _Story] = {}
        self._epoch = 0
        self._told = {
            "lease.granted": self._granted,
            "lease.renewed": self._renewed,
            "lease.revoked": self._revoked,
            "lease.ended": self._ended,
            "lease.settled": self._settled,
            "effect.reserved": self._reserved,
            "job.started": self._started,
            "items.completed": self._items_completed,
        }

    @property
    def main_flaws(self) -> list[Flaw]:
        """Of the main strand, on which every proof rests."""
        return self._main_flaws

    @property
    def jobs(self) -> list[str]:
        """That committed something, or moved their head."""
        return sorted(job for job, story in self._stories.items() if story.anchor or story.rows)

    # the journal

    def see(self, entry: Entry) -> None:
        if entry.strand.startswith("job:"):
            self._see_job(entry)
            return
        if entry.strand == MAIN:
            self._main_flaws += chained(self._main.add(entry))
        elif entry.strand.startswith("lease:"):
            lease = entry.strand.removeprefix("lease:")
            held = self._leases.get(lease)
            if held is None:
                self._blame_lease(lease, _row(entry), "S7", "its lease was never granted, or was over")
                return
            self._blame_chain(lease, held.chain.add(entry))
        tell = self._told.get(entry.kind)
        if tell is not None:
            try:
                tell(entry, Body(entry))
            except Unreadable as e:
                self._main_flaws.append(Flaw(_row(entry), "S7", str(e)))

    def end_main(self, end: StrandEnd) -> None:
        self._main_flaws += chained(self._main.close(end))

    def _story(self, job: str) -> _Story:
        return self._stories.setdefault(job, _Story(job))

    def _blame_lease(self, lease: str, row: str, rule: str, what: str) -> None:
        self._lease_flaws.setdefault(lease, []).append(Flaw(row, rule, what))

    def _blame_chain(self, lease: str, faults: Iterable[Fault]) -> None:
        for flaw in chained(faults):
            self._lease_flaws.setdefault(lease, []).append(flaw)

    def _granted(self, entry: Entry, body: Body) -> None:
        epoch = body.number("epoch")
        if epoch <= self._epoch:
            what = f"epoch {epoch} was granted after epoch {self._epoch}"
            self._main_flaws.append(Flaw(_row(entry), "L1", what))
        self._epoch = max(self._epoch, epoch)
        self._leases[entry.subject] = _Held(
            chain=Chain(lease_strand(entry.subject), entry.hash),
            anchor=entry.hash,
            tenant=entry.tenant,
            epoch=epoch,
            granted_at=entry.at,
            expires_at=body.number("expires_at"),
            ttl_us=body.number("ttl_us"),
            tier=body.text("tier"),
            exclusivity=body.text("exclusivity"),
            slices=body.text("slices"),
            detail=body.text("reason"),
            seats=body.number("seats") if body.get("seats") is not None else 0,
        )

    def _renewed(self, entry: Entry, body: Body) -> None:
        held = self._leases.get(entry.subject)
        if held is None:
            return
        refusal = held.refusal(entry.at)
        if refusal or held.state != "active" or body.number("epoch") != held.epoch:
            why = refusal or "while it was being revoked, or by another epoch"
            self._blame_lease(entry.subject, _row(entry), "L3", f"renewed {why}")
        held.expires_at = body.number("expires_at")

    def _revoked(self, entry: Entry, body: Body) -> None:
        held = self._leases.get(entry.subject)
        if held is not None:
            held.state, held.deadline_at = "revoking", body.number("deadline_at")
            held.reason, held.detail = body.text("reason"), body.text("detail")

    def _ended(self, entry: Entry, body: Body) -> None:
        held = self._leases.get(entry.subject)
        if held is None:
            return  # it only ever waited
        held.state, held.reason, held.detail = "ended", body.text("reason"), body.text("detail")
        held.ended_at = held.granted_at + body.number("gpu_us") // max(1, len(held.slices.split(";")))
        held.settled_at = entry.at if body.get("settled") else 0
        pledge = StrandEnd(body.number("strand_seq"), body.text("strand_hash"))
        self._blame_chain(entry.subject, held.chain.close(pledge))
        self._forget(entry.subject, held)

    def _settled(self, entry: Entry, body: Body) -> None:
        held = self._leases.get(entry.subject)
        if held is not None:
            held.settled_at = entry.at
            self._forget(entry.subject, held)

    def _forget(self, lease: str, held: _Held) -> None:
        """A lease that is over and did nothing a proof rests on needs no more room."""
        if held.settled_at and not held.used:
            del self._leases[lease]

    def _reserved(self, entry: Entry, body: Body) -> None:
        found = _Reservation(body.text("lease"), body.number("epoch"), body.text("fingerprint"))
        story = self._story(body.text("job"))
        held = self._leases.get(found.lease)
        if held is not None:
            held.used = True
        if held is None or held.epoch != found.epoch or held.refusal(entry.at):
            what = f"effect {entry.subject} was reserved by lease {found.lease}, which was not held then"
            story.blame(_row(entry), "S2", what)
        story.reserved[entry.subject] = found
        story.may_be_gone.discard(entry.subject)

    def _started(self, entry: Entry, body: Body) -> None:
        story = self._story(entry.subject)
        if story.anchor:
            story.blame(_row(entry), "S7", "the job was started twice")
        story.anchor, story.tenant = entry.hash, entry.tenant
        story.chain = Chain(job_strand(entry.subject), entry.hash)
        story.began_at = entry.at

    def _items_completed(self, entry: Entry, body: Body) -> None:
        held = self._leases.get(str(body.get("lease") or ""))
        if held is not None:
            held.used = True
            held.committed_at = max(held.committed_at, entry.at)

    # a job's strand

    def _see_job(self, entry: Entry) -> None:
        story = self._story(entry.strand.removeprefix("job:"))
        if story.chain is None:
            story.blame(_row(entry), "S7", "no row of the main strand says that this job was started")
            story.chain = Chain(entry.strand, "")
        story.flaws += chained(story.chain.add(entry))
        story.rows += 1
        if entry.tenant != story.tenant:
            story.blame(_row(entry), "T1", f"it is of tenant {entry.tenant}, the job of {story.tenant}")
        try:
            self._tell(story, entry, Body(entry))
        except Unreadable as e:
            story.blame(_row(entry), "S7", str(e))

    def _tell(self, story: _Story, entry: Entry, body: Body) -> None:
        if entry.kind == "step.committed":
            self._committed(story, entry, body)
        elif entry.kind == "head.adopted":
            _adopted(story, entry, body)
        elif entry.kind == "versions.retained":
            floor = body.number("floor")
            if not story.floor <= floor <= story.version:
                story.blame(_row(entry), "C5", f"the floor moved from {story.floor} to {floor}")
            story.floor, story.sweeps = floor, story.sweeps + 1
            story.kept = {at: row for at, row in story.kept.items() if at[1]} | body.kept()
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
            story.blame(_row(entry), "S7", f"a job's strand has no rows of the kind {entry.kind[:40]!r}")

    def _committed(self, story: _Story, entry: Entry, body: Body) -> None:
        row = _row(entry)
        told = Commitment.of(entry)
        if told.version != story.version + 1:
            story.blame(row, "S3", f"version {told.version} was committed after version {story.version}")
        begins = story.step + 1
        if told.first != begins and story.version:
            what = "were left out" if told.first > begins else "were committed before"
            story.blame(row, "S3", f"steps {min(told.first, begins)} to {max(told.first, begins) - 1} {what}")
        if not 1 <= told.first <= told.step:
            story.blame(row, "S3", f"steps {told.first} to {told.step} are not a span")
        if told.epoch < story.epoch:
            story.blame(row, "S2", f"epoch {told.epoch} committed after epoch {story.epoch}")
        self._fenced(story, entry, told)
        if not story.version:
            story.began = told.first
        story.version, story.step, story.digest = told.version, told.step, told.digest
        story.cursor, story.epoch, story.moved_at = told.cursor, max(story.epoch, told.epoch), entry.at
        least, most = story.epochs
        story.epochs = (min(least or told.epoch, told.epoch), max(most, told.epoch))
        for key in told.effects:
            story.reserved.pop(key, None)
            story.may_be_gone.discard(key)

    def _fenced(self, story: _Story, entry: Entry, told: Commitment) -> None:
        story.leases.add(told.lease)
        for rule, what in self.unfenced(told.lease, told.epoch, entry.at):
            story.blame(_row(entry), rule, what)
        held = self._leases.get(told.lease)
        if held is None:
            return
        if held.tenant != story.tenant:
            story.blame(_row(entry), "T1", f"lease {told.lease} is of tenant {held.tenant}")
        held.used = True
        held.committed_at = max(held.committed_at, entry.at)

    def unfenced(self, lease: str, epoch: int, at: int) -> Iterator[tuple[str, str]]:
        """Which rule a write under this lease broke at this moment, and how (S2). Asked when the journal has come to it."""
        held = self._leases.get(lease)
        if held is None:
            yield "S2", f"lease {lease}, which committed it, was never granted, or was over"
            return
        if held.epoch != epoch:
            yield "S2", f"epoch {epoch} committed under lease {lease}, whose epoch is {held.epoch}"
        refusal = held.refusal(at)
        if refusal:
            yield "S2", f"committed under lease {lease} {refusal}"

    # the rows

    def match(
        self, job: str, entries: Iterable[Entry], effects: Iterable[Effect], open_effects: Iterable[Effect]
    ) -> None:
        """The job's strand once more, its completed effects by version and key, and those that are only reserved (S1, S4)."""
        story = self._story(job)
        pending = _Ahead(effects)
        for entry in entries:
            if entry.kind != "step.committed":
                continue
            try:
                told = Commitment.of(entry)
            except Unreadable:
                continue  # named already
            for stray in pending.before(told.version):
                story.blame(_effect_row(stray), "S1", f"no commit made version {stray.version} of it true")
            if not story.survives(entry.seq, told.version):
                story.undone += 1
                continue
            story.commits += 1
            story.effects += len(told.effects) - 1
            found = {effect.key: effect for effect in pending.of(told.version)}
            for key, spoken in told.effects.items():
                story.flaws += _compare_effect(job, told, key, spoken, found.pop(key, None))
            for stray in found.values():
                story.blame(_effect_row(stray), "S4", f"commit {entry.subject} does not name it")
        for stray in pending.rest():
            story.blame(_effect_row(stray), "S1", f"no commit made version {stray.version} of it true")
        self._match_open(story, open_effects)

    def _match_open(self, story: _Story, effects: Iterable[Effect]) -> None:
        missing = dict(story.reserved)
        for effect in effects:
            reserved = missing.pop(effect.key, None)
            if reserved is None:
                story.blame(_effect_row(effect), "S4", "nobody reserved it, or it was committed")
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
                story.blame(_effect_row(effect), "S4", "it is not as it was reserved")
        for key in sorted(set(missing) - story.may_be_gone):
            story.blame(f"effect {key}", "S1", "it was reserved, and its row is missing")

    def wants_leases(self, job: str) -> list[str]:
        """The leases whose rows the proof rests on."""
        story = self._story(job)
        return sorted(story.leases | {r.lease for r in story.reserved.values()})

    def prove(
        self, job: str, head: HeadRow | None, kept: Sequence[Kept], leases: Sequence[LeaseRow]
    ) -> Proof:
        story = self._story(job)
        flaws = [*self._main_flaws, *story.flaws, *self.match_leases(self.wants_leases(job), leases)]
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

    def match_leases(self, wanted: Iterable[str], rows: Sequence[LeaseRow]) -> Iterator[Flaw]:
        """These leases' rows, and what their strands say."""
        found = {row.id: row for row in rows}
        for lease in wanted:
            yield from self._lease_flaws.get(lease, [])
            yield from self._compare_lease(lease, found.get(lease))

    def _compare_lease(self, lease_id: str, row: LeaseRow | None) -> Iterator[Flaw]:
        name = f"lease {lease_id}"
        held = self._leases.get(lease_id)
        if held is None:
            return  # what it committed is named already
        if row is None and 0 < held.settled_at < self._gone_before:
            return  # a prune removed it; that it did is in the journal
        if row is None:
            yield Flaw(name, "A1", "it was granted, and its row is missing")
            return
        if row.lease is None:
            yield Flaw(name, "A1", "its row holds a value that no lease has")
            return
        lease = row.lease
        sizes = {s.vram_bytes for s in lease.slices}
        pairs = [
            ("tenant", lease.tenant, held.tenant),
            ("tier", lease.request.tier.value, held.tier),
            ("exclusivity", lease.request.exclusivity.value, held.exclusivity),
            ("ttl_us", lease.request.ttl_us, held.ttl_us),
            ("epoch", lease.epoch, held.epoch),
            ("slices", ";".join(f"{s.device_id}={s.vram_bytes}" for s in lease.slices), held.slices),
            ("device_count", lease.request.count, len(held.slices.split(";"))),
            ("vram_bytes", lease.vram_bytes, min(sizes, key=lambda n: n != lease.vram_bytes, default=0)),
            ("seats", lease.seats, held.seats),
            ("granted_at", lease.granted_at, held.granted_at),
            ("expires_at", lease.expires_at, held.expires_at),
            ("deadline_at", lease.deadline_at, held.deadline_at),
            ("ended_at", lease.ended_at, held.ended_at),
            ("settled_at", lease.settled_at, held.settled_at),
            ("committed_at", lease.committed_at, held.committed_at),
            ("state", lease.state.value, held.state),
            ("reason", lease.reason.value if lease.reason else "", held.reason),
            ("detail", lease.detail, held.detail),
            ("strand_anchor", row.anchor, held.anchor),
        ]
        yield from differences(name, "A1", pairs)
        for fault in held.chain.close(row.end):
            yield Flaw(name, "S7", fault.what)


def _adopted(story: _Story, entry: Entry, body: Body) -> None:
    row = _row(entry)
    reason, before, version = body.text("reason"), body.number("before"), body.number("version")
    if reason not in REASONS:
        story.blame(row, "S3", f"a head does not move by {reason[:40]!r}")
    if before != story.version or version <= before:
        story.blame(
            row, "S3", f"the head moved from version {before} to {version}; it was at {story.version}"
        )
    forget_after = body.get("forget_after")
    if type(forget_after) is int:
        story.forgets.append((entry.seq, forget_after))
        story.may_be_gone.update(story.reserved)
    elif reason == "rollback":
        raise Unreadable("it does not say what it forgot, as rows of this version do")
    story.version, story.step, story.digest = version, body.number("step"), body.text("digest")
    story.cursor, story.moved_at, story.moves = "", entry.at, story.moves + 1
    story.epoch, story.floor = body.number("epoch"), body.number("floor")
    for at, kept in body.kept().items():
        story.kept.setdefault(at, kept)
    if before == 0:
        story.began = story.step + 1


@dataclass(frozen=True, slots=True)
class Commitment:
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
    def of(cls, entry: Entry) -> Commitment:
        body = Body(entry)
        joined = body.get("effects") or {}
        if not isinstance(joined, dict):
            raise Unreadable("its effects cannot be read")
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


class _Ahead:
    """Effects in the order of their versions, read no further than asked."""

    def __init__(self, effects: Iterable[Effect]) -> None:
        self._effects = iter(effects)
        self._next = next(self._effects, None)

    def _take(self) -> Effect:
        taken, self._next = self._next, next(self._effects, None)
        assert taken is not None
        return taken

    def before(self, version: int) -> Iterator[Effect]:
        while self._next is not None and self._next.version < version:
            yield self._take()

    def of(self, version: int) -> Iterator[Effect]:
        while self._next is not None and self._next.version == version:
            yield self._take()

    def rest(self) -> Iterator[Effect]:
        while self._next is not None:
            yield self._take()


# --- comparing rows ------------------------------------------------------------------------------------------


def chained(faults: Iterable[Fault]) -> list[Flaw]:
    return [Flaw(f"journal {fault.strand} #{fault.seq}", "S7", fault.what) for fault in faults]


def _effect_row(effect: Effect) -> str:
    return f"effect {effect.key}"


def differences(row: str, rule: str, pairs: Iterable[tuple[str, object, object]]) -> Iterator[Flaw]:
    for column, found, told in pairs:
        if found != told:
            yield Flaw(row, rule, f"{column} is {_short(found)}, the journal says {_short(told)}")


def _short(value: object) -> str:
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 40 else f"{text[:37]}…{text[-1]}"


def _compare_effect(
    job: str, told: Commitment, key: str, spoken: str, effect: Effect | None
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


def _compare_kept(story: _Story, kept: Sequence[Kept]) -> Iterator[Flaw]:
    found = {(k.version, k.tag): (k.digest, k.step) for k in kept}
    for at in sorted(found.keys() | story.kept.keys()):
        name = f"kept version {at[0]} of {story.job}" + (f" as {at[1]}" if at[1] else "")
        if found.get(at) != story.kept.get(at):
            if at not in found:
                yield Flaw(name, "C5", "it was kept, and its row is missing")
            else:
                yield Flaw(name, "C5", "nothing in the journal kept it like this")
