"""The numbers of a run: one table of what a record of metrics.jsonl may have, with units and meanings.

`workers/planning.py` and the loop fill records; the report's charts and docs/monitor.md take their words from here. A
loop may log further numbers under names of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Metric:
    """A number, or a word, of one step. `unit` is "" for counts, shares and words."""

    name: str
    unit: str
    meaning: str


METRICS: Final = (
    Metric("step", "", "the step's number, as the loop counts"),
    Metric("wall_time", "s", "when the step ended, since 1970"),
    Metric("at_s", "s", "the same on the machine's monotonic clock"),
    Metric("step_s", "s", "from the end of the step before to the end of this one"),
    Metric("predicted_step_s", "s", "what the planner expects of such a step; null until it has measured enough"),
    Metric("stall_s", "s", "how long forward and backward waited for weights, or for memory"),
    Metric("cpu_busy_s", "s", "how long the CPU updated in the step before"),
    Metric("gather_s", "s", "all-gathers of FSDP2; with several ranks"),
    Metric("rank", "", "the rank in the job; with several ranks"),
    Metric("threads", "", "threads of the optimizer"),
    Metric("k", "", "share of the parameters that the GPU owns"),
    Metric("gpu_layers", "", "layers that the GPU owns"),
    Metric("visiting_layers", "", "layers whose state visits the GPU"),
    Metric("streamed_layers", "", "layers whose weights rest in host memory"),
    Metric("moved", "", "layers that have moved since training began"),
    Metric("reason", "", "why the plan was made that takes effect in this step; other steps have none"),
    Metric("policy", "", "how the planner decides"),
    Metric("objective", "", "what it optimizes"),
    Metric("mode", "", "speculate: the CPU updates ahead of the norm; defer: after it; null: there is none"),
    Metric("state_dtype", "", "dtype of the moments"),
    Metric("master_dtype", "", "dtype of the masters of bf16 weights"),
    Metric("gpu_peak_bytes", "byte", "torch's peak on the GPU so far; null without a GPU"),
    Metric(
        "gpu_used_bytes",
        "byte",
        "of the GPU's memory, by all programs; like the next three, as read in the last second",
    ),
    Metric("gpu_utilization", "", "share of the time in which the GPU ran something, as NVML tells"),
    Metric("gpu_watts", "W", "mean power of the GPU since the reading before"),
    Metric("host_watts", "W", "the same of the host's processors, if Linux lets the coordinator read it"),
    Metric("predicted_gpu_bytes", "byte", "the peak that the planner expects; null without a GPU"),
    Metric("predicted_host_bytes", "byte", "host memory for planes and processes that it expects"),
    Metric("missing_records", "", "records before this one that a full disk has cost"),
    Metric(
        "skipped_steps", "", "steps that were skipped so far, as their gradients were not finite; if steps are skipped"
    ),
    Metric("steps", "", "how many steps the run is to have; of recipes"),
    Metric("remaining_s", "s", "until the run ends, at the mean pace since it was started; of recipes"),
    Metric("loss", "nat", "training loss per token, or what the loop logs under this name"),
    Metric("lr", "", "learning rate"),
    Metric("grad_norm", "", "norm of all gradients, before clipping; null if it was not finite"),
    Metric("loss_scale", "", "scale of the loss"),
    Metric("tokens_per_s", "1/s", "tokens per second"),
    Metric("tflops", "TFLOP/s", "of the model, without what checkpointing computes again"),
    Metric("mfu", "", "the same as a share of the GPU's peak"),
    Metric("validation_loss", "nat", "validation loss per token"),
    Metric("validation_nats_per_byte", "nat", "validation loss per byte of text"),
    Metric("validation_accuracy", "", "share of validation tokens that were predicted right"),
    Metric("diverged_at", "", "the step in which training was seen to diverge"),
)
BY_NAME: Final = {metric.name: metric for metric in METRICS}
