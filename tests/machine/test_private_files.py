"""Threat 25: what is in a home is its user's alone, whatever the umask; and threat 26: a lock strangers cannot take."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import pytest

import sublet
from sublet.core.errors import Disconnected, Misconfigured
from sublet.ledger.engines.sqlite import writer_lock
from sublet.ledger.engines.sqlite.engine import open_ledger
from sublet.machine.private_files import make_private_folder, open_private
from sublet.processes.clock import HostClock
from tests.conftest import need
from tests.homes import Home
from tests.leases.test_lease import ledger_of
from tests.studio.conftest import HostedSessions, hosted_here  # noqa: F401

STRANGER, GROUP = 65_534, 54_321


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def _modes(folder: Path) -> dict[str, str]:
    """What others than the owner may do, of all that is there."""
    found = {}
    for above, folders, files in os.walk(folder):
        for name in ["", *folders, *files]:
            path = Path(above) / name
            mode = path.lstat().st_mode
            if not stat.S_ISLNK(mode) and mode & 0o077:
                found[str(path.relative_to(folder))] = oct(stat.S_IMODE(mode))
    return found


@pytest.mark.usefixtures("open_umask")
def test_nothing_in_a_home_is_anybody_elses(hosted_here: HostedSessions) -> None:  # noqa: F811
    """With 0755 and 0644 any account could read the ledger and the packs."""
    settings = hosted_here.settings
    with sublet.gpu(vram="1GiB", ttl="1m", holder="worker") as lease:
        assert lease.run(abs, -1) == 1
    run = sublet.train("mode", state={"w": numpy.zeros(4)}, every=1, vram="1GiB", ttl="1m")
    for _ in run.steps(2):
        pass
    wide = _modes(settings.home)
    wide.pop("scratch", None)  # tenants pass it, each to a folder of its own
    wide.pop("run/resumes", None)  # the training loop's own; the folders above it are closed
    assert wide == {}
    names = " ".join(str(p) for p in settings.home.rglob("*"))
    for part in (
        "ledger.db-gate",
        "ledger.db-wal",
        "ledger.db-bells",
        "warden.log",
        "packs",
        ".sock",
        ".arenas",
    ):
        assert part in names, f"{part} was not looked at"


def test_a_home_that_was_open_is_closed_and_that_is_said_once(sqlite_home: Home) -> None:
    home = sqlite_home.settings.home
    home.mkdir(mode=0o755)
    home.chmod(0o755)
    said = [
        subprocess.run(
            [sys.executable, "-m", "sublet", "tenant", "ls"],
            capture_output=True,
            text=True,
            env=sqlite_home.environment,
        ).stderr
        for _ in range(2)
    ]
    assert "could be entered by other users of this machine (mode 755); it is closed to them now" in said[0]
    assert "entered" not in said[1]
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


def test_a_ledger_that_was_open_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    open_ledger(f"sqlite:{path}", HostClock()).close()
    for file in tmp_path.glob("ledger.db*"):
        file.chmod(0o755 if file.is_dir() else 0o644)
    ledger = open_ledger(f"sqlite:{path}", HostClock())
    ledger.prove_write()
    ledger.close()
    assert {name: mode for name, mode in _modes(tmp_path).items() if "bells" not in name and name} == {}


def test_opening_a_ledger_again_drops_no_lock(tmp_path: Path) -> None:
    """A process that closes any descriptor of a file loses its POSIX locks on it, SQLite's too."""
    ledger = open_ledger(f"sqlite:{tmp_path}/ledger.db", HostClock())

    def locks() -> int:
        files = {str(os.stat(p).st_ino) for p in tmp_path.glob("ledger.db*")}
        lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        return sum("POSIX" in line and line[5].rpartition(":")[2] in files for line in lines)

    def look() -> None:
        before = locks()
        assert before
        open_ledger(f"sqlite:{tmp_path}/ledger.db", HostClock())
        assert locks() >= before

    ledger.now()
    ledger.at_once(lambda: (ledger.tenants(), look()))
    ledger.close()


def _as(uid: int, work: Callable[[], None], gid: int = STRANGER) -> int:
    """The exit status of a child that does this as somebody else, with a umask as people have it."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.setgroups([])
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
            os.umask(0o022)
            work()
            code = 0
        except PermissionError:
            code = 13
        except Misconfigured:
            code = 78
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture
def anybodys() -> Iterator[Path]:
    """A folder that every user can pass."""
    need(os.getuid() == 0, "root, to be somebody else")
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="sublet-modes-") as made:
        os.chmod(made, 0o755)
        yield Path(made)


def test_a_stranger_cannot_take_the_lock_that_writers_wait_for(anybodys: Path) -> None:
    """Whoever could read the gate file could hold its lock, and everybody waited."""
    ledger = open_ledger(f"sqlite:{anybodys}/ledger.db", HostClock())
    ledger.prove_write()

    def lock(name: str) -> None:
        with open(anybodys / name, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    for name in ("ledger.db", "ledger.db-gate", "ledger.db-wal", "ledger.db-shm"):
        assert _as(STRANGER, lambda name=name: lock(name)) == 13, name
    ledger.bell().close()  # its folder is made when somebody first listens
    assert _as(STRANGER, lambda: os.listdir(anybodys / "ledger.db-bells") and None) == 13
    ledger.prove_write()
    ledger.close()


def test_a_ledger_of_somebody_else_is_refused_in_words(anybodys: Path) -> None:
    open_ledger(f"sqlite:{anybodys}/ledger.db", HostClock()).close()
    assert _as(STRANGER, lambda: open_ledger(f"sqlite:{anybodys}/ledger.db", HostClock()).close()) == 78


def test_a_group_shares_a_ledger_in_its_folder(anybodys: Path) -> None:
    """Also with a umask of 022, which made what one wrote read-only for the others."""
    os.chown(anybodys, -1, GROUP)
    os.chmod(anybodys, 0o2770)

    def write() -> None:
        ledger = open_ledger(f"sqlite:{anybodys}/ledger.db", HostClock())
        bell = ledger.bell()
        bell.listen("schedule")
        ledger.prove_write()
        ledger.close()

    assert _as(1001, write, GROUP) == 0
    assert _as(1002, write, GROUP) == 0
    assert _as(1001, write, GROUP) == 0
    assert _as(1003, write) != 0, "not of the group"
    assert all(p.stat().st_mode & 0o007 == 0 for p in anybodys.rglob("*"))


def test_what_root_makes_in_a_home_is_its_owners(anybodys: Path) -> None:
    home = anybodys / "home"
    home.mkdir(mode=0o700)
    os.chown(home, 1001, 1001)
    make_private_folder(home / "run" / "waiting")
    os.close(open_private(home / "run" / "lock", os.O_RDWR))
    for path in (home / "run", home / "run" / "waiting", home / "run" / "lock"):
        assert (path.stat().st_uid, path.stat().st_gid) == (1001, 1001)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        open_private(tmp_path / "link", os.O_RDWR)
    assert not (tmp_path / "elsewhere").exists()


# --- no wait without a limit ---


def test_a_lock_that_is_never_free_is_named_and_waited_for_no_longer(
    sqlite_home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = ledger_of(sqlite_home)
    ledger.prove_write()
    holds = sqlite_home.start(
        """
        import fcntl, sys
        file = open(sys.argv[1], "r+b")
        fcntl.flock(file, fcntl.LOCK_EX)
        print("holds", flush=True)
        sys.stdin.readline()
        """,
        f"{sqlite_home.settings.home}/ledger.db-gate",
    )
    assert holds.stdout.readline() == "holds\n"
    monkeypatch.setattr(writer_lock, "WAIT_SECONDS", 0.1)
    for _ in range(2):
        with pytest.raises(Disconnected, match=rf"held by process {holds.pid} .* nothing was changed"):
            ledger.prove_write()
    monkeypatch.setattr(writer_lock, "WAIT_SECONDS", 60.0)
    waiting = threading.Thread(target=ledger.prove_write)
    waiting.start()
    holds.stdin.write("\n")
    holds.stdin.flush()
    waiting.join(60)
    assert not waiting.is_alive()
    for _ in range(50):  # those who gave up hold nothing when their turn comes
        ledger.prove_write()
