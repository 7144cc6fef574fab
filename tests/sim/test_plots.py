"""Bars as text and as SVG: to scale, named, and safe to open."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from sublet.core.errors import BadInput
from sublet.sim.plots import PlotPanel, as_svg, as_text, write

PANELS = [
    PlotPanel(title="p99 <wait>", unit="s", bars=(("ours", 50.0), ("fifo & co", 100.0), ("none", 0.0))),
    PlotPanel(title="jain", digits=2, bars=(("ours", 0.5),)),
]


def test_bars_of_text_are_to_scale():
    lines = as_text(PANELS, width=8).splitlines()
    assert lines == [
        "p99 <wait>",
        "  ours       ████ 50s",
        "  fifo & co  ████████ 100s",
        "  none        0s",
        "",
        "jain",
        "  ours  ████████ 0.50",
    ]
    assert "▌" in as_text([PlotPanel(title="t", bars=(("a", 0.5), ("b", 8.0)))], width=8)


def test_an_svg_is_well_formed_to_scale_and_needs_nothing_from_elsewhere():
    text = as_svg("a <title>", PANELS)
    root = ET.fromstring(text)
    rects = [
        float(r.get("width"))
        for r in root.iter("{http://www.w3.org/2000/svg}rect")
        if "%" not in r.get("width")
    ]
    assert rects[0] == pytest.approx(rects[1] / 2)
    assert (rects[2], rects[3]) == (0, rects[1])
    words = [t.text for t in root.iter("{http://www.w3.org/2000/svg}text")]
    assert words[0] == "a <title>"
    assert "fifo & co" in words
    assert "100s" in words
    assert text.count("http") == 1  # its own name space
    assert as_svg("t", PANELS) == as_svg("t", PANELS)


def test_nothing_but_zeros_can_be_drawn():
    empty = [PlotPanel(title="t", bars=(("a", 0.0),))]
    assert as_text(empty).splitlines()[1] == "  a   0"
    assert 'width="0.0"' in as_svg("t", empty)


def test_a_file_is_written_by_its_ending(tmp_path: Path):
    write(tmp_path / "a.svg", "t", PANELS)
    assert (tmp_path / "a.svg").read_text() == as_svg("t", PANELS)
    with pytest.raises(BadInput, match=r"ends in \.svg or \.png"):
        write(tmp_path / "a.gif", "t", PANELS)
    with pytest.raises(BadInput, match="cannot be written"):
        write(tmp_path / "none" / "a.svg", "t", PANELS)


def test_a_png_where_matplotlib_is_installed(tmp_path: Path):
    pytest.importorskip("matplotlib")
    write(tmp_path / "a.png", "t", PANELS)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_is_said(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(BadInput, match="needs matplotlib, which is not installed"):
        write(tmp_path / "a.png", "t", PANELS)
