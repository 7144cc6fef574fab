"""I5: a ledger that went back in time grants nothing until somebody says so, and no crash makes one look as if it had."""

from __future__ import annotations

import os
import shutil
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from sublet.core.errors import LedgerFromThePast
from sublet.ledger.engines.sqlite.engine import apply_migrations, backup, open_ledger
from sublet.ledger.engines.stamp_file import fresh_stamp
from sublet.ledger.ledger import SqlLedger
from sublet.machine import failpoints
from sublet.testing.clock import VirtualClock
from tests.ledger.rig import Rig, sqlite_rig

SIDES = ("", "-wal", "-shm")


@pytest.fixture
def ready(sqlite: Rig) -> Rig:
    sqlite.tenant()
    sqlite.device("gpu0", 1000)
    return sqlite


def path_of(rig: Rig) -> Path:
    return Path(rig.url.removeprefix("sqlite:"))


def stamp_of(rig: Rig) -> Path:
    return Path(f"{path_of(rig)}-stamp")


def take(rig: Rig, folder: Path, *names: str) -> Path:
    """Copies of the ledger's files as they are now."""
    folder.mkdir()
    for end in names or SIDES:
        shutil.copyfile(f"{path_of(rig)}{end}", folder / f"ledger.db{end}")
    return folder


def put_back(rig: Rig, folder: Path) -> None:
    for end in SIDES:
        Path(f"{path_of(rig)}{end}").unlink(missing_ok=True)
        if (folder / f"ledger.db{end}").exists():
            shutil.copyfile(folder / f"ledger.db{end}", f"{path_of(rig)}{end}")


def lose_the_log(rig: Rig, folder: Path) -> None:
    """As after a kill: nobody has copied the log into the file, and the log is gone."""
    without = take(rig, folder / "without", "")
    rig.close()
    put_back(rig, without)


def granted(rig: Rig, ledger: SqlLedger | None = None) -> int:
    return rig.ask(1, ledger=ledger).lease.epoch


def goes_on(rig: Rig, above: int) -> None:
    """Somebody says that this is the ledger now: no epoch of before is granted again."""
    ledger = rig.open()
    ledger.mark_restored(actor="root")
    assert granted(rig, ledger) > above
    other = rig.open()
    assert granted(rig, other) > above
    assert other.verify().faults == ()


# --- what is refused -----------------------------------------------------------------------------------------


def test_a_lost_log_of_a_young_ledger(ready: Rig, tmp_path: Path) -> None:
    """I5: everything was still in the log. Without it no lease was ever granted, and epoch 1 would be again."""
    highest = max(granted(ready) for _ in range(3))
    lose_the_log(ready, tmp_path)
    ledger = ready.open()
    assert (ledger.leases(), ledger.tenants()) == ([], [])
    ready.ledger = ledger
    with pytest.raises(LedgerFromThePast, match="went back in time") as raised:
        ready.tenant()
    assert "sublet migrate --restored" in raised.value.remedy
    ledger.mark_restored(actor="root")
    ready.tenant()
    ready.device("gpu0", 1000)
    assert granted(ready) > highest


def test_a_lost_log_of_a_ledger_that_was_checkpointed(ready: Rig, tmp_path: Path) -> None:
    """I5: what the file had when its log was last copied into it is the past."""
    granted(ready)
    ready.sql("PRAGMA wal_checkpoint(TRUNCATE)")
    highest = max(granted(ready) for _ in range(3))
    lose_the_log(ready, tmp_path)
    ledger = ready.open()
    with pytest.raises(LedgerFromThePast, match=f"epoch {highest}"):
        granted(ready, ledger)
    goes_on(ready, highest)


@pytest.mark.parametrize("how", ["files", "backup"])
def test_an_old_copy_put_back(ready: Rig, tmp_path: Path, how: str) -> None:
    """I5: whether the files were copied or a backup was made, it may be read and grants nothing."""
    held = ready.ask(1)
    if how == "files":
        old = take(ready, tmp_path / "old")
    else:
        old = tmp_path / "old"
        old.mkdir()
        backup(path_of(ready), old / "ledger.db")
    highest = max(granted(ready) for _ in range(3))
    ready.close()
    put_back(ready, old)
    ledger = ready.open()
    assert [a.lease.id for a in ledger.leases()] == [held.lease.id]
    refused: list[Callable[[], object]] = [
        lambda: granted(ready, ledger),
        lambda: ledger.renew(ready.key(held)),
        lambda: ready.commit(held, 1),
        lambda: ledger.tick(),
        ledger.prove_write,
    ]
    ready.ledger = ledger
    for verb in refused:
        with pytest.raises(LedgerFromThePast, match="went back in time"):
            verb()
    goes_on(ready, highest)


def test_a_lost_step_is_noticed_too(ready: Rig, tmp_path: Path) -> None:
    """I5: no epoch was granted since the copy, but a step was committed."""
    held = ready.ask(1)
    old = take(ready, tmp_path / "old")
    assert ready.clock is not None
    ready.clock.advance(1)
    ready.commit(held, 1)
    ready.close()
    put_back(ready, old)
    ready.ledger = ready.open()
    with pytest.raises(LedgerFromThePast, match="went back in time"):
        ready.commit(held, 1)


@pytest.mark.parametrize("left", [None, b""])
def test_a_file_that_is_gone(ready: Rig, left: bytes | None) -> None:
    """I5: an empty ledger in the place of a lost one knows nothing of who holds what. None is made unasked."""
    highest = granted(ready)
    ready.close()
    for end in SIDES:
        Path(f"{path_of(ready)}{end}").unlink(missing_ok=True)
    if left is not None:
        path_of(ready).write_bytes(left)
    with pytest.raises(LedgerFromThePast, match=f"a ledger was here, which granted up to epoch {highest}"):
        ready.open()
    assert path_of(ready).stat().st_size == 0, "what is left of it can still be put back"
    assert ready.clock is not None
    apply_migrations(path_of(ready), ready.clock)
    ready.ledger = ready.open()
    with pytest.raises(LedgerFromThePast, match="another ledger was here"):
        ready.tenant()
    ready.ledger.mark_restored(actor="root")
    ready.tenant()
    ready.device("gpu0", 1000)
    assert granted(ready) > highest


def test_a_copy_elsewhere(ready: Rig, tmp_path: Path) -> None:
    """I5: a copy of the file alone may be read. It becomes a ledger when somebody says so."""
    highest = granted(ready)
    copy = tmp_path / "copy.db"
    backup(path_of(ready), copy)
    assert ready.clock is not None
    ledger = open_ledger(f"sqlite:{copy}", ready.clock)
    assert len(ledger.leases()) == 1
    with pytest.raises(LedgerFromThePast, match="no stamp beside it"):
        granted(ready, ledger)
    assert granted(ready) == highest + 1, "the ledger it was copied from goes on"
    ledger.mark_restored(actor="root")
    assert granted(ready, ledger) > highest
    ledger.close()


def test_another_ledger_in_its_place(ready: Rig, tmp_path: Path) -> None:
    """I5: one with higher epochs, even: it is not the one that was here."""
    highest = granted(ready)
    other = sqlite_rig(tmp_path)
    other.tenant()
    other.device("gpu0", 1000)
    there = max(granted(other) for _ in range(10))
    other.close()
    ready.close()
    put_back(
        ready, take(other, tmp_path / "other", *[s for s in SIDES if Path(f"{path_of(other)}{s}").exists()])
    )
    with pytest.raises(LedgerFromThePast, match="another ledger"):
        granted(ready, ready.open())
    goes_on(ready, max(highest, there))


def test_one_that_runs_sees_the_file_replaced_under_it(ready: Rig, tmp_path: Path) -> None:
    """I5: a process that opened the ledger before is refused as well, at its next write."""
    backup(path_of(ready), tmp_path / "old.db")
    granted(ready)
    running = ready.open()
    granted(ready, running)
    ready.sql("PRAGMA wal_checkpoint(TRUNCATE)")
    shutil.copyfile(tmp_path / "old.db", path_of(ready))  # into the same file
    with pytest.raises(LedgerFromThePast, match="went back in time"):
        granted(ready, ready.open())


def test_the_backup_from_before_a_restore_put_back_later(ready: Rig, tmp_path: Path) -> None:
    """I5: what was the ledger before the restore is the past as well, although it knows more grants."""
    backup(path_of(ready), tmp_path / "old.db")
    granted(ready)
    before = take(ready, tmp_path / "before")
    ready.close()
    (tmp_path / "put").mkdir()
    shutil.copyfile(tmp_path / "old.db", tmp_path / "put" / "ledger.db")
    put_back(ready, tmp_path / "put")
    ledger = ready.open()
    ledger.mark_restored(actor="root")
    ledger.close()
    put_back(ready, before)
    with pytest.raises(LedgerFromThePast, match="went back in time"):
        granted(ready, ready.open())


def test_a_restore_under_a_clock_that_is_behind(ready: Rig, tmp_path: Path) -> None:
    """L1: the jump starts from the highest epoch that was ever granted here, not from the backup's."""
    backup(path_of(ready), tmp_path / "old.db")
    ready.ledger.mark_restored(actor="root")
    highest = granted(ready)
    ready.close()
    (tmp_path / "put").mkdir()
    shutil.copyfile(tmp_path / "old.db", tmp_path / "put" / "ledger.db")
    put_back(ready, tmp_path / "put")
    assert ready.clock is not None
    ready.clock.step_wall(-1_000_000_000_000)
    ready.clock.reboot()
    goes_on(ready, highest)


@pytest.mark.parametrize("damage", [b"", b"nonsense", bytes(512)])
def test_a_stamp_that_does_not_read(ready: Rig, damage: bytes) -> None:
    """I5: nobody can say what was granted, so nothing is."""
    granted(ready)
    ready.close()
    stamp_of(ready).write_bytes(damage)
    with pytest.raises(LedgerFromThePast, match="no stamp beside it"):
        granted(ready, ready.open())


def test_the_stamp_is_its_owners_alone(ready: Rig) -> None:
    """I5: whoever may write the ledger may write its stamp, and nobody else may read it."""
    assert stat.S_IMODE(stamp_of(ready).stat().st_mode) == 0o600


def test_a_stamp_that_cannot_be_written_stops_nobody(ready: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is behind then, which refuses nobody."""

    def fails(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", fails)
    first = granted(ready)
    assert granted(ready) == first + 1


# --- what is not refused: no crash makes a ledger look old ---------------------------------------------------


def test_the_stamp_is_never_ahead_of_what_the_disk_has(
    ready: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I5: the power may fail after any write of the stamp. The ledger as it was when it was last synced is not the past."""
    sync, pwrite = os.fdatasync, os.pwrite
    on_disk = tmp_path / "on-disk"
    states: list[Path] = []

    def synced(fd: int) -> None:
        sync(fd)
        shutil.rmtree(on_disk, ignore_errors=True)
        take(ready, on_disk)

    def written(fd: int, data: bytes, at: int) -> int:
        done = pwrite(fd, data, at)
        if os.path.samestat(os.fstat(fd), os.stat(stamp_of(ready))) and on_disk.exists():
            state = shutil.copytree(on_disk, tmp_path / f"state-{len(states)}")
            shutil.copyfile(stamp_of(ready), state / "ledger.db-stamp")
            states.append(state)
        return done

    monkeypatch.setattr(os, "fdatasync", synced)
    monkeypatch.setattr(os, "pwrite", written)
    held = [ready.ask(1) for _ in range(4)]
    ready.release(held[0])  # not durable: it is in the log, and may be lost
    ready.ledger.beat_host("node-b")
    ready.commit(held[1], 1)
    ready.ledger.barrier()
    ready.ledger.mark_restored(actor="root")
    ready.ask(1)
    monkeypatch.undo()
    assert len(states) >= 7
    for state in states:
        assert ready.clock is not None
        ledger = open_ledger(f"sqlite:{state / 'ledger.db'}", ready.clock)
        ledger.prove_write()
        ledger.close()


def killed(work: Callable[[], object]) -> None:
    pid = os.fork()
    if not pid:
        try:
            work()
        finally:
            os._exit(3)
    _, status = os.waitpid(pid, 0)
    assert (os.WIFSIGNALED(status), os.WTERMSIG(status)) == (True, signal.SIGKILL)


@pytest.mark.parametrize("place", ["before_commit", "after_commit_before_reply"])
@pytest.mark.parametrize("verb", ["grant", "restore"])
def test_killed_at_any_moment_the_ledger_goes_on(ready: Rig, place: str, verb: str) -> None:
    """I5: a process that dies inside a grant or a restore leaves a ledger that grants."""
    highest = granted(ready)

    def die() -> None:
        ledger = ready.open()
        failpoints.arm(place, "kill")
        if verb == "grant":
            ready.ask(1, ledger=ledger, lease_id="killed")
        else:
            ledger.mark_restored(actor="root")

    killed(die)
    assert granted(ready, ready.open()) > highest


def test_killed_while_an_old_copy_becomes_the_ledger(ready: Rig, tmp_path: Path) -> None:
    """I5: before the restore is committed the copy is the past; afterwards it is the ledger, whatever the stamp still says."""
    backup(path_of(ready), tmp_path / "copy.db")
    highest = max(granted(ready) for _ in range(3))
    assert ready.clock is not None
    for place, refused in (("before_commit", True), ("after_commit_before_reply", False)):

        def die(place: str = place) -> None:
            ledger = open_ledger(f"sqlite:{tmp_path / 'copy.db'}", VirtualClock())
            failpoints.arm(place, "kill")
            ledger.mark_restored(actor="root")

        killed(die)
        ledger = open_ledger(f"sqlite:{tmp_path / 'copy.db'}", ready.clock)
        if refused:
            with pytest.raises(LedgerFromThePast):
                granted(ready, ledger)
        else:
            assert granted(ready, ledger) > highest
        ledger.close()


def test_a_stamp_that_is_behind_refuses_nobody(ready: Rig, tmp_path: Path) -> None:
    """I5: the power failed before the stamp reached the disk. The ledger itself lost nothing."""
    granted(ready)
    shutil.copyfile(stamp_of(ready), tmp_path / "behind")
    highest = granted(ready)
    ready.close()
    shutil.copyfile(tmp_path / "behind", stamp_of(ready))
    assert granted(ready, ready.open()) == highest + 1


def test_killed_while_the_ledger_is_made(tmp_path: Path) -> None:
    """I5: with a stamp and no ledger yet, or a ledger the stamp does not name yet, the next one begins or goes on."""
    rig = sqlite_rig(tmp_path)
    rig.close()
    whole = stamp_of(rig).read_bytes()
    unbound = fresh_stamp()
    assert len(unbound) == len(whole)
    stamp_of(rig).write_bytes(unbound)
    rig.ledger = rig.open()
    rig.tenant()
    rig.close()
    assert stamp_of(rig).read_bytes() != unbound
    for end in SIDES:
        Path(f"{path_of(rig)}{end}").unlink()
    stamp_of(rig).write_bytes(unbound)
    rig.ledger = rig.open()
    rig.tenant()
    rig.device("gpu0", 1000)
    assert granted(rig) == 1
