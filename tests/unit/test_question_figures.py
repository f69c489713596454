"""The cells of a report's tables, computed again from the rounds and the counters of stored runs.

Nothing here calls code that computes metrics or tables, and no stored metric is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest
from scipy import stats

from tests.stored_samples import Figures, Measured, Rows, expected, wrong
from tests.stored_trainings import CASES as OF_TRAININGS

FORMULAS: dict[str, Callable[[int, float], float]] = {
    "2 (N-1) S / N": lambda N, S: 2 * (N - 1) * S / N,
    "(S / B) log2 N": lambda N, S: S * math.log2(N),
    "2 (N-1) S": lambda N, S: 2 * (N - 1) * S,
}
PARTS = ("loading", "data", "forward", "backward", "gradient_sync", "optimizer")


# --- Q1 and Q2


def epoch(m: Measured) -> Figures:
    loading = 1 - m["without_loading"].t / m.t if m.spec["input"] != "fixed" else None
    return {"epoch": m.t, "loading": loading, "throughput": m.n * m.N * m.b / m.t}


def workers(m: Measured) -> Rows:
    found = {str(m.spec["loader_workers"]): m}
    found |= {name[8:]: m[name] for name in m.stored["references"] if name.startswith("workers=")}
    for name, loaded in found.items():
        yield {"workers": name, "input in words": ""}, {"loading": 1 - m["without_loading"].t / loaded.t}


def speedup(m: Measured) -> float | None:
    """Return the speedup over the slowest device alone; that of an epoch is one of trained images."""
    if m.N == 1:
        return None
    alone, one = max(m["one_device"].ranks(m.N)), m["one_device"]
    if "one_device_step" in m.stored["references"]:  # the epoch is that of the first device
        in_turn = m["one_device_step"].ranks(m.N)
        alone *= max(in_turn) / in_turn[0]
    work = {"weak": m.N, "strong": 1}.get(m.kind, m.n * m.N * m.b / (one.n * one.b))
    return work * alone / m.t


def scaling(m: Measured) -> Figures:
    return {"step": m.t, "epoch": m.n * m.epoch_step, "speedup": speedup(m)}


def enough(m: Measured) -> Figures:
    S = speedup(m)
    return {"efficiency": S / m.N, "extra device time": m.N / S - 1} if S else {}


def cost(N: int, t: float, alone: float | None) -> Figures:
    found: Figures = {"device-minutes": N * t / 60}
    if alone is None:
        return found
    return found | {"time saved": alone - t, "% saved": 1 - t / alone, "extra device time": N * t - alone}


def cost_of_epoch(m: Measured) -> Figures:
    S = speedup(m)
    return cost(m.N, m.t, S and S * m.t)


# --- Q3


def split(m: Measured) -> Figures:
    """Traced seconds are those of the rank that waits most, but communication is without waiting."""
    trace, whole = m["trace"], m["data_parallel" if m.spec["strategy"] == "data_parallel" else "ddp"]
    exposed = trace.of("exposed_comm_seconds") or trace.counters["exposed_comm_seconds"]
    rank, waits = exposed.index(max(exposed)), np.subtract(whole.ranks(m.N), m["no_sync"].ranks(m.N))
    found = {"compute": trace.of("compute_seconds")[rank], "communication": sending(trace)}
    found |= {"with waiting": trace.of("comm_seconds")[rank], "exposed (trace)": max(exposed)}
    return {name: m.n * t for name, t in found.items()} | {"exposed (difference)": m.n * max(waits)}


def sending(trace: Measured) -> float:
    """Return the seconds without waiting; older runs have those of the rank that waits least."""
    return min(trace.of("comm_without_waiting_seconds") or trace.of("comm_seconds"))


def data_parallel(m: Measured) -> Figures:
    found = {part: f"{part}_seconds" for part in ("replicate", "scatter", "gather", "reduce")}
    seconds = {
        name: m.n * m["trace"].of(counter)[0] for name, counter in (found | {"sum": "comm_seconds"}).items()
    }
    ddp = m["ddp_trace"]
    if not ddp.of("comm_without_waiting_seconds"):  # an older run
        return seconds
    ddp_seconds = m.n * sending(ddp)
    return seconds | {"DDP": ddp_seconds, "over DDP": seconds["sum"] / ddp_seconds}


def sent_at(m: Measured) -> Figures:
    S, trace = m["replay"].of("gradient_bytes")[0], m["trace"]
    t = min(trace.of("all_reduce_without_waiting_seconds") or trace.of("all_reduce_seconds"))
    return {name: formula(m.N, S) / t for name, formula in FORMULAS.items()}


def bandwidth(m: Measured) -> Figures:
    busbw, part = sent_at(m)["2 (N-1) S / N"], sending(m["trace"]) / m.t
    sent, link = m.n * m["replay"].of("gradient_bytes")[0], m.link()
    used = busbw / link if link else None
    return {"gradients per epoch": sent, "part of the step": part, "busbw": busbw, "link used": used}


def all_reduce(m: Measured) -> Figures:
    if m.spec["algorithm"] != "backend" or not m.spec["in_place"]:
        return {}
    seconds = {name: formula(m.N, m.spec["nbytes"]) / (m.link() or 0) for name, formula in FORMULAS.items()}
    return {"measured": m.t} | {name: (t, t / m.t) for name, t in seconds.items()}


# --- messages, strategies, precision, parts and laws


def messages(m: Measured) -> Figures:
    kinds = ("gradients", "buffers", "parameters", "metrics", "control", "model", "other")
    found = {kind: (m.most(f"{kind}: bytes"), m.most(f"{kind}: messages")) for kind in kinds}
    known: Figures = {kind: sent for kind, sent in found.items() if sent[0]}
    return known | {"first parameters": m.most("start initial state: bytes")}


def strategy(m: Measured) -> Figures:
    (ddp,), S = [*(one.t for one in m.named("ddp")), None][:1], m.most("gradient_bytes")
    found = {
        "step": m.t,
        "DDP's step": ddp,
        "over DDP": ddp and ddp / m.t,
        "throughput": m.N * m.b / m.epoch_step,
    }
    return found | {"gradients per epoch": S and m.n * S, "peak memory": m.most("peak_memory_bytes")}


def precision(m: Measured) -> Figures:
    found = {"step": m.t, "throughput": m.b / m.epoch_step, "memory": m.most("peak_memory_bytes")}
    over = {f"over {name}": m[name].t / m.t for name in m.stored["references"]}
    return found | over | {"loss after 5 steps": m.most("loss_after_5_steps")}


def parts_of(m: Measured, rank: int) -> dict[str, float]:
    return {part: m.counters[f"{part}_seconds"][rank] for part in PARTS if f"{part}_seconds" in m.counters}


def least_waiting(m: Measured) -> dict[str, float]:
    waits = m.of("gradient_sync_seconds") or [0.0]
    return parts_of(m, waits.index(min(waits)))


def parts(m: Measured, per_epoch: bool = False) -> Figures:
    found = least_waiting(m["parts"])
    step = m.t / (m.n if "epoch_breakdown" in m.name else 1)
    found |= {"other": step - sum(found.values()), "epoch" if per_epoch else "step": step}
    names = {"gradient_sync": "sync"}
    return {names.get(part, part): (m.n if per_epoch else 1) * t for part, t in found.items()}


def part_speedups(m: Measured) -> Rows:
    one, work = m["parts_on_one_device"], m.N if m.kind == "weak" else 1
    alone, together = parts_of(one, int(np.argmax(one.ranks(m.N)))), least_waiting(m["parts"])
    batch = f"batch {m.b:,} per rank" if m.kind == "weak" else f"global batch {m.N * m.b:,}"
    least = [0.01 * sum(found.values()) for found in (alone, together)]  # shorter parts have no speedup
    for part in PARTS:
        t1, tN = alone.get(part), together.get(part)
        known = t1 and tN and t1 > least[0] and tN > least[1]
        figures = {"alone": t1, "together": tN, "speedup": work * t1 / tN if known and t1 and tN else None}
        yield {"part": part.replace("_", " "), "fraction": batch}, figures
    t1, tN = sum(alone.values()), sum(together.values())
    yield {"part": "all parts", "fraction": batch}, {"alone": t1, "together": tN, "speedup": work * t1 / tN}


def law(m: Measured) -> Rows:
    """Yield each number of devices. The fraction s is that of a regression through the origin, y = s x."""
    weak = "gustafson" in m.name
    t = {m.N: m.t} | {int(name[11:]): m[name].t for name in m.stored["references"] if "world_size=" in name}
    t1 = max(m["one_device"].ranks(m.N))
    S = {N: (N if weak else 1) * t1 / t[N] for N in sorted(t)}
    x, y = np.array([[(1 if weak else S[N]) * (1 - 1 / N), 1 - S[N] / N] for N in S]).T
    s = x @ y / (x @ x)
    half = stats.t.ppf(0.975, len(S) - 1) * (((y - s * x) ** 2).sum() / (len(S) - 1) / (x @ x)) ** 0.5
    for N in (1, 2, 4, 8, 16, 32):
        bounds = [min(max(bound, 0), 1) for bound in (s, s + half, s - half)]
        found = [N - bound * (N - 1) if weak else 1 / (bound + (1 - bound) / N) for bound in bounds]
        predicted, measured = N > 1 and 0 <= s <= 1, S.get(N, 1.0 if N == 1 else None)
        steps = m.spec["epoch_images"] // m.b if weak else m.n  # of one device
        figures: Figures = {}
        if measured:
            figures |= {"speedup": measured, "epoch": steps * t1 / measured}
        if predicted:
            figures |= {"predicted speedup": found, "predicted epoch": steps * t1 / found[0]}
        if predicted and measured:
            figures["error of the speedup"] = found[0] / measured - 1
        fraction = f"a serial fraction of {s:.1%} ({s - half:.1%} to {s + half:.1%})"
        devices = m.properties()["devices"]
        yield {devices: str(N), "fraction": fraction}, figures


CPU, CPU_REPORT = "perf/baselines/cpu2-epyc-25-17-1/0014_core.json", "docs/runs/cpu2-report.json.gz"
TWO = "perf/baselines/h100-80gb-hbm3x2/0005_core.json"
SPLIT, ALL_REDUCE = (f"docs/runs/h100x2-{name}.json.gz" for name in ("split", "all_reduce"))
BY_PARTS = "docs/runs/h200x2-data_parallel.json.gz"
NEW, NEW_CPU = "docs/runs/h200x2-questions.json.gz", "docs/runs/cpu2-questions.json.gz"
EPOCHS, SUITE = "docs/runs/h100x2-epochs.json.gz", "docs/runs/h200x4-suite.json.gz"
ONE = "docs/runs/h200x1-questions.json.gz"
PRECISION, RESNET50 = (f"docs/runs/h200x1-{name}.json.gz" for name in ("precision", "resnet50"))
LAWS = "docs/runs/h100x4-laws.json.gz"
ALL_REDUCES = (CPU_REPORT, TWO, ALL_REDUCE)
SPLITS = (CPU, TWO, SPLIT, NEW, NEW_CPU)
STEPS = (CPU, CPU_REPORT, TWO, RESNET50)
NEWEST = (TWO, NEW, NEW_CPU)
LOADED = (CPU, TWO, SUITE, ONE, NEW_CPU)
SCALED = (*STEPS[:-1], NEW, NEW_CPU)
SIZE, BUFFER, ALL_STEPS = "devices, batch|", "devices, buffer|", "step_breakdown|epoch_breakdown"
# the title, the tests, the rows and the columns, the figures, and the runs
CASES: tuple[tuple[str, str, str, Callable[[Measured], Figures | Rows], Sequence[str]], ...] = (
    ("Q1: time per epoch by batch size", "batch_size", "batch|input in words", epoch, LOADED),
    ("Q1: workers that load images", "loader_workers", "workers|batch", workers, (SUITE, ONE, NEW_CPU)),
    ("Q2: weak scaling", "weak_scaling", "devices|batch", scaling, (*STEPS, NEW, NEW_CPU)),
    ("Q2: strong scaling", "strong_scaling", "devices|global batch", scaling, SCALED),
    (
        "When is one device enough?",
        "\\w+_scaling",
        "devices|constant batch",
        enough,
        (*STEPS[:-1], EPOCHS, NEW, NEW_CPU),
    ),
    ("Q3: computation and communication of an epoch", "(comm|data_parallel)_split", SIZE, split, SPLITS),
    (
        "Q3: DataParallel's communication in an epoch",
        "data_parallel_split",
        SIZE,
        data_parallel,
        (BY_PARTS, NEW),
    ),
    ("Q3: bandwidth while training", "comm_split", SIZE, bandwidth, SPLITS),
    ("Q3: bandwidth while training, by the reports' formulas", "comm_split", SIZE, sent_at, SPLITS),
    ("Q3: an all_reduce, by the reports' formulas", "all_reduce", BUFFER, all_reduce, ALL_REDUCES),
    ("Q6 and Q7: messages besides gradients", "messages", "strategy|batch", messages, (CPU, *NEWEST)),
    ("Q7: strategies", "strategies", "strategy|batch", strategy, (CPU, *NEWEST)),
    ("Parts of a step", ALL_STEPS, SIZE, parts, (*STEPS, NEW, NEW_CPU)),
    ("Parts of an epoch", ALL_STEPS, SIZE, partial(parts, per_epoch=True), (*STEPS, NEW, NEW_CPU)),
    (
        "Speedup of the parts of a step",
        "\\w+_speedup",
        "part|input in words, together",
        part_speedups,
        (CPU_REPORT, NEW, NEW_CPU),
    ),
    ("Laws of scaling", "amdahl|gustafson", "devices|constant batch", law, (CPU_REPORT, LAWS)),
    ("Cost of an epoch", "epoch_scaling", SIZE, cost_of_epoch, (CPU_REPORT, TWO, EPOCHS, NEW, NEW_CPU)),
    (
        "Mixed precision: time of a step",
        "precision",
        "precision|batch",
        precision,
        (CPU, TWO, PRECISION, ONE),
    ),
)


@pytest.mark.parametrize(
    ("title", "tests", "place", "figures", "name"),
    [(*case, name) for *case, names in (*CASES, *OF_TRAININGS) for name in names],
)
def test_cells_follow_from_the_samples(
    title: str, tests: str, place: str, figures: Callable[[Measured], Figures | Rows], name: str
) -> None:
    assert [*wrong(name, title, expected(name, tests, place, figures), left_out="report .")] == []
