"""The self-test of a device, on every kind of device there is here; and on broken ones, each of which it must
name.
"""

from __future__ import annotations

import os
import signal
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sublet.core.errors import DeviceFault
from sublet.core.progress.kernel_arguments import Scalar, f32, f64, i32, i64, u32, u64
from sublet.devices import selftest
from sublet.devices.host import Faults, HostContext, HostDriver
from sublet.devices.opencl import OpenClDriver, _installed
from sublet.devices.selftest import DOUBLE_KERNELS, KERNELS, PARTS, Row, run_part, try_device
from sublet.ports.device import Capabilities
from sublet.ports.ledger import FoundDevice
from tests.conftest import MORE_EXAMPLES, need
from tests.devices import ptx
from tests.devices.cuda_shim import Shim, assemble
from tests.devices.test_cuda import MUTANTS, mutate

CHECKS = [name for steps in PARTS.values() for name, _, _ in steps] + ["all given back"]


def statuses(rows: Sequence[Row]) -> dict[str, str]:
    assert all(r.seen for r in rows)
    return {r.check: r.status for r in rows}


def test_the_host() -> None:
    driver = HostDriver()
    rows = list(try_device(driver, driver.probe("1x1GiB", "selftest")[0]))
    assert [r.check for r in rows] == CHECKS
    assert statuses(rows) == dict.fromkeys(CHECKS, "ok") | {"scrub": "skip"}, rows


def test_opencl() -> None:
    need(_installed(), "pyopencl with PoCL")
    driver = OpenClDriver()
    rows = list(try_device(driver, driver.probe("auto", "here")[0]))
    skipped = dict.fromkeys(("scrub", "memory in use", "all given back"), "skip")
    assert statuses(rows) == dict.fromkeys(CHECKS, "ok") | skipped, rows


# over the pretended NVIDIA driver

TRY = """
    from sublet.devices import selftest
    selftest.SETTLE_SECONDS = 0.2
    answer([[r.check, r.status, r.seen] for r in selftest.try_device(driver, gpus()[0])])
"""


def failures(answer: list[list[str]]) -> dict[str, str]:
    assert [check for check, _, _ in answer] == CHECKS
    return {check: seen for check, status, seen in answer if status == "fail"}


def test_cuda(shim: Shim) -> None:
    ran = shim.run(TRY, memory=100 << 20)
    assert {check: status for check, status, _ in ran.answer} == dict.fromkeys(CHECKS, "ok"), ran.answer
    assert "100MiB of 100MiB overwritten" in ran.answer[-2][2]
    assert ran.wrong == []


@pytest.mark.parametrize(
    ("settings", "check", "words"),
    [
        ({"leak": 1}, "all given back", "8MiB in use, nothing before"),
        ({"crash": "count"}, "every thread", "CUDA_ERROR_ILLEGAL_ADDRESS"),
        ({"init_error": 100}, "open", "CUDA_ERROR_NO_DEVICE"),
        ({"ptx_max": 600}, "load", "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"),
    ],
)
def test_a_gpu_that_is_not_well(
    shim: Shim,
    settings: dict[str, Any],
    check: str,
    words: str,
) -> None:
    found = failures(shim.run(TRY, memory=100 << 20, **settings).answer)
    assert words in found[check]


def test_a_gpu_whose_processes_nobody_counts(shim: Shim) -> None:
    ran = shim.run(TRY, memory=100 << 20, no_accounting=1)
    assert failures(ran.answer) == {}
    assert ran.answer[3][:2] == ["memory in use", "skip"]


#: One for each check that can tell; `make proof` has the others too.
WRONG = [
    ("f32 as f64", "arguments"),
    ("grid and block swapped", "every thread"),
    ("one byte not zeroed", "alloc"),
    ("order swapped", "arguments"),
    ("memory not zeroed", "alloc"),
    ("size for address", "arguments"),
]


@pytest.mark.parametrize(("name", "check"), WRONG if MORE_EXAMPLES > 1 else WRONG[:3])
def test_a_wrong_cuda_driver_fails(shim: Shim, tmp_path: Path, name: str, check: str) -> None:
    mutate(shim, tmp_path, *MUTANTS[name])
    assert check in failures(shim.run(TRY, memory=100 << 20).answer)


# broken in one way each


class Broken(HostContext):
    """A host context with one thing wrong with it."""

    def __init__(self, fault: str) -> None:
        super().__init__("broken-host0", Faults())
        self.fault = fault

    def alloc(self, size: int) -> Any:
        if self.fault == "memory fault" and size > 1 << 40:
            raise DeviceFault("broken")
        if self.fault == "memory for all" and size > 1 << 40:
            size = 4096
        memory = super().alloc(size)
        if self.fault == "dirty":
            memory.view[size - 1] = 1
        return memory

    def write(self, buffer: Any, offset: int, data: memoryview) -> None:
        super().write(buffer, offset, data[:-1] if self.fault == "short write" else data)

    def read(self, buffer: Any, offset: int, size: int) -> bytes:
        return super().read(buffer, 0 if self.fault == "offset ignored" else offset, size)

    def load(self, source: str | bytes) -> Any:
        if self.fault == "no compiler":
            raise RuntimeError("no compiler")
        return super().load(source)

    def launch(self, module: Any, kernel: str, grid: Any, block: Any, args: Sequence[Any]) -> None:
        if self.fault == "anything goes" and len(args) != module[kernel].__code__.co_argcount - 1:
            return
        if self.fault == "rounded":
            args = [Scalar("f64", 0.5) if isinstance(a, Scalar) and a.kind == "f64" else a for a in args]
        if self.fault == "signs lost":
            args = [
                Scalar("i64", abs(a.value)) if isinstance(a, Scalar) and a.kind == "i64" else a for a in args
            ]
        super().launch(module, kernel, grid, (1, 1, 1) if self.fault == "one thread a block" else block, args)

    def sync(self, timeout_us: int | None) -> int:
        spent = super().sync(None if self.fault == "no watchdog" else timeout_us)
        return {"no clock": 0, "wrong clock": spent * 1000 + 10**6}.get(self.fault, spent)

    def close(self) -> None:
        if self.fault == "cannot close":
            raise DeviceFault("it will not close")


class BrokenDriver(HostDriver):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def capabilities(self, ordinal: int = 0) -> Capabilities:
        return Capabilities(
            sources=("python",), measures_memory=True, keeps_contents=self.fault.startswith("scrub")
        )

    def open(self, device_id: str, ordinal: int, lease_id: str) -> Broken:
        if self.fault == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "hang":
            time.sleep(1000)
        return Broken(self.fault)

    def used_bytes(self, device_id: str, ordinal: int, besides: frozenset[int] = frozenset()) -> int | None:
        if self.fault == "blind":
            return 5
        return super().used_bytes(device_id, ordinal, frozenset() if self.fault == "one for all" else besides)

    def scrub(self, device_id: str, ordinal: int, size: int) -> int:
        if self.fault == "scrub raises":
            raise DeviceFault("dirty")
        return 0


DEVICE = FoundDevice(id="broken-host0", driver="host", ordinal=0, name="broken", capacity_bytes=1 << 30)


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ("dirty", "alloc"),
        ("short write", "write and read"),
        ("offset ignored", "write and read"),
        ("blind", "memory in use"),
        ("one for all", "memory in use"),
        ("no compiler", "load"),
        ("signs lost", "arguments"),
        ("rounded", "double precision"),
        ("one thread a block", "every thread"),
        ("no clock", "device time"),
        ("wrong clock", "device time"),
        ("anything goes", "wrong launch"),
        ("memory fault", "out of memory"),
        ("memory for all", "out of memory"),
        ("cannot close", "free and close"),
        ("no watchdog", "watchdog"),
        ("scrub nothing", "scrub"),
        ("scrub raises", "scrub"),
    ],
)
def test_a_broken_driver_is_named(fault: str, check: str) -> None:
    rows = [row for part in PARTS for row in run_part(part, BrokenDriver(fault), DEVICE)]
    assert [r.check for r in rows] == CHECKS[:-1]
    failed = [r.check for r in rows if r.status == "fail"]
    assert failed[:1] == [check], rows


def test_what_stands_on_a_failed_step_is_skipped() -> None:
    rows = {r.check: r for r in run_part("session", BrokenDriver("no compiler"), DEVICE)}
    assert rows["load"].seen == "the driver raised RuntimeError: no compiler"
    assert (rows["arguments"].status, rows["arguments"].seen) == ("skip", "not tried without: load")
    assert rows["out of memory"].status == rows["free and close"].status == "ok"


@pytest.mark.parametrize(
    ("fault", "seconds", "words"),
    [("crash", 60.0, "its process ended with -9"), ("hang", 3.0, "no answer within 3 s")],
)
def test_a_device_that_takes_its_process_along(
    fault: str, seconds: float, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selftest, "PART_SECONDS", seconds)
    monkeypatch.setattr(selftest, "PARTS", {"session": PARTS["session"]})
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]))
    rows = list(try_device(BrokenDriver(fault), DEVICE))
    assert (rows[0].check, rows[0].status, rows[0].seen) == ("open", "fail", words)
    assert {r.status for r in rows[1:-1]} == {"skip"}
    assert (rows[-1].check, rows[-1].status) == ("all given back", "ok")


# the kernels' own text: the shim knows them by name only


def test_every_kind_of_source_has_both_texts() -> None:
    assert KERNELS.keys() == DOUBLE_KERNELS.keys()


def address(at: int) -> bytes:
    return at.to_bytes(8, "little")


def test_the_ptx_does_what_is_expected_of_it() -> None:
    text, memory = KERNELS["ptx"], bytearray(b"\xee" * 64)
    args = [u32(0xDEADBEEF), u64(2**63 + 1), i32(-5), i64(-(2**40) - 3), f32(1.5)]
    ptx.run(text, "kinds", [*(a.encoded() for a in args), address(8)], memory)
    expected = struct.pack("<I4xQi4xqf4x", *(a.value for a in args))
    assert memory == b"\xee" * 8 + expected + b"\xee" * 16
    memory = bytearray(8)
    ptx.run(text, "count", [address(4)], memory, grid=(3, 2, 1), block=(4, 2, 2))
    assert memory == struct.pack("<4xI", 96)
    ptx.run(text, "spin", [address(1000), address(0)], memory)
    x = 1
    for _ in range(1000):
        x = (x * 6364136223846793005 + 1442695040888963407) % 2**64
        x ^= x >> 29
    assert memory == address(x | 1)
    ptx.run(DOUBLE_KERNELS["ptx"], "real64", [f64(-0.1).encoded(), address(0)], memory)
    assert memory == struct.pack("<d", -0.1)


@pytest.mark.parametrize("text", [KERNELS["ptx"], DOUBLE_KERNELS["ptx"]], ids=["kernels", "double"])
def test_the_ptx_is_taken_by_nvidia_s_assembler(text: str, tmp_path: Path) -> None:
    assemble(text, tmp_path)
