"""Which timings of the small graph count as the slow pace. tests/gpu has the two paces themselves."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ddpperf.workers.gpu_pace import GpuPace


@pytest.mark.parametrize(
    ("timings", "slowdown"),
    [
        ([1.0], 1.0),
        ([0.9], 1.0),  # the new fastest
        ([1.05], 1.05),
        ([1.2, 1.01], 1.01),  # something else delayed the first timing
        ([1.2, 1.1, 1.15], 1.1),  # slow each time
    ],
)
def test_only_a_lasting_slowdown_counts(
    timings: Sequence[float], slowdown: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter(timings)
    monkeypatch.setattr(GpuPace, "_seconds", lambda self: next(left))
    pace = GpuPace.__new__(GpuPace)  # its __init__ needs a GPU
    pace._fast = 1.0
    assert pace.slowdown() == pytest.approx(slowdown)
    assert next(left, None) is None
