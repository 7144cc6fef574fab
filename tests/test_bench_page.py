"""`make bench` writes its page: what was not reached first, each part with its own run, earlier parts kept."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from bench import __main__ as bench
from bench.measure import Goal, Section
from bench.page import page, versions


def a_section(title: str, *goals: Goal) -> Section:
    return Section(title, ["", "ops/s"], [["ours", "1,000"], ["a | b", "900"]], list(goals), ["a note"])


def a_suite(*sections: Section, waited: float = 1.0, commit: str = "abc1234") -> dict[str, Any]:
    return {
        "at": "2026-01-01 10:00 UTC",
        "commit": commit,
        "seconds": 120,
        "waited_percent": waited,
        "machine": "cores 2",
        "sections": [json.loads(json.dumps(section.as_json())) for section in sections],
    }


FAST, SLOW = Goal("leases / etcd", 6.5, 6.0), Goal("a start", 3.0, 2.0, "s", at_most=True)


def test_what_was_not_reached_stands_first() -> None:
    text = page({"leases": a_suite(a_section("Leases", FAST, SLOW))}, ["studio"], {"redis": "8.1.0"})
    assert "**1 of 2 goals were reached.** Not measured: studio." in text
    first = text.index("| a start | 3.00 s | ≤ 2 s | leases |")
    assert first < text.index("## leases")
    assert "leases / etcd" not in text[: text.index("## leases")]
    assert "| leases / etcd | 6.50 x | ≥ 6 x | reached |" in text
    assert "| a \\| b | 900 |" in text
    assert "commit abc1234, 2 minutes; it waited for a CPU 1 % of the time." in text
    assert "do not quote" not in text
    assert "redis 8.1.0" in text


def test_a_busy_machine_is_said() -> None:
    text = page({"leases": a_suite(a_section("Leases", FAST), waited=12.5)}, [], {})
    assert "waited for a CPU 12.5 % of the time. **Others used the CPU: do not quote it.**" in text


def test_a_part_alone_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "RESULTS", tmp_path / ".bench" / "results.json")
    monkeypatch.setattr(bench, "PAGE", tmp_path / "benchmarks.md")
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.setattr(
        bench, "SUITES", {"leases": lambda _: [a_section("Leases", FAST)], "queues": lambda _: []}
    )
    monkeypatch.setattr("sys.argv", ["bench", "lea", "--place", "/var/tmp"])
    bench.keep({"queues": a_suite(a_section("Queues", SLOW), commit="0ldc0de")})
    assert bench.main() == 0
    text = (tmp_path / "benchmarks.md").read_text()
    assert text.index("## leases") < text.index("## queues")
    assert "commit 0ldc0de" in text
    assert "Not measured" not in text


def test_a_part_is_named_by_its_beginning() -> None:
    assert bench.chosen("queue") == ["queues"]
    assert bench.chosen("leases,queue") == ["leases", "queues"]
    for name in ("s", "nothing"):
        with pytest.raises(argparse.ArgumentTypeError, match="is none of leases, queues"):
            bench.chosen(name)


def test_every_peer_has_a_version_or_says_that_it_is_not_here(tmp_path: Path) -> None:
    found = versions(tmp_path)
    assert found["ray"] == "not installed"
    assert all(found.values())
