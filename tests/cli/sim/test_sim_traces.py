"""`sublet sim spot` and `sublet sim jobs`: tables, JSON, plots, advice, and what they say of a wrong file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from sublet.cli.sim.sim import sim
from sublet.core.errors import BadInput


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    path = tmp_path / "nodes.csv"
    path.write_text(
        "t_s,event,node\n0,add,a\n0,add,b\n3600,remove,a\n5400,add,c\n7200,remove,b\n9000,remove,c\n"
    )
    return path


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "jobs.csv"
    path.write_text(
        "submit_s,duration_s,gpus,vc\n0,100,1,hog\n1,100,1,hog\n2,100,1,small\n3,7200,1,small\n4,60,1,late\n"
    )
    return path


def said(*words: object) -> str:
    done = CliRunner().invoke(sim, list(map(str, words)), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_spot_compares_ways_to_save_and_says_which_to_use(nodes):
    lines = said("spot", nodes).splitlines()
    assert lines[0] == "nodes.csv: 4.0 node-hours of 3 nodes in 2.5 h, 3 of them taken"
    names = [line.split("  ")[0] for line in lines[2:9]]
    assert names == [
        "every=auto",
        "every 10s",
        "every 1m00s",
        "every 10m00s",
        "every 1h00m",
        "every 3h00m",
        "never",
    ]
    goodput = {
        name: float(line.split()[1 + name.count(" ")]) for name, line in zip(names, lines[2:9], strict=True)
    }
    assert goodput["never"] == 0
    assert goodput["every=auto"] > goodput["every 10m00s"] > goodput["every 1h00m"]
    assert lines[10].startswith("save every ")
    assert "or every=auto, with a ttl of " in lines[10]
    assert lines[11] == "- a node was lost 3 times in 4 node-hours: one every 1h20m"


def test_spot_in_json_adds_up(nodes):
    found = json.loads(said("spot", nodes, "--state", "12GB", "--restart", "1m", "--price", "0.9", "--json"))
    assert found["training"] == {
        "step_us": 1_000_000,
        "stall_us": 1_000_000,
        "save_us": 6_000_000,
        "restart_us": 60_000_000,
    }
    part = found["parts"][0]
    for way in part["ways"]:
        parts = [way[f"{name}_us"] for name in ("useful", "starting", "saving", "lost", "left_over")]
        assert sum(parts) == part["node_us"] == 4 * 3_600_000_000
        if way["useful_us"]:
            assert way["cost_per_useful_hour_micro"] == 900_000 * way["node_us"] // way["useful_us"]
    assert found["advice"]["goodput"] >= max(way["goodput"] for way in part["ways"][1:]) - 1e-6
    assert len(found["advice"]["reasons"]) == 4


def test_spot_with_a_notice_and_chosen_ways(nodes):
    found = json.loads(
        said(
            "spot",
            nodes,
            "--notice",
            "30s",
            "--every",
            "auto",
            "--every",
            "30s",
            "--every",
            "never",
            "--json",
        )
    )
    names = [way["name"] for way in found["parts"][0]["ways"]]
    assert names == ["every=auto + 30s notice", "every 30s + 30s notice", "never + 30s notice"]
    assert found["parts"][0]["ways"][2]["goodput"] > 0.95  # it saved when it was told


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--every", "0s"], "is not a cadence"),
        (["--every", "often"], "every 'often' is not a duration"),
        (["--price", "cheap"], "price 'cheap' is no price of an hour"),
        (["--step", "0s"], "a step of no time"),
        (["--state", "big"], "state 'big'"),
    ],
)
def test_spot_refuses_what_it_cannot_read(nodes, words, says):
    with pytest.raises(BadInput, match=says):
        said("spot", nodes, *words)


def test_jobs_compares_ways_to_share(log):
    lines = said("jobs", log, "--gpus", 3).splitlines()
    assert lines[0].startswith("5 jobs of 3 tenants, 2 GPU-hours of work in 4.0s on 3 GPUs")
    assert [line.split()[0] for line in lines[2:6]] == ["dedicated", "fifo", "ours", "ours-capped"]


def test_jobs_in_json(log):
    found = json.loads(
        said("jobs", log, "--gpus", 1, "--scheme", "fifo", "--scheme", "ours", "--hold-cap", "1h", "--json")
    )
    assert [s["scheme"] for s in found["schemes"]] == ["fifo", "ours"]
    assert found["jobs"] == 5
    assert found["schemes"][0]["most_us"] == (100 * 3 + 7200 - 4) * 1_000_000  # late, behind everybody
    assert found["schemes"][1]["most_us"] < found["schemes"][0]["most_us"] + 7200 * 1_000_000
    capped = json.loads(said("jobs", log, "--gpus", 1, "--longest", "60s", "--scheme", "fifo", "--json"))
    assert capped["work_us"] == 5 * 60 * 1_000_000


def test_jobs_finds_the_fewest_gpus(log):
    text = said("jobs", log, "--gpus", 1, "--scheme", "ours", "--target", "1s")
    assert "5 GPUs: with them ours keeps the p99 wait within 1s" in text
    found = json.loads(said("jobs", log, "--gpus", 1, "--scheme", "ours", "--target", "2h", "--json"))[
        "fewest_gpus"
    ]
    assert found["p99_us"] <= 7200 * 1_000_000
    assert str(found["gpus"]) in found["tried"]


def test_plots_go_to_a_file_or_to_the_terminal(nodes, log, tmp_path):
    said("spot", nodes, "--plot", tmp_path / "spot.svg")
    assert "every=auto" in (tmp_path / "spot.svg").read_text()
    said("jobs", log, "--gpus", 2, "--scheme", "fifo", "--scheme", "ours", "--plot", tmp_path / "jobs.svg")
    assert "Jain" in (tmp_path / "jobs.svg").read_text()
    assert "█" in said("spot", nodes, "--plot", "-")
    assert "█" not in said("spot", nodes, "--plot", "-", "--json")


def test_a_wrong_file_is_said_with_what_would_be_right(log, nodes):
    with pytest.raises(BadInput, match="which is no trace known here") as wrong:
        said("spot", log)
    assert "t_s,event,node or t_s,instances or segment,t_s,event,n_nodes,nodes" in wrong.value.remedy
    with pytest.raises(BadInput, match="which is no trace known here"):
        said("jobs", nodes)


def test_another_policy_is_replayed(log, tmp_path):
    # Two jobs of hog and one of small for one GPU: small, below its share, is before hog's second; unless who waits a second is promoted.
    path = tmp_path / "three.csv"
    path.write_text("submit_s,duration_s,gpus,vc\n0,100,1,hog\n1,100,1,hog\n20,100,1,small\n")
    words = ("jobs", path, "--gpus", 1, "--scheme", "ours", "--json")
    usual = json.loads(said(*words))["schemes"][0]
    promoted = json.loads(said(*words, "--policy", "batch_promote_after=1s"))["schemes"][0]
    assert usual["worst_tenant"] == "hog"
    assert usual["worst_slowdown"] != promoted["worst_slowdown"]
    assert promoted["most_us"] == (200 - 20) * 1_000_000  # first come, first served
    for wrong, says in (
        ("promote_after", "is no knob with a value"),
        ("patience=3s", "policy 'patience' is unknown"),
        ("promote_after=soon", "is not a duration"),
        ("waitlist_max=many", "policy 'waitlist_max' is unknown|must be|many"),
    ):
        with pytest.raises(BadInput, match=says):
            said(*words, "--policy", wrong)
