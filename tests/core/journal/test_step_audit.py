"""Stories that no honest ledger tells, each chained correctly: the rules alone must see what is wrong (S1-S4)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sublet.core.journal.chain import GENESIS, MAIN, Entry, StrandEnd, body_text, entry_hash
from sublet.core.journal.step_audit import HeadRow, Proof, StepAudit
from sublet.core.progress.effect import Effect, Head, said

TTL = 100


class Forger:
    """Writes journal rows with good hashes, whatever they say."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.ends: dict[str, StrandEnd] = {MAIN: StrandEnd(0, GENESIS)}
        self.effects: list[Effect] = []
        self.anchor = ""
        self.leases: set[str] = set()

    def write(self, strand: str, at: int, kind: str, subject: str, **body: Any) -> str:
        end = self.ends[strand]
        text = body_text(body)
        digest = entry_hash(end.hash, strand, end.seq + 1, at, kind, "ada", subject, text)
        self.entries.append(Entry(strand, end.seq + 1, at, kind, "ada", subject, text, digest))
        self.ends[strand] = StrandEnd(end.seq + 1, digest)
        return digest

    def grant(self, lease: str, epoch: int, at: int) -> None:
        body = {
            "epoch": epoch,
            "expires_at": at + TTL,
            "ttl_us": TTL,
            "tier": "batch",
            "exclusivity": "shared",
        }
        self.ends[f"lease:{lease}"] = StrandEnd(
            0, self.write(MAIN, at, "lease.granted", lease, slices="gpu0=1", reason="free", **body)
        )

    def renew(self, lease: str, epoch: int, at: int) -> None:
        self.write(f"lease:{lease}", at, "lease.renewed", lease, epoch=epoch, expires_at=at + TTL)

    def revoke(self, lease: str, at: int, deadline: int) -> None:
        self.write(MAIN, at, "lease.revoked", lease, deadline_at=deadline, reason="revoked", detail="d")

    def end(self, lease: str, at: int) -> None:
        end = self.ends[f"lease:{lease}"]
        body = {"reason": "released", "detail": "d", "gpu_us": at, "settled": True}
        self.write(MAIN, at, "lease.ended", lease, strand_seq=end.seq, strand_hash=end.hash, **body)

    def start(self, at: int = 0) -> None:
        self.anchor = self.write(MAIN, at, "job.started", "j", lease="A")
        self.ends["job:j"] = StrandEnd(0, self.anchor)

    def commit(
        self,
        at: int,
        version: int,
        first: int,
        step: int,
        *,
        lease: str = "A",
        epoch: int = 1,
        key: str = "",
        stored: bool = True,
    ) -> None:
        key = key or f"j:{step}"
        spoken = said("f", "o")
        body = {"version": version, "first": first, "step": step, "digest": f"d{version}", "fingerprint": "f"}
        self.write(
            "job:j",
            at,
            "step.committed",
            key,
            said=spoken,
            cursor=said("", ""),
            epoch=epoch,
            lease=lease,
            **body,
        )
        self.head = Head(
            job="j",
            tenant="ada",
            version=version,
            step=step,
            digest=f"d{version}",
            epoch=epoch,
            committed_at=at,
        )
        if stored:
            self.effects = [e for e in self.effects if e.key != key]
            self.effects.append(
                Effect(
                    key=key,
                    fingerprint="f",
                    job="j",
                    owner=lease,
                    epoch=epoch,
                    completed=True,
                    outcome="o",
                    version=version,
                )
            )

    def adopt(
        self, at: int, before: int, version: int, step: int, forget_after: int | None, *, epoch: int = 1
    ) -> None:
        body = {
            "before": before,
            "version": version,
            "step": step,
            "digest": f"d{version}",
            "epoch": epoch,
            "floor": 0,
        }
        self.write(
            "job:j",
            at,
            "head.adopted",
            "j",
            reason="rollback",
            forget_after=forget_after,
            kept=[],
            by="me",
            **body,
        )
        self.head = Head(
            job="j",
            tenant="ada",
            version=version,
            step=step,
            digest=f"d{version}",
            epoch=epoch,
            committed_at=at,
        )

    def proof(self) -> Proof:
        replay = StepAudit()
        for entry in self.entries:
            replay.see(entry)
        replay.end_main(self.ends[MAIN])
        own = [e for e in self.entries if e.strand == "job:j"]
        replay.match("j", own, sorted(self.effects, key=lambda e: (e.version, e.key)), [])
        return replay.prove("j", HeadRow(head=self.head, end=self.ends["job:j"], anchor=self.anchor), [], [])

    def flaws(self) -> list[str]:
        """Without those about lease rows, which a forger has none of."""
        return [f"{f.rule} {f.what}" for f in self.proof().flaws if not f.row.startswith("lease ")]


@pytest.fixture
def forger() -> Forger:
    made = Forger()
    made.grant("A", 1, 0)
    made.start()
    return made


def test_an_honest_story(forger: Forger) -> None:
    forger.commit(10, 1, 1, 3)
    forger.renew("A", 1, 50)
    forger.commit(120, 2, 4, 4)
    forger.revoke("A", 130, 140)
    forger.commit(139, 3, 5, 9)
    forger.end("A", 139)
    forger.grant("B", 2, 200)
    forger.commit(210, 4, 10, 10, lease="B", epoch=2)
    assert forger.flaws() == []
    proof = forger.proof()
    assert (proof.first, proof.step, proof.commits, proof.leases, proof.epochs) == (1, 10, 4, 2, (1, 2))


@pytest.mark.parametrize(
    ("second", "what"),
    [
        ((2, 5, 6), "S3 steps 4 to 4 were left out"),
        ((2, 3, 6), "S3 steps 3 to 3 were committed before"),
        ((2, 1, 3), "S3 steps 1 to 3 were committed before"),
        ((3, 4, 4), "S3 version 3 was committed after version 1"),
        ((1, 4, 4), "S3 version 1 was committed after version 1"),
        ((2, 4, 3), "S3 steps 4 to 3 are not a span"),
    ],
)
def test_a_gap_or_a_repeat(forger: Forger, second: tuple[int, int, int], what: str) -> None:
    forger.commit(10, 1, 1, 3)
    forger.commit(20, *second, key="second")
    assert what in forger.flaws()


def test_a_job_that_begins_elsewhere_does_so_once(forger: Forger) -> None:
    forger.commit(10, 1, 42, 42)
    assert forger.flaws() == []
    forger.commit(20, 2, 50, 50)
    assert forger.flaws() == ["S3 steps 43 to 49 were left out"]


def test_a_commit_needs_a_live_lease(forger: Forger) -> None:
    """S2, at the microsecond."""
    forger.commit(TTL - 1, 1, 1, 1)
    assert forger.flaws() == []
    forger.commit(TTL, 2, 2, 2)
    assert forger.flaws() == ["S2 committed under lease A after it expired"]


def test_a_commit_after_the_grace(forger: Forger) -> None:
    forger.revoke("A", 10, 20)
    forger.commit(19, 1, 1, 1)
    assert forger.flaws() == []
    forger.commit(20, 2, 2, 2)
    assert forger.flaws() == ["S2 committed under lease A after its grace was over"]


def test_a_commit_after_the_end(forger: Forger) -> None:
    forger.commit(5, 1, 1, 1)
    forger.end("A", 10)
    forger.commit(10, 2, 2, 2)
    assert forger.flaws() == ["S2 committed under lease A after it ended (released)"]


def test_a_commit_under_a_lease_nobody_granted(forger: Forger) -> None:
    forger.commit(5, 1, 1, 1, lease="X")
    assert forger.flaws() == ["S2 lease X, which committed it, was never granted, or was over"]


def test_a_commit_of_another_epoch(forger: Forger) -> None:
    forger.commit(5, 1, 1, 1, epoch=2)
    assert forger.flaws() == ["S2 epoch 2 committed under lease A, whose epoch is 1"]


def test_an_old_epoch_after_a_newer_one(forger: Forger) -> None:
    """Both leases are alive; only the order of the epochs gives it away."""
    forger.grant("B", 2, 1)
    forger.commit(5, 1, 1, 1, lease="B", epoch=2)
    forger.commit(6, 2, 2, 2, lease="A", epoch=1)
    assert forger.flaws()[0] == "S2 epoch 1 committed after epoch 2"


def test_an_epoch_granted_twice(forger: Forger) -> None:
    forger.grant("B", 1, 1)
    forger.commit(5, 1, 1, 1, lease="B")
    assert forger.flaws() == ["L1 epoch 1 was granted after epoch 1"]


def test_a_renewal_after_the_expiry_gives_nothing_back(forger: Forger) -> None:
    forger.renew("A", 1, TTL)
    forger.commit(TTL + 5, 1, 1, 1)
    assert forger.flaws() == ["L3 renewed after it expired"]


def test_a_commit_without_its_effect(forger: Forger) -> None:
    forger.commit(5, 1, 1, 1, stored=False)
    assert forger.flaws() == ["S1 version 1 was committed with it, and it is missing or of another version"]


def test_one_key_committed_twice(forger: Forger) -> None:
    """S4: the row of the first is written over, and so the first has none."""
    forger.commit(5, 1, 1, 1, key="once")
    forger.commit(6, 2, 2, 2, key="once")
    assert forger.flaws() == ["S1 version 1 was committed with it, and it is missing or of another version"]


def test_a_rollback_restarts_the_count_and_forgets(forger: Forger) -> None:
    forger.commit(5, 1, 1, 3)
    forger.commit(6, 2, 4, 6)
    forger.commit(7, 3, 7, 8)
    forger.adopt(8, before=3, version=4, step=3, forget_after=1)
    forger.effects = [e for e in forger.effects if e.version <= 1]
    forger.commit(9, 5, 4, 6)
    assert forger.flaws() == []
    proof = forger.proof()
    assert (proof.commits, proof.undone, proof.moves, proof.step) == (2, 2, 1, 6)
    forger.commit(10, 6, 9, 9)
    assert forger.flaws() == ["S3 steps 7 to 8 were left out"]


def test_a_rollback_that_left_an_effect_behind(forger: Forger) -> None:
    forger.commit(5, 1, 1, 3)
    forger.commit(6, 2, 4, 6)
    forger.adopt(8, before=2, version=3, step=3, forget_after=1)
    assert forger.flaws() == ["S1 no commit made version 2 of it true"]


def test_an_adoption_lets_the_epoch_be_what_it_says(forger: Forger) -> None:
    forger.commit(5, 1, 1, 3)
    forger.adopt(6, before=1, version=9, step=20, forget_after=9, epoch=7)
    assert forger.flaws() == []
    forger.commit(7, 10, 21, 21)
    assert forger.flaws() == ["S2 epoch 1 committed after epoch 7", "S1 epoch is 1, the journal says 7"]


def test_a_move_from_elsewhere(forger: Forger) -> None:
    forger.commit(5, 1, 1, 3)
    forger.adopt(6, before=2, version=3, step=3, forget_after=2)
    assert forger.flaws() == ["S3 the head moved from version 2 to 3; it was at 1"]


def test_a_row_of_another_kind(forger: Forger) -> None:
    forger.commit(5, 1, 1, 1)
    forger.write("job:j", 6, "step.undone", "j")
    assert forger.flaws() == ["S7 a job's strand has no rows of the kind 'step.undone'"]


@pytest.mark.parametrize("missing", ["first", "said", "cursor", "lease", "epoch", "version", "digest"])
def test_a_row_that_does_not_say_enough_proves_nothing(forger: Forger, missing: str) -> None:
    forger.commit(5, 1, 1, 1)
    last = forger.entries.pop()
    forger.ends["job:j"] = StrandEnd(0, forger.anchor)
    body = json.loads(last.body)
    del body[missing]
    forger.write("job:j", 5, "step.committed", "j:1", **body)
    assert f"S7 it does not say its {missing}, as rows of this version do" in forger.flaws()


def test_a_strand_nobody_started() -> None:
    forger = Forger()
    forger.grant("A", 1, 0)
    forger.ends["job:j"] = StrandEnd(0, GENESIS)
    forger.commit(5, 1, 1, 1)
    assert "S7 no row of the main strand says that this job was started" in forger.flaws()
