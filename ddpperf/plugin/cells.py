"""The cells of an experiment: what each of its tests measures, or why it cannot be measured here."""

from __future__ import annotations

import pytest
from _pytest.mark import ParameterSet

from ddpperf.specs import Spec

Cell = Spec | ParameterSet


def skipped(identity: str, reason: str) -> ParameterSet:
    """A cell that cannot be measured here: its test is collected, and skipped with the reason."""
    return pytest.param(None, id=identity, marks=pytest.mark.skip(reason=reason))
