"""Messages: what do ranks send besides gradients, in a step and before the first one, and are gradients enough?"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import pytest

from ddpperf.plugin.cases import Case, if_valid, size_id, skipped
from ddpperf.plugin.measure import Measure
from ddpperf.plugin.options.options import Options
from ddpperf.results import units
from ddpperf.specs import MessagesSpec, TrainingSpec, measured_as

VARIANTS: tuple[dict[str, Any], ...] = (
    {"strategy": "ddp"},
    {"strategy": "ddp", "comm_hook": "bf16", "buffer_sync": False},
    {"strategy": "own_ddp"},
    {"strategy": "zero1"},
    {"strategy": "fsdp"},
)
KINDS = ("gradients", "buffers", "parameters", "metrics", "control", "other")
STARTS = ("initial state", "control", "other")


def strategies(options: Options) -> Iterator[Case]:
    """On all devices, eagerly, of the smallest batch: what is sent depends on neither. By --spec what that asks for."""
    world_size = max(options.world_sizes)
    if world_size == 1:
        yield skipped(size_id(options.device, 1), "one device sends nothing; pass --world-sizes 1,2")
        return
    for fields in VARIANTS if not options.spec_fields else ({},):
        work: dict[str, Any] = {
            "world_size": world_size,
            "per_rank_batch_size": min(options.batch_sizes),
            "input": options.input,
            "execution": "eager",
        }
        named = "+".join(str(value) for value in fields.values())
        yield if_valid(
            f"{size_id(options.device, world_size)}-{named}", partial(counted, options, **work | fields)
        )


def counted(options: Options, **fields: Any) -> TrainingSpec:
    return measured_as(MessagesSpec, options.step(**fields))


@pytest.mark.specs(cases=strategies)
def test_messages(measure: Measure, spec: MessagesSpec) -> None:
    """By kind, the messages and bytes of a step, and of the start. DDP's gradients are exactly the parameters' bytes."""
    ledger = measure(spec)
    for prefix, kinds in (("", KINDS), ("start ", STARTS)):
        for kind in kinds:
            nbytes, messages = (ledger.counter(f"{prefix}{kind}: {what}") for what in ("bytes", "messages"))
            if nbytes:
                none = dict.fromkeys(
                    (sample.set for sample in ledger.samples), 0.0
                )  # of a side that sends nothing of it
                name = f"{prefix}{kind}".replace(" ", "_")
                measure.metric(f"{name}_bytes", none | nbytes)
                measure.metric(f"{name}_messages", none | messages)
    for sentence in sorted({said(sample.counters) for sample in ledger.samples}):
        measure.note(sentence)
    if unknown := {*ledger.counter("other: messages"), *ledger.counter("start other: messages")}:
        pytest.fail(f"sets {', '.join(sorted(unknown))} sent a message of no known kind", pytrace=False)
    sent = ledger.counter("gradients: bytes")
    for name, due in ledger.counter("gradient_bytes").items():
        if sent.get(name) != due:
            pytest.fail(
                f"set {name} sent {sent.get(name, 0):.0f} bytes as gradients, which have {due:.0f}",
                pytrace=False,
            )


def said(counters: Mapping[str, tuple[float, ...]]) -> str:
    """What rank 0 sends in a step, by kind and collective, and each message of gradients."""
    parts = []
    for name, (nbytes, *_) in counters.items():
        if match := re.fullmatch(r"(\w+) by (\w+): bytes", name):
            kind, collective = match.groups()
            messages = counters[f"{kind} by {collective}: messages"][0]
            buckets = [each for bucket, (each, *_) in counters.items() if bucket.startswith("bucket")]
            single = (
                f" ({', '.join(map(units.nbytes, buckets))})"
                if kind == "gradients" and len(buckets) > 1
                else ""
            )
            whose = "a mean loss, which is ours, " if kind == "metrics" else f"{kind} "
            parts.append(f"{whose}{units.nbytes(nbytes)} by {messages:.0f} {collective}{single}")
    return f"each step sends {'; '.join(parts)}"
