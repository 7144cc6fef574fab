"""`%%gpu` and `%gpu` as typed: options, help, mistakes, and the same in scripts and terminals."""

from __future__ import annotations

import re

import pytest

from tests.notebook.conftest import Kernel, Lab
from tests.notebook.test_output import gpu


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--vram lots", "--vram 'lots'"),
        ("--ttl soon", "--ttl 'soon'"),
        ("--ttl 0", "--ttl 0 is out of range"),
        ("--tier royal", "royal"),
        ("--count 0", "--count 0 must be at least 1"),
        ("--count two", "invalid int value"),
        ("--keep 1x", "'1x' is not the name of a variable"),
        ("--in a-b", "'a-b' is not the name of a variable"),
        ("--every never", "--every 'never'"),
        ("--frobnicate", "unrecognized arguments: --frobnicate"),
        ("--vram '8GB", "No closing quotation"),
        ("--exclusivity none", "none"),
        ("--wait long", "--wait 'long'"),
        ("--least tiny", "--least 'tiny'"),
        ("stray", "unrecognized arguments: stray"),
    ],
)
def test_mistakes_are_told_before_anything_is_leased(
    kernel: Kernel, shared_lab: Lab, options: str, said: str
) -> None:
    leases = len(shared_lab.all_leases())
    shown = kernel.run(gpu("1", options))
    assert shown.status == "error"
    assert said in shown.stderr
    assert "→" in shown.stderr
    assert "Traceback" not in shown.stderr + shown.trace
    assert len(shared_lab.all_leases()) == leases


def test_help(kernel: Kernel) -> None:
    shown = kernel.fine(gpu("1", "--help"))
    for option in ("--vram", "--ttl", "--tier", "--keep", "--in", "--out", "--count", "--wait", "--every"):
        assert option in shown.stdout
    assert "Example:" in shown.stdout
    assert "release" in kernel.fine("%gpu --help").stdout


def test_names_said_in_two_options_all_count(kernel: Kernel) -> None:
    kernel.fine("first, second, third = 1, 2, 3")
    shown = kernel.run(gpu("1", "--keep nowhere --keep first"))
    assert "--keep names nowhere" in shown.said
    kernel.fine(gpu("fourth = first + second\nfifth = 5", "--in first --in second --out fourth --out fifth"))
    assert kernel.value("fourth, fifth") == "(3, 5)"


def test_more_than_there_is(kernel: Kernel) -> None:
    shown = kernel.run(gpu("1", "--vram 1TB"))
    assert shown.error == "NeverFits"
    assert "sublet gpus" in shown.trace
    assert "src/sublet" not in shown.trace


def test_more_than_the_slice(kernel: Kernel) -> None:
    """VRAM is enforced for sessions: an error of the cell's, and the session goes on."""
    code = "import sublet\nwith sublet.lease().open() as gpu:\n    {}"
    shown = kernel.run(gpu(code.format("gpu.alloc(3 << 30)"), "--vram 1GiB"))
    assert shown.error == "OutOfMemory"
    assert "gpu.alloc(3 << 30)" in shown.trace
    shown = kernel.fine(gpu(code.format("len(gpu.read(gpu.alloc(16)))"), "--vram 1GiB"))


def test_kernel_launches_are_counted(kernel: Kernel) -> None:
    code = """
import sublet
with sublet.lease().open() as gpu:
    module = gpu.load("def noop(total): pass")
    for _ in range(3):
        gpu.launch(module, "noop", grid=(1,), block=(1,), args=[])
    gpu.sync()
"""
    assert "3 launches" in kernel.fine(gpu(code)).line


def test_the_panel(kernel: Kernel) -> None:
    kernel.fine(gpu("1", "--vram 2GiB --ttl 10m"))
    shown = kernel.fine("%gpu status")
    drawn = shown.displays[0]["data"]
    assert re.search(
        r"2GiB on \S+: warm, until nobody has used it for 10m\S*\n\d+:\d\d left of 10:00\nlease L",
        drawn["text/plain"],
    )
    assert "<script" not in drawn["text/html"]
    assert "http" not in drawn["text/html"]
    kernel.begin("%gpu release")
    panel = shown.displays[0]["transient"]["display_id"]
    shown = kernel.finish()
    assert [u["transient"]["display_id"] for u in shown.updates] == [panel]  # drawn anew, where it stands
    assert "No GPU is leased" in shown.updates[0]["data"]["text/plain"]
    assert "GPU given back" in shown.texts[0]
    assert "no GPU to give back" in kernel.fine("%gpu release").texts[0]


def test_history_quota_and_cost(shared_lab: Lab) -> None:
    kernel = shared_lab.kernel("figures", SUBLET_PRICE="3600")
    assert "Nothing was leased yet" in kernel.fine("%gpu history").texts[0]
    assert "Nothing was leased yet" in kernel.fine("%gpu cost").texts[0]
    shown = kernel.fine(gpu("import time\ntime.sleep(0.3)", "--release"))
    seconds = float(re.search(r"([\d.]+) GPU-s", shown.line)[1])  # type: ignore[index]
    price = float(re.search(r"price ([\d.]+)", shown.line)[1])  # type: ignore[index]
    assert price == pytest.approx(seconds, abs=0.0006)  # one a second
    history = kernel.fine("%gpu history").texts[0].splitlines()
    assert len(history) == 2
    assert "released" in history[1]
    assert "any number" in kernel.fine("%gpu quota").texts[0]
    assert "total" in kernel.fine("%gpu cost").texts[0]
    kernel.close()


def test_a_wrong_price_says_so(shared_lab: Lab) -> None:
    kernel = shared_lab.kernel("dear", SUBLET_PRICE="dear")
    shown = kernel.run(gpu("1"))
    assert "SUBLET_PRICE" in shown.trace + shown.stderr
    kernel.close()


def test_plainly_with_sublet_disable(shared_lab: Lab) -> None:
    kernel = shared_lab.kernel("plain", SUBLET_DISABLE="1")
    kernel.fine("import os\nme = os.getpid()\nlock = __import__('threading').Lock()")
    shown = kernel.fine(gpu("lock.locked(), os.getpid() == me"))
    assert shown.result == "(False, True)"
    assert shown.displays == []
    assert "plainly" in kernel.fine("%gpu").texts[0]
    shown = kernel.run(gpu("1/0"))
    assert shown.error == "ZeroDivisionError"
    assert "----> 2 1/0" in shown.trace
    shown = kernel.fine(gpu("import asyncio\nawait asyncio.sleep(0)\nx = 3\nx;", "--vram 8GB"))
    assert shown.result == ""
    assert kernel.value("x") == "3"
    assert "unrecognized arguments" in kernel.run(gpu("1", "--frobnicate")).stderr
    kernel.fine("%reload_ext sublet")
    assert (
        kernel.value("len([t for t in get_ipython().input_transformers_cleanup if 'as_it_is' in str(t)])")
        == "1"
    )
    kernel.close()


def test_functions_and_leases_in_a_notebook(kernel: Kernel) -> None:
    """The notebook's own process never holds a lease: a worker does."""
    code = """
import os, sublet
offset = 10
@sublet.on_gpu(vram="1GiB", ttl="1m")
def where(x):
    return os.getpid(), x + offset
pid, value = where(1)
with sublet.gpu(vram="1GiB", ttl="1m") as lease:
    inside = lease.run(os.getpid)
    with lease.open() as gpu:
        buffer = gpu.alloc(4); gpu.write(buffer, b"abcd"); read = bytes(gpu.read(buffer))
(pid != os.getpid(), value, inside != os.getpid(), read)
"""
    assert kernel.fine(code).result == "(True, 11, True, b'abcd')"
    assert kernel.fine(gpu("where(5)[1], where(5)[0] == os.getpid()")).result == "(15, True)"
    kernel.fine("from sublet.functions.on_gpu import release_warm; release_warm()")


def test_the_extension_can_be_unloaded_and_loaded_again(shared_lab: Lab) -> None:
    kernel = shared_lab.kernel("again")
    kernel.fine(gpu("x = 1"))
    kernel.fine("%unload_ext sublet")
    assert "gpu" in kernel.run(gpu("x")).stderr
    kernel.fine("%load_ext sublet")
    assert kernel.fine(gpu("x + 1")).result == "2"
    kernel.fine("%reload_ext sublet")
    assert kernel.fine(gpu("x + 2")).result == "3"
    kernel.close()
