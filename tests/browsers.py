"""A real browser that finds no other host. A headless one where it is installed: it costs half of what the same browser without a window does."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from tests.conftest import need

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


@contextlib.contextmanager
def a_browser() -> Iterator[Any]:
    need(find_spec("playwright") is not None, "playwright")
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    need(found is not None, "a Chromium browser")
    from playwright.sync_api import sync_playwright

    # A browser has business of its own with its maker. It finds nobody but this host.
    args = ["--no-sandbox", "--no-proxy-server", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=args)
        try:
            yield browser
        finally:
            browser.close()
