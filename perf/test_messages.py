"""Messages: how many bytes does a rank send in a training step, and what for?"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from ddpperf.plugin.cases import Case, if_valid, size_id, skipped
from ddpperf.plugin.measure_fixture import Measure
from ddpperf.plugin.options.options import Options
from ddpperf.results import units
from ddpperf.results.metrics import MESSAGE_KINDS
from ddpperf.specs import MessagesSpec, TrainingSpec, measured_as

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
        batch_size, named = min(options.batch_sizes), "+".join(map(str, fields.values()))
        work = {"world_size": world_size, "per_rank_batch_size": batch_size, "input": options.input}
        identity = f"{size_id(options, world_size)}-{named}"
        yield if_valid(identity, counted, options, **work, execution="eager", **fields)


def counted(options: Options, **fields: Any) -> TrainingSpec:
    return measured_as(MessagesSpec, options.step(**fields))


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
    for sentence in sorted({described(sample.counters) for sample in ledger.samples}):
        measure.note(sentence)
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


def described(counters: Mapping[str, tuple[float, ...]]) -> str:
    """Return a sentence about the messages that rank 0 sends in a training step.

    The sentence has the bytes of each kind of message and collective, and the size of each gradient
    bucket.
    """
    parts = []
    for counter, (nbytes, *_) in counters.items():
        if match := re.fullmatch(r"(\w+) by (\w+): bytes", counter):
            kind, collective = match.groups()
            messages = counters[f"{kind} by {collective}: messages"][0]
            buckets = [size for bucket, (size, *_) in counters.items() if bucket.startswith("bucket")]
            several = kind == "gradients" and len(buckets) > 1
            single = f" ({', '.join(map(units.nbytes, buckets))})" if several else ""
            name = "the mean loss for the report " if kind == "metrics" else f"{kind} "
            parts.append(f"{name}{units.nbytes(nbytes)} by {messages:.0f} {collective}{single}")
    return f"each step sends {'; '.join(parts)}"
