"""Hosts that reach a server by a wire of their own, which can be cut: each is a network namespace with one end of a veth pair.

Rules of this file:
- A cut says nothing. Packets leave and never arrive, as through a switch that lost its power: the neighbour's hardware address is set to nobody's.
  So a cut may be of one direction only: the server does what was asked, and its answers are lost; or it hears nothing, and could still speak.
- `loud` takes the link down: the kernel tells whoever sends at once.
- Everything is made under names of this process, and removed with it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

SERVER = "10.77.0.1"
NOBODY = "02:00:00:00:00:ff"
#: What is lost, by the ends whose packets find nobody.
CUTS = {"requests": ("host",), "answers": ("server",), "both": ("host", "server"), "loud": ()}
_made = itertools.count(1)


def possible() -> bool:
    """Whether this process may make network namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("nsenter") is None:
        return False
    name = f"sublet-{os.getpid()}-try"
    try:
        ip("netns", "add", name)
        ip("netns", "del", name)
    except subprocess.CalledProcessError:
        return False
    return True


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, stdin=subprocess.DEVNULL)


class Wire:
    """Between the server and one host."""

    def __init__(self, server: str, host: str, number: int) -> None:
        self.server, self.host = server, host
        self.near, self.far = f"10.77.{number}.1", f"10.77.{number}.2"
        self.port = f"wire{number}"
        ip("link", "add", self.port, "netns", server, "type", "veth", "peer", "name", "wire", "netns", host)
        ip("-n", server, "addr", "add", f"{self.near}/24", "dev", self.port)
        ip("-n", host, "addr", "add", f"{self.far}/24", "dev", "wire")
        self._up()

    def _up(self) -> None:
        ip("-n", self.host, "link", "set", "lo", "up")
        ip("-n", self.server, "link", "set", self.port, "up")
        ip("-n", self.host, "link", "set", "wire", "up")
        ip("-n", self.host, "route", "replace", SERVER, "via", self.near)

    @property
    def ends(self) -> dict[str, tuple[str, ...]]:
        """By whose packets: the namespace, its neighbour and the device."""
        return {
            "host": ("-n", self.host, "neigh", self.near, "wire"),
            "server": ("-n", self.server, "neigh", self.far, self.port),
        }

    def cut(self, how: str) -> None:
        for end in CUTS[how]:
            option, where, what, neighbour, device = self.ends[end]
            ip(option, where, what, "replace", neighbour, "lladdr", NOBODY, "dev", device, "nud", "permanent")
        if how == "loud":
            ip("-n", self.server, "link", "set", self.port, "down")

    def heal(self) -> None:
        for option, where, what, neighbour, device in self.ends.values():
            with contextlib.suppress(subprocess.CalledProcessError):  # that end was not cut
                ip(option, where, what, "del", neighbour, "dev", device)
        self._up()

    def command(self, *words: str) -> list[str]:
        """That runs on the host."""
        return ["nsenter", f"--net={path(self.host)}", "--", *words]


def path(namespace: str) -> Path:
    return Path("/run/netns") / namespace


@contextlib.contextmanager
def wires(many: int) -> Iterator[tuple[Path, list[Wire]]]:
    """The server's namespace, and its hosts' wires."""
    prefix = f"sublet-{os.getpid()}-{next(_made)}"
    names = [f"{prefix}-server", *(f"{prefix}-{number}" for number in range(1, many + 1))]
    try:
        for name in names:
            ip("netns", "add", name)
        server, *hosts = names
        ip("-n", server, "link", "set", "lo", "up")
        ip("-n", server, "addr", "add", f"{SERVER}/32", "dev", "lo")
        yield path(server), [Wire(server, host, number) for number, host in enumerate(hosts, 1)]
    finally:
        for name in names:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)


def reaches(wire: Wire, port: int, seconds: float = 2.0) -> bool:
    """Whether a host gets an answer of the server."""
    code = f"import socket; socket.create_connection(({SERVER!r}, {port}), {seconds}).close()"
    return subprocess.run(wire.command("python3", "-c", code), capture_output=True).returncode == 0


def listener(network: Path) -> subprocess.Popen[bytes]:
    """A server that takes any connection, for `reaches`; its port is 7777."""
    code = f"import socket\ns = socket.create_server(({SERVER!r}, 7777))\nprint(flush=True)\nwhile True: s.accept()[0].close()"
    started = subprocess.Popen(
        ["nsenter", f"--net={network}", "--", "python3", "-u", "-c", code], stdout=subprocess.PIPE
    )
    assert started.stdout is not None
    started.stdout.readline()
    return started
