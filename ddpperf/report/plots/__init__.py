"""Pictures of a stored run's experiments, made with matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ddpperf.io.files import write_atomically
from ddpperf.report.experiment_columns import WHOLE_TRAININGS
from ddpperf.report.plots.bars import ab_ratios, communication, step_parts
from ddpperf.report.plots.lines import all_reduce, law, scaling
from ddpperf.report.plots.over_time import curves, utilization
from ddpperf.report.plots.picture import FORMS, STYLE, Draw, Picture
from ddpperf.report.stored_cases import cases_of, of_functions

SCALING = ("test_weak_scaling", "test_strong_scaling")
SPLIT = ("test_comm_split", "test_data_parallel_split")
ALL_REDUCE = ("test_all_reduce", "test_backend_model")
CURVES = (*WHOLE_TRAININGS, "test_precision_accuracy")
BY_EPOCH = "on the training and the test images by epoch, a panel for each training"
LAW = "law up to 32 devices, and measured ones"
BUSBW = "Bus bandwidth of all_reduce by buffer size and algorithm, with the fitted model and the link"
# The name of a picture, its test functions, the function that draws it, and its description.
DRAWN: tuple[tuple[str, tuple[str, ...], Draw, str], ...] = (
    ("scaling", SCALING, scaling, "Speedup of weak and strong scaling by number of devices"),
    ("epoch_scaling", ("test_epoch_scaling",), scaling, "Speedup of an epoch by number of devices"),
    ("amdahl", ("test_amdahl",), law, f"Speedups by Amdahl's {LAW}"),
    ("gustafson", ("test_gustafson",), law, f"Speedups by Gustafson's {LAW}"),
    ("communication", SPLIT, communication, "Compute, overlapped and exposed communication"),
    ("step_parts", ("test_step_breakdown",), step_parts, "Time of the parts of a training step"),
    ("epoch_parts", ("test_epoch_breakdown",), step_parts, "Time of the parts of a step with a DataLoader"),
    ("all_reduce", ALL_REDUCE, all_reduce, BUSBW),
    ("loss_by_epoch", CURVES, partial(curves, of="loss"), f"Loss {BY_EPOCH}"),
    ("accuracy_by_epoch", CURVES, partial(curves, of="accuracy"), f"Accuracy {BY_EPOCH}"),
)


def write_plots(folder: Path, document: Mapping[str, Any]) -> Path:
    """Write each picture of a stored run as PNG and SVG to a folder, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for picture in pictures_of(document):
        for form in FORMS:
            write_atomically(folder / f"{picture.name}.{form}", picture.rendered(form))
    return folder


def pictures_of(document: Mapping[str, Any]) -> list[Picture]:
    """Return the pictures of a stored run."""
    from matplotlib import rc_context

    header, cases = document["ddpperf"], cases_of(document)
    drawn: list[Picture | None] = []
    with rc_context(STYLE):
        for name, tests, draw, description in DRAWN:
            chosen = of_functions(cases, *tests)
            figure = draw(chosen) if chosen else None
            if figure is not None:
                title = chosen[0].experiment.title
                drawn.append(Picture(name=name, experiment=title, description=description, figure=figure))
        drawn += [utilization(case) for case in of_functions(cases, *WHOLE_TRAININGS)]
        drawn.append(ab_ratios(header))
    return [picture for picture in drawn if picture is not None]
