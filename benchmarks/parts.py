"""What is measured: the parts of the suite, their jobs, and a job's segments.

    suite ── Job as JSON ──▶ benchmarks.step ── a row for each Segment ──▶ suite

A job is one system in one process. Building a model takes longer than twenty of its steps, so one process measures
several batch sizes, k or policies in turn: it sends a segment's commands to the coordinator, as `hytrain-monitor` does,
and lets the steps settle.

A part fits into a few minutes on an H200. The next machine differs, so each part that compares includes the systems
that it compares with.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Final, NamedTuple, Self

from benchmarks.host import optimizer_threads
from protocol.handles import Precision


class Shape(NamedTuple):
    """Of a model. Keys and values have `key_heads`, or one for each head; the loss is made of `loss_chunks` parts.

    With `experts`, each layer has so many of the `intermediate` size, and a token is routed to `chosen` of them.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    vocabulary: int
    key_heads: int | None = None
    loss_chunks: int = 1
    experts: int = 0
    chosen: int = 0

    @property
    def idle_parameters(self) -> int:
        """Of the experts that a token is not routed to, each with three matrices."""
        return self.layers * (self.experts - self.chosen) * 3 * self.hidden * self.intermediate


#: GPT-2's vocabulary is rounded up to what tensor cores like.
SHAPES: Final = {
    "demo": Shape(176, 480, 5, 4, 256),
    "tiny": Shape(256, 688, 4, 4, 2048),
    "short": Shape(2048, 5632, 8, 16, 32000),
    "1b": Shape(2048, 5632, 22, 16, 32000),
    "3b": Shape(3200, 8640, 26, 32, 32000),
    "7b": Shape(4096, 11008, 32, 32, 32000),
    "llama3-8b": Shape(4096, 14336, 32, 32, 128256, 8, 16),
    "10b": Shape(5120, 13824, 30, 40, 32000),
    "20b": Shape(5120, 13824, 63, 40, 32000),
    "21b": Shape(6144, 16384, 46, 48, 32000),
    "41b": Shape(8192, 22016, 50, 64, 32000),
    # 29.7 B parameters, of which a token meets 2.5 B
    "30b-experts": Shape(2048, 768, 48, 32, 32000, 4, experts=128, chosen=8),
    # in 128 GiB of host memory, FSDP2 trains 5.3 B, and ZeRO-2 4.1 B
    "5b-experts": Shape(2560, 8960, 9, 20, 32000, 4, experts=8, chosen=2),
    "4b-experts": Shape(2560, 8960, 7, 20, 32000, 4, experts=8, chosen=2),
    "tiny-experts": Shape(64, 128, 3, 4, 256, 2, experts=8, chosen=2),
    "gpt2-tiny": Shape(64, 256, 2, 4, 2048),
    "gpt2-large": Shape(1280, 5120, 36, 20, 50304),
}
#: No rank can hold these whole: they are built on the meta device, and each rank makes its shards.
ON_META: Final = ("20b", "21b", "30b-experts", "41b")
#: HyTrain as it is by default: the planner chooses k.
AUTO: Final = "hytrain:auto"
#: The same told when updates begin, and for a loop that clips by itself.
TIMINGS: Final = (AUTO, f"{AUTO},updates=backward", f"{AUTO},updates=step")
UNAWARE: Final = "hytrain-unaware:auto"
#: The same with Muon for the matrices of the blocks.
MUON: Final = "hytrain-muon:auto"
#: On several ranks: FSDP2 with everything on the GPUs, what the others are compared with.
RESIDENT: Final = "fsdp2:no-offload"
RESIDENT_MUON: Final = "fsdp2-muon:no-offload"
#: What each of many GPUs may take of its memory.
LARGE_GIB: Final = 80.0
SCHEDULES: Final = ("gpipe", "1f1b")
STATIC_KS: Final = ("0", "0.1", "0.15", "0.2", "0.25", "0.3", "0.5", "1")
BATCHES: Final = (8, 16, 4, 2, 1)
CLIPPED: Final = "clipped"
NO_CLIPPING, NEVER_CLIPPED, ALWAYS_CLIPPED = "no clipping", "never clipped", "always clipped"
#: A limit for the gradients' norm as people set it, and others.
CLIP: Final = 1.0
#: Seconds in which 48 GB are saved and loaded again: a guess.
SAVE_S: Final = 110.0
SAVING: Final = "saving"
POWER: Final = "power"
EXPERTS: Final = "experts"
EAGER, COMPILED = "eager", "compiled blocks"
#: Blocks whose activations are not recomputed.
KEPT, GRAPHED = "eager, activations kept", "CUDA graphs, activations kept"
#: The whole model given to torch.compile, its activations kept.
WHOLE: Final = "whole model compiled"
#: Each block computes one sequence after another, before the next block begins; and a backward for each sequence.
IN_PARTS, ONE_BY_ONE = "blocks in parts", "a backward for each sequence"
#: What the part "growing" measures.
RANDOM, FIRST = "lengths at random", "the same, the longest first"
#: With blocks that are computed again in backward, and with activations that are kept.
FOUR_TIMES: Final = ("four times the largest so far", "four times the largest so far, activations kept")
NEIGHBOUR, PARK, STEADY = "another process takes memory", "parked and resumed", "nothing is evicted"
UNWATCHED, WATCHED, UNWATCHED_AGAIN = "no monitor", "50 monitors", "no monitor again"
#: HyTrain with all weights in host memory, but for those of layers that the GPU owns.
OFFLOADED: Final = f"{AUTO},offload_weights=1"
#: HyTrain with all of its placements, for GPUs with little memory.
ROAMING: Final = "hytrain:auto,visit=auto,offload_weights=auto"
#: The same with activations in host memory as well.
LEANEST: Final = f"{ROAMING},offload_activations"
#: GiB of GPU memory that torch may take.
CAPS: Final = (8, 12, 16, 24, 32, 48)
#: Labels by cap in GiB, for 3.43 B parameters: less than two thirds of what bitsandbytes' 8-bit AdamW takes, and a
#: quarter of what no offload takes.
LEAN: Final = {gib: f"below {gib:g} GiB" for gib in (14.0, 15.5)}
#: Updates in `step()`, and in backward as gradients come, which are then freed.
FLASHOPTIM: Final = ("flashoptim", "flashoptim-released")
#: Where weights, too, are in host memory. What runs below the lowest cap takes no more below a higher one.
WEIGHTLESS: Final = ("fsdp2", "deepspeed-zero3-params")
LIMITS: Final = {NO_CLIPPING: 0.0, NEVER_CLIPPED: 1e6, ALWAYS_CLIPPED: 1e-3}


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Steps of one kind: `settle` steps that are only noted, then `measure` steps that count.

    Settling goes on for up to `patience` more steps while layers still move. `label` tells this segment from others of
    the same system and batch. `profile` records the GPU's kernels during the measured steps; `digest` takes a checksum
    of the weights after them. With `saves`, training goes on while the whole state is saved; then that is loaded.
    `power` measures the power during the measured steps. So many `monitors` are attached in all steps. With `launches`,
    further steps show how long the host takes for one, and on a GPU its kernels.
    """

    batch: int
    label: str = ""
    settle: int = 4
    measure: int = 8
    patience: int = 0
    commands: tuple[tuple[str, str], ...] = ()
    profile: bool = False
    digest: bool = False
    saves: bool = False
    power: bool = False
    monitors: int = 0
    launches: bool = False


@dataclass(frozen=True, kw_only=True)
class Job:
    """One system, e.g. "deepspeed-zero2" or "hytrain:auto", and its segments. `start_s` and `step_s` are guesses.

    With `ranks`, torchrun starts so many processes, a device each; `batch` is then a rank's share. `tensor` ranks form
    a tensor-parallel group; `context` ranks share sequences of so many times `sequence`. With a `schedule`, all ranks
    are the stages of one pipeline. With `cap_gib`, torch may take so much of the GPU's memory, and the model is in host
    memory when the system gets it. `blocks` says how blocks are called: eagerly, compiled by torch.compile alone or
    with the whole model, or as CUDA graphs of the first segment's batch.
    """

    system: str = ""
    segments: tuple[Segment, ...] = ()
    shape: str = "3b"
    sequence: int = 1024
    device: str = "cuda"
    dtype: str = "bfloat16"
    clip: float = 0.0
    threads: int | None = None
    deterministic: bool = False
    ranks: int = 0
    tensor: int = 1
    context: int = 1
    schedule: str = ""
    cap_gib: float = 0.0
    blocks: str = EAGER
    start_s: float = 15.0
    step_s: float = 0.6

    @property
    def expected_s(self) -> float:
        """The expected time with the process's start; a step's cost grows with its batch."""
        costs = [self.step_s * max(s.batch / 8, 0.25) * (s.settle + s.measure + 8 * s.launches) for s in self.segments]
        return self.start_s + sum(costs) + SAVE_S * sum(segment.saves for segment in self.segments)

    @property
    def sharing(self) -> int:
        """How many ranks work on the same sequences."""
        return self.ranks if self.schedule else self.tensor

    @property
    def length(self) -> int:
        """The tokens of a sequence: `sequence` are a rank's share of it."""
        return self.sequence * self.context

    @property
    def is_on_meta(self) -> bool:
        """Whether the model is built without memory, and each rank makes its shards."""
        return self.ranks > 0 and self.shape in ON_META

    @property
    def reads_text(self) -> bool:
        """Whether it trains on the demo's text rather than on random tokens."""
        return self.shape.startswith("gpt2")

    @property
    def folder(self) -> str:
        """Where its run folder is kept, if at all."""
        divided = (self.tensor > 1 and "tensor", self.context > 1 and "context", self.schedule)
        more = (self.shape, f"{self.ranks}-ranks", *divided, self.clip and "clipped")
        return "-".join([self.system, *filter(None, more)]) if self.ranks else self.system

    def only(self, batches: Collection[int]) -> Self:
        """The job without segments of other batch sizes."""
        return replace(self, segments=tuple(segment for segment in self.segments if segment.batch in batches))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        fields = json.loads(text)
        for each in fields["segments"]:
            each["commands"] = tuple(map(tuple, each["commands"]))
        return cls(**fields | {"segments": tuple(Segment(**each) for each in fields["segments"])})


@dataclass(frozen=True)
class Known:
    """What is known of a system. The two times are guesses from runs on an H200, used for the budget.

    `exact`: whether its update is AdamW on fp32 masters, or which other one it is.
    """

    start_s: float
    step_s: float  # at batch 8
    exact: str = "yes"


KNOWN: Final = {
    "no-offload": Known(15, 0.6),
    "forward-backward": Known(15, 0.55, "no update"),
    "torch": Known(15, 0.6, "in fp32"),
    "hytrain": Known(22, 0.6),
    "hytrain-unaware": Known(22, 0.6),
    "hytrain-accumulating": Known(22, 2.4),
    "no-offload-muon": Known(15, 1.0, "Muon"),
    "hytrain-muon": Known(22, 1.0, "Muon"),
    "torchao-fp32": Known(20, 1.4),
    "torchao-bf16": Known(20, 1.1, "no"),
    "deepspeed-zero2": Known(75, 2.0),
    "deepspeed-twinflow": Known(40, 2.1),
    "fsdp2": Known(40, 2.2),
    "torch-bf16": Known(15, 0.6, "no: bf16 moments, no masters"),
    "bnb-8bit": Known(20, 0.6, "no: 8-bit moments, no masters"),
    "bnb-paged-8bit": Known(20, 0.6, "no: 8-bit moments, no masters"),
    "flashoptim": Known(20, 0.6, "no: 8-bit moments, masters of 24 bits"),
    "flashoptim-released": Known(20, 0.6, "no: 8-bit moments, masters of 24 bits"),
    "sft-torch-fp32": Known(25, 0.4),
    "sft-torch-bf16": Known(25, 0.3, "no: bf16 moments, no masters"),
    "sft-hytrain": Known(30, 0.3),
    "hytrain-growing": Known(30, 1.1),
    "hytrain-unserved": Known(30, 0.8),
    # on several ranks, 7 B
    "fsdp2:no-offload": Known(25, 1.0),
    "fsdp2-muon:no-offload": Known(25, 1.5, "Muon"),
    "fsdp2:forward-backward": Known(25, 1.0, "no update"),
    "fsdp2:cpu-offload": Known(50, 2.0),
    "deepspeed-zero3": Known(60, 4.0),
    "deepspeed-zero3-params": Known(60, 3.0),
    "ddp": Known(20, 0.3),
}
UNKNOWN: Final = Known(20, 1.0, "–")
PEERS: Final = ("torchao-fp32", "deepspeed-zero2", "fsdp2", "deepspeed-twinflow", "torchao-bf16")
#: The first one is what the others are compared with.
SFT: Final = ("sft-torch-fp32", "sft-torch-bf16", "sft-hytrain")
#: DeepSpeed compiles its kernel at first use, so its first system starts slowly.
TIMEOUT_S: Final = 240.0
#: The first steps are slow, and the planner takes GPU memory for them. After so many steps it has given that back.
AT_REST_STEPS: Final = 40


def about(system: str) -> Known:
    known = KNOWN.get(system) or KNOWN.get(system.partition(":")[0], UNKNOWN)
    moments, masters = (system.partition(f"{name}=")[2].partition(",")[0] for name in Precision._fields)
    smaller = [] if moments in ("", "float32") else [f"{moments} moments"]
    smaller += [] if masters in ("", "float32") else ["no masters"]
    return replace(known, exact=f"no: {', '.join(smaller)}") if smaller else known


def job(template: Job, system: str, *segments: Segment) -> Job:
    known = about(system)
    return replace(template, system=system, segments=segments, start_s=known.start_s, step_s=known.step_s)


def plain(template: Job, system: str, batch: int = 8) -> Job:
    """One system at one batch size: fewer steps of the slow ones, and enough for HyTrain's planner to be at rest."""
    if ":auto" in system:
        steps = Segment(batch=batch, settle=AT_REST_STEPS, measure=20, patience=AT_REST_STEPS)
    elif system.startswith("hytrain"):
        steps = Segment(batch=batch, settle=10, measure=20)
    else:
        settle, measure = (2, 5) if about(system).step_s > 1 else (4, 10)
        steps = Segment(batch=batch, settle=settle, measure=measure)
    return job(template, system, steps)


def _plain(*systems: str) -> Callable[[Job], list[Job]]:
    return lambda template: [plain(template, system) for system in systems]


def sweep(template: Job) -> list[Job]:
    """The planner from a cold start, then static k up and down, and the planner again, all in one process."""
    segments = [Segment(batch=8, label="auto from the start", settle=10, measure=10)]
    before = 0.2
    for k in (*STATIC_KS, *reversed(STATIC_KS)):
        # The more layers move, the longer it takes to prepare their memory.
        settle = 6 + round(20 * abs(float(k) - before))
        segments.append(Segment(batch=8, label=f"k={k}", settle=settle, measure=6, patience=12, commands=(("k", k),)))
        before = float(k)
    again = Segment(batch=8, label="auto", settle=16, measure=8, patience=16, commands=(("k", "auto"),))
    return [job(template, AUTO, *segments, again)]


def policies(template: Job) -> list[Job]:
    """Four policies at five batch sizes in one process; "fixed" has Twin-Flow's ratio.

    The host drifts, so the default is measured before the policies that it is compared with, and again after them.
    """

    def segment(batch: int, policy: str) -> Segment:
        commands = (("k", "0.5"),) if policy == "fixed" else (("k", "auto"), ("policy", policy))
        # Short steps are over before many layers have moved.
        settle, measure = (10, 5) if batch > 8 else (14, 7) if batch > 4 else (20, 9)
        return Segment(batch=batch, label=policy, settle=settle, measure=measure, patience=20, commands=commands)

    turns = ("deadline", "balance", "deadline", "fixed")
    return [job(template, AUTO, *(segment(batch, policy) for batch in BATCHES for policy in turns))]


def objectives(template: Job) -> list[Job]:
    """What the planner gives up for memory."""
    names = ("speed", "gpu-memory", "host-memory")
    steps = Segment(batch=8, settle=12, measure=8, patience=20)
    return [job(template, AUTO, *(replace(steps, label=name, commands=(("objective", name),)) for name in names))]


def batches(template: Job) -> list[Job]:
    """All batch sizes, one process for each system; torchao at the smallest, where offloading costs most."""
    few = [Segment(batch=batch, settle=3, measure=7) for batch in BATCHES]
    # The memory of layers that have moved is given back for seconds, also by the system: more of the short steps.
    settled = [Segment(batch=batch, settle=14 + 48 // batch, measure=8, patience=30) for batch in BATCHES]
    systems = {"no-offload": few, "forward-backward": few, AUTO: settled}
    return [*(job(template, system, *steps) for system, steps in systems.items()), plain(template, "torchao-fp32", 1)]


def threads(template: Job) -> list[Job]:
    """The optimizer's threads halved by command and given back, with the static k that could be had each time."""
    every = optimizer_threads()

    def moment(label: str, *commands: tuple[str, str], settle: int = 20) -> Segment:
        return Segment(batch=8, label=label, settle=settle, measure=10, commands=commands)

    def static(label: str, *ks: str) -> list[Segment]:
        steps = Segment(batch=8, settle=6, measure=5, patience=6)
        return [replace(steps, label=f"{label}, k={k}", commands=(("k", k),)) for k in ks]

    segments = [
        moment("all threads", settle=14),
        moment("halved", ("threads", str(max(every // 2, 1)))),
        *static("halved", "0.2", "0.3", "0.4", "0.5", "0.6", "0.8"),
        moment("halved again", ("k", "auto"), settle=10),
        moment("given back", ("threads", str(every))),
        *static("given back", "0.1", "0.2", "0.3", "0.4"),
    ]
    return [job(template, f"{AUTO},threads={every}", *segments)]


def launches(template: Job) -> list[Job]:
    """What a step's launches cost at small and large batches: eager, with compiled blocks, and with CUDA graphs."""
    found = []
    for blocks in (EAGER, COMPILED, KEPT, GRAPHED):
        sizes = (16, 4, 1) if blocks in (EAGER, COMPILED) else (1,)
        few = [Segment(batch=batch, label=blocks, settle=4, measure=5, launches=True) for batch in sizes]
        settled = [replace(steps, settle=8 + 40 // steps.batch, patience=20) for steps in few]
        for system, steps in (("no-offload", few), (AUTO, settled)):
            made = job(replace(template, blocks=blocks), system, *steps)
            found.append(replace(made, start_s=made.start_s + 30 * (blocks == COMPILED)))
    return found


def compiled(template: Job) -> list[Job]:
    """Steps that launches bound: 8 layers, eager and with the whole model compiled, beside torch's own AdamW."""
    base, found = _shaped(template, "short"), list[Job]()
    for blocks in (KEPT, WHOLE):
        few = [Segment(batch=batch, label=blocks, settle=20, measure=40) for batch in (1, 8)]
        settled = [replace(steps, patience=100) for steps in few]
        for system, steps in (("torch-bf16", few), ("hytrain:1", few), (AUTO, settled)):
            made = job(replace(base, blocks=blocks), system, *steps)
            found.append(replace(made, start_s=made.start_s + 40 * (blocks == WHOLE), step_s=0.06))
    return found


def rest(template: Job) -> list[Job]:
    """Every step from the first on: how soon training is at rest, and whether it stays there."""
    steps = Segment(batch=8, label="from the first step", settle=0, measure=300)
    caps = ((template, AUTO), (replace(template, cap_gib=15.5), ROAMING))
    return [
        job(template, "no-offload", replace(steps, measure=40)),
        *(job(base, system, steps) for base, system in caps),
    ]


def idle(template: Job) -> list[Job]:
    """The GPU's idle share and its causes; with half of the layers on the GPU, no forward waits for weights."""
    steps = Segment(batch=8, label="profiled", measure=7, patience=16, profile=True)
    settle = {AUTO: 14, "hytrain:0.5": 6, "no-offload": 4, "forward-backward": 4}
    return [job(template, system, replace(steps, settle=count)) for system, count in settle.items()]


def clipping(template: Job) -> list[Job]:
    """The global norm clipped never and always, compared with no clipping and with a peer that clips."""

    def clipped(limit: float, system: str, label: str, settle: int, measure: int, patience: int = 0) -> Job:
        steps = Segment(batch=8, label=label, settle=settle, measure=measure, patience=patience)
        return job(replace(template, clip=limit), system, steps)

    ours = [clipped(limit, AUTO, label, settle=24, measure=10, patience=20) for label, limit in LIMITS.items()]
    return [*ours, clipped(LIMITS[ALWAYS_CLIPPED], "deepspeed-zero2", ALWAYS_CLIPPED, settle=2, measure=5)]


def updates(template: Job) -> list[Job]:
    """When updates begin: in backward, in `step()`, also below a cap, or as it is learned; and a loop that clips."""
    clipped = replace(template, clip=LIMITS[ALWAYS_CLIPPED])
    steps = {batch: Segment(batch=batch, settle=24, measure=10, patience=60) for batch in (8, 1)}
    asked = [job(template, system, *steps.values()) for system in ("no-offload", *TIMINGS)]
    found = [*asked, *(job(clipped, system, replace(steps[8], label=CLIPPED)) for system in (AUTO, UNAWARE))]
    capped = replace(template, cap_gib=template.cap_gib or 40)  # less the margin, 65 % of what no offload takes
    below = replace(steps[8], label=f"below {capped.cap_gib:g} GiB")
    return [*found, job(capped, f"{AUTO},updates=step,visit=auto", below)]


def identical(template: Job) -> list[Job]:
    """200 steps, overlapped with layers moving as the planner likes, and with nothing overlapped: the same bits?"""
    small = replace(template, shape="1b" if template.shape == "3b" else template.shape, deterministic=True)
    steps = Segment(batch=2, label="200 steps", settle=190, measure=10, digest=True)
    return [replace(job(small, system, steps), step_s=0.6) for system in (AUTO, "hytrain:0,serial")]


def lean(template: Job) -> list[Job]:
    """What people try first where memory is short, beside HyTrain as it is and below a cap on the GPU's memory."""
    systems = ("no-offload", AUTO, OFFLOADED, "torch-bf16", "bnb-8bit", "bnb-paged-8bit", *FLASHOPTIM)
    below = [(plain(replace(template, cap_gib=gib), ROAMING), label) for gib, label in LEAN.items()]
    return [
        *(plain(template, system) for system in systems),
        *(replace(one, segments=(replace(one.segments[0], label=label),)) for one, label in below),
    ]


def sft(template: Job) -> list[Job]:
    """Fine-tuning under the Trainer, clipped at 1.0 as it does by default; all take the same number of steps."""
    small = replace(template, shape="1b" if template.shape == "3b" else template.shape, clip=CLIP)
    steps = Segment(batch=8, settle=AT_REST_STEPS, measure=20)
    return [job(small, system, steps) for system in SFT]


def growing(template: Job) -> list[Job]:
    """Batches that grow, below 24 GiB: of random lengths, and one four times the largest so far."""
    base = replace(template, cap_gib=template.cap_gib or 24, sequence=16 * template.sequence)
    lengths = [Segment(batch=1, label=label, settle=10, measure=60) for label in (RANDOM, FIRST)]
    options = [system.partition(":")[2] for system in (AUTO, ROAMING)]
    found = [job(base, f"hytrain-growing:{option}", one) for option in options for one in lengths]
    found.append(_four_times(replace(base, sequence=base.sequence // 2), FOUR_TIMES[0]))
    return [replace(one, step_s=4 * one.step_s) for one in found]  # a sequence is as long as a batch of eight others


def _four_times(base: Job, label: str) -> Job:
    return job(base, "hytrain-growing:auto", Segment(batch=1, label=label, settle=50, measure=10))


def giving_way(template: Job) -> list[Job]:
    """What others may take of the GPU's memory, or a batch that keeps activations; the cost when nobody does."""
    kept = replace(template, cap_gib=template.cap_gib or 24, sequence=4 * template.sequence, blocks=KEPT)
    beside = Segment(batch=8, label=NEIGHBOUR, settle=AT_REST_STEPS, measure=80)
    steady = Segment(batch=8, label=STEADY, settle=AT_REST_STEPS, measure=40)
    parked = Segment(batch=1, label=PARK, settle=20, measure=10)
    return [
        job(template, "hytrain-growing:auto", beside),
        *(job(template, f"{system}:auto", steady) for system in ("hytrain-growing", "hytrain-unserved")),
        job(_shaped(template, "7b"), "hytrain-growing:auto", parked),
        _four_times(kept, FOUR_TIMES[1]),
    ]


def saving(template: Job) -> list[Job]:
    """The whole state saved while training goes on, and loaded again; labelled, as `plain` has the same steps."""
    jobs = [plain(template, system) for system in ("no-offload", AUTO, "deepspeed-zero2")]
    each = ((one, replace(one.segments[0], label=SAVING, saves=True)) for one in jobs)
    return [replace(one, segments=(steps,)) for one, steps in each]


def experts(template: Job) -> list[Job]:
    """Two of eight experts see a token: few FLOPs stand against many states. Labelled, as `plain` has other shapes."""
    base, jobs = _shaped(template, "5b-experts"), list[Job]()
    for system in ("no-offload", AUTO, f"{AUTO},visit=auto", "deepspeed-zero2", "fsdp2"):
        found = plain(base, system)
        slower = 1.3 if system.startswith("hytrain") else 2.5  # by their CPU's update of three times as many states
        steps = replace(found.segments[0], label=EXPERTS)
        jobs.append(replace(found, segments=(steps,), start_s=found.start_s + 25, step_s=slower * found.step_s))
    return jobs


def power(template: Job) -> list[Job]:
    """The power of the GPU and of the host over a dozen seconds of each system's steps."""

    def metered(system: str, settle: int, measure: int, patience: int = 0) -> Job:
        steps = Segment(batch=8, label=POWER, settle=settle, measure=measure, patience=patience, power=True)
        return job(template, system, steps)

    return [metered("no-offload", 4, 24), metered(AUTO, 30, 24, 20), metered("deepspeed-zero2", 2, 7)]


def monitors(template: Job) -> list[Job]:
    """Fixed shares without a monitor, with 50 of which 25 are stopped, and without again: what is between is noise."""
    steps = Segment(batch=8, settle=6, measure=36)
    counts = {UNWATCHED: 0, WATCHED: 50, UNWATCHED_AGAIN: 0}
    return [job(template, "hytrain:0.5", *(replace(steps, label=each, monitors=n) for each, n in counts.items()))]


def frontier(
    template: Job,
    shape: str,
    caps: Sequence[int],
    *,
    peers: Sequence[str] = WEIGHTLESS,
    start_s: float = 0.0,
    times: float = 1.0,
) -> list[Job]:
    """Below caps on GPU memory, or below the one that was asked for; below the lowest also `peers`.

    `start_s`, `times`: how much longer a start and a step take than with 3.4 B.
    """

    def below(cap_gib: float, system: str) -> Job:
        settle, measure = (32, 8) if system.startswith("hytrain") else (2, 4)
        found = job(
            replace(_shaped(template, shape), cap_gib=cap_gib), system, Segment(batch=8, settle=settle, measure=measure)
        )
        return replace(found, start_s=found.start_s + start_s, step_s=times * found.step_s)

    lowest, asked = caps[0], [template.cap_gib] if template.cap_gib else caps
    return [below(gib, system) for gib in asked for system in (ROAMING, *(peers if gib == lowest else ()))]


def home(template: Job) -> list[Job]:
    """What a GPU of 24 or 12 GB trains in a machine with 64 or 32 GB of memory, with moments in bf16.

    Run it on 8 cores, with `--host-memory-gb 68`: with less than 4 GB left, a system is stopped.
    """

    def on(shape: str, system: str, batch: int, *, cap_gib: int = 24, sequence: int = 1024, step_s: float = 3.0) -> Job:
        base = replace(_shaped(template, shape), cap_gib=cap_gib, sequence=sequence)
        settle, measure = (32, 8) if system.startswith("hytrain") else (2, 4)
        found = job(base, system, Segment(batch=batch, settle=settle, measure=measure))
        return replace(found, start_s=found.start_s + 20, step_s=step_s)

    smaller = f"{ROAMING},state_dtype=bfloat16,host_memory_limit"
    return [
        on("llama3-8b", f"{smaller}={58 * 10**9}", 2, sequence=4096, step_s=6.0),
        on("3b", f"{smaller}={27 * 10**9}", 4, cap_gib=12, step_s=1.5),
        on("7b", f"{smaller}={58 * 10**9}", 4),
        *(on("7b", system, 4) for system in ("bnb-paged-8bit", "torchao-bf16", *WEIGHTLESS)),
    ]


def in_parts(template: Job) -> list[Job]:
    """Offloaded weights below 12 GiB, fetched for each of eight sequences or once for all of them."""
    base = replace(_shaped(template, "7b"), cap_gib=template.cap_gib or 12)
    options = ROAMING.partition(":")[2]
    each = job(base, f"hytrain-accumulating:{options}", Segment(batch=8, label=ONE_BY_ONE, settle=8, measure=4))
    whole = job(replace(base, blocks=IN_PARTS), ROAMING, Segment(batch=8, label=IN_PARTS, settle=20, measure=8))
    return [replace(one, start_s=90, step_s=step_s) for one, step_s in ((each, 10.0), (whole, 6.0))]


def long(template: Job) -> list[Job]:
    """Long sequences below 24 GiB: with activations in host memory, and with those on the GPU."""
    base = replace(_shaped(template, "llama3-8b"), cap_gib=template.cap_gib or 24)

    def over(sequence: int, system: str, settle: int, measure: int, step_s: float) -> Job:
        steps = Segment(batch=1, settle=settle, measure=measure)
        found = job(replace(base, sequence=sequence), system, steps)
        return replace(found, start_s=found.start_s + 20, step_s=step_s)

    resident = f"{ROAMING},state_dtype=bfloat16"
    lengths = ((16384, 20, 8, 12.0), (32768, 8, 4, 32.0))
    systems = (f"{resident},offload_activations", resident)
    return [over(length, system, *more) for length, *more in lengths for system in systems]


def largest(template: Job) -> list[Job]:
    """20.3 B parameters on a GPU of 141 GB: before the first plan that knows the machine, and after it."""
    base = _shaped(template, "20b")
    ends = [
        Segment(batch=1, label="step 4", settle=0, measure=4),
        Segment(batch=1, label="step 20", settle=12, measure=4),
    ]
    return [replace(job(base, ROAMING, *ends), start_s=150, step_s=6)]


# ---------------------------------------------------------------- several ranks


def _on_ranks(template: Job, system: str, *, step_s: float, start_s: float = 0, label: str = "", batch: int = 8) -> Job:
    """One system, with enough steps for HyTrain's planner to be at rest."""
    settle, patience, measure = (20, AT_REST_STEPS, 10) if system.startswith("hytrain") else (2, 0, 6)
    steps = Segment(batch=batch, label=label, settle=settle, patience=patience, measure=measure)
    found = job(template, system, steps)
    return replace(found, step_s=step_s, start_s=start_s or max(found.start_s, 25))


def _shaped(template: Job, shape: str) -> Job:
    """With this shape, unless the caller asked for another."""
    return replace(template, shape=shape) if template.shape == Job.shape else template


def _worlds(template: Job, smallest: int) -> list[int]:
    return [world for world in (1, 2, 4, 8) if smallest <= world <= template.ranks]


def ranks(template: Job) -> list[Job]:
    """HyTrain under FSDP2, beside FSDP2 without offload and other ways to offload."""
    base = _shaped(template, "7b")
    own = [_on_ranks(base, system, step_s=1.1) for system in (RESIDENT, AUTO)]
    peers = {"fsdp2:forward-backward": 1.0, "fsdp2:cpu-offload": 2.0, "deepspeed-zero2": 3.0, "deepspeed-zero3": 4.0}
    return [*own, *(_on_ranks(base, system, step_s=step_s) for system, step_s in peers.items())]


def ranks_clipping(template: Job) -> list[Job]:
    """The same with a limit for the norm: one that clips until the tokens are learned, one that never clips, or always.

    What does not overlap takes the same time with any limit.
    """
    base = _shaped(template, "7b")
    jobs = [(CLIP, RESIDENT), (CLIP, AUTO), (LIMITS[NEVER_CLIPPED], AUTO), (LIMITS[ALWAYS_CLIPPED], AUTO)]
    return [_on_ranks(replace(base, clip=limit), system, step_s=1.1) for limit, system in jobs]


def ranks_offloaded(template: Job) -> list[Job]:
    """Weights in host memory, too: 7 B below 24 GiB a GPU, and 20 B, of which FSDP2 offloads everything."""
    small, large = (replace(template, shape=shape) for shape in ("7b", "20b"))
    below = replace(small, cap_gib=template.cap_gib or 24)
    jobs = [(small, RESIDENT, 8, 1.1), (below, ROAMING, 8, 1.4)]
    jobs += [(replace(large, cap_gib=LARGE_GIB), system, 4, 5.0) for system in (ROAMING, "fsdp2:cpu-offload")]
    return [_on_ranks(base, system, step_s=step_s, batch=batch) for base, system, batch, step_s in jobs]


def ranks_muon(template: Job) -> list[Job]:
    """Muon for the matrices of the blocks, which the ranks share, beside torch's Muon on FSDP2's shards."""
    base = _shaped(template, "3b")
    return [_on_ranks(base, system, step_s=1.5) for system in (RESIDENT_MUON, MUON, "hytrain-muon:1")]


def scaling(template: Job) -> list[Job]:
    """The same batch a GPU on 1, 2, 4 GPUs; on the largest number, the jobs are those of `ranks`."""
    base = _shaped(template, "7b")
    worlds = [replace(base, ranks=world) for world in _worlds(base, 1)]
    return [_on_ranks(each, system, step_s=1.1) for each in worlds for system in (RESIDENT, AUTO)]


def gpt2(template: Job) -> list[Job]:
    """GPT-2 Large on the demo's text: DDP, FSDP2, and FSDP2 with tensor parallelism; all take the same steps."""
    base = replace(template, shape="gpt2-tiny" if template.shape == "tiny" else "gpt2-large")
    steps = [Segment(batch=batch, settle=30, measure=10) for batch in (8, 32)]
    split = [replace(each, label="tensor 2") for each in steps]
    jobs = [job(base, system, *steps) for system in ("ddp", RESIDENT, AUTO)]
    jobs += [job(replace(base, tensor=2), system, *split) for system in (RESIDENT, AUTO)]
    return [replace(each, start_s=25, step_s=0.2) for each in jobs]


def context(template: Job) -> list[Job]:
    """One sequence of 64K tokens, which all ranks share, with 8 B: HyTrain beside FSDP2 with offload and without."""
    tokens = 64 * template.sequence
    base = replace(_shaped(template, "llama3-8b"), sequence=tokens // template.ranks, context=template.ranks)
    few = Segment(batch=1, settle=2, measure=5)
    settled = Segment(batch=1, settle=12, patience=20, measure=6)
    jobs = [job(base, AUTO, settled), *(job(base, system, few) for system in ("fsdp2:cpu-offload", RESIDENT))]
    return [replace(each, start_s=60, step_s=36.0) for each in jobs]


def pipeline(template: Job) -> list[Job]:
    """Pipelines of 2 and 4 stages under two schedules, without offload and with HyTrain."""
    worlds = [replace(template, ranks=world, schedule=name) for world in _worlds(template, 2) for name in SCHEDULES]
    systems = ("no-offload", AUTO)
    return [_on_ranks(each, system, step_s=0.8, label=each.schedule) for each in worlds for system in systems]


def large(template: Job) -> list[Job]:
    """21 B and 41 B parameters below 80 GiB a GPU: without offload, if that fits, and with HyTrain."""
    bases = [replace(_shaped(template, shape), cap_gib=LARGE_GIB) for shape in ("21b", "41b")]
    jobs = [_on_ranks(base, system, step_s=6.0, start_s=75) for base in bases for system in (RESIDENT, AUTO)]
    fewer = {"settle": 12, "patience": 20, "measure": 6}  # of steps that take seconds
    return [replace(each, segments=tuple(replace(one, **fewer) for one in each.segments)) for each in jobs]


def routed(template: Job) -> list[Job]:
    """30 B parameters, of which a token meets 2.5 B, clipped: one sequence of 8K or of 16K tokens a GPU."""
    base = replace(_shaped(template, "30b-experts"), clip=CLIP)
    bases = [replace(base, sequence=sequence) for sequence in (8192, 16384)]
    return [_on_ranks(base, system, step_s=16.0, start_s=90, batch=1) for base in bases for system in (RESIDENT, AUTO)]


def eight(template: Job) -> list[Job]:
    """For eight GPUs of one host: ever more of them, beside other ways to offload; and what takes many of them."""
    worlds = [replace(_shaped(template, "7b"), ranks=world) for world in _worlds(template, 1)]
    peers = {"fsdp2:cpu-offload": 2.0, "deepspeed-zero2": 3.0}
    beside = [_on_ranks(each, system, step_s=step_s) for each in worlds for system, step_s in peers.items()]
    return [*scaling(template), *beside, *large(template), *routed(template)]


#: These take `--gpus` ranks.
RANKED: Final = {
    each.__name__: each
    for each in (ranks, ranks_clipping, ranks_offloaded, ranks_muon)
    + (scaling, gpt2, context, pipeline, large, routed, eight)
}
PARTS: Final[dict[str, Callable[[Job], list[Job]]]] = {
    "main": _plain("no-offload", "forward-backward", AUTO, "hytrain:1", "hytrain:0"),
    "peers": _plain("no-offload", AUTO, *PEERS),
    "muon": _plain("no-offload-muon", MUON, "hytrain-muon:1", "hytrain-muon:0"),
    "sweep": sweep,
    "policies": policies,
    "objectives": objectives,
    "batches": batches,
    "threads": threads,
    "idle": idle,
    "launches": launches,
    "compiled": compiled,
    "rest": rest,
    "clipping": clipping,
    "updates": updates,
    "identical": identical,
    "lean": lean,
    "sft": sft,
    "growing": growing,
    "giving_way": giving_way,
    "saving": saving,
    "experts": experts,
    "power": power,
    "monitors": monitors,
    "frontier_3b": partial(frontier, shape="3b", caps=CAPS),
    "frontier_7b": partial(frontier, shape="7b", caps=CAPS, start_s=35, times=1.9),
    # Its peers would need 16 bytes of host memory for each of 9.8 B parameters, more than 128 GiB. Activations have no
    # room below the lowest cap.
    "frontier_10b": partial(frontier, shape="10b", caps=CAPS, peers=(LEANEST,), start_s=55, times=2.6),
    "home": home,
    "in_parts": in_parts,
    "long": long,
    "largest": largest,
    "cpu": _plain("torch", "hytrain:0", AUTO),
    **RANKED,
}
