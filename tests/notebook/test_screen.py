"""What is drawn: as text and as HTML, safe to show."""

from __future__ import annotations

import re

import pytest

from sublet.core.errors import BadInput
from sublet.core.values import parse_price
from sublet.notebook.screen import countdown, fields, line, table, title

HOSTILE = "<script>alert(1)</script> & \"quoted\" 'x'"


def test_nothing_a_name_contains_becomes_markup() -> None:
    for drawn in (
        line(HOSTILE),
        title(HOSTILE),
        table([HOSTILE], [[HOSTILE]]),
        fields([(HOSTILE, HOSTILE)]),
    ):
        assert "<script>" not in drawn.html
        assert "&lt;script&gt;" in drawn.html
        assert HOSTILE in drawn.text


def test_figures_stand_to_the_right() -> None:
    drawn = table(["cell", "GPU-s"], [["In [2]", "0.5"], ["In [10]", "12.25"]], total=["total", "12.75"])
    assert drawn.text.splitlines() == [
        "cell     GPU-s",
        "In [2]     0.5",
        "In [10]  12.25",
        "total    12.75",
    ]
    assert drawn.html.count("<tr") == 4
    assert drawn.html.count("border-top") == 1


def test_the_countdown_is_styles_only_and_no_two_share_one() -> None:
    one, two = countdown(75.4, 300), countdown(75.4, 300)
    assert one.text == "1:15 left of 5:00"
    assert 'aria-label="1:15 left of 5:00"' in one.html
    assert "<script" not in one.html
    assert not set(re.findall(r"sublet-[0-9a-f]{8}", one.html)) & set(
        re.findall(r"sublet-[0-9a-f]{8}", two.html)
    )
    assert "25.13%" in one.html
    assert countdown(0, 0).text == "0:00 left of 0:00"


@pytest.mark.parametrize(
    ("text", "micro"),
    [("2.50", 2_500_000), ("0", 0), ("0.000001", 1), ("1000000", 10**12), (" 3 ", 3_000_000)],
)
def test_prices(text: str, micro: int) -> None:
    assert parse_price(text) == micro


@pytest.mark.parametrize("text", ["", "-1", "1e3", "nan", "2,50", "0.0000001", "12345678", "€2", "²"])
def test_what_is_no_price(text: str) -> None:
    with pytest.raises(BadInput, match="not a price"):
        parse_price(text)
