"""Results as files and objects: the first durable one stays, whatever happens around it (C2, C6)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sublet.core.errors import BadInput, Misconfigured, SinkDown
from sublet.queues.sinks import directory
from sublet.queues.sinks.bucket import BucketSink, open_bucket
from sublet.queues.sinks.directory import DirectorySink, open_directory
from sublet.queues.sinks.documents import document_of, place_of
from tests.conftest import need
from tests.crash_states import Log, crash_states, recording
from tests.in_memory import in_memory
from tests.queues.sinks.results import made
from tests.queues.sinks.rig import BucketPlace
from tests.seeds import SEED
from tests.store.servers import FakeGcs, Servers

STATES = int(os.environ.get("SUBLET_CRASH_STATES", "300"))


@pytest.fixture
def fast() -> Iterator[Path]:
    with in_memory() as folder:
        yield folder


# --- names ---------------------------------------------------------------------------------------------------


def test_a_name_for_every_key() -> None:
    assert place_of("images/12345") == ("images", "12", "12345.json")
    assert place_of("team/a:b/7") == ("team%2Fa:b", "0", "7.json")
    queues = [
        "..",
        ".",
        ".unfinished",
        "a/../b",
        "a%2Fb",
        "a/b",
        "a b",
        "A",
        "a",
        "x" * 500,
        "x" * 501,
        "\n",
        "é" * 100,
        "nul\0",
    ]
    folders = [place_of(f"{queue}/1")[0] for queue in queues]
    assert len(set(folders)) == len(queues)
    for folder in folders:
        assert not folder.startswith(".")
        assert "/" not in folder
        assert folder.isascii()
        assert folder.isprintable()
        assert len(folder) < 200


@pytest.mark.parametrize(
    "key",
    ["images", "images/", "/1", "images/x", "images/-1", "images/1e3", "images/١", "images/" + "9" * 99],
)
def test_keys_of_no_item(key: str) -> None:
    with pytest.raises(BadInput):
        place_of(key)


def test_a_thousand_in_one_folder(fast: Path) -> None:
    sink = open_directory(f"dir:{fast}/r")
    sink.store([made(n) for n in (0, 999, 1000, 1001, 987_654_321)])
    found = sorted(str(p.relative_to(fast / "r")) for p in (fast / "r").rglob("*.json"))
    assert found == [
        "images/0/0.json", "images/0/999.json", "images/1/1000.json", "images/1/1001.json", "images/987654/987654321.json",
    ]  # fmt: skip


# --- the power goes off --------------------------------------------------------------------------------------


def story(place: Path, kind: type[DirectorySink]) -> Log:
    """Opening, two batches, one of them partly somebody else's whose folder was never synced, and a look."""
    (place / "disk").mkdir()
    with recording(place / "disk") as log:
        sink = kind(place / "disk" / "new" / "results")
        sink.check()
        sink.store([made(n, result="x" * 700) for n in (1, 1000)])
        log.mark("1 1000")
        # As a process does that dies between the link and the sync of the folder.
        folder = place / "disk" / "new" / "results" / "images" / "0"
        draft = os.open(folder.parent.parent / "d", os.O_CREAT | os.O_WRONLY)
        os.write(draft, document_of(made(2, result="x" * 700)))
        os.fsync(draft)
        os.close(draft)
        os.link(folder.parent.parent / "d", folder / "2.json")
        assert sink.known(["images/2", "images/3"]) == {"images/2"}
        log.mark("2")
        sink.store([made(n, result="x" * 700) for n in (2, 3)])
        log.mark("3")
    log.check_complete()
    return log


def check(log: Log, place: Path, states: int) -> int:
    looked = 0
    for crash in crash_states(log, count=states, seed=SEED):
        looked += 1
        crash.write_to(place / "after")
        results = place / "after" / "new" / "results"
        there = {}
        for path in results.glob("images/*/*.json"):
            data = path.read_bytes()
            whole = data == document_of(made(int(path.stem), result="x" * 700))
            assert whole, f"{path.name} is torn: {crash}"
            there[path.stem] = data
        promised = {item for mark in crash.marks for item in mark.split()}
        assert promised <= there.keys(), f"{promised - there.keys()} is lost: {crash}"
    return looked


def test_power_cuts(fast: Path) -> None:
    assert check(story(fast, DirectorySink), fast, STATES) >= 100


MUTANTS: dict[str, list[tuple[str, str]]] = {
    "a file is not synced": [("            for _, fd in written:\n                os.fsync(fd)\n", "")],
    "the folder is not synced": [("                            os.fsync(folder)\n", "")],
    "what is known is not synced": [("                        os.fsync(folder)\n                        found", "                        found")],
    "the folder above is not synced": [("            os.fsync(above)\n", "")],
    "the folder of the queues is not synced": [("            os.fsync(root)\n", "")],
    "new folders are not synced": [("            make_folder(self.path)\n", "            self.path.mkdir(parents=True, exist_ok=True)\n"), ("                    sync_path(self.path.parent)", "                    pass")],
}  # fmt: skip


def mutant(changes: list[tuple[str, str]]) -> type[DirectorySink]:
    """The source with something wrong in it."""
    text = Path(directory.__file__).read_text()
    for old, new in changes:
        assert text.count(old) == 1, f"the source no longer has {old!r} once"
        text = text.replace(old, new)
    spec = importlib.util.spec_from_loader("mutant", loader=None)
    assert spec is not None
    module: types.ModuleType = importlib.util.module_from_spec(spec)
    exec(compile(text, "mutant", "exec"), module.__dict__)
    kind: type[DirectorySink] = module.DirectorySink
    return kind


@pytest.mark.parametrize("what", MUTANTS, ids=lambda w: w.replace(" ", "-"))
def test_it_finds(fast: Path, what: str) -> None:
    log = story(fast, mutant(MUTANTS[what]))
    with pytest.raises(AssertionError, match=r"Crash\("):
        check(log, fast, 400)


# --- the folder ----------------------------------------------------------------------------------------------


def test_a_draft_of_somebody_who_died_is_nothing(fast: Path) -> None:
    sink = open_directory(f"dir:{fast}/r")
    (fast / "r" / ".unfinished" / "0123").write_text('{"key": "images/1"')
    assert sink.known(["images/1"]) == set()
    sink.store([made(1)])
    assert [p.name for p in (fast / "r" / ".unfinished").iterdir()] == ["0123"]


def test_a_full_disk(tmp_path: Path) -> None:
    place = tmp_path / "full"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(place)], capture_output=True, check=False
    )
    need(mounted.returncode == 0, "the right to mount")
    try:
        sink = open_directory(f"dir:{place}/r")
        sink.store([made(1)])
        with pytest.raises(SinkDown, match="full"):
            sink.store([made(n, result="x" * 100_000) for n in range(2, 8)])
        assert json.loads((place / "r/images/0/1.json").read_text())["result"] == [1, 1]
        assert list((place / "r/.unfinished").iterdir()) == []
        sink.store([made(9, result="fits")])
        assert sink.known(["images/1", "images/2", "images/9"]) == {"images/1", "images/9"}
    finally:
        subprocess.run(["umount", "-l", str(place)], check=False)


def test_a_folder_on_another_disk_is_not_the_one_that_was_opened(fast: Path, tmp_path: Path) -> None:
    """A disk that was unmounted leaves a folder of the same name behind."""
    if os.stat(fast).st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("one disk")
    (tmp_path / "mnt").symlink_to(fast)
    sink = open_directory(f"dir:{tmp_path}/mnt/r")
    sink.store([made(1)])
    (tmp_path / "mnt").unlink()
    (tmp_path / "mnt" / "r").mkdir(parents=True)
    with pytest.raises(SinkDown, match="another disk"):
        sink.store([made(2)])
    assert list((tmp_path / "mnt" / "r").iterdir()) == []


def test_a_folder_that_is_gone_is_not_made_again(fast: Path) -> None:
    sink = open_directory(f"dir:{fast}/r")
    (fast / "r").rename(fast / "away")
    with pytest.raises(SinkDown):
        sink.store([made(1)])
    assert not (fast / "r").exists()


@pytest.mark.parametrize("planted", ["queue", "thousand", "file"])
def test_links_lead_nowhere(fast: Path, planted: str) -> None:
    outside = fast / "outside"
    outside.mkdir()
    sink = open_directory(f"dir:{fast}/r")
    images = fast / "r" / "images"
    if planted == "queue":
        images.symlink_to(outside)
    elif planted == "thousand":
        images.mkdir()
        (images / "0").symlink_to(outside)
    else:
        (images / "0").mkdir(parents=True)
        (images / "0" / "1.json").symlink_to(outside / "1.json")
    with pytest.raises(SinkDown):
        sink.store([made(1)])
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("path", ["/dev/null/x", "/proc/nowhere/x"])
def test_places_that_are_no_folder(path: str) -> None:
    with pytest.raises(Misconfigured) as caught:
        open_directory(f"dir:{path}")
    assert "hard links" in caught.value.remedy


def test_who_looked_too_early_writes_over_nothing(fast: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C2: a zombie that saw no file, was stopped, and goes on."""
    url = f"dir:{fast}/r"
    zombie, other = open_directory(url), open_directory(url)
    look = zombie.known

    def look_and_sleep(keys: Any) -> set[str]:
        found = look(keys)
        other.store([made(1, delivery=2), made(2, delivery=2)])
        return found

    monkeypatch.setattr(zombie, "known", look_and_sleep)
    zombie.store([made(n, delivery=1) for n in (1, 2, 3)])
    kept = {p.stem: json.loads(p.read_text())["delivery"] for p in (fast / "r").glob("images/0/*.json")}
    assert kept == {"1": 2, "2": 2, "3": 1}


def test_results_are_written_once(fast: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = open_directory(f"dir:{fast}/r")
    sink.store([made(1), made(2)])
    calls: list[int] = []
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: (calls.append(fd), real(fd, data))[1])
    sink.store([made(1), made(2), made(3)])
    assert len(calls) == 1


# --- buckets -------------------------------------------------------------------------------------------------


def test_a_bucket_that_ignores_the_condition_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """C2: a zombie could write over what is stored."""
    gcs = FakeGcs(obeys=False)
    try:
        for key, value in gcs.server.environment.items():
            monkeypatch.setenv(key, value)
        sink = open_bucket(gcs.server.url())
        with pytest.raises(SinkDown, match="ignores the condition"):
            sink.store([made(1)])
        with pytest.raises(Misconfigured, match="cannot be a sink"):
            sink.check()
        assert not [name for name in gcs.objects if "images" in name]
    finally:
        gcs.close()


def test_an_answer_that_was_lost(object_stores: Servers) -> None:
    """The object is there, and the next attempt finds that it is ours."""
    place = BucketPlace("gs", object_stores["gcs"])
    try:
        sink = place.open()
        sink.store([made(1)])
        lost: list[Any] = []

        def lose(seen: Any) -> str | None:
            if seen.method == "PUT" and not lost:
                lost.append(seen)
                return "lost"
            return None

        place._proxy.faults = lose
        sink.store([made(2)])
        assert lost
        assert place.stored()["images/2"]["result"] == [2, 1]
    finally:
        place.end()


def test_opening_a_bucket_sends_nothing(object_stores: Servers) -> None:
    """Whoever opens a sink may fork its workers afterwards."""
    place = BucketPlace("gs", object_stores["gcs"])
    try:
        assert isinstance(place.open(), BucketSink)
        assert place.seen == []
    finally:
        place.end()


def test_a_bucket_that_is_not_there(object_stores: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    server = object_stores["moto"]
    for key, value in server.environment.items():
        monkeypatch.setenv(key, value)
    sink = open_bucket("s3://no-such-bucket-here/x")
    with pytest.raises(SinkDown):
        sink.store([made(1)])
    with pytest.raises(Misconfigured, match="no such bucket"):
        sink.check()


@pytest.mark.parametrize("kind", ["azurite", "gcs"])
def test_other_clouds(object_stores: Servers, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server = object_stores[kind]
    for key, value in server.environment.items():
        monkeypatch.setenv(key, value)
    sink = open_bucket(server.url())
    sink.store([made(1, queue="a/b%c"), made(2, queue="a/b%c")])
    sink.store([made(1, queue="a/b%c", delivery=2, result="later")])
    assert sink.known(["a/b%c/1", "a/b%c/2", "a/b%c/3", "a/b/1"]) == {"a/b%c/1", "a/b%c/2"}
