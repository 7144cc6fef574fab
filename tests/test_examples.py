"""Every example runs, on every kind of device this machine has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sublet.drivers.opencl import _installed
from tests.conftest import need
from tests.runtime.conftest import Home, sqlite_home  # noqa: F401

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize("devices", ["host:1x1GiB", "opencl:all"])
def test_recipe_52_gpu_session(devices: str, sqlite_home: Home) -> None:  # noqa: F811
    if devices.startswith("opencl"):
        need(_installed(), "pyopencl with PoCL")
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "recipe_52_gpu_session.py")],
        capture_output=True,
        text=True,
        env=sqlite_home.environment | {"SUBLET_DEVICES": devices},
    )
    assert done.returncode == 0, done.stderr
    assert "step 42 done: [43, 44, 45, 46]" in done.stdout
    assert "nothing is left" in done.stdout
