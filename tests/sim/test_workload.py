"""Reading request logs: what is taken, and what is refused with which words."""

from __future__ import annotations

import pytest

from sublet.core.errors import BadInput
from sublet.sim.workload import COLUMNS, Arrival, first_part, parse_requests, read_requests

HEADER = ",".join(COLUMNS)


def line(at="0", tenant="G1", work="2.5", status="SUCCEED") -> str:
    return f"{at},{tenant},{work},{status},TXT_2_IMG,30.0,1.0,M0,0"


def parsed(*lines: str):
    return parse_requests([f"{x}\n" for x in lines], name="log.csv")


def test_what_succeeded_is_taken_in_the_order_of_arrival():
    found = parsed(HEADER, line(at="7"), line(at="3.25", tenant="G2"), line(status="FAILED", work=""))
    assert found.arrivals == (
        Arrival(tenant="G2", at=3_250_000, work_us=2_500_000),
        Arrival(tenant="G1", at=7_000_000, work_us=2_500_000),
    )
    assert (found.left_out, found.tenants, found.work_us) == ({"FAILED": 1}, 2, 5_000_000)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "log.csv is empty"),
        (["t_s,event,node", "1,add,x"], "without group, exec_s.* and with 'event', 'node'"),
        ([HEADER + ",more", line() + ",1"], "no request log: with 'more'"),
        ([",".join(reversed(COLUMNS)), line()], "in another order"),
        ([HEADER, "1,G1,2"], "line 2 of log.csv has 3 columns, not 9"),
        ([HEADER, line(), line(at="soon")], "line 3 of log.csv: t_s 'soon' is no number of seconds"),
        ([HEADER, line(at="-1")], "t_s '-1' is no number"),
        ([HEADER, line(at="nan")], "t_s 'nan' is no number"),
        ([HEADER, line(work="1e9")], "exec_s '1e9' is no number"),
        ([HEADER, line(work="0")], "exec_s '0' is not between"),
        ([HEADER, line(work="99999999")], "is not between 0 and 7d00h"),
        ([HEADER, line(tenant="a b")], "line 2 of log.csv: group 'a b' is not a name"),
        ([HEADER, line(status="DONE")], "status 'DONE' is unknown"),
        ([HEADER, line(status="FAILED")], "no request that succeeded"),
        ([HEADER], "no request that succeeded"),
    ],
)
def test_another_file_is_refused_with_what_is_wrong(lines, said):
    with pytest.raises(BadInput, match=said):
        parsed(*lines)


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path):
    with pytest.raises(BadInput, match="cannot be read: No such file"):
        read_requests(tmp_path / "none.csv")
    with pytest.raises(BadInput, match="cannot be read: Is a directory"):
        read_requests(tmp_path)
    (tmp_path / "b.csv").write_bytes(b"\xff\xfe\x00t_s")
    with pytest.raises(BadInput, match=r"b\.csv is not CSV text"):
        read_requests(tmp_path / "b.csv")
    (tmp_path / "q.csv").write_text(f'{HEADER}\n"1,G1')
    with pytest.raises(BadInput, match=r"q\.csv is not CSV text"):
        read_requests(tmp_path / "q.csv")


def test_the_first_part_is_what_arrived_in_it():
    whole = parsed(HEADER, line(at="1"), line(at="9"))
    assert first_part(whole, 9_000_000).arrivals == whole.arrivals[:1]
    with pytest.raises(BadInput, match=r"nothing arrives in the first 1\.0s"):
        first_part(whole, 1_000_000)
