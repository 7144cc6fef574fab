"""What must hold after every event of a simulated world, each rule by its id in INVARIANTS.

Rules of this file:
- It knows the rules, not the code: leases, heads and items are followed from the journal's new rows alone, row by row, and then compared
  with the tables. What the tables say and no row told is a change without a decision (A1, S1).
- What somebody acted on is never forgotten, not even by a crash: epochs that were taken up, commits and results that were confirmed.
- A violation stops the world at once, with the seed and the number of the event.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sublet.core.errors import SubletError
from sublet.core.journal.chain import GENESIS, MAIN, entry_hash
from sublet.core.scheduling.device import Exclusivity, may_join

if TYPE_CHECKING:
    from proof.deep.world import Held, Process, World

Row = tuple[Any, ...]

_NEW_ROWS = (
    "SELECT id, strand, seq, at, kind, tenant, subject, body, hash FROM journal WHERE id > ? ORDER BY id"
)
_LIVE = "SELECT id, state, epoch, expires_at, deadline_at, granted_at FROM lease WHERE settled_at = 0"
_ANCHOR = {"lease": "lease WHERE id", "job": "head WHERE job", "consumer": "consumer WHERE id"}
#: A refusal by one of these verbs stands in the journal, in a row of this kind, in the same transaction (A1).
REFUSALS = {
    "acquire": "lease.refused",
    "renew": "lease.renew_refused",
    "commit": "step.refused",
    "reserve": "effect.refused",
}
#: Refusals that are no decision: there was nothing to decide about.
_NO_DECISION = frozenset(["not_found", "bad_input"])
LIVE = ("active", "revoking")


class Violation(BaseException):
    """An invariant is broken. Not an `Exception`: nothing on the way may take it for a failure it can handle."""

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(f"{rule}: {what}")
        self.rule = rule
        self.what = what


@dataclass(slots=True)
class Told:
    """A lease as the journal tells it."""

    state: str
    tenant: str
    epoch: int = 0
    expires_at: int = 0
    deadline_at: int = 0
    granted_at: int = 0
    ttl_us: int = 0
    slices: str = ""
    offered: str = ""
    settled: bool = False
    reason: str = ""


@dataclass(slots=True)
class Promises:
    """What somebody was told is durable. A backup that is put back takes those made since with it, and nothing else does."""

    grants: dict[str, int] = field(default_factory=dict)
    commits: dict[tuple[str, int], str] = field(default_factory=dict)
    effects: dict[str, tuple[str, str]] = field(default_factory=dict)
    results: dict[int, str] = field(default_factory=dict)
    published: dict[int, int] = field(default_factory=dict)

    def copy(self) -> Promises:
        return Promises(
            dict(self.grants),
            dict(self.commits),
            dict(self.effects),
            dict(self.results),
            dict(self.published),
        )


class Checks:
    def __init__(self, world: World) -> None:
        self.world = world
        self.promises = Promises()
        self.top_taken = 0  # the highest epoch a holder acted on
        self.ran: Counter[str] = Counter()  # how often each rule was asked
        self._forget()

    def _forget(self) -> None:
        self.last_id = 0
        self.last_epoch = 0
        self.strands: dict[str, tuple[int, str]] = {MAIN: (0, GENESIS)}
        self.main_hashes: set[str] = set()
        self.leases: dict[str, Told] = {}
        self.heads: dict[str, tuple[int, int, int]] = {}  # version, step, epoch
        self.commits: dict[tuple[str, int], str] = {}  # (job, version): key
        self.effects: dict[str, tuple[str, str, int]] = {}
        self.done: dict[int, tuple[int, int]] = {}  # item: delivery, consumer
        self._touched: list[str] = []

    def fail(self, rule: str, what: str) -> None:
        raise Violation(rule, what)

    # --- after an event --------------------------------------------------------------------------------------

    def after(
        self, verb: str, subject: str = "", error: SubletError | None = None, *, known: bool = True
    ) -> None:
        """`subject` is whom the verb was about, `error` what it was refused with; `known` whether the lease it was called under is
        there: to whoever shows one that is not, nothing is decided."""
        rows = self.world.engine.rows(_NEW_ROWS, self.last_id)
        self._touched.clear()
        if rows:
            self._follow(rows, live=True)
        if error is not None and verb in REFUSALS and known and error.code not in _NO_DECISION:
            told = sum(1 for r in rows if r[4] == REFUSALS[verb] and r[6] == subject)
            self.ran["A1"] += 1
            if told != 1 and not (told == 0 and self._summed_up(REFUSALS[verb], error.code)):
                self.fail("A1", f"{verb} of {subject} was refused ({error.code}), {told} rows say so")
        elif error is None and verb == "renew" and known:
            self.ran["A1"] += 1
            if not any(r[4] == "lease.renewed" and r[6] == subject for r in rows):
                self.fail("A1", f"{subject} was renewed and no row says so")
        self._compare(verb)

    def _summed_up(self, kind: str, code: str) -> bool:
        """Whether so many of this kind were refused in this minute that the others are only counted."""
        counted = "SELECT count(*) FROM refusal_tally WHERE kind = ? AND code = ? AND more > 0"
        return bool(self.world.engine.rows(counted, kind, code)[0][0])

    def _follow(self, rows: list[Row], *, live: bool) -> None:
        for number, strand, seq, at, kind, tenant, subject, body, digest in rows:
            self.last_id = number
            self._link(strand, seq, at, kind, tenant, subject, body, digest)
            if "secret" in body:
                self.fail("A1", f"{kind} of {subject} shows a secret")
            step = _STEPS.get(kind)
            if step is not None:
                step(self, at, tenant, subject, json.loads(body), live)

    def _link(
        self, strand: str, seq: int, at: int, kind: str, tenant: str, subject: str, body: str, digest: str
    ) -> None:
        """S7: each row follows the one before it on its strand, and a strand begins at a row of the main one."""
        self.ran["S7"] += 1
        known = self.strands.get(strand)
        if known is None or (seq == 1 and strand != MAIN):
            what, _, owner = strand.partition(":")
            found = self.world.engine.rows(
                f"SELECT strand_anchor FROM {_ANCHOR[what]} = ?", int(owner) if what == "consumer" else owner
            )
            if not found or found[0][0] not in self.main_hashes:
                self.fail("S7", f"{strand} begins at no row of the main strand")
            known = (0, found[0][0])
        if seq != known[0] + 1:
            self.fail("S7", f"row {seq} of {strand} follows row {known[0]}")
        if entry_hash(known[1], strand, seq, at, kind, tenant, subject, body) != digest:
            self.fail("S7", f"row {seq} of {strand} does not carry the hash of the one before it")
        self.strands[strand] = (seq, digest)
        if strand == MAIN:
            self.main_hashes.add(digest)

    # --- what rows tell --------------------------------------------------------------------------------------

    def _waiting(self, at: int, tenant: str, subject: str, body: dict[str, Any], live: bool) -> None:
        self.leases[subject] = Told("waiting", tenant)

    def _offered(self, at: int, tenant: str, subject: str, body: dict[str, Any], live: bool) -> None:
        self.leases[subject].offered = body["slices"]

    def _withdrawn(self, at: int, tenant: str, subject: str, body: dict[str, Any], live: bool) -> None:
        self.leases[subject].offered = ""

    def _granted(self, at: int, tenant: str, subject: str, body: dict[str, Any], live: bool) -> None:
        self.ran["L1"] += 1
        epoch = body["epoch"]
        if epoch <= self.last_epoch or (live and epoch <= self.top_taken):
            self.fail(
                "L1", f"epoch {epoch} granted to {subject} after {max(self.last_epoch, self.top_taken)}"
            )
        self.last_epoch = epoch
        known = self.leases.get(subject)
        if known is not None and known.state != "waiting":
            self.fail("L3", f"{subject} granted while {known.state}")
        if body["expires_at"] > at + body["ttl_us"]:
            self.fail("L4", f"{subject} granted for longer than its ttl")
        self.leases[subject] = Told(
            "active", tenant, epoch, body["expires_at"], 0, at, body["ttl_us"], body["slices"]
        )
        if live:
            self._touched.append(tenant)

    def _renewed(self, at: int, tenant: str, subject: str, body: dict[str, Any], live: bool) -> None:
        self.ran["L3"] += 1
        told = self.leases.get(subject)
        if told is None or told.state != "active" or told.epoch != body["epoch"] or at >= told.expires_at:
            self.fail("L3", f"{subject} renewed at {at}: {told}")
        assert told is not None
        self.ran["L4"] += 1
        if not told.expires_at <= body["expires_at"] <= max(told.expires_at, at + told.ttl_us):
            self.fail("L4", f"{subject}: expiry moved from {told.expires_at} to {body['expires_at']} at {at}")
        told.expires_at = body["expires_at"]

    def _revoked(self, at: int, tenant: str, subject: str, body: dict[str, Any], live: bool) -> None:
        told = self.leases[subject]
        self.ran["L3"] += 1
        late = (told.state == "active" and at >= told.expires_at) or (
            told.state == "revoking" and at >= told.deadline_at
        )
        if told.state not in LIVE or late:
            self.fail("L3", f"{subject} was over and got a deadline at {at}: {told}")
        if told.state == "revoking" and body["deadline_at"] > told.deadline_at:
            self.fail("L4", f"{subject}: its deadline moved back")
        told.state, told.deadline_at = "revoking", body["deadline_at"]

    def _ended(self, at: int, tenant: str, subject: str, body: dict[str, Any], live: bool) -> None:
        told = self.leases[subject]
        if told.state == "ended":
            self.fail("L3", f"{subject} ended twice")
        reason = body["reason"]
        self.ran["L5"] += 1
        if told.state == "active" and (
            (reason == "expired" and at < told.expires_at)
            or (reason in ("preempted", "hold_cap", "idle", "quota"))
            or (reason == "holder_lost" and live and self.world.lives(subject))
        ):
            self.fail("L5", f"{subject} ended as {reason} at {at}, it ran until {told.expires_at}")
        early = told.state == "revoking" and at < told.deadline_at
        if early and (
            reason == "expired" or (reason == "holder_lost" and live and self.world.lives(subject))
        ):
            self.fail("L5", f"{subject} ended as {reason} before its deadline")
        if told.granted_at:
            self.ran["T4"] += 1
            last = told.deadline_at if told.state == "revoking" else told.expires_at
            billed = max(told.granted_at, min(at, last)) - told.granted_at
            if body["gpu_us"] != billed * len(told.slices.split(";")):
                self.fail("T4", f"{subject} was billed {body['gpu_us']} us, it had {billed} on each device")
        told.state, told.settled, told.reason, told.offered = "ended", bool(body["settled"]), reason, ""

    def _settled(self, at: int, tenant: str, subject: str, body: dict[str, Any], live: bool) -> None:
        told = self.leases[subject]
        self.ran["K1"] += 1
        if told.state != "ended" or told.settled:
            self.fail("L5", f"{subject}: its slices went back while {told.state}")
        if live and body["proven"] and self.world.lives(subject):
            self.fail("K1", f"{subject} was settled as proven and its process lives")
        told.settled = True

    def _reserved(self, at: int, tenant: str, subject: str, body: dict[str, Any], live: bool) -> None:
        told = self.leases.get(body["lease"])
        self.ran["S2"] += 1
        limit = told.deadline_at if told and told.state == "revoking" else told.expires_at if told else 0
        if told is None or told.state not in LIVE or told.epoch != body["epoch"] or at >= limit:
            self.fail("S2", f"{subject} reserved by epoch {body['epoch']} at {at}: {told}")

    def _committed(self, at: int, tenant: str, subject: str, body: dict[str, Any], live: bool) -> None:
        told = self.leases.get(body["lease"])
        self.ran["S2"] += 1
        limit = (
            told.deadline_at
            if told is not None and told.state == "revoking"
            else told.expires_at
            if told
            else 0
        )
        if told is None or told.state not in LIVE or told.epoch != body["epoch"] or at >= limit:
            self.fail("S2", f"{subject} committed by epoch {body['epoch']} at {at}: {told}")
        job = subject.rpartition(":")[0]
        version, step, epoch = self.heads.get(job, (0, 0, 0))
        self.ran["S3"] += 1
        if (body["version"], body["first"]) != (version + 1, step + 1):
            self.fail("S3", f"{job}: version {body['version']} step {body['first']} after {version}, {step}")
        if body["epoch"] < epoch:
            self.fail("S2", f"{job}: epoch {body['epoch']} committed after epoch {epoch}")
        assert told is not None
        if told.tenant != tenant:
            self.fail("T1", f"{job} of {tenant} was committed by {told.tenant}")
        self.heads[job] = (body["version"], body["step"], body["epoch"])
        self.commits[(job, body["version"])] = subject
        keys = [subject, *body.get("effects", {})]
        self.ran["S1"] += 1
        for key in keys:
            found = self.world.engine.rows(
                "SELECT completed, fingerprint, outcome, version FROM effect WHERE key = ?", key
            )
            if live and (not found or not found[0][0] or found[0][3] != body["version"]):
                self.fail(
                    "S1", f"{job} moved to version {body['version']}, its effect {key} did not come true"
                )
            if found:
                known = self.effects.get(key)
                self.ran["S4"] += 1
                if known is not None and known != found[0][1:]:
                    self.fail("S4", f"effect {key} was {known}, is {found[0][1:]}")
                self.effects[key] = found[0][1:]

    def _completed(self, at: int, tenant: str, subject: str, body: dict[str, Any], live: bool) -> None:
        lease = body.get("lease")
        if lease is not None:
            told = self.leases.get(lease)
            self.ran["S2"] += 1
            limit = told.deadline_at if told and told.state == "revoking" else told.expires_at if told else 0
            if told is None or told.state not in LIVE or told.epoch != body["epoch"] or at >= limit:
                self.fail("S2", f"items completed under {lease} at {at}: {told}")
        for item, delivery, _ in body["done"]:
            self.ran["S6"] += 1
            if item in self.done:
                self.fail("S6", f"item {item} done by delivery {delivery}, and before by {self.done[item]}")
            self.done[item] = (delivery, 0)
            found = self.world.engine.rows("SELECT state, delivery FROM item WHERE id = ?", item)
            if live and (not found or found[0] != ("done", delivery)):
                self.fail("S1", f"item {item}: a row says done, its own is {found}")

    # --- tables beside what was told -------------------------------------------------------------------------

    def _compare(self, verb: str) -> None:
        rows = self.world.engine.rows
        seen: list[str] = []
        waiting = 0
        for lease, state, epoch, expires_at, deadline_at, granted_at in rows(_LIVE):
            told = self.leases.get(lease)
            seen.append(lease)
            if told is None:
                self.fail("A1", f"{lease} is there, and no row says why")
            assert told is not None
            if (state, epoch) != (told.state, told.epoch):
                self.fail(
                    "L3", f"{lease} is {state} with epoch {epoch} after {verb}, the journal says {told}"
                )
            if state in LIVE and (expires_at, granted_at) != (told.expires_at, told.granted_at):
                self.fail("L4", f"{lease} expires at {expires_at} after {verb}, the journal says {told}")
            if state == "revoking" and deadline_at != told.deadline_at:
                self.fail(
                    "L4", f"{lease} has its deadline at {deadline_at} after {verb}, the journal says {told}"
                )
            waiting += state == "waiting"
        self.ran["L3"] += 1
        self.ran["L4"] += 1
        live = {
            lease
            for lease, told in self.leases.items()
            if not (told.settled or (told.state == "ended" and not told.granted_at))
        }
        for lease in live.difference(seen):
            if self.leases[lease].state != "ended" or not self.leases[lease].settled:
                self.fail("L5", f"{lease} is gone after {verb}, the journal says {self.leases[lease]}")
        # A world has hundreds of old leases; what is settled is not looked at again.
        for lease in [lease for lease, told in self.leases.items() if told.settled]:
            self.world.settled(lease, self.leases.pop(lease))
        self._check_devices(waiting)
        self._check_heads()

    def _check_devices(self, waiting: int) -> None:
        rows = self.world.engine.rows
        on: dict[str, list[Row]] = {}
        of: dict[str, list[Row]] = {}
        for row in rows("SELECT device_id, lease_id, tenant, exclusivity, vram_bytes FROM slice"):
            on.setdefault(row[0], []).append(row)
            of.setdefault(row[2], []).append(row)
        self.ran["L2"] += 1
        for device, capacity, free, count in rows(
            "SELECT id, capacity_bytes, free_bytes, leases FROM device"
        ):
            here = on.get(device, ())
            used = sum(r[4] for r in here)
            if used > capacity or free != capacity - used or count != len(here):
                self.fail(
                    "L2", f"{device}: {used} of {capacity} used, {free} said to be free, {count} leases"
                )
            for a, b in itertools.combinations(here, 2):
                first, second = Exclusivity(a[3]), Exclusivity(b[3])
                if not may_join(first, second, same_tenant=a[2] == b[2]):
                    self.fail("L2", f"{a[1]} ({a[3]}) beside {b[1]} ({b[3]}) on {device}")
        self.ran["T2"] += 1
        for name, leases, vram, count, most, most_bytes, per_day, left in rows(
            "SELECT name, live_leases, live_bytes, waiting, max_leases, max_vram_bytes, gpu_us_per_day, left_us FROM tenant"
        ):
            mine = of.get(name, ())
            if leases != len({r[1] for r in mine}) or vram != sum(r[4] for r in mine):
                self.fail(
                    "T2", f"{name} is said to hold {leases} leases and {vram} bytes, its slices are {mine}"
                )
            if name in self._touched and ((most and leases > most) or (most_bytes and vram > most_bytes)):
                self.fail(
                    "T2",
                    f"{name} was granted {leases} leases, {vram} bytes; it may have {most}, {most_bytes}",
                )
            if per_day and left > per_day:
                self.fail("T2", f"{name} has {left} us of GPU time left, of {per_day} a day")
            waiting -= count
        if waiting or rows("SELECT waiting FROM pool")[0][0] != sum(
            1 for told in self.leases.values() if told.state == "waiting"
        ):
            self.fail("T2", "the waitlist's count is not how many wait")

    def _check_heads(self) -> None:
        self.ran["S1"] += 1
        for job, version, step, epoch in self.world.engine.rows("SELECT job, version, step, epoch FROM head"):
            if self.heads.get(job) != (version, step, epoch):
                self.fail(
                    "S1", f"{job} is at {version}, {step}, {epoch}; the journal says {self.heads.get(job)}"
                )

    # --- what holders did ------------------------------------------------------------------------------------

    def took_up(self, epoch: int) -> None:
        """Somebody begins to work under it: nobody else may ever have it (L1)."""
        self.top_taken = max(self.top_taken, epoch)

    def device_work(self, process: Process, held: Held) -> None:
        """L6, L7: what a holder submits by its own clock, the ledger still counts as its own."""
        self.ran["L6"] += 1
        if process.local() >= held.deadline:
            self.fail("L6", f"{held.lease_id}: work after the holder's own deadline")
        if process.outlived_restore or (not process.has_pid and self.world.mix.server_crashes):
            return
        found = self.world.engine.rows("SELECT count(*) FROM slice WHERE lease_id = ?", held.lease_id)
        if not found[0][0]:
            # A lease by name has no process to end: only its expiry is sure, and a revoke it has not heard of comes sooner.
            if (
                not process.has_pid
                and self.world.engine.rows("SELECT deadline_at FROM lease WHERE id = ?", held.lease_id)[0][0]
            ):
                return
            told = self.leases.get(held.lease_id)
            self.fail(
                "L6",
                f"{held.lease_id} (epoch {held.epoch}) works on a device that is not its any more: {told}",
            )

    def delivered(self, item: int) -> None:
        self.ran["S6"] += 1
        if item in self.done:
            self.fail("S6", f"item {item} was handed out after it was done")

    # --- after a crash ---------------------------------------------------------------------------------------

    def again(self, why: str) -> None:
        """The ledger came back: everything is followed anew from what is there, and promises must still be kept."""
        taken, promises = self.top_taken, self.promises
        self._forget()
        self.top_taken, self.promises = taken, promises
        self._follow(self.world.engine.rows(_NEW_ROWS, 0), live=False)
        self._compare(why)
        self.verify(why)
        self.ran["C6"] += 1
        for lease, epoch in promises.grants.items():
            found = self.world.engine.rows("SELECT epoch FROM lease WHERE id = ?", lease)
            if not found or found[0][0] != epoch:
                self.fail("L1", f"the grant of {lease} with epoch {epoch} is gone after {why}: {found}")
        for place, key in promises.commits.items():
            if self.commits.get(place) != key:
                self.fail("S6", f"commit {place} by {key} was confirmed and is gone after {why}")
        for key, (fingerprint, outcome) in promises.effects.items():
            if self.effects.get(key, ("", "", 0))[:2] != (fingerprint, outcome):
                self.fail(
                    "S4",
                    f"effect {key} was confirmed as {outcome} and is {self.effects.get(key)} after {why}",
                )
        for item, result in promises.results.items():
            found = self.world.engine.rows("SELECT state, result FROM item WHERE id = ?", item)
            if found != [("done", result)]:
                self.fail("S6", f"item {item} was acked and is {found} after {why}")
        for consumer, batch in promises.published.items():
            found = self.world.engine.rows("SELECT batch FROM consumer WHERE id = ?", consumer)
            if not found or found[0][0] < batch:
                self.fail("S6", f"batch {batch} of consumer {consumer} was confirmed and is gone after {why}")

    def verify(self, why: str) -> None:
        """The ledger's own audit, over everything."""
        self.ran["S7"] += 1
        faults = self.world.ledger.verify().faults
        if faults:
            self.fail("S7", f"after {why}: {faults[:3]}")

    def prove(self) -> None:
        """Job by job and queue by queue, as `sublet audit` does it."""
        for proof in self.world.ledger.prove():
            if not proof.proven:
                self.fail(proof.flaws[0].rule or "S1", f"{proof.job}: {proof.flaws[:2]}")
        for queue in self.world.queues.values():
            items = self.world.ledger.prove_queue(queue)
            if not items.proven:
                self.fail("S6", f"{items.queue}: {items.flaws[:2]}")


_STEPS = {
    "lease.waiting": Checks._waiting,
    "lease.offered": Checks._offered,
    "lease.offer_withdrawn": Checks._withdrawn,
    "lease.granted": Checks._granted,
    "lease.renewed": Checks._renewed,
    "lease.revoked": Checks._revoked,
    "lease.ended": Checks._ended,
    "lease.settled": Checks._settled,
    "effect.reserved": Checks._reserved,
    "step.committed": Checks._committed,
    "items.completed": Checks._completed,
}
