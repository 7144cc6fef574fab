"""Every verb of `ports.ledger`, the same on both engines.

What each test guards is named by its id in INVARIANTS. A refused verb is checked to have changed nothing but the journal.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sublet.core.errors import (
    BadInput,
    EffectBusy,
    Fenced,
    FingerprintMismatch,
    HeadMoved,
    LeaseLost,
    LeaseNotActive,
    NeverFits,
    NoCapacity,
    NotFound,
    QuotaReached,
    Stale,
    SubletError,
    WaitlistFull,
)
from sublet.core.leasing.lease import EndReason, Holder, LeaseState, Request, Tier
from sublet.core.leasing.tenancy import Tenant
from sublet.core.progress.effect import AlreadyCommitted, Committed, Reserved
from sublet.core.scheduling.device import DeviceState, Exclusivity
from sublet.core.scheduling.schedule import Drop, End, Revoke, Withdraw
from sublet.ledger.verbs.leasing.after_restore import EPOCH_GAP
from sublet.ports.ledger import Answer, LeaseKey
from sublet.ports.processes import Receipt
from tests.ledger.rig import HERE, MINUTE, SECOND, Rig, a_step

GONE = Receipt(proven=True, ladder="gone", containment="cgroup")
NOT_PROVEN = Receipt(proven=False, ladder="unproven", containment="none", detail="pid 7 is still there")


@pytest.fixture
def pool(rig: Rig) -> Rig:
    """Two tenants, one device of 80."""
    rig.tenant("ada")
    rig.tenant("bob")
    rig.device("gpu0", 80)
    return rig


# --- acquire -------------------------------------------------------------------------------------------------


def test_a_grant_says_who_holds_what_until_when(pool: Rig) -> None:
    answer = pool.ask(10, pid=42)
    lease = answer.lease
    assert lease.state is LeaseState.ACTIVE
    assert answer.wait is None
    assert [(s.device_id, s.vram_bytes) for s in lease.slices] == [("gpu0", 10)]
    assert lease.expires_at == answer.at + 5 * MINUTE
    assert lease.granted_at == answer.at
    assert lease.claimed
    assert lease.busy
    assert lease.detail == "capacity is free"
    assert lease.holder == Holder(host=HERE, pid=42)
    seen = pool.look(answer)
    assert replace(seen, request=lease.request) == lease
    assert pool.kinds(lease.id) == ["lease.granted"]
    [device] = pool.ledger.devices()
    assert (device.free_bytes, device.leases, device.sole_tenant) == (70, 1, "ada")
    ada = pool.ledger.tenant("ada")
    assert (ada.live_leases, ada.live_bytes, ada.rate_ppm) == (1, 10, 125_000)


def test_every_grant_has_a_higher_epoch(pool: Rig) -> None:
    """L1, over reopening and over grants to waiters."""
    epochs = []
    for _ in range(3):
        answer = pool.ask(10)
        epochs.append(answer.lease.epoch)
        pool.release(answer)
    pool.ledger = pool.open()
    first = pool.ask(80)
    waiter = pool.ask(80)
    epochs += [first.lease.epoch]
    pool.release(first)
    epochs.append(pool.look(waiter).epoch)
    assert epochs == sorted(set(epochs))
    assert epochs[0] > 0


def test_acquire_again_with_the_same_id_returns_the_first_answer(pool: Rig) -> None:
    first = pool.ask(10, lease_id="again")
    with pool.only_journals():
        second = pool.ask(10, lease_id="again")
    assert (second.lease.epoch, second.lease.expires_at) == (first.lease.epoch, first.lease.expires_at)


def test_acquire_again_with_another_secret_is_refused(pool: Rig) -> None:
    pool.ask(10, lease_id="mine")
    with pool.only_journals(), pytest.raises(NotFound):
        pool.ledger.acquire(
            "mine", "other", Request(tenant="ada", vram_bytes=10, ttl_us=MINUTE), Holder(host=HERE)
        )


def test_a_waiter_that_asks_again_keeps_its_place(pool: Rig) -> None:
    pool.ask(80)
    waiter = pool.ask(80, lease_id="waits")
    with pool.only_journals():
        again = pool.ask(80, lease_id="waits")
    assert again.lease.state is LeaseState.WAITING
    assert again.lease.joined_at == waiter.lease.joined_at


def test_many_devices_or_none(pool: Rig) -> None:
    pool.devices({"gpu0": 80, "gpu1": 80, "gpu2": 80})
    pool.ask(71, host=HERE)
    with pool.only_journals("lease.refused"), pytest.raises(NoCapacity):
        pool.ask(10, count=3, wait_us=0)
    two = pool.ask(10, count=2)
    assert len({s.device_id for s in two.lease.slices}) == 2
    assert [s.vram_bytes for s in two.lease.slices] == [10, 10]
    ada = pool.ledger.tenant("ada")
    assert (ada.live_leases, ada.live_bytes) == (2, 91)
    pool.release(two)
    assert sorted(d.free_bytes for d in pool.ledger.devices()) == [9, 80, 80]


def test_small_leases_are_packed_together(pool: Rig) -> None:
    pool.devices({"gpu0": 80, "gpu1": 80})
    pool.ask(10, lease_id="one")
    assert pool.ask(10).lease.slices[0].device_id == pool.look("one").slices[0].device_id


@pytest.mark.parametrize(
    ("resident", "newcomer", "same", "other"),
    [
        ("shared", "shared", True, True),
        ("session", "shared", True, False),
        ("device", "shared", False, False),
        ("shared", "session", True, False),
        ("session", "session", True, False),
        ("device", "session", False, False),
        ("shared", "device", False, False),
        ("session", "device", False, False),
        ("device", "device", False, False),
    ],
)
def test_exclusivity(pool: Rig, resident: str, newcomer: str, same: bool, other: bool) -> None:
    """L2, the whole matrix, through the sums the device keeps."""
    pool.ask(10, exclusivity=Exclusivity(resident))
    for tenant, welcome in (("bob", other), ("ada", same)):
        if welcome:
            assert pool.release(pool.ask(10, tenant=tenant, exclusivity=Exclusivity(newcomer), wait_us=0))
        else:
            with (
                pool.only_journals("lease.refused"),
                pytest.raises(NoCapacity, match=r"exclusivity|resources"),
            ):
                pool.ask(10, tenant=tenant, exclusivity=Exclusivity(newcomer), wait_us=0)


def test_a_device_lease_takes_all_of_it(pool: Rig) -> None:
    answer = pool.ask(10, exclusivity=Exclusivity.DEVICE)
    assert answer.lease.slices[0].vram_bytes == 80
    assert pool.ledger.devices()[0].free_bytes == 0
    pool.release(answer)
    assert pool.ledger.devices()[0].free_bytes == 80


def test_when_a_third_tenant_leaves_the_device_is_the_first_ones_again(pool: Rig) -> None:
    mine = pool.ask(10, tenant="ada")
    theirs = pool.ask(10, tenant="bob")
    assert pool.ledger.devices()[0].sole_tenant == "*"
    pool.release(theirs)
    assert pool.ledger.devices()[0].sole_tenant == "ada"
    pool.ask(10, tenant="ada", exclusivity=Exclusivity.SESSION, wait_us=0)
    pool.release(mine)
    assert pool.ledger.devices()[0].session_leases == 1


def test_only_the_asked_host(pool: Rig) -> None:
    pool.device("far0", 80, host="node-b")
    answer = pool.ledger.acquire(
        "on-b", "s", Request(tenant="ada", vram_bytes=10, ttl_us=MINUTE, host="node-b"), Holder(host=HERE)
    )
    assert answer.lease.slices[0].device_id == "far0"
    with pytest.raises(NeverFits):
        pool.ledger.acquire(
            "on-c", "s", Request(tenant="ada", vram_bytes=10, ttl_us=MINUTE, host="node-c"), Holder(host=HERE)
        )


@pytest.mark.parametrize(
    ("error", "request_"),
    [
        (NeverFits, {"vram": 81}),
        (NeverFits, {"vram": 10, "count": 2}),
        (NoCapacity, {"vram": 80, "wait_us": 0}),
        (QuotaReached, {"vram": 60, "tenant": "poor"}),
        (QuotaReached, {"vram": 30, "tenant": "poor", "wait_us": 0}),
        (WaitlistFull, {"vram": 80, "tenant": "hasty"}),
    ],
)
def test_a_refusal_changes_nothing_but_the_journal(
    pool: Rig, error: type[SubletError], request_: dict[str, object]
) -> None:
    pool.tenant("poor", max_vram_bytes=50)
    pool.tenant("hasty", max_waiting=1)
    pool.ask(30, tenant="poor")
    pool.ask(80, tenant="hasty")
    with pool.only_journals("lease.refused"), pytest.raises(error):
        pool.ask(lease_id="no", **request_)
    [(tenant, body)] = pool.sql("SELECT tenant, body FROM journal WHERE subject = 'no'")
    assert tenant == request_.get("tenant", "ada")
    assert error.code in body
    with pytest.raises(NotFound):
        pool.look("no")


@pytest.mark.parametrize(
    ("lease_id", "tenant", "host", "job"),
    [
        ("bad id", "ada", HERE, ""),
        ("fine", "a da", HERE, ""),
        ("fine", "ada", "../x", ""),
        ("fine", "ada", HERE, "a/../b"),
        ("fine", "nobody", HERE, ""),
    ],
)
def test_bad_input_writes_nothing(pool: Rig, lease_id: str, tenant: str, host: str, job: str) -> None:
    with pool.only_journals(), pytest.raises(BadInput):
        pool.ledger.acquire(
            lease_id, "s", Request(tenant=tenant, vram_bytes=1, ttl_us=MINUTE, job=job), Holder(host=host)
        )


def test_a_bad_host_in_the_request_is_refused(pool: Rig) -> None:
    with pool.only_journals(), pytest.raises(BadInput):
        pool.ledger.acquire(
            "x", "s", Request(tenant="ada", vram_bytes=1, ttl_us=MINUTE, host="a b"), Holder(host=HERE)
        )


def test_quotas_hold_and_free_again(pool: Rig) -> None:
    """T2."""
    pool.tenant("poor", max_leases=2, max_vram_bytes=50)
    one = pool.ask(20, tenant="poor")
    pool.ask(20, tenant="poor")
    with pytest.raises(QuotaReached, match="2 of 2 leases"):
        pool.ask(1, tenant="poor", wait_us=0)
    blocked = pool.ask(25, tenant="poor")
    assert blocked.wait is not None
    assert blocked.wait.reason.startswith("quota")
    assert (
        pool.ask(10, tenant="bob", wait_us=0).lease.state is LeaseState.ACTIVE
    )  # nobody waits behind a quota
    pool.release(one)
    assert pool.look(blocked).state is LeaseState.ACTIVE


def test_a_whole_device_counts_whole_against_the_quota(pool: Rig) -> None:
    """T2: what it gets counts, not what it asked for."""
    pool.tenant("poor", max_vram_bytes=50)
    with pytest.raises(QuotaReached):
        pool.ask(1, tenant="poor", exclusivity=Exclusivity.DEVICE, wait_us=0)
    assert pool.ledger.tenant("poor").live_bytes <= 50


# --- waiting -------------------------------------------------------------------------------------------------


def test_waiting_says_where_and_why(pool: Rig) -> None:
    pool.ask(80)
    first = pool.ask(40, tenant="bob")
    second = pool.ask(40, tenant="bob")
    assert (first.wait.position, second.wait.position) == (1, 2)
    assert "nothing is free" in second.wait.reason
    assert pool.kinds(first.lease.id) == ["lease.waiting"]
    assert pool.ledger.tenant("bob").waiting == 2
    attended = pool.ledger.attend(second.lease.id, pool.secret(second))
    assert attended.wait.position == 2
    assert attended.wait.eta_us is not None
    assert pool.ledger.attend(first.lease.id, pool.secret(first), explain=False).wait is None
    with pool.only_journals(), pytest.raises(NotFound):
        pool.ledger.attend(first.lease.id, "wrong")


def test_a_listing_shows_where_waiters_stand(pool: Rig) -> None:
    """A listing is read only: it must not need a lock to say why somebody waits."""
    if pool.engine == "postgres":
        pool.ledger.engine.patience_us = 200_000
    pool.ask(80)
    pool.ask(40, tenant="bob", lease_id="first")
    pool.ask(40, tenant="bob", lease_id="second")
    listed = {a.lease.id: a.wait for a in pool.ledger.leases()}
    assert (listed["first"].position, listed["second"].position) == (1, 2)
    assert listed["second"].reason.startswith("resources: needs 40B")


def test_attending_is_a_sign_of_life(pool: Rig) -> None:
    pool.ask(80)
    waiter = pool.ask(40, tenant="bob")
    silence = pool.ledger.policy().waiter_silence_us
    pool.advance(silence - SECOND)
    pool.ledger.attend(waiter.lease.id, pool.secret(waiter))
    pool.advance(silence - SECOND)
    pool.ledger.tick()
    assert pool.look(waiter).state is LeaseState.WAITING


def test_a_grant_is_durable_before_a_waiter_is_told_of_it(pool: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """L1: the release that made it need not survive a crash. Who only waits, waits for no disk."""
    synced: list[str] = []
    confirm = pool.ledger.engine.confirm

    def counted(sql: str, *params: object) -> Any:
        synced.append(sql)
        return confirm(sql, *params)

    holder = pool.ask(80)
    waiter = pool.ask(80, tenant="bob")
    monkeypatch.setattr(pool.ledger.engine, "confirm", counted)
    for _ in range(3):
        assert pool.ledger.attend(waiter.lease.id, pool.secret(waiter)).lease.state is LeaseState.WAITING
    pool.release(holder)
    assert synced == []
    for told in (1, 2):  # the first answer may be lost on its way
        assert pool.ledger.attend(waiter.lease.id, pool.secret(waiter)).lease.state is LeaseState.ACTIVE
        assert len(synced) == told


def test_the_waitlist_is_by_tier_then_share_then_arrival(pool: Rig) -> None:
    """T3: who has used more waits longer, whoever came first."""
    pool.tenant("eve")
    holder = pool.ask(80, tenant="ada")
    pool.advance(MINUTE)  # ada has used a device-minute
    order = [
        pool.ask(80, tenant="bob", tier=Tier.BATCH),
        pool.ask(80, tenant="ada"),
        pool.ask(80, tenant="bob"),
        pool.ask(80, tenant="eve"),
    ]
    expected = [order[2], order[3], order[1], order[0]]
    places = [pool.ledger.attend(a.lease.id, pool.secret(a)).wait.position for a in expected]
    assert places == [1, 2, 3, 4]
    pool.release(holder)
    for served in expected:
        assert [pool.look(x).state.value for x in order].count("active") == 1
        assert pool.look(served).state is LeaseState.ACTIVE
        assert pool.release(served)


def test_a_waiter_is_granted_in_the_transaction_that_made_room(pool: Rig) -> None:
    """S8."""
    holder = pool.ask(80)
    waiter = pool.ask(80, tenant="bob", ttl_us=10 * MINUTE)
    pool.release(holder)
    # PostgreSQL names the transaction that wrote a row; with a clock that stands still the instant tells as much.
    together = "at" if pool.engine == "sqlite" else "xmin::text"
    rows = pool.sql(f"SELECT kind, {together} FROM journal WHERE strand = 'main' ORDER BY id DESC LIMIT 2")
    assert [kind for kind, _ in rows] == ["lease.granted", "lease.ended"]
    assert rows[0][1] == rows[1][1]
    lease = pool.look(waiter)
    assert lease.state is LeaseState.ACTIVE
    assert not lease.claimed
    assert lease.expires_at == lease.granted_at + pool.ledger.policy().claim_us
    assert pool.ledger.tenant("bob").waiting == 0
    assert pool.sql("SELECT waiting FROM pool") == [(0,)]


def test_a_grant_is_taken_up_by_renewing_it(pool: Rig) -> None:
    holder = pool.ask(80)
    waiter = pool.ask(80, tenant="bob", ttl_us=10 * MINUTE)
    pool.release(holder)
    renewed = pool.ledger.renew(pool.key(pool.look(waiter)))
    assert renewed.lease.claimed
    assert renewed.lease.expires_at == renewed.at + 10 * MINUTE


def test_a_grant_nobody_takes_up_goes_to_the_next(pool: Rig) -> None:
    holder = pool.ask(80)
    gone = pool.ask(80, tenant="bob")
    pool.advance(SECOND)
    patient = pool.ask(80, tenant="bob")
    pool.release(holder)
    pool.advance(pool.ledger.policy().claim_us)
    pool.ledger.tick()
    lease = pool.look(gone)
    assert (lease.state, lease.reason) == (LeaseState.ENDED, EndReason.EXPIRED)
    assert "never took it up" in lease.detail
    assert pool.look(patient).state is LeaseState.ACTIVE


def test_less_now_rather_than_more_later(pool: Rig) -> None:
    pool.ask(60)
    answer = pool.ask(40, tenant="bob", least_bytes=15)
    assert answer.lease.state is LeaseState.ACTIVE
    assert answer.lease.slices[0].vram_bytes == 20
    with pytest.raises(NoCapacity):
        pool.ask(40, tenant="bob", least_bytes=15, wait_us=0)


def _offered(pool: Rig) -> tuple[Answer, Answer]:
    holder = pool.ask(60)
    return holder, pool.ask(40, tenant="bob", wants_offers=True)


def test_an_offer_is_held_and_accepted(pool: Rig) -> None:
    _, offered = _offered(pool)
    lease = offered.lease
    assert lease.state is LeaseState.WAITING
    assert lease.slices[0].vram_bytes == 20
    assert lease.offer_until == offered.at + pool.ledger.policy().offer_hold_us
    assert pool.ledger.devices()[0].free_bytes == 0
    with pytest.raises(NoCapacity):
        pool.ask(1, wait_us=0)  # what is on offer is not given to somebody else
    with pool.only_journals(), pytest.raises(NotFound):
        pool.ledger.accept(lease.id, "wrong")
    taken = pool.ledger.accept(lease.id, pool.secret(offered))
    assert taken.lease.state is LeaseState.ACTIVE
    assert taken.lease.slices[0].vram_bytes == 20
    assert taken.lease.claimed
    assert taken.lease.expires_at == taken.at + 5 * MINUTE
    assert pool.kinds(lease.id) == ["lease.waiting", "lease.offered", "lease.granted"]
    bob = pool.ledger.tenant("bob")
    assert (bob.live_leases, bob.live_bytes, bob.waiting) == (1, 20, 0)


def test_an_offer_is_declined_and_the_place_is_kept(pool: Rig) -> None:
    holder, offered = _offered(pool)
    with pool.only_journals(), pytest.raises(NotFound):
        pool.ledger.decline(offered.lease.id, "wrong")
    kept = pool.ledger.decline(offered.lease.id, pool.secret(offered))
    assert kept.lease.state is LeaseState.WAITING
    assert kept.lease.slices == ()
    assert pool.ledger.devices()[0].free_bytes == 20
    bob = pool.ledger.tenant("bob")
    assert (bob.live_leases, bob.live_bytes, bob.waiting) == (0, 0, 1)
    with pool.only_journals(), pytest.raises(Stale):
        pool.ledger.accept(offered.lease.id, pool.secret(offered))
    pool.release(holder)
    assert pool.look(offered).state is LeaseState.ACTIVE
    assert pool.look(offered).slices[0].vram_bytes == 40


def test_an_offer_lapses(pool: Rig) -> None:
    _, offered = _offered(pool)
    pool.advance(pool.ledger.policy().offer_hold_us)
    with pool.only_journals(), pytest.raises(Stale):
        pool.ledger.accept(offered.lease.id, pool.secret(offered))
    pool.ledger.attend(offered.lease.id, pool.secret(offered))
    result = pool.ledger.tick()
    assert Withdraw in {type(i) for i in result.instructions}
    assert pool.look(offered).slices == ()
    assert pool.look(offered).state is LeaseState.WAITING
    assert pool.ledger.devices()[0].free_bytes == 20


def test_a_declined_offer_goes_to_the_next_who_fits(pool: Rig) -> None:
    _, offered = _offered(pool)
    small = pool.ask(20, tenant="bob")
    assert small.lease.state is LeaseState.WAITING
    pool.ledger.decline(offered.lease.id, pool.secret(offered))
    assert pool.look(small).state is LeaseState.ACTIVE


def test_accept_again_returns_the_first_answer(pool: Rig) -> None:
    _, offered = _offered(pool)
    first = pool.ledger.accept(offered.lease.id, pool.secret(offered))
    again = pool.ledger.accept(offered.lease.id, pool.secret(offered))
    assert again.lease.epoch == first.lease.epoch


# --- holding -------------------------------------------------------------------------------------------------


def test_renew_moves_the_expiry_by_the_ttl(pool: Rig) -> None:
    """L4."""
    answer = pool.ask(10)
    pool.advance(MINUTE)
    renewed = pool.ledger.renew(pool.key(answer), busy=False)
    assert renewed.lease.expires_at == renewed.at + 5 * MINUTE
    seen = pool.look(answer)
    assert (seen.expires_at, seen.busy, seen.active_at) == (renewed.lease.expires_at, False, renewed.at)
    assert pool.sql("SELECT kind FROM journal WHERE strand = ?", f"lease:{answer.lease.id}") == [
        ("lease.renewed",)
    ]


@pytest.mark.parametrize("many", [False, True])
def test_being_kept_is_not_being_used(pool: Rig, many: bool) -> None:
    """Renewed as idle, a lease has been idle since it last worked, so that the longest idle one is the first to go."""

    def renew(busy: bool) -> Answer:
        pool.advance(MINUTE)
        if not many:
            return pool.ledger.renew(pool.key(answer), busy=busy)
        [found] = pool.ledger.renew_many([(pool.key(answer), busy)])
        assert isinstance(found, Answer)
        return found

    answer = pool.ask(10)
    stopped = renew(False)
    for busy, since_stopped in ((False, True), (False, True), (True, False), (False, False)):
        renewed = renew(busy)
        assert renewed.lease.expires_at == renewed.at + 5 * MINUTE
        assert renewed.lease == pool.look(answer)
        assert renewed.lease.active_at == (stopped.at if since_stopped else renewed.at)


@pytest.mark.parametrize(
    "how", ["expired", "released", "wrong epoch", "epoch zero", "wrong secret", "unknown"]
)
def test_a_dead_lease_is_not_renewed(pool: Rig, how: str) -> None:
    """L3."""
    answer = pool.ask(10)
    key = pool.key(answer)
    journalled = ["lease.renew_refused"]
    if how == "expired":
        pool.advance(5 * MINUTE)
    elif how == "released":
        pool.release(answer)
    elif how == "wrong epoch":
        key = replace(key, epoch=key.epoch + 1)
    elif how == "epoch zero":
        key = replace(key, epoch=0)
    elif how == "wrong secret":
        key, journalled = replace(key, secret="other"), []
    else:
        key, journalled = replace(key, lease_id="nobody"), []
    with pool.only_journals(*journalled), pytest.raises(LeaseLost) as raised:
        pool.ledger.renew(key)
    assert not isinstance(raised.value, LeaseNotActive)


def test_a_waiter_cannot_renew(pool: Rig) -> None:
    pool.ask(80)
    waiter = pool.ask(80)
    with pool.only_journals("lease.renew_refused"), pytest.raises(LeaseLost):
        pool.ledger.renew(LeaseKey(waiter.lease.id, 0, pool.secret(waiter)))


def test_one_instant_before_expiry_is_still_held(pool: Rig) -> None:
    instant = 1 if pool.engine == "sqlite" else SECOND  # the server's clock flows while we ask
    answer = pool.ask(10)
    pool.advance(5 * MINUTE - instant)
    assert pool.ledger.renew(pool.key(answer)).lease.state is LeaseState.ACTIVE
    pool.advance(5 * MINUTE)
    with pytest.raises(LeaseLost, match="expired"):
        pool.ledger.renew(pool.key(answer))


def test_renew_stops_at_the_hold_cap_when_somebody_waits(pool: Rig) -> None:
    """L4."""
    answer = pool.ask(80, hold_cap_us=7 * MINUTE)
    key = pool.key(answer)
    cap = answer.lease.granted_at + 7 * MINUTE
    pool.advance(4 * MINUTE)
    assert pool.ledger.renew(key).lease.expires_at > cap  # nobody waits
    pool.advance(2 * MINUTE)
    waiter = pool.ask(80, tenant="bob")
    promised = pool.look(answer).expires_at
    assert pool.ledger.renew(key).lease.expires_at == promised
    pool.advance(2 * MINUTE)
    with (
        pool.only_journals("lease.renew_refused"),
        pytest.raises(LeaseLost, match="the most while others wait"),
    ):
        pool.ledger.renew(key)
    pool.release(waiter)
    assert pool.ledger.renew(key).lease.expires_at > promised


def test_strict_hold_caps_without_anybody_waiting(pool: Rig) -> None:
    pool.policy(strict_hold=True)
    answer = pool.ask(80, hold_cap_us=6 * MINUTE)
    pool.advance(4 * MINUTE)
    renewed = pool.ledger.renew(pool.key(answer))
    assert renewed.lease.expires_at == answer.lease.granted_at + 6 * MINUTE


def test_batch_has_no_cap_and_interactive_the_policys(pool: Rig) -> None:
    assert pool.look(pool.ask(1)).hold_cap_us == pool.ledger.policy().hold_cap_us
    assert pool.look(pool.ask(1, tier=Tier.BATCH)).hold_cap_us == 0
    assert pool.look(pool.ask(1, tier=Tier.SPOT, hold_cap_us=MINUTE)).hold_cap_us == MINUTE


def test_renew_many_answers_each(pool: Rig) -> None:
    good = pool.ask(10, lease_id="a-good")
    lost = pool.ask(10, lease_id="b-lost")
    also = pool.ask(10, lease_id="c-also")
    pool.release(lost)
    pool.advance(MINUTE)
    answers = pool.ledger.renew_many(
        [(pool.key(good), True), (pool.key(lost), True), (pool.key(also), False)]
    )
    assert isinstance(answers[1], LeaseLost)
    assert [a.lease.id for a in answers if isinstance(a, Answer)] == ["a-good", "c-also"]
    assert all(a.lease.expires_at == a.at + 5 * MINUTE for a in answers if isinstance(a, Answer))
    assert (pool.look(good).busy, pool.look(also).busy) == (True, False)
    assert pool.ledger.renew_many([]) == []
    assert pool.faults() == []


def test_renew_many_answers_in_the_order_asked(pool: Rig) -> None:
    first = pool.ask(10, lease_id="z-first")
    second = pool.ask(10, lease_id="a-second")
    pool.release(first)
    answers = pool.ledger.renew_many([(pool.key(first), True), (pool.key(second), True)])
    assert isinstance(answers[0], LeaseLost)
    assert isinstance(answers[1], Answer)


def test_mark_says_who_is_idle(pool: Rig) -> None:
    answer = pool.ask(10)
    pool.advance(SECOND)
    pool.ledger.mark(pool.key(answer), busy=False)
    seen = pool.look(answer)
    assert not seen.busy
    assert seen.active_at >= answer.at + SECOND
    for key in (replace(pool.key(answer), secret="other"), replace(pool.key(answer), epoch=99)):
        with pool.only_journals():
            pool.ledger.mark(key, busy=True)


def test_release_gives_back_once(pool: Rig) -> None:
    answer = pool.ask(10, pid=42)
    with pool.only_journals(), pytest.raises(NotFound):
        pool.ledger.release(answer.lease.id, "wrong")
    assert pool.release(answer) is True
    lease = pool.look(answer)
    assert (lease.state, lease.reason) == (LeaseState.ENDED, EndReason.RELEASED)
    assert lease.settled_at
    assert pool.kinds(lease.id) == ["lease.granted", "lease.ended"]
    assert pool.ledger.devices()[0].free_bytes == 80
    ada = pool.ledger.tenant("ada")
    assert (ada.live_leases, ada.live_bytes, ada.rate_ppm) == (0, 0, 0)
    with pool.only_journals():
        assert pool.release(answer) is False
    with pool.only_journals(), pytest.raises(NotFound):
        pool.ledger.release("nobody", "x")


def test_release_leaves_the_waitlist(pool: Rig) -> None:
    pool.ask(80)
    waiter = pool.ask(80, tenant="bob")
    assert pool.release(waiter) is True
    assert pool.look(waiter).state is LeaseState.ENDED
    assert pool.ledger.tenant("bob").waiting == 0
    assert pool.sql("SELECT waiting FROM pool") == [(0,)]
    assert pool.ledger.usage() == []


def test_release_after_expiry_says_expired(pool: Rig) -> None:
    answer = pool.ask(10)
    pool.advance(10 * MINUTE)
    assert pool.release(answer) is True
    lease = pool.look(answer)
    assert (lease.reason, lease.ended_at) == (EndReason.EXPIRED, lease.expires_at)


def test_look_at_nothing(pool: Rig) -> None:
    with pytest.raises(NotFound):
        pool.ledger.look("nobody")


def test_listings(pool: Rig) -> None:
    mine, theirs = pool.ask(10), pool.ask(10, tenant="bob")
    pool.release(mine)
    assert [a.lease.id for a in pool.ledger.leases()] == [theirs.lease.id]
    assert {a.lease.id for a in pool.ledger.leases(live_only=False)} == {mine.lease.id, theirs.lease.id}
    assert pool.ledger.leases(tenant="ada") == []
    assert len(pool.ledger.leases(live_only=False, limit=1)) == 1


# --- taking back ---------------------------------------------------------------------------------------------


def _revoke(
    pool: Rig, answer: Answer, grace: int, reason: EndReason = EndReason.REVOKED, detail: str = "asked"
) -> Answer:
    return pool.ledger.revoke(answer.lease.id, reason=reason, detail=detail, grace_us=grace, actor="root")


def test_revoking_lets_the_holder_commit_but_not_renew(pool: Rig) -> None:
    """S2 within the grace, fenced after it."""
    answer = pool.ask(10)
    revoked = _revoke(pool, answer, 10 * SECOND)
    assert revoked.lease.state is LeaseState.REVOKING
    assert revoked.lease.deadline_at == revoked.at + 10 * SECOND
    assert revoked.lease.detail == "asked"
    with pool.only_journals("lease.renew_refused"), pytest.raises(LeaseNotActive):
        pool.ledger.renew(pool.key(answer))
    assert pool.commit(answer, 1) == Committed(1)
    assert pool.commit(answer, 2) == Committed(2)
    pool.advance(10 * SECOND)
    with pool.only_journals("step.refused"), pytest.raises(Fenced, match="grace is over"):
        pool.commit(answer, 3)
    with pytest.raises(LeaseLost):
        pool.ledger.renew(pool.key(answer))
    assert pool.look(answer).expires_at == answer.lease.expires_at


def test_the_nearer_deadline_wins(pool: Rig) -> None:
    answer = pool.ask(10)
    _revoke(pool, answer, 10 * SECOND)
    near = _revoke(pool, answer, 2 * SECOND).lease.deadline_at
    assert _revoke(pool, answer, 60 * SECOND).lease.deadline_at == near
    assert pool.look(answer).deadline_at == near
    assert pool.kinds(answer.lease.id) == ["lease.granted"] + ["lease.revoked"] * 3


def test_the_nearer_deadlines_reason_is_kept(pool: Rig) -> None:
    answer = pool.ask(10)
    _revoke(pool, answer, 2 * SECOND, EndReason.PREEMPTED, "batch makes room")
    later = _revoke(pool, answer, 60 * SECOND, EndReason.HOLD_CAP, "held too long").lease
    assert (later.reason, later.detail) == (EndReason.PREEMPTED, "batch makes room")


def test_at_the_deadline_a_tick_ends_it_with_the_reason_given(pool: Rig) -> None:
    answer = pool.ask(10)
    _revoke(pool, answer, 10 * SECOND, EndReason.PREEMPTED, "somebody more important")
    pool.ledger.tick()
    assert pool.look(answer).state is LeaseState.REVOKING
    pool.advance(10 * SECOND)
    pool.ledger.tick()
    lease = pool.look(answer)
    assert (lease.state, lease.reason) == (LeaseState.ENDED, EndReason.PREEMPTED)
    assert lease.detail == "somebody more important"


def test_releasing_while_revoking_is_draining_in_time(pool: Rig) -> None:
    answer = pool.ask(10)
    _revoke(pool, answer, 10 * SECOND)
    pool.release(answer)
    lease = pool.look(answer)
    assert lease.reason is EndReason.REVOKED
    assert lease.detail.startswith("drained in time")


def test_revoking_a_waiter_takes_it_off_the_list(pool: Rig) -> None:
    pool.ask(80)
    waiter = pool.ask(80, tenant="bob")
    assert _revoke(pool, waiter, MINUTE).lease.state is LeaseState.ENDED
    assert pool.ledger.tenant("bob").waiting == 0


def test_what_cannot_be_revoked(pool: Rig) -> None:
    answer = pool.ask(10)
    with pool.only_journals(), pytest.raises(BadInput):
        _revoke(pool, answer, -1)
    with pool.only_journals(), pytest.raises(BadInput):
        _revoke(pool, answer, 1, EndReason.RELEASED)
    with pool.only_journals(), pytest.raises(BadInput):
        _revoke(pool, answer, 1, detail="two\nlines")
    with pool.only_journals(), pytest.raises(NotFound):
        pool.ledger.revoke("nobody", reason=EndReason.REVOKED, detail="", grace_us=0, actor="root")
    pool.release(answer)
    with pool.only_journals(), pytest.raises(LeaseLost, match="already ended"):
        _revoke(pool, answer, 1)


def test_revoking_an_expired_lease_does_not_bring_it_back(pool: Rig) -> None:
    """L3."""
    answer = pool.ask(10)
    pool.advance(6 * MINUTE)
    with pytest.raises(Fenced):
        pool.commit(answer, 1)
    try:
        _revoke(pool, answer, MINUTE)
    except LeaseLost:
        pass
    with pytest.raises(Fenced):
        pool.commit(answer, 1)


def test_a_warden_ends_a_lease_whose_holder_is_gone(pool: Rig) -> None:
    answer = pool.ask(10, pid=42)
    end = {"reason": EndReason.HOLDER_LOST, "detail": "pid 42 is gone"}
    with pool.only_journals():
        assert pool.ledger.end(answer.lease.id, answer.lease.epoch + 1, **end) is False
        assert pool.ledger.end("nobody", 1, **end) is False
    assert pool.ledger.end(answer.lease.id, answer.lease.epoch, **end) is True
    lease = pool.look(answer)
    assert (lease.state, lease.reason, lease.settled_at) == (LeaseState.ENDED, EndReason.HOLDER_LOST, 0)
    assert pool.ledger.devices()[0].free_bytes == 70  # until the teardown is settled
    with pool.only_journals():
        assert pool.ledger.end(answer.lease.id, answer.lease.epoch, **end) is False
    with pool.only_journals("step.refused"), pytest.raises(Fenced):
        pool.commit(answer, 1)


def test_a_holder_gone_after_its_lease_ran_out_was_not_lost(pool: Rig) -> None:
    """It is gone because the lease was over: the reason says so."""
    end = {"reason": EndReason.HOLDER_LOST, "detail": "pid 42 is gone"}
    expired, revoked = pool.ask(10, pid=42, ttl_us=MINUTE), pool.ask(10, pid=42)
    pool.ledger.revoke(
        revoked.lease.id, reason=EndReason.REVOKED, detail="maintenance", grace_us=SECOND, actor="test"
    )
    pool.advance(2 * MINUTE)
    for answer in (expired, revoked):
        assert pool.ledger.end(answer.lease.id, answer.lease.epoch, **end) is True
    assert (pool.look(expired).reason, pool.look(expired).detail) == (EndReason.EXPIRED, "its ttl ran out")
    assert (pool.look(revoked).reason, pool.look(revoked).detail) == (EndReason.REVOKED, "maintenance")
    assert not pool.ledger.verify().faults


def test_a_warden_ends_a_waiter_whose_holder_is_gone(pool: Rig) -> None:
    pool.ask(80)
    waiter = pool.ask(80, tenant="bob", pid=42)
    assert pool.ledger.end(waiter.lease.id, 0, reason=EndReason.HOLDER_LOST, detail="gone")
    assert pool.look(waiter).settled_at
    assert pool.ledger.tenant("bob").waiting == 0


def test_settling_a_proven_teardown_hands_the_slice_on(pool: Rig) -> None:
    """K1."""
    answer = pool.ask(80, pid=42)
    waiter = pool.ask(80, tenant="bob")
    with pool.only_journals():
        assert pool.ledger.settle(answer.lease.id, answer.lease.epoch, GONE) is False  # it lives
    pool.ledger.end(answer.lease.id, answer.lease.epoch, reason=EndReason.HOLDER_LOST, detail="gone")
    assert pool.look(waiter).state is LeaseState.WAITING
    with pool.only_journals():
        assert pool.ledger.settle(answer.lease.id, answer.lease.epoch + 1, GONE) is False
        assert pool.ledger.settle("nobody", 1, GONE) is False
    assert pool.ledger.settle(answer.lease.id, answer.lease.epoch, GONE) is True
    assert pool.look(waiter).state is LeaseState.ACTIVE
    with pool.only_journals():
        assert pool.ledger.settle(answer.lease.id, answer.lease.epoch, GONE) is False
    [(body,)] = pool.sql("SELECT body FROM journal WHERE kind = 'lease.settled'")
    assert '"ladder":"gone"' in body
    assert '"proven":true' in body


def test_a_release_that_leaves_a_teardown_to_the_warden(pool: Rig) -> None:
    """K1: over at once for its holder; the slice stays until the warden has seen the holder gone."""
    answer = pool.ask(80, pid=42)
    waiter = pool.ask(80, tenant="bob")
    assert pool.ledger.release(answer.lease.id, pool.secret(answer), torn_down=False) is True
    released = pool.look(answer)
    assert (released.state, released.reason, released.settled_at) == (LeaseState.ENDED, EndReason.RELEASED, 0)
    assert pool.look(waiter).state is LeaseState.WAITING
    assert [x.id for x in pool.ledger.host_view(released.holder.host).leases if x.id == released.id]
    assert pool.ledger.settle(answer.lease.id, answer.lease.epoch, GONE) is True
    assert pool.look(waiter).state is LeaseState.ACTIVE
    assert not pool.ledger.verify().faults


def test_receipts_are_kept_newest_first(pool: Rig) -> None:
    whole = Receipt(
        proven=True,
        ladder="kill",
        containment="cgroup, pid namespace",
        pids=(7, 8),
        freed_bytes=1 << 40,
        scrubbed_bytes=5,
        duration_us=12,
        detail="it said: 'no'",
    )
    for tenant, receipt in (("ada", GONE), ("bob", whole)):
        answer = pool.ask(10, tenant=tenant, pid=42)
        pool.ledger.end(answer.lease.id, answer.lease.epoch, reason=EndReason.HOLDER_LOST, detail="gone")
        pool.ledger.settle(answer.lease.id, answer.lease.epoch, receipt)
        pool.advance(SECOND)
    newest, oldest = pool.ledger.receipts()
    assert (newest.lease_id, newest.tenant, newest.receipt) == (answer.lease.id, "bob", whole)
    assert newest.devices == tuple(s.device_id for s in answer.lease.slices)
    assert oldest.receipt == GONE
    assert [t.tenant for t in pool.ledger.receipts(tenant="ada")] == ["ada"]
    assert len(pool.ledger.receipts(limit=1)) == 1
    assert newest.at > oldest.at


def test_settling_an_unproven_teardown_withholds_the_device(pool: Rig) -> None:
    """K1: nobody gets memory that may still be in use, until an operator says so."""
    answer = pool.ask(80, pid=42)
    waiter = pool.ask(80, tenant="bob")
    pool.ledger.end(answer.lease.id, answer.lease.epoch, reason=EndReason.HOLDER_LOST, detail="gone")
    assert pool.ledger.settle(answer.lease.id, answer.lease.epoch, NOT_PROVEN) is True
    [device] = pool.ledger.devices()
    assert device.state is DeviceState.QUARANTINED
    assert "pid 7" in device.note
    assert device.free_bytes == 80
    pool.ledger.tick()
    assert pool.look(waiter).state is LeaseState.WAITING
    with pytest.raises(NoCapacity):
        pool.ask(1, wait_us=0)
    assert pool.kinds("gpu0")[-1] == "device.quarantined"
    pool.ledger.set_device("gpu0", state="ready", note="looked at it", actor="root")
    assert pool.look(waiter).state is LeaseState.ACTIVE


# --- tick ----------------------------------------------------------------------------------------------------


def test_a_tick_ends_what_expired_and_nothing_else(pool: Rig) -> None:
    """L5."""
    short = pool.ask(10, ttl_us=MINUTE)
    by_process = pool.ask(10, ttl_us=MINUTE, pid=42)
    long = pool.ask(10)
    assert pool.ledger.tick().instructions == ()
    pool.advance(MINUTE)
    ended = {i.lease_id for i in pool.ledger.tick().instructions if isinstance(i, End)}
    assert ended == {short.lease.id, by_process.lease.id}
    assert pool.look(short).reason is EndReason.EXPIRED
    assert pool.look(short).settled_at  # held by name only: nothing to tear down
    assert not pool.look(by_process).settled_at
    assert pool.look(long).state is LeaseState.ACTIVE
    assert pool.ledger.devices()[0].free_bytes == 60
    assert pool.ledger.tick().instructions == ()


def test_a_tick_says_when_to_look_again(pool: Rig) -> None:
    answer = pool.ask(10, ttl_us=MINUTE)
    assert pool.ledger.tick().next_look_at == answer.lease.expires_at


def test_an_idle_lease_is_taken_when_somebody_waits(pool: Rig) -> None:
    answer = pool.ask(80)
    pool.ledger.mark(pool.key(answer), busy=False)
    pool.advance(10 * SECOND)
    assert pool.ledger.tick().instructions == ()  # nobody waits
    waiter = pool.ask(80, tenant="bob")
    [revoke] = pool.ledger.tick().instructions
    assert isinstance(revoke, Revoke)
    assert revoke.end_reason is EndReason.IDLE
    assert "while bob waits" in pool.look(answer).detail
    assert pool.ledger.tick().instructions == ()  # one waiter costs one victim
    pool.later(pool.ledger.policy().grace_us, waiter)
    pool.ledger.tick()
    assert pool.look(answer).reason is EndReason.IDLE
    assert pool.look(waiter).state is LeaseState.ACTIVE


def test_a_busy_lease_is_not_idle(pool: Rig) -> None:
    answer = pool.ask(80)
    pool.advance(20 * SECOND)
    pool.ask(80, tenant="bob")
    assert pool.ledger.tick().instructions == ()
    assert pool.look(answer).state is LeaseState.ACTIVE


def test_the_hold_cap_with_cooldown(pool: Rig) -> None:
    answer = pool.ask(80, hold_cap_us=MINUTE)
    pool.later(MINUTE)
    waiter = pool.ask(80, tenant="bob")
    [revoke] = pool.ledger.tick().instructions
    assert revoke.end_reason is EndReason.HOLD_CAP
    again = pool.ask(80, tenant="ada")
    pool.later(pool.ledger.policy().grace_us, waiter, again)
    pool.ledger.tick()
    assert pool.look(answer).reason is EndReason.HOLD_CAP
    ada = pool.ledger.tenant("ada")
    assert ada.cooldown_until > pool.ledger.now()
    assert pool.look(waiter).state is LeaseState.ACTIVE
    assert pool.look(again).state is LeaseState.WAITING


def test_preemption_takes_the_lower_tier_after_its_minimum_run(pool: Rig) -> None:
    spot = pool.ask(80, tier=Tier.SPOT, job="night")
    waiter = pool.ask(80, tenant="bob")
    assert pool.ledger.tick().instructions == ()  # it has not run long enough
    pool.later(pool.ledger.policy().min_run_us, waiter)
    pool.ledger.tick()
    assert pool.look(spot).state is LeaseState.REVOKING
    assert pool.look(spot).reason is EndReason.PREEMPTED
    pool.later(pool.ledger.policy().grace_us, waiter)
    pool.ledger.tick()
    assert pool.look(waiter).state is LeaseState.ACTIVE
    assert pool.look(pool.ask(80, tier=Tier.SPOT, job="night")).preemptions == 1


def test_nobody_preempts_its_own_tier(pool: Rig) -> None:
    pool.ask(80, hold_cap_us=0)
    waiter = pool.ask(80, tenant="bob")
    for _ in range(4):
        pool.later(20 * SECOND, waiter)
        assert pool.ledger.tick().instructions == ()


def test_waiters_are_dropped_for_silence_and_for_time(pool: Rig) -> None:
    pool.ask(80)
    timed = pool.ask(80, tenant="bob", wait_us=10 * SECOND)
    silent = pool.ask(80, tenant="bob")
    pool.advance(10 * SECOND)
    dropped = [i for i in pool.ledger.tick().instructions if isinstance(i, Drop)]
    assert [d.lease_id for d in dropped] == [timed.lease.id]
    assert pool.look(timed).reason is EndReason.REFUSED
    pool.advance(pool.ledger.policy().waiter_silence_us)
    pool.ledger.tick()
    assert pool.look(silent).reason is EndReason.HOLDER_LOST
    assert pool.ledger.tenant("bob").waiting == 0
    assert pool.ledger.usage() == []


def test_silent_hosts_lose_their_devices(pool: Rig) -> None:
    pool.device("far0", 80, host="node-b")
    pool.while_heard(pool.ledger.policy().host_silence_us + SECOND, "node-b")
    pool.ledger.tick()
    states = {d.id: d.state for d in pool.ledger.devices()}
    assert states == {"gpu0": DeviceState.LOST, "far0": DeviceState.READY}
    assert pool.kinds(HERE)[-1] == "host.lost"
    pool.advance(pool.ledger.policy().host_silence_us + SECOND)
    pool.ledger.tick(host="node-b")  # a warden that ticks is not silent
    assert {d.id: d.state for d in pool.ledger.devices()}["far0"] is DeviceState.READY


@pytest.mark.parametrize(("gang", "size"), [(Exclusivity.SHARED, 80), (Exclusivity.SESSION, 40)])
def test_a_tick_does_not_hand_the_same_memory_out_twice(pool: Rig, gang: Exclusivity, size: int) -> None:
    pool.devices({"gpu0": 80, "gpu1": 80, "gpu2": 80})
    pool.tenant("eve")
    for tenant in ("ada", "bob"):
        pool.ledger.set_tenant(tenant, actor="root", max_leases=2)
    pool.ask(80, tenant="bob", lease_id="long")
    pool.ask(80, tenant="ada", lease_id="short", ttl_us=10 * SECOND)
    pool.ledger.set_tenant("bob", actor="root", max_leases=1)
    pool.ask(size, tenant="eve", lease_id="gang", count=2, exclusivity=gang)
    pool.ask(size, tenant="bob", lease_id="single")
    pool.ledger.set_tenant("bob", actor="root", max_leases=2)  # now only the gang is before it
    pool.later(10 * SECOND)
    pool.ledger.tick()
    assert pool.look("gang").state is LeaseState.ACTIVE
    assert pool.look("single").state is LeaseState.WAITING


def test_a_tick_takes_nothing_for_who_is_served(pool: Rig) -> None:
    pool.devices({"gpu0": 80, "gpu1": 80})
    pool.ask(80, lease_id="expiring", ttl_us=10 * SECOND)
    idle = pool.ask(80, lease_id="idle")
    pool.ledger.mark(pool.key(idle), busy=False)
    pool.later(9 * SECOND)
    waiter = pool.ask(80, tenant="bob")
    pool.later(SECOND)
    pool.ledger.tick()
    assert pool.look(waiter).state is LeaseState.ACTIVE
    assert pool.look(idle).state is LeaseState.ACTIVE


# --- devices -------------------------------------------------------------------------------------------------


def test_hosts_report_devices_that_come_and_go(pool: Rig) -> None:
    pool.devices({"gpu0": 80, "gpu1": 40})
    assert [(d.id, d.capacity_bytes, d.ordinal) for d in pool.ledger.devices(HERE)] == [
        ("gpu0", 80, 0),
        ("gpu1", 40, 1),
    ]
    rows = pool.ledger.verify().rows
    pool.devices({"gpu0": 80, "gpu1": 40})
    assert pool.ledger.verify().rows == rows  # no news, no row
    answer = pool.ask(80)
    pool.devices({"gpu1": 40})
    lost = next(d for d in pool.ledger.devices() if d.id == "gpu0")
    assert lost.state is DeviceState.LOST
    assert pool.look(answer).state is LeaseState.ACTIVE  # it runs out by itself
    with pytest.raises(NeverFits):
        pool.ask(80)
    pool.release(answer)
    pool.devices({"gpu0": 80, "gpu1": 40})
    assert pool.ask(80, wait_us=0).lease.slices[0].device_id == "gpu0"
    assert pool.ledger.devices("node-z") == []


def test_a_partial_report_loses_nothing(pool: Rig) -> None:
    pool.devices({"gpu1": 80}, complete=False)
    assert {d.id: d.state for d in pool.ledger.devices()} == {
        "gpu0": DeviceState.READY,
        "gpu1": DeviceState.READY,
    }


def test_a_device_that_returns_goes_to_who_waits(pool: Rig) -> None:
    pool.ask(80)
    waiter = pool.ask(80, tenant="bob")
    pool.device("gpu1", 80)
    assert pool.look(waiter).state is LeaseState.ACTIVE


def test_a_device_that_grew_is_believed_when_empty(pool: Rig) -> None:
    answer = pool.ask(10)
    pool.devices({"gpu0": 90})
    assert pool.ledger.devices()[0].capacity_bytes == 80
    pool.release(answer)
    pool.devices({"gpu0": 90})
    [device] = pool.ledger.devices()
    assert (device.capacity_bytes, device.free_bytes) == (90, 90)


@pytest.mark.parametrize("state", ["quarantined", "draining"])
def test_what_an_operator_withheld_stays_withheld(pool: Rig, state: str) -> None:
    pool.ledger.set_device("gpu0", state=state, note="burnt", actor="root")
    pool.devices({"gpu1": 80})
    pool.devices({"gpu0": 80, "gpu1": 80})
    device = next(d for d in pool.ledger.devices() if d.id == "gpu0")
    assert (device.state.value, device.note) == (state, "burnt")


def test_two_hosts_cannot_have_one_device(pool: Rig) -> None:
    if pool.engine == "postgres":
        pool.ledger.engine.patience_us = 200_000
    with pool.only_journals(), pytest.raises(BadInput):
        pool.device("gpu0", 80, host="node-b")


def test_operators_set_devices(pool: Rig) -> None:
    with pool.only_journals(), pytest.raises(BadInput):
        pool.ledger.set_device("gpu0", state="lost", note="", actor="root")
    with pool.only_journals(), pytest.raises(NotFound):
        pool.ledger.set_device("gpu9", state="ready", note="", actor="root")
    for state in ("draining", "quarantined"):
        device = pool.ledger.set_device("gpu0", state=state, note="why", actor="root")
        assert (device.state.value, device.note) == (state, "why")
        with pytest.raises(NoCapacity):
            pool.ask(10, wait_us=0)
    waiter = pool.ask(10)
    pool.ledger.set_device("gpu0", state="ready", note="", actor="root")
    assert pool.look(waiter).state is LeaseState.ACTIVE
    assert pool.kinds("gpu0") == ["device.draining", "device.quarantined", "device.ready"]


def test_draining_leaves_live_leases_alone(pool: Rig) -> None:
    answer = pool.ask(10)
    pool.ledger.set_device("gpu0", state="draining", note="", actor="root")
    pool.ledger.tick()
    assert pool.ledger.renew(pool.key(answer)).lease.state is LeaseState.ACTIVE


def test_a_warden_sees_what_it_must_enforce(pool: Rig) -> None:
    """K3."""
    here = pool.ask(10, pid=42)
    pool.ask(10, pid=43, host="node-b")
    ended = pool.ask(10, pid=44)
    pool.ledger.end(ended.lease.id, ended.lease.epoch, reason=EndReason.HOLDER_LOST, detail="gone")
    released = pool.ask(10, pid=45)
    pool.release(released)
    waiter = pool.ask(80, pid=46)
    view = pool.ledger.host_view(HERE)
    assert {x.id for x in view.leases} == {here.lease.id, ended.lease.id, waiter.lease.id}
    assert view.at >= here.at


# --- tenants, policy -----------------------------------------------------------------------------------------


def test_tenants(pool: Rig) -> None:
    made = pool.ledger.add_tenant(Tenant(name="eve", weight=50, max_leases=2), actor="root")
    assert (made.weight, made.max_leases, made.live_leases) == (50, 2, 0)
    with pool.only_journals(), pytest.raises(BadInput, match="exists"):
        pool.tenant("eve")
    with pool.only_journals():
        assert pool.ledger.add_tenant(Tenant(name="eve", weight=7), actor="root", exist_ok=True).weight == 50
    changed = pool.ledger.set_tenant("eve", actor="root", weight=60, max_vram_bytes=5, max_waiting=3)
    assert (changed.weight, changed.max_leases, changed.max_vram_bytes, changed.max_waiting) == (60, 2, 5, 3)
    assert pool.ledger.set_tenant("eve", actor="root", max_leases=0).max_leases == 0
    assert [t.name for t in pool.ledger.tenants()] == ["ada", "bob", "eve"]
    assert pool.kinds("eve") == ["tenant.added", "tenant.changed", "tenant.changed"]
    pool.ledger.remove_tenant("eve", actor="root")
    with pytest.raises(NotFound):
        pool.ledger.tenant("eve")


def test_bad_tenants(pool: Rig) -> None:
    with pool.only_journals():
        for bad in (Tenant(name="no name"), Tenant(name="x", weight=0), Tenant(name="x", max_leases=-1)):
            with pytest.raises(BadInput):
                pool.ledger.add_tenant(bad, actor="root")
        with pytest.raises(BadInput):
            pool.ledger.set_tenant("ada", actor="root", weight=0)
        for call in (pool.ledger.set_tenant, pool.ledger.remove_tenant):
            with pytest.raises(NotFound):
                call("nobody", actor="root")
    answer = pool.ask(10)
    with pool.only_journals(), pytest.raises(BadInput, match="still holds 1"):
        pool.ledger.remove_tenant("ada", actor="root")
    pool.release(answer)


def test_use_is_counted_and_decays(pool: Rig) -> None:
    answer = pool.ask(40)
    pool.advance(10 * MINUTE)
    pool.release(answer)
    used = pool.ledger.tenant("ada").used_us
    assert abs(used - 5 * MINUTE) < 5 * SECOND  # half a device for ten minutes
    pool.advance(pool.ledger.policy().half_life_us)
    pool.release(pool.ask(40))
    assert abs(pool.ledger.tenant("ada").used_us - used // 2) < 5 * SECOND


def test_policy_is_kept_and_journalled(pool: Rig) -> None:
    pool.policy(grace_us=7 * SECOND, strict_hold=True)
    assert pool.ledger.policy().grace_us == 7 * SECOND
    assert pool.open().policy() == pool.ledger.policy()
    assert pool.kinds("policy") == ["policy.set"]


# --- progress ------------------------------------------------------------------------------------------------


def test_reserving_an_effect(pool: Rig) -> None:
    answer = pool.ask(10)
    key = pool.key(answer)
    wanted = {"effect": "train:1", "job": "train", "fingerprint": "print-1"}
    assert pool.ledger.reserve(key, **wanted) == Reserved(key.epoch, taken_over=False)
    assert pool.ledger.reserve(key, **wanted) == Reserved(key.epoch, taken_over=False)
    effect = pool.ledger.effect("train:1")
    assert (effect.owner, effect.epoch, effect.completed) == (answer.lease.id, key.epoch, False)
    assert pool.kinds("train:1") == ["effect.reserved"] * 2
    assert pool.ledger.effect("train:2") is None


@pytest.mark.parametrize("before", [0, 2])
def test_a_live_owner_is_busy_and_a_dead_one_is_taken_over(pool: Rig, before: int) -> None:
    """S4, for the first commit of a job and for the hot ones after it."""
    first, second = pool.ask(10), pool.ask(10)
    for done in range(1, before + 1):
        pool.commit(first, done)
    step = before + 1
    wanted = {"effect": f"train:{step}", "job": "train", "fingerprint": f"print-{step}"}
    pool.ledger.reserve(pool.key(first), **wanted)
    with pool.only_journals("effect.refused"), pytest.raises(EffectBusy):
        pool.ledger.reserve(pool.key(second), **wanted)
    with pool.only_journals("step.refused"), pytest.raises(EffectBusy):
        pool.commit(second, step)
    pool.release(first)
    assert pool.ledger.reserve(pool.key(second), **wanted) == Reserved(second.lease.epoch, taken_over=True)
    assert pool.commit(second, step) == Committed(step)
    with pytest.raises(Fenced):
        pool.commit(first, step + 1)


@pytest.mark.parametrize("before", [0, 2])
def test_a_reserved_effect_is_completed_by_its_commit(pool: Rig, before: int) -> None:
    """S1."""
    answer, other = pool.ask(10), pool.ask(10)
    for done in range(1, before + 1):
        pool.commit(answer, done)
    step = before + 1
    pool.ledger.reserve(pool.key(answer), effect=f"train:{step}", job="train", fingerprint=f"print-{step}")
    assert pool.commit(answer, step) == Committed(step)
    effect = pool.ledger.effect(f"train:{step}")
    assert (effect.completed, effect.outcome, effect.version) == (True, f"outcome-{step}", step)
    with pool.only_journals("step.duplicate"):
        assert pool.commit(other, step) == AlreadyCommitted(step, f"outcome-{step}")


def test_an_older_epoch_does_not_take_over(pool: Rig) -> None:
    old, new = pool.ask(10), pool.ask(10)
    wanted = {"effect": "train:1", "job": "train", "fingerprint": "print-1"}
    pool.ledger.reserve(pool.key(new), **wanted)
    pool.release(new)
    with pool.only_journals("effect.refused"), pytest.raises(Fenced):
        pool.ledger.reserve(pool.key(old), **wanted)


def test_reserving_with_other_inputs_or_after_completion(pool: Rig) -> None:
    answer = pool.ask(10)
    pool.commit(answer, 1)
    key = pool.key(answer)
    with pool.only_journals("effect.duplicate"):
        assert pool.ledger.reserve(
            key, effect="train:1", job="train", fingerprint="print-1"
        ) == AlreadyCommitted(1, "outcome-1")
    with pool.only_journals("effect.refused"), pytest.raises(FingerprintMismatch):
        pool.ledger.reserve(key, effect="train:1", job="train", fingerprint="other")
    with pool.only_journals(), pytest.raises(BadInput):
        pool.ledger.reserve(key, effect="x", job="a b", fingerprint="p")


def test_commits_are_in_order_and_complete(pool: Rig) -> None:
    """S1, S3."""
    answer = pool.ask(10)
    for step in range(1, 6):
        assert pool.commit(answer, step) == Committed(step)
        head, effect = pool.ledger.head("train"), pool.ledger.effect(f"train:{step}")
        assert (head.version, head.step, head.digest, head.cursor, head.epoch, head.tenant) == (
            step,
            step,
            f"digest-{step}",
            f"cursor-{step}",
            answer.lease.epoch,
            "ada",
        )
        assert (effect.completed, effect.outcome, effect.version) == (True, f"outcome-{step}", step)
        assert pool.look(answer).committed_at == head.committed_at
    assert pool.sql(
        "SELECT count(*) FROM journal WHERE strand = 'job:train' AND kind = 'step.committed'"
    ) == [(5,)]
    assert pool.ledger.head("other") is None
    assert pool.faults() == []


@pytest.mark.parametrize("step", [1, 3])
def test_the_same_commit_again_is_answered_again(pool: Rig, step: int) -> None:
    """S4, S5: by its own holder `Committed`, by another one `AlreadyCommitted` with the stored outcome."""
    first, second = pool.ask(10), pool.ask(10)
    for done in range(1, step + 1):
        pool.commit(first, done)
    with pool.only_journals("step.duplicate"):
        assert pool.commit(first, step) == Committed(step)
        assert pool.commit(second, step, outcome="mine") == AlreadyCommitted(step, f"outcome-{step}")
    pool.release(first)
    with pool.only_journals():
        assert pool.commit(first, step) == Committed(step)  # it learns the truth although it is over


@pytest.mark.parametrize("step", [1, 2, 3])
def test_the_same_key_with_other_inputs_is_refused(pool: Rig, step: int) -> None:
    """S4."""
    answer = pool.ask(10)
    for done in range(1, step + 1):
        pool.commit(answer, done)
    with pool.only_journals("step.refused"), pytest.raises(FingerprintMismatch):
        pool.commit(answer, step, fingerprint="other")


def test_a_completed_key_is_not_done_again_as_the_next_step(pool: Rig) -> None:
    """S4 alone, with the compare-and-swap satisfied: nothing but the effect row stands in the way."""
    answer = pool.ask(10)
    pool.commit(answer, 1)
    pool.commit(answer, 2)
    with pool.only_journals("step.duplicate"):
        assert pool.commit(answer, 3, key="train:1", fingerprint="print-1") == AlreadyCommitted(
            1, "outcome-1"
        )


@pytest.mark.parametrize(
    "over",
    [
        {"expected_version": 1},
        {"expected_version": 3},
        {"step": 2},
        {"step": 4},
    ],
)
def test_a_commit_that_does_not_follow_is_refused(pool: Rig, over: dict[str, int]) -> None:
    """S3: the key is new and the fence holds, so only the compare-and-swap refuses."""
    answer = pool.ask(10)
    pool.commit(answer, 1)
    pool.commit(answer, 2)
    with pool.only_journals("step.refused"), pytest.raises(HeadMoved) as raised:
        pool.commit(answer, **{"step": 3, "expected_version": 2, "key": "new", **over})
    assert raised.value.version == 2


def test_the_first_step_is_one(pool: Rig) -> None:
    answer = pool.ask(10)
    with pool.only_journals("step.refused"), pytest.raises(HeadMoved):
        pool.commit(answer, 2, expected_version=0)
    with pytest.raises(BadInput):
        a_step(0)
    with pool.only_journals(), pytest.raises(BadInput):
        pool.commit(answer, 1, job="../x")


@pytest.mark.parametrize("steps_before", [0, 1, 2])
@pytest.mark.parametrize("how", ["expired", "ended", "wrong epoch", "wrong secret", "unknown"])
def test_a_fenced_holder_cannot_commit(pool: Rig, how: str, steps_before: int) -> None:
    """S2, for the first commit of a job and for the hot ones after it; the refusal is in the journal (A1)."""
    answer = pool.ask(10)
    for done in range(1, steps_before + 1):
        pool.commit(answer, done)
    key, error, journalled = pool.key(answer), Fenced, ["step.refused"]
    if how == "expired":
        pool.advance(5 * MINUTE)
    elif how == "ended":
        pool.release(answer)
    elif how == "wrong epoch":
        key = replace(key, epoch=key.epoch + 1)
    elif how == "wrong secret":
        key, error, journalled = replace(key, secret="x"), LeaseLost, []
    else:
        key, error, journalled = replace(key, lease_id="nobody"), LeaseLost, []
    with pool.only_journals(*journalled), pytest.raises(error):
        pool.ledger.commit(key, a_step(steps_before + 1))
    with pool.only_journals(*(["effect.refused"] if journalled else [])), pytest.raises(error):
        pool.ledger.reserve(key, effect="train:9", job="train", fingerprint="p")


def test_an_older_epoch_cannot_commit_after_a_newer_one(pool: Rig) -> None:
    """S2: both leases live, and still only the newer epoch writes."""
    old, new = pool.ask(10), pool.ask(10)
    pool.commit(old, 1)
    assert pool.commit(new, 2) == Committed(2)
    with pool.only_journals("step.refused"), pytest.raises(Fenced, match="was committed by epoch"):
        pool.commit(old, 3)


@pytest.mark.parametrize("step", [2, 3])
def test_another_tenants_job_is_not_there(pool: Rig, step: int) -> None:
    """T1."""
    mine, theirs = pool.ask(10), pool.ask(10, tenant="bob")
    for done in range(1, step):
        pool.commit(mine, done)
    head = pool.ledger.head("train")
    with pytest.raises(SubletError):
        pool.commit(theirs, step)
    assert pool.ledger.head("train") == head


# --- meter ---------------------------------------------------------------------------------------------------


def test_usage_is_the_time_held_exactly(pool: Rig) -> None:
    """T4."""
    pool.devices({"gpu0": 80, "gpu1": 80})
    answer = pool.ask(30, count=2, job="train", tier=Tier.BATCH)
    pool.advance(90 * SECOND)
    pool.release(answer)
    lease = pool.look(answer)
    [usage] = pool.ledger.usage()
    assert (usage.from_at, usage.to_at) == (lease.granted_at, lease.ended_at)
    held = usage.to_at - usage.from_at
    assert held >= 90 * SECOND
    assert usage.gpu_us == 2 * held
    assert usage.vram_byte_s == 60 * held // SECOND
    assert (usage.tenant, usage.tier, usage.job, usage.reason) == ("ada", "batch", "train", "released")


def test_time_after_the_right_ended_is_not_billed(pool: Rig) -> None:
    """T4."""
    expired, revoked = pool.ask(10, pid=1), pool.ask(10, pid=2)
    deadline = _revoke(pool, revoked, 10 * SECOND).lease.deadline_at
    pool.advance(20 * MINUTE)
    pool.ledger.tick()
    pool.advance(20 * MINUTE)
    for x in (expired, revoked):
        pool.ledger.settle(x.lease.id, x.lease.epoch, GONE)
    ends = {u.lease_id: u.to_at for u in pool.ledger.usage()}
    assert ends == {expired.lease.id: expired.lease.expires_at, revoked.lease.id: deadline}
    assert all(u.gpu_us == u.to_at - u.from_at for u in pool.ledger.usage())


def test_a_lease_is_metered_once(pool: Rig) -> None:
    """T4."""
    answer = pool.ask(10, pid=1)
    pool.advance(MINUTE)
    pool.ledger.end(answer.lease.id, answer.lease.epoch, reason=EndReason.HOLDER_LOST, detail="gone")
    pool.ledger.settle(answer.lease.id, answer.lease.epoch, GONE)
    pool.release(answer)
    assert len(pool.ledger.usage()) == 1
    assert pool.ledger.usage(tenant="bob") == []
    assert len(pool.ledger.usage(tenant="ada")) == 1
    assert pool.ledger.usage(since=pool.ledger.now() + MINUTE) == []


# --- journal, engine -----------------------------------------------------------------------------------------


def test_the_tail_and_a_seal(pool: Rig) -> None:
    answer = pool.ask(10)
    pool.commit(answer, 1)
    newest = pool.ledger.tail(limit=3)
    assert [entry.kind for _, entry in newest] == ["lease.granted", "job.started", "step.committed"]
    assert pool.ledger.tail(after=newest[-1][0]) == []
    sealed = pool.ledger.seal()
    [(number, entry)] = pool.ledger.tail(after=newest[-1][0])
    assert (entry.kind, entry.hash) == ("journal.sealed", sealed)
    assert pool.ledger.tail(after=number - 1) == [(number, entry)]
    everything = pool.ledger.tail(after=0, limit=1000)
    assert [i for i, _ in everything] == sorted(i for i, _ in everything)
    assert everything[0][1].kind == "tenant.added"
    assert pool.ledger.tail(after=0, limit=2) == everything[:2]
    verified = pool.ledger.verify()
    assert (verified.head, verified.faults) == (sealed, ())
    assert verified.strands == 3  # main, the lease, the job
    assert verified.rows == pool.sql("SELECT count(*) FROM journal")[0][0]


def test_after_a_restore_no_old_holder_writes(pool: Rig) -> None:
    """L1: whatever the lost days granted, no epoch comes twice."""
    holder, by_process = pool.ask(30), pool.ask(30, pid=7)
    waiter = pool.ask(80, tenant="bob")
    pool.commit(holder, 1)
    incarnation = pool.sql("SELECT value FROM meta WHERE key = 'incarnation'")
    assert pool.ledger.mark_restored(actor="root") == 3
    assert pool.sql("SELECT value FROM meta WHERE key = 'incarnation'") != incarnation
    for gone in (holder, by_process, waiter):
        assert pool.look(gone).state is LeaseState.ENDED
    assert not pool.look(by_process).settled_at  # its process may still be there
    for zombie in (holder, by_process):
        with pytest.raises(Fenced):
            pool.commit(zombie, 2)
        with pytest.raises(LeaseLost):
            pool.ledger.renew(pool.key(zombie))
    fresh = pool.ask(30)
    assert fresh.lease.epoch > holder.lease.epoch + EPOCH_GAP
    assert pool.commit(fresh, 2) == Committed(2)
    assert pool.ledger.tenant("bob").waiting == 0
    assert pool.faults() == []


def test_a_restore_with_an_open_offer(pool: Rig) -> None:
    pool.ask(60, lease_id="holds")
    pool.ask(40, tenant="bob", wants_offers=True, lease_id="a-offered")
    pool.ask(20, tenant="bob", lease_id="b-waits")
    assert pool.look("a-offered").slices
    assert pool.ledger.mark_restored(actor="root") == 3
    assert pool.sql("SELECT waiting FROM pool") == [(0,)]
    assert pool.sql("SELECT count(*) FROM slice") == [(0,)]
    assert [d.free_bytes for d in pool.ledger.devices()] == [80]
    assert pool.ledger.tenant("bob").live_leases == 0


def test_the_engine_describes_itself(pool: Rig) -> None:
    told = pool.ledger.describe()
    assert told["engine"].startswith("SQLite" if pool.engine == "sqlite" else "PostgreSQL")
    assert told["schema"].isdigit()
    pool.ledger.barrier()
    at = pool.ask(1).at
    assert pool.ledger.now() >= at


def test_a_bell_rings_for_the_waiter(pool: Rig) -> None:
    holder = pool.ask(80)
    waiter = pool.ask(80, tenant="bob")
    bell = pool.ledger.bell()
    try:
        bell.listen(f"lease:{waiter.lease.id}")
        while bell.wait(50_000):  # the first wait may answer at once
            pass
        pool.release(holder)
        assert bell.wait(2 * SECOND)
    finally:
        bell.close()
        bell.close()


def test_a_closed_ledger_says_so(pool: Rig) -> None:
    other = pool.open()
    other.tenants()
    other.close()
    with pytest.raises(SubletError) as raised:
        other.tenants()
    assert raised.value.code == "disconnected"


def test_heads_are_listed_by_name(pool: Rig) -> None:
    ada, bob = pool.ask(10), pool.ask(10, tenant="bob")
    assert pool.ledger.heads() == []
    pool.commit(ada, 1, job="zebra")
    pool.commit(bob, 1, job="ant")
    pool.commit(ada, 2, job="zebra", expected_version=1)
    assert [(h.job, h.tenant, h.version) for h in pool.ledger.heads()] == [
        ("ant", "bob", 1),
        ("zebra", "ada", 2),
    ]
    assert [h.job for h in pool.ledger.heads(tenant="ada")] == ["zebra"]


# --- seat ----------------------------------------------------------------------------------------------------


def test_a_lease_asked_for_by_name_is_seated_where_its_device_is(pool: Rig) -> None:
    """K1, A1: from then on it is the process's, watched by that host's warden and not settled without it."""
    answer = pool.ask(10, host="driver")
    process = Holder(host=HERE, pid=42, started=7)
    seated = pool.ledger.seat(pool.key(answer), process)
    assert seated.lease.holder == process
    assert pool.look(answer).holder == process
    assert pool.kinds(answer.lease.id) == ["lease.granted", "lease.seated"]
    assert [x.id for x in pool.ledger.host_view(HERE).leases] == [answer.lease.id]
    assert pool.ledger.host_view("driver").leases == ()
    assert pool.ledger.seat(pool.key(answer), process).lease.holder == process, "repeating it is fine"
    assert pool.kinds(answer.lease.id) == ["lease.granted", "lease.seated"]
    pool.advance(6 * MINUTE)
    pool.ledger.tick(HERE)
    ended = pool.look(answer)
    assert ended.state is LeaseState.ENDED
    assert not ended.settled_at, "its process may live: only a warden can say"
    assert pool.ledger.devices()[0].free_bytes == 70


def test_a_lease_that_was_never_seated_is_free_when_it_runs_out(pool: Rig) -> None:
    answer = pool.ask(10, host="driver")
    pool.advance(6 * MINUTE)
    pool.ledger.tick(HERE)
    assert pool.look(answer).settled_at
    assert pool.ledger.devices()[0].free_bytes == 80
    with pytest.raises(LeaseLost, match="has no place"):
        pool.ledger.seat(pool.key(answer), Holder(host=HERE, pid=42, started=7))
    assert pool.look(answer).holder == Holder(host="driver")


def test_who_may_not_be_seated_changes_nothing(pool: Rig) -> None:
    """L1, T1: not by another secret, not on another host, not in another's place."""
    answer = pool.ask(10, host="driver")
    key = pool.key(answer)
    for refused, holder in (
        (LeaseKey(key.lease_id, key.epoch, "wrong"), Holder(host=HERE, pid=42, started=7)),
        (LeaseKey(key.lease_id, key.epoch + 1, key.secret), Holder(host=HERE, pid=42, started=7)),
        (key, Holder(host="elsewhere", pid=42, started=7)),
        (key, Holder(host=HERE)),
    ):
        with pytest.raises(LeaseLost):
            pool.ledger.seat(refused, holder)
        assert pool.look(answer).holder == Holder(host="driver")
    pool.ledger.seat(key, Holder(host=HERE, pid=42, started=7))
    with pytest.raises(LeaseLost, match="process 42"):
        pool.ledger.seat(key, Holder(host=HERE, pid=43, started=7))
    assert pool.look(answer).holder.pid == 42
