"""What a run does at its edges: answers that were lost, warnings at odd moments, loops and effects used in ways nobody meant."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

import sublet
from sublet.core.errors import Disconnected, Fenced, LeaseLost
from sublet.core.progress import effect as effects
from sublet.leases.progress_line import ProgressLine
from sublet.ledger.ledger import SqlLedger
from sublet.store.checkpoints import CheckpointStore
from sublet.training import saves, single_runner
from sublet.training.train import leave_the_waitlist
from sublet.wiring import open_ledger
from tests.homes import Home, wait_until
from tests.training.rig import ended, forked, left_of, run_to_end, tell
from tests.training.test_run import committed_step, holds_lease


def begun(job: str = "job", state: dict[str, Any] | None = None, **options: Any) -> sublet.Run:
    options = {"vram": "1GiB", "every": 1000, "progress": False, **options}
    return sublet.train(job, {"x": 0} if state is None else state, **options)


def until(pid: int, fact: Callable[[], object]) -> None:
    """What a child must come to. It does not outlive a test that waited in vain."""
    try:
        wait_until(fact, 60)
    except AssertionError:
        tell(pid, signal.SIGKILL)
        ended(pid)
        raise


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saves, "RETRY_US", 10_000)


@pytest.fixture
def lease(sqlite_home: Home) -> Iterator[Any]:
    held = sublet.gpu(vram="1GiB", ttl="1m", holder="name").acquire()
    yield held
    held.release()


# --- answers that were lost (S5) -----------------------------------------------------------------------------


class Line:
    """The connection to the ledger: what happens to the next commits and to reads of effects."""

    def __init__(self, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ledger = open_ledger(home.settings)
        self.real = self.ledger.commit
        self.effect = self.ledger.effect
        self.on_commit: list[Callable[[Any, Any], Any]] = []
        self.deaf = False
        monkeypatch.setattr(self.ledger, "commit", self._commit)
        monkeypatch.setattr(self.ledger, "effect", self._effect)

    def _commit(self, key: Any, commit: Any) -> Any:
        return (self.on_commit.pop(0) if self.on_commit else self.real)(key, commit)

    def _effect(self, key: str) -> Any:
        if self.deaf:
            raise Disconnected("nobody answers")
        return self.effect(key)


@pytest.fixture
def line(sqlite_home: Home, monkeypatch: pytest.MonkeyPatch) -> Line:
    return Line(sqlite_home, monkeypatch)


@pytest.mark.parametrize("at_the_end", [False, True])
def test_a_commit_that_happened_is_found_when_the_ledger_answers_again(
    line: Line, soon: None, at_the_end: bool
) -> None:
    """Neither the answer nor the record of it could be read: the next save finds the head moved, by this very run."""

    def happens_unheard(key: Any, commit: Any) -> Any:
        line.real(key, commit)
        line.deaf = True
        threading.Timer(0.3, lambda: setattr(line, "deaf", False)).start()
        raise Disconnected("the answer was lost")

    line.on_commit = [line.real, happens_unheard]
    state = {"x": 0}
    run = begun(state=state, every=2)
    for step in run.steps(4 if at_the_end else 40):
        state["x"] += 1
        if step.number in (3, 5):
            step.effect(f"mail-{step.number}", lambda n=step.number: n)
        time.sleep(0.02)
    assert run.committed == run.step == state["x"]
    left = left_of("job", "job#mail-3", "job#mail-5")
    assert left.spans[:2] == [(1, 2), (3, 4)]
    assert [first for first, _ in left.spans] == [1, *(last + 1 for _, last in left.spans[:-1])]
    assert all(e.completed for e in left.effects.values())
    assert left.effects["job#mail-3"].version == 2
    assert left.faults == []
    assert run._saves._done_effects == set()


@pytest.mark.parametrize("steps", [4, 30])
def test_a_commit_that_arrives_after_it_was_given_up(line: Line, soon: None, steps: int) -> None:
    """The read said that it had not happened, and then it did: the save after it is refused, and the run goes on from there."""
    late: list[Any] = []

    def lost(key: Any, commit: Any) -> Any:
        late.append((key, commit))
        raise Disconnected("the answer was lost")

    def overtaken(key: Any, commit: Any) -> Any:
        line.real(*late[0])
        return line.real(key, commit)

    line.on_commit = [line.real, lost, overtaken]
    run = begun(every=2)
    for step in run.steps(steps):
        if step.number in (3, 6):
            step.effect(f"mail-{step.number}", lambda n=step.number: n)
        time.sleep(0.02)
    assert run.committed == steps
    left = left_of("job", "job#mail-3", "job#mail-6")
    assert left.spans[1] == (3, 4)
    assert left.effects["job#mail-3"].version == 2
    assert steps == 4 or left.effects["job#mail-6"].version == 3
    assert [first for first, _ in left.spans] == [1, *(last + 1 for _, last in left.spans[:-1])]


def test_the_commit_of_another_holder_is_not_taken_for_ones_own(line: Line) -> None:
    """The answer was lost, the lease too, and whoever came next did the same step: theirs is what counts."""
    mine = sublet.gpu(vram="1GiB", ttl="1m", holder="name").acquire()
    theirs = sublet.gpu(vram="1GiB", ttl="1m", holder="name").acquire()
    asked: dict[str, Any] = {
        "job": "job",
        "step": 1,
        "module": "def add(grid, step, n, batch):\n    batch[0] = 7\n",
        "kernel": "add",
        "batch": b"\x01",
        "output_bytes": 1,
        "expected_version": 0,
    }
    done: list[Any] = []

    def lost(key: Any, commit: Any) -> Any:
        mine.release()
        done.append(sublet.run_step(lease=theirs, **asked))
        raise Disconnected("the answer was lost")

    line.on_commit = [lost]
    assert sublet.run_step(lease=mine, **asked) == sublet.Duplicate(1, b"\x07")
    assert isinstance(done[0], sublet.Completed)


def test_a_head_moved_by_somebody_else_ends_the_run(line: Line) -> None:
    """Whoever does not own the head does not go on: its next save could not be a continuation."""
    lease = sublet.gpu(vram="1GiB", ttl="1m", holder="name").acquire()
    run = begun(every=1, lease=lease)
    with pytest.raises(sublet.HeadMoved, match="somebody else moved job job beyond step 1"):
        for step in run.steps(5):
            if step.number == 2:
                wait_until(lambda: run._saves.under_way is not None and run._saves.under_way.saving.done)
                list(begun(every=1, lease=lease).steps(2))  # the same holder: the reservation is its own
    assert run.step <= 3
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_duplicate_commit_is_somebody_elses(line: Line) -> None:
    """It was not this state that became true."""
    line.on_commit = [lambda key, commit: effects.AlreadyCommitted(7, "")]
    run = begun(every=1)
    with pytest.raises(sublet.HeadMoved, match="version 7"):
        list(run.steps(1))
    assert run.committed == 0


def test_a_lease_that_ended_begins_no_step(lease: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = begun(lease=lease)
    seen = []
    ending = LeaseLost("it has ended")
    with pytest.raises(LeaseLost, match="it has ended"):
        for step in run.steps(5):
            seen.append(step.number)
            if step.number == 2:
                monkeypatch.setattr(lease, "check", lambda: (_ for _ in ()).throw(ending))
    assert seen == [1, 2]
    assert committed_step() == 0


def test_a_pause_between_saves_that_fail(sqlite_home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def refuse(*_: Any) -> Any:
        tried.append(1)
        raise sublet.QuorumNotReached("replica A is on holiday")

    monkeypatch.setattr(saves, "RETRY_US", 60_000_000)
    run = begun(every=1)
    with monkeypatch.context() as broken:
        broken.setattr(CheckpointStore, "_store_chunks", refuse)
        for step in run.steps(20):
            time.sleep(0.01)
            if step.number == 20:
                assert len(tried) == 1
                break


# --- warnings at odd moments ---------------------------------------------------------------------------------


def test_a_warning_while_the_last_save_is_tried_again(sqlite_home: Home, tmp_path: Path) -> None:
    """All steps are done and nothing can be saved: told to leave, it leaves, with exit code 85."""

    def work() -> None:
        run = begun(every=1000)
        for _ in run.steps(3):
            pass

    def failing_work() -> None:
        def refuse(*_: Any) -> Any:
            (tmp_path / "tried").touch()
            raise sublet.QuorumNotReached("replica A is on holiday")

        CheckpointStore._store_chunks = refuse  # type: ignore[method-assign]
        work()

    pid = forked(failing_work)
    until(pid, (tmp_path / "tried").exists)
    tell(pid, signal.SIGTERM)
    assert ended(pid, 20) == 85
    assert committed_step() == 0
    assert run_to_end(work) == 0
    assert committed_step() == 3


def test_a_warning_while_a_predecessor_is_waited_for(sqlite_home: Home, tmp_path: Path) -> None:
    """It leaves at once, and does not ask the ledger a thousand times first."""
    lease = sublet.gpu(vram="1GiB", ttl="1m", holder="name").acquire()
    run = begun(lease=lease)

    def work() -> None:
        single_runner.PREDECESSOR_US = 30_000_000
        ledger = open_ledger(sqlite_home.settings)
        real = ledger.effect

        def effect(key: str) -> Any:
            (tmp_path / "asked").touch()
            return real(key)

        ledger.effect = effect  # type: ignore[method-assign]
        begun()

    pid = forked(work)
    until(pid, (tmp_path / "asked").exists)
    tell(pid, signal.SIGTERM)
    assert ended(pid, 20) == 85
    run.close()


def test_a_warning_while_the_save_before_is_waited_for(
    sqlite_home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that hangs: it is said that the run leaves, and why, before anybody kills it."""
    go_on = threading.Event()
    real, plan = CheckpointStore._store_chunks, saves.Saves.plan
    in_time: list[bool] = []

    def hanging(*args: Any) -> Any:
        go_on.wait(20)
        return real(*args)

    def planned(*args: Any) -> Any:
        in_time.append(not go_on.is_set())
        go_on.set()
        return plan(*args)

    monkeypatch.setattr(CheckpointStore, "_store_chunks", hanging)
    monkeypatch.setattr(saves.Saves, "plan", planned)
    run = begun(every=1)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    threading.Timer(5, go_on.set).start()
    for _ in run.steps(5, on_notice="stop"):
        pass
    assert in_time == [True]
    assert run.preempted
    assert run.committed == run.step == 2


@pytest.mark.parametrize("error", [LeaseLost("it has ended"), Fenced("a newer holder owns this")])
def test_a_lease_lost_while_leaving_does_not_change_how_it_leaves(
    sqlite_home: Home, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    run = begun()
    with pytest.raises(sublet.Preempted) as left:
        for step in run.steps(5):
            if step.number == 2:
                monkeypatch.setattr(CheckpointStore, "save", lambda *_, **__: (_ for _ in ()).throw(error))
                os.kill(os.getpid(), signal.SIGTERM)
                wait_until(lambda: run.should_stop)
    assert left.value.code == 85
    assert str(error) in left.value.plan
    assert left.value.committed == 0
    run.close()


def test_interrupted_while_a_save_is_waited_for(sqlite_home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second Ctrl-C: the save that was under way is still waited for, and counted."""
    run = begun(every=2)
    real = CheckpointStore.settle
    interrupts = [KeyboardInterrupt()]

    def settle(store: CheckpointStore) -> None:
        if store._behind is not None and interrupts:
            raise interrupts.pop()
        real(store)

    monkeypatch.setattr(CheckpointStore, "settle", settle)
    with pytest.raises(KeyboardInterrupt):
        for _ in run.steps(5):
            time.sleep(0.05)
    assert run.committed >= 2
    assert holds_lease("job") == ""


# --- loops used in ways nobody meant -------------------------------------------------------------------------


def test_two_loops_made_before_either_began(sqlite_home: Home) -> None:
    run = begun()
    with pytest.raises(sublet.BadInput, match="one loop at a time"):
        for _ in zip(run.steps(3), run.steps(3), strict=True):
            pass
    run = begun()
    loop = run.steps(3)
    run.close()
    with pytest.raises(sublet.BadInput, match="over"):
        next(loop)


def test_closed_in_the_middle_of_a_step(lease: Any) -> None:
    """The loop ends there, although the lease is somebody else's and goes on."""
    run = begun(lease=lease)
    seen = []
    for step in run.steps(5):
        seen.append(step.number)
        if step.number == 3:
            run.close()
    assert seen == [1, 2, 3]
    assert run.committed == 0
    assert committed_step() == 0


def test_a_state_that_was_left_in_the_middle_cannot_be_saved(lease: Any) -> None:
    state = {"x": 0}
    with sublet.checkpoints() as store:
        run = begun(state=state, lease=lease, store=store)
        for step in run.steps(5):
            state["x"] += 1
            if step.number == 3:
                break
        with pytest.raises(sublet.BadInput, match="over"):
            run.save()
    assert committed_step() == 0


def test_saving_after_the_end_is_nothing(sqlite_home: Home) -> None:
    run = begun()
    run.save()
    assert list(run.steps(0)) == []
    run.save()
    assert run.version == 0


def test_fewer_steps_than_there_are(sqlite_home: Home) -> None:
    list(begun().steps(4))
    run = begun()
    assert list(run.steps(2)) == []
    assert (run.step, run.committed) == (4, 4)


@pytest.mark.parametrize("child_goes_on", [False, True])
def test_a_forked_child_is_not_the_runner(sqlite_home: Home, tmp_path: Path, child_goes_on: bool) -> None:
    """Unwound, or running on into the next step: it says nothing, saves nothing and gives nothing back."""

    def work() -> None:
        state = {"x": 0}
        sys.stderr = (tmp_path / "said").open("a", buffering=1)
        run = begun(state=state, every=1, progress=True)
        mother = os.getpid()
        try:
            for step in run.steps(6):
                state["x"] += 1
                time.sleep(0.02)
                if step.number == 3:
                    pid = os.fork()
                    if not pid and not child_goes_on:
                        raise SystemExit(3)
                    if pid and ended(pid) != (4 if child_goes_on else 3):
                        os._exit(9)
        except LeaseLost as lost:
            os._exit(4 if os.getpid() != mother and "forked child" in lost.message else 5)

    assert run_to_end(work) == 0
    left = left_of("job")
    assert left.spans[-1][1] == 6
    assert left.state["state"] == {"x": 6}
    said = (tmp_path / "said").read_text()
    assert "done at step 6" in said
    assert "left in the middle" not in said


def test_in_a_thread_and_inside_each_other(lease: Any) -> None:
    outer = begun("outer", lease=lease)
    found: list[int] = []

    def inner(job: str) -> None:
        run = begun(job, lease=lease)
        for _ in run.steps(2):
            pass
        found.append(run.committed)

    for _ in outer.steps(2):
        inner("inner")
        thread = threading.Thread(target=inner, args=("thread",))
        thread.start()
        thread.join()
    assert found == [2] * 4
    assert outer.committed == 2
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_resume_that_fails_gives_everything_back(
    sqlite_home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    list(begun(state={"x": 0}).steps(1))
    closed = []
    real = CheckpointStore.close
    monkeypatch.setattr(CheckpointStore, "close", lambda store: (closed.append(store), real(store))[1])
    with pytest.raises(sublet.BadInput, match="same parts"):
        begun(state={"y": 0})
    assert len(closed) == 1
    assert holds_lease("job") == ""
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_steps_cost_microseconds_and_leave_nothing_behind(sqlite_home: Home) -> None:
    run = begun(every="auto")
    before: tuple[int, float] = (0, 0.0)
    for step in run.steps(6_000):
        step.log(loss=0.5)
        if step.number == 2_000:
            tracemalloc.start()
        if step.number == 4_000:
            before = (tracemalloc.get_traced_memory()[0], time.thread_time())
            tracemalloc.stop()
    assert before[0] < 500_000
    assert (time.thread_time() - before[1]) / 2_000 < 0.005


# --- effects -------------------------------------------------------------------------------------------------


def test_an_effect_outside_its_step_is_refused_before_it_is_done(lease: Any) -> None:
    called: list[str] = []
    run = begun(lease=lease)
    kept: list[Any] = []
    for step in run.steps(2):
        kept.append(step)
        if step.number == 2:
            with pytest.raises(sublet.BadInput, match="step 1 is over"):
                kept[0].effect("late", called.append)
    with pytest.raises(sublet.BadInput, match="step 2 is over"):
        kept[1].effect("later", called.append)
    assert called == []
    assert left_of("job", "job#late", "job#later").effects == {}


def test_an_effect_that_is_committed_is_not_done_again(lease: Any) -> None:
    """Asked for by a run that has not seen the commit: the stored result, and no call."""
    called: list[str] = []
    behind = begun(lease=lease)
    for run in (begun(lease=lease), behind):
        for step in run.steps(1):
            assert step.effect("mail", lambda key: called.append(key) or "sent") == "sent"
            if run is behind:
                break
    assert called == ["job#mail"]


def test_more_effects_than_a_commit_takes(sqlite_home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many of them are committed sooner than the cadence says; too many in one step are refused before they are done."""
    for module in (effects, saves):
        monkeypatch.setattr(module, "MOST_EFFECTS", 8)
    monkeypatch.setattr(saves, "_MANY_EFFECTS", 4)
    run = begun()
    done = 0
    for step in run.steps(8):
        for n in range(3):
            step.record(f"{step.number}-{n}", n)
            done += 1
        if step.number == 8:
            with pytest.raises(sublet.BadInput, match="waiting for one commit"):
                for n in range(3, 20):
                    step.record(f"8-{n}", n)
                    done += 1
    assert run.committed == 8
    found = left_of("job", *[f"job#{s}-{n}" for s in range(1, 9) for n in range(20)]).effects
    assert len(found) == done
    assert all(e.completed for e in found.values())


def test_what_a_function_gets_and_gives(sqlite_home: Home) -> None:
    got: dict[str, Any] = {}
    run = begun()
    for step in run.steps(1):
        got["default"] = step.effect("a", lambda n=5: n)
        got["key"] = step.effect("b", lambda key: key)
        got["builtin"] = step.effect("c", dict)
        got["alike"] = step.effect("d", lambda: {1: (2, 3)})
        got["keyword"] = step.effect("e", lambda **more: sorted(more))
        with pytest.raises(sublet.BadInput, match=r"'f' returned cannot be stored: .*64 KiB"):
            step.effect("f", lambda: "x" * 70_000)
    assert got == {"default": 5, "key": "job#b", "builtin": {}, "alike": {"1": [2, 3]}, "keyword": []}
    assert json.loads(left_of("job", "job#d").effects["job#d"].outcome) == got["alike"]


def test_no_two_jobs_have_a_key_in_common(lease: Any) -> None:
    """Names may have ':' and '/' in them: steps, effects and reservations of one job are not those of another."""
    for job, key in (("a", "b:1"), ("a/b", "c"), ("a", "b/c"), ("train", "5"), ("5", "x"), ("train:5", "x")):
        run = begun(job, lease=lease, every=1)
        for step in run.steps(run.committed + 6):
            if step.number == run.resumed_at + 1:
                assert step.effect(key, lambda job=job: job) == job
    assert open_ledger(sublet.settings.load_settings()).verify().faults == ()


# --- what is logged and shown --------------------------------------------------------------------------------


def test_what_was_logged_does_not_keep_a_graph_alive(sqlite_home: Home) -> None:
    torch = pytest.importorskip("torch")
    run = begun()
    for step in run.steps(1):
        step.log(loss=(torch.ones(10, requires_grad=True) * 2).sum())
        assert run._log._values["loss"].grad_fn is None
    assert run._log.numbers() == {"loss": 20.0}


def test_whatever_is_logged_is_no_reason_not_to_commit(sqlite_home: Home) -> None:
    class Odd:
        cursor: ClassVar[dict[str, Any]] = {"at": {1, 2}}

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, saved: Any) -> None: ...

    class Places(Odd):
        cursor: ClassVar[dict[str, Any]] = {"epoch": 3}

    run = begun(state={"odd": Odd(), "data": Places()})
    for step in run.steps(1):
        step.log(first=1.5, huge=10**400, **{f"number-{n}": n for n in range(10_000)})
    assert run.committed == 1
    left = left_of("job", "job:1")
    log = json.loads(left.effects["job:1"].outcome)["log"]
    assert log["first"] == 1.5
    assert log["huge"] == "inf"
    assert 500 < len(log) < 10_000
    assert left.head is not None
    assert json.loads(left.head.cursor) == {"data": {"epoch": 3}}


def test_nobody_there_to_show_it_to(sqlite_home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    closed = os.fdopen(writing, "w")
    closed.close()
    os.close(reading)

    class NoTerminal:
        written = ""

        def write(self, text: str) -> None:
            self.written += text

        def flush(self) -> None: ...

    plain = NoTerminal()
    for stream in (closed, None, plain):
        monkeypatch.setattr(sys, "stderr", stream)
        run = begun(progress=True)
        assert len(list(run.steps(run.committed + 2))) == 2
    assert "done at step 6" in plain.written


def test_leaving_the_waitlist_without_a_stream(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from sublet.core.notice import Notice

    class Told:
        notice = Notice(source="signal", reason="SIGTERM", deadline_us=0)

    monkeypatch.setattr(sys, "stderr", None)
    with pytest.raises(sublet.Preempted):
        leave_the_waitlist(Told(), "job")  # type: ignore[arg-type]
    assert capsys.readouterr().out == ""


def test_the_bar_ends_where_it_ends() -> None:
    import io

    out = io.StringIO()
    ProgressLine(out, "job").show(
        0,
        step=10,
        total=5,
        committed=10,
        committed_ago_us=None,
        steps_per_s=1.0,
        goodput=1.0,
        lease_s=1.0,
        log={},
    )
    assert f"[{'#' * 16}] 10/5" in out.getvalue()


@pytest.mark.parametrize("every", [2, 1000])
def test_a_lease_that_ended_behind_the_runs_back_is_a_lease_that_is_lost(
    sqlite_home: Home, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    """S2: the ledger knew before this process did, and refused the commit of what was saved."""

    def refused(*_: Any, **__: Any) -> None:
        raise Fenced("the write was refused and changed nothing: the lease was revoked and its grace is over")

    run = begun(every=every)
    with pytest.raises(LeaseLost, match="the lease of this run has ended: ") as lost:
        for step in run.steps(6):
            if step.number == 3:
                run._saves.collect()
                monkeypatch.setattr(SqlLedger, "commit", refused)
    assert isinstance(lost.value.__cause__, Fenced)
    run.close()
