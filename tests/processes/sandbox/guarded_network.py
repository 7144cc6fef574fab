"""A network namespace of its own with metadata addresses in it, and a guarded group: what is refused there, as
JSON. Runs as root."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

from sublet.processes.sandbox.containment import Group
from sublet.processes.sandbox.network_guard import enter_empty_network, guard_network, listening_ports

ADDRESSES = ("169.254.169.254/32", "100.100.100.200/32", "192.0.2.9/32", "fd00:ec2::254/128")
SERVICE, OTHER, WEB, NAMES = 8700, 9000, 80, 53
MPTCP = 262


def _tcp(host: str, port: int, protocol: int = 0) -> str:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM, protocol) as sock:
            sock.settimeout(2)  # a packet that is dropped is answered by nobody
            sock.connect((host, port))
    except PermissionError:
        return "refused"
    except TimeoutError:
        return "dropped"
    except OSError as e:
        return f"{type(e).__name__}"
    return "reached"


def _udp(host: str, port: int) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.sendto(b"x", (host, port))
        except PermissionError:
            return "refused"
    return "reached"


def looked_around() -> dict[str, str]:
    found = {f"{host} {port}": _tcp(host, port) for host in HOSTS for port in (SERVICE, OTHER, WEB, NAMES)}
    for host in ("127.0.0.1", "169.254.169.254"):
        found |= {f"udp {host} {port}": _udp(host, port) for port in (OTHER, NAMES)}
        found[f"mptcp {host} {SERVICE}"] = _tcp(host, SERVICE, MPTCP)
    return found


HOSTS = (
    "127.0.0.1",
    "127.9.9.9",
    "192.0.2.9",
    "169.254.169.254",
    "100.100.100.200",
    "::1",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "fd00:ec2::254",
)


def main() -> None:
    enter_empty_network()
    for address in ADDRESSES:
        subprocess.run(["ip", "addr", "add", address, "dev", "lo"], check=True)
    listening = []
    for port in (SERVICE, OTHER, WEB, NAMES):
        sock = socket.socket(socket.AF_INET6)
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(("::", port))
        sock.listen(100)
        listening.append(sock)
    group = Group.make(f"sublet-guarded-{os.getpid()}")
    assert group is not None
    try:
        guard_network(group.path, [SERVICE])
        child = os.fork()
        if child == 0:
            group.join()
            print(json.dumps({"found": looked_around(), "listening": sorted(listening_ports())}), flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        print(json.dumps(looked_around()))  # whoever is not in the group is not guarded
    finally:
        group.remove()


if __name__ == "__main__":
    sys.exit(main())
