"""Options of a command line, parsed in this process in a millisecond."""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from ddpperf.plugin.options.options import Options, read_options

Read = Callable[..., Options]  # of arguments as typed, and gpus=N


def reader(config: pytest.Config) -> Read:
    """Return a function that reads arguments as a run on a machine with `gpus` GPUs would."""
    return partial(_read, config)


def _read(config: pytest.Config, *arguments: str, gpus: int = 0) -> Options:
    run = copy.copy(config)
    run.option = config._parser.parse_known_args(arguments, namespace=Namespace())
    run.args = []
    run.invocation_params = pytest.Config.InvocationParams(args=arguments, plugins=None, dir=Path.cwd())
    return read_options(run, gpus)
