"""`sublet drill` with real processes: it passes what resumes exactly, and fails what does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sublet.machine import lease_environment
from tests import forked
from tests.cli.test_commands import home  # noqa: F401
from tests.homes import Home

#: Losses of the one that must pass; `make proof` has many.
KILLS = int(os.environ.get("SUBLET_DRILL", "4"))

#: What a step does, and what the run is told that it depends on.
STEADY = ("w += rng.standard_normal(100)", '{"w": w, "rng": rng}')
FORGETFUL = ("m *= 0.9; m += rng.standard_normal(100); w += m", '{"w": w, "rng": rng}')
CLOCKED = ("w += time.time()", '{"w": w, "rng": rng}')

JOB = """
import time, numpy as np, sublet
w, m, rng = np.zeros(100), np.zeros(100), np.random.default_rng(0)
run = sublet.train("toy", state=STATE, every=3, vram="64MiB", ttl="20s", grace="5s", progress=False)
for step in run.steps(STEPS):
    BODY
    time.sleep(0.02)
    step.record(f"row-{step.number}", float(w.sum()))
"""


def drill(home: Home, command: list[str], *options: str) -> subprocess.CompletedProcess[str]:  # noqa: F811
    return forked.run(
        [sys.executable, "-m", "sublet", "drill", *options, "--", *command],
        env=home.environment,
        timeout=170 + 20 * KILLS,
    )


def job(kind: tuple[str, str], steps: int = 40) -> list[str]:
    code = JOB.replace("BODY", kind[0]).replace("STATE", kind[1]).replace("STEPS", str(steps))
    return [sys.executable, "-c", code]


def found(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_a_run_that_resumes_exactly_passes_every_kind_of_loss(home: Home, tmp_path: Path) -> None:  # noqa: F811
    kept = tmp_path / "kept"
    command = job(STEADY, 10 * KILLS)
    done = drill(home, command, "--kills", str(KILLS), "--seed", "5", "--json", "--keep", str(kept))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.startswith("seed 5 "), "the seed comes first, so that it can be repeated"
    shown = found(done)
    assert (shown["bit_equal"], shown["proven"], shown["faults"]) == (True, True, [])
    assert len(shown["losses"]) == KILLS
    assert {loss["kind"] for loss in shown["losses"]} == {"kill", "revoke", "stop", "term"}
    assert shown["jobs"]["toy"]["step"] == 10 * KILLS
    assert all(loss["wasted"] <= 7 for loss in shown["losses"]), "three steps in a span, a span behind"
    assert all(loss["wasted"] == 0 for loss in shown["losses"] if loss["kind"] == "term")
    assert any(loss["back_seconds"] for loss in shown["losses"])
    # Nothing of the user's was touched, and both runs can be looked at.
    assert not (Path(home.settings.home) / "ledger.db").exists()
    scratch = home.environment | {
        "SUBLET_HOME": str(kept / "disturbed" / "home"),
        "SUBLET_LEDGER": f"sqlite:{kept}/disturbed/home/ledger.db",
    }
    audit = [sys.executable, "-m", "sublet", "audit", "toy", "--no-store"]
    assert forked.run(audit, env=scratch).returncode == 0


@pytest.mark.parametrize(
    "kind", [FORGETFUL, CLOCKED], ids=["forgets part of its state", "depends on the clock"]
)
def test_a_run_that_does_not_is_told_what_is_different(home: Home, kind: tuple[str, str]) -> None:  # noqa: F811
    done = drill(home, job(kind), "--kills", "2", "--seed", "2", "--kinds", "kill")
    assert done.returncode == 73, done.stdout + done.stderr
    assert "DIFFERENT: at step 40 its state is different" in done.stdout
    assert "state.w: from element 0 of 100 on, the bits differ" in done.stdout
    assert "each committed once" in done.stdout, "a ledger in order does not make a run exact"
    assert "give sublet.train everything" in done.stderr


STAYING = """
import time, numpy as np, sublet
while True:
    w = np.zeros(10)
    run = sublet.train("toy", state={"w": w}, every=2, vram="64MiB", progress=False)
    for step in run.steps(30, on_notice="stop"):
        w += step.number
        time.sleep(0.02)
    if not run.preempted:
        break
"""


def test_a_command_that_takes_a_new_lease_by_itself_is_not_started_again(home: Home) -> None:  # noqa: F811
    done = drill(
        home, [sys.executable, "-c", STAYING], "--kills", "2", "--seed", "1", "--kinds", "revoke", "--json"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shown = found(done)
    assert (shown["bit_equal"], shown["proven"]) == (True, True)
    exits = {loss["grace_seconds"] > 0: loss["exit_code"] for loss in shown["losses"]}
    assert exits[True] is None, "it drained and went on"
    assert exits[False] != 0, "without grace the warden ended it, unless it had heard of it first and let go"


def test_who_is_not_followed_works_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(lease_environment.STEPS_VARIABLE, raising=False)
    assert lease_environment.onlooker() is None
    short = tmp_path / "short"
    short.write_bytes(b"")
    for path in (tmp_path / "gone", short, tmp_path):
        monkeypatch.setenv(lease_environment.STEPS_VARIABLE, str(path))
        assert lease_environment.onlooker() is None
    page = lease_environment.open_page(tmp_path / "page", create=True)
    monkeypatch.setenv(lease_environment.STEPS_VARIABLE, str(tmp_path / "page"))
    followed = lease_environment.onlooker()
    assert followed is not None
    lease_environment.write_steps(followed, 7, 5)
    assert lease_environment.read_steps(page) == (7, 5)


@pytest.mark.parametrize(
    ("command", "options", "code", "words"),
    [
        (["false"], [], 2, "failed with exit code 1, undisturbed"),
        (["true"], [], 2, "the command committed nothing"),
        (["sleep", "60"], ["--timeout", "1s"], 2, "did not finish within 1 s"),
        (["/no/such/program"], [], 2, "cannot be started"),
        (["true"], ["--kinds", "explode"], 2, "explode is unknown"),
    ],
)
def test_what_cannot_be_drilled_is_said_plainly(
    home: Home,  # noqa: F811
    command: list[str],
    options: list[str],
    code: int,
    words: str,
) -> None:
    done = drill(home, command, *options)
    assert done.returncode == code
    assert words in done.stderr
