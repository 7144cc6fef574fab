"""The CUDA driver over the pretended NVIDIA libraries of `shim/`: no GPU, and nothing of the driver replaced."""

from __future__ import annotations

import ctypes
import inspect
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace

import pytest

from sublet.core.errors import CompileFailed, MissingExtra
from sublet.devices.cuda import CudaDriver
from sublet.devices.cuda_code import compile_cuda_c, read_signatures, source_kind
from tests.conftest import need
from tests.devices import test_contract
from tests.devices.cuda_shim import PTX, SHIM, Ran, Shim

FIRST = "GPU-10213243-5465-7687-98a9-bacbdcedfe0f"
SECOND = "GPU-20314253-6475-8697-a8b9-cadbecfd0e1f"
GIB = 1 << 30


@pytest.mark.parametrize(
    ("modules", "package"),
    [(["pynvml"], "nvidia-ml-py"), (["cuda.bindings", "cuda.bindings.driver"], "cuda-bindings")],
)
def test_without_the_packages(shim: Shim, modules: list[str], package: str) -> None:
    """Here is a driver, so `all` says what is missing."""
    ran = shim.run(f"""
        for name in {modules!r}:
            sys.modules[name] = None
        one = driver.probe("auto", "here"), driver.probe("", "here"), refused(driver.probe, "all", "here")
        answer([*one, driver.used_bytes("{FIRST}", 0), refused(driver.open, "{FIRST}", 0, "L")])
    """)
    auto, empty, (kind, words, remedy), used, opening = ran.answer
    assert (auto, empty, kind) == ([], [], "BadInput")
    assert package in words
    assert "pip install 'sublet[cuda]'" in words
    assert remedy == "pip install 'sublet[cuda]'"
    if package == "nvidia-ml-py":
        assert used is None
    else:
        assert opening == ["MissingExtra", "the package cuda-bindings is not installed", remedy]


def test_without_the_driver_libraries(shim: Shim, shim_libraries: Path, tmp_path: Path) -> None:
    script = f"""
        def found(spec):
            try:
                return driver.probe(spec, "here")
            except BadInput as e:
                return e.message
        one = found("auto"), found("all"), found("0")
        answer([*one, driver.used_bytes("{FIRST}", 0), refused(driver.open, "{FIRST}", 0, "L")])
    """
    auto, every, first, used, _ = shim.run(script, nvml_error=9).answer
    assert (auto, every, used) == ([], [], None)
    assert (
        first
        == "SUBLET_DEVICES cuda:0 cannot be used: NVML does not start: Driver Not Loaded (install the NVIDIA driver)"
    )
    auto, every, *_ = shim.run(script, nvml_error=18).answer
    assert auto == []
    assert "NVML does not start" in every, "a driver that is there and does not work is not passed over"
    try:
        ctypes.CDLL("libcuda.so.1")
        pytest.skip("this machine has a real libcuda.so.1")
    except OSError:
        pass
    shim.libraries = tmp_path / "few"
    shim.libraries.mkdir()
    auto, every, first, used, opening = shim.run(script).answer
    assert (auto, every, used) == ([], [], None)
    assert "NVML does not start" in first
    assert opening[0] == "DeviceFault"
    assert opening[2] == "install or update the NVIDIA driver"
    hidden = "for name in ('pynvml', 'cuda.bindings', 'cuda.bindings.driver'): sys.modules[name] = None\n"
    auto, every, *_ = shim.run(hidden + dedent(script)).answer
    assert (auto, every) == ([], []), "nor are packages missed where there is no driver"
    shutil.copy(shim_libraries / "libnvidia-ml.so.1", shim.libraries)
    auto, every, *_ = shim.run(script).answer
    assert auto == []
    assert "libcuda.so.1 is missing" in every


# inventory


def test_probe(shim: Shim) -> None:
    ran = shim.run(f"""
        def found(spec):
            return [[d.id, d.driver, d.ordinal, d.name, d.capacity_bytes] for d in driver.probe(spec, "here")]
        specs = "auto", "", "all", "0+1", "1,0", "1", "{SECOND}", "{SECOND}+0"
        bad = "2", "0+0", "0+{FIRST}", "GPU-none", "x", "0+", "-1", "99999999999999999999"
        answer([[found(s) for s in specs], [refused(driver.probe, s, "here") for s in bad]])
    """)
    first, second = [FIRST, "cuda", 0, "Shim GPU 0", GIB], [SECOND, "cuda", 1, "Shim GPU 1", GIB]
    found, bad = ran.answer
    assert found[:4] == [[first, second]] * 4
    assert found[4:] == [[second, first], [second], [second], [second, first]]
    assert all(kind == "BadInput" and "SUBLET_DEVICES" in words for kind, words, _ in bad), bad
    assert "this host has 2 devices" in bad[0][1]
    assert "twice" in bad[1][1]
    assert "twice" in bad[2][1]
    assert ran.log == ["nvmlInit"], "a warden starts NVML once, and CUDA never"


def test_devices_that_cannot_be_leased_are_left_out(shim: Shim) -> None:
    script = """
        answer([[d.ordinal for d in driver.probe("auto", "here")], refused(driver.probe, "all", "here"),
                refused(driver.probe, "1", "here"), [d.ordinal for d in driver.probe("0", "here")]])
    """
    auto, every, named, other = shim.run(script, mig=1).answer
    assert (auto, other) == ([0], [0])
    assert every[0] == named[0] == "BadInput"
    assert "device 1: it is divided by MIG" in named[1]
    auto, every, named, _ = shim.run(script, lost=1).answer
    assert auto == [0]
    assert "GPU is lost" in every[1]


def test_a_host_without_devices(shim: Shim) -> None:
    assert shim.run('answer([gpus(), driver.probe("auto", "here")])', devices=0).answer == [[], []]


def test_an_older_driver_tells_the_size_too(shim: Shim) -> None:
    sizes = shim.run("answer([d.capacity_bytes for d in gpus()])", no_memory_v2=1, devices=1).answer
    assert sizes == [GIB + (16 << 20)]


def test_a_device_is_found_by_its_uuid_whatever_cuda_counts(shim: Shim) -> None:
    script = "s = opened(0); s.close(); s = opened(1); s.close()"
    for settings in ({}, {"reversed": 1}):
        log = shim.run(script, **settings).log
        assert [line for line in log if line.startswith("context on")] == [
            "context on GPU 0",
            "context on GPU 1",
        ]


def test_a_device_that_is_hidden_from_the_process(shim: Shim) -> None:
    ran = shim.run("answer(refused(opened, 1))", hide=1, CUDA_VISIBLE_DEVICES="0")
    assert ran.answer[0] == "DeviceFault"
    assert SECOND in ran.answer[1]
    assert "CUDA_VISIBLE_DEVICES is '0'" in ran.answer[1]


def test_a_driver_that_does_not_start(shim: Shim) -> None:
    kind, words, _ = shim.run("answer(refused(opened))", init_error=100).answer
    assert (kind, words) == (
        "DeviceFault",
        "cuInit failed: CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected",
    )
    assert shim.run("answer(refused(opened))", init_error=803).answer[1] == "cuInit failed: CUDA error 803"


# the recipe, and what the device reads

RECIPE = """
    s = opened()
    batch = s.alloc(4)
    s.write(batch, bytes([1, 2, 3, 254]))
    module = s.load(PTX)
    s.launch(module, "train_step", grid=(1, 1, 1), block=(1, 1, 1), args=[u64(42), u32(4), batch])
    spent = s.sync()
    out = s.read(batch)
    s.unload(module)
    s.free(batch)
    tally = s.close()
    answer([list(out), spent, tally.launches, tally.left_buffers, tally.left_modules, tally.problems])
"""


def test_the_recipe(shim: Shim) -> None:
    """Allocate, write, load, launch with typed arguments, sync, read, unload, free: the device saw exactly
    that."""
    ran = shim.run(RECIPE, kernel_us=2000)
    out, spent, *rest = ran.answer
    assert out == [43, 44, 45, 40]
    assert 2000 <= spent < 2_000_000
    assert rest == [1, 0, 0, []]
    (launch,) = ran.launches
    name, grid, block, step, n, pointer = launch.split()
    assert (name, grid, block) == ("train_step", "1,1,1", "1,1,1")
    assert (step, n) == ("0:2a00000000000000", "8:04000000")
    assert pointer.startswith("16:")
    assert len(pointer) == len("16:") + 16
    assert ran.wrong == []
    assert ran.log[-1] == "context destroyed"


MARSHALLING = """
    s = opened()
    x, y, out = s.alloc(16), s.alloc(16), s.alloc(32)
    assert s.read(x) == bytes(16), "memory is zeroed"
    module = s.load(PTX)
    s.write(x, struct.pack("<4f", 1, 2, 3, 4))
    s.write(y, struct.pack("<4f", 10, 20, 30, 40))
    s.launch(module, "saxpy", block=4, args=[u32(4), f32(0.5), x, y])
    s.sync()
    results = [list(struct.unpack("<4f", s.read(y)))]
    s.launch(module, "fill64", args=[f64(0.1), u32(3), out])
    results.append(list(struct.unpack("<3d", s.read(out, 24))))
    s.launch(module, "ramp", args=[i32(-2), i64(-(2**40)), u32(4), out])
    results.append(list(struct.unpack("<4q", s.read(out))))
    mixed = [u32(0xDEADBEEF), u64(2**63 + 1), i32(-5), f32(1.5), f64(-0.1), out]
    s.launch(module, "mixed", grid=(3, 2), block=(4, 2, 2), args=mixed)
    results.append(s.read(out) == struct.pack("<IQiifd", 0xDEADBEEF, 2**63 + 1, -5, 0, 1.5, -0.1))
    for step in (2**64 - 1, 0, 1 << 63):
        s.launch(module, "train_step", args=[u64(step), u32(1), x])
    s.launch(module, "nothing")
    s.sync()
    s.close()
    answer(results)
"""


def assert_marshalled(ran: Ran) -> None:
    saxpy, fill, ramp, mixed = ran.answer
    assert saxpy == [10.5, 21.0, 31.5, 42.0]
    assert fill == [0.1] * 3
    assert ramp == [-(2**40) - 2 * i for i in range(4)]
    assert mixed is True
    assert ran.wrong == []
    seen = [launch.split() for launch in ran.launches]
    # Where each argument begins is as wide as the ones before it, to the byte.
    assert [[a.split(":")[0] for a in s[3:]] for s in seen[:4]] == [
        ["0", "4", "8", "16"],
        ["0", "8", "16"],
        ["0", "8", "16", "24"],
        ["0", "8", "16", "20", "24", "32"],
    ]
    assert seen[0][3:5] == ["0:04000000", "4:0000003f"]
    assert seen[2][3:6] == ["0:feffffff", "8:0000000000ffffff", "16:04000000"]
    assert seen[3][1:3] == ["3,2,1", "4,2,2"]
    assert [s[3] for s in seen[4:7]] == ["0:" + "ff" * 8, "0:" + "00" * 8, "0:" + "00" * 7 + "80"]
    assert seen[7] == ["nothing", "1,1,1", "1,1,1"]


def test_every_type_arrives_bit_exact(shim: Shim) -> None:
    assert_marshalled(shim.run(MARSHALLING))


MUTANTS = {
    "order swapped": (
        "cuda_code.py",
        "for arg in args:\n        value",
        "for arg in reversed(args):\n        value",
    ),
    "u32 as eight bytes": (
        "cuda_code.py",
        "arg.encoded() if isinstance(arg, Scalar)",
        "arg.encoded().ljust(8 if arg.kind == 'u32' else 4, b'\\0') if isinstance(arg, Scalar)",
    ),
    "f32 as f64": (
        "cuda_code.py",
        "arg.encoded() if isinstance(arg, Scalar)",
        "(Scalar('f64', arg.value) if arg.kind == 'f32' else arg).encoded() if isinstance(arg, Scalar)",
    ),
    "values for addresses": (
        "cuda.py",
        "*(base + offset for offset in offsets)",
        "*(int.from_bytes(packed[o : o + 8], 'little') for o in offsets)",
    ),
    "values for the array": ("cuda.py", "ctypes.addressof(pointers), 0", "base, 0"),
    "one address for all": (
        "cuda.py",
        "*(base + offset for offset in offsets)",
        "*(base for offset in offsets)",
    ),
    "no alignment": ("cuda_code.py", "bytes(-len(block) % len(value))", "b''"),
    "pointer big-endian": ("cuda_code.py", 'to_bytes(8, "little")', 'to_bytes(8, "big")'),
    "size for address": ("cuda_code.py", "arg.address.to_bytes", "arg.size.to_bytes"),
    "grid and block swapped": ("cuda.py", "function, *grid, *block", "function, *block, *grid"),
    "memory not zeroed": ("cuda.py", 'self._api.do("cuMemsetD8", pointer, 0, size)', "pass"),
    "one byte not zeroed": ("cuda.py", "pointer, 0, size)", "pointer, 0, size - 1)"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_marshalling_is_noticed(shim: Shim, tmp_path: Path, name: str) -> None:
    """The test above must fail for each way of getting it wrong: it is the only proof short of a GPU."""
    mutate(shim, tmp_path, *MUTANTS[name])
    ran = shim.run(MARSHALLING, may_fail=True)
    assert_a_mutant_ran(ran)
    with pytest.raises(AssertionError):
        assert_marshalled(ran)


def mutate(shim: Shim, folder: Path, file: str, right: str, wrong: str) -> None:
    """What the shim runs from now on: this sublet, with one thing wrong in one driver file."""
    text = (shim.source / "sublet/devices" / file).read_text()
    assert text.count(right) == 1, right
    for inner in ("sublet", "sublet/devices"):
        (folder / inner).mkdir()
        for part in (shim.source / inner).iterdir():
            if part.name not in ("devices", file, "__pycache__"):
                (folder / inner / part.name).symlink_to(part)
    (folder / "sublet/devices" / file).write_text(text.replace(right, wrong))
    shim.source = folder


def assert_a_mutant_ran(ran: Ran) -> None:
    """It failed for what is wrong in it, not for how it was written."""
    assert not any(word in ran.error for word in ("SyntaxError", "NameError", "ImportError")), ran.error


def run_contract(shim: Shim) -> subprocess.CompletedProcess[str]:
    """`test_contract.py` in a process that has the shim for its driver: libraries cannot be unloaded
    again."""
    file = Path(test_contract.__file__)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "pytest_timeout", "-rA", "-k", "cuda", str(file)],
        # Other plug-ins take longer to import than the suite takes.
        env=shim.env(wedge="slow") | {test_contract.ONLY: "cuda", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=file.parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_contract_suite(shim: Shim) -> None:
    """Every test that asks for a driver runs for this one too."""
    wanted = [
        name
        for name, test in vars(test_contract).items()
        if name.startswith("test_") and {"rig", "gpu"} & set(inspect.signature(test).parameters)
    ]
    done = run_contract(shim)
    assert done.returncode == 0, done.stdout
    passed = re.findall(r"^PASSED .*::(\w+)\[cuda", done.stdout, re.MULTILINE)
    assert sorted(set(passed)) == sorted(wanted)
    assert "FAULT" not in shim.log.read_text()


@pytest.mark.parametrize("name", ["f32 as f64", "grid and block swapped", "memory not zeroed"])
def test_the_contract_suite_fails_for_a_wrong_driver(shim: Shim, tmp_path: Path, name: str) -> None:
    mutate(shim, tmp_path, *MUTANTS[name])
    done = run_contract(shim)
    assert "FAILED tests/devices/test_contract.py::test_" in done.stdout
    assert "PASSED tests/devices/test_contract.py::test_the_recipe[cuda]" in done.stdout


def test_partial_copies(shim: Shim) -> None:
    ran = shim.run("""
        s = opened()
        batch = s.alloc(10)
        s.write(batch, b"abc", offset=4)
        s.write(batch, memoryview(bytearray(b"-xyz-"))[1:4], offset=7)
        answer([s.read(batch, 5, offset=3).hex(), s.read(batch).hex(), s.read(batch, 0, offset=10).hex()])
        s.close()
    """)
    assert ran.answer == [b"\0abcx".hex(), b"\0\0\0\0abcxyz".hex(), ""]
    assert ran.wrong == []


def test_device_time_is_the_kernels(shim: Shim) -> None:
    ran = shim.run(
        """
        s = opened()
        module = s.load(PTX)
        times = [s.sync()]
        for _ in range(5):
            s.launch(module, "nothing")
        times += [s.sync(), s.sync()]
        s.close()
        answer(times)
        """,
        kernel_us=3000,
    )
    none, five, again = ran.answer
    assert (none, again) == (0, 0)
    assert 15_000 <= five < 1_000_000
    assert ran.wrong == []


def test_launches_without_a_sync_reuse_their_events(shim: Shim) -> None:
    ran = shim.run(
        """
        s = opened()
        module = s.load(PTX)
        for _ in range(1300):
            s.launch(module, "nothing")
        spent = s.sync()
        context = s._context
        answer([spent, len(context._idle)])
        s.close()
        """,
        kernel_us=1,
    )
    spent, pairs = ran.answer
    assert spent >= 1300
    assert pairs <= 520
    assert ran.wrong == []


# errors leave the session usable

GOES_ON = """
    s.launch(module, "train_step", args=[u64(1), u32(4), batch])
    s.sync()
    answer([*found, list(s.read(batch))])
    s.close()
"""


def test_wrong_launches_are_refused_before_the_device_hears_of_them(shim: Shim) -> None:
    ran = shim.run(
        """
    s = opened()
    batch, module, cubin = s.alloc(4), s.load(PTX), s.load(CUBIN)
    found = [
        refused(s.launch, module, "train_stop"),
        refused(s.launch, cubin, "train_stop"),
        refused(s.launch, module, "train_step", args=[u64(1), u32(4)]),
        refused(s.launch, cubin, "train_step", args=[u64(1), u32(4)]),
        refused(s.launch, cubin, "train_step", args=[u64(1), u64(4), batch]),
        refused(s.launch, cubin, "train_step", args=[u64(1), u32(4), batch, batch]),
        refused(s.launch, cubin, "takes_pair", args=[batch, batch]),
        refused(s.launch, module, "nothing", block=(1025,)),
        refused(s.launch, module, "nothing", grid=(1, 70000)),
    ]"""
        + GOES_ON
    )
    *found, out = ran.answer
    known = "it has count, fill64, mixed, nothing, ramp, saxpy, takes_pair, train_step"
    words = [
        f"the module has no kernel 'train_stop'; {known}",
        f"the module has no kernel 'train_stop'; {known}",
        "train_step takes 3 arguments, not 2: it takes (u64, u32, u64)",
        "train_step takes 3 arguments, not 2: it takes (b64, b32, b64)",
        "argument 1 of train_step is u64, the kernel wants b32: it takes (b64, b32, b64)",
        "train_step takes 3 arguments, not 4: it takes (b64, b32, b64)",
        "argument 0 of takes_pair is a buffer, the kernel wants b8[16]: it takes (b8[16], b64)",
        "the device cannot launch nothing as grid (1, 1, 1) of block (1025, 1, 1): "
        "CUDA_ERROR_INVALID_VALUE: invalid argument",
        "the device cannot launch nothing as grid (1, 70000, 1) of block (1, 1, 1): "
        "CUDA_ERROR_INVALID_VALUE: invalid argument",
    ]
    assert [f[:2] for f in found] == [["BadInput", w] for w in words]
    assert out == [1, 1, 1, 1]
    assert len(ran.launches) == 1
    assert ran.wrong == []


def test_a_cubin_under_a_driver_that_cannot_describe_it(shim: Shim) -> None:
    ran = shim.run(
        """
    s = opened()
    batch, module = s.alloc(4), s.load(CUBIN)
    found = [refused(s.launch, module, "train_stop")]"""
        + GOES_ON,
        old=1,
    )
    assert ran.answer[0][1] == "the module has no kernel 'train_stop'; it has none"
    assert ran.answer[1] == [1, 1, 1, 1]


def test_code_the_device_does_not_take(shim: Shim) -> None:
    ran = shim.run(
        """
    s = opened()
    batch, module = s.alloc(4), s.load(PTX)
    found = [
        refused(s.load, ".version 8.0\\n.target sm_70\\n.visible .entry f() {"),
        refused(s.load, b"\\x7fELF broken"),
        refused(s.load, b"\\xff\\xff"),
        refused(s.load, ""),
    ]"""
        + GOES_ON
    )
    broken, cubin, junk, empty, out = ran.answer
    assert broken[0] == cubin[0] == "CompileFailed"
    assert "CUDA_ERROR_INVALID_PTX" in broken[1]
    assert "ptxas application ptx input: fatal" in broken[1], "the assembler's log is shown"
    assert "CUDA_ERROR_INVALID_IMAGE" in cubin[1]
    assert (junk[0], empty[0]) == ("BadInput", "BadInput")
    assert out == [1, 1, 1, 1]
    assert ran.wrong == []


def test_more_memory_than_the_device_has(shim: Shim) -> None:
    ran = shim.run(
        """
    s = opened(quota=1 << 40)
    batch, module = s.alloc(4), s.load(PTX)
    found = [refused(s.alloc, 1 << 20), s.used_bytes]"""
        + GOES_ON,
        memory=1 << 20,
    )
    (kind, words, _), used, out = ran.answer
    assert kind == "OutOfMemory"
    assert words == "the device has not 1MiB left: CUDA_ERROR_OUT_OF_MEMORY: out of memory"
    assert (used, out) == (4, [1, 1, 1, 1])
    assert ran.wrong == []


def test_the_lease_ends(shim: Shim) -> None:
    ran = shim.run("""
        s = opened()
        batch, module = s.alloc(4), s.load(PTX)
        lease.held = False
        lost = [refused(s.launch, module, "nothing")[0], refused(s.alloc, 4)[0], refused(s.sync)[0]]
        s.free(batch)
        answer([lost, s.close().problems])
    """)
    assert ran.answer == [["LeaseLost"] * 3, []]
    assert ran.wrong == []


def test_what_the_program_left_is_freed(shim: Shim) -> None:
    ran = shim.run("""
        with opened() as s:
            buffers = [s.alloc(100) for _ in range(3)]
            module = s.load(PTX)
            s.launch(module, "train_step", args=[u64(1), u32(4), buffers[0]])
        t = s.tally
        answer([t.left_buffers, t.left_bytes, t.left_modules, t.problems, driver.used_bytes(s.device_id, 0)])
    """)
    assert ran.answer == [3, 300, 1, [], 0]
    assert ran.wrong == []
    assert "context destroyed" in ran.log


# a device that fails


def test_a_kernel_that_never_ends(shim: Shim) -> None:
    """A real driver would wait for it in every later call; none is made, and the process can end."""
    begun = time.monotonic()
    ran = shim.run(
        """
        s = opened(watchdog_us=100_000)
        batch, module = s.alloc(4096), s.load(PTX)
        s.launch(module, "nothing")
        begun = time.monotonic()
        first = refused(s.sync)
        took = time.monotonic() - begun
        after = refused(s.read, batch), refused(s.sync)
        tally = s.close()
        answer([first, took, after, tally.left_buffers, tally.problems, driver.used_bytes(s.device_id, 0)])
        """,
        wedge="nothing",
    )
    assert time.monotonic() - begun < 60
    first, took, after, left, problems, held = ran.answer
    assert first[:2] == ["KernelTimeout", "a kernel ran longer than 100ms"]
    assert 0.1 <= took < 30
    assert [a[0] for a in after] == ["DeviceFault"] * 2
    assert left == 1
    assert sum("only the end of this process" in p for p in problems) == 3, "buffer, module, context"
    assert held == 4096
    assert ran.wrong == []
    assert shim.run("answer(driver.used_bytes(gpus()[0].id, 0))").answer == 0


def test_a_kernel_that_crashes(shim: Shim) -> None:
    ran = shim.run(
        """
        s = opened()
        batch, module = s.alloc(4), s.load(PTX)
        found = []
        try:
            s.launch(module, "nothing")
            s.sync()
        except DeviceFault as e:
            found = [type(e).__name__, e.message, e.remedy]
        answer([found, refused(s.alloc, 4), s.close().problems])
        """,
        crash="nothing",
    )
    (kind, words, remedy), after, problems = ran.answer
    assert kind == "DeviceFault"
    assert "CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered" in words
    assert remedy == "end this process: its context on the device is lost"
    assert after[0] == "DeviceFault"
    assert len(problems) == 2, "the buffer and the module; the context went"
    assert ran.wrong == ["leak 1 buffers 1 modules 0 events"], "what a broken context can no longer free"


def test_a_kernel_out_of_its_buffer(shim: Shim) -> None:
    ran = shim.run("""
        s = opened()
        batch, module = s.alloc(4), s.load(PTX)
        try:
            s.launch(module, "train_step", args=[u64(1), u32(5), batch])
            s.sync()
        except DeviceFault as e:
            answer(e.message)
    """)
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in ran.answer
    assert ran.wrong == ["FAULT train_step: 5 bytes are out of range"]


# memory, seen from outside

HOLD = """
    s = opened({which})
    batch = s.alloc({size})
    answer(os.getpid())
    sys.stdin.readline()
    s.close()
"""
LOOK = f'answer([driver.used_bytes("{FIRST}", 0), driver.used_bytes("{SECOND}", 1)])'


@pytest.mark.parametrize("leak", [False, True])
def test_a_killed_process_gives_its_memory_back(shim: Shim, leak: bool) -> None:
    """Before it is waited for. With a device that leaks, its warden sees that it does."""
    settings = {"leak": 1} if leak else {}
    with (
        shim.start(HOLD.format(which=0, size=4096)) as one,
        shim.start(HOLD.format(which=0, size=100)) as two,
    ):
        assert one.stdout is not None
        assert two.stdout is not None
        one.stdout.readline()
        two.stdout.readline()
        assert shim.run(LOOK, **settings).answer == [4196, 0]
        assert (
            shim.run("answer(refused(opened(quota=1 << 40).alloc, 5000)[0])", memory=8000).answer
            == "OutOfMemory"
        )
        one.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + 10
        while (seen := shim.run(LOOK, **settings).answer) != [100, 0] and not leak:
            assert time.monotonic() < deadline
        assert seen == ([4196, 0] if leak else [100, 0])
        two.communicate("\n")
    assert shim.run(LOOK, **settings).answer == ([4096, 0] if leak else [0, 0])


def test_memory_nobody_accounts_for(shim: Shim) -> None:
    """The device knows what is used on it, and not by whom."""
    ran = shim.run(
        f"""
        s = opened()
        s.alloc(100)
        answer([driver.used_bytes("{FIRST}", 0), driver.used_bytes("{FIRST}", 0, frozenset([os.getpid()])),
                driver.used_bytes("{FIRST}", 0, frozenset([1])), refused(driver.used_bytes, "GPU-none", 0)])
        s.close()
        """,
        no_accounting=1,
    )
    used, besides_us, besides_another, unknown = ran.answer
    assert (used, besides_us, besides_another) == (100, None, 100)
    assert unknown[:2] == ["DeviceFault", "NVML cannot say what GPU-none holds: Not Found"]


BESIDES = """
    s = opened()
    s.alloc(100)
    other, us = {other}, os.getpid()
    sets = [], [us], [other], [us, other], [1]
    answer([driver.used_bytes(s.device_id, 0, frozenset(pids)) for pids in sets])
    s.close()
"""


def test_memory_of_anybody_else(shim: Shim) -> None:
    """Of the living; what the dead left is nobody's, and stays counted."""
    with shim.start(HOLD.format(which=0, size=4096)) as one:
        assert one.stdout is not None
        other = int(one.stdout.readline())
        assert shim.run(BESIDES.format(other=other)).answer == [4196, 4096, 100, 0, 4196]
        one.kill()
        one.wait()
        assert shim.run(BESIDES.format(other=other), leak=1).answer == [4196, 4096, 4196, 4096, 4196]
    assert shim.run(BESIDES.format(other=other)).answer == [100, 0, 100, 0, 100]


class BusyNvml:
    """NVML beside a process that holds other amounts at every look; somebody else has 10."""

    NVMLError = ValueError
    nvmlMemory_v2 = 2

    def __init__(self, *held: int | None) -> None:
        self.readings = list(held)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        now = self.readings.pop(0)
        return [] if now is None else [SimpleNamespace(pid=7, usedGpuMemory=now)]

    def nvmlDeviceGetMemoryInfo(self, handle: str, version: int) -> SimpleNamespace:
        return SimpleNamespace(total=1000, reserved=0, used=10 + (self.readings.pop(0) or 0))


@pytest.mark.parametrize(
    ("held", "least"),
    [
        ((100, 100, 100), 10),
        ((100, 40, 40), 10),  # freed before the device was asked
        ((100, 100, 40), 70),  # and after
        ((40, 100, 100), 70),
        ((40, 40, 100), 10),
        ((100, None, None), 10),  # it ended
        ((100, 100, None), 110),
    ],
)
def test_memory_of_others_is_never_hidden_by_a_process_at_work(
    held: tuple[int | None, ...], least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, nvml = CudaDriver(), BusyNvml(*held)
    monkeypatch.setattr(driver, "_nvml", lambda: nvml)
    assert driver.used_bytes("GPU-x", 0, frozenset([7])) == least


def test_processes_that_are_not_left_out_are_noticed(shim: Shim, tmp_path: Path) -> None:
    mutate(
        shim, tmp_path, "cuda.py", "for p in running if p.pid in pids}", "for p in running if p.pid in ()}"
    )
    ran = shim.run(BESIDES.format(other=1), may_fail=True)
    assert_a_mutant_ran(ran)
    assert ran.answer == [100] * 5


# memory that keeps what was in it

HANDOVERS = """
    from cuda.bindings import driver as raw
    from sublet.devices import scrub
    scrub.PIECE_BYTES = 1 << 16
    CAPACITY, SIZE = {capacity}, {room}
    device = gpus()[0].id

    def in_a_process(work, *args):
        '''What it returned. It is killed where it stands, with all that it holds.'''
        ours, theirs = os.pipe()
        if os.fork() == 0:
            try:
                os.write(theirs, json.dumps(work(*args)).encode())
                os.kill(os.getpid(), 9)
            finally:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
        os.close(theirs)
        with open(ours) as pipe:
            said = pipe.read()
        os.wait()
        return json.loads(said)

    def do(verb, *args):
        code, *values = getattr(raw, verb)(*args)
        assert int(code) == 0, (verb, code)
        return values[0] if values else None

    def tenant(canary):
        '''Take memory as the device gives it: how much of it somebody else wrote. Then write over all of it.'''
        do("cuInit", 0)
        do("cuCtxCreate", None, 0, 0)
        at, seen = do("cuMemAlloc", SIZE), bytearray(SIZE)
        do("cuMemcpyDtoH", seen, at, SIZE)
        do("cuMemsetD8", at, canary, SIZE)
        return SIZE - seen.count(0) - seen.count(0xa5)

    found, scrubbed = [], []
    for turn in range({turns}):
        found.append(in_a_process(tenant, 1 + turn % 150))
        if {scrubs}:
            scrubbed.append(in_a_process(driver.scrub, device, 0, CAPACITY * 2))
    answer([found, scrubbed, driver.used_bytes(device, 0)])
"""
CAPACITY, ROOM = 1030 << 10, 1000 << 10
HANDOVER_TURNS = int(os.environ.get("SUBLET_HANDOVERS", "50"))


def hand_over(shim: Shim, *, turns: int, scrubs: bool, may_fail: bool = False) -> Ran:
    script = HANDOVERS.format(turns=turns, scrubs=scrubs, capacity=CAPACITY, room=ROOM)
    return shim.run(script, memory=CAPACITY, may_fail=may_fail, within_s=60 + turns)


def test_the_shim_s_memory_keeps_what_a_killed_process_wrote(shim: Shim) -> None:
    assert hand_over(shim, turns=3, scrubs=False).answer == [[0, ROOM, ROOM], [], 0]


@pytest.mark.timeout(60 + HANDOVER_TURNS)
def test_handovers_with_scrubbing(shim: Shim) -> None:
    """Threat 16. As many as `make proof` wants, below the lease; `tests/storms/test_canary.py` has whole
    leases."""
    ran = hand_over(shim, turns=HANDOVER_TURNS, scrubs=True)
    found, scrubbed, used = ran.answer
    assert found == [0] * HANDOVER_TURNS
    assert scrubbed == [CAPACITY] * HANDOVER_TURNS, "all that is free, of twice as much"
    assert used == 0
    assert ran.wrong == []


SCRUB_MUTANTS = {
    "memory not overwritten": ("cuda.py", 'self._api.do("cuMemsetD8", pointer, 0, size)', "pass"),
    "freed before the next": (
        "scrub.py",
        "held.callback(context.free, buffer)\n            pieces.append((buffer, wanted))",
        "context.free(buffer)",
    ),
    "only one piece": ("scrub.py", "while done < size:", "while done < min(size, PIECE_BYTES):"),
    "gives up when a whole piece is not free": ("scrub.py", "if piece < LEAST_BYTES:", "if piece:"),
}


@pytest.mark.parametrize("name", SCRUB_MUTANTS)
def test_wrong_scrubbing_is_noticed(shim: Shim, tmp_path: Path, name: str) -> None:
    mutate(shim, tmp_path, *SCRUB_MUTANTS[name])
    ran = hand_over(shim, turns=3, scrubs=True, may_fail=True)
    assert_a_mutant_ran(ran)
    assert not ran.answers or ran.answer[:2] != [[0] * 3, [CAPACITY] * 3]


def test_scrubbing_beside_others(shim: Shim) -> None:
    """What is free is overwritten, what others hold is not touched, and a device without room is no fault."""
    with shim.start(HOLD.format(which=0, size=100 << 10)) as one:
        assert one.stdout is not None
        one.stdout.readline()
        ran = shim.run(f'answer([driver.scrub("{FIRST}", 0, n) for n in (0, 1000, 1 << 30)])', memory=1 << 20)
        assert ran.answer == [0, 1000, (1 << 20) - (100 << 10)]
        assert ran.wrong == []
        assert shim.run(f'answer(driver.scrub("{FIRST}", 0, 1 << 30))', memory=100 << 10).answer == 0
        one.communicate("\n")
    assert shim.run("answer(refused(driver.scrub, 'GPU-none', 0, 1))").answer[0] == "DeviceFault"


def test_scrubbing_a_device_that_has_no_room_for_a_context(shim: Shim) -> None:
    assert shim.run(f'answer(driver.scrub("{FIRST}", 0, 1 << 20))', ctx_error=2).answer == 0
    refused = shim.run(f'answer(refused(driver.scrub, "{FIRST}", 0, 1 << 20))', ctx_error=101).answer
    assert refused[0] == "DeviceFault", "but another fault is one"


def test_nvml_is_started_again_after_a_fork(shim: Shim) -> None:
    ran = shim.run("""
        gpus(); gpus()
        pid = os.fork()
        if pid == 0:
            gpus(); gpus()
            os._exit(0)
        os.waitpid(pid, 0)
    """)
    assert ran.log == ["nvmlInit"] * 2


# threads and other users of CUDA in the process


def test_the_thread_s_current_context_is_left_alone(shim: Shim) -> None:
    ran = shim.run("""
        import threading
        from cuda.bindings import driver as raw
        raw.cuInit(0)
        _, mine = raw.cuCtxCreate(None, 0, 0)
        def current():
            return int(raw.cuCtxGetCurrent()[1])
        seen = []
        s = opened()
        seen.append(current() == int(mine))
        batch, module = s.alloc(4), s.load(PTX)
        refused(s.launch, module, "none")
        seen.append(current() == int(mine))
        def elsewhere():
            s.launch(module, "train_step", args=[u64(1), u32(4), batch])
            seen.append((s.sync() >= 0, list(s.read(batch)), current()))
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        s.close()
        seen.append(current() == int(mine))
        answer(seen)
    """)
    assert ran.answer == [True, True, [True, [1, 1, 1, 1], 0], True]
    assert ran.wrong == []


def test_two_devices_in_one_process(shim: Shim) -> None:
    ran = shim.run(f"""
        a, b = opened(0), opened(1)
        for s, n in ((a, 4), (b, 8)):
            batch, module = s.alloc(n), s.load(PTX)
            s.launch(module, "train_step", args=[u64(n), u32(n), batch])
            s.sync()
            answer(list(s.read(batch)))
        {LOOK}
        a.close(); b.close()
    """)
    assert ran.answers == [[4] * 4, [8] * 8, [4, 8]]
    assert ran.wrong == []


# the shim itself: it must notice what it is there to notice


NOTICED = {
    "c.free(b); c.free(b)": "cuMemFree: freed before",
    "c.free(b); c.read(b, 0, 1)": "cuMemcpyDtoH: the memory was freed",
    "c.read(b, 0, 17)": "cuMemcpyDtoH: 17 bytes are out of range",
    "c.write(b, 12, memoryview(b'12345'))": "cuMemcpyHtoD: 5 bytes are out of range",
    "c.unload(m); c.unload(m)": "cuModuleUnload: the handle was destroyed",
    "c.unload(m); c.launch(m, 'nothing', one, one, [])": "cuModuleGetFunction: the handle was destroyed",
    "c.launch(m, 'nothing', one, one, []); f = dict(m.functions); c.unload(m); m.functions.update(f); "
    "c.launch(m, 'nothing', one, one, [])": "cuLaunchKernel: the handle was destroyed",
    "c.free(b); c.launch(m, 'count', one, one, [b])": "count: the memory was freed",
    "c.launch(m, 'count', one, one, [u64(123)])": "count: 7b is not device memory",
    "c.close(); c.alloc(1)": "cuCtxPushCurrent: the handle was destroyed",
    "c._api.do('cuMemAlloc', 1)": "cuMemAlloc without a current context",
    "d.free(b)": "cuMemFree: memory of another context",
}


def test_the_shim_notices(shim: Shim) -> None:
    ran = shim.run(f"""
        one = (1, 1, 1)
        for script in {list(NOTICED)!r}:
            c, d = (driver.open(gpus()[0].id, 0, "L") for _ in range(2))
            b, m = c.alloc(16), c.load(PTX)
            begun = os.path.getsize(os.environ["SHIM_LOG"])
            kind = refused(exec, script)[0]
            said = open(os.environ["SHIM_LOG"]).read()[begun:].splitlines()
            answer([kind, [line for line in said if line.startswith("FAULT")]])
    """)
    for (script, fault), (kind, said) in zip(NOTICED.items(), ran.answers, strict=True):
        assert kind in ("DeviceFault", "BadInput"), script
        assert said == [f"FAULT {fault}"], script


def test_the_shim_notices_a_missing_init_and_leaks(shim: Shim) -> None:
    ran = shim.run("""
        from sublet.devices.cuda import CudaApi
        early = refused(CudaApi().do, "cuDeviceGetCount")
        c = driver.open(gpus()[0].id, 0, "L")
        c.alloc(16), c.load(PTX)
        c.close()
        answer(early)
    """)
    assert "CUDA_ERROR_NOT_INITIALIZED" in ran.answer[1]
    assert ran.wrong == ["FAULT cuDeviceGetCount before cuInit", "leak 1 buffers 1 modules 0 events"]


# CUDA C


@pytest.fixture(scope="module", name="nvrtc")
def nvrtc_fixture() -> None:
    """A real compiler, without a GPU."""
    try:
        compile_cuda_c("", "sm_75")
    except MissingExtra:
        need(False, "nvidia-cuda-nvrtc")


@pytest.mark.usefixtures("nvrtc")
def test_the_kernels_compile_to_the_ptx_beside_them() -> None:
    ptx, cubin = compile_cuda_c((SHIM / "kernels.cu").read_text(), "sm_75")
    assert source_kind(ptx) == "ptx"
    assert source_kind(cubin) == "cubin"
    assert read_signatures(ptx.decode()) == read_signatures(PTX.read_text())


@pytest.mark.usefixtures("nvrtc")
def test_cuda_c_that_does_not_compile_shows_the_log() -> None:
    with pytest.raises(CompileFailed) as refused:
        compile_cuda_c('extern "C" __global__ void f(int *x) { *x = missing; }', "sm_75")
    assert 'kernel.cu(1): error: identifier "missing" is undefined' in refused.value.message
    with pytest.raises(CompileFailed, match="sm_1"):
        compile_cuda_c("", "sm_1")


@pytest.mark.usefixtures("nvrtc")
def test_cuda_c_end_to_end(shim: Shim) -> None:
    ran = shim.run(f"""
        s = opened()
        module = s.load(open({str(SHIM / "kernels.cu")!r}).read())
        batch = s.alloc(4)
        s.launch(module, "train_step", args=[u64(42), u32(4), batch])
        s.sync()
        mangled = s.load(b"__global__ void step(int *x) {{ *x = 1; }}")
        answer([list(s.read(batch)), refused(s.launch, module, "train_step", args=[u32(1)]),
                refused(s.launch, mangled, "step"), refused(s.load, "int f( {{")])
        s.close()
    """)
    out, count, mangled, broken = ran.answer
    assert out == [42] * 4
    assert count[:2] == ["BadInput", "train_step takes 3 arguments, not 1: it takes (u64, u32, u64)"]
    assert mangled[1] == "the module has no kernel 'step'; it has _Z4stepPi"
    assert mangled[2].startswith('declare it extern "C" __global__ void step(')
    assert broken[0] == "CompileFailed"
    assert "kernel.cu(1): error" in broken[1]
    assert ran.wrong == []


@pytest.mark.usefixtures("nvrtc")
def test_a_compiler_newer_than_the_driver(shim: Shim) -> None:
    """Its PTX is refused, so its machine code is given; which the shim recognises, and cannot run."""
    ran = shim.run("answer(refused(opened().load, 'extern \"C\" __global__ void f() {}'))", ptx_max=100)
    assert "a cubin of a real compiler" in ran.log
    assert "CUDA_ERROR_INVALID_IMAGE" in ran.answer[1]


def test_cuda_c_without_a_compiler(shim: Shim) -> None:
    ran = shim.run("""
        sys.modules["cuda.bindings.nvrtc"] = None
        s = opened()
        answer([refused(s.load, "__global__ void f() {}"), s.load(PTX).number > 0])
    """)
    (kind, words, remedy), loaded = ran.answer
    assert kind == "MissingExtra"
    assert "nvidia-cuda-nvrtc" in words
    assert remedy.startswith("pip install nvidia-cuda-nvrtc")
    assert loaded


def test_what_it_can() -> None:
    can = CudaDriver().capabilities()
    assert (can.sources, can.measures_memory) == (("ptx", "cubin", "cuda-c"), True)
    assert can.keeps_contents


def test_importing_it_needs_nothing() -> None:
    code = (
        "import sys, sublet.devices.cuda; assert not {'pynvml', 'cuda', 'cuda.bindings'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
