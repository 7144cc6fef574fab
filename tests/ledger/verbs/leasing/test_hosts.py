"""Several hosts on one ledger: devices that move, hosts that do not come back, on both engines."""

from __future__ import annotations

import json
import uuid

import pytest

from sublet.core.errors import BadInput
from sublet.core.leasing.lease import EndReason, Holder, LeaseState, Request
from sublet.core.scheduling.device import DeviceState
from sublet.ports.ledger import Answer
from sublet.ports.processes import Receipt
from tests.ledger.rig import HERE, MINUTE, SECOND, Rig

THERE = "node-b"


@pytest.fixture
def pool(rig: Rig) -> Rig:
    rig.tenant("ada")
    rig.device("gpu0", 80)
    return rig


def only(pool: Rig, name: str = "gpu0"):
    return next(d for d in pool.ledger.devices() if d.id == name)


def wanting(pool: Rig, host: str) -> Answer:
    """All of a device of this host, asked for there."""
    lease_id = f"{host}-{uuid.uuid4().hex[:8]}"
    pool.secrets[lease_id] = f"secret-{uuid.uuid4().hex}"
    wanted = Request(tenant="ada", vram_bytes=80, ttl_us=5 * MINUTE, host=host)
    return pool.ledger.acquire(lease_id, pool.secrets[lease_id], wanted, Holder(host=host, pid=0))


def silence(pool: Rig) -> int:
    return pool.ledger.policy().host_silence_us + SECOND


def test_a_request_of_one_host_waits_while_another_hosts_device_is_free(pool: Rig) -> None:
    """Both roads to a grant: at once, and from the waitlist when something is given back elsewhere."""
    pool.device("far0", 80, host=THERE)
    first = wanting(pool, HERE)
    second = wanting(pool, HERE)
    assert (first.lease.state, second.lease.state) == (LeaseState.ACTIVE, LeaseState.WAITING)
    far = wanting(pool, THERE)
    assert far.lease.slices[0].device_id == "far0"
    pool.release(far)
    pool.ledger.tick(THERE)
    assert pool.look(second).state is LeaseState.WAITING
    pool.release(first)
    assert pool.look(second).slices[0].device_id == "gpu0"


def test_a_device_is_not_taken_from_a_host_that_lives(pool: Rig) -> None:
    with pytest.raises(BadInput, match="whose warden is running"):
        pool.device("gpu0", 80, host=THERE)
    assert only(pool).host == HERE


def test_a_device_of_a_silent_host_moves_to_who_reports_it(pool: Rig) -> None:
    pool.advance(silence(pool))
    pool.devices({"other": 10, "gpu0": 60}, host=THERE)
    moved = only(pool)
    assert (moved.host, moved.state, moved.ordinal, moved.capacity_bytes, moved.free_bytes) == (
        THERE,
        DeviceState.READY,
        1,
        60,
        60,
    )
    assert pool.kinds("gpu0")[-1] == "device.moved"
    assert pool.ask(60, host=THERE).lease.state is LeaseState.ACTIVE
    with pytest.raises(BadInput, match="whose warden is running"):  # the first one comes back
        pool.device("gpu0", 80, host=HERE)
    assert not pool.faults()


def test_a_device_its_host_does_not_report_any_more_moves_at_once(pool: Rig) -> None:
    pool.devices({"spare": 10})  # gpu0 was given back
    pool.device("gpu0", 80, host=THERE)
    assert (only(pool).host, only(pool).state) == (THERE, DeviceState.READY)


def test_a_device_with_a_lease_that_is_not_settled_does_not_move(pool: Rig) -> None:
    """K1."""
    answer = pool.ask(80, pid=4242, ttl_us=MINUTE)
    pool.advance(silence(pool))
    for _ in range(2):  # while it runs, and when it is over and nobody has seen what it left
        with pytest.raises(BadInput, match="not settled"):
            pool.device("gpu0", 80, host=THERE)
        pool.advance(MINUTE)
        pool.ledger.tick(THERE)
    assert pool.look(answer).state is LeaseState.ENDED
    assert not pool.look(answer).settled_at
    assert only(pool).host == HERE


def test_what_was_withheld_stays_withheld_wherever_it_goes(pool: Rig) -> None:
    pool.ledger.set_device("gpu0", state="quarantined", note="it smells", actor="root")
    pool.advance(silence(pool))
    pool.device("gpu0", 80, host=THERE)
    assert (only(pool).host, only(pool).state, only(pool).note) == (
        THERE,
        DeviceState.QUARANTINED,
        "it smells",
    )


def test_a_host_that_does_not_come_back_is_given_up_and_its_tenants_are_free(pool: Rig) -> None:
    """Its lease ends at its deadline and counts against the tenant until the host is given up; what was on it is not called clean."""
    pool.ledger.set_tenant("ada", actor="root", max_leases=1)
    pool.device("far0", 1, host=THERE)
    answer = pool.ask(80, pid=4242, ttl_us=MINUTE, lease_id="gone")
    gone_us = pool.ledger.policy().host_gone_us
    pool.while_heard(2 * MINUTE, THERE)
    pool.ledger.tick(THERE)
    ended = pool.look(answer)
    assert (ended.state, ended.reason, ended.settled_at) == (LeaseState.ENDED, EndReason.EXPIRED, 0)
    assert pool.ledger.tenant("ada").live_leases == 1
    assert only(pool).state is DeviceState.LOST
    pool.while_heard(gone_us, THERE)
    pool.ledger.tick(THERE)
    assert pool.look(answer).settled_at
    assert pool.ledger.tenant("ada").live_leases == 0
    assert only(pool).state is DeviceState.QUARANTINED
    assert HERE in only(pool).note
    assert pool.kinds("gone")[-1] == "lease.settled"
    pool.devices({"gpu0": 80})  # it comes back after all: somebody looks first
    assert only(pool).state is DeviceState.QUARANTINED
    assert not pool.faults()


PROVEN = Receipt(proven=True, ladder="gone", containment="subreaper", pids=(4242,))
SEEN_TO_FAIL = Receipt(proven=False, ladder="unproven", containment="", detail="64MiB are still in use")


@pytest.fixture
def given_up(pool: Rig) -> list[Answer]:
    """Two leases on one device, of a host that was silent for so long."""
    pool.device("far0", 1, host=THERE)
    answers = [
        pool.ask(30, pid=pid, ttl_us=MINUTE, lease_id=name)
        for name, pid in (("first", 4242), ("second", 4243))
    ]
    for _ in range(2):
        pool.while_heard(MINUTE + pool.ledger.policy().host_gone_us, THERE)
        pool.ledger.tick(THERE)
    assert only(pool).state is DeviceState.QUARANTINED
    assert all(pool.look(answer).settled_at for answer in answers)
    return answers


def looked(pool: Rig, answer: Answer, receipt: Receipt = PROVEN) -> bool:
    """As its warden does with everything it is shown."""
    return pool.ledger.settle(answer.lease.id, answer.lease.epoch, receipt, host=HERE)


def to_look_at(pool: Rig, host: str = HERE) -> list[str]:
    return [lease.id for lease in pool.ledger.host_view(host).leases]


def test_what_was_given_up_is_shown_to_be_gone_by_its_own_warden(pool: Rig, given_up: list[Answer]) -> None:
    """K1, K3: the machine was only cut off. Its warden looks at what was given up, and when nothing is left of any of it the device is ready."""
    first, second = given_up
    assert to_look_at(pool) == ["first", "second"]
    assert to_look_at(pool, THERE) == []
    assert [lease.holder.pid for lease in pool.ledger.host_view(HERE).leases] == [4242, 4243]
    pool.devices({"gpu0": 80})
    assert looked(pool, first)
    assert (only(pool).state, to_look_at(pool)) == (DeviceState.QUARANTINED, ["second"])
    assert "second" in only(pool).note
    assert not looked(pool, first), "once is enough"
    assert looked(pool, second)
    assert (only(pool).state, only(pool).note, to_look_at(pool)) == (DeviceState.READY, "", [])
    assert [t.receipt for t in pool.ledger.receipts()] == [PROVEN, PROVEN]
    assert pool.kinds("gpu0")[-2:] == ["device.quarantined", "device.ready"]
    assert pool.kinds("first")[-2:] == ["lease.settled", "lease.looked_at"]
    assert pool.ledger.tenant("ada").live_leases == 0, "given back once"
    assert only(pool).free_bytes == only(pool).capacity_bytes
    assert wanting(pool, HERE).lease.state is LeaseState.ACTIVE
    assert not pool.faults()


def test_a_waiter_is_served_by_a_device_that_was_shown_to_be_clean(pool: Rig, given_up: list[Answer]) -> None:
    pool.devices({"gpu0": 80})
    waiting = wanting(pool, HERE)
    for answer in given_up:
        assert pool.look(waiting).state is LeaseState.WAITING
        looked(pool, answer)
    assert pool.look(waiting).state is LeaseState.ACTIVE


def test_what_is_left_there_after_all_stays_withheld(pool: Rig, given_up: list[Answer]) -> None:
    """K1: proof that nothing is left of one lease is none of the other."""
    first, second = given_up
    assert looked(pool, first, SEEN_TO_FAIL)
    assert "64MiB" in only(pool).note
    assert looked(pool, second)
    assert only(pool).state is DeviceState.QUARANTINED
    assert "64MiB" in only(pool).note
    assert to_look_at(pool) == []
    assert not looked(pool, first), "an operator is asked now"


def test_a_teardown_that_was_seen_to_fail_is_not_forgotten_for_one_nobody_saw(pool: Rig) -> None:
    """K1: whatever withheld the device first is still there when what was given up is shown to be gone."""
    pool.device("far0", 1, host=THERE)
    failed, other = (pool.ask(30, pid=pid, ttl_us=MINUTE) for pid in (4242, 4243))
    pool.ledger.end(failed.lease.id, failed.lease.epoch, reason=EndReason.HOLDER_LOST, detail="it died")
    assert looked(pool, failed, SEEN_TO_FAIL)
    for _ in range(2):
        pool.while_heard(MINUTE + pool.ledger.policy().host_gone_us, THERE)
        pool.ledger.tick(THERE)
    assert to_look_at(pool) == [other.lease.id]
    assert looked(pool, other)
    assert only(pool).state is DeviceState.QUARANTINED
    assert "64MiB" in only(pool).note


@pytest.mark.parametrize("state", ["quarantined", "draining"])
def test_an_operators_word_stands(pool: Rig, given_up: list[Answer], state: str) -> None:
    pool.ledger.set_device("gpu0", state=state, note="I want to see it", actor="root")
    for answer in given_up:
        looked(pool, answer)
    assert (only(pool).state.value, only(pool).note) == (state, "I want to see it")


def test_a_device_that_has_moved_on_is_not_the_old_hosts_to_clear(pool: Rig, given_up: list[Answer]) -> None:
    pool.device("gpu0", 80, host=THERE)
    for answer in given_up:
        looked(pool, answer)
    assert (only(pool).host, only(pool).state) == (THERE, DeviceState.QUARANTINED)


def test_a_silent_host_whose_holder_still_renews_is_not_given_up(pool: Rig) -> None:
    pool.device("far0", 1, host=THERE)
    answer = pool.ask(80, pid=4242, ttl_us=5 * MINUTE)
    for _ in range(6):
        pool.while_heard(3 * MINUTE, THERE)
        pool.ledger.renew(pool.key(answer))
        pool.ledger.tick(THERE)
    assert pool.look(answer).state is LeaseState.ACTIVE
    assert only(pool).leases == 1


def test_a_warden_does_not_give_up_its_own_host(pool: Rig) -> None:
    """It is the one who will settle them, with proof."""
    answer = pool.ask(80, pid=4242, ttl_us=MINUTE)
    pool.advance(MINUTE + pool.ledger.policy().host_gone_us)
    pool.ledger.tick(HERE)
    assert pool.look(answer).state is LeaseState.ENDED
    assert not pool.look(answer).settled_at


def test_a_revoked_holder_that_could_not_hear_of_it_keeps_its_memory_until_it_would_have_expired(
    pool: Rig,
) -> None:
    """L6: cut off with its warden, it works until 80 % of its ttl by its own clock."""
    pool.device("far0", 1, host=THERE)
    answer = pool.ask(80, pid=4242, ttl_us=60 * MINUTE)
    pool.ledger.revoke(
        answer.lease.id, reason=EndReason.REVOKED, detail="maintenance", grace_us=SECOND, actor="root"
    )
    for minutes, settled in ((15, False), (40, False), (10, True)):
        pool.while_heard(minutes * MINUTE, THERE)
        pool.ledger.tick(THERE)
        assert pool.look(answer).state is LeaseState.ENDED
        assert bool(pool.look(answer).settled_at) is settled, minutes


@pytest.mark.parametrize("away", [2, 100])
def test_a_time_in_which_nobody_was_heard_is_nobodys_silence(pool: Rig, away: int) -> None:
    """K1, K3: the ledger was away, or was put back from an old backup. Who is back first judges the others only by what it has heard of them since."""
    gone_us = pool.ledger.policy().host_gone_us
    pool.device("far0", 1, host=THERE)
    answer = pool.ask(80, pid=4242, ttl_us=MINUTE)
    pool.advance(away * gone_us)
    for _ in range(2):
        pool.ledger.beat_host(THERE)
        pool.ledger.tick(THERE)
    assert pool.look(answer).state is LeaseState.ENDED
    assert only(pool).state is DeviceState.READY
    assert not pool.look(answer).settled_at, "its own warden may be on its way"
    [(told,)] = pool.sql("SELECT body FROM journal WHERE kind = 'host.unheard'")
    assert abs(json.loads(told)["for_us"] - away * gone_us) < MINUTE
    # It does not come: from here on its silence counts.
    pool.while_heard(gone_us - MINUTE, THERE)
    pool.ledger.tick(THERE)
    assert (only(pool).state, pool.look(answer).settled_at) == (DeviceState.LOST, 0)
    pool.while_heard(2 * MINUTE, THERE)
    pool.ledger.tick(THERE)
    assert only(pool).state is DeviceState.QUARANTINED
    assert not pool.faults()
