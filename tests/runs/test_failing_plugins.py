"""Runs in which pytest or another plugin fails: what was measured is saved, decided and printed."""

from __future__ import annotations

import pytest

from tests.canned import CannedSuite
from tests.project import Finished

TESTS = """
import pytest
from ddpperf.specs import AllReduceSpec

@pytest.mark.parametrize("nbytes", [1024, 2048])
def test_it(measure, nbytes):
    measure(AllReduceSpec(world_size=2, nbytes=nbytes))
"""
PLUGIN = 'import pytest\n\npytest_plugins = ["ddpperf.plugin"]\n{}'
RAISES = "\ndef {hook}():\n    raise {error}\n"
WRAPPER = "\n@pytest.hookimpl(wrapper=True, tryfirst=True)\ndef {hook}():\n    yield\n    raise {error}\n"
FULL = "OSError('a disk is full')"
LATE = {
    "hook": RAISES.format(hook="pytest_sessionfinish", error=FULL),
    "wrapper": WRAPPER.format(hook="pytest_terminal_summary", error=FULL),
}


def run_with(suite: CannedSuite, hook: str, *arguments: str) -> Finished:
    suite.experiment.write_text(TESTS)
    (suite.root / "conftest.py").write_text(PLUGIN.format(hook))
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


def test_failing_plugin_hides_no_failure(canned_suite: CannedSuite) -> None:
    canned_suite.experiment.write_text(TESTS + "    assert 1 == 2\n")
    (canned_suite.root / "conftest.py").write_text(PLUGIN.format(LATE["hook"]))
    run = canned_suite.run("perf")
    run.assert_one_sentence(1, "FAIL: perf/test_it.py::test_it[1024] failed: assert 1 == 2")


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
    assert (extra["mine"], extra["1"]) == ("nan", {"(1, 2)": 3})


MEANWHILE = {
    "logreport": "Boom('by a plugin')",
    "KeyboardInterrupt": "KeyboardInterrupt('by a plugin')",
    "exit 0": "pytest.exit.Exception('by a plugin', 0)",
}
AFTER_FIRST = """
class Boom(Exception):
    pass

def pytest_runtest_logreport(report):
    if report.when == "teardown" and "1024" in report.nodeid:
        raise {error}
"""


@pytest.mark.parametrize("error", MEANWHILE.values(), ids=MEANWHILE)
def test_plugin_that_fails_meanwhile_keeps_what_was_measured(canned_suite: CannedSuite, error: str) -> None:
    run = run_with(canned_suite, AFTER_FIRST.format(error=error))
    assert run.status == 125, run
    assert "NO VERDICT: " in run.output
    assert "perf/test_it.py::test_it[2048] was not run" in run.output
    assert "by a plugin" in run.output
    assert list(canned_suite.measured()) == ["test_it[1024]"]
