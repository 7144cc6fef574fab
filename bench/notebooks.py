"""What `%%gpu` costs a notebook: until its first cell is ready, per cell, per line, per byte, and in GPU-seconds.

Rules of this file:
- Kernels are real ones, driven over IPC by `jupyter_client` as a front end drives them. A cell's time is from the execute request
  to the kernel's `idle`, with everything it showed received.
- A `%%gpu` cell is timed beside the normal cell that does the same, in the same kernel, in turns.
- What is billed is what the ledger's usage rows say.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.measure import Goal, Section, median_ratio, progress
from sublet import wiring
from sublet.leases.warden import warden_process
from sublet.settings import Settings, load_settings

FIRST_TURNS = 7
NOT_WARM_TURNS = 3
CELL_ROUNDS = 12
CELLS_A_ROUND = 10
PRINT_ROUNDS = 9
LINES = 20_000
ARRAY_ROUNDS = 11
ARRAY_BYTES = 256 << 20
MODEL_MB = 400
SESSION_SECONDS = 60
BURST_SECONDS = 1.0
PATIENCE_SECONDS = 120

FIRST_CELL = "import torch\nprint(torch.zeros(1))"
#: Its value comes back, for which the notebook imports torch too.
WITH_VALUE = "import torch\nx = torch.zeros(1)"


def run(place: Path) -> list[Section]:
    missing = [name for name in ("ipykernel", "jupyter_client", "torch") if find_spec(name) is None]
    if missing:
        section = Section("Notebooks", ["", ""])
        section.notes.append(f"not measured: not installed: {', '.join(missing)}")
        return [section]
    with _home(place / "notebooks") as home:
        parts = [lambda: _first(place, home), lambda: _cells(home), lambda: _lines(home)]
        parts += [lambda: _arrays(home), lambda: _models(home), lambda: _billed(home)]
        return [_with_waiting(part()) for part in parts]


#: How long kernels ran, and were ready to run without a CPU, in ns: what `bench.measure` says of this process says nothing of them.
_ran_and_waited = [0, 0]


def _with_waiting(section: Section) -> Section:
    ran, waited = _ran_and_waited
    _ran_and_waited[:] = 0, 0
    percent = 100 * waited / max(1, ran + waited)
    section.notes.append(f"its kernels waited for a CPU {percent:.0f} % of the time they wanted one")
    section.data["waited_percent"] = percent
    return section


# --- kernels -------------------------------------------------------------------------------------------------


@dataclass
class Shown:
    """What one cell showed."""

    seconds: float
    text: str = ""
    data: list[Mapping[str, Any]] = field(default_factory=list)


class Kernel:
    """One kernel, as a front end sees it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        from jupyter_client.manager import KernelManager

        self._manager = KernelManager(transport="ipc")
        self._manager.start_kernel(
            env=dict(environment), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=PATIENCE_SECONDS)

    def run(self, code: str) -> Shown:
        begun = time.perf_counter()
        request = self._client.execute(code, allow_stdin=False)
        shown = Shown(0.0)
        pieces: list[str] = []
        while True:
            message = self._client.get_iopub_msg(timeout=PATIENCE_SECONDS)
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                break
            if kind == "stream":
                pieces.append(content["text"])
            elif kind in ("display_data", "execute_result"):
                shown.data.append(content["data"])
            elif kind == "error":
                raise RuntimeError("\n".join(content["traceback"]))
        shown.seconds = time.perf_counter() - begun
        self._client.get_shell_msg(timeout=PATIENCE_SECONDS)
        shown.text = "".join(pieces)
        return shown

    def ms(self, code: str) -> float:
        return self.run(code).seconds * 1000

    def close(self) -> None:
        provisioner = self._manager.provisioner
        with contextlib.suppress(OSError):
            ran, waited, _ = Path(f"/proc/{provisioner.pid}/schedstat").read_text().split()
            _ran_and_waited[0] += int(ran)
            _ran_and_waited[1] += int(waited)
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)
        self._manager.cleanup_resources()


@dataclass(frozen=True)
class Home:
    """Where a notebook's ledger, warden and zygote are."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "SUBLET_HOME": str(self.folder),
            "SUBLET_LEDGER": f"sqlite:{self.folder}/ledger.db",
            "SUBLET_DEVICES": "host:1x16GiB",
        }

    def settings(self) -> Settings:
        os.environ.update({k: v for k, v in self.environment.items() if k.startswith("SUBLET_")})
        return load_settings()

    def warm(self) -> bool:
        """Whether its zygote serves."""
        return any(path.is_socket() for path in (self.folder / "run").glob("zygote-*"))

    def close(self) -> None:
        settings = self.settings()
        pids = [warden_process.warden_state(settings)[2]]
        pids += [int(lock.read_text() or 0) for lock in (self.folder / "run").glob("zygote-*.lock")]
        wiring.close_all()
        for pid in filter(None, pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        # Its files are deleted next, and whoever still runs would miss them.
        give_up_at = time.monotonic() + PATIENCE_SECONDS
        while any(Path(f"/proc/{pid}").exists() for pid in filter(None, pids)):
            if time.monotonic() > give_up_at:
                raise RuntimeError(f"warden or zygote of {self.folder} did not end: {pids}")
            time.sleep(0.02)


@contextlib.contextmanager
def _home(folder: Path) -> Iterator[Home]:
    home = Home(folder)
    try:
        yield home
    finally:
        home.close()


@contextlib.contextmanager
def _kernel(home: Home, *setup: str) -> Iterator[Kernel]:
    """With the extension loaded, and warm."""
    kernel = Kernel(home.environment)
    try:
        kernel.run("%load_ext sublet")
        while not home.warm():
            time.sleep(0.05)
        time.sleep(0.5)  # the notebook's own warming up, behind the zygote's
        for code in setup:
            kernel.run(code)
        yield kernel
        kernel.run("%gpu release")
    finally:
        kernel.close()


def _spread(times: list[float], digits: int = 0) -> list[str]:
    return [
        f"{statistics.median(times):,.{digits}f}",
        f"{min(times):,.{digits}f}-{max(times):,.{digits}f}",
    ]


# --- the first cell ------------------------------------------------------------------------------------------


def _peer(home: Home) -> float:
    """A kernel, and torch in it."""
    begun = time.perf_counter()
    kernel = Kernel(home.environment)
    try:
        kernel.run(FIRST_CELL)
        return (time.perf_counter() - begun) * 1000
    finally:
        kernel.close()


def _first_cell(home: Home, code: str = FIRST_CELL) -> float:
    with _kernel(home) as kernel:
        return kernel.ms(f"%%gpu\n{code}")


def _from_nothing(folder: Path) -> tuple[float, float]:
    """No warden, no zygote, and the cell sent right behind `%load_ext`: the cell alone, and from the kernel's start."""
    with _home(folder) as home:
        begun = time.perf_counter()
        kernel = Kernel(home.environment)
        try:
            kernel.run("%load_ext sublet")
            cell = kernel.ms(f"%%gpu\n{FIRST_CELL}")
            return cell, (time.perf_counter() - begun) * 1000
        finally:
            kernel.close()


def _first(place: Path, home: Home) -> Section:
    progress("notebooks: the first cell ...")
    peer: list[float] = []
    ours: list[float] = []
    valued: list[float] = []
    _first_cell(home)  # starts the warden and the zygote of this home
    for _ in range(FIRST_TURNS):
        time.sleep(0.5)  # whatever the last one left to its background
        ours.append(_first_cell(home))
        time.sleep(0.5)
        peer.append(_peer(home))
        time.sleep(0.5)
        valued.append(_first_cell(home, WITH_VALUE))
    cold = [_from_nothing(place / f"cold{turn}") for turn in range(NOT_WARM_TURNS)]
    section = Section(
        "The first cell: import torch, print(torch.zeros(1)), ms", ["", "median", "range", "ours is"]
    )
    ratio = median_ratio(peer, ours)
    section.rows.append(["a new kernel, import torch in it", *_spread(peer), ""])
    section.rows.append(
        ["first %%gpu cell of a kernel, zygote warm", *_spread(ours), f"{ratio:.1f} x faster"]
    )
    alone, whole = [c for c, _ in cold], [w for _, w in cold]
    peer_ms = statistics.median(peer)
    for name, times in (
        ("the same, x = torch.zeros(1) comes back", valued),
        ("first %%gpu cell, nothing warm", alone),
        ("the same, with the kernel's own start", whole),
    ):
        section.rows.append([name, *_spread(times), f"{peer_ms / statistics.median(times):.1f} x faster"])
    section.goals.append(Goal("first %%gpu cell, against a kernel that imports torch", ratio, 8.0))
    section.notes.append(
        "nothing warm: once per boot and user; %load_ext starts warming, and this cell does not wait before it"
    )
    section.data = {"peer": peer, "ours": ours, "nothing warm": alone, "with kernel": whole, "valued": valued}
    return section


# --- later cells ---------------------------------------------------------------------------------------------


def _beside(kernel: Kernel, normal: str, gpu: str, rounds: int, each: int) -> tuple[list[float], list[float]]:
    """Times of both, one number per round."""
    here: list[float] = []
    there: list[float] = []
    for _ in range(2):
        kernel.run(normal)
        kernel.run(gpu)
    for _ in range(rounds):
        turns: tuple[list[float], list[float]] = ([], [])
        for _ in range(each):
            turns[0].append(kernel.ms(normal))
            turns[1].append(kernel.ms(gpu))
        here.append(statistics.median(turns[0]))
        there.append(statistics.median(turns[1]))
    return here, there


def _cells(home: Home) -> Section:
    section = Section(
        "A later cell that does nothing, ms", ["", "normal cell", "%%gpu cell", "overhead p50", "range"]
    )
    cases = {
        "in a bare kernel": [],
        "numpy and torch imported": ["import numpy, torch"],
        "and 20 variables read": ["import numpy, torch", "x = {i: [i] * 10 for i in range(10)}", _twenty()],
    }
    for name, setup in cases.items():
        progress(f"notebooks: later cells, {name} ...")
        reads = "pass" if "20" not in name else "(" + ", ".join(f"v{i}" for i in range(20)) + ");"
        with _kernel(home, *setup) as kernel:
            normal, gpu = _beside(kernel, reads, f"%%gpu\n{reads}", CELL_ROUNDS, CELLS_A_ROUND)
        overhead = [g - n for g, n in zip(gpu, normal, strict=True)]
        p50 = statistics.median(overhead)
        section.rows.append(
            [
                name,
                f"{statistics.median(normal):.1f}",
                f"{statistics.median(gpu):.1f}",
                f"{p50:.1f}",
                f"{min(overhead):.1f}-{max(overhead):.1f}",
            ]
        )
        section.data[name] = {"normal": normal, "gpu": gpu}
        section.goals.append(Goal(f"a later cell beyond a normal one, {name}", p50, 10, "ms", at_most=True))
    return section


def _twenty() -> str:
    """Small things of the kinds a notebook has."""
    return "\n".join(
        f"v{i} = " + ("numpy.arange(100)", "[1, 2, 3] * 10", "dict(x=1, y='z')", "torch.ones(10)")[i % 4]
        for i in range(20)
    )


# --- output --------------------------------------------------------------------------------------------------


def _lines(home: Home) -> Section:
    progress("notebooks: 20,000 lines ...")
    code = f"for i in range({LINES}): print('line', i)"
    with _kernel(home) as kernel:
        whole = kernel.run(code).text
        if kernel.run(f"%%gpu\n{code}").text != whole:
            raise RuntimeError("a %%gpu cell printed something else than a normal one")
        normal, gpu = _beside(kernel, code, f"%%gpu\n{code}", PRINT_ROUNDS, 1)
    ratio = median_ratio(gpu, normal)
    section = Section(f"{LINES:,} printed lines, ms", ["", "median", "range", "to a normal cell"])
    section.rows.append(["normal cell", *_spread(normal), ""])
    section.rows.append(["%%gpu cell", *_spread(gpu), f"{ratio:.2f}"])
    section.goals.append(Goal(f"{LINES:,} lines, times of a normal cell", ratio, 1.3, at_most=True))
    section.data = {"normal": normal, "gpu": gpu}
    return section


# --- arrays --------------------------------------------------------------------------------------------------

_MAKE = {
    "NumPy": f"numpy.ones({ARRAY_BYTES}, dtype=numpy.uint8)",
    "torch": f"torch.ones({ARRAY_BYTES}, dtype=torch.uint8)",
}
_COPY = "t = time.perf_counter(); numpy.copyto(target, source); print(time.perf_counter() - t)"


def _arrays(home: Home) -> Section:
    section = Section(
        "256 MB between the notebook and a cell, ms",
        ["", "cell", "less an empty cell", "one memcpy", "memcpys it costs", "range"],
    )
    for kind, make in _MAKE.items():
        progress(f"notebooks: 256 MB, {kind} ...")
        setup = [
            "import numpy, time, torch",
            f"source = numpy.ones({ARRAY_BYTES}, dtype=numpy.uint8); target = numpy.zeros_like(source)",
            f"given = {make}",
            # Where no cell's names are looked for: only the worker has it, and it is made once.
            f"%%gpu\nimport builtins\nbuiltins.made = {make}",
        ]
        ways = {
            "in": "%%gpu\ngiven[0];",
            "out": "%%gpu\nbrought = made[:]",
        }
        with _kernel(home, *setup) as kernel:
            for way, code in ways.items():
                taken: dict[str, list[float]] = {"cell": [], "empty": [], "copy": []}
                for turn in range(ARRAY_ROUNDS + 2):
                    kernel.run("given[0] += 1")  # else a tensor that is there already would not be sent
                    new = {
                        "cell": kernel.ms(code),
                        "empty": kernel.ms("%%gpu\n0;"),
                        "copy": float(kernel.run(_COPY).text) * 1000,
                    }
                    if turn >= 2:  # a first array of a size pays for its pages, once
                        for name, value in new.items():
                            taken[name].append(value)
                shipped = [c - e for c, e in zip(taken["cell"], taken["empty"], strict=True)]
                ratios = [s / c for s, c in zip(shipped, taken["copy"], strict=True)]
                ratio = statistics.median(ratios)
                section.rows.append(
                    [
                        f"{kind}, {way}",
                        f"{statistics.median(taken['cell']):.1f}",
                        f"{statistics.median(shipped):.1f}",
                        f"{statistics.median(taken['copy']):.1f}",
                        f"{ratio:.2f}",
                        f"{min(ratios):.2f}-{max(ratios):.2f}",
                    ]
                )
                section.data[f"{kind}, {way}"] = taken
                section.goals.append(Goal(f"256 MB {kind} {way}, memcpys it costs", ratio, 1.5, at_most=True))
    section.notes.append(
        "one memcpy: numpy.copyto into memory that was written before, timed inside the same kernel, in turns; the cell beyond an "
        "empty %%gpu cell of the same turn"
    )
    return section


# --- a model that stays --------------------------------------------------------------------------------------


def _models(home: Home) -> Section:
    """What a cell costs that uses a model both sides have."""
    progress(f"notebooks: a model of {MODEL_MB} MB ...")
    width = 2048
    layers = MODEL_MB * (1 << 20) // (4 * width * width)
    section = Section(
        f"A cell that uses a model of {MODEL_MB} MB, ms beyond an empty %%gpu cell", ["", "median", "range"]
    )
    setup = [
        "import torch",
        f"model = torch.nn.Sequential(*(torch.nn.Linear({width}, {width}) for _ in range({layers})))",
        "%%gpu\nmodel.training;",
        "%%gpu\nmodel.training;",
    ]
    ways = {
        "read": "%%gpu\nmodel.training;",
        "one layer of it changed in place": "%%gpu\nwith torch.no_grad(): model[0].weight += 1",
    }
    with _kernel(home, *setup) as kernel:
        for name, code in ways.items():
            taken = []
            for turn in range(ARRAY_ROUNDS + 2):
                beyond = kernel.ms(code) - kernel.ms("%%gpu\n0;")
                if turn >= 2:
                    taken.append(beyond)
            section.rows.append([name, *_spread(taken, 1)])
            section.data[name] = taken
    return section


# --- what is billed ------------------------------------------------------------------------------------------


_WHICH = "print(*{line.lease_id for line in get_ipython().magics_manager.registry['GpuMagics'].bench.cells.account.lines()})"


def _billed(home: Home) -> Section:
    """A second of GPU in a minute, the ratio of 5 s in 5 minutes: one such minute of each kind, at the same time."""
    section = Section(
        f"A bursty session: {BURST_SECONDS:g} s of GPU in {SESSION_SECONDS} s, as 5 s in 5 minutes",
        ["", "GPU-seconds billed", "less than holding it"],
    )
    progress("notebooks: a minute of bursty sessions ...")
    ledger = wiring.open_ledger(home.settings())
    with contextlib.ExitStack() as sessions:
        begun: dict[str, tuple[Kernel, float, set[str]]] = {}
        for options in ("--ttl 2s", "--ttl 10s", "--ttl 5m", "--release"):
            kernel = sessions.enter_context(_kernel(home))
            began_at = time.perf_counter()
            kernel.run(f"%%gpu {options}\nimport time; time.sleep({BURST_SECONDS})")
            begun[options] = kernel, began_at, set(kernel.run(_WHICH).text.split())
        for options, (kernel, began_at, leases) in begun.items():
            time.sleep(max(0.0, began_at + SESSION_SECONDS - time.perf_counter()))
            kernel.run("%gpu release")
            held = time.perf_counter() - began_at
            billed = sum(row.gpu_us for row in ledger.usage() if row.lease_id in leases) / 1e6
            section.rows.append([f"%%gpu {options}", f"{billed:.2f}", f"{held / billed:.1f} x"])
            section.data[options] = {"billed": billed, "session": held}
            if options == "--ttl 2s":
                section.goals.append(
                    Goal(f"GPU-seconds billed less than holding, {options}", held / billed, 10.0)
                )
    section.notes.append(
        "--ttl 5m: the GPU stays warm for the session, and is paid for; it would be taken back if somebody waited"
    )
    return section
