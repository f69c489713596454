"""Options of a command line, parsed in this process in a millisecond, and the cases that they select."""

from __future__ import annotations

import copy
import importlib
from argparse import Namespace
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import perf
from ddpperf.machine.hardware import Machine
from ddpperf.plugin.cases import Case, parameters
from ddpperf.plugin.options.options import Options, read_options
from ddpperf.plugin.options.refused_options import check_combinations
from ddpperf.specs import Spec

Read = Callable[..., Options]  # of arguments as typed, and gpus=N


def reader(config: pytest.Config) -> Read:
    """Return a function that reads arguments as a run on a machine with `gpus` GPUs would."""
    return partial(_read, config)


def _read(config: pytest.Config, *arguments: str, gpus: int = 0) -> Options:
    run = copy.copy(config)
    run.option = config._parser.parse_known_args(arguments, namespace=Namespace())
    run.args = []
    run.invocation_params = pytest.Config.InvocationParams(args=arguments, plugins=None, dir=Path.cwd())
    options = read_options(run, gpus)
    check_combinations(options, gpus, compares=bool(run.getoption("benchmark_compare")))
    return options


def suite(options: Options) -> dict[str, dict[str, tuple[Spec | None, set[str]]]]:
    """Return the spec and the markers of each case of perf/, by the test's module and name."""
    found: dict[str, dict[str, tuple[Spec | None, set[str]]]] = {}
    for path in sorted(Path(perf.__path__[0]).glob("test_*.py")):
        for test, function in vars(importlib.import_module(f"perf.{path.stem}")).items():
            marks = getattr(function, "pytestmark", []) if test.startswith("test_") else []
            for marker in (mark for mark in marks if mark.name == "specs"):
                for case in parameters(test, marker, options, Machine(device=options.device)):
                    (spec,) = case.values
                    assert spec is None or isinstance(spec, Spec)
                    cases = found.setdefault(path.stem, {})
                    cases[f"{test}[{case.id}]"] = spec, {mark.name for mark in case.marks}
    return found


def specs_of(cases: Iterable[Case]) -> list[Any]:
    """Return the specs of the cases that are not skipped."""
    plain = [case for case in cases if isinstance(case, Spec) or not is_skipped(case)]
    return [case if isinstance(case, Spec) else case.values[0] for case in plain]


def is_skipped(case: Case) -> bool:
    return not isinstance(case, Spec) and any(mark.name == "skip" for mark in case.marks)
