"""perf/thresholds.toml, found and read: what a test must reach, and how two sides are judged."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from ddpperf.analysis.settings import DecisionSettings, read_decision
from ddpperf.analysis.thresholds import Threshold, read_document, thresholds_in

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
        raise pytest.UsageError(f"{NAME} cannot be read ({error.strerror}); make it a readable file") from error
    try:
        document = read_document(text, name=NAME)
        return thresholds_in(document, name=NAME), read_decision(document, name=NAME)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
