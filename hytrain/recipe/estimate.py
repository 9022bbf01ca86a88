"""What a recipe needs: memory by plane, process and placement, and FLOPs per step.

The launcher prints it for `--dry-run`. The parameters are counted on the meta device, so the model's size does not
matter.

docs/memory.md has the bytes per parameter. Whoever owns a layer, its weights are on the GPU once, unless they are
offloaded. State that visits the GPU needs no grads in host memory, but a ring of slots on the GPU. Updates that may
have to be undone need a second bank of the planes that they write: 12 more bytes in host memory. If there is no room
for it, updates wait for the norm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hytrain.memory.batch import StepMemory
from hytrain.memory.capacity import GPU_MARGIN, host_bound, is_integrated
from hytrain.memory.host import available_bytes
from hytrain.memory.visits import SLOT_NUMEL
from hytrain.memory.visits import SLOTS as RING_SLOTS
from hytrain.model.layers import find_blocks
from hytrain.readable import gib, table
from hytrain.recipe import adapters, config, tokenizer
from hytrain.recipe import model as models
from hytrain.recipe.config import Recipe
from hytrain.step.offload import SLOTS
from protocol import handles
from protocol.handles import DTYPE_BYTES, EXACT, SHARED_PLANES, Precision, plane_dtype
from protocol.messages import Segment
from protocol.placement import CPU, GPU, VISIT, Placement
from protocol.sizes import is_on_gpu, is_on_host


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes at one k: planes of the optimizer alone, planes shared with the trainer, memory of the trainer's device.

    `visits`: the state of all that the GPU does not own visits it. `offloaded`: the weights of all blocks rest in host
    memory.
    """

    k: float
    optimizer: int
    shared: int
    trainer: int
    visits: bool = False
    offloaded: bool = False

    @property
    def host(self) -> int:
        return self.optimizer + self.shared

    @property
    def name(self) -> str:
        return f"{self.k:g}" + ", visit=1" * self.visits + ", offload_weights=1" * self.offloaded


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a recipe needs. `device` is where the trainer computes: "GPU", even if this machine has none, or "CPU"."""

    device: str
    trainable: int
    frozen: int
    planes: dict[str, int]  # bytes per trainable parameter
    needs: tuple[Need, ...]
    ranks: Mapping[str, int]  # the mesh
    precision: Precision
    free_host: int
    bound_host: int  # for a rank's planes: what is free, less a margin
    free_device: int | None
    flops_per_step: float
    peak_tflops: float | None
    is_integrated: bool = False  # the GPU's memory is the host's
    activations: int | None = 0  # of each rank, in host memory; None: not known before a step
    step: StepMemory | None = None  # of one rank alone, where the model's sizes are known
    length: int = 0  # of a sequence

    def render(self) -> str:
        trainer, tflop = f"trainer ({self.device})", self.flops_per_step / 1e12
        heads = ("plane", "host, CPU-owned", f"{trainer}, CPU-owned", f"{trainer}, GPU-owned", "host copy in")
        rows = []
        for plane, nbytes in self.planes.items():
            places = (is_on_host(plane, CPU), is_on_gpu(plane, CPU), is_on_gpu(plane, GPU))
            mapped_by = "optimizer, trainer" if _is_shared(plane) else "optimizer"
            rows.append((plane, *(str(nbytes) if is_there else "-" for is_there in places), mapped_by))
        ranks = math.prod(self.ranks.values())
        host = max(n.host for n in self.needs)
        mesh = " x ".join(f"{name} {size}" for name, size in self.ranks.items() if size > 1)
        batches = {n: self.largest_batch(n) for n in self.needs}
        is_known = None not in batches.values()
        most = [f"largest batch, of {self.length:,} tokens"] if is_known else []
        needs = [
            (n.name, *map(gib, (n.optimizer, n.shared, n.host, n.trainer)), self.fits(n))
            + ((f"{(batches[n] or 0) // self.length:,}",) if is_known else ())
            for n in sorted(self.needs, key=lambda n: (n.k, n.offloaded, n.visits))
        ]
        free = ", the trainer's part included"
        if self.device == "GPU":
            free = ", no GPU in this machine" if self.free_device is None else f", GPU {gib(self.free_device)}"
        lines = [
            self.verdict(),
            "",
            f"{self.trainable:,} trainable parameters" + (f", {self.frozen:,} frozen" if self.frozen else ""),
            "",
            table(heads, rows),
            "(bytes per parameter)",
            "",
            table(("k", "optimizer", "shared planes", "host planes", trainer, "fits now", *most), needs),
            *([f"(of each rank; all {ranks} ranks, {mesh}: host planes {gib(ranks * host)})"] if ranks > 1 else []),
            f"Free now: host {gib(self.free_host)}{free}.",
            "Activations, gradients in flight and the libraries themselves come on top.",
            *self._of_activations(),
            *(
                [f"At most {self.most:,.1f} B parameters of this dtype fit into that, with visits."]
                if ranks == 1
                else []
            ),
            "",
            f"{tflop:,.3f} TFLOP per step{self._at_least(', ')}.",
        ]
        return "\n".join(lines)

    def verdict(self) -> str:
        """Whether the recipe fits, whether it is exact, how fast it is at most, and with which options."""
        how = "exact" if self.precision.is_exact else f"not exact, with {self.precision}"
        how += self._at_least(", in steps of ")
        answers = {
            answer: [need for need in self.needs if self.fits(need) == answer] for answer in ("yes", "on the host")
        }
        named = {answer: "; ".join(f"k={need.name}" for need in needs) for answer, needs in answers.items()}
        if named["yes"]:
            return f"It fits this machine, {how}; without activations, with any of: {named['yes']}."
        if needs := answers["on the host"]:
            least = gib(min(need.trainer for need in needs))
            return (
                f"It fits this machine's host memory, {how}, with any of: {named['on the host']}. There is no GPU "
                f"here: it needs one with {least} and room for activations."
            )
        of_each = " of each rank" * (math.prod(self.ranks.values()) > 1)
        host, gpu = (min(each) for each in zip(*((need.host, need.trainer) for need in self.needs if need.k < 1)))
        return (
            f"It does not fit this machine, where planes{of_each} may take {gib(self.bound_host)} of host memory: "
            f"unless the GPU owns layers, it takes {gib(host)}, and {gib(gpu)} on the GPU."
        )

    def _at_least(self, before: str) -> str:
        """How long a step takes on GPUs that reach their peak; nothing where that is not known."""
        if self.peak_tflops is None:
            return ""
        ranks = math.prod(self.ranks.values())
        least_s, whose = self.flops_per_step / 1e12 / self.peak_tflops / ranks, "each" if ranks > 1 else "the"
        return f"{before}at least {least_s:.3f} s at {whose} GPU's peak of {self.peak_tflops:g} TFLOP/s"

    def fits(self, need: Need) -> str:
        """Whether it fits into what is free for a rank, without activations on the GPU."""
        on_host = need.host + (self.activations or 0) + (need.trainer if self.has_one_memory else 0)
        lacks = ["host"] * (on_host > self.bound_host)
        lacks += ["GPU"] * (self.free_device is not None and need.trainer > self.free_device)
        if lacks:
            return "not on the " + " and ".join(lacks)
        return "yes" if self.device == "CPU" or self.free_device is not None else "on the host"

    @property
    def has_one_memory(self) -> bool:
        return self.device == "CPU" or self.is_integrated

    def largest_batch(self, need: Need) -> int | None:
        """The tokens of the largest batch for which this leaves room; None if that is not known."""
        free = self.bound_host - need.host if self.has_one_memory else self.free_device
        if self.step is None or free is None:
            return None
        margin = int(GPU_MARGIN * free) if self.device == "GPU" else 0
        return self.step.most_tokens(free - margin - need.trainer) if self.fits(need) == "yes" else 0

    def _of_activations(self) -> list[str]:
        if self.activations is None:
            return ["What blocks save for backward goes to host memory: model.gradient_checkpointing makes it less."]
        if not self.activations:
            return []
        return [f"Of these, the inputs of blocks go to host memory: {gib(self.activations)}."]

    @property
    def most(self) -> float:
        """Billions of parameters, if the GPU owns what it has room for, and the state of all others visits it."""
        on_host, on_gpu = sum(_on_host(self.planes, VISIT).values()), _on_gpu(self.planes, GPU)
        for_host = 0 if self.is_integrated else self.bound_host
        return (for_host / on_host + (self.free_device or 0) / on_gpu) / 1e9


def estimate(recipe: Recipe, ranks: int = 1, node_ranks: int | None = None) -> Estimate:
    """Counts what each of so many ranks needs, even if this machine lacks their GPUs.

    `node_ranks`: how many of them share this machine's memory; None: all.

    Raises ConfigError for an impossible model, and if the ranks do not fit the recipe.
    """
    config.check_ranks(recipe, ranks)
    models.require_folder(recipe.model.path)
    mesh = recipe.parallel.sizes(ranks)
    shards = mesh["data_shard"] * mesh["context"] * mesh["tensor"]
    length = recipe.data.sequence_length
    hf = models.configuration(recipe.model, _vocab_size(recipe), length)
    model = models.build_empty(recipe.model, hf)
    if recipe.lora is not None:
        model = adapters.adapt(model, recipe.lora, None)
    parameters = list(model.parameters())
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    frozen = sum(p.numel() for p in parameters) - trainable
    wanted, k = recipe.optimizer, recipe.optimizer.k
    speculates = wanted.speculate if wanted.speculate is not None else wanted.objective != "host-memory"
    second_bank = speculates and recipe.train.max_grad_norm is not None and recipe.train.loss_scale is None
    precision = Precision(wanted.state_dtype, wanted.master_dtype)
    planes = planes_of(recipe.model.dtype, wanted.gradient_dtype, precision, recipe.train.rule, second_bank=second_bank)
    here = torch.cuda.is_available()
    wants_gpu = recipe.train.device == "cuda" or (here and recipe.train.device == "auto")
    device = torch.device("cuda" if here and wants_gpu else "cpu")
    tokens = recipe.data.batch_size * length
    at_once = tokens * mesh["tensor"] // (recipe.train.grad_accumulation * ranks)
    shares = {0.0, 1.0} if k == "auto" else {0.0, 1.0, float(k)}
    own, others = (math.ceil(numel / shards) for numel in (trainable, frozen))  # of each rank
    needs = [need(planes, own, others, share) for share in shares]
    blocks = [sum(p.numel() for p in block.parameters() if p.requires_grad) for block in find_blocks(model)]
    largest = max((math.ceil(p.numel() / shards) for p in parameters if p.requires_grad), default=0)
    ring = RING_SLOTS * min(SLOT_NUMEL, largest) * (_on_gpu(planes, GPU) - planes["weights"])
    visits = need(planes, own, others, 0.0, VISIT)
    needs.append(replace(visits, trainer=visits.trainer + ring))
    if len(blocks) > SLOTS and (ranks == 1 or ranks > mesh["tensor"]):  # of several ranks, what FSDP2 gathers
        away = planes["weights"] * math.ceil((sum(blocks) - SLOTS * max(blocks)) / shards)
        needs += [replace(one, trainer=one.trainer - away, offloaded=True) for one in needs if not one.k]
    return Estimate(
        device="GPU" if wants_gpu else "CPU",
        trainable=trainable,
        frozen=frozen,
        planes=planes,
        needs=tuple(needs),
        ranks=mesh,
        precision=precision,
        free_host=available_bytes(),
        bound_host=host_bound(None, node_ranks or ranks),
        free_device=torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None,
        is_integrated=device.type == "cuda" and is_integrated(device),
        flops_per_step=models.cost(model, hf, length).flops_per_token * tokens,
        peak_tflops=models.peak_tflops(device),
        activations=_offloaded(recipe, hf, model, at_once),
        step=_step_memory(recipe, hf, model) if ranks == 1 else None,
        length=length,
    )


def _step_memory(recipe: Recipe, hf: Any, model: nn.Module) -> StepMemory | None:
    """What a step takes beside what is placed; None for a model without blocks."""
    text, blocks = hf.get_text_config(), find_blocks(model)
    if not blocks:
        return None
    hidden = int(text.hidden_size)
    return StepMemory(
        hidden=hidden,
        intermediate=int(getattr(text, "intermediate_size", None) or 4 * hidden),
        blocks=len(blocks),
        block_numel=max(sum(p.numel() for p in block.parameters()) for block in blocks),
        vocabulary=int(text.vocab_size),
        width=DTYPE_BYTES[recipe.model.dtype],
        loss_chunks=recipe.train.loss_chunks,
        keeps=not recipe.model.gradient_checkpointing,
        on_host=recipe.optimizer.offload_activations,
        parts=recipe.model.split_batch,
    )


def _offloaded(recipe: Recipe, hf: Any, model: nn.Module, tokens: int) -> int | None:
    """Host memory for the activations of so many tokens: each block's input but the last. None if all of them go."""
    if not recipe.optimizer.offload_activations:
        return 0
    if not recipe.model.gradient_checkpointing:
        return None
    width = DTYPE_BYTES[recipe.model.dtype]
    return max(0, len(find_blocks(model)) - 1) * tokens * int(hf.get_text_config().hidden_size) * width


def planes_of(
    dtype: str,
    gradient_dtype: str = "auto",
    precision: Precision = EXACT,
    rule: str = "adamw",
    *,
    second_bank: bool = False,
) -> dict[str, int]:
    """Bytes per trainable parameter, by plane, of a layer in this dtype, under this rule."""
    grads = dtype if gradient_dtype == "auto" or dtype != "float32" else gradient_dtype
    one = Segment(name="one", numel=1, dtype=dtype, grads_dtype=grads, group=0, rule=rule, **precision._asdict())
    dtypes = {plane: plane_dtype(plane, one) for plane in handles.planes_of(1 + second_bank)}
    return {plane: DTYPE_BYTES[its] for plane, its in dtypes.items() if its is not None}


def _is_shared(plane: str) -> bool:
    """Whether the trainer maps it, too."""
    return plane.removesuffix("'") in SHARED_PLANES


def _on_host(planes: Mapping[str, int], placement: Placement) -> dict[str, int]:
    return {plane: nbytes for plane, nbytes in planes.items() if is_on_host(plane, placement)}


def _on_gpu(planes: Mapping[str, int], placement: Placement) -> int:
    return sum(nbytes for plane, nbytes in planes.items() if is_on_gpu(plane, placement))


def need(planes: Mapping[str, int], trainable: int, frozen: int, k: float, of_rest: Placement = CPU) -> Need:
    """The planes' bytes if the GPU owns the fraction k. Frozen parameters are on the trainer's device."""
    by_gpu = round(trainable * k)
    rest, on_host = trainable - by_gpu, _on_host(planes, of_rest)
    shared = sum(nbytes for plane, nbytes in on_host.items() if _is_shared(plane))
    trainer = rest * _on_gpu(planes, of_rest) + by_gpu * _on_gpu(planes, GPU) + frozen * planes["weights"]
    return Need(k, rest * (sum(on_host.values()) - shared), rest * shared, trainer, visits=of_rest.visits)


def _vocab_size(recipe: Recipe) -> int | None:
    if recipe.data.kind == "random":
        return None
    words = tokenizer.given(recipe.tokenizer, recipe.model.path)
    return recipe.tokenizer.vocab_size if words is None else words.vocab_size
