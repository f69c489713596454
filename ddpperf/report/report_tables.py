"""The tables that a report on data-parallel training asks for, in Markdown, from a stored run.

Each question has a table and one sentence that is computed from its figures. A question that the run
did not measure names the command that measures it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ddpperf.analysis.cost_models import REPORT_FORMULAS
from ddpperf.analysis.scaling import amdahl_speedup, gustafson_speedup
from ddpperf.report.tables import Case, cases_of
from ddpperf.results import units
from ddpperf.results.samples import Measured
from ddpperf.specs import PARTS, MessagesSpec, RunSpec, SamplerSpec, TrainingSpec

Rows = list[tuple[str, ...]]
PREDICTED = (2, 4, 8, 16)  # devices for which a law of scaling predicts the speedup
NOTHING = "-"
KINDS = ("gradients", "buffers", "parameters", "metrics", "control", "other")


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question of a report: its title, the file of its experiment, and its table.

    answer: returns the rows of the table and a sentence; no rows if the run did not measure it.
    """

    title: str
    file: str
    headings: tuple[str, ...]
    answer: Callable[[Sequence[Case]], tuple[Rows, str]]


def report_tables(document: Mapping[str, Any]) -> str:
    """Return all tables of a stored run as Markdown."""
    cases = cases_of(document)
    parts = []
    for question in QUESTIONS:
        rows, sentence = question.answer(cases)
        parts += [f"## {question.title}", ""]
        if rows:
            parts += [
                f"| {' | '.join(question.headings)} |",
                f"|{'---|' * len(question.headings)}",
                *(f"| {' | '.join(row)} |" for row in rows),
                "",
            ]
        else:
            sentence = f"Not measured in this run: `python -m pytest perf/{question.file}`."
        parts += [sentence, ""] if sentence else []
    return "\n".join(parts)


def _of(cases: Sequence[Case], *names: str) -> list[Case]:
    """Return the cases of test functions, each case once."""
    found = [case for case in cases if case.test.rpartition("::")[2].partition("[")[0] in names]
    return [case for case in found if case.ab is None or case.ab["primary"]]


def _value(case: Case, name: str) -> float | None:
    return case.metrics[name]["value"] if name in case.metrics else None


def _text(value: float | None, form: Callable[[float], str]) -> str:
    return form(value) if value is not None else NOTHING


def _seconds(measured: Measured) -> float:
    return median(measured.median_step_seconds().values())


def _training(case: Case) -> TrainingSpec:
    assert isinstance(case.measured.spec, TrainingSpec)
    return case.measured.spec


def _reference(case: Case, name: str) -> float | None:
    stored = case.stored["references"].get(name)
    return _seconds(Measured.from_json(stored)) if stored is not None else None


def _batch_sizes(cases: Sequence[Case]) -> tuple[Rows, str]:
    rows: Rows = []
    speeds: dict[int, float] = {}
    costs: dict[str, float] = {}
    for case in _of(cases, "test_batch_size"):
        spec, epoch = _training(case), _seconds(case.measured)
        without = epoch if spec.input == "fixed" else _reference(case, "without_loading")
        loading = _value(case, "loading_fraction")
        workers = f", {spec.loader_workers} workers" if spec.loader_workers else ""
        rows.append(
            (
                f"{spec.per_rank_batch_size:,}",
                f"{spec.input}{workers}",
                units.seconds(epoch),
                _text(without, units.seconds),
                _text(loading, units.percent),
                _text(_value(case, "images_per_second"), units.whole),
            )
        )
        speeds[spec.per_rank_batch_size] = max(
            speeds.get(spec.per_rank_batch_size, 0.0), spec.images_per_epoch / epoch
        )
        costs[f"batch {spec.per_rank_batch_size}, {spec.input}{workers}"] = loading or 0.0
    if not rows:
        return [], ""
    best, worst = max(speeds, key=speeds.__getitem__), max(costs, key=costs.__getitem__)
    sentence = f"Batch size {best:,} trains fastest, with {speeds[best]:,.0f} images/s."
    if costs[worst] > 0:
        sentence += f" Loading costs most with {worst}: {costs[worst]:.1%} of the epoch."
    return rows, sentence


def _scaling(cases: Sequence[Case]) -> tuple[Rows, str]:
    rows: Rows = []
    efficiencies: dict[str, float] = {}
    for case in _of(cases, "test_weak_scaling", "test_strong_scaling"):
        spec, efficiency = _training(case), _value(case, "efficiency")
        rows.append(
            (
                case.experiment.kind,
                str(spec.world_size),
                f"{spec.per_rank_batch_size:,}",
                f"{spec.global_batch_size:,}",
                spec.strategy,
                spec.execution,
                units.seconds(_seconds(case.measured)),
                _text(_value(case, "epoch_seconds"), units.seconds),
                _text(_value(case, "speedup"), units.factor),
                _text(efficiency, units.percent),
            )
        )
        if efficiency is not None:
            name = f"{case.experiment.kind} scaling on {spec.world_size} devices"
            efficiencies[f"{name}, batch {spec.per_rank_batch_size} per device, {spec.strategy}"] = efficiency
    if not efficiencies:
        return rows, ""
    best = max(efficiencies, key=efficiencies.__getitem__)
    worst = min(efficiencies, key=efficiencies.__getitem__)
    sentence = f"The best efficiency is {efficiencies[best]:.1%} ({best})"
    return rows, sentence + (f", the worst is {efficiencies[worst]:.1%} ({worst})." if best != worst else ".")


def _communication(cases: Sequence[Case]) -> tuple[Rows, str]:
    rows: Rows = []
    hidden: list[float] = []
    for case in _of(cases, "test_comm_split"):
        spec = _training(case)
        whole, exposed = (
            _value(case, name) for name in ("traced_comm_seconds", "traced_exposed_comm_seconds")
        )
        seconds = [
            _value(case, "compute_seconds"),
            whole,
            exposed,
            _value(case, "exposed_comm_seconds"),
        ]
        epochs = [value * spec.steps_per_epoch if value is not None else None for value in seconds]
        rows.append(
            (
                str(spec.world_size),
                f"{spec.per_rank_batch_size:,}",
                spec.execution,
                *(_text(value, units.seconds) for value in epochs),
            )
        )
        if whole and exposed is not None:
            hidden.append(1 - exposed / whole)
    if not hidden:
        return rows, ""
    some = f"{min(hidden):.0%} to {max(hidden):.0%}" if len(hidden) > 1 else f"{hidden[0]:.0%}"
    return rows, f"Computation hides {some} of the communication; only the exposed rest makes a step longer."


def _bandwidth(cases: Sequence[Case]) -> tuple[Rows, str]:
    rows: Rows = []
    for case in _of(cases, "test_comm_split"):
        spec = _training(case)
        N, busbw = spec.world_size, _value(case, "gradient_busbw_bytes_per_second")
        gradients = _value(case, "communicated_bytes_per_epoch")
        if not busbw or not gradients:
            continue
        S = gradients / spec.steps_per_epoch
        sending = 2 * (N - 1) / N * S / busbw  # seconds, by the definition of the bus bandwidth
        by_formula = [formula.seconds(N, S, 1.0) / sending for formula in REPORT_FORMULAS]
        rows.append(
            (
                str(N),
                f"{spec.per_rank_batch_size:,}",
                units.bandwidth(busbw),
                _text(_value(case, "link_utilization"), units.percent),
                *map(units.bandwidth, by_formula),
            )
        )
    said = "; ".join(f"{formula.formula}: {formula.describes}" for formula in REPORT_FORMULAS)
    return rows, f"What the formulas of reports say, divided by the same seconds: {said}."


def _accuracy(cases: Sequence[Case]) -> tuple[Rows, str]:
    rows: Rows = []
    accuracies: dict[int, dict[int, float]] = {}
    for case in _of(cases, "test_large_batch", "test_long_run", "test_same_result_on_more_devices"):
        spec = case.measured.spec
        assert isinstance(spec, RunSpec)
        train, test = _value(case, "train_accuracy"), _value(case, "test_accuracy")
        low, high = _value(case, "test_accuracy_low"), _value(case, "test_accuracy_high")
        over = _value(case, "accuracy_over_baseline")
        rows.append(
            (
                f"{spec.global_batch_size:,}",
                str(spec.world_size),
                f"{spec.optimizer}, rate {spec.rate:g}, {spec.schedule}",
                str(spec.epochs),
                _text(train, units.percent),
                _text(test, units.percent),
                f"{low:.1%} to {high:.1%}" if low is not None and high is not None else NOTHING,
                _text(over, units.change),
            )
        )
        if train is not None:
            accuracies.setdefault(spec.epochs, {})[spec.global_batch_size] = train
    for epochs, by_batch in accuracies.items():
        if len(by_batch) > 1:
            small, large = min(by_batch), max(by_batch)
            change = by_batch[large] - by_batch[small]
            return rows, (
                f"After {epochs} epochs, the training accuracy with batch {large:,} differs by "
                f"{change * 100:+.1f} points from the one with batch {small:,}."
            )
    return rows, "One batch size was trained, so nothing is compared." if rows else ""


def _set_epoch(cases: Sequence[Case]) -> tuple[Rows, str]:
    rows: Rows = []
    names = ("test_shards_are_disjoint_and_cover_the_data", "test_without_set_epoch_the_epochs_repeat")
    repeated: dict[bool, float] = {}
    for case in _of(cases, *names):
        spec = case.measured.spec
        assert isinstance(spec, SamplerSpec)
        same = _value(case, "repeated_places")
        rows.append(
            (
                str(spec.world_size),
                "called" if spec.set_epoch else "not called",
                "dropped" if spec.drop_last else "repeated",
                _text(_value(case, "missing_images"), units.whole),
                _text(_value(case, "repeated_images"), units.whole),
                _text(same, units.percent),
            )
        )
        if same is not None:
            repeated[spec.set_epoch] = max(repeated.get(spec.set_epoch, 0.0), same)
    if not repeated.keys() >= {True, False}:
        return rows, ""
    return rows, (
        f"Without set_epoch, {repeated[False]:.0%} of the images keep their place in the next epoch; "
        f"with set_epoch, at most {repeated[True]:.0%}."
    )


def _messages(cases: Sequence[Case]) -> tuple[Rows, str]:
    rows: Rows = []
    others: dict[str, float] = {}
    for case in _of(cases, "test_messages"):
        spec = case.measured.spec
        assert isinstance(spec, MessagesSpec | TrainingSpec)
        sent = {kind: _value(case, f"{kind}_bytes") for kind in KINDS}
        counts = {kind: _value(case, f"{kind}_messages") for kind in KINDS}
        rows.append(
            (
                spec.strategy + (f"+{spec.comm_hook}" if spec.comm_hook != "none" else ""),
                *(
                    f"{_text(sent[kind], units.nbytes)} in {counts[kind] or 0:.0f}" if sent[kind] else NOTHING
                    for kind in KINDS
                ),
                _text(_value(case, "start_initial_state_bytes"), units.nbytes),
            )
        )
        whole = sum(value or 0.0 for value in sent.values())
        others.setdefault(spec.strategy, 1 - (sent["gradients"] or 0.0) / whole if whole else 0.0)
    if "ddp" not in others:
        return rows, ""
    return rows, f"In a step of DDP, {others['ddp']:.2%} of the bytes are no gradients."


def _parts(cases: Sequence[Case]) -> tuple[Rows, str]:
    rows: Rows = []
    longest = ""
    for case in _of(cases, "test_step_breakdown"):
        spec = _training(case)
        parts = {part: _value(case, f"{part}_seconds") for part in PARTS}
        rows.append(
            (
                str(spec.world_size),
                f"{spec.per_rank_batch_size:,}",
                spec.execution,
                *(_text(parts[part], units.seconds) for part in PARTS),
                units.seconds(_seconds(case.measured)),
            )
        )
        known = {part: value for part, value in parts.items() if value is not None}
        if known:
            part = max(known, key=known.__getitem__)
            longest = (
                f"On {spec.world_size} devices with batch {spec.per_rank_batch_size:,}, the longest part is "
                f"{part.replace('_', ' ')}, with {known[part] / sum(known.values()):.0%} of the parts."
            )
    return rows, longest


def _laws(cases: Sequence[Case]) -> tuple[Rows, str]:
    rows: Rows = []
    laws = {"test_amdahl": ("Amdahl", amdahl_speedup), "test_gustafson": ("Gustafson", gustafson_speedup)}
    sentence = ""
    for name, (law, speedup) in laws.items():
        for case in _of(cases, name):
            fraction = _value(case, "serial_fraction")
            if fraction is None:
                continue
            spec = _training(case)
            low, high = (_value(case, f"serial_fraction_{end}") for end in ("low", "high"))
            interval = f" ({low:.1%} to {high:.1%})" if low is not None and high is not None else ""
            rows.append(
                (
                    law,
                    f"{spec.per_rank_batch_size:,}",
                    f"{fraction:.1%}{interval}",
                    *(units.factor(speedup(fraction, N)) for N in PREDICTED),
                )
            )
            sentence = (
                f"{law}'s law predicts {speedup(fraction, PREDICTED[-1]):.2f}x on {PREDICTED[-1]} devices."
            )
    return rows, sentence


def _cost(cases: Sequence[Case]) -> tuple[Rows, str]:
    rows: Rows = []
    sentence = ""
    for case in _of(cases, "test_step_breakdown"):
        spent = _value(case, "device_seconds_per_epoch")
        if spent is None:
            continue
        spec = _training(case)
        saved, extra = (_value(case, f"{name}_seconds_per_epoch") for name in ("saved", "extra_device"))
        rows.append(
            (
                str(spec.world_size),
                f"{spec.per_rank_batch_size:,}",
                f"{spent / 60:.4f}",
                _text(saved, units.seconds),
                _text(extra, units.seconds),
            )
        )
        if saved is not None and extra is not None:
            sentence = (
                f"On {spec.world_size} devices with batch {spec.per_rank_batch_size:,}, an epoch is "
                f"{units.seconds(abs(saved))} {'shorter' if saved > 0 else 'longer'} and costs "
                f"{units.seconds(extra)} more device time than on one device."
            )
    return rows, sentence


QUESTIONS = (
    Question(
        title="Q1: time per epoch by batch size",
        file="test_batch_size.py",
        headings=("batch size", "images from", "epoch", "epoch without loading", "loading", "images/s"),
        answer=_batch_sizes,
    ),
    Question(
        title="Q2: time and speedup by batch size and devices",
        file="test_scaling.py",
        headings=(
            "scaling",
            "devices",
            "batch per device",
            "global batch",
            "strategy",
            "execution",
            "step",
            "epoch",
            "speedup",
            "efficiency",
        ),
        answer=_scaling,
    ),
    Question(
        title="Q3: computation and communication in an epoch",
        file="test_comm_split.py",
        headings=(
            "devices",
            "batch per device",
            "execution",
            "computation",
            "communication",
            "exposed, by trace",
            "exposed, by difference",
        ),
        answer=_communication,
    ),
    Question(
        title="Q3: bandwidth while training",
        file="test_comm_split.py",
        headings=(
            "devices",
            "batch per device",
            "bus bandwidth",
            "of the link",
            *(formula.formula for formula in REPORT_FORMULAS),
        ),
        answer=_bandwidth,
    ),
    Question(
        title="Q4: accuracy with a large batch",
        file="test_large_batch.py",
        headings=(
            "global batch",
            "devices",
            "recipe",
            "epochs",
            "training accuracy",
            "test accuracy",
            "95% interval",
            "over the small batch",
        ),
        answer=_accuracy,
    ),
    Question(
        title="Q5: with and without set_epoch",
        file="test_sampler.py",
        headings=("devices", "set_epoch", "last images", "missing", "repeated", "same place next epoch"),
        answer=_set_epoch,
    ),
    Question(
        title="Q6 and Q7: messages besides gradients",
        file="test_messages.py",
        headings=("strategy", *KINDS, "initial state at the start"),
        answer=_messages,
    ),
    Question(
        title="Parts of a step",
        file="test_step_breakdown.py",
        headings=(
            "devices",
            "batch per device",
            "execution",
            *(part.replace("_", " ") for part in PARTS),
            "step",
        ),
        answer=_parts,
    ),
    Question(
        title="Laws of scaling",
        file="test_scaling.py --world-sizes 1,2,4",
        headings=("law", "batch per device", "serial fraction", *(f"speedup on {N}" for N in PREDICTED)),
        answer=_laws,
    ),
    Question(
        title="Cost",
        file="test_step_breakdown.py",
        headings=(
            "devices",
            "batch per device",
            "device-minutes per epoch",
            "time saved",
            "extra device time",
        ),
        answer=_cost,
    ),
)
