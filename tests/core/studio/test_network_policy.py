"""What a tenant's worker may reach, by name."""

from __future__ import annotations

import pytest

from sublet.core.errors import Misconfigured
from sublet.core.studio.network_policy import PORTS_MOST, NetworkPolicy, closed_ports, network_policy


def test_a_policy_has_a_name_and_the_default_is_guarded() -> None:
    assert network_policy("") is NetworkPolicy.GUARDED
    assert [network_policy(policy.value) for policy in NetworkPolicy] == list(NetworkPolicy)
    with pytest.raises(Misconfigured, match="no network policy 'closed'"):
        network_policy("closed")


def test_all_ports_but_the_tenants_own_and_the_resolvers_are_closed() -> None:
    listening = [(8700, 0), (53, 0), (5432, 999), (6006, 700_001), (6007, 700_002), (8700, 1)]
    assert closed_ports(listening, 700_001) == [8700, 5432, 6007]
    assert closed_ports(listening, None) == [8700, 5432, 6006, 6007]


def test_a_tenant_with_many_listeners_does_not_open_a_services_port() -> None:
    many = [(port, 700_002) for port in range(1024, 60_000)]
    found = closed_ports([*many, (60_001, 0)], 700_001)
    assert found[0] == 60_001
    assert len(found) == PORTS_MOST
