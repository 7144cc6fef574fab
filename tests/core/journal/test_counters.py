"""Counters fold the journal's rows: into the same sums a report reads anew, one row at a time."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sublet.core.billing import goodput, meter
from sublet.core.journal.counters import (
    GpuTime,
    Granted,
    Happened,
    Histogram,
    JobStarted,
    LeaseEnded,
    LiveLease,
    StepsCommitted,
    Totals,
)
from sublet.core.leasing.lease import EndReason, Holder, LeaseRecord, LeaseState, Request
from sublet.core.scheduling.device import Slice
from tests.conftest import MORE_EXAMPLES

REASONS = [r for r in EndReason if r is not EndReason.REFUSED]


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[LeaseRecord], list[goodput.CommitUse], int]:
    """Leases with commits under them, as the ledger would have them; some are still held."""
    leases, commits = [], []
    now = 1_000_000
    for n in range(draw(st.integers(0, 6))):
        granted = draw(st.integers(1, 500))
        job = draw(st.sampled_from(["", "a", "b"]))
        ats = sorted(draw(st.lists(st.integers(0, 400), max_size=4)))
        committing = {"": draw(st.sampled_from(["", "c"])), "a": "a", "b": ""}[job]
        own = [
            goodput.CommitUse(
                lease=f"L{n}",
                job=committing,
                at=granted + at,
                steps=draw(st.integers(1, 3)),
                compute_us=draw(st.integers(-1, 300)),
            )
            for at in (ats if committing else [])
        ]
        commits += own
        ended = draw(st.booleans())
        length = (ats[-1] if own else 0) + draw(st.integers(0, 300))
        request = Request(tenant=f"t{n % 2}", vram_bytes=10, ttl_us=1_000_000, job=job)
        leases.append(
            LeaseRecord(
                id=f"L{n}",
                request=request,
                holder=Holder(host="h"),
                state=LeaseState.ENDED if ended else LeaseState.ACTIVE,
                slices=tuple(Slice(f"d{i}", 10) for i in range(draw(st.integers(1, 2)))),
                joined_at=granted,
                granted_at=granted,
                expires_at=granted + length,
                ended_at=granted + length if ended else 0,
                reason=draw(st.sampled_from(REASONS)) if ended else None,
                committed_at=own[-1].at if own else 0,
            )
        )
    return leases, commits, now


def rows_of(leases: list[LeaseRecord], commits: list[goodput.CommitUse]) -> list[Happened]:
    """In the order they happened. A job's first commit starts it."""
    found: list[tuple[int, int, Happened]] = []
    by_id = {lease.id: lease for lease in leases}
    started: set[str] = set()
    for lease in leases:
        granted = Granted(
            lease=lease.id,
            tenant=lease.tenant,
            tier="interactive",
            waited_us=0,
            at=lease.granted_at,
            devices=len(lease.slices),
        )
        found.append((lease.granted_at, 0, granted))
    for commit in sorted(commits, key=lambda c: c.at):
        if commit.job not in started:
            started.add(commit.job)
            found.append((commit.at, 1, JobStarted(job=commit.job)))
        done = StepsCommitted(
            lease=commit.lease,
            tenant=by_id[commit.lease].tenant,
            at=commit.at,
            steps=commit.steps,
            compute_us=commit.compute_us,
        )
        found.append((commit.at, 2, done))
    first = {c.job: c.at for c in sorted(commits, key=lambda c: -c.at)}
    for lease in leases:
        if lease.state is LeaseState.ENDED:
            ended = LeaseEnded(
                usage=meter.of_ended(lease),
                devices=len(lease.slices),
                committed_at=lease.committed_at,
                trains=lease.request.job in first and first[lease.request.job] <= lease.ended_at,
            )
            found.append((lease.ended_at, 3, ended))
    return [what for _, _, what in sorted(found, key=lambda f: f[:2])]


@settings(max_examples=300 * MORE_EXAMPLES, deadline=None)
@given(histories())
def test_the_fold_is_what_the_report_says(
    history: tuple[list[LeaseRecord], list[goodput.CommitUse], int],
) -> None:
    """T4: held, useful, wasted, refunded and goodput, to the microsecond."""
    leases, commits, now = history
    totals = Totals()
    for what in rows_of(leases, commits):
        totals.add(what)
    jobs = {c.job for c in commits}
    held = [
        LiveLease(lease=x, trains=x.request.job in jobs) for x in leases if x.state is not LeaseState.ENDED
    ]
    parts = goodput.stretches(leases, commits, since=0, now=now)
    wanted, _ = goodput.accounts(parts, lambda part: part.tenant)
    found = totals.with_held(held, now)
    assert sorted(tenant for tenant, _ in found) == [account.name for account in wanted]
    for account in wanted:
        time = found[account.name, "interactive"]
        assert time.gpu_us == account.held_us
        assert time.useful_us == account.useful_us
        assert time.training_us == account.held_us - account.other_us
        assert time.wasted_us == account.wasted_us
        assert time.refund_us == account.refund_us
        assert totals.steps[account.name] == account.steps
        assert totals.commits[account.name] == account.commits
        if account.commits:
            assert time.goodput_ppm == account.goodput_ppm


@given(histories(), st.integers(0, 800), st.integers(0, 800))
def test_what_is_held_only_grows(
    history: tuple[list[LeaseRecord], list[goodput.CommitUse], int], first: int, second: int
) -> None:
    leases, _, _ = history
    live = [LiveLease(lease=x, trains=False) for x in leases if x.state is LeaseState.ACTIVE]
    before = Totals().with_held(live, min(first, second))
    after = Totals().with_held(live, max(first, second))
    for whose, time in before.items():
        assert after[whose].gpu_us >= time.gpu_us
        assert after[whose].vram_byte_s >= time.vram_byte_s


def test_lost_time_of_a_job_counts_as_wasted_once_it_commits() -> None:
    """Who is taken back before the first commit cannot know yet that the job is one that commits."""
    totals = Totals()
    usage = meter.Usage(
        lease_id="L", tenant="ada", tier="spot", job="a", from_at=0, to_at=70, gpu_us=70, vram_byte_s=0,
        reason="preempted",
    )  # fmt: skip
    totals.add(LeaseEnded(usage=usage, devices=1, committed_at=0, trains=False))
    assert totals.time["ada", "spot"] == GpuTime(gpu_us=70)
    totals.add(JobStarted(job="other"))
    assert totals.time["ada", "spot"].wasted_us == 0
    totals.add(JobStarted(job="a"))
    assert totals.time["ada", "spot"] == GpuTime(gpu_us=70, training_us=70, wasted_us=70, refund_us=70)
    totals.add(JobStarted(job="a"))
    assert totals.time["ada", "spot"].wasted_us == 70


@given(st.lists(st.integers(0, 100)))
def test_a_bucket_holds_what_is_at_most_its_bound(values: list[int]) -> None:
    found = Histogram((10, 20, 50))
    for value in values:
        found.add(value)
    assert found.sum_us == sum(values)
    assert len(found.counts) == 4
    for n, bound in enumerate(found.bounds_us):
        assert sum(found.counts[: n + 1]) == sum(v <= bound for v in values)
    assert sum(found.counts) == len(values)


def test_leases_that_ended_are_forgotten() -> None:
    totals = Totals()
    for n in range(100):
        totals.add(Granted(lease=f"L{n}", tenant="ada", tier="spot", waited_us=0, at=0, devices=1))
        usage = meter.Usage(
            lease_id=f"L{n}", tenant="ada", tier="spot", job="", from_at=0, to_at=1, gpu_us=1, vram_byte_s=0,
            reason="released",
        )  # fmt: skip
        totals.add(LeaseEnded(usage=usage, devices=1, committed_at=0, trains=False))
    assert (totals._runs, totals._undecided) == ({}, {})
