"""Foreign text is harmless wherever it leaves ddpperf: on a terminal, a page or in a log of GitHub."""

from __future__ import annotations

import io
import math
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpperf.errors import Refused
from ddpperf.io.command import print_lines, refused
from ddpperf.io.terminal_text import MAX_LINES, harmless, printable_document, shortened
from tests.canned import CannedSuite
from tests.generated import BOUNDED

TITLE = "\x1b]0;owned\x07"  # sets the title of a terminal
NASTY = f"{TITLE}\x9b31m\n::error::a lie\n  ::add-mask::x ##[error]a lie"
OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]|^\s*::|##\w*\[", re.MULTILINE)


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("a\tb\nc caf\u00e9 \u65e5\u672c \udcff", "a\tb\nc caf\u00e9 \u65e5\u672c \udcff"),
        ("\x1b[2J\r\x00\x7f\x9b a\u202eb", "?[2J???? a?b"),
        ("::error::no\n \t::set-env::no", ": :error::no\n \t: :set-env::no"),
        ("at ##[error]no ##vso[task.x]", "at ## [error]no ## vso[task.x]"),
        ("test_a.py::test_b[2gpu]\n## ddpperf: PASS", "test_a.py::test_b[2gpu]\n## ddpperf: PASS"),
    ],
)
def test_controls_and_workflow_commands_are_broken(text: str, result: str) -> None:
    assert harmless(text) == result


@BOUNDED
@given(st.text(st.sampled_from(":#[ \t\n\x1b\x85ae]\u2028"), max_size=12))
def test_no_text_is_obeyed(text: str) -> None:
    assert not OBEYED.search(harmless(text))
    assert harmless(harmless(text)) == harmless(text)


def test_all_strings_of_a_document_are_printable() -> None:
    found = printable_document({"a\x1b": ["b\x9b", {"c": ("d\x00", 1, None, True)}], 2: math.nan})
    assert found == {"a?": ["b?", {"c": ["d?", 1, None, True]}], "2": "nan"}


def test_long_text_keeps_its_beginning_and_end() -> None:
    lines = [f"line {number}" for number in range(MAX_LINES + 7)]
    found = shortened("\n".join(lines)).splitlines()
    assert len(found) == MAX_LINES + 1
    assert (found[0], found[-1]) == (lines[0], lines[-1])
    assert found[MAX_LINES // 2] == "... (7 lines dropped)"


# --- where foreign text leaves


def test_printed_lines_and_refusals_are_harmless(capfd: pytest.CaptureFixture[str]) -> None:
    print_lines([NASTY])
    refused(Refused(f"::error::{TITLE}"))
    printed = capfd.readouterr()
    assert "a lie" in printed.out
    assert not OBEYED.search(printed.out)
    assert printed.err == ": :error::?]0;owned?\n"


def test_output_is_utf_8_in_any_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    print_lines(["caf\u00e9", "a name that is no text: \udcff"])
    assert written.getvalue() == b"caf\xc3\xa9\na name that is no text: \\udcff\n"
    monkeypatch.setattr(sys, "stdout", None)  # as Python does after >&-
    print_lines(["a line"])


NASTY_NOTE = """
from ddpperf.specs import AllReduceSpec

NASTY = {nasty!r}

def test_all_reduce(measure):
    measure(AllReduceSpec(world_size=2, nbytes=1024))
    measure.warn(NASTY + " word" * 40 + NASTY.strip())

def test_refused(measure):
    measure(AllReduceSpec(world_size=2, nbytes=2048))
    measure.metric(NASTY, {{"A1": 1.0}})
"""


def test_run_prints_and_writes_foreign_text_harmless(canned_suite: CannedSuite) -> None:
    canned_suite.experiment.write_text(NASTY_NOTE.format(nasty=NASTY))
    run = canned_suite.run("perf", "--verdict", "verdict.md", "--report", "page.html", "--color=no")
    verdict = (canned_suite.root / "verdict.md").read_text()
    page = (canned_suite.root / "page.html").read_text()
    assert all("a lie" in text for text in (run.output, verdict, page))
    for text in (run.output, verdict):
        assert not OBEYED.search(text), OBEYED.findall(text)
    assert not re.search("[\x1b\x9b]", page)
