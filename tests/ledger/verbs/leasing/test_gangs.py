"""One lease over several hosts, on both engines: granted whole or not at all, lost whole, given back host by host."""

from __future__ import annotations

import threading
import uuid
from random import Random
from typing import Any

import pytest

from sublet.core.errors import BadInput, LeaseLost, NeverFits, SubletError
from sublet.core.leasing.lease import EndReason, Holder, LeaseState, Request, Tier
from sublet.core.scheduling.device import DeviceState, Exclusivity
from sublet.core.scheduling.spread import Spread
from sublet.ledger.verbs.leasing import gangs
from sublet.ledger.verbs.leasing.waitlist import load_view
from sublet.ports.ledger import Answer
from sublet.ports.processes import Receipt
from tests.ledger.rig import HERE, MINUTE, SECOND, Rig

HOSTS = ("host-a", "host-b", "host-c")
PROVEN = Receipt(proven=True, ladder="term", containment="subreaper", pids=(7,), duration_us=1000)
UNPROVEN = Receipt(proven=False, ladder="unproven", containment="", detail="it does not die", duration_us=5)


@pytest.fixture
def pool(rig: Rig) -> Rig:
    """Three hosts with two devices each."""
    rig.tenant("ada")
    for host in HOSTS:
        rig.devices({f"{host}-0": 80, f"{host}-1": 80}, host=host)
    return rig


def gang(pool: Rig, count: int = 4, vram: int = 80, **request: Any) -> Answer:
    return pool.ask(vram, count=count, spread=Spread.OK, **request)


def one(pool: Rig, host: str) -> Answer:
    """A device of this host."""
    lease_id = f"one-{uuid.uuid4().hex[:8]}"
    pool.secrets[lease_id] = f"secret-{uuid.uuid4().hex}"
    wanted = Request(tenant="ada", vram_bytes=80, ttl_us=5 * MINUTE, host=host)
    return pool.ledger.acquire(lease_id, pool.secrets[lease_id], wanted, Holder(host=host))


def member(host: str, pid: int = 0) -> Holder:
    return Holder(host=host, pid=pid or 100 + ord(host[-1]), started=1)


def sit(pool: Rig, answer: Answer, *hosts: str) -> None:
    for host in hosts or [s.host for s in pool.ledger.seats(answer.lease.id)]:
        pool.ledger.seat(pool.key(answer), member(host), address=f"{host}:29500")


def seats(pool: Rig, answer: Answer) -> dict[str, tuple[str, ...]]:
    return {s.host: tuple(x.device_id for x in s.slices) for s in pool.ledger.seats(answer.lease.id)}


def free(pool: Rig) -> dict[str, int]:
    found = dict.fromkeys(HOSTS, 0)
    for d in pool.ledger.devices():
        found[d.host] += d.free_bytes
    return found


def lose(pool: Rig, answer: Answer, host: str) -> bool:
    return pool.ledger.end(
        answer.lease.id,
        answer.lease.epoch,
        reason=EndReason.HOLDER_LOST,
        detail=f"process {member(host).pid} ended without leaving it",
        host=host,
    )


def settle(pool: Rig, answer: Answer, host: str, receipt: Receipt = PROVEN) -> bool:
    return pool.ledger.settle(answer.lease.id, answer.lease.epoch, receipt, host=host)


# --- granted -------------------------------------------------------------------------------------------------------


def test_l1_l2_it_is_granted_whole_with_one_epoch_and_a_seat_on_each_host(pool: Rig) -> None:
    before = gang(pool, 2)  # one host has them
    answer = gang(pool, 4)
    assert before.lease.seats == 0
    assert not pool.ledger.seats(before.lease.id)
    assert answer.lease.state is LeaseState.ACTIVE
    assert answer.lease.epoch > before.lease.epoch
    assert answer.lease.seats == 2
    assert seats(pool, answer) == {"host-b": ("host-b-0", "host-b-1"), "host-c": ("host-c-0", "host-c-1")}
    assert free(pool) == dict.fromkeys(HOSTS, 0)
    assert pool.ledger.tenant("ada").live_leases == 2
    assert not pool.faults()


def test_it_takes_one_host_where_one_has_them(pool: Rig) -> None:
    small = one(pool, "host-a")
    assert small.lease.slices[0].device_id.startswith("host-a")
    two = gang(pool, 2)
    assert {s.device_id[:6] for s in two.lease.slices} == {"host-b"}, "fewest hosts"
    two_more = gang(pool, 2)
    assert {s.device_id[:6] for s in two_more.lease.slices} == {"host-c"}


def test_who_does_not_ask_for_it_waits_or_is_told(pool: Rig) -> None:
    with pytest.raises(NeverFits, match="spread=ok takes them from several"):
        pool.ask(80, count=3)
    for host in HOSTS:
        one(pool, host)
    waiting = pool.ask(80, count=2)
    assert waiting.lease.state is LeaseState.WAITING
    assert waiting.wait is not None
    assert "on one host" in waiting.wait.reason
    assert gang(pool, 2, lease_id="z").lease.state is LeaseState.ACTIVE, "what no host has alone is nobody's"


def test_all_or_nothing_when_something_breaks_in_the_middle(
    pool: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = pool.state()

    def breaks(tx: Any, lease: Any) -> None:
        gangs_lay(tx, lease)
        raise RuntimeError("power")

    gangs_lay = gangs.lay
    monkeypatch.setattr(gangs, "lay", breaks)
    with pytest.raises(RuntimeError, match="power"):
        gang(pool, 4)
    assert pool.state() == before


def test_a_process_cannot_ask_for_it(pool: Rig) -> None:
    with pytest.raises(BadInput, match="asked for by name"):
        gang(pool, 4, pid=77)


def test_a_waiting_gang_is_granted_whole_when_the_last_device_is_back(pool: Rig) -> None:
    held = [one(pool, "host-a"), one(pool, "host-b")]
    waiting = gang(pool, 6)
    assert waiting.lease.state is LeaseState.WAITING
    for answer in held:
        assert pool.look(waiting).state is LeaseState.WAITING
        assert not pool.ledger.seats(waiting.lease.id)
        assert pool.look(waiting).slices == ()
        pool.release(answer)
    granted = pool.look(waiting)
    assert (granted.state, granted.seats, len(granted.slices)) == (LeaseState.ACTIVE, 3, 6)
    assert len(pool.ledger.seats(granted.id)) == 3
    assert not pool.faults()


def test_l2_gangs_that_want_the_same_hosts_never_wait_for_each_other(pool: Rig) -> None:
    """Twelve clients ask, hold and give back at once: each is served whole, none for ever waits, nothing is ever overcommitted."""
    served: list[str] = []
    wrong: list[object] = []
    done = threading.Event()

    def watch() -> None:
        other = pool.open()
        while not done.is_set():
            for a in other.leases():
                lease = a.lease
                if lease.state is LeaseState.ACTIVE and len(lease.slices) != lease.request.count:
                    wrong.append(lease)
                if lease.state is LeaseState.ACTIVE and lease.seats:
                    there = other.seats(lease.id)
                    if sum(len(s.slices) for s in there) != lease.request.count:
                        wrong.append((lease, there))

    def client(number: int) -> None:
        draw, ledger = Random(number), pool.open()
        try:
            for turn in range(4):
                answer = gang(
                    pool,
                    draw.choice([3, 4, 6]),
                    lease_id=f"g{number:02d}-{turn}",
                    ledger=ledger,
                    tier=draw.choice(list(Tier)),
                )
                while answer.lease.state is LeaseState.WAITING:
                    answer = ledger.attend(answer.lease.id, pool.secret(answer), explain=False)
                for seat in ledger.seats(answer.lease.id)[:: draw.choice([1, -1])]:
                    ledger.seat(pool.key(answer), member(seat.host, 1000 + number))
                    ledger.stand_up(pool.key(answer), member(seat.host, 1000 + number))
                ledger.release(answer.lease.id, pool.secret(answer))
                served.append(answer.lease.id)
        except Exception as e:
            wrong.append(e)

    watcher = threading.Thread(target=watch)
    clients = [threading.Thread(target=client, args=(n,)) for n in range(6)]
    for thread in [watcher, *clients]:
        thread.start()
    for thread in clients:
        thread.join(120)
    done.set()
    watcher.join(20)
    assert not wrong, wrong[:3]
    assert len(served) == 24
    assert free(pool) == dict.fromkeys(HOSTS, 160)
    assert pool.ledger.tenant("ada").live_leases == 0
    assert not pool.faults()


# --- sat on --------------------------------------------------------------------------------------------------------


def test_only_a_process_of_its_hosts_sits_down_and_one_on_each(pool: Rig) -> None:
    answer = gang(pool, 4)
    hosts = list(seats(pool, answer))
    other = next(h for h in HOSTS if h not in hosts)
    with pytest.raises(LeaseLost, match=f"not on {other}"):
        pool.ledger.seat(pool.key(answer), member(other))
    with pytest.raises(LeaseLost, match="only a process"):
        pool.ledger.seat(pool.key(answer), Holder(host=hosts[0]))
    sit(pool, answer)
    sit(pool, answer)  # the answer was lost, and it asks again
    with pytest.raises(LeaseLost, match="sits there already"):
        pool.ledger.seat(pool.key(answer), member(hosts[0], 4711))
    with pytest.raises(LeaseLost, match="no lease"):
        pool.ledger.seat(
            type(pool.key(answer))(answer.lease.id, answer.lease.epoch, "guess"), member(hosts[0])
        )
    assert [s.address for s in pool.ledger.seats(answer.lease.id)] == [f"{h}:29500" for h in hosts]


def test_k3_each_warden_reads_its_own_seat_and_no_other(pool: Rig) -> None:
    answer = gang(pool, 4, host=HERE)
    sit(pool, answer)
    for host, devices in seats(pool, answer).items():
        [mine] = pool.open().host_view(host).leases
        assert (mine.id, mine.holder) == (answer.lease.id, member(host))
        assert tuple(s.device_id for s in mine.slices) == devices
        assert mine.expires_at == pool.look(answer).expires_at
    assert pool.ledger.host_view(HERE).leases == (), "who asked by name has nothing to enforce"


def test_a_member_that_stands_up_may_end_without_ending_the_others(pool: Rig) -> None:
    answer = gang(pool, 4)
    first, second = seats(pool, answer)
    sit(pool, answer)
    assert pool.ledger.stand_up(pool.key(answer), member(first))
    assert not pool.ledger.stand_up(pool.key(answer), member(first, 4711))
    assert not lose(pool, answer, first), "its warden saw it go, and it had said so"
    assert pool.look(answer).state is LeaseState.ACTIVE
    assert lose(pool, answer, second)


def test_a_member_that_fails_says_why_and_ends_the_others(pool: Rig) -> None:
    answer = gang(pool, 4)
    first, second = seats(pool, answer)
    sit(pool, answer)
    assert pool.ledger.stand_up(pool.key(answer), member(first), failed="it failed with ValueError: no")
    over = pool.look(answer)
    assert (over.state, over.reason) == (LeaseState.ENDED, EndReason.HOLDER_LOST)
    assert over.detail == f"its member on {first} (rank 0 of 2) is lost: it failed with ValueError: no"
    assert free(pool)[first] == 160, "it has said itself that it uses nothing any more"
    assert free(pool)[second] == 0
    assert settle(pool, answer, second)
    assert not pool.faults()


def test_a_gang_of_one_host_is_held_by_name_again_when_its_member_leaves(pool: Rig) -> None:
    answer = gang(pool, 2)
    [host] = {d.host for d in pool.ledger.devices() if d.id == answer.lease.slices[0].device_id}
    pool.ledger.seat(pool.key(answer), member(host))
    assert pool.look(answer).holder == member(host)
    assert pool.ledger.stand_up(pool.key(answer), member(host))
    assert not lose(pool, answer, host), "its warden saw it go, and it had said so"
    assert pool.release(answer)
    assert pool.look(answer).settled_at
    assert not pool.faults()


# --- lost ----------------------------------------------------------------------------------------------------------


def test_s2_k1_one_member_lost_ends_the_gang_and_each_host_gives_back_its_own(pool: Rig) -> None:
    answer = gang(pool, 4)
    first, second = seats(pool, answer)
    sit(pool, answer)
    assert pool.commit(answer, 1).version == 1
    assert lose(pool, answer, second)
    ended = pool.look(answer)
    assert (ended.state, ended.reason, ended.settled_at) == (LeaseState.ENDED, EndReason.HOLDER_LOST, 0)
    assert ended.detail == (
        f"its member on {second} (rank 1 of 2) is lost: process {member(second).pid} ended without leaving it"
    )
    with pytest.raises(SubletError) as refused:
        pool.commit(answer, 2)
    assert refused.value.code == "fenced"
    with pytest.raises(LeaseLost):
        pool.ledger.renew(pool.key(answer))
    with pytest.raises(LeaseLost):
        pool.ledger.seat(pool.key(answer), member(first))
    assert [x.state for x in pool.ledger.host_view(first).leases] == [LeaseState.ENDED], "to be ended at once"
    assert free(pool)[first] == free(pool)[second] == 0
    assert settle(pool, answer, second)
    assert not settle(pool, answer, second), "once"
    assert free(pool)[second] == 160
    assert free(pool)[first] == 0, "that one's memory may still be in use"
    assert pool.ledger.tenant("ada").live_leases == 1
    assert not pool.look(answer).settled_at
    again = one(pool, second)  # and its devices are leased again, beside the half that is not settled
    assert again.lease.state is LeaseState.ACTIVE
    assert again.lease.epoch > answer.lease.epoch
    assert settle(pool, answer, first)
    assert pool.look(answer).settled_at
    assert pool.ledger.tenant("ada").live_leases == 1
    assert {t.host for t in pool.ledger.receipts()} == {first, second}
    assert pool.ledger.host_view(first).leases == ()
    assert pool.kinds(answer.lease.id)[-1] == "lease.settled"
    assert not pool.faults()


def test_a_half_settled_gang_stands_in_nobodys_way(pool: Rig) -> None:
    """The schedule and the forecast look at what is still taken, not at what was."""
    answer = gang(pool, 6)
    sit(pool, answer)
    waiting = [pool.ask(80, lease_id=f"w{n}", exclusivity=Exclusivity.DEVICE) for n in range(5)]
    lose(pool, answer, "host-b")
    settle(pool, answer, "host-b")
    view = pool.ledger.engine.read(lambda tx: load_view(tx, with_leases=True))
    [seen] = [x for x in view.leases if x.id == answer.lease.id]
    assert {s.device_id[:6] for s in seen.slices} == {"host-a", "host-c"}
    pool.ledger.tick("host-b")
    states = [pool.ledger.attend(w.lease.id, pool.secret(w)).lease.state for w in waiting]
    assert states == [LeaseState.ACTIVE] * 2 + [LeaseState.WAITING] * 3
    settle(pool, answer, "host-a")
    settle(pool, answer, "host-c")
    assert [pool.look(w).state for w in waiting] == [LeaseState.ACTIVE] * 5
    assert not pool.faults()


def test_what_nobody_sat_on_goes_back_at_the_end_and_the_rest_when_it_is_proven(pool: Rig) -> None:
    answer = gang(pool, 4)
    first, second = seats(pool, answer)
    sit(pool, answer, first)
    assert pool.release(answer)
    assert pool.look(answer).reason is EndReason.RELEASED
    assert free(pool)[second] == 160
    assert free(pool)[first] == 0
    assert settle(pool, answer, first)
    assert pool.look(answer).settled_at
    nobody = gang(pool, 6)
    assert pool.release(nobody)
    assert pool.look(nobody).settled_at
    assert free(pool) == dict.fromkeys(HOSTS, 160)
    assert pool.ledger.tenant("ada").live_leases == 0
    assert not pool.faults()


def test_an_unproven_teardown_withholds_the_devices_of_its_host_only(pool: Rig) -> None:
    answer = gang(pool, 4)
    first, second = seats(pool, answer)
    sit(pool, answer)
    lose(pool, answer, first)
    settle(pool, answer, first, UNPROVEN)
    settle(pool, answer, second)
    assert {d.host for d in pool.ledger.devices() if d.state is DeviceState.QUARANTINED} == {first}
    assert pool.ledger.tenant("ada").live_leases == 0


@pytest.mark.parametrize("how", ["expiry", "revoke"])
def test_the_deadline_is_the_whole_gangs(how: str, pool: Rig) -> None:
    answer = gang(pool, 4, ttl_us=MINUTE)
    sit(pool, answer)
    if how == "revoke":
        pool.ledger.revoke(
            answer.lease.id, reason=EndReason.REVOKED, detail="maintenance", grace_us=SECOND, actor="root"
        )
        for host in seats(pool, answer):
            [mine] = pool.ledger.host_view(host).leases
            assert mine.state is LeaseState.REVOKING
            assert mine.ends_at == pool.look(answer).deadline_at
        assert pool.commit(answer, 1).version == 1, "within its grace"
    for _ in range(4):
        pool.advance(20 * SECOND)
        for host in HOSTS:
            pool.ledger.beat_host(host)
    pool.ledger.tick("host-a")
    ended = pool.look(answer)
    assert ended.state is LeaseState.ENDED
    assert ended.reason is (EndReason.REVOKED if how == "revoke" else EndReason.EXPIRED)
    assert not ended.settled_at
    assert sum(free(pool).values()) == 160


def test_k1_k3_a_silent_host_ends_the_gang_and_keeps_its_slices_until_it_has_looked(pool: Rig) -> None:
    answer = gang(pool, 4, ttl_us=60 * MINUTE)
    first, second = seats(pool, answer)
    sit(pool, answer)
    pool.while_heard(
        pool.ledger.policy().host_silence_us + SECOND, *(host for host in HOSTS if host != second)
    )
    pool.ledger.tick(first)
    ended = pool.look(answer)
    assert (ended.state, ended.reason) == (LeaseState.ENDED, EndReason.DEVICE_LOST)
    assert (
        f"its member on {second} (rank 1 of 2) is lost: the warden there has said nothing for" in ended.detail
    )
    with pytest.raises(SubletError):
        pool.commit(answer, 1)
    assert settle(pool, answer, first)
    assert free(pool)[first] == 160
    for _ in range(3):  # as often as anybody looks
        pool.ledger.tick(first)
    assert free(pool)[second] == 0, "it may be frozen, and move again"
    # It is back: its new warden reads what the last one had to enforce.
    [mine] = pool.open().host_view(second).leases
    assert (mine.state, mine.holder) == (LeaseState.ENDED, member(second))
    assert settle(pool, answer, second)
    assert pool.look(answer).settled_at
    assert not pool.faults()


def test_a_silent_warden_does_not_end_the_gang_of_its_own_host(pool: Rig) -> None:
    """It is the one who runs the schedule, so it lives."""
    answer = gang(pool, 4, ttl_us=60 * MINUTE)
    first, second = seats(pool, answer)
    pool.advance(pool.ledger.policy().host_silence_us + SECOND)
    pool.ledger.beat_host(first)
    pool.ledger.tick(second)
    assert pool.look(answer).state is LeaseState.ACTIVE


def test_a_host_that_does_not_come_back_is_given_up_alone(pool: Rig) -> None:
    answer = gang(pool, 4, ttl_us=MINUTE)
    first, second = seats(pool, answer)
    sit(pool, answer)
    lose(pool, answer, second)
    settle(pool, answer, first)
    pool.while_heard(MINUTE + pool.ledger.policy().host_gone_us, *(host for host in HOSTS if host != second))
    pool.ledger.tick(first)
    assert pool.look(answer).settled_at
    assert {d.host for d in pool.ledger.devices() if d.state is DeviceState.QUARANTINED} == {second}
    assert pool.ledger.tenant("ada").live_leases == 0
    # Its warden is back: it sees its own member, and nothing else of the gang.
    assert pool.ledger.host_view(first).leases == ()
    [seen] = pool.ledger.host_view(second).leases
    assert (seen.holder.host, seen.holder.pid) == (second, member(second).pid)
    assert {s.device_id for s in seen.slices} == set(seats(pool, answer)[second])
    assert settle(pool, answer, second)
    assert {d.state for d in pool.ledger.devices()} == {DeviceState.READY}
    assert all(t.receipt.proven for t in pool.ledger.receipts())
    assert not pool.faults()


def test_a_gang_of_a_silent_asker_is_not_settled_for_it(pool: Rig) -> None:
    """Who asked by name may be on any machine; what runs is on others."""
    pool.ledger.beat_host("laptop")
    answer = gang(pool, 4, ttl_us=MINUTE, host="laptop")
    sit(pool, answer)
    for _ in range(2):
        pool.while_heard(MINUTE + pool.ledger.policy().host_gone_us, *HOSTS)
        pool.ledger.tick("host-a")
    ended = pool.look(answer)
    assert ended.state is LeaseState.ENDED
    assert not ended.settled_at


def test_restored_from_a_backup_no_member_writes_and_each_host_proves(pool: Rig) -> None:
    answer = gang(pool, 4)
    sit(pool, answer)
    pool.ledger.mark_restored(actor="root")
    assert pool.look(answer).state is LeaseState.ENDED
    assert sum(free(pool).values()) == 160
    for host in seats(pool, answer):
        assert settle(pool, answer, host)
    assert pool.look(answer).settled_at
