"""What NVML tells of a GPU, and silence where it does not."""

from __future__ import annotations

import sys

import pytest

from sublet.devices import utilisation
from tests.devices.cuda_shim import Shim
from tests.devices.test_cuda import FIRST, SECOND

ASK = """
    import dataclasses
    from sublet.devices.utilisation import loads
    answer([{uuid: dataclasses.asdict(load) for uuid, load in loads().items()} for _ in range(2)])
"""


def test_each_gpu_by_its_uuid(shim: Shim) -> None:
    ran = shim.run(ASK, gpus=2)
    first, again = ran.answer
    assert first == again
    assert first == {
        FIRST: {"gpu_percent": 37, "memory_percent": 11, "celsius": 61, "milliwatts": None},
        SECOND: {"gpu_percent": 38, "memory_percent": 11, "celsius": 62, "milliwatts": None},
    }
    assert ran.log.count("nvmlInit") == 1  # anew each time, it can take a second


def test_no_driver_is_no_number(shim: Shim) -> None:
    assert shim.run(ASK, nvml_error=9).answer == [{}, {}]


def test_no_package_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert utilisation.loads() == {}
