"""The tick, alone and over virtual time: L2 at every moment, T3 for every waiter, no victim for nothing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublet.core.leasing.lease import (
    EndReason,
    Holder,
    LeaseEvent,
    LeaseRecord,
    LeaseState,
    Renewed,
    Request,
    Tier,
    after,
    renew,
)
from sublet.core.leasing.policy import Policy
from sublet.core.leasing.tenancy import Tenant, rate_of, used_now
from sublet.core.scheduling.admission import Grant, Offer, PoolView
from sublet.core.scheduling.device import Device, DeviceState, Exclusivity, Slice, fit
from sublet.core.scheduling.preemption import protected_us
from sublet.core.scheduling.schedule import Drop, End, Instruction, Revoke, Withdraw, next_look_at, tick
from tests.conftest import MORE_EXAMPLES
from tests.core.pool import (
    BATCH,
    DEVICE,
    GB,
    INTERACTIVE,
    NOW,
    SHARED,
    SPOT,
    M,
    S,
    active,
    assert_exclusion,
    device,
    request,
    view_of,
    waiter,
)

POLICY = Policy()


def kinds(found: list[Instruction]) -> list[tuple[str, str]]:
    return [(type(i).__name__, i.lease_id) for i in found]


def lower(name: str, on: str | list[str] = "d0", gb: int = 80, **fields: object) -> LeaseRecord:
    return active(name, on, gb=gb, **({"tier": SPOT, "granted_at": NOW - 20 * M} | fields))


# --- one tick ------------------------------------------------------------------------------------------------


def test_a_quiet_pool_needs_nothing() -> None:
    assert tick(view_of([device()], [active("x")]), NOW) == []
    assert tick(view_of([device()]), NOW) == []


def test_l5_an_expired_lease_ends_and_one_that_is_not_is_left_alone() -> None:
    over = active("x", gb=8, expires_at=NOW, epoch=4)
    got = tick(view_of([device()], [over, active("y", expires_at=NOW + 1)]), NOW)
    assert got == [
        End(lease_id="x", epoch=4, end_reason=EndReason.EXPIRED, reason="not renewed within its ttl of 5m00s")
    ]


def test_a_grant_nobody_took_up_says_so_when_it_ends() -> None:
    got = tick(view_of([device()], [active("x", expires_at=NOW, claimed=False)]), NOW)
    assert [i.reason for i in got] == ["granted, but the waiter never took it up"]


def test_a_revoked_lease_ends_at_its_deadline_for_its_own_reason() -> None:
    going = replace(
        active("x"), state=LeaseState.REVOKING, deadline_at=NOW, reason=EndReason.IDLE, detail="idle"
    )
    got = tick(view_of([device()], [going]), NOW)
    assert [(i.end_reason, i.reason) for i in got if isinstance(i, End)] == [(EndReason.IDLE, "idle")]
    assert tick(view_of([device()], [going]), NOW - 1) == []


def test_a_waiter_leaves_when_its_time_is_over_or_it_fell_silent() -> None:
    full = active("x", gb=80)
    late = waiter("late", wait_until=NOW, joined_at=NOW - 5 * M)
    silent = waiter("silent", joined_at=NOW - 5 * M, seen_at=NOW - 30 * S)
    fine = waiter("fine", joined_at=NOW - 5 * M, seen_at=NOW - 30 * S + 1, wait_until=NOW + 1)
    got = tick(view_of([device()], [full], [late, silent, fine]), NOW)
    assert [(i.lease_id, i.end_reason) for i in got if isinstance(i, Drop)] == [
        ("late", EndReason.REFUSED),
        ("silent", EndReason.HOLDER_LOST),
    ]


def test_one_who_has_gone_is_given_nothing_and_costs_nobody() -> None:
    gone = waiter("gone", gb=80, seen_at=NOW - M, joined_at=NOW - M)
    assert kinds(tick(view_of([device()], [], [gone]), NOW)) == [("Drop", "gone")]
    assert kinds(tick(view_of([device()], [lower("x")], [gone]), NOW)) == [("Drop", "gone")]


def offered(name: str, until: int, **fields: object) -> LeaseRecord:
    slices = (Slice("d0", 40 * GB),)
    return waiter(
        name, gb=80, wants_offers=True, slices=slices, vram_bytes=40 * GB, offer_until=until, **fields
    )


def test_an_offer_that_was_not_taken_goes_back_and_the_request_keeps_its_place() -> None:
    view = view_of([device()], [active("x", gb=40)], [offered("w", NOW)])
    assert kinds(tick(view, NOW)) == [("Withdraw", "w")]
    assert tick(view, NOW - 1) == []


def test_one_who_leaves_is_not_also_withdrawn() -> None:
    view = view_of([device()], [active("x", gb=40)], [offered("w", NOW, wait_until=NOW)])
    assert kinds(tick(view, NOW)) == [("Drop", "w")]


def test_order_inside_a_tick_ends_drops_withdrawals_grants_revokes() -> None:
    pool = [device("d0"), device("d1"), device("d2"), device("d3")]
    leases = [active("old", "d3", expires_at=NOW), lower("low", "d1"), active("y", "d0", gb=40)]
    wishes = [
        offered("lapsed", NOW, joined_at=NOW - 3 * S),
        waiter("gone", joined_at=NOW - M, seen_at=NOW - M),
        waiter("fits", "cyd", 80, joined_at=NOW - 2 * S, exclusivity=DEVICE),
        waiter("more", "dan", 80, joined_at=NOW - S, exclusivity=DEVICE, host="h"),
    ]
    # `old` frees d3 later in time, so `more` counts on it, or on `low`.
    found = [name for name, _ in kinds(tick(view_of(pool, leases, wishes), NOW))]
    order = ["End", "Drop", "Withdraw", "Grant", "Offer", "Revoke"]
    assert found == sorted(found, key=order.index)
    assert {"End", "Drop", "Withdraw", "Grant"} <= set(found)


def test_a_revoke_gives_the_grace_and_says_why() -> None:
    got = tick(view_of([device()], [lower("x", epoch=9)], [waiter("w", gb=80)]), NOW)
    assert [(i.lease_id, i.epoch, i.end_reason, i.deadline_at) for i in got if isinstance(i, Revoke)] == [
        ("x", 9, EndReason.PREEMPTED, NOW + POLICY.grace_us)
    ]
    assert "spot makes room for interactive" in got[0].reason


def test_free_room_is_handed_out_before_anybody_is_taken() -> None:
    view = view_of([device("d0"), device("d1")], [lower("x", "d0")], [waiter("w", gb=80)])
    assert kinds(tick(view, NOW)) == [("Grant", "w")]


# --- one waiter, one victim ----------------------------------------------------------------------------------


def test_room_that_is_being_made_is_counted() -> None:
    going = replace(lower("x", "d0"), state=LeaseState.REVOKING, deadline_at=NOW + 10 * S)
    view = view_of([device("d0"), device("d1")], [going, lower("y", "d1")], [waiter("w", gb=80)])
    assert tick(view, NOW) == []
    torn = replace(going, state=LeaseState.ENDED)
    view = view_of([device("d0"), device("d1")], [torn, lower("y", "d1")], [waiter("w", gb=80)])
    assert tick(view, NOW) == []


def test_two_waiters_may_cost_two() -> None:
    wishes = [waiter("w", gb=80, joined_at=NOW - 1), waiter("v", "cyd", 80)]
    view = view_of([device("d0"), device("d1")], [lower("x", "d0"), lower("y", "d1")], wishes)
    assert sorted(kinds(tick(view, NOW))) == [("Revoke", "x"), ("Revoke", "y")]


def test_a_lease_that_ends_in_this_tick_is_room_enough() -> None:
    leases = [active("over", "d0", gb=80, expires_at=NOW), lower("low", "d1")]
    got = tick(view_of([device("d0"), device("d1")], leases, [waiter("w", gb=80)]), NOW)
    assert kinds(got) == [("End", "over")]


@pytest.mark.parametrize(
    "lease",
    [
        lower("x", expires_at=NOW),
        active("x", gb=80, expires_at=NOW, busy=False, active_at=NOW - M),
        active("x", gb=80, expires_at=NOW, hold_cap_us=M, granted_at=NOW - M),
    ],
    ids=["lower tier", "idle", "capped"],
)
def test_a_lease_that_ends_is_not_revoked_as_well(lease: LeaseRecord) -> None:
    assert kinds(tick(view_of([device()], [lease], [waiter("w", gb=80)]), NOW)) == [("End", "x")]


def test_an_offer_that_lapses_in_this_tick_is_room_enough() -> None:
    lapsed = offered("w", NOW, joined_at=NOW - S)
    wish = waiter("v", "cyd", 40)
    view = view_of(
        [device("d0"), device("d1")], [active("x", "d0", gb=40), lower("low", "d1")], [lapsed, wish]
    )
    got = kinds(tick(view, NOW))
    assert ("Withdraw", "w") in got
    # `w` itself may have room made for the 80 GB it asked; `v` needs nobody.
    alone = replace(view, waiters=(replace(lapsed, wait_until=NOW), wish))
    assert [k for k, _ in kinds(tick(alone, NOW)) if k == "Revoke"] == []


@pytest.mark.parametrize("free", [0, 1])
def test_t2_nobody_is_revoked_for_a_waiter_whose_quota_is_used_up_in_this_tick(free: int) -> None:
    pool = [device(f"d{i}") for i in range(2 + free)]
    leases = [lower("x", "d0"), lower("y", "d1")]
    wishes = [waiter("w", gb=80, joined_at=NOW - 1), waiter("v", gb=80)]
    got = kinds(tick(view_of(pool, leases, wishes, [Tenant(name="ann", max_leases=1)]), NOW))
    assert sum(k == "Revoke" for k, _ in got) == 1 - free, got


def test_t2_nobody_is_revoked_for_a_waiter_over_its_quota() -> None:
    leases = [lower("x", "d0"), active("mine", "d1", "ann", 80)]
    view = view_of(
        [device("d0"), device("d1")], leases, [waiter("w", gb=80)], [Tenant(name="ann", max_leases=1)]
    )
    assert tick(view, NOW) == []


def test_every_device_of_a_revoked_gang_is_room_for_the_next_waiter() -> None:
    pool = [device("d0"), device("d1"), device("d2", 24)]
    leases = [
        lower("gang", ["d0", "d1"], committed_at=NOW - 9 * M),
        lower("low", "d2", 24, committed_at=NOW - S),
    ]
    wishes = [waiter("big", "ann", 80, joined_at=NOW - 1), waiter("small", "cyd", 24)]
    assert kinds(tick(view_of(pool, leases, wishes), NOW)) == [("Revoke", "gang")]


# --- a pool over virtual time --------------------------------------------------------------------------------


@dataclass
class Pool:
    """A ledger, a warden and all holders in one object, on a clock that is only a number."""

    devices: list[Device]
    policy: Policy
    random: Random
    now: int = NOW
    leases: dict[str, LeaseRecord] = field(default_factory=dict)
    tenants: dict[str, Tenant] = field(default_factory=dict)
    epoch: int = 0
    made: int = 0
    teardown_us: int = 0
    obedient: bool = True  # on a notice the holder commits and leaves within the grace
    leaves_at: dict[str, int] = field(default_factory=dict)
    waits: list[int] = field(default_factory=list)
    revoked: list[str] = field(default_factory=list)

    def view(self) -> PoolView:
        holding = [x for x in self.leases.values() if x.holds_slices]
        waiting = [x for x in self.leases.values() if x.state is LeaseState.WAITING]
        return view_of(self.devices, holding, waiting, self.tenants, self.policy)

    def join(self, asked: Request, name: str = "") -> str:
        self.made += 1
        name = name or f"l{self.made:04d}"
        self.tenants.setdefault(asked.tenant, Tenant(name=asked.tenant, as_of=self.now))
        self.leases[name] = LeaseRecord(
            id=name,
            request=asked,
            holder=Holder(host="h"),
            state=LeaseState.WAITING,
            joined_at=self.now,
            seen_at=self.now,
            hold_cap_us=self.policy.hold_cap_us if asked.tier is INTERACTIVE else 0,
        )
        return name

    def end(self, name: str, reason: EndReason) -> None:
        lease = self.leases[name]
        if lease.state in (LeaseState.ACTIVE, LeaseState.REVOKING):
            self.bill(lease, -1)
        if reason is EndReason.HOLD_CAP:
            row = self.tenants[lease.tenant]
            self.tenants[lease.tenant] = replace(row, cooldown_until=self.now + self.policy.cooldown_us)
        self.leases[name] = replace(
            lease, state=after(lease.state, LeaseEvent.END), ended_at=self.now, reason=reason
        )
        self.settle()

    def settle(self) -> None:
        for name, x in list(self.leases.items()):
            if x.state is LeaseState.ENDED and self.now >= x.ended_at + self.teardown_us:
                del self.leases[name]

    def bill(self, lease: LeaseRecord, sign: int) -> None:
        row = self.tenants[lease.tenant]
        capacity = {d.id: d.capacity_bytes for d in self.devices}
        rate = sum(
            rate_of(lease.request.exclusivity, s.vram_bytes, capacity[s.device_id]) for s in lease.slices
        )
        used = used_now(row, self.now, self.policy.half_life_us)
        self.tenants[lease.tenant] = replace(
            row, used_us=used, as_of=self.now, rate_ppm=row.rate_ppm + sign * rate
        )

    def apply(self, step: Instruction) -> None:
        lease = self.leases[step.lease_id]
        if isinstance(step, Grant):
            self.epoch += 1
            self.waits.append(self.now - lease.joined_at)
            self.leases[lease.id] = replace(
                lease,
                state=after(lease.state, LeaseEvent.GRANT),
                epoch=self.epoch,
                slices=step.slices,
                vram_bytes=step.vram_bytes,
                granted_at=self.now,
                expires_at=self.now + lease.request.ttl_us,
                active_at=self.now,
                busy=True,
                offer_until=0,
            )
            self.bill(self.leases[lease.id], +1)
        elif isinstance(step, Offer):
            self.leases[lease.id] = replace(
                lease, slices=step.slices, vram_bytes=step.vram_bytes, offer_until=step.until
            )
        elif isinstance(step, Revoke):
            assert lease.epoch == step.epoch
            if lease.state is not LeaseState.ACTIVE:
                return  # the ledger looks at the row again, and so does this
            self.revoked.append(lease.id)
            self.leases[lease.id] = replace(
                lease,
                state=after(lease.state, LeaseEvent.REVOKE),
                deadline_at=step.deadline_at,
                reason=step.end_reason,
                detail=step.reason,
            )
            if self.obedient:
                self.leaves_at[lease.id] = self.now + self.random.randrange(self.policy.grace_us)
        elif isinstance(step, Withdraw):
            self.leases[lease.id] = replace(lease, slices=(), vram_bytes=0)
        else:
            self.end(lease.id, step.end_reason)

    def run_tick(self) -> list[Instruction]:
        """Tick until nothing more comes of it at this moment; L2 is asked after every one."""
        applied: list[Instruction] = []
        for _ in range(50):
            view = self.view()
            steps = tick(view, self.now)
            assert len({(type(s), s.lease_id) for s in steps}) == len(steps)
            for step in steps:
                if step.lease_id in self.leases:
                    self.apply(step)
                    applied.append(step)
            assert_exclusion(self.devices, list(self.leases.values()))
            if not steps:
                return applied
        pytest.fail(f"ticks at one moment never come to rest: {kinds(steps)}")

    def live(self) -> None:
        """What the holders and the warden do between ticks: renew, look after their wait, leave when told."""
        waiting = any(x.state is LeaseState.WAITING for x in self.leases.values())
        for name, x in list(self.leases.items()):
            if x.state is LeaseState.WAITING:
                self.leases[name] = replace(x, seen_at=self.now)
            elif (
                x.state is LeaseState.ACTIVE
                and x.busy
                and x.expires_at - self.now < x.request.ttl_us * 4 // 10
            ):
                answer = renew(x, x.epoch, self.now, capped=waiting)
                if isinstance(answer, Renewed):
                    assert answer.expires_at >= x.expires_at
                    self.leases[name] = replace(x, expires_at=answer.expires_at)
            elif x.state is LeaseState.REVOKING and self.leaves_at.get(name, self.now + 1) <= self.now:
                self.end(name, x.reason or EndReason.RELEASED)
        self.settle()


@settings(max_examples=12 * MORE_EXAMPLES, deadline=None)
@given(st.integers(0, 10**9))
def test_l2_holds_at_every_moment_of_a_random_life(seed: int) -> None:
    random = Random(seed)
    pool = Pool(
        [
            device(f"d{i}", random.choice([24, 80]), host=random.choice("hk"))
            for i in range(random.randint(1, 4))
        ],
        Policy(hold_cap_us=5 * M, promote_after_us=5 * M),
        random,
        teardown_us=random.choice([0, 3 * S]),
        obedient=random.random() < 0.7,
    )
    for _ in range(80):
        pool.now += random.choice([1, S, 5 * S, 20 * S])
        pool.live()
        for _ in range(random.choice([0, 0, 1, 2])):
            gb = random.choice([4, 8, 20, 24, 40, 80])
            pool.join(
                request(
                    random.choice(["ann", "bob", "cyd"]),
                    gb,
                    ttl_us=random.choice([S, M]),
                    count=random.choice([1, 1, 1, 2]),
                    exclusivity=random.choice(list(Exclusivity)),
                    tier=random.choice(list(Tier)),
                    least_bytes=random.choice([0, 4 * GB]),
                    wants_offers=random.random() < 0.3,
                )
            )
        held = [n for n, x in pool.leases.items() if x.state is LeaseState.ACTIVE]
        for name in held:
            what = random.random()
            if what < 0.05:
                pool.end(name, EndReason.RELEASED)
            elif what < 0.15:
                x = pool.leases[name]
                pool.leases[name] = replace(x, busy=not x.busy, active_at=pool.now)
        pool.run_tick()


def closed_pool(seed: int, devices: int, people: int, *, releases: bool) -> Pool:
    """Everyone interactive and busy, and whoever loses a lease comes back for another: two hours of it."""
    random = Random(seed)
    pool = Pool(
        [device(f"d{i}") for i in range(devices)],
        POLICY,
        random,
        obedient=random.random() < 0.5,
        teardown_us=2 * S,
    )
    arrives = {f"t{i}": NOW + random.randrange(10 * M) for i in range(people)}
    leaves: dict[str, int] = {}
    while pool.now < NOW + 120 * M:
        pool.now += 10 * S
        pool.live()
        if releases:
            for name, x in list(pool.leases.items()):
                if x.state is LeaseState.ACTIVE:
                    leaves.setdefault(name, pool.now + random.randrange(40 * M))
                    if pool.now >= leaves[name]:
                        pool.end(name, EndReason.RELEASED)
        present = {x.tenant for x in pool.leases.values() if x.state is not LeaseState.ENDED}
        for name, at in arrives.items():
            if pool.now >= at and name not in present:
                pool.join(request(name, 80, exclusivity=random.choice([SHARED, DEVICE])))
        pool.run_tick()
    return pool


SLACK = 30 * S  # the step of the simulation, the teardown, and a tick


@settings(max_examples=4 * MORE_EXAMPLES, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 3))
def test_t3_nobody_waits_longer_than_hold_cap_and_grace(seed: int, devices: int) -> None:
    pool = closed_pool(seed, devices, 2 * devices, releases=False)
    still = [pool.now - x.joined_at for x in pool.leases.values() if x.state is LeaseState.WAITING]
    assert len(pool.waits) >= 4 * devices
    assert max([*pool.waits, *still]) <= POLICY.hold_cap_us + POLICY.grace_us + SLACK


@settings(max_examples=3 * MORE_EXAMPLES, deadline=None)
@given(st.integers(0, 10**9))
def test_t3_with_a_longer_line_the_wait_is_bounded_by_the_turns_ahead(seed: int) -> None:
    pool = closed_pool(seed, 2, 6, releases=False)
    still = [pool.now - x.joined_at for x in pool.leases.values() if x.state is LeaseState.WAITING]
    assert max([*pool.waits, *still]) <= 2 * (POLICY.hold_cap_us + POLICY.grace_us + SLACK)


@settings(max_examples=3 * MORE_EXAMPLES, deadline=None)
@given(st.integers(0, 10**9))
def test_t3_those_who_leave_early_and_come_back_do_not_starve_the_rest(seed: int) -> None:
    pool = closed_pool(seed, 2, 4, releases=True)
    still = [pool.now - x.joined_at for x in pool.leases.values() if x.state is LeaseState.WAITING]
    bound = POLICY.promote_after_us + POLICY.hold_cap_us + POLICY.grace_us + SLACK
    assert max([*pool.waits, *still]) <= bound


@settings(max_examples=20 * MORE_EXAMPLES, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 4), st.booleans())
def test_one_waiter_never_costs_two_victims_over_time(seed: int, devices: int, obedient: bool) -> None:
    """Whole-device leases of lower tiers everywhere, one interactive waiter: one revoke, until it is served."""
    random = Random(seed)
    pool = Pool(
        [device(f"d{i}") for i in range(devices)], POLICY, random, obedient=obedient, teardown_us=4 * S
    )
    for i in range(devices):
        pool.join(request(f"t{i}", 80, tier=random.choice([BATCH, SPOT])))
    pool.run_tick()
    pool.now += random.randrange(1, 3 * M)
    pool.live()
    wish = pool.join(request("ann", 80))
    for _ in range(200):
        pool.run_tick()
        if pool.leases[wish].state is LeaseState.ACTIVE:
            break
        pool.now += S
        pool.live()
    assert pool.leases[wish].state is LeaseState.ACTIVE
    assert len(pool.revoked) == 1


def test_two_that_would_take_from_each_other_do_not_take_turns() -> None:
    """No ping-pong: after the preemption the loser waits, and the winner keeps the device to its cap."""
    pool = Pool([device()], POLICY, Random(1))
    pool.join(request("bob", 80, tier=SPOT), "spot")
    pool.run_tick()
    pool.now += 2 * M
    pool.join(request("ann", 80), "top")
    for _ in range(60):
        pool.run_tick()
        pool.now += S
        pool.live()
        if "spot" not in pool.leases:
            pool.join(request("bob", 80, tier=SPOT), "spot")
    assert pool.leases["top"].state is LeaseState.ACTIVE
    for _ in range(28 * 60):
        pool.now += S
        pool.live()
        pool.run_tick()
    assert pool.revoked == ["spot"]


def test_t3_a_busy_holder_at_its_cap_gets_its_grace_and_the_true_reason() -> None:
    pool = Pool([device()], POLICY, Random(1), obedient=False)
    pool.join(request("bob", 80), "held")
    pool.run_tick()
    pool.join(request("ann", 80), "next")
    said: list[Instruction] = []
    while pool.now < NOW + POLICY.hold_cap_us + POLICY.grace_us + SLACK:
        pool.now += S
        pool.live()
        said += [i for i in pool.run_tick() if i.lease_id == "held"]
    assert [type(i) for i in said] == [Revoke, End], [i.reason for i in said]
    assert {i.end_reason for i in said} == {EndReason.HOLD_CAP}
    assert pool.tenants["bob"].cooldown_until


# --- when to look again --------------------------------------------------------------------------------------


def moments_of(view: PoolView) -> set[int]:
    """Every instant at which some rule of the schedule could change its mind."""
    p, found = view.policy, set()
    for x in view.leases:
        found |= {x.expires_at, x.deadline_at, x.offer_until, x.active_at + p.idle_after_us}
        found |= {x.granted_at + x.hold_cap_us, x.granted_at + protected_us(x, p)}
    for w in view.waiters:
        found |= {w.wait_until, w.offer_until, max(w.seen_at, w.joined_at) + p.waiter_silence_us}
        found |= {w.joined_at + p.backfill_patience_us, w.joined_at + p.gang_patience_us}
        every = p.rises_after_us(w.request.tier.rank)
        found |= {w.joined_at + i * every for i in range(1, 5)}
    found |= {t.cooldown_until for t in view.tenants.values()}
    return found | {m - 1 for m in found}


def assert_looks_in_time(view: PoolView) -> None:
    if tick(view, NOW):
        return  # something is to be done now; the question is asked of a pool at rest
    look = next_look_at(view, NOW)
    assert look is None or look > NOW
    for at in sorted(m for m in moments_of(view) if m > NOW):
        steps = tick(view, at)
        if steps:
            assert look is not None, f"nobody looks, but at +{(at - NOW) / S}s: {kinds(steps)}"
            assert look <= at, f"looks at +{(look - NOW) / S}s, but at +{(at - NOW) / S}s: {kinds(steps)}"
            return


@pytest.mark.parametrize(
    "view",
    [
        view_of([device()], [active("x")]),
        view_of([device()], [replace(active("x"), state=LeaseState.REVOKING, deadline_at=NOW + S)]),
        view_of([device()], [active("x", gb=80)], [waiter("w", wait_until=NOW + S)]),
        view_of([device()], [active("x", gb=40)], [offered("w", NOW + S)]),
        view_of([device()], [active("x", gb=80, busy=False, active_at=NOW - S)], [waiter("w")]),
        view_of(
            [device()],
            [active("x", gb=80, granted_at=NOW - 5 * M, hold_cap_us=10 * M, expires_at=NOW + 20 * M)],
            [waiter("w", seen_at=NOW + 90 * M)],
        ),
        pytest.param(
            view_of([device()], [lower("x", granted_at=NOW - S, expires_at=NOW + 20 * M)], [waiter("w")]),
            id="protected time",
        ),
        pytest.param(
            view_of(
                [device()],
                [lower("x", granted_at=NOW - S, preemptions=2, expires_at=NOW + 20 * M)],
                [waiter("w", gb=80, seen_at=NOW + 10 * M)],
            ),
            id="doubled protected time",
        ),
        pytest.param(view_of([device()], [active("x", gb=80)], [waiter("w")]), id="silence"),
        pytest.param(
            view_of(
                [device()],
                [active("x", gb=70, expires_at=NOW + 90 * M)],
                [
                    waiter("big", "cyd", 80, joined_at=NOW - 31 * M, seen_at=NOW + 90 * M),
                    waiter("small", "ann", 8, joined_at=NOW - 59 * M, tier=BATCH, seen_at=NOW + 90 * M),
                ],
            ),
            id="promotion",
        ),
    ],
)
def test_the_next_look_is_in_time(view: PoolView) -> None:
    assert_looks_in_time(view)


@st.composite
def resting_views(draw: st.DrawFn) -> PoolView:
    pool = [device(f"d{i}", draw(st.sampled_from([24, 80]))) for i in range(draw(st.integers(1, 3)))]

    def ago(*seconds: int) -> int:
        return NOW - draw(st.sampled_from(seconds)) * S

    def wish(name: str) -> LeaseRecord:
        return waiter(
            name,
            draw(st.sampled_from(["ann", "bob"])),
            draw(st.sampled_from([80, 24, 8])),
            exclusivity=draw(st.sampled_from(Exclusivity)),
            tier=draw(st.sampled_from(Tier)),
            joined_at=ago(0, 20, 29, 1790, 3590),
            seen_at=ago(0, 20),
            wait_until=draw(st.sampled_from([0, 0, NOW + 7 * S])),
        )

    leases: list[LeaseRecord] = []
    for i in range(draw(st.integers(0, 4))):
        w = wish(f"x{i}")
        slices = fit(w.request.shape(), view_of(pool, leases).devices)
        if slices is None:
            continue
        leases.append(
            replace(
                w,
                state=draw(
                    st.sampled_from([LeaseState.ACTIVE] * 4 + [LeaseState.REVOKING, LeaseState.ENDED])
                ),
                slices=slices,
                epoch=i + 1,
                expires_at=NOW + draw(st.sampled_from([10, 3000])) * S,
                deadline_at=NOW + 9 * S,
                busy=draw(st.sampled_from([True, True, False])),
                active_at=ago(0, 3),
                granted_at=ago(0, 30, 50, 1799),
                hold_cap_us=draw(st.sampled_from([0, 30 * M])),
                preemptions=draw(st.sampled_from([0, 0, 1])),
            )
        )
    rows = [Tenant(name=n, cooldown_until=draw(st.sampled_from([0, NOW + 5 * S]))) for n in ("ann", "bob")]
    return view_of(pool, leases, [wish(f"w{i}") for i in range(draw(st.integers(0, 3)))], rows)


@settings(max_examples=80 * MORE_EXAMPLES, deadline=None)
@given(resting_views())
def test_the_next_look_is_never_later_than_what_time_alone_brings(view: PoolView) -> None:
    assert_looks_in_time(view)


def test_with_nothing_to_come_nobody_needs_to_look() -> None:
    assert next_look_at(view_of([device()]), NOW) is None
    assert next_look_at(view_of([device(state=DeviceState.LOST)]), NOW) is None
    torn = replace(active("x"), state=LeaseState.ENDED, ended_at=NOW - S, busy=True)
    assert next_look_at(view_of([device()], [torn]), NOW) is None
