"""What a tenant's worker reaches over the network: the internet and itself, and neither this host's services nor
what a cloud says of the machine. In network namespaces of their own, and on loopback.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sublet.core.studio.network_policy import GUARDED_WORDS, NONE_WORDS, OPEN_WORDS
from sublet.processes.sandbox import bpf, containment, network_guard
from tests.conftest import need
from tests.processes.conftest import REPOSITORY
from tests.processes.sandbox import guarded_network

SCRIPTS = Path(__file__).parents[1]


def _can_guard() -> bool:
    if os.getuid() != 0:
        return False
    group = containment.Group.make(f"sublet-trial-guard-{os.getpid()}")
    if group is None:
        return False
    try:
        network_guard.guard_network(group.path, [])
        return True
    except OSError:
        return False
    finally:
        group.remove()


def _said(*command: str) -> list[Any]:
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=170,
        cwd="/",
        env=dict(os.environ) | {"PYTHONPATH": f"{REPOSITORY}/src:{REPOSITORY}"},
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_in_a_guarded_group_metadata_and_services_are_refused_and_all_else_is_reached() -> None:
    need(_can_guard() and shutil.which("ip") is not None, "root with cgroup v2 and BPF, and the ip command")
    guarded, free = _said(str(SCRIPTS / "sandbox" / "guarded_network.py"))
    assert set(free.values()) == {"reached"}
    found = dict(guarded["found"])
    metadata = ("169.254.169.254", "100.100.100.200", "::ffff:169.254.169.254", "fd00:ec2::254")
    for host in guarded_network.HOSTS:
        service, other, web, names = (
            found.pop(f"{host} {port}")
            for port in (
                guarded_network.SERVICE,
                guarded_network.OTHER,
                guarded_network.WEB,
                guarded_network.NAMES,
            )
        )
        assert service in ("refused", "dropped")
        assert names == "reached"
        assert {other, web} == ({"refused"} if host in metadata else {"reached"}), host
    assert found == {
        "udp 127.0.0.1 9000": "reached",
        "udp 127.0.0.1 53": "reached",
        "udp 169.254.169.254 9000": "refused",
        "udp 169.254.169.254 53": "reached",
        "mptcp 127.0.0.1 8700": "refused",
        "mptcp 169.254.169.254 8700": "refused",
    }
    assert guarded["listening"] == [[port, 0] for port in (53, 80, 8700, 9000)]


@pytest.fixture
def far_home() -> Iterator[Path]:
    """Not below /tmp, which is covered anyway."""
    place = "/opt" if os.access("/opt", os.W_OK) else "/var/tmp"
    with tempfile.TemporaryDirectory(dir=place, prefix="sublet-test-") as made:
        os.chmod(made, 0o755)
        yield Path(made) / "home"


def _check_none(found: dict[str, Any]) -> None:
    """A network of its own, or no worker."""
    if "refused" in found["none"]:
        assert "was to have no network" in found["none"]["refused"]
        return
    assert NONE_WORDS in found["none"]["containment"]
    assert (found["none"]["service"], found["none"]["own"]) == (errno.ECONNREFUSED, 0)


def test_as_root_a_worker_reaches_its_own_sockets_and_not_those_of_this_hosts_services(
    far_home: Path,
) -> None:
    need(os.getuid() == 0, "root")
    (found,) = _said(str(SCRIPTS / "network_probe.py"), str(far_home))
    _check_none(found)
    assert OPEN_WORDS in found["open"]["containment"]
    assert (found["open"]["service"], found["open"]["own"]) == (0, 0)
    if not _can_guard():
        assert OPEN_WORDS in found["guarded"]["containment"]
        need(False, "cgroup v2 and BPF")
    assert GUARDED_WORDS in found["guarded"]["containment"]
    assert (found["guarded"]["service"], found["guarded"]["own"]) == (errno.EPERM, 0)


def test_as_a_user_what_is_not_guarded_is_said_to_be_open(far_home: Path) -> None:
    if os.getuid() == 0:
        uid = 54_322
        os.chown(far_home.parent, uid, uid)
        starts = [str(SCRIPTS / "as_user.py"), str(uid)]
    else:
        starts = []
    (found,) = _said(*starts, str(SCRIPTS / "network_probe.py"), str(far_home))
    assert found["uid"] != 0
    _check_none(found)
    assert OPEN_WORDS in found["guarded"]["containment"]
    assert (found["guarded"]["service"], found["guarded"]["own"]) == (0, 0)


def test_a_listener_is_found_with_its_user() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        assert (sock.getsockname()[1], os.getuid()) in network_guard.listening_ports()


def test_a_program_jumps_to_labels_that_come_later() -> None:
    program = bpf.BpfProgram()
    program.jump_if(1, 5, "yes")
    program.end(0)
    program.label("yes")
    program.end(1)
    code = program.assembled()
    assert len(code) == 5 * 8
    assert code[2:4] == (2).to_bytes(2, "little")
