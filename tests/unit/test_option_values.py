"""Parsers of option values, and the declared options."""

from __future__ import annotations

import argparse
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpperf.plugin.options import option_table
from ddpperf.plugin.options.option_table import FIELDS, OPTIONS, Option
from ddpperf.plugin.options.options import default_world_sizes
from tests.generated import BOUNDED


@pytest.mark.parametrize(
    ("device", "gpus", "expected"),
    [
        ("cpu", 0, (1, 2)),
        ("cpu", 8, (1, 2)),
        ("cuda", 0, (1,)),
        ("cuda", 1, (1,)),
        ("cuda", 2, (1, 2)),
        ("cuda", 4, (1, 2, 4)),
        ("cuda", 6, (1, 2, 4, 6)),
        ("cuda", 8, (1, 2, 4, 8)),
    ],
)
def test_world_sizes_default_to_powers_of_two_and_all_gpus(
    device: str, gpus: int, expected: tuple[int, ...]
) -> None:
    assert default_world_sizes(device, gpus) == expected


@pytest.mark.parametrize(("text", "value"), [("1", 1), (" 2 ", 2), ("999999", 999999), ("007", 7)])
def test_whole_numbers_are_parsed(text: str, value: int) -> None:
    assert option_table.WHOLE_NUMBER(text) == value


@pytest.mark.parametrize("text", ["", "0", "-1", "+1", "1.0", "1e3", "two", "٣", "²", "1_0", "1000000000"])
def test_other_texts_are_no_whole_numbers(text: str) -> None:
    sentence = f"takes a whole number from 1 to 999999999, got {text!r}; pass for example 2"
    with pytest.raises(argparse.ArgumentTypeError, match=f"^{re.escape(sentence)}$"):
        option_table.WHOLE_NUMBER(text)


@BOUNDED
@given(st.floats(), st.floats(1e-3, 1e6))
def test_numbers_are_above_0_and_up_to_a_limit(value: float, most: float) -> None:
    parse = option_table.number("seconds", "SECONDS", most, "0.5")
    if 0 < value <= most:
        assert parse(repr(value)) == value
    else:
        with pytest.raises(
            argparse.ArgumentTypeError, match=r"^takes seconds above 0 and up to .*, got .*; pass"
        ):
            parse(repr(value))


def test_the_limit_of_a_number_is_accepted() -> None:
    assert option_table.DELAY("10") == 10
    with pytest.raises(argparse.ArgumentTypeError, match=r"^takes seconds above 0 and up to 10, got"):
        option_table.DELAY(repr(math.nextafter(10, 11)))


@pytest.mark.parametrize("option", [*OPTIONS.values(), *FIELDS], ids=lambda option: option.name)
def test_example_of_each_option_is_accepted(option: Option) -> None:
    if option.parser is not option_table.SIDE:  # its example does not exist here
        assert option.parser(option.parser.example) is not None


def test_defaults_can_be_typed() -> None:
    typed = [option for option in OPTIONS.values() if isinstance(option.default, tuple)]
    assert len(typed) == 11
    for option in typed:
        assert [option.default_on(device) for device in ("cpu", "cuda")], option.name
