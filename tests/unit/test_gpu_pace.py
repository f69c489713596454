"""How much slower CUDA graphs run than before. tests/gpu has the two paces themselves."""

from __future__ import annotations

import pytest

from ddpperf.workers.gpu_pace import GpuPace


def test_slowdown_is_against_the_shortest_time_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    timings = iter([1.0, 0.8, 1.0])
    monkeypatch.setattr(GpuPace, "_seconds", lambda self: next(timings))
    pace = GpuPace.__new__(GpuPace)  # its __init__ needs a GPU
    pace._fast = 1.0
    assert [pace.slowdown() for _ in range(3)] == pytest.approx([1.0, 1.0, 1.25])
