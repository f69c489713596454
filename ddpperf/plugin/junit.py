"""JUnit XML cases for tests that got slower and for the verdict of the test run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import pytest
from _pytest.junitxml import LogXML, xml_key

from ddpperf.results.outcomes import Status, Verdict

VERDICT = "ddpperf::verdict"  # the name of the case that stands for the whole run


def add_verdict(config: pytest.Config, worse: Mapping[str, str], verdict: Verdict) -> None:
    """Add a failed JUnit case for each test that got worse, and a case for the verdict.

    The verdict's case is passed, failed or in error. Without --junitxml nothing is added. Call this
    before pytest writes the XML file.
    worse: what got worse, by test id.
    """
    xml = config.stash.get(xml_key, None)
    if xml is None:
        return
    for test, what in worse.items():
        _add(xml, test, "call", what)
    reasons = "\n".join(verdict.reasons)
    failure = f"{verdict.status}: {reasons}" if verdict.status is not Status.PASS else ""
    # JUnit calls a failed setup an error
    _add(xml, VERDICT, "setup" if verdict.status is Status.NO_VERDICT else "call", failure)


def _add(xml: LogXML, test: str, when: Literal["setup", "call"], failure: str) -> None:
    """Add a JUnit case, even if the file already has a passed case of the same test.

    failure: empty if the case passed.
    """
    path, _, name = test.partition("::")
    for phase, why in ((when, failure), ("teardown", "")):
        outcome: Literal["failed", "passed"] = "failed" if why else "passed"
        location = (path, None, name)
        report = pytest.TestReport(test, location, {}, outcome, why or None, phase)  # type: ignore[arg-type]
        xml.pytest_runtest_logreport(report)
