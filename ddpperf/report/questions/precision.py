"""Speed and accuracy of mixed precision."""

from __future__ import annotations

from collections.abc import Sequence

from ddpperf.report.questions.accuracy import accuracies
from ddpperf.report.questions.question import Cells, Question, extreme, time_cell, training_of
from ddpperf.report.stored_cases import Case
from ddpperf.results import units

CLAIMED = (2.0, 3.0)  # how much faster than FP32 many texts say that FP16 is
SPEED = ("images_per_second", "speedup_over_fp32", "speedup_over_tf32")


def _about_precision(cases: Sequence[Case]) -> str:
    """Answer whether a 16-bit format is 2 to 3 times as fast, as many texts claim."""
    steps: dict[str, dict[int, float]] = {}  # seconds by precision and batch size
    others = [{**case.properties, "batch": "", "precision": ""} for case in cases]
    for case, properties in zip(cases, others, strict=True):
        if properties == others[0]:
            batches = steps.setdefault(case.properties["precision"], {})
            batches[training_of(case).global_batch_size] = case.seconds
    name = next((name for name in ("fp16", "bf16") if name in steps), "")
    sentences = []
    for base in ("fp32", "tf32"):
        both = [batch for batch in steps.get(name, ()) if batch in steps.get(base, ())]
        ratios = {batch: steps[base][batch] / steps[name][batch] for batch in both}
        if ratios:
            found = ", ".join(f"{ratio:.2f}x at batch {batch:,}" for batch, ratio in ratios.items())
            within = sum(CLAIMED[0] <= ratio <= CLAIMED[1] for ratio in ratios.values())
            sentences.append(
                f"Is {name} 2 to 3 times as fast as {base}? It is for {within} of "
                f"{units.counted(len(ratios), 'batch size')}: {found}."
            )
    if "tf32" in steps:
        sentences.append("By default, torch computes convolutions in tf32, so a report's fp32 may be tf32.")
    return " ".join(sentences)


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
