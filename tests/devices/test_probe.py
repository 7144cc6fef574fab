"""Which devices `auto` means."""

from __future__ import annotations

import pytest

from sublet.core.errors import BadInput
from sublet.devices.probe import Probe, find_devices
from sublet.ports.ledger import FoundDevice


def finding(driver: str, count: int) -> Probe:
    def probe(spec: str, host: str) -> list[FoundDevice]:
        return [
            FoundDevice(id=f"{driver}{n}", driver=driver, ordinal=n, name=spec, capacity_bytes=1)
            for n in range(count)
        ]

    return probe


@pytest.mark.parametrize(
    ("cuda", "vendor", "opencl", "wanted"),
    [
        (2, 0, 2, ["cuda0", "cuda1"]),  # OpenCL shows the same two again
        (1, 1, 1, ["cuda0", "xpu0"]),
        (0, 0, 2, ["opencl0", "opencl1"]),
        (0, 0, 0, ["host0"]),
    ],
)
def test_auto_never_finds_a_gpu_twice(cuda: int, vendor: int, opencl: int, wanted: list[str]) -> None:
    """L2: a device known under two names would be granted twice."""
    counts = {"cuda": cuda, "xpu": vendor, "opencl": opencl, "host": 1}
    probes = {name: finding(name, count) for name, count in counts.items()}
    assert [d.id for d in find_devices("auto", "h", probes)] == wanted


def test_named_devices_are_all_taken() -> None:
    probes = {"cuda": finding("cuda", 1), "host": finding("host", 2)}
    found = find_devices("host:2x1GiB, cuda:all", "h", probes)
    assert [(d.id, d.name) for d in found] == [("host0", "2x1GiB"), ("host1", "2x1GiB"), ("cuda0", "all")]
    with pytest.raises(BadInput, match="names the driver 'tpu'; known: cuda, host"):
        find_devices("tpu:all", "h", probes)
    with pytest.raises(BadInput, match="has no device"):
        find_devices("cuda:all", "h", {"cuda": finding("cuda", 0)})
