"""`/metrics` over real ledgers: counters never fall, say what the ledger says, and cost what is new."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families as parsed

from sublet.core.billing.goodput import accounts, stretches
from sublet.core.errors import SubletError
from sublet.core.leasing.lease import EndReason, Request, Tier
from sublet.core.studio.session import job_of
from sublet.devices.utilisation import Load
from sublet.ports.ledger import Ledger, MeterPage
from sublet.ports.processes import Receipt
from sublet.studio.views.metrics import TABLE, Meters
from tests.conftest import MORE_EXAMPLES
from tests.ledger.rig import HERE, MINUTE, SECOND, Rig, a_step

Sample = tuple[str, tuple[tuple[str, str], ...]]


def scrape(meters: Meters, ledger: Ledger) -> dict[Sample, Decimal]:
    """Every sample, with its value as it was written."""
    text = meters.render(ledger)
    families = list(parsed(text))
    assert [f.name for f in families] == [s.name.removesuffix("_total") for s in TABLE]
    values = [Decimal(line.rpartition(" ")[2]) for line in text.splitlines() if not line.startswith("#")]
    samples = [s for f in families for s in f.samples]
    found = {(s.name, tuple(sorted(s.labels.items()))): v for s, v in zip(samples, values, strict=True)}
    assert len(found) == len(samples), "a sample is told twice"
    return found


def counters(found: dict[Sample, Decimal]) -> dict[Sample, Decimal]:
    own = {s.name for s in TABLE if s.kind == "gauge"} | {"process_cpu_seconds_total"}
    return {key: value for key, value in found.items() if key[0] not in own}


def total(found: dict[Sample, Decimal], name: str, **labels: str) -> Decimal:
    return sum(
        (v for (n, own), v in found.items() if n == name and labels.items() <= dict(own).items()), Decimal(0)
    )


@pytest.fixture
def pool(rig: Rig) -> Rig:
    rig.devices({"gpu0": 100, "gpu1": 100})
    rig.tenant("ada")
    rig.tenant("bob", weight=300)
    return rig


def receipt(proven: bool, duration_us: int) -> Receipt:
    return Receipt(
        proven=proven,
        ladder="killed",
        containment="cgroup",
        pids=(),
        freed_bytes=0,
        scrubbed_bytes=0,
        duration_us=duration_us,
        detail="a test's",
    )


def storm(rig: Rig, seed: int, turns: int) -> Iterator[None]:
    """Random things that happen to leases. What the ledger refuses is part of it."""
    chance = random.Random(seed)
    live: list[Any] = []
    steps: Counter[str] = Counter()
    ledger = rig.ledger

    def ask() -> None:
        job = chance.choice(["", "train", "other"])
        tier = chance.choice(["interactive", "batch", "spot"])
        live.append(
            rig.ask(
                chance.choice([20, 50, 100]),
                tenant=chance.choice(["ada", "bob"]),
                pid=chance.choice([0, 7]),
                job=job,
                tier=Tier(tier),
                count=chance.choice([1, 1, 2]),
                ttl_us=chance.choice([20, 60]) * SECOND,
            )
        )

    def commit() -> None:
        answer = chance.choice(live)
        job = chance.choice(["train", "other"])
        done = ledger.commit(
            rig.key(rig.look(answer)),
            a_step(steps[job] + chance.choice([1, 1, 1, 0, 2]), job=job, outcome='{"compute_us": 3000000}'),
        )
        steps[job] = getattr(done, "version", steps[job])

    def revoke() -> None:
        reason = chance.choice([EndReason.REVOKED, EndReason.PREEMPTED, EndReason.IDLE])
        ledger.revoke(
            chance.choice(live).lease.id, reason=reason, detail="a test", grace_us=5 * SECOND, actor="t"
        )

    def settle() -> None:
        for lease in ledger.host_view(HERE).leases:
            if lease.ended_at and not lease.settled_at:
                ledger.settle(lease.id, lease.epoch, receipt(chance.random() < 0.9, chance.randrange(10**7)))

    def clear() -> None:
        for device in ("gpu0", "gpu1"):
            ledger.set_device(device, state="ready", note="", actor="t")

    def renew() -> None:
        ledger.renew(rig.key(rig.look(chance.choice(live))))

    doing = [ask, ask, commit, commit, commit, revoke, settle, clear, renew, lambda: ledger.tick(HERE)]
    doing.append(lambda: rig.release(chance.choice(live)))
    doing.append(lambda: rig.later(chance.randrange(10) * SECOND))
    for _ in range(turns):
        try:
            chance.choice(doing)()
        except (SubletError, IndexError):
            pass
        yield


def end_all(rig: Rig) -> None:
    """What is held grows with the time, and two scrapes are not at the same."""
    for answer in rig.ledger.leases():
        rig.ledger.release(answer.lease.id, rig.secrets[answer.lease.id])


@pytest.mark.parametrize("seed", range(min(MORE_EXAMPLES, 20)))
def test_counters_in_a_storm(pool: Rig, seed: int) -> None:
    """T4: they never fall, do not depend on when they were read, and are the ledger's own sums to the
    microsecond."""
    meters, before = Meters(), {}
    for turn, _ in enumerate(storm(pool, seed, 400)):
        if turn % 7 == 0:
            now = counters(scrape(meters, pool.ledger))
            for key, value in before.items():
                assert now[key] >= value, f"{key} fell from {value}"
            before = now
    end_all(pool)
    found = scrape(meters, pool.ledger)
    again = counters(scrape(Meters(), pool.ledger))  # another process, or this one after a restart
    assert again == counters(found)
    usage = pool.ledger.usage()
    for tenant in ("ada", "bob"):
        for tier in ("interactive", "batch", "spot"):
            own = [u for u in usage if (u.tenant, u.tier) == (tenant, tier)]
            whose = {"tenant": tenant, "tier": tier}
            assert total(found, "sublet_gpu_seconds_total", **whose) * SECOND == sum(u.gpu_us for u in own)
            assert total(found, "sublet_vram_byte_seconds_total", **whose) == sum(u.vram_byte_s for u in own)
    ends = Counter(u.reason for u in usage)
    assert len(ends) > 2
    for reason, count in ends.items():
        assert total(found, "sublet_lease_ends_total", reason=reason) == count
    journal = Counter(kind for (kind,) in pool.sql("SELECT kind FROM journal"))
    assert total(found, "sublet_lease_wait_seconds_count") == journal["lease.granted"] == len(usage)
    assert total(found, "sublet_teardown_seconds_count") == journal["lease.settled"] > 0
    assert total(found, "sublet_commits_total") == journal["step.committed"] > 0
    assert total(found, "sublet_duplicates_total") == journal["step.duplicate"]
    assert total(found, "sublet_lease_refusals_total") == journal["lease.refused"]
    assert total(found, "sublet_quarantines_total") == journal["device.quarantined"]
    assert total(found, "sublet_fence_refusals_total", verb="commit") == journal["step.refused"]
    assert total(found, "sublet_leases_active") == total(found, "sublet_leases_waiting") == 0


def test_the_report_says_the_same(pool: Rig) -> None:
    for _ in storm(pool, 11, 300):
        pass
    found = scrape(Meters(), pool.ledger)
    held = pool.ledger.held()
    _, whole = accounts(stretches(held.leases, held.commits, since=0, now=held.at), lambda part: part.tenant)
    assert whole.useful_us > 0
    assert total(found, "sublet_useful_gpu_seconds_total") * SECOND == whole.useful_us
    assert total(found, "sublet_wasted_gpu_seconds_total") * SECOND == whole.wasted_us
    assert total(found, "sublet_refund_seconds_total") * SECOND == whole.refund_us
    assert total(found, "sublet_steps_committed_total") == whole.steps


class Watched:
    """A ledger that remembers which pages were read from it."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self.pages = ledger, list[MeterPage]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)

    def metered(self, **asked: Any) -> MeterPage:
        self.pages.append(self._ledger.metered(**asked))
        return self.pages[-1]


def test_a_scrape_reads_only_what_is_new(pool: Rig) -> None:
    for _ in range(20):
        pool.release(pool.ask(10))
    meters, watched = Meters(), Watched(pool.ledger)
    scrape(meters, watched)
    assert len(watched.pages[-1].happened) == 40
    scrape(meters, watched)
    assert watched.pages[-1].happened == ()
    pool.ask(10)
    found = scrape(meters, watched)
    assert len(watched.pages[-1].happened) == 1
    assert total(found, "sublet_lease_wait_seconds_count") == 21


def test_many_pages_are_as_one(pool: Rig) -> None:
    for _ in storm(pool, 5, 200):
        pass
    end_all(pool)

    class Small(Watched):
        def metered(self, **asked: Any) -> MeterPage:
            return super().metered(**asked, limit=3)

    small = Small(pool.ledger)
    assert counters(scrape(Meters(), small)) == counters(scrape(Meters(), pool.ledger))
    assert len(small.pages) > 10


def test_a_commit_that_appears_late_is_counted_once(postgres: Rig) -> None:
    """Its number was taken before others became visible, its transaction ended after they were read."""
    postgres.devices({"gpu0": 100})
    postgres.tenant("ada")
    first, second = postgres.ask(10), postgres.ask(10)
    meters = Meters()
    postgres.commit(first, 1, job="slow")
    slow = postgres.schema.connect()
    slow.execute("BEGIN")
    # The row of the first job's second commit, as its transaction would write it.
    slow.execute(
        "INSERT INTO journal (strand, seq, at, kind, tenant, subject, body, hash) "
        "SELECT strand, 2, at, kind, tenant, 'slow:2', replace(body, '\"step\":1', '\"step\":2'), hash "
        "FROM journal WHERE kind = 'step.committed'"
    )
    postgres.commit(second, 1, job="quick")
    before = scrape(meters, postgres.ledger)
    assert total(before, "sublet_commits_total") == 2
    slow.execute("COMMIT")
    slow.close()
    for _ in range(2):
        assert total(scrape(meters, postgres.ledger), "sublet_commits_total") == 3
    postgres.advance(10 * MINUTE)  # long after: settled, and not read again
    watched = Watched(postgres.ledger)
    for _ in range(2):
        assert total(scrape(meters, watched), "sublet_commits_total") == 3
    assert watched.pages[-1].happened == ()


def test_sessions_and_what_was_done_in_them(pool: Rig) -> None:
    def opened(number: int, tenant: str) -> str:
        session_id = f"S{number:020x}"
        request = Request(
            tenant=tenant, vram_bytes=10, ttl_us=MINUTE, job=job_of(tenant, session_id), host=HERE
        )
        pool.ledger.open_session(
            session_id, tenant, request=request, warm_us=MINUTE, name="", checkpoint="", host=HERE
        )
        return session_id

    one, two = opened(1, "ada"), opened(2, "ada")
    opened(3, "bob")
    pool.ledger.note_session(one, calls=3, errors=1, launches=20, checkpoint_bytes=4096)
    pool.ledger.note_session(two, calls=2)
    meters = Meters()
    for _ in range(2):  # the second time one of them has ended, and is forgotten afterwards
        found = scrape(meters, pool.ledger)
        assert total(found, "sublet_session_calls_total", tenant="ada") == 5
        assert total(found, "sublet_session_errors_total", tenant="ada") == 1
        assert total(found, "sublet_kernel_launches_total", tenant="ada") == 20
        assert total(found, "sublet_checkpoint_bytes_total", tenant="ada") == 4096
        assert total(found, "sublet_session_calls_total", tenant="bob") == 0
        pool.ledger.end_session(one, "ada", detail="done", actor="ada")
    assert total(found, "sublet_sessions", status="opening") == 2
    pool.advance(MINUTE)
    assert pool.ledger.drop_sessions(pool.ledger.now()) == 1
    for again in (meters, Meters()):
        assert total(scrape(again, pool.ledger), "sublet_session_calls_total", tenant="ada") == 5


def test_gauges_are_what_is_now(pool: Rig) -> None:
    held = pool.ask(100, tenant="ada")
    pool.ask(60, tenant="ada")
    waiter = pool.ask(90, tenant="bob")
    pool.ledger.set_device("gpu1", state="quarantined", note="a test", actor="t")
    pool.later(7 * SECOND, waiter)
    loads = {"gpu0": Load(gpu_percent=93, memory_percent=41, milliwatts=251_400)}
    found = scrape(Meters(lambda: loads), pool.ledger)
    assert total(found, "sublet_leases_active", tier="interactive") == 2
    assert total(found, "sublet_leases_waiting", tier="interactive") == 1
    assert 7 <= total(found, "sublet_waitlist_oldest_seconds", tier="interactive") < 60
    assert total(found, "sublet_devices_quarantined") == 1
    assert total(found, "sublet_devices", state="ready") == 1
    assert total(found, "sublet_tenant_weight", tenant="bob") == 300
    assert total(found, "DCGM_FI_DEV_GPU_UTIL") == 0  # none of the devices is NVIDIA's: nobody asked
    pool.sql(
        "UPDATE device SET driver = 'cuda', capacity_bytes = 3145728, free_bytes = 1048575 WHERE id = 'gpu0'"
    )
    found = scrape(Meters(lambda: loads), pool.ledger)
    on_gpu0 = {"UUID": "gpu0", "gpu": "0", "Hostname": HERE, "modelName": "test device", "device": "cuda0"}
    assert total(found, "DCGM_FI_DEV_FB_TOTAL", **on_gpu0) == 3
    assert total(found, "DCGM_FI_DEV_FB_USED", **on_gpu0) == 3  # a part of a mebibyte is in use
    assert total(found, "DCGM_FI_DEV_FB_FREE", **on_gpu0) == 0
    assert total(found, "DCGM_FI_DEV_GPU_UTIL", **on_gpu0) == 93
    assert total(found, "DCGM_FI_DEV_MEM_COPY_UTIL", **on_gpu0) == 41
    assert total(found, "DCGM_FI_DEV_POWER_USAGE", **on_gpu0) == Decimal("251.4")
    assert not [name for name, _ in found if name == "DCGM_FI_DEV_GPU_TEMP"]
    assert held.lease.granted_at


def test_what_the_process_does_itself(sqlite: Rig) -> None:
    meters = Meters()
    meters.own.request("GET", "/v1/sessions/{id}", 200, 0.003)
    meters.own.request("GET", "/v1/sessions/{id}", 404, 0.2)
    meters.own.request("POST", "", 404, 0.001)
    over = meters.own.stream("events")
    found = scrape(meters, sqlite.ledger)
    over()
    assert total(found, "sublet_http_requests_total", route="/v1/sessions/{id}", status="200") == 1
    assert total(found, "sublet_http_requests_total", route="none", method="POST") == 1
    assert total(found, "sublet_http_request_seconds_count", route="/v1/sessions/{id}") == 2
    assert total(found, "sublet_http_request_seconds_bucket", route="/v1/sessions/{id}", le="0.005") == 1
    assert total(found, "sublet_http_streams", kind="events") == 1
    assert total(scrape(meters, sqlite.ledger), "sublet_http_streams", kind="events") == 0
    assert total(found, "process_resident_memory_bytes") > 1 << 20
    assert total(found, "process_open_fds") > 0
    assert 0 < total(found, "process_start_time_seconds") < 2**33


def test_no_secret_and_no_id_is_told(pool: Rig) -> None:
    answer = pool.ask(10)
    text = Meters().render(pool.ledger)
    assert answer.lease.id not in text
    assert pool.secret(answer) not in text
