"""The notebook of recipe 11, run by nbclient in a real kernel, on real leases: as it is, disturbed from
outside, and undisturbed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import ROUND_HALF_UP, Decimal
from importlib.util import find_spec
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from sublet.core.billing.meter import of_ended
from sublet.core.leasing.lease import EndReason
from sublet.ports.ledger import Ledger
from sublet.wiring import open_ledger
from tests import forked
from tests.conftest import MORE_EXAMPLES, need
from tests.homes import Home
from tests.notebook import recipe_11
from tests.notebook.recipe_11 import Operator, add_up, facts

in_proof = pytest.mark.skipif(
    MORE_EXAMPLES == 1,
    reason="a part of make proof: as a reader runs it, and in JupyterLab, it shows the same",
)


@pytest.fixture(scope="module")
def notebooks_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    for module in ("torch", "matplotlib"):
        need(find_spec(module) is not None, module)
    with recipe_11.notebook_home(tmp_path_factory.mktemp("recipe-11"), "host:1x1GiB") as home:
        yield home


@pytest.fixture(scope="module")
def ledger(notebooks_home: Home) -> Ledger:
    return open_ledger(notebooks_home.settings)


class Done:
    """A notebook that was run."""

    def __init__(self, notebook: Any) -> None:
        self._cells = {cell.id: cell for cell in notebook.cells}
        self.facts = facts(self.said("facts"))

    def said(self, cell: str) -> str:
        outputs = self._cells[cell].outputs
        return "".join(
            o.text if o.output_type == "stream" else o.get("data", {}).get("text/plain", "") for o in outputs
        )

    def error(self, cell: str) -> str:
        [error] = [o for o in self._cells[cell].outputs if o.output_type == "error"]
        return f"{error.ename}: {error.evalue}"

    def steps(self, cell: str) -> tuple[int, int]:
        """Where a training cell began and ended."""
        begun, ended = (
            re.search(r"from step (\d+)", self.said(cell)),
            re.search(r"to step (\d+)", self.said(cell)),
        )
        assert begun, self.said(cell)
        return int(begun[1]), int(ended[1]) if ended else 0


def run(notebook: Any, operator: Operator | None = None) -> Done:
    client = NotebookClient(notebook, timeout=120, kernel_name="python3")
    if operator is not None:
        client.on_cell_execute = lambda cell, cell_index: (
            operator.look_on() if cell.id == "train-two" else None
        )
    with forked.kernels():
        client.execute()
    if operator is not None:
        operator.done()
    return Done(notebook)


@pytest.fixture(scope="module")
def undisturbed(notebooks_home: Home) -> Done:
    """The same cells, and nobody takes anything."""
    return run(recipe_11.read(pace="0", without=("operator",)))


def check_the_kernel_lived(done: Done, ledger: Ledger) -> None:
    assert done.facts["pid"] == done.facts["pid_at_first"]
    assert done.facts["its_own"]
    assert done.said("after-loss").startswith("same process: True\n")
    add_up(done.facts["lines"], ledger)


def check_the_cost_that_is_shown(done: Done, ledger: Ledger) -> None:
    """Also what is printed, rounded as it is, adds up."""
    lines, cost = done.facts["lines"], done.said("cost")
    shown = [Decimal(seconds) for seconds in re.findall(r"^(?:In \[\d+\]|warm) .*?(\d+\.\d{3})", cost, re.M)]
    assert len(shown) == len(lines)
    assert all(
        abs(s - Decimal(us) / 1_000_000) <= Decimal("0.001")
        for s, (_, _, us) in zip(shown, lines, strict=True)
    )
    used = sum(of_ended(ledger.look(lease_id).lease).gpu_us for lease_id in {line[0] for line in lines})
    total = Decimal(used).scaleb(-6).quantize(Decimal("0.001"), ROUND_HALF_UP)
    assert sum(shown) == total
    assert re.search(rf"^total +{total} ", cost, re.M)
    assert f"to the microsecond: {total} GPU-s." in cost


@in_proof
def test_undisturbed_it_trains_on_one_lease(undisturbed: Done, ledger: Ledger) -> None:
    assert [undisturbed.steps(cell) for cell in recipe_11.TRAINING] == [
        (0, 100),
        (100, 500),
        (500, 500),
        (500, 600),
    ]
    assert len({lease_id for lease_id, _, _ in undisturbed.facts["lines"]}) == 1
    assert undisturbed.said("equal") == "equal to the last bit: True\n"
    check_the_kernel_lived(undisturbed, ledger)
    check_the_cost_that_is_shown(undisturbed, ledger)


@in_proof
def test_the_gpu_goes_in_the_middle_and_a_rerun_goes_on_from_what_was_kept(
    undisturbed: Done, ledger: Ledger
) -> None:
    operator = Operator(ledger)
    done = run(recipe_11.read(pace="0.008", without=("operator",)), operator)

    assert done.error("train-two").startswith(
        f"GpuSessionEnded: {recipe_11.ENDED} Saved: model, optim, step, losses at "
    )
    assert ", before this cell)" not in done.error("train-two")
    assert done.steps("train-two") == (100, 0)
    kept, _ = done.steps("train-two-again")
    assert 100 < kept < 500
    assert done.said("after-loss") == f"same process: True\nstep {kept}, {kept} losses\n"
    assert done.steps("train-two-again") == (kept, 500)
    assert done.steps("train-three") == (500, 600)

    assert done.facts["digest"] == undisturbed.facts["digest"]
    assert done.said("equal") == "equal to the last bit: True\n"
    check_the_kernel_lived(done, ledger)
    check_the_cost_that_is_shown(done, ledger)
    first, second = dict.fromkeys(lease_id for lease_id, _, _ in done.facts["lines"])
    assert first == operator.lease_id
    assert ledger.look(first).lease.reason is EndReason.REVOKED
    assert ledger.look(second).lease.reason is EndReason.RELEASED
    assert "revoked: somebody more important came" in done.said("history")


def test_as_a_reader_runs_it(ledger: Ledger) -> None:
    """Its own operator takes the GPU back, by the command line; and it trains once more, undisturbed, to
    compare."""
    done = run(recipe_11.read())
    assert (
        "GPU session ended (revoked: an operator took it back). Rerun this cell to reacquire."
        in done.error("train-two")
    )
    kept, until = done.steps("train-two-again")
    assert 100 < kept < until == 500
    assert done.said("equal") == "equal to the last bit: True\n"
    check_the_kernel_lived(done, ledger)
    check_the_cost_that_is_shown(done, ledger)


def test_it_is_shipped_without_outputs() -> None:
    notebook: Any = nbformat.read(recipe_11.PATH, 4)  # type: ignore[no-untyped-call]
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not [cell.id for cell in code if cell.outputs or cell.execution_count]
    assert recipe_11.PATH.read_bytes() == _written(notebook)


def _written(notebook: Any) -> bytes:
    return f"{nbformat.writes(notebook)}\n".encode()  # type: ignore[no-untyped-call]
