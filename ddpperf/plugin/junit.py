"""What the run decided after its tests had passed, for pytest's JUnit XML: those that got worse, and the verdict itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import pytest
from _pytest.junitxml import LogXML, xml_key

from ddpperf.results.outcomes import Status, Verdict

VERDICT = "ddpperf::verdict"  # the name of the case that stands for the whole run


def add_verdict(config: pytest.Config, failures: Mapping[str, str], verdict: Verdict) -> None:
    """Add a failed case for each test that got worse, and one of the verdict: passed, failed, or in error where there is none.

    failures: by test, how it got worse. Does nothing where no --junitxml was asked for; call before the file is written.
    """
    xml = config.stash.get(xml_key, None)
    if xml is None:
        return
    for test, how in failures.items():
        _add(xml, test, "call", "failed", how)
    reasons = "\n".join(verdict.reasons)
    if verdict.status is Status.PASS:
        _add(xml, VERDICT, "call", "passed", "")
    elif verdict.status is Status.FAIL:
        _add(xml, VERDICT, "call", "failed", f"FAIL: {reasons}")
    else:
        _add(xml, VERDICT, "setup", "failed", f"NO VERDICT: {reasons}")  # JUnit's word for that is an error


def _add(
    xml: LogXML, test: str, when: Literal["setup", "call"], outcome: Literal["passed", "failed"], text: str
) -> None:
    """A case of its own, even beside one of the same test that had passed."""
    location = (test.partition("::")[0], None, test.partition("::")[2])
    for phase, ended, why in ((when, outcome, text or None), ("teardown", "passed", None)):
        xml.pytest_runtest_logreport(
            pytest.TestReport(test, location, {}, ended, why, phase)  # type: ignore[arg-type]
        )
