"""What a tenant's worker may reach over the network.

Rules of this file:
- `guarded`, the default: the internet, and its own processes. Not the addresses at which clouds give out
  credentials of the machine, and not the services of this host: the studio's own port is one of them.
- `none`: a network of its own in which there is nobody else. `open`: all that the host reaches.
- Names are still looked up: the resolver's port stays open at every address.
- A policy that was asked for and cannot be had is said in words; without `none` nothing begins.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum
from ipaddress import IPv4Network, IPv6Network

from sublet.core.errors import Misconfigured
from sublet.core.studio.own_uid import IsolationRefusal

DNS_PORT = 53
#: More services than a host has.
PORTS_MOST = 4000
#: Where AWS, GCE, Azure, Alibaba, Oracle and OpenStack describe a machine, with its credentials.
METADATA_V4 = tuple(
    IPv4Network(text)
    for text in ("169.254.0.0/16", "168.63.129.16/32", "100.100.100.200/32", "192.0.0.192/32")
)
METADATA_V6 = tuple(IPv6Network(text) for text in ("fd00:ec2::/32", "fd20:ce::254/128"))
LOOPBACK_V4 = IPv4Network("127.0.0.0/8")
LOOPBACK_V6 = IPv6Network("::1/128")

GUARDED_WORDS = "guarded network"
NONE_WORDS = "no network"
OPEN_WORDS = "open network"


class NetworkPolicy(Enum):
    GUARDED = "guarded"
    NONE = "none"
    OPEN = "open"


def network_policy(said: str) -> NetworkPolicy:
    try:
        return NetworkPolicy(said.strip() or NetworkPolicy.GUARDED.value)
    except ValueError:
        raise Misconfigured(
            f"there is no network policy {said[:40]!r}",
            remedy="set SUBLET_TENANT_NETWORK to guarded, none or open",
        ) from None


def closed_ports(listening: Collection[tuple[int, int]], own_uid: int | None) -> list[int]:
    """The ports to close, of (port, uid) that somebody of this host listens on: all but the tenant's own.
    Services come first, because tenants, whose uids are higher, may listen on any number of them."""
    others = sorted((uid, port) for port, uid in listening if uid != own_uid and port != DNS_PORT)
    return list(dict.fromkeys(port for _, port in others))[:PORTS_MOST]


def not_cut_off(what: str) -> IsolationRefusal:
    return IsolationRefusal(
        reason=f"its worker was to have no network, and cannot be given one of its own ({what}), so it was "
        "not started, and nothing ran",
        remedy="let the service make network namespaces, or set SUBLET_TENANT_NETWORK to guarded or open",
    )
