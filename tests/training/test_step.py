"""`sublet.run_step`: one kernel over one batch, exactly once (S1-S5)."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import sublet
from sublet.core.leasing.lease import EndReason
from sublet.leases.lease import Lease
from sublet.wiring import open_ledger
from tests.homes import Home, wait_until
from tests.training.rig import ended, forked, looking, run_to_end

ADD = """
def train_step(grid, step, n, batch):
    for i in range(n):
        batch[i] = (batch[i] + step) % 256
"""
SUM = """
def train_step(grid, step, n, batch, state, by):
    for i in range(len(state)):
        state[i] = (state[i] + batch[i] * by) % 256
    for i in range(n):
        batch[i] = state[i]
"""


def asked(lease: Lease, step: int = 1, version: int = 0, **over: Any) -> Any:
    values: dict[str, Any] = {
        "job": "job",
        "step": step,
        "lease": lease,
        "module": ADD,
        "kernel": "train_step",
        "batch": bytes([1, 2, 3, 4]),
        "output_bytes": 4,
        "expected_version": version,
    }
    return sublet.run_step(**{**values, **over})


@pytest.fixture
def lease(sqlite_home: Home) -> Lease:
    """By name: a warden must not kill the tests for what they do to their lease."""
    return sublet.gpu(vram="1GiB", ttl="1m", holder="name").acquire()


def no_device(lease: Lease) -> None:
    """From here on, opening a device fails the test."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("the device was touched")

    lease._opener = refuse


def test_a_step_is_computed_saved_and_committed(lease: Lease, sqlite_home: Home) -> None:
    done = asked(lease)
    assert (done.version, done.output) == (1, bytes([2, 3, 4, 5]))
    ledger = open_ledger(sqlite_home.settings)
    head, effect = ledger.head("job"), ledger.effect("job:1")
    assert head is not None
    assert effect is not None
    assert (head.step, head.version, head.digest) == (1, 1, done.digest)
    assert (effect.completed, effect.version, effect.owner) == (True, 1, lease.id)
    with sublet.checkpoints() as store:
        assert store.load("job")["output"] == done.output


@pytest.mark.parametrize("size", [4, 100_000])
def test_a_duplicate_gets_the_stored_result_and_touches_no_device(lease: Lease, size: int) -> None:
    batch = bytes(range(256)) * (size // 256 + 1)
    done = asked(lease, batch=batch[:size], output_bytes=size)
    no_device(lease)
    assert asked(lease, batch=batch[:size], output_bytes=size) == sublet.Duplicate(1, done.output)


def test_a_duplicate_is_known_after_later_steps_too(lease: Lease) -> None:
    first = asked(lease, 1, 0)
    asked(lease, 2, 1)
    no_device(lease)
    assert asked(lease, 1, 0) == sublet.Duplicate(1, first.output)
    assert asked(lease, 1, 2) == sublet.Duplicate(1, first.output)


@pytest.mark.parametrize(
    "other",
    [
        {"batch": b"\x09\x02\x03\x04"},
        {"module": ADD + "\n"},
        {"grid": (2,)},
        {"output_bytes": 3},
        {"args": [sublet.u32(1)]},
    ],
)
def test_the_same_step_with_other_inputs_is_refused(lease: Lease, other: dict[str, Any]) -> None:
    asked(lease)
    no_device(lease)
    with pytest.raises(sublet.FingerprintMismatch):
        asked(lease, **other)


def test_a_step_that_training_committed_is_a_duplicate_without_a_result(lease: Lease) -> None:
    state = {"x": 0}
    for _ in sublet.train("job", state, every=3, lease=lease, progress=False).steps(3):
        state["x"] += 1
    no_device(lease)
    assert asked(lease, 2, 1) == sublet.Duplicate(1, None)


def test_the_recipe_begins_at_step_42_and_goes_on_from_there(lease: Lease) -> None:
    assert asked(lease, 42, 0).version == 1
    with pytest.raises(sublet.HeadMoved):
        asked(lease, 44, 1)
    assert asked(lease, 43, 1).version == 2


def test_a_wrong_version_is_refused_before_any_work(lease: Lease) -> None:
    asked(lease)
    no_device(lease)
    with pytest.raises(sublet.HeadMoved) as moved:
        asked(lease, 2, 0)
    assert moved.value.version == 1


def test_the_state_is_carried_from_step_to_step(lease: Lease) -> None:
    values = {"module": SUM, "state_bytes": 4, "args": [sublet.u32(2)]}
    assert asked(lease, 1, 0, **values).output == bytes([2, 4, 6, 8])
    assert asked(lease, 2, 1, **values).output == bytes([4, 8, 12, 16])
    no_device(lease)
    assert asked(lease, 2, 1, **values).output == bytes([4, 8, 12, 16])


def test_a_state_of_another_size_is_refused_and_nothing_is_committed(lease: Lease, sqlite_home: Home) -> None:
    asked(lease, 1, 0, module=SUM, state_bytes=4, args=[sublet.u32(2)])
    with pytest.raises(sublet.BadInput, match="not the 3 bytes"):
        asked(lease, 2, 1, module=SUM, state_bytes=3, args=[sublet.u32(2)])
    head = open_ledger(sqlite_home.settings).head("job")
    assert head is not None
    assert head.step == 1


@pytest.mark.parametrize("how", ["released", "revoking", "ended"])
def test_without_an_active_lease_nothing_is_started(lease: Lease, sqlite_home: Home, how: str) -> None:
    """Fail closed, before the device and before the ledger."""
    ledger = open_ledger(sqlite_home.settings)
    if how == "released":
        lease.release()
    else:
        grace = 60_000_000 if how == "revoking" else 0
        ledger.revoke(lease.id, reason=EndReason.REVOKED, detail="test", grace_us=grace, actor="test")
        wait_until(lambda: lease.status == how)
    no_device(lease)
    with pytest.raises(sublet.LeaseNotActive, match="step 1 was not started"):
        asked(lease)
    assert ledger.effect("job:1") is None


def test_two_holders_of_one_step(lease: Lease) -> None:
    """The other one is busy with it; when its lease is dead the step is taken over."""
    other = sublet.gpu(vram="1GiB", ttl="1m", holder="name").acquire()
    newer = sublet.gpu(vram="1GiB", ttl="1m", holder="name").acquire()
    with pytest.raises(sublet.CompileFailed):
        asked(other, module="not python (")  # reserved, and left
    with pytest.raises(sublet.EffectBusy):
        asked(newer, module="not python (")
    other.release()
    with pytest.raises(sublet.CompileFailed):
        asked(newer, module="not python (")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"step": 0}, "not a step"),
        ({"job": "../x"}, "job"),
        ({"output_bytes": -1}, "sizes"),
        ({"batch": b"", "output_bytes": 0}, "computes nothing"),
    ],
)
def test_wrong_input_is_one_sentence(lease: Lease, wrong: dict[str, Any], says: str) -> None:
    no_device(lease)
    with pytest.raises(sublet.BadInput, match=says):
        asked(lease, **wrong)


PLACES = [
    "after_chunk_write",
    "after_publish",
    "before_manifest",
    "after_quorum",
    "before_begin",
    "after_lock",
    "after_fence_check",
    "after_cas",
    "after_effect",
    "before_commit",
    "after_commit_before_reply",
]


def nobody_holds() -> bool:
    with looking() as ledger:
        return not ledger.leases()


def test_killed_at_every_place_the_step_is_done_once(home: Home) -> None:
    def work(step: int) -> None:
        with sublet.gpu(vram="1GiB", ttl="5s") as lease:
            with looking() as ledger:
                head = ledger.head("job")
            version = head.version if head is not None else 0
            found = asked(lease, step, version, module=SUM, state_bytes=4, args=[sublet.u32(1)])
            os._exit(
                0 if found.output == bytes([step, 2 * step % 256, 3 * step % 256, 4 * step % 256]) else 3
            )

    kills = [(place, 1) for place in PLACES] + [("after_chunk_write", 2), ("after_publish", 2)]
    died = 0
    for step, (place, nth) in enumerate(kills, 1):
        code = run_to_end(lambda step=step: work(step), armed={place: ("kill", nth)})
        died += code == -signal.SIGKILL
        assert code in (0, -signal.SIGKILL), f"{place} ended with {code}"
        wait_until(nobody_holds)  # busy for a moment after the kill
        for _ in range(2):  # it is done, and then it is told of
            assert run_to_end(lambda step=step: work(step)) == 0, f"after {place}"
    assert died >= len(PLACES) // 2  # PostgreSQL has several of them inside one call to the server
    with looking() as ledger:
        head = ledger.head("job")
        assert head is not None
        assert head.step == head.version == len(kills)
        assert ledger.verify().faults == ()


ROUNDS = int(os.environ.get("SUBLET_STEP_RACES", "4"))


def test_of_two_processes_at_one_step_one_completes_it(home: Home, tmp_path: Path) -> None:
    """Begun at the same moment with the same inputs: one does the work, the other is told of it; the device is touched once (S4)."""

    def work(step: int, number: int) -> None:
        with sublet.gpu(vram="1GiB", ttl="10s") as lease:
            real = lease._opener
            assert real is not None

            def opened(*args: Any) -> Any:
                (tmp_path / f"touched-{step}-{number}").touch()
                return real(*args)

            lease._opener = opened
            (tmp_path / f"ready-{step}-{number}").touch()
            wait_until((tmp_path / f"go-{step}").exists)
            try:
                found = asked(lease, step, step - 1)
            except sublet.EffectBusy:
                os._exit(12)
            os._exit(10 if isinstance(found, sublet.Completed) else 11)

    for step in range(1, ROUNDS + 1):
        pids = [forked(lambda n=n, step=step: work(step, n)) for n in (1, 2)]
        wait_until(lambda step=step: len(list(tmp_path.glob(f"ready-{step}-*"))) == 2)
        (tmp_path / f"go-{step}").touch()
        codes = sorted(ended(pid) for pid in pids)
        assert codes in ([10, 11], [10, 12]), codes
        assert len(list(tmp_path.glob(f"touched-{step}-*"))) == 1
    with looking() as ledger:
        head = ledger.head("job")
        assert head is not None
        assert head.step == head.version == ROUNDS
        assert ledger.verify().faults == ()
