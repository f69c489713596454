"""Control measurements, which check that a comparison of step times can be trusted.

The negative control is a copy of memory, whose time no code change affects. The positive control is a
step with an artificial delay, which the comparison must find. The base is measured once more
after the candidate's processes have ended, because these must not disturb it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean

from ddpperf.errors import first_line
from ddpperf.results.outcomes import Reason
from ddpperf.results.samples import BASE, CANDIDATE, Measured
from ddpperf.specs import CopySpec, EpochSpec, RunSpec, TrainingSpec
from ddpperf.specs.script import ScriptSpec
from ddpperf.specs.spec import MOST_DELAY_SECONDS
from ddpperf.verdict.controls import QUIETER, shows_delay
from ddpperf.verdict.estimates import Control, Estimates, RowKey, SideValues, Stage, estimates_of
from ddpperf.verdict.noise_classes import EAGER_TOLERANCE, NoiseClass, usual_spread
from ddpperf.verdict.rows import rows
from ddpperf.verdict.settings import Limits, Settings
from ddpperf.workers.failures import SetFailure
from ddpperf.workers.pool import Pool
from ddpperf.workers.script_run import CONTROL_DELAY, CONTROL_RATIOS

# On a CPU, both buffers fit into a core's own cache, which other programs do not share. On 2 cores of an
# EPYC, process sets differed by 0.0 to 0.6% with 64 KiB, and by 0.1 to 4.8% with 1 MiB. torch copies so few
# bytes with a single thread.
CACHED_BYTES = 2**16
COPY = {
    "cpu": CopySpec(world_size=1, nbytes=CACHED_BYTES),
    "cuda": CopySpec(world_size=1, nbytes=2**28),
}
HOST_COPY = CopySpec(world_size=1, nbytes=CACHED_BYTES, memory="host")  # on GPUs: it sees slower CPU cores
CANNOT_MEASURE = (SetFailure, ValueError, OSError)
NO_STEP = Reason(
    "the positive control was not measured: no test measures a step or a call whose time is judged",
    "run a test of a training step in the same run",
)
COPY_CLASS, HOST_CLASS = NoiseClass(kind="copy"), NoiseClass(kind="host copy")
SCRIPT_CONTROL = NoiseClass(kind="script control")
DELAY_REPEATS = 2  # of the delayed step, at most
HOST = Limits(margin=0.05, tolerance=EAGER_TOLERANCE)  # the CPU's speed matters only outside of CUDA graphs


def copied(pool: Pool, device: str) -> Measured | None:
    """Time a copy of memory for comparisons with this run; None if that fails."""
    with contextlib.suppress(*CANNOT_MEASURE):
        return pool.measure(COPY[device])
    return None


def stored_copy(then: Measured | None, now: Measured | None, settings: Settings) -> list[Estimates]:
    """Return the estimates of the copies of memory in the stored run and in this run, if both have one."""
    if then is None or now is None or then.spec != now.spec:
        return []
    sides = [list(run.median_step_seconds().values())[:1] for run in (then, now)]
    control = _control(Control.STORED_COPY, sides, COPY_CLASS, settings, Stage.STORED)
    return [replace(control, run_spread=usual_spread("time", now.spec, settings))]


def measure_controls(
    pool: Pool, tests: Mapping[str, Measured], estimates: Sequence[Estimates], settings: Settings
) -> tuple[list[Estimates], list[Reason]]:
    """Make the control measurements of an A/B run.

    Returns their estimates, and a reason for each control that could not be measured.
    tests, estimates: the measurements of the tests, and the estimates of their metrics.
    """
    found: list[Estimates] = []
    step = _shortest(estimates)
    try:
        # On a CPU, other programs make all times vary, and two process sets do not tell how much.
        noise_class = step.noise_class if step is not None and settings.device == "cpu" else COPY_CLASS
        copy = pool.measure(COPY[settings.device])
        found.append(_control(Control.COPY, _by_side(copy), noise_class, settings))
        if settings.device == "cuda":
            with contextlib.suppress(*CANNOT_MEASURE):  # an older base does not know it
                host = pool.measure(HOST_COPY)
                control = _control(Control.HOST_COPY, _by_side(host), HOST_CLASS, settings)
                found.append(replace(control, limits=HOST))
        if step is not None:
            usual = tests[step.tests[0]]
            if isinstance(usual.spec, ScriptSpec):
                found.append(_delayed_in_script(usual, step, settings))
            else:
                found += _delayed(pool, usual, step, estimates, settings)
    except CANNOT_MEASURE as error:
        return found, [Reason(f"a control could not be measured: {first_line(error)}", QUIETER)]
    return found, [] if step is not None else [NO_STEP]


def _shortest(estimates: Sequence[Estimates]) -> Estimates | None:
    """Return the judged time with the smallest tolerance, of those the shortest; if possible of a step.

    A whole training run is never returned, because it would add the delay to very many steps.
    """
    by_order = {
        (not isinstance(pair.base, TrainingSpec), entry.limits.tolerance, mean(entry.base)): entry
        for entry in estimates
        if (pair := entry.key.pair) and not isinstance(pair.base, RunSpec)
        if entry.key.metric == "time" and entry.limits and not entry.missing
    }
    return by_order[min(by_order)] if by_order else None


def _delayed(
    pool: Pool, usual: Measured, step: Estimates, estimates: Sequence[Estimates], settings: Settings
) -> list[Estimates]:
    """Time a step whose candidate is delayed by its tolerance, and then the base alone.

    The base is measured without a delay in the same rounds, so that a change of the machine's speed
    since the step's own measurement cancels out. If the delay does not show, both measurements are
    repeated, at most `DELAY_REPEATS` times, and all of them count: on a busy CPU, a single one varies by
    as much as the delay.
    """
    assert step.limits is not None
    spec, delay = usual.spec_of(CANDIDATE), step.limits.tolerance * mean(_by_side(usual)[1])
    delay /= spec.steps_per_epoch if isinstance(spec, EpochSpec) else 1
    slowed = replace(spec, delay_seconds=min(MOST_DELAY_SECONDS, spec.delay_seconds + delay))
    scale, grown = mean(step.base), list[float]()
    for repeat in range(1 + DELAY_REPEATS):
        delayed = pool.measure(usual.spec, slowed)
        if repeat or {sample.set for sample in usual.samples} != {sample.set for sample in delayed.samples}:
            usual = pool.measure(usual.spec, usual.candidate_spec)
        (base, candidate), (base_again, candidate_delayed) = _by_side(usual), _by_side(delayed)
        # The ratios are of the same process sets, so what makes sets differ cancels out, too.
        pairs = zip(base, candidate, base_again, candidate_delayed, strict=True)
        grown += [scale * (slower / again) / (c / b) for b, c, again, slower in pairs]
        fixed = [scale] * len(grown)  # makes the ratios seconds again, for the table
        control = _control(Control.DELAYED, (fixed, grown), step.noise_class, settings)
        if any(shows_delay(row) for row in rows([*estimates, control], settings) if row.key == control.key):
            break
    alone = list(pool.measure_base_alone(delayed).median_step_seconds().values())
    return [control, _control(Control.BASE_ALONE, (alone, base_again), step.noise_class, settings)]


def _delayed_in_script(measured: Measured, step: Estimates, settings: Settings) -> Estimates:
    """Return the control of a script: some early steps of each run were delayed.

    The steps around them were not, so what makes runs differ cancels out.
    """
    assert step.limits is not None
    samples = measured.of(CANDIDATE).samples
    found = [mean(sample.counters[name]) for sample in samples for name in CONTROL_RATIOS]
    scale = mean(step.base)
    sides = [scale] * len(found), [scale * ratio for ratio in found]
    control = _control(Control.DELAYED, sides, SCRIPT_CONTROL, settings)
    return replace(control, limits=replace(step.limits, tolerance=CONTROL_DELAY[settings.device]))


def _by_side(measured: Measured) -> SideValues:
    """Return the median seconds of a step in each process set of the base, and of the candidate."""
    return [list(measured.of(side).median_step_seconds().values()) for side in (BASE, CANDIDATE)]


def _control(
    control: Control,
    sides: SideValues,
    noise_class: NoiseClass,
    settings: Settings,
    stage: Stage = Stage.FIRST,
) -> Estimates:
    return estimates_of(RowKey(metric="time", control=control), (), stage, sides, noise_class, settings)
