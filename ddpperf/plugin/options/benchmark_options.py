"""Options of pytest and of pytest-benchmark that mean something else for performance tests."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

import pytest
from pytest_benchmark.utils import PercentageRegressionCheck

from ddpperf.errors import Refused

# Options without an effect on performance tests, which run as long and as often as --rounds says, in
# processes of their own that warm up and have their own timers, and whose runs are in .ddpperf/runs.
WITHOUT_EFFECT = (
    r"--benchmark-(calibration-precision|confidence|max-time|min-\w+|precision|storage|warmup.*|"
    r"disable-gc|timer|cprofile.*)(=.*)?"
)
# Options of pytest that only list something, or only set fixtures up.
LISTING_OPTIONS = ("collectonly", "setuponly", "showfixtures", "show_fixtures_per_test")
# Rank and number of processes, as torchrun, mpirun, srun and others set them. Slurm's batch scripts and
# allocations have SLURM_NTASKS, too, but no step of several tasks.
LAUNCHED = {
    "LOCAL_RANK": "WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK": "PMI_SIZE",
    "SLURM_PROCID": "SLURM_STEP_NUM_TASKS",
}


def runs_tests(config: pytest.Config) -> bool:
    """Return whether this process runs the collected tests, and does not only list them.

    Workers of pytest-xdist run no performance tests.
    """
    return not hasattr(config, "workerinput") and not any(
        config.getoption(option, False) for option in LISTING_OPTIONS
    )


def check_one_process() -> None:
    """Raise Refused if a launcher has started several pytest processes, which would measure at once."""
    for rank, size in LAUNCHED.items():
        count = os.environ.get(size, "")
        if rank in os.environ and count.isdecimal() and int(count) > 1:
            what = f"a launcher has started {count} processes of pytest ({size}={count})"
            advice = "run python -m pytest perf/ without torchrun, mpirun or srun"
            raise Refused(f"{what}, but a single pytest starts all ranks itself; {advice}")


def check_measuring_options(config: pytest.Config) -> None:
    """Raise Refused for pytest-benchmark options that cannot apply to tests in worker processes.

    Only options of the command line are refused. Those in a project's configuration may be for
    other benchmarks of the project.
    """
    if config.getoption("benchmark_disable") and not config.getoption("benchmark_enable"):
        raise Refused("--benchmark-disable leaves nothing to measure; pass --benchmark-skip or --rounds 1")
    for word in map(str, config.invocation_params.args):
        if re.fullmatch(WITHOUT_EFFECT, word):
            raise Refused(f"{word} has no effect on performance tests; leave it out, or pass --rounds")


def slower_ratio(config: pytest.Config, given: Collection[str]) -> float | None:
    """Return the largest allowed ratio of a step time to the baseline's step time, or None.

    The ratio is that of --benchmark-compare-fail. pytest-benchmark's own check prints a traceback,
    ignores missing results, and uses only the last of several limits. Raises Refused for a
    --benchmark-compare that ddpperf does not support. given: the names of ddpperf's options.
    """
    name, compare = "--benchmark-compare", config.getoption("benchmark_compare")
    file = Path(str(compare).partition("::")[0])
    if compare == "" or (isinstance(compare, str) and (file.is_dir() or file.suffix == ".py")):
        raise Refused(f"pytest read {compare!r} as the stored run of {name}; put it last")
    if compare and "--candidate" in given:
        raise Refused(
            f"{name} measures this environment as the candidate, got --candidate, too; leave one out"
        )
    limits = [word for word in map(str, config.invocation_params.args) if word.startswith(f"{name}-fail")]
    (check, *more) = config.getoption("benchmark_compare_fail") or [None]
    if check is None:
        return None
    if more or len(limits) > 1 or not isinstance(check, PercentageRegressionCheck) or check.field != "median":
        raise Refused(f"{name}-fail takes one median:N%, got another or several; pass one")
    if not compare:
        raise Refused(f"{name}-fail needs a baseline to compare with; add {name}")
    return 1 + float(check.threshold) / 100


def project_root(config: pytest.Config) -> Path:
    """Return the folder of the measured project, which has thresholds and stored runs.

    It is pytest's root. pytest takes the common folder of all words of the command line, options
    included, or a folder above that holds its configuration. So the present folder is the root if its
    perf/ is measured. Raises Refused if pytest took a folder of --base or --candidate for the root, or if
    measured tests have thresholds that do not belong to the root.
    """
    here, root = config.invocation_params.dir, config.rootpath
    if config.option.rootdir or config.option.inifilename:
        return root
    paths = [Path(here, argument.partition("::")[0]).resolve() for argument in config.args]
    outside = [path for path in paths if not path.is_relative_to(root)]
    if outside and (config.getoption("--base") or config.getoption("--candidate")):
        why = f"pytest took {root} for the root of this project, but {outside[0]} is outside"
        raise Refused(f"{why}; name the tests first, and write options with =, as --base=DIR")
    if paths and all(path.is_relative_to((here / "perf").resolve()) for path in paths):
        return here
    for path in paths:
        for folder in (path, *path.parents):
            thresholds = folder / "thresholds.toml"
            if folder.name == "perf" and thresholds.exists() and folder.parent != root.resolve():
                what = (
                    f"these tests have their own {thresholds}, but pytest took {root} for the project's root"
                )
                raise Refused(f"{what}; start pytest in {folder.parent}")
    return root
