"""How figures are written: a unit that suits, names that the field uses, columns as wide as they need to be."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

METRIC_FORMATS = {
    "speedup": lambda value: f"speedup {value:.2f}x",
    "efficiency": lambda value: f"efficiency {value:.1%}",
    "speedup_over_eager": lambda value: f"{value:.2f}x eager",
    "speedup_over_ddp": lambda value: f"{value:.2f}x plain DDP",
    "images_per_second": lambda value: f"{value:,.0f} images/s",
    "cpu_seconds": lambda value: f"CPU {format_seconds(value)}",
    "launch_bound": lambda value: f"launch bound {value:.2f}x",
    "communicator_seconds": lambda value: f"communicator {value:.2f} s",
    "compile_seconds": lambda value: f"compilation {value:.1f} s",
    "capture_seconds": lambda value: f"capture {value:.2f} s",
    "step_seconds": lambda value: f"step {format_seconds(value)}",
    "epoch_seconds": lambda value: f"epoch {format_seconds(value)}",
    "loss_after_5_steps": lambda value: f"loss {value:.3f} after 5 steps",
    "communicated_bytes_per_epoch": lambda value: f"gradients {value / 1e9:.3g} GB/epoch",
    "peak_memory_bytes": lambda value: f"peak {value / 1e9:.3g} GB",
    "algbw_bytes_per_second": lambda value: f"algbw {value / 1e9:.3g} GB/s",
    "busbw_bytes_per_second": lambda value: f"busbw {value / 1e9:.3g} GB/s",
    "exposed_comm_seconds": lambda value: f"exposed {format_seconds(value)} by difference",
    "traced_exposed_comm_seconds": lambda value: f"exposed {format_seconds(value)} by trace",
    "overlap_fraction": lambda value: f"overlap {value:.0%}",
    "method_disagreement": lambda value: f"they differ by {value:.1%} of the step",
    "traced_comm_seconds": lambda value: f"communication {format_seconds(value)}",
    "comm_without_waiting_seconds": lambda value: f"{format_seconds(value)} of it without waiting",
    "traced_step_seconds": lambda value: f"of a traced step of {format_seconds(value)}",
    "replayed_comm_seconds": lambda value: f"its messages alone {format_seconds(value)}",
    "step_minus_one_device_seconds": lambda value: f"t(N) - t(1) {format_seconds(value)}",
    "bookkeeping_seconds": lambda value: f"bookkeeping {format_seconds(value)}",
    "comm_skew_seconds": lambda value: f"skew {format_seconds(value)}",
    "traced_comm_skew_seconds": lambda value: f"skew {format_seconds(value)} by trace",
    "compute_seconds": lambda value: f"compute {format_seconds(value)}",
    "copy_seconds": lambda value: f"copies {format_seconds(value)}",
    "idle_seconds": lambda value: f"idle {format_seconds(value)}",
    "gradient_busbw_bytes_per_second": lambda value: f"gradients' busbw {value / 1e9:.3g} GB/s",
    "gradient_busbw_exposed_bytes_per_second": lambda value: f"{value / 1e9:.3g} GB/s over what is exposed",
    "exposed_link_utilization": lambda value: f"{value:.1%} of the link over what is exposed",
    "link_utilization": lambda value: f"{value:.1%} of the link",
    "data_seconds": lambda value: f"data {format_seconds(value)}",
    "forward_seconds": lambda value: f"forward {format_seconds(value)}",
    "backward_seconds": lambda value: f"backward {format_seconds(value)}",
    "gradient_sync_seconds": lambda value: f"gradient sync {format_seconds(value)}",
    "optimizer_seconds": lambda value: f"optimizer {format_seconds(value)}",
    "parts_over_step": lambda value: f"together {value:.1%} of the step with marks",
    "marked_over_step": lambda value: f"which is {value:.3f} of the one without",
    "gpu_busy_share": lambda value: f"GPU busy {value:.1%}",
    "mfu": lambda value: f"MFU {value:.1%}",
    "straggler_spread": lambda value: f"stragglers {value:.1%}",
    "device_seconds_per_epoch": lambda value: f"an epoch costs {format_seconds(value)} of devices",
    "saved_seconds_per_epoch": lambda value: f"saves {format_seconds(value)}",
    "extra_device_seconds_per_epoch": lambda value: f"for {format_seconds(value)} of devices more",
    "framework_seconds": lambda value: f"{format_seconds(value)} besides its kernel",
    "speedup_of_the_fastest": lambda value: (
        f"the fastest is {value:.2f}x as fast as the backend"
    ),  # of earlier runs
    "speedup_of_the_best_other": lambda value: f"the best other is {value:.2f}x as fast as the backend",
    "latency_seconds": lambda value: f"latency {format_seconds(value)}",
    "latency_seconds_low": lambda value: f"at least {format_seconds(value)}",
    "latency_seconds_high": lambda value: f"at most {format_seconds(value)}",
    "link_bytes_per_second": lambda value: f"link {value / 1e9:.3g} GB/s",
    "link_bytes_per_second_low": lambda value: f"link at least {value / 1e9:.3g} GB/s",
    "link_bytes_per_second_high": lambda value: f"at most {value / 1e9:.3g} GB/s",
    "reduce_byte_seconds": lambda value: f"adding up {value * 1e9:.2g} s a GB",
    "reduce_byte_seconds_low": lambda value: f"at least {value * 1e9:.2g}",
    "reduce_byte_seconds_high": lambda value: f"at most {value * 1e9:.2g}",
    "ring_bytes_over_measured": lambda value: f"2 (N-1) S / N over B is {value:.2f} of the largest",
    "doubling_seconds_over_measured": lambda value: f"(S / B) log2 N {value:.2f}",
    "aggregate_bytes_over_measured": lambda value: f"2 (N-1) S over B {value:.2f}",
    "asymptotic_busbw_bytes_per_second": lambda value: f"busbw of large buffers {value / 1e9:.3g} GB/s",
    "asymptotic_busbw_bytes_per_second_low": lambda value: f"at least {value / 1e9:.3g}",
    "asymptotic_busbw_bytes_per_second_high": lambda value: f"at most {value / 1e9:.3g}",
    "protocols": lambda value: count(round(value), "protocol"),
    "held_out_error": lambda value: f"half of the sizes left out are predicted within {value:.1%}",
    "excess_seconds": lambda value: f"{format_seconds(value)} longer than on one device",
    "plain_excess_seconds": lambda value: f"if it stayed the same {format_seconds(value)}",
    "projection_error": lambda value: f"projected {value:+.1%} off",
    "serial_share": lambda value: f"serial share {value:.1%}",
    "serial_share_low": lambda value: f"at least {value:.1%}",
    "serial_share_high": lambda value: f"at most {value:.1%}",
    "largest_batch_size": lambda value: f"{value:.0f} images fit",
    "train_loss": lambda value: f"train loss {value:.3f}",
    "train_accuracy": lambda value: f"train accuracy {value:.1%}",
    "test_loss": lambda value: f"test loss {value:.3f}",
    "test_accuracy": lambda value: f"test accuracy {value:.2%}",
    "test_accuracy_low": lambda value: f"at least {value:.1%}",
    "test_accuracy_high": lambda value: f"at most {value:.1%}",
    "best_test_accuracy": lambda value: f"best {value:.2%}",
    "loading_share": lambda value: f"loading {value:.1%}",
    "enough_workers": lambda value: f"loading stops limiting at {count(round(value), 'worker')}",
    "missing_images": lambda value: f"{count(round(value), 'image')} missing",
    "repeated_images": lambda value: f"{value:.0f} repeated",
    "repeated_places": lambda value: f"{value:.1%} in the same place next epoch",
}


def count(number: int, what: str) -> str:
    """1 set, 2 sets."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def short(test: str) -> str:
    """A test's id without its file."""
    return test.split("::", 1)[-1]


def format_metric(name: str, value: float, unit: str = "") -> str:
    """A metric's value with its name, or what it is usually called."""
    if name in METRIC_FORMATS:
        return METRIC_FORMATS[name](value)
    if match := re.fullmatch(r"loading_share_with_(\d+)_workers", name):
        return f"loading {value:.1%} with {count(int(match[1]), 'worker')}"
    if match := re.fullmatch(
        r"(start_)?(gradients|buffers|parameters|metrics|control|initial_state|other)_(bytes|messages)", name
    ):
        if match[3] == "messages":
            return f"in {count(round(value), 'message')}"
        return f"{'at the start ' if match[1] else ''}{match[2].replace('_', ' ')} {format_bytes(value)}"
    if match := re.fullmatch(r"accuracy_(\w+?)(_low|_high)?", name):
        said = (
            f"accuracy {match[1].replace('_', ' ')} "
            if not match[2]
            else f"at {'least' if match[2] == '_low' else 'most'} "
        )
        return f"{said}{value:+.1%}"
    if match := re.fullmatch(r"(step_seconds|images_per_second|peak_memory_bytes)_at_(\d+)", name):
        said = {
            "s": format_seconds(value),
            "1/s": f"{value:,.0f} images/s",
            "B": f"peak {value / 1e9:.3g} GB",
        }[unit]
        return f"{match[2]} images: {said}" if unit == "s" else said
    if match := re.fullmatch(r"predicted_over_measured_(\w+)", name):
        return f"{match[1]} predicted {value:.2f}x its time"
    if match := re.fullmatch(r"(\w+)_over_backend", name):
        return f"{match[1]} {value:.2f}x the backend's time"
    if match := re.fullmatch(r"projected_(excess|efficiency)_on_(\d+)(_low|_high)?", name):
        if match[1] == "efficiency":
            return f"efficiency {value:.1%} on {match[2]}"
        said = {"_low": "at least", "_high": "at most"}.get(match[3], f"projected on {match[2]} devices")
        return f"{said} {format_seconds(value)}"
    if match := re.fullmatch(r"(predicted_)?speedup_of_(\d+)", name):
        return f"{'by the law' if match[1] else f'on {match[2]} devices'} {value:.2f}x"
    return f"{name} {value:.4g} {unit}"


def aligned(rows: Sequence[tuple[str, ...]], figures: Collection[int]) -> list[str]:
    """Columns as wide as their widest cell: words to the left, the columns of `figures` to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            case.rjust(width) if column in figures else case.ljust(width)
            for column, (case, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def format_bytes(nbytes: float) -> str:
    """As nccl-tests counts them, by powers of ten: 46.76 MB, 38.56 KB, 4 B."""
    unit, scale = next(
        ((unit, scale) for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)) if nbytes >= scale),
        ("B", 1),
    )
    return f"{nbytes / scale:.4g} {unit}"


def format_seconds(seconds: float) -> str:
    """Four significant digits in the unit that suits: 1.234 s, 132.1 ms, 45.60 us."""
    units = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
    unit, scale = next((each for each in units if abs(seconds) >= each[1]), units[-1])
    value = seconds / scale
    return f"{value:.0f} {unit}" if abs(value) >= 1000 else f"{value:#.4g} {unit}".replace(". ", " ")
