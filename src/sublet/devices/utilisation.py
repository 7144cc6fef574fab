"""How busy NVIDIA GPUs are, according to NVML.

Rules of this file:
- What cannot be measured is left out (no driver, no package, an old device), because a scrape must not fail
  for that.
- NVML stays open for the process, as in `devices.cuda`, and for the same reason.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from importlib import import_module
from typing import Any

_opened_by = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    gpu_percent: int | None = None
    memory_percent: int | None = None
    celsius: int | None = None
    milliwatts: int | None = None


def loads() -> dict[str, Load]:
    """The utilisation of each GPU of this host, by its UUID."""
    global _opened_by
    try:
        nvml: Any = import_module("pynvml")
    except ImportError:
        return {}
    try:
        if _opened_by != os.getpid():
            nvml.nvmlInit()
            _opened_by = os.getpid()
        handles = [nvml.nvmlDeviceGetHandleByIndex(n) for n in range(nvml.nvmlDeviceGetCount())]
        return {nvml.nvmlDeviceGetUUID(handle): _load(nvml, handle) for handle in handles}
    except nvml.NVMLError:
        return {}


def _load(nvml: Any, handle: Any) -> Load:
    found: dict[str, int] = {}
    with contextlib.suppress(nvml.NVMLError):
        rates = nvml.nvmlDeviceGetUtilizationRates(handle)
        found |= {"gpu_percent": int(rates.gpu), "memory_percent": int(rates.memory)}
    with contextlib.suppress(nvml.NVMLError):
        found["celsius"] = int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
    with contextlib.suppress(nvml.NVMLError):
        found["milliwatts"] = int(nvml.nvmlDeviceGetPowerUsage(handle))
    return Load(**found)
