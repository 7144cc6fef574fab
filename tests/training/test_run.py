"""`sublet.train`: what counts as a step, how a run leaves, what it does when saves fail, and effects beyond the model."""

from __future__ import annotations

import io
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sublet
from sublet.core.leasing.lease import EndReason, LeaseState
from sublet.leases.progress_line import ProgressLine
from sublet.store.checkpoints import CheckpointStore
from sublet.training import saves
from tests.homes import Home, wait_until
from tests.training.rig import (
    CRASHED,
    Left,
    calm_walk,
    check_walk,
    ended,
    forked,
    left_of,
    looking,
    run_to_end,
    tell,
    walk,
)

STEPS = 12


def committed_step(job: str = "job") -> int:
    with looking() as ledger:
        head = ledger.head(job)
        return head.step if head is not None else 0


@pytest.fixture
def calm(sqlite_home: Home) -> Left:
    return calm_walk(STEPS)


class Begun:
    """How many steps were begun, told by a process that may be killed at any moment."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "begun"

    def __call__(self, run: Any, step: Any) -> None:
        self.path.write_text(str(step.number))

    @property
    def last(self) -> int:
        return int(self.path.read_text() or 0) if self.path.exists() else 0


# --- leaving -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 5, 1000, "auto"])
def test_a_signal_wastes_no_step(sqlite_home: Home, calm: Left, tmp_path: Path, every: Any) -> None:
    """Preempted with notice: every step that was begun is committed, whatever the cadence. Exit code 85."""
    begun = Begun(tmp_path)
    pid = forked(lambda: walk("job", STEPS, every=every, pause=0.1, on_step=begun))
    wait_until(lambda: begun.last >= 4)
    tell(pid, signal.SIGTERM)
    assert ended(pid) == 85
    assert committed_step() == begun.last
    assert run_to_end(lambda: walk("job", STEPS, every=every)) == 0
    check_walk("job", calm, STEPS)


def test_further_signals_change_nothing(sqlite_home: Home, calm: Left) -> None:
    """Nor does one that comes while the program is on its way out."""

    def slow_save() -> None:
        real = CheckpointStore.save

        def save(*args: Any, **options: Any) -> Any:
            time.sleep(0.3)
            return real(*args, **options)

        CheckpointStore.save = save  # type: ignore[method-assign]
        try:
            walk("job", STEPS, every=1000, pause=0.05)
        finally:
            time.sleep(0.3)  # an interpreter that takes its time to end

    pid = forked(slow_save)
    wait_until(lambda: holds_lease("job"))
    time.sleep(0.2)
    for _ in range(8):
        tell(pid, signal.SIGTERM)
        time.sleep(0.1)
    assert ended(pid) == 85
    assert committed_step() > 0
    assert run_to_end(lambda: walk("job", STEPS)) == 0
    check_walk("job", calm, STEPS)


def holds_lease(job: str) -> str:
    with looking() as ledger:
        for answer in ledger.leases():
            if answer.lease.request.job == job and answer.lease.state is LeaseState.ACTIVE:
                return answer.lease.id
    return ""


def waits(job: str) -> bool:
    with looking() as ledger:
        found = [a.lease for a in ledger.leases() if a.lease.request.job == job]
        return any(lease.state is LeaseState.WAITING for lease in found)


@pytest.mark.parametrize("place", ["a step", "a save", "a restore", "a wait for the lease"])
def test_sigterm_with_15_seconds_during(sqlite_home: Home, calm: Left, tmp_path: Path, place: str) -> None:
    """Committed, exit code 85, and the next start continues."""
    started = tmp_path / "started"

    def during(real: Any) -> Any:
        def slowly(*args: Any, **options: Any) -> Any:
            started.touch()
            time.sleep(0.6)
            return real(*args, **options)

        return slowly

    def work() -> None:
        if place == "a save":
            CheckpointStore._store_chunks = during(CheckpointStore._store_chunks)  # type: ignore[method-assign]
        if place == "a restore":
            CheckpointStore.load = during(CheckpointStore.load)  # type: ignore[method-assign]
        walk("job", STEPS, every=2, on_step=on_step, grace="15s")

    def on_step(run: Any, step: Any) -> None:
        if place == "a step" and step.number == 5:
            started.touch()
            time.sleep(0.6)

    blocker = None
    if place == "a restore":

        def begin(run: Any, step: Any) -> None:
            if step.number == 5:
                os._exit(7)

        assert run_to_end(lambda: walk("job", STEPS, every=2, on_step=begin)) == 7
    if place == "a wait for the lease":
        blocker = sublet.gpu(vram="16GiB", ttl="1m", holder="name").ask()
    pid = forked(work)
    wait_until(started.exists if blocker is None else lambda: waits("job"))
    time.sleep(0.2)
    tell(pid, signal.SIGTERM)
    assert ended(pid) == 85
    if blocker is not None:
        with looking() as ledger:  # its own connection was closed for the child
            ledger.revoke(blocker.id, reason=EndReason.REVOKED, detail="", grace_us=0, actor="test")
    if place == "a step":
        assert committed_step() == 5
    assert run_to_end(lambda: walk("job", STEPS, every=2)) == 0
    check_walk("job", calm, STEPS)


@pytest.mark.parametrize("reason", [EndReason.REVOKED, EndReason.PREEMPTED, EndReason.HOLD_CAP])
def test_a_revoked_lease_wastes_no_step(
    sqlite_home: Home, calm: Left, tmp_path: Path, reason: EndReason
) -> None:
    begun = Begun(tmp_path)
    pid = forked(lambda: walk("job", STEPS, every=1000, pause=0.1, on_step=begun))
    wait_until(lambda: begun.last >= 3)
    with looking() as ledger:
        lease = next(a.lease.id for a in ledger.leases() if a.lease.request.job == "job")
        ledger.revoke(lease, reason=reason, detail="test", grace_us=10_000_000, actor="test")
    assert ended(pid) == 85
    assert committed_step() == begun.last
    with looking() as ledger:
        assert ledger.look(lease).lease.state is LeaseState.ENDED
    assert run_to_end(lambda: walk("job", STEPS)) == 0
    check_walk("job", calm, STEPS)


def test_without_time_to_save_it_leaves_with_what_is_committed(sqlite_home: Home, calm: Left) -> None:
    """The margin is a second: half a second is no time."""
    pid = forked(lambda: walk("job", STEPS, every=4, pause=0.1, grace="0.5s"))
    wait_until(lambda: committed_step() == 4)
    tell(pid, signal.SIGTERM)
    assert ended(pid) == 85
    assert committed_step() == 4
    assert run_to_end(lambda: walk("job", STEPS)) == 0
    check_walk("job", calm, STEPS)


def test_the_loop_can_just_end_on_a_notice(sqlite_home: Home) -> None:
    walking: dict[str, Any] = {"x": 0}
    run = sublet.train("job", walking, vram="1GiB", every=1000, progress=False)
    for step in run.steps(STEPS, on_notice="stop"):
        walking["x"] += 1
        if step.number == 3:
            assert not run.should_stop
            os.kill(os.getpid(), signal.SIGTERM)
            wait_until(lambda: run.should_stop)
            assert run.notice is not None
            assert run.notice.source == "signal"
    assert run.preempted
    assert (run.step, run.committed) == (3, 3)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


# --- what counts ---------------------------------------------------------------------------------------------


def test_a_step_left_in_the_middle_does_not_count(sqlite_home: Home, calm: Left) -> None:
    def fail(run: Any, step: Any) -> None:
        if step.number == 8:
            raise RuntimeError("in the middle")

    assert run_to_end(lambda: walk("job", STEPS, every=2, on_step=fail)) == CRASHED
    assert committed_step() in (4, 6)
    assert run_to_end(lambda: walk("job", STEPS)) == 0
    check_walk("job", calm, STEPS)


def test_break_does_not_count_the_step_and_stop_does(sqlite_home: Home) -> None:
    def run_until(job: str, leave: str) -> sublet.Run:
        state = {"x": 0}
        run = sublet.train(job, state, vram="1GiB", every=1000, progress=False)
        for step in run.steps(STEPS):
            state["x"] += 1
            if step.number == 5 and leave == "break":
                break
            if step.number == 5 and leave == "stop":
                run.stop("converged")
        return run

    broken = run_until("broken", "break")
    assert (broken.step, broken.committed) == (4, 0)
    assert run_until("stopped", "stop").committed == 5
    assert left_of("stopped").state["state"] == {"x": 5}


def test_a_run_that_is_over_has_no_steps_left_and_its_state_is_there(sqlite_home: Home) -> None:
    for _ in range(2):
        state: dict[str, Any] = {"w": np.zeros(3), "n": 0}
        run = sublet.train("job", state, vram="1GiB", every=2, progress=False)
        seen = [step.number for step in run.steps(4) if state["w"].__iadd__(1) is not None]
    assert seen == []
    assert list(state["w"]) == [4.0, 4.0, 4.0]
    assert run.version == 2


def test_more_steps_can_be_asked_for_later(sqlite_home: Home) -> None:
    for total in (3, 7):
        state = {"x": 0}
        numbers = []
        for step in sublet.train("job", state, vram="1GiB", every=2, progress=False).steps(total):
            state["x"] += 1
            numbers.append(step.number)
    assert numbers == [4, 5, 6, 7]
    assert state["x"] == 7


def test_every(sqlite_home: Home) -> None:
    run = sublet.train("job", {"x": 0}, vram="1GiB", every=1000, progress=False)
    third, often, never = [], 0, 0
    for step in run.steps(9):
        third += [step.number] if run.every(3) else []
        often += run.every("1ms")
        never += run.every("1h")
        time.sleep(0.002)
    assert third == [3, 6, 9]
    assert often >= 8
    assert never == 0


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: sublet.train(state={"x": 1}), "needs a name"),
        (lambda: sublet.train("../x", {"x": 1}), "job"),
        (lambda: sublet.train("job"), "state= is a dict"),
        (lambda: sublet.train("job", [1]), "state= is a dict"),  # type: ignore[arg-type]
        (lambda: sublet.train("job", {1: 2}), "have names"),  # type: ignore[dict-item]
        (lambda: sublet.train("job", {"x": 1}, every=0), "every"),
        (lambda: sublet.train("job", {"x": 1}, grace="soon"), "grace"),
        (lambda: sublet.train("job", {"x": 1}, vram="much"), "vram"),
        (lambda: sublet.train("job", {"x": 1}, per_rank=["y"]), "per_rank"),
    ],
)
def test_wrong_input_is_one_sentence(sqlite_home: Home, call: Any, says: str) -> None:
    with pytest.raises(sublet.BadInput, match=says):
        call()


def test_a_loop_that_cannot_be(sqlite_home: Home) -> None:
    with sublet.train("job", {"x": 1}, vram="1GiB", progress=False) as run:
        for total in (-1, 1.5, True, "many"):
            with pytest.raises(sublet.BadInput, match="number of steps"):
                run.steps(total)  # type: ignore[arg-type]
        with pytest.raises(sublet.BadInput, match="on_notice"):
            run.steps(1, on_notice="?")
        with pytest.raises(sublet.BadInput, match="every"):
            run.every(0)
        for _ in run.steps(2):
            with pytest.raises(sublet.BadInput, match="one loop at a time"):
                run.steps(3)
            with pytest.raises(sublet.BadInput, match="not finished"):
                run.save()
    with pytest.raises(sublet.BadInput, match="over"):
        run.steps(3)
    assert holds_lease("job") == ""


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"w": np.zeros(4)}, "another shape"),
        ({"w": np.zeros(3, dtype=np.float32)}, "another shape or type"),
        ({"w": np.zeros(3), "more": 1}, "same parts"),
        ({"v": np.zeros(3)}, "same parts"),
    ],
)
def test_another_state_is_not_restored_into(sqlite_home: Home, state: dict[str, Any], says: str) -> None:
    for _ in sublet.train("job", {"w": np.ones(3)}, vram="1GiB", progress=False).steps(2):
        pass
    with pytest.raises(sublet.BadInput, match=says):
        sublet.train("job", state, vram="1GiB", progress=False)
    assert holds_lease("job") == ""


def test_what_cannot_be_saved_says_where_it_is(sqlite_home: Home) -> None:
    run = sublet.train("job", {"model": {"f": len}}, vram="1GiB", every=1, progress=False)
    with pytest.raises(sublet.Unsavable, match="'f'"):
        for _ in run.steps(3):
            pass
    assert run.committed == 0


# --- saves that fail -----------------------------------------------------------------------------------------


def failing(times: int) -> None:
    """In this process: the store fails so often, then works."""
    real = CheckpointStore._store_chunks
    left = [times]

    def store_chunks(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise sublet.QuorumNotReached("replica A is on holiday")
        return real(*args, **options)

    CheckpointStore._store_chunks = store_chunks  # type: ignore[method-assign]


def test_training_goes_on_while_saves_fail_and_catches_up(sqlite_home: Home, calm: Left) -> None:
    """Spans of failed saves are in the next one: no gap, and the effects in them once."""

    def work() -> None:
        saves.RETRY_US = 30_000
        failing(3)

        def mail(run: Any, step: Any) -> None:
            if step.number == 2:
                step.effect("mail", lambda: "sent")

        walk("job", STEPS, every=2, pause=0.02, on_step=mail)

    assert run_to_end(work) == 0
    left = check_walk("job", calm, STEPS)
    assert left.spans[0][1] > 2
    assert left_of("job", "job#mail").effects["job#mail"].completed


def test_a_save_that_fails_at_the_very_end_is_tried_again(sqlite_home: Home, calm: Left) -> None:
    def work() -> None:
        saves.RETRY_US = 10_000
        failing(3)
        walk("job", STEPS, every=1000)

    assert run_to_end(work) == 0
    assert check_walk("job", calm, STEPS).spans == [(1, STEPS)]


def test_progress_nobody_can_save_is_given_up(sqlite_home: Home) -> None:
    training_retry, saves.RETRY_US = saves.RETRY_US, 10_000
    try:
        state = {"x": 0}
        run = sublet.train("job", state, vram="1GiB", every=1, progress=False, save_patience="0.3s")
        saved = CheckpointStore._store_chunks
        failing(10_000)
        with pytest.raises(sublet.NotDurable, match="nothing could be saved for") as told:
            for _ in run.steps(10_000):
                state["x"] += 1
                time.sleep(0.01)
        assert "step 0 is committed" in told.value.message
    finally:
        CheckpointStore._store_chunks = saved  # type: ignore[method-assign]
        saves.RETRY_US = training_retry
    assert holds_lease("job") == ""


def test_a_drain_that_cannot_save_still_leaves(sqlite_home: Home, calm: Left) -> None:
    def work() -> None:
        def stop(run: Any, step: Any) -> None:
            if step.number == 5:
                wait_until(lambda: run._saves.under_way is None or run._saves.under_way.saving.done)
                failing(1000)
                os.kill(os.getpid(), signal.SIGTERM)

        walk("job", STEPS, every=4, on_step=stop)

    assert run_to_end(work) == 85
    assert committed_step() == 4
    assert run_to_end(lambda: walk("job", STEPS)) == 0
    check_walk("job", calm, STEPS)


# --- effects -------------------------------------------------------------------------------------------------


def test_an_effect_happens_once_and_its_result_is_kept(sqlite_home: Home, tmp_path: Path) -> None:
    """Killed after the commit: not called again. Killed before it: called again, with the same key."""
    log = tmp_path / "log"

    def life(die_at: int) -> Any:
        def on_step(run: Any, step: Any) -> None:
            if step.number in (3, 8):

                def send(key: str) -> dict[str, Any]:
                    with log.open("a") as file:
                        file.write(f"{key}\n")
                    return {"sent": step.number}

                result = step.effect(f"mail-{step.number}", send)
                assert result == {"sent": step.number}
            if step.number == die_at:
                time.sleep(0.5)  # until the save behind is over
                os._exit(7)

        return on_step

    assert run_to_end(lambda: walk("job", STEPS, every=2, pause=0.03, on_step=life(9))) == 7
    assert committed_step() == 8
    assert run_to_end(lambda: walk("job", STEPS, every=1000, on_step=life(11))) == 7
    assert run_to_end(lambda: walk("job", STEPS, every=1000, on_step=life(0))) == 0
    assert log.read_text().split() == ["job#mail-3", "job#mail-8"]
    effects = left_of("job", "job#mail-3", "job#mail-8").effects
    assert [json.loads(e.outcome) for e in effects.values()] == [{"sent": 3}, {"sent": 8}]


def test_an_effect_of_an_uncommitted_step_is_done_again_with_the_same_key(
    sqlite_home: Home, tmp_path: Path
) -> None:
    log = tmp_path / "log"

    def send(key: str) -> None:
        with log.open("a") as file:
            file.write(f"{key}\n")

    def life(die: bool) -> Any:
        def on_step(run: Any, step: Any) -> None:
            if step.number == 3:
                step.effect("mail", send)
            if die and step.number == 4:
                os._exit(7)

        return on_step

    assert run_to_end(lambda: walk("job", 6, every=1000, on_step=life(True))) == 7
    assert run_to_end(lambda: walk("job", 6, every=1000, on_step=life(False))) == 0
    assert log.read_text().split() == ["job#mail", "job#mail"]
    effect = left_of("job", "job#mail").effects["job#mail"]
    assert (effect.completed, effect.version) == (True, 1)


def test_records_and_wrong_effects(sqlite_home: Home) -> None:
    run = sublet.train("job", {"x": 0}, vram="1GiB", every=1, progress=False)
    for step in run.steps(3):
        if step.number == 1:
            assert step.record("accuracy", 0.5) == 0.5
            with pytest.raises(sublet.BadInput, match="not committed yet"):
                step.record("accuracy", 0.6)
            with pytest.raises(sublet.BadInput, match="cannot be stored"):
                step.effect("odd", lambda: object())
        if step.number == 3:
            wait_until(lambda: run._parts.ledger.head("job").step >= 1)  # type: ignore[union-attr]
            with pytest.raises((sublet.FingerprintMismatch, sublet.BadInput)):
                step.record("accuracy", 0.7)
    assert json.loads(left_of("job", "job#accuracy").effects["job#accuracy"].outcome) == 0.5


# --- what is shown -------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_line_says_where_it_is_and_what_is_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    out = Terminal()
    line = ProgressLine(out, "job")
    shown: dict[str, Any] = {
        "step": 50,
        "total": 100,
        "committed": 48,
        "committed_ago_us": 3_000_000,
        "steps_per_s": 12.34,
        "goodput": 0.9876,
        "lease_s": 125.0,
        "log": {"loss": 0.12345},
    }
    line.show(0, **shown)
    for text in (
        "50/100",
        "loss 0.1235",
        "12.3 steps/s",
        "goodput 98.8%",
        "committed 48, 3.0s ago",
        "lease 2m05s",
    ):
        assert text in out.getvalue(), text
    assert not line.due(1)
    assert line.due(10_000_000)
    line.say("resumes")
    assert out.getvalue().endswith("job: resumes\n")


def test_a_closed_terminal_does_not_end_the_run() -> None:
    out = io.StringIO()
    line = ProgressLine(out, "job")
    out.close()
    line.say("still here")
    line.close()


def test_a_loss_that_is_not_a_number_is_stored_as_such(sqlite_home: Home) -> None:
    run = sublet.train("job", {"x": 0}, vram="1GiB", every=1, progress=False)
    for step in run.steps(1):
        step.log(loss=float("nan"), name="text", tensor=np.float32(2.5))
    outcome = json.loads(left_of("job", "job:1").effects["job:1"].outcome)
    assert outcome["log"] == {"loss": "nan", "tensor": 2.5}
    assert outcome["compute_us"] >= 0


def test_the_lease_s_own_end_counts_when_a_signal_promises_more(sqlite_home: Home, calm: Left) -> None:
    """15 seconds of grace are worth nothing to a lease that ends in half a second."""

    def work() -> None:
        def stop(run: Any, step: Any) -> None:
            if step.number == 6:
                os.kill(os.getpid(), signal.SIGTERM)
                run._parts.lease._deadline_us = run._parts.clock.monotonic_us() + 500_000

        walk("job", STEPS, every=4, on_step=stop, grace="15s")

    assert run_to_end(work) == 85
    assert committed_step() == 4
    assert run_to_end(lambda: walk("job", STEPS)) == 0
    check_walk("job", calm, STEPS)
