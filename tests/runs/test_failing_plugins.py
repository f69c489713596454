"""Runs in which pytest or another plugin fails: what was measured is saved, decided and printed."""

from __future__ import annotations

import pytest

from tests.canned import CannedSuite
from tests.project import Finished

TESTS = """
from ddpperf.specs import AllReduceSpec

def test_first(measure):
    measure(AllReduceSpec(world_size=2, nbytes=1024))

def test_last(measure):
    measure(AllReduceSpec(world_size=2, nbytes=2048))
"""
PLUGIN = """
import pytest

pytest_plugins = ["ddpperf.plugin"]

{hook}
"""
RAISES = """
def {hook}({arguments}):
    raise {error}
"""
WRAPPER = """
@pytest.hookimpl(wrapper=True, tryfirst=True)
def {hook}():
    {before}
    yield
    {after}
"""
# Registered by a conftest that pytest loads after ddpperf, so that its hooks are called first
OUTERMOST = """
class Outermost:
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self):
        raise OSError("a plugin's disk is full")
        yield

def pytest_collection_finish(session):
    session.config.pluginmanager.register(Outermost())
"""
LATE = {
    "sessionfinish": RAISES.format(
        hook="pytest_sessionfinish", arguments="", error="OSError('a disk is full')"
    ),
    "sessionfinish wrapper": WRAPPER.format(
        hook="pytest_sessionfinish", before="", after="raise OSError('a disk is full')"
    ),
    "sessionfinish before its yield": WRAPPER.format(
        hook="pytest_sessionfinish", before="raise OSError('a disk is full')", after=""
    ),
    "terminal_summary": RAISES.format(
        hook="pytest_terminal_summary", arguments="", error="OSError('a disk is full')"
    ),
    "terminal_summary wrapper": WRAPPER.format(
        hook="pytest_terminal_summary", before="", after="raise OSError('a disk is full')"
    ),
    "unconfigure": RAISES.format(hook="pytest_unconfigure", arguments="", error="OSError('a disk is full')"),
    "interrupt": RAISES.format(
        hook="pytest_sessionfinish", arguments="", error="KeyboardInterrupt('a disk is full')"
    ),
    "outermost": OUTERMOST,
    "system exit": RAISES.format(
        hook="pytest_terminal_summary", arguments="", error="SystemExit('a disk is full')"
    ),
}


def run_with(suite: CannedSuite, hook: str, *arguments: str) -> Finished:
    suite.experiment.write_text(TESTS)
    (suite.root / "conftest.py").write_text(PLUGIN.format(hook=hook))
    return suite.run("perf", *arguments)


@pytest.mark.parametrize("hook", LATE.values(), ids=LATE)
def test_plugin_that_fails_late_loses_nothing(canned_suite: CannedSuite, hook: str) -> None:
    run = run_with(canned_suite, hook)
    run.assert_one_sentence(4, "another plugin failed while the run ended", "disk is full", "conftest.py")
    run.assert_one_sentence(4, "PASS: 2 tests measured")
    assert "ddpperf on cpu" in run.output, "the table is printed"
    (saved,) = canned_suite.saved_runs()
    assert saved["ddpperf"]["verdict"]["status"] == "PASS"
    assert len(saved["benchmarks"]) == 2


def test_failed_junit_file_loses_nothing(canned_suite: CannedSuite) -> None:
    canned_suite.experiment.write_text(TESTS)
    (canned_suite.root / "j.xml" / "in the way").mkdir(parents=True)
    (canned_suite.root / "conftest.py").write_text(PLUGIN.format(hook=""))
    run = canned_suite.run("perf", "--junitxml", "link.xml")
    assert run.status == 0, run
    (canned_suite.root / "link.xml").unlink()
    (canned_suite.root / "link.xml").symlink_to("missing/j.xml")
    run = canned_suite.run("perf", "--junitxml", "link.xml")
    run.assert_one_sentence(4, "another plugin failed while the run ended: FileNotFoundError")
    run.assert_one_sentence(4, "PASS: 2 tests measured")
    assert len(canned_suite.saved_runs()) == 2


def test_failing_plugin_hides_no_failure(canned_suite: CannedSuite) -> None:
    """The exit status of a FAIL stays 1, and pytest prints why the test failed."""
    canned_suite.experiment.write_text(TESTS + "    assert 1 == 2\n")
    (canned_suite.root / "conftest.py").write_text(PLUGIN.format(hook=LATE["sessionfinish"]))
    run = canned_suite.run("perf")
    run.assert_one_sentence(1, "FAIL: perf/test_it.py::test_last failed: assert 1 == 2")
    assert "E       assert 1 == 2" in run.output
    assert "1 failed, 1 passed" in run.output


def test_extra_info_that_is_no_json_loses_nothing(canned_suite: CannedSuite) -> None:
    canned_suite.experiment.write_text(
        TESTS
        + "\ndef test_own(measure, benchmark):\n"
        + "    measure(AllReduceSpec(world_size=2, nbytes=4096))\n"
        + "    benchmark.extra_info['mine'] = float('nan')\n"
        + "    benchmark.extra_info[1] = {(1, 2): 3}\n"
    )
    run = canned_suite.run("perf", "--verdict", "v.md", "--report", "r.html")
    run.assert_one_sentence(0, "PASS: 3 tests measured")
    extra = canned_suite.saved_runs()[0]["benchmarks"][2]["extra_info"]
    assert (extra["mine"], extra["1"]) == ("nan", "{(1, 2): 3}")


@pytest.mark.parametrize(
    ("hook", "arguments"),
    [
        ("pytest_benchmark_generate_commit_info", ""),
        ("pytest_benchmark_generate_json", "benchmarks"),
    ],
)
def test_failed_description_of_a_run_loses_nothing(
    canned_suite: CannedSuite, hook: str, arguments: str
) -> None:
    raises = RAISES.format(hook=hook, arguments=arguments, error="OSError('no repository')")
    run = run_with(canned_suite, raises)
    run.assert_one_sentence(4, "another plugin failed while the run ended", "no repository")
    run.assert_one_sentence(4, "PASS: 2 tests measured")
    (saved,) = canned_suite.saved_runs()
    assert len(saved["benchmarks"]) == 2


MEANWHILE = {
    "logreport": "Boom('by a plugin')",
    "KeyboardInterrupt": "KeyboardInterrupt('by a plugin')",
    "SystemExit": "SystemExit('by a plugin')",
    "usage error": "pytest.UsageError('by a plugin')",
    "exit 0": "pytest.exit.Exception('by a plugin', 0)",
    "exit 3": "pytest.exit.Exception('by a plugin', 3)",
    "exit 4": "pytest.exit.Exception('by a plugin', 4)",
    "exit 77": "pytest.exit.Exception('by a plugin', 77)",
}
AFTER_FIRST = """
class Boom(Exception):
    pass

def pytest_runtest_logreport(report):
    if report.when == "teardown" and "first" in report.nodeid:
        raise {error}
"""


def test_failure_while_pytest_is_interrupted_is_no_pass(canned_suite: CannedSuite) -> None:
    """All tests were measured, and pytest does not say that the run was interrupted."""
    hook = """
def pytest_runtest_logreport(report):
    if report.when == "teardown" and "last" in report.nodeid:
        raise KeyboardInterrupt("SIGINT")

def pytest_keyboard_interrupt():
    raise OSError("no terminal")
"""
    run = run_with(canned_suite, hook)
    run.assert_one_sentence(4, "NO VERDICT: the run was interrupted by SIGINT")
    run.assert_one_sentence(4, "another plugin failed while the run ended: OSError: no terminal")
    assert len(canned_suite.measured()) == 2


@pytest.mark.parametrize("error", MEANWHILE.values(), ids=MEANWHILE)
def test_plugin_that_fails_meanwhile_keeps_what_was_measured(canned_suite: CannedSuite, error: str) -> None:
    run = run_with(canned_suite, AFTER_FIRST.format(error=error))
    assert run.status == 125, run
    assert "NO VERDICT: " in run.output
    assert "perf/test_it.py::test_last was not run" in run.output
    assert "by a plugin" in run.output
    assert list(canned_suite.measured()) == ["test_first"]
