"""Sizes, rates and times as people write them."""

from collections.abc import Callable
from typing import Any

import pytest

from hetero.errors import ConfigError
from hetero.units import (
    format_bytes,
    format_rate,
    format_seconds,
    parse_budget,
    parse_bytes,
    parse_rate,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("parse", "value", "expected"),
    [
        (parse_bytes, 0, 0),
        (parse_bytes, "1.5 KiB", 1536),
        (parse_bytes, " 20GB ", 20_000_000_000),
        (parse_rate, "4GiB/s", 4.0 * 2**30),
        (parse_rate, 12, 12.0),
        (parse_seconds, "10us", 1e-5),
        (parse_seconds, "2 s", 2.0),
        (parse_seconds, 0, 0.0),
    ],
)
def test_what_people_write_is_read(parse: Callable[[Any], float], value: Any, expected: float) -> None:
    assert parse(value) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("value", "expected"), [("80%", 800), ("100%", 1000), (0.25, 250), (1.0, 1000), (1, 1), ("2KiB", 2048)]
)
def test_a_budget_is_bytes_or_a_share(value: Any, expected: int) -> None:
    assert parse_budget(value, 1000) == expected


@pytest.mark.parametrize(
    ("parse", "value", "message"),
    [
        (parse_bytes, "20G", "write '20GiB'"),
        (parse_bytes, "20", "a number and a unit"),
        (parse_bytes, "20 XB", "unknown unit 'XB'"),
        (parse_bytes, -1, "cannot be negative"),
        (parse_bytes, True, "expected bytes"),
        (parse_bytes, "9" * 400 + "GiB", "more than can be counted"),
        (parse_rate, "4GiB", "bytes per second"),
        (parse_rate, 0, "must be positive"),
        (parse_rate, float("nan"), "must be positive"),
        (parse_seconds, "3 h", "unknown unit 'h'"),
        (parse_seconds, float("inf"), "must be finite"),
    ],
)
def test_what_is_ambiguous_or_impossible_is_refused(
    parse: Callable[[Any], float], value: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(value)


@pytest.mark.parametrize("value", [0, 0.0, 1.5, float("nan"), "0%", "101%", "0B", "-1B"])
def test_a_budget_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError):
        parse_budget(value, 1000)


def test_numbers_are_written_as_people_read_them() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1536, 3 << 30, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3.0 GiB",
        "5.0 TiB",
    ]
    assert format_rate(4 << 30) == "4.0 GiB/s"
    assert [format_seconds(s) for s in (0.0, 2e-9, 3e-6, 0.0042, 61.0)] == [
        "0 s",
        "2 ns",
        "3.00 us",
        "4.20 ms",
        "61.00 s",
    ]
