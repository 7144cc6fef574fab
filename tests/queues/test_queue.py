"""`sublet.queue` as its users have it: items kept while they are worked on, given back when they are not, and results that survive."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import sublet
from sublet import wiring
from sublet.core.errors import (
    BadInput,
    FingerprintMismatch,
    ItemFailed,
    NotFound,
    NotJson,
    SinkDown,
    StaleDelivery,
    TooLarge,
)
from sublet.core.queues.items import MOST_DEPTH, ItemState, Nack
from sublet.ports.broker import BrokerMessage
from sublet.ports.sink import Made
from sublet.queues.queue import Queue
from sublet.settings import Settings, load_settings
from tests.forked import Forked
from tests.homes import wait_until

_names = itertools.count(1)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """One home for the file: every test has a queue of its own in it."""
    yield load_settings(home=str(tmp_path_factory.mktemp("queues")))
    wiring.close_all()


@pytest.fixture
def new(settings: Settings) -> Iterator[Callable[..., Queue]]:
    made: list[Queue] = []
    name = f"q{next(_names)}"

    def one(**options: Any) -> Queue:
        made.append(sublet.queue(name, settings=settings, **options))
        return made[-1]

    yield one
    for queue in made:
        queue.close()


def bodies(queue: Queue, state: ItemState = ItemState.READY) -> list[Any]:
    return [sublet.core.queues.items.from_text(r.body) for r in queue.peek(1000, state=state)]  # type: ignore[attr-defined]


def test_from_publish_to_results(new: Callable[..., Queue]) -> None:
    queue = new()
    assert queue.publish((f"{n}.png" for n in range(25)), key=str, batch=10).new == 25
    assert queue.publish("3.png", key="3.png").duplicates == 1
    for item in queue.pull(10, visibility="60s"):
        with item:
            item.complete({"was": item.body})
    results = list(queue.results())
    assert [(r.body, r.value) for r in results] == [(f"{n}.png", {"was": f"{n}.png"}) for n in range(10)]
    assert [r.body for r in queue.results(after=results[7].id)] == ["8.png", "9.png"]
    assert queue.stats().ready == 15


@pytest.mark.parametrize("one", ["text", 5, {"path": "x"}, None, 1.5, True])
def test_one_item_is_one_item(new: Callable[..., Queue], one: Any) -> None:
    queue = new()
    assert queue.publish(one).new == 1
    assert bodies(queue) == [one]


def test_leaving_the_loop_gives_back_the_rest_at_once(new: Callable[..., Queue]) -> None:
    queue = new()
    queue.publish(["a", "b", "c", "d"])
    for item in queue.pull(4, visibility="10m"):
        with item:
            item.complete()
        if item.body == "b":
            break
    assert bodies(queue) == ["c", "d"]
    assert queue.stats().failed == 0


def test_leaving_a_block_without_completing_gives_the_item_back(new: Callable[..., Queue]) -> None:
    queue = new(tries=1)
    queue.publish("a")
    for _ in range(3):  # however often: that is no failure
        (item,) = queue.pull(1, visibility="10m")
        with item:
            pass
    (again,) = queue.pull(1)
    assert (again.body, again.failures, again.losses) == ("a", 0, 0)
    assert (queue.stats().failed, list(queue.dead())) == (0, [])


def test_leaving_a_block_keeps_the_items_place_and_raising_in_it_counts_as_a_try(
    new: Callable[..., Queue],
) -> None:
    queue = new(tries=2, backoff=0)
    queue.publish(["a", "b"])
    (item,) = queue.pull(1, visibility="10m")
    with item:
        pass
    with pytest.raises(ValueError, match="broken"), next(queue.pull(1)) as item:
        assert (item.body, item.delivery, item.failures) == ("a", 2, 0)
        raise ValueError("broken")
    assert [(one.body, one.failures) for one in queue.pull(2)] == [("b", 0), ("a", 1)]


def test_an_exception_is_kept_with_its_traceback_and_goes_on(new: Callable[..., Queue]) -> None:
    queue = new(tries=2, backoff=0)
    queue.publish("a")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            for item in queue.pull():
                with item:
                    item.body = 1 / 0
    (dead,) = queue.dead()
    assert dead.failures == 2
    assert "test_queue.py" in dead.error
    assert dead.error.strip().endswith("ZeroDivisionError: division by zero")
    assert queue.redrive() == 1
    assert queue.stats().ready == 1


@pytest.mark.parametrize("leaving", [KeyboardInterrupt, SystemExit, sublet.LeaseLost, sublet.SinkDown])
def test_being_told_to_leave_is_nobodys_failure(
    new: Callable[..., Queue], leaving: type[BaseException]
) -> None:
    queue = new(tries=1)
    queue.publish("a")
    with pytest.raises(leaving):
        for item in queue.pull(visibility="10m"):
            with item:
                raise leaving
    assert (queue.stats().ready, queue.stats().failed) == (1, 0)


def test_it_is_extended_while_it_is_worked_on(new: Callable[..., Queue]) -> None:
    mine, other = new(), new()
    mine.publish("a")
    (item,) = mine.take(1, visibility_us=300_000)
    until = time.monotonic() + 1.2
    while time.monotonic() < until:
        assert other.take(1) == []
        time.sleep(0.05)
    item.complete("late but mine")
    assert [r.value for r in mine.results()] == ["late but mine"]
    assert next(iter(mine.results())).delivery == 1


def test_one_that_is_due_soon_is_extended_although_another_is_due_late(new: Callable[..., Queue]) -> None:
    """S6: what extends sleeps until the first is due; one that is due before that wakes it."""
    mine, other = new(), new()
    mine.publish(["long", "short"])
    (long,) = mine.take(1, visibility_us=600_000_000)
    time.sleep(0.3)  # by now it sleeps, and a test that comes too early only tests less
    (short,) = mine.take(1, visibility_us=300_000)
    until = time.monotonic() + 1.2
    while time.monotonic() < until:
        assert other.take(1) == []
        time.sleep(0.05)
    for item in (long, short):
        item.complete(item.body)
    assert [(r.value, r.delivery) for r in mine.results()] == [("long", 1), ("short", 1)]


def test_one_that_was_stopped_past_its_visibility_is_refused_and_counted(
    new: Callable[..., Queue], settings: Settings, tmp_path: Path
) -> None:
    """A real process, stopped as by a debugger or a frozen VM: the item goes to somebody else, its own late result nowhere."""
    queue = new()
    queue.publish("a")
    code = """
import sys, sublet
from sublet.core.errors import StaleDelivery
queue = sublet.queue(sys.argv[1])
(item,) = queue.take(1, visibility_us=500_000)
print("has it", flush=True)
sys.stdin.readline()
try:
    item.complete("zombie")
    print("accepted", flush=True)
except StaleDelivery:
    print("refused", flush=True)
"""
    child = Forked(
        [sys.executable, "-u", "-c", code, queue.name],
        env={**os.environ, "SUBLET_HOME": str(settings.home)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdin is not None
        assert child.stdout.readline() == "has it\n"
        child.send_signal(signal.SIGSTOP)
        taken: list[Any] = []
        wait_until(lambda: bool(taken or taken.extend(queue.take(1)) or taken))
        child.send_signal(signal.SIGCONT)
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "refused\n"
        taken[0].complete("heir")
    finally:
        child.send_signal(signal.SIGCONT)
        child.kill()
        child.wait()
    assert [(r.value, r.delivery) for r in queue.results()] == [("heir", 2)]
    assert queue.stats().stale == 1


def test_a_killed_process_of_this_host_keeps_nothing(new: Callable[..., Queue], settings: Settings) -> None:
    """Visibility is ten minutes; the next one to pull sees that the process is gone."""
    queue = new()
    queue.publish(["a", "b"])
    code = """
import sys, time, sublet
items = sublet.queue(sys.argv[1]).take(1, visibility_us=600_000_000)
print(items[0].body, flush=True)
time.sleep(100)
"""
    child = Forked(
        [sys.executable, "-u", "-c", code, queue.name],
        env={**os.environ, "SUBLET_HOME": str(settings.home)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "a\n"
        (mine,) = queue.take(5)
        assert mine.body == "b"
        assert queue.take(1) == [], "it was taken from one that lives"
    finally:
        child.kill()
        child.wait()
    found: list[Any] = []
    wait_until(lambda: bool(found or found.extend(queue.take(1)) or found))
    assert (found[0].body, found[0].losses) == ("a", 1)


def test_a_forked_child_is_a_consumer_of_its_own(new: Callable[..., Queue]) -> None:
    queue = new()
    queue.publish(["a", "b"])
    (mine,) = queue.take(1, visibility_us=600_000_000)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            (its,) = queue.take(1)
            its.complete("child")
            os.write(write, its.body.encode())
        finally:
            os._exit(0)
    os.close(write)
    assert os.read(read, 10) == b"b"
    os.waitpid(pid, 0)
    mine.complete("parent")
    assert [r.value for r in queue.results()] == ["parent", "child"]


def test_a_child_forked_while_another_thread_publishes_is_not_stuck(
    new: Callable[..., Queue], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = new()
    queue.publish("a")
    ledger = wiring.open_ledger(settings)
    publish, inside, go_on = ledger.publish, threading.Event(), threading.Event()

    def slowly(*given: Any) -> Any:
        inside.set()
        go_on.wait(60)
        return publish(*given)

    monkeypatch.setattr(ledger, "publish", slowly)
    thread = threading.Thread(target=queue.publish, args=("b",))
    thread.start()
    assert inside.wait(20)
    pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)
            (item,) = queue.take(1)
            item.complete("child")
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    go_on.set()
    thread.join()
    assert status == 0
    assert [r.value for r in queue.results()] == ["child"]


@pytest.mark.parametrize("drop", ["an item", "a loop that was never begun"])
def test_what_nobody_can_complete_any_more_is_not_kept(new: Callable[..., Queue], drop: str) -> None:
    queue, other = new(), new()
    queue.publish(["a", "b"])
    kept = queue.take(1, visibility_us=300_000)
    if drop == "an item":
        queue.take(1, visibility_us=300_000)
    else:
        queue.pull(1, visibility="300ms")
    gc.collect()
    wait_until(lambda: [item.complete("r") for item in other.take(1)])
    assert other.take(1) == []
    kept[0].complete("r")
    assert queue.stats().stale == 0


def test_waiting_ends_when_an_item_comes(new: Callable[..., Queue]) -> None:
    mine, other = new(), new()
    other.publish("first")
    assert [i.body for i in mine.take(1)] == ["first"]
    got: list[Any] = []
    waiter = threading.Thread(target=lambda: got.extend(mine.take(1, wait_us=20_000_000)))
    waiter.start()
    time.sleep(0.2)
    other.publish("second")
    waiter.join(60)
    assert [i.body for i in got] == ["second"]
    assert mine.take(1, wait_us=1000) == []


def test_many_threads_share_one_queue(new: Callable[..., Queue]) -> None:
    queue = new()
    queue.publish(range(200))

    def work() -> None:
        while items := queue.take(7):
            assert queue.complete((item, item.body * 2) for item in items) == [None] * len(items)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(r.value for r in queue.results()) == [2 * n for n in range(200)]
    assert queue.stats().completed == 200


# --- map -----------------------------------------------------------------------------------------------------


def test_map_gives_results_in_order_and_computes_each_once(new: Callable[..., Queue]) -> None:
    queue = new()
    computed: list[str] = []

    def upper(text: str) -> str:
        computed.append(text)
        return text.upper()

    assert list(queue.map(upper, ["b", "a", "b", "c"])) == ["B", "A", "B", "C"]
    assert sorted(computed) == ["a", "b", "c"]
    assert list(queue.map(upper, (x for x in ["a", "d"]))) == ["A", "D"]
    assert sorted(computed) == ["a", "b", "c", "d"], "something was computed twice"


def test_map_goes_on_where_it_was_left(new: Callable[..., Queue]) -> None:
    queue = new()
    computed: list[int] = []

    def square(n: int) -> int:
        computed.append(n)
        return n * n

    first = queue.map(square, range(30))
    assert [next(first) for _ in range(10)] == [n * n for n in range(10)]
    first.close()
    assert list(queue.map(square, range(30))) == [n * n for n in range(30)]
    assert sorted(computed) == list(range(30))


def test_map_raises_where_an_item_failed_every_try(new: Callable[..., Queue]) -> None:
    queue = new(tries=2, backoff=0)
    mapped = queue.map(lambda n: 1 // n, [1, 0, 2])
    assert next(mapped) == 1
    with pytest.raises(ItemFailed, match="ZeroDivisionError"):
        next(mapped)
    assert list(queue.map(lambda n: 1 // n, [1, 2])) == [1, 0]


# --- wrong input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("apart", [1, 3000], ids=["in one batch", "in two"])
def test_map_refuses_two_items_under_one_key(new: Callable[..., Queue], apart: int) -> None:
    """S4: the result of one would be given out as the other's."""
    queue = new()
    items = [("same", 1), *((str(n), n) for n in range(apart)), ("same", 2)]
    with pytest.raises(FingerprintMismatch, match="the key same"):
        list(queue.map(lambda item: item[1], items, key=lambda item: item[0]))


def test_what_is_not_json_is_named_and_what_came_before_is_said(new: Callable[..., Queue]) -> None:
    queue = new()
    with pytest.raises(NotJson, match="item 1 cannot be written as JSON"):
        queue.publish([{"x": object()}])
    with pytest.raises(NotJson, match=r"item 5 .*first 4 items are published"):
        queue.publish(["a", "b", "c", "d", {1, 2}], batch=2)
    with pytest.raises(NotJson, match=r"first 2 items are published") as told:
        queue.publish([["e"], ["f"], b"raw"], batch=1)
    assert "key=" in told.value.remedy
    assert queue.stats().ready == 6


def test_an_item_of_ten_megabytes_is_refused(new: Callable[..., Queue]) -> None:
    queue = new()
    with pytest.raises(TooLarge, match=r"10\.5MB") as told:
        queue.publish("x" * 10_500_000)
    assert "file" in told.value.remedy
    with pytest.raises(NotFound):
        queue.stats()  # nothing was made of it


def test_a_result_that_is_too_large_leaves_the_item_with_the_worker(new: Callable[..., Queue]) -> None:
    queue = new()
    queue.publish("a")
    (item,) = queue.take(1)
    with pytest.raises(TooLarge, match="the result of item"):
        item.complete("x" * 2_000_000)
    with pytest.raises(NotJson):
        item.complete(object())
    item.complete("smaller")
    assert [r.value for r in queue.results()] == ["smaller"]


def test_an_unknown_queue_is_named_with_those_there_are(
    new: Callable[..., Queue], settings: Settings
) -> None:
    for number in range(12):
        sublet.queue(f"other{number}", settings=settings).publish("a")
    sublet.queue("images", settings=settings).publish("a")
    with pytest.raises(NotFound) as told:
        sublet.queue("imges", settings=settings).stats()
    assert told.value.remedy.startswith("there are: images, ")
    with pytest.raises(NotFound):
        sublet.queue("imges", settings=settings).take(1)


@pytest.mark.parametrize("name", ["", "a b", "../x", "x/y", "ü", "a" * 64])
def test_a_name_is_a_name(settings: Settings, name: str) -> None:
    with pytest.raises(BadInput):
        sublet.queue(name, settings=settings)


def test_a_key_with_another_item_is_refused_after_the_others_are_in(new: Callable[..., Queue]) -> None:
    queue = new()
    queue.publish({"id": "1", "x": 1}, key="1")
    with pytest.raises(FingerprintMismatch, match=r"1 items were not published.*\(1\). 1 were published"):
        queue.publish([{"id": "1", "x": 2}, {"id": "2", "x": 2}], key=lambda body: body["id"])
    assert len(bodies(queue)) == 2
    with pytest.raises(BadInput, match="must be a text"):
        queue.publish([5], key=lambda body: body)
    with pytest.raises(BadInput, match="function of the item"):
        queue.publish(["a"], key="a")


def test_terms_are_the_queues_own_unless_said(new: Callable[..., Queue], settings: Settings) -> None:
    new(tries=3, visibility="30s").publish("a")
    again = new(backoff="5s")
    again.publish("b")
    terms = again.record().terms
    assert (terms.tries, terms.visibility_us, terms.backoff_us) == (3, 30_000_000, 5_000_000)
    with pytest.raises(BadInput):
        new(tries=0)
    with pytest.raises(BadInput):
        new(tries="3")


# --- sinks and brokers, as the queue treats them -------------------------------------------------------------


class Shelf:
    """A sink in memory that can be down, and can die between storing and answering."""

    def __init__(self) -> None:
        self.stored: dict[str, Made] = {}
        self.down = False
        self.dies_after_storing = False

    def check(self) -> None:
        pass

    def store(self, results: Any) -> None:
        if self.down:
            raise SinkDown
        for made in results:
            old = self.stored.get(made.key)
            if old is None or made.delivery > old.delivery:
                self.stored[made.key] = made
        if self.dies_after_storing:
            raise KeyboardInterrupt

    def known(self, keys: Any) -> set[str]:
        if self.down:
            raise SinkDown
        return set(keys) & set(self.stored)

    def describe(self) -> dict[str, str]:
        return {}

    def close(self) -> None:
        pass


def test_a_result_goes_to_the_sink_first(new: Callable[..., Queue]) -> None:
    shelf = Shelf()
    queue = new(sink=shelf)
    queue.publish("a", key="k")
    shelf.down = True
    (item,) = queue.take(1)
    with pytest.raises(SinkDown):
        item.complete("r")
    assert queue.stats().done == 0, "acknowledged without being stored"
    shelf.down = False
    item.complete("r")
    (made,) = shelf.stored.values()
    assert (made.key, made.item_key, made.delivery, made.body, made.result) == (
        f"{queue.name}/{item.id}",
        "k",
        1,
        "a",
        "r",
    )
    assert queue.stats().done == 1


def test_what_the_sink_knows_is_not_worked_on_again(new: Callable[..., Queue]) -> None:
    """A crash between the sink and the ledger: redelivered, it ends as a duplicate (S6)."""
    shelf = Shelf()
    queue = new(sink=shelf)
    queue.publish(["a", "b"])
    shelf.dies_after_storing = True
    with pytest.raises(KeyboardInterrupt):
        for item in queue.pull(2):
            with item:
                item.complete("r")
    shelf.dies_after_storing = False
    assert [item.body for item in queue.take(2)] == ["b"]
    assert queue.stats().done == 1
    assert len(shelf.stored) == 1


def test_map_gives_results_also_of_what_only_the_sink_has(new: Callable[..., Queue]) -> None:
    shelf = Shelf()
    queue = new(sink=shelf)
    shelf.dies_after_storing = True
    with pytest.raises(KeyboardInterrupt):
        list(queue.map(str.upper, ["a"]))
    shelf.dies_after_storing = False
    assert list(queue.map(str.upper, ["a"])) == ["A"]
    assert [made.result for made in shelf.stored.values()] == ["A"]


def test_items_of_a_sink_that_is_down_are_given_back(new: Callable[..., Queue]) -> None:
    shelf = Shelf()
    queue = new(sink=shelf)
    queue.publish("a")
    next(iter(queue.take(1))).nack()
    shelf.down = True
    with pytest.raises(SinkDown):
        queue.take(1)
    assert queue.stats().ready == 1


class Letters:
    """A broker in memory: what is not settled comes again."""

    def __init__(self, *messages: tuple[str, Any]) -> None:
        self.waiting = list(messages)
        self.held: list[tuple[str, Any]] = []
        self.aside: list[str] = []
        self.settles = True

    def receive(self, most: int, *, wait_us: int = 0) -> list[BrokerMessage]:
        some, self.waiting = self.waiting[:most], self.waiting[most:]
        self.held += some
        return [BrokerMessage(key=k, body=b, receipt=(k, b)) for k, b in some]

    def settle(self, messages: Any) -> None:
        if not self.settles:
            raise sublet.BrokerDown
        for message in messages:
            self.held.remove(message.receipt)

    def give_back(self, messages: Any) -> None:
        for message in messages:
            self.held.remove(message.receipt)
            self.waiting.append(message.receipt)

    def put_aside(self, message: BrokerMessage, why: str) -> None:
        self.held.remove(message.receipt)
        self.aside.append(message.key)

    def publish(self, items: Any) -> None:
        self.waiting += items

    def depth(self) -> int:
        return len(self.waiting)

    def describe(self) -> dict[str, str]:
        return {}

    def close(self) -> None:
        pass


def test_a_message_becomes_an_item_once(new: Callable[..., Queue]) -> None:
    letters = Letters(("1", "a"), ("2", "b"), ("1", "a"))
    queue = new(broker=letters)
    assert queue.publish("c", key="3").new == 1
    done = []
    while items := queue.take(2):
        done += [item.body for item in items]
        queue.complete((item, None) for item in items)
    assert sorted(done) == ["a", "b", "c"]
    assert (letters.waiting, letters.held) == ([], [])
    letters.waiting.append(("2", "b"))  # redelivered after it was done
    assert queue.take(1) == []
    assert letters.held == []


def test_a_crash_before_settling_is_a_duplicate_later(new: Callable[..., Queue]) -> None:
    """S6."""
    letters = Letters(("1", "a"))
    queue = new(broker=letters)
    letters.settles = False
    with pytest.raises(sublet.BrokerDown):
        queue.take(1)
    letters.settles = True
    letters.waiting, letters.held = letters.held, []
    assert [i.body for i in queue.take(1)] == ["a"]
    assert queue.take(1) == []
    assert queue.stats().published == 1


def test_a_message_that_can_never_be_an_item_is_put_aside(new: Callable[..., Queue]) -> None:
    letters = Letters(("big", "x" * 2_000_000), ("fine", "a"))
    queue = new(broker=letters)
    assert [i.body for i in queue.take(5)] == ["a"]
    assert (letters.aside, letters.held) == (["big"], [])


def test_a_message_with_a_known_key_and_another_body_does_not_block(new: Callable[..., Queue]) -> None:
    letters = Letters(("1", "a"), ("1", "other"), ("2", "b"))
    queue = new(broker=letters)
    with pytest.warns(RuntimeWarning, match="another content"):
        assert [i.body for i in queue.take(5)] == ["a", "b"]
    assert letters.held == []


def test_a_stale_result_says_who_has_it(new: Callable[..., Queue]) -> None:
    queue = new()
    queue.publish("a")
    (item,) = queue.take(1)
    assert queue.purge(ItemState.LEASED) == 1
    with pytest.raises(StaleDelivery, match="purged"):
        item.complete("r")
    assert item.lost


# --- answers that are lost, and what is left behind ----------------------------------------------------------


@pytest.fixture
def losing(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The next publish is done, and its answer lost."""
    ledger = wiring.open_ledger(settings)
    publish = ledger.publish

    def lose(error: type[BaseException]) -> None:
        def lost(*given: Any) -> Any:
            monkeypatch.setattr(ledger, "publish", publish)
            publish(*given)
            raise error("the answer is lost")

        monkeypatch.setattr(ledger, "publish", lost)

    return lose


@pytest.mark.parametrize("error", [sublet.Disconnected, KeyboardInterrupt])
def test_what_is_published_after_an_answer_was_lost_is_there(
    new: Callable[..., Queue], losing: Callable[..., None], error: type[BaseException]
) -> None:
    """Under the number of the batch that was not answered it would be taken for that one, and dropped (S4)."""
    queue = new()
    queue.publish("first")
    losing(error)
    with pytest.raises(error):
        queue.publish(["a", "b"])
    assert queue.publish(["c", "d"]).new == 2
    assert queue.publish("e").new == 1
    assert bodies(queue) == ["first", "a", "b", "c", "d", "e"]


def test_the_same_again_after_an_answer_was_lost_is_published_once(
    new: Callable[..., Queue], losing: Callable[..., None]
) -> None:
    queue = new()
    losing(sublet.Disconnected)
    with pytest.raises(sublet.Disconnected):
        queue.publish(["a", "b"])
    assert queue.publish(["a", "b"]).new == 2
    assert bodies(queue) == ["a", "b"]
    assert queue.publish(["a", "b"]).new == 2, "published twice on purpose"
    assert bodies(queue) == ["a", "b", "a", "b"]


def test_messages_that_come_after_an_answer_was_lost_are_not_settled_unread(
    new: Callable[..., Queue], losing: Callable[..., None]
) -> None:
    letters = Letters(("1", "a"), ("2", "b"), ("3", "c"))
    queue = new(broker=letters)
    losing(sublet.Disconnected)
    with pytest.raises(sublet.Disconnected):
        queue.take(1)
    taken = []
    while items := queue.take(1):
        taken += [item.body for item in items]
        queue.complete((item, None) for item in items)
    assert sorted(taken) == ["a", "b", "c"]
    assert (letters.waiting, letters.held) == ([], [])


def test_a_broker_that_is_down_holds_up_nothing_that_is_here(new: Callable[..., Queue]) -> None:
    letters = Letters(("1", "a"), ("2", "b"))
    queue = new(broker=letters)
    queue.give_back((item, Nack(item=item.id, delivery=1, failed=False)) for item in queue.take(2))
    letters.receive = lambda most, wait_us=0: (_ for _ in ()).throw(sublet.BrokerDown)  # type: ignore[method-assign]
    assert [item.body for item in queue.take(5)] == ["a", "b"]
    with pytest.raises(sublet.BrokerDown):
        queue.take(5)


def test_what_is_left_by_an_interrupt_while_the_sink_is_asked_is_given_back(
    new: Callable[..., Queue],
) -> None:
    shelf = Shelf()
    queue = new(sink=shelf)
    queue.publish(["a", "b"])
    for item in queue.take(2):
        item.nack()

    def interrupted(keys: Any) -> set[str]:
        raise KeyboardInterrupt

    shelf.known = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        queue.take(2)
    assert queue.stats().ready == 2


def test_what_is_nested_too_deep_to_be_read_elsewhere_is_refused(new: Callable[..., Queue]) -> None:
    def nested(depth: int) -> Any:
        return [nested(depth - 1)] if depth else "]]]"

    def deeper(frames: int) -> list[Any]:
        return deeper(frames - 1) if frames else queue.take(1)

    queue = new()
    queue.publish([nested(MOST_DEPTH - 1)], key=lambda body: "k")
    queue.publish([[[]] * 2 * MOST_DEPTH])
    with pytest.raises(NotJson, match="deeper"):
        queue.publish({"a": nested(MOST_DEPTH)})
    (item,) = deeper(200)
    with pytest.raises(NotJson, match="deeper"):
        item.complete({"a": nested(MOST_DEPTH)})
    item.complete(item.body)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda queue: queue.publish("x", priority=1.5),
        lambda queue: queue.publish("x", priority="high"),
        lambda queue: queue.publish(["x"], batch="many"),
        lambda queue: queue.publish("x", key=5),
        lambda queue: queue.pull(1.5),
        lambda queue: queue.pull(visibility=0),
        lambda queue: queue.peek(-1),
        lambda queue: queue.item(1 << 70),
        lambda queue: queue.redrive([1 << 70]),
        lambda queue: list(queue.results(after=1 << 70)),
        lambda queue: queue.purge("done"),
    ],
)
def test_what_nobody_can_mean_is_refused_in_words(
    new: Callable[..., Queue], wrong: Callable[[Queue], Any]
) -> None:
    queue = new()
    queue.publish("a")
    with pytest.raises(BadInput):
        wrong(queue)
    assert bodies(queue) == ["a"]


def test_an_error_may_be_anything(new: Callable[..., Queue]) -> None:
    queue = new(tries=1)
    queue.publish("a")
    (item,) = queue.take(1)
    item.fail(404)
    assert next(queue.dead()).error == "404"


def test_map_does_not_wait_for_what_was_purged(new: Callable[..., Queue]) -> None:
    queue = new()

    def meanwhile(body: str) -> str:
        if body == "b":
            queue.purge(ItemState.LEASED)
        return body.upper()

    given = queue.map(meanwhile, ["a", "b", "c"])
    assert next(given) == "A"
    raised: list[BaseException] = []

    def wait_for_it() -> None:
        try:
            next(given)
        except NotFound as e:
            raised.append(e)

    threading.Thread(target=wait_for_it, daemon=True).start()
    wait_until(lambda: raised)
    assert "purged" in str(raised[0])
    assert list(queue.map(str.upper, ["a", "b", "c"])) == ["A", "B", "C"]


# --- what is held --------------------------------------------------------------------------------------------


def test_what_is_over_is_not_extended_any_more(new: Callable[..., Queue]) -> None:
    queue = new()
    queue.publish(["a", "b"])
    one, two = queue.take(2)
    one.complete("r")
    assert queue._held.numbers() == [two.id]
    two.nack()
    assert queue._held.numbers() == []


def test_a_worker_hears_that_its_item_is_gone(new: Callable[..., Queue]) -> None:
    shelf = Shelf()
    queue = new(sink=shelf)
    queue.publish("a")
    (item,) = queue.take(1, visibility_us=300_000)
    queue.purge(ItemState.LEASED)
    wait_until(lambda: item.lost)
    with pytest.raises(StaleDelivery):
        item.complete("r")
    assert shelf.stored == {}, "what is known to be somebody else's is not stored"


def test_each_item_is_extended_by_its_own_visibility_and_again_after_an_error(
    new: Callable[..., Queue], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = new()
    queue.publish(["short", "long"])
    ledger = wiring.open_ledger(settings)
    extend, asked = ledger.extend, []

    def watched(consumer: int, held: Any, visibility_us: int) -> set[int]:
        asked.append((list(held), visibility_us))
        if len(asked) == 1:
            raise sublet.Disconnected
        return extend(consumer, held, visibility_us)

    monkeypatch.setattr(ledger, "extend", watched)
    (short,), (long,) = queue.take(1, visibility_us=300_000), queue.take(1, visibility_us=600_000_000)
    wait_until(lambda: len(asked) >= 3)
    assert {(tuple(held), us) for held, us in asked} == {(((short.id, 1),), 300_000)}
    assert queue.item(long.id).visible_at > queue.stats().at + 300_000_000


def test_after_a_rest_items_are_extended_again(
    new: Callable[..., Queue], monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, other = new(), new()
    queue.publish(["a", "b"])
    monkeypatch.setattr(queue._held._changed, "wait_for", lambda fact, seconds: bool(fact()))
    (first,) = queue.take(1, visibility_us=300_000)
    first.complete("r")
    wait_until(lambda: queue._held._thread is None)
    (second,) = queue.take(1, visibility_us=300_000)
    before = queue.item(second.id).visible_at
    wait_until(lambda: queue.item(second.id).visible_at > before)
    assert other.take(1) == []


def test_the_work_on_an_item_begins_when_the_loop_comes_to_it(new: Callable[..., Queue]) -> None:
    queue = new()
    queue.publish(["slow", "fast"])
    for item in queue.pull(2):
        if item.body == "slow":
            time.sleep(0.3)
        item.complete()
    slow, fast = queue.results()
    assert fast.work_us < 300_000 <= slow.work_us


def test_who_waits_sees_what_becomes_due_though_no_bell_rings(new: Callable[..., Queue]) -> None:
    queue = new()
    queue.publish("a", delay="300ms")
    begun = time.monotonic()
    assert [item.body for item in queue.take(1, wait_us=60_000_000)] == ["a"]
    assert time.monotonic() - begun < 30


def test_a_page_of_large_results_is_small(
    new: Callable[..., Queue], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = new()
    queue.publish(["x" * 400_000] * 20)
    queue.complete((item, None) for item in queue.take(20))
    ledger = wiring.open_ledger(settings)
    items, pages = ledger.items, []

    def watched(*given: Any, **options: Any) -> Any:
        pages.append(options["limit"])
        return items(*given, **options)

    monkeypatch.setattr(ledger, "items", watched)
    assert len(list(queue.results())) == 20
    assert pages[0] == 16
    assert pages[1] < 16
