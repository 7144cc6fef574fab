"""Traces of nodes and of jobs: every kind is read, and a bad line is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from sublet.core.errors import BadInput
from sublet.core.values import SECOND_US
from sublet.sim.traces import (
    NodeSpan,
    TraceJob,
    of_busy_tenants,
    parse_availability,
    parse_jobs,
    read_availability,
    read_jobs,
)
from tests.sim.workloads import SHARED_TRACE

SHARED = SHARED_TRACE.parent


def spans(*lines: str) -> list[list[tuple[float, float, bool]]]:
    found = parse_availability(lines, name="t.csv")
    return [[(s.since / SECOND_US, s.until / SECOND_US, s.lost) for s in a.spans] for a in found]


def test_events_of_single_nodes():
    assert spans("t_s,event,node", "0,add,a", "5.5,add,b", "9,remove,a", "12,add,a", "20,remove,b") == [
        [(0, 9, True), (5.5, 20, True), (12, 20, False)]
    ]


def test_counts_say_how_many_are_there_and_the_last_to_come_goes_first():
    assert spans("t_s,instances", "0,2", "10,3", "10,3", "15,1", "20,1") == [
        [(0, 15, True), (0, 20, False), (10, 15, True)]
    ]


def test_parts_of_a_file_are_traces_of_their_own():
    found = parse_availability(
        ["segment,t_s,event,n_nodes,nodes", "x,0,add,2,a|b", "y,0,add,1,a", "x,60,no-op,0,", "x,90,remove,1,b",
         "y,60,remove,1,a", "y,70,migration,0,"],
        name="t.csv",
    )  # fmt: skip
    assert [a.name for a in found] == ["t.csv:x", "t.csv:y"]
    assert found[0].spans == (
        NodeSpan(since=0, until=90 * SECOND_US, lost=False),
        NodeSpan(since=0, until=90 * SECOND_US, lost=True),
    )
    assert (found[0].losses, found[1].losses, found[1].ends_at) == (1, 1, 70 * SECOND_US)
    assert found[0].node_us == 180 * SECOND_US


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["t,event"], "the trace t.csv begins with 't,event', which is no trace known here"),
        ([], "begins with ''"),
        (["t_s,event,node", "0,add"], "line 2 of t.csv has 2 columns, not 3"),
        (["t_s,event,node", "x,add,a"], "line 2 of t.csv: t_s 'x' is no number of seconds"),
        (["t_s,event,node", "5,add,a", "4,add,b"], "line 3 of t.csv: t_s goes back in time"),
        (["t_s,event,node", "0,add,a", "1,add,a"], "line 3 of t.csv: node 'a' comes and is there already"),
        (["t_s,event,node", "0,remove,a"], "line 2 of t.csv: node 'a' goes and is not there"),
        (["t_s,event,node", "0,stop,a"], "line 2 of t.csv: event 'stop' is unknown"),
        (["t_s,event,node", "0,no-op,a"], "line 2 of t.csv: event 'no-op' is unknown"),
        (["t_s,instances", "0,-1"], "line 2 of t.csv: instances '-1' is no whole number from 0 to 100000"),
        (["t_s,instances", "0,0"], "has no node that was there for any time"),
        (["segment,t_s,event,n_nodes,nodes", "x,0,add,3,a|b"], "line 2 of t.csv: n_nodes is 3, and 2 nodes are named"),
    ],
)  # fmt: skip
def test_a_bad_line_of_an_availability_trace_is_named(lines, says):
    with pytest.raises(BadInput, match=says.replace("|", r"\|").replace(",", ".")):
        parse_availability(lines, name="t.csv")


def test_jobs_are_read_in_the_order_of_submission():
    assert parse_jobs(["submit_s,duration_s,gpus,vc", "9,60,8,ml", "3,1.5,1,web"], name="j.csv") == [
        TraceJob(tenant="web", at=3 * SECOND_US, work_us=1_500_000, gpus=1),
        TraceJob(tenant="ml", at=9 * SECOND_US, work_us=60 * SECOND_US, gpus=8),
    ]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("1,0,1,a", "line 2 of j.csv: duration_s '0' is not between 0 and"),
        ("1,5,0,a", "line 2 of j.csv: gpus '0' is no whole number from 1 to 1024"),
        ("1,5,2000,a", "gpus '2000'"),
        ("1,5,1,a b", "line 2 of j.csv: vc"),
        ("1,5,1", "line 2 of j.csv has 3 columns, not 4"),
    ],
)
def test_a_bad_line_of_a_job_log_is_named(line, says):
    with pytest.raises(BadInput, match=says):
        parse_jobs(["submit_s,duration_s,gpus,vc", line], name="j.csv")
    with pytest.raises(BadInput, match="has no job"):
        parse_jobs(["submit_s,duration_s,gpus,vc"], name="j.csv")


def test_tenants_with_few_jobs_can_be_left_out():
    jobs = parse_jobs(["submit_s,duration_s,gpus,vc", "1,5,1,a", "2,5,1,b", "3,5,1,b"], name="j.csv")
    assert {j.tenant for j in of_busy_tenants(jobs, 2)} == {"b"}
    with pytest.raises(BadInput, match="no tenant has 3 jobs"):
        of_busy_tenants(jobs, 3)


def test_a_file_that_is_not_there_or_not_text_is_said(tmp_path: Path):
    with pytest.raises(BadInput, match="cannot be read: No such file"):
        read_jobs(tmp_path / "none.csv")
    (tmp_path / "b.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="is not CSV text"):
        read_availability(tmp_path / "b.csv")


def test_the_real_traces_are_what_their_description_says():
    if not SHARED.exists():
        pytest.skip("the traces are not in ../shared/traces")
    p3 = read_availability(SHARED / "bamboo_p3_events.csv")[0]
    assert p3.losses == 167
    assert read_availability(SHARED / "bamboo_g4dn_events.csv")[0].losses == 74
    assert len(read_availability(SHARED / "parcae_segments.csv")) == 4
    assert read_availability(SHARED / "bamboo_gcp_v100x1-east1c_count.csv")[0].losses == 555
    assert len(read_jobs(SHARED / "philly_two_weeks.csv")) == 12_377
