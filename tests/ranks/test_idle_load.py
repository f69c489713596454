"""The CPU time of real ranks between the rounds of their process set."""

from __future__ import annotations

from ddpperf.results.samples import Sample
from ddpperf.workers.interpreter import Side
from ddpperf.workers.pool import Pool
from ddpperf.workers.process_set import SetOptions
from tests import busy_steps
from tests.busy_steps import step_of


def idle_cpus(sample: Sample) -> list[float]:
    """Return how many cores each rank keeps busy between its rounds."""
    used, seconds = (sample.counters[name] for name in ("idle_cpu_seconds", "idle_seconds"))
    return [of_rank / seconds[0] for of_rank in used]


def test_spinning_thread_and_child_of_ranks_are_counted() -> None:
    options = SetOptions(size=2, device="cpu", rounds=7, deadline_seconds=60, time_only=True)
    sides = [Side(name=name, environment=busy_steps.ALLOWED) for name in ("A", "B")]
    with Pool(options, sides=sides) as pool:
        quiet, busy = pool.measure(step_of("quiet"), step_of("busy")).samples
    assert max(idle_cpus(quiet)) < 0.05
    assert all(0.1 < cpus < 1.2 for cpus in idle_cpus(busy)), "about 1 if the machine has nothing else to do"
