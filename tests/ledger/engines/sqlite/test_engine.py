"""The embedded engine by itself: what it refuses to open, forks, threads, clocks, full disks, backups."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import apsw
import pytest

from sublet.core.errors import InvariantBroken, LeaseLost, Misconfigured, NotDurable, SchemaMismatch
from sublet.core.leasing.lease import Holder, LeaseState, Request
from sublet.ledger.engines.sqlite import engine as engine
from sublet.ledger.engines.sqlite import ledger_file
from sublet.ledger.engines.sqlite.engine import OLDEST_LIBRARY, backup, check_library, open_ledger
from sublet.ledger.engines.sqlite.ledger_file import check_place, file_system_of
from sublet.ledger.schema import versions
from sublet.machine import failpoints
from sublet.testing.clock import VirtualClock
from tests.ledger.rig import MINUTE, SECOND, Rig


@pytest.fixture
def ready(sqlite: Rig) -> Rig:
    sqlite.tenant()
    sqlite.device("gpu0", 1000)
    return sqlite


def path_of(rig: Rig) -> Path:
    return Path(rig.url.removeprefix("sqlite:"))


# --- opening -------------------------------------------------------------------------------------------------


def test_an_old_library_is_refused() -> None:
    check_library(OLDEST_LIBRARY)
    check_library((*OLDEST_LIBRARY[:2], OLDEST_LIBRARY[2] + 1))
    for old in ((3, 51, 2), (3, 7, 0), (3, 50, 9)):
        with pytest.raises(Misconfigured, match="can corrupt"):
            check_library(old)


def test_opening_asks_for_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "library_version", lambda: (3, 40, 1))
    with pytest.raises(Misconfigured):
        open_ledger(f"sqlite:{tmp_path}/ledger.db", VirtualClock())
    assert list(tmp_path.iterdir()) == []


MOUNTS = """\
/dev/vda / ext4 rw 0 0
proc /proc proc rw 0 0
server:/home /home nfs4 rw 0 0
/dev/vdb /home/local xfs rw 0 0
//nas/share /mnt/with\\040space cifs rw 0 0
sshfs#x /home/local/remote fuse.sshfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/lib/x", "ext4"),
        ("/home/ada/x", "nfs4"),
        ("/homer/x", "ext4"),
        ("/home/local/x", "xfs"),
        ("/home/local/remote/deep/x", "fuse.sshfs"),
        ("/mnt/with space/x", "cifs"),
    ],
)
def test_the_file_system_of_a_path(path: str, kind: str) -> None:
    assert file_system_of(Path(path), MOUNTS) == kind


def test_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = f"/dev/vda / ext4 rw 0 0\nserver:/x {os.path.realpath(tmp_path)} nfs rw 0 0\n"
    monkeypatch.setattr(ledger_file, "file_system_of", partial(file_system_of, mounts=mounts))
    with pytest.raises(Misconfigured, match="network file system"):
        check_place(tmp_path / "ledger.db")
    with pytest.raises(Misconfigured, match="nfs"):
        open_ledger(f"sqlite:{tmp_path}/ledger.db", VirtualClock())
    assert not (tmp_path / "ledger.db").exists()


def test_a_newer_schema_is_refused_untouched(ready: Rig) -> None:
    ready.close()
    path = path_of(ready)
    ready.sql("UPDATE meta SET value = ? WHERE key = 'schema_version'", str(versions.newest("sqlite") + 1))
    ready.sql("PRAGMA wal_checkpoint(TRUNCATE)")
    before = path.read_bytes()
    with pytest.raises(SchemaMismatch, match="knows up to"):
        open_ledger(f"sqlite:{path}", VirtualClock())
    with pytest.raises(SchemaMismatch):
        engine.apply_migrations(path, VirtualClock())
    assert path.read_bytes() == before


def _database(path: Path, *statements: str) -> None:
    db = apsw.Connection(str(path))
    for statement in statements:
        db.execute(statement)
    db.close()


def test_a_foreign_database_is_refused_untouched(tmp_path: Path) -> None:
    path = tmp_path / "photos.db"
    _database(path, "CREATE TABLE photo (id INTEGER)", "INSERT INTO photo VALUES (7)")
    before = path.read_bytes()
    with pytest.raises(SchemaMismatch, match="not a ledger"):
        open_ledger(f"sqlite:{path}", VirtualClock())
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "table",
    [
        "CREATE TABLE meta (id INTEGER, note TEXT)",
        "CREATE TABLE meta (key TEXT, value TEXT)",
        "CREATE TABLE meta AS SELECT 'schema_version' AS key, 'v7.1' AS value",
    ],
)
def test_a_foreign_table_called_meta_is_no_ledger(tmp_path: Path, table: str) -> None:
    path = tmp_path / "other.db"
    _database(path, table)
    with pytest.raises(SchemaMismatch):
        open_ledger(f"sqlite:{path}", VirtualClock())


def test_garbage_is_refused_untouched(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    path.write_bytes(os.urandom(8192))
    before = path.read_bytes()
    with pytest.raises(Misconfigured, match="damaged or not a ledger"):
        open_ledger(f"sqlite:{path}", VirtualClock())
    assert path.read_bytes() == before


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Misconfigured):
        open_ledger(f"sqlite:{tmp_path}/file/ledger.db", VirtualClock())
    (tmp_path / "folder.db").mkdir()
    with pytest.raises(Misconfigured):
        open_ledger(f"sqlite:{tmp_path}/folder.db", VirtualClock())


def test_many_open_a_new_ledger_at_once(tmp_path: Path) -> None:
    problems: list[BaseException] = []
    start = threading.Barrier(8)

    def one() -> None:
        try:
            start.wait()
            ledger = open_ledger(f"sqlite:{tmp_path}/new.db", VirtualClock())
            ledger.tenants()
            ledger.close()
        except BaseException as e:
            problems.append(e)

    _run([one] * 8)
    assert problems == []


def _run(targets: list[Any]) -> None:
    threads = [threading.Thread(target=target, daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"


# --- forks and threads ---------------------------------------------------------------------------------------


def test_a_forked_child_uses_the_ledger_while_the_parent_goes_on(ready: Rig) -> None:
    before = ready.ask(1)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)  # a child that hangs must not hang the tests
        status = 1
        try:
            os.close(read)
            for n in range(20):
                ready.release(ready.ask(1, lease_id=f"child-{n}"))
            ready.ledger.renew(ready.key(before))
            ready.ledger.close()
            status = 0
        except BaseException:
            os.write(write, traceback.format_exc().encode()[-2000:])
        os._exit(status)
    os.close(write)
    for n in range(20):
        ready.release(ready.ask(1, lease_id=f"parent-{n}"))
    told = os.read(read, 4000)
    _, status = os.waitpid(pid, 0)
    os.close(read)
    assert status == 0, told.decode()
    assert len(ready.ledger.leases(live_only=False)) == 41
    ready.ledger.renew(ready.key(before))
    assert ready.faults() == []


def test_a_child_forked_among_threads(ready: Rig) -> None:
    """The parent has a combiner thread; the child has none and must not wait for it."""
    ready.ledger.engine._combine(lambda tx: None, True)
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)  # a child that hangs must not hang the tests
        status = 1
        try:
            ready.ledger.engine._combine(lambda tx: None, True)
            ready.release(ready.ask(1, lease_id="child"))
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    ready.ledger.engine._combine(lambda tx: None, True)
    assert ready.look("child").state is LeaseState.ENDED


def test_sixteen_threads(ready: Rig) -> None:
    """With many writers one commits for all: every lease granted once, every sum right afterwards."""
    ready.devices({"gpu0": 1000, "gpu1": 1000})
    epochs: list[int] = []
    problems: list[str] = []
    start = threading.Barrier(16)

    def work(number: int) -> None:
        try:
            start.wait()
            for n in range(50):
                held = ready.ask(10, lease_id=f"t{number}-{n}")
                epochs.append(held.lease.epoch)
                if n % 10 == 0:
                    ready.ledger.renew(ready.key(held))
                assert ready.release(held) is True
        except BaseException:
            problems.append(traceback.format_exc())

    _run([partial(work, n) for n in range(16)])
    assert problems == []
    assert ready.ledger.engine._combiner is not None
    assert len(epochs) == len(set(epochs)) == 800
    assert [d.free_bytes for d in ready.ledger.devices()] == [1000, 1000]
    ada = ready.ledger.tenant("ada")
    assert (ada.live_leases, ada.live_bytes, ada.rate_ppm) == (0, 0, 0)
    assert ready.faults() == []


def test_threads_never_overcommit(ready: Rig) -> None:
    """L2 and T2 under concurrency."""
    ready.tenant("poor", max_leases=3)
    outcomes: list[str] = []
    start = threading.Barrier(16)

    def work(number: int) -> None:
        start.wait()
        for n in range(5):
            try:
                ready.ask(10, tenant="poor", wait_us=0, lease_id=f"q{number}-{n}")
                outcomes.append("granted")
            except Exception as e:
                outcomes.append(type(e).__name__)

    _run([partial(work, n) for n in range(16)])
    assert sorted(outcomes) == ["QuotaReached"] * 77 + ["granted"] * 3


def test_one_that_raises_does_not_poison_the_others(ready: Rig) -> None:
    engine_ = ready.ledger.engine
    results: list[object] = []
    start = threading.Barrier(12)

    def good(n: int) -> None:
        start.wait()
        for i in range(10):
            done = engine_._combine(partial(_insert_host, f"h{n}-{i}"), True)
            results.append(done)

    def bad() -> None:
        start.wait()
        for _ in range(10):
            try:
                engine_._combine(_insert_then_raise, True)
            except ZeroDivisionError as e:
                results.append(e)

    _run([partial(good, n) for n in range(9)] + [bad] * 3)
    assert sum(r == 1 for r in results) == 90
    assert sum(isinstance(r, ZeroDivisionError) for r in results) == 30
    names = {name for (name,) in ready.sql("SELECT name FROM host")}
    assert len([n for n in names if n.startswith("h")]) == 90
    assert "ghost" not in names


def _insert_host(name: str, tx: Any) -> int:
    return tx.run("INSERT INTO host VALUES (?, 1)", name)


def _insert_then_raise(tx: Any) -> None:
    tx.run("INSERT INTO host VALUES ('ghost', 1)")
    raise ZeroDivisionError


def test_errors_are_ours_in_the_combiner_too(ready: Rig) -> None:
    def impossible(tx: Any) -> None:
        tx.run("UPDATE device SET free_bytes = -1")

    with pytest.raises(InvariantBroken):
        ready.ledger.engine.write(impossible, durable=True)
    with pytest.raises(InvariantBroken):
        ready.ledger.engine._combine(impossible, True)


def test_processes_take_turns(ready: Rig) -> None:
    """Several processes at once, each with its own ledger: no BUSY reaches anybody."""
    script = textwrap.dedent(
        """
        import sys
        from sublet.core.leasing.lease import Holder, Request
        from sublet.processes.clock import HostClock
        from sublet.ledger.engines.sqlite.engine import open_ledger
        ledger = open_ledger(sys.argv[1], HostClock())
        for n in range(40):
            name = f"{sys.argv[2]}-{n}"
            ledger.acquire(name, "s", Request(tenant="ada", vram_bytes=1, ttl_us=10**8), Holder(host="node-a"))
            assert ledger.release(name, "s")
        """
    )
    running = [
        subprocess.Popen([sys.executable, "-c", script, ready.url, f"p{n}"], stderr=subprocess.PIPE)
        for n in range(4)
    ]
    for process in running:
        _, told = process.communicate(timeout=60)
        assert process.returncode == 0, told.decode()[-2000:]
    assert ready.sql("SELECT count(*), count(DISTINCT epoch) FROM lease") == [(160, 160)]
    assert ready.ledger.devices()[0].free_bytes == 1000
    assert ready.faults() == []


def test_a_stopped_process_is_let_out_of_its_transaction(ready: Rig) -> None:
    """Ctrl-Z inside a transaction holds up everybody; `unstick` lets it finish that and stops it again."""
    ready.ask(1, lease_id="before")
    assert ready.ledger.unstick() == ""
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        try:
            failpoints.arm("before_commit", lambda: os.kill(os.getpid(), signal.SIGSTOP), nth=1)
            ready.ask(1, lease_id="stopped")
            time.sleep(60)
        finally:
            os._exit(0)
    try:
        assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
        answers: list[object] = []
        waiting = threading.Thread(target=lambda: answers.append(ready.ask(1, lease_id="after")), daemon=True)
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        assert str(pid) in ready.ledger.unstick()
        waiting.join(60)
        assert answers
        assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1]), "its owner had stopped it"
        assert ready.look("stopped").state is LeaseState.ACTIVE
        assert ready.ledger.unstick() == ""
        assert ready.faults() == []
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


# --- clocks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [3600 * SECOND, -3600 * SECOND])
def test_stepping_the_wall_clock_moves_no_lease(ready: Rig, step: int) -> None:
    """L4."""
    held = ready.ask(1)
    before = ready.ledger.now()
    ready.clock.step_wall(step)
    assert ready.ledger.now() == before
    ready.ledger.tick()
    ready.clock.advance(4 * MINUTE)
    assert ready.ledger.renew(ready.key(held)).at == before + 4 * MINUTE
    ready.clock.advance(5 * MINUTE)
    with pytest.raises(LeaseLost):
        ready.ledger.renew(ready.key(held))
    reopened = open_ledger(ready.url, ready.clock)
    assert reopened.now() == before + 9 * MINUTE
    reopened.close()


@pytest.mark.parametrize("step", [0, -3600 * SECOND])
def test_time_does_not_run_backwards_over_a_reboot(ready: Rig, step: int) -> None:
    held = ready.ask(1)
    ready.clock.advance(MINUTE)
    ready.ledger.beat_host("node-a")
    before = ready.ledger.now()
    ready.clock.reboot()
    ready.clock.step_wall(step)
    assert ready.ledger.now() >= before
    ready.ledger.beat_host("node-a")
    ready.clock.advance(MINUTE)
    assert ready.ledger.now() == before + MINUTE
    assert ready.look(held).expires_at == held.lease.expires_at
    ready.clock.advance(4 * MINUTE)
    with pytest.raises(LeaseLost):
        ready.ledger.renew(ready.key(held))


def test_time_off_counts(ready: Rig) -> None:
    """An hour with the machine off is an hour: nobody held anything meanwhile."""
    held = ready.ask(1)
    ready.clock.reboot()
    ready.clock.step_wall(3600 * SECOND)
    with pytest.raises(LeaseLost):
        ready.ledger.renew(ready.key(held))


def test_a_boot_clock_that_stumbles_is_clamped(ready: Rig) -> None:
    before = ready.ask(1).at
    ready.clock.boot -= 10 * SECOND
    assert ready.ledger.now() == before
    assert ready.ask(1).at == before


# --- disk ----------------------------------------------------------------------------------------------------

FILL = """
import resource, sys
from sublet.core.errors import NotDurable, SubletError
from sublet.core.leasing.lease import Holder, Request
from sublet.core.leasing.tenancy import Tenant
from sublet.ledger.engines.sqlite.engine import open_ledger
from sublet.ports.ledger import FoundDevice
from sublet.testing.clock import VirtualClock

clock = VirtualClock()
ledger = open_ledger(sys.argv[1], clock)
ledger.add_tenant(Tenant(name="ada"), actor="test")
ledger.report_host("node-a", [FoundDevice(id="g", driver="host", ordinal=0, name="", capacity_bytes=10**9)])
if sys.argv[2] == "limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))
done, refused = 0, ""
for n in range(5000):
    try:
        ledger.acquire(f"l{n}", "s", Request(tenant="ada", vram_bytes=1, ttl_us=10**9), Holder(host="node-a"))
        done += 1
    except NotDurable as e:
        refused = e.code
        break
assert refused == "not_durable", done
assert ledger.tenant("ada").live_leases == done, "a refused lease was counted"
if sys.argv[2] == "limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    ledger.acquire("after", "s", Request(tenant="ada", vram_bytes=1, ttl_us=10**9), Holder(host="node-a"))
    assert ledger.verify().faults == ()
print("done", done)
"""


def test_a_disk_that_refuses_a_write_is_not_durable(tmp_path: Path) -> None:
    """The file size limit stands in for a failing disk, and then lets go: the ledger is whole."""
    done = subprocess.run(
        [sys.executable, "-c", FILL, f"sqlite:{tmp_path}/ledger.db", "limit"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_full_disk_is_not_durable(tmp_path: Path) -> None:
    """A real one: a file system of two megabytes in a mount namespace of the child."""
    place = tmp_path / "small"
    place.mkdir()
    command = (
        f'mount -t tmpfs -o size=2m none {place} && exec {sys.executable} -c "$FILL" sqlite:{place}/l.db full'
    )
    try:
        probe = subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("unshare is missing")
    if probe.returncode:
        pytest.skip("mounting needs root")
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "FILL": FILL},
    )
    if "permission denied" in done.stderr.lower() and "mount" in done.stderr:
        pytest.skip("mounting needs root")
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_disk_that_does_not_confirm_is_not_durable(ready: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fails)
    with pytest.raises(NotDurable):
        ready.ask(1)
    with pytest.raises(NotDurable):
        ready.ledger.barrier()


def test_a_log_that_cannot_be_opened_to_be_synced_is_not_durable(
    ready: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def fails(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).endswith("-wal"):
            raise OSError(5, "Input/output error")
        return real(path, *args, **kwargs)

    ledger = ready.open()
    monkeypatch.setattr(os, "open", fails)
    with pytest.raises(NotDurable):
        ready.ask(1, ledger=ledger)


def test_only_durable_verbs_wait_for_the_disk(ready: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    held = ready.ask(1)
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    ready.ledger.renew(ready.key(held))
    ready.ledger.beat_host("node-a")
    assert synced == []
    ready.commit(held, 1)
    assert len(synced) == 1
    ready.ask(1)
    assert len(synced) == 2
    ready.ledger.barrier()
    assert len(synced) == 3


# --- backup --------------------------------------------------------------------------------------------------


def test_a_backup_of_a_live_ledger(ready: Rig, tmp_path: Path) -> None:
    """Taken while others write: it verifies, and after `mark_restored` no old epoch is granted again."""
    held = ready.ask(1)
    ready.commit(held, 1)
    stop = threading.Event()

    def churn() -> None:
        n = 0
        while not stop.is_set():
            n += 1
            ready.release(ready.ask(1, lease_id=f"churn-{n}"))

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for n in range(3):
            backup(path_of(ready), tmp_path / f"copy-{n}.db")
    finally:
        stop.set()
        thread.join()
    highest = ready.ask(1).lease.epoch
    copy = open_ledger(f"sqlite:{tmp_path}/copy-2.db", ready.clock)
    assert copy.verify().faults == ()
    assert copy.head("train") == ready.ledger.head("train")
    copy.mark_restored(actor="root")
    fresh = copy.acquire(
        "new", "s", Request(tenant="ada", vram_bytes=1, ttl_us=MINUTE), Holder(host="node-a")
    )
    assert fresh.lease.epoch > highest
    with pytest.raises(LeaseLost):
        copy.renew(ready.key(held))
    copy.close()
