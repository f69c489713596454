"""The pytest hooks of ddpperf, in the order in which pytest calls them.

The classes `Collection`, `Outcomes` and `RunOutputs` implement further hooks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from ddpperf.errors import Refused
from ddpperf.io.terminal_text import harmless
from ddpperf.machine import hardware
from ddpperf.plugin.cases import lacking_marks, parameters
from ddpperf.plugin.collected_tests import spec_of
from ddpperf.plugin.interrupts import interrupt_once
from ddpperf.plugin.judge import Judge
from ddpperf.plugin.measure_fixture import Measure
from ddpperf.plugin.options.benchmark_options import check_measuring_options, check_one_process, runs_tests
from ddpperf.plugin.options.option_table import add_options
from ddpperf.plugin.options.options import is_experiment
from ddpperf.plugin.run_outputs import RunOutputs
from ddpperf.plugin.session import Session
from ddpperf.results.outcomes import Reason
from ddpperf.specs import Spec
from ddpperf.verdict.verdict import exit_status

SESSION, OUTPUTS = pytest.StashKey[Session](), pytest.StashKey[RunOutputs]()
JUDGE = pytest.StashKey[Judge]()
NO_XDIST = "performance tests measure time one after another, but -n was given; run them without -n"
MARKERS = (
    "specs(cases=f): f(options) yields the specs to measure, one test for each spec",
    "slow: a test outside the core suite, which --full adds; set by case(spec, core=False)",
    "gate: a test to run before every merge; set by case(spec, gate=True)",
    "candidate_cannot: a test that only the candidate of an A/B run cannot measure; set by ddpperf",
    "base_failed: a test that the base of an A/B run could not measure; set by ddpperf",
    "recipe(name): a training with a recipe, which reports name",
)


@contextlib.contextmanager
def refusals_as_usage_errors() -> Iterator[None]:
    """Convert ddpperf's `Refused` error to pytest.UsageError, which ends the test run."""
    try:
        yield
    except Refused as refused:
        raise pytest.UsageError(harmless(" ".join(str(refused).split()))) from refused


pytest_addoption = add_options
pytest_benchmark_generate_machine_info = hardware.machine_info


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Read ddpperf's options, and turn off pytest-benchmark's own saving and comparing."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    config.addinivalue_line("filterwarnings", "ignore:Benchmark fixture was not used at all")
    if not config.pluginmanager.hasplugin("benchmark"):
        raise pytest.UsageError(
            "ddpperf needs pytest-benchmark, which was not loaded; leave -p no:benchmark out"
        )
    with refusals_as_usage_errors():
        config.stash[OUTPUTS] = RunOutputs(config)  # first, as it deletes an earlier run's verdict
        config.stash[SESSION] = session = Session(config)
    config.stash[JUDGE] = Judge(session)
    for plugin in (session.collection, session.outcomes, config.stash[OUTPUTS]):
        config.pluginmanager.register(plugin)
    config.option.benchmark_storage = "file://."  # pytest-benchmark then makes no folder
    config.option.benchmark_save = config.option.benchmark_autosave = config.option.benchmark_json = None
    config.option.benchmark_compare = str(session.baseline.path) if session.baseline is not None else None
    config.option.benchmark_compare_fail = None
    config.option.benchmark_quiet = True  # --benchmark-verbose still prints pytest-benchmark's table


# --- collecting


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize each test marked with `specs` by the measurement specs of its marker."""
    marker = metafunc.definition.get_closest_marker("specs")
    if marker is None:
        return
    session = metafunc.config.stash[SESSION]
    cases = []
    if not session.collection.refusal:
        try:
            _prepare(metafunc.config)
            cases = parameters(metafunc.function.__name__, marker, session.options, session.machine)
        except Refused as refused:  # a hook that raises here would only lose one file
            session.collection.refusal = str(refused)
    metafunc.parametrize("spec", cases)


def _prepare(config: pytest.Config) -> None:
    session = config.stash[SESSION]
    capture = config.pluginmanager.getplugin("capturemanager")
    shown = capture.global_and_fixture_disabled() if capture is not None else contextlib.nullcontext()
    interrupt_once(config)
    with shown:
        session.prepare()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Store the ids of the collected tests; raise pytest.UsageError if they cannot be measured.

    Other plugins, such as that of --lf, have removed their tests by now.
    """
    config = session.config
    ours = config.stash[SESSION]
    ours.collection.collect(session.items)
    ours.outcomes.expect(ours.collection.tests)
    with refusals_as_usage_errors():
        if ours.collection.refusal:
            raise Refused(ours.collection.refusal)
        if not ours.collection.tests:
            return
        if runs_tests(config):
            check_one_process()
            check_measuring_options(config)
        _prepare(config)
        measured = [(item, spec) for item in session.items if isinstance(spec := spec_of(item), Spec)]
        ours.check_sides(function for _, spec in measured for function in spec.functions)
        for item, spec in measured:
            for mark in lacking_marks(spec, ours.options):
                item.add_marker(mark)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(ids: list[str]) -> None:
    """Refuse pytest-xdist's -n, whose workers would run experiments side by side."""
    if any(map(is_experiment, ids)):
        pytest.exit(NO_XDIST, returncode=4)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> Iterator[Any]:
    """Lock the devices before the first test, and compare the measurements after the last test."""
    ours, config = session.config.stash[SESSION], session.config
    measuring = ours.collection.tests and runs_tests(config)
    if measuring:
        with refusals_as_usage_errors():
            ours.start()
    result = yield
    if measuring and ours.measured():
        try:
            config.stash[JUDGE].judge(session.items)
        except Refused as refused:  # a usage error would lose what was measured
            ours.problems.append(Reason(str(refused)))
    return result


# --- measuring


@pytest.fixture
def measure(request: pytest.FixtureRequest, benchmark: BenchmarkFixture) -> Measure:
    """Provide a function that measures a spec, such as a training step, in worker processes.

    Call it as `measure(spec)`; `ddpperf.plugin.measure_fixture.Measure` describes the result.
    """
    if hasattr(request.config, "workerinput"):  # a worker of pytest-xdist, of a suite outside perf/
        pytest.fail(NO_XDIST, pytrace=False)
    return request.config.stash[SESSION].fixture(request.node.nodeid, benchmark, request.node.add_marker)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[Any]:
    """Fail a test if one of its metrics does not reach the threshold in perf/thresholds.toml."""
    session = pyfuncitem.config.stash[SESSION]
    try:
        result = yield
    finally:
        session.progress.clear()
    if violations := session.violations(pyfuncitem.nodeid, pyfuncitem.originalname):
        pytest.fail(harmless("; ".join(violations)), pytrace=False)
    return result


# --- ending


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> Iterator[None]:
    """End all worker processes, then decide and save, before other plugins write their files."""
    stash = session.config.stash
    outputs = stash[OUTPUTS]
    try:
        outputs.end(stash[SESSION], stash[JUDGE], exitstatus)
    except Exception as error:
        outputs.failed(error)
    try:
        yield
    except Exception as error:
        if outputs.verdict is None:
            raise
        outputs.plugin_failed(error)
    outputs.print_lines()
    # A PASS is 0, so that the exit status of another plugin holds, such as that of --fail-on-flaky.
    if outputs.verdict is not None:
        session.exitstatus = exit_status(outputs.verdict.status, saved=outputs.saved) or session.exitstatus
