"""The measured tests of a stored run, from which tables, pictures and sentences are made."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

from ddpperf.report.experiment_columns import Experiment, experiment_of, function_of
from ddpperf.report.round_warnings import ONE_DEVICE, relative_error, warnings_of
from ddpperf.results.metrics import find_or_plain
from ddpperf.results.outcomes import NoteKind
from ddpperf.results.samples import CANDIDATE, Measured
from ddpperf.results.stored_runs import is_ab_run
from ddpperf.specs import (
    PARTS,
    RETIRED_FIELDS,
    AllReduceSpec,
    CustomStepSpec,
    EpochSpec,
    RunSpec,
    SamplerSpec,
    ScriptSpec,
    TrainingSpec,
)
from ddpperf.specs.labels import labels

# The properties that describe a case in a sentence
DESCRIBED = ("GPUs", "ranks", "batch", "global batch", "model", "execution", "strategy", "recipe")
BY_EPOCH = (
    *("train_loss", "train_accuracy", "test_loss", "test_accuracy"),
    *("train_seconds", "epoch_seconds", "skipped_steps"),
)
LEAST_ERROR = 0.0035  # standard deviation of a step's time between two process sets, in CUDA graphs
SEED = "seed="  # how the names of references begin that train with other random seeds


@dataclass(frozen=True, kw_only=True)
class Case:
    """A measured test of a stored run.

    stored: what the run stored of the test. header: what the run stored of itself.
    """

    test: str
    stored: dict[str, Any]
    header: Mapping[str, Any]

    @cached_property
    def measured(self) -> Measured:
        """The test's own measurement; of an A/B run, that of the candidate."""
        return self._of_candidate(self.stored)

    @cached_property
    def references(self) -> dict[str, Measured]:
        """The other measurements that the metrics needed, by name."""
        return {name: self._of_candidate(found) for name, found in self.stored["references"].items()}

    def _of_candidate(self, stored: dict[str, Any]) -> Measured:
        measured = Measured.from_json(stored)
        sides = {sample.side for sample in measured.samples}
        return measured.of(CANDIDATE) if is_ab_run(self.header) and CANDIDATE in sides else measured

    @cached_property
    def metrics(self) -> dict[str, dict[str, Any]]:
        """The metrics by name, each with "value", "unit" and its values "by_set"."""
        found: dict[str, dict[str, Any]] = self.stored["metrics"]
        if not is_ab_run(self.header):
            return found
        sets = {sample.set for sample in self.measured.samples}
        of_candidate = {}
        for name, metric in found.items():
            if by_set := {of_set: value for of_set, value in metric["by_set"].items() if of_set in sets}:
                of_candidate[name] = metric | {"value": median(by_set.values()), "by_set": by_set}
        return of_candidate

    @property
    def experiment(self) -> Experiment:
        return experiment_of(self.test)

    @property
    def recipe(self) -> str:
        """The name of the training recipe, or ""."""
        return str(self.header.get("recipes", {}).get(self.test, ""))

    @property
    def outcome(self) -> str:
        return str(self.header["outcomes"][self.test]["kind"])

    @cached_property
    def properties(self) -> dict[str, str]:
        """What the test measures, by name, such as "batch", in the order of the columns of a table.

        A property that does not apply, such as the strategy of a single device, is "".
        """
        spec = self.measured.spec
        devices = "GPUs" if self.header["options"].get("device") == "cuda" else "ranks"
        found = {"kind": self.experiment.kind, devices: str(spec.world_size), **labels(spec)}
        if isinstance(spec, TrainingSpec | CustomStepSpec):
            found["batch"] = f"{spec.per_rank_batch_size:,}"
        if isinstance(spec, TrainingSpec):
            found["strategy"] = found["strategy"].removeprefix("single")
            found["execution"] = "+".join(filter(None, (spec.execution, found.pop("inductor"))))
            if self.experiment.global_batch:  # in place of the images on one rank
                found = {"global batch" if name == "batch" else name: value for name, value in found.items()}
                found["global batch"] = f"{spec.global_batch_size:,}"
        if isinstance(spec, RunSpec):
            found["epochs"] = str(spec.epochs)
        if "buffer" in found:
            found["buffer"] = re.sub(r"(?<=\d)(?=[KMG]?i?B)", " ", found["buffer"])  # 64 MiB
        if isinstance(spec, AllReduceSpec) and spec.copies:
            found["result"] = "copy + all_reduce"
        if found.get("algorithm") == "backend":
            found["algorithm"] = self.header["environment"].get("backend") or "backend"
        if len(self.seeds) > 1 or self.recipe:
            found |= {"seed": "", "seeds": str(len(self.seeds))}
        if self.recipe:
            found["recipe"] = self.recipe
        return found

    @cached_property
    def warnings(self) -> list[str]:
        return warnings_of(self.stored)

    @property
    def seeds(self) -> list[Measured]:
        """The test's own measurement, and those of the same training with other random seeds."""
        others = (run for name, run in self.references.items() if name.startswith(SEED))
        return [self.measured, *others]

    @property
    def seconds(self) -> float:
        """The time of a step, call, epoch or training: the median over process sets."""
        return median(self.measured.median_step_seconds().values())

    @property
    def step_seconds(self) -> float:
        """The time of a step, also if the test times an epoch."""
        return self.value("step_seconds") or self.seconds

    @property
    def other_seconds(self) -> float:
        """The time of a step that is in none of its parts; negative if the parts overlap."""
        return self.step_seconds - math.fsum(self.value(f"{part}_seconds") or 0.0 for part in PARTS)

    @property
    def timed_work(self) -> str:
        """The name of the work that the test times, such as "step" or "call"."""
        spec = self.measured.spec
        if isinstance(spec, RunSpec):
            return "training"
        if isinstance(spec, EpochSpec):
            return "epoch"
        if isinstance(spec, TrainingSpec | CustomStepSpec | ScriptSpec):
            return "step"
        return "listing" if isinstance(spec, SamplerSpec) else "call"

    @property
    def notes(self) -> list[str]:
        """The explanations of the test's results."""
        texts = [note["text"] for note in self.stored["notes"] if note["kind"] == NoteKind.INFO]
        for name in RETIRED_FIELDS:
            if value := self.stored["spec"].get(name):
                texts.append(f"measured with {name}={value}, which this version no longer has")
        return texts

    @property
    def link_bytes_per_second(self) -> float | None:
        """The rate of the link that a collective's link_utilization refers to, or None.

        It is None for the hierarchical all_reduce and for all_to_all. Between nodes, these send other
        numbers of bytes than busbw counts.
        """
        named = self.properties.get("algorithm"), self.properties.get("collective")
        if "hierarchical" in named or "all_to_all" in named:
            return None
        used, busbw = self.value("link_utilization"), self.value("busbw_bytes_per_second")
        return busbw / used if used and busbw else None

    def value(self, metric: str) -> float | None:
        """Return the value of a metric, or None if the test has no such metric."""
        found: float | None = self.metrics[metric]["value"] if metric in self.metrics else None
        return found

    def interval(self, metric: str) -> tuple[float, float] | None:
        """Return the ends of a metric's 95% interval, or None if they are not stored."""
        low, high = (self.value(f"{metric}_{end}") for end in ("low", "high"))
        return None if low is None or high is None else (low, high)

    def compared_with(self, metric: str) -> tuple[float, float] | None:
        """Return what a speedup compares with: its seconds, for as many images, and the speedup's error.

        The error is half of the 95% interval as a fraction of the speedup. It follows from the spread
        of both measurements' rounds, but process sets of the same code differ by LEAST_ERROR, too.
        Returns None for another metric, or if the other measurement is not stored.
        """
        speedup, name = self.value(metric), metric.removeprefix("speedup_over_")
        other = self.references.get(ONE_DEVICE if metric == "speedup" else name)
        if not speedup or other is None or not metric.startswith("speedup"):
            return None
        spec, seconds = self.measured.spec, speedup * self.seconds
        errors = [max(LEAST_ERROR, relative_error(measured)) for measured in (self.measured, other)]
        is_weak = metric == "speedup" and self.experiment.kind == "weak"
        return seconds / (spec.world_size if is_weak else 1), 1.96 * math.hypot(*errors)

    def described(self) -> str:
        """Return the devices, the batch size and what else the test trains, as text."""
        return ", ".join(all_in_words({name: self.properties.get(name, "") for name in DESCRIBED}))


def usual_properties(header: Mapping[str, Any]) -> dict[str, str]:
    """Return the properties that measurements have by default under a run's options, by name."""
    options = header["options"]
    usual = {"input": "fixed", "result": "in place", "order": "set_epoch", "collective": "all_reduce"}
    usual["algorithm"] = header["environment"].get("backend") or "backend"
    usual |= {name: options[name] for name in ("model", "precision", "input") if name in options}
    if executions := options.get("executions"):
        usual["execution"] = executions[0]
    return usual


def usual_strategy(cases: Sequence[Case]) -> str:
    """Return the commonest strategy of some cases on several devices; "" if each has its own."""
    found = Counter(name for case in cases if (name := case.properties.get("strategy")))
    return next((name for name, count in found.most_common(1) if count > 1), "")


def in_words(name: str, value: str) -> str:
    """Return a property as text for a heading, such as "2 ranks" or "batch 32 per rank"."""
    if name == "input":
        return {"fixed": "one fixed batch", "device": "images on the device"}.get(value, value)
    if name in ("ranks", "GPUs", "epochs", "seeds"):
        return f"{value} {name if value != '1' else name.removesuffix('s')}"
    if name == "batch":
        return f"batch {value}{'' if ' ' in value else ' per rank'}"
    if name == "recipe":
        return f'recipe "{value}"'  # the names of recipes contain commas
    return f"{name} {value}" if name in ("global batch", "uneven end") else value


def all_in_words(
    properties: Mapping[str, str], *, usual: Mapping[str, str] | None = None, without: Collection[str] = ()
) -> list[str]:
    """Return properties as texts, without those that have the usual value, and some others."""
    return [
        in_words(name, value)
        for name, value in properties.items()
        if value and name not in without and (usual or {}).get(name) != value
    ]


def cases_of(document: Mapping[str, Any]) -> list[Case]:
    """Return the measured tests of a stored run, in their order."""
    header = document["ddpperf"]
    stored = {found["fullname"]: found["extra_info"]["ddpperf"] for found in document["benchmarks"]}
    tests = (test for test in header["outcomes"] if test in stored)
    return [Case(test=test, stored=stored[test], header=header) for test in tests]


def looks_worse(row: Mapping[str, Any]) -> bool:
    """Return whether a row was found worse, or may be worse and could not be decided."""
    return row["finding"] == "worse" or (row["finding"] == "undecided" and bool(row["suspicious"]))


def of_functions(cases: Sequence[Case], *names: str) -> list[Case]:
    """Return the cases of test functions such as test_weak_scaling."""
    return [case for case in cases if function_of(case.test) in names]


def judged_rows(header: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the rows of a run's comparison with its base; none if it was compared with nothing."""
    found: Sequence[Mapping[str, Any]] = header.get("judged", {}).get("rows", ())
    return found


def without_file(test: str) -> str:
    return test.split("::", 1)[-1]


def all_metrics(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return each measured test, and the headings and values of all of its metrics as text."""
    found = []
    for case in cases_of(document):
        of_case = case.metrics.items()
        texts = [find_or_plain(name, metric["unit"]).text(metric["value"]) for name, metric in of_case]
        found.append((without_file(case.test), ", ".join(texts)))
    return found


def curve_points(case: Case) -> Iterator[dict[str, Any]]:
    """Yield the loss, the accuracy and the other values of BY_EPOCH for each epoch of a training.

    Each dict is one epoch with one random seed in one process set.
    """
    for measured in case.seeds:
        spec = measured.spec
        if not isinstance(spec, RunSpec):
            continue
        for sample in measured.samples:
            for epoch in range(1, spec.epochs + 1):
                stored = {name: sample.counters.get(f"{name}_{epoch}") for name in BY_EPOCH}
                # All ranks have the same losses and accuracies. Their seconds differ a little.
                figures = {name: max(ranks) for name, ranks in stored.items() if ranks}
                if figures:
                    yield {"epoch": epoch, "seed": spec.seed, "process_set": sample.set} | figures
