"""Result sets into docs/benchmarks.md: the goals and tables between markers, and pictures.

    python -m benchmarks.report [--results DIR...]

    DIR/rows*.jsonl, DIR/kernel*.json ─▶ GOALS, TABLES ─▶ <!-- begin: NAME --> … <!-- end: NAME -->
                                      └▶ pictures ─▶ docs/pictures/bench-*.png

Everything between markers is written anew from the rows; the rest of the page stays as it is. A ratio is of two
medians of one host and commit. What was not measured is said to be missing. `suite` prints `one_host`.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from benchmarks import columns as col
from benchmarks import several
from benchmarks.columns import MISSING, NOTHING, computed, last, markdown, median, number, of, relative, share, table
from benchmarks.goals import HEAD, Goal, Judge, NotMeasured, judged, known
from benchmarks.idle import CAUSES
from benchmarks.parts import (
    ALWAYS_CLIPPED,
    AUTO,
    EAGER,
    EXPERTS,
    FIRST,
    LEAN,
    MUON,
    NEVER_CLIPPED,
    NO_CLIPPING,
    OFFLOADED,
    ONE_BY_ONE,
    PARK,
    RANDOM,
    ROAMING,
    SAVING,
    SFT,
    UNWATCHED,
    UNWATCHED_AGAIN,
    WATCHED,
    WEIGHTLESS,
)
from benchmarks.rows import Rows, is_steady, pair, ratio

RESULTS: Final = Path(__file__).resolve().with_name("results")
PAGE: Final = RESULTS.parent.parent / "docs" / "benchmarks.md"
SAME: Final = 0.01  # two step times count as the same if they differ by no more than this
REACHED_STEPS: Final = 20
_BLOCK: Final = re.compile(r"(<!-- begin: ([\w-]+) -->\n).*?(<!-- end: \2 -->)", re.DOTALL)


# ---------------------------------------------------------------- goals


def in_both(above: str, below: str, time_bar: float, memory_bar: float, *, batch: int = 8) -> Judge:
    """Step time and GPU memory, each compared with another system's."""

    def judge(here: Rows) -> tuple[str, bool]:
        time, memory = (known(here.ratio(above, below, batch, each)) for each in ("step_s", "gpu_peak_gb"))
        return f"{time:.3f} at {share(memory)}", time <= time_bar and memory <= memory_bar

    return judge


def compared(part: str, above: str, below: str, *, at_most: float = 0, at_least: float = 0, batch: int = 8) -> Judge:
    """The ratio of two step times on the host that measured this part. One of the bars is given."""

    def judge(rows: Rows) -> tuple[str, bool]:
        here = rows.where(batch=batch).of_part(part).beside(rows)
        if error := here.named(above, batch).error():
            raise NotMeasured(f"failed: {error}")
        value = known(here.ratio(above, below, batch))
        return (f"{value:.3f}", value <= at_most) if at_most else (f"{value:.2f} ×", value >= at_least)

    return judge


def near_the_best_static(rows: Rows) -> tuple[str, bool]:
    """The planner's k compared with the best of the sweep, ten steps after a cold start and at rest."""
    sweep = rows.of_part("sweep")
    medians = (sweep.where(label=label).median("step_s") for label in ("auto from the start", "auto"))
    cold, rest = (known(ratio(step_s, sweep.best_static())) for step_s in medians)
    return f"{cold:.3f} in steps 11 to 20, {rest:.3f} at rest", cold <= 1.05


def follows_the_threads(rows: Rows) -> tuple[str, bool]:
    texts, met = [], True
    for label in ("halved", "given back"):
        steps, before, after = known(rows.of_part("threads").reaction(label))
        texts.append(f"{label}: k {before:.2f} to {after:.2f}, step {steps}")
        met = met and steps <= REACHED_STEPS and before != after
    return "; ".join(texts), met


def prediction_error(rows: Rows) -> tuple[str, bool]:
    """The worst prediction among steady rows; the other rows are reported and do not count."""
    off: dict[bool, list[float]] = {True: [], False: []}
    for row in rows.predicted():
        off[is_steady(row)].append(abs(row["predicted_step_s"] / row["step_s"] - 1))
    worst = known(max(off[True], default=None))
    others = f"; {share(max(off[False]))} in {len(off[False])} that were not steady" if off[False] else ""
    return f"at worst {share(worst)} off in {len(off[True])} rows{others}", worst <= 0.1


def against_formulas(rows: Rows) -> tuple[str, bool]:
    """`deadline` compared with `balance` and `cotrain` at each batch size: the worst ratio of step times, and GPU
    memory compared with those of them that are as fast.
    """
    ratios, less, more, alike = list[float](), 0, 0, 0
    for here in rows.of_part("policies").by("batch"):
        ours, others = here.where(label="deadline"), here.where(label=("balance", "cotrain"))
        time, memory = ours.median("step_s"), ours.median("gpu_peak_gb") or 0.0
        if time is None or not others.values("step_s"):
            continue
        ratios.append(time / min(others.values("step_s")))
        if as_fast := [row["gpu_peak_gb"] for row in others if row.get("step_s", 2 * time) <= (1 + SAME) * time]:
            alike += 1
            less += memory < min(as_fast)
            more += memory > (1 + SAME) * min(as_fast)
    worst = known(max(ratios, default=None))
    memory_text = f"less GPU memory at {less} of {alike} batch sizes where one of them is as fast, more at {more}"
    return f"at worst {worst:.3f}; {memory_text}", worst <= 1 + SAME and more == 0


def idle_share(rows: Rows) -> tuple[str, bool]:
    idle = known(rows.of_part("idle").where(system=AUTO).last("idle") or None)["share"]
    return share(idle), idle <= 0.03


def same_bits(rows: Rows) -> tuple[str, bool]:
    """Equal checksums of all weights, however much overlapped and whoever owned the layers."""
    digests = [known(row.get("digest")) for row in rows.of_part("identical")]
    if len(digests) < 2:
        raise NotMeasured
    same = len(set(digests)) == 1
    return f"{len(digests)} runs, {'the same bits' if same else 'different bits'}", same


def watched(rows: Rows) -> tuple[str, bool]:
    """A step with 50 monitors, by the mean of those without before and after; and how far these two differ."""
    here = rows.of_part("monitors")
    before, beside, after = (
        known(here.where(label=label).median("step_s")) for label in (UNWATCHED, WATCHED, UNWATCHED_AGAIN)
    )
    value = 2 * beside / (before + after)
    return f"{value:.4f}; without, before and after differ by {share(abs(after / before - 1), 2)}", value <= 1.005


def routed(rows: Rows) -> tuple[str, bool]:
    """Experts: how many times as fast as ZeRO-2 offload, of the models that both have trained."""
    names = (f"deepspeed-zero2 {EXPERTS}", f"{AUTO} {EXPERTS}")
    found = {mine.last("shape"): mine.ratio(*names) for mine in rows.of_part("experts").by("shape")}
    faster = {shape: value for shape, value in found.items() if value is not None}
    least = known(min(faster.values(), default=None))
    return ", ".join(f"{value:.2f} × ({shape})" for shape, value in faster.items()), least >= 2.0


def saved_with(field: str, bar: float, write: Callable[[float | None], str]) -> Judge:
    """What a save beside training costs."""

    def judge(rows: Rows) -> tuple[str, bool]:
        here = rows.of_part("saving").named(f"{AUTO} {SAVING}")
        if error := here.error():
            raise NotMeasured(f"failed: {error}")
        value = known(here.median(field))
        return write(value), value <= bar

    return judge


# fmt: off
GOALS: Final = (
    Goal("batch 8: step / no offload, GPU memory / no offload", "≤ 1.00 at ≤ 40 %",
         in_both(AUTO, "no-offload", 1.0, 0.4), each_host=True),
    Goal("batch 8: step / HyTrain with k = 1, all on the GPU", "≤ 1.01",
         compared("main", AUTO, "hytrain:1", at_most=1.01)),
    Goal("batch 8: step / forward and backward only", "≤ 1.06",
         compared("main", AUTO, "forward-backward", at_most=1.06)),
    Goal("faster than torchao, fp32", "≥ 2.2 ×", compared("peers", "torchao-fp32", AUTO, at_least=2.2), each_host=True),
    Goal("faster than DeepSpeed ZeRO-2 offload", "≥ 3.0 ×",
         compared("peers", "deepspeed-zero2", AUTO, at_least=3.0), each_host=True),
    Goal("faster than FSDP2 CPU offload", "≥ 3.4 ×", compared("peers", "fsdp2", AUTO, at_least=3.4), each_host=True),
    Goal("batch 1: step / no offload, GPU memory / no offload", "≤ 1.10 at ≤ 75 %",
         in_both(AUTO, "no-offload", 1.1, 0.75, batch=1), each_host=True),
    Goal("batch 1: faster than torchao, fp32", "≥ 5 ×",
         compared("batches", "torchao-fp32", AUTO, at_least=5.0, batch=1)),
    Goal(f"{LEAN[15.5]}: step / no offload, GPU memory / no offload", "≤ 1.00 at ≤ 25 %",
         in_both(f"{ROAMING} {LEAN[15.5]}", "no-offload", 1.0, 0.25), each_host=True),
    Goal(f"{LEAN[14.0]}: both / bitsandbytes' 8-bit AdamW, which is not exact", "≤ 1.00 at ≤ 65 %",
         in_both(f"{ROAMING} {LEAN[14.0]}", "bnb-8bit", 1.0, 0.65), each_host=True),
    Goal(f"{LEAN[15.5]}: both / torch's AdamW on bf16 parameters, which is not exact", "≤ 1.02 at ≤ 55 %",
         in_both(f"{ROAMING} {LEAN[15.5]}", "torch-bf16", 1.02, 0.55), each_host=True),
    Goal("weights in host memory: step, GPU memory / the same with weights on the GPU", "≤ 1.03 at ≤ 100 %",
         in_both(OFFLOADED, AUTO, 1.03, 1.0), each_host=True),
    Goal("the planner's step / the best static k's, within 10 steps", "≤ 1.05", near_the_best_static),
    Goal("threads halved, then given back: k moves, within 10 % of the new best", "within 20 steps",
         follows_the_threads),
    Goal("predicted / measured step time in steady state", "within 10 %", prediction_error),
    Goal("deadline / the better of balance and cotrain, batch 1 to 16", "≤ 1.01, less memory", against_formulas),
    Goal("GPU idle at batch 8", "≤ 3 %", idle_share, each_host=True),
    Goal("overlapped or not, 200 steps", "the same bits", same_bits),
    Goal("max_grad_norm, never clipped: step / the step without it", "≤ 1.02",
         compared("clipping", f"{AUTO} {NEVER_CLIPPED}", f"{AUTO} {NO_CLIPPING}", at_most=1.02)),
    Goal("max_grad_norm, always clipped: step / the step without it", "≤ 1.03",
         compared("clipping", f"{AUTO} {ALWAYS_CLIPPED}", f"{AUTO} {NO_CLIPPING}", at_most=1.03)),
    Goal("max_grad_norm, always clipped: faster than ZeRO-2 that clips, too", "≥ 1.5 ×",
         compared("clipping", f"deepspeed-zero2 {ALWAYS_CLIPPED}", f"{AUTO} {ALWAYS_CLIPPED}", at_least=1.5)),
    Goal("Muon: step / no offload, GPU memory / no offload", "≤ 1.05 at ≤ 50 %",
         in_both(MUON, "no-offload-muon", 1.05, 0.5), each_host=True),
    Goal("a mixture of experts: times as fast as ZeRO-2 offload", "≥ 2 ×", routed),
    Goal("50 monitors, 25 of them stopped: step / the step without", "≤ 1.005", watched),
    Goal("a save beside training: stalls / the save's duration", "≤ 10 %", saved_with("save_stall_share", 0.1, share)),
    Goal("a save beside training: more host memory", "≤ 1 GB",
         saved_with("save_host_gb", 1.0, lambda value: f"{number(value, 2)} GB")),
    Goal("a saved state: bytes per parameter", "≤ 14.2", saved_with("disk_bytes_per_parameter", 14.2, number)),
)
# fmt: on
KERNEL_GOALS: Final = {"native / stream": 0.9, "native / DeepSpeed's operator with casts": 1.3}


def goals(rows: Rows, kernel: dict[str, float]) -> str:
    """Each goal, its bar, what was measured, and whether it is met. `kernel`: `benchmarks.kernel`'s summary."""
    body = judged(GOALS, rows)
    for what, bar in KERNEL_GOALS.items():
        rate = next((value for name, value in kernel.items() if name.startswith(what)), None)
        met = MISSING if rate is None else "yes" if rate >= bar else "**no**"
        body.append((f"CPU kernel: {what}", f"≥ {bar}", "not measured" if rate is None else f"{rate:.2f}", met))
    return markdown(HEAD, body)


# ---------------------------------------------------------------- tables


def one_host(rows: Rows) -> str:
    """Every system at each batch size and label compared with no offload, on one host: medians over repeats."""

    def to_no_offload(mine: Rows) -> float | None:
        same_update = "no-offload-muon" if "-muon" in mine.last("system") else "no-offload"
        base = rows.where(system=same_update, batch=mine.last("batch"))
        return ratio(mine.median("step_s"), base.median("step_s"))

    named = ("system", lambda mine: f"{mine.last('system')} {mine.last('label')}".strip())
    speed = (col.STEP, computed("relative to no offload", to_no_offload), median("TFLOP/s", "tflops", 0))
    exact = last("exact fp32 AdamW?", "exact")
    return table(rows.by("system", "batch", "label"), named, col.BATCH, col.K, *speed, *col.MEMORY, exact)


def systems(rows: Rows) -> str:
    """The main part, the peers' and what is lean at batch 8: a table for each host that measured some of them."""
    parts = [part for part in rows.distinct("part") if part in ("main", "peers", "lean")]
    found = []
    for there in Rows(row for part in parts for row in rows.of_part(part)).by_host():
        wanted = (*there.distinct("system"), "no-offload", AUTO)
        mine = rows.where(**pair(there), system=wanted, batch=8, label=("", *LEAN.values()))
        found.append(f"Host {there.last('host')}, commit {there.last('commit')}:\n\n" + one_host(mine))
    return "\n\n".join(found) or NOTHING


def hosts(rows: Rows) -> str:
    """The main part on each host: the CPU's rate while it trains, and the planner's choice."""

    def rate(here: Rows) -> str:
        rate = ratio(*(here.named("hytrain:0").median(field) for field in ("parameters", "cpu_busy_s")))
        return number(None if rate is None else rate / 1e9, 1)

    def relative(here: Rows, field: str = "step_s") -> float | None:
        return here.ratio(AUTO, "no-offload", field=field)

    lines = [here for here in rows.where(part="main").by_host() if relative(here)]
    time = computed("s/step relative to no offload", relative)
    memory = computed("GPU memory relative to no offload", lambda here: relative(here, "gpu_peak_gb"), share)
    return table(lines, *col.HOST, ("CPU, Gparam/s", rate), of("k", AUTO, "k", 2), time, memory)


def sweep(rows: Rows) -> str:
    """Static k and the planner's in one process."""
    lines = rows.of_part("sweep").by("label")
    best = min((value for mine in lines if (value := mine.median("step_s"))), default=None)

    def asked(mine: Rows) -> str:
        label: str = mine.last("label")
        return f"**{label}**" if label.startswith("auto") else label

    k, to_best = median("k, in whole layers", "k", 3), lambda mine: ratio(mine.median("step_s"), best)
    speed = (col.STEP, computed("relative to the best", to_best), col.PREDICTED)
    return table(lines, ("asked for", asked), k, *speed, *col.MEMORY)


def policies(rows: Rows) -> str:
    lines = sorted(rows.of_part("policies").by("batch", "label"), key=lambda mine: mine.last("batch"))
    return table(lines, col.BATCH, last("policy", "label"), *col.PLAN)


def objectives(rows: Rows) -> str:
    return table(rows.of_part("objectives").by("label"), last("objective", "label"), *col.PLAN)


def batches(rows: Rows) -> str:
    """Batch sizes, each on the host that measured it: HyTrain between no offload and no update at all."""
    sizes = sorted(rows.where(part="batches").distinct("batch"))
    names = {"HyTrain": AUTO, "no offload": "no-offload", "forward + backward": "forward-backward"}

    def to_no_offload(here: Rows, field: str = "step_s") -> float | None:
        return here.ratio(AUTO, "no-offload", here.last("batch"), field)

    return table(
        [rows.where(batch=size).of_part("batches") for size in sizes],
        *(col.BATCH, col.HOST[0], of("k", AUTO, "k", 2)),
        *(of(f"{name} s/step", system, "step_s", 4) for name, system in names.items()),
        of("torchao fp32 s/step", "torchao-fp32", "step_s", 4),
        computed("HyTrain / no offload", to_no_offload),
        *(of(f"{name} GPU GB", names[name], "gpu_peak_gb", 1) for name in ("HyTrain", "no offload")),
        computed("GPU memory / no offload", lambda here: to_no_offload(here, "gpu_peak_gb"), share),
    )


def threads(rows: Rows) -> str:
    """Each moment of the threads part, and how long the run took to get near the best static k."""
    here = rows.of_part("threads")

    def near(mine: Rows) -> str:
        found = here.reaction(mine.last("label"))
        return f"step {found[0]}" if found else MISSING

    return table(here.by("label"), last("moment", "label"), *col.PLAN[:3], ("within 10 % of the best from", near))


def prediction(rows: Rows) -> str:
    """Predicted and measured, wherever the planner's default policy was at rest."""
    what = ("setting", lambda mine: mine.last("label") or "auto")
    quotient = computed("predicted / measured", lambda mine: ratio(mine.last("predicted_step_s"), mine.last("step_s")))
    steady = ("steady", lambda mine: "yes" if is_steady(mine[-1]) else "no")
    times = (col.PREDICTED, median("measured s/step", "step_s", 4), quotient, median("stall s", "stall_s", 4))
    return table(rows.predicted().each(), last("part", "part"), col.BATCH, what, col.K, *times, steady)


def idle(rows: Rows) -> str:
    """The GPU's idle share by cause, on each host, with HyTrain's own measure of its stalls."""

    def of_cause(cause: str) -> Callable[[Rows], str]:
        return lambda mine: share((mine.last("idle") or {}).get(cause), 2)

    def in_all(mine: Rows) -> str:
        return f"failed: {mine.error()}" if mine.error() else of_cause("share")(mine)

    def stalls(mine: Rows) -> str:
        return share(ratio(mine.last("stall_s"), mine.last("step_s")), 2)

    columns = (*col.HOST, col.SYSTEM, col.K, ("idle", in_all), *((cause, of_cause(cause)) for cause in CAUSES))
    return table(rows.where(part="idle").each(), *columns, ("stalls as HyTrain measures them", stalls))


def launches(rows: Rows) -> str:
    """Eager and compiled blocks at each batch size: the host's time for a step, the GPU's, and late launches."""
    here = rows.of_part("launches")

    def seen(name: str, write: Callable[[float | None], str]) -> Callable[[Rows], str]:
        return lambda mine: write((mine.last("idle") or {}).get(name))

    to_eager = relative(here, "batch", system="no-offload", label=EAGER)
    speed = (col.K, col.STEP, computed("relative to no offload, eager", to_eager))
    host = (median("the call returns after, s", "call_s", 4),)
    gpu = (
        ("kernels per step", seen("kernels", lambda value: number(value, 0))),
        ("GPU busy, s", seen("busy_s", lambda value: number(value, 4))),
        ("idle", seen("share", share)),
        ("idle for late launches", seen("launch", share)),
    )
    lines = sorted(here.by("batch", "label", "system"), key=lambda mine: mine.last("batch"))
    return table(lines, col.BATCH, col.SYSTEM, last("blocks", "label"), *speed, *host, *gpu, col.MEMORY[0])


def compiled(rows: Rows) -> str:
    """Steps so short that launches are what takes time, eager and compiled, beside torch's own AdamW."""
    here = rows.of_part("compiled")
    lines = sorted(here.by("label", "batch", "system"), key=lambda mine: (mine.last("label"), mine.last("batch")))
    to_torch = computed("relative to torch-bf16", relative(here, "label", "batch", system="torch-bf16"))
    return table(lines, col.BATCH, col.SYSTEM, last("model", "label"), col.K, col.STEP, to_torch, col.MEMORY[0])


def clipping(rows: Rows) -> str:
    here = rows.of_part("clipping")
    to_base = computed("relative to no clipping", relative(here, system=AUTO, label=NO_CLIPPING, batch=8))
    return table(here.by("label", "system"), col.SYSTEM, last("the global norm is", "label"), *col.PLAN, to_base)


def updates(rows: Rows) -> str:
    """When updates begin, relative to no offload at the same batch size on the same host."""
    here = rows.where(part="updates")
    to_base = [
        computed(head, relative(here, "batch", "host", field=field, system="no-offload"))
        for head, field in (("of no offload's time", "step_s"), ("of its memory", "gpu_peak_gb"))
    ]
    return table(
        here.by("host", "commit", "batch", "label", "system"),
        last("host", "host"),
        last("commit", "commit"),
        col.BATCH,
        col.SYSTEM,
        last("loop", "label"),
        *col.PLAN,
        *to_base,
    )


def sft(rows: Rows) -> str:
    """Fine-tuning under the Trainer: torch's AdamW and HyTrain's."""
    here = rows.of_part("sft")
    to_base = computed(f"relative to {SFT[0]}", relative(here, system=SFT[0]))

    def rate(mine: Rows) -> str:
        tokens = mine.last("batch") * mine.last("sequence")
        return number(ratio(tokens, mine.median("step_s")), 0)

    speed = (col.K, col.STEP, to_base, ("tokens/s", rate))
    told = (last("exact fp32 AdamW?", "exact"), median("loss, last 10 steps", "loss", 3))
    return table(here.by("system"), col.SYSTEM, *speed, *col.MEMORY, *told)


def saving(rows: Rows) -> str:
    """A save of the whole state beside training, and loading it again."""

    def loaded(mine: Rows) -> str:
        error = mine.last("resume_error")
        return f"failed: {error}" if error else number(mine.median("resume_s"), 1)

    def restored(mine: Rows) -> str:
        return {True: "yes", False: "**no**", None: MISSING}[mine.last("restored")]

    time = (median("save, s", "save_s", 1), median("the call alone, s", "save_call_s", 1))
    stalls = (
        median("stalls, s", "save_stall_s", 1),
        computed("stalls / save", lambda mine: mine.median("save_stall_share"), share),
    )
    size = computed("GB saved", lambda mine: ratio(mine.median("disk_bytes"), 1e9), lambda value: number(value, 1))
    return table(
        rows.of_part("saving").by("system"),
        *(
            col.SYSTEM,
            last("saved with", "saved_with"),
            last("in the end", "saved_is"),
            col.K,
            col.STEP,
            *time,
            *stalls,
        ),
        *(size, median("bytes per parameter", "disk_bytes_per_parameter", 2)),
        *(median("more host GB", "save_host_gb", 1), ("load, s", loaded), ("the same weights", restored)),
    )


def power(rows: Rows) -> str:
    """Watts, and joules per token."""

    def tokens_per_s(mine: Rows) -> float | None:
        return ratio(mine.last("batch") * mine.last("sequence"), mine.median("step_s"))

    speed = (col.K, col.STEP, computed("tokens/s", tokens_per_s, lambda value: number(value, 0)))
    watts = (median("GPU, W", "gpu_watts", 0), median("host's processors, W", "host_watts", 0))
    joules = (
        median("GPU, J per token", "gpu_joules_per_token", 4),
        median("host's processors, J per token", "host_joules_per_token", 4),
    )
    return table(rows.of_part("power").by("system"), col.SYSTEM, *speed, *watts, *joules)


def monitors(rows: Rows) -> str:
    """Steps with monitors attached and without."""
    here = rows.of_part("monitors")
    to_base = computed("relative to the first", relative(here, label=UNWATCHED), lambda value: number(value, 4))

    def read(mine: Rows) -> str:
        found = mine.last("monitors_read")
        return MISSING if found is None else f"{min(found[::2])} to {max(found[::2])}"

    columns = (last("attached", "label"), col.STEP, to_base, ("records that each has read that is not stopped", read))
    return table(here.by("label"), *columns)


#: Columns of systems below caps on GPU memory.
CAPPED: Final = (last("model", "shape"), ("cap", lambda mine: f"{mine.last('cap_gib'):.0f} GiB"), col.SYSTEM)
PLACED: Final = (col.K, last("layers that visit", "visiting"), last("layers that are offloaded", "offloaded"))
FRONTIERS: Final = ("frontier_3b", "frontier_7b", "frontier_10b")


def frontier(rows: Rows) -> str:
    """Below caps on GPU memory."""
    each = (rows.filled(part, "cap_gib", "system") for part in FRONTIERS)
    here = Rows(row for found in each for row in sorted(found, key=lambda row: float(row["cap_gib"])))

    def of_fastest_peer(mine: Rows) -> float | None:
        peers = here.where(shape=mine.last("shape"), system=WEIGHTLESS, host=mine.last("host")).values("step_s")
        return ratio(min(peers, default=None), mine.median("step_s")) if mine.last("system") == ROAMING else None

    faster = computed("times as fast as the fastest peer", of_fastest_peer, lambda value: number(value, 2))
    columns = (*CAPPED, *PLACED, col.STEP, col.PREDICTED, faster)
    return table(here.by("shape", "cap_gib", "system"), *columns, *col.MEMORY, *col.PREDICTED_MEMORY, *col.HOST)


def home(rows: Rows) -> str:
    """Little GPU memory, little host memory, few cores: each model with its peers, on one host."""
    shapes = rows.where(part="home").distinct("shape")
    here = [rows.where(shape=shape).filled("home", "cap_gib", "system") for shape in shapes]
    return _capped(mine for each in here for mine in each.by("cap_gib", "system"))


def long(rows: Rows) -> str:
    """Long sequences, with activations in host memory and without."""
    return _capped(rows.of_part("long").by("sequence", "system"))


def largest(rows: Rows) -> str:
    """The largest model on one GPU, with the loss: it has to fall."""
    model, loss = (last("model", "shape"), last("after", "label")), last("loss", "loss")
    columns = (*model, *PLACED, col.STEP, *col.MEMORY, median("most host GB", "host_peak_gb", 1), loss)
    return table(rows.of_part("largest").by("label"), *columns)


def growing(rows: Rows) -> str:
    """Batches that grow, and memory that others take: HyTrain alone, on each host that has measured it."""
    here = rows.where(part=("growing", "giving_way"))
    to_longest_first = relative(here, "host", "commit", "shape", "system", field="mean_s", label=FIRST)

    def lost(mine: Rows) -> float | None:
        """By not beginning with the longest batch."""
        return to_longest_first(mine) if mine.last("label") == RANDOM else None

    return table(
        here.by("host", "commit", "shape", "system", "label"),
        *col.HOST,
        last("model", "shape"),
        col.SYSTEM,
        last("what", "label"),
        ("steps", lambda mine: str(len(mine.last("steps_s") or ()))),
        ("mean s/step", lambda mine: f"failed: {mine.error()}" if mine.error() else number(mine.median("mean_s"), 4)),
        computed("relative to the longest first", lost),
        median("the batch takes s more", "extra_s", 2),
        last("as fast again after steps", "back_steps"),
        median("evicted GB", "evicted_gb", 1),
        *col.MEMORY,
    )


def parked(rows: Rows) -> str:
    """Seconds until the GPU's memory is another process's, and back; GB that stay there meanwhile."""
    here = rows.where(part="giving_way", label=PARK)
    seconds = (("park s", "park_s"), ("resume s", "resume_s"), ("lend s", "lend_s"), ("attach and copy s", "attach_s"))
    columns = (*(median(head, field, 2) for head, field in seconds), median("GB left", "left_gb", 2))
    return table(here.by("host", "commit", "shape"), *col.HOST, last("model", "shape"), *columns)


def in_parts(rows: Rows) -> str:
    """Offloaded weights that are fetched for each sequence of the batch, or once for all of them."""
    here = rows.where(part="in_parts")
    to_each = computed(f"relative to {ONE_BY_ONE}", relative(here, "host", "commit", "shape", label=ONE_BY_ONE))
    columns = (last("model", "shape"), col.BATCH, last("the batch is computed with", "label"), col.STEP, to_each)
    return table(here.by("host", "commit", "shape", "label"), *col.HOST, *columns, *col.MEMORY)


#: Steps at the end that are at rest, if any are; and the steps from the first on whose plans may still change.
LAST_STEPS, FIRST_STEPS = 100, 30


def at_rest(rows: Rows) -> str:
    """After how many steps training is at rest, and what happens later."""

    def usual_s(mine: Rows) -> float:
        return statistics.median(mine.last("steps_s")[-LAST_STEPS:])

    def reached(mine: Rows) -> str:
        steps_s, usual = mine.last("steps_s"), usual_s(mine)
        medians = (statistics.median(steps_s[index : index + 20]) for index in range(len(steps_s) - 19))
        return str(next((index for index, median_s in enumerate(medians) if abs(median_s / usual - 1) < 0.03), MISSING))

    def longer(mine: Rows) -> str:
        return str(sum(step_s > 1.1 * usual_s(mine) for step_s in mine.last("steps_s")[FIRST_STEPS:]))

    def plans(mine: Rows) -> str:
        ks = (mine.last("ks") or [])[FIRST_STEPS:]
        return str(sum(k != before for before, k in pairwise(ks))) if ks else MISSING

    here = Rows(row for row in rows.where(part="rest") if row.get("steps_s"))
    return table(
        here.by("host", "commit", "system"),
        *col.HOST,
        col.SYSTEM,
        ("cap", lambda mine: f"{mine.last('cap_gib'):g} GiB" if mine.last("cap_gib") else MISSING),
        ("s/step, last 100", lambda mine: number(usual_s(mine), 4)),
        ("its median within 3 % after steps", reached),
        ("later than step 30: steps above 1.1 times that", longer),
        ("other k", plans),
        *col.MEMORY,
    )


def _capped(lines: Iterable[Rows]) -> str:
    tokens = ("tokens per step", lambda mine: f"{mine.last('batch')} x {mine.last('sequence')}")
    columns = (*CAPPED, tokens, *PLACED, col.STEP, col.PREDICTED)
    return table(lines, *columns, *col.MEMORY, *col.PREDICTED_MEMORY)


def experts(rows: Rows) -> str:
    """Mixtures of experts, each on the host that measured most systems."""
    shapes = rows.where(part="experts").distinct("shape")
    each = [rows.where(shape=shape).of_part("experts") for shape in shapes]

    def of_zero2(mine: Rows) -> float | None:
        peer = next(here for here in each if here.last("shape") == mine.last("shape")).where(system="deepspeed-zero2")
        return ratio(peer.median("step_s"), mine.median("step_s"))

    faster = computed("times as fast as ZeRO-2", of_zero2, lambda value: number(value, 2))
    what = (last("model", "shape"), col.SYSTEM, *PLACED[:2], col.STEP, faster, median("TFLOP/s", "tflops", 0))
    exact = last("exact fp32 AdamW?", "exact")
    return table([line for here in each for line in here.by("system")], *what, *col.MEMORY, exact)


def identical(rows: Rows) -> str:
    checksum = ("checksum of all weights", lambda mine: mine.last("digest") or mine.last("error"))
    columns = (col.SYSTEM, median("k at the end", "k", 2), last("layers moved", "moved"), checksum)
    return table(rows.of_part("identical").each(), *columns)


def machines(rows: Rows) -> str:
    """Hardware, versions and commands of every host and commit in the set; what several share is written once."""
    alike: dict[str, list[Rows]] = {}
    for mine in rows.by_host():
        facts = {**mine.last("hardware"), **mine.last("versions")}
        text = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts.items() if value)
        alike.setdefault(text, []).append(mine)
    day = ("measured on", lambda mine: mine[0]["at"][:10])
    commands = ("commands", lambda mine: "<br>".join(f"`{command}`" for command in mine.distinct("command")))
    return "\n\n".join(f"{text}:\n\n{table(same, *col.HOST, day, commands)}" for text, same in alike.items()) or NOTHING


# ---------------------------------------------------------------- the page

TABLES: Final[dict[str, Callable[[Rows], str]]] = {
    make.__name__: make
    for make in (
        machines,
        systems,
        hosts,
        sweep,
        policies,
        objectives,
        batches,
        threads,
        prediction,
        idle,
        launches,
        clipping,
        updates,
        compiled,
        identical,
        sft,
        saving,
        experts,
        power,
        monitors,
        frontier,
        largest,
        home,
        long,
        growing,
        parked,
        in_parts,
        at_rest,
    )
}


def of_run(rows: Rows) -> str:
    """What one call of the suite measured, for the terminal."""
    alone, ranked = rows.on_ranks(False), rows.on_ranks(True)
    own_parts = (launches, compiled, sft, saving, experts, power, monitors, largest, home, long)
    apart = {**{make: (make.__name__,) for make in own_parts}, frontier: FRONTIERS}
    others = Rows(row for row in alone if not any(row["part"] in parts for parts in apart.values()))
    own = ((make, alone.where(part=parts)) for make, parts in apart.items())
    made = [(one_host, others), *own, *((make, ranked) for make in several.MEASURED.values())]
    return "\n\n".join(text for make, mine in made if mine and (text := make(mine)) != NOTHING)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 2 if there is nothing to report."""
    from benchmarks import pictures  # needs matplotlib, as nothing else here does

    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, nargs="+", default=[RESULTS], help="folders with rows*.jsonl")
    parser.add_argument("--page", type=Path, default=PAGE)
    arguments = parser.parse_args(argv)
    rows = Rows.read(*arguments.results)
    if not rows:
        parser.error(f"no rows*.jsonl with anything in it in {', '.join(map(str, arguments.results))}")
    kernels = sorted(path for folder in arguments.results for path in folder.glob("kernel*.json"))
    texts = blocks(rows, json.loads(kernels[-1].read_text()) if kernels else {})
    for name, shows in pictures.draw(rows, arguments.page.with_name("pictures")):
        texts[name] = f"![{shows}](pictures/bench-{name}.png)\n\n{texts[name]}"
    arguments.page.write_text(fill(arguments.page.read_text(), texts))
    return 0


def blocks(rows: Rows, kernel: dict[str, Any]) -> dict[str, str]:
    """The text of every block that a page may have. `kernel`: what `benchmarks.kernel --json` wrote."""
    from benchmarks.kernel import table as kernel_table  # needs hytrain, as no other table does

    alone, ranked = rows.on_ranks(False), rows.on_ranks(True)
    texts = {name: make(alone) for name, make in TABLES.items()}
    texts |= {name: make(ranked) for name, make in several.TABLES.items()}
    summary = kernel_table(kernel) if kernel else NOTHING
    return texts | {"machines": machines(rows), "goals": goals(alone, kernel.get("summary", {})), "kernel": summary}


def fill(page: str, texts: dict[str, str]) -> str:
    """The page with its blocks replaced. Raises `KeyError` for a block that nobody makes."""
    return _BLOCK.sub(lambda block: f"{block[1]}\n{texts[block[2]]}\n\n{block[3]}", page)


if __name__ == "__main__":
    sys.exit(main())
