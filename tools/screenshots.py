"""Makes docs/terminal.png and docs/report.png, pictures of the output and the page of a stored run.

    PYTHONPATH=. python tools/screenshots.py [RUN.json]

This needs Debian's package chromium and the Python package playwright.
"""

from __future__ import annotations

import json
import shutil
import sys
from html import escape
from pathlib import Path

from ddpperf.report.page import page
from ddpperf.report.summary import summary_lines, verdict_lines

ROOT = Path(__file__).parents[1]
RUN = ROOT / "perf" / "baselines" / "h200x1" / "0003_core.json"
TERMINAL = "background: #16181c; color: #e8e8e8; font: 13px/1.35 monospace; margin: 0; padding: 16px"


def main() -> None:
    from PIL import Image
    from playwright.sync_api import sync_playwright

    document = json.loads(Path(sys.argv[1] if len(sys.argv) > 1 else RUN).read_text())
    lines = [*summary_lines(document), *verdict_lines(document["ddpperf"])]
    terminal = f'<body style="margin: 0"><pre style="{TERMINAL}">{escape(chr(10).join(lines))}</pre>'
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, html, width, height in (
            ("terminal", terminal, 930, 0),
            ("report", page(document), 1000, 1150),
        ):
            tab = browser.new_page(viewport={"width": width, "height": height or 100})
            tab.set_content(html)
            picture = ROOT / "docs" / f"{name}.png"
            tab.screenshot(path=picture, full_page=not height)
            Image.open(picture).convert("RGB").quantize(32).save(picture, optimize=True)
        browser.close()


if __name__ == "__main__":
    main()
