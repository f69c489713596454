"""Damaged stored runs and thresholds: each is read, or refused in one sentence of at most 300 letters."""

from __future__ import annotations

import copy
import json
import random
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpperf.errors import Refused
from ddpperf.results.stored_runs import NoBaseline, Storage
from ddpperf.verdict.settings import read_decision
from ddpperf.verdict.thresholds import read_thresholds
from perf.common import recipes
from tests.canned import CannedSuite
from tests.project import REPOSITORY

VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    10**400,
    0.5,
    float("nan"),
    "\0",
    "\x1b]0;x\x07",
    "x" * 5000,
    [],
    {},
    [{}],
]


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


def damaged(document: Any) -> Iterator[Any]:
    """Yield copies of a document of JSON in which one value is another or gone."""
    draw = random.Random(1)
    for _ in range(150):
        changed = copy.deepcopy(document)
        container, key = draw.choice([*places(changed)])
        if draw.random() < 0.5:
            container[key] = draw.choice(VALUES)
        else:
            del container[key]
        yield changed


def require_sentence(error: Exception, path: Path) -> None:
    sentence = str(error).replace(str(path), "FILE")
    assert sentence.isprintable(), ascii(sentence)
    assert 0 < len(sentence) <= 300


def test_damaged_run_is_read_or_refused(canned_suite: CannedSuite) -> None:
    canned_suite.run("perf")
    path = canned_suite.root / "0001_x.json"
    (run,) = canned_suite.saved_runs()
    storage = Storage(root=canned_suite.root, hardware_key=run["ddpperf"]["hardware_key"])
    for changed in damaged(run):
        path.write_text(json.dumps(changed))
        try:
            storage.load(path)
        except NoBaseline as refusal:
            require_sentence(refusal, path)


def test_damaged_thresholds_are_read_or_refused() -> None:
    document = tomllib.loads((REPOSITORY / "perf" / "thresholds.toml").read_text())
    document["threshold"] = document["threshold"][:5]
    for changed in damaged(document):
        try:
            read_thresholds(changed)
            read_decision(changed)
        except Refused as refusal:
            require_sentence(refusal, Path("perf"))


def test_damaged_tuning_results_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "FOLDER", tmp_path)
    assert recipes.tuned() == {}
    (tmp_path / "recipes.json").write_text('{"cpu": ')
    with pytest.raises(ValueError, match=r"recipes.json cannot be read .*; correct or restore it"):
        recipes.tuned()
