"""Speed and accuracy of mixed precision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ddpperf.report.questions.accuracy import accuracies
from ddpperf.report.questions.question import Cells, Question, extreme, time_cell, training_of
from ddpperf.report.stored_cases import Case
from ddpperf.results import units
from ddpperf.verdict.judged_work import LAUNCH_BOUND

CLAIMED = (2.0, 3.0)  # how much faster than FP32 many texts say that FP16 is
SPEED = ("images_per_second", "speedup_over_fp32", "speedup_over_tf32")


def _about_precision(cases: Sequence[Case]) -> str:
    """Answer whether 16 bits are 2 to 3 times as fast, with the reasons that the figures show."""
    steps: dict[str, dict[int, Case]] = {}
    others = [{**case.properties, "batch": "", "precision": ""} for case in cases]
    for case, properties in zip(cases, others, strict=True):
        if properties == others[0]:
            steps.setdefault(case.properties["precision"], {})[training_of(case).global_batch_size] = case
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
    """Name the batch sizes with a ratio between 2 and 3, which is often claimed for fp16."""
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


PRECISION = Question(
    title="Mixed precision: time of a step",
    tests=("test_precision",),
    file="test_precision.py",
    needs=("images_per_second",),
    cells=time_cell,
    metrics=(*SPEED, "loss_after_5_steps"),
    sentence=_about_precision,
)


def _trained(case: Case) -> Cells:
    return time_cell(case) | accuracies(case)


def _about_trained_precision(cases: Sequence[Case]) -> str:
    compared = [case for case in cases if "accuracy_over_fp32" in case.metrics]
    if not compared:
        return "Only fp32 was trained, so nothing is compared."
    ends = [extreme(compared, "accuracy_over_fp32", most=most) for most in (True, False)]
    apart, case = max(ends, key=lambda pair: abs(pair[0]))
    which = f"{case.properties['precision']}, batch {case.properties['batch']}"
    sentence = (
        f"After {case.properties['epochs']} epochs, the test accuracy differs most from fp32's "
        f"by {units.points(apart)} points ({which})"
    )
    if interval := case.interval("accuracy_over_fp32"):
        within = "contains" if interval[0] <= 0 <= interval[1] else "does not contain"
        return f"{sentence}, and the 95% interval of this difference {within} 0."
    return f"{sentence}. One seed was trained, and trainings with other seeds differ, too."


PRECISION_ACCURACY = Question(
    title="Mixed precision: accuracy",
    tests=("test_precision_accuracy",),
    file="test_precision.py",
    needs=("train_accuracy",),
    cells=_trained,
    metrics=(*SPEED, "skipped_steps"),
    sentence=_about_trained_precision,
)
