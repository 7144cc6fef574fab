"""With SUBLET_URL set, what a program says about GPUs is said to the studio."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest

import sublet
from sublet.client.lease import RemoteLease
from sublet.core.errors import BadInput, Disconnected, Unauthorized
from sublet.functions import on_gpu
from sublet.leases import request
from tests.client.conftest import House, free_port, settled


@pytest.fixture
def routed(house: House, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("SUBLET_URL", house.url)
    monkeypatch.setenv("SUBLET_TOKEN", house.token())
    yield house
    on_gpu.release_warm()


def test_gpu_and_on_gpu_use_the_studio(routed: House) -> None:
    with sublet.gpu(vram="1GiB", ttl="1m") as lease:
        assert isinstance(lease, RemoteLease)
        assert lease.run(len, "abc") == 3
        assert [a.lease.id for a in routed.live_leases()] == [lease.id]

    @sublet.on_gpu(vram="2GiB", ttl="1m")
    def where(x: int) -> tuple[int, int, str]:
        lease = sublet.lease()
        return x, os.getpid(), lease.id

    x, pid, lease_id = where(7)
    assert x == 7
    assert pid != os.getpid()
    assert lease_id in {a.lease.id for a in routed.live_leases()}
    assert where(8)[1] == pid
    assert not os.path.exists("/nowhere")
    on_gpu.release_warm()
    settled(routed)


def test_on_gpu_in_the_studio_takes_a_new_one_when_the_last_was_taken(routed: House) -> None:
    @sublet.on_gpu(vram="1GiB", ttl="1m")
    def where() -> str:
        return sublet.lease().id

    first = where()
    routed.revoke(first, detail="ada needs it")
    settled(routed)
    assert where() != first


def test_a_wrong_token_and_a_wrong_address_say_what_to_do(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUBLET_URL", house.url)
    with pytest.raises(Unauthorized) as no_token:
        sublet.gpu()
    assert "SUBLET_TOKEN" in no_token.value.remedy
    monkeypatch.setenv("SUBLET_TOKEN", house.token()[:-4] + "0000")
    with pytest.raises(Unauthorized) as wrong:
        sublet.gpu()
    assert wrong.value.remedy
    monkeypatch.setenv("SUBLET_URL", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(Disconnected, match="there is no studio") as nowhere:
        sublet.gpu()
    assert "SUBLET_URL" in nowhere.value.remedy


def test_what_must_be_on_this_machine_stays_here(routed: House) -> None:
    with pytest.raises(BadInput, match="in a studio a worker"):
        sublet.gpu(holder="process")
    assert isinstance(request.local_gpu(), request.GpuRequest)


def test_a_program_on_a_laptop(routed: House) -> None:
    """In a process of its own, without a ledger, a warden or a device."""
    code = """
        import sublet

        @sublet.on_gpu(vram="1GiB", ttl="1m")
        def double(x):
            print("in the studio")
            return 2 * x

        print(double(21))
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SUBLET_")}
    environment |= {"SUBLET_URL": routed.url, "SUBLET_TOKEN": routed.token(), "HOME": "/nowhere"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True
    )
    assert done.stdout == "in the studio\n42\n", done.stderr
    settled(routed)


@pytest.mark.parametrize("words", [["-c", "import sublet"], ["-m", "sublet", "--help"]])
def test_neither_import_nor_help_pays_for_the_client(words: list[str]) -> None:
    """Beside a Python that imports what they cannot do without, in time they computed: others compute meanwhile."""
    bare = "import click" if "-m" in words else "pass"

    def quickest(command: list[str]) -> float:
        best = 60.0
        for _ in range(5):
            process = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL)
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            assert process.returncode == 0
            best = min(best, used.ru_utime + used.ru_stime)
        return best

    assert quickest(words) < quickest(["-c", bare]) + 0.15


def test_a_machine_without_what_only_linux_has(routed: House) -> None:
    """The whole way, from the decorator and from what a notebook's cells are packed with."""
    pytest.importorskip("numpy")
    code = """
        import sys
        for name in ("fcntl", "resource", "pwd", "grp", "termios", "apsw"):
            sys.modules[name] = None
        import numpy, sublet

        @sublet.on_gpu(vram="1GiB", ttl="1m")
        def total(values):
            return float(values.sum())

        print(total(numpy.ones(1 << 20)))

        from sublet.notebook.cells.variable_sync import SyncedVariables, unpack_values
        from sublet.notebook import magics
        from sublet.notebook.cells import inside_cell
        values = {"a": numpy.ones(1 << 20), "b": [1, 2]}
        payload = SyncedVariables().payload(values, ("a", "b"))
        print(sorted(unpack_values(payload.values)))
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SUBLET_")}
    environment |= {"SUBLET_URL": routed.url, "SUBLET_TOKEN": routed.token()}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True
    )
    assert done.stdout == "1048576.0\n['a', 'b']\n", done.stderr
