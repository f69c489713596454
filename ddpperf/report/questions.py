"""The tables that a report on data-parallel training asks for, in Markdown, from a stored run.

Each question has a table and one sentence that is computed from its figures. A question that the run
did not measure names the command that measures it. The first columns of a table are the devices,
the batch size, and what else distinguishes the rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ddpperf.analysis.cost_models import REPORT_FORMULAS
from ddpperf.analysis.logarithmic_fit import Estimate
from ddpperf.analysis.scaling import (
    PREDICTED_DEVICES,
    Law,
    amdahl_speedup,
    gustafson_speedup,
    not_predictable,
    predicted_speedup,
    strong_speedup,
    weak_speedup,
)
from ddpperf.report.cases import Case, cases_of, of_functions
from ddpperf.report.facets import in_words
from ddpperf.report.tables import distinguished
from ddpperf.results import units
from ddpperf.results.metrics import MESSAGE_KINDS
from ddpperf.specs import DATA_PARALLEL_PARTS, PARTS, AllReduceSpec, SamplerSpec, TrainingSpec
from ddpperf.verdict.judged_work import LAUNCH_BOUND

CLAIMED = (2.0, 3.0)  # how much faster than FP32 many texts say that FP16 is
# More devices are worth it up to such an efficiency; one at 50% takes twice the device time of one device.
EFFICIENCY_LIMITS = (0.8, 0.5)
MOST_NAMED = 3  # trainings in a sentence
# properties with a column even if they do not vary
ALWAYS = ("GPUs", "ranks", "batch", "global batch", "buffer")
NOTHING = "-"
Cells = Mapping[str, str]
Form = Callable[[float], str]
OVER: dict[str, tuple[str, Form]] = {
    "images/s": ("images_per_second", units.whole),
    "over fp32": ("speedup_over_fp32", units.factor),
    "over tf32": ("speedup_over_tf32", units.factor),
}


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question of a report.

    tests: the test functions that answer it. needs: the metric without which a test, such as one that
    failed early, answers nothing. file: the file of the tests, with the options that they need. row:
    returns the figures of a case by heading, or an empty mapping if it has none. rows: returns all
    columns of a table whose rows are not the cases, in place of `row`. sentence: returns a sentence
    on the cases that have figures.
    """

    title: str
    tests: tuple[str, ...]
    needs: str
    file: str
    sentence: Callable[[Sequence[Case]], str]
    row: Callable[[Case], Cells] | None = None
    rows: Callable[[Sequence[Case]], Sequence[Cells]] | None = None


def report_tables(document: Mapping[str, Any]) -> str:
    """Return all tables of a stored run as Markdown; of an A/B run, those of the candidate."""
    cases = cases_of(document)
    parts = []
    for question in QUESTIONS:
        parts += [f"## {question.title}", ""]
        if found := answering(cases, question):
            parts += [*_table(found, question), "", question.sentence(found), ""]
        else:
            parts += [f"Not measured in this run: `python -m pytest perf/{question.file}`.", ""]
    return "\n".join(parts)


def answering(cases: Sequence[Case], question: Question) -> list[Case]:
    """Return the cases that have figures for a question."""
    found = [case for case in of_functions(cases, *question.tests) if question.needs in case.metrics]
    return found if question.row is None else [case for case in found if question.row(case)]


def table_rows(cases: Sequence[Case], question: Question) -> list[list[str]]:
    """Return the rows of a question's table as text; the first row has the headings."""
    if question.rows is not None:
        rows = question.rows(cases)
    else:
        assert question.row is not None
        rows = [
            {**described, **question.row(case)}
            for described, case in zip(_distinguishing(cases), cases, strict=True)
        ]
    headings = list(dict.fromkeys(heading for row in rows for heading in row))
    return [headings, *([row.get(heading, NOTHING) for heading in headings] for row in rows)]


def _distinguishing(cases: Sequence[Case]) -> list[Cells]:
    """Return the properties that distinguish the cases, and those that always have a column."""
    _, varying = distinguished(cases)
    names = [name for name in ALWAYS if any(case.properties.get(name) for case in cases)]
    columns = {name: [case.properties.get(name) or NOTHING for case in cases] for name in names}
    columns |= {column.heading or "kind": list(column.cells) for column in varying}
    return [{name: cells[place] for name, cells in columns.items()} for place in range(len(cases))]


def _table(cases: Sequence[Case], question: Question) -> list[str]:
    """Return the lines of a question's table in Markdown."""
    headings, *rows = table_rows(cases, question)
    head, *body = [f"| {' | '.join(line)} |" for line in (headings, *rows)]
    return [head, "|" + "---|" * len(headings), *body]


def _cells(case: Case, metrics: Mapping[str, tuple[str, Form]], scale: float = 1.0) -> dict[str, str]:
    """Return the metrics that a case has, by heading. metrics: name and format by heading."""
    values = {heading: (case.value(name), form) for heading, (name, form) in metrics.items()}
    return {heading: form(scale * value) for heading, (value, form) in values.items() if value is not None}


def _training(case: Case) -> TrainingSpec:
    assert isinstance(case.measured.spec, TrainingSpec)
    return case.measured.spec


def _extreme(cases: Sequence[Case], metric: str, *, most: bool) -> tuple[float, Case]:
    """Return the largest or smallest value of a metric, and its case."""
    found = [(value, case) for case in cases if (value := case.value(metric)) is not None]
    return (max if most else min)(found, key=lambda pair: pair[0])


# --- Q1: batch size and loading


def _epoch(case: Case) -> Cells:
    without = case.references.get("without_loading")
    cells = {"epoch": units.seconds(case.seconds)}
    if without is not None:
        alone = median(without.median_step_seconds().values())
        cells["epoch without loading"] = units.seconds(alone)
    return cells | _cells(
        case, {"loading": ("loading_fraction", units.percent), "images/s": ("images_per_second", units.whole)}
    )


def _about_epochs(cases: Sequence[Case]) -> str:
    speed, best = _extreme(cases, "images_per_second", most=True)
    sentence = "One batch size was measured."
    if len({case.properties["batch"] for case in cases}) > 1:
        sentence = f"Batch size {best.properties['batch']} trains fastest, with {speed:,.0f} images/s."
    loaded = [case for case in cases if "loading_fraction" in case.metrics]
    if loaded:
        fraction, worst = _extreme(loaded, "loading_fraction", most=True)
        cost = f"costs at most {fraction:.1%} of an epoch" if fraction > 0 else "costs no time"
        sentence += f" Loading {cost}, with batch size {worst.properties['batch']}."
    return sentence


# --- Q2: scaling


def _scaled(case: Case) -> Cells:
    cells = {"global batch": f"{_training(case).global_batch_size:,}", "step": units.seconds(case.seconds)}
    return cells | _cells(
        case,
        {
            "epoch": ("epoch_seconds", units.seconds),
            "speedup": ("speedup", units.factor),
            "efficiency": ("efficiency", units.percent),
        },
    )


def _about_scaling(cases: Sequence[Case]) -> str:
    scaled = [case for case in cases if "efficiency" in case.metrics]
    if not scaled:
        return "One device was measured, so there is no speedup."
    ends = []
    for most, word in ((True, "best"), (False, "worst")):
        value, case = _extreme(scaled, "efficiency", most=most)
        ends.append(
            f"The {word} efficiency is {value:.1%} ({case.experiment.kind} scaling, {case.described()})."
        )
    return " ".join(dict.fromkeys(ends))


# --- Q3: computation, communication and bandwidth


def _communicated(case: Case) -> Cells:
    return _cells(
        case,
        {
            "computation": ("compute_seconds", units.seconds),
            "communication": ("traced_comm_seconds", units.seconds),
            "exposed, by trace": ("traced_exposed_comm_seconds", units.seconds),
            "exposed, by difference": ("exposed_comm_seconds", units.seconds),
        },
        _training(case).steps_per_epoch,
    )


def _about_communication(cases: Sequence[Case]) -> str:
    if not any("overlap_fraction" in case.metrics for case in cases):
        return "No trace was made, so only the difference is known."
    least, _ = _extreme(cases, "overlap_fraction", most=False)
    most, _ = _extreme(cases, "overlap_fraction", most=True)
    some = f"{least:.0%}" if f"{least:.0%}" == f"{most:.0%}" else f"{least:.0%} to {most:.0%}"
    return (
        f"By trace, computation hides {some} of the communication. Only the exposed rest makes a step "
        "longer. Where difference and trace disagree, the exposed communication is not known well."
    )


def _by_part(case: Case) -> Cells:
    parts = {part: (f"{part}_seconds", units.seconds) for part in DATA_PARALLEL_PARTS}
    seconds = {
        "communication": ("traced_comm_seconds", units.seconds),
        "exposed": ("traced_exposed_comm_seconds", units.seconds),
        "GPUs idle in these parts": ("idle_in_comm_seconds", units.seconds),
        "DDP's communication": ("ddp_traced_comm_seconds", units.seconds),
        "DDP's exposed": ("ddp_traced_exposed_comm_seconds", units.seconds),
    }
    return _cells(case, parts | seconds, _training(case).steps_per_epoch)


def _about_data_parallel(cases: Sequence[Case]) -> str:
    totals = {
        part: sum(case.value(f"{part}_seconds") or 0.0 for case in cases) for part in DATA_PARALLEL_PARTS
    }
    longest = max(totals, key=totals.__getitem__)
    sentence = f"By trace, {longest} takes the longest of the four parts."
    if any("comm_over_ddp" in case.metrics for case in cases):
        ratio, case = _extreme(cases, "comm_over_ddp", most=True)
        sentence += (
            f" DataParallel communicates up to {units.factor(ratio)} as long as DDP ({case.described()})."
        )
    return sentence


def _sent_at(case: Case) -> Cells:
    spec = _training(case)
    busbw, gradients = (
        case.value("gradient_busbw_bytes_per_second"),
        case.value("communicated_bytes_per_epoch"),
    )
    if not busbw or not gradients:
        return {}
    N, S = spec.world_size, gradients / spec.steps_per_epoch
    sending = 2 * (N - 1) / N * S / busbw  # seconds, by the definition of the bus bandwidth
    cells = {"bus bandwidth": units.bandwidth(busbw)}
    cells |= _cells(case, {"of the link": ("link_utilization", units.percent)})
    return cells | {
        formula.formula: units.bandwidth(formula.seconds(N, S, 1.0) / sending) for formula in REPORT_FORMULAS
    }


def _about_bandwidth(cases: Sequence[Case]) -> str:
    said = "; ".join(f"{formula.formula} is {formula.describes}" for formula in REPORT_FORMULAS)
    return f"The last columns divide formulas of reports by the measured communication time. {said}."


def _formulas(cases: Sequence[Case]) -> list[Cells]:
    """Return a row for each formula and each in-place all_reduce of the library."""
    chosen = _of_the_library(cases)
    rows: list[Cells] = []
    for described, case in zip(_distinguishing(chosen), chosen, strict=True):
        for formula in REPORT_FORMULAS:
            N, link = case.measured.spec.world_size, case.link_bytes_per_second
            seconds = formula.seconds(N, _nbytes(case), link or math.inf)
            cells = {
                "formula": formula.formula,
                "what it counts": formula.counts,
                "predicted": units.seconds(seconds),
                "measured": units.seconds(case.seconds),
                "predicted over measured": f"{seconds / case.seconds:.3g}",
            }
            rows.append({**described, **cells})
    return rows


def _of_the_library(cases: Sequence[Case]) -> list[Case]:
    specs = [case.measured.spec for case in cases]
    return [
        case
        for case, spec in zip(cases, specs, strict=True)
        if isinstance(spec, AllReduceSpec) and spec.algorithm == "backend" and spec.in_place
    ]


def _about_formulas(cases: Sequence[Case]) -> str:
    """Relate the formulas to each other and to the link utilization of the largest all_reduce."""
    chosen = _of_the_library(cases)
    if not chosen:
        return "No all_reduce of the library was measured."
    case = max(chosen, key=lambda case: (case.measured.spec.world_size, _nbytes(case)))
    N = case.measured.spec.world_size
    ring, doubling, aggregate = (formula.seconds(N, 1.0, 1.0) for formula in REPORT_FORMULAS)
    return (
        f"Bytes are divided by the rate of the link, {units.bandwidth(case.link_bytes_per_second or 0.0)}. "
        "For 2 (N-1) S / N, predicted over measured is the link utilization: "
        f"{units.percent(case.value('link_utilization') or 0.0)} with {case.described()} and "
        f"{case.properties['buffer']}. There, (S / B) log2 N is {doubling / ring:.2f} times as long, and "
        f"2 (N-1) S is {aggregate / ring:.0f} times as long, because it counts links that work at the "
        "same time one after the other. No formula has a latency, so all are too short for small buffers."
    )


def _nbytes(case: Case) -> int:
    assert isinstance(case.measured.spec, AllReduceSpec)
    return case.measured.spec.nbytes


# --- Q4 and Q5: accuracy


def _accuracies(case: Case) -> Cells:
    cells = _cells(
        case,
        {
            "training accuracy": ("train_accuracy", units.percent),
            "test accuracy": ("test_accuracy", units.percent),
        },
    )
    if ends := case.interval("test_accuracy"):
        cells["95% interval"] = "{:.1%} to {:.1%}".format(*ends)
    cells |= _cells(case, {"mirrored test accuracy": ("mirrored_test_accuracy", units.percent)})
    cells |= _cells(
        case,
        {
            "points over the small batch": ("accuracy_over_baseline", _points),
            "points over as it is": ("accuracy_over_as_it_is", _points),
        },
    )
    for kind, heading in (("train", "training"), ("test", "test")):
        prefix = f"reported_{kind}_accuracy_"
        stated = [
            f"{name.removeprefix(prefix)}: {units.percent(metric['value'])}"
            for name, metric in case.metrics.items()
            if name.startswith(prefix)
        ]
        if stated:
            cells[f"{heading} accuracy in reports"] = ", ".join(stated)
    return cells


def _points(fraction: float) -> str:
    return f"{100 * fraction:+.1f}"


def _about_accuracy(cases: Sequence[Case]) -> str:
    """Compare the best training with the largest batch and the first one with the smallest batch."""
    compared = of_functions(cases, "test_large_batch", "test_remedies")
    trained = [case for case in compared if "train_accuracy" in case.metrics]
    sizes = {case.test: _training(case).global_batch_size for case in trained}
    if len(set(sizes.values())) < 2:
        return "Not two batch sizes were trained, so nothing is compared."
    small = next(case for case in trained if sizes[case.test] == min(sizes.values()))
    epochs = small.properties["epochs"]
    large = [
        case
        for case in trained
        if sizes[case.test] == max(sizes.values()) and case.properties["epochs"] == epochs
    ]
    if not large:
        return "The large and the small batch were trained for different numbers of epochs."
    (before, _), (after, best) = (
        _extreme([small], "train_accuracy", most=True),
        _extreme(large, "train_accuracy", most=True),
    )
    return (
        f"After {epochs} epochs, the small batch has a training accuracy of {before:.1%} "
        f"({small.described()}), and the best large batch has {after:.1%} ({best.described()}): "
        f"{_points(after - before)} points."
    )


# --- mixed precision


def _precision(case: Case) -> Cells:
    return {"step": units.seconds(case.seconds)} | _cells(
        case, OVER | {"loss after 5 steps": ("loss_after_5_steps", units.decimal)}
    )


def _about_precision(cases: Sequence[Case]) -> str:
    """Answer whether 16 bits are 2 to 3 times as fast, with the reasons that the figures show."""
    steps: dict[str, dict[int, Case]] = {}
    others = [{**case.properties, "batch": "", "precision": ""} for case in cases]
    for case, properties in zip(cases, others, strict=True):
        if properties == others[0]:
            steps.setdefault(case.properties["precision"], {})[_training(case).global_batch_size] = case
    name = next((name for name in ("fp16", "bf16") if name in steps), "")
    if not name or "fp32" not in steps:
        return "A 16-bit format and fp32 were not both measured, so nothing is compared."
    sentences = [] if name == "fp16" else ["fp16 was not measured."]
    for base in ("fp32", "tf32"):
        both = [batch for batch in steps[name] if batch in steps.get(base, ())]
        if base == "tf32" and both:
            sentences.append(
                "torch computes convolutions in tf32 by default, so a report's fp32 may be tf32."
            )
        if both:
            ratios = {batch: _ratio(steps[base][batch], steps[name][batch]) for batch in both}
            sentences.append(f"Is {name} 2 to 3 times as fast as {base}? {claim(ratios)}")
    return " ".join([*sentences, *_reasons(steps, name)])


def _ratio(slower: Case, faster: Case) -> float:
    return slower.seconds / faster.seconds


def claim(ratios: Mapping[int, float]) -> str:
    """Say at which batch sizes a ratio is between 2 and 3, as it is often said of fp16."""
    found = _listed([f"{ratio:.2f}x at batch {batch:,}" for batch, ratio in ratios.items()])
    least, most = CLAIMED
    ranges = {
        "in this range": [batch for batch, ratio in ratios.items() if least <= ratio <= most],
        "less": [batch for batch, ratio in ratios.items() if ratio < least],
        "more": [batch for batch, ratio in ratios.items() if ratio > most],
    }
    answers = [
        f"{what} at batch {_listed(f'{batch:,}' for batch in at)}" for what, at in ranges.items() if at
    ]
    if len(answers) == 1:
        answers = [f"always {answers[0].split(' at ')[0]}"]
    return f"It is {found}: {', '.join(answers)}."


def _listed(parts: Iterable[str]) -> str:
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last


def _reasons(steps: Mapping[str, Mapping[int, Case]], name: str) -> list[str]:
    """Return the reasons for the speedups of a 16-bit format that the measured times show."""
    found = []
    batches = sorted(steps[name].keys() & steps["fp32"].keys())
    if bound := [
        batch for batch in batches if (steps[name][batch].value("launch_bound") or 0) > LAUNCH_BOUND
    ]:
        found.append(
            f"At batch {_listed(map(str, bound))} the {name} step waits for kernel launches on the CPU, "
            "which no number format makes faster."
        )
    least, most = batches[0], batches[-1]
    grown = {of: _ratio(steps[of][most], steps[of][least]) for of in (name, "fp32")}
    if grown[name] < grown["fp32"] < most / least:
        found.append(
            f"A small batch gains less, because it does not fill the device: {most / least:g} times as many "
            f"images take {grown[name]:.1f} times as long in {name}, {grown['fp32']:.1f} times in fp32."
        )
    if most in (tf32 := steps.get("tf32", {})):
        by_tf32 = _ratio(steps["fp32"][most], tf32[most])
        by_16_bits = _ratio(tf32[most], steps[name][most])
        larger = "larger" if by_tf32 > by_16_bits else "smaller"
        found.append(
            f"At batch {most:,}, tf32 is {by_tf32:.2f}x as fast as fp32 by tensor cores alone, which is the "
            f"{larger} part of {name}'s gain; 16 bits instead of 32 add {by_16_bits:.2f}x."
        )
    return found


def _trained(case: Case) -> Cells:
    cells = {"training": units.seconds(case.seconds)} | _cells(case, OVER)
    cells |= _accuracies(case)
    cells |= _cells(case, {"points over fp32": ("accuracy_over_fp32", _points)})
    return cells | _cells(case, {"skipped steps": ("skipped_steps", units.whole)})


def _about_trained_precision(cases: Sequence[Case]) -> str:
    compared = [case for case in cases if "accuracy_over_fp32" in case.metrics]
    if not compared:
        return "Only fp32 was trained, so nothing is compared."
    apart, case = max(
        ((case.value("accuracy_over_fp32") or 0.0, case) for case in compared), key=lambda pair: abs(pair[0])
    )
    which = f"{case.properties['precision']}, batch {case.properties['batch']}"
    sentence = (
        f"After {case.properties['epochs']} epochs, the test accuracy differs most from fp32's "
        f"by {_points(apart)} points ({which})"
    )
    if ends := case.interval("accuracy_over_fp32"):
        within = "contains" if ends[0] <= 0 <= ends[1] else "does not contain"
        return f"{sentence}, and the 95% interval of this difference {within} 0."
    return f"{sentence}. One seed was trained, and trainings with other seeds differ, too."


def _sampled(case: Case) -> Cells:
    assert isinstance(case.measured.spec, SamplerSpec)
    return {"set_epoch": "called" if case.measured.spec.set_epoch else "not called"} | _cells(
        case,
        {
            "missing images": ("missing_images", units.whole),
            "repeated images": ("repeated_images", units.whole),
            "same place next epoch": ("repeated_places", units.percent),
        },
    )


def _about_set_epoch(cases: Sequence[Case]) -> str:
    parts = {
        called: [case for case in cases if case.measured.spec.set_epoch is called] for called in (True, False)
    }
    if not all(parts.values()):
        return ""
    with_it, without = (
        _extreme(parts[called], "repeated_places", most=called)[0] for called in (True, False)
    )
    return (
        f"Without set_epoch, {units.percent(without)} of the images keep their place in the next epoch. "
        f"With set_epoch, at most {units.percent(with_it)} do."
    )


# --- Q6 and Q7: messages


def _messages(case: Case) -> Cells:
    cells = {}
    for kind in MESSAGE_KINDS:
        if nbytes := case.value(f"{kind}_bytes"):
            count = units.counted(int(case.value(f"{kind}_messages") or 0), "message")
            cells[kind] = f"{units.nbytes(nbytes)} in {count}"
    return cells | _cells(case, {"initial state at the start": ("start_initial_state_bytes", units.nbytes)})


def _about_messages(cases: Sequence[Case]) -> str:
    for case in cases:
        if case.properties["strategy"] == "ddp":
            sent = {kind: case.value(f"{kind}_bytes") or 0.0 for kind in MESSAGE_KINDS}
            others = 1 - sent["gradients"] / sum(sent.values())
            return f"In a step of DDP, {others:.2%} of the bytes are not gradients."
    return "Plain DDP was not measured."


# --- parts of a step, and laws of scaling


def _parts(case: Case) -> Cells:
    parts = {part.replace("_", " "): (f"{part}_seconds", units.seconds) for part in PARTS}
    return _cells(case, parts) | {"step": units.seconds(case.value("step_seconds") or case.seconds)}


def _about_parts(cases: Sequence[Case]) -> str:
    case = max(cases, key=lambda case: case.measured.spec.world_size)
    parts = {part: case.value(f"{part}_seconds") or 0.0 for part in PARTS}
    longest = max(parts, key=parts.__getitem__)
    fraction, name = parts[longest] / sum(parts.values()), longest.replace("_", " ")
    return f"With {case.described()}, the longest part is {name}: {fraction:.0%} of the step."


def _speedups(cases: Sequence[Case]) -> list[Cells]:
    """Return a row for each step part, with its time on one and on several devices.

    Cases that differ only in the number of devices share rows.
    """
    groups: dict[str, dict[int, Case]] = {}
    for case in cases:
        groups.setdefault(_scaled_work(case, cases), {})[_training(case).world_size] = case
    sizes = sorted({N for group in groups.values() for N in group})
    devices = "GPUs" if "GPUs" in cases[0].properties else "ranks"
    headings = [f"1 {devices[:-1]}", *(f"{N} {devices}" for N in sizes), *(f"speedup on {N}" for N in sizes)]
    rows: list[Cells] = []
    for work, group in groups.items():
        found = [group[N].value if N in group else _no_value for N in sizes]
        first = group[min(group)]
        law = weak_speedup if first.experiment.kind == "weak" else strong_speedup
        sums = [0.0] * (1 + len(sizes))
        for part in PARTS:
            seconds = [first.value(f"{part}_seconds_on_one_device")]
            seconds += [value(f"{part}_seconds") for value in found]
            speedups = [value(f"{part}_speedup") for value in found]
            if any(seconds):
                cells = zip(headings, _part_cells(seconds, speedups), strict=True)
                rows.append({"scaling": work, "part": part.replace("_", " "), **dict(cells)})
            sums = [total + (value or 0.0) for total, value in zip(sums, seconds, strict=True)]
        t1, *many = sums
        whole = [law(t1, tN, N) if tN else None for N, tN in zip(sizes, many, strict=True)]
        cells = zip(headings, _part_cells([total or None for total in sums], whole), strict=True)
        rows.append({"scaling": work, "part": "all parts", **dict(cells)})
    return rows


def _no_value(metric: str) -> float | None:
    """Return None as the value of every metric, because no case was measured."""
    del metric
    return None


def _part_cells(seconds: Sequence[float | None], speedups: Sequence[float | None]) -> list[str]:
    cells = [NOTHING if value is None else units.seconds(value) for value in seconds]
    return cells + [NOTHING if value is None else units.factor(value) for value in speedups]


def _scaled_work(case: Case, cases: Sequence[Case]) -> str:
    """Return what a case scales, such as "weak, batch 32 per rank", and what varies over all cases."""
    spec, weak = _training(case), case.experiment.kind == "weak"
    batch = f"batch {spec.per_rank_batch_size:,} per rank"
    words = [case.experiment.kind, batch if weak else f"global batch {spec.global_batch_size:,}"]
    for name in ("model", "precision", "execution", "strategy", "input"):
        if len({other.properties.get(name) for other in cases}) > 1:
            words.append(in_words(name, case.properties.get(name, "")))
    return ", ".join(filter(None, words))


def _about_speedups(cases: Sequence[Case]) -> str:
    ends = []
    for most, word in ((True, "largest"), (False, "smallest")):
        found = [
            (*_extreme(cases, f"{part}_speedup", most=most), part)
            for part in PARTS
            if any(f"{part}_speedup" in case.metrics for case in cases)
        ]
        value, case, part = (max if most else min)(found, key=lambda triple: triple[0])
        ends.append(
            f"The {word} speedup has the part {part.replace('_', ' ')}: {units.factor(value)} "
            f"({case.experiment.kind} scaling, {case.described()})."
        )
    short = "A part shorter than 1% of its step has no speedup."
    return " ".join([*dict.fromkeys(ends), short])


def _by_training(cases: Sequence[Case]) -> dict[str, list[Case]]:
    """Return cases by the training that they share on all numbers of devices, in words."""
    fields = [_without_devices(case) for case in cases]
    names = dict.fromkeys(name for of_case in fields for name in of_case)
    varying = {name for name in names if len({of_case.get(name, "") for of_case in fields}) > 1}
    found: dict[str, list[Case]] = {}
    for case, of_case in zip(cases, fields, strict=True):
        words = [
            in_words(name, value)
            for name, value in of_case.items()
            if value and (name in varying or name in ("batch", "global batch"))
        ]
        found.setdefault(", ".join(words), []).append(case)
    return found


def _without_devices(case: Case) -> dict[str, str]:
    """Return the properties of a training that are the same on all numbers of devices."""
    experiment, properties = case.experiment, dict(case.properties)
    if experiment.kind == "strong":  # whose global batch is constant
        properties |= {"batch": "", "global batch": f"{_training(case).global_batch_size:,}"}
    found = {"kind": f"{experiment.kind} scaling" if experiment.kind else experiment.title}
    found |= {name: properties.get(name, "") for name in ("batch", "global batch")}
    return found | {
        name: value for name, value in properties.items() if name not in ("GPUs", "ranks", "kind")
    }


LAWS: Mapping[str, Law] = {"Amdahl's law": amdahl_speedup, "Gustafson's law": gustafson_speedup}


def _fitted(case: Case) -> Estimate:
    """Return the serial fraction of a law; the bounds are infinite if they are not known."""
    low, high = case.interval("serial_fraction") or (-math.inf, math.inf)
    return Estimate(value=case.value("serial_fraction") or 0.0, low=low, high=high)


def predicted_by(case: Case, N: float) -> Estimate | None:
    """Return the speedup that a law predicts for N devices; None if the law predicts nothing."""
    fraction = _fitted(case)
    if not_predictable(fraction.value):
        return None
    return predicted_speedup(LAWS[case.experiment.title], fraction, N)


def _estimate(found: Estimate | None, form: Form, scale: float = 1.0) -> str:
    """Return a value with its 95% interval as text."""
    if found is None:
        return NOTHING
    known = math.isfinite(found.low) and math.isfinite(found.high)
    interval = f"{form(scale * found.low)} to {form(scale * found.high)}" if known else "interval not known"
    return f"{form(scale * found.value)} ({interval})"


def _law_rows(cases: Sequence[Case]) -> list[Cells]:
    rows: list[Cells] = []
    for training, found in _by_training(cases).items():
        for case in found:
            measured = measured_speedups(case)
            for N in sorted({*measured, *PREDICTED_DEVICES}):
                predicted = predicted_by(case, N)
                row = {
                    "training": training,
                    "serial fraction": _estimate(_fitted(case), units.percent),
                    "devices": str(N),
                    "measured speedup": units.factor(measured[N]) if N in measured else "not measured",
                    "predicted speedup": _estimate(predicted, units.factor),
                    "predicted efficiency": _estimate(predicted, units.percent, 1 / N),
                }
                rows.append(row)
    return rows


def measured_speedups(case: Case) -> dict[int, float]:
    """Return the measured speedups of a law's test by the number of devices."""
    name = "speedup_of_"
    measured = {key.removeprefix(name): found["value"] for key, found in case.metrics.items() if name in key}
    return {int(N): speedup for N, speedup in sorted(measured.items()) if N.isdecimal()}


def _about_laws(cases: Sequence[Case]) -> str:
    """Say what each law predicts for the most devices, and how far it is from what was measured."""
    sentences, most = {}, PREDICTED_DEVICES[-1]
    for training, (case, *_) in _by_training(cases).items():
        title, predicted = case.experiment.title, predicted_by(case, most)
        if predicted is None:
            reason = not_predictable(_fitted(case).value)
            sentences[training] = f"{training}: {reason}, so nothing is predicted."
            continue
        errors = [
            abs(fitted.value / speedup - 1)
            for N, speedup in measured_speedups(case).items()
            if (fitted := predicted_by(case, N)) is not None
        ]
        sentences[title] = (
            f"{training}: {_estimate(predicted, units.factor)} is predicted on {most} devices, if the law "
            f"holds there. It differs from the measured speedups by up to {max(errors):.1%}."
        )
    warnings = dict.fromkeys(warning for case in cases for warning in case.warnings)
    return " ".join([*sentences.values(), *(f"Warning: {warning}." for warning in warnings)])


# --- costs


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The device time and the price of an epoch or of a whole training.

    of: "epoch" or "training". suffix: how the names of the metrics end.
    """

    of: str
    suffix: str

    def row(self, case: Case) -> Cells:
        device, saved, extra = self._seconds(case)
        if device is None:
            return {}
        cells = {f"device-minutes per {self.of}": f"{device / 60:.4f}"}
        if saved is not None and extra is not None:
            cells |= {"time saved": units.seconds(saved), "extra device time": units.seconds(extra)}
            cells["device-hours for a saved hour"] = f"{extra / saved:.3f}" if saved > 0 else NOTHING
        if (price := case.hour_price) is not None:
            cells["price"] = units.money(price * device / 3600)
            if saved is not None and extra is not None:
                cells["extra price"] = units.money(price * extra / 3600)
                cells["price of a saved hour"] = units.money(price * extra / saved) if saved > 0 else NOTHING
        return cells

    def sentence(self, cases: Sequence[Case]) -> str:
        compared = [case for case in cases if self._seconds(case)[1] is not None]
        if not compared:
            least, case = _extreme(cases, f"device_seconds_{self.suffix}", most=False)
            price = "" if case.hour_price is None else f" and costs {self.row(case)['price']}"
            article = "an" if self.of == "epoch" else "a"
            return f"With {case.described()}, {article} {self.of} takes {units.seconds(least)}{price}."
        saved, case = _extreme(compared, f"saved_seconds_{self.suffix}", most=True)
        extra = self._seconds(case)[2] or 0.0
        sentence = (
            f"With {case.described()}, {'an' if self.of == 'epoch' else 'a'} {self.of} is "
            f"{units.seconds(abs(saved))} {'shorter' if saved > 0 else 'longer'} and takes "
            f"{units.seconds(abs(extra))} {'more' if extra > 0 else 'less'} device time than on one device."
        )
        if case.hour_price is not None:
            cells = self.row(case)
            more = units.money(abs(case.hour_price * extra / 3600))
            sentence += (
                f" It costs {cells['price']}, {more} {'more' if extra > 0 else 'less'} than on one device."
            )
            if saved > 0:
                sentence += f" A saved hour costs {cells['price of a saved hour']}."
        return sentence

    def _seconds(self, case: Case) -> tuple[float | None, float | None, float | None]:
        """Return the device time, the time saved and the extra device time, as far as they are known."""
        device, saved, extra = (
            case.value(f"{name}_{self.suffix}")
            for name in ("device_seconds", "saved_seconds", "extra_device_seconds")
        )
        return device, saved, extra


EPOCH_COSTS, TRAINING_COSTS = (
    Costs(of="epoch", suffix="per_epoch"),
    Costs(of="training", suffix="of_training"),
)


# --- when one GPU is enough


def _efficiencies(cases: Sequence[Case]) -> dict[int, float]:
    """Return the parallel efficiency of a training by the number of devices; 1 for one device."""
    found = {_training(case).world_size: case.value("efficiency") for case in cases}
    return {1: 1.0} | {N: value for N, value in sorted(found.items()) if value is not None}


def _worth(efficiencies: Mapping[int, float], limit: float) -> int:
    """Return the largest number of devices up to which all measured efficiencies reach a limit."""
    worth = 1
    for N, value in efficiencies.items():
        if value < limit:
            break
        worth = N
    return worth


def _enough_rows(cases: Sequence[Case]) -> list[Cells]:
    """Return a row for each training: on how many devices it takes least, and what more give."""
    rows: list[Cells] = []
    for training, found in _by_training(cases).items():
        efficiencies = _efficiencies(found)
        speedups = {N: N * value for N, value in efficiencies.items()}
        fastest = max(speedups, key=speedups.__getitem__)
        slower = [str(N) for N, speedup in speedups.items() if speedup < 1]
        rows.append(
            {
                "training": training,
                "measured devices": ", ".join(map(str, efficiencies)),
                "least device time on": str(max(efficiencies, key=efficiencies.__getitem__)),
                **{
                    f"efficiency of {limit:.0%} up to": str(_worth(efficiencies, limit))
                    for limit in EFFICIENCY_LIMITS
                },
                "slower than one device": ", ".join(slower) or NOTHING,
                "fastest": f"{fastest} ({units.factor(speedups[fastest])})",
            }
        )
    return rows


def _about_enough(cases: Sequence[Case]) -> str:
    """Say for which trainings one device is enough, by the first of the limits of efficiency.

    DataParallel is left out if there are other strategies, because it is nearly always slower.
    """
    limit = EFFICIENCY_LIMITS[0]
    cases = [case for case in cases if case.properties["strategy"] != "data_parallel"] or cases
    worst: list[tuple[float, str]] = []
    for training, found in _by_training(cases).items():
        _, (N, value) = list(_efficiencies(found).items())[:2]
        speed = f"{abs(N * value - 1):.0%} {'faster' if N * value >= 1 else 'slower'}"
        time = f"{abs(1 / value - 1):.0%} {'more' if value <= 1 else 'less'} device time"
        worst.append((value, f"for {training}: {N} devices are {speed} and take {time}"))
    worst.sort()
    enough = [text for value, text in worst if value < limit]
    named = f"an efficiency of {limit:.0%} as the limit"
    if not enough:
        return f"With {named}, more devices are worth it. They gain least {worst[0][1]}."
    more = f" One device is also enough for {len(enough) - MOST_NAMED} other trainings."
    said = f"With {named}, one device is enough {'; '.join(enough[:MOST_NAMED])}."
    return said + (more if len(enough) > MOST_NAMED else "")


# --- utilization and energy


def _used(case: Case) -> Cells:
    def both(name: str, form: Form) -> str:
        found = [case.value(f"{name}_{ending}") for ending in ("mean", "peak")]
        return NOTHING if None in found else " / ".join(form(value) for value in found if value is not None)

    quantities: dict[str, tuple[str, Form]] = {
        "GPU": ("gpu_utilization", units.percent),
        "GPU memory": ("gpu_memory_bytes", units.nbytes),
        "power": ("power_watts", units.watts),
        "temperature": ("temperature_celsius", units.celsius),
        "CPU cores": ("cpu_utilization", units.percent),
        "memory of a rank": ("rank_memory_bytes", units.nbytes),
    }
    texts = {heading: both(name, form) for heading, (name, form) in quantities.items()}
    cells = {heading: text for heading, text in texts.items() if text != NOTHING}
    return cells | _cells(
        case,
        {
            "energy per epoch": ("joules_per_epoch", units.joules),
            "energy per step": ("joules_per_step", units.joules),
            "images/J": ("images_per_joule", "{:.3g}".format),
        },
    )


def _about_usage(cases: Sequence[Case]) -> str:
    sentences = ["A cell with two figures has the mean and the peak."]
    if any("gpu_utilization_mean" in case.metrics for case in cases):
        sentences.append("The driver averages a GPU's utilization over 1/6 s to 1 s.")
    if any("images_per_joule" in case.metrics for case in cases):
        most, case = _extreme(cases, "images_per_joule", most=True)
        sentences.append(f"The most images per joule are {most:.3g} ({case.described()}).")
    else:
        sentences.append(
            "No energy is known: no energy counter could be read, or the rounds were too short for it."
        )
    return " ".join(sentences)


LARGE_BATCH = (
    *("test_large_batch", "test_remedies", "test_report_training", "test_long_run"),
    "test_same_result_on_more_devices",
)
SHARDS = ("test_shards_are_disjoint_and_cover_the_data", "test_without_set_epoch_the_epochs_repeat")
EPOCHS = ("test_batch_size", "test_epoch_scaling")
FORMULAS = Question(
    title="Q3: formulas of reports beside the measured all_reduce",
    tests=("test_all_reduce",),
    file="test_all_reduce.py",
    needs="link_utilization",
    rows=_formulas,
    sentence=_about_formulas,
)
QUESTIONS = (
    Question(
        title="Q1: time per epoch by batch size",
        tests=("test_batch_size",),
        file="test_batch_size.py",
        needs="images_per_second",
        row=_epoch,
        sentence=_about_epochs,
    ),
    Question(
        title="Q2: time and speedup by batch size and devices",
        tests=("test_weak_scaling", "test_strong_scaling"),
        file="test_scaling.py",
        needs="images_per_second",
        row=_scaled,
        sentence=_about_scaling,
    ),
    Question(
        title="Q3: computation and communication in an epoch",
        tests=("test_comm_split", "test_data_parallel_split"),
        file="test_comm_split.py",
        needs="exposed_comm_seconds",
        row=_communicated,
        sentence=_about_communication,
    ),
    Question(
        title="Q3: communication of DataParallel beside DDP's, in an epoch",
        tests=("test_data_parallel_split",),
        file="test_comm_split.py",
        needs="replicate_seconds",
        row=_by_part,
        sentence=_about_data_parallel,
    ),
    Question(
        title="Q3: bandwidth while training",
        tests=("test_comm_split",),
        file="test_comm_split.py",
        needs="gradient_busbw_bytes_per_second",
        row=_sent_at,
        sentence=_about_bandwidth,
    ),
    FORMULAS,
    Question(
        title="Q4: accuracy with a large batch",
        tests=LARGE_BATCH,
        file="test_large_batch.py",
        needs="train_accuracy",
        row=_accuracies,
        sentence=_about_accuracy,
    ),
    Question(
        title="Mixed precision: time of a step",
        tests=("test_precision",),
        file="test_precision.py",
        needs="images_per_second",
        row=_precision,
        sentence=_about_precision,
    ),
    Question(
        title="Mixed precision: accuracy",
        tests=("test_precision_accuracy",),
        file="test_precision.py",
        needs="train_accuracy",
        row=_trained,
        sentence=_about_trained_precision,
    ),
    Question(
        title="Q5: with and without set_epoch",
        tests=SHARDS,
        file="test_sampler.py",
        needs="repeated_places",
        row=_sampled,
        sentence=_about_set_epoch,
    ),
    Question(
        title="Q6 and Q7: messages besides gradients",
        tests=("test_messages",),
        file="test_messages.py",
        needs="gradients_bytes",
        row=_messages,
        sentence=_about_messages,
    ),
    Question(
        title="Parts of a step",
        tests=("test_step_breakdown", "test_epoch_breakdown"),
        file="test_step_breakdown.py",
        needs="forward_seconds",
        row=_parts,
        sentence=_about_parts,
    ),
    Question(
        title="Speedup of the parts of a step",
        tests=("test_weak_parts_speedup", "test_strong_parts_speedup"),
        file="test_step_breakdown.py",
        needs="forward_speedup",
        rows=_speedups,
        sentence=_about_speedups,
    ),
    Question(
        title="Laws of scaling",
        tests=("test_amdahl", "test_gustafson"),
        file="test_scaling.py --world-sizes 1,2,4",
        needs="serial_fraction",
        rows=_law_rows,
        sentence=_about_laws,
    ),
    Question(
        title="Cost",
        tests=("test_step_breakdown", "test_epoch_scaling"),
        file="test_step_breakdown.py",
        needs="device_seconds_per_epoch",
        row=EPOCH_COSTS.row,
        sentence=EPOCH_COSTS.sentence,
    ),
    Question(
        title="Cost of a whole training",
        tests=LARGE_BATCH,
        file="test_large_batch.py",
        needs="device_seconds_of_training",
        row=TRAINING_COSTS.row,
        sentence=TRAINING_COSTS.sentence,
    ),
    Question(
        title="When is one device enough?",
        tests=("test_weak_scaling", "test_strong_scaling", "test_epoch_scaling"),
        file="test_scaling.py",
        needs="efficiency",
        rows=_enough_rows,
        sentence=_about_enough,
    ),
    Question(
        title="Utilization and energy",
        tests=(*LARGE_BATCH, *EPOCHS),
        file="test_large_batch.py",
        needs="cpu_utilization_mean",
        row=_used,
        sentence=_about_usage,
    ),
)
