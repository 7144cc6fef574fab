"""A real JupyterLab with a real browser in front of it, and neither of them talks to anybody else.

Rules of this file:
- Server, kernels and browser live in folders of the test's own and listen on the loopback only. What the
  server or a kernel wants from elsewhere goes to a proxy that answers nobody and remembers who asked; the
  browser finds no other host at all.
- What is clicked, typed and seen is the page's. `window.jupyterapp` is used to open a file and to choose a
  cell.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import nbformat

from tests.browsers import a_browser

TOKEN = "of-this-test"
DARK, LIGHT = "JupyterLab Dark", "JupyterLab Light"
#: Every cell is in the page, also below what is seen.
_SETTINGS = {
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}


class Outside:
    """The way out of this host, as far as the server and its kernels know."""

    def __init__(self) -> None:
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port = self._door.getsockname()[1]
        self.asked: list[bytes] = []
        threading.Thread(target=self._refuse, daemon=True).start()

    def _refuse(self) -> None:
        while True:
            try:
                caller, _ = self._door.accept()
            except OSError:
                return
            with caller, contextlib.suppress(OSError):
                caller.settimeout(5)
                self.asked.append(caller.recv(200))

    def close(self) -> None:
        self._door.close()


class JupyterLab:
    """A server, and the one page that looks at it."""

    def __init__(self, folder: Path, url: str, page: Any) -> None:
        self.folder, self.url, self.page = folder, url, page
        self.asked: set[str] = set()
        page.on("request", lambda request: self.asked.add(request.url))
        page.on("websocket", lambda link: self.asked.add(link.url))

    def hosts(self) -> set[str]:
        """Whom the page asked anything."""
        return {
            urlsplit(url).hostname or "" for url in self.asked if urlsplit(url).scheme not in ("data", "blob")
        }

    def open(self, name: str, notebook: Any) -> OpenNotebook:
        nbformat.write(notebook, self.folder / name)
        if self.page.url == "about:blank":
            self.page.goto(f"{self.url}lab?token={TOKEN}&reset")
            self.page.wait_for_function(
                "() => window.jupyterapp && window.jupyterapp.restored.then(() => true)"
            )
        self.page.evaluate(
            "async path => "
            "{ await jupyterapp.commands.execute('docmanager:open', {path, factory: 'Notebook'}); }",
            name,
        )
        return OpenNotebook(self, name)

    def theme(self, name: str) -> None:
        self.page.evaluate(
            "async theme => { await jupyterapp.commands.execute('apputils:change-theme', {theme}); }", name
        )
        self.page.wait_for_function("name => document.body.dataset.jpThemeName === name", arg=name)


class OpenNotebook:
    """One that is open in the page."""

    def __init__(self, lab: JupyterLab, name: str) -> None:
        self._lab, self.name, self._page = lab, name, lab.page
        self.ready()

    def _js(self, code: str, *args: Any) -> Any:
        """`panel` is this notebook's widget."""
        found = "[...jupyterapp.shell.widgets('main')].find(w => w.context && w.context.path === name)"
        return self._page.evaluate(
            f"async ([name, ...args]) => {{ const panel = {found}; {code} }}", [self.name, *args]
        )

    def ready(self) -> None:
        self._js("await panel.context.ready; await panel.sessionContext.ready; await panel.revealed;")

    def look(self) -> None:
        """To the front."""
        self._js("jupyterapp.shell.activateById(panel.id);")

    def choose(self, cell_id: str) -> None:
        self.look()
        self._js(
            "const at = panel.content.widgets.findIndex(w => w.model.id === args[0]);"
            "panel.content.activeCellIndex = at; panel.content.deselectAll(); panel.content.mode = 'command';"
            "panel.content.node.focus(); panel.content.scrollToItem(at);",
            cell_id,
        )

    def press(self, *keys: str) -> None:
        """On the chosen cell."""
        self.look()
        self._js("panel.content.mode = 'command'; panel.content.node.focus();")
        for key in keys:
            self._page.keyboard.press(key)

    def run(self, cell_id: str) -> None:
        """Begin it, and stay there."""
        self.choose(cell_id)
        self.press("Control+Enter")

    def shot(self, path: Path) -> None:
        self.look()
        self._page.locator("#jupyterlab-splash").wait_for(state="detached")
        self._page.screenshot(path=str(path))

    def run_from_menu(self, words: str) -> None:
        self.look()
        self._page.get_by_role("menuitem", name="Run", exact=True).click()
        self._page.locator(".lm-Menu-itemLabel", has_text=words).first.click()

    def cell(self, cell_id: str) -> Any:
        """The node of a cell in the page."""
        number = self._js(
            "const at = panel.content.widgets.findIndex(w => w.model.id === args[0]);"
            "panel.content.widgets[at].node.dataset.subletTest = panel.id + args[0]; return panel.id;",
            cell_id,
        )
        return self._page.locator(f"[data-sublet-test='{number}{cell_id}']")

    def wait_for(self, cell_id: str, text: str) -> None:
        """Until the page shows it under the cell."""
        self.look()
        self.cell(cell_id).locator(".jp-Cell-outputArea").get_by_text(text).first.wait_for()

    def said(self, cell_id: str) -> str:
        """What the page shows under a cell."""
        return str(self.cell(cell_id).locator(".jp-Cell-outputArea").inner_text())


@contextlib.contextmanager
def served(folder: Path, environment: dict[str, str], outside: Outside) -> Iterator[str]:
    """A server of its own, and its address."""
    import matplotlib

    for name, values in _SETTINGS.items():
        path = folder / "settings" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    root = folder / "notebooks"
    root.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    proxy = f"http://127.0.0.1:{outside.port}"
    own = {
        "HOME": str(folder),
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTER_DATA_DIR": str(folder / "data"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
        "IPYTHONDIR": str(folder / "ipython"),
        "MPLCONFIGDIR": matplotlib.get_cachedir(),  # where it has listed this machine's fonts already
        **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY"), proxy),
        "NO_PROXY": "127.0.0.1,localhost",
    }
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}"]
    command += ["--ip=127.0.0.1", "--ServerApp.port_retries=0", f"--IdentityProvider.token={TOKEN}"]
    command += [f"--ServerApp.root_dir={root}", "--LabApp.expose_app_in_browser=True"]
    command += ["--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate", "--LabApp.news_url="]
    command += ["--LabApp.extension_manager=readonly"]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(
            command, env=environment | own, cwd=root, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    url = f"http://127.0.0.1:{port}/"
    try:
        _wait_for(url, server, folder / "server.log")
        yield url
    finally:
        _end(server, url)


def _wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 120
    while True:
        with contextlib.suppress(OSError), urlopen(f"{url}api", timeout=5):
            return
        assert server.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def _end(server: subprocess.Popen[bytes], url: str) -> None:
    """With its kernels."""
    with contextlib.suppress(OSError):
        urlopen(Request(f"{url}api/shutdown?token={TOKEN}", method="POST"), timeout=10).close()
    try:
        server.wait(20)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


@contextlib.contextmanager
def browser_page() -> Iterator[Any]:
    with a_browser() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(60_000)
        yield page
