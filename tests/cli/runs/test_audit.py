"""`sublet audit` over a job that really trained: proven, and not proven once somebody edited a row by hand."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import apsw
import pytest

from sublet.wiring import checkpoints
from tests import forked
from tests.cli.test_commands import as_json, home, sublet  # noqa: F401
from tests.homes import Home

JOB = """
import sys, numpy as np, sublet
for end in map(int, sys.argv[1:]):
    w, rng = np.zeros(100), np.random.default_rng(0)
    run = sublet.train("toy", state={"w": w, "rng": rng}, every=4, vram="64MiB", progress=False)
    for step in run.steps(end):
        w += rng.standard_normal(100)
        step.effect(f"row-{step.number}", lambda: {"sum": float(w.sum())})
"""


def train(home: Home, *ends: int) -> None:  # noqa: F811
    forked.run([sys.executable, "-c", JOB, *map(str, ends)], env=home.environment, timeout=60, check=True)


def edit(home: Home, sql: str) -> None:  # noqa: F811
    db = apsw.Connection(str(Path(home.settings.home) / "ledger.db"))
    db.set_busy_timeout(5000)
    db.execute(sql)
    assert db.changes() == 1
    db.close()


def audit(home: Home, *args: str) -> tuple[int, list[dict[str, Any]]]:  # noqa: F811
    done = sublet(home, "audit", *args, "--json")
    return done.returncode, json.loads(done.stdout)


@pytest.fixture
def trained(home: Home) -> Home:  # noqa: F811
    train(home, 6, 10)
    return home


def test_a_job_is_proven_until_somebody_edits_a_row(trained: Home) -> None:
    shown = sublet(trained, "audit", "toy")
    assert shown.returncode == 0, shown.stderr
    for text in (
        "1-10, each committed once",
        "10, each committed once",
        "2, epochs 1 to 2",
        "on the replicas",
        "proven",
    ):
        assert text in shown.stdout
    code, (proof,) = audit(trained)
    assert (code, proof["proven"], proof["commits"], proof["effects"], proof["leases"]) == (0, True, 4, 10, 2)
    assert audit(trained, "toy", "--deep")[1][0]["checkpoint"] == "every copy read"
    rows = [
        json.loads(line)
        for line in sublet(trained, "audit", "toy", "--effects", "--json").stdout.splitlines()
    ]
    assert [r["key"] for r in rows if r["key"].startswith("toy#")] == sorted(
        f"toy#row-{n}" for n in range(1, 11)
    )
    assert "sum" in sublet(trained, "audit", "toy", "--effects").stdout

    edit(trained, """UPDATE effect SET outcome = '{"sum": 0.0}' WHERE key = 'toy#row-7'""")
    broken = sublet(trained, "audit", "toy")
    assert broken.returncode == 73
    assert "effect toy#row-7" in broken.stdout
    assert "backup" in broken.stdout
    assert "not proven: 1 fault in toy" in broken.stderr
    code, (proof,) = audit(trained, "toy")
    assert (code, proof["proven"], proof["faults"][0]["row"]) == (73, False, "effect toy#row-7")


def test_a_rollback_is_part_of_the_story(trained: Home) -> None:
    with checkpoints(settings=trained.settings) as store:
        store.rollback("toy", 1)
    train(trained, 12)
    code, (proof,) = audit(trained, "toy")
    assert (code, proof["faults"], proof["first_step"], proof["last_step"]) == (0, [], 1, 12)
    assert proof["undone_commits"] >= 1
    assert "rollback" in sublet(trained, "audit", "toy").stdout


def test_a_checkpoint_that_is_not_there_is_named(trained: Home) -> None:
    store = Path(trained.settings.home) / "store"
    for manifest in (store / "manifests").rglob("*"):
        if manifest.is_file():
            manifest.unlink()
    code, (proof,) = audit(trained, "toy")
    assert code == 73
    assert proof["faults"][0]["row"].startswith("checkpoint toy version")
    assert audit(trained, "toy", "--no-store")[0] == 0
    shutil.rmtree(store)
    (store.parent / "store").write_text("no folder")
    code, (proof,) = audit(trained, "toy")
    assert (code, proof["checkpoint"].startswith("not reached")) == (0, True)
    assert sublet(trained, "audit", "toy", "--store").returncode == 78


def test_names_that_are_not_there(home: Home) -> None:  # noqa: F811
    assert sublet(home, "audit").returncode == 0
    done = sublet(home, "audit", "nothing")
    assert (done.returncode, "nothing was committed as nothing" in done.stderr) == (2, True)
