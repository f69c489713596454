"""The cells of an experiment: what each of its tests measures, or why it cannot be measured here."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial

import pytest
from _pytest.mark import ParameterSet

from ddpperf.machine.compiler import compiler_reason
from ddpperf.machine.hardware import Machine
from ddpperf.specs import Spec, TrainingSpec, gpu_reason, measured_as
from ddpperf.specs.instruments import Kind

Case = Spec | ParameterSet


def without_torchvision(spec: Spec, what: str) -> Case:
    """The spec, or a skipped cell where `what` it needs of torchvision is not there."""
    found = importlib.util.find_spec("torchvision") is not None
    return spec if found else skipped(spec.id, f"{what} needs torchvision, which is not installed")


def skipped(identity: str, reason: str, *marks: pytest.MarkDecorator) -> ParameterSet:
    """A cell that cannot be measured here: its test, with these marks, is collected, and skipped with the reason."""
    return pytest.param(None, id=identity, marks=[pytest.mark.skip(reason=reason), *marks])


def if_valid(identity: str, make: Callable[[], Spec]) -> Case:
    """What `make` gives, or a skipped cell named `identity` where it does not go together with what the options say."""
    try:
        return make()
    except ValueError as error:
        return skipped(identity, str(error))


def if_measured_as(kind: type[Kind], case: Case) -> Case:
    """The cell, skipped where `kind`, another measurement of the same training that its test needs, cannot be made of it."""
    if not isinstance(case, TrainingSpec):
        return case
    measured = if_valid(case.id, partial(measured_as, kind, case))
    return case if isinstance(measured, TrainingSpec) else measured


def possible(spec: Spec, machine: Machine) -> Case:
    """The spec, or a skipped cell where the machine cannot do what it asks."""
    reason = machine.mapping_reason(spec)
    if isinstance(spec, TrainingSpec):
        reason = (
            gpu_reason(spec, machine.device)
            or (compiler_reason(machine.device) if spec.compiled else "")
            or reason
        )
    return skipped(spec.id, reason) if reason else spec
