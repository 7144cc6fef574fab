"""Arrays of JAX, in a process of its own: its threads and the forks of other tests do not go together."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from tests.conftest import need


def test_arrays_of_jax() -> None:
    need(find_spec("jax") is not None, "jax")
    tests = Path(__file__).with_name("jax_arrays.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(tests)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
