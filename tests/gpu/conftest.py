"""What all tests on GPUs need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def as_in_a_rank() -> Iterator[None]:
    """Stop CUPTI after each profile, as ranks do.

    Otherwise it slows every launch, and a profile after one that left it running may be empty.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEARDOWN_CUPTI", "1")
        yield
