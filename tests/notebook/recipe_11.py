"""The notebook of recipe 11, as the tests run it: whole or without its operator, at a pace of their own, with
questions to its kernel.

Rules of this file:
- The training cells are the notebook's own, to the letter. What a test adds are normal cells, which say facts
  the notebook does not show.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

from sublet.core.leasing.lease import EndReason, LeaseState
from sublet.ports.ledger import Ledger
from tests.conftest import repository
from tests.homes import Home, close_home, make_home

PATH = repository("examples/recipe_11_five_minutes.ipynb")
TRAINING = ("train-one", "train-two", "train-two-again", "train-three")
ENDED = "GPU session ended (revoked: somebody more important came). Rerun this cell to reacquire."

#: After `prepare`: something that only this process can have, and that no cell ever reads.
_OWN = """
import threading
its_own = {"lock": threading.Lock(), "lines": iter(range(3))}
its_own_id = id(its_own), id(its_own["lock"])
"""
#: At the end. Every bit that training has made is in the digest.
_FACTS = """
import hashlib, json
def _bytes(value):
    if hasattr(value, "numpy"):
        return value.detach().numpy().tobytes()
    if isinstance(value, dict):
        return b"".join(repr(key).encode() + _bytes(part) for key, part in value.items())
    return repr(value).encode()
_made = [model.state_dict(), optim.state_dict()["state"], losses, step]
_lines = get_ipython().magics_manager.registry["GpuMagics"].bench.cells.account.lines()
print("FACTS" + json.dumps({
    "digest": hashlib.sha256(b"".join(map(_bytes, _made))).hexdigest(),
    "pid": os.getpid(),
    "pid_at_first": notebook_process,
    "its_own": (id(its_own), id(its_own["lock"])) == its_own_id,
    "lines": [[line.lease_id, line.cell, line.gpu_us] for line in _lines],
}))
"""


@contextlib.contextmanager
def notebook_home(folder: Path, devices: str) -> Iterator[Home]:
    """Its workers have torch already: started once, for every notebook of a test file."""
    with pytest.MonkeyPatch.context() as patch:
        made = make_home(folder, f"sqlite:{folder}/home/ledger.db", patch, devices)
        # One thread: on a busy machine those of torch wait for each other, for longer than such a small
        # network takes.
        for name, value in (
            ("SUBLET_PRELOAD", "numpy,torch,torch._dynamo,torch.optim"),
            ("OMP_NUM_THREADS", "1"),
        ):
            patch.setenv(name, value)
            made.environment[name] = value
        yield made
        close_home(made)


def read(*, pace: str = "", without: tuple[str, ...] = ()) -> Any:
    """With the facts at its end."""
    notebook: Any = nbformat.read(PATH, 4)  # type: ignore[no-untyped-call]
    known = {cell.id for cell in notebook.cells}
    assert known.issuperset((*TRAINING, *without, "prepare", "operator")), known
    kept = []
    for cell in notebook.cells:
        if cell.id in without:
            continue
        if pace and cell.id == "prepare":
            cell.source, changed = re.subn(r"(?m)^pace = \S+", f"pace = {pace}", cell.source)
            assert changed == 1
        kept.append(cell)
        if cell.id == "prepare":
            kept.append(_code("own", _OWN))
    notebook.cells = [*kept, _code("facts", _FACTS)]
    return notebook


def _code(name: str, source: str) -> Any:
    return nbformat.v4.new_code_cell(source.strip(), id=name)  # type: ignore[no-untyped-call]


def facts(said: str) -> dict[str, Any]:
    found = re.search(r"^FACTS(.*)$", said, re.M)
    assert found, said
    return dict(json.loads(found[1]))


class Operator:
    """Takes the GPU back from outside when the notebook has saved so often since it was called."""

    def __init__(self, ledger: Ledger, *, grace_us: int = 0, saves: int = 2) -> None:
        self._ledger, self._grace_us, self._saves = ledger, grace_us, saves
        self.lease_id = ""
        self.failed: BaseException | None = None
        self._thread: threading.Thread | None = None

    def look_on(self) -> None:
        [lease] = self._ledger.leases()
        head = max(self._ledger.heads(), key=lambda one: one.committed_at)
        self.lease_id = lease.lease.id
        self._thread = threading.Thread(target=self._wait_and_revoke, args=(head.job, head.version))
        self._thread.start()

    def _wait_and_revoke(self, job: str, version: int) -> None:
        try:
            deadline = time.monotonic() + 60
            while (head := self._ledger.head(job)) is None or head.version < version + self._saves:
                assert time.monotonic() < deadline, "the cell did not save"
                time.sleep(0.005)
            self._ledger.revoke(
                self.lease_id,
                reason=EndReason.REVOKED,
                detail="somebody more important came",
                grace_us=self._grace_us,
                actor="test",
            )
        except BaseException as e:
            self.failed = e

    def done(self) -> None:
        assert self._thread is not None, "it was never called"
        self._thread.join()
        if self.failed is not None:
            raise self.failed


def add_up(lines: list[list[Any]], ledger: Ledger) -> None:
    """The lines of every lease are its usage in the ledger, to the microsecond."""
    assert lines
    used = {usage.lease_id: usage.gpu_us for usage in ledger.usage()}
    for lease_id in {lease_id for lease_id, _, _ in lines}:
        assert ledger.look(lease_id).lease.state is LeaseState.ENDED
        assert sum(gpu_us for other, _, gpu_us in lines if other == lease_id) == used[lease_id]
