"""Every message of a run, in the order of a gradient's life. Data only; `codec` puts them on the wire.

    handshake   Hello -> Welcome -> Ready
    layers      LayerTable -> Calibration -> PlanesReady -> TakeOver
    a step      StepBegin -> GradReady ... -> (Verdict) -> WeightsReady ...
    ownership   Plan -> PlanAck -> Reassign -> AllocatePlanes / TakeOver / GiveUp -> PlanApplied
    watching    TrainerReport, OptimizerReport, SetThreads, SetMode, Log -> StatusRequest, Status, Command, CommandReply
    the end     Failure, SessionEnded, Goodbye

Names: a fact (`GradReady`) or an order (`Reassign`). Values that cannot be are refused on construction,
so a message that decodes is in range; whether it fits the layer table is for its receiver to check.
Who sent a message is not in it: the envelope names the sender's address.
Units are in the names; times are seconds of the node's monotonic clock.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from protocol.address import Address
from protocol.placement import PLACEMENTS, Placement

#: Of the weights, each with those that their gradients may have.
GRADS_DTYPES = {"bfloat16": ("bfloat16",), "float16": ("float16",), "float32": ("float32", "bfloat16")}
OBJECTIVES = ("speed", "gpu-memory", "host-memory")
_INBOX = re.compile(r"[a-z]{1,16}(-[0-9a-f]{1,8}){0,2}")


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ValueError(sentence)


def _require_inbox(name: str) -> None:
    _require(_INBOX.fullmatch(name) is not None, f"{name!r} is no name of an inbox")


def _require_placements(placements: tuple[str, ...]) -> None:
    unknown = [name for name in placements if name not in PLACEMENTS]
    _require(not unknown, f"unknown placements {unknown}; known: {', '.join(PLACEMENTS)}")


# ---------------------------------------------------------------- handshake


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A worker to the coordinator: here I am. `inbox` is the name of its inbox in the run's socket folder."""

    pid: int
    inbox: str

    def __post_init__(self) -> None:
        _require(self.pid > 0, "pid must be positive")
        _require_inbox(self.inbox)


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The coordinator to a worker: you belong to this run."""

    run_name: str
    coordinator_pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A worker to the coordinator, as the last act of a successful construction."""

    detail: str


# ---------------------------------------------------------------- the layer table


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One parameter, or one piece of it, inside a layer. `group` is the index of its parameter group."""

    name: str
    numel: int
    dtype: str
    grads_dtype: str
    group: int

    def __post_init__(self) -> None:
        _require(self.numel > 0, f"segment {self.name!r} has no elements")
        _require(self.dtype in GRADS_DTYPES, f"segment {self.name!r} has dtype {self.dtype!r}")
        _require(
            self.grads_dtype in GRADS_DTYPES[self.dtype],
            f"segment {self.name!r} cannot have {self.grads_dtype!r} gradients",
        )
        _require(self.group >= 0, "a parameter group's index is not negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What is scheduled and moved as one: a stable ID, its position in the forward order, its segments."""

    lid: int
    position: int
    name: str
    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        _require(self.lid >= 0 and self.position >= 0, "layer IDs and positions are not negative")
        _require(len(self.segments) > 0, f"layer {self.lid} has no segments")

    @property
    def numel(self) -> int:
        return sum(segment.numel for segment in self.segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTable:
    """The trainer to the coordinator, and on to the optimizer: the layers, and how the user wants them placed.

    It takes that way so that it reaches the optimizer before the first plan, which the coordinator sends after it.

    `inbox` is the trainer's, as in its Hello: the optimizer writes to it.
    `awaits_verdict`: updates hold only after the end of backward. `speculate`: whether the CPU makes them before that,
    None if the coordinator is to choose. `k` is None for "auto". `gpu_bytes` bounds the optimizer state of GPU-owned
    layers, None if unknown. `continues`: the last trainer's training goes on with these layers, as it was commanded to.
    `threads`, which the coordinator adds: how many are to update on the CPU, None for as many as it begins with.
    """

    layers: tuple[Layer, ...]
    inbox: str
    device: str
    policy: str
    objective: str
    awaits_verdict: bool
    speculate: bool | None
    k: float | None
    backend: str
    gpu_bytes: int | None
    host_bytes: int | None
    continues: bool
    threads: int | None = None

    def __post_init__(self) -> None:
        _require(len(self.layers) > 0, "a layer table needs a layer")
        _require_inbox(self.inbox)
        _require(
            [layer.lid for layer in self.layers] == list(range(len(self.layers))),
            "layer IDs must be 0, 1, 2, … in the table's order",
        )
        _require(
            sorted(layer.position for layer in self.layers) == list(range(len(self.layers))),
            "positions must be a permutation of 0, 1, 2, …",
        )
        _require(self.k is None or 0.0 <= self.k <= 1.0, f"k is {self.k}, not in [0, 1]")
        _require(self.objective in OBJECTIVES, f"unknown objective {self.objective!r}")
        _require(self.threads is None or self.threads >= 1, f"{self.threads} threads")
        _require(self.awaits_verdict or self.speculate is False, "without a verdict there is nothing to be ahead of")

    @property
    def banks(self) -> int:
        """How many banks of planes a CPU-owned layer has: two, if its updates may have to be undone."""
        return 1 if self.speculate is False else 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Trainer or optimizer to the coordinator, before the first step: what one parameter takes, in seconds.

    The copies of one parameter's gradient out and of its weight in, and one parameter's update on CPU and GPU.
    None where the sender cannot know.
    """

    d2h_s: float | None = None
    h2d_s: float | None = None
    cpu_update_s: float | None = None
    gpu_update_s: float | None = None

    def __post_init__(self) -> None:
        given = (self.d2h_s, self.h2d_s, self.cpu_update_s, self.gpu_update_s)
        _require(all(value is None or 0.0 < value < 1.0 for value in given), "seconds a parameter, above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionsLearned:
    """The trainer to optimizer and coordinator: the observed forward order; `positions[lid]`."""

    positions: tuple[int, ...]

    def __post_init__(self) -> None:
        _require(sorted(self.positions) == list(range(len(self.positions))), "positions must be a permutation")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanesReady:
    """The optimizer to the trainer, beside the descriptor of a layer's arena (SCM_RIGHTS): touched, zeroed."""

    lid: int
    nbytes: int

    def __post_init__(self) -> None:
        _require(self.lid >= 0 and self.nbytes > 0, "a layer's arena has an ID and a size")


# ---------------------------------------------------------------- a step


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHyper:
    """One parameter group's hyperparameters as read when the step's last backward begins."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBegin:
    """The trainer to the optimizer, before the step's first GradReady.

    `awaits_verdict`: gradients may have to be scaled, or left alone; a Verdict follows, and no WeightsReady before it.
    """

    step: int
    groups: tuple[GroupHyper, ...]
    awaits_verdict: bool

    def __post_init__(self) -> None:
        _require(self.step >= 0, "steps count from 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class GradReady:
    """The gradient of layer `lid` lies complete in its `grads` plane.

    `counts[i]` is segment i's own step count after this update, or 0 if it had no gradient in this step. `exceeds`: the
    step's gradients so far are enough to say that they will be scaled, or the step skipped. It is a hint.
    """

    step: int
    lid: int
    counts: tuple[int, ...]
    exceeds: bool = False

    def __post_init__(self) -> None:
        _require(self.step >= 0 and self.lid >= 0, "steps and layer IDs are not negative")
        _require(min(self.counts, default=-1) >= 0 < max(self.counts, default=0), "step counts of an update")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The trainer to both, when backward is over: the step's gradients are multiplied by `scale`, or it is skipped."""

    step: int
    scale: float
    skipped: bool

    def __post_init__(self) -> None:
        _require(self.step >= 0, "steps count from 0")
        _require(not self.scale < 0.0 and not math.isinf(self.scale), f"a scale of {self.scale}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsReady:
    """Layer `lid` is updated: `weights` may be copied, `grads` may be overwritten.

    `banks[i]` is the bank in which segment i's planes hold from now on.
    """

    step: int
    lid: int
    banks: tuple[int, ...]

    def __post_init__(self) -> None:
        _require(self.step >= 0 and self.lid >= 0, "steps and layer IDs are not negative")
        _require(set(self.banks) <= {0, 1}, f"banks {self.banks}, not 0 or 1")


# ---------------------------------------------------------------- ownership


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The coordinator to trainer and optimizer: the placement of each layer, by LID, from step `step` on, and why."""

    plan_id: int
    step: int
    placements: tuple[str, ...]
    k: float
    policy: str
    reason: str
    predicted_step_s: float | None

    def __post_init__(self) -> None:
        _require(self.plan_id >= 0 and self.step >= 0, "plans and steps are numbered from 0")
        _require_placements(self.placements)
        _require(0.0 <= self.k <= 1.0, f"k is {self.k}, not in [0, 1]")

    def placement(self, lid: int) -> Placement:
        """The placement of layer `lid`."""
        return PLACEMENTS[self.placements[lid]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAck:
    """Trainer or optimizer to the coordinator: the plan can hold; or it cannot, and why."""

    plan_id: int
    accepted: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reassign:
    """The coordinator to the trainer, once both have acknowledged: the plan holds from its step on."""

    plan_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanApplied:
    """The trainer to both: layers are placed so from step `step` on, the plan's own step or a later one.

    If the GPU has no room for one of the plan's layers, the placements differ from the plan's. `handover_s` is how
    long the training loop had to wait.
    """

    plan_id: int
    step: int
    placements: tuple[str, ...]
    moved: int
    handover_s: float

    def __post_init__(self) -> None:
        _require_placements(self.placements)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatePlanes:
    """The trainer to the optimizer: make this layer's planes; a PlanesReady answers beside the descriptor."""

    lid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeOver:
    """The trainer to the optimizer: the layer's state is in its planes, it is yours from step `step` on."""

    plan_id: int
    lid: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """The trainer to the optimizer: the layer's state has been read, it is the GPU's from step `step` on."""

    plan_id: int
    lid: int
    step: int


# ---------------------------------------------------------------- measurements and watching


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """One layer in one step, seconds; None where nothing was measured."""

    lid: int
    forward_s: float | None = None
    backward_s: float | None = None
    d2h_s: float | None = None
    h2d_s: float | None = None
    gpu_update_s: float | None = None
    stall_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerReport:
    """The trainer to the coordinator after each step.

    `layers`, `stall_s`, `middle_s`, `starved` are of step `measured`, the last one that the device had passed, None
    while there is none. Of several backwards in a step, `layers` has the first forward and the last backward,
    `middle_s` all between. In the share `starved` of layers' backwards the device had run dry, waiting for launches.
    `step` is the step of the other messages; `number` counts from 1 and goes on where a resumed run stopped. `moving`
    says that memory of layers that change owners was made ready or given back during `step`, or their state copied.
    """

    step: int
    number: int
    at_s: float
    step_s: float
    measured: int | None
    stall_s: float
    middle_s: float
    starved: float
    k: float
    moving: bool
    placements: tuple[str, ...]
    gpu_free_bytes: int | None
    layers: tuple[LayerTimes, ...]

    def __post_init__(self) -> None:
        _require_placements(self.placements)


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuUpdate:
    """One layer's update by the optimizer process: the time of its tiles, with what was handled between them, and the
    time from GradReady to WeightsReady.
    """

    lid: int
    update_s: float
    queued_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerReport:
    """The optimizer to the coordinator, once all that it was sent in a step is done, by so many threads."""

    step: int
    threads: int
    busy_s: float
    updates: tuple[CpuUpdate, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetThreads:
    """The coordinator to the optimizer: update with so many threads from the next tile on."""

    threads: int

    def __post_init__(self) -> None:
        _require(self.threads > 0, "an update needs a thread")


@dataclass(frozen=True, slots=True, kw_only=True)
class SetMode:
    """The coordinator to the optimizer: from the next StepBegin on, update ahead of the verdict, or wait for it."""

    speculate: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """The training loop's own numbers (loss, tokens/s, …), merged into the record of step number `step`."""

    step: int
    numbers: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusRequest:
    """A monitor asks the coordinator for the newest status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process of the run, for people."""

    address: Address
    pid: int
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The coordinator to monitors: the newest record of metrics.jsonl as JSON text, and who does what."""

    run_name: str
    run_dir: str
    record: str
    processes: tuple[Process, ...]
    layer_names: tuple[str, ...]
    layer_numels: tuple[int, ...]
    layer_positions: tuple[int, ...]
    placements: tuple[str, ...]
    policy: str
    reason: str

    def __post_init__(self) -> None:
        _require_placements(self.placements)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A monitor asks the coordinator for one of the allowed commands."""

    name: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandReply:
    ok: bool
    text: str


# ---------------------------------------------------------------- the end


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A worker to the others as it dies: what went wrong, where, and the traceback."""

    step: int | None
    lid: int | None
    error: str
    traceback: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEnded:
    """The optimizer to the coordinator: the trainer's Goodbye has come, all its layers are given back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye:
    """The run is over for its sender, and that is as it should be."""


Message = (
    Hello
    | Welcome
    | Ready
    | LayerTable
    | Calibration
    | PositionsLearned
    | PlanesReady
    | StepBegin
    | GradReady
    | Verdict
    | WeightsReady
    | Plan
    | PlanAck
    | Reassign
    | PlanApplied
    | AllocatePlanes
    | TakeOver
    | GiveUp
    | TrainerReport
    | OptimizerReport
    | SetThreads
    | SetMode
    | Log
    | StatusRequest
    | Status
    | Command
    | CommandReply
    | Failure
    | SessionEnded
    | Goodbye
)
