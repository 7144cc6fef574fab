"""The zygote: one per user and setting, there when it is wanted, gone when it is not; what it forks is
independent of it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sublet.core.errors import Misconfigured
from sublet.processes.ladder import children_of, read_stat
from sublet.processes.sandbox.containment import Group, group_name
from sublet.processes.worker.local import LocalWorker
from sublet.processes.worker.workers import LocalWorkers
from tests.homes import process_is_gone, wait_until
from tests.processes.conftest import end_zygotes, moved_in, remove_group, zygote_pids


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "home"
    end_zygotes(tmp_path / "home")


@pytest.fixture
def own(home: Path) -> LocalWorkers:
    return LocalWorkers(home, "here", "")


def works(workers: LocalWorkers) -> LocalWorker:
    made = moved_in(workers)
    assert made.call(os.getpid, (), {}) > 0
    return made


def zygote_of(worker: LocalWorker) -> int:
    stat = read_stat(worker.holder.pid)
    assert stat is not None
    return stat.parent


def spare_of(zygote: int, *given: LocalWorker) -> int:
    """The supervisor that waits to be wanted."""
    mine = {w.holder.pid for w in given}
    found: list[int] = []

    def look() -> bool:
        found[:] = [s.pid for s in children_of(zygote) if s.pid not in mine and s.state != "Z"]
        return bool(found)

    wait_until(look)
    return found[0]


def test_many_who_start_it_at_once_get_one(home: Path) -> None:
    """In this process and in others."""
    script = (
        "import sys, pathlib\n"
        "from sublet.processes.worker.workers import LocalWorkers\n"
        "LocalWorkers(pathlib.Path(sys.argv[1]), 'here', '').warm()\n"
    )
    others = [subprocess.Popen([sys.executable, "-c", script, str(home)]) for _ in range(2)]
    made: list[LocalWorker] = []
    threads = [
        threading.Thread(target=lambda: made.append(works(LocalWorkers(home, "here", "")))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for other in others:
        assert other.wait(30) == 0
    assert len(made) == 3
    assert len({zygote_of(worker) for worker in made}) == 1
    assert zygote_pids(home) == [zygote_of(made[0])]
    for worker in made:
        worker.end("over")


def test_a_spare_that_died_is_replaced(own: LocalWorkers) -> None:
    first = works(own)
    spare = spare_of(zygote_of(first), first)
    stat = read_stat(spare)
    assert stat is not None
    os.kill(spare, signal.SIGKILL)
    wait_until(lambda: process_is_gone(spare))  # until then it can still be sent the order that dies with it
    second = LocalWorker(own._ask, "here")  # by the zygote alone: start() would ask twice
    assert second.holder.pid != spare
    # Only its worker, in its sleep: it is not handed to anybody.
    spare = spare_of(zygote_of(first), first, second)
    wait_until(lambda: children_of(spare))
    below = children_of(spare)
    os.kill(below[0].pid, signal.SIGKILL)
    wait_until(lambda: process_is_gone(spare))
    third = works(own)
    for worker in (first, second, third):
        worker.end("over")
    remove_group(stat.pid, stat.started)


def test_a_zygote_that_dies_while_it_makes_a_spare_leaves_nothing(own: LocalWorkers) -> None:
    """The spare finds nobody to report to: it ends its worker and removes the group, as it would later."""
    spares = []
    for _ in range(4):
        worker = works(own)
        zygote = zygote_of(worker)
        spare = read_stat(spare_of(zygote, worker))  # just forked
        os.kill(zygote, signal.SIGKILL)
        worker.end("over")
        if spare is not None:
            spares.append(spare)
    for spare in spares:
        wait_until(lambda spare=spare: process_is_gone(spare.pid))
        assert Group.find(group_name(spare.pid, spare.started)) is None


def test_a_zygote_that_was_killed_is_replaced_while_its_workers_live_on(
    own: LocalWorkers, home: Path
) -> None:
    """The lock it held went with it, not with the last worker it had forked."""
    first = works(own)
    old = zygote_of(first)
    spare = spare_of(old, first)
    os.kill(old, signal.SIGKILL)
    begun = time.monotonic()
    second = works(own)
    assert time.monotonic() - begun < 20
    assert zygote_of(second) != old
    assert zygote_pids(home) == [zygote_of(second)]
    assert first.call(os.getpid, (), {}) > 0
    wait_until(lambda: process_is_gone(spare))
    for worker in (first, second):
        worker.end("over")
        wait_until(lambda worker=worker: process_is_gone(worker.worker_pid))


def test_it_leaves_when_nobody_wants_anything(home: Path) -> None:
    own = LocalWorkers(home, "here", "", idle_exit=0.3)
    worker = works(own)
    zygote = zygote_of(worker)
    time.sleep(1.2)
    assert not process_is_gone(zygote)  # a worker of its lives
    spare = spare_of(zygote, worker)
    worker.end("over")
    wait_until(lambda: process_is_gone(zygote))
    wait_until(lambda: process_is_gone(spare))
    again = works(own)
    assert zygote_of(again) != zygote
    again.end("over")


def test_it_leaves_when_its_socket_is_gone(own: LocalWorkers, home: Path) -> None:
    worker = works(own)
    zygote = zygote_of(worker)
    (place,) = [p for p in (home / "run").iterdir() if p.is_socket()]
    place.unlink()
    wait_until(lambda: process_is_gone(zygote))
    assert worker.call(os.getpid, (), {}) > 0
    again = works(own)
    for made in (worker, again):
        made.end("over")


def test_a_request_lost_with_a_leaving_zygote_is_asked_again(
    own: LocalWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was there when we connected, and gone before it answered."""
    own.warm()
    connect = own._connect
    asked: list[int] = []

    def to_nobody() -> socket.socket:
        asked.append(1)
        if len(asked) > 1:
            return connect()
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        there.close()
        return here

    monkeypatch.setattr(own, "_connect", to_nobody)
    works(own).end("over")
    assert len(asked) == 2


def test_a_home_with_a_long_path(tmp_path: Path) -> None:
    """A socket's address has room for 107 characters."""
    home = tmp_path / ("d" * 100) / ("e" * 100)
    try:
        works(LocalWorkers(home, "here", "")).end("over")
    finally:
        end_zygotes(home)


def test_a_module_that_is_missing_is_a_line_in_the_log(home: Path) -> None:
    worker = works(LocalWorkers(home, "here", "no_such_module, json"))
    assert "no_such_module was not preloaded" in (home / "zygote.log").read_text()
    assert worker.call(lambda: "json" in __import__("sys").modules, (), {})
    worker.end("over")


def test_a_zygote_that_cannot_start_is_explained(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(Misconfigured, match="could not start"):
        LocalWorkers(home, "here", "").start()


def test_each_worker_is_a_session_of_its_own_and_reaped(own: LocalWorkers) -> None:
    worker = works(own)
    zygote = zygote_of(worker)
    assert os.getsid(worker.holder.pid) == worker.holder.pid
    worker.end("over")
    wait_until(lambda: worker.holder.pid not in {s.pid for s in children_of(zygote)})


def test_settings_of_another_kind_get_another_zygote(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {LocalWorkers(home, "here", preload)._name for preload in ("", "json", "json,os")}
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    names.add(LocalWorkers(home, "here", "")._name)
    assert len(names) == 4


def test_who_asks_while_it_imports_does_not_wait_for_all_of_it(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was imported before the question is there, what comes after it is not; later workers have
    everything."""
    gates = [tmp_path / "first", tmp_path / "second"]
    for number, gate in enumerate(gates):
        (tmp_path / f"slow_{number}.py").write_text(
            f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)\n"
        )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    told = threading.Event()

    class Telling(LocalWorkers):
        def _ask(self, fds: list[int]) -> None:
            super()._ask(fds)
            told.set()

    workers = Telling(home, "here", "slow_0,slow_1")
    asked: list[LocalWorker] = []
    thread = threading.Thread(target=lambda: asked.append(works(workers)))
    thread.start()
    assert told.wait(20)  # it has asked, in the middle of the first import
    gates[0].touch()
    thread.join(20)
    assert asked, "it waits for what it did not need"
    assert asked[0].call(eval, ("'slow_0' in sys.modules, 'slow_1' in sys.modules", {"sys": sys}), {}) == (
        True,
        False,
    )
    gates[1].touch()

    def has_all() -> bool:
        made = works(workers)
        found = made.call(eval, ("'slow_1' in sys.modules", {"sys": sys}), {})
        made.end("looked at")
        return bool(found)

    wait_until(has_all)
    asked[0].end("the test is over")
