"""All messages between the processes of a run, as docs/architecture.md tells them. `codec` encodes and decodes them.

A message is named after a fact (`GradReady`) or an order (`Reassign`). Construction rejects values that are out of
range, so every decoded message is in range. The receiver checks whether it fits the layer table. A message does not
name its sender; the envelope has the sender's address. Times are seconds of the node's monotonic clock.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import Field, dataclass
from typing import Annotated, Any, ClassVar, NamedTuple, dataclass_transform, get_args, get_type_hints

from protocol.address import Address
from protocol.placement import Places
from protocol.rules import MOMENTS, ON_DEVICE, Hyper

#: The dtypes of weights, each with the dtypes that their gradients may have.
GRADS_DTYPES = {"bfloat16": ("bfloat16",), "float16": ("float16",), "float32": ("float32", "bfloat16")}
#: The dtypes of the moments; kernels/float8.py describes float8. With another one than float32 the update is not exact.
STATE_DTYPES = ("float32", "bfloat16", "float8")
#: The dtypes of the masters of bfloat16 weights. With bfloat16 these weights are masters themselves, and not exact.
MASTER_DTYPES = ("float32", "bfloat16")
#: The number of float modes; kernels/backend.py describes them.
FLOAT_MODES = 16
OBJECTIVES = ("speed", "gpu-memory", "host-memory")
#: How the coordinator decides which layers are updated where.
POLICIES = ("fixed", "balance", "deadline", "random")
#: The most steps of a timeline that a monitor asks for.
MAX_TRACED_STEPS = 1000
_INBOX = re.compile(r"[a-z]{1,16}(-[0-9a-f]{1,8}){0,2}")


class Within(NamedTuple):
    """What a number in a field has to be, or each of several. None is allowed where the type allows it."""

    least: float
    most: float = math.inf


Count = Annotated[int, Within(0)]
Positive = Annotated[int, Within(1)]
Pid = Annotated[int, Within(1, (1 << 31) - 1)]
Bank = Annotated[int, Within(0, 1)]
Traceable = Annotated[int, Within(0, MAX_TRACED_STEPS)]
Share = Annotated[float, Within(0.0, 1.0)]
#: Seconds per parameter: less than one, and more than none.
Rate = Annotated[float, Within(math.nextafter(0.0, 1.0), math.nextafter(1.0, 0.0))]


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Record:
    """A frozen dataclass whose fields are given by name, and are what they are declared to be."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    _declared: ClassVar[tuple[tuple[str, float, float], ...]]

    def __init_subclass__(cls) -> None:
        hints = get_type_hints(cls, include_extras=True)
        cls._declared = tuple((name, *bounds) for name, hint in hints.items() for bounds in _bounds(hint))
        if cls._declared or "_check" in vars(cls):
            cls.__post_init__ = cls._check_all  # type: ignore[attr-defined]
        dataclass(frozen=True, kw_only=True)(cls)

    def _check_all(self) -> None:
        values = self.__dict__  # little is called for what is right: messages are made while the device waits
        for name, least, most in self._declared:
            value = values[name]
            for each in value if value.__class__ is tuple else (value,):
                if each is not None and not least <= each <= most:
                    raise ValueError(f"{name} {each!r} is not in [{least}, {most}]")
        self._check()

    def _check(self) -> None:
        """Raise ValueError unless the fields fit each other."""


def _bounds(hint: Any) -> Iterator[Within]:
    yield from getattr(hint, "__metadata__", ())
    for inner in get_args(hint):
        yield from _bounds(inner)


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ValueError(sentence)


def _require_inbox(name: str) -> None:
    _require(_INBOX.fullmatch(name) is not None, f"{name!r} is not an inbox name")


class Message(Record):
    """The base class of everything that is sent on its own. `by`: the roles that send it. From others it is dropped."""

    by: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, by: str) -> None:
        super().__init_subclass__()
        cls.by = tuple(by.split())


# ---------------------------------------------------------------- handshake


class Hello(Message, by="trainer optimizer"):
    """Worker to coordinator: the first message. `inbox` names the worker's inbox in the run's socket folder.

    `attempt`: that of the Introduce which this answers; 0 if nobody has asked.
    """

    pid: Pid
    inbox: str
    attempt: Count = 0

    def _check(self) -> None:
        _require_inbox(self.inbox)


class Welcome(Message, by="coordinator"):
    """Coordinator to worker: the answer to Hello. The worker belongs to this run."""

    coordinator_pid: int


class Ready(Message, by="trainer optimizer"):
    """Worker to coordinator, after the worker has been constructed successfully.

    `cores`: those of an optimizer, which has at most one thread on each. 0: of another, or not known.
    """

    detail: str
    cores: Count = 0


# ---------------------------------------------------------------- the layer table


class Segment(Record):
    """A parameter, or a piece of one, inside a layer. `group` is the index of its parameter group, `rule` updates it.

    `key` stands for the parameter, and `start` is the piece's first element in it: they choose the random bits with
    which moments and weights are rounded, if moments or masters are not float32.

    A rule that updates whole matrices has the parameter's `shape`: (rows, columns). If it lies `by_columns`, its
    columns come one after the other; otherwise, its rows. If ranks share the matrix, the segment is this rank's part.

    `lanes` and `fuses`: how torch computes on the trainer's CPU, which decides about roundings
    (`hytrain.kernels.torch_backend.Vectors`).
    """

    name: str
    numel: Positive
    dtype: str
    grads_dtype: str
    group: Count
    state_dtype: str = "float32"
    key: int = 0
    start: Count = 0
    master_dtype: str = "float32"
    rule: str = "adamw"
    shape: tuple[int, ...] = ()
    by_columns: bool = False
    lanes: int = 8
    fuses: bool = True

    def _check(self) -> None:
        _require(self.rule in MOMENTS, f"segment {self.name!r} has the unknown rule {self.rule!r}")
        _require(self.dtype in GRADS_DTYPES, f"segment {self.name!r} has dtype {self.dtype!r}")
        known = self.grads_dtype in GRADS_DTYPES[self.dtype]
        _require(known, f"segment {self.name!r} cannot have {self.grads_dtype!r} gradients")
        _require(self.state_dtype in STATE_DTYPES, f"segment {self.name!r} cannot have {self.state_dtype!r} moments")
        fits = self.master_dtype == "float32" or self.dtype == self.master_dtype == "bfloat16"
        _require(fits, f"segment {self.name!r} cannot have {self.master_dtype!r} masters of {self.dtype} weights")
        _require(0 <= self.key < 1 << 32, f"segment {self.name!r} has an impossible key")
        _require(0 < self.lanes <= 128, f"segment {self.name!r} is computed in vectors of {self.lanes} elements")
        fits = self.rule not in ON_DEVICE or (len(self.shape) == 2 and math.prod(self.shape) >= self.numel)
        _require(fits, f"segment {self.name!r} of {self.numel} elements is no matrix of shape {self.shape}")

    @property
    def is_shared(self) -> bool:
        """Whether it is a part of a matrix that is updated as a whole: other ranks have the rest."""
        return self.rule in ON_DEVICE and self.numel < math.prod(self.shape)


class Layer(Record):
    """The unit of scheduling and moving: a stable ID, the position in the forward order, and the segments."""

    lid: Count
    position: Count
    name: str
    segments: tuple[Segment, ...]

    def _check(self) -> None:
        _require(len(self.segments) > 0, f"layer {self.lid} has no segments")

    @property
    def numel(self) -> int:
        return sum(segment.numel for segment in self.segments)

    @property
    def stays_on_device(self) -> bool:
        """Whether the trainer's device makes all of its updates: its placements are "gpu" and "visit"."""
        return any(segment.rule in ON_DEVICE for segment in self.segments)


class LayerTable(Message, by="trainer coordinator"):
    """Trainer to coordinator, which forwards it to the optimizer before the first plan: layers and the user's wishes.

    `inbox`: the trainer's inbox, as in its Hello; the optimizer sends to it.
    `awaits_verdict`: updates become final only at the end of backward.
    `in_step`: updates begin in `step()`, until a report says otherwise.
    `speculate`: whether the CPU updates before that; None lets the coordinator choose.
    `k`: None means "auto". `visit`, `offload_weights`: the fractions of the parameters whose state visits the GPU, and
    whose weights rest in host memory; None means "auto".
    `blocks`: the LIDs of each block that can be offloaded. `window_bytes`: the GPU memory through which they come.
    `ring_bytes`: the GPU memory through which state visits. `hold_bytes`: what may wait for that there.
    `gpu_bytes`: the limit for the optimizer state of GPU-owned layers and the weights of those blocks; None if unknown.
    `continues`: this trainer continues the previous trainer's training, so commands given to that one still apply.
    `threads`: set by the coordinator; how many threads update on the CPU. None keeps the number at the start.
    `rank` of `world`: the trainer's place in its job.
    `gpu`: the UUID of its GPU, as NVML has it; empty without one.
    """

    layers: tuple[Layer, ...]
    inbox: str
    device: str
    policy: str
    objective: str
    awaits_verdict: bool
    speculate: bool | None
    k: Share | None
    backend: str
    gpu_bytes: int | None
    host_bytes: int | None
    continues: bool
    threads: Positive | None = None
    rank: Count = 0
    world: int = 1
    visit: Share | None = 0.0
    offload_weights: Share | None = 0.0
    blocks: tuple[tuple[int, ...], ...] = ()
    window_bytes: Count = 0
    ring_bytes: Count = 0
    hold_bytes: Count = 0
    gpu: str = ""
    in_step: bool = False

    def _check(self) -> None:
        numbers = list(range(len(self.layers)))
        _require(len(numbers) > 0, "a layer table needs a layer")
        _require_inbox(self.inbox)
        _require([layer.lid for layer in self.layers] == numbers, "layer IDs must be 0, 1, 2, … in the table's order")
        positions = sorted(layer.position for layer in self.layers)
        _require(positions == numbers, "positions must be a permutation of 0, 1, 2, …")
        in_blocks = [lid for block in self.blocks for lid in block]
        _require(all(self.blocks) and len(set(in_blocks)) == len(in_blocks), "a layer is in one block, if any")
        _require(set(in_blocks) <= set(numbers), "blocks are of layers in the table")
        _require(self.policy in POLICIES, f"unknown policy {self.policy!r}")
        _require(self.policy != "fixed" or self.k is not None, 'policy "fixed" needs a k')
        _require(self.objective in OBJECTIVES, f"unknown objective {self.objective!r}")
        _require(self.awaits_verdict or self.speculate is False, "speculating needs a verdict to come")
        _require(self.rank < self.world, f"rank {self.rank} of {self.world}")

    @property
    def banks(self) -> int:
        """The number of banks of a CPU-owned layer: two if its updates may have to be undone."""
        return 1 if self.speculate is False else 2


class Calibration(Message, by="trainer optimizer"):
    """Trainer or optimizer to coordinator, before the first step: seconds per parameter.

    `d2h_s`: copying the gradient to the host. `h2d_s`: copying the weight to the GPU. The other two: the update on the
    CPU and on the GPU. None if the sender cannot know.
    """

    d2h_s: Rate | None = None
    h2d_s: Rate | None = None
    cpu_update_s: Rate | None = None
    gpu_update_s: Rate | None = None


class PositionsLearned(Message, by="trainer"):
    """Trainer to optimizer and coordinator: the observed forward order, as `positions[lid]`."""

    positions: tuple[int, ...]

    def _check(self) -> None:
        _require(sorted(self.positions) == list(range(len(self.positions))), "positions must be a permutation")


class PlanesReady(Message, by="optimizer trainer"):
    """Optimizer to trainer, with the descriptor of a layer's arena (SCM_RIGHTS). The memory is touched and zeroed.

    Trainer to optimizer, before `Evicted`: the arena that it has made itself, with the layer's state.
    """

    lid: Count


class PlanesRefused(Message, by="optimizer"):
    """Optimizer to trainer, in place of `PlanesReady`: there is no memory or no descriptor for a layer's arena."""

    lid: Count
    reason: str


# ---------------------------------------------------------------- a step


class StepBegin(Message, by="trainer"):
    """Trainer to optimizer, before the step's first GradReady.

    `groups`: the hyperparameters of each parameter group, read when the step's last backward begins.
    `float_mode`: how that thread treats denormal numbers and rounds, if it makes updates on a CPU, too.
    `awaits_verdict`: a Verdict will scale the gradients or skip the step. No WeightsReady may be sent before it.
    """

    step: Count
    groups: tuple[Hyper, ...]
    awaits_verdict: bool
    float_mode: int = 0

    def _check(self) -> None:
        _require(0 <= self.float_mode < FLOAT_MODES, f"{self.float_mode} is no float mode")


class GradReady(Message, by="trainer"):
    """Trainer to optimizer: the whole gradient of layer `lid` is in its `grads` plane.

    `counts[i]`: the step count of segment i after this update, or 0 if it had no gradient in this step.
    """

    step: Count
    lid: Count
    counts: tuple[Count, ...]

    def _check(self) -> None:
        _require(any(self.counts), "no segment has a gradient")


class Verdict(Message, by="trainer"):
    """Trainer to both, after backward: multiply the step's gradients by `scale`, or skip the step.

    `rounds`: as the loop has multiplied them, in their own dtype, by any number.
    """

    step: Count
    scale: float
    skipped: bool
    rounds: bool = False

    def _check(self) -> None:
        possible = self.rounds or not (self.scale < 0.0 or math.isinf(self.scale))
        _require(possible, f"the scale {self.scale} is negative or infinite")


class WeightsReady(Message, by="optimizer"):
    """Optimizer to trainer: layer `lid` is updated. `weights` may be copied, `grads` may be overwritten.

    `banks[i]` is the current bank of segment i from now on.
    """

    step: Count
    lid: Count
    banks: tuple[Bank, ...]


# ---------------------------------------------------------------- ownership


class Plan(Message, by="coordinator"):
    """Coordinator to trainer and optimizer: the placement of each layer from step `step` on, and why."""

    plan_id: Count
    step: Count
    places: Places
    k: Share
    policy: str
    reason: str
    predicted_step_s: float | None


class PlanAck(Message, by="trainer optimizer"):
    """Trainer or optimizer to coordinator: accepts the plan, or refuses it with a reason."""

    plan_id: int
    accepted: bool
    reason: str


class Reassign(Message, by="coordinator"):
    """Coordinator to trainer, once both have accepted: the plan takes effect at its step."""

    plan_id: int


class PlanApplied(Message, by="trainer"):
    """Trainer to both: the placements in effect from step `step` on, which is the plan's step or a later one.

    The placements differ from the plan's if the GPU has no room for one of its layers. Weights rest where they are to
    rest from their next forward on. `handover_s` is how long the training loop had to wait.
    """

    plan_id: int
    step: int
    places: Places
    moved: int
    handover_s: float


class Evicted(Message, by="trainer"):
    """Trainer to both: a layer's state has left the GPU, in step `step`, and visits it from now on. No plan said so.

    So many bytes were freed there in `evict_s`, for `reason`.
    """

    lid: Count
    step: Count
    nbytes: Count
    evict_s: float
    reason: str


class AllocatePlanes(Message, by="trainer"):
    """Trainer to optimizer: create a layer's planes. The answer is PlanesReady, or PlanesRefused."""

    lid: int


class ReleasePlanes(Message, by="trainer"):
    """Trainer to optimizer: planes that it asked for, and may have, will not be used."""

    lid: int


class TakeOver(Message, by="trainer"):
    """Trainer to optimizer: the layer's state is in its planes, and the optimizer owns it from step `step` on.

    `banks`: the current bank of each segment, as in `WeightsReady`.
    """

    plan_id: int
    lid: int
    step: int
    banks: tuple[Bank, ...]


class Counted(Message, by="trainer"):
    """Trainer to optimizer, before a step begins: how many updates each segment of layer `lid` has had.

    Sent after TakeOver, and where the optimizer's own count is not the trainer's, since state was loaded.
    """

    lid: Count
    counts: tuple[Count, ...]


class GiveUp(Message, by="trainer"):
    """Trainer to optimizer: the GPU updates the layer from step `step` on.

    If its state is on the GPU then, it has been read, and the planes can be released.
    """

    plan_id: int
    lid: int
    step: int


# ---------------------------------------------------------------- another coordinator


class Introduce(Message, by="coordinator"):
    """Coordinator to all workers, at its start in the place of one that has died: say who you are, as to that one.

    The answers are Hello and Ready. Behind them, an optimizer sends its last Calibration, and a trainer, after its
    step, Rejoin. `attempt` counts from 1: only an answer to the last one says that its connection is heard.
    """

    coordinator_pid: Pid
    attempt: Positive


class Rejoin(Message, by="trainer"):
    """Trainer to coordinator, after Introduce and between two steps: what the last coordinator knew of its layers.

    `plan`: the one that it has acknowledged last. `holds`: that is agreed on, and not applied yet.
    `places`: as in PlanApplied. `step`: so many have ended. `moved`: so many layers have moved. `skipped`: so many
    steps were skipped. `draws`: it draws a timeline.
    What was reported and is not recorded yet comes again, behind this message.
    """

    table: LayerTable
    calibration: Calibration
    plan: Plan
    holds: bool
    places: Places
    step: Count
    moved: Count
    skipped: Count
    draws: bool

    def _check(self) -> None:
        placed = {len(self.places), len(self.plan.places)}
        _require(placed == {len(self.table.layers)}, "each layer has a placement, now and with the plan")


# ---------------------------------------------------------------- measurements and watching


class LayerTimes(Record):
    """The times of one layer in one step, in seconds; None if not measured."""

    lid: int
    forward_s: float | None = None
    backward_s: float | None = None
    d2h_s: float | None = None
    h2d_s: float | None = None
    gpu_update_s: float | None = None
    visit_s: float | None = None
    stall_s: float | None = None


class TrainerReport(Message, by="trainer"):
    """Trainer to coordinator, after each step.

    `step`: the step number that all messages use. `number`: counts from 1, and continues after a resume.
    `at_s`: monotonic; `wall_time`: seconds since 1970.
    `measured`: the last step that the device has finished, None if there is none. `layers`, `stall_s`, `exposed_s`,
    `middle_s`, `starved` and `gather_s` belong to this step.
    `layers`: if a step has several backwards, the first forward and the last backward. `middle_s`: everything between,
    and between the last backward and `step()` if updates begin there.
    `exposed_s`: how long forward waits for FSDP2's all-gathers and for its copies of what was gathered, without the
    wait for this rank's own updates. On device "cpu", only for the copies.
    `starved`: the share of layers' backwards in which the device ran out of queued work.
    `gather_s`: the time of FSDP2's all-gathers, including the wait for ranks that join them later; None without any.
    `in_step`: updates began in `step()`, not in backward.
    `moving`: during `step`, memory of moving layers was prepared or freed, or their state was copied.
    `places`: those in effect in `step`.
    `gpu_usable_bytes`: what the trainer can have of the GPU's memory, less a margin. `gpu_needed_bytes`: the most that
    it has had so far. None without a GPU. `waited_bytes`: the most that gradients took in `step` which waited for
    visits, with the memory by which the window of offloaded weights was wider.
    `activation_bytes`: pinned host memory for activations, all of which one backward brings back to the device.
    `to_device_bytes`, `to_host_bytes`: copied since the report before, or since training began.
    `host_free_bytes`: what planes may still take of the host's memory, as others left it after `step`; below 0 if some
    of the margin is used. None if it was not asked for.
    `saves`: the loop saves checkpoints when it is asked to.
    """

    step: int
    number: int
    at_s: float
    wall_time: float
    step_s: float
    measured: int | None
    stall_s: float
    exposed_s: float
    middle_s: float
    starved: float
    gather_s: float | None
    k: float
    moving: bool
    places: Places
    gpu_usable_bytes: int | None
    gpu_needed_bytes: int | None
    host_free_bytes: int | None
    waited_bytes: int
    activation_bytes: int
    to_device_bytes: int
    to_host_bytes: int
    layers: tuple[LayerTimes, ...]
    saves: bool = False
    in_step: bool = False


class CpuUpdate(Record):
    """One layer's update by the optimizer process: the time of its tiles, with messages handled between them."""

    lid: int
    update_s: float


class OptimizerReport(Message, by="optimizer"):
    """Optimizer to coordinator, once all updates that it was sent in a step are done. `threads` made them."""

    step: int
    threads: Positive
    busy_s: float
    updates: tuple[CpuUpdate, ...]


class SetThreads(Message, by="coordinator"):
    """Coordinator to optimizer: update with this number of threads from the next tile on."""

    threads: Positive


class SetGpuMemory(Message, by="coordinator"):
    """Coordinator to trainer: report at most so much of the GPU's memory to plan with. None: all that is free."""

    nbytes: Count | None


class SetMode(Message, by="coordinator"):
    """Coordinator to optimizer: from the next StepBegin on, update ahead of the verdict, or wait for it."""

    speculate: bool


class TraceNext(Message, by="coordinator"):
    """Coordinator to trainer: draw the timeline of so many steps, from the next one on. 0 ends it now."""

    steps: Traceable


class TraceSteps(Message, by="trainer"):
    """Trainer to optimizer, before the StepBegin of step `first`: draw these steps, `steps` of them. 0 ends it now."""

    first: Count
    steps: Traceable


class Traced(Message, by="trainer optimizer"):
    """Trainer or optimizer to coordinator: its part of the timeline is in the run's folder."""


class SaveCheckpoint(Message, by="coordinator"):
    """Coordinator to trainer: the loop is asked to save a checkpoint after one of the next steps."""


class Log(Message, by="trainer"):
    """Trainer to coordinator: the loop's own numbers (loss, tokens/s, …) for the record of step number `step`.

    `renames`: the number that this step had so far, if the loop has another count. `ahead`: its report comes later.
    """

    step: int
    numbers: dict[str, float]
    renames: int | None = None
    ahead: bool = False


class RankStatus(Record):
    """One rank of a job with `world` of them. `record`: its newest one, as JSON text. `cores`: those of its optimizer.

    `gather_s` is the mean time of its all-gathers in a step, over the last steps; None if it has none.
    """

    rank: int
    world: int
    host: str
    record: str
    cores: str
    gather_s: float | None


class NodeStatus(Message, by="trainer"):
    """Rank 0 of a job on several machines to its coordinator: the ranks on the other machines."""

    ranks: tuple[RankStatus, ...]


class Ping(Message, by="coordinator"):
    """Coordinator to trainer and optimizer, once a second during training: answer on this connection.

    `recorded_s`: the `at_s` of the trainer's newest report whose record is written; None if there is none.
    `status`: that of the trainer's rank, if its job has other machines.
    """

    recorded_s: float | None = None
    status: RankStatus | None = None


class Pong(Message, by="trainer optimizer"):
    """Trainer or optimizer to coordinator: the answer to Ping. `waits_for`: what training waits for; may be empty.

    `writing`: the folder that is being written, and for how long; "" if none is.
    """

    waits_for: str = ""
    writing: str = ""
    writing_s: float = 0.0


class StatusRequest(Message, by="monitor"):
    """Monitor to coordinator: send the newest status."""


class Process(Record):
    """One process of the run, as shown to users. `silent_s`: for how long it has not answered; 0 while it does.

    `writing`, `writing_s`: as in its last Pong.
    """

    address: Address
    pid: int
    detail: str
    silent_s: float = 0.0
    writing: str = ""
    writing_s: float = 0.0


class Status(Message, by="coordinator"):
    """Coordinator to monitors: the newest record of metrics.jsonl as JSON text, the layers and the processes.

    `layer_names`, `layer_numels`, `layer_positions` and `places` are by LID. `places` are those in effect, and `plan`
    is the newest plan, which may have to wait for its step. None: there is none, or no trainer.
    `host_planes`, `device_planes`: bytes by plane in host memory, and on the trainer's device.
    `ranks`: those of the job that are known, in their order: on the first machine all. Empty if there is only one.
    `no_timeline`: why the newest timeline could not be written; "" if it could, or is being drawn.
    """

    run_name: str
    run_dir: str
    record: str
    processes: tuple[Process, ...]
    layer_names: tuple[str, ...]
    layer_numels: tuple[int, ...]
    layer_positions: tuple[int, ...]
    places: Places
    host_planes: dict[str, int]
    device_planes: dict[str, int]
    plan: Plan | None
    policy: str
    reason: str
    ranks: tuple[RankStatus, ...]
    no_timeline: str = ""


class Command(Message, by="monitor trainer"):
    """Monitor to coordinator: one of the commands that docs/monitoring.md lists. A trainer's is for itself alone."""

    name: str
    value: str


class CommandReply(Message, by="coordinator"):
    """Coordinator to monitor: whether the command was accepted, and a sentence for the user."""

    ok: bool
    text: str


# ---------------------------------------------------------------- the end


class Failure(Message, by="optimizer coordinator"):
    """Optimizer to the others, before it exits: what went wrong, in which step and layer, and the traceback.

    Coordinator to a trainer: no first plan fits.
    """

    step: int | None
    lid: int | None
    error: str
    traceback: str


class Goodbye(Message, by="trainer optimizer coordinator"):
    """The sender leaves in order: a trainer the run, an optimizer its trainer, whose layers' memory is freed."""
