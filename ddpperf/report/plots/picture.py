"""The shared code of all pictures: files, colours, labels, and frames for lines and for bars."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpperf.report.stored_cases import Case, all_in_words, usual_properties

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The colours of Okabe and Ito, and of Tol, which colour-blind readers can distinguish.
COLOURS = (
    *("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000"),
    *("#882255", "#999933", "#44AA99", "#332288", "#F0E442"),
)
MARKERS = "osD^vPX*<>ph"
LINES = ("-", "--", ":", "-.")
WIDTH, ROW_HEIGHT, LEGEND_HEIGHT, LEAST_HEIGHT = 10.0, 0.32, 0.16, 2.6  # inches
LEGEND_WIDTH, LEGEND_MARK = 150, 8  # characters
NOT_IN_LABELS = ("epochs", "seed", "seeds", "memory format")
STYLE: dict[Any, Any] = {
    **{"svg.fonttype": "none", "svg.hashsalt": "ddpperf", "font.size": 9},
    **{"axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True},
    **{"legend.fontsize": 7, "legend.frameon": False},
}
FORMS: dict[str, dict[str, Any]] = {
    "png": {"dpi": 150},
    "svg": {"metadata": {"Date": None}},  # so that equal runs give equal files
}
Draw = Callable[[Sequence[Case]], "Figure | None"]


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture of an experiment.

    name: the name of its files. experiment: the title of the experiment's table, or "" for the whole
    run. description: what the picture shows, for readers who cannot see it.
    """

    name: str
    experiment: str
    description: str
    figure: Figure

    def rendered(self, form: str) -> bytes:
        """Return the picture as a file, where `form` is png or svg."""
        from matplotlib import rc_context

        file = io.BytesIO()
        with rc_context(STYLE):
            self.figure.savefig(file, format=form, **FORMS[form])
        return file.getvalue()


def label(case: Case, *, without: Sequence[str] = ()) -> str:
    """Return the properties of a case in one line, without the defaults under the run's options."""
    usual = usual_properties(case.header) | {"algorithm": ""}  # a legend compares algorithms
    found = case.properties
    if case.recipe:
        found = {name: found.get(name, "") for name in ("GPUs", "ranks", "recipe")}
    return ", ".join(all_in_words(found, usual=usual, without=(*without, *NOT_IN_LABELS)))


def line_look(number: int) -> dict[str, Any]:
    """Return colour, marker and line style of a line; the first 48 lines differ."""
    which = number % len(COLOURS)
    line = LINES[number // len(COLOURS) % len(LINES)]
    return {"color": COLOURS[which], "marker": MARKERS[which], "linestyle": line}


def new_figure(height: float) -> Figure:
    """Return an empty figure. height: in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height), layout="constrained")


def line_frame(*, lines: int) -> tuple[Figure, Axes]:
    """Return a figure with room below its axes for a legend of `lines` lines."""
    figure = new_figure(3.4 + LEGEND_HEIGHT * lines)
    return figure, figure.subplots()


def row_frame(names: Sequence[str], what: str) -> tuple[Figure, Axes]:
    """Return a figure with a row for each name, the first on top. what: the horizontal axis."""
    figure = new_figure(max(LEAST_HEIGHT, 1.2 + ROW_HEIGHT * len(names)))
    axes = figure.subplots()
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlabel(what)
    return figure, axes


def legend(figure: Figure, axes: Axes) -> None:
    """Put the legend of the axes below the figure, where it hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    columns = max(1, int(LEGEND_WIDTH // (LEGEND_MARK + max(map(len, labels), default=0))))
    figure.legend(handles, labels, loc="outside lower left", ncols=columns)
