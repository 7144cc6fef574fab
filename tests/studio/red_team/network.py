"""Attacks by network: the studio's own port, the addresses of metadata, the host below the machine."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping
from typing import Any

from tests.studio.red_team.registry import attack

Facts = Mapping[str, Any]
#: A packet that is dropped is answered by nobody, and one to where no route leads at once.
_SECONDS = 0.4
_METADATA = {
    "of most clouds": "169.254.169.254",
    "of most clouds, as IPv6": "::ffff:169.254.169.254",
    "of AWS, by IPv6": "fd00:ec2::254",
    "of Alibaba": "100.100.100.200",
    "of Azure": "168.63.129.16",
    "of containers on AWS": "169.254.170.2",
}


def _outcome(host: str, port: int, kind: int = socket.SOCK_STREAM, protocol: int = 0) -> int:
    """0: connected. EPERM: refused by the guard. Anything else is the network's answer."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, kind, protocol) as sock:
        sock.settimeout(_SECONDS)
        try:
            sock.connect((host, port))
            if kind == socket.SOCK_DGRAM:
                sock.send(b"x")
        except TimeoutError:
            return errno.ETIMEDOUT
        except OSError as e:
            return e.errno or -1
    return 0


def _leaves(host: str, port: int, kind: int = socket.SOCK_STREAM) -> str:
    """Whether it is given to the network at all: what a cloud would answer cannot be seen here."""
    code = _outcome(host, port, kind)
    return "" if code in (errno.EPERM, errno.EACCES) else f"it was sent ({errno.errorcode.get(code, code)})"


for _of, _host in _METADATA.items():

    @attack(f"metadata {_of}", f"ask {_host} for the machine's credentials")
    def _(facts: Facts, host: str = _host) -> Any:
        return _leaves(host, 80)


@attack("metadata by datagram", "send a datagram to the address of metadata")
def _(facts: Facts) -> Any:
    return _leaves("169.254.169.254", 80, socket.SOCK_DGRAM)


@attack("studio's port", "connect to the studio itself from inside")
def _(facts: Facts) -> Any:
    return _outcome("127.0.0.1", facts["port"]) == 0 and "connected"


@attack("studio's port by another address", "connect to the studio by another loopback address")
def _(facts: Facts) -> Any:
    return 0 in (_outcome("127.0.0.1", facts["port"]), _outcome("0.0.0.0", facts["port"])) and "connected"


@attack("studio's port as IPv6", "connect to the studio by an address that is mapped")
def _(facts: Facts) -> Any:
    return _outcome("::ffff:127.0.0.1", facts["port"]) == 0 and "connected"


@attack("studio's port by another protocol", "connect to the studio by Multipath TCP")
def _(facts: Facts) -> Any:
    return _outcome("127.0.0.1", facts["port"], protocol=262) == 0 and "connected"


@attack("local service", "connect to another service of this host")
def _(facts: Facts) -> Any:
    return _outcome("127.0.0.1", facts["local_port"]) == 0 and "connected"


@attack("raw packets", "see and send packets below every protocol")
def _(facts: Facts) -> Any:
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW):
        return "a socket"


@attack("raw IP", "send packets of its own making")
def _(facts: Facts) -> Any:
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_UDP):
        return "a socket"


@attack("host below the machine", "open a socket to the hypervisor")
def _(facts: Facts) -> Any:
    with socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM):
        return "a socket"


@attack("low port", "listen on a port that only the system may have")
def _(facts: Facts) -> Any:
    for port in range(1000, 1020):
        with socket.socket() as sock:
            try:
                sock.bind(("127.9.9.9", port))
            except OSError as e:
                if e.errno == errno.EADDRINUSE:
                    continue
                raise
            return port
    return ""


@attack("neighbour's port", "connect to a port on which another tenant's session listens")
def _(facts: Facts) -> Any:
    return _outcome("127.0.0.1", facts["their_port"]) == 0 and "connected"
