"""docs/options.md is made from the declared options."""

from __future__ import annotations

from ddpperf.plugin.options.option_table import FIELDS, OPTIONS
from tools import update_options


def test_page_of_options_is_current() -> None:
    page = update_options.PAGE.read_text()
    assert update_options.updated(page) == page, "run tools/update_options.py"


def test_options_and_fields_are_few() -> None:
    assert (len(OPTIONS), len(FIELDS)) <= (29, 10)
