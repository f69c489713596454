"""The cases of each parametrized performance test, with their ids and reasons for skips."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from ddpperf.errors import Refused
from ddpperf.machine.hardware import Machine
from ddpperf.plugin.options.options import Options
from ddpperf.plugin.options.spec_fields import change_reason, machine_reason
from ddpperf.results.outcomes import Outcome, OutcomeKind
from ddpperf.specs import (
    CopySpec,
    CustomCollectiveSpec,
    CustomStepSpec,
    RunSpec,
    SamplerSpec,
    Spec,
    TrainingSpec,
    format_bytes,
    measured_as,
)
from ddpperf.specs.collective import Call
from ddpperf.specs.instruments import Kind
from ddpperf.specs.recipe import WORDS
from ddpperf.specs.training import strategy_words

Case = Spec | ParameterSet

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
    every suite, so that its reason is seen.
    """
    found = pytest.param(measured, id=id) if isinstance(measured, Spec) else measured
    if not isinstance(found.values[0], Spec):
        return found
    suites = [pytest.mark.gate] * gate + [pytest.mark.slow] * (not core)
    return pytest.param(*found.values, id=found.id, marks=[*found.marks, *suites])


def parameters(test: str, marker: pytest.Mark, options: Options, machine: Machine) -> list[ParameterSet]:
    """Return the pytest parameters of a test, made from the measurement specs of its marker.

    Raises Refused for a marker without valid specs, and for two cases with the same id.
    """
    make = marker.kwargs.get("cases")
    if make is None:
        raise Refused(
            f"{test} is marked with specs but has no cases; write @pytest.mark.specs(cases=function)"
        )
    try:
        cases = list(make(options) or ())
    except (ValueError, TypeError, KeyError) as error:
        raise Refused(f"{test} cannot be measured: {error}") from error
    if wrong := [wrong for wrong in cases if not isinstance(wrong, Case)]:
        why = f"{test} has cases that are no specs, such as {wrong[0]!r}"
        raise Refused(f"{why}; yield an AllReduceSpec, options.step(...)")
    gate = marker.kwargs.get("gate", lambda options, spec: False)
    core = marker.kwargs.get("core", lambda options, spec: True)
    found = [_parameter(measured, options, machine, gate, core) for measured in cases]
    ids = [parameter.id for parameter in found]
    if twice := [name for name in ids if ids.count(name) > 1]:
        why = f"{test} has two cases with the id {twice[0]}, which names what is stored"
        raise Refused(f"{why}; measure each once, or name one with pytest.param(spec, id=...)")
    return found


def functions_of(item: pytest.Item) -> tuple[str, ...]:
    """Return the user's functions that the spec of a collected test names."""
    callspec = getattr(item, "callspec", None)
    spec = callspec.params.get("spec") if callspec is not None else None
    return spec.functions if isinstance(spec, Spec) else ()


Predicate = Callable[[Options, Any], bool]


def _parameter(
    measured: Case, options: Options, machine: Machine, gate: Predicate, core: Predicate
) -> ParameterSet:
    """Return a case with its id, skipped if this machine, the base or the candidate cannot measure it.

    gate, core: functions of the marker that choose suites for all cases of a test.
    """
    (spec,) = (measured,) if isinstance(measured, Spec) else measured.values
    if not isinstance(spec, Spec):
        assert isinstance(measured, ParameterSet)
        return measured
    found = case(measured, core=core(options, spec), gate=gate(options, spec))
    marks = list(found.marks)
    if not any(mark.name == "skip" for mark in marks):
        if reason := machine_reason(spec, machine):
            marks.append(pytest.mark.skip(reason=reason))
        elif outcome := side_outcome(spec, options, machine):
            marks.append(pytest.mark.skip(reason=outcome.reason))
            if outcome.kind is OutcomeKind.CANDIDATE_CANNOT:
                marks.append(pytest.mark.candidate_cannot)
    identity = found.id or case_id(spec, options)
    spec = dataclasses.replace(spec, delay_seconds=options.delay_seconds)
    return pytest.param(spec, id=identity, marks=marks)


def side_outcome(spec: Spec, options: Options, machine: Machine) -> Outcome | None:
    """Return the outcome of a test whose spec the base or the candidate of an A/B run cannot measure.

    Returns None if both can measure it, or if this is no A/B run.
    """
    if options.sides is None:
        return None
    needs_torchvision = isinstance(spec, TrainingSpec) and (
        spec.model.startswith("torchvision:") or spec.input == "dataloader"
    )
    if needs_torchvision and not options.sides.torchvision:
        reason = "it needs torchvision, which the base or the candidate lacks"
        return Outcome(kind=OutcomeKind.SKIPPED, reason=reason)
    reason = change_reason(spec, options.sides.spec_fields, machine)
    return Outcome(kind=OutcomeKind.CANDIDATE_CANNOT, reason=reason) if reason else None


def without_torchvision(spec: Spec, what: str) -> Case:
    """Return a measurement spec, or a skipped test case if torchvision is not installed.

    what: the subject of the sentence that says who needs torchvision.
    """
    found = importlib.util.find_spec("torchvision") is not None
    return spec if found else skipped(spec, f"{what} needs torchvision, which is not installed")


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


def if_measured_as(kind: type[Kind], case: Case) -> Case:
    """Return a test case, which is skipped if an instrument cannot measure its training.

    kind: the class of the instrument's spec, such as the spec of a profiled training step.
    """
    if not isinstance(case, TrainingSpec):
        return case
    try:
        measured_as(kind, case)
    except ValueError as error:
        return skipped(case, str(error))
    return case


# --- ids


def size_id(options: Options, world_size: int, batch_size: int | None = None) -> str:
    """Return the first part of a test id, such as `4gpu-b512` on GPUs or `2rank-b32` on CPUs.

    On several nodes, it names the ranks of each node: `2x8gpu-b512`. batch_size: images per rank.
    """
    nodes = options.nodes.of(world_size)
    ranks = f"{nodes}x{world_size // nodes}" if nodes > 1 else f"{world_size}"
    ranks += "gpu" if options.device == "cuda" else "rank"
    return ranks if batch_size is None else f"{ranks}-b{batch_size}"


def case_id(spec: Spec, options: Options) -> str:
    """Return a test id with the numbers of a spec and its differences from the default options."""
    size = size_id(options, spec.world_size)
    if isinstance(spec, TrainingSpec):
        return "-".join([size, f"b{spec.per_rank_batch_size}", *_training_words(spec, options)])
    if isinstance(spec, SamplerSpec):
        words = ["drop_last"] * spec.drop_last + ["no_set_epoch"] * (not spec.set_epoch)
        return "-".join([size, *words])
    if isinstance(spec, CustomStepSpec):
        words = [] if spec.execution == "eager" else [spec.execution]
        return "-".join([size, f"b{spec.per_rank_batch_size}", _function_word(spec.function), *words])
    words = [size, format_bytes(spec.nbytes)] if isinstance(spec, Call | CopySpec) else [size]
    if isinstance(spec, CustomCollectiveSpec):
        words.append(_function_word(spec.function))
    if isinstance(spec, Call):
        kind = getattr(spec, "kind", None) or getattr(spec, "algorithm", "backend")
        words += [str(kind)] * (kind != "backend") + [spec.execution] * (spec.execution != "eager")
        words += ["out_of_place"] * (not getattr(spec, "in_place", True))
    return "-".join(words)


def _function_word(function: str) -> str:
    return function.rpartition(":")[2]


def _training_words(spec: TrainingSpec, options: Options) -> list[str]:
    usual = _usual_training(spec, options)
    words = [getattr(spec, name) for name in ("model", "precision") if _differs(spec, usual, name)]
    inductor = [spec.inductor] if spec.inductor and _differs(spec, usual, "inductor") else []
    if spec.execution != options.executions[0] or inductor:
        words.append("+".join([spec.execution, *inductor]))
    if _strategy_words(spec) != _strategy_words(usual):
        words.append(_strategy_words(spec))
    if spec.input != usual.input or spec.loader_workers:
        words.append(f"{spec.input}{spec.loader_workers if spec.input == 'dataloader' else ''}")
    if isinstance(spec, RunSpec):
        words.append(f"lr{spec.rate:g}")
        changed = [name for name in NAMED_IN_ID if _differs(spec, RunSpec, name)]
        words += [_recipe_word(name).format(getattr(spec, name)) for name in changed]
    return words


def _usual_training(spec: TrainingSpec, options: Options) -> Any:
    fields: dict[str, Any] = {"world_size": spec.world_size, "execution": spec.execution}
    if spec.world_size > 1 and spec.captured and not isinstance(spec, RunSpec):
        fields |= fastest_ddp(options)
    defaults = {name: field.default for name, field in type(spec).__dataclass_fields__.items()}
    fields = defaults | options.fields(**fields)
    return SimpleNamespace(**fields | {"input": "device" if isinstance(spec, RunSpec) else options.input})


def _differs(spec: TrainingSpec, usual: Any, name: str) -> bool:
    return bool(getattr(spec, name) != getattr(usual, name))


def _strategy_words(spec: Any) -> str:
    return strategy_words(spec).replace("=", "").replace("symmetric_memory", "symm")


# The hyperparameters that a test id names if they are not RunSpec's defaults.
NAMED_IN_ID = (
    *("optimizer", "schedule", "grow_from", "momentum", "weight_decay", "label_smoothing"),
    *("cutmix", "crop_padding", "uncropped_epochs", "average_weights", "clip_norm", "nesterov"),
    *("decay_vectors", "set_epoch", "seed"),
)


def _recipe_word(name: str) -> str:
    """Return the word of a test id for a hyperparameter."""
    own = {"optimizer": "{}", "schedule": "{}", "momentum": "mom{:g}", "seed": "seed{}"}
    return own.get(name) or WORDS[name].replace("=", "")
