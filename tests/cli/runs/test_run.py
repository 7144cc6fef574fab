"""`sublet run`, `logs`, `attach` and `cancel` as people use them: streams, terminals, names, words and codes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sublet.core.leasing.lease import EndReason, LeaseState
from sublet.machine.run_folder import RunFolder, find_run, prune, runs_folder
from tests.forked import Forked
from tests.homes import Home, close_home, make_home, process_is_gone, wait_until
from tests.runs.runs import SCRIPT, SUBLET, Runs, runs_in


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


def test_the_environment_is_exactly_what_is_promised(runs: Runs) -> None:
    told = dict(runs.home.environment) | {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "CUDA_DEVICE_ORDER": "FASTEST_FIRST",
        "SUBLET_LEASE_ID": "Lstale",
        "KEPT": "yes",
    }
    run = runs.python(
        "import os, json; print(json.dumps(dict(os.environ)))",
        options=("--grace", "20s", "--env", "MORE=a=b"),
        env=told,
        stdout=subprocess.PIPE,
    )
    assert run.wait() == 0
    assert run.process.stdout is not None
    seen = json.loads(run.process.stdout.read())
    settings = runs.home.settings
    left = run.exit
    lease = runs.ledger.look(left["lease"]).lease
    name, _, value = run.mark.partition("=")
    expected = (
        told
        | {
            "CUDA_VISIBLE_DEVICES": "",  # a host device has no UUID that CUDA knows; the inherited ones are not ours to use
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "SUBLET_LEASE_ID": lease.id,
            "SUBLET_EPOCH": str(lease.epoch),
            "SUBLET_RESTART_COUNT": "0",
            "SUBLET_CHECKPOINT_DIR": f"{settings.home}/checkpoints/{run.name}",
            "SUBLET_NOTICE_FILE": str(run.folder.notice_file),
            "SUBLET_GRACE_SECONDS": "20",
            "SUBLET_JOB": run.name,
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "19",
            "SUBLET_STORE": settings["store"],
            "SUBLET_TENANT": settings["tenant"],
            "SUBLET_PLACEMENT": "local",
            "SUBLET_NOTICES": "auto",
            "MORE": "a=b",
            name: value,
        }
    )
    expires = seen.pop("SUBLET_EXPIRES_AT")
    assert expires.endswith("+00:00")
    seen.pop("LC_CTYPE", None)  # Python's own
    expected.pop("LC_CTYPE", None)
    assert seen == expected
    assert not Path(expected["SUBLET_CHECKPOINT_DIR"]).exists(), "an empty folder nobody used was left"


def test_streams_are_passed_through_untouched(runs: Runs) -> None:
    run = runs.command(
        "/bin/sh",
        "-c",
        "cat; echo err >&2",
        options=("--json",),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    out, err = run.process.communicate("in \x00\n", timeout=30)
    assert out == "in \x00\n"
    said, last = err.splitlines()
    assert said == "err"
    assert json.loads(last) == run.exit
    assert json.loads(last)["outcome"] == "done"


def test_no_signal_is_inherited_ignored(runs: Runs) -> None:
    """Python ignores SIGPIPE, a background shell SIGINT, the run SIGTSTP; `sublet run -- yes | head` must end all the same."""
    run = runs.command(
        "grep",
        "SigIgn",
        "/proc/self/status",
        stdout=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert run.wait() == 0
    assert run.process.stdout is not None
    ignored = int(run.process.stdout.read().split()[1], 16)
    of_the_c_library = (
        1 << 31 | 1 << 32
    )  # 32 and 33: no program may set them, and some launchers leave one ignored
    assert ignored & ~of_the_c_library == 0


def test_the_grace_and_the_lease_are_said_at_the_start(runs: Runs) -> None:
    run = runs.command("true", options=("--grace", "7s"))
    assert run.wait() == 0
    assert "7.0s" in run.said
    assert run.exit["lease"] in run.said


@pytest.mark.parametrize(("profile", "code"), [("k8s", 143), ("sge", 99), ("condor", 85), ("zero", 0)])
def test_profiles(runs: Runs, profile: str, code: int) -> None:
    run = runs.script("--exit-profile", profile)
    run.wait_for_start()
    run.process.terminate()
    assert run.wait() == code
    assert (run.exit["outcome"], run.exit["exit_code"]) == ("preempted", code)


def test_a_named_run_keeps_its_checkpoint_folder(runs: Runs) -> None:
    keep = """
        import os, pathlib, sys
        place = pathlib.Path(os.environ["SUBLET_CHECKPOINT_DIR"]) / "step"
        seen = int(place.read_text()) if place.exists() else 0
        place.write_text(str(seen + 1))
        sys.exit(0 if seen == 1 else 3)
    """
    run = runs.python(keep, options=("--restarts", "1", "--backoff", "10ms"))
    assert run.wait() == 0
    assert (runs.home.settings.home / "checkpoints" / run.name / "step").read_text() == "2"


# --- wrong input ---------------------------------------------------------------------------------------------

WRONG: list[tuple[list[str], int, str]] = [
    (["run"], 2, "there is no command"),
    (["run", "--"], 2, "there is no command"),
    (["run", "--", "no-such-program"], 127, "'no-such-program' was not found; no lease"),
    (["run", "--", "/etc/passwd"], 126, "not executable; no lease"),
    (["run", "--env", "PATH=/nowhere", "--", "sh"], 127, "was not found"),
    (["run", "--vram", "lots", "--", "true"], 2, "is not a size"),
    (["run", "--ttl", "1", "--grace", "soon", "--", "true"], 2, "grace 'soon' is not a duration"),
    (["run", "--time", "-1", "--", "true"], 2, "is not a duration"),
    (["run", "--tier", "gold", "--", "true"], 2, "use interactive, batch or spot"),
    (["run", "--exit-profile", "lsf", "--", "true"], 2, "use default, k8s"),
    (["run", "--env", "NOVALUE", "--", "true"], 2, "is not NAME=VALUE"),
    (["run", "--name", "../up", "--", "true"], 2, "is not a name"),
    (["run", "--restarts", "-1", "--", "true"], 2, "must not be negative"),
    (["run", "--drained", "0", "--", "true"], 2, "0 is always done"),
    (["run", "--vram", "64GiB", "--", "true"], 75, "64GiB"),
    (["run", "--resume"], 2, "there is no command"),
    (["run", "--resume", "--", "bash", "train.sh"], 2, "and bash is none; no lease was asked for"),
    (["run", "--resume", "--", "python", "-u", "-m", "train"], 2, "needs the script's file"),
    (["logs", "Rnothing"], 2, "there is no run 'Rnothing'"),
    (["attach", "../../etc"], 2, "there is no run"),
    (["cancel", "Rnothing"], 2, "there is no run"),
]


@pytest.mark.parametrize(
    ("args", "code", "words"), WRONG, ids=lambda x: " ".join(x) if isinstance(x, list) else ""
)
def test_wrong_input_is_one_sentence(runs: Runs, args: list[str], code: int, words: str) -> None:
    done = runs.quick(*args)
    assert (done.returncode, done.stdout) == (code, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not [a for a in runs.ledger.leases() if a.lease.state is not LeaseState.ENDED]


KILLED_ONCE = """
import os, signal, time
w = 1.0
for i in range(30):
    w -= 0.1 * w
    if i == 20 and not os.path.exists("{mark}"):
        open("{mark}", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
print("result", i, w)
"""


@pytest.mark.parametrize("detached", [(), ("-d",)], ids=["here", "detached"])
def test_a_script_that_knows_nothing_goes_on_where_it_was(
    detached: tuple[str, ...], runs: Runs, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    job = f"resumed{len(detached)}"
    script.write_text(KILLED_ONCE.format(mark=runs.home.settings.home / job))
    options = ("--resume", "--restarts", "2", "--backoff", "10ms", "--vram", "1GiB", "--name", job)
    done = runs.quick("run", *detached, *options, "--", sys.executable, "-u", str(script))
    assert done.returncode == 0, done.stderr
    if detached:  # the other's output is this process's
        w = 1.0
        for _ in range(30):
            w -= 0.1 * w
        assert f"result 29 {w}" in runs.quick("attach", done.stdout.strip()).stdout
    head = runs.ledger.head(job)
    assert head is not None
    assert head.step == 30


TRAINS = """
import sublet
state = {{"n": 0}}
for step in sublet.train("asks", state, vram="{vram}", progress=False).steps(2):
    state["n"] += 1
"""


def test_what_trains_in_a_run_works_under_the_runs_lease(runs: Runs) -> None:
    before = len(runs.ledger.leases(live_only=False))
    command = ("--vram", "1GiB", "--", sys.executable, "-c")
    done = runs.quick("run", *command, TRAINS.format(vram="64MiB"))
    assert done.returncode == 0, done.stderr
    assert len(runs.ledger.leases(live_only=False)) == before + 1
    assert runs.quick("run", *command, TRAINS.format(vram="2GiB")).returncode == 1  # more than the run has


def test_a_dry_run_leases_nothing(runs: Runs) -> None:
    before = len(runs.ledger.leases(live_only=False))
    free = runs.quick("run", "--vram", "4GiB", "--dry-run", "--", "false")
    assert free.returncode == 0
    assert "would lease 4GiB, tier batch" in free.stdout
    assert f"{runs.home.settings['host']}-host0" in free.stdout
    full = runs.quick("run", "--vram", "64GiB", "--dry-run", "--json", "--", "false")
    assert json.loads(full.stdout)["free_now"] is False
    assert len(runs.ledger.leases(live_only=False)) == before


def test_a_run_inside_a_run_is_refused(runs: Runs) -> None:
    run = runs.command(*SUBLET, "run", "--", "true")
    assert run.wait() == 78
    assert "inside a run already" in run.said


# --- detached ------------------------------------------------------------------------------------------------


def detached(runs: Runs, *options: str, ending: str = "85", until: int = 1) -> tuple[str, Path]:
    out = runs.path / "out"
    done = runs.quick(
        "run", "-d", *options, "--", sys.executable, "-c", _dedented(SCRIPT), str(out), ending, str(until)
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), out


def _dedented(code: str) -> str:
    import textwrap

    return textwrap.dedent(code)


def lease_of(run: RunFolder) -> str:
    return str(run.facts()["lease"])


def test_a_detached_run_is_followed_over_a_requeue_to_its_exit_code(runs: Runs) -> None:
    code = """
        import os, signal, sys, time
        count = int(os.environ["SUBLET_RESTART_COUNT"])
        print("begin", count)
        if count == 1:
            sys.exit(6)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(85))
        while True: time.sleep(0.01)
    """
    done = runs.quick("run", "-d", "--name", "fol/low", "--", sys.executable, "-c", _dedented(code))
    run = find_run(runs.home.settings.home, done.stdout.strip())
    assert find_run(runs.home.settings.home, "fol/low") == run
    follower = Forked(
        [*SUBLET, "logs", "-f", "fol/low"], stdout=subprocess.PIPE, text=True, env=runs.home.environment
    )
    wait_until(lambda: "begin 0" in run.log.read_text(), 30)
    listed = runs.quick("ps", "--runs")
    assert run.id in listed.stdout
    assert "running" in listed.stdout
    assert "fol/low" in runs.quick("ps").stdout
    runs.ledger.revoke(lease_of(run), reason=EndReason.REVOKED, detail="x", grace_us=10_000_000, actor="t")
    out, _ = follower.communicate(timeout=40)
    assert follower.returncode == 6
    lines = [line for line in out.splitlines() if not line.startswith("sublet:")]
    assert lines == ["begin 0", "begin 1"]
    assert "revoked: x" in out
    assert run.exit()["exit_code"] == 6
    tail = runs.quick("logs", "-n", "1", run.id)
    assert (tail.returncode, tail.stdout.count("\n")) == (0, 1)
    assert "failed" in tail.stdout
    assert runs.quick("logs", "-n", "0", run.id).stdout == ""
    assert runs.sublet("attach", run.id).returncode == 6
    assert runs.quick("cancel", run.id).stdout.strip() == f"run {run.id} has ended already: failed"
    listed = json.loads(runs.quick("ps", "--runs", "--all", "--json").stdout)
    assert next(x for x in listed if x["id"] == run.id)["state"] == "failed"


def test_ctrl_c_in_attach_detaches_and_cancel_drains(runs: Runs) -> None:
    run_id, out = detached(runs, "--name", "att")
    wait_until(out.exists, 30)
    watcher = Forked(
        [*SUBLET, "attach", "att"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=runs.home.environment,
    )
    assert watcher.stderr is not None
    assert "Ctrl-C detaches" in watcher.stderr.readline()
    time.sleep(0.3)
    watcher.send_signal(signal.SIGINT)
    _, said = watcher.communicate(timeout=20)
    assert watcher.returncode == 0
    assert "goes on" in said
    run = find_run(runs.home.settings.home, run_id)
    assert run.exit() == {}
    told = runs.quick("cancel", "att", "--grace", "9s")
    assert "told to leave, killed in 9.0s" in told.stdout
    assert runs.sublet("logs", "-f", run_id).returncode == 85
    assert (run.exit()["outcome"], run.exit()["reason"].split(";")[0]) == ("preempted", "cancelled")
    notice = json.loads(out.read_text().splitlines()[1][5:])
    assert (notice["source"], notice["reason"]) == ("cancel", "cancelled")
    assert 5 < notice["seconds_left"] <= 9


def test_cancelled_twice_it_is_killed(runs: Runs) -> None:
    run_id, out = detached(runs, "--grace", "10m", ending="stay")
    wait_until(out.exists, 30)
    assert "told to leave" in runs.quick("cancel", run_id).stdout
    wait_until(lambda: "told" in out.read_text())
    assert "killed" in runs.quick("cancel", run_id).stdout
    assert runs.sublet("logs", "-f", run_id).returncode == 137
    assert find_run(runs.home.settings.home, run_id).exit()["outcome"] == "killed"


def test_cancel_now_reaches_a_run_that_is_stopped(runs: Runs) -> None:
    run_id, out = detached(runs, "--grace", "10m", ending="stay")
    wait_until(out.exists, 30)
    run = find_run(runs.home.settings.home, run_id)
    facts = run.facts()
    os.kill(facts["pid"], signal.SIGSTOP)
    begun = time.monotonic()
    assert runs.quick("cancel", "--now", run_id).returncode == 0
    wait_until(lambda: process_is_gone(facts["supervisor"][0]), 20)
    assert time.monotonic() - begun < 20
    os.kill(facts["pid"], signal.SIGCONT)
    assert runs.sublet("logs", "-f", run_id).returncode == 137


def test_a_lost_detached_run_ends_its_followers(runs: Runs) -> None:
    run_id, out = detached(runs, "--grace", "300ms")
    wait_until(out.exists, 30)
    run = find_run(runs.home.settings.home, run_id)
    os.kill(run.facts()["pid"], signal.SIGKILL)
    assert runs.sublet("logs", "-f", run_id).returncode == 137
    assert run.exit()["outcome"] == "lost"
    assert "told" in out.read_text()


def test_a_run_on_a_terminal_has_no_log(runs: Runs) -> None:
    run = runs.command("true")
    assert run.wait() == 0
    done = runs.quick("logs", run.folder.id)
    assert done.returncode == 2
    assert "went to the terminal" in done.stderr


# --- terminals -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def on_terminal(home: Home, args: list[str]) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The process leads a session whose terminal we hold the other end of."""
    master, slave = pty.openpty()

    def take() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        args, stdin=slave, stdout=slave, stderr=slave, env=home.environment, preexec_fn=take
    )
    os.close(slave)
    try:
        yield process, master
    finally:
        with contextlib.suppress(OSError):
            os.close(master)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()


def script_args(out: Path, until: int = 1) -> list[str]:
    return ["--", sys.executable, "-c", _dedented(SCRIPT), str(out), "85", str(until)]


def test_a_closed_terminal_drains_the_run_in_it(runs: Runs) -> None:
    out = runs.path / "out"
    with on_terminal(runs.home, [*SUBLET, "run", "--name", "hung", *script_args(out)]) as (process, master):
        wait_until(out.exists, 30)
        os.close(master)
        assert process.wait(timeout=90) == 85
    (told,) = [json.loads(line[5:]) for line in out.read_text().splitlines() if line.startswith("told")]
    assert "SIGHUP" in told["reason"]
    assert find_run(runs.home.settings.home, "hung").exit()["outcome"] == "preempted"


def test_a_detached_run_survives_its_terminal(runs: Runs) -> None:
    out = runs.path / "out"
    with on_terminal(runs.home, [*SUBLET, "run", "-d", "--name", "stays", *script_args(out)]) as (
        process,
        master,
    ):
        assert process.wait(timeout=90) == 0
        wait_until(out.exists, 30)
        os.close(master)
    time.sleep(0.5)
    run = find_run(runs.home.settings.home, "stays")
    assert run.exit() == {}
    assert "told" not in out.read_text()
    runs.quick("cancel", "stays")
    assert runs.sublet("logs", "-f", "stays").returncode == 85


def test_ctrl_c_on_a_terminal_is_one_notice_to_the_leader(runs: Runs) -> None:
    """The terminal signals the whole foreground group; the command is not in it."""
    out = runs.path / "out"
    code = """
        import os, signal, sys, time
        def note(*_):
            open(sys.argv[1], "a").write(f"{_[0]} ")
            if _[0] == 15: os._exit(85)
        signal.signal(signal.SIGINT, note)
        signal.signal(signal.SIGTERM, note)
        print(sys.stdout.isatty(), flush=True)
        open(sys.argv[1], "w").close()
        while True: time.sleep(0.01)
    """
    args = [*SUBLET, "run", "--", sys.executable, "-c", _dedented(code), str(out)]
    with on_terminal(runs.home, args) as (process, master):
        wait_until(out.exists, 30)
        os.write(master, b"\x1a\x03")  # Ctrl-Z is ignored: a lease cannot be paused
        assert process.wait(timeout=90) == 85
        shown = os.read(master, 65536).decode()
    assert out.read_text() == "15 "
    assert "True" in shown


# --- folders -------------------------------------------------------------------------------------------------


def _ended_run(home: Path, name: str, at: float, **facts: Any) -> RunFolder:
    run = RunFolder(runs_folder(home) / f"R{name}")
    run.make()
    run.record(name=name, started_at=at, **facts)
    run.leave(outcome="done", exit_code=0)
    return run


def test_old_runs_are_removed_and_living_ones_never(tmp_path: Path) -> None:
    old, new = _ended_run(tmp_path, "old", 1.0), _ended_run(tmp_path, "new", 3.0)
    living = RunFolder(runs_folder(tmp_path) / "Rliving")
    living.make()
    living.record(name="old", started_at=0.5)
    assert find_run(tmp_path, "old") == living
    prune(tmp_path, keep=1)
    assert not old.path.exists()
    assert new.path.exists()
    assert living.path.exists()
