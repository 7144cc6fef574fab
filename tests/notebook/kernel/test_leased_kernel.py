"""A kernel that is leased as a whole: real kernel managers, real kernels, a real ledger and warden."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import nbformat
import pytest
from jupyter_client import AsyncKernelManager, KernelManager
from jupyter_client.ioloop import AsyncIOLoopKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient
from traitlets.config import Config

import sublet
from sublet.core.errors import BadInput
from sublet.core.leasing.lease import EndReason, LeaseRecord, LeaseState
from sublet.core.leasing.tenancy import Tenant
from sublet.core.notice import Notice
from sublet.notebook.kernel import lease, messages
from sublet.notebook.kernel import provisioner as leased_kernel
from sublet.notice_bus.notice_file import write_notice
from sublet.processes.supervisor import command
from sublet.wiring import CLOCK, open_ledger
from tests.homes import Home, close_home, make_home, process_is_gone, wait_until
from tests.processes import forced_command

One = TypeVar("One")
KERNELSPEC = Path(leased_kernel.__file__).parent / "kernelspec" / "kernel.json"
SECONDS = 60


@dataclass
class Room:
    """A home with one device of 4 GiB, and kernel specs made from the one that is installed."""

    home: Home
    path: Path
    notebooks: list[Notebook] = field(default_factory=list)

    def specs(
        self, *, mode: str = "message", argv: list[str] | None = None, **config: Any
    ) -> KernelSpecManager:
        spec = json.loads(KERNELSPEC.read_text())
        spec["metadata"]["kernel_provisioner"]["config"] |= {"vram": "4GiB", "ttl": "10m"} | config
        spec["interrupt_mode"] = mode
        spec["argv"] = argv or spec["argv"]
        folder = self.path / f"specs{len(list(self.path.iterdir()))}" / "kernels" / "leased"
        folder.mkdir(parents=True)
        (folder / "kernel.json").write_text(json.dumps(spec))
        return KernelSpecManager(kernel_dirs=[str(folder.parent)], ensure_native_kernel=False)

    def open(self, **options: Any) -> Notebook:
        made = Notebook(KernelManager(kernel_name="leased", kernel_spec_manager=self.specs(**options)))
        self.notebooks.append(made)
        made.start()
        return made

    def leases(self) -> list[LeaseRecord]:
        return [answer.lease for answer in open_ledger(self.home.settings).leases(live_only=False)]

    def live(self) -> list[LeaseRecord]:
        return [row for row in self.leases() if row.state in (LeaseState.ACTIVE, LeaseState.REVOKING)]

    def nothing_is_left(self) -> bool:
        """No lease, no supervisor, no folder."""
        kept = self.home.settings.home / "run" / "kernels"
        held = [row for row in self.leases() if row.epoch and row.holder.pid not in (0, os.getpid())]
        return (
            not self.live()
            and all(row.settled_at and process_is_gone(row.holder.pid) for row in held)
            and not (kept.is_dir() and list(kept.iterdir()))
        )


@dataclass
class Ran:
    status: str = ""
    stdout: str = ""
    stderr: str = ""
    result: str = ""
    error: str = ""
    shown: str = ""


class Notebook:
    """A front end with one kernel."""

    def __init__(self, manager: KernelManager) -> None:
        self.manager = manager
        self.client: Any = None

    def start(self) -> None:
        self.manager.start_kernel()
        self.connect()

    def connect(self) -> None:
        if self.client is not None:
            self.client.stop_channels()
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=SECONDS)

    def run(self, code: str, until: Callable[[Ran], bool] | None = None, **options: Any) -> Ran:
        """To its end, or until something is seen of it: then it goes on."""
        return self.follow(self.client.execute(code, **options), until)

    def follow(self, number: str, until: Callable[[Ran], bool] | None = None) -> Ran:
        ran = Ran()
        give_up = time.monotonic() + SECONDS
        while time.monotonic() < give_up:
            message = self.client.get_iopub_msg(timeout=SECONDS)
            if message["parent_header"].get("msg_id") != number:
                continue
            kind, content = message["msg_type"], message["content"]
            see(ran, kind, content)
            if until is not None and until(ran):
                self.number = number
                return ran
            if kind == "status" and content["execution_state"] == "idle":
                ran.status = self._reply(number)
                return ran
        raise AssertionError("the cell did not end in time")

    def _reply(self, number: str) -> str:
        while True:
            message = self.client.get_shell_msg(timeout=SECONDS)
            if message["parent_header"].get("msg_id") == number:
                return str(message["content"]["status"])

    def close(self) -> None:
        if self.client is not None:
            self.client.stop_channels()
        if self.manager.has_kernel:
            self.manager.shutdown_kernel(now=True)


def see(ran: Ran, kind: str, content: Any) -> None:
    if kind == "stream":
        setattr(ran, content["name"], getattr(ran, content["name"]) + content["text"])
    elif kind == "execute_result":
        ran.result = content["data"]["text/plain"]
    elif kind == "error":
        ran.error = "\n".join(content["traceback"])
    elif kind in ("display_data", "update_display_data"):
        ran.shown += content["data"]["text/plain"] + "\n"


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    path = tmp_path_factory.mktemp("leased")
    with pytest.MonkeyPatch.context() as patch:
        home = make_home(path, f"sqlite:{path}/home/ledger.db", patch, "host:1x4GiB")
        # A socket's address is short, and the folder of a test is not.
        patch.setenv("JUPYTER_RUNTIME_DIR", f"/tmp/slk-{home.settings['host']}")
        patch.setenv("IPYTHONDIR", str(path / "ipython"))
        (path / "specs").mkdir()
        made = Room(home, path / "specs")
        yield made
        for notebook in made.notebooks:
            notebook.close()
        left = made.nothing_is_left() or wait_until(made.nothing_is_left) is None
        close_home(home)
        shutil.rmtree(os.environ["JUPYTER_RUNTIME_DIR"], ignore_errors=True)
        assert left


@pytest.fixture(autouse=True)
def tidied(room: Room) -> Iterator[None]:
    """What a test left open, because it failed, must not stand in the way of the next."""
    before = len(room.notebooks)
    yield
    for one in room.notebooks[before:]:
        one.close()


@pytest.fixture(scope="module")
def notebook(room: Room) -> Iterator[Notebook]:
    """For tests that leave the kernel as it was. Others wait: it has the only device while a cell of it
    ran."""
    made = room.open(vram="1GiB", mode="signal")
    yield made
    made.close()


def only(rows: list[One]) -> One:
    assert len(rows) == 1
    return rows[0]


# --- the lease ---


def test_a_kernel_takes_its_gpu_with_its_first_cell_and_gives_it_back_at_shutdown(room: Room) -> None:
    ledger = open_ledger(room.home.settings)
    before = len(room.leases())
    notebook = room.open(tenant="ada")
    ledger.add_tenant(Tenant(name="ada", max_vram_bytes=1 << 30), actor="test")

    assert "takes its GPU when the first cell is run" in notebook.run("%gpu status").shown
    assert "Nothing was leased yet" in notebook.run("%gpu cost").shown
    notebook.run("hidden = 1", silent=True)
    assert len(room.leases()) == before, "an open notebook holds nothing"

    refused = notebook.run("ran = True")
    assert refused.status == "error"
    assert "QuotaReached" in refused.error
    assert "→" in refused.error, "it says what to do"
    ledger.set_tenant("ada", max_vram_bytes=0, actor="test")

    with sublet.gpu(vram="4GiB", ttl="10m", holder="process"):
        waits = notebook.run("ran = True", until=lambda ran: "place 1 in the waitlist" in ran.shown)
        assert waits.status == ""
        notebook.manager.interrupt_kernel()
        left = notebook.follow(notebook.number)
        assert "interrupted while it waited for a GPU; the cell was not run" in left.error
        wait_until(lambda: not [row for row in room.leases() if row.state is LeaseState.WAITING])
    assert notebook.run("'ran' in globals(), hidden").result == "(False, 1)"

    row = only(room.live())
    assert row.tenant == "ada"
    told = json.loads(
        notebook.run(
            "import json, os; "
            "print(json.dumps({k: v for k, v in os.environ.items() if k[:4] in ('SUBL', 'CUDA')}))"
        ).stdout
    )
    assert (told["SUBLET_LEASE_ID"], told["SUBLET_EPOCH"]) == (row.id, str(row.epoch))
    assert (told["CUDA_VISIBLE_DEVICES"], told["CUDA_DEVICE_ORDER"]) == ("", "PCI_BUS_ID")
    assert "SUBLET_KERNEL_LINK" not in told
    assert row.holder.pid not in (0, os.getpid()), "the server is never the holder"

    notebook.run("import time; print('begun'); time.sleep(0.3)", until=lambda ran: "begun" in ran.stdout)
    wait_until(lambda: only(room.live()).busy)
    notebook.follow(notebook.number)
    wait_until(lambda: not only(room.live()).busy)

    notebook.manager.shutdown_kernel()
    assert ledger.look(row.id).lease.reason is EndReason.RELEASED
    wait_until(room.nothing_is_left)


def test_a_notebook_runs_headless(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_PATH", str(Path(room.specs().kernel_dirs[0]).parent))
    cells = [
        "%%gpu --keep x\nimport asyncio, sublet\nawait asyncio.sleep(0)\nx = 20",
        "await asyncio.sleep(0); x + 1",
        "print(sublet.lease().id)",
    ]
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    NotebookClient(made, kernel_name="leased", timeout=SECONDS).execute()
    assert made.cells[1].outputs[0].data["text/plain"] == "21"
    assert made.cells[2].outputs[0].text.strip() == room.leases()[0].id
    wait_until(room.nothing_is_left)


# --- what runs inside ---


def test_magics_and_decorators_are_plain_in_a_leased_kernel(room: Room, notebook: Notebook) -> None:
    ran = notebook.run("%%gpu --vram 99GB\nimport os, sublet\nhere = os.getpid()\nhere")
    assert (ran.status, ran.error) == ("ok", "")
    failed = notebook.run("%%gpu\n1 / 0").error
    assert "line 2" in failed
    assert "%%gpu" in failed, "its own lines"
    assert notebook.run("os.getpid() == here == sublet.on_gpu(os.getpid)()").result == "True"
    assert len(room.live()) == 1, "no second lease"
    row = only(room.live())
    assert row.id in notebook.run("sublet.lease()").result
    opened = notebook.run("with sublet.lease().open() as gpu: print(gpu.read(gpu.alloc(4))[:4] is not None)")
    assert opened.stdout == "True\n", opened
    status = notebook.run("%gpu").shown
    assert "This kernel is leased as a whole: 1GiB" in status
    assert row.id in status
    assert "goes back when the kernel is restarted or shut down" in notebook.run("%gpu release").shown
    assert "GPU-s so far" in notebook.run("%gpu cost").shown
    assert "leases" in notebook.run("%gpu quota").shown
    kept = only(list((room.home.settings.home / "run" / "kernels").iterdir()))
    assert (
        f"/ipykernel_{kept.name}/" in notebook.run("get_ipython().compile.get_code_name('1', '1', 1)").result
    )
    assert "already loaded" in notebook.run("%load_ext sublet").stdout


def test_an_interrupt_by_signal_stops_the_cell_and_leaves_the_lease(room: Room, notebook: Notebook) -> None:
    notebook.run("import time; print('begun'); time.sleep(600)", until=lambda ran: "begun" in ran.stdout)
    row = only(room.live())
    notebook.manager.interrupt_kernel()
    assert "KeyboardInterrupt" in notebook.follow(notebook.number).error
    assert notebook.run("1 + 1").result == "2"
    assert only(room.live()).id == row.id


def test_a_restart_gives_the_lease_back_and_the_next_cell_takes_another(
    room: Room, notebook: Notebook
) -> None:
    notebook.run("x = 1")
    first = only(room.live())
    notebook.manager.restart_kernel()
    notebook.connect()
    assert room.live() == []
    assert process_is_gone(first.holder.pid)
    ran = notebook.run("'x' in globals()")
    assert (ran.result, ran.stderr) == ("False", ""), "nothing to explain: it was asked for"
    assert only(room.live()).id != first.id
    notebook.manager.interrupt_kernel()  # while nothing runs: nothing happens
    assert notebook.run("2").result == "2"
    notebook.close()  # the only device is wanted


# --- losing it ---


def test_a_revoked_kernel_is_warned_ended_and_restarted_under_a_new_lease(
    room: Room, caplog: pytest.LogCaptureFixture
) -> None:
    """As a Jupyter server does it: its own restarter, on its own event loop."""
    ledger = open_ledger(room.home.settings)
    config = Config()
    config.KernelRestarter.time_to_dead = 0.1
    caplog.set_level(logging.INFO)

    async def server() -> None:
        manager = AsyncIOLoopKernelManager(
            kernel_name="leased",
            kernel_spec_manager=room.specs(),
            config=config,
            log=logging.getLogger("server"),
        )
        await manager.start_kernel()
        client: Any = manager.client()
        client.start_channels()
        try:
            await client.wait_for_ready(timeout=SECONDS)
            await seen(client, "import sublet; kept = 1; print('first')", "first")
            number = client.execute(
                "import time\n"
                "print('begun', flush=True)\n"
                "while not sublet.lease().warned: time.sleep(0.01)\n"
                "print('it knows', flush=True); time.sleep(600)"
            )
            ran = Ran()
            await hear(client, number, ran, lambda: "begun" in ran.stdout)
            row = only(room.live())
            ledger.revoke(
                row.id, reason=EndReason.REVOKED, detail="for a test", grace_us=1_500_000, actor="test"
            )
            await hear(client, number, ran, lambda: "GPU session ended" in ran.stderr)
            assert "GPU session ends in 2 s (revoked: for a test). This kernel ends with it" in ran.stderr
            assert "GPU session ended (revoked: for a test)." in ran.stderr
            assert ran.stderr.count("GPU session ends in") == 1, "said once"
            assert "it knows" in ran.stdout
            while not process_is_gone(row.holder.pid) or not await manager.is_alive():
                await asyncio.sleep(0.02)
            client.stop_channels()
            client = manager.client()
            client.start_channels()
            await client.wait_for_ready(timeout=SECONDS)
            assert room.live() == [], "a kernel nobody uses yet takes nothing"
            again = await seen(client, "print('kept' in globals())", "False")
            assert again.stderr == messages.restarted("revoked: for a test") + "\n"
            assert only(room.live()).epoch > row.epoch
            assert (await seen(client, "print('more')", "more")).stderr == "", "said once"
        finally:
            client.stop_channels()
            await manager.shutdown_kernel(now=True)

    asyncio.run(server())
    assert "GPU session ended (revoked: for a test). The kernel was restarted" in caplog.text
    wait_until(room.nothing_is_left)
    ends = {row.reason for row in room.leases()[:2]}
    assert ends == {EndReason.REVOKED, EndReason.RELEASED}


async def seen(client: Any, code: str, text: str) -> Ran:
    ran = Ran()
    await hear(client, client.execute(code), ran, lambda: text in ran.stdout)
    return ran


async def hear(client: Any, number: str, ran: Ran, enough: Callable[[], bool]) -> None:
    while not enough():
        message = await client.get_iopub_msg(timeout=SECONDS)
        if message["parent_header"].get("msg_id") == number:
            see(ran, message["msg_type"], message["content"])


def test_an_idle_kernel_goes_to_who_waits_and_a_busy_one_does_not(room: Room) -> None:
    ledger = open_ledger(room.home.settings)
    policy = ledger.policy()
    ledger.set_policy(dataclasses.replace(policy, idle_after_us=200_000, grace_us=400_000), actor="test")
    notebook = room.open()
    try:
        notebook.run("import time; print('begun'); time.sleep(1.2)", until=lambda ran: "begun" in ran.stdout)
        row = only(room.live())
        child = room.home.start("import sublet; print(sublet.gpu('4GiB').acquire().id, flush=True)")
        wait_until(lambda: [row for row in room.leases() if row.state is LeaseState.WAITING])
        assert notebook.follow(notebook.number).status == "ok", "it was not taken from under the cell"
        assert child.stdout is not None
        assert child.stdout.readline().startswith("L")
        ended = ledger.look(row.id).lease
        assert ended.reason is EndReason.IDLE
        wait_until(lambda: not notebook.manager.is_alive())
        child.wait()
        notebook.manager.restart_kernel(now=True)
        notebook.connect()
        assert "GPU session ended (idle: " in notebook.run("1").stderr
    finally:
        ledger.set_policy(policy, actor="test")
        notebook.close()
    wait_until(room.nothing_is_left)


def test_a_lease_nobody_uses_runs_out_and_its_kernel_with_it(room: Room) -> None:
    notebook = room.open(ttl="4s")
    notebook.run("1")
    row = only(room.live())
    wait_until(lambda: not notebook.manager.is_alive())
    assert process_is_gone(row.holder.pid)
    provisioner: Any = notebook.manager.provisioner
    assert "GPU session ended (idle: no cell was run for its ttl)" in provisioner._last_words
    notebook.close()
    wait_until(room.nothing_is_left)


def test_a_kernel_that_is_killed_gives_its_gpu_back_and_the_next_one_says_so(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the weakest containment there is, where nothing but its own environment tells a kernel that it is
    leased."""
    forced = Path(forced_command.__file__)
    monkeypatch.setattr(command, "SUPERVISOR", (sys.executable, str(forced), "subreaper"))
    notebook = room.open()
    ran = notebook.run("%%gpu --vram 99GB\nimport os, subprocess\nhere = os.getpid()")
    assert ran.status == "ok", ran.error
    notebook.run("left = subprocess.Popen(['sleep', '600'], start_new_session=True)")
    pid = int(notebook.run("left.pid").result)
    refused = notebook.run("import sublet; sublet.gpu().acquire()").error
    assert "BadInput: a leased worker cannot be started inside" in refused.replace("\x1b[31m", "").replace(
        "\x1b[39m", ""
    )
    provisioner: Any = notebook.manager.provisioner
    assert provisioner.pid == int(notebook.run("here").result)
    row = only(room.live())

    notebook.run(
        "from sublet.machine import lease_environment; "
        "lease_environment.write_deadline(get_ipython().kernel.link.process_lease.page, 0)"
    )
    late = notebook.run("too_late = 1")
    assert "GpuSessionEnded" in late.error, "after its deadline nothing new is begun (L6)"
    notebook.run("link = get_ipython().kernel.link", silent=True)
    notebook.run("lease_environment.write_deadline(link.process_lease.page, 2**62)", silent=True)
    assert notebook.run("'too_late' in globals()").result == "False"

    notebook.run(
        "import time; get_ipython().kernel.link._socket.shutdown(2); print('begun'); time.sleep(600)",
        until=lambda ran: "begun" in ran.stdout,
    )
    wait_until(lambda: not only(room.live()).busy)  # who cannot say that it works is not renewed

    os.kill(provisioner.pid, signal.SIGKILL)
    wait_until(lambda: not notebook.manager.is_alive())
    wait_until(lambda: not room.live())
    receipt = receipt_of(room, row.id)
    assert (receipt.proven, receipt.containment) == (True, "subreaper")
    assert process_is_gone(pid)
    assert "The kernel died (killed by SIGKILL), and its GPU was given back." in provisioner._last_words
    notebook.close()
    wait_until(room.nothing_is_left)


def receipt_of(room: Room, lease_id: str) -> Any:
    ledger = open_ledger(room.home.settings)
    wait_until(lambda: [one for one in ledger.receipts() if one.lease_id == lease_id])
    return next(one.receipt for one in ledger.receipts() if one.lease_id == lease_id)


def test_a_server_that_is_killed_takes_the_kernel_and_its_lease_along(room: Room) -> None:
    specs = room.specs()
    code = f"""
        import time
        from jupyter_client import AsyncKernelManager, KernelManager
        from jupyter_client.kernelspec import KernelSpecManager
        specs = KernelSpecManager(kernel_dirs={specs.kernel_dirs!r}, ensure_native_kernel=False)
        manager = KernelManager(kernel_name="leased", kernel_spec_manager=specs)
        manager.start_kernel()
        client = manager.client()
        client.start_channels()
        client.wait_for_ready(timeout=60)
        client.execute_interactive("1", timeout=60)
        client.execute("import time; time.sleep(600)")
        print("up", manager.provisioner.pid, flush=True)
        time.sleep(600)
    """
    sockets = Path(os.environ["JUPYTER_RUNTIME_DIR"])
    child = room.home.start(code, JUPYTER_RUNTIME_DIR=str(sockets))
    assert child.stdout is not None
    words = child.stdout.readline().split()
    row = only(room.live())
    os.kill(child.pid, signal.SIGKILL)
    wait_until(lambda: process_is_gone(int(words[1])))
    wait_until(lambda: not room.live())
    wait_until(lambda: open_ledger(room.home.settings).look(row.id).lease.settled_at)
    kept = room.home.settings.home / "run" / "kernels"
    wait_until(lambda: all((path / "exit.json").exists() for path in kept.iterdir()))
    assert len(list(sockets.glob("sublet-*"))) == 5
    leased_kernel._sweep(kept)
    assert (list(kept.iterdir()), list(sockets.glob("sublet-*"))) == ([], [])


def test_a_warning_of_the_machine_reaches_the_kernel(
    room: Room, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUBLET_NOTICES", "notice_file")
    monkeypatch.setenv("SUBLET_NOTICE_FILE", str(tmp_path / "notice"))
    watching = lease._MachineNotices()
    monkeypatch.setattr(lease, "machine", watching)
    notebook = room.open()
    begun: Any = lambda ran: "begun" in ran.stdout  # noqa: E731
    notebook.run(
        "import sublet, time; print('begun')\nwhile not sublet.lease().warned: time.sleep(0.01)\nprint('warned')\n"
        "while True: time.sleep(0.01)",
        until=begun,
    )
    now = CLOCK.monotonic_us()
    gone = Notice(source="gce", reason="the VM is taken back", deadline_us=now + 30_000_000)
    write_notice(tmp_path / "notice", gone, now)
    words = "s (the VM is taken back). This kernel ends with it: save what you need now."
    notebook.follow(notebook.number, until=lambda ran: words in ran.stderr and "warned" in ran.stdout)
    notebook.manager.interrupt_kernel()
    assert notebook.follow(notebook.number).status == "error"
    told = notebook.run("import os; print(open(os.environ['SUBLET_NOTICE_FILE']).read())").stdout
    assert json.loads(told)["reason"] == "the VM is taken back"
    kernel: Any = notebook.manager.provisioner
    notebook.run("print('begun'); time.sleep(0.5)", until=begun)
    for later_us in (0, -1000, 60_000_000):  # as the keeper has it: read again, and after a renewal
        idle = Notice(source="keeper", reason="idle: for a test", deadline_us=now + 90_000_000 + later_us)
        kernel._kernel.warn(idle)
    assert notebook.follow(notebook.number).stderr.count("(idle: for a test)") == 2
    notebook.close()
    assert watching._kernels == set()
    assert watching._notice_bus is not None
    watching._notice_bus.close()


# --- other ways to start it ---


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"vram": "lots"}, "vram"),
        ({"wait": "soon"}, "wait"),
        ({"colour": "red"}, "colour"),
        ({"tier": "best"}, "tier"),
    ],
)
def test_a_wrong_kernel_json_is_refused_before_anything_starts(
    room: Room, config: dict[str, str], words: str
) -> None:
    manager = KernelManager(kernel_name="leased", kernel_spec_manager=room.specs(**config))
    with pytest.raises(BadInput, match=words):
        manager.start_kernel()
    assert not manager.has_kernel
    kept = room.home.settings.home / "run" / "kernels"
    assert not kept.is_dir() or not list(kept.iterdir())


def test_a_kernel_json_without_the_leasing_class_is_refused(room: Room) -> None:
    plain = ["python", "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    manager = KernelManager(kernel_name="leased", kernel_spec_manager=room.specs(argv=plain))
    with pytest.raises(BadInput, match="never ask for its lease") as refused:
        manager.start_kernel()
    assert leased_kernel.KERNEL_CLASS in refused.value.remedy


def test_a_start_that_was_given_up_leaves_nothing(room: Room) -> None:
    kept = room.home.settings.home / "run" / "kernels"

    async def server() -> None:
        manager = AsyncKernelManager(kernel_name="leased", kernel_spec_manager=room.specs())
        starting = asyncio.ensure_future(manager.start_kernel())
        while not (kept.is_dir() and list(kept.iterdir())):
            await asyncio.sleep(0.001)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    asyncio.run(server())
    wait_until(lambda: not list(kept.iterdir()))
    wait_until(room.nothing_is_left)


@pytest.mark.parametrize("said", [{}, {"transport": "tcp"}, {"ip": "0.0.0.0"}])
def test_messages_go_through_a_unix_socket_unless_somebody_said_otherwise(
    room: Room, said: dict[str, str]
) -> None:
    manager = KernelManager(
        kernel_name="leased", kernel_spec_manager=room.specs(), config=Config(KernelManager=said)
    )
    manager.pre_start_kernel()
    assert manager.transport == ("tcp" if said else "ipc")
    written = json.loads(Path(manager.connection_file).read_text())
    assert written["transport"] == manager.transport
    manager.cleanup_resources()


def test_started_without_a_provisioner_it_is_a_plain_kernel_and_says_so(room: Room) -> None:
    """As an editor does that starts kernels by itself."""
    specs = room.specs()
    path = Path(specs.kernel_dirs[0]) / "leased" / "kernel.json"
    spec = json.loads(path.read_text())
    del spec["metadata"]["kernel_provisioner"]
    path.write_text(json.dumps(spec))
    notebook = Notebook(KernelManager(kernel_name="leased", kernel_spec_manager=specs))
    notebook.start()
    try:
        ran = notebook.run("1 + 1")
        assert (ran.status, ran.result) == ("ok", "2")
        assert "Put %%gpu above the cells that need one" in ran.stderr
    finally:
        notebook.close()


def test_switched_off_it_is_a_plain_local_kernel(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBLET_DISABLE", "1")
    notebook = room.open()
    ran = notebook.run("1 + 1")
    assert (ran.result, ran.stderr) == ("2", "")
    assert room.live() == []
    notebook.manager.shutdown_kernel(now=True)


def test_the_kernel_spec_that_is_installed_names_what_exists() -> None:
    spec = json.loads(KERNELSPEC.read_text())
    assert leased_kernel.KERNEL_CLASS in spec["argv"]
    module, _, name = leased_kernel.KERNEL_CLASS.partition("=")[2].rpartition(".")
    found = subprocess.run(
        [sys.executable, "-c", f"from {module} import {name}"], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    assert set(spec["metadata"]["kernel_provisioner"]["config"]) <= set(leased_kernel.KERNEL_OPTIONS)
