"""Pools of every kind, drawn from a seed: several hosts, gangs, offers, quotas by number, by VRAM and by the day, leases in every state."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from sublet.core.leasing.lease import LeaseRecord, LeaseState, Tier
from sublet.core.leasing.policy import Policy
from sublet.core.leasing.tenancy import PPM, Tenant
from sublet.core.scheduling.admission import PoolView
from sublet.core.scheduling.device import DeviceState, Exclusivity, fit
from sublet.core.scheduling.spread import Spread
from sublet.core.values import DAY_US, HOUR_US
from tests.core.pool import GB, NOW, M, S, device, view_of, waiter

NAMES = ("ann", "bob", "cyd", "dot", "eve", "fay")


def wish(draw: Random, name: str, *, kinds: tuple[Exclusivity, ...] = tuple(Exclusivity)) -> LeaseRecord:
    host = draw.choice(["", "", "", "", "h", "k"])
    return waiter(
        name,
        draw.choice(NAMES),
        draw.choice([4, 8, 8, 16, 24, 40, 80]),
        count=draw.choice([1, 1, 1, 1, 2, 3]),
        exclusivity=draw.choice(kinds),
        tier=draw.choice(list(Tier)),
        host=host,
        spread=Spread.NO if host else draw.choice(list(Spread)),
        least_bytes=draw.choice([0, 0, 0, 4 * GB]),
        wants_offers=draw.random() < 0.25,
        wait_us=draw.choice([None, None, None, 0, 5 * M]),
        joined_at=NOW - draw.choice([0, 1, 10, 31, 300, 1790, 2000, 5000]) * S - draw.randrange(3),
        seen_at=NOW - draw.choice([0, 0, 0, 20, 29, 31]) * S,
        wait_until=draw.choice([0, 0, 0, 0, NOW + 7 * S, NOW - S, NOW]),
    )


def held(draw: Random, w: LeaseRecord, epoch: int, slices: tuple) -> LeaseRecord:
    state = draw.choice([LeaseState.ACTIVE] * 5 + [LeaseState.REVOKING, LeaseState.ENDED])
    granted_at = NOW - draw.choice([0, 30, 50, 59, 61, 130, 1786, 1799, 1801]) * S
    return replace(
        w,
        state=state,
        slices=slices,
        epoch=epoch,
        granted_at=granted_at,
        expires_at=NOW + draw.choice([10, 12, 3000, 3000, 3000, 0, -1]) * S,
        deadline_at=NOW + draw.choice([9, 0, 14]) * S if state is LeaseState.REVOKING else 0,
        ended_at=NOW - S if state is LeaseState.ENDED else 0,
        busy=state is not LeaseState.ENDED and draw.random() < 0.5,
        active_at=NOW - draw.choice([0, 3, 5, 5, 6, 40, 41]) * S,
        committed_at=draw.choice([0, 0, NOW - 10 * S, NOW - 10 * S, NOW - 77 * S, NOW]),
        hold_cap_us=draw.choice([0, 0, 30 * M]),
        preemptions=draw.choice([0, 0, 1, 5]),
        claimed=draw.random() < 0.8,
        detail=draw.choice(["", "said so"]),
        wait_until=0,
    )


def view(seed: int, *, most_devices: int = 8) -> PoolView:
    draw = Random(seed)
    kinds = draw.choice([tuple(Exclusivity), (Exclusivity.DEVICE,), (Exclusivity.SHARED,)])
    devices = [
        device(
            f"d{i:02d}",
            draw.choice([24, 80, 80]),
            host=draw.choice(["h", "h", "k"]),
            state=draw.choice([DeviceState.READY] * 12 + list(DeviceState)),
        )
        for i in range(draw.randint(1, most_devices))
    ]
    draw.shuffle(devices)
    leases: list[LeaseRecord] = []
    for i in range(draw.randint(0, 2 * most_devices)):
        w = wish(draw, f"{draw.choice('abcxyz')}{100 + i}", kinds=kinds)
        slices = fit(w.request.shape(), view_of(devices, leases).devices)
        if slices is not None:
            leases.append(held(draw, w, i + 1, slices))
    waiters = [
        wish(draw, f"{draw.choice('abcxyz')}{i}", kinds=kinds)
        for i in range(draw.choice([0, 1, 2, 5, 9, 14]))
    ]
    for i, w in enumerate(waiters):
        slices = (
            fit(w.request.shape(), view_of(devices, [*leases, *waiters[:i]]).devices)
            if draw.random() < 0.1
            else None
        )
        if slices is not None:
            waiters[i] = replace(
                w, slices=slices, wait_until=0, offer_until=NOW + draw.choice([4 * S, 0, -S])
            )
        elif draw.random() < 0.1:
            waiters[i] = replace(w, offer_until=NOW - S)
    alike = draw.random() < 0.2  # everybody has used the same: the closest comparison there is
    rows = [
        Tenant(
            name=name,
            weight=100 if alike else draw.choice([50, 100, 300]),
            used_us=7 * M if alike else draw.choice([0, draw.randrange(100) * M, draw.randrange(10**10)]),
            rate_ppm=0 if alike else draw.choice([0, 0, PPM, 3 * PPM + 17]),
            as_of=NOW - HOUR_US if alike else NOW - draw.choice([0, 1, 100 * S, 30 * DAY_US, 70 * DAY_US]),
            cooldown_until=draw.choice([0, 0, NOW + M, NOW - M]),
        )
        for name in NAMES
    ]
    knobs = draw.choice(
        [
            {"batch_promote_after_us": 30 * M},
            {"gang_patience_us": 30 * S},
            {"backfill_patience_us": 0},
            {"promote_after_us": 0, "batch_promote_after_us": draw.choice([0, 30 * M])},
            {"half_life_us": HOUR_US},
        ]
    )
    made = view_of(
        devices,
        sorted(leases, key=lambda x: x.id),
        sorted(waiters, key=lambda w: (w.joined_at, w.id)),
        rows,
        Policy(**knobs),
    )
    made = replace(made, leases=tuple(sorted(made.leases, key=lambda x: x.id)))
    limited = {
        name: replace(
            row,
            max_leases=draw.choice([0, 0, row.live_leases + 1, row.live_leases + 2]),
            max_vram_bytes=draw.choice([0, 0, row.live_bytes + 20 * GB, row.live_bytes + 90 * GB]),
            max_waiting=draw.choice([0, 0, 2]),
            gpu_us_per_day=(per_day := draw.choice([0, 0, 0, HOUR_US])),
            left_us=draw.choice([0, S, 9 * S, HOUR_US // 2]) if per_day else 0,
            left_at=NOW - draw.choice([0, 30]) * S,
        )
        for name, row in made.tenants.items()
    }
    return replace(made, tenants=limited)
