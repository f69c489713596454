"""The pytest plugin: hooks in the order in which a run meets them. What they do is in the modules beside this one."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from ddpperf.plugin import hardware
from ddpperf.plugin.ending import Ending
from ddpperf.plugin.measure import CLOCK, Measure
from ddpperf.plugin.options import add_options, read_options, refused
from ddpperf.plugin.session import Session

SESSION = pytest.StashKey[Session]()


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Check the options, and take saving and comparing over before pytest-benchmark reads what was asked for."""
    config.addinivalue_line("markers", "specs(cells=f): f takes the Options and yields the specs to measure, a test for each")
    config.addinivalue_line("filterwarnings", "ignore:Benchmark fixture was not used at all")
    gpus = hardware.visible_gpus()
    options = read_options(config, len(gpus))
    if sentence := refused(config):
        raise pytest.UsageError(sentence)
    session = Session(options, gpus, config.rootpath, config.getoption("benchmark_compare") or None)
    session.find_baseline()
    config.stash[SESSION] = session
    if not _is_xdist_worker(config):
        config.pluginmanager.register(session, "ddpperf-session")
        config.pluginmanager.register(Ending(config, session), "ddpperf-ending")
    config.option.benchmark_storage = "file://."  # so that no folder is made: nothing is kept there
    config.option.benchmark_save = config.option.benchmark_autosave = config.option.benchmark_json = None
    config.option.benchmark_compare = str(session.baseline.path) if session.baseline is not None else None
    config.option.benchmark_compare_fail = None


def pytest_benchmark_generate_machine_info() -> dict[str, Any]:
    """What stays the same on one machine: pytest-benchmark's own includes the CPU's momentary clock, and warns of it."""
    return {
        "node": platform.node(),
        "machine": platform.machine(),
        "system": platform.system(),
        "python_implementation": platform.python_implementation(),
        "python_version": platform.python_version(),
        "cpu": {"brand_raw": hardware.cpu_model(), "count": hardware.core_count()},
    }


# --- collecting


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("specs")
    if marker is not None:
        specs = list(marker.kwargs["cells"](metafunc.config.stash[SESSION].options))
        metafunc.parametrize("spec", specs, ids=[spec.id for spec in specs])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    session = config.stash[SESSION]
    session.collected = [item.nodeid for item in items if _measures(item)]
    session.arguments = [_relative(argument, config) for argument in config.args]


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in filter(_measures, items):
        item.config.stash[SESSION].deselected.add(item.nodeid)


def _measures(item: pytest.Item) -> bool:
    return "measure" in getattr(item, "fixturenames", ())


def _relative(argument: str, config: pytest.Config) -> str:
    """A path on the command line as test ids begin: relative to the root, "" for the root itself."""
    path, *rest = argument.split("::", 1)
    relative = os.path.relpath(config.invocation_params.dir / path, config.rootpath)
    return "::".join(["" if relative == "." else Path(relative).as_posix(), *rest])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(ids: list[str]) -> None:
    if any("perf" in Path(test.split("::")[0]).parts for test in ids):
        pytest.exit(_NO_XDIST, returncode=4)


_NO_XDIST = "perf/ measures time and cannot share the machine with itself, but -n was given; run it without -n"


def _is_xdist_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Take the devices before the first test; a second run on them is refused."""
    ours = session.config.stash[SESSION]
    if ours.collected and not session.config.option.collectonly and not _is_xdist_worker(session.config):
        ours.start()


# --- measuring


@pytest.fixture(autouse=True)
def _device_clock(request: pytest.FixtureRequest) -> None:
    """Give pytest-benchmark the virtual clock: markers do not merge, so the nearest one is repeated with it."""
    if "measure" in request.fixturenames:
        marker = request.node.get_closest_marker("benchmark")
        keywords = dict(marker.kwargs) if marker else {}
        request.node.add_marker(pytest.mark.benchmark(**(keywords | {"timer": CLOCK})), append=False)


@pytest.fixture
def measure(request: pytest.FixtureRequest, benchmark: BenchmarkFixture) -> Measure:
    """Measures a spec on real process sets: `measure(spec)`; see `ddpperf.plugin.measure.Measure`."""
    if _is_xdist_worker(request.config):
        pytest.fail(_NO_XDIST, pytrace=False)
    session = request.config.stash[SESSION]
    session.measures[request.node.nodeid] = fixture = Measure(benchmark, session.pool, session.notes)
    return fixture


# --- ending


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> Iterator[None]:
    """End the processes first of all; `Ending` saves and decides after that."""
    session.config.stash[SESSION].finish()
    return (yield)
