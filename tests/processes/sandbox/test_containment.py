"""K1 and K2: when a worker ends, by whatever way, nothing that it started lives on. In every containment
there is.

Only the last resort depends on others: a supervisor that is killed cannot clean up. Then the namespace dies
with it; without one, the zygote inherits the orphans and ends them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from sublet.core.errors import WorkerLost
from sublet.processes.channel.channel import pair, receive_with_fds, send_with_fds
from sublet.processes.daemonize import spawn_detached
from sublet.processes.ladder import Stat, children_of, read_stat
from sublet.processes.sandbox import containment
from sublet.processes.sandbox.containment import CGROUP, PID_NAMESPACE, SUBREAPER, Group, group_name
from sublet.processes.worker.workers import LocalWorkers
from tests.conftest import need
from tests.homes import process_is_gone, wait_until
from tests.processes.conftest import FAR_US, REPOSITORY, end_zygotes, moved_in, now_us, remove_group
from tests.processes.planting import plant

MODES = [f"{CGROUP}, {PID_NAMESPACE}", PID_NAMESPACE, CGROUP, SUBREAPER]


class Forced(LocalWorkers):
    """Workers of a zygote that may use only these means of containment."""

    def __init__(self, home: Path, mode: str) -> None:
        super().__init__(home, "here", "")
        self.mode = mode

    def _spawn(self) -> int:
        self._folder.mkdir(parents=True, exist_ok=True)
        driver = str(Path(__file__).parents[1].joinpath("forced_zygote.py"))
        command = [sys.executable, driver, self.mode, "--folder", str(self._folder), "--name", self._name]
        path = {"PYTHONPATH": f"{REPOSITORY}/src:{REPOSITORY}"}
        return spawn_detached(command, dict(os.environ) | path, self._log)


@pytest.fixture(scope="module", params=MODES)
def forced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forced]:
    mode = str(request.param)
    if CGROUP in mode:
        probe = Group.make(f"sublet-probe-{uuid.uuid4().hex}")
        need(probe is not None, "a writable cgroup v2")
        assert probe is not None
        probe.remove()
    if PID_NAMESPACE in mode:
        need(containment.namespaces_work(), "PID namespaces")
    home = tmp_path_factory.mktemp("forced")
    yield Forced(home, mode)
    end_zygotes(home)


class Planted:
    """A worker that has started processes of every troublesome kind, each recognised by a word in its
    environment."""

    def __init__(self, workers: Forced) -> None:
        self.word = f"planted-{uuid.uuid4().hex}"
        self.worker = moved_in(workers)
        self.group = group_name(self.worker.holder.pid, self.worker.holder.started)
        # Limits that a group has are named after what contains it.
        assert f"{self.worker.containment}, ".startswith(f"{workers.mode}, ")
        group = Group.find(self.group)
        assert (group is not None) == (CGROUP in workers.mode)
        if group is not None:
            assert self.worker.worker_pid in group.pids()
            assert not group.emptied(0)
            assert self.group in {found.path.name for _, _, found in Group.all()}
        self.worker.call(plant, (self.word,), {})
        wait_until(lambda: len(self.living()) >= 7)

    def living(self) -> list[int]:
        found = []
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError):
                    if self.word.encode() in Path(
                        f"/proc/{name}/environ"
                    ).read_bytes() and not process_is_gone(int(name)):
                        found.append(int(name))
        return found

    def all_gone(self, seconds: float = 10.0, *, group_stays: bool = False) -> None:
        wait_until(lambda: process_is_gone(self.worker.holder.pid), seconds)
        wait_until(lambda: process_is_gone(self.worker.worker_pid), seconds)
        wait_until(lambda: not self.living(), seconds)
        group = Group.find(self.group)
        if group_stays and group is not None:  # the warden's sweep removes it; here nobody else does
            wait_until(lambda: group.pids() == [], seconds)
            group.remove()
        assert Group.find(self.group) is None


@pytest.fixture
def planted(forced: Forced) -> Iterator[Planted]:
    made = Planted(forced)
    yield made
    made.worker.end("the test is over")


def test_told_to_end(planted: Planted) -> None:
    planted.worker.end("enough")
    # Not after a while: when end() returns.
    assert planted.living() == []
    planted.all_gone()


def test_at_the_deadline(planted: Planted) -> None:
    planted.worker.arm(now_us(), now_us() + 200_000)
    # On a busy machine the kernel may come before the supervisor is done; what that leaves is the warden's.
    planted.all_gone(group_stays=True)
    assert planted.worker.ending == "its lease ran out"


def test_a_deadline_may_move_either_way(planted: Planted) -> None:
    worker = planted.worker
    worker.arm(now_us(), now_us() + 300_000, confirm=True)
    worker.arm(now_us(), now_us() + FAR_US, confirm=True)
    time.sleep(0.45)
    assert worker.call(os.getpid, (), {}) > 0
    worker.arm(now_us(), now_us() + 60 * 86_400_000_000, confirm=True)  # longer than poll() can wait
    time.sleep(0.05)
    assert worker.call(os.getpid, (), {}) > 0
    worker.arm(now_us(), now_us() + 100_000, confirm=True)
    planted.all_gone(group_stays=True)


def test_the_worker_leaves_by_itself(planted: Planted) -> None:
    with pytest.raises(WorkerLost, match="code 3"):
        planted.worker.call(os._exit, (3,), {})
    planted.all_gone()


def test_the_worker_is_deaf_and_stopped(planted: Planted) -> None:
    def deaf() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    planted.worker.call(deaf, (), {})
    os.kill(planted.worker.worker_pid, signal.SIGSTOP)
    planted.worker.end("enough")
    assert planted.living() == []
    planted.all_gone()


def test_the_supervisor_is_stopped_and_the_kernel_ends_it(planted: Planted) -> None:
    """The last resort: nobody of ours runs any more when the deadline comes."""
    planted.worker.arm(now_us(), now_us() + 350_000, confirm=True)
    os.kill(planted.worker.holder.pid, signal.SIGSTOP)
    time.sleep(0.05)
    assert not process_is_gone(planted.worker.holder.pid)
    assert planted.living()
    planted.all_gone(group_stays=True)


def test_the_supervisor_is_killed(planted: Planted) -> None:
    os.kill(planted.worker.holder.pid, signal.SIGKILL)
    planted.all_gone(group_stays=True)


def test_the_only_supervisor_is_killed_while_no_spare_is_there(planted: Planted) -> None:
    """The zygote ends the orphans also when it has nobody else to look after."""
    stat = read_stat(planted.worker.holder.pid)
    assert stat is not None
    zygote = stat.parent
    spares: list[Stat] = []
    while not spares:  # one that is yet to be made would be somebody to look after
        spares = [s for s in children_of(zygote) if s.pid != planted.worker.holder.pid]
    os.kill(zygote, signal.SIGSTOP)
    for pid in [*(s.pid for s in spares), planted.worker.holder.pid]:
        os.kill(pid, signal.SIGKILL)
    os.kill(zygote, signal.SIGCONT)
    planted.all_gone(group_stays=True)
    for spare in spares:
        remove_group(spare.pid, spare.started)


def test_sigterm_to_the_supervisor_ends_the_worker(planted: Planted) -> None:
    """What the warden's ladder does first."""
    os.kill(planted.worker.holder.pid, signal.SIGTERM)
    planted.all_gone()
    assert "lease is over" in planted.worker.ending


def test_a_fork_bomb(forced: Forced) -> None:
    """Each child starts others, up to a number that a machine can bear, while they are being ended."""
    bomb = Planted(forced)

    def explode() -> None:
        code = (
            "import os, sys, time\n"
            "for _ in range(12):\n"
            "    if os.fork() == 0:\n"
            "        os.setsid()\n"
            "        for _ in range(12):\n"
            "            time.sleep(0.01)\n"
            "            if os.fork() == 0: time.sleep(1000)\n"
            "        time.sleep(1000)\n"
            "time.sleep(1000)\n"
        )
        subprocess.Popen([sys.executable, "-S", "-c", code])

    bomb.worker.call(explode, (), {})
    wait_until(lambda: len(bomb.living()) > 40)
    bomb.worker.end("enough")
    assert bomb.living() == []
    bomb.all_gone()


def test_the_caller_is_killed(forced: Forced) -> None:
    """While a child of its own still holds every descriptor it had."""
    code = """
    import os, sys, time
    from pathlib import Path
    from tests.processes.sandbox.test_containment import Forced, Planted
    made = Planted(Forced(Path(sys.argv[1]), sys.argv[2]))
    child = os.fork()
    if child:
        print(made.worker.holder.pid, made.worker.worker_pid, made.group, made.word, child, flush=True)
    time.sleep(60)
    """
    caller = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(forced._folder.parent), forced.mode],
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ) | {"PYTHONPATH": f"{REPOSITORY}/src:{REPOSITORY}"},
    )
    with caller:
        assert caller.stdout is not None
        holder, worker, group, word, child = caller.stdout.readline().split()
        caller.kill()
        try:
            for pid in (holder, worker):
                wait_until(lambda pid=pid: process_is_gone(int(pid)))
        finally:
            os.kill(int(child), signal.SIGKILL)
    seen = Planted.__new__(Planted)
    seen.word = word
    wait_until(lambda: not seen.living())
    assert Group.find(group) is None


def test_the_zygote_goes_first_and_workers_live_on(forced: Forced) -> None:
    planted = Planted(forced)
    end_zygotes(forced._folder.parent)
    assert planted.worker.call(os.getpid, (), {}) > 0
    another = moved_in(forced)
    assert another.call(os.getpid, (), {}) > 0
    another.end("enough")
    planted.worker.end("enough")
    planted.all_gone()


def test_zygote_and_supervisor_are_killed(forced: Forced) -> None:
    """K2, with nobody left to do anything: the worker dies with its supervisor, and a namespace with all that
    is in it. Without one, what the worker had started is the warden's to find, by its group if there is
    one."""
    planted = Planted(forced)
    end_zygotes(forced._folder.parent)
    os.kill(planted.worker.holder.pid, signal.SIGKILL)
    wait_until(lambda: process_is_gone(planted.worker.worker_pid))
    if PID_NAMESPACE in forced.mode:
        wait_until(lambda: not planted.living())
    group = Group.find(planted.group)
    if group is not None:
        group.kill()
        assert group.emptied(5_000_000)
    for pid in planted.living():
        assert forced.mode == SUBREAPER
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    planted.all_gone(group_stays=True)
    planted.worker.end("over")


# --- without root ---

NOBODY = 65534
UNPRIVILEGED = """
import os, sys
from pathlib import Path
from sublet.processes.sandbox import containment
from sublet.processes.worker.workers import LocalWorkers
from tests.processes.conftest import end_zygotes, moved_in, wait_until
from tests.processes.sandbox.test_containment import Planted

class Plain(LocalWorkers):
    mode = containment.PID_NAMESPACE if containment.namespaces_work() else containment.SUBREAPER

home = Path(sys.argv[1])
made = Planted(Plain(home, "here", ""))
look = lambda: (os.getuid(), os.getpid() == int(os.readlink("/proc/self")), Path("/proc/self/status").read_text())
uid, same, status = made.worker.call(look, (), {})
capable = [line for line in status.splitlines() if line.startswith(("CapEff", "CapPrm"))]
print(os.getuid(), uid, same, made.worker.containment, flush=True)
print(*(line.split()[1].strip("0") == "" for line in capable), flush=True)
sys.stdin.readline()
made.worker.end("enough")
made.all_gone()
end_zygotes(home)
print("gone", flush=True)
"""


def reachable_by_all(command: list[str], folder: Path) -> list[str]:
    """The same, run in a mount namespace where the interpreter's, its packages' and our own folders can be
    entered by anybody."""
    wanted = sorted({Path(p).resolve() for p in (sys.base_prefix, sys.prefix, REPOSITORY)})
    hidden = [
        (place, next(p for p in reversed([place, *place.parents]) if not p.stat().st_mode & 0o001))
        for place in wanted
        if any(not p.stat().st_mode & 0o001 for p in [place, *place.parents])
    ]
    if not hidden:
        return command
    # Whoever lies inside another comes with it.
    hidden = [(p, top) for p, top in hidden if not any(p != q and p.is_relative_to(q) for q, _ in hidden)]
    lines = ["mount --make-rprivate /"]
    for number, (place, _) in enumerate(hidden):
        (folder / f"aside{number}").mkdir()
        lines.append(f"mount --bind {place} {folder}/aside{number}")
    lines += [f"mount -t tmpfs -o mode=755 none {top}" for top in sorted({top for _, top in hidden})]
    for number, (place, _) in enumerate(hidden):
        lines += [f"mkdir -p -m 755 {place}", f"mount --bind {folder}/aside{number} {place}"]
    return ["unshare", "-m", "/bin/sh", "-ec", "\n".join([*lines, 'exec "$@"']), "sh", *command]


def test_without_root() -> None:
    """As a user who may nothing: it works, says what contains it, and nothing survives. And the zygote serves
    its own user only."""
    need(os.getuid() == 0, "root, to become somebody else")
    with tempfile.TemporaryDirectory(prefix="sublet-") as name:
        os.chmod(name, 0o755)
        home = Path(name) / "home"
        home.mkdir()
        os.chown(home, NOBODY, NOBODY)
        become = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        command = [*become, sys.executable, "-c", UNPRIVILEGED, str(home)]
        script = subprocess.Popen(
            reachable_by_all(command, Path(name)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            env={
                "PATH": os.environ["PATH"],
                "PYTHONPATH": f"{REPOSITORY}/src:{REPOSITORY}",
                "PYTHONDONTWRITEBYTECODE": "1",
            },
        )
        with script:
            assert script.stdin is not None
            assert script.stdout is not None
            try:
                assert script.stdout.readline() in [
                    f"{NOBODY} {NOBODY} True {mode}\n" for mode in (PID_NAMESPACE, SUBREAPER)
                ]
                assert script.stdout.readline() == "True True\n"
                refused_to_others(home)
            finally:
                script.stdin.close()
            assert script.stdout.readline() == "gone\n"


def refused_to_others(home: Path) -> None:
    """Root can open any socket. It is not the zygote's user all the same."""
    (place,) = [p for p in (home / "run").iterdir() if p.is_socket()]
    assert place.stat().st_mode & 0o777 == 0o600

    def ask(fds: list[int]) -> None:
        import socket

        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(str(place))
            send_with_fds(sock, b"worker", fds)

    here, there = pair()
    with here, there:
        ask([there.fileno()] * 5)
        there.close()
        here.settimeout(5)
        assert receive_with_fds(here) == (b"", [])
