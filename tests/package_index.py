"""A package index in a folder, from which pip installs small wheels without a network."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path


def add_wheel(index: Path, name: str, version: str, files: Mapping[str, str]) -> None:
    """Add a wheel to the index; `files` are what it installs besides its own version."""
    folder = index / name
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    links = "".join(f'<a href="{path.name}">{path.name}</a>\n' for path in sorted(folder.glob("*.whl")))
    (folder / "index.html").write_text(links)
