"""A table of what `test_projection` says, of two kept runs that together have all that it needs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from ddpperf.analysis.projection import Excess, project, sending_error, sending_seconds
from ddpperf.analysis.protocols import choose_envelope
from ddpperf.results import units
from ddpperf.results.samples import Measured
from perf.test_projection import NORMAL, excess
from tools.tables import ROOT, all_reduces, is_plain

FEWER, MORE = 2, 4
CELL = "world_size={N}-batch={batch}-resnet18_cifar-{strategy}-bf16-graph-device]"
DDP = "ddp+avg+view+no_buffer_sync"
BATCHES = (128, 512)


def projection_table(runs: str) -> str:
    """A captured step's excess over t(1) on 4 devices, predicted from its step and the all_reduces on 2, beside that measured.

    runs: FIRST and SECOND; the first has scaling and all_reduces, the second, on 2 devices, a step taken apart.
    """
    first, second = runs.split(" and ")
    scaling, apart = stored(first), stored(second)
    twos = {
        each: t
        for each, t in all_reduces(first).items()
        if is_plain(each) and each.captured and each.world_size == FEWER
    }
    lines = choose_envelope([each.nbytes for each in twos], list(twos.values()))
    rows = [
        "| images a device | on 2 | on 4 | projected | 95 % interval | off by | as on 2 |",
        "|---|---|---|---|---|---|---|",
    ]
    for batch in BATCHES:
        weak = {
            N: scaling["test_weak_scaling[" + CELL.format(N=N, batch=batch, strategy=DDP)]
            for N in (FEWER, MORE)
        }
        split = apart["test_comm_split[" + CELL.format(N=FEWER, batch=batch, strategy=DDP)]["references"]
        alone = apart["test_step_breakdown[" + CELL.format(N=1, batch=batch, strategy="single")]["references"]
        measured = {N: over_one_device(each, each["references"]) for N, each in weak.items()}
        sent = [nbytes[0] for name, nbytes in counters(split["replay"]).items() if name.startswith("bucket")]
        told = project(
            {FEWER: measured[FEWER]},
            over_one_device(split["local"], split),
            partial(sending_seconds, {FEWER: lines.envelope}, sent, node=MORE, network=None),
            MORE,
            hideable=min(counters(alone["parts"])["backward_seconds"]),
            error=sending_error({FEWER: NORMAL * lines.held_out_error}, MORE, node=MORE),
        )
        there = measured[MORE].seconds
        figures = [units.seconds(each) for each in (measured[FEWER].seconds, there, told.seconds)]
        figures.append(f"{units.seconds(told.low)} to {units.seconds(told.high)}")
        figures += [f"{each / there - 1:+.1%}" for each in (told.seconds, told.plain)]
        rows.append(f"| {batch} | {' | '.join(figures)} |")
    return "\n".join([*rows, ""])


def stored(run: str) -> dict[str, Any]:
    """By test, what a run has of it."""
    return {
        each["name"]: each["extra_info"]["ddpperf"]
        for each in json.loads((ROOT / run).read_text())["benchmarks"]
    }


def over_one_device(longer: Mapping[str, Any], references: Mapping[str, Any]) -> Excess:
    step = Measured.from_json(dict(longer))
    return excess(step, Measured.from_json(references["one_device"]), step.samples[0].set)


def counters(reference: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of its first set."""
    return Measured.from_json(dict(reference)).samples[0].counters
