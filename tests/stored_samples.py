"""Reads the printed grids of a report's tables, and the samples of stored runs, without ddpperf.analysis."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ddpperf.report.questions import report_tables
from ddpperf.results import samples
from ddpperf.results.stored_runs import read_document
from tests.project import REPOSITORY

Json = dict[str, Any]
LABELS = (
    "GPUs|ranks|batch|global batch|buffer|workers|strategy|precision|training"
    "|uneven end|order|part|change|figure"
)
KINDS = {"weak scaling", "strong scaling"}
CAPTION = (
    "kind",
    "model",
    "precision",
    "execution",
    "strategy",
    "format",
    "input in words",
    "law",
    "fraction",
)
KIBI = ("", "KiB", "MiB", "GiB")
NUMBER = re.compile(r"(?<![\w.])([-+]?\d[\d,]*\.?\d*)(%|x|(?: ([mu]?s|[GMK]?B(?:/s)?)\b))?")
UNITS = {"": 1, "x": 1, "%": 0.01, "s": 1, "ms": 1e-3, "us": 1e-6, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9}


# --- the printed text


class Cell(NamedTuple):
    """A cell that is not empty: the words of its caption, its place, and its text or its numbers."""

    caption: frozenset[str]
    labels: dict[str, str]
    group: str
    heading: str
    shown: Any

    def has(self, cell: Cell) -> bool:
        """Return whether another cell, of which less may be known, is this one."""
        same = (cell.group, cell.heading) == (self.group, self.heading)
        known = cell.caption <= self.caption and cell.labels.items() <= self.labels.items()
        return same and known and cell.caption & KINDS == self.caption & KINDS


@cache
def run(name: str) -> Json:
    document: Json = read_document(REPOSITORY / name)
    document["ddpperf"]["by_mean"] = document["datetime"] > "2026-11-28"  # before, by the median step
    return document


@cache
def sections(name: str) -> dict[str, str]:
    return dict(part.split("\n", 1) for part in report_tables(run(name)).split("## ")[1:])


def cells(name: str, title: str) -> Iterator[Cell]:
    caption = frozenset[str]()
    for paragraph in sections(name)[title].strip().split("\n\n"):
        if not paragraph.startswith("|"):
            caption = frozenset(" ".join(paragraph.split()).removesuffix(".").split(", "))
            continue
        headings, _, *rows = [line.strip("| ").split(" | ") for line in paragraph.splitlines()]
        for row in rows:
            labels: dict[str, str] = {}
            group = ""
            for heading, text in zip(headings, row, strict=True):
                *first, rest = heading.split(": ")
                group = re.sub("^(global )?batch ", "", first[0]) if first else group
                if re.fullmatch(LABELS, heading) and len(labels) == headings.index(heading):
                    labels[heading] = text
                elif text != "-":
                    yield Cell(caption, labels, group, rest, re.sub(" ![0-9,]+$", "", text))


def shows(text: str, values: Sequence[float]) -> bool:
    """Return whether the numbers of a text are these values. Quantities have four digits, or end in zeros."""
    if text == "none":
        return values[0] < 0
    found = NUMBER.findall(text)
    for (digits, mark, unit), value in zip(found, values, strict=False):
        number, places = float(digits.replace(",", "")), len(digits.partition(".")[2])
        if unit and number:
            places = max(places, 3 - math.floor(math.log10(abs(number))))
        if abs(number - value / UNITS[(unit or mark).removesuffix("/s")]) > 0.5001 * 10**-places:
            return False
    return len(found) == len(values)


# --- the samples


class Measured:
    """A stored measurement: its spec, the seconds of each rank in each round, and counters of the ranks."""

    def __init__(self, stored: Json, header: Json, name: str = "") -> None:
        (sample,) = stored["samples"]
        self.stored, self.header, self.name = stored, header, name
        self.spec = asdict(
            samples.Measured.from_json(stored).spec
        )  # with the fields that have their defaults
        self.N: int = self.spec["world_size"]
        self.rounds = np.array(sample["seconds"]) / stored["iterations"]
        self.t = float(np.median(self.rounds[:, : self.N].max(axis=1)))
        mean = float(self.rounds[:, : self.N].max(axis=1).mean())
        self.epoch_step = mean if header["by_mean"] else self.t  # from which epochs and throughputs follow
        self.counters: dict[str, list[float]] = sample["counters"]
        self.kind = "|".join(re.findall("weak|strong", name))
        spec = self.spec
        if "per_rank_batch_size" in spec:
            processes = 1 if spec["strategy"] == "data_parallel" else self.N
            self.b: int = spec["per_rank_batch_size"]
            self.n: int = spec["epoch_images"] // processes // (self.b * self.N // processes)  # steps

    def __getitem__(self, name: str) -> Measured:
        return Measured(self.stored["references"][name], self.header)

    def named(self, begin: str) -> list[Measured]:
        return [self[name] for name in self.stored["references"] if name.startswith(begin)]

    def of(self, counter: str) -> list[float]:
        return self.counters.get(counter, [])[: self.N]

    def most(self, counter: str) -> float | None:
        return max(self.of(counter), default=None)

    def ranks(self, N: int) -> list[float]:
        """Return the median over rounds of each of N devices, also if they worked in turn."""
        return [float(t) for t in np.median(self.rounds, axis=0)[:N]]

    def link(self) -> float | None:
        links = self.header["environment"].get("links", ())
        return next((one["bytes_per_second"] for one in links if self.N in one["world_sizes"]), None)

    def properties(self) -> dict[str, str]:
        """Return what the caption, the rows or the columns say of this measurement."""
        devices = "GPUs" if self.header["options"]["device"] == "cuda" else "ranks"
        found = {devices: str(self.N), "devices": devices, "together": f"{self.N} {devices}"}
        found["kind"] = f"{self.kind} scaling" if self.kind else ""
        get: Callable[[str], Any] = self.spec.get
        recipe = self.header.get("recipes", {}).get(self.name, "")
        found["buffer"] = next(
            (f"{S >> 10 * p} {KIBI[p]}" for p in (3, 2, 1) if (S := get("nbytes") or 0) >> 10 * p), ""
        )
        found["order"] = "set_epoch" if get("set_epoch") else "no_set_epoch"
        found["uneven end"] = "drop_last" if get("drop_last") else "padded"
        found["execution"] = "+".join(filter(None, (get("execution"), get("inductor"))))
        if "per_rank_batch_size" not in self.spec:
            return found
        words = [get("strategy"), get("comm_hook").replace("none", "").replace("symmetric_memory", "symm")]
        words += [
            f"bucket{get('bucket_cap_mb')}" * bool(get("bucket_cap_mb")),
            "view" * get("gradient_as_bucket_view"),
            "static" * get("static_graph"),
        ]
        words += [
            "no_buffer_sync" * (not get("buffer_sync")),
            "sync_batch_norm" * get("sync_batch_norm"),
            "accumulate2" * (get("accumulation_steps") > 1),
        ]
        found |= {"strategy": "+".join(filter(None, words)) * (self.N > 1), "batch": f"{self.b:,}"}
        found |= {"global batch": f"{self.N * self.b:,}", "format": get("memory_format"), "recipe": recipe}
        found |= {name: get(name) for name in ("model", "precision")}
        found["input"] = {"dataloader": f"dataloader{get('loader_workers')}"}.get(get("input"), get("input"))
        is_global = re.search("strong|amdahl", self.name)
        found["constant batch"] = found["global batch" if is_global else "batch"]
        laws = {"amdahl": "Amdahl's law", "gustafson": "Gustafson's law"}
        found["law"] = "".join(law for name, law in laws.items() if name in self.name)
        in_words = {"fixed": "one fixed batch", "device": "images on the device"}
        found["input in words"] = in_words.get(found["input"], found["input"])
        found["training"] = recipe.removeprefix(str(self.N * self.b)).lstrip(", ")
        found["training"] = found["training"] or "".join(re.findall(r"lr.*(?=\])", self.name))
        return found


Figures = dict[str, Any]  # the numbers of a cell by its heading; None if there is no such cell
Rows = Iterator[tuple[dict[str, str], Figures]]  # the places of several rows, and their figures


def measured(name: str, tests: str) -> Iterator[Measured]:
    """Yield the measurements of the tests of a run whose names fit a pattern."""
    document = run(name)
    for test in document["benchmarks"]:
        ended = test["extra_info"]["ddpperf"]["metrics"]  # not so for a test in which the run was interrupted
        if ended and re.search(rf"::test_({tests})\[", test["fullname"]):
            yield Measured(test["extra_info"]["ddpperf"], document["ddpperf"], test["fullname"])


def expected(
    name: str, tests: str, place: str, figures: Callable[[Measured], Figures | Rows]
) -> Iterator[Cell]:
    """Yield the cells that follow from the samples of the tests of a run.

    tests: a pattern of their names. place: the properties that are rows, "|", and those that are columns.
    """
    for m in measured(name, tests):
        properties, found = m.properties(), figures(m)
        rows, columns = (
            part.split(", ") for part in place.replace("devices", properties["devices"]).split("|")
        )
        for changed, by_heading in [({}, found)] if isinstance(found, dict) else found:
            of = properties | changed
            shared = {
                of.get(name, "")
                for name in CAPTION
                if name not in columns and name.split()[0] not in (*rows, *columns)
            } - {""}
            labels = {name: of[name] for name in rows if of.get(name)}
            for heading, values in by_heading.items():
                if values is not None:
                    group = ", ".join(of[name] for name in columns if of.get(name))
                    yield Cell(frozenset(shared), labels, group, heading, np.atleast_1d(values))


def wrong(name: str, title: str, found: Iterable[Cell], *, left_out: str = "-") -> Iterator[str]:
    """Yield the cells of a table that differ from those that are expected, and those that are missing."""
    found = list(found)
    cells_left = {id(cell): cell for cell in found}
    for cell in cells(name, title):
        if re.fullmatch(left_out, cell.heading):
            continue
        same = [other for other in found if cell.has(other)]
        if not same or not all(shows(cell.shown, other.shown) for other in same):
            where = f"{cell.labels} {cell.group}: {cell.heading}"
            yield f"{where} {cell.shown}, expected {[other.shown for other in same]}"
        for other in same:
            cells_left.pop(id(other), None)
    yield from (f"not printed: {cell}" for cell in cells_left.values())
