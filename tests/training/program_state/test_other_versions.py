"""The same programs with the other versions of Python whose frames are known."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.program_state import test_call_stack, test_functions, test_pickling, test_set_order
from tests.training.program_state.carried import Carried

ROOT = Path(__file__).parents[3]
PROGRAMS = {
    f"{module.__name__}: {name}": text
    for module in (test_call_stack, test_functions, test_pickling, test_set_order)
    for name, text in module.PROGRAMS.items()
    if "numpy" not in text and name != "a long chain"
}
#: Under 3.13 a frame's variables are shown without being held, so a program that was never lost lets them go at once; one that
#: goes on has them in the frames of its beginning as well, to its end. Older versions hold them in both.
LATER = {"3.13": {f"{test_call_stack.__name__}: what a frame lets go"}}


def _interpreter(version: str) -> str:
    here = sorted(Path.home().glob(f".pyenv/versions/{version}*/bin/python"))
    return str(here[-1]) if here else shutil.which(f"python{version}") or ""


@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_they_go_on_elsewhere(version: str) -> None:
    python = _interpreter(version)
    if not python or version == ".".join(map(str, sys.version_info[:2])):
        pytest.skip(f"there is no other Python {version} here")
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    done = subprocess.run(
        [python, "-m", "tests.training.program_state.carried"],
        input=json.dumps(
            {name: text for name, text in PROGRAMS.items() if name not in LATER.get(version, ())}
        ),
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = {name: Carried(**result) for name, result in json.loads(done.stdout).items()}
    assert not {name: one.fault or one.refused for name, one in found.items() if one.fault or one.refused}
