"""The parts of the suite: which systems, in which segments. A part fits into a few minutes on an H200.

A machine may be lent for minutes at a time, and the next one is another. So each part that compares brings the systems
that it compares with; where this machine has measured them already, they are not measured again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from benchmarks.host import optimizer_threads
from benchmarks.job import Job, Segment

STATIC_KS: Final = ("0", "0.1", "0.15", "0.2", "0.25", "0.3", "0.5", "1")
BATCHES: Final = (8, 16, 4, 2, 1)
NO_CLIPPING, NEVER_CLIPPED, ALWAYS_CLIPPED = "no clipping", "never clipped", "always clipped"


@dataclass(frozen=True)
class Known:
    """Of a system: seconds to start and seconds a step at batch 8, guessed from runs on an H200 for the budget's sake;
    and whether its update is exact AdamW on fp32 masters."""

    start_s: float
    step_s: float
    exact: str = "yes"


KNOWN: Final = {
    "no-offload": Known(15, 0.6),
    "forward-backward": Known(15, 0.55, "no update"),
    "torch": Known(15, 0.6),
    "hytrain": Known(22, 0.6),
    "torchao-fp32": Known(20, 1.4),
    "torchao-bf16": Known(20, 1.1, "no"),
    "deepspeed-zero2": Known(75, 2.0),
    "deepspeed-twinflow": Known(40, 2.1),
    "deepspeed-superoffload": Known(45, 4.2),
    "deepspeed-zenflow": Known(60, 3.0, "no"),
    "fsdp2": Known(40, 2.2),
}
UNKNOWN: Final = Known(20, 1.0, "–")
#: DeepSpeed compiles its kernel at first use, so its first system starts slowly.
TIMEOUT_S: Final = 240.0
#: What HyTrain's planner has taken of the GPU's memory for a few slow steps at the start is given back by then.
AT_REST_STEPS: Final = 40


def about(system: str) -> Known:
    return KNOWN.get(system.partition(":")[0], UNKNOWN)


def job(template: Job, system: str, *segments: Segment) -> Job:
    known = about(system)
    return replace(template, system=system, segments=segments, start_s=known.start_s, step_s=known.step_s)


def plain(template: Job, system: str, batch: int = 8) -> Job:
    """One system at one batch size; the slow ones with fewer steps, HyTrain's planner at rest."""
    if system.startswith("hytrain"):
        steps = Segment(batch=batch, settle=AT_REST_STEPS if ":auto" in system else 10, measure=20)
    elif about(system).step_s > 1:
        steps = Segment(batch=batch, settle=2, measure=5)
    else:
        steps = Segment(batch=batch, settle=4, measure=10)
    return job(template, system, steps)


def _plain(*systems: str) -> Callable[[Job], list[Job]]:
    return lambda template: [plain(template, system) for system in systems]


def _beside(*systems: str) -> Callable[[Job], list[Job]]:
    """Peers, after what they are compared with."""
    return _plain("no-offload", "hytrain:auto", *systems)


def sweep(template: Job) -> list[Job]:
    """The planner from a cold start, then static k up and down, the planner again at the end, all in one process."""
    segments = [Segment(batch=8, label="auto from the start", settle=10, measure=10)]
    before = 0.2
    for k in (*STATIC_KS, *reversed(STATIC_KS)):
        # The more layers move, the longer their memory takes to be there.
        settle = 6 + round(20 * abs(float(k) - before))
        segments.append(Segment(batch=8, label=f"k={k}", settle=settle, measure=6, patience=12, commands=(("k", k),)))
        before = float(k)
    again = Segment(batch=8, label="auto", settle=16, measure=8, patience=16, commands=(("k", "auto"),))
    return [job(template, "hytrain:auto", *segments, again)]


def policies(template: Job) -> list[Job]:
    """Four policies at five batch sizes in one process; "fixed" gets the ratio that Twin-Flow gets.

    The host drifts: the default comes before the policies that it is compared with, and again after them.
    """
    segments = []
    for batch in BATCHES:
        for policy in ("deadline", "balance", "cotrain", "deadline", "fixed"):
            commands = (("k", "0.5"),) if policy == "fixed" else (("k", "auto"), ("policy", policy))
            # Short steps are over before many layers have moved.
            settle, measure = (10, 5) if batch > 8 else (14, 7) if batch > 4 else (20, 9)
            segments.append(
                Segment(batch=batch, label=policy, settle=settle, measure=measure, patience=20, commands=commands)
            )
    return [job(template, "hytrain:auto", *segments)]


def objectives(template: Job) -> list[Job]:
    """What the planner gives up for memory."""
    segments = [
        Segment(batch=8, label=name, settle=12, measure=8, patience=20, commands=(("objective", name),))
        for name in ("speed", "gpu-memory", "host-memory")
    ]
    return [job(template, "hytrain:auto", *segments)]


def batches(template: Job) -> list[Job]:
    """Other batch sizes, in one process a system; torchao at the smallest, where offloading costs most."""
    return [
        job(template, "no-offload", *(Segment(batch=batch, settle=3, measure=7) for batch in BATCHES)),
        job(template, "forward-backward", *(Segment(batch=batch, settle=3, measure=7) for batch in BATCHES)),
        job(template, "hytrain:auto", *(_settled(batch) for batch in BATCHES)),
        plain(template, "torchao-fp32", batch=1),
    ]


def _settled(batch: int) -> Segment:
    """Memory of layers that have moved is given back for seconds, by the operating system too: more of short steps."""
    return Segment(batch=batch, settle=14 + 48 // batch, measure=8, patience=30)


def threads(template: Job) -> list[Job]:
    """The optimizer's threads halved by command and given back, and what static k would have given meanwhile."""
    every = optimizer_threads()
    half = max(every // 2, 1)

    def moment(label: str, *commands: tuple[str, str], settle: int = 20) -> Segment:
        return Segment(batch=8, label=label, settle=settle, measure=10, commands=commands)

    def static(label: str, *ks: str) -> list[Segment]:
        return [
            Segment(batch=8, label=f"{label}, k={k}", settle=6, measure=5, patience=6, commands=(("k", k),)) for k in ks
        ]

    segments = [
        moment("all threads", settle=14),
        moment("halved", ("threads", str(half))),
        *static("halved", "0.2", "0.3", "0.4", "0.5", "0.6", "0.8"),
        moment("halved again", ("k", "auto"), settle=10),
        moment("given back", ("threads", str(every))),
        *static("given back", "0.1", "0.2", "0.3", "0.4"),
    ]
    return [job(template, f"hytrain:auto,threads={every}", *segments)]


def idle(template: Job) -> list[Job]:
    """The GPU's idle share and its causes; with half of the layers on the GPU, no forward waits for weights."""
    return [
        job(template, system, Segment(batch=8, label="profiled", settle=settle, measure=7, patience=16, profile=True))
        for system, settle in (("hytrain:auto", 14), ("hytrain:0.5", 6), ("no-offload", 4), ("forward-backward", 4))
    ]


def clipping(template: Job) -> list[Job]:
    """The global norm clipped never and always, beside not asking for it, and beside a peer that clips."""
    limits = {NO_CLIPPING: 0.0, NEVER_CLIPPED: 1e6, ALWAYS_CLIPPED: 1e-3}
    jobs = []
    for label, limit in limits.items():
        steps = Segment(batch=8, label=label, settle=24, measure=10, patience=20)
        jobs.append(job(replace(template, clip=limit), "hytrain:auto", steps))
    always = Segment(batch=8, label=ALWAYS_CLIPPED, settle=2, measure=5)
    return [*jobs, job(replace(template, clip=limits[ALWAYS_CLIPPED]), "deepspeed-zero2", always)]


def identical(template: Job) -> list[Job]:
    """200 steps, overlapped with layers moving as the planner likes, and with nothing overlapped: the same bits?"""
    small = replace(template, shape="1b" if template.shape == "3b" else template.shape, deterministic=True)
    steps = Segment(batch=2, label="200 steps", settle=190, measure=10, digest=True)
    systems = ("hytrain:auto", "hytrain:0,serial")
    return [replace(job(small, system, steps), step_s=0.6) for system in systems]


PARTS: Final[dict[str, Callable[[Job], list[Job]]]] = {
    "main": _plain("no-offload", "forward-backward", "hytrain:auto", "hytrain:1", "hytrain:0"),
    "peers": _beside("torchao-fp32", "deepspeed-zero2", "fsdp2", "deepspeed-twinflow", "torchao-bf16"),
    "peers-slow": _beside("deepspeed-superoffload", "deepspeed-zenflow"),
    "sweep": sweep,
    "policies": policies,
    "objectives": objectives,
    "batches": batches,
    "threads": threads,
    "idle": idle,
    "clipping": clipping,
    "identical": identical,
    "cpu": _plain("torch", "hytrain:0", "hytrain:auto"),
}
