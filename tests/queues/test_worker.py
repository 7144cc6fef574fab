"""A worker under fire: whatever raises, dies, is taken or is down, each item is completed, failed by its own fault, or given back at once."""

from __future__ import annotations

import io
import itertools
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import sublet
from sublet import wiring
from sublet.core.errors import BadInput, BrokerDown, Disconnected, NotFound, SinkDown, WorkerLost
from sublet.core.leasing.lease import EndReason, LeaseState
from sublet.core.leasing.options import GpuOptions
from sublet.core.notice import Notice
from sublet.core.queues.items import ItemState
from sublet.core.runs.exits import Outcome
from sublet.core.values import SECOND_US
from sublet.leases.lease import Lease
from sublet.leases.progress_line import WorkLine
from sublet.notice_bus.bus import NoticeBus
from sublet.ports.broker import BrokerMessage
from sublet.ports.items import ItemRecord
from sublet.ports.sink import Made
from sublet.processes.worker import target
from sublet.processes.worker.target import TargetNotReady
from sublet.queues import build_worker
from sublet.queues.queue import Queue
from sublet.queues.tally import WorkerExit
from sublet.queues.worker import QueueWorker
from tests.homes import Home, close_home, make_home, wait_until
from tests.queues.work_targets import HERE

_numbers = itertools.count()


@pytest.fixture(scope="module")
def shared_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("work")
        made = make_home(path, f"sqlite:{path}/home/ledger.db", patch, "host:1x16GiB")
        yield made
        close_home(made)


@dataclass
class Bench:
    """One queue with a worker at it."""

    home: Home
    path: Path
    name: str = field(default_factory=lambda: f"q{next(_numbers)}")
    options: dict[str, Any] = field(default_factory=dict)
    said: io.StringIO = field(default_factory=io.StringIO)
    work: QueueWorker | None = None
    left: WorkerExit | None = None
    error: BaseException | None = None
    thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        self.notice_bus = NoticeBus(wiring.CLOCK, (), grace_us=15 * SECOND_US, signals=()).__enter__()
        self.ledger = wiring.open_ledger(self.home.settings)
        self.log = self.path / f"{self.name}.log"

    def queue(self, name: str = "", **terms: Any) -> Queue:
        return sublet.queue(name or self.name, **({"backoff": "10ms"} | terms))

    def publish(self, *does: str, name: str = "", **terms: Any) -> list[int]:
        """An item for each, and their numbers in the ledger."""
        queue = self.queue(name, **terms)
        known = {item.id for state in ItemState for item in self.of(state, name)}
        queue.publish({"n": n, "do": do, "log": str(self.log)} for n, do in enumerate(does))
        return sorted({item.id for state in ItemState for item in self.of(state, name)} - known)

    def of(self, state: ItemState, name: str = "") -> list[ItemRecord]:
        try:
            record = self.ledger.queue(self.home.settings["tenant"], name or self.name)
        except NotFound:
            return []
        return self.ledger.items(record.id, state)

    def item(self, number: int) -> ItemRecord:
        return self.queue().item(number)

    def prepare(self, name: str, **wish: Any) -> QueueWorker:
        target = name if ":" in name else f"{HERE}:{name}"
        given = {"queues": self.name, "target": target, "until_empty": True} | wish
        prepared = build_worker.prepare(build_worker.WorkOptions(**given), sublet.settings.load_settings())
        self.work = build_worker.worker(prepared, self.notice_bus, WorkLine(self.said, self.name))
        return self.work

    def go(self, name: str, **wish: Any) -> WorkerExit:
        return self.prepare(name, **wish).go()

    def start(
        self, name: str, change: Callable[[QueueWorker], None] = lambda work: None, **wish: Any
    ) -> None:
        work = self.prepare(name, **wish)
        change(work)

        def run() -> None:
            try:
                self.left = work.go()
            except BaseException as e:
                self.error = e

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def wait(self, seconds: float = 40) -> WorkerExit:
        assert self.thread is not None
        self.thread.join(seconds)
        assert not self.thread.is_alive(), self.said.getvalue()
        if self.error is not None:
            raise self.error
        assert self.left is not None
        return self.left

    def notes(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def wait_for(self, note: str) -> None:
        wait_until(lambda: any(line.startswith(note) for line in self.notes()), 30)

    def tell(self, seconds: float) -> None:
        deadline = wiring.CLOCK.monotonic_us() + round(seconds * SECOND_US)
        self.notice_bus.raise_notice(
            Notice(source="cloud", reason="the VM is reclaimed", deadline_us=deadline)
        )

    def leases(self) -> list[str]:
        return [a.lease.id for a in self.ledger.leases() if a.lease.state is not LeaseState.ENDED]

    def revoke(self, grace_us: int) -> None:
        (lease,) = self.leases()
        self.ledger.revoke(
            lease, reason=EndReason.REVOKED, detail="a test wants it", grace_us=grace_us, actor="test"
        )

    def close(self) -> None:
        self.tell(0)
        if self.thread is not None:
            self.thread.join(20)
        self.notice_bus.close()
        wait_until(lambda: not self.leases())


@pytest.fixture
def bench(shared_home: Home, tmp_path: Path) -> Iterator[Bench]:
    made = Bench(shared_home, tmp_path)
    yield made
    made.close()


def results(items: Sequence[ItemRecord]) -> list[str]:
    return [item.result for item in items]


# --- what it does --------------------------------------------------------------------------------------------


def test_a_function_gets_one_item_at_a_time(bench: Bench) -> None:
    bench.publish(*[""] * 3)
    left = bench.go("work")
    assert (left.outcome, left.exit_code, left.tally.done, left.tally.leases) == (Outcome.DONE, 0, 3, 1)
    done = bench.of(ItemState.DONE)
    assert results(done) == ["0", "2", "4"]
    assert [item.delivery for item in done] == [1, 1, 1]
    assert all(item.work_us > 0 for item in done)
    assert {line.split()[2] for line in bench.notes() if line.startswith("begin")} == {"2"}, (
        "one worker process"
    )
    assert not bench.leases()


def test_a_class_is_set_up_once_and_batches_are_lists(bench: Bench) -> None:
    bench.publish(*[""] * 7)
    left = bench.go("Model", batch=3)
    assert left.tally.done == 7
    said = [line for line in bench.notes() if not line.startswith(("begin", "end"))]
    assert said == ["made", "setup", "batch [0, 1, 2]", "batch [3, 4, 5]", "batch [6]", "teardown"]


def test_setup_and_teardown_may_be_missing_and_a_teardown_that_fails_costs_nothing(bench: Bench) -> None:
    bench.publish("", "")
    assert bench.go("BadTeardown").exit_code == 0
    assert len(bench.of(ItemState.DONE)) == 2
    assert "RuntimeError: no way down" in bench.said.getvalue()


def test_a_generator_of_results_is_as_good_as_a_list(bench: Bench) -> None:
    bench.publish("", "")
    assert bench.go("as_generator", batch=5).tally.done == 2


@pytest.mark.parametrize(
    ("target", "said"), [("short", "it returned 0 for 1"), ("no_list", "it returned dict for 1")]
)
def test_a_batch_with_other_than_as_many_results_fails_and_says_so(
    bench: Bench, target: str, said: str
) -> None:
    bench.publish("", "", tries=1)
    left = bench.go(target, batch=2)
    assert (left.tally.failed, left.tally.dead, left.tally.done) == (2, 2, 0)
    for item in bench.of(ItemState.DEAD):
        assert said in item.error
        assert "as many results as it was given items" in item.error


def test_queues_are_served_in_turn(bench: Bench) -> None:
    """A queue with much to do gets no more than its turn while another has some."""
    other = f"{bench.name}-b"
    bench.publish(*["many"] * 5)
    bench.publish(*["few"] * 2, name=other)
    order: list[str] = []
    work = bench.prepare("work", queues=f"{bench.name},{other}")
    for queue in work.queues.values():
        taken = queue.take

        def take(*args: Any, name: str = queue.name, taken: Any = taken, **options: Any) -> Any:
            items = taken(*args, **options)
            order.extend(name for _ in items)
            return items

        queue.take = take  # type: ignore[method-assign]
    assert work.go().tally.done == 7
    a, b = bench.name, other
    assert order == [a, b, a, b, a, a, a]


def test_until_empty_waits_for_what_others_have(bench: Bench) -> None:
    bench.publish("", "", "")
    (held,) = bench.queue().take(1)
    bench.start("work")
    wait_until(lambda: len(bench.of(ItemState.DONE)) == 2, 30)
    assert bench.work is not None
    wait_until(lambda: bench.work.bell is not None)  # type: ignore[union-attr]  # it saw that there is no more to be had
    held.nack()
    assert bench.wait().tally.done == 3


def test_until_empty_sees_what_is_given_back_while_it_looks(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing ready, then nothing with anybody: true at two moments, and an item is left."""
    bench.publish("", "")
    (held,) = bench.queue().take(1)
    work = bench.prepare("work")
    (queue,) = work.queues.values()
    peek = queue.peek

    def looking(most: int, *, state: ItemState) -> list[ItemRecord]:
        seen = peek(most, state=state)
        if state is ItemState.DELAYED and not held.over and not peek(1):
            held.nack()
        return seen

    monkeypatch.setattr(queue, "peek", looking)
    assert work.go().tally.done == 2


def test_until_empty_waits_for_what_is_delayed(bench: Bench) -> None:
    bench.publish("")
    bench.queue().publish({"n": 1, "log": str(bench.log)}, delay=1)
    assert bench.go("work").tally.done == 2


def test_it_leaves_after_so_many_items(bench: Bench) -> None:
    bench.publish(*[""] * 5)
    left = bench.go("batch", batch=2, most=3)
    assert (left.exit_code, left.tally.done, left.reason) == (0, 3, "3 items were worked on")
    assert len(bench.of(ItemState.READY)) == 2


def test_it_leaves_when_idle_and_leases_nothing_for_an_empty_queue(bench: Bench) -> None:
    bench.queue().publish([])
    bench.ledger.open_queue(bench.home.settings["tenant"], bench.name, None)
    left = bench.go("work", until_empty=False, idle="300ms")
    assert (left.exit_code, left.tally.leases) == (0, 0)
    assert "nothing to do for" in left.reason


def test_an_idle_gpu_is_given_back_and_leased_again_when_there_is_work(bench: Bench) -> None:
    bench.publish("")
    bench.start("Model", batch=1, until_empty=False, rest_us=SECOND_US // 5)
    wait_until(lambda: "the GPU is given back" in bench.said.getvalue() and not bench.leases(), 30)
    bench.publish("")
    wait_until(lambda: len(bench.of(ItemState.DONE)) == 2, 30)
    bench.tell(15)
    assert bench.wait().tally.leases == 2
    assert [line for line in bench.notes() if line in ("setup", "teardown")] == ["setup", "teardown"] * 2


def test_disabled_it_is_a_plain_call_in_this_process(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBLET_DISABLE", "1")
    bench.publish("", "raise", "", tries=2)
    left = bench.go("Model", batch=3)
    assert (left.tally.done, left.tally.dead, left.tally.leases) == (2, 1, 0)
    assert f"begin 0 {os.getpid()}" in bench.notes()
    assert bench.notes()[-1] == "teardown"


# --- what fails ----------------------------------------------------------------------------------------------


def test_only_the_poisonous_item_of_a_batch_fails(bench: Bench) -> None:
    numbers = bench.publish("", "", "raise", "", tries=3)
    left = bench.go("Model", batch=4)
    assert (left.tally.done, left.tally.failed, left.tally.dead) == (3, 3, 1)
    done = bench.of(ItemState.DONE)
    assert [item.id for item in done] == [n for n in numbers if n != numbers[2]]
    assert [item.delivery for item in done] == [1, 1, 1], "the others were not handed out again"
    assert [item.failures for item in done] == [0, 0, 0]
    (dead,) = bench.of(ItemState.DEAD)
    assert (dead.id, dead.failures, dead.losses) == (numbers[2], 3, 0)
    assert "work_targets.py" in dead.error
    assert "in batch" in dead.error
    assert dead.error.rstrip().endswith("ValueError: poison 2")
    assert "target.py" not in dead.error.replace("work_targets.py", ""), "our own frames are not shown"


def test_what_failed_once_is_tried_again_later(bench: Bench) -> None:
    (number,) = bench.publish("raise once")
    left = bench.go("work")
    assert (left.tally.done, left.tally.failed, left.tally.dead) == (1, 1, 0)
    item = bench.item(number)
    assert (item.state, item.failures, item.delivery, item.error) == (ItemState.DONE, 1, 2, "")


def test_sys_exit_in_an_item_is_its_failure_and_not_the_end(bench: Bench) -> None:
    bench.publish("exit", "", tries=1)
    left = bench.go("work")
    assert (left.tally.done, left.tally.dead, left.tally.lost_workers) == (1, 1, 0)
    assert "SystemExit: 4" in bench.of(ItemState.DEAD)[0].error


@pytest.mark.parametrize("do", ["cancel", "interrupt", "not to be pickled"])
def test_what_is_no_exception_is_the_items_failure_too(bench: Bench, do: str) -> None:
    """Otherwise it ends every worker that comes to it, and counts as nobody's failure."""
    bench.publish("", do, "", tries=1)
    left = bench.go("batch", batch=3)
    assert (left.tally.done, left.tally.dead, left.tally.lost_workers) == (2, 1, 0)
    assert "poison" in bench.of(ItemState.DEAD)[0].error


def test_what_is_no_exception_is_a_failure_in_this_process_too(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUBLET_DISABLE", "1")
    bench.publish("cancel", "", tries=1)
    left = bench.go("work")
    assert (left.tally.done, left.tally.dead) == (1, 1)
    bench.publish("interrupt", tries=1)
    with pytest.raises(KeyboardInterrupt):  # there it is the Ctrl-C of whoever sits here
        bench.go("work")
    assert len(bench.of(ItemState.READY)) == 1


@pytest.mark.parametrize(
    ("do", "said"),
    [("segfault", "it ended the worker: signal 11"), ("leave", "it ended the worker: exited with code 3")],
)
def test_only_the_item_that_ends_the_worker_fails(bench: Bench, do: str, said: str) -> None:
    numbers = bench.publish("", do, "", tries=1)
    left = bench.go("batch", batch=3)
    assert (left.tally.done, left.tally.failed, left.tally.dead) == (2, 1, 1)
    assert (left.tally.lost_workers, left.tally.leases) == (2, 3), bench.said.getvalue()
    (dead,) = bench.of(ItemState.DEAD)
    assert (dead.id, dead.error, dead.losses) == (numbers[1], said, 0)
    assert [item.delivery for item in bench.of(ItemState.DONE)] == [1, 1]


def test_an_item_that_ends_the_worker_alone_fails_at_once(bench: Bench) -> None:
    bench.publish("leave", "", tries=1)
    left = bench.go("work")
    assert (left.tally.done, left.tally.dead, left.tally.lost_workers) == (1, 1, 1)


def test_a_lost_host_is_no_items_failure(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The item was alone on the worker when its node went: it is given back, and worked on under another lease."""
    losses = iter([WorkerLost("the worker ended: its node was lost", with_host=True)])
    plain = Lease.run

    def run(lease: Lease, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if function is target.process and (lost := next(losses, None)) is not None:
            raise lost
        return plain(lease, function, *args, **kwargs)

    monkeypatch.setattr(Lease, "run", run)
    bench.publish("", "", tries=1)
    left = bench.go("work")
    assert (left.tally.done, left.tally.failed, left.tally.given_back) == (2, 0, 1), bench.said.getvalue()
    assert (left.tally.lost_leases, left.tally.lost_workers, left.tally.leases) == (1, 0, 2)


@pytest.mark.parametrize(
    ("do", "said"), [("set", "NotJson: the result"), ("large", "TooLarge: the result has 2")]
)
def test_a_result_that_cannot_be_stored_fails_its_item_only(bench: Bench, do: str, said: str) -> None:
    numbers = bench.publish("", do, "", tries=1)
    left = bench.go("batch", batch=3)
    assert (left.tally.done, left.tally.failed) == (2, 1)
    (dead,) = bench.of(ItemState.DEAD)
    assert dead.id == numbers[1]
    assert dead.error.startswith(said)
    assert [line for line in bench.notes() if line.startswith("batch")] == ["batch [0, 1, 2]"], (
        "worked on once"
    )


def test_a_result_that_comes_too_late_is_refused_and_counted(bench: Bench) -> None:
    bench.publish("slowly")
    bench.start("work")
    bench.wait_for("begin 0")
    (consumer,) = bench.queue().workers()
    bench.ledger.end_consumer(consumer.id)
    other = bench.queue()
    (stolen,) = other.take(1)
    wait_until(lambda: bench.work is not None and bench.work.tally.refused == 1, 30)
    stolen.complete("mine")
    left = bench.wait()
    assert (left.tally.done, left.tally.refused, left.exit_code) == (0, 1, 0)
    assert results(bench.of(ItemState.DONE)) == ['"mine"']


# --- what cannot be loaded -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("BadSetup", "in load_weights"),
        ("DeadlySetup", "ended the worker: signal 11"),
        ("NoProcess", "has no method process"),
        ("later", "is async"),
        ("NUMBER", "neither a function nor a class"),
        ("missing", "has no missing"),
    ],
)
def test_a_target_that_cannot_be_loaded_touches_no_item(bench: Bench, name: str, said: str) -> None:
    bench.publish("", "")
    with pytest.raises(TargetNotReady, match="no item was touched") as e:
        bench.go(name)
    assert said in e.value.message
    assert [(item.failures, item.losses) for item in bench.of(ItemState.READY)] == [(0, 0), (0, 0)]
    assert not bench.leases()


def test_an_import_that_raises_is_told_with_its_traceback(bench: Bench) -> None:
    bench.publish("")
    file = bench.path / "random.py"  # a name that is taken
    file.write_text("import random\nassert random.__file__ != __file__\nprobability = 1 / 0\n")
    with pytest.raises(TargetNotReady) as e:
        bench.go(f"{file}:work")
    assert "ZeroDivisionError" in e.value.message
    assert "probability = 1 / 0" in e.value.message
    assert len(bench.of(ItemState.READY)) == 1


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nothing", "does not name a function"),
        (":work", "does not name a function"),
        ("a b:work", "not the name of a module"),
        ("no_such_module_at_all:work", "there is no module"),
        ("/nowhere/file.py:work", "there is no file"),
        ("json:dumps()", "does not name a function"),
    ],
)
def test_what_can_be_told_without_a_gpu_is_told_before(bench: Bench, target: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        build_worker.prepare(build_worker.WorkOptions(queues="q", target=target), bench.home.settings)


def test_a_queue_that_is_not_there(bench: Bench) -> None:
    with pytest.raises(NotFound, match="no queue"):
        bench.go("work")
    assert not bench.leases()


def test_a_gpu_that_can_never_be_had(bench: Bench) -> None:
    (number,) = bench.publish("")
    left = bench.go("work", gpu=GpuOptions(vram="64GiB", tier="batch"))
    assert (left.outcome, left.exit_code) == (Outcome.NO_LEASE, 75)
    assert bench.item(number).state is ItemState.READY


# --- what is taken away --------------------------------------------------------------------------------------


def test_who_must_wait_for_a_gpu_holds_no_items(bench: Bench) -> None:
    (number,) = bench.publish("")
    with sublet.gpu("10GiB", holder="name"):
        bench.start("work", gpu=GpuOptions(vram="10GiB", tier="batch"))
        wait_until(lambda: "waiting for a GPU" in bench.said.getvalue(), 30)
        wait_until(lambda: bench.item(number).state is ItemState.READY)
    assert bench.wait().tally.done == 1


def test_a_revoked_lease_gives_its_items_back_at_once_and_another_goes_on(bench: Bench) -> None:
    numbers = bench.publish("hang once", "", "")
    bench.start("Model", batch=2, visibility="10m")
    bench.wait_for("begin 0")
    bench.revoke(grace_us=0)
    left = bench.wait()
    assert (left.tally.done, left.tally.failed, left.tally.lost_leases, left.tally.leases) == (3, 0, 1, 2)
    items = [bench.item(number) for number in numbers]
    assert [(i.delivery, i.failures, i.losses) for i in items] == [(2, 0, 0), (2, 0, 0), (1, 0, 0)]
    assert [line for line in bench.notes() if line == "setup"] == ["setup"] * 2


def test_a_lease_that_is_just_enough_is_leased_again_at_once(bench: Bench) -> None:
    """Who asks before its old slice is free stands in its own way."""
    bench.publish("leave", "", tries=1)
    with sublet.gpu("16GiB", holder="name"):
        pass  # everything before this test is settled
    left = bench.go("work", gpu=GpuOptions(vram="16GiB", tier="batch", wait="0"))
    assert (left.exit_code, left.tally.done, left.tally.dead, left.tally.leases) == (0, 1, 1, 2)


def test_results_are_fenced_by_the_lease_they_were_made_under(bench: Bench) -> None:
    """S2: what is acknowledged names its lease, whose row the same transaction has checked."""
    bench.publish("slowly")
    bench.start("work")
    bench.wait_for("begin 0")
    (lease,) = bench.leases()
    bench.wait()
    told = [e for _, e in bench.ledger.tail(limit=100) if e.kind == "items.completed"]
    assert json.loads(told[-1].body)["lease"] == lease


def test_a_batch_that_can_finish_in_the_grace_of_a_revoke_does(bench: Bench) -> None:
    (first, second) = bench.publish("slowly", "")
    bench.start("work")
    bench.wait_for("begin 0")
    bench.revoke(grace_us=10 * SECOND_US)
    left = bench.wait()
    assert (left.tally.done, left.tally.leases) == (2, 2)
    assert bench.item(first).delivery == 1
    assert bench.item(second).delivery == 1


def test_told_to_leave_the_batch_that_runs_finishes_and_the_rest_stays(bench: Bench) -> None:
    bench.publish("slowly", "", "")
    bench.start("Model", batch=1)
    bench.wait_for("begin 0")
    bench.tell(20)
    left = bench.wait()
    assert (left.outcome, left.exit_code, left.tally.done) == (Outcome.PREEMPTED, 85, 1)
    assert len(bench.of(ItemState.READY)) == 2
    assert bench.notes()[-1] == "teardown"


def test_told_to_leave_what_cannot_finish_is_ready_again_at_once(bench: Bench) -> None:
    numbers = bench.publish("hang", "", "")
    bench.start("Model", batch=2, visibility="10m", profile="k8s")
    bench.wait_for("begin 0")
    begun = wiring.CLOCK.monotonic_us()
    bench.tell(1)
    left = bench.wait()
    assert (left.outcome, left.exit_code, left.tally.given_back) == (Outcome.PREEMPTED, 143, 2)
    ready = bench.of(ItemState.READY)
    assert [item.id for item in ready] == numbers, "each at its old place"
    assert [(item.failures, item.losses) for item in ready] == [(0, 0)] * 3
    assert wiring.CLOCK.monotonic_us() - begun < 60 * SECOND_US
    assert not bench.leases()


def test_a_batch_that_never_makes_it_in_time_is_ended_at_once(bench: Bench) -> None:
    """Measured before: such a batch takes longer than is left, so its items are somebody else's now and not at the deadline."""
    bench.publish("slowly", "hang")
    bench.start("work", visibility="10m")
    bench.wait_for("begin 1")
    assert bench.work is not None
    bench.work.target.usual_us[1] = 300 * SECOND_US
    bench.tell(120)
    assert bench.wait(30).tally.given_back == 1
    assert "is ended: such a batch takes" in bench.said.getvalue()


def test_told_to_leave_while_it_waits_for_items_or_loads(bench: Bench) -> None:
    bench.ledger.open_queue(bench.home.settings["tenant"], bench.name, None)
    bench.start("work", until_empty=False)
    wait_until(lambda: bench.work is not None and bench.work.bell is not None)
    bench.tell(15)
    assert bench.wait().exit_code == 85


def test_one_by_one_ends_too_when_told(bench: Bench) -> None:
    bench.publish("raise", "hang once", "", tries=5)

    def hurry(work: QueueWorker) -> None:
        work.target.usual_us[1] = 300 * SECOND_US

    bench.start("batch", hurry, batch=3)
    bench.wait_for("begin 1")  # alone, after the batch raised
    bench.tell(60)
    left = bench.wait(30)
    assert (left.exit_code, left.tally.failed, left.tally.given_back) == (85, 1, 2)


# --- what is down --------------------------------------------------------------------------------------------


class Shelf:
    """A sink in memory that can be closed for a while."""

    def __init__(self) -> None:
        self.down = True
        self.tries = 0
        self.stored: dict[str, Any] = {}

    def check(self) -> None:
        pass

    def store(self, made: Sequence[Made]) -> None:
        self.tries += 1
        if self.down:
            raise SinkDown("the shelf is locked")
        if any(one.body.get("do") == "unwanted" for one in made):
            raise BadInput("this shelf takes no such thing")
        self.stored |= {one.key: one.result for one in made}

    def known(self, keys: Sequence[str]) -> set[str]:
        return set(keys) & set(self.stored)

    def describe(self) -> dict[str, str]:
        return {"kind": "shelf"}

    def close(self) -> None:
        pass


def with_sink(shelf: Shelf) -> Callable[[QueueWorker], None]:
    def change(work: QueueWorker) -> None:
        for queue in work.queues.values():
            queue.sink = shelf

    return change


def test_a_sink_that_is_down_holds_everything_up_and_loses_nothing(bench: Bench) -> None:
    shelf = Shelf()
    numbers = bench.publish(*[""] * 4)
    bench.start("batch", with_sink(shelf), batch=2, visibility="300ms")
    wait_until(lambda: shelf.tries >= 5, 30)  # longer than the visibility
    held = [bench.item(number) for number in numbers[:2]]
    assert [(item.state, item.delivery) for item in held] == [(ItemState.LEASED, 1)] * 2, "extended meanwhile"
    assert [item.id for item in bench.of(ItemState.READY)] == numbers[2:], "nothing else was taken"
    assert not bench.of(ItemState.DONE), "nothing was acknowledged"
    shelf.down = False
    left = bench.wait()
    assert (left.tally.done, left.tally.failed) == (4, 0)
    assert [bench.item(number).delivery for number in numbers] == [1] * 4
    assert sorted(shelf.stored.values()) == [0, 2, 4, 6]
    assert bench.said.getvalue().count("the shelf is locked") == 1
    assert "answers again" in bench.said.getvalue()
    assert [line for line in bench.notes() if line.startswith("batch")] == ["batch [0, 1]", "batch [2, 3]"]


def test_told_to_leave_while_the_sink_is_down_the_items_are_given_back(bench: Bench) -> None:
    shelf = Shelf()
    bench.publish("", "")
    bench.start("batch", with_sink(shelf), batch=2, visibility="10m")
    wait_until(lambda: shelf.tries >= 2, 30)
    bench.tell(1)
    left = bench.wait()
    assert (left.exit_code, left.tally.given_back) == (85, 2)
    assert len(bench.of(ItemState.READY)) == 2


def test_a_lease_is_kept_while_results_wait_for_the_sink(bench: Bench) -> None:
    """One that counts as idle is not renewed, and taken for whoever waits; the results would be lost with it."""
    shelf = Shelf()
    bench.publish("")
    bench.start("work", with_sink(shelf))
    wait_until(lambda: shelf.tries >= 5, 30)  # longer than it takes to be reported idle
    (lease,) = bench.leases()
    assert bench.ledger.look(lease).lease.busy
    shelf.down = False
    left = bench.wait()
    assert (left.tally.done, left.tally.leases) == (1, 1)


def test_a_lease_that_is_lost_while_the_sink_is_down_gives_its_items_back(bench: Bench) -> None:
    shelf = Shelf()
    (number,) = bench.publish("")
    bench.start("work", with_sink(shelf), visibility="10m")
    wait_until(lambda: shelf.tries >= 2, 30)
    bench.revoke(grace_us=0)
    wait_until(lambda: bench.item(number).delivery == 2, 30)
    shelf.down = False
    left = bench.wait()
    assert (left.tally.done, left.tally.failed, left.tally.lost_leases) == (1, 0, 1)


def test_a_lease_that_is_lost_while_the_sinks_own_are_acknowledged_is_leased_again(bench: Bench) -> None:
    shelf = Shelf()
    shelf.down = False
    bench.publish("", "", "")
    for item in bench.queue().take(3):
        if item.body["n"] == 1:
            shelf.stored[item.idempotency_key] = "from before"
        item.nack()
    known = shelf.known

    def taken_meanwhile(keys: Sequence[str]) -> set[str]:
        if bench.leases():
            bench.revoke(grace_us=0)
            shelf.known = known  # type: ignore[method-assign]
        return known(keys)

    shelf.known = taken_meanwhile  # type: ignore[method-assign]
    work = bench.prepare("batch", batch=3, visibility="10m")
    with_sink(shelf)(work)
    left = work.go()
    assert (left.tally.done, left.tally.failed, left.tally.leases) == (2, 0, 2)
    assert len(bench.of(ItemState.DONE)) == 3


def test_what_the_sink_will_never_take_fails_alone(bench: Bench) -> None:
    shelf = Shelf()
    shelf.down = False
    numbers = bench.publish("", "unwanted", "", tries=1)
    bench.start("batch", with_sink(shelf), batch=3)
    assert (bench.wait().tally.done, len(shelf.stored)) == (2, 2)
    (dead,) = bench.of(ItemState.DEAD)
    assert (dead.id, dead.error) == (numbers[1], "BadInput: this shelf takes no such thing")


def test_a_ledger_that_is_away_for_a_while_is_waited_for(bench: Bench) -> None:
    bench.publish("", "", "")
    lost: list[str] = []

    def change(work: QueueWorker) -> None:
        (queue,) = work.queues.values()
        for verb in ("complete_written", "take", "give_back"):
            real = getattr(queue, verb)

            def flaky(*args: Any, real: Any = real, verb: str = verb, **options: Any) -> Any:
                if work.tally.batches and lost.count(verb) < 3:
                    lost.append(verb)
                    if verb == "complete_written" and lost.count(verb) == 2:
                        real(*args, **options)  # it arrived, and the answer was lost
                    raise Disconnected("the ledger is away")
                return real(*args, **options)

            setattr(queue, verb, flaky)

    bench.start("work", change)
    left = bench.wait()
    assert (left.exit_code, left.tally.done, left.tally.failed, left.tally.refused) == (0, 3, 0, 0)
    assert lost.count("complete_written") == 3
    assert lost.count("take") == 3
    assert len(bench.of(ItemState.DONE)) == 3
    assert len([line for line in bench.notes() if line.startswith("begin")]) == 3


def test_told_to_leave_while_the_ledger_is_away_it_does_not_claim_that_all_is_given_back(
    bench: Bench,
) -> None:
    bench.publish("hang")

    def away(*args: Any, **options: Any) -> Any:
        raise Disconnected("the ledger is away")

    def change(work: QueueWorker) -> None:
        (queue,) = work.queues.values()
        queue.give_back = away  # type: ignore[method-assign]

    bench.start("work", change)
    bench.wait_for("begin 0")
    bench.tell(0.1)
    left = bench.wait()
    assert (left.outcome, left.exit_code, left.tally.given_back) == (Outcome.STOPPED, 143, 0)


class Crate:
    """A broker in memory, which is away for a while at first."""

    def __init__(self, bodies: Sequence[Any]) -> None:
        self.waiting = [BrokerMessage(key=str(n), body=body, receipt=n) for n, body in enumerate(bodies)]
        self.out: list[BrokerMessage] = []
        self.asked = 0

    def receive(self, most: int, *, wait_us: int = 0) -> list[BrokerMessage]:
        self.asked += 1
        if 2 <= self.asked <= 4:
            raise BrokerDown("the crate is shut")
        given, self.waiting = self.waiting[:most], self.waiting[most:]
        self.out += given
        return given

    def settle(self, messages: Sequence[BrokerMessage]) -> None:
        self.out = [message for message in self.out if message not in messages]

    def give_back(self, messages: Sequence[BrokerMessage]) -> None:
        self.waiting += messages

    def put_aside(self, message: BrokerMessage, why: str) -> None:
        raise AssertionError(why)

    def publish(self, items: Sequence[tuple[str, Any]]) -> None:
        raise AssertionError("nobody publishes here")

    def depth(self) -> int | None:
        return len(self.waiting)

    def describe(self) -> dict[str, str]:
        return {"kind": "crate"}

    def close(self) -> None:
        pass


def test_a_broker_that_is_down_for_a_while(bench: Bench) -> None:
    crate = Crate([{"n": n, "log": str(bench.log)} for n in range(3)])
    options = build_worker.WorkOptions(queues=bench.name, target=f"{HERE}:work", until_empty=True)
    prepared = build_worker.prepare(options, sublet.settings.load_settings())
    prepared = replace(prepared, queues=(sublet.queue(bench.name, broker=crate),))
    left = build_worker.worker(prepared, bench.notice_bus, WorkLine(bench.said, "crate")).go()
    assert (left.exit_code, left.tally.done) == (0, 3)
    assert not crate.waiting
    assert not crate.out
    assert bench.said.getvalue().count("the crate is shut") == 1


def test_a_ledger_that_is_away_from_the_start_is_told(bench: Bench) -> None:
    bench.publish("")
    work = bench.prepare("work")
    (queue,) = work.queues.values()

    def away(*args: Any, **options: Any) -> Any:
        raise Disconnected("the ledger is away")

    queue.take = away  # type: ignore[method-assign]
    with pytest.raises(Disconnected):
        work.go()
