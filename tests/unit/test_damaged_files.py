"""Damaged stored runs and thresholds: each is read, or refused in one sentence of at most 300 letters."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddpperf.results.stored_runs import NoBaseline, Storage
from ddpperf.verdict.settings import read_decision
from ddpperf.verdict.thresholds import read_document, read_thresholds
from perf.common import recipes
from tests.canned import CannedSuite
from tests.project import REPOSITORY

VALUES: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, -1, 0, 10**400, 0.5, 1e308, float("nan"), "", "\0", "\x1b]0;x\x07", "x" * 5000, [], {}, [{}]]
)
SAME_EACH_TIME = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def places(document: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container in a document of JSON, with each of its keys or indices."""
    items: list[tuple[Any, Any]] = []
    if isinstance(document, dict):
        items = [*document.items()]
    elif isinstance(document, list):
        items = [*enumerate(document)]
    for key, value in items:
        yield document, key
        yield from places(value)


def damaged(document: Any, draw: st.DataObject) -> Any:
    """Return a copy of a document of JSON in which one to three values are others or gone."""
    changed = copy.deepcopy(document)
    for _ in range(draw.draw(st.integers(1, 3))):
        if not (found := [*places(changed)]):
            break
        container, key = found[draw.draw(st.integers(0, len(found) - 1))]
        if draw.draw(st.booleans()):
            container[key] = copy.deepcopy(draw.draw(VALUES))
        else:
            del container[key]
    return changed


def require_sentence(error: Exception, path: Path) -> None:
    sentence = str(error).replace(str(path), "FILE")
    assert sentence.isprintable(), ascii(sentence)
    assert 0 < len(sentence) <= 300


@SAME_EACH_TIME
@given(st.data())
def test_damaged_run_is_read_or_refused(canned_suite: CannedSuite, data: st.DataObject) -> None:
    if not (saved := canned_suite.saved_runs()):
        canned_suite.run("perf")
        saved = canned_suite.saved_runs()
    path = canned_suite.root / "0001_x.json"
    path.write_text(json.dumps(damaged(saved[0], data)))
    try:
        Storage(root=canned_suite.root, hardware_key="cpu2").load(path)
    except NoBaseline as refusal:
        require_sentence(refusal, path)


@SAME_EACH_TIME
@given(st.data())
def test_damaged_thresholds_are_read_or_refused(data: st.DataObject) -> None:
    document = read_document((REPOSITORY / "perf" / "thresholds.toml").read_text())
    document["threshold"] = document["threshold"][:5]
    changed = damaged(document, data)
    try:
        read_thresholds(changed)
        read_decision(changed)
    except ValueError as refusal:
        require_sentence(refusal, Path("perf"))


def test_damaged_tuning_results_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "FOLDER", tmp_path)
    assert recipes.tuned() == {}
    (tmp_path / "recipes.json").write_text('{"cpu": ')
    with pytest.raises(ValueError, match=r"recipes.json cannot be read .*; restore it, or remove it to tune"):
        recipes.tuned()
