"""The tables of docs/explain/simulation.md are what the traces give. What takes seconds is replayed here; SUBLET_TRACES_LONG=1 replays all."""

from __future__ import annotations

import os
import runpy

import pytest

from sublet.sim.traces import read_availability
from tests.conftest import repository
from tests.sim.workloads import SHARED_TRACE

ROOT = repository("docs").parent
SHARED = SHARED_TRACE.parent
LONG = bool(os.environ.get("SUBLET_TRACES_LONG"))


@pytest.fixture(scope="module")
def pages() -> dict:
    if not SHARED.exists():
        pytest.skip("the traces are not in ../shared/traces")
    return runpy.run_path(str(ROOT / "docs" / "traces.py"))


def rows(pages: dict, name: str) -> list[str]:
    return pages["table_in"]((ROOT / "docs" / "explain" / "simulation.md").read_text(), name).splitlines()


def test_goodput_on_spot_nodes(pages):
    written = rows(pages, "spot")
    for name in pages["SPOT"] if LONG else ("bamboo_g4dn_events.csv", "parcae_segments.csv"):
        for part in read_availability(SHARED / name):
            assert pages["spot_row"](part) in written, "python docs/traces.py writes it anew"
    assert len(written) == 2 + 3 + 4


def test_every_auto_is_close_to_the_best_interval_chosen_afterwards(pages):
    for row in rows(pages, "spot")[2:]:
        cells = [cell.strip(" *") for cell in row.strip("|").split("|")]
        auto, best = float(cells[3]), float(cells[-1].split()[0])
        assert auto >= 0.995 * best, row


def test_jobs_of_a_cluster(pages):
    written = rows(pages, "jobs")
    found = pages["philly"](SHARED)
    names = list(pages["JOB_WAYS"])[: None if LONG else pages["QUICK_JOB_WAYS"]]
    for name in names:
        assert pages["job_row"](name, found) in written, "python docs/traces.py --long writes it anew"
    cells = {
        row.split("|")[1].strip(" *"): [c.strip().replace(",", "") for c in row.split("|")[2:]]
        for row in written[2:]
    }
    fifo = cells["one pool, first come first served"]
    for name in ("ours, nothing is taken from a job", "ours, hold cap 4 h"):
        ours = cells[name]
        for column in (0, 1, 2, 4, 5):  # mean, p90, p99, slowdown, worst tenant
            assert float(ours[column]) < float(fifo[column]), name
        assert float(ours[6]) > float(fifo[6]), name  # Jain


def test_the_first_days_of_the_studio(pages):
    assert "\n".join(rows(pages, "studio")) == pages["studio_table"](SHARED)
