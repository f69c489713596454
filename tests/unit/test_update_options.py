"""docs/options.md is made from the declared options."""

from __future__ import annotations

import pytest

from ddpperf.plugin.options.option_table import FIELDS, OPTIONS, Option
from tools import update_options

MOST_COLUMNS = 110


def test_page_of_options_is_current() -> None:
    page = update_options.PAGE.read_text()
    assert update_options.updated(page) == page, "run tools/update_options.py"


@pytest.mark.parametrize("option", OPTIONS.values(), ids=lambda option: option.name)
def test_every_option_is_on_the_page_in_short_cells(option: Option) -> None:
    (row,) = update_options.table([option]).splitlines()[2:]
    assert row in update_options.PAGE.read_text()
    cells = row.strip("| ").split(" | ")
    assert len(cells) == 3
    assert max(map(len, cells)) <= MOST_COLUMNS, row
    assert cells[-1].endswith(".")


def test_options_and_fields_are_few() -> None:
    assert (len(OPTIONS), len(FIELDS)) <= (28, 12)
