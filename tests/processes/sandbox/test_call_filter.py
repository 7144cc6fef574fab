"""Which system calls a tenant's worker does without, and that all else goes on as before."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sublet.core.studio.call_policy import NAMESPACE_BITS, REFUSED
from sublet.core.studio.isolation import FILTERED
from sublet.core.studio.worker_limits import WorkerLimits
from sublet.processes.sandbox import call_filter, limits
from sublet.processes.worker.local import LocalWorker
from tests.conftest import need
from tests.processes.conftest import REPOSITORY
from tests.processes.sandbox.test_limits import limited, printed, words

#: What each call answers, asked with arguments that mean nothing to it.
ASKS = """
import ctypes, errno, json, os
libc = ctypes.CDLL(None, use_errno=True)
def answer(number, *arguments):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_ulong(a) for a in arguments])
    return 0 if result >= 0 else ctypes.get_errno()
def clone(flags):
    result = libc.syscall(ctypes.c_long({clone}), ctypes.c_ulong(flags | 17), 0, 0, 0, 0)
    if result == 0:
        os._exit(0)
    if result < 0:
        return ctypes.get_errno()
    os.waitpid(result, 0)
    return 0
found = {{name: answer(number, *[2**64 - 1] * 5) for name, number in {numbers!r}.items()}}
found |= {{f"clone {{bit:#x}}": clone(bit) for bit in {bits!r}}}
found |= {{f"unshare {{bit:#x}}": answer({unshare}, bit) for bit in {bits!r}}}
found["userfaultfd"] = answer({userfaultfd}, 0)
found["userfaultfd of its own"] = answer({userfaultfd}, 1)
found["clone3"] = answer({clone3}, 0, 0)
found["x32"] = answer(0x40000000 + 39)
found["vsock"] = answer({socket}, 40, 1, 0)
found["plain clone"] = clone(0)
found["unshare of files"] = answer({unshare}, 0x400)
found["getpid"] = answer({getpid})
print(json.dumps(found))
"""
GETPID = {"x86_64": 39, "aarch64": 172}
_BITS = [1 << n for n in range(32) if NAMESPACE_BITS["clone"] >> n & 1]


def asks() -> str:
    numbers = call_filter.NUMBERS[os.uname().machine]
    refused = {name: numbers[name] for group in REFUSED.values() for name in group}
    picked = {name: numbers[name] for name in ("clone", "unshare", "clone3", "socket", "userfaultfd")}
    return ASKS.format(numbers=refused, bits=_BITS, getpid=GETPID[os.uname().machine], **picked)


@pytest.fixture(scope="module")
def worker() -> Iterator[LocalWorker]:
    need(os.uname().machine in call_filter.NUMBERS, "a machine whose system calls are known")
    wanted = WorkerLimits(memory_bytes=limits.machine_memory() // 2)
    # The home's path is short: torch makes a socket below its temporary folder.
    with tempfile.TemporaryDirectory(dir="/tmp") as name, limited(Path(name), wanted) as made:
        yield made


def test_each_call_of_the_list_is_refused_in_a_worker(worker: LocalWorker) -> None:
    assert FILTERED in words(worker)
    found = json.loads(printed(worker, asks()))
    wanted = {
        "clone3": errno.ENOSYS,
        "plain clone": 0,
        "unshare of files": 0,
        "getpid": 0,
        "userfaultfd": errno.EPERM,
    }
    for name, code in wanted.items():
        assert found.pop(name) == code, name
    # The kernel may not have it or not give it; then the filter is not who says so.
    assert found.pop("userfaultfd of its own") in (0, errno.ENOSYS, errno.EPERM)
    if os.uname().machine != "x86_64":
        found.pop("x32")
    assert set(found.values()) == {errno.EPERM}, found


def test_what_a_worker_is_refused_is_not_refused_by_the_machine() -> None:
    """Without the filter most of it is answered by something else: nothing of the above would be shown on a
    machine that refuses everything by itself."""
    need(os.uname().machine in call_filter.NUMBERS, "a machine whose system calls are known")
    done = subprocess.run([sys.executable, "-c", asks()], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    others = {name for name, code in found.items() if code != errno.EPERM}
    assert {"ptrace", "process_vm_readv", "process_vm_writev", "kcmp"} & others
    assert "clone3" in others
    assert found["clone3"] != errno.ENOSYS


def test_the_filter_stays_for_other_programs_and_through_threads(worker: LocalWorker) -> None:
    code = f"""
import subprocess, sys, threading
source = {asks()!r}
def ask():
    print(subprocess.run([sys.executable, "-c", source], capture_output=True, text=True).stdout, end="")
thread = threading.Thread(target=ask)
thread.start()
thread.join()
"""
    found = json.loads(printed(worker, code))
    assert found["ptrace"] == found["mount"] == errno.EPERM
    assert found["plain clone"] == 0


WORKS = """
import json, os, subprocess, sys, threading
import multiprocessing as mp
from concurrent.futures import ProcessPoolExecutor
found = {}
open("scales.py", "w").write(
    "import torch\\n"
    "class Squares(torch.utils.data.Dataset):\\n"
    "    def __len__(self): return 32\\n"
    "    def __getitem__(self, i): return torch.tensor(float(i * i))\\n"
    "def twice(n): return 2 * n\\n"
)
sys.path.insert(0, os.getcwd())
import numpy, torch, scales
from torch.utils.data import DataLoader
if __name__ == "__main__":
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.clone()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    found["step"] = not torch.equal(before, model.weight)
    for method in ("fork", "spawn"):
        loaded = DataLoader(scales.Squares(), batch_size=8, num_workers=2, multiprocessing_context=method)
        found[f"loader {method}"] = int(sum(float(b.sum()) for b in loaded))
        with ProcessPoolExecutor(2, mp_context=mp.get_context(method)) as pool:
            found[f"pool {method}"] = sum(pool.map(scales.twice, range(5)))
    found["numpy"] = float(numpy.linalg.norm(numpy.ones((3, 3)) @ numpy.ones(3)))
    found["subprocess"] = subprocess.run(["sh", "-c", "echo $((6 * 7)) | cat"], capture_output=True, text=True).stdout
    found["posix_spawn"] = os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)[1]
    threads = [threading.Thread(target=lambda: None) for _ in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    os.makedirs("site/pkg/x.dist-info", exist_ok=True)
    open("site/pkg/__init__.py.tmp", "w").write("answer = 42\\n")
    os.replace("site/pkg/__init__.py.tmp", "site/pkg/__init__.py")
    os.chmod("site/pkg/__init__.py", 0o644)
    os.symlink("__init__.py", "site/pkg/link.py")
    os.utime("site/pkg/__init__.py", (1, 1))
    said = subprocess.run([sys.executable, "-c", "import pkg; print(pkg.answer)"], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": "site"})
    found["package"] = said.stdout + said.stderr[-300:]
    print(json.dumps(found))
"""


def test_training_loaders_pools_programs_and_packages_work_all_the_same(worker: LocalWorker) -> None:
    pytest.importorskip("torch")
    assert FILTERED in words(worker)
    code = f"""
import subprocess, sys
open("works.py", "w").write({WORKS!r})
done = subprocess.run([sys.executable, "works.py"], capture_output=True, text=True)
print(done.stdout if done.returncode == 0 else done.stderr[-2000:])
"""
    found = json.loads(printed(worker, code).splitlines()[-1])
    squares = sum(i * i for i in range(32))
    assert found == {
        "step": True,
        "loader fork": squares,
        "loader spawn": squares,
        "pool fork": 20,
        "pool spawn": 20,
        "numpy": pytest.approx(27**0.5),
        "subprocess": "42\n",
        "posix_spawn": 0,
        "package": "42\n",
    }


def test_pages_that_were_written_to_are_still_told_by_the_kernel(worker: LocalWorker) -> None:
    code = """
from sublet.processes.channel import dirty_pages
try:
    dirty_pages._PageTracker().close()
    print("works")
except OSError as e:
    print(e.errno)
"""
    outside = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=dict(os.environ) | {"PYTHONPATH": f"{REPOSITORY}/src"},
    ).stdout.strip()
    need(outside == "works", "userfaultfd with PAGEMAP_SCAN")
    assert printed(worker, code) == "works"


def test_every_machine_has_a_number_for_every_call_and_no_number_twice() -> None:
    for machine, numbers in call_filter.NUMBERS.items():
        for name in (name for group in REFUSED.values() for name in group):
            assert name in numbers, (machine, name)
        assert len(set(numbers.values())) == len(numbers), machine
        code = call_filter.assembled(machine)
        assert len(code) % 8 == 0
        assert len(code) // 8 < 256, "a jump of this kind reaches no further"
