"""Durations, bytes and bandwidths as the summary prints them: four digits in the unit that suits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpperf.results import units
from tests.generated import BOUNDED

UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1.234, "1.234 s"), (0.1321, "132.1 ms"), (45.6e-6, "45.60 us"),
        (12.3456, "12.35 s"), (123.456, "123.5 s"),
        (1234.4, "1234 s"), (1.0, "1.000 s"),
        (1e-3, "1.000 ms"), (1e-6, "1.000 us"), (9.994e-3, "9.994 ms"),
    ],
)  # fmt: skip
def test_seconds_have_four_significant_digits(seconds: float, text: str) -> None:
    assert units.seconds(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(46_760_000, "46.76 MB"), (1e9, "1 GB"), (2.5e9, "2.5 GB"), (1e3, "1 KB"), (1e6, "1 MB"), (4, "4 B")],
)
def test_bytes_are_counted_by_powers_of_ten(count: float, text: str) -> None:
    assert units.nbytes(count) == text
    assert units.bandwidth(count) == f"{text}/s"


@BOUNDED
@given(st.floats(1e-7, 1e5))
def test_a_formatted_duration_can_be_read_back(seconds: float) -> None:
    value, unit = units.seconds(seconds).split(" ")
    assert float(value) * UNITS[unit] == pytest.approx(seconds, rel=5.01e-4, abs=5.01e-10)
