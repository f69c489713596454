"""Makes the tables of docs/options.md from the declared command-line options.

    PYTHONPATH=. python tools/update_options.py

The page has a table for each group of options and a table of the fields of --spec. The other text
of the page is written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from ddpperf.plugin.options.option_table import FIELDS, GROUPS, Option
from tools.markdown_tables import markdown

PAGE = Path(__file__).parents[1] / "docs" / "options.md"
MADE = re.compile(r"(<!-- made by tools/update_options.py -->\n).*?(<!-- end -->)", re.DOTALL)


def updated(page: str) -> str:
    """Return the text of docs/options.md with tables of today's command-line options."""
    tables = "\n".join(tables_of_options())
    return MADE.sub(lambda made: f"{made[1]}{tables}{made[2]}", page)


def tables_of_options() -> Iterator[str]:
    """Yield a heading and a table for each group of options, and then for the fields of --spec."""
    for title, options in GROUPS.items():
        yield f"## {title}\n\n{table(options)}"
    rows = [(f"`{name}`", help_text) for name, help_text in FIELDS.items()]
    yield f"## Fields of `--spec` and `--candidate`\n\n{markdown(('field', 'what it does'), rows)}"


def table(options: Iterable[Option]) -> str:
    """Return a Markdown table of options."""
    rows = []
    for option in options:
        repeat = " Repeat the option to set several." if option.repeated else ""
        name = f"{option.name} {option.metavar}".strip()
        rows.append((f"`{name}`", option.default_text, option.help + repeat))
    return markdown(("option", "default", "what it does"), rows)


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
