"""I1: a worker is kept to its limits, and says which of them the kernel really enforces.

The bombs are small: a limit of a hundred processes and of 300 MiB shows the same as one of thousands.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from sublet.core.errors import BadInput, WorkerLost
from sublet.core.studio.isolation import OWN_IPC
from sublet.core.studio.worker_limits import (
    DEFAULT_LIMITS,
    MIB,
    Enforcer,
    LimitInForce,
    Resource,
    WorkerLimits,
    bounds,
)
from sublet.processes.ladder import HostProcesses
from sublet.processes.sandbox import containment, limits
from sublet.processes.sandbox.containment import Group, group_name
from sublet.processes.sandbox.tenant_sandbox import TenantSandbox
from sublet.processes.worker.local import LocalWorker
from sublet.processes.worker.workers import LocalWorkers
from tests.conftest import need
from tests.processes.conftest import REPOSITORY, end_zygotes, moved_in
from tests.processes.test_sealed import Heard, run

SMALL = WorkerLimits(processes=100, memory_bytes=300 * MIB, cpu_weight=50)
FORKS = """
import os, signal, time
got = []
for _ in range(300):
    try:
        pid = os.fork()
    except OSError:
        break
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    got.append(pid)
for pid in got:  # what is printed needs a thread
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
print(len(got))
"""
EATS = """
import os
kept = []
def eat():
    for _ in range(200):
        kept.append(bytearray(os.urandom(1)) * (4 << 20))
pid = os.fork()
if pid == 0:
    try:
        eat()
    except MemoryError:
        os._exit(7)
    os._exit(0)
status = os.waitpid(pid, 0)[1]
print(os.waitstatus_to_exitcode(status))
"""


@contextlib.contextmanager
def limited(home: Path, wanted: WorkerLimits = SMALL) -> Iterator[LocalWorker]:
    os.environ["PYTHONPATH"] = os.pathsep.join((str(REPOSITORY / "src"), str(REPOSITORY)))
    workers = LocalWorkers(home, "here", "sublet", sandbox=TenantSandbox(number=7), limits=wanted)
    made = moved_in(workers)
    try:
        yield made
    finally:
        made.end("the test is over")
        end_zygotes(home)


def words(worker: LocalWorker) -> list[str]:
    return worker.containment.split(", ")


def printed(worker: LocalWorker, code: str) -> str:
    sink = Heard()
    fine, answer = run(worker, code, sink=sink)
    assert fine, answer
    return str(sink.of("stdout")).strip()


# --- a group ---


@pytest.fixture
def group() -> Iterator[Group]:
    made = Group.make(f"sublet-limits-{uuid.uuid4().hex}", SMALL)
    need(made is not None, "a writable cgroup v2")
    assert made is not None
    yield made
    made.kill()
    made.emptied(5_000_000)
    made.remove()
    assert not made.path.exists()
    assert not any(place.exists() for place in made.beside)


def test_a_group_holds_its_processes_to_the_number_it_names(group: Group) -> None:
    """Its children were once counted by nobody, while the receipt said cgroup."""
    named = {limit.resource: limit for limit in group.limits}
    need(Resource.PROCESSES in named, "the cgroup controller pids")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        group.join()
        started = 0
        with contextlib.suppress(OSError):
            for _ in range(300):
                if os.fork() == 0:
                    time.sleep(60)
                    os._exit(0)
                started += 1
        os.write(writer, str(started).encode())
        time.sleep(60)
        os._exit(0)
    try:
        assert int(os.read(reader, 10)) == SMALL.processes - 1
    finally:
        group.kill()
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)


def test_what_a_group_names_can_be_read_where_the_kernel_keeps_it(group: Group) -> None:
    places = [group.path, *group.beside]
    for limit in group.limits:
        knobs = {
            Resource.PROCESSES: {"pids.max": SMALL.processes},
            Resource.MEMORY: {
                "memory.max": SMALL.memory_bytes,
                "memory.limit_in_bytes": SMALL.memory_bytes,
            },
            Resource.CPU: {"cpu.weight": 50, "cpu.shares": 512},
        }[limit.resource]
        found = {
            int((place / knob).read_text()) == amount
            for place in places
            for knob, amount in knobs.items()
            if (place / knob).exists()
        }
        assert True in found, limit


def test_a_limit_that_is_not_read_back_is_not_in_force(tmp_path: Path) -> None:
    """I1: what can be written need not be a knob of the kernel's, and need not keep what was written."""
    group = tmp_path / "group"
    group.mkdir()
    for name in ("cgroup.controllers", "cgroup.subtree_control"):
        (tmp_path / name).write_text("pids memory cpu\n")
    os.symlink("/dev/null", group / "pids.max")  # takes everything, and shows nothing
    (group / "memory.max").write_text("max\n")
    kept, _ = limits.put_in_force(group, SMALL)
    assert [limit.resource for limit in kept] == [Resource.MEMORY, Resource.CPU]


def test_groups_beside_are_found_and_removed_by_name() -> None:
    """By a warden that never saw them made."""
    name = f"sublet-limits-{uuid.uuid4().hex}"
    made = Group.make(name, SMALL)
    need(made is not None, "a writable cgroup v2")
    assert made is not None
    if not made.beside:
        made.remove()
        pytest.skip("this machine has no cgroup v1 beside v2")
    stranger = Group.find(name)
    assert stranger is not None
    assert set(limits.groups_beside(name)) == set(made.beside)
    stranger.remove()
    assert not any(place.exists() for place in (made.path, *made.beside))


def test_a_sweep_finds_what_is_left_beside_a_group_that_is_gone() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    made = Group.make(group_name(ended.pid, 1), SMALL)
    need(made is not None, "a writable cgroup v2")
    assert made is not None
    made.path.rmdir()
    HostProcesses("here").sweep()
    assert not any(place.exists() for place in made.beside)


def test_a_service_steps_aside_so_that_its_group_may_have_controllers() -> None:
    """cgroup v2 gives no controller to the children of a group that has processes itself."""
    mount = limits.cgroup_mount()
    need(mount is not None and os.access(mount, os.W_OK) and os.getuid() == 0, "a writable cgroup v2")
    assert mount is not None
    there = (mount / "cgroup.controllers").read_text().split()
    need(bool(there), "a controller of cgroup v2")
    controller = there[0]
    was = (mount / "cgroup.subtree_control").read_text().split()
    top = mount / f"sublet-top-{uuid.uuid4().hex}"
    asleep = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert limits.enabled(mount, [controller]) == {controller}
        top.mkdir()
        (top / "cgroup.procs").write_text(str(asleep.pid))
        assert limits.enabled(top, [controller]) == set()
        # Not its own: what lives there stays there.
        assert not limits.step_aside(top, [controller])
        assert str(asleep.pid) in (top / "cgroup.procs").read_text().split()
        assert limits.step_aside(top, [controller], top)
        assert limits.enabled(top, [controller]) == {controller}
        assert str(asleep.pid) in (top / limits.LEAF / "cgroup.procs").read_text().split()
        assert not limits.step_aside(top, [controller], top)  # once is enough
    finally:
        asleep.kill()
        asleep.wait()
        for place in (top / limits.LEAF, top):
            if place.exists():
                place.rmdir()
        if controller not in was:
            (mount / "cgroup.subtree_control").write_text(f"-{controller}")


# --- a tenant's worker ---


def test_a_fork_bomb_meets_its_limit(tmp_path: Path) -> None:
    with limited(tmp_path) as worker:
        assert bounds(Resource.PROCESSES, words(worker)), worker.containment
        assert 0 < int(printed(worker, FORKS)) < SMALL.processes


def test_no_limit_is_raised_from_inside(tmp_path: Path) -> None:
    code = """
import glob, os, resource
raised = []
for kind in (resource.RLIMIT_NPROC, resource.RLIMIT_DATA):
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        try:
            resource.setrlimit(kind, (hard + 1, hard + 1))
            raised.append(kind)
        except (OSError, ValueError):
            pass
for line in open('/proc/self/mounts'):
    _, place, what, *_ = line.split()
    if what not in ('cgroup', 'cgroup2'):
        continue
    found = [p for top in (place, place + '/*', place + '/*/*', place + '/*/*/*') for p in glob.glob(top)]
    for folder in found:
        for name, text in (('cgroup.procs', '0'), ('pids.max', 'max'), ('memory.max', 'max'),
                           ('memory.limit_in_bytes', '-1')):
            try:
                with open(os.path.join(folder, name), 'w') as knob:
                    knob.write(text)
                raised.append(folder + '/' + name)
            except OSError:
                pass
print(raised)
"""
    with limited(tmp_path) as worker:
        assert printed(worker, code) == "[]"


def test_a_memory_bomb_meets_its_limit(tmp_path: Path) -> None:
    """800 MiB in another process of the worker: that one is ended or told, and the session goes on."""
    with limited(tmp_path) as worker:
        assert printed(worker, EATS) in (str(-signal.SIGKILL), "7"), worker.containment
        assert printed(worker, "print('alive')") == "alive"


def test_many_processes_together_meet_the_limit_of_memory(tmp_path: Path) -> None:
    """None of them takes much. Only a group counts them together, and only then the words say so."""
    code = """
import os
go_on, told = os.pipe()
children = []
for _ in range(8):
    has_it, says = os.pipe()
    pid = os.fork()
    if pid == 0:
        kept = bytearray(b'x') * (80 << 20)
        os.write(says, b'x')
        os.read(go_on, 1)
        os._exit(0)
    os.close(says)
    children.append((pid, has_it))
for _, has_it in children:
    os.read(has_it, 1)  # it has its memory, or was ended
os.write(told, b'x' * 8)
pids = [pid for pid, _ in children]
print(sum(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in pids))
"""
    with limited(tmp_path) as worker:
        need(bounds(Resource.MEMORY, words(worker)), "the cgroup controller memory")
        assert int(printed(worker, code)) >= 4


def test_shared_memory_is_not_more_than_half_of_it(tmp_path: Path) -> None:
    with limited(tmp_path) as worker:
        need(containment.namespaces_work(), "namespaces")
        code = "import os\ns = os.statvfs('/dev/shm')\nprint(s.f_blocks * s.f_frsize)"
        assert int(printed(worker, code)) == SMALL.memory_bytes // 2


def test_shared_memory_of_another_tenant_cannot_be_seen(tmp_path: Path) -> None:
    """System V segments have no file that a folder could hide."""
    code = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
print(libc.shmget(0x5ab1e7, 4096, 0o1666), len(open('/proc/sysvipc/shm').readlines()))
"""
    need(containment.namespaces_work(), "namespaces")
    with limited(tmp_path) as one:
        assert OWN_IPC in words(one)
        assert int(printed(one, code).split()[0]) >= 0
        two = moved_in(
            LocalWorkers(tmp_path, "here", "sublet", sandbox=TenantSandbox(number=8), limits=SMALL)
        )
        assert printed(two, "print(len(open('/proc/sysvipc/shm').readlines()))") == "1"
        two.end("the test is over")


def test_the_kernel_ends_a_worker_before_the_service(tmp_path: Path) -> None:
    with limited(tmp_path) as worker:
        score = int(printed(worker, "print(open('/proc/self/oom_score_adj').read())"))
        assert score > int(Path("/proc/self/oom_score_adj").read_text())


def test_torch_lives_within_the_default_limits() -> None:
    """Its libraries map gigabytes that they never touch. The home's path is short: torch makes a socket below
    its temporary folder."""
    pytest.importorskip("torch")
    code = """
import torch
from torch.utils.data import DataLoader
print(sum(int(b.sum()) for b in DataLoader(torch.ones(64, 4), batch_size=8, num_workers=2)))
x = torch.ones(512, 512, requires_grad=True)
(x @ x).sum().backward()
"""
    wanted = WorkerLimits(processes=DEFAULT_LIMITS.processes, memory_bytes=limits.machine_memory() // 2)
    with tempfile.TemporaryDirectory(dir="/tmp") as name, limited(Path(name), wanted) as worker:
        assert printed(worker, code) == "256"


AS_USER = """
import json, sys
from pathlib import Path
from tests.processes.sandbox.test_limits import FORKS, EATS, limited, printed
with limited(Path(sys.argv[1])) as worker:
    print(json.dumps([worker.containment, printed(worker, FORKS), printed(worker, EATS)]))
"""


def test_without_root_the_words_are_those_of_rlimits() -> None:
    """A user who may make no group: each process has its limit, and the words claim no more."""
    need(os.getuid() == 0, "root, to become somebody else")
    with tempfile.TemporaryDirectory(prefix="sublet-", dir="/tmp") as name:
        home = Path(name) / "home"
        home.mkdir()
        for place in (Path(name), home):
            os.chmod(place, 0o755)
            os.chown(place, 65533, 65533)
        driver = Path(__file__).parents[1] / "as_user.py"
        done = subprocess.run(
            [sys.executable, str(driver), "65533", "-c", AS_USER, str(home)],
            capture_output=True,
            text=True,
            timeout=120,
            cwd="/",
            env=dict(os.environ)
            | {"PYTHONPATH": f"{REPOSITORY}/src:{REPOSITORY}", "PYTHONDONTWRITEBYTECODE": "1"},
        )
    assert done.returncode == 0, done.stderr
    said, started, ended = json.loads(done.stdout.splitlines()[-1])
    in_words = said.split(", ")
    assert LimitInForce(resource=Resource.PROCESSES, amount=100, by=Enforcer.RLIMIT).words in in_words
    assert "memory 300MiB of each process by rlimit" in in_words
    assert "cpu not limited" in in_words
    assert not bounds(Resource.MEMORY, in_words)
    assert 0 < int(started) < SMALL.processes
    assert ended == "7"


@pytest.mark.parametrize("wrong", [{"processes": 3}, {"memory_bytes": MIB}, {"cpu_weight": 20_000}])
def test_limits_that_no_worker_could_live_with_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(BadInput):
        WorkerLimits(**wrong)


def test_a_bomb_that_ends_its_worker_is_named(tmp_path: Path) -> None:
    with limited(tmp_path) as worker:
        need(bounds(Resource.MEMORY, words(worker)), "the cgroup controller memory")
        with pytest.raises(WorkerLost, match="signal 9"):
            run(worker, "kept = [bytearray(b'x') * (4 << 20) for _ in range(200)]")
