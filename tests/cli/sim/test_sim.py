"""`sublet sim studio`: the table, the JSON, and what it says of a wrong file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from sublet.cli.sim.sim import sim
from sublet.core.errors import BadInput
from sublet.sim.workload import COLUMNS

#: a restores to 10 and runs to 30, b comes at 12, a comes back at 40; one more failed.
LINES = [("0", "a", "20.0", "SUCCEED"), ("12", "b", "5", "SUCCEED"), ("40", "a", "10", "SUCCEED"), ("50", "c", "1", "FAILED")]  # fmt: skip


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.csv"
    rows = [",".join((*row, "TXT_2_IMG", "30.0", "1.0", "M0", "0")) for row in LINES]
    path.write_text("\n".join([",".join(COLUMNS), *rows]) + "\n")
    return path


def said(*words: object) -> str:
    done = CliRunner().invoke(sim, ["studio", *map(str, words)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_the_table_has_a_line_for_each_way_of_sharing(log):
    lines = said(log, "--gpus", 1, "--restore", "10s").splitlines()
    assert lines[0] == (
        "3 requests of 2 tenants, 0.0 GPU-hours of work, on 1 GPUs; a restore takes 10s; 1 that did not succeed are left out"
    )
    by_name = {line.split()[0]: line.split() for line in lines[2:-1]}
    assert list(by_name) == ["ours", "passive-ttl", "idle-cull", "per-user", "per-request"]
    # Waits worked out by hand in tests/sim/test_engine.py.
    assert by_name["ours"][1:3] == ["26.5", "33.8"]
    assert by_name["passive-ttl"][1:3] == ["10.0", "348.5"]
    assert by_name["idle-cull"][2] == "1,848"


def test_json_has_every_figure_in_microseconds(log):
    found = json.loads(
        said(log, "--gpus", 1, "--restore", "10s", "--scheme", "ours", "--scheme", "fair-ttl", "--json")
    )
    assert (found["requests"], found["tenants"], found["left_out"]) == (3, 2, {"FAILED": 1})
    ours, fair = found["schemes"]
    assert (ours["scheme"], fair["scheme"]) == ("ours", "fair-ttl")
    assert ours["wait"] == {
        "p50_us": 26_500_000,
        "p95_us": 33_750_000,
        "p99_us": 33_750_000,
        "most_us": 33_750_000,
        "mean_us": 23_416_666,
    }
    assert ours["ends"] == {"idle": 2, "released": 1}


def test_another_ttl_and_the_first_days_only(log):
    assert "ttl 1m00s" in said(log, "--gpus", 1, "--ttl", "1m", "--scheme", "passive-ttl")
    assert said(log, "--days", 0.0002, "--scheme", "ours").startswith("2 requests of 2 tenants")


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--ttl", "1ms"], "ttl 1ms is out of range"),
        (["--ttl", "soon"], "is not a duration"),
        (["--days", "1e-12"], "nothing arrives in the first"),
    ],
)
def test_what_cannot_be_is_refused(log, words, what):
    with pytest.raises(BadInput, match=what):
        CliRunner().invoke(sim, ["studio", str(log), *words], catch_exceptions=False)


def test_the_fewest_gpus_and_a_ttl_are_found_for_a_target(log):
    text = said(log, "--gpus", 1, "--restore", "10s", "--scheme", "ours", "--target", "10s")
    assert "2 GPUs and a ttl of " in text
    assert (
        "p95 waits in seconds by number of GPUs, ttl 5m00s: 1: 33.8, 2: 10.0; 2 is the first within 10s"
        in text
    )
    found = json.loads(said(log, "--restore", "10s", "--scheme", "ours", "--target", "40s", "--json"))[
        "advice"
    ]
    assert (found["gpus"], found["p95_us"] <= 40_000_000) == (1, True)
    with pytest.raises(BadInput, match="below the restore of 10s cannot be had"):
        said(log, "--restore", "10s", "--target", "1s")


def test_another_policy_is_replayed(log):
    # Idle after a minute instead of five seconds: b waits for a's GPU that much longer.
    words = (log, "--gpus", 1, "--restore", "10s", "--scheme", "ours", "--scheme", "passive-ttl", "--json")
    usual = json.loads(said(*words))["schemes"]
    slow = json.loads(said(*words, "--policy", "idle_after=60s"))["schemes"]
    assert slow[0]["wait"]["p95_us"] > usual[0]["wait"]["p95_us"]
    assert slow[1] == usual[1]  # not ours: no policy of ours


def test_a_plot_of_the_studio(log, tmp_path):
    said(log, "--gpus", 1, "--scheme", "ours", "--plot", tmp_path / "s.svg")
    assert "p95 wait" in (tmp_path / "s.svg").read_text()


def test_a_wrong_file_is_one_sentence_and_a_remedy(tmp_path):
    (tmp_path / "spot.csv").write_text("t_s,event,node\n0,add,n1\n")
    done = subprocess.run(
        [sys.executable, "-m", "sublet", "sim", "studio", str(tmp_path / "spot.csv")],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "the trace spot.csv is no request log: without group" in done.stderr
    assert "its first line must be t_s,group,exec_s" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_help_names_every_scheme_and_shows_an_example():
    text = said("--help")
    assert "Example:  sublet sim studio" in text
    for name in ("ours", "fair-ttl", "passive-ttl", "idle-cull", "per-user", "per-request"):
        assert name in text
