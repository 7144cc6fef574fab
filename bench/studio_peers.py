"""What the studio is measured against: JupyterHub, and a bare FastAPI handler.

Rules of this file:
- A peer is as fast as its documentation lets it be: JupyterHub starts the plain Jupyter server without JupyterLab and without looking for
  extensions; the bare handler has no token, no limits and no log, and the server settings of `sublet serve`.
- A peer that is not installed says so.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.peers import NotInstalled, free_ports, served

TOKEN = uuid.uuid4().hex
PROXY = Path(sys.prefix) / "proxy" / "node_modules" / ".bin" / "configurable-http-proxy"
PATIENCE_SECONDS = 120

_HUB = """
c = get_config()
c.JupyterHub.bind_url = "http://127.0.0.1:{port}"
c.JupyterHub.hub_bind_url = "http://127.0.0.1:{hub}"
c.ConfigurableHTTPProxy.api_url = "http://127.0.0.1:{api}"
c.ConfigurableHTTPProxy.command = [{proxy!r}]
c.JupyterHub.authenticator_class = "dummy"
c.Authenticator.allow_all = True
c.JupyterHub.spawner_class = "simple"
c.JupyterHub.db_url = "sqlite:///{folder}/hub.sqlite"
c.JupyterHub.cookie_secret_file = "{folder}/cookie"
c.JupyterHub.pid_file = "{folder}/pid"
c.SimpleLocalProcessSpawner.home_dir_template = "{folder}/{{username}}"
c.Spawner.environment = {{"JUPYTERHUB_SINGLEUSER_APP": "jupyter_server.serverapp.ServerApp", "JUPYTER_NO_CONFIG": "1"}}
c.Spawner.args = ["--allow-root"]
c.JupyterHub.services = [{{"name": "bench", "api_token": {token!r}}}]
c.JupyterHub.load_roles = [{{"name": "bench", "services": ["bench"], "scopes": ["admin:users", "admin:servers", "access:servers"]}}]
c.JupyterHub.tornado_settings = {{"slow_spawn_timeout": 60}}
c.JupyterHub.log_level = "ERROR"
"""


class Hub:
    """A JupyterHub, asked over its API."""

    def __init__(self, port: int) -> None:
        self.port = port

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, bytes]:
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_SECONDS)
        try:
            headers = {"Authorization": f"token {TOKEN}", "Content-Type": "application/json"}
            line.request(method, path, None if body is None else json.dumps(body), headers)
            answer = line.getresponse()
            return answer.status, answer.read()
        finally:
            line.close()

    def up(self) -> bool:
        with contextlib.suppress(OSError):
            return self.ask("GET", "/hub/api/")[0] == 200
        return False

    def first_result(self, user: str, code: str) -> float:
        """Seconds from the request for a server until the cell's result came over the kernel's websocket."""
        websocket: Any = __import__("websocket")
        self.ask("POST", f"/hub/api/users/{user}")
        begun = time.perf_counter()
        status, _ = self.ask("POST", f"/hub/api/users/{user}/server")
        while status == 202:  # the hub stopped waiting for it
            known = json.loads(self.ask("GET", f"/hub/api/users/{user}")[1])
            if known["servers"].get("", {}).get("ready"):
                break
            time.sleep(0.01)
        status, made = self.ask("POST", f"/user/{user}/api/kernels", {"name": "python3"})
        if status != 201:
            raise RuntimeError(f"no kernel: {status} {made[:200]!r}")
        url = f"ws://127.0.0.1:{self.port}/user/{user}/api/kernels/{json.loads(made)['id']}/channels"
        line = websocket.create_connection(
            url, header={"Authorization": f"token {TOKEN}"}, timeout=PATIENCE_SECONDS
        )
        try:
            asked = uuid.uuid4().hex
            line.send(json.dumps(_execute(asked, code)))
            while True:
                said = json.loads(line.recv())
                if said["parent_header"].get("msg_id") == asked and said["msg_type"] == "execute_result":
                    return time.perf_counter() - begun
        finally:
            line.close()

    def end(self, user: str) -> None:
        """Its server is stopped, and gone."""
        status, _ = self.ask("DELETE", f"/hub/api/users/{user}/server")
        while status == 202 and json.loads(self.ask("GET", f"/hub/api/users/{user}")[1])["servers"]:
            time.sleep(0.05)


def _execute(message: str, code: str) -> dict[str, object]:
    return {
        "header": {
            "msg_id": message,
            "username": "bench",
            "session": message,
            "msg_type": "execute_request",
            "version": "5.3",
        },
        "parent_header": {},
        "metadata": {},
        "content": {
            "code": code,
            "silent": False,
            "store_history": False,
            "user_expressions": {},
            "allow_stdin": False,
            "stop_on_error": True,
        },
        "channel": "shell",
    }


@contextlib.contextmanager
def jupyterhub(folder: Path) -> Iterator[Hub]:
    missing = [
        name for name in ("jupyterhub", "jupyter_server", "ipykernel", "websocket") if not find_spec(name)
    ]
    if missing:
        raise NotInstalled(f"not installed: {', '.join(missing)}")
    if not PROXY.exists() or shutil.which("node") is None:
        raise NotInstalled("not installed: configurable-http-proxy (make bench installs it with npm)")
    folder.mkdir(parents=True)
    port, hub, api = free_ports(3)
    config = folder / "hub.py"
    config.write_text(_HUB.format(port=port, hub=hub, api=api, proxy=str(PROXY), folder=folder, token=TOKEN))
    found = Hub(port)
    program = str(Path(sys.executable).parent / "jupyterhub")
    before = os.environ["PATH"]
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{before}"  # it looks for jupyterhub-singleuser there
    try:
        with served([program, "-f", str(config)], found.up, patience_s=PATIENCE_SECONDS):
            yield found
    finally:
        os.environ["PATH"] = before
