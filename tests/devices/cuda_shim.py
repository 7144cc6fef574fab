"""The pretended NVIDIA driver of the tests: builds the two libraries of `shim/`, and runs scripts under them.

A script is its own process: the libraries are found through LD_LIBRARY_PATH, which counts when a process
starts. It has the names of `PRELUDE`, and gives its answer by `answer(...)`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import sublet
from tests import forked
from tests.conftest import need

SHIM = Path(__file__).parent / "shim"
PTX = SHIM / "kernels.ptx"
LIBRARIES = {"libcuda.so.1": "libcuda_shim.c", "libnvidia-ml.so.1": "libnvml_shim.c"}

PRELUDE = """
import contextlib, ctypes, json, os, struct, sys, time
from sublet.core.errors import *
from sublet.core.progress.kernel_arguments import f32, f64, i32, i64, u32, u64
from sublet.devices.cuda import CudaDriver
from sublet.devices.session import LocalGpuSession

PTX = open({ptx!r}).read()
CUBIN = b"\\x7fELF" + PTX.encode() + b"\\0"

class Lease:
    id = "Ltest"
    held = True
    def check(self):
        if not self.held:
            raise LeaseLost("lease Ltest has ended: test")
    @contextlib.contextmanager
    def working(self):
        yield

lease = Lease()
driver = CudaDriver()

def gpus():
    return driver.probe("all", "here")

def opened(which=0, quota=1 << 20, **options):
    device = gpus()[which]
    return LocalGpuSession(driver.open(device.id, device.ordinal, lease.id), lease, quota, device_id=device.id, **options)

def refused(verb, *args, **options):
    '''Which error, and its words.'''
    try:
        verb(*args, **options)
    except SubletError as e:
        return [type(e).__name__, e.message, e.remedy]
    return ["nothing", "", ""]

def answer(value):
    print(json.dumps(value), flush=True)
"""


@dataclass(frozen=True, slots=True)
class Ran:
    answers: list[Any]
    log: list[str]
    error: str

    @property
    def answer(self) -> Any:
        assert len(self.answers) == 1, self.error
        return self.answers[0]

    @property
    def launches(self) -> list[str]:
        return [line.removeprefix("launch ") for line in self.log if line.startswith("launch ")]

    @property
    def wrong(self) -> list[str]:
        """What a correct program does not do."""
        return [line for line in self.log if line.startswith(("FAULT", "leak"))]


class Shim:
    def __init__(self, libraries: Path, folder: Path) -> None:
        self.libraries = libraries
        self.state = folder / "state"
        self.log = folder / "log"
        self.state.mkdir(parents=True)
        self.source = Path(sublet.__file__).parents[1]

    def env(self, **settings: object) -> dict[str, str]:
        plain = {k: v for k, v in os.environ.items() if not k.startswith(("SHIM_", "CUDA_", "SUBLET_"))}
        return plain | {
            "LD_LIBRARY_PATH": str(self.libraries),
            "PYTHONPATH": str(self.source),
            "SHIM_STATE": str(self.state),
            "SHIM_LOG": str(self.log),
            **{name if name.isupper() else f"SHIM_{name.upper()}": str(v) for name, v in settings.items()},
        }

    def start(self, script: str, **settings: object) -> subprocess.Popen[str]:
        text = PRELUDE.format(ptx=str(PTX)) + textwrap.dedent(script)
        pipe = subprocess.PIPE
        # Another source than the one imported here takes a process that imports anew.
        kind = forked.Forked if self.source == Path(sublet.__file__).parents[1] else subprocess.Popen
        return kind(
            [sys.executable, "-c", text],
            env=self.env(**settings),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
        )

    def run(self, script: str, *, may_fail: bool = False, within_s: float = 60, **settings: object) -> Ran:
        self.log.unlink(missing_ok=True)
        with self.start(script, **settings) as child:
            try:
                out, error = child.communicate(timeout=within_s)
            except BaseException:  # the test's own time limit too: leaving the block waits for the child
                child.kill()
                raise
        assert may_fail or child.returncode == 0, error
        log = self.log.read_text().splitlines() if self.log.exists() else []
        return Ran([json.loads(line) for line in out.splitlines()], log, error)


def assemble(ptx: str, folder: Path) -> None:
    """By NVIDIA's own assembler, where there is one. It is no part of what the tests install, so CI does not
    ask for it."""
    ptxas = shutil.which("ptxas")
    if ptxas is None:
        pytest.skip("ptxas is missing: it comes with the CUDA toolkit, and in nvidia-cuda-nvcc")
    (folder / "module.ptx").write_text(ptx)
    command = [ptxas, "-arch=sm_75", "-o", str(folder / "module.cubin"), str(folder / "module.ptx")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def build(folder: Path) -> Path:
    for library, source in LIBRARIES.items():
        flags = ["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
        names = [f"-Wl,-soname,{library}", "-o", str(folder / library), str(SHIM / source)]
        subprocess.run(["gcc", *flags, *names], check=True)
    return folder


@pytest.fixture(scope="session", name="shim_libraries")
def shim_libraries_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need(shutil.which("gcc") is not None, "gcc")
    for module, package in (("cuda.bindings.driver", "cuda-bindings"), ("pynvml", "nvidia-ml-py")):
        try:
            __import__(module)
        except ImportError:
            need(False, package)
    return build(tmp_path_factory.mktemp("cuda-shim"))


@pytest.fixture(name="shim")
def shim_fixture(shim_libraries: Path, tmp_path: Path) -> Shim:
    return Shim(shim_libraries, tmp_path / "shim")
