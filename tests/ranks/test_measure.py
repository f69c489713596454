"""The `measure` fixture on real ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ddpperf.plugin.measure_fixture import Measure
from ddpperf.results.notes import warning
from ddpperf.specs import AllReduceSpec, Fault
from ddpperf.workers.pool import Pool
from ddpperf.workers.process_set import SetOptions
from tests.project import Marked

SPEC = AllReduceSpec(world_size=2, nbytes=1024)


def test_attempt_is_counted_and_its_failure_returned(
    marked: Marked,
) -> None:
    benchmark: Any = None
    with Pool(SetOptions(size=2, device="cpu", rounds=1, deadline_seconds=60)) as pool:
        measure = Measure(benchmark, pool, lambda measured, fresh: [warning(measured.spec.id)] * fresh)
        assert not isinstance(measure.attempt(SPEC), str)
        assert measure.record.notes == [warning(SPEC.id)]
        assert measure.counted_seconds == pool.counted_seconds > 0
        told = measure.attempt(replace(SPEC, fault=Fault(kind="raise", rank=1, command="open")))
    assert isinstance(told, str)
    assert told.startswith("rank 1 of set A1 raised ")
