"""The cases of each parametrized performance test, with their ids and reasons for skips."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from ddpperf.errors import Refused, quoted
from ddpperf.machine.compiler import compiler_problem, compiler_reason
from ddpperf.machine.hardware import Machine
from ddpperf.plugin.options.ab_sides import changed
from ddpperf.plugin.options.options import Options
from ddpperf.plugin.options.refused_options import lacking_side
from ddpperf.specs import AllReduceSpec, RunSpec, Spec, TrainingSpec
from ddpperf.specs.labels import UNNAMED, labels, training_labels
from ddpperf.specs.training_step import gpu_reason

Case = Spec | ParameterSet

# Labels that a test id leaves out
USUAL = {"execution": "eager", "result": "in place", "uneven end": "padded", "order": "set_epoch"}

# DDP's options of a step in a CUDA graph. NCCL averages the gradients, gradients are views of their
# buckets, and BatchNorm statistics are not broadcast.
FASTEST_DDP: dict[str, Any] = {"comm_hook": "avg", "gradient_as_bucket_view": True, "buffer_sync": False}
OWN_DDP: dict[str, Any] = {"strategy": "own_ddp", "comm_hook": "symmetric_memory"}


def fastest_ddp(options: Options) -> dict[str, Any]:
    """Return the fields of a training spec that make a DDP step in a CUDA graph fastest.

    If --spec chooses own_ddp, the fields of own_ddp are returned.
    """
    return OWN_DDP if options.spec_fields.get("strategy") == "own_ddp" else FASTEST_DDP


def case(measured: Case, *, id: str | None = None, core: bool = True, gate: bool = False) -> ParameterSet:
    """Return a test case with its id and the suites that it belongs to.

    id: the id in place of the one that the spec would give. core: whether `pytest perf/` measures
    the case without --full. gate: whether `-m gate` selects it. A skipped case without a spec is in
    every suite, so that its reason is seen. Raises TypeError if `measured` is no spec.
    """
    if isinstance(measured, Spec):
        measured = pytest.param(measured, id=id)
    elif not isinstance(measured, ParameterSet):
        raise TypeError(f"{quoted(measured)} is no spec; yield an AllReduceSpec, options.step(...)")
    suites = [pytest.mark.gate] * gate + [pytest.mark.slow] * (not core)
    return measured._replace(marks=[*measured.marks, *suites]) if measured.values[0] else measured


def parameters(test: str, marker: pytest.Mark, options: Options, machine: Machine) -> list[ParameterSet]:
    """Return the pytest parameters of a test, made from the measurement specs of its marker.

    Raises Refused for a marker without valid specs, and for two cases with the same id.
    """
    if list(marker.kwargs) != ["cases"]:
        what = "write @pytest.mark.specs(cases=function), and yield case(spec, core=False, gate=True)"
        raise Refused(f"{test} is marked with specs, which takes cases and nothing else; {what}")
    try:
        cases = [case(measured) for measured in marker.kwargs["cases"](options) or ()]
    except (ValueError, TypeError, KeyError) as error:
        raise Refused(f"{test} cannot be measured: {error}") from error
    found = [_parameter(measured, options, machine) for measured in cases]
    ids = [parameter.id for parameter in found]
    if twice := [name for name in ids if ids.count(name) > 1]:
        why = f"{test} has two cases with the id {twice[0]}, so their results cannot be distinguished"
        raise Refused(f"{why}; measure each once, or name one with case(spec, id=...)")
    return found


def _parameter(found: ParameterSet, options: Options, machine: Machine) -> ParameterSet:
    """Return a case with its id and the delay of --spec, skipped if it cannot be measured."""
    (spec,) = found.values
    if not isinstance(spec, Spec):
        return found
    marks = list(found.marks)
    if not any(mark.name == "skip" for mark in marks):
        marks += _skips(spec, options, machine)
    delayed = dataclasses.replace(spec, delay_seconds=options.delay_seconds)
    return pytest.param(delayed, id=found.id or case_id(spec, options), marks=marks)


def _skips(spec: Spec, options: Options, machine: Machine) -> list[pytest.MarkDecorator]:
    """Return the marks of a case that this machine, the base or the candidate cannot measure."""
    if reason := machine_reason(spec, machine):
        return [pytest.mark.skip(reason=reason)]
    if (sides := options.sides) is None:
        return []
    try:
        reason = machine_reason(changed(spec, sides.spec_fields), machine)
    except ValueError as error:
        reason = str(error)
    skip = pytest.mark.skip(reason=f"the candidate cannot measure it: {reason}")
    return [skip, pytest.mark.candidate_cannot] if reason else []


def lacking_marks(spec: Spec, options: Options) -> list[pytest.MarkDecorator]:
    """Return the marks of a case for which base or candidate lacks something, once both are checked."""
    for function in spec.functions:
        if side := lacking_side(options, function):
            reason = f"the {side} lacks {function}, so there is nothing to compare"
            skip = pytest.mark.skip(reason=reason)
            return [skip, pytest.mark.candidate_cannot] if side == "candidate" else [skip]
    found = options.sides.found if options.sides is not None else {}
    if _needs_torchvision(spec) and not all(side.torchvision for side in found.values()):
        return [pytest.mark.skip(reason="it needs torchvision, which the base or the candidate lacks")]
    return []


def machine_reason(spec: Spec, machine: Machine) -> str:
    """Return why a machine cannot measure a spec, or an empty string if it can."""
    reason = machine.mapping_reason(spec)
    if machine.device == "cuda" and _runs_low_latency(spec) and (problem := compiler_problem("C")):
        reason = reason or f"low_latency {problem}; install both, or set CC"
    if isinstance(spec, TrainingSpec):
        uncompiled = compiler_reason(machine.device) if spec.compiled else ""
        if spec.strategy == "data_parallel" and machine.crosses_nodes(spec.world_size):
            reason = "strategy data_parallel drives GPUs from one process, and these are on several nodes"
        reason = gpu_reason(spec, machine.device) or uncompiled or reason
    if _needs_torchvision(spec) and importlib.util.find_spec("torchvision") is None:
        reason = reason or "it needs torchvision, which is not installed"
    return reason


def _runs_low_latency(spec: Spec) -> bool:
    if isinstance(spec, TrainingSpec):
        return spec.strategy == "own_ddp" and spec.maps_memory
    return isinstance(spec, AllReduceSpec) and spec.algorithm == "low_latency"


def _needs_torchvision(spec: Spec) -> bool:
    return isinstance(spec, TrainingSpec) and (
        spec.model.startswith("torchvision:") or spec.input == "dataloader"
    )


def skipped(case: Spec | str, reason: str) -> ParameterSet:
    """Return a test case that pytest collects and skips with the given reason.

    case: the spec that cannot be measured here, or a test id where no spec can be made.
    """
    spec, identity = (case, None) if isinstance(case, Spec) else (None, case)
    return pytest.param(spec, id=identity, marks=pytest.mark.skip(reason=reason))


def if_valid(identity: str, make: Callable[..., Spec], *arguments: Any, **fields: Any) -> Case:
    """Return the spec that `make` makes, or a skipped test case if it raises ValueError.

    identity: the id of the skipped case. arguments, fields: the arguments of `make`.
    """
    try:
        return make(*arguments, **fields)
    except ValueError as error:
        return skipped(identity, str(error))


# --- ids


def size_id(options: Options, world_size: int) -> str:
    """Return the first part of a test id: `4gpu`, `2rank` on CPUs, or `2x8gpu` on two nodes."""
    nodes = world_size // options.links.node if options.nodes > 1 else 1
    ranks = f"{nodes}x{world_size // nodes}" if nodes > 1 else f"{world_size}"
    return f"{ranks}{'gpu' if options.device == 'cuda' else 'rank'}"


def case_id(spec: Spec, options: Options) -> str:
    """Return a test id with the numbers of a spec and its differences from the default options."""
    found, usual = labels(spec), _usual_labels(spec, options)
    words = [
        word for name, word in found.items() if word not in ("", usual.get(name)) and name not in UNNAMED
    ]
    return "-".join([size_id(options, spec.world_size), *words])


def _usual_labels(spec: Spec, options: Options) -> dict[str, str]:
    """Return the labels that a spec of the same kind has with the default options."""
    if isinstance(spec, AllReduceSpec):
        return USUAL | {"algorithm": "backend", "collective": "all_reduce"}
    if not isinstance(spec, TrainingSpec):
        return USUAL
    fields: dict[str, Any] = {"world_size": spec.world_size, "execution": spec.execution}
    if spec.world_size > 1 and spec.captured and not isinstance(spec, RunSpec):
        fields |= fastest_ddp(options)
    defaults = {field.name: field.default for field in dataclasses.fields(spec)}
    usual = SimpleNamespace(**defaults | options.fields(**fields))
    usual.input = "device" if isinstance(spec, RunSpec) else options.input
    return training_labels(usual) | {"execution": options.executions[0], "seed": "seed0"}
