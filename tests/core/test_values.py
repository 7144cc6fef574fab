"""What people type becomes an exact integer or a sentence that says what would be accepted."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sublet.core.errors import BadInput
from sublet.core.values import (
    DAY_US,
    HOUR_US,
    MAX_BYTES,
    MAX_DURATION_US,
    MINUTE_US,
    SECOND_US,
    SizeRange,
    check_job,
    check_name,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
    parse_size_range,
)

quick = settings(max_examples=150, deadline=None)

HOSTILE = [
    "",
    " ",
    "\n",
    "\x00",
    "-5m",
    "- 5m",
    "+5m",
    "5 m",
    "5x",
    "m",
    "5mm",
    "5m 30s",
    "five",
    "1e3",
    "0x10",
    "1_000",
    "nan",
    "inf",
    "None",
    "5m; DROP TABLE lease; --",
    "' OR 1=1 --",
    "1.5.5s",
    ".5s",
    "5.s",
    "1:2:3:4",
    "1:5",
    "1:005",
    "²",
    "½h",
    "५m",
    "５m",
    "٥:٣٠",
    "1\u200bh",
    "10MiBs",
    "..",
]


@pytest.mark.parametrize(
    ("text", "us"),
    [
        ("30s", 30 * SECOND_US),
        ("5m", 5 * MINUTE_US),
        ("1h30m", 90 * MINUTE_US),
        ("1d2h3m4s5ms6us", DAY_US + 2 * HOUR_US + 3 * MINUTE_US + 4 * SECOND_US + 5_006),
        ("1:30:00", 90 * MINUTE_US),
        ("5:30", 5 * MINUTE_US + 30 * SECOND_US),
        ("0:00", 0),
        ("100:00:00", 100 * HOUR_US),
        ("0.1s", 100_000),
        ("1.5h", 90 * MINUTE_US),
        ("  5m\n", 5 * MINUTE_US),
        ("90", 90 * SECOND_US),
        ("0", 0),
        (90, 90 * SECOND_US),
        (0, 0),
        (0.25, 250_000),
        (-0.0, 0),
        ("366d", MAX_DURATION_US),
    ],
)
def test_a_duration_is_read_exactly(text: str | int | float, us: int) -> None:
    got = parse_duration(text)
    assert got == us
    assert type(got) is int


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_duration(text, what="ttl")
    assert "ttl" in caught.value.message
    assert re.search(r"\b(30s|5m|24h)\b", caught.value.message)


@pytest.mark.parametrize("value", [True, False, None, b"5m", [5], {"s": 5}, object(), 1j])
def test_a_duration_of_another_type_is_refused(value: object) -> None:
    with pytest.raises(BadInput):
        parse_duration(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value",
    [
        -1,
        -0.001,
        float("nan"),
        float("inf"),
        float("-inf"),
        367 * 86_400,
        "367d",
        "9" * 40,
        10**40,
        1e30,
        pytest.param("9" * 5000, id="5000 digits"),
        pytest.param("9" * 5000 + "m", id="5000 digits of minutes"),
        pytest.param("9" * 5000 + ":00:00", id="5000 digits on a clock"),
        pytest.param(10**5000, id="int of 5000 digits"),
        1e305,
        1.7976931348623157e308,
    ],
)
def test_a_duration_out_of_range_is_refused(value: str | int | float) -> None:
    with pytest.raises(BadInput) as caught:
        parse_duration(value)
    assert caught.value.message


@pytest.mark.parametrize("parse", [parse_duration, parse_size, parse_size_range])
def test_a_refusal_does_not_repeat_a_long_input(parse) -> None:
    with pytest.raises(BadInput) as caught:
        parse("x" * 100_000)
    assert len(caught.value.message) < 300


@quick
@given(st.integers(0, MAX_DURATION_US))
def test_a_duration_in_microseconds_round_trips(us: int) -> None:
    assert parse_duration(f"{us}us") == us
    assert parse_duration(f"{us // SECOND_US}.{us % SECOND_US:06d}s") == us


@quick
@given(st.integers(0, 9000), st.integers(0, 59), st.integers(0, 59))
def test_a_clock_says_the_same_as_its_parts(hours: int, minutes: int, seconds: int) -> None:
    clock = f"{hours}:{minutes:02d}:{seconds:02d}"
    expected = hours * HOUR_US + minutes * MINUTE_US + seconds * SECOND_US
    if expected <= MAX_DURATION_US:
        assert parse_duration(clock) == parse_duration(f"{hours}h{minutes}m{seconds}s") == expected
    else:
        with pytest.raises(BadInput):
            parse_duration(clock)


@pytest.mark.parametrize("text", ["1:99:99", "1:60:00", "1:00:60", "5:99"])
def test_a_clock_that_no_clock_shows_is_refused(text: str) -> None:
    with pytest.raises(BadInput):
        parse_duration(text)


@quick
@given(st.text(max_size=20))
@example("٣s")
def test_no_text_crashes_the_reader_or_is_read_wrongly(text: str) -> None:
    for parse in (parse_duration, parse_size, parse_size_range):
        try:
            got = parse(text)
        except BadInput:
            continue
        assert text.isascii(), f"{parse.__name__} read {text!r} as {got}"


@quick
@given(st.integers(0, MAX_DURATION_US))
@example(999)
@example(9_999_999)
@example(59_999_999)
def test_a_shown_duration_reads_back_to_what_it_shows(us: int) -> None:
    shown = format_duration(us)
    assert len(shown) <= 7
    back = parse_duration(shown)
    assert abs(back - us) <= max(1_000, us // 10), f"{us} was shown as {shown}"


@pytest.mark.parametrize(
    ("us", "shown"),
    [
        (0, "0ms"),
        (350_000, "350ms"),
        (4_200_000, "4.2s"),
        (42 * SECOND_US, "42s"),
        (725 * SECOND_US, "12m05s"),
        (3 * HOUR_US + 7 * MINUTE_US, "3h07m"),
        (2 * DAY_US + 4 * HOUR_US, "2d04h"),
        (-5 * SECOND_US, "-5.0s"),
    ],
)
def test_a_duration_is_shown_short(us: int, shown: str) -> None:
    assert format_duration(us) == shown


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GB", 8_000_000_000),
        ("16GiB", 16 << 30),
        ("512MB", 512_000_000),
        ("1.5GB", 1_500_000_000),
        ("8gb", 8_000_000_000),
        ("8G", 8 << 30),
        ("512m", 512 << 20),
        ("8 GB", 8_000_000_000),
        (" 8GB ", 8_000_000_000),
        ("1024", 1024),
        ("1B", 1),
        (1, 1),
        (MAX_BYTES, MAX_BYTES),
        ("1024TiB", MAX_BYTES),
    ],
)
def test_a_size_is_read_exactly(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        *(t for t in HOSTILE if t not in ("1_000", "5 m")),  # five MiB
        "1_000",
        "-8GB",
        "8QB",
        "8GBps",
        "8G B",
        "８GB",
        "٨GB",
        "8GB; DROP TABLE device",
        "0",
        "0GB",
        "0.1B",
        "1025TiB",
        "9" * 40,
        pytest.param("9" * 5000, id="5000 digits"),
    ],
)
def test_a_hostile_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_size(text, what="vram")
    assert "vram" in caught.value.message
    assert "GB" in caught.value.message


@pytest.mark.parametrize(
    "value",
    [
        True,
        False,
        None,
        1.5,
        float("nan"),
        b"8GB",
        -1,
        0,
        MAX_BYTES + 1,
        pytest.param(10**5000, id="int of 5000 digits"),
    ],
)
def test_a_size_of_another_type_or_range_is_refused(value: object) -> None:
    with pytest.raises(BadInput):
        parse_size(value)  # type: ignore[arg-type]


@quick
@given(st.integers(1, MAX_BYTES))
def test_a_size_in_bytes_round_trips(size: int) -> None:
    assert parse_size(size) == parse_size(str(size)) == parse_size(f"{size}B") == size


def test_a_range_has_two_ends_or_one() -> None:
    assert parse_size_range("24GB..80GB") == SizeRange(24 * 10**9, 80 * 10**9)
    assert parse_size_range("24GB .. 80GB") == SizeRange(24 * 10**9, 80 * 10**9)
    assert parse_size_range("16GiB") == SizeRange(16 << 30, 16 << 30)
    assert parse_size_range("8GB..8GB") == SizeRange(8 * 10**9, 8 * 10**9)
    assert parse_size_range(4096) == SizeRange(4096, 4096)


@pytest.mark.parametrize(
    "text",
    ["80GB..24GB", "..", "8GB..", "..8GB", "8GB...80GB", "1GB..2GB..3GB", "0..8GB", "-1GB..8GB", "", True],
)
def test_a_range_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(BadInput):
        parse_size_range(text)


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (16 << 30, "16GiB"),
        (8_000_000_000, "8GB"),
        (24_000_000_000, "24GB"),
        (80_000_000_000, "80GB"),
        (512_000_000, "512MB"),
        (1 << 40, "1TiB"),
        (1_500_000_001, "1.5GB"),
        (999, "999B"),
        (0, "0B"),
        (-8_000_000_001, "-8.0GB"),
    ],
)
def test_a_size_is_shown_short(size: int, shown: str) -> None:
    assert format_size(size) == shown


@quick
@given(st.integers(1, MAX_BYTES // 2))
def test_a_shown_size_reads_back_to_what_it_shows(size: int) -> None:
    assert abs(parse_size(format_size(size)) - size) <= size // 10


@quick
@given(st.integers(1, 999), st.sampled_from(["KB", "MB", "GB", "TB", "KiB", "MiB", "GiB"]))
def test_a_whole_number_of_a_unit_is_shown_in_at_most_seven_characters(count: int, unit: str) -> None:
    size = parse_size(f"{count}{unit}")
    assert parse_size(format_size(size)) == size
    assert len(format_size(size)) <= 7


@pytest.mark.parametrize("name", ["a", "ann", "Ann-2", "ann@lab.example", "0", "a" * 63, "gpu_0"])
def test_a_name_is_returned_as_it_is(name: str) -> None:
    assert check_name(name, what="tenant") == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        " ",
        "-a",
        ".a",
        "_a",
        "@a",
        "a b",
        "a\n",
        "a/b",
        "a:b",
        "a'b",
        "é",
        "ａ",
        "a" * 64,
        "a\x00",
        "*",
        None,
        5,
    ],
)
def test_what_is_not_a_name_is_refused(name: object) -> None:
    with pytest.raises(BadInput) as caught:
        check_name(name, what="tenant")  # type: ignore[arg-type]
    assert caught.value.message.startswith("tenant ")


@pytest.mark.parametrize("job", ["train", "lab/train:v2", "a" * 127, "a.b-c_d@e"])
def test_a_job_is_returned_as_it_is(job: str) -> None:
    assert check_job(job) == job


@pytest.mark.parametrize(
    "job", ["", "/etc/passwd", "a/../b", "..", "a..", ":a", "a" * 128, "a b", "a\n", "é", "a;b", None, 1]
)
def test_what_is_not_a_job_is_refused(job: object) -> None:
    with pytest.raises(BadInput):
        check_job(job)  # type: ignore[arg-type]


def test_a_refusal_of_a_long_name_is_short() -> None:
    with pytest.raises(BadInput) as caught:
        check_name("x" * 10_000, what="tenant")
    assert len(caught.value.message) < 300
