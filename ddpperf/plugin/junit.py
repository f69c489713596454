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
        _add(xml, test, "call", "failed", what)
    reasons = "\n".join(verdict.reasons)
    if verdict.status is Status.PASS:
        _add(xml, VERDICT, "call", "passed", "")
    elif verdict.status is Status.FAIL:
        _add(xml, VERDICT, "call", "failed", f"FAIL: {reasons}")
    else:
        _add(xml, VERDICT, "setup", "failed", f"NO VERDICT: {reasons}")  # JUnit calls this an error


def _add(
    xml: LogXML, test: str, when: Literal["setup", "call"], outcome: Literal["passed", "failed"], text: str
) -> None:
    """Add a JUnit case, even if the file already has a passed case of the same test."""
    location = (test.partition("::")[0], None, test.partition("::")[2])
    for phase, ended, why in ((when, outcome, text or None), ("teardown", "passed", None)):
        xml.pytest_runtest_logreport(
            pytest.TestReport(test, location, {}, ended, why, phase)  # type: ignore[arg-type]
        )
