"""Sentences on what a run found, made from its metrics and its comparison."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from statistics import median
from typing import Any

from ddpperf.analysis.statistics import FEWEST_ROUNDS, relative_iqr
from ddpperf.report.facets import facets, in_words, size
from ddpperf.report.text import short
from ddpperf.report.warnings import NOISY_IQR
from ddpperf.results import units
from ddpperf.results.samples import Measured

MOST = 5  # sentences
LEAST_GAIN = 1.05  # a smaller speedup is not worth a sentence
NAMED = ("GPUs", "ranks", "batch", "strategy", "buffer")


def worth_knowing(document: Mapping[str, Any]) -> list[str]:
    """Return at most five sentences on a stored run, the most important first."""
    stored = {found["fullname"]: found["extra_info"]["ddpperf"] for found in document["benchmarks"]}
    device = document["ddpperf"]["options"].get("device", "cpu")
    sentences = _sentences(stored, document["ddpperf"], device)
    return list(islice(sentences, MOST))


def _sentences(stored: Mapping[str, Any], header: Mapping[str, Any], device: str) -> Iterator[str]:
    yield from _changed(header)
    yield from _scaling(stored, device)
    yield from _fastest(stored)
    yield from _strategy(stored, device)
    yield from _least_certain(stored)


def _values(found: Mapping[str, Any]) -> dict[str, float]:
    return {name: metric["value"] for name, metric in found["metrics"].items()}


def _of(stored: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {test: found for test, found in stored.items() if short(test).partition("[")[0] == name}


def _words(found: dict[str, Any], device: str) -> str:
    spec = Measured.from_json(found).spec
    properties = facets(spec, device=device)
    return ", ".join(in_words(name, properties[name]) for name in NAMED if properties.get(name))


def _changed(header: Mapping[str, Any]) -> Iterator[str]:
    """Say which time changed most beside the base's code."""
    ab = header.get("against") or header.get("confirmed") or {"rows": ()}
    rows = [row for row in ab["rows"] if row["primary"] and row["gated"] and row["control"] is None]
    if rows:
        most = max(rows, key=lambda row: max(row["ratio"], 1 / row["ratio"]))
        interval = f"{most['low']:.3f} to {most['high']:.3f}"
        yield f"The largest change is that of {short(most['test'])}: {most['ratio']:.3f} times ({interval})."


def _scaling(stored: Mapping[str, Any], device: str) -> Iterator[str]:
    """Say what scaled worst, and how much of this step only waits for communication."""
    scaled = {
        test: found
        for name in ("test_weak_scaling", "test_strong_scaling")
        for test, found in _of(stored, name).items()
        if "efficiency" in found["metrics"] and found["spec"]["strategy"] != "data_parallel"
    }
    if not scaled:
        return
    worst = min(scaled, key=lambda test: _values(scaled[test])["efficiency"])
    found = scaled[worst]
    values = _values(found)
    kind = "weak" if "weak" in worst else "strong"
    text = (
        f"{_words(found, device)} scale worst: {kind} scaling is {units.factor(values['speedup'])}, an "
        f"efficiency of {units.percent(values['efficiency'])}"
    )
    for split in _of(stored, "test_comm_split").values():
        if split["spec"] == found["spec"]:
            seconds = median(Measured.from_json(split).median_step_seconds().values())
            names = ("exposed_comm_seconds", "traced_exposed_comm_seconds")
            exposed = sorted(_values(split)[name] / seconds for name in names if name in split["metrics"])
            part = " to ".join(dict.fromkeys(f"{max(0.0, value):.0%}" for value in exposed))
            text += f"; {part} of this step only waits for communication"
    yield f"{text}."


def _fastest(stored: Mapping[str, Any]) -> Iterator[str]:
    """Name an all-reduce algorithm that is faster than the library's."""
    for found in _of(stored, "test_fastest_all_reduce").values():
        values = _values(found)
        gain = values.get("speedup_of_the_best_other", 0.0)
        over = {name: t for name, t in values.items() if name.endswith("_over_backend")}
        if gain >= LEAST_GAIN and over:
            of = size(found["spec"]["nbytes"])
            best = min(over, key=over.__getitem__).removesuffix("_over_backend")
            yield f"The algorithm {best} is {units.factor(gain)} as fast as the library's all_reduce of {of}."
            return


def _strategy(stored: Mapping[str, Any], device: str) -> Iterator[str]:
    """Name the strategy or DDP option that is faster than plain DDP by most."""
    gains = {
        test: _values(found)["speedup_over_ddp"]
        for test, found in _of(stored, "test_strategies").items()
        if "speedup_over_ddp" in found["metrics"]
    }
    if gains and gains[best := max(gains, key=gains.__getitem__)] >= LEAST_GAIN:
        yield f"{_words(stored[best], device)} is {units.factor(gains[best])} as fast as plain DDP."


def _least_certain(stored: Mapping[str, Any]) -> Iterator[str]:
    """Name the test whose rounds spread most."""
    spreads = {}
    for test, found in stored.items():
        measured = Measured.from_json(found)
        rounds = [measured.step_seconds(sample) for sample in measured.samples]
        if not measured.spec.counts and min(map(len, rounds)) >= FEWEST_ROUNDS:
            spreads[test] = median(map(relative_iqr, rounds))
    if spreads and spreads[noisiest := max(spreads, key=spreads.__getitem__)] > NOISY_IQR:
        yield f"Trust {short(noisiest)} least: its rounds spread by {spreads[noisiest]:.0%} (IQR)."
