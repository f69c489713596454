"""What the command line says of a training's spec: its forms, and single fields by --spec."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, get_args

import pytest

from ddpperf.errors import Refused
from ddpperf.machine.compiler import check_inductor, compiler_reason
from ddpperf.specs import Execution, Spec, TrainingSpec, gpu_reason
from ddpperf.specs.strategy import (
    COMPILED_EXECUTIONS,
    DDP_OPTIONS,
    GROUPED_STRATEGIES,
    OWN_DDP_HOOKS,
    SHARDED_STRATEGIES,
    options_of,
)

if TYPE_CHECKING:
    from ddpperf.machine.hardware import Machine

Value = str | int | bool
# The fields that --spec can set, each of the type that an example shows.
FIELDS: dict[str, Value] = {
    **DDP_OPTIONS,
    "strategy": "ddp",
    "sync_batch_norm": False,
    "accumulation_steps": 1,
    "inductor": "",
}
CPU_FORMS: tuple[Execution, ...] = ("eager",)  # compiling takes half a minute and more there
GPU_FORMS: tuple[Execution, ...] = ("graph", "compile+graph", "eager")


def read_executions(text: str | None, device: str) -> tuple[Execution, ...]:
    """The forms of --executions, by default those that suit the device."""
    if text is None:
        return GPU_FORMS if device == "cuda" else CPU_FORMS
    executions: tuple[Any, ...] = tuple(word.strip() for word in text.split(","))
    for execution in executions:
        if execution not in get_args(Execution):
            raise pytest.UsageError(
                f"--executions takes {', '.join(get_args(Execution))}, got {execution!r}; pass for example --executions eager"
            )
    if len(set(executions)) != len(executions):
        raise pytest.UsageError(f"--executions names a form twice, got {text!r}; name each once")
    return executions


def read_spec_fields(
    given: Sequence[str], option: str = "--spec", *, execution: bool = False
) -> dict[str, Value]:
    """The fields of OPTION FIELD=VALUE, each in its own type. form: whether that is one of them."""
    known = (*FIELDS, "execution") if execution else tuple(FIELDS)
    fields: dict[str, Value] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if name not in known or not equals:
            raise pytest.UsageError(
                f"{option} takes FIELD=VALUE with a field of {', '.join(known)}, got {text[:60]!r}; "
                f"pass for example {option} comm_hook=bf16"
            )
        if name in fields:
            raise pytest.UsageError(
                f"{option} sets {name} twice, got {fields[name]} and {value[:40]}; set it once"
            )
        fields[name] = _value(option, name, value)
    return fields


def _value(option: str, name: str, text: str) -> Value:
    example = FIELDS.get(name, "")
    if name == "execution" and text not in get_args(Execution):
        raise pytest.UsageError(
            f"{option} form takes {', '.join(get_args(Execution))}, got {text[:40]!r}; pass one of them"
        )
    if isinstance(example, bool):
        if text.lower() not in ("true", "false"):
            raise pytest.UsageError(
                f"{option} {name} takes true or false, got {text[:40]!r}; pass one of them"
            )
        return text.lower() == "true"
    if isinstance(example, int):
        if not (text.isascii() and text.isdecimal() and len(text) <= 9):
            example_text = f"{option} {name}=2"
            raise pytest.UsageError(
                f"{option} {name} takes a whole number, got {text[:40]!r}; pass for example {example_text}"
            )
        return int(text)
    return text


def fitting(given: Mapping[str, Value], strategy: str, execution: str) -> dict[str, Value]:
    """Those of the given fields that a cell of this strategy and form has: one device has no hook, eager no compiler."""
    left_out = DDP_OPTIONS.keys() - options_of(strategy)
    left_out |= set() if strategy in GROUPED_STRATEGIES else {"sync_batch_norm"}
    left_out |= set() if execution in COMPILED_EXECUTIONS else {"inductor"}
    return {name: value for name, value in given.items() if name not in left_out | {"strategy"}}


def check_training(
    base: Mapping[str, Any],
    batch_sizes: Sequence[int],
    given: Mapping[str, Value],
    executions: str | None,
    device: str,
) -> None:
    """Raise pytest.UsageError if what was given does not go together in one of the forms, or cannot be done here.

    base: what a training has from other options, of world sizes the greatest. given: the fields of --spec. forms: --executions.
    """
    world_size = base["world_size"]
    used = read_executions(executions, device)
    if given.get("inductor") and not set(COMPILED_EXECUTIONS).intersection(used):
        raise pytest.UsageError(
            f"--spec inductor={given['inductor']} needs a compiled form, got {', '.join(used)}; pass --executions compile"
        )
    if (strategy := given.get("strategy", "ddp")) not in GROUPED_STRATEGIES:
        raise pytest.UsageError(
            f"--spec strategy takes {', '.join(GROUPED_STRATEGIES)}, got {strategy}; pass one of them"
        )
    for name in ("strategy", "sync_batch_norm", *DDP_OPTIONS):
        if name in given and world_size == 1:
            raise pytest.UsageError(
                f"--spec {name}={given[name]} needs several ranks, got one; pass --world-sizes 1,2"
            )
    for execution, batch_size in product(used, batch_sizes):
        sizes = {"per_rank_batch_size": batch_size, "epoch_images": world_size * batch_size}
        fields: dict[str, Any] = {
            "strategy": "single" if world_size == 1 else "ddp",
            **base,
            **sizes,
            **given,
            "execution": execution,
        }
        if execution not in COMPILED_EXECUTIONS:
            fields["inductor"] = ""
        try:
            spec = TrainingSpec(**fields)
        except ValueError as error:
            advice = "" if ";" in str(error) else "; pass another value"
            raise pytest.UsageError(f"{error}{advice}") from error
        if reason := gpu_reason(spec, device):
            raise pytest.UsageError(f"{reason}; pass other --executions or another --spec")
        if executions is not None and spec.compiled and (reason := compiler_reason(device)):
            raise pytest.UsageError(reason)
    if inductor := given.get("inductor"):
        check_inductor(str(inductor))


def check_candidate(
    base: Mapping[str, Any],
    batch_sizes: Sequence[int],
    given: Mapping[str, Value],
    candidate: Mapping[str, Value],
    executions: str | None,
    device: str,
) -> None:
    """As `check_training`, of what --against-spec sets beside what is given to both sides."""
    if not candidate:
        return
    fields = {**given, **{name: value for name, value in candidate.items() if name != "execution"}}
    try:
        check_training(
            base,
            batch_sizes,
            fields,
            str(candidate["execution"]) if "execution" in candidate else executions,
            device,
        )
    except (pytest.UsageError, Refused) as error:
        raise pytest.UsageError(str(error).replace("--spec", "--against-spec")) from error


def changed(spec: Spec, given: Mapping[str, Value]) -> Spec:
    """`spec` with those of the given fields that it has, form among them.

    Raises ValueError if there is no such training.
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


def change_reason(spec: Spec, given: Mapping[str, Value], machine: Machine) -> str:
    """Why a candidate with the given fields cannot measure its part of `spec`, which the base can; empty if it can."""
    try:
        candidate = changed(spec, given)
        reason = machine.mapping_reason(candidate)
    except ValueError as error:
        reason = str(error)
    else:
        reason = reason or (
            gpu_reason(candidate, machine.device) if isinstance(candidate, TrainingSpec) else ""
        )
    return f"the candidate cannot measure it: {reason}" if reason else ""
