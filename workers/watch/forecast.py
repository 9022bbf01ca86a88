"""How fast a machine would train LLaMA models of several sizes, and which of them fit: the planner on made-up layers.

    Rates, memory ─▶ a model's layers with their times ─▶ decide() ─▶ Forecast

Forward and backward are as long as their matrix products, at a part of the speed of one large product; with
checkpointing, backward computes forward again. `doctor` measures the rates and prints the forecasts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from hytrain.memory.batch import StepMemory
from hytrain.memory.capacity import GPU_MARGIN, WAITING_SHARE
from hytrain.memory.visits import ring_bytes
from hytrain.planner.ladder import Infeasible
from hytrain.planner.policies import decide
from hytrain.planner.profile import LayerProfile, Limits, Profile, Question
from hytrain.step.offload import SLOTS
from protocol import messages as m
from protocol.handles import DTYPE_BYTES, Precision
from workers.planning.planning import BESIDE_TRAINING
from workers.planning.room import facts, sizes_of

#: What training reaches of the speed of one large matrix product: 0.6 to 0.8 on H100 and H200 hosts, with 3 to 10 B
#: parameters.
OF_PRODUCT: Final = 0.6
#: Layers have no more elements than this: larger parameters are cut.
LAYER_NUMEL: Final = 300_000_000
#: The loss is taken of so many parts of the sequences, one after the other.
LOSS_CHUNKS: Final = 8


@dataclass(frozen=True)
class Shape:
    """A LLaMA. `key_heads` is the share of the heads that have keys and values of their own.

    `counted`: so many parameters has a block of another model. `tied`: the head is the embedding.
    """

    name: str
    hidden: int
    intermediate: int
    blocks: int
    vocabulary: int = 32000
    key_heads: float = 1.0
    counted: int = 0
    tied: bool = False

    @property
    def block_numel(self) -> int:
        attention = 2 * (1 + self.key_heads) * self.hidden**2
        return self.counted or int(attention + 3 * self.hidden * self.intermediate)

    @property
    def head_numel(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def numel(self) -> int:
        return self.blocks * self.block_numel + (1 if self.tied else 2) * self.head_numel

    def step_bytes(self, tokens: int) -> int:
        """GPU memory of a step besides what is placed: embedding and head, gradients on their way, and activations.

        With checkpointing these are what enters each block, one block's own, and the logits of a part of the loss.
        """
        return self._ends_bytes + self._step.fixed_bytes + self.token_bytes(tokens)

    def token_bytes(self, tokens: int) -> int:
        """Its activations alone."""
        return self._step.token_bytes(tokens)

    @property
    def _ends_bytes(self) -> int:
        return 2 * 2 * self.head_numel

    @property
    def _step(self) -> StepMemory:
        of = (self.hidden, self.intermediate, self.blocks, self.block_numel, self.vocabulary)
        return StepMemory(*of, loss_chunks=LOSS_CHUNKS)

    def most_tokens(self, gpu_bytes: int, precision: Precision) -> int:
        """The largest batch, with all state on its visits and all weights offloaded."""
        table = _table(self, gpu_bytes, 0, precision)
        placed = self._ends_bytes + table.window_bytes + table.ring_bytes + table.hold_bytes
        return self._step.most_tokens(int((1 - GPU_MARGIN) * gpu_bytes) - placed)


SHAPES: Final = (
    Shape("1 B", 2048, 5632, 22),
    Shape("3 B", 3200, 8640, 26),
    Shape("7 B", 4096, 11008, 32),
    Shape("8 B (Llama 3)", 4096, 14336, 32, 128256, 0.25),
    Shape("13 B", 5120, 13824, 40),
    Shape("20 B", 5120, 13824, 63),
    Shape("33 B", 6656, 17920, 60),
    Shape("70 B (Llama 3)", 8192, 28672, 80, 128256, 0.125),
)


@dataclass(frozen=True)
class Rates:
    """Products in FLOP/s, copies in bytes/s, updates in parameters/s; the CPU's by precision."""

    product: float
    to_host: float
    from_host: float
    gpu_update: float
    cpu_update: Mapping[Precision, float]


@dataclass(frozen=True)
class Forecast:
    """Of one model: seconds per step, and what they would be if updates took no time. None if it does not fit.

    `visit` and `offload`: the shares of the parameters whose state visits the GPU, and whose weights are offloaded.
    """

    step_s: float | None
    work_s: float
    reason: str
    visit: float = 0.0
    offload: float = 0.0


def forecast(
    shape: Shape,
    rates: Rates,
    *,
    gpu_bytes: int,
    host_bytes: int,
    tokens: int,
    precision: Precision,
    visit: float | None = None,
    offload: float | None = None,
) -> Forecast:
    """A step over so many tokens, with bf16 weights. `gpu_bytes` are free, `host_bytes` may be taken by planes.

    `visit` and `offload`: the shares, as the options of the same names; None lets the planner choose.
    """
    table = _table(shape, gpu_bytes, host_bytes, precision)
    per_parameter_s = 8 * tokens / (OF_PRODUCT * rates.product)
    work_s = per_parameter_s * (shape.blocks * shape.block_numel + shape.head_numel)
    layers, sizes = [], sizes_of(table)
    for layer in table.layers:
        works = not layer.name.startswith("embedding")
        each = {
            "forward_s": works * per_parameter_s / 4,
            "backward_s": works * per_parameter_s * 3 / 4,
            "d2h_s": 2 / rates.to_host,
            "h2d_s": 2 / rates.from_host,
            "cpu_update_s": BESIDE_TRAINING / rates.cpu_update[precision],
            "gpu_update_s": 1 / rates.gpu_update,
            "visit_s": BESIDE_TRAINING * state_bytes(precision) / min(rates.to_host, rates.from_host),
        }
        times: dict[str, Any] = {name: layer.numel * value for name, value in each.items()}
        layers.append(LayerProfile(**asdict(facts(layer, table, sizes)), **times))
    profile = Profile(
        layers=tuple(layers),
        window_bytes=table.window_bytes,
        for_visits_bytes=table.ring_bytes + table.hold_bytes,
        hold_bytes=table.hold_bytes,
    )
    room = int((1 - GPU_MARGIN) * gpu_bytes) - shape.step_bytes(tokens)
    try:
        limits = Limits(gpu_state_bytes=max(room, 0), host_bytes=host_bytes)
        asked = Question(policy="deadline", limits=limits, current=frozenset(), visit=visit, offload=offload)
        decision = decide(asked, replace(profile, visit=1.0, offload=1.0))
    except Infeasible as error:
        return Forecast(None, work_s, str(error))
    planned = replace(profile, visit=decision.visit, offload=decision.offload)
    if planned.gpu_state_bytes(decision.gpu_lids) + planned.held_for_visits_bytes > room:  # nothing takes less
        return Forecast(None, work_s, f"a step of {tokens} tokens leaves the GPU no room")
    return Forecast(decision.predicted_step_s, work_s, decision.reason, decision.visit, decision.offload)


def most_parameters(*, gpu_bytes: int, host_bytes: int, precision: Precision) -> float:
    """How many fit, with activations left out: the GPU owns what it has room for, the state of all others visits it."""
    state = state_bytes(precision)
    return host_bytes / (state + 2) + (1 - GPU_MARGIN) * gpu_bytes / (state + 2)


def state_bytes(precision: Precision) -> int:
    """Of a parameter's remainder and moments."""
    return sum(DTYPE_BYTES[dtype] for dtype in precision.planes("bfloat16").values())


def _table(shape: Shape, gpu_bytes: int, host_bytes: int, precision: Precision) -> m.LayerTable:
    """As a trainer would send it: blocks in pieces, which can be offloaded, between embedding and head."""
    layers: list[m.Layer] = []

    def add(name: str, numel: int) -> tuple[int, ...]:
        pieces = math.ceil(numel / LAYER_NUMEL)
        first = len(layers)
        for piece in range(pieces):
            segment = m.Segment(
                name="w",
                numel=numel // pieces,
                dtype="bfloat16",
                grads_dtype="bfloat16",
                group=0,
                **precision._asdict(),
            )
            at = len(layers)
            layers.append(m.Layer(lid=at, position=at, name=f"{name}#{piece}", segments=(segment,)))
        return tuple(range(first, len(layers)))

    if not shape.tied:
        add("embedding", shape.head_numel)
    blocks = [add(f"{index}", shape.block_numel) for index in range(shape.blocks)]
    add("head", shape.head_numel)
    return m.LayerTable(
        layers=tuple(layers),
        inbox="trainer",
        device="cuda",
        policy="deadline",
        objective="speed",
        awaits_verdict=False,
        speculate=False,
        k=None,
        backend="auto",
        gpu_bytes=gpu_bytes,
        host_bytes=host_bytes,
        continues=False,
        visit=None,
        offload_weights=None,
        blocks=tuple(blocks),
        window_bytes=SLOTS * 2 * shape.block_numel,
        ring_bytes=ring_bytes([segment for layer in layers for segment in layer.segments]),
        hold_bytes=int(WAITING_SHARE * gpu_bytes),
    )
