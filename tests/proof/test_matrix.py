"""The matrix tells exact, refused, dead and silently different apart: tried with stand-ins for the shim of which each does one of these."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from proof.matrix import catalogue, table
from proof.matrix.case import PROGRAMS, Case
from proof.matrix.contents import compare
from proof.matrix.life import Life
from proof.matrix.trial import (
    BROKEN,
    DIES,
    EXACT,
    FILES,
    REFUSED,
    REFUSED_LATER,
    SILENT,
    UNDETERMINED,
    WARNED,
    Rig,
    Trial,
    Verdict,
)
from tests.homes import Home
from tests.seeds import SEED

PROGRAM = """
import json, os, sys, time
total = 0
start = int(os.environ.get("START", "0"))
for step in range(start, 40):
    total += step
    print("step", step, flush=True)
    time.sleep(0.005)
open("log.txt", "w").write(os.environ.get("LOG", "once") + chr(10))
json.dump({"total": total, "extra": os.environ.get("EXTRA")}, open("model.json", "w"))
"""

#: Of the programs, those that need nothing but torch, and little time.
SAMPLE = ("regression",)

#: What each stand-in does before it runs the program; `lives` counts how often it was started in this folder.
SHIM = """
import os, runpy, sys
script = next(a for a in sys.argv[1:] if a.endswith(".py"))
job = sys.argv[sys.argv.index("--name") + 1]
lives = int(open("../lives-" + job).read()) if os.path.exists("../lives-" + job) else 0
open("../lives-" + job, "w").write(str(lives + 1))
{does}
sys.argv = [script]
runpy.run_path(script, run_name="__main__")
"""
SHIMS = {
    EXACT: "",
    SILENT: "if lives: os.environ['START'] = '7'",
    WARNED: "print(job + ': warning: it is carried', file=sys.stderr)\nif lives: os.environ['START'] = '7'",
    FILES: "if lives: os.environ['LOG'] = 'twice'",
    REFUSED: "sys.exit(print('sublet: line 5 cannot be resumed', file=sys.stderr) or 2)",
    REFUSED_LATER: "if lives > 1: sys.exit(print('sublet: what was saved is another', file=sys.stderr) or 73)",
    DIES: "if lives > 1: raise KeyError('best_metric')",
    BROKEN: "raise KeyError('at once')",
}


def trial(tmp_path: Path, does: str, program: str = PROGRAM, *, twice: bool = False) -> Verdict:
    source = tmp_path / "program.py"
    source.write_text(program)
    shim = tmp_path / "shim.py"
    shim.write_text(SHIM.replace("{does}", does))
    case = Case(
        name="program", model_of="nothing", source=source, script="program.py", progress=r"^step (\d+)"
    )
    rig = Rig(
        python=Path(sys.executable),
        results=tmp_path,
        home=tmp_path,
        seed=SEED,
        kills=2,
        twice=twice,
        environment=os.environ | {"SUBLET_HOME": str(tmp_path / "home")},
        shim_options=(),
        shim=(str(shim),),
    )
    # A lease of theirs that could be revoked they have not; it is told to leave instead.
    return Trial(case, rig).run()


@pytest.mark.parametrize("verdict", SHIMS)
def test_each_end_is_told_from_the_others(verdict: str, tmp_path: Path) -> None:
    found = trial(tmp_path, SHIMS[verdict])
    assert found.verdict == verdict, found
    if verdict in (REFUSED, REFUSED_LATER):
        assert "sublet: " in found.said
    if verdict in (DIES, BROKEN):
        assert "KeyError" in found.said
    if verdict == SILENT:
        assert "total" in found.said
        assert found.model_differs
    assert table.page(
        {
            "programs": [as_row(found)],
            "machine": {},
            "kills": 2,
            "at": "",
            "seconds": 1,
            "seed": 7,
            "load_before": 0.0,
            "tried": 1,
        }
    )


def as_row(verdict: Verdict) -> dict[str, object]:
    return {name: getattr(verdict, name) for name in Verdict.__slots__}


def test_a_program_that_differs_from_itself_proves_nothing(tmp_path: Path) -> None:
    program = PROGRAM.replace("total = 0", "total = int.from_bytes(os.urandom(4), 'big')")
    assert trial(tmp_path, "", program, twice=True).verdict == UNDETERMINED


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_under_the_shim(name: str, sqlite_home: Home, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    rig = Rig(
        python=Path(sys.executable),
        results=tmp_path,
        home=sqlite_home.settings.home,
        seed=SEED,
        kills=1,
        twice=False,
        environment=sqlite_home.environment
        | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(PROGRAMS.parents[2] / "src")},
        shim_options=("--vram", "128MiB", "--quiet"),
    )
    found = Trial(next(case for case in catalogue.cases() if case.name == name), rig).run()
    assert found.verdict == EXACT, found


def test_every_disturbance_is_counted(tmp_path: Path) -> None:
    found = trial(tmp_path, "")
    kinds = " ".join(found.disturbed)
    assert sum(kinds.count(kind) for kind in ("kill ", "notice ", "revoke ")) >= 3, found.disturbed


def test_equal_values_in_other_files_are_the_same(tmp_path: Path) -> None:
    """The bytes of a pickle depend on which objects were shared, the order in JSON does not change a value."""
    torch = pytest.importorskip("torch")
    case = Case(
        name="x", model_of="", source=tmp_path / "x.py", script="x.py", progress="x", volatile=("^time$",)
    )
    plain, other = tmp_path / "plain", tmp_path / "other"
    key = "".join(["w", "eight"])
    for folder, name in ((plain, "weight"), (other, key)):
        folder.mkdir()
        torch.save({name: torch.ones(3), "state": {0: {name: 1.5}}}, folder / "model.pt")
        found = {"loss": 0.25, "time": folder.name, f"{folder}/best": f"{folder}/best"}
        (folder / "seen.json").write_text(json.dumps(found))
    assert compare(case, plain, other, set()) == {}
    torch.save({"weight": torch.ones(3) + 1e-7, "state": {0: {"weight": 1.5}}}, other / "model.pt")
    (other / "late.txt").write_text("x")
    differs = compare(case, plain, other, set())
    assert "1 of" in differs["model.pt"]
    assert differs["late.txt"] == "not written by plain Python"


def test_the_catalogue_names_what_there_is() -> None:
    named = {case.name for case in catalogue.cases()}
    assert named == {path.stem for path in PROGRAMS.iterdir() if not path.name.startswith("_")}
    assert len(named) >= 30
    assert all(case.source.exists() for case in catalogue.cases())


def test_a_line_says_how_far() -> None:
    case = next(case for case in catalogue.cases() if case.name == "mnist")
    assert case.position("epoch 3 [64/2000] loss 0.5") == (3, 64)
    assert case.position("tested: 5") is None
    assert Life(0).furthest == -1
