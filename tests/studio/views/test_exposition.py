"""The text is what Prometheus reads: any label, exact numbers, cumulative buckets."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families as parsed

from sublet.core.journal.counters import Histogram
from sublet.studio.views.exposition import MetricSeries, MetricsPage, millionths

TABLE = (
    MetricSeries("x_total", "counter", "Some \\ text\nof two lines."),
    MetricSeries("y_seconds", "histogram", "Others."),
    MetricSeries("z", "gauge", "None."),
)


#: What a label is made of that could be taken for something else, and anything at all.
VALUES = st.text('"\\\n,={} n#') | st.text()


@given(st.dictionaries(st.sampled_from(["tenant", "kind", "UUID"]), VALUES), st.integers(0, 2**53))
def test_any_label_comes_back(labels: dict[str, str], value: int) -> None:
    page = MetricsPage(TABLE)
    page.tell("x_total", value, labels)
    page.tell("z", 1, {"tenant": "after"})
    text = page.text()
    assert text.count("\n") == 8  # nothing in a label breaks a line
    counter, _, gauge = parsed(text)
    [sample] = counter.samples
    assert (sample.name, sample.labels, sample.value) == ("x_total", labels, value)
    assert counter.documentation == "Some \\ text\nof two lines."
    assert gauge.samples[0].labels == {"tenant": "after"}


@given(st.integers(-(10**18), 10**18))
def test_millionths_are_exact(value: int) -> None:
    text = millionths(value)
    assert Decimal(text) * 1_000_000 == value
    assert "e" not in text.lower()


@given(st.lists(st.integers(0, 4_000_000)))
def test_buckets_are_cumulative(values: list[int]) -> None:
    found = Histogram((1_000_000, 2_500_000))
    for value in values:
        found.add(value)
    page = MetricsPage(TABLE)
    page.tell_histogram("y_seconds", found, {"tier": "spot"})
    [family] = [f for f in parsed(page.text()) if f.name == "y_seconds"]
    told = {s.labels.get("le", s.name): s.value for s in family.samples}
    assert list(told) == ["1", "2.5", "+Inf", "y_seconds_sum", "y_seconds_count"]
    assert told["1"] == sum(v <= 1_000_000 for v in values)
    assert told["2.5"] == sum(v <= 2_500_000 for v in values)
    assert told["+Inf"] == told["y_seconds_count"] == len(values)
    assert told["y_seconds_sum"] == pytest.approx(sum(values) / 1e6)


def test_what_is_not_described_is_not_told() -> None:
    with pytest.raises(KeyError):
        MetricsPage(TABLE).tell("unknown_total", 1)
