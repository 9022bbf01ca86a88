"""What HyTrain is to reach, as numbers, and what was measured. Pure: rows in, sentences out.

Every ratio is of two medians of one host. A goal that nothing was measured for says so.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from benchmarks.parts import ALWAYS_CLIPPED, NEVER_CLIPPED, NO_CLIPPING
from benchmarks.rows import Row, Rows, group, ratio
from benchmarks.words import MISSING, share

AUTO: Final = "hytrain:auto"
OUR_BATCH: Final = 8
#: What a number that a ratio is called the same as may differ by.
SAME: Final = 0.01
REACHED_STEPS: Final = 20
#: Steps just before the measured ones, and what both medians may differ by in a steady state.
STEADY_STEPS: Final = 6
STEADY: Final = 0.1


@dataclass(frozen=True)
class Verdict:
    """What was measured, in words, and whether that meets the bar; None if it can't be said.

    `where` says on how many hosts it does, if on some only.
    """

    text: str
    met: bool | None
    where: str = ""

    @property
    def word(self) -> str:
        return MISSING if self.met is None else self.where or ("yes" if self.met else "**no**")


NOT_MEASURED: Final = Verdict("not measured", None)


@dataclass(frozen=True)
class Goal:
    what: str
    bar: str
    judge: Callable[[Rows], Verdict]


def of(rows: Rows, system: str, batch: int = OUR_BATCH, label: str = "") -> Rows:
    return rows.where(system=system, batch=batch, label=label)


def step_ratio(rows: Rows, above: str, below: str, batch: int = OUR_BATCH, field: str = "step_s") -> float | None:
    return ratio(of(rows, above, batch).median(field), of(rows, below, batch).median(field))


def at_most(value: float | None, bar: float, text: str = "") -> Verdict:
    return NOT_MEASURED if value is None else Verdict(text or f"{value:.3f}", value <= bar)


def at_least(value: float | None, bar: float) -> Verdict:
    return NOT_MEASURED if value is None else Verdict(f"{value:.2f} ×", value >= bar)


def on_each_host(judge: Callable[[Rows], Verdict]) -> Callable[[Rows], Verdict]:
    """Where hosts differ by more than the bar leaves: all that have measured it count, the newest first."""

    def judge_each(rows: Rows) -> Verdict:
        pairs = reversed(dict.fromkeys(map(group, rows)))
        verdicts = [judge(Rows(row for row in rows if group(row) == pair)) for pair in pairs]
        found = [verdict for verdict in verdicts if verdict.met is not None]
        if not found:
            return NOT_MEASURED
        good = sum(bool(verdict.met) for verdict in found)
        where = f"on {good} of {len(found)} hosts" if 0 < good < len(found) else ""
        return Verdict("; ".join(verdict.text for verdict in found), good == len(found), where)

    return judge_each


def beside_no_offload(batch: int, time_bar: float, memory_bar: float) -> Callable[[Rows], Verdict]:
    """Step time and GPU memory beside everything on the GPU, of one host's rows."""

    def judge(here: Rows) -> Verdict:
        time = step_ratio(here, AUTO, "no-offload", batch)
        memory = step_ratio(here, AUTO, "no-offload", batch, "gpu_peak_gb")
        if time is None or memory is None:
            return NOT_MEASURED
        return Verdict(f"{time:.3f} at {share(memory)}", time <= time_bar and memory <= memory_bar)

    return judge


def beside(other: str, bar: float) -> Callable[[Rows], Verdict]:
    return lambda rows: at_most(step_ratio(rows.of_part("main").beside(rows), AUTO, other), bar)


def faster_than(peer: str, part: str, bar: float, batch: int = OUR_BATCH) -> Callable[[Rows], Verdict]:
    def judge(rows: Rows) -> Verdict:
        here = rows.where(batch=batch).of_part(part).beside(rows)
        if error := of(here, peer, batch).error():
            return Verdict(f"failed: {error}", None)
        return at_least(step_ratio(here, peer, AUTO, batch), bar)

    return judge


def best_static(rows: Rows, prefix: str = "k=") -> float | None:
    """The shortest step of a sweep over k: of each k's median over its repeats."""
    labels = [label for label in rows.labels() if label.startswith(prefix)]
    medians = [value for label in labels if (value := rows.where(label=label).median("step_s")) is not None]
    return min(medians, default=None)


def near_the_best_static(rows: Rows) -> Verdict:
    """The planner's k beside the best of the sweep, ten steps after a cold start and at rest."""
    sweep = rows.of_part("sweep")
    best = best_static(sweep)
    cold = ratio(sweep.where(label="auto from the start").median("step_s"), best)
    rest = ratio(sweep.where(label="auto").median("step_s"), best)
    if cold is None or rest is None:
        return NOT_MEASURED
    return Verdict(f"{cold:.3f} in steps 11 to 20, {rest:.3f} at rest", cold <= 1.05)


def reaction(rows: Rows, label: str, statics: str) -> tuple[int | None, float | None, float | None]:
    """After a command: steps until five in a row are within 10 % of the best static k, k before, k after.

    As many steps as there were, plus one, if that never happened.
    """
    row = rows.where(label=label).last()
    best = best_static(rows, f"{statics}, k=")
    if row is None or best is None or not row.get("ks"):
        return None, None, None
    times = [*row["settling_s"], *row["steps_s"]]
    windows = (index for index in range(len(times) - 4) if statistics.median(times[index : index + 5]) <= 1.1 * best)
    return next(windows, len(times)) + 1, row["ks"][0], row["ks"][-1]


def follows_the_threads(rows: Rows) -> Verdict:
    threads, texts, met = rows.of_part("threads"), list[str](), True
    for label in ("halved", "given back"):
        steps, before, after = reaction(threads, label, label)
        if steps is None or before is None or after is None:
            return NOT_MEASURED
        texts.append(f"{label}: k {before:.2f} to {after:.2f}, step {steps}")
        met = met and steps <= REACHED_STEPS and before != after
    return Verdict("; ".join(texts), met)


def prediction(rows: Rows) -> Verdict:
    """The worst of the planner's own choices whose steps were steady; the others are only told."""
    off = [(abs(row["predicted_step_s"] / row["step_s"] - 1), is_steady(row)) for row in predicted(rows)]
    steady, others = ([value for value, is_so in off if is_so == wanted] for wanted in (True, False))
    if not steady:
        return NOT_MEASURED
    text = f"at worst {share(max(steady))} off in {len(steady)} rows"
    if others:
        text += f"; {share(max(others))} in {len(others)} that were not steady"
    return at_most(max(steady), 0.1, text)


def predicted(rows: Rows) -> Rows:
    """Rows with a prediction, of parts in which the planner had the time to settle."""
    auto = (row for row in rows.where(part=("main", "sweep", "batches", "policies")) if row.get("predicted_step_s"))
    return Rows(row for row in auto if row.get("policy") == "deadline")


def is_steady(row: Row) -> bool:
    """Whether the last steps before the measured ones took as long as these: a prediction comes from those before."""
    before = row.get("settling_s", [])[-STEADY_STEPS:]
    return not before or abs(statistics.median(before) / row["step_s"] - 1) <= STEADY


def against_formulas(rows: Rows) -> Verdict:
    """`deadline` beside `balance` and `cotrain` at each batch size: the worst ratio, and what memory those of them take
    that are as fast.
    """
    here, ratios, less, more, compared = rows.of_part("policies"), list[float](), 0, 0, 0
    for batch in sorted({row["batch"] for row in here}):
        ours = here.where(batch=batch, label="deadline")
        others = here.where(batch=batch, label=("balance", "cotrain"))
        if (time := ours.median("step_s")) is None or not others.values("step_s"):
            continue
        ratios.append(time / min(others.values("step_s")))
        as_fast = [row["gpu_peak_gb"] for row in others if row["step_s"] <= (1 + SAME) * time]
        compared += bool(as_fast)
        less += bool(as_fast) and (ours.median("gpu_peak_gb") or 0.0) < min(as_fast)
        more += bool(as_fast) and (ours.median("gpu_peak_gb") or 0.0) > (1 + SAME) * min(as_fast)
    worst = max(ratios, default=None)
    memory = f"less GPU memory at {less} of {compared} batch sizes where one of them is as fast, more at {more}"
    text = "" if worst is None else f"at worst {worst:.3f}; {memory}"
    verdict = at_most(worst, 1 + SAME, text)
    return Verdict(verdict.text, verdict.met and more == 0)


def idle_share(rows: Rows) -> Verdict:
    row = rows.of_part("idle").where(system=AUTO).last()
    measured = (row or {}).get("idle")
    return at_most(measured["share"], 0.03, share(measured["share"])) if measured else NOT_MEASURED


def never_clipped(rows: Rows) -> Verdict:
    here = rows.of_part("clipping").where(system=AUTO)
    times = (here.where(label=label).median("step_s") for label in (NEVER_CLIPPED, NO_CLIPPING))
    return at_most(ratio(*times), 1.03)


def always_clipped(rows: Rows) -> Verdict:
    here = rows.of_part("clipping").where(label=ALWAYS_CLIPPED)
    times = (here.where(system=system).median("step_s") for system in ("deepspeed-zero2", AUTO))
    return at_least(ratio(*times), 1.5)


def same_bits(rows: Rows) -> Verdict:
    """Equal checksums of all weights, however much overlapped and whoever owned the layers."""
    digests = [row.get("digest") for row in rows.of_part("identical")]
    if len(digests) < 2 or None in digests:
        return NOT_MEASURED
    same = len(set(digests)) == 1
    return Verdict(f"{len(digests)} runs, {'the same bits' if same else 'different bits'}", same)


GOALS: Final = (
    Goal(
        "batch 8: step / no offload, GPU memory / no offload",
        "≤ 1.00 at ≤ 40 %",
        on_each_host(beside_no_offload(8, 1.0, 0.4)),
    ),
    Goal("batch 8: step / HyTrain with k = 1, all on the GPU", "≤ 1.01", beside("hytrain:1", 1.01)),
    Goal("batch 8: step / forward and backward only", "≤ 1.06", beside("forward-backward", 1.06)),
    Goal("faster than torchao, fp32", "≥ 2.2 ×", on_each_host(faster_than("torchao-fp32", "peers", 2.2))),
    Goal("faster than DeepSpeed ZeRO-2 offload", "≥ 3.0 ×", on_each_host(faster_than("deepspeed-zero2", "peers", 3.0))),
    Goal("faster than FSDP2 CPU offload", "≥ 3.4 ×", on_each_host(faster_than("fsdp2", "peers", 3.4))),
    Goal(
        "batch 1: step / no offload, GPU memory / no offload",
        "≤ 1.10 at ≤ 75 %",
        on_each_host(beside_no_offload(1, 1.1, 0.75)),
    ),
    Goal("batch 1: faster than torchao, fp32", "≥ 5 ×", faster_than("torchao-fp32", "batches", 5.0, batch=1)),
    Goal("the planner's step / the best static k's, within 10 steps", "≤ 1.05", near_the_best_static),
    Goal(
        "threads halved, then given back: k moves, within 10 % of the new best",
        "within 20 steps",
        follows_the_threads,
    ),
    Goal("predicted / measured step time in steady state", "within 10 %", prediction),
    Goal("deadline / the better of balance and cotrain, batch 1 to 16", "≤ 1.01, less memory", against_formulas),
    Goal("GPU idle at batch 8", "≤ 3 %", on_each_host(idle_share)),
    Goal("overlapped or not, 200 steps", "the same bits", same_bits),
    Goal("max_grad_norm, never clipped: step / the step without it", "≤ 1.03", never_clipped),
    Goal("max_grad_norm, always clipped: faster than ZeRO-2 that clips, too", "≥ 1.5 ×", always_clipped),
)


def table(rows: Rows, kernel: dict[str, float]) -> Iterable[tuple[str, str, str, str]]:
    """Each goal, its bar, what was measured, and whether that is enough. `kernel`: `benchmarks.kernel`'s summary."""
    for goal in GOALS:
        verdict = goal.judge(rows)
        yield goal.what, goal.bar, verdict.text, verdict.word
    for what, bar in (("native / stream", 0.9), ("native / DeepSpeed's operator with casts", 1.3)):
        value = next((value for name, value in kernel.items() if name.startswith(what)), None)
        verdict = NOT_MEASURED if value is None else Verdict(f"{value:.2f}", value >= bar)
        yield f"CPU kernel: {what}", f"≥ {bar}", verdict.text, verdict.word
