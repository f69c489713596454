"""The tables that a report on data-parallel training asks for, in Markdown, from a stored run.

Each question has a table and one sentence that is computed from its figures. A question that the run
did not measure names the command that measures it. The first columns of a table are the devices,
the batch size, and what else distinguishes the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ddpperf.analysis.cost_models import REPORT_FORMULAS
from ddpperf.analysis.scaling import amdahl_speedup, gustafson_speedup, strong_speedup, weak_speedup
from ddpperf.report.cases import Case, cases_of, of_functions
from ddpperf.report.facets import in_words
from ddpperf.report.tables import distinguished
from ddpperf.results import units
from ddpperf.results.metrics import MESSAGE_KINDS
from ddpperf.specs import DATA_PARALLEL_PARTS, PARTS, AllReduceSpec, SamplerSpec, TrainingSpec

PREDICTED = (2, 4, 8, 16)  # devices for which a law of scaling predicts the speedup
# properties with a column even if they do not vary
ALWAYS = ("GPUs", "ranks", "batch", "global batch", "buffer")
NOTHING = "-"
Cells = Mapping[str, str]
Form = Callable[[float], str]


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question of a report.

    tests: the test functions that answer it. needs: the metric without which a test, such as one that
    failed early, answers nothing. file: the file of the tests, with the options that they need. row:
    returns the figures of a case by heading, or an empty mapping if it has none; for a case with
    several rows, it returns a list of them. sentence: returns a sentence on the cases that have
    figures. lines: returns the lines of a table whose rows are not the cases.
    """

    title: str
    tests: tuple[str, ...]
    needs: str
    file: str
    row: Callable[[Case], Cells | Sequence[Cells]]
    sentence: Callable[[Sequence[Case]], str]
    lines: Callable[[Sequence[Case]], list[str]] | None = None


def report_tables(document: Mapping[str, Any]) -> str:
    """Return all tables of a stored run as Markdown; of an A/B run, those of the candidate."""
    cases = cases_of(document)
    parts = []
    for question in QUESTIONS:
        parts += [f"## {question.title}", ""]
        if found := answering(cases, question):
            lines = question.lines(found) if question.lines else _table(found, question)
            parts += [*lines, "", question.sentence(found), ""]
        else:
            parts += [f"Not measured in this run: `python -m pytest perf/{question.file}`.", ""]
    return "\n".join(parts)


def answering(cases: Sequence[Case], question: Question) -> list[Case]:
    """Return the cases that have figures for a question."""
    found = of_functions(cases, *question.tests)
    return [case for case in found if question.needs in case.metrics and question.row(case)]


def table_rows(cases: Sequence[Case], question: Question) -> list[list[str]]:
    """Return the rows of a question's table; the first row has the headings."""
    figures = [(place, row) for place, case in enumerate(cases) for row in _figures(question, case)]
    headings = list(dict.fromkeys(heading for _, row in figures for heading in row))
    _, varying = distinguished(cases)
    names = [name for name in ALWAYS if any(case.properties.get(name) for case in cases)]
    columns = {name: [case.properties.get(name) or NOTHING for case in cases] for name in names}
    columns |= {column.heading or "kind": list(column.cells) for column in varying}
    rows = [
        [*(cells[place] for cells in columns.values()), *(row.get(heading, NOTHING) for heading in headings)]
        for place, row in figures
    ]
    return [[*columns, *headings], *rows]


def _figures(question: Question, case: Case) -> Sequence[Cells]:
    found = question.row(case)
    return [found] if isinstance(found, Mapping) else found


def _table(cases: Sequence[Case], question: Question) -> list[str]:
    """Return the lines of a question's table."""
    headings, *rows = table_rows(cases, question)
    return _lines(headings, rows)


def _lines(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
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


def _formulas(case: Case) -> list[Cells]:
    """Return a row for each formula, for an all_reduce of the library."""
    spec, link = case.measured.spec, case.link_bytes_per_second
    assert isinstance(spec, AllReduceSpec)
    if spec.algorithm != "backend" or not spec.in_place or link is None:
        return []
    predicted = {formula: formula.seconds(spec.world_size, spec.nbytes, link) for formula in REPORT_FORMULAS}
    return [
        {
            "formula": formula.formula,
            "what it counts": formula.counts,
            "predicted": units.seconds(seconds),
            "measured": units.seconds(case.seconds),
            "predicted over measured": f"{seconds / case.seconds:.3g}",
        }
        for formula, seconds in predicted.items()
    ]


def _about_formulas(cases: Sequence[Case]) -> str:
    """Relate the formulas to each other and to the link utilization of the largest all_reduce."""
    case = max(cases, key=lambda case: (case.measured.spec.world_size, _nbytes(case)))
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


# --- parts of a step, laws and costs


def _parts(case: Case) -> Cells:
    parts = {part.replace("_", " "): (f"{part}_seconds", units.seconds) for part in PARTS}
    return _cells(case, parts) | {"step": units.seconds(case.value("step_seconds") or case.seconds)}


def _about_parts(cases: Sequence[Case]) -> str:
    case = max(cases, key=lambda case: case.measured.spec.world_size)
    parts = {part: case.value(f"{part}_seconds") or 0.0 for part in PARTS}
    longest = max(parts, key=parts.__getitem__)
    fraction, name = parts[longest] / sum(parts.values()), longest.replace("_", " ")
    return f"With {case.described()}, the longest part is {name}: {fraction:.0%} of the step."


def _speedups(case: Case) -> Cells:
    parts = {part.replace("_", " "): (f"{part}_speedup", units.factor) for part in PARTS}
    return _cells(case, parts)


def _speedup_lines(cases: Sequence[Case]) -> list[str]:
    """Return a table of the step parts on one and on several devices, with a row for each part.

    Cases that differ only in the number of devices share rows.
    """
    groups: dict[str, dict[int, Case]] = {}
    for case in cases:
        groups.setdefault(_scaled_work(case, cases), {})[_training(case).world_size] = case
    sizes = sorted({N for group in groups.values() for N in group})
    devices = "GPUs" if "GPUs" in cases[0].properties else "ranks"
    headings = ["scaling", "part", f"1 {devices[:-1]}"]
    headings += [f"{N} {devices}" for N in sizes] + [f"speedup on {N}" for N in sizes]
    rows = []
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
                rows.append([work, part.replace("_", " "), *_part_cells(seconds, speedups)])
            sums = [total + (value or 0.0) for total, value in zip(sums, seconds, strict=True)]
        t1, *many = sums
        whole = [law(t1, tN, N) if tN else None for N, tN in zip(sizes, many, strict=True)]
        rows.append([work, "all parts", *_part_cells([total or None for total in sums], whole)])
    return _lines(headings, rows)


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


def _law(case: Case) -> Cells:
    fraction = case.value("serial_fraction")
    if fraction is None:
        return {}
    ends = case.interval("serial_fraction")
    interval = " ({:.1%} to {:.1%})".format(*ends) if ends else ""
    cells = {"law": case.experiment.title, "serial fraction": f"{fraction:.1%}{interval}"}
    return cells | {f"speedup on {N}": _predicted(case, fraction, N) for N in PREDICTED}


def _predicted(case: Case, fraction: float, N: int) -> str:
    if fraction < 0:  # a speedup above N, for which the law predicts nothing
        return NOTHING
    law = amdahl_speedup if case.experiment.title == "Amdahl's law" else gustafson_speedup
    return units.factor(law(fraction, N))


def _about_laws(cases: Sequence[Case]) -> str:
    predicted = [
        (case, fraction) for case in cases if (fraction := case.value("serial_fraction") or 0.0) >= 0
    ]
    if not predicted:
        return "The speedups exceed the number of devices, for which the laws predict nothing."
    case, fraction = predicted[-1]
    most = PREDICTED[-1]
    speedup = _predicted(case, fraction, most)
    return f"{case.experiment.title} predicts {speedup} on {most} devices ({case.described()})."


def _cost(case: Case) -> Cells:
    return _cells(
        case,
        {
            "device-minutes per epoch": ("device_seconds_per_epoch", lambda seconds: f"{seconds / 60:.4f}"),
            "time saved": ("saved_seconds_per_epoch", units.seconds),
            "extra device time": ("extra_device_seconds_per_epoch", units.seconds),
        },
    )


def _about_cost(cases: Sequence[Case]) -> str:
    saved, case = _extreme(cases, "saved_seconds_per_epoch", most=True)
    extra = case.value("extra_device_seconds_per_epoch") or 0.0
    return (
        f"With {case.described()}, an epoch is {units.seconds(abs(saved))} "
        f"{'shorter' if saved > 0 else 'longer'} and takes {units.seconds(abs(extra))} "
        f"{'more' if extra > 0 else 'less'} device time than on one device."
    )


LARGE_BATCH = (
    *("test_large_batch", "test_remedies", "test_report_training", "test_long_run"),
    "test_same_result_on_more_devices",
)
SHARDS = ("test_shards_are_disjoint_and_cover_the_data", "test_without_set_epoch_the_epochs_repeat")
FORMULAS = Question(
    title="Q3: formulas of reports beside the measured all_reduce",
    tests=("test_all_reduce",),
    file="test_all_reduce.py",
    needs="link_utilization",
    row=_formulas,
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
        row=_speedups,
        sentence=_about_speedups,
        lines=_speedup_lines,
    ),
    Question(
        title="Laws of scaling",
        tests=("test_amdahl", "test_gustafson"),
        file="test_scaling.py --world-sizes 1,2,4",
        needs="serial_fraction",
        row=_law,
        sentence=_about_laws,
    ),
    Question(
        title="Cost",
        tests=("test_step_breakdown",),
        file="test_step_breakdown.py",
        needs="saved_seconds_per_epoch",
        row=_cost,
        sentence=_about_cost,
    ),
)
