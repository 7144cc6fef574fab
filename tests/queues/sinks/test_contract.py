"""What every sink keeps to, with the real parts: `ports/sink.py` says it, and S6 needs it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from sublet.core.errors import SinkDown
from sublet.ports.sink import Sink
from tests import forked
from tests.queues.sinks.results import made
from tests.queues.sinks.rig import OPENERS, BucketPlace, FolderPlace, FunctionPlace, Place, PostgresPlace

ROOT = Path(__file__).parents[3]
ODD = {
    "nul": "a\x00b",
    "half": "\ud800",
    "both": "Zürich 🎉 'quote\" \\ %s ?",
    "deep": [[{"": None}]],
    "n": -1.5e300,
}


@pytest.fixture
def sink(place: Place) -> Iterator[Sink]:
    opened = place.open()
    yield opened
    opened.close()


def test_what_was_stored_is_known(place: Place, sink: Sink) -> None:
    assert sink.known(["images/1", "images/2"]) == set()
    sink.store([made(1, item_key="a.png", result={"label": "cat"}), made(3)])
    assert sink.known(["images/1", "images/2", "images/3"]) == {"images/1", "images/3"}
    assert place.stored() == {
        "images/1": {"queue": "images", "item": 1, "item_key": "a.png", "delivery": 1, "body": {"n": 1}, "result": {"label": "cat"}},
        "images/3": {"queue": "images", "item": 3, "item_key": "", "delivery": 1, "body": {"n": 3}, "result": [3, 1]},
    }  # fmt: skip
    other = place.open()
    assert other.known(["images/3", "other/3", "Images/3"]) == {"images/3"}
    other.close()


def test_the_same_again_changes_nothing(place: Place, sink: Sink) -> None:
    sink.store([made(1), made(2)])
    before = place.stored()
    sink.store([made(1), made(2)])
    sink.store([made(2, result="another of the same delivery")])
    assert place.stored() == before


def test_an_older_delivery_changes_nothing(place: Place, sink: Sink) -> None:
    """A zombie that wakes up."""
    sink.store([made(1, delivery=10), made(2, delivery=3)])
    before = place.stored()
    sink.store([made(1, delivery=9, result="old"), made(2, delivery=2, result="old")])
    assert place.stored() == before


def test_a_newer_delivery_replaces_in_a_table_and_the_first_stays_in_a_file(place: Place, sink: Sink) -> None:
    sink.store([made(1, delivery=2, result="first")])
    sink.store([made(1, delivery=10, result="second"), made(2, delivery=1)])
    stored = place.stored()
    kept = (10, "second") if place.newest_wins else (2, "first")
    assert (stored["images/1"]["delivery"], stored["images/1"]["result"]) == kept
    assert set(stored) == {"images/1", "images/2"}


def test_twice_in_one_batch(place: Place, sink: Sink) -> None:
    sink.store([made(1, delivery=1), made(1, delivery=3, result="newest"), made(1, delivery=2)])
    assert place.stored()["images/1"]["result"] == "newest"


def test_a_thousand_at_once(place: Place, sink: Sink) -> None:
    count = 25 if isinstance(place, BucketPlace) else 1000
    items = random.Random(3).sample(range(10 * count), count)
    sink.store([made(n) for n in items])
    stored = place.stored()
    assert {row["item"] for row in stored.values()} == set(items)
    assert all(row["result"] == [row["item"], 1] for row in stored.values())
    asked = [f"images/{n}" for n in range(0, 10 * count, 10 if isinstance(place, BucketPlace) else 3)]
    assert sink.known(asked) == {key for key in asked if key in stored}


def test_any_text_and_a_large_result(place: Place, sink: Sink) -> None:
    large = "x" * (1 << 20)
    queue = "Büro/a:b@c%2F.."
    sink.store(
        [
            made(7, body=ODD, result=[ODD]),
            made(8, result=large),
            made(9, queue=queue, item_key="Ключ ' \" \\"),
        ]
    )
    stored = place.stored()
    assert stored["images/7"]["body"] == ODD
    assert stored["images/7"]["result"] == [ODD]
    assert stored["images/8"]["result"] == large
    assert stored[f"{queue}/9"]["item_key"] == "Ключ ' \" \\"
    assert sink.known([f"{queue}/9", "images/8", "images/9"]) == {f"{queue}/9", "images/8"}


def test_nothing_is_nothing(place: Place, sink: Sink) -> None:
    sink.store([])
    assert sink.known([]) == set()


def test_down_is_told_and_back_is_stored(place: Place, sink: Sink) -> None:
    sink.store([made(1)])
    with place.broken():
        for call in (lambda: sink.store([made(2)]), lambda: sink.known(["images/1"])):
            with pytest.raises(SinkDown) as caught:
                call()
            assert caught.value.remedy
            assert "acknowledged" in caught.value.message
    if isinstance(place, BucketPlace):
        from tests.homes import wait_until

        wait_until(lambda: _stored(sink))
    sink.store([made(2)])
    assert sink.known(["images/1", "images/2"]) == {"images/1", "images/2"}
    assert set(place.stored()) == {"images/1", "images/2"}


def _stored(sink: Sink) -> bool:
    """A bucket that failed is left alone for a moment."""
    with contextlib.suppress(SinkDown):
        sink.store([made(2)])
        return True
    return False


def test_used_by_several_threads(place: Place, sink: Sink) -> None:
    failed: list[BaseException] = []
    crowd = 3 if isinstance(place, BucketPlace) else 6

    def work(me: int) -> None:
        try:
            for start in range(0, 20, 10):
                batch = [made(n, delivery=me) for n in range(start, start + 10)]
                random.Random(me).shuffle(batch)
                sink.store(batch)
                assert len(sink.known([m.key for m in batch])) == 10
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=work, args=(me,)) for me in range(1, crowd + 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    stored = place.stored()
    assert len(stored) == 20
    assert all(row["result"] == [row["item"], row["delivery"]] for row in stored.values())
    if place.newest_wins:
        assert {row["delivery"] for row in stored.values()} == {crowd}


def test_a_forked_child_opens_its_own(place: Place, sink: Sink) -> None:
    if isinstance(place, FunctionPlace):
        pytest.skip("it has nothing to open")
    sink.store([made(1)])
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        said = b"?"
        try:
            sink.store([made(2)])
            said = b"stored" if sink.known(["images/1", "images/2"]) == {"images/1", "images/2"} else b"lost"
            sink.close()
        except SinkDown as e:
            said = e.message.encode()
        except BaseException:
            said = traceback.format_exc().encode()
        finally:
            os.write(theirs, said)
            os._exit(0)
    os.close(theirs)
    try:
        with os.fdopen(ours, "rb") as pipe:
            said = pipe.read()
    finally:
        os.waitpid(child, 0)
    assert (b"forked" in said) if isinstance(place, BucketPlace) else (said == b"stored"), said
    sink.store([made(3)])
    assert sink.known(["images/1", "images/3"]) == {"images/1", "images/3"}


def test_closed_twice(place: Place) -> None:
    sink = place.open()
    sink.store([made(1)])
    sink.close()
    sink.close()
    with pytest.raises(SinkDown, match="closed"):
        sink.store([made(2)])


def test_it_says_where_it_is(place: Place, sink: Sink) -> None:
    said = sink.describe()
    assert said["kind"]
    assert said["place"]
    assert all(isinstance(value, str) for value in said.values())


def test_two_processes_and_one_is_killed(place: Place) -> None:
    """S6: what a dying process left half done is completed by whoever is handed the items next. Each result is there once, and whole."""
    if isinstance(place, FunctionPlace):
        pytest.skip("it lives in one process")
    items, batch = (20, 5) if isinstance(place, BucketPlace) else (300, 20)
    environment = {**os.environ, **place.environment}

    def start(delivery: int) -> subprocess.Popen[str]:
        opener = OPENERS[place.kind]
        words = [f"{opener.__module__}:{opener.__name__}", place.url, str(items), str(batch), str(delivery)]
        return forked.Forked(
            [sys.executable, "-m", "tests.queues.sinks.writer", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=ROOT,
        )

    victim, survivor = start(1), start(2)
    try:
        assert victim.stdout is not None
        assert victim.stdout.readline() == "0\n"
        os.kill(victim.pid, signal.SIGKILL)
        victim.wait()
        _, said = survivor.communicate(timeout=60)
        assert survivor.returncode == 0, said
    finally:
        for process in (victim, survivor):
            if process.poll() is None:
                process.kill()
                process.wait()
    stored = place.stored()
    assert {row["item"] for row in stored.values()} == set(range(items))
    for row in stored.values():
        assert row["result"] == [row["item"], row["delivery"]]
        assert row["delivery"] == 2 or not place.newest_wins
    again = place.open()
    again.store(
        [made(n, delivery=3) for n in range(items) if f"images/{n}" not in again.known([f"images/{n}"])]
    )
    assert place.stored() == stored
    again.close()
    if isinstance(place, PostgresPlace):
        assert place.sql("SELECT count(*) FROM results") == [(items,)]
    if isinstance(place, FolderPlace):
        assert len(list((place.folder / ".unfinished").iterdir())) <= batch
