"""Silent hosts: what is lost, what may move, what is given up, and never a moment too soon."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sublet.core.leasing.hosts import (
    Host,
    HostLoss,
    HostStays,
    Moves,
    common_silence_us,
    given_up,
    gone,
    losses,
    may_move,
    silent,
)
from sublet.core.leasing.lease import Holder, LeaseRecord, LeaseState, Request
from sublet.core.leasing.policy import Policy
from sublet.core.scheduling.device import Device, DeviceState
from sublet.core.values import SECOND_US

POLICY = Policy(host_silence_us=30 * SECOND_US, host_gone_us=600 * SECOND_US)
NOW = 10_000 * SECOND_US
HEARD = Host(name="a", seen_at=NOW - POLICY.host_silence_us)
SILENT = Host(name="a", seen_at=HEARD.seen_at - 1)
GONE = Host(name="a", seen_at=NOW - POLICY.host_gone_us - 1)
DEVICE = Device(id="gpu0", host="a", driver="host", ordinal=0, name="", capacity_bytes=9, free_bytes=9)
ENDED = LeaseRecord(
    id="L1",
    request=Request(tenant="t", vram_bytes=1, ttl_us=SECOND_US),
    holder=Holder(host="a", pid=7, started=1),
    state=LeaseState.ENDED,
    expires_at=NOW - 1,
)


def test_silence_is_longer_than_the_policy_says_and_not_a_moment_less() -> None:
    assert not silent(HEARD, POLICY.host_silence_us, NOW)
    assert silent(SILENT, POLICY.host_silence_us, NOW)
    assert silent(None, POLICY.host_silence_us, NOW)


def test_the_silent_lose_their_devices_in_the_order_of_their_names_and_whoever_asks_is_heard() -> None:
    hosts = [Host(name="c", seen_at=0), replace(HEARD, name="b"), SILENT]
    assert losses(hosts, "x", POLICY, NOW) == [
        HostLoss(host="a", reason="its warden is silent"),
        HostLoss(host="c", reason="its warden is silent"),
    ]
    assert [loss.host for loss in losses(hosts, "c", POLICY, NOW)] == ["a"]


def test_a_device_stays_while_its_warden_is_heard() -> None:
    said = may_move(DEVICE, HEARD, POLICY, NOW)
    assert isinstance(said, HostStays)
    assert said.reason == "device gpu0 already belongs to host a, whose warden is running"
    assert "SUBLET_HOST" in said.remedy


def test_a_device_moves_from_one_that_is_silent_unknown_or_does_not_report_it() -> None:
    for device, owner, why in [
        (DEVICE, SILENT, "is silent"),
        (DEVICE, None, "is silent"),
        (replace(DEVICE, state=DeviceState.LOST, note="not reported"), HEARD, "does not report it any more"),
    ]:
        said = may_move(device, owner, POLICY, NOW)
        assert said == Moves(
            state=DeviceState.READY, note="", reason=f"host a {why}, and nothing of it is left on the device"
        )


@pytest.mark.parametrize("state", [DeviceState.READY, DeviceState.LOST, DeviceState.QUARANTINED])
@pytest.mark.parametrize("owner", [SILENT, None, GONE])
def test_nothing_moves_with_a_lease_that_is_not_settled(state: DeviceState, owner: Host | None) -> None:
    """K1: nobody has seen what it left."""
    said = may_move(replace(DEVICE, state=state, leases=2), owner, POLICY, NOW)
    assert isinstance(said, HostStays)
    assert "2 lease(s) not settled" in said.reason
    assert "host_gone" in said.remedy


@pytest.mark.parametrize("state", [DeviceState.QUARANTINED, DeviceState.DRAINING])
def test_what_was_withheld_stays_withheld(state: DeviceState) -> None:
    said = may_move(replace(DEVICE, state=state, note="it smells"), SILENT, POLICY, NOW)
    assert isinstance(said, Moves)
    assert (said.state, said.note) == (state, "it smells")


def test_who_is_given_up() -> None:
    still = replace(GONE, seen_at=GONE.seen_at + 1)
    assert gone([GONE], "x", POLICY, NOW) == [GONE]
    assert gone([GONE], "a", POLICY, NOW) == []
    assert gone([still], "x", POLICY, NOW) == []


def test_what_is_over_on_a_host_that_is_gone_goes_back_unproven() -> None:
    assert given_up(ENDED, GONE, POLICY, NOW) == (
        "host a has been silent for 10m00s: nobody can see whether its processes are gone"
    )


@pytest.mark.parametrize(
    "lease",
    [
        replace(ENDED, state=LeaseState.ACTIVE),
        replace(ENDED, state=LeaseState.REVOKING),
        replace(ENDED, settled_at=1),
        replace(ENDED, expires_at=NOW),  # revoked; its holder may not have heard, and works until then (L6)
    ],
)
def test_what_is_not_over_is_left_alone(lease: LeaseRecord) -> None:
    """L6."""
    assert given_up(lease, GONE, POLICY, NOW) == ""
    assert given_up(ENDED, SILENT, POLICY, NOW) == ""


@given(st.integers(0, NOW), st.sampled_from(DeviceState), st.integers(0, 3))
def test_the_steps_come_one_after_the_other(seen_at: int, state: DeviceState, leases: int) -> None:
    """Who is given up is silent; what moves has no lease on it, and comes from a host that is silent or does not have it."""
    host = Host(name="a", seen_at=seen_at)
    if gone([host], "x", POLICY, NOW):
        assert losses([host], "x", POLICY, NOW)
    if isinstance(may_move(replace(DEVICE, state=state, leases=leases), host, POLICY, NOW), Moves):
        assert not leases
        assert losses([host], "x", POLICY, NOW) or state is DeviceState.LOST


def test_nobody_heard_is_longer_than_one_may_be_silent() -> None:
    """K1: one who is heard is enough for the silence of the others to count."""
    assert common_silence_us([GONE, HEARD], POLICY, NOW) == 0
    assert common_silence_us([GONE, SILENT], POLICY, NOW) == POLICY.host_silence_us + 1
    assert common_silence_us([], POLICY, NOW) == 0
    # Between two beats nobody is heard, however short a silence the policy bears.
    impatient = replace(POLICY, host_silence_us=SECOND_US)
    assert common_silence_us([replace(HEARD, seen_at=NOW - 2 * SECOND_US)], impatient, NOW) == 0
