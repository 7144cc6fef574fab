"""`%%gpu` against a studio, from a notebook on a machine that has nothing but the address and a token."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sublet.core.billing.meter import of_ended
from tests.client.conftest import House, open_house, settled
from tests.homes import wait_until
from tests.notebook.conftest import Kernel, need_notebooks


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    need_notebooks()
    with pytest.MonkeyPatch.context() as monkeypatch:
        made = open_house(
            tmp_path_factory.mktemp("studio"), monkeypatch, "host:1x16GiB", SUBLET_PRELOAD="numpy"
        )
        yield made
        made.close()


def laptop(house: House, folder: Path, name: str = "notebook") -> Kernel:
    environment = {k: v for k, v in house.home.environment.items() if not k.startswith("SUBLET_")}
    environment |= {"SUBLET_URL": house.url, "SUBLET_TOKEN": house.token(), "HOME": str(folder)}
    made = Kernel(folder, environment, name)
    made.fine("%load_ext sublet")
    return made


@pytest.fixture(scope="module")
def kernel(house: House, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    made = laptop(house, tmp_path_factory.mktemp("laptop"))
    yield made
    made.close()


def test_variables_travel_both_ways(kernel: Kernel, house: House) -> None:
    kernel.fine("import os, numpy as np\na = np.arange(5)\nscale = 3")
    shown = kernel.fine("%%gpu --vram 1GiB\nb = a * scale\nprint('there', b.sum())\npid = os.getpid()\nb")
    assert shown.stdout == "there 30\n"
    assert shown.result == "array([ 0,  3,  6,  9, 12])"
    assert kernel.value("b.tolist(), pid != os.getpid()") == "([0, 3, 6, 9, 12], True)"
    assert "GPU-s" in shown.line
    assert "1GiB" in shown.line
    (lease,) = house.live_leases()
    assert lease.lease.tenant == "ann"


def test_functions_and_classes_of_the_notebook_go_along(kernel: Kernel) -> None:
    kernel.fine("class Point:\n    def __init__(self, x): self.x = x\ndef twice(p): return Point(2 * p.x)")
    kernel.fine("%%gpu --vram 1GiB\np = twice(Point(4))")
    assert kernel.value("p.x, type(p) is Point") == "(8, True)"


def test_large_values_both_ways(kernel: Kernel) -> None:
    kernel.fine("import numpy as np\nbig = np.arange(8 << 20, dtype=np.float64)")
    kernel.fine("%%gpu --vram 1GiB\nbigger = big + 1")
    assert kernel.value("bool((bigger == big + 1).all()), bigger.nbytes") == "(True, 67108864)"
    kernel.fine("del big, bigger")


def test_an_error_shows_the_cell_s_own_lines(kernel: Kernel) -> None:
    shown = kernel.run("%%gpu --vram 1GiB\nvalue = 0\n1 / value")
    assert shown.error == "ZeroDivisionError"
    assert "1 / value" in shown.trace
    assert kernel.value("1 + 1") == "2"


def test_displays_and_their_order(kernel: Kernel) -> None:
    shown = kernel.fine(
        "%%gpu --vram 1GiB\nfrom IPython.display import display, HTML\n"
        "print('before')\ndisplay(HTML('<b>rich</b>'))\nprint('after')"
    )
    assert shown.stdout == "before\nafter\n"
    assert shown.displays[0]["data"].get("text/html") == "<b>rich</b>"
    assert shown.order[:3] == ["stream", "display_data", "stream"]


def test_ctrl_c_interrupts_the_cell_in_the_studio(kernel: Kernel) -> None:
    kernel.fine("%%gpu --vram 1GiB\nkept_here = 5")
    kernel.begin("%%gpu --vram 1GiB\nimport time\nprint('begun', flush=True)\ntime.sleep(60)")
    shown = kernel.finish(until=lambda s: "begun" in s.stdout)
    kernel.interrupt()
    shown = kernel.finish()
    assert shown.error == "KeyboardInterrupt"
    assert shown.seconds < 30
    assert kernel.fine("%%gpu --vram 1GiB\nkept_here + 1").result == "6"


def test_sublet_lease_and_a_gpu_session_in_a_cell(kernel: Kernel) -> None:
    shown = kernel.fine(
        "%%gpu --vram 1GiB\nimport sublet\nwith sublet.lease().open() as gpu:\n"
        "    buffer = gpu.alloc(4)\n    gpu.write(buffer, b'abcd')\n    print(gpu.read(buffer))"
    )
    assert shown.stdout == "b'abcd'\n"


def test_the_laptop_s_folder_and_path_are_not_the_studio_s(kernel: Kernel) -> None:
    kernel.fine("%%gpu --vram 1GiB\nimport sys, os\nbefore = (os.getcwd(), list(sys.path))")
    kernel.fine(
        "import sys, os\nos.makedirs('elsewhere', exist_ok=True)\nos.chdir('elsewhere')\nsys.path.append('/odd')"
    )
    kernel.fine("%%gpu --vram 1GiB\nafter = (os.getcwd(), list(sys.path))")
    assert kernel.value("before == after") == "True"
    kernel.fine("os.chdir('..')\nsys.path.remove('/odd')")


def test_panel_cost_quota_and_history(kernel: Kernel) -> None:
    kernel.fine("%%gpu --vram 1GiB\nx = 1")
    assert any("warm" in text for text in kernel.fine("%gpu").texts)
    assert any("ann" in text for text in kernel.fine("%gpu quota").texts)
    kernel.fine("%gpu release")
    history = "\n".join(kernel.fine("%gpu history").texts)
    assert "released" in history
    cost = "\n".join(kernel.fine("%gpu cost").texts)
    assert "to the microsecond" in cost
    assert kernel.value("x") == "1"


def test_the_lines_of_a_lease_are_the_ledger_s_usage(kernel: Kernel, house: House) -> None:
    kernel.fine("%%gpu --vram 1GiB\npass")
    kernel.fine("%%gpu --vram 1GiB --release\npass")
    settled(house)  # the studio ends it when it can, and the bill says so meanwhile
    cost = "\n".join(kernel.fine("%gpu cost").texts)
    found = re.search(r"usage, to the microsecond: ([0-9.]+) GPU-s", cost)
    assert found, cost
    ended = [a.lease for a in house.ledger.leases(live_only=False) if a.lease.ended_at and a.lease.granted_at]
    ours = [row for row in ended if row.request.job.startswith("studio/ann/notebook-")]
    assert abs(float(found[1]) - sum(of_ended(row).gpu_us for row in ours) / 1e6) < 0.001


def test_kept_in_the_studio_and_restored_by_another_notebook(
    kernel: Kernel, house: House, tmp_path: Path
) -> None:
    kernel.fine("import numpy as np\nmodel = np.zeros(4)\nstep = 0")
    shown = kernel.fine(
        "%%gpu --vram 1GiB --keep model,step --every 0s\nfor i in range(3):\n    model = model + 1\n    step = i + 1"
    )
    assert "saved" in shown.line
    status = "\n".join(kernel.fine("%gpu").texts)
    job = re.search(r"of (notebook-[0-9a-f]{6})", status)
    assert job, status
    other = laptop(house, tmp_path, "other")
    try:
        other.fine(f"%gpu restore {job[1]}")
        assert other.value("step, model.tolist()") == "(3, [3.0, 3.0, 3.0, 3.0])"
    finally:
        other.close()


def test_lost_under_a_cell_it_goes_on_from_what_was_kept(kernel: Kernel, house: House) -> None:
    kernel.fine("%gpu release\nstep = 0")
    settled(house)
    kernel.begin(
        "%%gpu --vram 1GiB --keep step --every 0s\nimport time\nwhile step < 1000:\n    step = step + 1\n    time.sleep(0.05)"
    )
    wait_until(lambda: [a for a in house.live_leases() if a.lease.committed_at])
    (lease,) = [a.lease for a in house.live_leases()]
    house.revoke(lease.id, grace_s=5, detail="ada needs it")
    shown = kernel.finish()
    assert shown.error == "GpuSessionEnded"
    assert "ada needs it" in shown.said
    assert "Saved: step" in shown.said
    assert int(kernel.value("step")) > 0


def test_the_service_dies_under_a_cell_and_the_cell_goes_on(kernel: Kernel, house: House) -> None:
    kernel.begin(
        "%%gpu --vram 1GiB\nimport time\nfor i in range(40):\n    print(i)\n    time.sleep(0.1)\ndone = 'yes'"
    )
    kernel.finish(until=lambda s: "3" in s.stdout)
    house.restart()
    house.restart()
    kernel.finish()
    assert kernel.value("done") == "'yes'"


def test_an_example_notebook_runs_from_top_to_bottom(house: House, tmp_path: Path) -> None:
    import nbclient
    import nbformat

    notebook = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_code_cell("%load_ext sublet\ndata = list(range(10))"),
            nbformat.v4.new_code_cell("%%gpu --vram 1GiB --ttl 1m\ntotal = sum(x * x for x in data)\ntotal"),
            nbformat.v4.new_code_cell("assert total == 285\n%gpu release"),
        ]
    )
    environment = {k: v for k, v in house.home.environment.items() if not k.startswith("SUBLET_")}
    environment |= {"SUBLET_URL": house.url, "SUBLET_TOKEN": house.token()}
    nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3").execute(
        env=environment, cwd=str(tmp_path)
    )
    assert "285" in str(notebook.cells[1].outputs)


def test_no_studio_there_is_told_and_the_notebook_lives(tmp_path: Path, house: House) -> None:
    environment = {k: v for k, v in house.home.environment.items() if not k.startswith("SUBLET_")}
    environment |= {"SUBLET_URL": "http://127.0.0.1:9", "SUBLET_TOKEN": house.token()}
    kernel = Kernel(tmp_path, environment)
    try:
        kernel.fine("%load_ext sublet\nx = 3")
        shown = kernel.run("%%gpu\ny = x")
        assert shown.error == "GpuUnavailable"
        assert "there is no studio" in shown.said
        assert kernel.value("x") == "3"
    finally:
        kernel.close()
