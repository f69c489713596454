"""What all tests on GPUs need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def as_in_a_rank() -> Iterator[None]:
    """Stop CUPTI after each profile, as ranks do.

    A CUPTI that still runs slows every launch, and the next profile may be empty.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEARDOWN_CUPTI", "1")
        yield
