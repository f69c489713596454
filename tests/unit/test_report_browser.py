"""The page in Chromium: no errors, no horizontal scrolling on a telephone, no violation of axe's rules.

These tests need Debian's package chromium and the Python packages playwright and
axe-playwright-python. Without one of them, they are skipped.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpperf.report.html_page import page
from ddpperf.results.stored_runs import read_document

sync_api = pytest.importorskip("playwright.sync_api")
axe = pytest.importorskip("axe_playwright_python.sync_playwright")
CHROMIUM = shutil.which("chromium")
ROOT = Path(__file__).parents[2]
RUNS = (
    ROOT / "perf" / "baselines" / "cpu2-epyc-25-17-1" / "0014_core.json",
    ROOT / "docs" / "runs" / "h200x4-suite.json.gz",
    ROOT / "docs" / "runs" / "cpu2-gate.json.gz",
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
    pytest.mark.parametrize("run", RUNS, ids=lambda run: run.stem),
    pytest.mark.parametrize("scheme", ["light", "dark"]),
]


@pytest.fixture
def tab(run: Path, scheme: str, tmp_path: Path) -> Iterator[Any]:
    """The page of a stored run in a browser window of 390 pixels, with all console messages."""
    file = tmp_path / "report.html"
    file.write_text(page(read_document(run), [("a", {"x": 1.0}), ("b", {"x": 1.1})]))
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 390, "height": 844}, color_scheme=scheme)
        tab.said = []
        tab.on("console", lambda message: tab.said.append(message.text))
        tab.on("pageerror", lambda error: tab.said.append(str(error)))
        tab.on("requestfailed", lambda request: tab.said.append(request.url))
        tab.goto(file.as_uri())
        yield tab
        browser.close()


def test_page_is_quiet_narrow_and_accessible(tab: Any) -> None:
    assert tab.said == []
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390
    images = "Array.from(document.images).every(image => image.complete && image.naturalWidth > 0)"
    assert tab.evaluate(images)
    found = axe.Axe().run(tab)
    assert [violation["id"] for violation in found.response["violations"]] == []
