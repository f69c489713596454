"""Durations, bytes and bandwidths as the summary prints them: four digits in the unit that suits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ddpperf.results import units


@pytest.mark.parametrize(
    ("form", "value", "text"),
    [
        (units.seconds, 123.456, "123.5 s"),
        (units.seconds, 1234.4, "1234 s"),
        (units.seconds, 1e-3, "1.000 ms"),
        (units.nbytes, 1e9, "1 GB"),
        (units.nbytes, 1e3, "1 KB"),
        (units.nbytes, 4, "4 B"),
        (units.joules, 7.89e-3, "7.89 mJ"),
        (units.money, 0.00731, "0.00731"),
        (units.points, 0.012, "+1.2"),
    ],
)
def test_number_has_the_unit_that_suits(form: Callable[[float], str], value: float, text: str) -> None:
    assert form(value) == text
