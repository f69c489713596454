"""Messages: how many bytes does a rank send in a training step, and what for?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ddpperf.plugin.cases import Case, size_id, skipped
from ddpperf.plugin.measure_fixture import Measure
from ddpperf.plugin.options.options import Options
from ddpperf.results.metrics import MESSAGE_KINDS
from ddpperf.specs import MessagesSpec, TrainingSpec, measured_as
from perf.common.step_specs import step_case

VARIANTS: tuple[dict[str, Any], ...] = (
    {"strategy": "ddp"},
    {"strategy": "ddp", "comm_hook": "bf16", "buffer_sync": False},
    {"strategy": "own_ddp"},
    {"strategy": "zero1"},
    {"strategy": "fsdp"},
)
STARTS = ("initial state", "control", "other")


def strategies(options: Options) -> Iterator[Case]:
    """Yield a training step whose messages are counted, for each parallel strategy on all devices.

    If --spec is given, yield its strategy only. Steps are eager and have the smallest batch size,
    because messages depend on neither.
    """
    world_size = max(options.world_sizes)
    if world_size == 1:
        yield skipped(size_id(options, 1), "one device sends no messages; pass --world-sizes 1,2")
        return
    for fields in VARIANTS if not options.spec_fields else ({},):
        name = "+".join(map(str, fields.values()))
        step = step_case(
            options, world_size, min(options.batch_sizes), "eager", kind=MessagesSpec, name=name, **fields
        )
        yield measured_as(MessagesSpec, step) if isinstance(step, TrainingSpec) else step


@pytest.mark.specs(cases=strategies)
def test_messages(measure: Measure, spec: MessagesSpec) -> None:
    """How many messages does a training step send, and does it send each gradient exactly once?"""
    ledger = measure(spec)
    for prefix, kinds in (("", MESSAGE_KINDS), ("start ", STARTS)):
        for kind in kinds:
            nbytes, messages = (ledger.counter(f"{prefix}{kind}: {what}") for what in ("bytes", "messages"))
            if nbytes:
                # the base or the candidate may send none
                none = {sample.set: 0.0 for sample in ledger.samples}
                name = f"{prefix}{kind}".replace(" ", "_")
                measure.metric(f"{name}_bytes", none | nbytes)
                measure.metric(f"{name}_messages", none | messages)
    if unknown := {*ledger.counter("other: messages"), *ledger.counter("start other: messages")}:
        pytest.fail(
            f"process sets {', '.join(sorted(unknown))} sent messages of an unknown kind", pytrace=False
        )
    sent = ledger.counter("gradients: bytes")
    if parameters := ledger.counter("parameter_bytes"):
        over = {name: sent.get(name, 0.0) / nbytes for name, nbytes in parameters.items()}
        measure.metric("gradients_over_parameters", over)
    for name, due in ledger.counter("gradient_bytes").items():
        if sent.get(name) != due:
            pytest.fail(
                f"process set {name} sent {sent.get(name, 0):.0f} bytes of gradients, expected {due:.0f}",
                pytrace=False,
            )
