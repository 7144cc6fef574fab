"""The studio's page in a real browser that finds no other host.

Rules of this file: the page is driven as somebody would, by what it shows and by the keyboard; every request
it makes is written down.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.conftest import need

AXE = Path(__file__).parents[2] / ".venv" / "axe" / "node_modules" / "axe-core" / "axe.min.js"
WIDE, PHONE = {"width": 1600, "height": 1000}, {"width": 360, "height": 780}


class Studio:
    """One page that looks at a service."""

    def __init__(self, page: Any, url: str) -> None:
        self.page, self.url = page, url
        self.asked: list[str] = []
        self.wrong: list[str] = []  # what the browser's console complained about
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("console", lambda said: self.wrong.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on("dialog", lambda dialog: (self.wrong.append(f"dialog: {dialog.message}"), dialog.dismiss()))

    def enter(self, token: str, view: str = "") -> None:
        self.page.goto(self.url + (f"#{view}" if view else ""))
        self.page.get_by_label("Your token").fill(token)
        self.page.keyboard.press("Enter")
        self.page.locator("#live[data-state=live]").wait_for()

    def go(self, view: str) -> None:
        self.page.evaluate("view => { location.hash = view; }", view)

    def focused(self) -> str:
        """The accessible name, or what stands for it, of where the keyboard is."""
        return str(
            self.page.evaluate(
                "() => "
                "{ const a = document.activeElement; return a.getAttribute('aria-label') || a.labels?.[0]?.textContent || a.textContent.trim() || a.tagName; }"
            )
        )

    def tab_to(self, name: str, *, backwards: bool = False) -> None:
        """As a keyboard does it: press Tab until it is there."""
        for _ in range(200):
            self.page.keyboard.press("Shift+Tab" if backwards else "Tab")
            if self.focused() == name:
                return
        raise AssertionError(f"the keyboard does not reach {name!r}")

    def violations(self) -> list[str]:
        """What axe finds, each with its place."""
        if not self.page.evaluate("() => 'axe' in window"):
            self.page.evaluate(AXE.read_text())  # by the debugger's door: the page's policy stays as it is
        found = self.page.evaluate(
            """async () => (await axe.run(document, {resultTypes: ['violations']})).violations.map(
              v => v.id + ': ' + v.nodes.map(n => n.target.join(' ') + ' (' + n.failureSummary + ')').join('; '))"""
        )
        return [str(one) for one in found]

    def hosts(self) -> set[str]:
        return {urlsplit(url).netloc for url in self.asked if urlsplit(url).scheme not in ("data", "blob")}


#: Good news leaves the page after nine seconds. A test on a crowded machine may come to look later than that.
MESSAGES_STAY = """
    const plain = window.setTimeout;
    window.setTimeout = (act, ms, ...more) => plain(act, ms === 9000 ? 300000 : ms, ...more);
"""


@contextlib.contextmanager
def a_page(browser: Any, url: str, **options: Any) -> Iterator[Studio]:
    """A tab of its own: nothing is kept from another one."""
    context = browser.new_context(**({"viewport": WIDE} | options))
    try:
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.add_init_script(MESSAGES_STAY)
        yield Studio(page, url)
    finally:
        context.close()


def expect_count(locator: Any, count: int) -> None:
    """Wait until so many are there: what the page shows next is drawn when its answer came."""
    playwright = import_module("playwright.sync_api")
    playwright.expect(locator).to_have_count(count, timeout=60_000)


def expect_text(locator: Any, text: str) -> None:
    playwright = import_module("playwright.sync_api")
    playwright.expect(locator).to_contain_text(text, timeout=60_000)


def need_axe() -> None:
    need(AXE.exists(), "axe-core from npm ('make setup' installs it)")
