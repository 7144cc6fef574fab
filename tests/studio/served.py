"""A real service in a process of its own, and somebody who talks to it with nothing but sockets."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from sublet.core.leasing.tenancy import Tenant
from sublet.core.studio.token import Scope
from sublet.ports.ledger import Ledger
from sublet.studio.tokens import new_token
from tests import forked
from tests.free_ports import free_port


def token_for(ledger: Ledger, tenant: str, scope: Scope = Scope.USER) -> str:
    ledger.add_tenant(Tenant(name=tenant), actor="test", exist_ok=True)
    made = new_token()
    ledger.add_token(made.id, made.digest, tenant, actor="test", scope=scope)
    return made.text


@dataclass(eq=False)
class Served:
    """`sublet serve` at a port of its own; killed and started again as often as one likes."""

    environment: dict[str, str]
    port: int = field(default_factory=free_port)
    options: tuple[str, ...] = ()
    process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "sublet", "serve", "--port", str(self.port), *self.options]
        self.process = forked.Forked(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=self.environment
        )
        deadline = time.monotonic() + 30
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self.port), 1):
                    return
            except OSError:
                assert time.monotonic() < deadline, "the service did not start"
                assert self.process.poll() is None, "the service ended"
                time.sleep(0.01)

    def kill(self, number: int = signal.SIGKILL) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)
        self.process.wait()


class Caller:
    """One tenant's requests, on one connection that is made anew when it was cut."""

    def __init__(self, port: int, token: str, timeout: float = 30.0) -> None:
        self._port, self._token, self._timeout = port, token, timeout
        self._connection: http.client.HTTPConnection | None = None

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and JSON, of lines a list. Raises OSError or HTTPException when it is cut."""
        if self._connection is None:
            self._connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=self._timeout)
        headers = {"Authorization": f"Bearer {self._token}"}
        data = None
        if body is not None:
            data, headers["Content-Type"] = json.dumps(body), "application/json"
        try:
            self._connection.request(method, path, data, headers)
            answer = self._connection.getresponse()
            text = answer.read()
        except BaseException:
            self.close()
            raise
        if answer.getheader("Content-Type", "").startswith("application/x-ndjson"):
            return answer.status, [json.loads(line) for line in text.splitlines()]
        return answer.status, json.loads(text) if text else None

    def until_answered(
        self, method: str, path: str, body: Any = None, seconds: float = 60.0
    ) -> tuple[int, Any]:
        """The same request again for as long as it is cut: what is asked for must not mind."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                status, found = self.ask(method, path, body)
            except (OSError, http.client.HTTPException, ValueError):
                status, found = 0, None
            if status not in (0, 503, 429):
                return status, found
            assert time.monotonic() < deadline, f"no answer to {method} {path} in time"
            time.sleep(0.02)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
