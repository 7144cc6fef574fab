"""`sublet queue …` as people use it: what it says, what it leaves with, and that it changes nothing it should not."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import sublet as library
from sublet.cli.main import cli, main
from sublet.cli.queues.queue import queue
from sublet.queues import queue as runtime_queues
from sublet.wiring import open_ledger
from tests import forked
from tests.homes import Home, wait_until


@dataclass
class Said:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def home(sqlite_home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.chdir(tmp_path)
    return sqlite_home


@pytest.fixture
def sublet(
    home: Home, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> Iterator[Callable[..., Said]]:
    """The whole program with its exit code, in this process: a command takes a moment instead of half a second."""

    def call(*args: str, stdin: bytes = b"") -> Said:
        monkeypatch.setattr(sys, "argv", ["sublet", *args])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capfdbinary.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capfdbinary.readouterr()
        return Said(int(left.value.code or 0), out.decode(), err.decode())

    yield call
    # A command remembers its --help as it was first asked for; whoever asks next must find it unasked.
    for command in (cli, queue, *queue.commands.values()):
        command._help_option = None


Call = Callable[..., Said]


def work(name: str, most: int = 1000, bad: Callable[[Any], bool] = lambda body: False) -> None:
    """What is there, once: each result is the body's text in capitals."""
    queue = library.queue(name)
    for item in queue.take(most):
        if bad(item.body):
            item.fail(ValueError(f"cannot do {item.body}\x1b[31m"))
        else:
            item.complete({"of": item.body, "said": str(item.body).upper()})


# --- publishing ----------------------------------------------------------------------------------------------


def test_items_from_arguments_lines_and_names_of_files(sublet: Call, tmp_path: Path) -> None:
    assert sublet("queue", "publish", "q", "a", "b", "a").out == "q: 3 new, 0 duplicates, 0 conflicts\n"
    assert sublet("queue", "publish", "keyed", "a", "b", "a", "--key", "self", "--json").json == {
        "queue": "keyed", "new": 2, "duplicates": 1, "conflicts": 0, "conflicting": [],
    }  # fmt: skip
    (tmp_path / "lines.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n\n  \nthree with spaces  \n\xc3\xa4")
    assert "4 new" in sublet("queue", "publish", "lines", "--file", "lines.txt").out
    assert [i["body"] for i in sublet("queue", "peek", "lines", "--json").json] == [
        "one", "two", "three with spaces  ", "ä",
    ]  # fmt: skip
    for args in (["--file", "-"], ["-"]):
        assert "2 new" in sublet("queue", "publish", "piped", *args, stdin=b"x\ny\n").out
    for name in ("a/1.png", "a/b/2.png", "a/b/3.txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    assert "2 new" in sublet("queue", "publish", "images", "--glob", "a/**/*.png").out
    assert {i["body"] for i in sublet("queue", "peek", "images", "--json").json} == {"a/1.png", "a/b/2.png"}
    nothing = sublet("queue", "publish", "images", "--glob", "*.gif")
    assert (nothing.code, "no file matches *.gif" in nothing.err) == (2, True)


def test_json_lines_and_their_keys(sublet: Call) -> None:
    lines = b'{"id": 7, "p": "x"}\n{"id": "8"}\n{"id": 7, "p": "x"}\n[1, null]\n'
    assert "4 new" in sublet("queue", "publish", "plain", "-", "--jsonl", stdin=lines).out
    first = sublet("queue", "publish", "j", "-", "--jsonl", "--key-field", "id", stdin=lines[:-10])
    assert first.out == "j: 2 new, 1 duplicate, 0 conflicts\n"
    assert [(i["key"], i["body"]) for i in sublet("queue", "peek", "j", "--json").json] == [
        ("7", {"id": 7, "p": "x"}), ("8", {"id": "8"}),
    ]  # fmt: skip
    other = sublet(
        "queue", "publish", "j", "-", "--jsonl", "--key-field", "id", stdin=b'{"id":7}\n{"id":9}\n'
    )
    assert other.code == 73
    assert other.out == "j: 1 new, 0 duplicates, 1 conflict\n"
    assert "1 whose key is known with another item (7)" in other.err
    assert sublet("queue", "peek", "j", "--json").json[0]["body"] == {"id": 7, "p": "x"}
    missing = sublet("queue", "publish", "j", "-", "--jsonl", "--key-field", "nr", stdin=b'{"nr":true}')
    assert (missing.code, "line 1 has no text or whole number in the field 'nr'" in missing.err) == (2, True)


def test_a_long_item_is_known_by_its_digest(sublet: Call) -> None:
    line = b"x" * 2000 + b"\n"
    assert "1 new, 1 duplicate" in sublet("queue", "publish", "q", "-", "--key", "self", stdin=line * 2).out
    assert sublet("queue", "peek", "q", "--json").json[0]["key"].startswith("sha256:")


BAD_LINES = [
    (b"[1", "--jsonl", "line 1501 is not JSON: Expecting ',' delimiter at character 3"),
    (b'{"a": NaN}', "--jsonl", "line 1501 is not JSON: NaN is no JSON"),
    (b"[" * 100_000, "--jsonl", "line 1501 is not JSON"),
    (b"9" * 5000, "--jsonl", "line 1501 is not JSON"),
    (b"\xff\xfe", "", "line 1501 is not UTF-8"),
    (b"x" * 1_100_000, "", "line 1501 has 1.1MB; a queue takes 1MiB"),
    (b"x" * 10_000_000, "", "line 1501 is longer than 8MiB"),
]


@pytest.mark.parametrize(("bad", "option", "says"), BAD_LINES, ids=lambda v: str(v)[:20])
def test_a_bad_line_is_named_and_everything_before_it_is_published(
    sublet: Call, bad: bytes, option: str, says: str
) -> None:
    """1500 is one batch and a half: what was read and not yet published counts too."""
    Path("lines").write_bytes(b"7\n" * 1500 + bad + b"\n8\n")
    done = sublet("queue", "publish", "q", "--file", "lines", *filter(None, [option]))
    assert done.code == 2
    assert says in done.err
    assert "everything before it was: 1500 new, 0 duplicates, 0 conflicts" in done.err
    assert "tail -n +1501 lines | sublet queue publish q" in done.err
    assert sublet("queue", "stats", "q", "--json").json["published"] == 1500
    subprocess.run("tail -n +1502 lines > rest", shell=True, check=True)
    assert "1 new" in sublet("queue", "publish", "q", "--file", "rest", *filter(None, [option])).out


def test_a_bad_first_line_publishes_nothing(sublet: Call) -> None:
    done = sublet("queue", "publish", "q", "-", "--jsonl", stdin=b"no\n")
    assert (done.code, "line 1 is not JSON" in done.err, "nothing was published" in done.err) == (
        2,
        True,
        True,
    )
    assert sublet("queue", "ls", "--json").json == []


def test_the_terms_of_a_queue(sublet: Call) -> None:
    terms = ["--tries", "3", "--losses", "4", "--visibility", "5m", "--backoff", "10s", "--concurrency", "2"]
    assert "its terms are set" in sublet("queue", "publish", "q", *terms).out
    want = {"visibility_seconds": 300, "tries": 3, "losses": 4, "backoff_seconds": 10, "concurrency": 2}
    assert sublet("queue", "show", "q", "--json").json["terms"] == want
    sublet("queue", "publish", "q", "a", "--tries", "7", "--priority", "5", "--delay", "1h")
    shown = sublet("queue", "show", "q", "--json").json
    assert shown["terms"] == want | {"tries": 7}
    assert (shown["delayed"], shown["ready"]) == (1, 0)
    [item] = sublet("queue", "peek", "q", "--state", "delayed", "--json").json
    assert item["priority"] == 5
    assert "in 59m" in sublet("queue", "peek", "q", "--state", "delayed").out
    assert "delayed: ready in 59m" in sublet("queue", "show", "q", str(item["id"])).out


WRONG: list[tuple[list[str], str]] = [
    (["publish", "q"], "there is nothing to publish"),
    (["publish", "../q", "a"], "is not a name"),
    (["publish", "q", "a", "--file", "f"], "say one of them"),
    (["publish", "q", "a", "--key", "self", "--key-field", "x"], "not both"),
    (["publish", "q", "--file", "nowhere"], "nowhere cannot be read: No such file"),
    (["publish", "q", "--file", "/"], "cannot be read"),
    (["publish", "q", "a", "--tries", "0"], "tries and losses are whole numbers"),
    (["publish", "q", "a", "--visibility", "soon"], "is not a duration"),
    (["publish", "q", "a", "--visibility", "1ms"], "visibility"),
    (["publish", "q", "a", "--priority", "9999999"], "item 1: priority 9999999 is out of range"),
    (["publish", "q", "a", "--delay", "-1s"], "delay"),
    (["publish", "q", "a", "--broker", "nowhere"], "has no scheme"),
    (["redrive", "there"], "say which items to redrive, or --all"),
    (["redrive", "there", "1", "--all"], "say which items to redrive, or --all"),
    (["purge", "there", "--state", "ready"], "nobody is there to be asked"),
    (["results", "there", "--output", "no/folder/x"], "there is no folder"),
    (["results", "there", "--output", "/dev/null"], "is not a file that could be replaced"),
    (["results", "there", "--format", "csv", "--json"], "cannot both go to standard output"),
    (["stats", "there", "--every", "never"], "is not a duration"),
    (["show", "there", "99"], "the queue has no item 99"),
]


@pytest.mark.parametrize(("args", "says"), WRONG, ids=lambda v: " ".join(v) if isinstance(v, list) else "")
def test_wrong_requests(sublet: Call, args: list[str], says: str) -> None:
    sublet("queue", "publish", "there", "a")
    done = sublet("queue", *args)
    assert (done.code in (2, 78), says in done.err) == (True, True), done
    assert "Traceback" not in done.err
    assert sublet("queue", "stats", "there", "--json").json["ready"] == 1
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize(
    "verb",
    [
        "show q",
        "peek q",
        "stats q",
        "stats q --watch",
        "redrive q --all",
        "purge q --state all --yes",
        "pause q",
        "resume q",
        "results q",
        "results q --dead",
        "audit q",
    ],
)
def test_an_unknown_queue_names_those_there_are(sublet: Call, verb: str) -> None:
    empty = sublet("queue", *verb.split())
    assert (empty.code, "sublet queue publish q" in empty.err) == (2, True)
    sublet("queue", "publish", "images", "a")
    done = sublet("queue", *verb.split(), "--json")
    assert done.code == 2
    assert json.loads(done.err)["error"]["remedy"] == "there are: images"
    assert [q["name"] for q in sublet("queue", "ls", "--json").json] == ["images"]


def test_a_broker_that_is_down_says_what_was_published_before(
    sublet: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sublet.core.errors import BrokerDown

    class Flaky:
        sent = 0

        def publish(self, items: Any) -> None:
            if self.sent:
                raise BrokerDown("the broker does not answer")
            Flaky.sent += len(items)

    monkeypatch.setattr("sublet.queues.opening.open_broker", lambda url, name: Flaky())
    done = sublet("queue", "publish", "q", "-", "--broker", "amqp://here", stdin=b"a\n" * 1200)
    assert done.code == 69
    assert "the broker does not answer. Before that: 1000 sent to the broker" in done.err
    assert "publish the rest then" in done.err


def test_ctrl_c_says_what_is_in(sublet: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    into_ledger, batches = runtime_queues.Queue._into_ledger, []

    def interrupted(self: Any, drafts: Any) -> Any:
        if batches:
            raise KeyboardInterrupt
        batches.append(1)
        return into_ledger(self, drafts)

    monkeypatch.setattr(runtime_queues.Queue, "_into_ledger", interrupted)
    done = sublet("queue", "publish", "q", "-", stdin=b"a\n" * 1200)
    assert done.code == 130
    assert "stopped; of q: 1000 new, 0 duplicates, 0 conflicts" in done.err


# --- looking -------------------------------------------------------------------------------------------------


def test_a_queue_from_publish_to_purge(sublet: Call) -> None:
    empty = sublet("queue", "ls")
    assert (empty.code, empty.out, "sublet queue publish" in empty.err) == (0, "", True)
    sublet("queue", "publish", "q", "a", "bad", "c", "d", "--tries", "1", "--key", "self")
    assert sublet("queue", "ls").out.splitlines()[1].split() == [
        "q", "4", "0", "0", "0", "0", "0.0/s", "0", "open",
    ]  # fmt: skip
    work("q", 3, lambda body: body == "bad")
    [listed] = sublet("queue", "ls", "--json").json
    assert (listed["ready"], listed["done"], listed["dead"], listed["depth"]) == (1, 2, 1, 1)
    shown = sublet("queue", "show", "q").out
    for text in ("1 ready, 0 delayed, 0 leased, 2 done, 1 dead", "dead after 1 failures", "1 dead: 'sublet"):
        assert text in shown
    [dead] = sublet("queue", "peek", "q", "--state", "dead", "--json").json
    assert "ValueError: cannot do bad\\x1b[31m" in sublet("queue", "peek", "q", "--state", "dead").out
    item = sublet("queue", "show", "q", str(dead["id"])).out
    assert "last error\n" in item
    assert "ValueError: cannot do bad\\x1b[31m" in item
    assert "\x1b" not in item
    assert "1: 1 failed, 0 lost their worker" in item
    done = sublet("queue", "peek", "q", "--state", "done", "--json").json[0]
    assert (done["result"], done["delivery"]) == ({"of": "a", "said": "A"}, 1)
    assert '"said": "A"' in sublet("queue", "show", "q", str(done["id"])).out
    stats = sublet("queue", "stats", "q").out
    for text in ("depth     1: 1 ready", "done      2; 1 dead", "failures  1", "refused   0"):
        assert text in stats

    assert "paused: nothing is handed out" in sublet("queue", "pause", "q").out
    assert sublet("queue", "ls").out.splitlines()[1].split()[-1] == "paused"
    assert library.queue("q").take(9) == []
    assert "hands out items again" in sublet("queue", "resume", "q").out

    assert sublet("queue", "redrive", "q", str(dead["id"]), str(done["id"])).out == (
        "1 item of q made ready again; 1 of those named are not dead, and were left alone\n"
    )
    assert sublet("queue", "redrive", "q", "--all", "--json").json == {"queue": "q", "redriven": 0}
    work("q")
    assert sublet("queue", "audit", "q").out.endswith("proven\n")
    assert sublet("queue", "purge", "q", "--state", "done", "--yes").out == "4 items of q forgotten\n"
    assert sublet("queue", "stats", "q", "--json").json["purged"] == 4
    assert sublet("queue", "audit", "--json").json[0]["proven"] is True
    assert "no item of q is done" in sublet("queue", "peek", "q", "--state", "done").err


def test_a_purge_never_takes_what_somebody_has_unless_it_is_said(sublet: Call) -> None:
    sublet("queue", "publish", "q", "a", "b")
    queue = library.queue("q")
    [held] = queue.take(1)
    done = sublet("queue", "purge", "q", "--state", "all", "--yes")
    assert done.out == "1 item of q forgotten\n1 that somebody has were left: say --state leased for those\n"
    shown = sublet("queue", "show", "q").out
    assert f"{os.getpid()}" in shown
    assert "leased: consumer" in sublet("queue", "show", "q", str(held.id)).out
    assert sublet("queue", "purge", "q", "--state", "leased", "--yes", "--json").json["purged"] == 1
    with pytest.raises(library.StaleDelivery, match="purged"):
        held.complete(1)
    queue.close()
    assert sublet("queue", "audit", "q").code == 0


def test_watching_in_a_pipe_until_it_is_empty(sublet: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    sublet("queue", "publish", "q", "a", "b", "--tries", "1")
    looks = []

    def pass_by(seconds: float) -> None:
        looks.append(seconds)
        work("q", 1, lambda body: body == "a")

    monkeypatch.setattr("sublet.cli.queues.view.time.sleep", pass_by)
    done = sublet("queue", "stats", "q", "--until-empty", "--every", "70ms")
    lines = done.out.splitlines()
    assert (done.code, len(lines), looks) == (0, 3, [0.07, 0.07])
    assert "2 ready, 0 delayed, 0 leased, 0 done, 0 dead" in lines[0]
    assert "0 ready, 0 delayed, 0 leased, 1 done, 1 dead" in lines[2]
    [line] = sublet("queue", "stats", "q", "--until-empty", "--json").out.splitlines()
    assert json.loads(line)["done"] == 1

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sublet.cli.queues.view.time.sleep", interrupt)
    assert sublet("queue", "stats", "q", "--watch").code == 0


def test_watching_on_a_terminal(home: Home) -> None:
    """A real terminal: the picture is drawn, follows the queue, and Ctrl-C ends it without an error."""
    queue = library.queue("q")
    queue.publish(["a", "b", "c"])
    main_end, own_end = os.openpty()
    child = subprocess.Popen(
        [sys.executable, "-m", "sublet", "queue", "stats", "q", "--watch", "--every", "100ms"],
        stdin=own_end,
        stdout=own_end,
        stderr=own_end,
        env=home.environment | {"COLUMNS": "60", "TERM": "xterm"},
        start_new_session=True,
    )
    os.close(own_end)
    home.children.append(child)  # type: ignore[arg-type]
    os.set_blocking(main_end, False)
    drawn = b""

    def shows(text: str) -> bool:
        nonlocal drawn
        try:
            drawn += os.read(main_end, 1 << 20)
        except OSError:
            pass
        return text.encode() in drawn

    try:
        wait_until(lambda: shows("3 ready"))
        [first, *rest] = queue.take(3)
        wait_until(lambda: shows("by 1 worker"))
        wait_until(lambda: shows(str(os.getpid())))
        first.complete(1)
        wait_until(lambda: shows("1 done"))
        os.kill(child.pid, signal.SIGINT)
        wait_until(lambda: shows("") and child.poll() is not None)
        assert child.returncode == 0
        assert b"Traceback" not in drawn
        queue.give_back((item, item.untouched()) for item in rest)
    finally:
        os.close(main_end)
        queue.close()


# --- exporting -----------------------------------------------------------------------------------------------


def test_results_as_json_lines_and_csv(sublet: Call) -> None:
    bodies = ["plain", 'with "quotes", commas\nand lines', {"b": [1, None]}, 7, "ä", "=1+1", "", None, True]
    library.queue("q", tries=1).publish([*bodies, "bad"], key=lambda body: f"k{body!r}"[:100])
    queue = library.queue("q")
    for item in queue.take(20):
        if item.body == "bad":
            item.fail("no way\nat all")
        else:
            item.complete(item.body)
    lines = [json.loads(line) for line in sublet("queue", "results", "q").out.splitlines()]
    assert [line["body"] for line in lines] == bodies
    assert [line["result"] for line in lines] == bodies
    assert list(lines[0]) == ["id", "key", "body", "result", "done_at", "work_seconds", "delivery"]
    assert lines[0]["done_at"].endswith("Z")

    raw = sublet("queue", "results", "q", "--format", "csv").out
    assert raw.startswith("id,key,body,result,done_at,work_seconds,delivery\r\n")
    rows = list(csv.DictReader(io.StringIO(raw, newline="")))
    assert [row["result"] for row in rows] == [
        "plain", 'with "quotes", commas\nand lines', '{"b": [1, null]}', "7", "ä", "=1+1", "", "", "true",
    ]  # fmt: skip
    assert '"with ""quotes"", commas\nand lines"' in raw

    later = sublet("queue", "results", "q", "--after", str(lines[6]["id"])).out.splitlines()
    assert [json.loads(line)["body"] for line in later] == [None, True]
    [dead] = sublet("queue", "results", "q", "--dead").out.splitlines()
    assert (json.loads(dead)["error"], json.loads(dead)["failures"]) == ("no way\nat all", 1)
    assert (
        "error,died_at,failures,losses,delivery"
        in sublet("queue", "results", "q", "--dead", "--format", "csv").out
    )

    told = sublet("queue", "results", "q", "--output", "r.jsonl")
    assert told.out == f"9 results of q in r.jsonl; the last is item {lines[-1]['id']}\n"
    assert [json.loads(line) for line in Path("r.jsonl").read_text().splitlines()] == lines
    again = sublet("queue", "results", "q", "--output", "r.jsonl")
    assert (again.code, "is there already" in again.err) == (2, True)
    forced = sublet("queue", "results", "q", "--output", "r.jsonl", "--force", "--format", "csv", "--json")
    assert forced.json == {"queue": "q", "file": "r.jsonl", "count": 9, "last_id": lines[-1]["id"]}
    assert Path("r.jsonl").read_bytes().decode() == raw
    assert [p.name for p in Path.cwd().iterdir() if "draft" in p.name] == []


def test_names_that_are_no_utf8_come_out_as_they_went_in(sublet: Call) -> None:
    name = os.fsdecode(b"im\xff.png")
    library.queue("q").publish([name, "\ud800"])
    for item in library.queue("q").take(2):
        item.complete(item.body)
    lines = sublet("queue", "results", "q").out.splitlines()
    assert [json.loads(line)["result"] for line in lines] == [name, "\ud800"]
    assert sublet("queue", "results", "q", "--format", "csv", "--output", "x.csv").code == 0
    assert b"\\ud800" in Path("x.csv").read_bytes()
    sublet("queue", "purge", "q", "--state", "done", "--yes")
    library.queue("q").publish(name)
    library.queue("q").take(1)[0].complete(name)
    sublet("queue", "results", "q", "--format", "csv", "--output", "x.csv", "--force")
    assert b"im\xff.png" in Path("x.csv").read_bytes()


def test_an_export_that_fails_leaves_the_old_file(sublet: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    library.queue("q").publish(["a", "b"])
    work("q")
    Path("r.jsonl").write_text("old\n")
    monkeypatch.setattr("os.replace", _no_space)
    done = sublet("queue", "results", "q", "--output", "r.jsonl", "--force")
    assert done.code == 74
    assert "No space left on device; the results are in the ledger as before" in done.err
    assert Path("r.jsonl").read_text() == "old\n"
    assert sorted(p.name for p in Path.cwd().iterdir() if p.is_file()) == ["r.jsonl"]


def _no_space(*args: object) -> None:
    raise OSError(28, "No space left on device")


def test_large_results_are_read_a_few_at_a_time(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    library.queue("q").publish(["x" * 400_000] * 25 + ["y"] * 300)
    queue = library.queue("q")
    while items := queue.take(100):
        queue.complete((item, item.body) for item in items)
    ledger = open_ledger(home.settings)
    pages: list[int] = []

    def items_of(*args: Any, **options: Any) -> Any:
        found = real(*args, **options)
        pages.append(len(found))
        return found

    real = ledger.items
    monkeypatch.setattr(ledger, "items", items_of)
    assert [len(result.body) for result in queue.results()] == [400_000] * 25 + [1] * 300
    assert pages == [16, 5, 5, 6, 24, 96, 173, 0]


def test_a_reader_that_leaves_is_no_error(home: Home) -> None:
    library.queue("q").publish(["x" * 1000] * 500)
    work("q")
    command = f"{sys.executable} -m sublet queue results q | head -1"
    done = subprocess.run(
        ["/bin/bash", "-o", "pipefail", "-c", command], env=home.environment, capture_output=True, text=True
    )
    assert (done.returncode, len(done.stdout.splitlines()), done.stderr) == (0, 1, "")


# --- proving -------------------------------------------------------------------------------------------------


def test_an_edited_result_is_named(sublet: Call, home: Home) -> None:
    import apsw

    library.queue("q").publish(["a", "b"])
    library.queue("other").publish("c")
    work("q")
    assert sublet("queue", "audit").out.splitlines()[1].split()[-1] == "yes"
    db = apsw.Connection(str(home.settings.home / "ledger.db"))
    db.set_busy_timeout(10_000)  # a warden writes there too
    db.execute("UPDATE item SET result = '\"forged\"' WHERE id = 2")
    db.close()
    broken = sublet("queue", "audit", "q")
    assert broken.code == 73
    assert "item 2  S4    its result is not the one that was completed" in broken.out
    assert "do not rely on this item's result" in broken.out
    assert "NOT PROVEN" in broken.out
    assert "not proven: 1 fault in q" in broken.err
    as_json = sublet("queue", "audit", "--json")
    assert (as_json.code, [p["proven"] for p in as_json.json]) == (73, [True, False])
    assert sublet("queue", "audit").out.splitlines()[2].split("  ")[-1].strip() == "NO: 1 faults"


# --- many ----------------------------------------------------------------------------------------------------

#: `make proof` says a million.
MANY = int(os.environ.get("SUBLET_QUEUE_ITEMS", "30000"))
FEW = 2000
#: Of growth from few to many. An item is a kilobyte in memory: what held them all would need more than twice as much.
MOST_KB = 12_000

MEMORY = """
import re, sys, threading, time, sublet
from sublet.cli.main import cli, main
from sublet.cli.queues.queue import queue
peak, name = 0, sys.argv[1]
def used():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1])
def watch():
    global peak
    while True:
        peak = max(peak, used())
        time.sleep(0.005)
threading.Thread(target=watch, daemon=True).start()
def run(*args):
    sys.argv = ["sublet", "queue", *args]
    try:
        main()
    except SystemExit as left:
        assert not left.code, left.code
"""
PARTS = {
    "publish a generator": """
def items():
    for number in range(int(sys.argv[2])):
        yield f"{number:010d}" + "x" * 500
sublet.queue(name).publish(items(), key=lambda body: body[:10])
""",
    "publish lines": "run('publish', name + '-lines', '--file', name + '.txt')",
    "pull and complete": """
queue = sublet.queue(name)
while items := queue.take(100):
    assert queue.complete((item, item.body) for item in items) == [None] * len(items)
""",
    "results": "run('results', name, '--output', name + '.csv', '--format', 'csv')",
}


def test_memory_does_not_grow_with_the_number_of_items(home: Home, tmp_path: Path) -> None:
    """Publisher, puller and export, each in a process of its own, over few items and over many."""
    counts = {"few": FEW, "many": MANY}
    for name, count in counts.items():
        with (tmp_path / f"{name}.txt").open("w") as file:
            file.writelines(f"{number:010d}{'x' * 500}\n" for number in range(count))
    for part, code in PARTS.items():
        peaks = {}
        for name, count in counts.items():
            command = [sys.executable, "-c", f"{MEMORY}\n{code}\nprint(max(peak, used()))", name, str(count)]
            done = forked.run(command, env=home.environment, cwd=tmp_path, timeout=1800, check=True)
            peaks[name] = int(done.stdout.split()[-1])
        assert peaks["many"] - peaks["few"] < MOST_KB, f"{part}: {peaks}"
        print(f"{part}: {peaks['few']} kB for {FEW}, {peaks['many']} kB for {MANY}")
    with (tmp_path / "many.csv").open(newline="") as file:
        numbers = [row[3][:10] for row in csv.reader(file)][1:]
    assert numbers == [f"{number:010d}" for number in range(MANY)]
    ledger = open_ledger(home.settings)
    proof = ledger.prove_queue(ledger.queue(home.settings["tenant"], "many").id)
    assert (proof.flaws, proof.done, proof.waiting) == ((), MANY, 0)
