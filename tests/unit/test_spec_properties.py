"""The words of tables and pages for what a test measures, and for a training recipe."""

from __future__ import annotations

import pytest

from ddpperf.report.spec_properties import in_words


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("recipe", "64, warm-up", 'recipe "64, warm-up"'),
        ("batch", "32", "batch 32 per rank"),
        ("ranks", "1", "1 rank"),
    ],
)
def test_property_is_clear_in_a_list(name: str, value: str, words: str) -> None:
    assert in_words(name, value) == words
