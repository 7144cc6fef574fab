"""A command and its supervisor: what is told in which order, and that nothing outlives a deadline in any
containment.
"""

from __future__ import annotations

import contextlib
import json
import os
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

from sublet.core.errors import WorkerLost
from sublet.core.notice import Notice
from sublet.machine.executables import find_executable
from sublet.machine.run_folder import RunFolder
from sublet.ports.worker import CommandExit
from sublet.processes.channel.channel import pair
from sublet.processes.sandbox import containment
from sublet.processes.supervisor import command, report
from sublet.processes.supervisor.command import LocalCommand
from sublet.processes.supervisor.supervisor import BACKSTOP_US
from tests.conftest import need
from tests.homes import process_is_gone, wait_until
from tests.processes.conftest import FAR_US, now_us, remove_group

CONTAINMENTS = ["cgroup, pid namespace", "pid namespace", "cgroup", "subreaper"]
STUBBORN = """
    import os, signal, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for _ in range(2):
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            time.sleep(1000)
    os.wait(); os.wait()
    open(sys.argv[1], "w").close()
    time.sleep(1000)
"""


def notice_at(deadline_us: int) -> Notice:
    return Notice(source="test", reason="it has to leave", deadline_us=deadline_us)


def marked(mark: str) -> list[int]:
    """Every process that has the mark in its environment, wherever it went."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if mark.encode() in Path(f"/proc/{name}/environ").read_bytes() and not process_is_gone(
                    int(name)
                ):
                    found.append(int(name))
    return found


class Rig:
    def __init__(self, tmp_path: Path) -> None:
        self.path = tmp_path
        self.mark = f"MARK={uuid.uuid4().hex}"
        self.started: list[LocalCommand] = []

    def start(self, code: str, *args: str, grace_us: int = 500_000, **more: Any) -> LocalCommand:
        run = RunFolder(self.path / "R1")
        run.make()
        made = LocalCommand(
            run,
            self.path / "run",
            "here",
            sys.executable,
            [sys.executable, "-c", textwrap.dedent(code), *args],
            grace_us,
            **more,
        )
        self.started.append(made)
        return made

    def begin(self, made: LocalCommand, *, kill_in_us: int = FAR_US, stop_in_us: int | None = None) -> None:
        now = now_us()
        stop = kill_in_us if stop_in_us is None else stop_in_us
        made.arm(now + stop, now + kill_in_us, confirm=True)
        name, _, value = self.mark.partition("=")
        made.begin("L1", 1, {"PATH": os.environ["PATH"], name: value})


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    for one in made.started:
        one.end("the test is over")
        wait_until(lambda one=one: process_is_gone(one.holder.pid))
        remove_group(one.holder.pid, one.holder.started)
    assert marked(made.mark) == []


def awaited(made: LocalCommand, seconds: float = 20) -> CommandExit:
    found: list[CommandExit] = []

    def look() -> bool:
        left = made.left()
        if left is not None:
            found.append(left)
        return left is not None

    wait_until(look, seconds)
    return found[0]


#: Where only "is there a first process of a namespace" makes a difference.
TWO = pytest.mark.parametrize("contained_by", [CONTAINMENTS[0], CONTAINMENTS[3]], indirect=True)


@pytest.fixture(params=CONTAINMENTS)
def contained_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    wanted = str(request.param)
    for part in wanted.split(", "):
        need(part in [*containment.available(), "subreaper"], part)
    forced = Path(__file__).parents[1].joinpath("forced_command.py")
    monkeypatch.setattr(command, "SUPERVISOR", (sys.executable, str(forced), wanted))
    return wanted


def test_a_tree_that_ignores_everything_is_gone_after_its_grace(rig: Rig, contained_by: str) -> None:
    """K1: also those who forked twice, into sessions of their own."""
    up = rig.path / "up"
    made = rig.start(STUBBORN, str(up))
    assert f"{made.containment}, ".startswith(f"{contained_by}, ")
    rig.begin(made)
    wait_until(up.exists)
    assert len(marked(rig.mark)) == 3
    made.drain(notice_at(now_us() + 200_000))
    left = awaited(made)
    assert marked(rig.mark) == []
    assert left == CommandExit(code=137, why="its grace is over", killed=True)
    account = report.read(rig.path / "run", made.holder.pid, made.holder.started)
    assert (account["ended"], account["ladder"], account["survivors"]) == (True, "kill", [])
    assert account["containment"] == made.containment


@TWO
def test_exit_codes_and_signals_arrive_as_a_shell_shows_them(rig: Rig, contained_by: str) -> None:
    for code, expected in (("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137), ("", 0)):
        made = rig.start(code)
        rig.begin(made)
        assert awaited(made) == CommandExit(code=expected)
        # The lease is given back first: until then its holder lives.
        assert not process_is_gone(made.holder.pid)
        made.end("released")
        assert process_is_gone(made.holder.pid)


@TWO
def test_at_the_end_of_its_lease_it_dies_with_nobodys_help(rig: Rig, contained_by: str) -> None:
    """K2: no drain, no order, nobody who renews."""
    up = rig.path / "up"
    made = rig.start(STUBBORN, str(up))
    rig.begin(made, kill_in_us=1_500_000)
    wait_until(up.exists)
    left = awaited(made)
    assert left.killed
    assert left.lease_over
    assert marked(rig.mark) == []


@pytest.mark.parametrize("contained_by", CONTAINMENTS[2:], indirect=True)
def test_a_supervisor_that_comes_late_still_ends_everybody(rig: Rig, contained_by: str) -> None:
    """K2 without a namespace: were it ended for its lateness, what the command has started would live on."""
    up = rig.path / "up"
    made = rig.start(STUBBORN, str(up))
    deadline = now_us() + 1_500_000
    rig.begin(made, kill_in_us=1_500_000)
    wait_until(up.exists)
    os.kill(made.holder.pid, signal.SIGSTOP)
    while now_us() < deadline + 2 * BACKSTOP_US:
        time.sleep(0.05)
    os.kill(made.holder.pid, signal.SIGCONT)
    left = awaited(made)
    assert left.killed
    assert left.lease_over
    assert marked(rig.mark) == []


@TWO
def test_what_a_command_leaves_behind_is_asked_and_then_ended(rig: Rig, contained_by: str) -> None:
    wrote = rig.path / "wrote"
    code = """
        import os, signal, sys, time
        read, write = os.pipe()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, lambda *_: (open(sys.argv[1], "w").write("asked"), os._exit(0)))
            os.write(write, b"!")
            time.sleep(1000)
        os.read(read, 1)
        raise SystemExit(4)
    """
    made = rig.start(code, str(wrote))
    rig.begin(made)
    assert awaited(made).code == 4
    assert marked(rig.mark) == []
    assert wrote.read_text() == "asked"


LOADER = """
    import json, os, signal, subprocess, sys, time
    def note(what):
        with open(sys.argv[1], "a") as file:
            file.write(f"{time.monotonic_ns()} {what}\\n")
    ends = float(sys.argv[2])
    for n in range(2):
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, lambda *_: (note("child"), os._exit(0)))
            note("up")
            while True: time.sleep(1000)
    def leave(*_):
        note("leader")
        time.sleep(ends)
        note("left")
        os._exit(85)
    signal.signal(signal.SIGTERM, leave)
    note("up")
    while True: time.sleep(1000)
"""


def _notes(path: Path) -> list[str]:
    if not path.exists():
        return []
    return [
        line.split()[1] for line in sorted(path.read_text().splitlines(), key=lambda x: int(x.split()[0]))
    ]


@TWO
def test_the_leader_is_told_first_and_its_children_when_it_has_left(rig: Rig, contained_by: str) -> None:
    notes = rig.path / "notes"
    made = rig.start(LOADER, str(notes), "0.4")
    rig.begin(made)
    wait_until(lambda: len(_notes(notes)) == 3)
    made.drain(notice_at(now_us() + 20_000_000))
    assert awaited(made) == CommandExit(code=85)
    assert _notes(notes)[3:] == ["leader", "left", "child", "child"]


def test_children_hear_of_it_shortly_before_the_deadline_of_a_leader_that_stays(rig: Rig) -> None:
    notes = rig.path / "notes"
    made = rig.start(LOADER, str(notes), "1000")
    rig.begin(made)
    wait_until(lambda: len(_notes(notes)) == 3)
    made.drain(notice_at(now_us() + 2_000_000))
    assert awaited(made).killed
    assert _notes(notes)[3:] == ["leader", "child", "child"]


COUNTS = """
    import os, signal, sys, time
    signal.signal(signal.SIGTERM, lambda *_: open(sys.argv[1], "a").write("t"))
    open(sys.argv[1], "w").close()
    while True: time.sleep(0.01)
"""


def test_it_is_told_once_and_a_nearer_deadline_counts(rig: Rig) -> None:
    told = rig.path / "told"
    made = rig.start(COUNTS, str(told))
    rig.begin(made)
    wait_until(told.exists)
    made.drain(notice_at(now_us() + FAR_US))
    wait_until(lambda: told.read_text() == "t")
    made.drain(notice_at(now_us() + 2 * FAR_US))
    made.drain(notice_at(now_us() + 300_000))
    assert awaited(made).killed
    assert told.read_text() == "t"


def test_a_stopped_command_hears_it_too(rig: Rig) -> None:
    told = rig.path / "told"
    made = rig.start(COUNTS, str(told))
    rig.begin(made)
    wait_until(told.exists)
    os.kill(made.command_pid, signal.SIGSTOP)
    made.drain(notice_at(now_us() + 2_000_000))
    wait_until(lambda: told.read_text() == "t")


def test_without_a_renewal_the_supervisor_drains_by_itself(rig: Rig) -> None:
    """The run is stopped, or its machine too busy: the command still has the time between stop and end."""
    told = rig.path / "told"
    made = rig.start(COUNTS, str(told))
    rig.begin(made, stop_in_us=1_000_000, kill_in_us=2_500_000)
    wait_until(told.exists)
    wait_until(lambda: told.read_text() == "t")
    notice = json.loads((rig.path / "R1" / "notice.json").read_text())
    assert notice["source"] == "supervisor"
    assert "not renewed" in notice["reason"]
    assert awaited(made).lease_over


def test_a_command_that_its_supervisor_drained_says_so_though_a_renewal_came_after_all(rig: Rig) -> None:
    """Not a failure of its own: the run has a lease that lives, and a command that was told to leave."""
    up = rig.path / "up"
    made = rig.start("import sys, time\nopen(sys.argv[1], 'w').close()\ntime.sleep(60)", str(up))
    rig.begin(made, stop_in_us=1_000_000, kill_in_us=FAR_US)
    wait_until(up.exists)
    left = awaited(made)
    assert (left.code, left.killed) == (143, False)
    assert (left.why, left.lease_over) == ("its lease was not renewed in time", True)


def test_a_renewal_moves_the_deadline_but_not_that_of_a_drain(rig: Rig) -> None:
    up = rig.path / "up"
    made = rig.start(STUBBORN, str(up))
    rig.begin(made, kill_in_us=1_500_000)
    wait_until(up.exists)
    made.arm(now_us() + FAR_US, now_us() + FAR_US)
    time.sleep(1.7)
    assert made.left() is None
    made.drain(notice_at(now_us() + 200_000))
    made.arm(now_us() + FAR_US, now_us() + FAR_US)
    assert awaited(made).killed


@pytest.mark.parametrize(
    ("what", "kill_in_us", "why"),
    [
        (signal.SIGKILL, FAR_US, "its supervisor was killed"),
        (signal.SIGSTOP, 2_000_000, "its lease ran out"),
    ],
)
def test_a_supervisor_that_is_killed_or_stopped_takes_everything_along(
    rig: Rig, what: signal.Signals, kill_in_us: int, why: str
) -> None:
    """Stopped, the kernel's timer ends it just after the lease."""
    up = rig.path / "up"
    made = rig.start(STUBBORN, str(up))
    rig.begin(made, kill_in_us=kill_in_us)
    wait_until(up.exists)
    os.kill(made.holder.pid, what)
    left = awaited(made)
    assert left == CommandExit(code=None, why=why)
    wait_until(lambda: marked(rig.mark) == [])


def test_a_command_that_never_began_never_ran(rig: Rig) -> None:
    ran = rig.path / "ran"
    made = rig.start("import sys; open(sys.argv[1], 'w').close()", str(ran))
    made.end("no lease was granted")
    assert process_is_gone(made.holder.pid)
    assert process_is_gone(made.command_pid)
    assert not ran.exists()


def test_a_file_that_cannot_be_executed_after_all(rig: Rig) -> None:
    broken = rig.path / "broken"
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)
    run = RunFolder(rig.path / "R1")
    run.make()
    made = LocalCommand(run, rig.path / "run", "here", str(broken), ["broken"], 0)
    rig.started.append(made)
    rig.begin(made)
    assert awaited(made).code == 127


def test_finding_a_command_as_a_shell_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").write_text("x")
    tool = tmp_path / "tool"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    assert find_executable("tool", str(tmp_path)) == (str(tool), 0)
    assert find_executable(str(tool), "") == (str(tool), 0)
    assert find_executable("data", str(tmp_path)) == ("", 126)
    assert find_executable(str(tmp_path / "data"), "") == ("", 126)
    assert find_executable(str(tmp_path), "") == ("", 126)
    assert find_executable("nothing", str(tmp_path)) == ("", 127)
    assert find_executable("", str(tmp_path)) == ("", 127)


def test_a_killed_run_is_drained_and_written_down(rig: Rig) -> None:
    """`exit.json` is there although whoever should write it is gone."""
    told = rig.path / "told"
    code = f"""
        import sys, time
        sys.path[:0] = {sys.path!r}
        from pathlib import Path
        from tests.processes.supervisor.test_command import Rig
        rig = Rig(Path(sys.argv[1]))
        rig.mark = sys.argv[2]
        made = rig.start(sys.argv[3], sys.argv[4], grace_us=300_000)
        rig.begin(made)
        print(made.holder.pid, flush=True)
        time.sleep(1000)
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(rig.path), rig.mark, COUNTS, str(told)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    holder = int(child.stdout.readline())
    wait_until(told.exists)
    child.kill()
    child.wait()
    child.stdout.close()
    wait_until(lambda: process_is_gone(holder))
    assert marked(rig.mark) == []
    assert told.read_text() == "t"
    run = RunFolder(rig.path / "R1")
    assert "killed" in json.loads(run.notice_file.read_text())["reason"]
    left = run.exit()
    assert (left["outcome"], left["exit_code"]) == ("lost", 137)


# --- a command that is more than a script: a kernel ---


def test_a_command_is_handed_its_links_its_folder_and_its_streams(rig: Rig) -> None:
    ours, theirs = pair()
    said = rig.path / "said"
    (rig.path / "there").mkdir()
    code = """
        import os, socket
        link = socket.socket(fileno=int(os.environ["LINK"]))
        link.send(os.getcwd().encode())
        print(link.recv(100).decode(), flush=True)
    """
    with theirs, said.open("wb") as out:
        made = rig.start(
            code, folder=str(rig.path / "there"), links={"LINK": theirs.fileno()}, streams={"stdout": out}
        )
        rig.begin(made)
    assert ours.recv(1000).decode() == str(rig.path / "there")
    ours.send(b"heard")
    assert awaited(made).code == 0
    assert said.read_text() == "heard\n"
    assert ours.recv(10) == b"", "nobody else kept an end of it"
    ours.close()


def test_a_folder_that_is_gone_is_an_exit_code(rig: Rig) -> None:
    made = rig.start("pass", folder=str(rig.path / "nowhere"), streams={"stderr": subprocess.DEVNULL})
    rig.begin(made)
    assert awaited(made).code == 127


@TWO
def test_a_command_that_began_before_its_lease_ends_with_it(rig: Rig, contained_by: str) -> None:
    up = rig.path / "up"
    made = rig.start(STUBBORN, str(up))
    name, _, value = rig.mark.partition("=")
    made.begin("", 0, {"PATH": os.environ["PATH"], name: value})
    wait_until(up.exists)
    assert made.left() is None
    made.arm(now_us() + 100_000, now_us() + 200_000, confirm=True)
    left = awaited(made)
    assert (left.killed, left.lease_over) == (True, True)
    assert marked(rig.mark) == []


def test_a_lease_is_not_armed_for_a_command_that_has_left(rig: Rig) -> None:
    made = rig.start("raise SystemExit(7)")
    made.begin("", 0, {"PATH": os.environ["PATH"]})
    wait_until(lambda: process_is_gone(made.holder.pid))
    with pytest.raises(WorkerLost):
        made.arm(now_us() + FAR_US, now_us() + FAR_US, confirm=True)
    assert awaited(made).code == 7, "how it left is not forgotten over that"
