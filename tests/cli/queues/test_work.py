"""`sublet work` as people use it: processes that are killed, told to leave and started again; words and codes."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sublet
from sublet import wiring
from sublet.core.leasing.lease import LeaseState
from sublet.core.queues.items import ItemState
from sublet.queues.queue import Queue
from tests import forked
from tests.homes import Home, close_home, make_home, wait_until

TARGET = """
    import os, sys, time

    def double(item):
        return 2 * item["n"]

    def noisy(item):
        print(f"item {item['n']}", end="", flush=True)
        return item["n"]

    class Slow:
        '''Says what it begins with, and does not end before it is let.'''

        def setup(self):
            print("ready in", os.getpid(), flush=True)

        def process(self, items):
            for item in items:
                with open(item["log"], "a") as log:
                    log.write(f"begin {item['n']}\\n")
            while not os.path.exists(item["log"] + ".go"):
                time.sleep(0.01)
            return [2 * item["n"] for item in items]

    class Broken:
        def setup(self):
            raise OSError("no weights here")

        def process(self, item):
            pass
"""


@pytest.fixture(scope="module")
def shared_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("work")
        patch.setenv("SUBLET_NOTICES", "none")
        made = make_home(path, f"sqlite:{path}/home/ledger.db", patch, "host:1x16GiB")
        yield made
        close_home(made)


class Floor:
    """A queue, its target in a folder, and the workers that were started there."""

    def __init__(self, home: Home, path: Path) -> None:
        self.home, self.path = home, path
        self.name = f"q{uuid.uuid4().hex[:8]}"
        self.log = path / "log"
        self.started: list[subprocess.Popen[str]] = []
        (path / "mytarget.py").write_text(textwrap.dedent(TARGET))

    @property
    def queue(self) -> Queue:
        return sublet.queue(self.name)

    def publish(self, count: int) -> None:
        self.queue.publish(
            ({"n": n, "log": str(self.log)} for n in range(count)), key=lambda item: str(item["n"])
        )

    def of(self, state: ItemState) -> list[Any]:
        return self.queue.peek(1000, state=state)

    def begun(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0

    def command(self, target: str, *options: str) -> list[str]:
        return [sys.executable, "-m", "sublet", "work", self.name, f"mytarget:{target}", *options]

    def start(self, target: str, *options: str) -> subprocess.Popen[str]:
        child = forked.Forked(
            self.command(target, *options),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.home.environment,
            cwd=self.path,
        )
        self.started.append(child)
        return child

    def run(self, target: str, *options: str) -> subprocess.CompletedProcess[str]:
        return forked.run(
            self.command(target, *options), env=self.home.environment, cwd=self.path, timeout=60
        )

    def leases(self) -> list[str]:
        ledger = wiring.open_ledger(self.home.settings)
        return [a.lease.id for a in ledger.leases() if a.lease.state is not LeaseState.ENDED]

    def close(self) -> None:
        for child in self.started:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            child.communicate()
        wait_until(lambda: not self.leases())


@pytest.fixture
def floor(shared_home: Home, tmp_path: Path) -> Iterator[Floor]:
    made = Floor(shared_home, tmp_path)
    yield made
    made.close()


def test_a_queue_is_worked_off_and_summed_up(floor: Floor) -> None:
    floor.publish(5)
    done = floor.run("double", "--until-empty", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = done.stdout.splitlines()
    said = json.loads(line)
    assert (said["queues"], said["outcome"], said["exit_code"]) == ([floor.name], "done", 0)
    assert (said["done"], said["failed"], said["dead"], said["refused"]) == (5, 0, 0, 0)
    assert [r.value for r in floor.queue.results()] == [0, 2, 4, 6, 8]


def test_the_summary_has_a_line_of_its_own_whatever_was_printed(floor: Floor) -> None:
    floor.publish(2)
    done = floor.run("noisy", "--until-empty", "--json")
    printed, said = done.stdout.splitlines()
    assert (printed, json.loads(said)["done"]) == ("item 0item 1", 2)


def test_nobody_reads_what_it_prints_and_no_item_is_to_blame(floor: Floor) -> None:
    floor.publish(3)
    child = floor.start("noisy", "--until-empty")
    assert child.stdout is not None
    child.stdout.close()
    child.wait(30)
    stats = floor.queue.stats()
    assert (stats.failed, stats.dead, stats.leased) == (0, 0, 0)


def test_sigterm_in_a_batch_and_its_items_are_ready_at_once(floor: Floor) -> None:
    """Preempted mid-batch with notice: not after the visibility, which is ten minutes here."""
    floor.publish(5)
    child = floor.start("Slow", "--batch", "4", "--visibility", "10m", "--grace", "1s")
    wait_until(lambda: floor.begun() == 4, 40)
    child.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    child.send_signal(signal.SIGTERM)  # changes nothing
    out, err = child.communicate(timeout=30)
    stats = floor.queue.stats()
    assert (stats.ready, stats.leased, stats.done, stats.failed) == (5, 0, 0, 0), err
    assert child.returncode == 85
    assert "ready in" in out
    assert "4 given back untouched" in err
    assert not floor.leases()
    floor.log.with_name("log.go").touch()
    assert floor.run("Slow", "--batch", "4", "--until-empty").returncode == 0
    assert [(r.value, r.delivery) for r in floor.queue.results()] == [(0, 2), (2, 2), (4, 2), (6, 2), (8, 1)]


def test_sigterm_in_a_batch_that_can_finish(floor: Floor) -> None:
    floor.publish(3)
    child = floor.start("Slow", "--batch", "2", "--exit-profile", "zero", "--json")
    wait_until(lambda: floor.begun() == 2, 40)
    child.send_signal(signal.SIGTERM)
    floor.log.with_name("log.go").touch()
    out, _ = child.communicate(timeout=30)
    said = json.loads(out.splitlines()[-1])
    assert (child.returncode, said["outcome"], said["done"], said["given_back"]) == (0, "preempted", 2, 0)
    assert floor.queue.stats().ready == 1


def test_killed_in_a_batch_another_worker_does_it_at_once(floor: Floor) -> None:
    """Its visibility is ten minutes; that its process is gone can be seen."""
    floor.publish(5)
    child = floor.start("Slow", "--batch", "4", "--visibility", "10m")
    wait_until(lambda: floor.begun() == 4, 40)
    child.kill()
    child.wait()
    floor.log.with_name("log.go").touch()
    assert floor.run("Slow", "--batch", "4", "--until-empty").returncode == 0
    results = list(floor.queue.results())
    assert [r.value for r in results] == [0, 2, 4, 6, 8]
    stats = floor.queue.stats()
    assert (stats.done, stats.completed, stats.dead) == (5, 5, 0)
    assert [item.losses for item in floor.of(ItemState.DONE)] == [1, 1, 1, 1, 0]
    wait_until(lambda: not floor.leases())


def test_ctrl_c_drains_and_a_second_one_leaves_at_once(floor: Floor) -> None:
    floor.publish(2)
    child = floor.start("Slow", "--batch", "2", "--visibility", "10m", "--grace", "5m")
    wait_until(lambda: floor.begun() == 2, 40)
    child.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert child.poll() is None
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=30)
    assert child.returncode == 130
    assert floor.queue.stats().ready == 2


def test_a_setup_that_fails_is_told_at_once(floor: Floor) -> None:
    floor.publish(2)
    done = floor.run("Broken")
    assert done.returncode == 2
    assert "OSError: no weights here" in done.stderr
    assert 'raise OSError("no weights here")' in done.stderr
    assert "no item was touched" in done.stderr
    assert [item.failures for item in floor.of(ItemState.READY)] == [0, 0]


def test_a_queue_that_is_not_there(floor: Floor) -> None:
    floor.publish(1)
    known, floor.name = floor.name, "elsewhere"
    done = floor.run("double")
    assert done.returncode == 2
    assert "no queue elsewhere" in done.stderr
    assert known in done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--batch", "0"), "--batch must be"),
        (("--most", "-1"), "--most must be"),
        (("--visibility", "1ms"), "visibility"),
        (("--vram", "much"), "vram"),
        (("--exit-profile", "wild"), "exit profile"),
        (("--grace", "soon"), "grace"),
        (("--tier", "gold"), "tier"),
    ],
)
def test_bad_words_are_refused_before_anything_is_leased(
    floor: Floor, options: tuple[str, ...], said: str
) -> None:
    done = floor.run("double", *options)
    assert done.returncode == 2
    assert said in done.stderr


def test_on_a_terminal_there_is_a_line(floor: Floor) -> None:
    floor.publish(6)
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        floor.command("Slow", "--batch", "2", "--until-empty"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        env=floor.home.environment | {"COLUMNS": "200"},
        cwd=floor.path,
    )
    os.close(theirs)
    try:
        wait_until(lambda: floor.begun() == 2, 40)
        floor.log.with_name("log.go").touch()
        shown = b""
        with contextlib.suppress(OSError):
            while chunk := os.read(ours, 4096):
                shown += chunk
        assert child.wait(30) == 0
    finally:
        child.kill()
        child.wait()
        os.close(ours)
    text = shown.decode()
    assert re.search(rf"{floor.name} \[[#.]+\] 0/6  0/s  depth 6  done here 0  lease \d", text)
    assert "6 done, in" in text
