"""Apply the training fields of --spec and --candidate to specs; say why a result cannot be measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ddpperf.machine.compiler import compiler_reason, triton_reason
from ddpperf.plugin.options.option_table import Value
from ddpperf.specs import AllReduceSpec, Spec, TrainingSpec, gpu_reason
from ddpperf.specs.training import (
    COMPILED_EXECUTIONS,
    DDP_OPTIONS,
    GROUPED_STRATEGIES,
    OWN_DDP_HOOKS,
    SHARDED_STRATEGIES,
    options_of,
)

if TYPE_CHECKING:
    from ddpperf.machine.hardware import Machine


def fitting(given: Mapping[str, Value], strategy: str, execution: str) -> dict[str, Value]:
    """Return the given training fields that a strategy and an execution mode support."""
    left_out = DDP_OPTIONS.keys() - options_of(strategy) | {"strategy"}
    left_out |= set() if strategy in GROUPED_STRATEGIES else {"sync_batch_norm"}
    left_out |= set() if execution in COMPILED_EXECUTIONS else {"inductor"}
    return {name: value for name, value in given.items() if name not in left_out}


def changed(spec: Spec, given: Mapping[str, Value]) -> Spec:
    """Return a copy of a training spec with the given fields changed.

    Fields that the training does not have are left out. "execution" may be one of the fields.
    Raises ValueError if such a training is impossible.
    """
    if not (given and isinstance(spec, TrainingSpec)):
        return spec
    fields: dict[str, Any] = {"execution": spec.execution, "inductor": spec.inductor, **given}
    strategy = fields.get("strategy", spec.strategy) if spec.strategy in GROUPED_STRATEGIES else spec.strategy
    fields = {"inductor": "", **fitting(fields, strategy, fields["execution"]), "strategy": strategy}
    fields = {name: value for name, value in DDP_OPTIONS.items() if name not in options_of(strategy)} | fields
    if strategy == "own_ddp" and spec.comm_hook not in OWN_DDP_HOOKS:
        fields = {"comm_hook": "none"} | fields
    if strategy in SHARDED_STRATEGIES:
        fields["memory_format"] = "contiguous"
    return dataclasses.replace(spec, **fields)


def machine_reason(spec: Spec, machine: Machine) -> str:
    """Return why a machine cannot measure a spec, or an empty string if it can."""
    reason = machine.mapping_reason(spec)
    if machine.device == "cuda" and _runs_low_latency(spec):
        reason = reason or triton_reason()
    if isinstance(spec, TrainingSpec):
        uncompiled = compiler_reason(machine.device) if spec.compiled else ""
        if spec.strategy == "data_parallel" and machine.crosses_nodes(spec.world_size):
            reason = "strategy data_parallel drives GPUs from one process, and these are on several nodes"
        reason = gpu_reason(spec, machine.device) or uncompiled or reason
    return reason


def _runs_low_latency(spec: Spec) -> bool:
    if isinstance(spec, TrainingSpec):
        return spec.strategy == "own_ddp" and spec.maps_memory
    return isinstance(spec, AllReduceSpec) and spec.algorithm == "low_latency"


def change_reason(spec: Spec, given: Mapping[str, Value], machine: Machine) -> str:
    """Return why the candidate cannot measure a training with changed fields.

    Returns an empty string if the candidate can.
    """
    try:
        reason = machine_reason(changed(spec, given), machine)
    except ValueError as error:
        reason = str(error)
    return f"the candidate cannot measure it: {reason}" if reason else ""
