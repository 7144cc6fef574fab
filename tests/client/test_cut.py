"""The service dies in the middle: nothing is lost, nothing is said twice, nothing runs twice."""

from __future__ import annotations

import random
import signal
import threading
import time
from typing import Any

import pytest

import sublet
from sublet.core.errors import Disconnected, LeaseLost, WorkerLost
from tests.client.conftest import House, settled
from tests.homes import wait_until

LINES = 400


def begins(key: str) -> None:
    """Notes in the session that it was begun: there is no folder that both sides see."""
    import sys

    noted = sys.__dict__.setdefault("begun", {})
    noted[key] = noted.get(key, 0) + 1
    print("begun", flush=True)


def begun(key: str) -> int:
    import sys

    return sys.__dict__.get("begun", {}).get(key, 0)  # type: ignore[no-any-return]


def counts(key: str, lines: int, pause: float) -> int:
    import time

    begins(key)
    for i in range(lines):
        print(f"line {i}")
        if pause:
            time.sleep(pause)
    return lines


def asks(key: str, times: int) -> list[int]:
    import time

    from sublet.processes.worker.worker import ask_caller

    begins(key)
    found = []
    for i in range(times):
        found.append(ask_caller(i))
        time.sleep(0.02)
    return found


def large(key: str, size: int) -> bytes:
    begins(key)
    return bytes(range(256)) * (size // 256)


class Seen:
    def __init__(self) -> None:
        self.said = ""

    def text(self, stream: str, text: str) -> None:
        self.said += text

    def show(self, what: Any) -> None: ...


def test_killed_twenty_times_in_the_middle_of_a_call(house: House) -> None:
    studio = house.connect()
    rng = random.Random(8)
    kills = 0
    with studio.gpu(vram="1GiB", ttl="1m") as lease:
        lease.run(len, "")
        for round_ in range(5):
            key, seen = f"r{round_}", Seen()
            found: list[Any] = []
            calling = threading.Thread(
                target=lambda key=key, seen=seen, found=found: found.append(  # type: ignore[misc]
                    lease.run_shown(counts, (key, LINES, 0.005), seen, lambda asked: None)
                )
            )
            calling.start()
            for _ in range(4):
                time.sleep(rng.uniform(0.0, 0.5))
                house.restart()
                kills += 1
            calling.join(60)
            assert found == [LINES]
            assert seen.said.splitlines() == ["begun", *(f"line {i}" for i in range(LINES))]
            assert lease.run(begun, key) == 1
        assert lease.status == "active"
    assert kills == 20
    settled(house)


def test_killed_while_questions_are_asked(house: House) -> None:
    studio = house.connect()
    answered = []

    def answer(number: int) -> int:
        answered.append(number)
        return number * number

    with studio.gpu(vram="1GiB", ttl="1m") as lease:
        lease.run(len, "")
        found: list[Any] = []
        calling = threading.Thread(
            target=lambda: found.append(lease.run_shown(asks, ("asked", 60), Seen(), answer))
        )
        calling.start()
        for _ in range(4):
            time.sleep(0.2)
            house.restart()
        calling.join(60)
        assert lease.run(begun, "asked") == 1
    assert found == [[i * i for i in range(60)]]
    assert answered == list(range(60))


def test_killed_while_a_large_result_is_on_its_way(house: House) -> None:
    studio = house.connect()
    seen, size = Seen(), 64 << 20
    with studio.gpu(vram="1GiB", ttl="1m") as lease:
        lease.run(len, "")
        found: list[bytes] = []
        calling = threading.Thread(
            target=lambda: found.append(lease.run_shown(large, ("large", size), seen, lambda asked: None))
        )
        calling.start()
        wait_until(lambda: "begun" in seen.said)
        for _ in range(2):
            house.restart()
        calling.join(60)
        assert lease.run(begun, "large") == 1
    assert found == [bytes(range(256)) * (size // 256)]


def test_a_call_sent_while_the_service_is_down_runs_once_when_it_is_back(house: House) -> None:
    studio = house.connect()
    with studio.gpu(vram="1GiB", ttl="1m") as lease:
        lease.run(len, "")
        house.kill()
        threading.Timer(0.5, house.start).start()
        assert lease.run(counts, "once", 1, 0) == 1
        assert lease.run(begun, "once") == 1


def test_a_waiter_keeps_its_place_while_the_service_is_away(house: House) -> None:
    ann, bob = house.connect("ann"), house.connect("bob")
    held = ann.gpu(vram="16GiB", ttl="1m").acquire()
    got: list[Any] = []

    def wait() -> None:
        with bob.gpu(vram="16GiB") as lease:
            got.append(lease.run(len, "abc"))

    waiting = threading.Thread(target=wait)
    waiting.start()
    wait_until(lambda: len(house.live_leases()) == 2)
    before = {a.lease.id: a.lease.joined_at for a in house.live_leases()}
    house.restart()
    assert {a.lease.id: a.lease.joined_at for a in house.live_leases()} == before
    held.release()
    waiting.join(60)
    assert got == [3]


def test_given_up_it_says_that_the_call_may_run_and_how_to_listen_to_it_again(
    house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    studio = house.connect(patience="1s")
    lease = studio.gpu(vram="1GiB", ttl="1m").acquire()
    lease.run(len, "")
    threading.Timer(0.5, house.kill).start()
    with pytest.raises(Disconnected, match="may still be running") as caught:
        lease.run(counts, "long", 30, 0.1)
    assert "1 s" in str(caught.value)
    house.start()
    capsys.readouterr()
    remedy = caught.value.remedy
    assert "studio.find(" in remedy
    words = remedy.partition(": ")[2]
    assert eval(words, {"studio": house.connect()}) == 30
    assert capsys.readouterr().out.splitlines() == ["begun", *(f"line {i}" for i in range(30))]
    assert lease.run(begun, "long") == 1
    lease.release()


def test_the_session_host_dies_and_the_call_is_lost_not_repeated(house: House) -> None:
    studio = house.connect()
    seen = Seen()
    with studio.gpu(vram="1GiB", ttl="30s") as lease:
        lease.run(len, "")
        threading.Timer(0.5, house.kill_session_host).start()
        with pytest.raises((WorkerLost, LeaseLost)):
            lease.run_shown(counts, ("lost", 600, 0.1), seen, lambda asked: None)
    assert seen.said.count("begun") <= 1


def test_sent_when_the_session_host_is_gone_it_is_a_lost_lease(house: House) -> None:
    studio = house.connect()
    with studio.gpu(vram="1GiB", ttl="30s") as lease:
        lease.run(len, "")
        house.kill_session_host()
        with pytest.raises(LeaseLost):
            lease.run(len, "")
        assert lease.status == "ended"


def test_out_of_reach_is_a_notice_that_goes_when_it_is_back(house: House) -> None:
    studio = house.connect(patience="0.5s")
    with studio.gpu(vram="1GiB", ttl="8s") as lease:
        heard: list[Any] = []
        lease.on_notice(heard.append)
        house.kill()
        wait_until(lambda: heard)
        assert heard[0].source == "keeper"
        house.start()
        wait_until(lambda: lease.notice is None)
        assert lease.run(len, "ab") == 2


def test_ctrl_c_while_the_service_is_away_is_passed_on_when_it_is_back(house: House) -> None:
    studio = house.connect()
    seen = Seen()
    with studio.gpu(vram="1GiB", ttl="1m") as lease:
        lease.run(len, "")

        def trouble() -> None:
            wait_until(lambda: "begun" in seen.said)
            house.kill()
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            time.sleep(0.3)
            house.start()

        threading.Thread(target=trouble).start()
        with pytest.raises(KeyboardInterrupt):
            lease.run_shown(counts, ("interrupted", 600, 0.1), seen, lambda asked: None)
        assert lease.run(begun, "interrupted") == 1


def test_events_are_taken_up_after_the_last_one(house: House) -> None:
    studio = house.connect()
    seen: list[Any] = []

    def listen() -> None:
        for event in studio.events(after=0):
            seen.append(event)
            if event.kind == "session.ended" and len([e for e in seen if e.kind == "session.ended"]) == 4:
                return

    listening = threading.Thread(target=listen, daemon=True)
    listening.start()
    for _ in range(4):
        studio.session(vram="1GiB").wait_until_active().end()
        house.restart()
    listening.join(30)
    assert not listening.is_alive()
    ids = [event.id for event in seen]
    assert ids == sorted(set(ids))
    assert len([e for e in seen if e.kind == "session.opened"]) == 4
    assert {e.tenant for e in seen} <= {"ann", ""}
    assert isinstance(studio, sublet.Studio)
