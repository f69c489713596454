"""Small images as files, in the folders that `--data imagefolder:DIR` means."""

from __future__ import annotations

import random
from pathlib import Path

from PIL import Image

CLASSES = ["ape", "bee", "cat"]


def picture(path: Path, seed: int, *, size: tuple[int, int] = (4, 3), mode: str = "RGB") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.frombytes(mode, size, random.Random(seed).randbytes(size[0] * size[1] * len(mode))).save(path)
    return path


def images_in(folder: Path) -> Path:
    """Seven images of each class to train and two to test, 4 wide and 3 high."""
    for split, count in (("train", 7), ("test", 2)):
        for number, name in enumerate(CLASSES):
            for each in range(count):
                picture(folder / split / name / f"{each}.png", 100 * number + 10 * each + count)
    return folder


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


def silent(line: str) -> None:
    pass
