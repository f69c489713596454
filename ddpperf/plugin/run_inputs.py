"""Read what a test run needs before it collects tests: thresholds, settings, and the stored run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ddpperf.errors import Refused
from ddpperf.machine import hardware
from ddpperf.machine.gpu_description import Gpu
from ddpperf.plugin.options.options import Options
from ddpperf.results.stored_runs import Baseline, NoBaseline, Storage
from ddpperf.verdict.settings import DecisionSettings
from ddpperf.verdict.thresholds import HardwareThresholds, read_threshold_file


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """The hardware and the files of a test run, which do not change while it runs.

    baseline: the stored run to compare with; None without --benchmark-compare, or if none was
    found.
    no_baseline: why no stored run was found, or "".
    """

    gpus: Sequence[Gpu]
    storage: Storage
    thresholds: HardwareThresholds
    settings: DecisionSettings
    baseline: Baseline | None
    no_baseline: str


def read_inputs(
    options: Options, gpus: Sequence[Gpu], root: Path, compare_with: str | Literal[True] | None
) -> RunInputs:
    """Read perf/thresholds.toml and the stored run to compare with.

    compare_with: the name of the stored run, or True for the newest one. Raises Refused for a wrong
    file, and for a stored run of this name that does not exist.
    """
    key = hardware.hardware_key(options.device, gpus)
    if options.nodes.interface is not None:
        key = f"{options.nodes.count}x{key}-{options.nodes.interface.link}"
    storage = Storage(root=root, hardware_key=key)
    thresholds, settings = read_threshold_file(root)
    baseline, no_baseline = None, ""
    if compare_with:
        try:
            baseline = storage.load(storage.find(compare_with))
        except NoBaseline as problem:
            if compare_with is not True:
                raise Refused(str(problem)) from problem
            no_baseline = str(problem)
    return RunInputs(
        gpus=gpus,
        storage=storage,
        thresholds=HardwareThresholds(thresholds, storage.hardware_key),
        settings=settings["gpu" if options.device == "cuda" else "cpu"],
        baseline=baseline,
        no_baseline=no_baseline,
    )
