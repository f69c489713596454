"""The experiment on an unchanged training script: its cases, and what is said of its steps."""

from __future__ import annotations

from collections.abc import Iterator

from ddpperf.plugin.cases import Case, case, skipped
from ddpperf.plugin.measure_fixture import Measure
from ddpperf.plugin.options.options import Options
from ddpperf.results import units
from ddpperf.results.samples import Measured
from ddpperf.specs.script import RANKS, ScriptSpec
from ddpperf.workers.script_run import PAUSE

COUNTERS = ("first_step_seconds", "step_p50_seconds", "step_p99_seconds", "step_largest_seconds")
UNEVEN = 0.02  # ranks whose steps differ by more are named


def scripts(options: Options) -> Iterator[Case]:
    """Yield the script of --script, on the most ranks or on each number of --world-sizes."""
    if options.script is None:
        yield skipped(
            "script", 'pass --script "torchrun --nproc-per-node {ranks} train.py" to measure your own script'
        )
        return
    several = "--world-sizes" in options.given
    numbers = options.world_sizes if several or RANKS in options.script else (1,)
    for world_size in numbers if several else (max(numbers),):
        yield case(ScriptSpec(command=options.script, world_size=world_size), gate=True)


def script_metrics(measure: Measure, measured: Measured) -> None:
    """Store how fast the steps of a script are, how long the first one took, and what is uneven."""
    mean = measured.mean_step_seconds()
    measure.metric("steps_per_second", {name: 1 / seconds for name, seconds in mean.items()})
    for name in COUNTERS:
        measure.metric(name, measured.counter(name))
    if by_set := measured.counter("peak_memory_bytes"):
        measure.metric("peak_memory_bytes", by_set)
    of_side = measured.of(measured.samples[-1].side)
    sample = of_side.samples[-1]
    if pauses := int(sample.counters["pause_steps"][0]):
        largest = units.seconds(sample.counters["step_largest_seconds"][0])
        part = f"{sample.counters['pause_fraction'][0]:.0%} of the time"
        what = f"{units.counted(pauses, 'step')} took more than {PAUSE:g} times the median"
        measure.note(f"pauses: {what}, {part}; the longest took {largest}")
    seconds = of_side.rank_step_seconds(sample)
    if len(seconds) > 1 and max(seconds) > (1 + UNEVEN) * min(seconds):
        slowest = seconds.index(max(seconds))
        measure.note(f"rank {slowest} is {max(seconds) / min(seconds) - 1:.0%} slower than the fastest rank")
    if len(memory := sample.counters.get("peak_memory_bytes", ())) > 1:
        measure.note(f"peak memory by rank: {', '.join(map(units.nbytes, memory))}")
