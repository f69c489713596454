"""perf/thresholds.toml, found and read: what a test must reach, and how two sides are judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from ddpperf.specs import Spec
from ddpperf.verdict.settings import DecisionSettings, read_decision
from ddpperf.verdict.thresholds import Threshold, read_document, thresholds_in

NAME = "perf/thresholds.toml"


def read_threshold_file(root: Path) -> tuple[tuple[Threshold, ...], Mapping[str, DecisionSettings]]:
    """Thresholds, and by class of hardware the decision's settings; those built in where there is no file.

    Raises pytest.UsageError with one sentence if the file is broken.
    """
    try:
        text = (root / NAME).read_text()
    except (FileNotFoundError, NotADirectoryError):
        text = ""
    except UnicodeDecodeError as error:
        raise pytest.UsageError(f"{NAME} is not in UTF-8 ({error.reason}); save it as that") from error
    except OSError as error:
        raise pytest.UsageError(
            f"{NAME} cannot be read ({error.strerror}); make it a readable file"
        ) from error
    try:
        document = read_document(text, name=NAME)
        return thresholds_in(document, name=NAME), read_decision(document, name=NAME)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error


class HardwareThresholds:
    """The thresholds for one hardware key, and which of them a test was held to."""

    def __init__(self, thresholds: Sequence[Threshold], hardware_key: str) -> None:
        self._own = [each for each in thresholds if each.hardware == hardware_key]
        self._applied: set[int] = set()  # their numbers

    def violations(self, function: str, spec: Spec, values: Mapping[str, float]) -> list[str]:
        """Those for this test that its metrics do not reach, a sentence each."""
        applying = [
            each for each in self._own if each.applies(hardware=each.hardware, test=function, spec=spec)
        ]
        self._applied |= {each.number for each in applying}
        return [sentence for each in applying for sentence in each.violations(values)]

    def counts(self) -> dict[str, int]:
        return {"applied": len(self._applied), "known": len(self._own)}
