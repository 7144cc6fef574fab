"""Replaying the journal: what every audit shares when it reads the rows once more, in stored order.

Rules of this file:
- A row's fields are what they should be, or the row is unreadable; an unreadable row proves nothing and is a
  flaw.
- The main strand and every lease are followed here, from grant to end. What the other rows mean is for the
  audits.
- Memory grows with the leases that are open or that a proof rests on, not with the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from sublet.core.journal.chain import GENESIS, MAIN, Chain, Entry, Fault, StrandEnd, fields_of, lease_strand
from sublet.core.leasing.lease import LeaseRecord

T = TypeVar("T")

# --- flaws --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Flaw:
    """One thing that keeps a job or a queue from being proven."""

    row: str
    rule: str
    what: str

    @property
    def remedy(self) -> str:
        return _REMEDIES.get(self.row.split(" ", 1)[0], _REMEDIES["journal"])


_RESTORE = "put a backup back ('sublet migrate --restore')"
_REMEDIES = {
    "journal": f"the history itself was changed: keep this ledger as evidence and {_RESTORE}",
    "head": "the journal says where the job stands: put a backup back, or roll back to a version you trust "
    "('sublet checkpoint rollback')",
    "effect": f"do not rely on this effect's outcome: {_RESTORE}",
    "lease": f"the row was changed outside sublet: {_RESTORE}",
    "kept": f"tag the version again, or {_RESTORE}",
    "queue": f"the journal says what was done with its items: {_RESTORE}",
    "consumer": f"the row was changed outside sublet: {_RESTORE}",
    "item": f"do not rely on this item's result: {_RESTORE}",
    "checkpoint": "look at its copies with 'sublet checkpoint verify', then 'sublet checkpoint repair'",
}


@dataclass(slots=True)
class FlawList:
    """Flaws in the order they were found. Beyond `most` they are only counted."""

    most: int | None = None
    kept: list[Flaw] = field(default_factory=list)
    more: int = 0

    def blame(self, row: str, rule: str, what: str) -> None:
        self.add([Flaw(row, rule, what)])

    def add(self, flaws: Iterable[Flaw]) -> None:
        for flaw in flaws:
            if self.most is None or len(self.kept) < self.most:
                self.kept.append(flaw)
            else:
                self.more += 1


def row_name(entry: Entry) -> str:
    return f"journal {entry.strand} #{entry.seq}"


def chain_flaws(faults: Iterable[Fault]) -> list[Flaw]:
    return [Flaw(f"journal {fault.strand} #{fault.seq}", "S7", fault.what) for fault in faults]


def differences(row: str, rule: str, pairs: Iterable[tuple[str, object, object]]) -> Iterator[Flaw]:
    """A flaw for each column whose stored value is not what the journal says."""
    for column, found, told in pairs:
        if found != told:
            yield Flaw(row, rule, f"{column} is {_short(found)}, the journal says {_short(told)}")


def _short(value: object) -> str:
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 40 else f"{text[:37]}…{text[-1]}"


# --- reading ------------------------------------------------------------------------------------------------


class UnreadableRow(ValueError):
    """Why a row of the journal proves nothing."""


class RowBody:
    """A row's body, parsed when a field is first asked for."""

    __slots__ = ("_entry", "_fields")

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self._fields: dict[str, Any] | None = None

    def get(self, name: str) -> Any:
        if self._fields is None:
            self._fields = fields_of(self._entry)
            if self._fields is None:
                raise UnreadableRow("its body cannot be read")
        return self._fields.get(name)

    def number(self, name: str) -> int:
        value = self.get(name)
        if type(value) is not int:
            raise UnreadableRow(f"it does not say its {name}, as rows of this version do")
        return value

    def text(self, name: str) -> str:
        value = self.get(name)
        if type(value) is not str:
            raise UnreadableRow(f"it does not say its {name}, as rows of this version do")
        return value


class ReadAhead(Generic[T]):
    """Things in the order of a number each of them has, read no further than asked."""

    def __init__(self, things: Iterable[T], number: Callable[[T], int]) -> None:
        self._rest = iter(things)
        self._number = number
        self._next = next(self._rest, None)

    @property
    def next_number(self) -> int | None:
        return None if self._next is None else self._number(self._next)

    def of(self, number: int) -> list[T]:
        found: list[T] = []
        while self._next is not None and self._number(self._next) == number:
            found.append(self._take())
        return found

    def before(self, number: int | None) -> Iterator[T]:
        """Those with smaller numbers; with None, all that are left."""
        while self._next is not None and (number is None or self._number(self._next) < number):
            yield self._take()

    def _take(self) -> T:
        taken, self._next = self._next, next(self._rest, None)
        assert taken is not None
        return taken


# --- leases -------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class ReplayedLease:
    """One lease, as the journal has told it so far."""

    epoch: int
    ttl_us: int
    expires_at: int
    granted_at: int = 0
    deadline_at: int = 0
    state: str = "active"
    reason: str = ""

    @property
    def ended(self) -> bool:
        return self.state == "ended"

    def refusal(self, at: int) -> str:
        """Why a write does not count at this moment, or '' (S2)."""
        if at < self.granted_at:
            return "before it was granted"
        if self.ended:
            return f"after it ended ({self.reason})"
        if self.state == "revoking":
            return "" if at < self.deadline_at else "after its grace was over"
        return "" if at < self.expires_at else "after it expired"

    def renewal_refusals(self, at: int, epoch: int) -> Iterator[str]:
        """Everything that forbade a renewal at this moment (L3)."""
        if self.ended:
            yield "renewed after it ended"
        if self.deadline_at:
            yield "renewed while it was being revoked"
        if epoch != self.epoch:
            yield f"renewed by epoch {epoch}, its epoch is {self.epoch}"
        if at >= self.expires_at:
            yield "renewed after it expired"


@dataclass(slots=True, kw_only=True)
class _FollowedLease(ReplayedLease):
    """What its row in the ledger is compared with."""

    chain: Chain
    anchor: str
    tenant: str
    tier: str
    exclusivity: str
    slices: str
    detail: str
    seats: int
    ended_at: int = 0
    settled_at: int = 0
    committed_at: int = 0
    used: bool = False  # a proof rests on it


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRow:
    """A lease's row; its record is None when the row holds something that no lease has."""

    id: str
    lease: LeaseRecord | None
    end: StrandEnd
    anchor: str


#: What an audit does with rows of one kind.
Visit = Callable[[Entry, RowBody], None]


class JournalReplay:
    """Follows the main strand and the leases. Each row of a kind in `visits` is then shown to its visitor."""

    def __init__(self, visits: Mapping[str, Visit], *, gone_before: int = 0) -> None:
        """Rows of leases that were over before `gone_before` may have been pruned."""
        self.main_flaws = FlawList()  # of the main strand, on which every proof rests
        self._gone_before = gone_before
        self._main = Chain(MAIN, GENESIS)
        self._leases: dict[str, _FollowedLease] = {}
        self._lease_flaws: dict[str, FlawList] = {}
        self._epoch = 0
        self._visits = visits
        self._follows: dict[str, Visit] = {
            "lease.granted": self._granted,
            "lease.renewed": self._renewed,
            "lease.revoked": self._revoked,
            "lease.ended": self._ended,
            "lease.settled": self._settled,
            "effect.reserved": self._reserved,
            "items.completed": self._committed,
        }

    def see(self, entry: Entry, body: RowBody) -> None:
        if entry.strand.startswith("job:"):
            self._see_commit(entry, body)
            return
        if entry.strand == MAIN:
            self.main_flaws.add(chain_flaws(self._main.add(entry)))
        elif entry.strand.startswith("lease:"):
            lease = entry.strand.removeprefix("lease:")
            held = self._leases.get(lease)
            if held is None:
                self._blame(lease, row_name(entry), "S7", "its lease was never granted, or was over")
                return
            self._blame_chain(lease, held.chain.add(entry))
        try:
            for kinds in (self._follows, self._visits):
                visit = kinds.get(entry.kind)
                if visit is not None:
                    visit(entry, body)
        except UnreadableRow as e:
            self.main_flaws.blame(row_name(entry), "S7", str(e))

    def end_main(self, end: StrandEnd) -> None:
        self.main_flaws.add(chain_flaws(self._main.close(end)))

    def _blame(self, lease: str, row: str, rule: str, what: str) -> None:
        self._lease_flaws.setdefault(lease, FlawList()).blame(row, rule, what)

    def _blame_chain(self, lease: str, faults: Iterable[Fault]) -> None:
        for flaw in chain_flaws(faults):
            self._blame(lease, flaw.row, flaw.rule, flaw.what)

    def _granted(self, entry: Entry, body: RowBody) -> None:
        epoch = body.number("epoch")
        if epoch <= self._epoch:
            what = f"epoch {epoch} was granted after epoch {self._epoch}"
            self.main_flaws.blame(row_name(entry), "L1", what)
        self._epoch = max(self._epoch, epoch)
        self._leases[entry.subject] = _FollowedLease(
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

    def _renewed(self, entry: Entry, body: RowBody) -> None:
        held = self._leases.get(entry.subject)
        if held is None:
            return
        refused = list(held.renewal_refusals(entry.at, body.number("epoch")))
        if entry.at < held.granted_at:
            refused.append("renewed before it was granted")
        if refused:
            self._blame(entry.subject, row_name(entry), "L3", ", ".join(refused))
        held.expires_at = body.number("expires_at")

    def _revoked(self, entry: Entry, body: RowBody) -> None:
        held = self._leases.get(entry.subject)
        if held is not None:
            held.state, held.deadline_at = "revoking", body.number("deadline_at")
            held.reason, held.detail = body.text("reason"), body.text("detail")

    def _ended(self, entry: Entry, body: RowBody) -> None:
        held = self._leases.get(entry.subject)
        if held is None:
            return  # it only ever waited
        held.state, held.reason, held.detail = "ended", body.text("reason"), body.text("detail")
        held.ended_at = held.granted_at + body.number("gpu_us") // max(1, len(held.slices.split(";")))
        held.settled_at = entry.at if body.get("settled") else 0
        pledge = StrandEnd(body.number("strand_seq"), body.text("strand_hash"))
        self._blame_chain(entry.subject, held.chain.close(pledge))
        self._forget(entry.subject, held)

    def _settled(self, entry: Entry, body: RowBody) -> None:
        held = self._leases.get(entry.subject)
        if held is not None:
            held.settled_at = entry.at
            self._forget(entry.subject, held)

    def _forget(self, lease: str, held: _FollowedLease) -> None:
        """Drop a lease that is over and did nothing a proof rests on."""
        if held.settled_at and not held.used:
            del self._leases[lease]

    def _reserved(self, entry: Entry, body: RowBody) -> None:
        held = self._leases.get(body.text("lease"))
        if held is not None:
            held.used = True

    def _committed(self, entry: Entry, body: RowBody) -> None:
        held = self._leases.get(str(body.get("lease") or ""))
        if held is not None:
            held.used = True
            held.committed_at = max(held.committed_at, entry.at)

    def _see_commit(self, entry: Entry, body: RowBody) -> None:
        if entry.kind == "step.committed":
            try:
                self._committed(entry, body)
            except UnreadableRow:
                pass  # a flaw of its job, whose audit names it

    # what the audits ask

    def unfenced(
        self, lease: str, epoch: int, at: int, tenant: str | None = None
    ) -> Iterator[tuple[str, str]]:
        """Each rule that a write under this lease broke at this moment, and how. Ask at the row that
        wrote."""
        held = self._leases.get(lease)
        if held is None:
            yield "S2", f"lease {lease}, which committed it, was never granted, or was over"
            return
        if held.epoch != epoch:
            yield "S2", f"epoch {epoch} committed under lease {lease}, whose epoch is {held.epoch}"
        refusal = held.refusal(at)
        if refusal:
            yield "S2", f"committed under lease {lease} {refusal}"
        if tenant is not None and held.tenant != tenant:
            yield "T1", f"lease {lease} is of tenant {held.tenant}"

    def match_leases(self, wanted: Iterable[str], rows: Sequence[LeaseRow]) -> Iterator[Flaw]:
        """The flaws of these leases: of their strands, and of their rows."""
        found = {row.id: row for row in rows}
        for lease in wanted:
            if lease in self._lease_flaws:
                yield from self._lease_flaws[lease].kept
            if lease in self._leases:  # otherwise what it committed is named already
                yield from self._compare(self._leases[lease], f"lease {lease}", found.get(lease))

    def _compare(self, held: _FollowedLease, name: str, row: LeaseRow | None) -> Iterator[Flaw]:
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
