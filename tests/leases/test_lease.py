"""A lease in the hands of real processes: handover, loss, and what a stale holder may still do."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

import sublet
from sublet import wiring
from sublet.core.leasing.lease import EndReason, Holder, LeaseState
from sublet.core.leasing.tenancy import Tenant
from sublet.core.progress.effect import Commit, Committed
from sublet.leases.acquire import acquire
from tests.homes import Home, process_is_gone, wait_until

HOLD = """
    import sublet, sys, time
    with sublet.gpu(vram="16GiB", ttl=sys.argv[1]) as lease:
        print("held", lease.id, lease.epoch, time.monotonic_ns(), flush=True)
        sys.stdin.readline()
    print("released", time.monotonic_ns(), flush=True)
"""


def held(child) -> tuple[str, int, int]:
    word, lease_id, epoch, at = child.stdout.readline().split()
    assert word == "held"
    return lease_id, int(epoch), int(at)


def ledger_of(home: Home):
    return wiring.open_ledger(home.settings)


@pytest.mark.parametrize("how", ["release", "kill -9"])
def test_the_second_starts_when_the_first_goes_not_at_the_ttl(home: Home, how: str) -> None:
    first = home.start(HOLD, "10m")
    first_id, first_epoch, _ = held(first)
    second = home.start(HOLD, "10m")
    ledger = ledger_of(home)
    wait_until(lambda: any(a.lease.state is LeaseState.WAITING for a in ledger.leases()))
    gone_at = time.monotonic_ns()
    if how == "release":
        first.stdin.write("\n")
        first.stdin.flush()
    else:
        first.kill()
    _, second_epoch, at = held(second)
    assert second_epoch > first_epoch  # L1
    assert at - gone_at < 5e9, "it waited for a timer instead of the event"
    ended = ledger.look(first_id).lease
    assert ended.reason is (EndReason.RELEASED if how == "release" else EndReason.HOLDER_LOST)
    assert not ledger.verify().faults


def test_a_waiter_that_dies_leaves_the_waitlist(home: Home) -> None:
    first = home.start(HOLD, "10m")
    held(first)
    second = home.start(HOLD, "10m")
    ledger = ledger_of(home)
    wait_until(lambda: any(a.lease.state is LeaseState.WAITING for a in ledger.leases()))
    second.kill()
    wait_until(lambda: len(ledger.leases()) == 1)
    assert ledger.tenant(home.settings["tenant"]).waiting == 0


def test_a_stopped_holder_is_killed_at_its_deadline(home: Home) -> None:
    """K2, L6: SIGSTOP past the expiry; nothing it does later can count, because it is dead."""
    child = home.start(HOLD, "2s")
    lease_id, _, _ = held(child)
    os.kill(child.pid, signal.SIGSTOP)
    wait_until(lambda: process_is_gone(child.pid))
    ledger = ledger_of(home)
    wait_until(lambda: ledger.look(lease_id).lease.settled_at)
    assert ledger.look(lease_id).lease.reason is EndReason.EXPIRED
    settled = [e for _, e in ledger.tail(limit=100) if e.kind == "lease.settled"]
    assert '"ladder":"kill"' in settled[-1].body
    assert ledger.devices()[0].free_bytes == 16 << 30


def test_a_lease_that_cannot_be_paid_any_longer_is_told_before_it_ends(home: Home) -> None:
    """It has a ttl of a minute and GPU time for two seconds: told after one, over after two, whatever the ttl says (L6)."""
    ledger = ledger_of(home)
    ledger.add_tenant(Tenant(name="poor", gpu_us_per_day=2_000_000), actor="test")
    with sublet.gpu(vram="16GiB", ttl="1m", tenant="poor", exclusivity="device", holder="name") as lease:
        wait_until(lambda: lease.notice is not None)
        assert lease.status == "revoking"
        assert "used its 2.0s of GPU time a day" in lease.notice.reason
        wait_until(lambda: lease.status == "ended")
        with pytest.raises(sublet.LeaseLost):
            lease.check()
        wait_until(lambda: ledger.look(lease.id).lease.state is LeaseState.ENDED)
    ended = ledger.look(lease.id).lease
    assert ended.reason is EndReason.QUOTA
    assert 2_000_000 <= ended.ended_at - ended.granted_at < 2_001_000
    with (
        pytest.raises(sublet.Refused, match=r"left are .* refill at"),
        sublet.gpu(vram="1GiB", ttl="1m", tenant="poor", wait=0, holder="name"),
    ):
        pass


ZOMBIE = """
    import sublet, sys, os, signal
    from sublet import wiring
    from sublet.core.progress.effect import Commit
    with sublet.gpu(vram="16GiB", ttl="3s", holder="name") as lease:
        ledger = wiring.open_ledger(wiring.load_settings())
        ledger.commit(lease.key, Commit(job="j", key="j:1", step=1, fingerprint="f", expected_version=0, digest="d1"))
        print("held", lease.id, lease.epoch, 0, flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
        for what in ("commit", "renew"):
            try:
                if what == "commit":
                    ledger.commit(lease.key, Commit(job="j", key="j:2-zombie", step=2, fingerprint="z", expected_version=1, digest="zombie"))
                else:
                    ledger.renew(lease.key)
                print(what, "succeeded", flush=True)
            except sublet.SubletError as e:
                print(what, e.code, flush=True)
        print("status", lease.status, flush=True)
"""


def test_a_holder_continued_after_its_expiry_can_write_nothing(home: Home) -> None:
    """S2, L3. Held by name, so that nobody kills it: the fence alone must stop it."""
    zombie = home.start(ZOMBIE)
    lease_id, epoch, _ = held(zombie)
    ledger = ledger_of(home)
    wait_until(lambda: ledger.look(lease_id).lease.state is LeaseState.ENDED)
    with sublet.gpu(vram="16GiB", ttl="1m") as mine:
        assert mine.epoch > epoch
        step = Commit(job="j", key="j:2", step=2, fingerprint="f", expected_version=1, digest="mine")
        assert ledger.commit(mine.key, step) == Committed(2)
        os.kill(zombie.pid, signal.SIGCONT)
        said = zombie.stdout.read().splitlines()
        assert said == ["commit fenced", "renew lease_lost", "status ended"]
        head = ledger.head("j")
        assert head is not None
        assert (head.version, head.digest) == (2, "mine")
    assert not ledger.verify().faults


def test_a_revoked_holder_hears_of_it_may_commit_and_then_is_ended(home: Home) -> None:
    child = home.start(
        """
        import sublet, time
        from sublet import wiring
        from sublet.core.progress.effect import Commit
        with sublet.gpu(vram="16GiB", ttl="10m") as lease:
            print("held", lease.id, lease.epoch, 0, flush=True)
            while lease.notice is None:
                time.sleep(0.005)
            ledger = wiring.open_ledger(wiring.load_settings())
            done = ledger.commit(lease.key, Commit(job="j", key="j:1", step=1, fingerprint="f", expected_version=0, digest="d"))
            print(lease.status, done.version, lease.notice.reason, flush=True)
            time.sleep(600)
        """
    )
    lease_id, _, _ = held(child)
    ledger = ledger_of(home)
    ledger.revoke(lease_id, reason=EndReason.REVOKED, detail="maintenance", grace_us=2_000_000, actor="op")
    assert child.stdout.readline().strip() == "revoking 1 revoked: maintenance"
    wait_until(lambda: process_is_gone(child.pid))
    wait_until(lambda: ledger.look(lease_id).lease.settled_at)
    ended = ledger.look(lease_id).lease
    assert ended.reason is EndReason.REVOKED
    assert ended.ended_at >= ended.deadline_at  # the whole grace was its own
    assert not ledger.verify().faults


def test_the_keeper_renews_while_there_is_work(home: Home) -> None:
    # This process is the holder, and dies with its lease: a machine that is busy for a moment must not end the tests.
    with sublet.gpu(vram="1GiB", ttl="4s") as lease:
        time.sleep(6)
        assert lease.status == "active"
        assert ledger_of(home).look(lease.id).lease.state is LeaseState.ACTIVE


def test_an_unused_lease_runs_out_with_a_notice_before_its_end(home: Home) -> None:
    """Acquired by name without a block and never touched: idle, so not renewed."""
    lease = sublet.gpu(vram="1GiB", ttl="4s", holder="name").acquire()
    lease._touched = False
    heard: list[float] = []
    lease.on_notice(lambda notice: heard.append(lease.seconds_left))
    wait_until(lambda: lease.status == "ended")
    assert heard
    assert heard[0] > 0, "the warning came after the end"
    with pytest.raises(sublet.LeaseLost):
        lease.check()
    ledger = ledger_of(home)
    wait_until(lambda: ledger.look(lease.id).lease.state is LeaseState.ENDED)


def test_touching_keeps_it(home: Home) -> None:
    lease = sublet.gpu(vram="1GiB", ttl="3s", holder="name").acquire()
    for _ in range(45):
        lease.touch()
        time.sleep(0.1)
    assert lease.status == "active"
    lease.release()


def test_an_idle_lease_goes_to_who_waits(home: Home) -> None:
    ledger = ledger_of(home)
    policy = ledger.policy()
    import dataclasses

    ledger.set_policy(dataclasses.replace(policy, idle_after_us=300_000, grace_us=500_000), actor="test")
    idle = sublet.gpu(vram="16GiB", ttl="10m", holder="name").acquire()
    child = home.start(HOLD, "10m")
    held(child)
    ended = ledger.look(idle.id).lease
    assert ended.reason is EndReason.IDLE
    wait_until(lambda: idle.status == "ended")


def test_interrupted_as_it_was_granted(home: Home) -> None:
    """The grant is durable, and its holder will never know: it is given back, not left to run out."""
    ledger = ledger_of(home)

    class InterruptedOnItsWayBack:
        def __getattr__(self, name: str) -> object:
            return getattr(ledger, name)

        def acquire(self, *args: object) -> None:
            ledger.acquire(*args)  # type: ignore[arg-type]
            raise KeyboardInterrupt

    request = sublet.gpu(vram="1GiB").request
    holder = Holder(host=home.settings["host"])
    with sublet.gpu(vram="1GiB"):  # so that there is a device
        pass
    with pytest.raises(KeyboardInterrupt):
        acquire(InterruptedOnItsWayBack(), wiring.CLOCK, request, holder)  # type: ignore[arg-type]
    last = max((a.lease for a in ledger.leases(live_only=False)), key=lambda lease: lease.granted_at)
    assert last.reason is EndReason.RELEASED
    assert not [a for a in ledger.leases() if a.lease.state is not LeaseState.ENDED]


def test_release_is_idempotent_and_follows_an_exception(home: Home) -> None:
    with pytest.raises(RuntimeError, match="mine"), sublet.gpu(vram="1GiB") as lease:
        raise RuntimeError("mine")
    ledger = ledger_of(home)
    assert ledger.look(lease.id).lease.reason is EndReason.RELEASED
    lease.release()
    lease.release()
    assert lease.status == "ended"
    with pytest.raises(sublet.LeaseLost):
        lease.touch()


def test_a_forked_child_does_not_hold_its_parents_lease(home: Home) -> None:
    with sublet.gpu(vram="1GiB") as lease:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                lease.release()
                os.write(write, lease.status.encode())
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        assert os.read(read, 100) == b"ended"
        assert lease.status == "active"
        assert ledger_of(home).look(lease.id).lease.state is LeaseState.ACTIVE


def test_nonblocking_is_refused_with_a_reason(home: Home) -> None:
    with sublet.gpu(vram="16GiB"):
        with pytest.raises(sublet.NoCapacity, match="needs 1GiB, nothing is free"):
            sublet.gpu(vram="1GiB", wait=0).acquire()
        begun = time.monotonic()
        with pytest.raises(sublet.WaitTimedOut):
            sublet.gpu(vram="1GiB", wait="1s").acquire()
        assert time.monotonic() - begun >= 1


def test_a_range_takes_what_is_free(home: Home) -> None:
    with sublet.gpu(vram="10GiB"), sublet.gpu(vram="2GiB..12GiB", wait=0) as lease:
        assert lease.vram_bytes == 6 << 30


def test_an_offer_is_a_choice(home: Home) -> None:
    seen = []
    with sublet.gpu(vram="10GiB"):
        request = sublet.gpu(vram="12GiB", on_offer=lambda answer: seen.append(answer.lease.detail) or True)
        with request as lease:
            assert lease.vram_bytes == 6 << 30
    assert "6GiB is free now" in seen[0]
    assert not ledger_of(home).verify().faults


def test_bad_input_is_one_sentence_and_changes_nothing(home: Home) -> None:
    ledger = ledger_of(home)
    before = ledger.tail(limit=1)
    for wrong in (
        {"vram": "-1GB"},
        {"vram": 0},
        {"vram": "lots"},
        {"ttl": 0},
        {"ttl": "0s"},
        {"ttl": "400d"},
        {"ttl": float("nan")},
        {"count": 0},
        {"count": 1.5},
        {"exclusivity": "exclusive-ish"},
        {"tier": "urgent"},
        {"tenant": "x'; DROP TABLE lease; --"},
        {"tenant": "../root"},
        {"job": "a b"},
        {"wait": "-3s"},
        {"least": "2GB", "vram": "1GB"},
    ):
        with pytest.raises(sublet.BadInput) as caught:
            sublet.gpu(**wrong).acquire()
        assert "\n" not in str(caught.value)
        assert caught.value.remedy
    with pytest.raises(sublet.NotFound, match="tenant nobody is unknown"):
        sublet.gpu(tenant="nobody").acquire()
    with pytest.raises(sublet.NeverFits):
        sublet.gpu(vram="64GB").acquire()
    assert [
        e.kind for _, e in ledger.tail(after=before[-1][0] if before else 0) if e.kind.startswith("lease.")
    ] in (
        ["lease.refused"],
        [],
    )
    assert ledger.leases(live_only=False) == []


def test_a_lease_kept_warm_that_is_touched_stays_and_goes_when_it_is_not(sqlite_home: Home) -> None:
    lease = sublet.gpu(vram="1GiB", ttl="1m", holder="process").acquire()
    lease.warm_us = 1_000_000
    given_back = threading.Event()
    lease.keep_warm(given_back.set)
    for _ in range(30):  # for three times as long as it is kept untouched
        lease.touch()
        assert lease.seconds_to_go > 0.5
        time.sleep(0.1)
    assert not given_back.is_set()
    assert lease.status == "active"
    assert given_back.wait(60)
    assert "nobody used it" in lease.yielded
    with pytest.raises(sublet.LeaseLost):
        lease.touch()
