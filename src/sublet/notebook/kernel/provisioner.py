"""The kernel "Python 3 (leased GPU)": started by a Jupyter server through its kernel provisioner, leased as a
whole.

Rules of this file:
- It is `jupyter_client`'s local provisioner with another way to start and end the process. Blocking work runs
  in a thread.
- kernel.json is checked before anything is started.
- A restart releases the lease, and the next cell takes another: a lease owns a process, and its device is
  passed on only when that process is proven gone.
- With SUBLET_DISABLE=1 it is a plain local kernel.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jupyter_client.localinterfaces import localhost
from jupyter_client.provisioning.local_provisioner import LocalProvisioner
from jupyter_core.paths import jupyter_runtime_dir
from jupyter_core.utils import ensure_dir_exists

from sublet.core.errors import BadInput
from sublet.core.leasing.options import GpuOptions
from sublet.core.notice import DEFAULT_GRACE
from sublet.core.values import SECOND_US, parse_duration
from sublet.leases.request import GpuRequest, local_gpu
from sublet.machine.executables import find_executable
from sublet.machine.run_folder import RunFolder, new_run_id
from sublet.notebook.kernel.lease import KernelLease
from sublet.notebook.kernel.messages import LINK_VARIABLE, WORDS_VARIABLE
from sublet.processes.channel.channel import pair
from sublet.runs.build import settings_as_variables
from sublet.settings import SPECS, Settings, load_settings
from sublet.wiring import start_command

#: The class that kernel.json must name, because it asks for the lease.
KERNEL_CLASS = "--IPKernelApp.kernel_class=sublet.notebook.kernel.in_kernel.LeasedIPythonKernel"
KERNEL_OPTIONS = ("vram", "ttl", "tier", "count", "exclusivity", "tenant", "wait", "least")
#: Longer than an unreachable ledger and a process that does not die take together.
END_SECONDS = 15.0
POLL_SECONDS = 0.05
#: Of a Unix socket's address, with the number that follows it.
LONGEST_ADDRESS = 100


class LeasedKernel(LocalProvisioner):
    def __init__(self, **kwargs: Any) -> None:
        """Takes `config` of kernel.json as keywords, beside those of `jupyter_client`; not as traits, because
        `wait` is a method here."""
        self._wish = {name: kwargs.pop(name) for name in KERNEL_OPTIONS if name in kwargs}
        unknown = set(kwargs) - {"kernel_id", "kernel_spec", "parent", "config", "log"}
        if unknown:
            raise BadInput(
                f"kernel.json: kernel_provisioner.config does not know {', '.join(sorted(unknown))}",
                remedy=f"use {', '.join(KERNEL_OPTIONS)}",
            )
        super().__init__(**kwargs)
        self._kernel: KernelLease | None = None
        self._last_words = ""
        self._request: GpuRequest | None = None
        self._settings: Settings | None = None

    # starting

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        self._settings = settings = _settings_for(kwargs.get("env") or os.environ)
        if settings.disabled:
            self._request = None
            return await super().pre_launch(**kwargs)
        if KERNEL_CLASS not in self.kernel_spec.argv:
            raise BadInput(
                f"kernel.json of {self.kernel_spec.display_name!r} starts a kernel that would never ask for "
                "its lease",
                remedy=f'add "{KERNEL_CLASS}" to its argv; it must be an ipykernel, with sublet installed '
                "beside it",
            )
        self._request = local_gpu(GpuOptions(**self._wish, holder="worker"), settings=settings)
        self._prefer_unix_sockets()
        return await super().pre_launch(**kwargs)

    def _prefer_unix_sockets(self) -> None:
        """Uses Unix sockets unless a transport was configured, because any local user could read a TCP port
        on loopback."""
        manager = self.parent
        if manager is None or manager.transport != "tcp" or manager.ip != localhost():
            return
        if any(
            {"transport", "ip"} & set(manager.config.get(kind.__name__, {})) for kind in type(manager).__mro__
        ):
            return
        if os.path.exists(manager.connection_file):
            return  # with ports in it, which a client may have read
        folder = os.path.dirname(os.path.abspath(manager.connection_file)) if manager.connection_file else ""
        folder = folder or jupyter_runtime_dir()
        ensure_dir_exists(folder, mode=0o700)
        address = os.path.join(folder, f"sublet-{self.kernel_id[:8]}")
        if len(address) <= LONGEST_ADDRESS:
            manager.transport, manager.ip = "ipc", address

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> Any:
        if self._request is None:
            return await super().launch_kernel(cmd, **kwargs)
        started = asyncio.get_running_loop().run_in_executor(None, lambda: self._start(cmd, kwargs))
        try:
            self._kernel = await asyncio.shield(started)
        except asyncio.CancelledError:
            started.add_done_callback(_not_wanted)
            raise
        self.cwd = kwargs.get("cwd") or Path.cwd()
        return self.connection_info

    def _start(self, cmd: list[str], options: Mapping[str, Any]) -> KernelLease:
        """Starts the kernel under its supervisor. Blocks, so it does not run in the event loop."""
        settings, request = self._settings, self._request
        assert settings is not None
        assert request is not None
        given: Mapping[str, str] = options.get("env") or os.environ
        environment = dict(given) | settings_as_variables(settings, request.request.tenant)
        executable, code = find_executable(cmd[0], environment.get("PATH", os.defpath))
        if code:
            raise BadInput(f"{cmd[0]!r} cannot be run; no lease was asked for")
        grace_us = parse_duration(DEFAULT_GRACE)
        folder = RunFolder(_kernels_folder(settings) / new_run_id())
        _sweep(folder.path.parent)
        folder.path.parent.mkdir(parents=True, exist_ok=True)
        folder.make()
        folder.record(sockets=self.parent.ip if self.parent and self.parent.transport == "ipc" else "")
        environment |= {
            "SUBLET_DISABLE": "1",  # it has its GPU: decorators and %%gpu are plain calls here
            "SUBLET_NOTICE_FILE": str(folder.notice_file),
            "SUBLET_GRACE_SECONDS": f"{grace_us / SECOND_US:g}",
            "CUDA_VISIBLE_DEVICES": "",  # until it has a lease
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "JPY_PARENT_PID": "1",  # its supervisor watches it; inside a namespace there is no parent to poll
            WORDS_VARIABLE: self._last_words,
        }
        ours, theirs = pair()
        streams = {name: options[name] for name in ("stdout", "stderr") if options.get(name) is not None}
        with contextlib.ExitStack() as undo:
            undo.callback(shutil.rmtree, folder.path, ignore_errors=True)
            undo.callback(ours.close)
            with theirs:
                command: Any = start_command(
                    settings,
                    folder,
                    executable,
                    cmd,
                    grace_us,
                    folder=os.fspath(options["cwd"]) if options.get("cwd") else None,
                    links={LINK_VARIABLE: theirs.fileno()},
                    streams={"stdin": subprocess.DEVNULL, **streams},
                )
                undo.callback(command.end, "its kernel could not be started")
                kernel = KernelLease(
                    self.kernel_id,
                    settings,
                    request.request,
                    folder,
                    command,
                    command.command_pid,
                    ours,
                    self.log,
                )
                kernel.begin(environment)
            undo.pop_all()
        self.pid = self.pgid = command.command_pid
        self._last_words = ""
        return kernel

    # while it runs

    @property
    def has_process(self) -> bool:
        return self._kernel is not None or bool(super().has_process)

    async def poll(self) -> int | None:
        if self._kernel is None:
            return await super().poll()
        code = self._kernel.exit_code
        if code is not None and self._kernel.words:
            self._last_words = self._kernel.words
        return code

    async def wait(self) -> int | None:
        if self._kernel is None:
            return await super().wait()
        while (code := await self.poll()) is None:
            await asyncio.sleep(POLL_SECONDS)
        self._kernel = None
        return code

    async def send_signal(self, signum: int) -> None:
        if self._kernel is None:
            await super().send_signal(signum)
        else:
            self._kernel.signal(signum)

    # ending

    async def shutdown_requested(self, restart: bool = False) -> None:
        if self._kernel is not None:
            self._kernel.expect_end()

    async def terminate(self, restart: bool = False) -> None:
        await self._end() if self._kernel is not None else await super().terminate(restart=restart)

    async def kill(self, restart: bool = False) -> None:
        await self._end() if self._kernel is not None else await super().kill(restart=restart)

    async def _end(self) -> None:
        kernel = self._kernel
        assert kernel is not None
        await asyncio.get_running_loop().run_in_executor(None, lambda: kernel.end(END_SECONDS))

    async def cleanup(self, restart: bool = False) -> None:
        if self._kernel is not None:
            await self._end()
            self._kernel = None
        await super().cleanup(restart=restart)


def _not_wanted(started: asyncio.Future[KernelLease]) -> None:
    """Ends a kernel that was started for a cancelled request."""
    if not started.cancelled() and started.exception() is None:
        started.result().end(0)


def _settings_for(environment: Mapping[str, str]) -> Settings:
    """The usual settings, overridden by the kernel's own environment (`env` in kernel.json)."""
    said = {spec.name: environment.get(spec.variable, "") for spec in SPECS}
    return load_settings(
        **{
            spec.name: said[spec.name]
            for spec in SPECS
            if said[spec.name] and said[spec.name] != os.environ.get(spec.variable)
        }
    )


def _kernels_folder(settings: Settings) -> Path:
    return settings.home / "run" / "kernels"


def _sweep(folder: Path) -> None:
    """Removes folders and sockets of kernels whose server was killed, once their supervisors recorded how
    they ended."""
    for path in folder.iterdir() if folder.is_dir() else ():
        left = RunFolder(path)
        if left.exit():
            sockets = str(left.facts().get("sockets", ""))
            for socket in Path(sockets).parent.glob(f"{Path(sockets).name}-[0-9]*") if sockets else ():
                socket.unlink(missing_ok=True)
            shutil.rmtree(path, ignore_errors=True)
