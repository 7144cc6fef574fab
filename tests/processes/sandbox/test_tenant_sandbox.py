"""Threat 15: what code in a session can learn of, reach or break outside of it. As root, and as a user
without any rights.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sublet.core.errors import BadInput, NotIsolated, WorkerLost
from sublet.core.studio.isolation import FILTERED, HIDDEN_HOME, OWN_UID, READ_ONLY, SAME_UID, SCOPED
from sublet.machine import lease_environment
from sublet.processes.daemonize import spawn_detached
from sublet.processes.sandbox import containment, tenant_sandbox
from sublet.processes.sandbox.tenant_sandbox import SandboxSpec, TenantSandbox
from sublet.processes.worker.local import LocalWorker
from sublet.processes.worker.workers import LocalWorkers
from tests.conftest import need
from tests.homes import process_is_gone, wait_until
from tests.processes import sealed_targets
from tests.processes.conftest import FAR_US, REPOSITORY, end_zygotes, moved_in, now_us, remove_group
from tests.processes.probing import SECRET, probed
from tests.processes.test_sealed import Heard, call, run


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("sandbox")
    yield made
    end_zygotes(made)


@pytest.fixture(autouse=True)
def its_tests_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """By workers that are told nothing else of this process's."""
    root = Path(__file__).parents[3]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(root / "src"), str(root))))


@pytest.fixture
def tenants(home: Path) -> LocalWorkers:
    return LocalWorkers(home, "here", "numpy,sublet", sandbox=TenantSandbox(number=7))


@pytest.fixture
def tenant(tenants: LocalWorkers) -> Iterator[LocalWorker]:
    made = moved_in(tenants)
    yield made
    made.end("the test is over")
    for pid in (made.worker_pid, made.holder.pid):
        wait_until(lambda pid=pid: process_is_gone(pid))


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """That anybody may pass, as pytest's own folders may not be."""
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        os.chmod(made, 0o755)
        yield Path(made)


# --- what dies, and what is left ---


def test_the_scratch_of_a_killed_worker_is_removed(tenant: LocalWorker) -> None:
    deep = "import os\nos.makedirs('a/b')\nopen('a/b/c', 'w').close()\nos.symlink('/', 'a/link')\nos.chmod('a/b', 0)\nos.chmod('a', 0)"
    assert run(tenant, deep)[0]
    os.kill(tenant.worker_pid, signal.SIGKILL)
    wait_until(lambda: not os.path.exists(tenant.scratch))
    assert os.path.isdir("/etc")


def test_the_scratch_of_a_killed_supervisor_is_removed(tenant: LocalWorker) -> None:
    assert os.path.isdir(tenant.scratch)
    os.kill(tenant.holder.pid, signal.SIGKILL)
    wait_until(lambda: not os.path.exists(tenant.scratch))
    remove_group(tenant.holder.pid, tenant.holder.started)


def test_what_a_killed_zygote_could_not_remove_the_next_one_does(home: Path, tenants: LocalWorkers) -> None:
    worker = moved_in(tenants)
    end_zygotes(home)
    assert run(worker, "1")[0]  # it does not need it
    worker.end("over")
    assert os.path.isdir(worker.scratch)
    tenants.warm()
    wait_until(lambda: not os.path.exists(worker.scratch))


def test_a_scratch_that_is_somebodys_stays(tmp_path: Path) -> None:
    from sublet.processes.ladder import read_stat

    own = read_stat(os.getpid())
    assert own is not None
    root = tmp_path / "scratch"
    kept = tenant_sandbox.make_scratch(root, own.pid, own.started)
    other = tenant_sandbox.make_scratch(root, own.pid, own.started + 1)  # the pid is another's now
    (root / "not ours").mkdir()
    assert tenant_sandbox.remove_left_scratch(root) == [other.name]
    assert kept.is_dir()
    assert not other.exists()
    assert (root / "not ours").is_dir()


def test_a_scratch_root_that_somebody_else_made_is_not_used(tmp_path: Path) -> None:
    need(os.getuid() == 0, "root")
    root = tmp_path / "scratch"
    root.mkdir()
    os.chown(root, 12345, 12345)
    with pytest.raises(PermissionError):
        tenant_sandbox.make_scratch(root, 1, 1)
    root.rmdir()
    root.symlink_to(tmp_path)
    with pytest.raises(PermissionError):
        tenant_sandbox.make_scratch(root, 1, 1)


def test_a_lease_that_ends_takes_the_processes_of_its_tenant_along(tenant: LocalWorker) -> None:
    fine, _ = run(
        tenant,
        "import subprocess\nchildren = [subprocess.Popen(['sleep', '100'], start_new_session=True) for _ in range(3)]",
    )
    assert fine
    tenant.arm(now_us() + 100_000, now_us() + 200_000)
    with pytest.raises(WorkerLost):
        run(tenant, "import time; time.sleep(30)")
    wait_until(lambda: not _pids_of_uid(tenant_sandbox.uid_of(7)))


def _pids_of_uid(uid: int | None) -> list[str]:
    if uid is None or os.getuid() != 0:
        return []
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has just gone
            if os.stat(f"/proc/{pid}").st_uid == uid:
                found.append(pid)
    return found


# --- threat 15 ---


def _check(found: dict[str, object]) -> None:
    assert found["got"] == []
    assert found["failed"] == []
    assert found["modes"] == [0o700, 0o700]
    assert found["removed"] is True


@pytest.fixture
def far_home() -> Iterator[Path]:
    """Not below /tmp, which is covered anyway."""
    with tempfile.TemporaryDirectory(dir="/opt", prefix="sublet-test-") as made:
        os.chmod(made, 0o755)
        yield Path(made) / "home"
        end_zygotes(Path(made) / "home")


def test_as_root_a_session_gets_hold_of_nothing_outside_of_it(far_home: Path) -> None:
    need(os.getuid() == 0 and containment.namespaces_work(), "root with namespaces")
    groups = os.getgroups()
    os.setgroups([4, 24])
    try:
        found = json.loads(json.dumps(probed(far_home)))
    finally:
        os.setgroups(groups)
        for name in ("SUBLET_TOKEN", "AWS_SECRET_ACCESS_KEY"):
            os.environ.pop(name, None)
    _check(found)
    assert found["uids"] == [tenant_sandbox.UID_BASE + 1, tenant_sandbox.UID_BASE + 2]
    for word in (HIDDEN_HOME, READ_ONLY, OWN_UID):
        assert word in found["containment"]
    assert SAME_UID not in found["containment"]


def test_as_a_user_without_rights_a_session_gets_hold_of_nothing_outside_of_it(far_home: Path) -> None:
    need(os.getuid() == 0, "root, to become a user")
    uid = 54_321
    os.chown(far_home.parent, uid, uid)
    here = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, str(here / "as_user.py"), str(uid), str(here / "probing.py"), str(far_home)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd="/",
        env=dict(os.environ) | {"PYTHONPATH": f"{REPOSITORY}/src:{REPOSITORY}"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    if HIDDEN_HOME not in found["containment"]:
        need(False, "user namespaces")
    _check(found)
    for word in (HIDDEN_HOME, READ_ONLY, SAME_UID):
        assert word in found["containment"]
    assert OWN_UID not in found["containment"]


def test_the_callers_environment_is_never_sent(
    tenants: LocalWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUBLET_LEDGER", f"postgresql://u:{SECRET}@h/d")
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("LC_TIME", "C")
    worker = tenants.start()
    worker.arm(now_us() + FAR_US, now_us() + FAR_US, confirm=True)
    worker.begin("lease-1", 7, {"CUDA_VISIBLE_DEVICES": "GPU-1", "SUBLET_LEASE_ID": "lease-1"})
    _, (told,) = call(worker, "whole_environment")
    found = json.loads(told)
    worker.end("over")
    assert SECRET not in told.decode()
    assert found["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    assert found["LC_TIME"] == "C"
    assert found["HOME"] == worker.scratch
    assert found["TMPDIR"].startswith(worker.scratch)


@pytest.mark.parametrize(
    "name", ["TOKEN", "LC", "PATHS", "XLC_ALL", "LD_PRELOAD", "PYTHONSTARTUP", "path", "LANGUAGE"]
)
def test_the_list_of_variables_is_short(name: str) -> None:
    assert name not in tenant_sandbox.zygote_environment({name: "x", "PYTHONPATH": "/somewhere"})
    assert "PYTHONPATH" not in tenant_sandbox.zygote_environment({"PYTHONPATH": "/somewhere"})


def test_what_is_covered_lies_in_no_other_cover_and_python_is_never_lost() -> None:
    spec = SandboxSpec(
        number=1,
        home="/root/.sublet",
        hide=("/srv/ledger", "/root/.sublet/x"),
        scratch="/root/.sublet/scratch/1-1",
    )
    covers = tenant_sandbox.covered(spec, [], None, home="/root")
    assert covers == sorted({os.path.realpath(p) for p in ("/root", "/run", "/srv/ledger")})
    assert tenant_sandbox.covered(spec, [], None, home="/") == sorted(
        {os.path.realpath(p) for p in ("/root/.sublet", "/run", "/srv/ledger")}
    )


def test_what_a_tenants_user_could_not_pass_is_opened_for_it(open_folder: Path) -> None:
    closed = open_folder / "closed"
    (closed / "python").mkdir(parents=True)
    closed.chmod(0o700)
    spec = SandboxSpec(number=1, home="/nonexistent", hide=(), scratch="")
    assert str(closed) in tenant_sandbox.covered(spec, [str(closed / "python")], 700_001, home="/")
    assert str(closed) not in tenant_sandbox.covered(spec, [str(closed / "python")], None, home="/")
    assert not tenant_sandbox._reaches(str(closed / "python"), 700_001)


def test_numbers_out_of_range_and_endless_paths_are_refused() -> None:
    for number in (-1, tenant_sandbox.NUMBER_MOST):
        with pytest.raises(BadInput):
            TenantSandbox(number=number)
    with pytest.raises(BadInput):
        TenantSandbox(number=1, hide=("/" + "x" * 3000,))


def test_a_tenants_files_are_closed_to_others(tenant: LocalWorker) -> None:
    assert run(tenant, "open('mine', 'w').close()")[0]
    mine = os.stat(f"{tenant.scratch}/mine")
    assert stat.S_IMODE(mine.st_mode) == 0o600
    assert mine.st_uid == (tenant_sandbox.uid_of(7) if os.getuid() == 0 else os.getuid())


# --- what a hostile worker may say to who called it ---


def test_a_sandboxed_worker_is_called_sealed_only(tenant: LocalWorker) -> None:
    with pytest.raises(BadInput, match="sealed only"):
        tenant.call(len, ([],), {})
    with pytest.raises(BadInput, match="sealed only"):
        tenant.call_many(len, [(([],), {})])


@pytest.mark.parametrize("word", sealed_targets.words())
def test_what_cannot_be_read_ends_the_worker_and_nothing_else(tenant: LocalWorker, word: str) -> None:
    began = time.monotonic()
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(WorkerLost, match="closed its end" if word == "empty" else "cannot be read"):
        call(tenant, "say", word.encode())
    assert time.monotonic() - began < 25, "it waited for the worker's own end"
    wait_until(lambda: process_is_gone(tenant.worker_pid))
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    with pytest.raises(WorkerLost):
        call(tenant, "echo")


def test_what_a_tenant_prints_when_nobody_listens_is_not_printed_here(
    tenant: LocalWorker, capfd: pytest.CaptureFixture[str]
) -> None:
    source = (
        "import os, threading\nthreading.Timer(0.1, lambda: (print('late'), os.write(1, b'raw'))).start()"
    )
    assert run(tenant, source)[0]
    time.sleep(0.4)
    tenant.end("over")
    assert capfd.readouterr() == ("", "")


def test_nothing_a_tenant_sends_is_ever_unpickled_here(tenant: LocalWorker, tmp_path: Path) -> None:
    canary = Path(tenant.scratch) / "canary"
    sink = Heard()
    assert call(tenant, "bombs", str(canary).encode(), sink=sink)[0]
    assert call(tenant, "echo", b"next") == (True, [b"next"])
    with pytest.raises(WorkerLost):
        call(tenant, "bombs", str(canary).encode(), b"raw", sink=sink)
    assert not canary.exists()


def test_the_page_that_both_map_cannot_be_cut(tenant: LocalWorker) -> None:
    source = """
        import ctypes, os
        from sublet.processes.worker import worker
        failed = 0
        for name in os.listdir("/proc/self/map_files"):
            try:
                if "sublet-tenure" in os.readlink(f"/proc/self/map_files/{name}"):
                    os.truncate(f"/proc/self/map_files/{name}", 0)
                    raise AssertionError("cut")
            except OSError:
                failed += 1
    """
    run(tenant, source)
    tenant.warn()
    tenant.arm(now_us() + FAR_US, now_us() + FAR_US)
    assert len(tenant._page) == lease_environment.PAGE_BYTES


def test_a_page_cannot_be_cut_by_a_descriptor_either(
    workers: LocalWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []
    real = os.memfd_create

    def keep(name: str, flags: int) -> int:
        fd = real(name, flags)
        if name == "sublet-tenure":
            kept.append(os.dup(fd))
        return fd

    monkeypatch.setattr(os, "memfd_create", keep)
    worker = workers.start()
    for size in (0, lease_environment.PAGE_BYTES * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(kept[0], size)
    os.close(kept[0])
    worker.end("over")


# --- where the kernel allows less ---


class Forced(LocalWorkers):
    """Workers of a zygote that may use only these means of containment."""

    def __init__(self, home: Path, mode: str) -> None:
        super().__init__(home, "here", "", sandbox=TenantSandbox(number=9))
        self.mode = mode

    def _spawn(self) -> int:
        self._folder.mkdir(parents=True, exist_ok=True)
        driver = str(Path(__file__).parents[1].joinpath("forced_zygote.py"))
        command = [sys.executable, driver, self.mode, "--folder", str(self._folder), "--name", self._name]
        return spawn_detached(
            [*command, "--hidden-home", str(self._home)],
            tenant_sandbox.zygote_environment(os.environ),
            self._log,
        )


def test_without_namespaces_it_works_and_claims_nothing_it_has_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY}/src:{REPOSITORY}")
    monkeypatch.setenv("HF_TOKEN", SECRET)
    home = tmp_path / "home"
    home.mkdir(mode=0o755)
    try:
        worker = moved_in(Forced(home, containment.SUBREAPER))
    except NotIsolated as e:
        worker, refused = None, e.message
    if worker is None:  # this Python lies where only root can read: a tenant is refused, and is never root
        end_zygotes(home)
        assert os.getuid() == 0
        assert "cannot read the files" in refused
        return
    try:
        words = [w for w in worker.containment.split(", ") if "limited" not in w and " by " not in w]
        assert [w for w in words if w not in (SCOPED, FILTERED)] in (
            ["subreaper", uid] for uid in (OWN_UID, SAME_UID)
        )
        assert not worker.scratch.startswith(str(home))
        fine, told = run(
            worker, f"import os\nassert os.getcwd() == {worker.scratch!r}\nopen('mine', 'w').close()"
        )
        assert fine, told
        _, (found,) = call(worker, "whole_environment")
        assert SECRET not in found.decode()
        if os.getuid() == 0:
            assert stat.S_IMODE(home.stat().st_mode) == 0o700
    finally:
        worker.end("over")
        wait_until(lambda: not os.path.exists(worker.scratch))
        end_zygotes(home)
        Path(worker.scratch).parent.rmdir()
