"""`make proof` itself: its parts name what there is, a part that did not finish counts nothing, and the page says what was seen."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from proof import __main__ as runner
from proof.page import bound, page
from proof.parts import Part, parts, printed, told
from tests.homes import process_is_gone, wait_until

ROOT = Path(__file__).parents[2]
ALL = parts()


@pytest.mark.parametrize("part", ALL, ids=lambda p: p.name)
def test_a_part_names_what_there_is(part: Part) -> None:
    for word in part.command:
        if word.startswith("tests/"):
            file, _, name = word.partition("::")
            assert (ROOT / file).exists(), word
            assert not name or f"def {name}(" in (ROOT / file).read_text(), word
    sources = "".join(p.read_text() for p in (ROOT / "tests").rglob("*.py"))
    for name in part.environment:
        assert f'"{name}"' in sources, f"no test reads {name}"
    assert part.expected_s <= part.limit_s <= 3600


def test_all_of_it_fits_into_an_hour() -> None:
    """By what each is expected to take, in the order in which they begin; and what claims hang on has begun long before."""
    lanes = [0] * runner.LANES
    for part in sorted(ALL, key=lambda p: (not p.first, -p.expected_s)):
        begins = min(lanes)
        assert not part.first or begins <= 1800, part.name
        lanes[lanes.index(begins)] += part.expected_s
        if part.alone:
            lanes.append(begins + part.expected_s)
    assert max(lanes) <= 3400, lanes


def test_every_goal_is_asked_for() -> None:
    """What the parts are told to try is enough for every count that is wanted."""
    told_to = {
        name: int(often) for part in ALL for name, often in part.environment.items() if often.isdigit()
    }
    assert told_to["SUBLET_TRAINING_KILLS"] >= 10_000
    assert told_to["SUBLET_POSTGRES_CRASHES"] >= 500
    assert told_to["SUBLET_BLOCK_SYSCALLS"] >= 1_000
    words = {part.name: part.command for part in ALL}
    assert int(words["linear-sqlite"][words["linear-sqlite"].index("--ops") + 1]) >= 1_000_000
    assert int(words["deep"][words["deep"].index("--faults") + 1]) >= 1_000_000


def a_part(name: str, code: str, **over: object) -> Part:
    values = {
        "shows": "it",
        "rules": "L1",
        "command": [sys.executable, "-c", code],
        "expected_s": 1,
        "limit_s": 50,
    }
    return Part(name=name, **{**values, **over})  # type: ignore[arg-type]


def test_held_violated_and_not_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [
        a_part("good", "print('12 killed'); print('30 killed')", counts=printed(kills=r"(\d+) killed")),
        a_part("told", "pass", counts=told(races="MANY"), environment={"MANY": "300"}),
        a_part("bad", "print('5 killed'); raise SystemExit(1)", counts=printed(kills=r"(\d+) killed")),
        a_part("slow", "print('7 killed', flush=True); import time; time.sleep(60)", limit_s=1, counts=printed(kills=r"(\d+) killed")),
    ]  # fmt: skip
    monkeypatch.setattr(runner, "parts", lambda: made)
    where = ["--results", str(tmp_path), "--page", str(tmp_path / "proof.md")]
    assert runner.main(["good", "told", *where]) == 0
    assert runner.main(["slow", *where]) == 3
    assert runner.main(["bad", *where]) == 1
    made[0] = a_part("good", "import time; time.sleep(60)", limit_s=1)
    assert runner.main(["good", *where]) == 3, "cut off: what was found before stays"
    assert (
        "1 part was tried in this run, up to 3 at a time. From the run that began "
        in (tmp_path / "proof.md").read_text()
    )
    found = {p["name"]: p for p in json.loads((tmp_path / "results.json").read_text())["parts"]}
    assert {name: (p["verdict"], p["counts"]) for name, p in found.items()} == {
        "good": ("held", [["kills", 42]]),
        "told": ("held", [["races", 300]]),
        "bad": ("VIOLATED", []),
        "slow": ("not finished", []),
    }
    text = (tmp_path / "proof.md").read_text()
    assert re.search(r"\| kills of real processes \| 10,000 \| 42 \| not reached", text)
    assert "**bad**: VIOLATED" in text
    assert "**slow**: not finished" in text
    assert "1.0e-02" in text  # 3 in 300


@pytest.mark.parametrize("told", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_ends_what_it_started(tmp_path: Path, told: int) -> None:
    """Each part is in a session of its own: a Ctrl-C of the terminal does not reach it."""
    code = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
    program = f"""
import sys
from proof import __main__ as runner
from tests.proof.test_parts import a_part

made = [a_part(name, "", command=[sys.executable, "-c", {code!r}, f"{tmp_path}/{{name}}"]) for name in ("one", "two")]
runner.parts = lambda: made
runner.hear_interrupts()
sys.exit(runner.main(["--results", {str(tmp_path)!r}, "--page", "{tmp_path}/proof.md"]))
"""
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    try:
        wait_until(
            lambda: all(
                (tmp_path / name).exists() and (tmp_path / name).read_text() for name in ("one", "two")
            )
        )
        process.send_signal(told)
        assert process.wait(30) == 130
    finally:
        process.kill()
    assert all(process_is_gone(int((tmp_path / name).read_text())) for name in ("one", "two"))
    assert not (tmp_path / "proof.md").exists()


def test_when_what_only_computes_is_over_one_more_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the others waits until all four have begun."""
    code = f"""
import pathlib, sys, time
here = pathlib.Path({str(tmp_path)!r})
(here / sys.argv[1]).touch()
until = time.monotonic() + 60
while len(list(here.glob("other*"))) < 4:
    assert time.monotonic() < until
    time.sleep(0.01)
"""
    made = [a_part("computes", "pass", alone=True, first=True)]
    made += [
        a_part(name, "", command=[sys.executable, "-c", code, name], limit_s=100)
        for name in ("other1", "other2", "other3", "other4")
    ]
    monkeypatch.setattr(runner, "parts", lambda: made)
    assert runner.main(["--results", str(tmp_path / "results"), "--page", str(tmp_path / "proof.md")]) == 0
    assert "All 5 parts were tried in this one run, up to 4 at a time." in (tmp_path / "proof.md").read_text()


def test_an_unknown_part_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        runner.main(["nothing"])
    assert "no part nothing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("what", "count", "supports"),
    [
        ("kills", 10_000, "3.0e-04"),
        ("kills", 30, "1.0e-01"),
        ("kills", 29, "–"),
        ("kills", 0, "–"),
        ("seconds away", 3600, "–"),
    ],
)
def test_what_a_count_supports(what: str, count: int, supports: str) -> None:
    assert bound(what, count) == supports


def test_what_did_not_hold_supports_nothing() -> None:
    parts: list[dict[str, Any]] = [
        {"name": name, "shows": "s", "rules": "L1", "verdict": verdict, "run": "now", "counts": [("kills", 300)], "seconds": 6, "replay": "again"}
        for name, verdict in (("good", "held"), ("bad", "VIOLATED"), ("cut", "not finished"))
    ]  # fmt: skip
    parts[0]["run"] = "before"
    summary = {"at": "now", "seed": "1", "seconds": 60, "load_before": 1.0, "machine": {}, "run": "now", "lanes": 3, "parts": parts}  # fmt: skip
    text = page(summary)
    assert "| good | s | L1 | held | 300 kills | 0 | 1.0e-02 | 0.1 |" in text
    assert "| bad | s | L1 | VIOLATED | 300 kills | see below | – | 0.1 |" in text
    assert "| cut | s | L1 | not finished | 300 kills | – | – | 0.1 |" in text
    assert (
        "2 parts were tried in this run, up to 3 at a time. From the run that began before, 1: good." in text
    )
    parts[1]["run"] = "before"
    assert "1 part was tried in this run" in page(summary)


def test_the_page_has_the_whole_story() -> None:
    summary = {
        "at": "now", "seed": "1", "seconds": 60, "load_before": 1.0, "machine": {"cores": "2"}, "run": "now", "lanes": 3,
        "parts": [
            {
                "name": "deep", "shows": "worlds", "rules": "L1", "verdict": "held", "run": "now", "counts": [("simulated days", 400), ("faults", 1_200_000)],
                "seconds": 60, "last_words": "", "replay": "",
                "numbers": {"faults_by_kind": {"kill": 5}, "checks": {"L1": 9}, "work": {"step": 3}},
            },
            {
                "name": "mutants", "shows": "bugs", "rules": "all", "verdict": "held", "run": "now", "counts": [("bugs killed", 1)], "seconds": 1, "last_words": "",
                "replay": "", "numbers": [{"name": "no fence", "rule": "S2", "verdict": "killed", "test": "tests/x.py::y", "off": ""}],
            },
        ],
    }  # fmt: skip
    text = page(summary)
    assert "| simulated days | 365 | 400 | reached |" in text
    assert "| faults in simulated worlds | 1,000,000 | 1,200,000 | reached |" in text
    assert "| 1,200,000 faults | 0 | 2.5e-06 |" in text
    assert "| 1 bugs killed | 0 | – |" in text
    assert "All 2 parts were tried in this one run, up to 3 at a time." in text
    assert "Not tried: scripts." in page({**summary, "never": ["scripts"]})
    assert "| no fence | S2 | killed | `x.py::y` | – |" in text
    [of_s2] = [line for line in text.splitlines() if line.startswith("| S2 | ")]
    assert "no fence; " in of_s2
    assert "| 1 of " in of_s2
