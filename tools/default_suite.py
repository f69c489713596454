"""List the tests that perf/ collects by default on some hardware, without needing that hardware."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from _pytest.config import _prepareconfig

import perf
from ddpperf.machine.hardware import Machine
from ddpperf.plugin.cases import parameters
from ddpperf.plugin.options.options import Options, read_options
from ddpperf.specs import Spec


def experiments() -> Iterator[tuple[str, str, pytest.Mark]]:
    """Yield the module, the name and the specs marker of each test in perf/."""
    for path in sorted(Path(perf.__path__[0]).glob("test_*.py")):
        module = importlib.import_module(f"perf.{path.stem}")
        for name, function in vars(module).items():
            for mark in getattr(function, "pytestmark", []) if name.startswith("test_") else []:
                if mark.name == "specs":
                    yield path.stem, name, mark


def gpu_count(hardware_key: str) -> int:
    """Return the number of GPUs of a node by a hardware key, such as 4 for h200x4; 0 for a CPU."""
    of_node = re.sub(r"^\d+x", "", hardware_key)
    return 0 if of_node.startswith("cpu") else int(re.findall(r"x(\d+)(?=-|$)", of_node)[0])


def node_count(hardware_key: str) -> int:
    """Return the number of nodes of a hardware key, such as 2 for 2xh200x4-ib400."""
    found = re.match(r"(\d+)x", hardware_key)
    return int(found[1]) if found else 1


def options_on(gpus: int, arguments: Sequence[str] = ()) -> Options:
    """Return ddpperf's options on a machine with this many GPUs. arguments: those of the command line."""
    config = _prepareconfig(["-p", "ddpperf.plugin", "-c", "/dev/null", "--rootdir", "/", *arguments])
    try:
        return read_options(config, gpus)
    finally:
        config._ensure_unconfigure()


def default_suite(hardware_key: str, digest: str = "", *, core: bool = False) -> Sequence[tuple[str, Spec]]:
    """Return the test function and the spec of each case that can run on some hardware.

    digest: the digest of the images of --data; empty for synthetic images. core: whether to return
    the core suite instead of the full suite.
    """
    left_out = {"skip", "slow"} if core else {"skip"}
    nodes = node_count(hardware_key)
    on_nodes = [f"--nodes={nodes}", "--interface=lo", "--launcher=srun"] if nodes > 1 else []
    options = options_on(gpu_count(hardware_key), on_nodes)
    if digest:
        images = dataclasses.replace(options.data, name="imagefolder", digest=digest)
        options = dataclasses.replace(options, data=images)
    found = []
    for _, test, marker in experiments():
        for case in parameters(test, marker, options, Machine(device=options.device)):
            (spec,) = case.values
            if isinstance(spec, Spec) and left_out.isdisjoint(mark.name for mark in case.marks):
                found.append((test, spec))
    return found
