"""The cells of an experiment: what each of its tests measures, or why it cannot be measured here."""

from __future__ import annotations

import importlib.util

import pytest
from _pytest.mark import ParameterSet

from ddpperf.specs import Spec

Cell = Spec | ParameterSet


def without_torchvision(spec: Spec, what: str) -> Cell:
    """The spec, or a skipped cell where `what` it needs of torchvision is not there."""
    found = importlib.util.find_spec("torchvision") is not None
    return spec if found else skipped(spec.id, f"{what} needs torchvision, which is not installed")


def skipped(identity: str, reason: str) -> ParameterSet:
    """A cell that cannot be measured here: its test is collected, and skipped with the reason."""
    return pytest.param(None, id=identity, marks=pytest.mark.skip(reason=reason))
