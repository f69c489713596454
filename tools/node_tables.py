"""Makes the tables of docs/nodes.md from a stored run on several nodes."""

from __future__ import annotations

import json
from collections.abc import Callable

from ddpperf.report.cases import Case, of_functions
from ddpperf.results import units
from ddpperf.specs import AllReduceSpec, TrainingSpec, format_bytes
from tools.tables import ROOT, cases, markdown

LINKS = {  # the test that fits a link, and the beginnings of the metrics of its latency and bandwidth
    "inside a node, a message": ("test_cost_model", "inside_message", "inside"),
    "between nodes, a message": ("test_cost_model", "between_message", "between"),
    "between nodes, one way": ("test_backend_model", "between_latency", "between"),
}


def node_calls_table(run: str) -> str:
    """Return a Markdown table of all-reduce times inside a node and between nodes, by algorithm."""
    node = _node_size(run)
    times: dict[tuple[int, int], dict[str, float]] = {}
    for case in of_functions(cases(run), "test_all_reduce"):
        spec = case.measured.spec
        assert isinstance(spec, AllReduceSpec)
        if spec.in_place:
            times.setdefault((spec.nbytes, spec.world_size), {})[spec.algorithm] = case.seconds
    names = {"backend": "gloo", "ring": "flat ring", "hierarchical": "hierarchical"}
    rows = []
    for (nbytes, N), seconds in sorted(times.items()):
        columns = [units.seconds(seconds[name]) if name in seconds else "-" for name in names]
        over = f"{seconds['ring'] / seconds['hierarchical']:.2f}x" if "hierarchical" in seconds else "-"
        rows.append((format_bytes(nbytes), _ranks(N, node), *columns, over))
    return markdown(("size", "ranks", *names.values(), "ring over hierarchical"), rows)


def node_links_table(run: str) -> str:
    """Return a Markdown table of the fitted links inside a node and between nodes."""
    found = cases(run)
    rows = []
    for words, (test, latency, bandwidth) in LINKS.items():
        case = next(
            case for case in of_functions(found, test) if f"{bandwidth}_bytes_per_second" in case.metrics
        )
        seconds = _with_interval(case, f"{latency}_seconds", units.seconds)
        rate = _with_interval(case, f"{bandwidth}_bytes_per_second", units.bandwidth)
        rows.append((words, f"`{test}`", seconds, rate))
    return markdown(("link", "fitted by", "latency", "bandwidth"), rows)


def node_scaling_table(run: str) -> str:
    """Return a Markdown table of the weak scaling of a training step, inside a node and over nodes."""
    node, rows = _node_size(run), []
    found = of_functions(cases(run), "test_weak_scaling")
    for case in sorted(found, key=lambda case: case.measured.spec.world_size):
        assert isinstance(case.measured.spec, TrainingSpec)
        N, speedup = case.measured.spec.world_size, case.value("speedup")
        efficiency = case.value("efficiency")
        rows.append(
            (
                _ranks(N, node),
                units.seconds(case.seconds),
                "-" if speedup is None else units.factor(speedup),
                "-" if efficiency is None else units.percent(efficiency),
            )
        )
    return markdown(("ranks", "step", "speedup", "efficiency"), rows)


def _node_size(run: str) -> int:
    size: int = json.loads((ROOT / run).read_text())["ddpperf"]["options"]["links"]["node"]
    return size


def _ranks(N: int, node: int) -> str:
    return f"{N // node}x{node}" if node < N else str(N)


def _with_interval(case: Case, metric: str, text: Callable[[float], str]) -> str:
    low, high = (text(case.metrics[f"{metric}_{end}"]["value"]) for end in ("low", "high"))
    return f"{text(case.metrics[metric]['value'])} ({low} to {high})"
