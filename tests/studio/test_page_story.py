"""The page before a real service: two tenants want one small device, and an operator takes it from the first.

What is asserted is what the pages show. Pictures are left in the test's folder, or in SUBLET_PAGE_SHOTS, for
somebody to look at.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sublet import wiring
from sublet.core.studio.token import Scope
from sublet.ports.ledger import Ledger
from tests.browsers import a_browser
from tests.homes import close_home, make_home
from tests.studio.conftest import HostedSessions
from tests.studio.in_browser import PHONE, Studio, a_page, expect_count, expect_text, need_axe
from tests.studio.served import Served, token_for

pytestmark = pytest.mark.timeout(
    400
)  # three browsers' pages, a service, a warden, a session host and workers
VIEWS = ("studio", "leases", "usage", "work", "receipts")
SOON = 60_000
HOSTILE = "<img src=x onerror='window.hit=1'><script>window.hit=1</script>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with a_browser() as found:
        yield found


@dataclass
class House:
    """A service in a process of its own, with all that stands behind one, and the tokens of its people."""

    served: Served
    ledger: Ledger
    tokens: dict[str, str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.served.port}/"


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    home = make_home(tmp_path, f"sqlite:{tmp_path}/home/ledger.db", monkeypatch, "host:1x1GiB")
    ledger = wiring.open_ledger(home.settings)
    ledger.set_price("host", 2_500_000, actor="test")
    tokens = {name: token_for(ledger, name) for name in ("ada", "ben")}
    tokens["operator"] = token_for(ledger, "operator", Scope.OPERATOR)
    served = Served(home.environment)
    served.start()
    yield House(served, ledger, tokens)
    served.kill()
    HostedSessions(home, ledger).kill_session_host()
    close_home(home)


@pytest.fixture
def shots(tmp_path: Path) -> Path:
    folder = Path(os.environ.get("SUBLET_PAGE_SHOTS") or tmp_path / "shots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def open_session(studio: Studio, vram: str, name: str, *, offers: bool = False, **fields: str) -> None:
    page = studio.page
    page.get_by_role("button", name="Open a session").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Memory (VRAM)").fill(vram)
    dialog.get_by_label("Name (may be empty)").fill(name)
    for label, value in fields.items():
        dialog.get_by_label(label).fill(value)
    dialog.get_by_label("Offer me less if that is free now").set_checked(offers)
    dialog.get_by_role("button", name="Open the session").click()
    dialog.wait_for(state="detached")


def row(studio: Studio, name: str) -> Any:
    return studio.page.get_by_role("table", name=re.compile("open sessions", re.I)).get_by_role(
        "row", name=name
    )


def becomes(studio: Studio, name: str, status: str) -> Any:
    """The row of a session, when it shows that status."""
    found = row(studio, name).filter(has=studio.page.get_by_role("cell", name=status, exact=True))
    found.wait_for(timeout=SOON)
    return found


def run(studio: Studio, code: str) -> Any:
    """In the session that is looked at, when what ran before is over; where its output comes."""
    studio.page.locator("button:not([aria-disabled=true])", has_text=re.compile("^Run$")).wait_for(
        timeout=SOON
    )
    studio.page.get_by_label("Python, run in the session's own worker").fill(code)
    studio.page.keyboard.press("Control+Enter")
    return studio.page.locator(".ran").last


def words(studio: Studio) -> str:
    return str(studio.page.locator("body").inner_text())


def test_a_device_goes_from_one_tenant_to_the_other(browser: Any, house: House, shots: Path) -> None:
    need_axe()
    served, tokens = house.served, house.tokens
    with contextlib.ExitStack() as open_pages:
        ada, ben, operator = (open_pages.enter_context(a_page(browser, house.url)) for _ in range(3))
        for studio, name in ((ada, "ada"), (ben, "ben"), (operator, "operator")):
            studio.enter(tokens[name])
        assert "No session is open." in words(ada)
        ada.page.screenshot(path=shots / "ada-empty.png")

        # ada opens a session and works in it
        open_session(ada, "768MiB", "training", **{"Checkpoint (may be empty)": "net"})
        becomes(ada, "training", "active")
        ada.page.get_by_role("link", name="training").click()
        ada.page.get_by_role("heading", name="Session training").wait_for()
        run(ada, "x = 20\nprint('hello from the worker')\nx + 1").get_by_text(re.compile("^Done")).wait_for(
            timeout=SOON
        )
        assert "hello from the worker\n21" in ada.page.locator(".ran").last.inner_text()
        output = run(
            ada,
            "import time\nfor i in range(100):\n    print('tick', i, flush=True); time.sleep(0.1)\n    if i > 5 and x > 20: break",
        )
        output.get_by_text("tick 2").wait_for(timeout=SOON)  # as it is printed, and not at the end
        assert output.get_by_text(re.compile("^Done")).count() == 0
        ada.page.screenshot(path=shots / "ada-runs.png")
        ada.page.keyboard.press("Control+Enter")  # one at a time, and nobody is left to guess why
        ada.page.get_by_role("status").get_by_text("Not run: the last code still runs").wait_for(timeout=SOON)
        expect_count(output, 1)
        expect_count(ada.page.locator(".ran"), 2)
        ada.page.get_by_role("button", name="Interrupt").click()
        output.get_by_text("KeyboardInterrupt").first.wait_for(timeout=SOON)
        failed = run(ada, "1 / 0")
        failed.get_by_text("ZeroDivisionError: division by zero").wait_for(timeout=SOON)
        hostile = run(ada, "print('<img src=x onerror=window.hit=1>')\nx")
        hostile.get_by_text("<img src=x onerror=window.hit=1>").first.wait_for(timeout=SOON)
        assert ada.page.evaluate("() => window.hit") is None
        run(ada, "import sublet\nsublet.save({'step': 3})").get_by_text(re.compile("^Done")).wait_for(
            timeout=SOON
        )
        ada.go("work")
        job = ada.page.get_by_role("row", name="studio/ada/net")
        job.wait_for(timeout=SOON)
        ada.page.screenshot(path=shots / "ada-jobs.png")
        ada.go("studio")

        # ben waits, and sees nothing of ada
        open_session(ben, "768MiB", "evaluation")
        waiting = becomes(ben, "evaluation", "waiting")
        expect_text(waiting, "place 1")
        assert "ada" not in words(ben)
        assert "training" not in words(ben)
        ben.page.screenshot(path=shots / "ben-waits.png")

        # the operator sees both, and takes ada's lease back
        becomes(operator, "training", "active")
        becomes(operator, "evaluation", "waiting")
        operator.page.screenshot(path=shots / "operator-before.png")
        row(operator, "training").get_by_role("button", name="Revoke the lease of training").click()
        dialog = operator.page.get_by_role("dialog")
        expect_text(dialog, "768 MiB on")
        dialog.get_by_label("Reason").fill("ben's deadline is today")
        dialog.get_by_label("Grace").fill("2s")
        operator.page.screenshot(path=shots / "operator-revokes.png")
        dialog.get_by_role("button", name="Revoke the lease").click()
        operator.page.get_by_role("status").get_by_text("is revoked: ben's deadline is today").wait_for()

        # ada hears it with its reason; ben starts; the receipt is there
        lost = becomes(ada, "training", "suspended")
        assert re.search("revoked: .*ben's deadline is today", lost.inner_text())
        ada.page.get_by_text(re.compile("training lost its GPU .*ben's deadline is today")).wait_for()
        becomes(ben, "evaluation", "active")
        ben.page.get_by_text("evaluation has a GPU now: 768 MiB.").wait_for()
        for studio, seen in ((ada, True), (operator, True), (ben, False)):
            studio.go("receipts")
            table = studio.page.get_by_role("table", name=re.compile("^Receipts"))
            if seen:
                proof = table.get_by_role("row", name="ada")
                proof.get_by_text("proven").wait_for(timeout=SOON)
                assert re.search(r"\d (ms|s)", proof.inner_text())
            else:
                studio.page.get_by_text("No Receipt yet.").wait_for()
        operator.page.screenshot(path=shots / "operator-receipts.png")
        for studio in (ada, ben, operator):
            studio.go("studio")
        operator.page.get_by_role("button", name="Show the last 10 minutes only").click()
        operator.page.locator("rect.bar.taken").first.hover()
        operator.page.get_by_role("tooltip").get_by_text(
            re.compile("revoked: .*ben's deadline is today")
        ).wait_for()
        operator.page.screenshot(path=shots / "operator-after.png")

        # it is suspended, not gone: resumed it waits, and goes on when ben ends
        row(ada, "training").get_by_role("button", name="Resume training").click()
        becomes(ada, "training", "waiting")
        row(ben, "evaluation").get_by_role("button", name="End evaluation").click()
        ben.page.get_by_role("dialog").get_by_role("button", name="End the session").click()
        ben.page.get_by_text("No session is open.").wait_for(timeout=SOON)
        becomes(ada, "training", "active")

        # the service dies and comes back: pages say so, sessions do not notice
        ada.page.get_by_role("link", name="training").click()
        run(ada, "y = runs = 0").get_by_text(re.compile("^Done")).wait_for(timeout=SOON)
        long = run(
            ada,
            "import time\nruns += 1\nfor i in range(30): print('line', i, flush=True); time.sleep(0.2)",
        )
        long.get_by_text("line 3").wait_for(timeout=SOON)
        served.kill()
        for studio in (ada, operator):
            studio.page.get_by_role("status").get_by_text("Not live since").wait_for()
        ada.page.screenshot(path=shots / "ada-not-live.png")
        served.start()
        for studio in (ada, operator):
            studio.page.locator("#live[data-state=live]").wait_for(timeout=SOON)
        # what ran went on, is seen whole, and was not run twice
        long.get_by_text(re.compile("^Done")).wait_for(timeout=SOON)
        lines = [f"line {i}" for i in range(30)]
        assert [line for line in long.inner_text().splitlines() if re.fullmatch(r"line \d+", line)] == lines
        run(ada, "'runs', runs").get_by_text("('runs', 1)").wait_for(timeout=SOON)
        ada.page.screenshot(path=shots / "ada-session.png")

        for studio in (ada, ben, operator):
            assert studio.hosts() == {house.url.split("/")[2]}
            assert not any(token in url for url in studio.asked for token in tokens.values())
            refused = [said for said in studio.wrong if "ERR_" not in said]  # while the service was away
            assert refused == []
            assert studio.page.locator("#said-problem").inner_text() == ""
            for scheme in ("light", "dark") if studio is operator else ("light",):
                studio.page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
                for view in VIEWS:
                    studio.go(view)
                    if view == "usage":
                        studio.page.get_by_role("table", name="Usage by tenant").wait_for(timeout=SOON)
                    assert studio.violations() == [], f"{view}, {scheme}"
        photograph(operator, "operator", shots)
        photograph(ada, "ada", shots)


def photograph(studio: Studio, whose: str, shots: Path) -> None:
    for scheme in ("light", "dark"):
        studio.page.emulate_media(color_scheme=scheme)
        for view in VIEWS:
            studio.go(view)
            studio.page.wait_for_timeout(150)
            studio.page.screenshot(path=shots / f"{whose}-{view}-{scheme}.png")
    studio.page.set_viewport_size(PHONE)
    for view in VIEWS:
        studio.go(view)
        studio.page.wait_for_timeout(150)
        assert studio.page.evaluate("() => document.documentElement.scrollWidth") <= PHONE["width"], view
        studio.page.screenshot(path=shots / f"{whose}-{view}-phone.png", full_page=True)


def test_an_offer_is_seen_and_taken_and_operators_change_things(
    browser: Any, house: House, shots: Path
) -> None:
    with contextlib.ExitStack() as open_pages:
        ada, ben, operator = (open_pages.enter_context(a_page(browser, house.url)) for _ in range(3))
        for studio, name in ((ada, "ada"), (ben, "ben"), (operator, "operator")):
            studio.enter(house.tokens[name])
        open_session(ada, "768MiB", "first")
        becomes(ada, "first", "active")
        open_session(ben, "512MiB", "second", offers=True)
        offer = ben.page.get_by_role("region", name="Offers")
        offer.wait_for(timeout=SOON)
        said = offer.inner_text()
        assert "256 MiB" in said
        assert "2.50 per GPU-hour" in said
        assert re.search(r"Answer within\s+\d:\d\d", said)
        ben.page.screenshot(path=shots / "ben-offer.png")
        offer.get_by_role("button", name="Accept 256 MiB for second").click()
        assert "256 MiB" in becomes(ben, "second", "active").inner_text()

        # words of theirs stay words, on their page and on the operator's
        open_session(ada, "64MiB", HOSTILE)
        for studio in (ada, operator):
            studio.page.get_by_role("link", name=HOSTILE).wait_for(timeout=SOON)
            assert studio.page.evaluate("() => window.hit") is None

        page, dialog = operator.page, operator.page.get_by_role("dialog")
        page.get_by_role("button", name=re.compile("^Drain ")).click()
        dialog.get_by_label("Note").fill("new fan at noon")
        dialog.get_by_role("button", name="Drain the device").click()
        page.get_by_text("Why: new fan at noon").wait_for()
        page.get_by_role("button", name=re.compile("^Clear ")).first.click()
        dialog.get_by_role("button", name="Say that it is clean").click()
        page.get_by_role("button", name=re.compile("^Drain ")).wait_for()
        operator.go("usage")
        page.get_by_role("button", name="Set quotas of ben").click()
        dialog.get_by_label("Leases at once").fill("2")
        dialog.get_by_label("VRAM at once").fill("2GiB")
        dialog.get_by_role("button", name="Set the quotas").click()
        page.get_by_role("row", name="ben").get_by_text("leases at once 2 · VRAM at once 2 GiB").wait_for()
        assert house.ledger.tenant("ben").max_vram_bytes == 2 << 30
        assert operator.wrong == []

        # a token that is taken away shows the way in again, and why
        house.ledger.revoke_token(house.tokens["ben"].split("_")[1], actor="test")
        ben.page.get_by_role("heading", name="Sign in to the studio").wait_for(timeout=SOON)
        assert "was revoked" in ben.page.locator("#sign-in-problem").inner_text()
        assert "second" not in words(ben)
