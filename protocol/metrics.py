"""The numbers of a run: one table of what a record of metrics.jsonl may have, with units and meanings.

`workers/planning/planning.py` and the loop fill records; report, web page, Prometheus and docs take their words from
here. A loop may log further numbers under names of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Metric:
    """A number, or a word, of one step. `unit` is "" for counts, shares and words.

    `prometheus` is the name with Prometheus's base units; "" for what is not exported. Counters end in `_total`.
    """

    name: str
    unit: str
    meaning: str
    prometheus: str = ""


METRICS: Final = (
    Metric("step", "", "the step's number, as the loop counts", "hytrain_step"),
    Metric("wall_time", "s", "when the step ended, since 1970", "hytrain_last_step_timestamp_seconds"),
    Metric("at_s", "s", "when the step ended, on the machine's monotonic clock"),
    Metric("step_s", "s", "from the end of the step before to the end of this one", "hytrain_step_seconds"),
    Metric(
        "predicted_step_s",
        "s",
        "what the planner expects of such a step; null until it has measured enough",
        "hytrain_predicted_step_seconds",
    ),
    Metric("stall_s", "s", "how long forward and backward waited for weights, or for memory", "hytrain_stall_seconds"),
    Metric("cpu_busy_s", "s", "how long the CPU updated in the step before", "hytrain_cpu_busy_seconds"),
    Metric(
        "starved",
        "",
        "share of the layers at the end of whose backward the GPU waited for launches: the host is the limit",
        "hytrain_starved_ratio",
    ),
    Metric(
        "unexplained_s",
        "s",
        "what a step shortly before took beyond layers' times and expected waits: the loop's work, and late updates",
        "hytrain_unexplained_seconds",
    ),
    Metric("gather_s", "s", "time in FSDP2's all-gathers; with several ranks", "hytrain_gather_seconds"),
    Metric("rank", "", "the rank in the job; with several ranks"),
    Metric("threads", "", "threads of the optimizer", "hytrain_optimizer_threads"),
    Metric("k", "", "share of the parameters that the GPU owns", "hytrain_k_ratio"),
    Metric("gpu_layers", "", "layers that the GPU owns", "hytrain_gpu_layers"),
    Metric("visiting_layers", "", "layers whose state visits the GPU", "hytrain_visiting_layers"),
    Metric("offloaded_layers", "", "layers whose weights rest in host memory", "hytrain_offloaded_layers"),
    Metric("to_device_bytes", "byte", "copied in the step to the trainer's device", "hytrain_to_device_bytes"),
    Metric("to_host_bytes", "byte", "copied in the step to host memory", "hytrain_to_host_bytes"),
    Metric("moved", "", "layers that have moved since training began", "hytrain_moved_layers_total"),
    Metric(
        "evicted_bytes",
        "byte",
        "state that left the GPU at once because its memory was needed, since training began; once there is some",
        "hytrain_evicted_bytes_total",
    ),
    Metric("evict_s", "s", "how long that took; only in steps in which state left", "hytrain_evict_seconds"),
    Metric(
        "reason",
        "",
        "why the plan was made that takes effect in this step, or why state left the GPU; only in such steps",
    ),
    Metric("policy", "", "how the planner decides"),
    Metric("objective", "", "what it optimizes"),
    Metric("mode", "", "speculate: the CPU updates ahead of the norm; defer: after it; null: there is none"),
    Metric("state_dtype", "", "dtype of the moments"),
    Metric("master_dtype", "", "dtype of the masters of bf16 weights"),
    Metric("gpu_peak_bytes", "byte", "torch's peak on the GPU so far; null without a GPU", "hytrain_gpu_peak_bytes"),
    Metric(
        "gpu_used_bytes",
        "byte",
        "GPU memory used by all programs; like the next three, read within the last second",
        "hytrain_gpu_used_bytes",
    ),
    Metric(
        "gpu_utilization",
        "",
        "share of the time in which the GPU ran something, from NVML",
        "hytrain_gpu_utilization_ratio",
    ),
    Metric("gpu_watts", "W", "mean power of the GPU since the previous reading", "hytrain_gpu_power_watts"),
    Metric(
        "host_watts",
        "W",
        "mean power of the host's processors since the previous reading, if Linux lets the coordinator read it",
        "hytrain_host_power_watts",
    ),
    Metric(
        "predicted_gpu_bytes",
        "byte",
        "the peak that the planner expects; null without a GPU",
        "hytrain_predicted_gpu_bytes",
    ),
    Metric(
        "predicted_host_bytes",
        "byte",
        "host memory for planes, activations and processes that the planner expects",
        "hytrain_predicted_host_bytes",
    ),
    Metric("missing_records", "", "records before this one that were lost because the disk was full"),
    Metric(
        "skipped_steps",
        "",
        "steps skipped since training began because gradients were not finite; if steps wait for their norm",
        "hytrain_skipped_steps_total",
    ),
    Metric("steps", "", "how many steps the run will have; recipes only", "hytrain_planned_steps"),
    Metric(
        "remaining_s",
        "s",
        "time until the run ends, at its mean pace since the start; recipes only",
        "hytrain_remaining_seconds",
    ),
    Metric("loss", "nat", "training loss per token, or what the loop logs under this name", "hytrain_loss_nats"),
    Metric("lr", "", "learning rate", "hytrain_learning_rate"),
    Metric(
        "grad_norm", "", "norm of all gradients, before clipping; null if it was not finite", "hytrain_gradient_norm"
    ),
    Metric("loss_scale", "", "scale of the loss", "hytrain_loss_scale"),
    Metric("tokens_per_s", "1/s", "tokens per second", "hytrain_tokens_per_second"),
    Metric("tokens", "", "tokens of the step, on all ranks; recipes only", "hytrain_step_tokens"),
    Metric("tflops", "TFLOP/s", "of the model, without recomputation"),
    Metric("mfu", "", "FLOP/s of the model as a share of the GPU's peak", "hytrain_mfu_ratio"),
    Metric("validation_loss", "nat", "validation loss per token", "hytrain_validation_loss_nats"),
    Metric("validation_nats_per_byte", "nat", "validation loss per byte of text", "hytrain_validation_nats_per_byte"),
    Metric(
        "validation_accuracy",
        "",
        "share of validation tokens that were predicted right",
        "hytrain_validation_accuracy_ratio",
    ),
    Metric("diverged_at", "", "the step in which training diverged", "hytrain_diverged_step"),
)
BY_NAME: Final = {metric.name: metric for metric in METRICS}
#: What records were named before.
RENAMED: Final[dict[str, str]] = {"streamed_layers": "offloaded_layers"}


def records(lines: Iterable[bytes | str]) -> Iterator[dict[str, Any]]:
    """Those of lines, of this version or an earlier one, but for what a crash or the middle of a file has cut off."""
    for line in lines:
        with suppress(ValueError):
            if isinstance(record := json.loads(line), dict):
                yield {RENAMED[name] if name in RENAMED else name: value for name, value in record.items()}
