"""The studio as its users meet it: until the first result, requests a second, many sessions at once, the page.

Rules of this file:
- The service is `sublet serve` with its log, its tokens and its session host; only the limits on the rate of requests are off.
- Peers and what they are spared: `studio_peers`, `bare_app`. Who is compared takes turns in one run.
- Processes are ended by the ids in the home's own lock files, and nobody else's.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.ledgers import postgres_server
from bench.measure import Goal, Section, median_ratio, progress
from bench.peers import NotInstalled, free_ports, served
from bench.studio_peers import jupyterhub
from sublet import wiring
from sublet.leases.warden import warden_process
from sublet.processes.pid_lock import state_of
from sublet.settings import Settings, load_settings

OPENING_TURNS = 7
LOAD_ROUNDS = 9
LOAD_SECONDS = 0.5
CONNECTIONS = 16
LOADED_SESSIONS = 20
FEW, MANY = 50, int(os.environ.get("SUBLET_BENCH_SESSIONS", "1000"))
MANY_TTL_SECONDS = 60
PATIENCE_SECONDS = 900
#: Of the memory that is free: the machine is not ours alone.
MEMORY_PART = 0.75
CODE = "import numpy; int(numpy.arange(10).sum())"


def run(place: Path) -> list[Section]:
    missing = [name for name in ("fastapi", "uvicorn", "httptools", "uvloop") if find_spec(name) is None]
    if missing:
        section = Section("Studio", ["", ""])
        section.notes.append(f"not measured: not installed: {', '.join(missing)}")
        return [section]
    with postgres_server(place) as url:
        return [
            _opening(place / "opening"),
            _throughput(place / "load", "SQLite", f"sqlite:{place}/load/ledger.db"),
            _throughput(place / "load-pg", "PostgreSQL", f"{url}&sublet_schema=studio"),
            _many(place / "many"),
            _page(),
        ]


# --- a studio ------------------------------------------------------------------------------------------------


@dataclass
class Studio:
    settings: Settings
    port: int
    token: str
    pid: int

    def ask(self, method: str, path: str, body: object = None) -> Any:
        return json.loads(self.read(path, method, body))

    def read(self, path: str, method: str = "GET", body: object = None) -> bytes:
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_SECONDS)
        try:
            headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
            line.request(method, path, None if body is None else json.dumps(body), headers)
            answer = line.getresponse()
            found = answer.read()
            if answer.status >= 300:
                raise RuntimeError(f"{method} {path}: {answer.status} {found[:300]!r}")
            return found
        finally:
            line.close()

    def open(self, **wish: object) -> str:
        return str(self.ask("POST", "/v1/sessions", wish)["id"])

    def active(self) -> int:
        """As the metrics count them: a listing would cost more than what is measured beside it."""
        found = re.search(r'^sublet_sessions\{status="active"\} (\d+)$', self.read("/metrics").decode(), re.M)
        return int(found[1]) if found else 0

    def wait_active(self, count: int) -> None:
        give_up_at = time.monotonic() + PATIENCE_SECONDS
        while (found := self.active()) < count:
            if time.monotonic() > give_up_at:
                raise RuntimeError(f"of {count} sessions {found} became active")
            time.sleep(0.2)

    def request(self, method: str, path: str) -> str:
        """As bytes on a connection that stays."""
        return (
            f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {self.token}\r\n"
            f"Content-Length: 0\r\n\r\n"
        )


@contextlib.contextmanager
def _studio(folder: Path, *, ledger: str = "", devices: str = "host:1x128GiB") -> Iterator[Studio]:
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    os.environ |= {
        "SUBLET_HOME": str(folder),
        "SUBLET_LEDGER": ledger or f"sqlite:{folder}/ledger.db",
        "SUBLET_DEVICES": devices,
        "SUBLET_PRELOAD": "numpy",
        "SUBLET_HOST": "bench",
    }
    settings = load_settings()
    with (folder / "service.log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "sublet", "serve", "--port", "0", "--rate", "0", "--address-rate", "0"],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline().rsplit(":", 1)[1])
            token = server.stdout.readline().split()[-1]
            studio = Studio(settings, port, token, server.pid)
            give_up_at = time.monotonic() + PATIENCE_SECONDS
            while not _ready(port):
                if server.poll() is not None or time.monotonic() > give_up_at:
                    raise RuntimeError(f"sublet serve did not start: see {folder}/service.log")
                time.sleep(0.05)
            yield studio
            _end_sessions(studio)
        finally:
            server.terminate()
            server.wait(timeout=60)
            _end_helpers(settings)


def _end_sessions(studio: Studio) -> None:
    """All of them, and wait until their leases are settled: a warden does not leave before that."""
    ids = [s["id"] for s in studio.ask("GET", "/v1/sessions?limit=1000")["sessions"]]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda i: studio.ask("DELETE", f"/v1/sessions/{i}"), ids))
    ledger = wiring.open_ledger(studio.settings)
    give_up_at = time.monotonic() + PATIENCE_SECONDS
    while ledger.leases(limit=1) and time.monotonic() < give_up_at:
        time.sleep(0.2)


def _ready(port: int) -> bool:
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        line.request("GET", "/readyz")
        return line.getresponse().status == 200
    except OSError:
        return False
    finally:
        line.close()


def _end_helpers(settings: Settings) -> None:
    """Session host, warden and zygotes of this home, by the ids in lock files that are held: who died is not asked for by its old id."""
    from sublet.studio.holder.finding import session_host_pid

    wiring.close_all()
    first = [session_host_pid(settings)]
    rest = [warden_process.warden_state(settings)[2]]
    rest += [state_of(lock)[2] for lock in (settings.home / "run").glob("zygote-*.lock")]
    for pids in (first, rest):
        for pid in filter(None, pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        give_up_at = time.monotonic() + PATIENCE_SECONDS
        while any(Path(f"/proc/{pid}").exists() for pid in filter(None, pids)):
            if time.monotonic() > give_up_at:
                raise RuntimeError(f"of {settings.home} these did not end: {pids}")
            time.sleep(0.05)


# --- until the first result ----------------------------------------------------------------------------------


class _Heard:
    """Keeps what a call shows."""

    def __init__(self) -> None:
        self.shown: list[Any] = []

    def text(self, stream: str, text: str) -> None:
        pass

    def show(self, display: Any) -> None:
        self.shown.append(display)


def _opening(folder: Path) -> Section:
    progress("studio: until the first result")
    import sublet

    section = Section(
        f"Until the first result of a one-line computation with numpy, seconds ({OPENING_TURNS} turns each)",
        ["", "median", "spread", ""],
    )
    ours: list[float] = []
    theirs: list[float] = []

    def open_ours(studio: Any) -> float:
        begun = time.perf_counter()
        session = studio.session(vram="1GiB", ttl="1m")
        heard = _Heard()
        session.run_code(CODE, screen=heard)
        took = time.perf_counter() - begun
        if "45" not in repr(heard.shown):
            raise RuntimeError(f"not the result: {heard.shown!r}")
        session.end()
        return took

    with contextlib.ExitStack() as stack:
        served_here = stack.enter_context(_studio(folder / "studio"))
        studio = sublet.connect(f"http://127.0.0.1:{served_here.port}", served_here.token)
        try:
            hub = stack.enter_context(jupyterhub(folder / "hub"))
        except NotInstalled as e:
            hub = None
            section.notes.append(f"JupyterHub: {e}")
        for turn in range(OPENING_TURNS + 1):  # the first of each is not counted: it fills caches
            took = open_ours(studio)
            if turn:
                ours.append(took)
            if hub is not None:
                took = hub.first_result(f"user{turn}", CODE)
                hub.end(f"user{turn}")
                if turn:
                    theirs.append(took)
            time.sleep(0.5)
    for name, times, note in (
        ("sublet, over HTTP", ours, "a session of its own, leased, in a worker of its own"),
        ("JupyterHub", theirs, "a single-user server and a kernel"),
    ):
        if times:
            spread = f"{min(times):.2f}-{max(times):.2f}"
            section.rows.append([name, f"{statistics.median(times):.3f}", spread, note])
    section.data |= {"ours_s": ours, "jupyterhub_s": theirs}
    if theirs:
        section.goals.append(
            Goal("first result through the studio, against JupyterHub", median_ratio(theirs, ours), 10)
        )
    return section


# --- requests a second ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def _load() -> Iterator[Any]:
    """Ask it for a turn: which port, which requests, how long."""
    worker = subprocess.Popen(
        [sys.executable, "-m", "bench.load"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert worker.stdin is not None
    assert worker.stdout is not None

    def turn(port: int, requests: list[str], seconds: float, connections: int = CONNECTIONS) -> Any:
        asked = {"port": port, "requests": requests, "connections": connections, "seconds": seconds}
        worker.stdin.write(json.dumps(asked) + "\n")
        worker.stdin.flush()
        return json.loads(worker.stdout.readline())

    try:
        yield turn
    finally:
        worker.stdin.close()
        worker.wait(timeout=30)


def _percentile(sorted_values: list[int], part: float) -> float:
    return sorted_values[min(len(sorted_values) - 1, int(len(sorted_values) * part))] / 1000


def _throughput(folder: Path, engine: str, ledger: str) -> Section:
    progress(f"studio: requests a second on {engine}")
    section = Section(
        f"Requests a second, {engine}, {CONNECTIONS} connections that stay, {LOAD_ROUNDS} rounds",
        ["", "a second", "spread", "p50 ms", "p99 ms", "of bare", "CPU us", "of bare", ""],
    )
    with _studio(folder, ledger=ledger) as studio, _load() as turn:
        ids = [studio.open(vram="64MiB", ttl="10m", warm="1h") for _ in range(LOADED_SESSIONS)]
        studio.wait_active(len(ids))
        [port] = free_ports(1)
        command = [sys.executable, "-m", "bench.bare_app", ledger, str(port)]
        with served(command, lambda: _answers(port, f"/select/{ids[0]}")) as bare_pid:
            pids = {port: bare_pid, studio.port: studio.pid}
            subjects = {
                "bare: one SELECT": (port, [studio.request("GET", f"/select/{i}") for i in ids]),
                "status": (studio.port, [studio.request("GET", f"/v1/sessions/{i}") for i in ids]),
                "touch": (studio.port, [studio.request("POST", f"/v1/sessions/{i}/touch") for i in ids]),
            }
            if engine == "SQLite":
                subjects["bare: one UPDATE"] = (port, [studio.request("GET", f"/update/{i}") for i in ids])
            rates: dict[str, list[float]] = {name: [] for name in subjects}
            took: dict[str, list[int]] = {name: [] for name in subjects}
            cost: dict[str, list[float]] = {name: [] for name in subjects}
            names = list(subjects)
            for number in range(-1, LOAD_ROUNDS):  # the first round only warms
                shift = number % len(names)
                for name in names[shift:] + names[:shift]:
                    pid = pids[subjects[name][0]]
                    before = _cpu_us(pid)
                    found = turn(*subjects[name], LOAD_SECONDS)
                    if number >= 0 and found["took_us"]:
                        rates[name].append(found["rate"])
                        took[name] += found["took_us"]
                        cost[name].append((_cpu_us(pid) - before) / len(found["took_us"]))
    bare = rates["bare: one SELECT"]
    notes = {
        "bare: one SELECT": "FastAPI and uvicorn, no token, no log",
        "bare: one UPDATE": "the same, and each is a transaction",
        "status": "token, limits, one SELECT, log",
        "touch": "the same, and marked as used",
    }
    for name, found in rates.items():
        times = sorted(took[name])
        section.rows.append(
            [
                name,
                f"{statistics.median(found):,.0f}",
                f"{min(found):,.0f}-{max(found):,.0f}",
                f"{_percentile(times, 0.5):.1f}",
                f"{_percentile(times, 0.99):.1f}",
                f"{median_ratio(found, bare):.2f}",
                f"{statistics.median(cost[name]):.0f}",
                f"{median_ratio(cost['bare: one SELECT'], cost[name]):.2f}",
                notes[name],
            ]
        )
    section.data |= {"rates": rates, "cpu_us": cost}
    section.notes.append(
        "CPU us is the server's processor time for a request: others on the machine change it less than the rate"
    )
    for name in ("status", "touch"):
        section.goals.append(
            Goal(f"{name} against a bare handler, {engine}", median_ratio(rates[name], bare), 0.6)
        )
    return section


def _cpu_us(pid: int) -> int:
    """Of all its threads, as the scheduler counts it."""
    return sum(
        int(path.read_text().split()[0]) // 1000 for path in Path(f"/proc/{pid}/task").glob("*/schedstat")
    )


def _answers(port: int, path: str) -> bool:
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        line.request("GET", path)
        return line.getresponse().status == 200
    except OSError:
        return False
    finally:
        line.close()


# --- many sessions -------------------------------------------------------------------------------------------


def _pss_bytes(pid: int) -> int:
    """Its own memory and its part of what it shares; 0 when it is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def _descendants(pid: int) -> list[int]:
    """Below a process of this bench, by the kernel's own lists of children."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *_descendants(child)]
    return found


def _available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024


def _many(folder: Path) -> Section:
    from sublet.studio.holder.finding import session_host_pid

    progress("studio: many sessions at once")
    section = Section("Many live sessions on one service", ["", "sessions", "value", ""])
    with _studio(folder) as studio, _load() as turn, ThreadPoolExecutor(8) as threads:
        session_host = session_host_pid(studio.settings)
        run = studio.settings.home / "run"
        before = _available_bytes()

        def more(count: int, until: int) -> float:
            begun = time.perf_counter()
            wish = {"vram": "64MiB", "ttl": f"{MANY_TTL_SECONDS}s", "warm": "1h"}
            list(threads.map(lambda _: studio.open(**wish), range(count)))
            studio.wait_active(until)
            return time.perf_counter() - begun

        def told(count: int, opened: int, took: float) -> float:
            zygotes = [state_of(lock)[2] for lock in run.glob("zygote-*.lock")]
            below = {pid for top in (session_host, *zygotes) if top for pid in _descendants(top)} - set(
                zygotes
            )
            per_session = sum(map(_pss_bytes, below)) / count
            ids = [s["id"] for s in studio.ask("GET", "/v1/sessions?limit=1000")["sessions"]]
            found = turn(studio.port, [studio.request("POST", f"/v1/sessions/{i}/touch") for i in ids], 5.0)
            times = sorted(found["took_us"])
            rows = [
                ("opened and active", f"{took:.1f} s", f"{opened} more, {took / opened * 1000:.0f} ms each"),
                ("touch p50 / p99", f"{_percentile(times, 0.5):.1f} / {_percentile(times, 0.99):.1f} ms", ""),
                ("memory of the service", f"{_pss_bytes(studio.pid) / 1e6:.0f} MB", ""),
                ("memory of the session host", f"{_pss_bytes(session_host) / 1e6:.0f} MB", ""),
                ("memory of a session's processes", f"{per_session / 1e6:.1f} MB", f"{len(below)} processes"),
            ]
            section.rows.extend([name, str(count), value, note] for name, value, note in rows)
            section.data[f"touch_us_{count}"] = times
            return (before - _available_bytes()) / count

        each = told(FEW, FEW, more(FEW, FEW))
        wanted = max(FEW, min(MANY, int(before * MEMORY_PART / max(each, 1))))
        section.notes.append(
            f"{FEW} sessions took {each / 1e6:.1f} MB each of the machine's memory; {before / 1e9:.1f} GB were free: "
            f"{wanted} of {MANY} were opened"
        )
        if wanted > FEW:
            told(wanted, wanted - FEW, more(wanted - FEW, wanted))
            time.sleep(1.2 * MANY_TTL_SECONDS)  # every lease is renewed at least once
            left, renewals = _margins(studio.settings.home / "ledger.db")
            alive = studio.active()
            section.rows += [
                ["still active after another 1.2 ttl", str(wanted), str(alive), ""],
                ["ttl left at a renewal, p50 / p1 / least", str(wanted),
                 f"{statistics.median(left):.0f} / {left[len(left) // 100]:.0f} / {left[0]:.0f} %", f"{renewals} renewals"],
            ]  # fmt: skip
            section.data |= {"ttl_left_percent": left, "alive": alive, "sessions": wanted}
            section.goals.append(Goal("live sessions on one service", wanted, MANY, unit="sessions"))
            section.goals.append(Goal("of them still active", 100 * alive / wanted, 100, unit="%"))
    return section


def _margins(ledger: Path) -> tuple[list[float], int]:
    """How much of its ttl each lease had left when it was renewed, sorted."""
    import apsw

    until: dict[str, int] = {}
    left: list[float] = []
    rows = apsw.Connection(str(ledger), flags=apsw.SQLITE_OPEN_READONLY).execute(
        "SELECT kind, subject, at, body FROM journal WHERE kind IN ('lease.granted', 'lease.renewed') ORDER BY id"
    )
    for kind, lease, at, body in rows:
        if kind == "lease.renewed":
            left.append(100 * (until[lease] - at) / (MANY_TTL_SECONDS * 1_000_000))
        until[lease] = json.loads(body)["expires_at"]
    return sorted(left), len(left)


# --- the page ------------------------------------------------------------------------------------------------


def _page() -> Section:
    """As the page's own test measures it, in a real browser."""
    progress("studio: the page")
    section = Section("An update of the page with 500 leases, milliseconds", ["view", "median", "spread", ""])
    root = Path(__file__).parents[1]
    command = [sys.executable, "-m", "pytest", "-s", "-q", "tests/studio/test_page.py", "-k", "500_leases"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    found = re.findall(r"(\w+): an update of 500 leases took \[([^]]*)\] ms", done.stdout)
    if not found:
        section.notes.append("not measured: no browser here, or the page's test did not run")
    for view, numbers in found:
        times = [float(n) for n in numbers.split(",")]
        section.rows.append(
            [view, f"{statistics.median(times):.1f}", f"{min(times):.1f}-{max(times):.1f}", "in chromium"]
        )
        section.data[view] = times
        section.goals.append(
            Goal(f"an update of the page, view {view}", statistics.median(times), 50, unit="ms", at_most=True)
        )
    return section
