"""What users say of gangs, on one machine: what is refused with which words, a member that joins, fails and leaves. Several machines are in
`tests/deploy/test_gangs.py`."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time

import pytest

import sublet
from sublet import wiring
from sublet.core.leasing.lease import EndReason, LeaseState
from sublet.leases.gangs.member import key_of
from sublet.leases.gangs.members import Members, meeting_place, rank_environment
from sublet.ports.ledger import LeaseKey
from tests.homes import Home, process_is_gone, wait_until

MEMBER = """
    import os, sublet, sys
    with sublet.join() as member:
        print(member.rank, member.world, *member.devices, os.environ["MASTER_ADDR"], flush=True)
        if sys.stdin.readline().strip() == "fail":
            raise ValueError("a fault of the user's code")
"""


def around() -> list[str]:
    return [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SUBLET_LEASE_ID")]


def test_a_lease_of_one_host_has_one_member(sqlite_home: Home) -> None:
    with sublet.gpu(vram="100MB", ttl="1m", holder="worker") as lease:
        assert lease.run_everywhere(around) == [["0", "1", "0", lease.id]]
        with pytest.raises(ZeroDivisionError):
            lease.run_everywhere(divmod, 1, 0)
        assert lease.run_everywhere(sum, [1, 2]) == [3]


def test_words_that_are_refused(sqlite_home: Home) -> None:
    with pytest.raises(sublet.BadInput, match="use no or ok"):
        sublet.gpu(count=2, spread="maybe")
    for holder in ("process", "worker"):
        with pytest.raises(sublet.BadInput, match="several hosts") as refused:
            sublet.gpu(count=2, spread="ok", holder=holder)
        assert "sublet.join()" in refused.value.remedy
    with pytest.raises(sublet.BadInput, match="SUBLET_GANG is not set"):
        sublet.join()
    for ticket in ("L1", "L1:x:secret", "L1:3:", "::"):
        with pytest.raises(sublet.BadInput, match="ticket"):
            key_of(ticket)
    assert key_of("L1:3:a:b").secret == "a:b"


def test_who_asked_for_it_is_not_a_member(sqlite_home: Home) -> None:
    with sublet.gpu(vram="100MB", ttl="1m", holder="name") as lease:
        with pytest.raises(sublet.BadInput, match="one or the other"):
            sublet.join(lease.ticket)
        assert lease.status == "active"


@pytest.mark.parametrize("how", ["leave", "fail"])
def test_a_member_joins_and_leaves_or_fails(how: str, sqlite_home: Home) -> None:
    ledger = wiring.open_ledger(sqlite_home.settings)
    with sublet.gpu(vram="100MB", ttl="1m", holder="name") as lease:
        member = sqlite_home.start(MEMBER, SUBLET_GANG=lease.ticket)
        assert member.stdout.readline().split() == ["0", "1", *lease.devices, "127.0.0.1"]
        assert lease.hosts == (sqlite_home.settings["host"],)
        assert ledger.look(lease.id).lease.holder.pid == member.pid
        member.stdin.write(f"{how}\n")
        member.stdin.flush()
        assert (member.wait(30) == 0) is (how == "leave")
        row = ledger.look(lease.id).lease
        if how == "leave":
            assert (row.state, row.holder.pid) == (LeaseState.ACTIVE, 0)
        else:
            assert (row.state, row.reason) == (LeaseState.ENDED, EndReason.HOLDER_LOST)
            assert row.detail == "it failed with ValueError: a fault of the user's code"
            wait_until(lambda: lease.status == "ended")
    wait_until(lambda: all(d.leases == 0 for d in ledger.devices()))


def test_ranks_are_told_as_torchrun_tells_them() -> None:
    found = rank_environment(1, 3, "[fd00::1]:29500")
    assert (found["RANK"], found["WORLD_SIZE"], found["GROUP_RANK"]) == ("1", "3", "1")
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("fd00::1", "29500")
    host, _, port = meeting_place("127.0.0.1").rpartition(":")
    assert host == "127.0.0.1"
    assert 0 < int(port) < 65536


def meets() -> list[str]:
    """Each tells the other its rank, over the place they were told to meet at."""
    rank, place = os.environ["RANK"], (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if rank == "0":
        with socket.create_server(place) as listener:
            other, _ = listener.accept()
    else:
        other = _met(place)
    with other:
        other.sendall(rank.encode())
        return [os.environ["A"], os.environ["B"], rank, other.recv(1).decode()]


def _met(place: tuple[str, int]) -> socket.socket:
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(place)
        time.sleep(0.01)


def fails_on_one() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("a fault of the user's code")
    time.sleep(60)  # as one that waits for the other


def dies_on_one() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def test_workers_of_several_hosts_are_one_to_their_lease(sqlite_home: Home) -> None:
    """Two real workers: called at once and able to meet; what one raises interrupts the other, and what one loses is lost for both."""
    key, ends = LeaseKey("L1", 3, "s"), wiring.CLOCK.monotonic_us() + 60_000_000
    workers = [wiring.workers(sqlite_home.settings).start() for _ in range(2)]
    both = Members([(worker, {"A": str(n)}) for n, worker in enumerate(workers)])
    try:
        both.arm(ends, ends, confirm=True)
        both.begin("L1", 3, {**sqlite_home.environment, "A": "all", "B": "same"})
        assert both.everywhere(key, meets, (), {}) == [["0", "same", "0", "1"], ["1", "same", "1", "0"]]
        with pytest.raises(sublet.BadInput, match="2 hosts"):
            both.only()
        with pytest.raises(ValueError, match="the user's code"):
            both.everywhere(key, fails_on_one, (), {})
        assert not both.ending
        with pytest.raises(sublet.WorkerLost):
            both.everywhere(key, dies_on_one, (), {})
        assert both.ending.startswith(f"member on {sqlite_home.settings['host']}: ")
    finally:
        both.end("over")
    assert all(process_is_gone(worker.holder.pid) for worker in workers)
