"""The dashboard and the manual speak of series that exist, and of all of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families as parsed

from sublet.studio.views.metrics import TABLE, Meters
from tests.conftest import repository
from tests.ledger.rig import Rig

ROOT = Path(__file__).parents[2]
BOARD = repository("deploy/grafana/sublet.json")
PAGE = ROOT / "docs" / "how-to" / "watch-a-studio.md"
NAME = re.compile(r"\b(?:sublet|DCGM|process)_[A-Za-z0-9_]+")


@pytest.fixture
def board() -> dict[str, Any]:
    return json.loads(BOARD.read_text())


def queries(board: dict[str, Any]) -> list[str]:
    found = [t["expr"] for panel in board["panels"] for t in panel.get("targets", ())]
    return [*found, *(v["definition"] for v in board["templating"]["list"] if "definition" in v)]


def known(sqlite: Rig) -> set[str]:
    """Every name a query may use, from a real scrape."""
    found: set[str] = set()
    for family in parsed(Meters().render(sqlite.ledger)):
        series = next(s for s in TABLE if s.name.removesuffix("_total") == family.name)
        ends = ("_bucket", "_sum", "_count") if series.kind == "histogram" else ("",)
        found |= {series.name + end for end in ends}
    return found


def test_the_dashboard_asks_only_for_what_there_is(board: dict[str, Any], sqlite: Rig) -> None:
    names = known(sqlite)
    asked = {name for query in queries(board) for name in NAME.findall(query)}
    assert asked <= names
    shown = " ".join(queries(board))
    for what in ("wait", "active", "preemptions", "teardown", "quarantined", "useful", "gpu_seconds", "cost"):
        assert what in shown


def test_the_dashboard_is_one_grafana_imports(board: dict[str, Any]) -> None:
    assert {"title", "uid", "schemaVersion", "panels", "templating", "time"} <= board.keys()
    assert board["schemaVersion"] >= 39
    assert board["id"] is None  # Grafana gives it one
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    assert board["templating"]["list"][0]["type"] == "datasource"
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert 0 <= place["x"] <= 24 - place["w"]
        if panel["type"] == "row":
            continue
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["targets"]
        for target in panel["targets"]:
            assert target["datasource"] == panel["datasource"]
            assert target["expr"].count("(") == target["expr"].count(")")
            assert re.search(r"\b(?:by|and) |max\(", target["expr"]), "instances would be summed"


def test_panels_do_not_lie_on_each_other(board: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_what_is_the_same_from_each_service_is_never_summed_over_them(board: dict[str, Any]) -> None:
    """`max` first: two services on one ledger tell the same counters."""
    own = re.compile(r"sublet_http_|process_|sublet_scrape_seconds")
    for query in [*queries(board), *re.findall(r"expr: (.*)", PAGE.read_text())]:
        if query.startswith("label_values") or own.search(query):
            continue
        assert not re.search(
            r"(?:sum|avg)(?: by \([^)]*\))? \((?:rate|increase)?\(?(?:sublet|DCGM)_", query
        ), query
        for name in NAME.findall(query):
            before = query[: query.index(name)]
            assert "max" in before, query


def test_every_series_is_in_the_manual() -> None:
    page = PAGE.read_text()
    named = set(NAME.findall(page))
    names = {series.name for series in TABLE}
    assert names <= named
    ends = {f"{s.name}{end}" for s in TABLE if s.kind == "histogram" for end in ("_bucket", "_sum", "_count")}
    assert named <= names | ends


def test_every_label_in_the_manual_is_told(sqlite: Rig) -> None:
    sqlite.devices({"gpu0": 100})
    sqlite.tenant("ada")
    first, second = sqlite.ask(10), sqlite.ask(10)
    sqlite.commit(first, 1)
    sqlite.commit(second, 1)
    meters = Meters()
    meters.own.request("GET", "/", 200, 0)
    text = meters.render(sqlite.ledger)
    for name, labels in re.findall(r"`(sublet_[a-z_]+)\{([a-z,]+)\}`", PAGE.read_text()):
        lines = [line for line in text.splitlines() if re.match(rf"{name}(_bucket)?\{{", line)]
        for label in labels.split(","):
            assert all(f'{label}="' in line for line in lines), (name, label)
