"""Measured results with given seconds, and their comparison with a stored run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ddpperf.results.samples import Measured, Sample
from ddpperf.results.stored_runs import Baseline, PastRun
from ddpperf.specs import AllReduceSpec, Spec
from ddpperf.verdict.settings import read_decision
from ddpperf.verdict.stored_run_comparison import Comparison, Reference, compare

CALL = AllReduceSpec(world_size=2, nbytes=2**24)
GPU = read_decision({})["gpu"]
QUIET = (1.0, 1.001, 1.002, 1.003)  # seconds of four rounds


def measured(*step_seconds: float, spec: Spec = CALL, iterations: int = 1) -> Measured:
    """Return what one process set measured; `step_seconds` are those of its rounds."""
    rounds = tuple((seconds * iterations,) for seconds in step_seconds)
    sample = Sample(set="A1", side="A", torch="2.11", seconds=rounds)
    return Measured(spec=spec, iterations=iterations, samples=(sample,))


def compared(
    now: dict[str, Measured],
    then: dict[str, Measured],
    expected: set[str] | None = None,
    *,
    limit: float | None = None,
    history: Sequence[dict[str, Measured]] = (),
    device: str = "cuda",
) -> Comparison:
    """Compare a run on GPUs with the stored run 0001_x.json, which follows the runs of `history`."""
    runs = [PastRun(measured=run, promoted=True) for run in history]
    baseline = Baseline(path=Path("0001_x.json"), measured=then, when="")
    settings = GPU if device == "cuda" else read_decision({})["cpu"]
    reference = Reference(baseline=baseline, settings=settings, device=device, limit=limit, history=runs)
    return compare(now, reference, now.keys() | then.keys() if expected is None else expected)
