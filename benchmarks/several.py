"""Goals and tables of the parts on several GPUs. `report` puts them into docs/benchmarks.md, `suite` prints them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from benchmarks import columns as col
from benchmarks.columns import MISSING, computed, last, markdown, median, number, relative, share, table
from benchmarks.goals import HEAD, Goal, Judge, judged, known
from benchmarks.parts import (
    ALWAYS_CLIPPED,
    AUTO,
    CLIP,
    LIMITS,
    MUON,
    NEVER_CLIPPED,
    RESIDENT,
    RESIDENT_MUON,
    ROAMING,
)
from benchmarks.rows import Rows, ratio

#: Limits for the gradients' norm. With any of them, what does not overlap takes the same time.
CLIPS: Final = (CLIP, LIMITS[NEVER_CLIPPED], LIMITS[ALWAYS_CLIPPED])


def together(rows: Rows, part: str = "ranks") -> Rows:
    """This part's host, its shape, no label: on every number of GPUs, clipped or not."""
    here = rows.of_part(part)
    return Rows(row for row in here.beside(rows).where(shape=here.last("shape"), label="") if not row.get("cap_gib"))


def at_most_gpus(rows: Rows, clip: float | tuple[float, ...] = 0.0) -> Rows:
    """Of `together`, the most GPUs."""
    here = together(rows)
    return here.where(ranks=max(here.values("ranks"), default=None), clip=clip)


# ---------------------------------------------------------------- goals


def vs_resident(clip: float, time_bar: float, memory_bar: float = float("inf")) -> Judge:
    """Step time and GPU memory, compared with FSDP2 with everything on the GPUs."""

    return lambda rows: _beside(at_most_gpus(rows, clip), AUTO, RESIDENT, time_bar, memory_bar)


def faster_than(system: str, bar: float) -> Judge:
    def judge(rows: Rows) -> tuple[str, bool]:
        here = at_most_gpus(rows)
        value = known(here.ratio(system, AUTO))
        return f"{value:.2f} ×, {_gpus(here)}", value >= bar

    return judge


def with_muon(rows: Rows) -> tuple[str, bool]:
    """As `vs_resident`, beside torch's Muon on FSDP2's shards."""
    return _beside(rows.of_part("ranks_muon"), MUON, RESIDENT_MUON, 1.05)


def offloaded(rows: Rows, here: Rows) -> Rows:
    """`ranks_offloaded` on one host, `here`, with what it has in common with `ranks`."""
    found = here.beside(rows).where(part=("ranks_offloaded", "ranks"), clip=0.0)
    return Rows(row for row in found if row["part"] == "ranks_offloaded" or row["system"] == RESIDENT)


def with_offloaded_weights(rows: Rows) -> tuple[str, bool]:
    here = rows.of_part("ranks_offloaded").where(shape="7b")
    return _beside(offloaded(rows, here).where(shape="7b"), ROAMING, RESIDENT, 1.25)


def with_pipeline(rows: Rows) -> tuple[str, bool]:
    here = rows.of_part("pipeline").where(label="1f1b", ranks=2)
    value = known(ratio(*(here.where(system=system).median("step_s") for system in (AUTO, "no-offload"))))
    return f"{value:.3f}", value <= 1.03


def _beside(here: Rows, ours: str, base: str, time_bar: float, memory_bar: float = float("inf")) -> tuple[str, bool]:
    time, memory = (known(here.ratio(ours, base, field=field)) for field in ("step_s", "gpu_peak_gb"))
    return f"{time:.3f} at {share(memory)}, {_gpus(here)}", time <= time_bar and memory <= memory_bar


def scales(rows: Rows) -> tuple[str, bool]:
    """The worst of the numbers of GPUs."""
    here = together(rows, "scaling").where(clip=0.0)
    found = {world: kept_up(here, world) for world in sorted(here.distinct("ranks")) if world > 1}
    worst = known(min((value for value in found.values() if value is not None), default=None))
    return ", ".join(f"{number(value)} on {world}" for world, value in found.items()), worst >= 0.95


def _gpus(here: Rows) -> str:
    return f"{here.last('ranks')} GPUs"


def efficiency(here: Rows, system: str, world: int) -> float | None:
    """One GPU's step time to that of `world` GPUs with the same batch each."""
    return ratio(*(here.where(system=system, ranks=ranks).median("step_s") for ranks in (1, world)))


def kept_up(here: Rows, world: int) -> float | None:
    """HyTrain's efficiency to FSDP2's."""
    return ratio(efficiency(here, AUTO, world), efficiency(here, RESIDENT, world))


# fmt: off
GOALS: Final = (
    Goal("step / FSDP2 without offload, GPU memory / FSDP2 without offload", "≤ 1.02 at ≤ 55 %",
         vs_resident(0.0, 1.02, 0.55), each_host=True),
    Goal("the same with max_grad_norm=1.0", "≤ 1.03", vs_resident(CLIP, 1.03), each_host=True),
    Goal("faster than FSDP2 CPU offload", "≥ 1.8 ×", faster_than("fsdp2:cpu-offload", 1.8), each_host=True),
    Goal("faster than DeepSpeed ZeRO-2 offload", "≥ 2.7 ×", faster_than("deepspeed-zero2", 2.7), each_host=True),
    Goal("faster than DeepSpeed ZeRO-3 offload", "≥ 3.7 ×", faster_than("deepspeed-zero3", 3.7), each_host=True),
    Goal("Muon: step / FSDP2 with torch's Muon and no offload", "≤ 1.05", with_muon, each_host=True),
    Goal("7 B with offloaded weights, below 24 GiB: step / FSDP2 without offload", "≤ 1.25",
         with_offloaded_weights, each_host=True),
    Goal("pipeline of two stages, 1F1B: step / no offload", "≤ 1.03", with_pipeline, each_host=True),
    Goal("efficiency on several GPUs / FSDP2's own", "≥ 0.95", scales, each_host=True),
)
# fmt: on


def goals(rows: Rows) -> str:
    return markdown(HEAD, judged(GOALS, rows))


# ---------------------------------------------------------------- tables


def by_rank(head: str, field: str, digits: int) -> col.Column:
    """A list with a number for each rank, of the newest row."""
    return head, lambda mine: ", ".join(number(value, digits) for value in mine.last(field) or []) or MISSING


GPUS, K = last("GPUs", "ranks"), by_rank("k by rank", "k_by_rank", 2)
SPEED: Final = (col.STEP, median("TFLOP/s per GPU", "tflops", 0))
CLIPPED: Final = (
    ("max_grad_norm", lambda mine: f"{mine.last('clip'):g}" if mine.last("clip") else MISSING),
    ("steps clipped", lambda mine: share(mine.last("clipped_share"))),
)


def ranks(rows: Rows) -> str:
    """On each host, every system beside FSDP2 without offload, those that clip beside the one that clips."""
    everywhere = (at_most_gpus(one_host, (0.0, *CLIPS)) for one_host in rows.by_host())
    return against(newest_first(everywhere), RESIDENT)


def with_offload(rows: Rows) -> str:
    hosts = rows.where(part="ranks_offloaded").by_host()
    return against(newest_first(offloaded(rows, here) for here in hosts), RESIDENT)


def newest_first(hosts: Iterable[Rows]) -> Rows:
    return Rows(row for here in reversed(list(hosts)) for row in here)


def against(here: Rows, base: str) -> str:
    """Step time and memory relative to `base` on the same host and as many GPUs, with the same model and clipping.

    Speed over GPU memory is how many times as many tokens a second a GB gives: what Hippie calls memory efficiency.
    """
    same = ("host", "commit", "shape", "sequence", "ranks", "label")

    def to_base(mine: Rows, field: str) -> float | None:
        clip = CLIPS if mine.last("clip") else 0.0
        return relative(here, *same, field=field, system=base, clip=clip)(mine)

    time, memory = (partial(to_base, field=field) for field in ("step_s", "gpu_peak_gb"))
    lines = here.by(*same, "clip", "system")
    model = (last("model", "shape"), last("tokens", "sequence")) if len(here.by("shape", "sequence")) > 1 else ()
    facts = (GPUS, last("schedule", "label")) if here.last("label") else (GPUS, *CLIPPED)
    return table(
        lines,
        *(col.HOST if len(here.by_host()) > 1 else ()),
        *model,
        col.SYSTEM,
        *facts,
        K,
        *SPEED,
        computed(f"relative to {base}", time),
        by_rank("GPU peak GB by rank", "gpu_peak_gb_by_rank", 1),
        computed(f"GPU memory relative to {base}", memory, share),
        computed("speed over GPU memory, relative", lambda mine: _inverse(time(mine), memory(mine))),
        ("host GB", col.host_gb),
    )


def _inverse(time: float | None, memory: float | None) -> float | None:
    return None if time is None or memory is None else 1 / (time * memory)


def scaling(rows: Rows) -> str:
    """One line for each number of GPUs."""
    here = together(rows, "scaling").where(clip=0.0, system=(RESIDENT, AUTO))

    def efficient(system: str) -> Callable[[Rows], float | None]:
        return lambda mine: efficiency(here, system, mine.last("ranks"))

    columns = [GPUS]
    for name, system in (("FSDP2", RESIDENT), ("HyTrain", AUTO)):
        columns += [col.of(f"{name} s/step", system, "step_s", 4), computed(f"{name} efficiency", efficient(system))]
    return table(
        sorted(here.by("ranks"), key=lambda mine: mine.last("ranks")),
        *columns,
        computed("HyTrain's / FSDP2's", lambda mine: kept_up(here, mine.last("ranks"))),
    )


def gpt2(rows: Rows) -> str:
    """Sorted by batch size; all systems of one size have taken the same number of steps."""
    lines = sorted(rows.of_part("gpt2").by("batch", "label", "system"), key=lambda mine: mine.last("batch"))
    rates = (median("tokens/s", "tokens_per_s", 0), median("samples/s", "samples_per_s", 1))
    learned = (
        median("held-out loss", "held_out_loss", 3),
        computed("held-out accuracy", lambda mine: mine.median("accuracy"), share),
    )
    return table(
        lines,
        GPUS,
        last("batch per GPU", "batch"),
        col.SYSTEM,
        ("tensor parallelism", lambda mine: mine.last("label").removeprefix("tensor ") or MISSING),
        K,
        col.STEP,
        *rates,
        computed("MFU", lambda mine: mine.median("mfu"), share),
        *col.MEMORY,
        *learned,
    )


def on_each_host(base: str, *parts: str) -> Callable[[Rows], str]:
    """Makes the table of these parts on each host, beside `base`."""
    return lambda rows: against(newest_first(rows.where(part=parts).by_host()), base)


MEASURED: Final = {
    "ranks-compared": ranks,
    "ranks-scaling": scaling,
    "ranks-gpt2": gpt2,
    "ranks-pipeline": on_each_host("no-offload", "pipeline"),
    "ranks-offloaded": with_offload,
    "ranks-muon": on_each_host(RESIDENT_MUON, "ranks_muon"),
    "ranks-context": on_each_host(RESIDENT, "context"),
    "ranks-eight": on_each_host(RESIDENT, "eight", "large", "routed"),  # on as many GPUs as there are
}
TABLES: Final = {"ranks-goals": goals, **MEASURED}
