"""Simulated worlds: calm ones hold, broken ones are found out, and one seed is one world.

The seed is printed first; `SUBLET_DEEP_SEED=N` begins elsewhere, and `python -m proof.deep --seed N --events M` shows one world again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sublet.core.billing.meter
import sublet.core.leasing.lease
import sublet.core.leasing.renewal
import sublet.core.progress.effect
import sublet.core.scheduling.admission
import sublet.ledger.verbs.leasing.after_restore
import sublet.ledger.verbs.leasing.leases
import sublet.ledger.verbs.leasing.schedule_tick
import sublet.ledger.verbs.leasing.waitlist
import sublet.ledger.verbs.progress.commit
import sublet.ledger.verbs.queues.items
import sublet.store.replicas.quorum
from proof.deep import programs
from proof.deep.mixes import Mix
from proof.deep.world import simulate
from sublet.core.progress.effect import AlreadyCommitted, Committed, Reserved
from sublet.ledger.engine import raised
from sublet.ledger.ledger import SqlLedger
from sublet.ledger.tx import PoolRow

SEED = int(os.environ.get("SUBLET_DEEP_SEED", "1"))
WORLDS = int(os.environ.get("SUBLET_DEEP_WORLDS", "2"))
EVENTS = 600
#: Seeds that showed something once: see docs/decisions/0026.
FOUND = (3, 5, 33, 133)


RULES = "L1 L2 L3 L4 L5 L6 S1 S2 S3 S4 S6 S7 S8 C1 C4 C6 T2 T3 T4 K1 K3 A1"


def test_worlds_without_a_violation() -> None:
    """L1-L7, S1-S8, C1-C4, C6, T1-T4, K1-K3, A1: and every rule that a world can break was asked in them."""
    print(f"seed {SEED}")
    faults = 0
    asked: set[str] = set()
    for seed in (*range(SEED, SEED + WORLDS), *FOUND):
        outcome = simulate(seed, EVENTS)
        assert not outcome.violation, (
            f"python -m proof.deep --seed {seed} --events {EVENTS}: {outcome.violation}"
        )
        faults += sum(outcome.faults.values())
        asked |= outcome.ran.keys()
    print(f"{faults} faults")
    assert faults > 100 * WORLDS
    assert [rule for rule in RULES.split() if rule not in asked] == []


def test_one_seed_is_one_world() -> None:
    """Whatever Python's hashes are: the same journal to the last row."""
    command = [
        sys.executable,
        "-m",
        "proof.deep",
        "--seed",
        "12",
        "--worlds",
        "2",
        "--events",
        "150",
        "--journal",
    ]
    said = [
        subprocess.run(
            command,
            env={**os.environ, "PYTHONHASHSEED": hashes},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hashes in ("1", "2")
    ]
    assert said[0] == said[1]
    worlds = dict(line.split(" ", 1) for line in said[0].splitlines() if line.startswith(("12 ", "13 ")))
    assert sorted(worlds) == ["12", "13"]
    assert worlds["12"] != worlds["13"]


def _no_fence(patch: pytest.MonkeyPatch) -> None:
    for module in (sublet.core.leasing.lease, sublet.core.progress.effect, sublet.ledger.verbs.queues.items):
        patch.setattr(module, "fence", lambda lease, epoch, now: "")


def _no_epoch(patch: pytest.MonkeyPatch) -> None:
    def next_epoch(pool: PoolRow) -> int:
        pool.dirty = True
        pool.epoch = max(1, pool.epoch)
        return pool.epoch

    patch.setattr(PoolRow, "next_epoch", next_epoch)


def _late_holder(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(programs, "local_deadline", lambda sent_at, ttl_us: sent_at + 3 * ttl_us)
    patch.setattr(programs, "next_move", _never_renews)


def _never_renews(tenure: Any, now: int) -> Any:
    return sublet.core.leasing.renewal.Move(
        sublet.core.leasing.renewal.RenewalAction.SLEEP, now + tenure.ttl_us, ""
    )


def _stale_reaper(patch: pytest.MonkeyPatch) -> None:
    known = sublet.ledger.verbs.leasing.schedule_tick.overdue
    patch.setattr(
        sublet.ledger.verbs.leasing.schedule_tick,
        "overdue",
        lambda lease, now: known(lease, now) or sublet.core.leasing.lease.EndReason.EXPIRED,
    )


def _no_quorum(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sublet.store.replicas.quorum, "missing_for_quorum", lambda policy, confirmed, domains: 0)


def _no_verifying(patch: pytest.MonkeyPatch) -> None:
    class Gullible(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            return True

        def __ne__(self, other: object) -> bool:
            return False

    known = sublet.store.replicas.quorum.digest
    patch.setattr(sublet.store.replicas.quorum, "digest", lambda data: Gullible(known(data)))


def _bills_the_reaper(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sublet.core.billing.meter, "billed_until", lambda lease, now: max(lease.granted_at, now))


def _backup_twice(patch: pytest.MonkeyPatch) -> None:
    known = sublet.ledger.verbs.leasing.after_restore.mark_restored

    def jump_from_the_backup(tx: Any, actor: str, highest_epoch: int) -> int:
        before = tx.pool.epoch
        ended = known(tx, actor, highest_epoch)
        tx.pool.epoch = before + sublet.ledger.verbs.leasing.after_restore.EPOCH_GAP
        return ended

    patch.setattr(sublet.ledger.verbs.leasing.after_restore, "mark_restored", jump_from_the_backup)


def _grants_told_too_soon(patch: pytest.MonkeyPatch) -> None:
    def attend(ledger: SqlLedger, lease_id: str, secret: str, *, explain: bool = True) -> Any:
        return raised(
            ledger.engine.write(
                lambda tx: sublet.ledger.verbs.leasing.waitlist.attend(tx, lease_id, secret, explain),
                durable=False,
            )
        )

    patch.setattr(SqlLedger, "attend", attend)


def _retries_blindly(patch: pytest.MonkeyPatch) -> None:
    """Whatever a completed effect says, it is reserved and committed again."""

    def decide(lease: Any, epoch: int, effect: Any, alive: bool, fingerprint: str, now: int) -> Any:
        found = known(lease, epoch, effect, alive, fingerprint, now)
        return Reserved(epoch, taken_over=False) if isinstance(found, AlreadyCommitted) else found

    known = sublet.core.progress.effect.decide_reserve
    patch.setattr(sublet.core.progress.effect, "decide_reserve", decide)
    patch.setattr(
        sublet.ledger.verbs.progress.commit,
        "decide_commit",
        lambda lease, epoch, head, effect, alive, commit, now: (
            Committed(head.version + 1)
            if not isinstance(found := decide(lease, epoch, effect, alive, commit.fingerprint, now), Reserved)
            or True
            else found
        ),
    )


def _nobody_is_next(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sublet.ledger.verbs.leasing.leases, "hand_out", lambda tx: None)
    whole = sublet.core.scheduling.admission.WaitlistWalk.run

    def only_who_comes(walk: Any, order: Any, *, until: str = "") -> Any:
        return whole(walk, order, until=until) if until else []

    patch.setattr(sublet.core.scheduling.admission.WaitlistWalk, "run", only_who_comes)


@pytest.mark.parametrize(
    ("broken", "rules", "first"),
    [
        (_no_fence, "S2 L3", 5),
        (_no_epoch, "L1", 1),
        (_late_holder, "L6", 169),
        (_stale_reaper, "L5", 1),
        (_no_quorum, "C1", 1),
        (_no_verifying, "C3", 38),
        (_bills_the_reaper, "T4", 1),
        (_backup_twice, "L1", 20),
        (_retries_blindly, "S1 S2 S3 S4 A1", 9),
        (_nobody_is_next, "T3 S8", 14),
    ],
)
def test_a_broken_world_is_found_out(
    broken: Callable[[pytest.MonkeyPatch], None], rules: str, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`first` is a seed that shows it soon; should the worlds have changed, one of the next ones does."""
    broken(monkeypatch)
    # Who is never served is seen when the faults have stopped: the sooner, the cheaper.
    events = EVENTS // 4 if broken is _nobody_is_next else EVENTS
    for seed in range(first, first + 100):
        violation = simulate(seed, events).violation
        if violation:
            assert violation.split(":")[0] in rules.split(), violation
            print(f"seed {seed}: {violation}")
            return
    pytest.fail("nothing was found")


def test_a_grant_that_a_crash_takes_back_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that often dies with what it had not synced, and waiters that are told of a grant that was not."""
    mix = Mix(tempo=30, hosts=1, ledger_dies=0.01, kill=0.01)
    assert not simulate(1, EVENTS, mix).violation
    _grants_told_too_soon(monkeypatch)
    for seed in range(1, 100):
        violation = simulate(seed, EVENTS, mix).violation
        if violation:
            print(f"seed {seed}: {violation}")
            assert violation.startswith(("L1:", "L6:")), violation
            return
    pytest.fail("nothing was found")
