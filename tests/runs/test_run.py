"""Runs under fire: whatever is killed, stopped or unreachable, the command's whole tree ends in time and the run's word is true."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sublet import wiring
from sublet.core.leasing.lease import EndReason, LeaseState
from sublet.core.notice import Notice
from sublet.core.runs.exits import Outcome
from sublet.leases.lease import Lease
from sublet.notice_bus.notice_file import read_notice
from sublet.ports.worker import CommandExit
from sublet.processes.supervisor.command import LocalCommand
from sublet.runs import build
from tests.homes import Home, close_home, make_home, process_is_gone, wait_until
from tests.processes.supervisor.test_command import STUBBORN
from tests.runs.runs import SCRIPT, Runs, Started, runs_in


@pytest.fixture(scope="module")
def shared_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("runs")
        made = make_home(path, f"sqlite:{path}/home/ledger.db", patch, "host:1x16GiB")
        yield made
        close_home(made)


@pytest.fixture
def runs(shared_home: Home, tmp_path: Path) -> Iterator[Runs]:
    with runs_in(shared_home, tmp_path) as made:
        yield made


def stubborn(runs: Runs, *options: str) -> tuple[Started, str]:
    """Running, three processes deep, and its lease."""
    up = runs.path / "up"
    made = runs.python(STUBBORN, str(up), options=options)
    wait_until(up.exists, 30)
    assert len(made.alive) == 3
    return made, made.folder.facts()["lease"]


def revoke(
    runs: Runs, lease_id: str, grace_us: int = 10_000_000, reason: EndReason = EndReason.REVOKED
) -> None:
    runs.ledger.revoke(lease_id, reason=reason, detail="a test wants it", grace_us=grace_us, actor="test")


# --- losses --------------------------------------------------------------------------------------------------


def test_preempted_twice_and_then_done(runs: Runs) -> None:
    run = runs.script("--vram", "2GiB", until=2)
    leases = []
    for number, reason in ((1, EndReason.REVOKED), (2, EndReason.PREEMPTED)):
        leases.append(run.wait_for_start(number))
        key = json.loads((run.folder.path / "lease.key").read_text())
        assert key["lease"] == leases[-1]
        assert (run.folder.path / "lease.key").stat().st_mode & 0o777 == 0o600
        assert run.folder.path.stat().st_mode & 0o777 == 0o700
        revoke(runs, leases[-1], reason=reason)
    assert run.wait() == 0
    assert [line.split()[1] for line in run.starts()] == ["0", "1", "2"]
    assert len(set(leases)) == 2
    assert "an old notice" not in run.notes()
    first, second = run.told()
    assert first["source"] == "lease"
    assert first["reason"] == "revoked: a test wants it"
    assert second["reason"] == "preempted: a test wants it"
    assert 0 < first["seconds_left"] <= 10
    assert first["deadline_monotonic_us"] > time.monotonic_ns() // 1000 - 60_000_000
    left = run.exit
    assert (left["outcome"], left["exit_code"], left["restarts"], left["preemptions"]) == ("done", 0, 2, 2)
    assert left["lease"] == run.starts()[-1].split()[2]
    assert left["epoch"] == runs.ledger.look(left["lease"]).lease.epoch
    assert not (run.folder.path / "lease.key").exists()
    for lease in leases:
        runs.settled(lease)
    receipts = {t.lease_id: t.receipt for t in runs.ledger.receipts()}
    for lease in leases:
        assert receipts[lease].proven
        assert receipts[lease].ladder == "term"


def test_a_limit_of_preemptions_leaves_with_85(runs: Runs) -> None:
    run = runs.script("--preemptions", "0", until=1)
    revoke(runs, run.wait_for_start())
    assert run.wait() == 85
    assert run.exit["outcome"] == "preempted"


def test_a_command_that_dies_of_the_notice_is_requeued_too(runs: Runs) -> None:
    """It lost what it had not saved, but it did not fail."""
    run = runs.script(ending="1", until=1)
    revoke(runs, run.wait_for_start())
    assert run.wait() == 0
    assert (run.exit["preemptions"], run.exit["restarts"]) == (1, 1)


def test_a_revoked_lease_of_a_stubborn_command_ends_in_time(runs: Runs) -> None:
    run, lease = stubborn(runs, "--preemptions", "0", "--grace", "60s")
    revoke(runs, lease, grace_us=1_000_000)
    assert run.wait() == 137
    assert run.alive == []
    assert (run.exit["outcome"], run.exit["exit_code"]) == ("killed", 137)
    runs.settled(lease)
    receipt = next(t.receipt for t in runs.ledger.receipts() if t.lease_id == lease)
    assert (receipt.proven, receipt.ladder) == (True, "kill")
    assert receipt.containment == run.folder.facts()["containment"]


def test_the_grace_of_the_run_is_the_most_a_command_gets(runs: Runs) -> None:
    run, lease = stubborn(runs, "--preemptions", "0", "--grace", "500ms")
    begun = time.monotonic()
    revoke(runs, lease, grace_us=60_000_000)
    assert run.wait() == 137
    assert time.monotonic() - begun < 30


def test_failures_have_a_budget_of_their_own(runs: Runs) -> None:
    fails = """
        import os, sys
        sys.exit(0 if int(os.environ["SUBLET_RESTART_COUNT"]) >= 2 else 3)
    """
    enough = runs.python(fails, options=("--restarts", "2", "--backoff", "10ms"))
    short = runs.python(fails, options=("--restarts", "1", "--backoff", "10ms"))
    assert enough.wait() == 0
    assert (enough.exit["restarts"], enough.exit["preemptions"]) == (2, 0)
    assert short.wait() == 3
    assert (short.exit["outcome"], short.exit["restarts"]) == ("failed", 1)
    assert "--restarts allows 1" in short.exit["reason"]


def test_a_restart_does_not_stand_in_its_own_way(runs: Runs) -> None:
    """Now or never, and the whole device: what the first start held must be free before the second asks. The warden is slow."""
    code = """
        import os, sys, time
        if os.environ["SUBLET_RESTART_COUNT"] == "1":
            sys.exit(0)
        open(sys.argv[1], "w").close()
        while not os.path.exists(sys.argv[2]): time.sleep(0.01)
        sys.exit(3)
    """
    up, go = runs.path / "up", runs.path / "go"
    options = ("--vram", "16GiB", "--wait", "0", "--restarts", "1", "--backoff", "1ms")
    run = runs.python(code, str(up), str(go), options=options)
    wait_until(up.exists, 30)
    warden = runs.home.warden_pid()
    os.kill(warden, signal.SIGSTOP)
    try:
        go.touch()
        wait_until(lambda: not run.alive)
        time.sleep(1.0)
    finally:
        os.kill(warden, signal.SIGCONT)
    assert run.wait() == 0, run.said


def test_progress_forgives_and_waste_is_counted(runs: Runs) -> None:
    """Each start commits two steps more, works on a third and fails: one allowed failure is enough for ever."""
    code = f"""
        import os, sys
        sys.path[:0] = {sys.path!r}
        from sublet.machine import lease_environment
        count = int(os.environ["SUBLET_RESTART_COUNT"])
        held = lease_environment.of_run()
        held.check()
        held.write_steps(2 * count + 3, 2 * count + 2)
        sys.exit(0 if count == 3 else 9)
    """
    run = runs.python(code, options=("--restarts", "1", "--backoff", "10ms"))
    assert run.wait() == 0, run.said
    left = run.exit
    assert (left["restarts"], left["committed_step"], left["step"], left["wasted_steps"]) == (3, 8, 9, 3)


# --- faults --------------------------------------------------------------------------------------------------


def test_kill_9_of_the_run_ends_its_command_within_the_grace(runs: Runs) -> None:
    run, lease = stubborn(runs, "--grace", "1s")
    run.process.kill()
    wait_until(lambda: not run.alive)
    wait_until(lambda: run.exit)
    assert (run.exit["outcome"], run.exit["exit_code"], run.exit["lease"]) == ("lost", 137, lease)
    assert json.loads(run.folder.notice_file.read_text())["source"] == "supervisor"
    runs.settled(lease)
    assert runs.ledger.look(lease).lease.reason is EndReason.HOLDER_LOST
    receipt = next(t.receipt for t in runs.ledger.receipts() if t.lease_id == lease)
    assert (receipt.proven, receipt.ladder) == (True, "kill")


def test_a_run_stopped_past_the_end_of_its_lease_loses_the_command_and_takes_it_up_again(runs: Runs) -> None:
    """K2: nobody renews, nobody tells; the supervisor does both. The run wakes up, and leases again."""
    run = runs.script("--ttl", "3s", until=1)
    lease = run.wait_for_start()
    os.kill(run.process.pid, signal.SIGSTOP)
    wait_until(lambda: not run.alive)
    (told,) = run.told()
    assert told["source"] == "supervisor"
    assert told["seconds_left"] < 1
    runs.settled(lease)
    os.kill(run.process.pid, signal.SIGCONT)
    assert run.wait() == 0
    assert (run.exit["restarts"], run.exit["preemptions"]) == (1, 1)


def test_a_stubborn_command_of_a_stopped_run_dies_with_its_lease(runs: Runs) -> None:
    run, lease = stubborn(runs, "--ttl", "3s", "--preemptions", "0")
    os.kill(run.process.pid, signal.SIGSTOP)
    wait_until(lambda: not run.alive)
    runs.settled(lease)
    ended = runs.ledger.look(lease).lease
    assert ended.reason in (EndReason.EXPIRED, EndReason.HOLDER_LOST)
    assert next(t.receipt for t in runs.ledger.receipts() if t.lease_id == lease).ladder == "kill"
    os.kill(run.process.pid, signal.SIGCONT)
    assert run.wait() == 137


def test_with_the_ledger_gone_the_command_ends_at_its_deadline(runs: Runs) -> None:
    """The embedded ledger's writer lock is held by somebody who never lets go: every write hangs, for run and warden alike."""
    run, lease = stubborn(runs, "--ttl", "3s")
    writer_lock = Path(f"{runs.home.settings.home}/ledger.db-gate")
    with writer_lock.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        wait_until(lambda: not run.alive, 20)
        assert not process_is_gone(run.process.pid)
        notice = json.loads(run.folder.notice_file.read_text())
        assert notice["source"] in ("keeper", "supervisor", "lease")
    runs.settled(lease)
    receipt = next(t.receipt for t in runs.ledger.receipts() if t.lease_id == lease)
    assert (receipt.proven, receipt.ladder) == (True, "kill")
    # The ledger is back: so is the command.
    wait_until(lambda: len(run.alive) == 3, 30)
    assert run.folder.facts()["restarts"] == 1
    run.process.send_signal(signal.SIGTERM)


def test_kill_9_of_the_supervisor_is_a_failure_of_its_own(runs: Runs) -> None:
    run = runs.script("--restarts", "1", "--backoff", "10ms", until=1)
    run.wait_for_start()
    os.kill(run.folder.facts()["supervisor"][0], signal.SIGKILL)
    assert run.wait() == 0
    assert (run.exit["restarts"], run.exit["preemptions"]) == (1, 0)


def test_a_lease_that_ended_with_its_supervisor_was_not_taken_away(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late the run looks: a failure is counted as one, though the lease's end is heard before the supervisor's."""
    heard, late = threading.Event(), []
    left, on_notice = LocalCommand.left, Lease.on_notice

    def looked_before_it_died(command: LocalCommand) -> CommandExit | None:
        found = left(command)
        # Heard before this look, as on a crowded machine: there is nothing to put off.
        if found is None or late or heard.is_set():
            return found
        late.append(heard.wait(30))
        return None

    def listening(lease: Lease, callback: Callable[[Notice], None]) -> None:
        on_notice(lease, lambda notice: (heard.set(), callback(notice))[1])

    monkeypatch.setattr(LocalCommand, "left", looked_before_it_died)
    monkeypatch.setattr(Lease, "on_notice", listening)
    out = runs.path / "out"
    command = (sys.executable, "-c", textwrap.dedent(SCRIPT), str(out), "85", "1")
    prepared = build.prepare(
        build.RunOptions(command=command, restarts=1, backoff="10ms"), runs.home.settings
    )

    def kill() -> None:
        wait_until(out.exists)
        os.kill(prepared.folder.facts()["supervisor"][0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    done = build.go(prepared, detached=False, say=lambda text: None, on_wait=None)
    killer.join()
    assert all(late)
    assert (done.exit_code, done.restarts, done.preemptions) == (0, 1, 0)


def test_an_old_key_and_an_old_page_are_nobodys(runs: Runs) -> None:
    """What the first start knew of its lease is of no use once the second has begun."""
    code = f"""
        import os, shutil, sys, time
        sys.path[:0] = {sys.path!r}
        from pathlib import Path
        from sublet.machine import lease_environment
        folder = Path(os.environ["SUBLET_NOTICE_FILE"]).parent
        first = os.environ["SUBLET_RESTART_COUNT"] == "0"
        held = lease_environment.of_run()
        assert held.id == os.environ["SUBLET_LEASE_ID"] and held.seconds_left > 0
        assert held.key.secret
        kept = Path(sys.argv[1])
        if first:
            kept.write_text(held.id)
            sys.exit(3)
        os.environ["SUBLET_LEASE_ID"] = kept.read_text()
        assert lease_environment.of_run() is None, "the new key was read as the old lease's"
    """
    run = runs.python(code, str(runs.path / "kept"), options=("--restarts", "1", "--backoff", "10ms"))
    assert run.wait() == 0, run.said


def test_the_page_moves_with_every_renewal_and_closes_with_the_lease(runs: Runs) -> None:
    code = f"""
        import sys, time
        sys.path[:0] = {sys.path!r}
        from sublet.machine import lease_environment
        held = lease_environment.of_run()
        ends = time.monotonic() + 5
        while time.monotonic() < ends:
            held.check()
            assert 0 < held.seconds_left <= 2.4
            time.sleep(0.01)
    """
    run = runs.python(code, options=("--ttl", "3s"))
    assert run.wait() == 0, run.said
    assert run.exit["restarts"] == 0


# --- whoever asks the run to stop ----------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_to_the_run_drains_and_ends_it(runs: Runs, number: signal.Signals) -> None:
    run = runs.script(until=1)
    run.wait_for_start()
    run.process.send_signal(number)
    assert run.wait() == 85
    assert run.told()[0]["source"] == "signal"
    assert number.name in run.told()[0]["reason"]
    assert (run.exit["outcome"], run.exit["restarts"]) == ("preempted", 0)


def test_a_second_sigterm_is_harmless(runs: Runs) -> None:
    slow = """
        import os, signal, sys, time
        def leave(*_):
            open(sys.argv[1], "a").write("t")
            time.sleep(1.5)
            os._exit(85)
        signal.signal(signal.SIGTERM, leave)
        open(sys.argv[1], "w").close()
        while True: time.sleep(0.01)
    """
    told = runs.path / "told"
    run = runs.python(slow, str(told))
    wait_until(told.exists, 30)
    run.process.terminate()
    wait_until(lambda: told.read_text() == "t")
    run.process.terminate()
    run.process.terminate()
    assert run.wait() == 85
    assert told.read_text() == "t"


def test_a_second_ctrl_c_ends_it(runs: Runs) -> None:
    run = runs.script("--grace", "10m", ending="stay")
    run.wait_for_start()
    run.process.send_signal(signal.SIGINT)
    wait_until(run.told)
    run.process.send_signal(signal.SIGINT)
    assert run.wait() in (130, 137)
    assert run.alive == []
    assert run.exit["outcome"] in ("killed", "stopped")


def test_killed_when_the_grace_is_over(runs: Runs) -> None:
    run, _ = stubborn(runs, "--grace", "500ms")
    run.process.terminate()
    assert run.wait() == 137
    assert run.alive == []
    assert run.exit["outcome"] == "killed"


def test_a_stop_counts_though_the_lease_goes_as_well(runs: Runs) -> None:
    """A revoke alone would be leased again; who asked the run to stop must not be overruled by a nearer deadline."""
    slow = SLOW_LEAVER
    told = runs.path / "told"
    run = runs.python(slow, str(told))
    wait_until(told.exists, 30)
    revoke(runs, run.folder.facts()["lease"], grace_us=8_000_000)
    wait_until(lambda: told.read_text() == "t")
    run.process.terminate()
    assert run.wait() == 85
    assert run.exit["restarts"] == 0


SLOW_LEAVER = """
    import os, signal, sys, time
    def leave(*_):
        open(sys.argv[1], "a").write("t")
        time.sleep(1.5)
        os._exit(85)
    signal.signal(signal.SIGTERM, leave)
    open(sys.argv[1], "w").close()
    while True: time.sleep(0.01)
"""


SWALLOWS = """
    import sys, sublet
    state = {"w": 0}
    run = sublet.train(sys.argv[3], state, every=1, progress=False)
    try:
        for step in run.steps(int(sys.argv[2])):
            state["w"] += 1
            if step.number == 3 and run.resumed_at == 0:
                open(sys.argv[1], "w").close()
                while run.notice is None:
                    pass
    except:
        pass
    print("end", state["w"], flush=True)
"""


@pytest.mark.parametrize("told", ["SIGTERM", "revoke"])
def test_a_script_that_catches_the_order_to_leave_is_not_done(runs: Runs, told: str) -> None:
    """X1. Its exit code is 0, and its steps are not made."""
    reached = runs.path / f"reached-{told}"
    run = runs.python(SWALLOWS, str(reached), "6", f"swallows-{told}")
    wait_until(reached.exists)
    if told == "revoke":
        revoke(runs, run.folder.facts()["lease"], grace_us=30_000_000)
        assert run.wait() == 0
        assert (run.exit["outcome"], run.exit["restarts"], run.exit["committed_step"]) == ("done", 1, 6)
    else:
        run.process.terminate()
        assert run.wait() == 85
        assert (run.exit["outcome"], run.exit["committed_step"]) == ("preempted", 3)


def test_a_machine_that_goes_away_ends_the_run(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is started again where there will be nothing to start it on. In this process, to have a cloud of our own."""
    out = runs.path / "out"

    class Cloud:
        name, risk = "gce", ""

        def here(self) -> bool:
            return True

        def watch(self, raise_notice: Callable[[Notice], None], stop: threading.Event) -> None:
            while not out.exists() and not stop.wait(0.01):
                pass
            deadline = time.monotonic_ns() // 1000 + 30_000_000
            raise_notice(Notice(source="gce", reason="the VM is taken back", deadline_us=deadline))

    monkeypatch.setattr(build, "notice_sources", lambda settings, *, grace_us: [Cloud()])
    command = (sys.executable, "-c", textwrap.dedent(SCRIPT), str(out), "85", "1")
    prepared = build.prepare(build.RunOptions(command=command, restarts=5), runs.home.settings)
    left = build.go(prepared, detached=False, say=lambda text: None, on_wait=None)
    assert (left.outcome, left.exit_code, left.restarts) == (Outcome.PREEMPTED, 85, 0)
    said = read_notice(prepared.folder.notice_file, wiring.CLOCK)
    assert said is not None
    assert (said.source, said.reason) == ("gce", "the VM is taken back")
    # Never longer than the run's own grace, though the cloud would have waited.
    assert '"seconds_left": 1' in prepared.folder.notice_file.read_text()


def test_the_time_limit_is_the_end_and_is_announced_before_it(runs: Runs) -> None:
    run = runs.script("--time", "6s", "--grace", "3s", until=1)
    assert run.wait() == 124
    (told,) = run.told()
    assert told["source"] == "wall_time"
    assert 0 < told["seconds_left"] <= 3
    assert run.exit["outcome"] == "time_limit"
    assert "the time limit of 6.0s is reached" in run.exit["reason"]


def test_the_time_limit_counts_over_restarts(runs: Runs) -> None:
    """Starts of less than a second each would never reach it by themselves."""
    code = "import time; time.sleep(0.7); raise SystemExit(3)"
    run = runs.python(code, options=("--time", "4s", "--restarts", "50", "--backoff", "10ms"))
    assert run.wait() == 124
    assert 1 <= run.exit["restarts"] <= 4


# --- no lease ------------------------------------------------------------------------------------------------


def test_no_lease_now_or_in_time_is_75(runs: Runs) -> None:
    holder = runs.script("--vram", "16GiB")
    holder.wait_for_start()
    now = runs.script("--vram", "1GiB", "--wait", "0")
    soon = runs.script("--vram", "1GiB", "--wait", "1s", "--exit-profile", "sge")
    never = runs.script("--vram", "64GiB")
    assert now.wait() == 75
    assert soon.wait() == 99
    assert never.wait() == 75
    for run in (now, soon, never):
        assert run.exit["outcome"] == "no_lease"
        assert run.starts() == []
        assert run.exit["reason"] in run.said
    assert "waiting: place 1" in soon.said


def test_a_waiter_that_is_told_to_stop_leaves_the_waitlist(runs: Runs) -> None:
    holder = runs.script("--vram", "16GiB")
    holder.wait_for_start()
    run = runs.script("--vram", "1GiB")
    wait_until(lambda: [a for a in runs.ledger.leases() if a.lease.state is LeaseState.WAITING], 30)
    run.process.terminate()
    assert run.wait() == 143
    assert run.exit["outcome"] == "stopped"
    assert not [a for a in runs.ledger.leases() if a.lease.state is LeaseState.WAITING]


def test_a_waiter_that_lost_its_place_asks_again(runs: Runs) -> None:
    """S8: nobody heard of it for a while, as when the line was cut: no reason to leave, and no lease was lost either."""

    def waiting() -> list[str]:
        return [a.lease.id for a in runs.ledger.leases() if a.lease.state is LeaseState.WAITING]

    holder = runs.script("--vram", "16GiB")
    holder.wait_for_start()
    run = runs.script("--vram", "1GiB", "--preemptions", "0", until=0)
    wait_until(waiting, 30)
    [first] = waiting()
    runs.ledger.end(first, 0, reason=EndReason.HOLDER_LOST, detail="the waiter fell silent")
    wait_until(lambda: waiting() not in ([], [first]), 30)
    holder.process.terminate()
    assert run.wait() == 0
    assert "the waiter fell silent; asking again" in run.said
    assert [line.split()[1] for line in run.starts()] == ["0"]
    assert (run.exit["restarts"], run.exit["preemptions"]) == (0, 0)


def test_a_waiter_that_somebody_withdrew_leaves(runs: Runs) -> None:
    holder = runs.script("--vram", "16GiB")
    holder.wait_for_start()
    run = runs.script("--vram", "1GiB")
    wait_until(lambda: [a for a in runs.ledger.leases() if a.lease.state is LeaseState.WAITING], 30)
    [waiting] = [a.lease.id for a in runs.ledger.leases() if a.lease.state is LeaseState.WAITING]
    revoke(runs, waiting)
    assert run.wait() == 75
    assert run.exit["reason"] == "the request was withdrawn: a test wants it"


def test_a_killed_waiter_leaves_nothing(runs: Runs) -> None:
    holder = runs.script("--vram", "16GiB")
    holder.wait_for_start()
    run = runs.script("--vram", "1GiB")
    wait_until(lambda: [a for a in runs.ledger.leases() if a.lease.state is LeaseState.WAITING], 30)
    run.process.kill()
    wait_until(lambda: not [a for a in runs.ledger.leases() if a.lease.state is LeaseState.WAITING], 20)


def test_preempted_by_a_higher_tier_and_back_when_it_is_gone(home: Home, tmp_path: Path) -> None:
    """The schedule's own preemption, end to end: a spot run makes way and continues after."""
    toml = '[policy]\nmin_run = "0s"\ngrace = "5s"\n'
    home.settings.home.mkdir(parents=True, exist_ok=True)
    (home.settings.home / "sublet.toml").write_text(toml)
    with runs_in(home, tmp_path) as runs:
        spot = runs.script("--vram", "16GiB", "--tier", "spot", until=1)
        spot.wait_for_start()
        urgent = runs.python(
            "import time; time.sleep(0.5)", options=("--vram", "16GiB", "--tier", "interactive")
        )
        assert urgent.wait() == 0
        assert spot.wait() == 0
        assert spot.told()[0]["reason"].startswith("preempted")
        assert spot.exit["preemptions"] == 1


# --- inside --------------------------------------------------------------------------------------------------


def test_the_library_inside_a_run(runs: Runs) -> None:
    """Processes are known outside by their supervisor: what a command borrows ends with it, and nobody seems dead to it."""
    code = f"""
        import os, sys
        sys.path[:0] = {sys.path!r}
        import sublet
        from sublet import wiring
        from sublet.machine import lease_environment
        from sublet.settings import load_settings
        settings = load_settings()
        me = wiring.processes(settings).identify(os.getpid())
        assert (me.pid, me.started) == lease_environment.run_holder(), me
        with sublet.gpu(vram="1GiB", wait=0) as more:
            row = wiring.open_ledger(settings).look(more.id).lease
            assert row.holder == me
        block = sublet.block(blocks=4)
        try:
            sublet.block(locator=block.locator)
        except sublet.BlockHeld:
            pass
        block.release()

        @sublet.on_gpu(vram="1GiB")
        def here():
            return os.getpid()

        assert here() == os.getpid()
        print("fine", settings["ledger"] == os.environ["SUBLET_LEDGER"])
    """
    import subprocess

    run = runs.python(code, stdout=subprocess.PIPE)
    assert run.wait() == 0, run.said
    assert run.process.stdout is not None
    assert run.process.stdout.read() == "fine True\n"


def test_what_it_starts_ends_with_it(runs: Runs) -> None:
    run = runs.command("/bin/sh", "-c", "sleep 1000 & exit 0")
    assert run.wait() == 0
    assert run.alive == []
