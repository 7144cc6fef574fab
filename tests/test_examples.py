"""Every example runs, on every kind of device this machine has."""

from __future__ import annotations

import re
import runpy
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

import sublet
from sublet.devices.opencl import _installed
from tests import forked
from tests.conftest import need, repository
from tests.devices import ptx
from tests.devices.cuda_shim import Shim, assemble
from tests.homes import Home

EXAMPLES = repository("examples")


def run_example(name: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return forked.run([sys.executable, str(EXAMPLES / name)], env=environment, children_too=True)


@pytest.mark.parametrize("devices", ["host:1x1GiB", "opencl:all", "cuda:all"])
def test_recipe_52_gpu_session(devices: str, sqlite_home: Home, request: pytest.FixtureRequest) -> None:
    environment = sqlite_home.environment | {"SUBLET_DEVICES": devices}
    if devices.startswith("opencl"):
        need(_installed(), "pyopencl with PoCL")
    if devices.startswith("cuda"):
        shim: Shim = request.getfixturevalue("shim")
        environment = shim.env(
            uuids=secrets.randbits(63), **{k: v for k, v in environment.items() if k.startswith("SUBLET_")}
        )
    done = run_example("recipe_52_gpu_session.py", environment)
    assert done.returncode == 0, done.stderr
    assert "step 42 done: [43, 44, 45, 46]" in done.stdout
    assert "nothing is left" in done.stdout
    if devices.startswith("cuda"):
        assert "leased GPU-" in done.stdout
        log = shim.log.read_text().splitlines()
        assert [line.split()[1:4] for line in log if line.startswith("launch ")] == [
            ["train_step", "4,1,1", "1,1,1"]
        ]
        assert not [line for line in log if line.startswith(("FAULT", "leak"))]


def test_the_ptx_of_recipe_52_is_taken_by_nvidia_s_assembler(tmp_path: Path) -> None:
    assemble(runpy.run_path(str(EXAMPLES / "recipe_52_gpu_session.py"))["PTX"], tmp_path)


def test_the_ptx_of_recipe_52_does_the_step() -> None:
    """The shim knows the kernel by its name and never looks inside."""
    text = runpy.run_path(str(EXAMPLES / "recipe_52_gpu_session.py"))["PTX"]
    for grid, block in (((4, 1, 1), (1, 1, 1)), ((3, 1, 1), (2, 1, 1))):
        memory = bytearray([9, 1, 2, 3, 254, 9, 9, 9])
        args = [sublet.u64(42).encoded(), sublet.u32(4).encoded(), (1).to_bytes(8, "little")]
        ptx.run(text, "train_step", args, memory, grid=grid, block=block)
        assert list(memory) == [9, 43, 44, 45, 40, 9, 9, 9]


def test_on_gpu(sqlite_home: Home) -> None:
    done = run_example("on_gpu.py", sqlite_home.environment)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[0].startswith("loading the model in process")
    assert said[1] == "first call: ([40, 59, 56], True)"
    assert said[2].startswith("second call, warm: ([40], False)")
    assert said[3] == "many small calls, 16 a trip: 328350"
    assert "exited with code 3" in said[4]
    assert said[-1] == "called again, a new worker: ([27], True)"


@pytest.mark.parametrize("devices", ["host:1x1GiB", "opencl:all"])
def test_recipe_52_training_step(devices: str, sqlite_home: Home) -> None:
    if devices.startswith("opencl"):
        need(_installed(), "pyopencl with PoCL")
    done = run_example("recipe_52_training_step.py", sqlite_home.environment | {"SUBLET_DEVICES": devices})
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[0].startswith("step 42: [43, 44, 45, 46], committed as version 1")
    assert said[1] == "step 42 again: a duplicate of version 1, its stored result is [43, 44, 45, 46]"
    assert said[2].startswith("step 43 without the lease: step 43 was not started")
    assert said[4:6] == [
        "cut: begun after step 0, left at 22, committed 20",
        "cut: begun after step 15, left at 40, committed 40",  # to see that 16 to 20 come out the same
    ]
    assert said[6] == "the run that was cut ended with the same weights, bit for bit"


def test_gke_spot_training(sqlite_home: Home) -> None:
    # A pod that is killed has said what it said: into a pipe it would not be written at once.
    done = run_example("gke_spot_training.py", sqlite_home.environment | {"PYTHONUNBUFFERED": "1"})
    assert done.returncode == 0, done.stderr
    assert "the pod left with exit code 85" in done.stdout
    assert done.stdout.count("mail sent, with the key spot-training#half-way-mail") in (1, 2)
    assert "60 steps, each committed once, over three pods" in done.stdout


def test_gke_batch_inference(sqlite_home: Home) -> None:
    # One zygote that has torch, instead of four workers that each import it.
    done = run_example("gke_batch_inference.py", sqlite_home.environment | {"SUBLET_PRELOAD": "torch"})
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("---")]
    assert said[0] == "--- 65 names are in the queue; published again, 65 of them are duplicates"
    assert "left with exit code 85: told to go, nothing lost" in said[2]
    assert said[-2].startswith("--- 64 images, each result stored once, over four workers")
    assert said[-1] == "--- 1 item is dead after 2 tries: ValueError: broken.ppm is not an image"


def test_recipe_18_studio(sqlite_home: Home) -> None:
    done = run_example("recipe_18_studio.py", sqlite_home.environment)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout
    in_order = [
        "ann asked for 8 GiB and has them",
        "ben asked for 12 GiB and waits: place 1",
        "cem asked for 12 GiB of spot and was offered 8 GiB",
        "and is given back, because nobody used it",
        "cem's spot lease is taken for ben",
        "ben has his 12 GiB",
        "the service was killed (kill -9)",
        "ben's function returned 8",
        "cem resumed, and finds what he saved: {'step': 1}",
        "the bill:",
    ]
    places = [said.index(words) for words in in_order]
    assert places == sorted(places)
    lines = re.findall(r"\(ben's function, in the studio: (\d) of 8\)", said)
    assert lines == [str(i) for i in range(1, 9)]
    bill = {
        row[0]: [float(x) for x in row[1:]]
        for row in re.findall(r"^ +(ann|ben|cem)" + r" +([0-9.]+)" * 4, said, re.M)
    }
    assert set(bill) == {"ann", "ben", "cem"}
    assert bill["ben"][1] > 0  # waited
    assert bill["cem"][2] > 0  # refunded
    assert not bill["ann"][2]
