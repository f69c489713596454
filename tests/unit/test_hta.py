"""Overlap equals HolisticTraceAnalysis's, if it is installed: pip install -e .[hta]."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from ddpperf.measuring.trace import split_of

hta = pytest.importorskip("hta.trace_analysis", reason="HolisticTraceAnalysis is not installed")

RANKS = 2
MAIN, SIDE, NCCL = 7, 11, 20  # streams
NAMES = {
    MAIN: "sm90_xmma_gemm_bf16bf16",
    SIDE: "void at::native::vectorized_elementwise_kernel<4>",
    NCCL: "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
}


def trace(rank: int) -> dict[str, Any]:
    """Return random kernels on three streams, one of which communicates."""
    drawn = random.Random(rank)
    free = dict.fromkeys(NAMES, 1000.0)
    events = []
    for number in range(300):
        stream = drawn.choice([MAIN, MAIN, SIDE, NCCL])
        begin, lasted = free[stream] + drawn.uniform(0, 90), drawn.uniform(5, 80)
        free[stream] = begin + lasted
        common = {
            "ph": "X",
            "args": {"correlation": number, "External id": number, "stream": stream, "device": rank},
        }
        launch = {
            "cat": "cuda_runtime",
            "name": "cudaLaunchKernel",
            "pid": 1,
            "tid": 1,
            "ts": begin - 10,
            "dur": 2.0,
        }
        kernel = {
            "cat": "kernel",
            "name": NAMES[stream],
            "pid": rank,
            "tid": stream,
            "ts": begin,
            "dur": lasted,
        }
        events += [
            common | launch | {"args": {"correlation": number, "External id": number}},
            common | kernel,
        ]
    return {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": RANKS}, "traceEvents": events}


def test_overlap_of_nccl_kernels_equals_htas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(RANKS):
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(trace(rank)))
    for ours, theirs in overlaps(tmp_path, monkeypatch):
        assert ours == pytest.approx(theirs, abs=1e-4)
        assert 0.3 < theirs < 0.95, "there is something to find"


def test_overlap_of_captured_steps_equals_htas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(RANKS):
        kept = Path(__file__).parents[1] / "traces" / f"h200x2-graph-512-rank{rank}.json.gz"
        (tmp_path / f"rank{rank}.json").write_bytes(gzip.decompress(kept.read_bytes()))
    for ours, theirs in overlaps(tmp_path, monkeypatch):
        assert ours == pytest.approx(theirs, abs=1e-4)


def overlaps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
    """Return ddpperf's and HTA's overlap of each rank. HTA rounds times unless told not to."""
    monkeypatch.setenv("HTA_DISABLE_NS_ROUNDING", "1")
    told = hta.TraceAnalysis(trace_dir=str(folder)).get_comm_comp_overlap(visualize=False)
    theirs = dict(zip(told["rank"], told["comp_comm_overlap_pctg"] / 100, strict=True))
    both = []
    for rank in range(RANKS):
        ours = split_of(json.loads((folder / f"rank{rank}.json").read_bytes())["traceEvents"])
        assert ours is not None
        both.append((1 - ours.exposed / ours.communication, float(theirs[rank])))
    return both
