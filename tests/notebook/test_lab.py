"""Notebooks in JupyterLab, in a real browser: recipe 11 disturbed by hand, and two notebooks that want one
small device.

What is asserted is the text of the page. Pictures of it are left in the test's folder, or in
SUBLET_LAB_SHOTS, for somebody to look at.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import nbformat
import pytest

from sublet.core.leasing.lease import EndReason, LeaseState
from sublet.ports.ledger import Ledger
from sublet.wiring import open_ledger
from tests.conftest import MORE_EXAMPLES, need
from tests.homes import Home
from tests.notebook import in_browser, recipe_11
from tests.notebook.in_browser import DARK, LIGHT, JupyterLab
from tests.notebook.recipe_11 import Operator, add_up, facts

#: What waiting looks like is tried without a browser in `test_waiting.py`.
in_proof = pytest.mark.skipif(MORE_EXAMPLES == 1, reason="in the browser, this is a part of make proof")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    for module in ("torch", "jupyterlab", "playwright", "matplotlib"):
        need(find_spec(module) is not None, module)
    with recipe_11.notebook_home(tmp_path_factory.mktemp("lab-home"), "host:1x1GiB") as made:
        yield made


@pytest.fixture(scope="module")
def ledger(home: Home) -> Ledger:
    return open_ledger(home.settings)


@pytest.fixture(scope="module")
def jupyterlab(home: Home, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JupyterLab]:
    outside = in_browser.Outside()
    folder = tmp_path_factory.mktemp("lab")
    with (
        in_browser.served(folder, home.environment, outside) as url,
        in_browser.browser_page() as page,
    ):
        yield JupyterLab(folder / "notebooks", url, page)
    outside.close()
    assert outside.asked == [], "the server or a kernel asked another host"


@pytest.fixture
def shots(tmp_path: Path) -> Path:
    folder = Path(os.environ.get("SUBLET_LAB_SHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def cells(**sources: str) -> Any:
    made = [nbformat.v4.new_code_cell(source, id=name) for name, source in sources.items()]  # type: ignore[no-untyped-call]
    return nbformat.v4.new_notebook(  # type: ignore[no-untyped-call]
        cells=made, metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    )


def test_recipe_11_loses_its_gpu_in_jupyterlab_and_ends_as_if_it_had_not(
    jupyterlab: JupyterLab, ledger: Ledger, shots: Path
) -> None:
    """As somebody would do it: run all, see the error, run that cell again, run the rest."""
    notebook = recipe_11.read(pace="0.005", without=("operator", "operator-words", "train-two-again"))
    for cell in notebook.cells:
        cell.metadata.pop("tags", None)  # without them the first error stops "Run All"
    page = jupyterlab.open("recipe_11_five_minutes.ipynb", notebook)
    operator = Operator(ledger, grace_us=30_000_000)

    page.run_from_menu("Run All Cells")
    page.wait_for("after-one", "step 100, 100 losses")
    operator.look_on()
    page.wait_for("train-two", "Rerun this cell to reacquire.")
    operator.done()
    lost = page.said("train-two")
    page.choose("train-two")
    page.shot(shots / "lost-light.png")
    assert recipe_11.ENDED in " ".join(lost.split())
    assert re.search(r"GPU session ends in \d+ s \(revoked: somebody more important came\)\.", lost)
    assert page.said("train-three") == ""

    page.press("Control+Enter")
    page.wait_for("train-two", "to step 500")
    again = re.search(r"from step (\d+)", page.said("train-two"))
    assert again is not None
    assert 100 < int(again[1]) < 500
    assert "GPU session ended" not in page.said("train-two")
    page.choose("after-loss")
    page.run_from_menu("Run Selected Cell and All Below")
    page.wait_for("facts", "FACTS")

    assert "same process: True" in page.said("after-loss")
    assert re.match(r"from step 500\s+to step 600, loss ", page.said("train-three"))
    assert page.said("equal").strip() == "equal to the last bit: True"
    assert page.cell("plot").locator("img").count() == 1
    assert "to the microsecond" in page.said("cost")
    assert "No GPU is leased" in page.said("status")
    assert "somebody more important came" in page.said("history")
    told = facts(page.said("facts"))
    assert told["pid"] == told["pid_at_first"]
    assert told["its_own"]
    add_up(told["lines"], ledger)
    assert ledger.look(operator.lease_id).lease.reason is EndReason.REVOKED

    page.choose("cost")
    page.shot(shots / "cost-light.png")
    jupyterlab.theme(DARK)
    page.shot(shots / "cost-dark.png")
    page.choose("plot")
    page.shot(shots / "plot-dark.png")
    jupyterlab.theme(LIGHT)
    assert jupyterlab.hosts() == {"127.0.0.1"}


@in_proof
def test_the_second_of_two_notebooks_sees_its_place_and_gets_the_gpu_when_the_first_is_idle(
    jupyterlab: JupyterLab, ledger: Ledger, shots: Path
) -> None:
    quick = dataclasses.replace(ledger.policy(), idle_after_us=300_000, grace_us=300_000)
    ledger.set_policy(quick, actor="test")
    busy = "import time, os\nwhile not os.path.exists('enough'):\n    time.sleep(0.05)\nprint('rested')"
    first = jupyterlab.open(
        "first.ipynb",
        cells(
            load="%load_ext sublet",
            busy=f"%%gpu --vram 1GiB\nprint('begun')\n{busy}",
            panel="%gpu",
            again="%%gpu --vram 1GiB\nprint('back', 1)",
        ),
    )
    first.run("load")
    first.run("busy")
    first.wait_for("busy", "begun")

    second = jupyterlab.open(
        "second.ipynb",
        cells(load="%load_ext sublet", work="%%gpu --vram 1GiB\nprint('mine', 6 * 7)"),
    )
    second.run("load")
    second.run("work")
    second.wait_for("work", "Waiting for a GPU: place 1 in the waitlist")
    second.shot(shots / "waiting-light.png")
    assert "mine" not in second.said("work")
    [holding] = [a.lease for a in ledger.leases() if a.lease.state is LeaseState.ACTIVE]

    (jupyterlab.folder / "enough").touch()
    second.wait_for("work", "mine 42")
    assert "Waiting for a GPU" not in second.said("work")
    second.shot(shots / "waited-light.png")
    assert ledger.look(holding.id).lease.reason is EndReason.IDLE

    first.run("panel")
    first.wait_for("panel", "No GPU is leased")
    assert "rested" in first.said("busy")
    first.run("again")
    first.wait_for("again", "back 1")
    first.shot(shots / "first-again-light.png")
    assert "the last one ended (" in first.said("again")
    assert jupyterlab.hosts() == {"127.0.0.1"}


@in_proof
def test_the_smaller_gpu_now_is_a_question_in_the_page(
    jupyterlab: JupyterLab, ledger: Ledger, shots: Path
) -> None:
    held = "%%gpu --vram 512MiB\nprint('begun')\nimport time\nfor _ in range(600):\n    time.sleep(0.1)"
    big = jupyterlab.open("big.ipynb", cells(load="%load_ext sublet", held=held))
    big.run("load")
    big.run("held")
    big.wait_for("held", "begun")

    ask = "%%gpu --vram 1GiB\nimport sublet\nprint('have', sublet.lease().vram_bytes)"
    small = jupyterlab.open(
        "small.ipynb", cells(load="%load_ext sublet", ask=ask, release="%gpu release", again=ask)
    )
    small.run("load")
    small.run("ask")
    box = small.cell("ask").locator(".jp-Stdin-input")
    box.wait_for()
    asked = " ".join(small.said("ask").split())
    jupyterlab.theme(DARK)
    small.shot(shots / "offer-dark.png")
    assert "512MiB is free now, and held for you for 19 s; 1GiB in about 30 min." in asked
    assert "512MiB now, or 1GiB in about 30 min. Take 512MiB now? [y/N]" in asked
    box.fill("y")
    box.press("Enter")
    small.wait_for("ask", f"have {512 << 20}")
    assert "held for you" not in small.said("ask")
    small.shot(shots / "accepted-dark.png")

    # Nobody answers: the place in the waitlist is kept, and served when the other is interrupted and idle.
    quick = dataclasses.replace(
        ledger.policy(), idle_after_us=300_000, grace_us=300_000, offer_hold_us=2_500_000
    )
    ledger.set_policy(quick, actor="test")
    small.run("release")
    small.wait_for("release", "GPU given back")
    small.run("again")
    small.wait_for("again", "Take 512MiB now?")
    small.wait_for("again", "Waiting for a GPU: place 1 in the waitlist")
    small.cell("again").locator(".jp-Stdin-input").wait_for(state="detached")
    small.shot(shots / "unanswered-dark.png")
    big.press("i", "i")
    big.wait_for("held", "KeyboardInterrupt")
    small.wait_for("again", f"have {1 << 30}")
    small.shot(shots / "unanswered-served-dark.png")
    assert jupyterlab.hosts() == {"127.0.0.1"}
