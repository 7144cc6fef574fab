"""`/metrics`: what the studio does, in the format of Prometheus.

Rules of this file:
- Counters of the studio are the ledger's (`core.journal.counters`), read from the first row when the process
  starts and then only what is new. Every service on that ledger shows the same values, and a restart does not
  lower them.
- Gauges are read in the same snapshot as the counters. Only what this process itself does (requests, streams,
  memory) is its own, and begins at zero with it.
- No series is labelled with a lease, session or token, because their number grows. Tenants, tiers, reasons
  and devices are few.
- Every series is in `TABLE` with its help text. A test finds each of them in the manual.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from sublet.core.journal.counters import TEARDOWN_BOUNDS_US, WAIT_BOUNDS_US, Histogram, StepsCommitted, Totals
from sublet.core.leasing.lease import HOLDING, REVOCABLE_FOR, EndReason, LeaseState, Tier
from sublet.core.scheduling.device import Device, DeviceState
from sublet.core.studio.isolation import NEEDED, NOT_CHECKED, HostIsolation
from sublet.core.studio.session import SessionStatus, status
from sublet.core.values import SECOND_US
from sublet.devices.utilisation import Load, loads
from sublet.ports.ledger import Ledger, MeterPage
from sublet.processes.loop_watch import ProcessHealth
from sublet.studio.views.exposition import MetricSeries, MetricsPage, millionths

_MIB = 1 << 20
#: A commit's row may become visible this long after rows with higher numbers: no transaction of the ledger
#: lives nearly so long.
_LATE_US = 30 * SECOND_US
#: From a look into memory to a long poll.
LATENCY_BOUNDS_US = tuple(
    us * 1000 for us in (1, 2, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 30_000)
)

TABLE: tuple[MetricSeries, ...] = (
    # of devices, named as NVIDIA's exporter does, so that its dashboards find them
    MetricSeries("DCGM_FI_DEV_FB_TOTAL", "gauge", "Device memory that can be leased (MiB)."),
    MetricSeries("DCGM_FI_DEV_FB_USED", "gauge", "Device memory that is leased (MiB)."),
    MetricSeries("DCGM_FI_DEV_FB_FREE", "gauge", "Device memory that is not leased (MiB)."),
    MetricSeries("DCGM_FI_DEV_GPU_UTIL", "gauge", "GPU utilisation in percent, where NVML tells it."),
    MetricSeries("DCGM_FI_DEV_MEM_COPY_UTIL", "gauge", "Memory utilisation in percent, where NVML tells it."),
    MetricSeries("DCGM_FI_DEV_GPU_TEMP", "gauge", "Temperature in degrees Celsius, where NVML tells it."),
    MetricSeries("DCGM_FI_DEV_POWER_USAGE", "gauge", "Power draw in watts, where NVML tells it."),
    MetricSeries("sublet_devices", "gauge", "Devices by state."),
    MetricSeries(
        "sublet_devices_quarantined", "gauge", "Devices withheld because a teardown was not proven."
    ),
    MetricSeries("sublet_quarantines_total", "counter", "Times a device was withheld."),
    # of leases and waiters
    MetricSeries(
        "sublet_lease_wait_seconds", "histogram", "From asking to holding, of leases that were granted."
    ),
    MetricSeries("sublet_leases_active", "gauge", "Leases held now, also those being taken back."),
    MetricSeries("sublet_leases_waiting", "gauge", "Requests in the waitlist now."),
    MetricSeries("sublet_waitlist_oldest_seconds", "gauge", "How long the one who waits longest has waited."),
    MetricSeries("sublet_waitlist_left_total", "counter", "Requests that left the waitlist without a lease."),
    MetricSeries("sublet_lease_refusals_total", "counter", "Requests that were refused at once."),
    MetricSeries("sublet_lease_ends_total", "counter", "Leases that ended after they were held, by reason."),
    MetricSeries("sublet_preemptions_total", "counter", "Leases the system took back, by reason."),
    MetricSeries("sublet_teardown_seconds", "histogram", "How long a teardown took that needed proof."),
    # of tenants
    MetricSeries("sublet_gpu_seconds_total", "counter", "GPU time held: seconds times devices."),
    MetricSeries("sublet_vram_byte_seconds_total", "counter", "Device memory held: bytes times seconds."),
    MetricSeries("sublet_training_gpu_seconds_total", "counter", "GPU time held by jobs that commit steps."),
    MetricSeries("sublet_useful_gpu_seconds_total", "counter", "GPU time in steps that were committed."),
    MetricSeries(
        "sublet_wasted_gpu_seconds_total", "counter", "GPU time after the last commit of a lost lease."
    ),
    MetricSeries("sublet_refund_seconds_total", "counter", "Wasted GPU time that is not charged."),
    MetricSeries(
        "sublet_cost_total", "counter", "What GPU time held costs by the price list, before refunds."
    ),
    MetricSeries(
        "sublet_goodput_ratio", "gauge", "Useful part of the GPU time held by jobs that commit steps."
    ),
    MetricSeries("sublet_tenant_weight", "gauge", "The tenant's share of a full studio, as a weight."),
    # of steps
    MetricSeries("sublet_steps_committed_total", "counter", "Steps that were committed."),
    MetricSeries("sublet_commits_total", "counter", "Commits; one may be of several steps."),
    MetricSeries(
        "sublet_duplicates_total", "counter", "Work that came a second time and was not done again."
    ),
    MetricSeries(
        "sublet_fence_refusals_total", "counter", "Writes of holders that were too late or out of order."
    ),
    # of sessions
    MetricSeries("sublet_sessions", "gauge", "Open studio sessions by status."),
    MetricSeries("sublet_session_calls_total", "counter", "Calls in studio sessions."),
    MetricSeries("sublet_session_errors_total", "counter", "Calls in studio sessions that failed."),
    MetricSeries("sublet_kernel_launches_total", "counter", "Kernels launched in studio sessions."),
    MetricSeries(
        "sublet_checkpoint_bytes_total", "counter", "Bytes that saves of studio sessions added to the store."
    ),
    MetricSeries("sublet_checkpoint_stored_bytes", "gauge", "Bytes of checkpoints that are kept."),
    # of the service's own process
    MetricSeries("sublet_http_requests_total", "counter", "Requests this process answered."),
    MetricSeries(
        "sublet_http_request_seconds", "histogram", "How long this process took to begin its answer."
    ),
    MetricSeries("sublet_http_streams", "gauge", "Streams this process holds open."),
    MetricSeries("sublet_scrape_seconds", "gauge", "How long it took to read what is new for this page."),
    # of this host's background processes
    MetricSeries("sublet_process_up", "gauge", "Whether this host's warden and session host run (1 or 0)."),
    MetricSeries(
        "sublet_loop_silent_seconds",
        "gauge",
        "How long ago each of their loops turned; it grows if one hangs.",
    ),
    MetricSeries(
        "sublet_isolation_in_force",
        "gauge",
        "Whether this host has each boundary that two tenants need between them (1 or 0).",
    ),
    MetricSeries("process_resident_memory_bytes", "gauge", "Memory of this process."),
    MetricSeries("process_cpu_seconds_total", "counter", "CPU time of this process."),
    MetricSeries("process_open_fds", "gauge", "Open files of this process."),
    MetricSeries("process_start_time_seconds", "gauge", "When this process started, since 1970."),
)


class LedgerMeter:
    """The ledger's counters, and how far they were read. Serves one scrape at a time."""

    def __init__(self) -> None:
        self.totals = Totals()
        self._row = 0
        self._settled = 0  # every commit up to this row is counted, and no other one will appear there
        self._counted: set[int] = set()  # commits after it that are counted too
        self._seen: deque[tuple[int, int]] = deque()  # when which row was the newest
        self._lock = threading.Lock()

    @contextmanager
    def caught_up(self, ledger: Ledger) -> Iterator[MeterPage]:
        """Reads what is new. Yields the last page: what is held as of these totals."""
        with self._lock:
            page = self._read(ledger)
            while page.more:
                page = self._read(ledger)
            yield page

    def _read(self, ledger: Ledger) -> MeterPage:
        page = ledger.metered(after=self._row, late_after=self._settled)
        for row, _, what in page.happened:
            if row in self._counted:
                continue
            self.totals.add(what)
            if isinstance(what, StepsCommitted):
                self._counted.add(row)
        self._row = page.upto
        self._seen.append((page.at, page.upto))
        long_ago = page.at - _LATE_US
        while self._seen and self._seen[0][0] < long_ago:
            self._settled = max(self._settled, self._seen.popleft()[1])
        self._settled = max([self._settled, *(row for row, at, _ in page.happened if at < long_ago)])
        self._counted = {row for row in self._counted if row > self._settled}
        return page


class OwnMeter:
    """Counts what this process itself does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, str, str]] = Counter()
        self._seconds: dict[str, Histogram] = {}
        self._streams: Counter[str] = Counter()

    def request(self, method: str, route: str, status_code: int, seconds: float) -> None:
        """Counts a request. `route` is the pattern, such as /v1/sessions/{id}, or 'none'."""
        with self._lock:
            self._requests[method, route or "none", str(status_code)] += 1
            latency = self._seconds.setdefault(route or "none", Histogram(LATENCY_BOUNDS_US))
            latency.add(max(0, round(seconds * SECOND_US)))

    def stream(self, kind: str) -> Callable[[], None]:
        """Counts an open stream; call the returned function once when it is over."""
        with self._lock:
            self._streams[kind] += 1

        def over() -> None:
            with self._lock:
                self._streams[kind] -= 1

        return over

    def tell(self, page: MetricsPage) -> None:
        with self._lock:
            for (method, route, code), count in sorted(self._requests.items()):
                page.tell(
                    "sublet_http_requests_total", count, {"method": method, "route": route, "status": code}
                )
            for route, latency in sorted(self._seconds.items()):
                page.tell_histogram("sublet_http_request_seconds", latency, {"route": route})
            for kind, count in sorted(self._streams.items()):
                page.tell("sublet_http_streams", count, {"kind": kind})


class Meters:
    """Everything one service exposes. Created once per process."""

    def __init__(
        self,
        utilisation: Callable[[], Mapping[str, Load]] = loads,
        loops: Callable[[], Mapping[str, ProcessHealth | None]] = dict,
        isolation: Callable[[], HostIsolation] = lambda: NOT_CHECKED,
    ) -> None:
        self._isolation = isolation
        self._loops = loops
        self.own = OwnMeter()
        self._ledger = LedgerMeter()
        self._utilisation = utilisation

    def render(self, ledger: Ledger) -> str:
        page = MetricsPage(TABLE)
        began = time.monotonic()
        with self._ledger.caught_up(ledger) as now:
            devices = ledger.devices()
            _tell_devices(page, devices, self._utilisation() if _has_gpus(devices) else {})
            _tell_totals(page, self._ledger.totals, now)
        _tell_standing(page, now)
        for tenant in ledger.tenants():
            page.tell("sublet_tenant_weight", tenant.weight, {"tenant": tenant.name})
        page.tell("sublet_scrape_seconds", millionths(round((time.monotonic() - began) * SECOND_US)))
        self.own.tell(page)
        _tell_loops(page, self._loops())
        _tell_isolation(page, self._isolation())
        _tell_process(page)
        return page.text()


def render(ledger: Ledger, meters: Meters) -> str:
    return meters.render(ledger)


def _has_gpus(devices: list[Device]) -> bool:
    return any(device.driver == "cuda" for device in devices)


def _tell_devices(page: MetricsPage, devices: list[Device], found: Mapping[str, Load]) -> None:
    states = Counter(device.state for device in devices)
    for state in DeviceState:
        page.tell("sublet_devices", states[state], {"state": state.value})
    page.tell("sublet_devices_quarantined", states[DeviceState.QUARANTINED])
    for device in devices:
        labels = {
            "gpu": str(device.ordinal),
            "UUID": device.id,
            "device": f"{device.driver}{device.ordinal}",
            "modelName": device.name,
            "Hostname": device.host,
        }
        used = device.capacity_bytes - device.free_bytes
        page.tell("DCGM_FI_DEV_FB_TOTAL", device.capacity_bytes // _MIB, labels)
        page.tell("DCGM_FI_DEV_FB_USED", -(-used // _MIB), labels)
        page.tell("DCGM_FI_DEV_FB_FREE", device.free_bytes // _MIB, labels)
        load = found.get(device.id, Load())
        for name, value in (
            ("DCGM_FI_DEV_GPU_UTIL", load.gpu_percent),
            ("DCGM_FI_DEV_MEM_COPY_UTIL", load.memory_percent),
            ("DCGM_FI_DEV_GPU_TEMP", load.celsius),
        ):
            if value is not None:
                page.tell(name, value, labels)
        if load.milliwatts is not None:
            page.tell("DCGM_FI_DEV_POWER_USAGE", millionths(load.milliwatts * 1000), labels)


def _tell_totals(page: MetricsPage, totals: Totals, now: MeterPage) -> None:
    """Writes the counters. Known kinds begin at 0, so that their first event shows as a rise."""
    page.tell("sublet_quarantines_total", totals.withheld)
    for tier in Tier:
        waits = totals.waits.get(tier.value, Histogram(WAIT_BOUNDS_US))
        page.tell_histogram("sublet_lease_wait_seconds", waits, {"tier": tier.value})
        for reason in EndReason:
            labels = {"reason": reason.value, "tier": tier.value}
            if reason is not EndReason.REFUSED:
                page.tell("sublet_lease_ends_total", totals.ends[reason.value, tier.value], labels)
            if reason in REVOCABLE_FOR:
                page.tell("sublet_preemptions_total", totals.taken_back[reason.value, tier.value], labels)
    for (why, of_tier), count in sorted(totals.left.items()):
        page.tell("sublet_waitlist_left_total", count, {"reason": why, "tier": of_tier})
    for code, count in sorted(totals.declined.items()):
        page.tell("sublet_lease_refusals_total", count, {"code": code})
    for proven in (True, False):
        teardowns = totals.teardowns.get(proven, Histogram(TEARDOWN_BOUNDS_US))
        page.tell_histogram("sublet_teardown_seconds", teardowns, {"proven": str(proven).lower()})
    for (tenant, of_tier), time_of in sorted(totals.with_held(now.held, now.at).items()):
        labels = {"tenant": tenant, "tier": of_tier}
        page.tell("sublet_gpu_seconds_total", millionths(time_of.gpu_us), labels)
        page.tell("sublet_vram_byte_seconds_total", time_of.vram_byte_s, labels)
        page.tell("sublet_training_gpu_seconds_total", millionths(time_of.training_us), labels)
        page.tell("sublet_useful_gpu_seconds_total", millionths(time_of.useful_us), labels)
        page.tell("sublet_wasted_gpu_seconds_total", millionths(time_of.wasted_us), labels)
        page.tell("sublet_refund_seconds_total", millionths(time_of.refund_us), labels)
        page.tell("sublet_cost_total", millionths(time_of.cost_micro), labels)
        if time_of.goodput_ppm is not None:
            page.tell("sublet_goodput_ratio", millionths(time_of.goodput_ppm), labels)
    for tenant, steps in sorted(totals.steps.items()):
        page.tell("sublet_steps_committed_total", steps, {"tenant": tenant})
        page.tell("sublet_commits_total", totals.commits[tenant], {"tenant": tenant})
    for kind in ("step", "effect"):
        page.tell("sublet_duplicates_total", totals.repeated[kind], {"kind": kind})
    page.tell("sublet_duplicates_total", now.stale_acks, {"kind": "stale_ack"})
    for (verb, code), count in sorted(totals.stopped.items()):
        page.tell("sublet_fence_refusals_total", count, {"verb": verb, "code": code})
    for tenant, work in sorted(totals.with_open(found.session for found in now.sessions).items()):
        page.tell("sublet_session_calls_total", work.calls, {"tenant": tenant})
        page.tell("sublet_session_errors_total", work.errors, {"tenant": tenant})
        page.tell("sublet_kernel_launches_total", work.launches, {"tenant": tenant})
        page.tell("sublet_checkpoint_bytes_total", work.checkpoint_bytes, {"tenant": tenant})


def _tell_standing(page: MetricsPage, now: MeterPage) -> None:
    """Writes the gauges: leases held and waiting, bytes stored, and sessions by status."""
    for tenant, stored in now.stored:
        page.tell("sublet_checkpoint_stored_bytes", stored, {"tenant": tenant})
    leases = [held.lease for held in now.held]
    for tier in Tier:
        waiting = [x for x in leases if x.request.tier is tier and x.state is LeaseState.WAITING]
        active = sum(x.request.tier is tier and x.state in HOLDING for x in leases)
        oldest = max((now.at - x.joined_at for x in waiting), default=0)
        page.tell("sublet_leases_active", active, {"tier": tier.value})
        page.tell("sublet_leases_waiting", len(waiting), {"tier": tier.value})
        page.tell("sublet_waitlist_oldest_seconds", millionths(max(0, oldest)), {"tier": tier.value})
    found = Counter(status(answer.session, answer.lease, now.at) for answer in now.sessions)
    for one in SessionStatus:
        if one is not SessionStatus.ENDED:
            page.tell("sublet_sessions", found[one], {"status": one.value})


@cache
def _booted_at() -> int:
    """The kernel's boot time in seconds since 1970, read once so that setting the clock does not move it."""
    lines = Path("/proc/stat").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("btime ")).split()[1])


def _tell_loops(page: MetricsPage, processes: Mapping[str, ProcessHealth | None]) -> None:
    for process, health in processes.items():
        if health is None:
            continue
        page.tell("sublet_process_up", int(health.running), {"process": process})
        for loop, silent_us in health.silent_us.items():
            labels = {"process": process, "loop": loop}
            page.tell("sublet_loop_silent_seconds", millionths(silent_us), labels)


def _tell_isolation(page: MetricsPage, isolation: HostIsolation) -> None:
    lacking = {boundary.name for boundary in isolation.missing}
    for boundary in NEEDED if not isolation.elsewhere else ():
        held = int(boundary.name not in lacking)
        page.tell("sublet_isolation_in_force", held, {"boundary": boundary.name})


def _tell_process(page: MetricsPage) -> None:
    """Writes process metrics of Linux, under the names that Prometheus' own clients use."""
    ticks = os.sysconf("SC_CLK_TCK")
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    page.tell("process_resident_memory_bytes", resident)
    page.tell("process_cpu_seconds_total", f"{(int(after_name[11]) + int(after_name[12])) / ticks:.2f}")
    page.tell("process_open_fds", len(os.listdir("/proc/self/fd")))
    page.tell("process_start_time_seconds", f"{_booted_at() + int(after_name[19]) / ticks:.2f}")
