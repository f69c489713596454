"""Makes the documentation's table of predicted step times on 4 GPUs from two stored test runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ddpperf.analysis.backend_protocols import choose_envelope
from ddpperf.analysis.projection import Excess, all_reduce_seconds, project, sending_error, sending_seconds
from ddpperf.report.cases import Case
from ddpperf.results import units
from ddpperf.results.samples import Measured
from perf.test_projection import NORMAL, excess
from tools.tables import all_reduces, cases, is_plain, markdown, one

FEWER, MORE = 2, 4
BATCHES = (128, 512)


def projection_table(runs: str) -> str:
    """Return a Markdown table of the extra step time on 4 devices, predicted and measured.

    The extra step time is t(N) - t(1). runs: the files of two stored runs, "FIRST and SECOND". The
    first run measured scaling and all-reduces. The second run measured the parts of a step on 2
    devices.
    """
    first, second = runs.split(" and ")
    scaling, parts = cases(first), cases(second)
    twos = {
        spec: t
        for spec, t in all_reduces(scaling).items()
        if is_plain(spec) and spec.captured and spec.world_size == FEWER
    }
    lines = choose_envelope([spec.nbytes for spec in twos], list(twos.values()))
    rows = []
    for batch in BATCHES:
        weak = {N: captured_step(scaling, "test_weak_scaling", N, batch) for N in (FEWER, MORE)}
        split = captured_step(parts, "test_comm_split", FEWER, batch)
        alone = captured_step(parts, "test_step_breakdown", 1, batch)
        measured = {N: over_one_device(case.measured, case) for N, case in weak.items()}
        replayed = split.references["replay"].samples[0].counters
        sent = [nbytes[0] for name, nbytes in replayed.items() if name.startswith("bucket")]
        projected = project(
            {FEWER: measured[FEWER]},
            over_one_device(split.references["local"], split),
            partial(
                sending_seconds,
                partial(all_reduce_seconds, {FEWER: lines.envelope}, node=MORE),
                [FEWER],
                sent,
                node=MORE,
                network=None,
            ),
            MORE,
            hideable=min(alone.references["parts"].samples[0].counters["backward_seconds"]),
            error=sending_error({FEWER: NORMAL * lines.held_out_error}, MORE, node=MORE),
        )
        there = measured[MORE].seconds
        figures = [units.seconds(t) for t in (measured[FEWER].seconds, there, projected.value)]
        figures.append(f"{units.seconds(projected.low)} to {units.seconds(projected.high)}")
        figures += [f"{t / there - 1:+.1%}" for t in (projected.value, measured[FEWER].seconds)]
        rows.append((str(batch), *figures))
    headings = ("images per device", "on 2", "on 4", "projected", "95% interval", "error", "error if as on 2")
    return markdown(headings, rows)


def captured_step(found: Sequence[Case], test: str, world_size: int, batch_size: int) -> Case:
    """Return the case of a ResNet-18 step in a CUDA graph.

    test: the name of the test function that measured the step.
    """
    return one(
        found,
        test,
        world_size=world_size,
        per_rank_batch_size=batch_size,
        model="resnet18_cifar",
        execution="graph",
        strategy="ddp" if world_size > 1 else "single",
    )


def over_one_device(step: Measured, case: Case) -> Excess:
    """Return a step's extra time compared with one device, in the first process set of the run.

    case: the case that measured the step, either itself or as a reference.
    """
    return excess(step, case.references["one_device"], step.samples[0].set)
