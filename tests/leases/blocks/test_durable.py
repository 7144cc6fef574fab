"""Durable values on block leases, with real processes that are killed, stopped and raced (C6, S2, fact 4)."""

from __future__ import annotations

import gc
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sublet
from sublet import wiring
from sublet.core.errors import (
    BadInput,
    BlockHeld,
    BlockTooSmall,
    Damaged,
    Disconnected,
    Fenced,
    LeaseLost,
    Misconfigured,
    NotDurable,
    NotFound,
    NothingSaved,
    SubletError,
)
from sublet.core.leasing.block import BlockState
from sublet.core.leasing.tenancy import Tenant
from sublet.leases.blocks import durable
from tests.conftest import need
from tests.core.leasing.test_block import traversals
from tests.homes import Home, wait_until

SYSCALLS = int(os.environ.get("SUBLET_BLOCK_SYSCALLS", "6"))


def kept(home: Home, value: Any, **options: Any) -> str:
    """A block with this value in it, held by nobody."""
    with sublet.block(**options) as block:
        sublet.Durable(value, block).checkpoint()
        return block.locator


def files(home: Home) -> list[str]:
    return sorted(p.name for p in (home.settings.home / "blocks").iterdir())


def test_what_the_design_promises(home: Home) -> None:
    block = sublet.block(blocks=512, ttl="1h")
    d = sublet.Durable({"epoch": 0}, block)
    first = d.checkpoint()
    again = sublet.Durable.restore(block.locator)
    assert again.value == {"epoch": 0}
    assert (block.blocks, block.size_bytes, block.capacity_bytes) == (512, 2 << 20, (1 << 20) - 512)
    assert (first.sequence, first.epoch, first.bytes > 0, len(first.digest)) == (1, block.epoch, True, 64)
    assert again.block.epoch > block.epoch
    with pytest.raises(Fenced):
        d.checkpoint()
    assert block.status == "ended"
    again.value["epoch"] = 1
    assert again.checkpoint().sequence == 2
    assert sublet.Durable.restore(block.locator).value == {"epoch": 1}
    assert not wiring.open_ledger(home.settings).verify().faults


def test_tensors_survive_a_kill(home: Home) -> None:
    """Recipe 11: a run checkpoints to a block, dies, and its successor goes on."""
    child = home.start(
        """
        import sublet, numpy, os, signal
        d = sublet.Durable({"w": numpy.arange(1000.0), "epoch": 0}, sublet.block())
        for epoch in range(1, 4):
            d.value["w"] += 1
            d.value["epoch"] = epoch
            d.checkpoint()
        print(d.locator, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    locator = child.stdout.readline().strip()
    child.wait()
    d = sublet.Durable.restore(locator)
    assert d.value["epoch"] == 3
    assert np.array_equal(d.value["w"], np.arange(1000.0) + 3)
    assert d.note == ""
    d.value["w"] *= 2
    assert d.checkpoint().sequence == 4


def test_a_living_holder_keeps_it(home: Home) -> None:
    child = home.start(
        """
        import sublet, sys
        with sublet.block(ttl="10m") as block:
            sublet.Durable([1], block).checkpoint()
            print(block.locator, flush=True)
            sys.stdin.readline()
        print("left", flush=True)
        """
    )
    locator = child.stdout.readline().strip()
    with pytest.raises(BlockHeld, match=f"process {child.pid} on .* for another 9m"):
        sublet.block(locator=locator)
    with pytest.raises(BlockHeld):
        sublet.Durable.restore(locator)
    with pytest.raises(BlockHeld):
        durable.remove_block(locator)
    child.stdin.write("\n")
    child.stdin.flush()
    assert child.stdout.readline() == "left\n"
    assert sublet.Durable.restore(locator).value == [1]


ZOMBIE = """
import os, signal, sys
import sublet
d = sublet.Durable({"by": "zombie", "n": 1, "pad": b"z" * 20_000}, sublet.block(ttl="1500ms"))
d.checkpoint()
d.value["n"] = 2
real_pwrite, real_sync = os.pwrite, os.fdatasync
where = sys.argv[1]
def stop():
    global where
    where = ""
    print(d.locator, flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
def pwrite(fd, data, at):
    if where == "before":
        stop()
    if where == "middle":
        done = real_pwrite(fd, data[: len(data) // 2], at)
        stop()
        return done
    return real_pwrite(fd, data, at)
def sync(fd):
    ours = "/blocks/" in os.readlink(f"/proc/self/fd/{fd}")  # and not the ledger's
    if where == "written" and ours:
        stop()
    real_sync(fd)
    if where == "synced" and ours:
        stop()
os.pwrite, os.fdatasync = pwrite, sync
try:
    d.checkpoint()
    print("checkpointed", flush=True)
except sublet.SubletError as e:
    print(type(e).__name__, flush=True)
try:
    d.checkpoint()
    print("checkpointed", flush=True)
except sublet.SubletError as e:
    print(type(e).__name__, flush=True)
"""


def restored_when_free(locator: str) -> Any:
    give_up = time.monotonic() + 20
    while True:
        try:
            return sublet.Durable.restore(locator, ttl="10m")
        except BlockHeld:
            assert time.monotonic() < give_up
            time.sleep(0.05)


@pytest.mark.parametrize("where", ["before", "middle", "written", "synced"])
@pytest.mark.parametrize("writes", [1, 2])
def test_a_zombie_writer_tears_nothing(sqlite_home: Home, where: str, writes: int) -> None:
    """Fact 4: it passed the check, was stopped, lost its lease, and writes on when somebody else has the block."""
    zombie = sqlite_home.start(ZOMBIE, where)
    locator = zombie.stdout.readline().strip()
    with pytest.raises(BlockHeld):
        sublet.block(locator=locator)
    d = restored_when_free(locator)
    assert d.value["n"] == 1, "its second checkpoint was never recorded"
    assert d.note == ""
    for number in range(writes):
        d.value = {"by": "successor", "n": 10 + number, "pad": b"s" * 20_000}
        done = d.checkpoint()
    os.kill(zombie.pid, signal.SIGCONT)
    assert [zombie.stdout.readline().strip() for _ in range(2)] == ["Fenced", "LeaseLost"]
    zombie.wait()
    found = d.block.read()
    assert (found.done, found.note) == (done, "")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sublet.Durable.restore(locator).value["n"] == 9 + writes
    assert len(files(sqlite_home)) == 1


def test_a_zombie_taking_over_comes_too_late(sqlite_home: Home) -> None:
    """Stopped between its attach and its copy; meanwhile somebody attached, checkpointed and is at work."""
    locator = kept(sqlite_home, "first")
    late = sqlite_home.start(
        """
        import os, signal, sys
        import sublet
        from sublet.machine import failpoints
        failpoints.arm("before_region_link", lambda: os.kill(os.getpid(), signal.SIGSTOP))
        print("ready", flush=True)
        try:
            d = sublet.Durable.restore(sys.argv[1], ttl="500ms")
            d.value = "late"
            d.checkpoint()
        except sublet.SubletError as e:
            print(type(e).__name__, flush=True)
        """,
        locator,
    )
    late.stdout.readline()
    wait_until(lambda: Path(f"/proc/{late.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    time.sleep(0.6)
    d = sublet.Durable.restore(locator)
    assert d.value == "first"
    d.value = "second"
    d.checkpoint()
    os.kill(late.pid, signal.SIGCONT)
    assert late.stdout.readline().strip() in ("Fenced", "LeaseLost", "NotDurable")
    late.wait()
    assert sublet.Durable.restore(locator).value == "second"
    assert len(files(sqlite_home)) == 1


def test_processes_racing_to_attach(home: Home) -> None:
    """The holder was killed; one of four gets the block, the others read who did."""
    holder = home.start(
        """
        import sublet, time
        d = sublet.Durable("value", sublet.block())
        d.checkpoint()
        print(d.locator, flush=True)
        time.sleep(60)
        """
    )
    locator = holder.stdout.readline().strip()
    racers = [
        home.start(
            """
            import sublet, sys
            print("ready", flush=True)
            sys.stdin.readline()
            try:
                print(sublet.Durable.restore(sys.argv[1]).value, flush=True)
            except sublet.BlockHeld:
                print("held", flush=True)
            sys.stdin.readline()
            """,
            locator,
        )
        for _ in range(4)
    ]
    for racer in racers:
        assert racer.stdout.readline() == "ready\n"
    holder.kill()
    holder.wait()
    for racer in racers:
        racer.stdin.write("\n")
        racer.stdin.flush()
    assert sorted(racer.stdout.readline().strip() for racer in racers) == ["held"] * 3 + ["value"]
    assert len(files(home)) == 1


# --- killed at any moment ------------------------------------------------------------------------------------

CHILD = """
import os, sys
import sublet
from sublet.machine import failpoints
locator = sys.argv[1]
d = None if os.environ["ARMED_FIRST"] else sublet.Durable.restore(locator)
os.environ["SUBLET_FAILPOINTS"] = os.environ["ARMED"]
failpoints.arm_from_environment()
print("armed", flush=True)
d = d or sublet.Durable.restore(locator)
d.value = {"n": 2, "pad": b"2" * 9000}
d.checkpoint()
print("done", flush=True)
"""
OLD, NEW = {"n": 1, "pad": b"1" * 5000}, {"n": 2, "pad": b"2" * 9000}


@pytest.mark.parametrize(
    ("armed", "outcome"),
    [
        # A checkpoint is two transactions around one write: the check and the record.
        ("before_begin@1", OLD), ("before_commit@1", OLD), ("after_commit_before_reply@1", OLD), ("after_slot_write", OLD),
        ("after_slot_fsync", OLD), ("before_begin@2", OLD), ("before_commit@2", OLD), ("after_commit_before_reply@2", NEW),
        ("before_region_link", OLD), ("after_region_link", OLD),
    ],
)  # fmt: skip
def test_killed_at_a_failpoint(sqlite_home: Home, armed: str, outcome: Any) -> None:
    """C6: exactly the old value until the record is committed, exactly the new one from then on."""
    name, _, nth = armed.partition("@")
    locator = kept(sqlite_home, OLD)
    child = sqlite_home.start(
        CHILD, locator, ARMED=f"{name}=kill@{nth or 1}", ARMED_FIRST="1" if "region" in name else ""
    )
    assert child.stdout.read().split() == ["armed"]
    assert child.wait() == -signal.SIGKILL
    d = sublet.Durable.restore(locator)
    assert (d.value, d.note) == (outcome, "")
    d.value = "after"
    d.checkpoint()
    assert sublet.Durable.restore(locator).value == "after"
    assert len(files(sqlite_home)) == 1


TRACED = "pwrite64,fdatasync,fsync,linkat,unlinkat,fallocate"


def test_killed_at_the_nth_system_call(sqlite_home: Home) -> None:
    """Restore and checkpoint under strace, killed at every one of the calls that change something (a sample here, all in proof)."""
    need(shutil.which("strace") is not None, "strace")
    locator = kept(sqlite_home, OLD)

    def run(inject: str) -> subprocess.CompletedProcess[str]:
        command = ["strace", "-f", "-qq", "-o", str(log), "-e", f"trace={TRACED}"]
        command += ["-e", f"inject={TRACED}:signal=KILL:when={inject}"] if inject else []
        return subprocess.run(
            [*command, sys.executable, "-c", CHILD, locator],
            capture_output=True,
            text=True,
            env=sqlite_home.environment | {"ARMED": "", "ARMED_FIRST": "1"},
            timeout=60,
        )

    log = sqlite_home.settings.home / "trace"
    whole = run("")
    need("Operation not permitted" not in whole.stderr, "permission to trace")
    assert whole.stdout.split() == ["armed", "done"], whole.stderr
    calls = len(re.findall(rf"^\d+ +({TRACED.replace(',', '|')})\(", log.read_text(), re.M))
    assert calls >= 15
    outcomes = []
    # The ledger's share of the calls differs a little from run to run; one run is not killed at all.
    step = max(1, calls // SYSCALLS)
    for n in [*range(1, calls + 1, step), calls + 1000]:
        fresh = sublet.Durable.restore(locator)
        fresh.value = OLD
        fresh.checkpoint()
        fresh.block.release()
        died = run(str(n))
        d = sublet.Durable.restore(locator)
        assert d.value in (OLD, NEW), n
        assert d.note == "", n
        if "done" in died.stdout:
            assert d.value == NEW, "a checkpoint that returned was lost"
        outcomes.append(d.value["n"])
        d.block.release()
    assert outcomes[0] == 1, "killed at the first call"
    assert outcomes[-1] == 2, "not killed"
    print(f"a block's checkpoint: {len(outcomes) - 1} places")


def test_expired_while_checkpointing(sqlite_home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """S2: the write was done, the lease was over before it was recorded. It raises, and the value before is the value."""

    class Nobody:
        def keep(self, block: Any) -> None: ...

    monkeypatch.setattr(durable, "block_keeper", Nobody)
    d = sublet.Durable("old", sublet.block(ttl="1500ms"))
    d.checkpoint()
    real = os.fdatasync

    def slow(fd: int) -> None:
        time.sleep(1.6)
        real(fd)

    d.value = "new"
    with monkeypatch.context() as sleepy:
        sleepy.setattr(os, "fdatasync", slow)
        with pytest.raises(LeaseLost, match="expired"):
            d.checkpoint()
    with pytest.raises(LeaseLost):
        d.checkpoint()
    assert sublet.Durable.restore(d.locator).value == "old"
    with pytest.raises(LeaseLost, match="not renewed in time"):
        late = sublet.Durable("x", sublet.block(ttl="200ms"))
        time.sleep(0.18)  # 80 % of the ttl is over: the holder stops by itself, without asking
        late.checkpoint()


def test_a_record_whose_answer_was_lost(sqlite_home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """S5: it counted after all, so the next checkpoint must leave that slot alone, whatever happens to it."""
    d = sublet.Durable("one", sublet.block())
    d.checkpoint()
    ledger = d.block._ledger
    real = ledger.record_block

    def lost(*args: Any) -> Any:
        real(*args)
        raise Disconnected

    d.value = "two"
    with monkeypatch.context() as cut:
        cut.setattr(ledger, "record_block", lost)
        with pytest.raises(Disconnected):
            d.checkpoint()

    def torn(fd: int, data: Any, at: int) -> int:
        pwrite(fd, data[:300], at)
        raise OSError(5, "broken disk")

    d.value, pwrite = "three", os.pwrite
    with monkeypatch.context() as broken:
        broken.setattr(os, "pwrite", torn)
        with pytest.raises(NotDurable):
            d.checkpoint()
    again = sublet.Durable.restore(d.locator)
    assert (again.value, again.note) == ("two", "")


# --- keeping it ----------------------------------------------------------------------------------------------


def test_it_is_renewed_while_it_is_in_use_and_no_longer(home: Home) -> None:
    ledger = wiring.open_ledger(home.settings)
    block = sublet.block(ttl="3s")
    time.sleep(5)
    assert block.status == "held"
    sublet.Durable(1, block).checkpoint()
    look = ledger.look_block(block.locator, block.tenant)
    assert look.block.state_at(look.at) is BlockState.HELD
    locator, tenant, first = block.locator, block.tenant, block.expires_at
    block.renew()
    assert block.expires_at > first
    del block
    gc.collect()

    def state() -> BlockState:
        look = ledger.look_block(locator, tenant)
        return look.block.state_at(look.at)

    wait_until(lambda: state() is BlockState.KEPT)  # forgotten without a release: it ran out


def test_a_keeper_outlives_a_ledger_that_does_not_answer(
    sqlite_home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = sublet.block(ttl="3s")
    real, failures = block._ledger.renew_block, []

    def renew(*args: Any, **kwargs: Any) -> Any:
        if len(failures) < 3:
            failures.append(1)
            raise Disconnected
        return real(*args, **kwargs)

    monkeypatch.setattr(block._ledger, "renew_block", renew)
    time.sleep(3.6)
    assert len(failures) == 3
    assert block.status == "held"


def test_release_keeps_and_discard_does_not(sqlite_home: Home) -> None:
    block = sublet.block(blocks=4)
    d = sublet.Durable("kept", block)
    d.checkpoint()
    block.release()
    block.release()
    with pytest.raises(LeaseLost, match="released"):
        d.checkpoint()
    again = sublet.block(locator=block.locator)
    assert again.blocks == 4
    with pytest.raises(LeaseLost):
        block.discard()  # an old handle has no say in it
    newest = sublet.Durable.restore(block.locator)
    with pytest.raises(Fenced):
        again.discard()  # nor has one that does not know yet that it is old
    assert newest.checkpoint().sequence == 2
    again = newest.block
    again.discard()
    assert files(sqlite_home) == []
    for verb in (lambda: sublet.block(locator=block.locator), again.check):
        with pytest.raises((NotFound, LeaseLost)):
            verb()
    again.release()
    with sublet.Durable(1, sublet.block()) as inner:
        inner.checkpoint()
    assert inner.block.status == "ended"


def test_a_forked_child_has_no_lease(sqlite_home: Home) -> None:
    d = sublet.Durable("parent", sublet.block())
    d.checkpoint()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            assert d.block.status == "ended"
            d.checkpoint()
        except LeaseLost as e:
            code = 0 if "parent process" in e.message else 2
        finally:
            d.block.release()  # of no effect
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert d.checkpoint().sequence == 2


def test_retention_and_sweep(sqlite_home: Home) -> None:
    soon, later, held = kept(sqlite_home, 1, keep="0s"), kept(sqlite_home, 2), sublet.block(keep=0)
    stray = sqlite_home.settings.home / "blocks" / ("B" + "e" * 20 + ".7")
    stray.write_bytes(b"of another ledger")
    swept, unknown = durable.sweep_blocks()
    assert (swept, unknown) == ([soon], ["B" + "e" * 20])
    assert stray.exists(), "another ledger may share this home"
    stray.unlink()
    assert [n.partition(".")[0] for n in files(sqlite_home)] == sorted([later, held.locator])
    with pytest.raises(NotFound):
        sublet.Durable.restore(soon)
    assert sublet.Durable.restore(later).value == 2
    # A sweep that died between the ledger and the disk is finished by the next.
    wiring.open_ledger(sqlite_home.settings).remove_block(
        held.locator, held.tenant, held._row.holder, actor="t", secret=held._secret
    )
    assert durable.sweep_blocks() == ([], [])
    assert [n.partition(".")[0] for n in files(sqlite_home)] == [later]


# --- what goes wrong -----------------------------------------------------------------------------------------


def test_empty_is_not_corrupt(sqlite_home: Home) -> None:
    locator = sublet.block().locator
    with pytest.raises(NothingSaved, match="nothing was checkpointed"):
        sublet.Durable.restore(locator)
    [row] = wiring.open_ledger(sqlite_home.settings).blocks()
    assert row.block.state is BlockState.KEPT, "what could not be restored is not held"
    d = sublet.Durable("first", sublet.block(locator=locator))
    d.checkpoint()
    assert sublet.Durable.restore(locator).value == "first"


def test_one_bad_slot_and_two(sqlite_home: Home) -> None:
    locator = kept(sqlite_home, "one")
    with sublet.block(locator=locator) as block:
        sublet.Durable("two", block).checkpoint()
    path = sqlite_home.settings.home / "blocks" / files(sqlite_home)[0]
    data = bytearray(path.read_bytes())
    half = len(data) // 2
    data[half + 520] ^= 1
    path.write_bytes(data)
    with pytest.warns(RuntimeWarning, match="checkpoint 2 was recorded and cannot be read"):
        d = sublet.Durable.restore(locator)
    assert d.value == "one"
    assert "digest does not match" in d.note
    d.value = "three"
    d.checkpoint()  # over the bad one
    d.block.release()
    path = sqlite_home.settings.home / "blocks" / files(sqlite_home)[0]
    assert sublet.Durable.restore(locator).value == "three"
    path = sqlite_home.settings.home / "blocks" / files(sqlite_home)[0]
    data = bytearray(path.read_bytes())
    data[520] ^= 1
    data[half + 10] ^= 1
    path.write_bytes(data)
    with pytest.raises(Damaged, match=r"first: its digest .* second: ") as refused:
        sublet.Durable.restore(locator)
    assert refused.value.remedy
    fresh = sublet.Durable("new", sublet.block(locator=locator))
    fresh.checkpoint()
    assert sublet.Durable.restore(locator).value == "new"


def test_a_slot_that_is_bad_is_never_the_one_that_is_kept(sqlite_home: Home) -> None:
    """After a fall-back to the older slot the next checkpoint goes over the bad one: a torn write then still leaves a value."""
    locator = kept(sqlite_home, "one")
    with sublet.block(locator=locator) as block:
        sublet.Durable("two", block).checkpoint()
    path = sqlite_home.settings.home / "blocks" / files(sqlite_home)[0]
    data = bytearray(path.read_bytes())
    data[len(data) // 2 + 520] ^= 1
    path.write_bytes(data)
    block = sublet.block(locator=locator)  # attached without looking at the value
    real = os.pwrite

    def torn(fd: int, data: Any, at: int) -> int:
        real(fd, data[:300], at)
        raise OSError(5, "broken disk")

    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(os, "pwrite", torn)
        with pytest.raises(NotDurable):
            sublet.Durable("three", block).checkpoint()
    with pytest.warns(RuntimeWarning):
        assert sublet.Durable.restore(locator).value == "one"


def test_too_large_raises_and_keeps_what_was(sqlite_home: Home) -> None:
    d = sublet.Durable({"w": np.zeros(100)}, sublet.block(blocks=2))
    d.checkpoint()
    d.value = {"w": np.zeros(1000)}
    with pytest.raises(BlockTooSmall) as refused:
        d.checkpoint()
    found = re.search(r"needs (\d+) blocks", refused.value.message)
    assert found is not None
    larger = sublet.Durable(d.value, sublet.block(blocks=int(found.group(1))))
    larger.checkpoint()
    assert len(sublet.Durable.restore(d.locator).value["w"]) == 100


def test_a_disk_without_room_grants_nothing(sqlite_home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    locator = kept(sqlite_home, "value")
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(NotDurable, match="No space"):
            sublet.block()
        with pytest.raises(NotDurable, match="No space"):
            sublet.Durable.restore(locator)
    ledger = wiring.open_ledger(sqlite_home.settings)
    assert [a.block.id for a in ledger.blocks()] == [locator]
    assert ledger.blocks()[0].block.state is BlockState.KEPT, "it was given back for the next to try"
    assert sublet.Durable.restore(locator).value == "value"


def test_another_tenant_cannot_tell_it_is_there(sqlite_home: Home) -> None:
    """T1, with a locator that leaked."""
    ledger = wiring.open_ledger(sqlite_home.settings)
    locator = kept(sqlite_home, "secret")
    ledger.add_tenant(Tenant(name="mallory"), actor="test")
    said = set()
    for name in (locator, "B" + "0" * 20):
        for verb in (
            lambda n: sublet.block(locator=n, tenant="mallory"),
            lambda n: sublet.Durable.restore(n, tenant="mallory"),
        ):
            with pytest.raises(NotFound) as refused:
                verb(name)
            said.add(refused.value.message.replace(name, "ID"))
    assert len(said) == 1
    assert sublet.Durable.restore(locator).value == "secret"


def test_locators_that_lead_elsewhere(sqlite_home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threat 9: refused before the disk is asked for anything."""
    kept(sqlite_home, "value")
    opened: list[Any] = []
    real = os.open

    def watching(path: Any, *args: Any, **kwargs: Any) -> int:
        opened.append(path)
        return real(path, *args, **kwargs)

    with monkeypatch.context() as watched:
        watched.setattr(os, "open", watching)
        for text in traversals(500):
            with pytest.raises(BadInput):
                sublet.block(locator=text)
            with pytest.raises(BadInput):
                durable.remove_block(text)
        for text in traversals(20):
            with pytest.raises(BadInput):
                sublet.Durable.restore(text)
    blocks = sqlite_home.settings.home / "blocks"
    assert not [p for p in opened if str(p).startswith(str(blocks)) or "passwd" in str(p)]


def test_a_block_of_another_home_is_not_taken(sqlite_home: Home, tmp_path: Path) -> None:
    """Two hosts on one ledger: the one without the region must not take it from the one that has it."""
    locator = kept(sqlite_home, "value")
    epoch = (
        wiring.open_ledger(sqlite_home.settings)
        .look_block(locator, sqlite_home.settings["tenant"])
        .block.epoch
    )
    elsewhere = durable.load_settings(home=str(tmp_path / "other"))
    with pytest.raises(NotFound, match=f"last held on {sqlite_home.settings['host']}"):
        sublet.block(locator=locator, settings=elsewhere)
    after = wiring.open_ledger(sqlite_home.settings).look_block(locator, sqlite_home.settings["tenant"])
    assert after.block.epoch == epoch
    assert sublet.Durable.restore(locator).value == "value"


def test_after_a_restored_ledger_the_disk_is_believed(sqlite_home: Home) -> None:
    locator = kept(sqlite_home, "at the backup")
    d = sublet.Durable.restore(locator)
    d.value = "since the backup"
    d.checkpoint()
    ledger = wiring.open_ledger(sqlite_home.settings)
    ledger.mark_restored(actor="test")
    with pytest.raises(LeaseLost):
        d.checkpoint()
    again = sublet.Durable.restore(locator)
    assert again.value == "since the backup"
    again.value = "after"
    assert again.checkpoint().sequence == 3
    assert sublet.Durable.restore(locator).value == "after"


class Upper:
    id = "upper-1"

    def encode(self, value: str) -> list[memoryview]:
        return [memoryview(value.upper().encode())]

    def decode(self, data: memoryview) -> str:
        return bytes(data).decode()


def test_codecs(sqlite_home: Home) -> None:
    d = sublet.Durable("quiet", sublet.block(), codec=Upper())
    d.checkpoint()
    assert sublet.Durable.restore(d.locator, codec=Upper()).value == "QUIET"
    with pytest.raises(Misconfigured, match="upper-1"):
        sublet.Durable.restore(d.locator)
    plain = kept(sqlite_home, "x")
    with pytest.raises(BadInput, match="written by the codec 'tree-1', not by 'upper-1'"):
        sublet.Durable.restore(plain, codec=Upper())

    class Nameless(Upper):
        id = ""

    with pytest.raises(BadInput):
        sublet.Durable("x", sublet.block(), codec=Nameless()).checkpoint()


def test_wrong_words(sqlite_home: Home) -> None:
    for options in (
        {"blocks": 1},
        {"blocks": "many"},
        {"ttl": "soon"},
        {"keep": -1},
        {"ttl": 0},
        {"tenant": "../x"},
    ):
        with pytest.raises(SubletError):
            sublet.block(**options)
    with pytest.raises(BadInput, match="leave out blocks"):
        sublet.block(blocks=8, locator="B" + "0" * 20)
    with pytest.raises(BadInput, match="needs a block"):
        sublet.Durable(1, "B" + "0" * 20)  # type: ignore[arg-type]
    with pytest.raises(sublet.Unsavable):
        sublet.Durable(object(), sublet.block()).checkpoint()


def test_import_sublet_does_not_bring_it_along() -> None:
    code = "import sublet, sys; print([m for m in sys.modules if m.startswith('sublet.')]); sublet.Durable; sublet.block"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
