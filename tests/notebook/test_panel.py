"""What is shown of a bill and of a quota."""

from __future__ import annotations

import re
from decimal import Decimal
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sublet import wiring
from sublet.core.leasing.tenancy import Tenant
from sublet.notebook.panel import GpuPanel, _seconds, in_seconds
from sublet.notebook.screen import Frontend
from sublet.notebook.workbench import Workbench
from tests.homes import Home


@given(st.lists(st.integers(0, 10**10)))
def test_the_seconds_that_are_shown_add_up_to_the_total_that_is_shown(parts: list[int]) -> None:
    shown = [Decimal(text) for text in in_seconds(parts)]
    assert sum(shown) == Decimal(_seconds(sum(parts)))
    for part, text in zip(parts, shown, strict=True):
        assert abs(Decimal(part) / 1_000_000 - text) <= Decimal("0.001")


def test_the_quota_says_what_is_left_of_the_days_gpu_time(
    sqlite_home: Home,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SUBLET_TENANT", "ada")
    ledger = wiring.open_ledger(sqlite_home.settings)
    ledger.add_tenant(Tenant(name="ada"), actor="test")
    front = Frontend(SimpleNamespace(user_ns={}))
    panel = GpuPanel(front, Workbench(front))
    panel.quota()
    assert "GPU time a day" not in capsys.readouterr().out
    ledger.set_tenant("ada", actor="test", gpu_us_per_day=7_200_000_000)
    panel.quota()
    assert re.search(
        r"left 2h00m of 2h00m a day, full again at \d{4}-\d\d-\d\d \d\d:", capsys.readouterr().out
    )
