"""FSDP2 (`fully_shard`): as with torch's AdamW, bit for bit, whatever each rank's k; or one sentence on every rank.

A practice is a function of a model and an optimizer, which is HyTrain's or torch's, and knows no difference. It runs in
every rank; each rank compares what it holds.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sharded_models
import torch
import torch.distributed as dist
from helpers import LR, adamw, differing, late_weights, on_waiting, opened, wait_for_coordinator
from ranks import RankGroup
from sharded_models import (
    STEPS,
    VOCAB,
    WIDTH,
    Decoder,
    LocalReference,
    Practice,
    clip,
    for_this_rank,
    fused,
    local,
    require_one_norm,
    same_as,
    tokens,
)
from sharded_models import next_token_loss as loss_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import hytrain
from hytrain.errors import HyTrainError, StaleReadError
from hytrain.memory.arena import Mapping
from hytrain.memory.lending import view
from hytrain.step import activations, check
from hytrain.step.activations import Activations
from workers.coordinate.records import LOG_PATIENCE_STEPS

# ---------------------------------------------------------------- models


@cache
def mesh(*shape: int) -> DeviceMesh:
    names = ("shard",) if len(shape) == 1 else ("replicate", "shard")
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def shard(model: Decoder, over: DeviceMesh | None = None, **options: Any) -> Decoder:
    """Every block, and the rest: `fully_shard`'s usual way."""
    over = over or mesh(dist.get_world_size())
    for block in model.blocks:
        fully_shard(block, mesh=over, **options)
    fully_shard(model, mesh=over, **options)
    return model


def plain() -> Decoder:
    return shard(Decoder())


def mixed_precision() -> Decoder:
    """Computed and gathered in bf16, with explicit prefetch in both directions."""
    model = shard(Decoder(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    blocks: Any = list(model.blocks)
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 3])
        block.set_modules_to_backward_prefetch(blocks[max(index - 2, 0) : index][::-1])
    return model


def prefetched() -> Decoder:
    model: Any = plain()
    model.set_modules_to_forward_prefetch(list(model.blocks[:2]))
    for block, following in zip(model.blocks, model.blocks[1:], strict=False):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])
    return model


def bfloat16() -> Decoder:
    return shard(Decoder().to(torch.bfloat16))


def zero_2() -> Decoder:
    """Parameters stay gathered between forward and backward. The head is the embedding."""
    return shard(Decoder(tied=True), reshard_after_forward=False)


def grouped() -> Decoder:
    """Embedding, norm and head have groups of their own, as with Accelerate."""
    model = Decoder()
    for part in (model.embedding, [model.norm, model.head]):
        fully_shard(part, mesh=mesh(2), reshard_after_forward=part is model.embedding)
    return shard(model)


def checkpointed() -> Decoder:
    return shard(Decoder(checkpointed=True))


def frozen_scales() -> Decoder:
    """Rank 1 has nothing of what is frozen."""
    model = Decoder()
    for block in model.blocks:
        block.scale.requires_grad_(False)
    return shard(model)


class Mixture(nn.Module):
    """Four experts fused in one tensor, of which each rank has two; and four modules that take turns in the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / WIDTH)
        self.turns = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        share, chosen = self.gate(x).softmax(-1).max(-1)
        y: Tensor = (self.experts[chosen] @ x[..., None])[..., 0] * share[..., None]
        return x + y + self.turns[self.count % 4](x)


def mixtures() -> Decoder:
    model = Decoder()
    model.blocks = nn.ModuleList(Mixture() for _ in range(3))
    return shard(model)


class Towers(nn.Module):
    """Two roots: FSDP2 reduces what each has at the end of backward."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = plain(), plain()

    def forward(self, tokens: Tensor) -> Tensor:
        sum_: Tensor = self.one(tokens) + self.other(tokens)
        return sum_


def hybrid() -> Decoder:
    return shard(Decoder(), mesh(2, 2))


# ---------------------------------------------------------------- practices


def backward(model: Any, step: int) -> Tensor:
    loss = loss_of(model, step)
    loss.backward()
    return loss.detach()


def update(opt: Any) -> None:
    opt.step()
    opt.zero_grad()


def loop(model: Any, opt: Any, steps: int = STEPS) -> Iterable[Tensor]:
    for step in range(steps):
        yield backward(model, step)
        update(opt)


def moving(model: Any, opt: Any) -> Iterable[Tensor]:
    """Layers move between the steps: some steps later at the latest, all answers to a plan have been heard."""
    for loss in loop(model, opt, STEPS + 2 * LOG_PATIENCE_STEPS):
        yield loss
        if isinstance(opt, hytrain.AdamW) and opt.statistics().step > 1:
            wait_for_coordinator(opt)
            opt._engine._handover.wait()
    assert not isinstance(opt, hytrain.AdamW) or opt.statistics().moved, "some did"


def unsharded_by_the_user(model: Any, opt: Any) -> Iterable[Tensor]:
    for step in range(STEPS):
        handle = model.unshard(async_op=True)
        model.blocks[1].unshard()
        if handle is not None:
            handle.wait()
        yield backward(model, step)
        update(opt)


def evaluated(model: Any, opt: Any) -> Iterable[Tensor]:
    """After evaluation, FSDP2's root stays gathered, and `model.parameters()` has other objects. A schedule, too."""
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0 / (1 + step))
    for step in range(STEPS):
        model.train()
        yield backward(model, step)
        update(opt)
        schedule.step()
        if step != 3:
            model.eval()
            with torch.no_grad():
                yield loss_of(model, 100 + step)


def reads(model: Any, opt: Any) -> Iterable[Tensor]:
    """Averages and saved weights between the steps."""
    averages = {name: p.detach().clone() for name, p in model.named_parameters()}
    kept = list(model.named_parameters())
    for step in range(STEPS):
        yield backward(model, step)
        update(opt)
        match step:
            case 0 | 1:
                with torch.no_grad():
                    for name, p in model.named_parameters():
                        averages[name].lerp_(p, 0.1)
            case 2:
                for _, p in kept:
                    yield p.full_tensor().detach()
            case 3:
                for value in model.state_dict().values():
                    yield local(value).clone()
            case 4:
                for _, p in kept:
                    yield p.to_local().detach().clone()
                yield torch.nn.utils.get_total_norm([p.detach() for _, p in kept]).full_tensor()
    for average in averages.values():
        yield local(average)


def writes(model: Any, opt: Any) -> Iterable[Tensor]:
    for step in range(STEPS + 2):
        yield backward(model, step)
        update(opt)
        match step:
            case 0:
                for p in model.parameters():
                    p.data.mul_(0.9)
            case 1:
                with torch.no_grad():
                    for p in model.parameters():
                        p.add_(0.01)
            case 2:
                with torch.no_grad():
                    for p in model.parameters():
                        p.to_local().add_(0.01)
            case 3:
                saved = copy.deepcopy(model.state_dict())
            case 4:
                model.load_state_dict(saved)
            case 5:
                for p in model.parameters():
                    p.data.to_local().mul_(1.1)
            case 6:  # torch counts no write of these for DTensors
                with torch.no_grad():
                    torch._foreach_mul_(list(model.parameters()), 0.9)


def written_by_collectives(model: Any, opt: Any) -> Iterable[Tensor]:
    """Into parts of the same size on all ranks. Autograd counts none of these writes."""
    weights, rank = [block.down.weight for block in model.blocks], dist.get_rank()
    for step in range(STEPS):
        yield backward(model, step)
        update(opt)
        for p in weights:
            match step:
                case 0:
                    with torch.no_grad():
                        dist.all_reduce(p.to_local())
                case 1:
                    dist.broadcast(p.data.to_local(), 0)
                case 2:
                    dist.all_reduce(p.to_local().data)
                case 3:
                    part = p.detach().to_local()
                    dist.recv(part, 0) if rank else dist.send(part, 1)
                case 4:
                    dist.all_reduce(torch.eye(3).to_sparse())  # which has no memory of this kind
                    dist.all_reduce(p.detach().to_local()[3:7], async_op=True).wait()


def unfrozen(model: Any, opt: Any) -> Iterable[Tensor]:
    for step in range(4):
        if step == 2:
            for block in model.blocks:
                block.scale.requires_grad_(True)
        yield backward(model, step)
        update(opt)


def unsynchronized(model: Any, opt: Any) -> Iterable[Tensor]:
    """FSDP2's own accumulation: only the last backward reduces gradients, and parameters stay gathered until then."""
    for step in range(STEPS):
        for part in range(3):
            model.set_requires_gradient_sync(part == 2)
            model.set_reshard_after_backward(part == 2)
            yield backward(model, 10 * step + part)
        update(opt)


def accumulated(model: Any, opt: Any) -> Iterable[Tensor]:
    """Every backward reduces gradients; HyTrain sums the shards'."""
    for step in range(STEPS):
        for part in range(2):
            yield backward(model, 10 * step + part)
        update(opt)


def accumulated_without_a_number(model: Any, opt: Any) -> Iterable[Tensor]:
    for step in range(STEPS):
        for part in range(2):
            with opt.no_sync() if isinstance(opt, hytrain.AdamW) and part == 0 else nullcontext():
                yield backward(model, 10 * step + part)
        update(opt)


# ---------------------------------------------------------------- the same bits as torch

CPU, GPU, BOTH = {"k": 0.0}, {"k": 1.0}, {"k": (0.0, 1.0)}


@dataclass(frozen=True)
class Row:
    """`make` under `practice`, with each of HyTrain's options."""

    make: Callable[[], nn.Module] = plain
    practice: Practice = loop
    choices: list[dict[str, Any]] = field(default_factory=lambda: [BOTH])
    reference: Callable[[nn.Module], torch.optim.Optimizer] = fused


ROWS = {
    "plain": Row(choices=[CPU, GPU, BOTH, {"k": "auto"}]),
    "layers that move": Row(practice=moving, choices=[{"policy": "random"}]),
    "mixed precision and prefetch": Row(mixed_precision, choices=[CPU, BOTH]),
    "prefetch": Row(prefetched, choices=[CPU]),
    "bfloat16": Row(bfloat16, choices=[CPU, GPU, BOTH], reference=LocalReference),
    "ZeRO-2, tied": Row(zero_2),
    "activation checkpointing": Row(checkpointed),
    "model.unshard()": Row(practice=unsharded_by_the_user),
    "evaluation": Row(practice=evaluated),
    "evaluation, each part its own group": Row(grouped, evaluated),
    "experts, some of them skipped": Row(mixtures, choices=[CPU, GPU, BOTH]),
    "two roots": Row(Towers, choices=[CPU]),
    "unfreezing": Row(frozen_scales, unfrozen, choices=[CPU]),
    "reads": Row(practice=reads),
    "writes": Row(practice=writes),
    "writes by collectives": Row(practice=written_by_collectives, choices=[CPU, GPU, BOTH]),
    "set_requires_gradient_sync": Row(practice=unsynchronized),
    "grad_accumulation": Row(practice=accumulated, choices=[{**BOTH, "grad_accumulation": 2}]),
    "no_sync": Row(practice=accumulated_without_a_number),
}


def compare(name: str) -> None:
    row = ROWS[name]
    same_as(row.reference, row.practice, row.make, row.choices)


@pytest.mark.parametrize("name", ROWS)
def test_the_same_bits_as_torch(name: str, two_ranks: RankGroup) -> None:
    two_ranks.run(compare, name)


def compare_of_width(name: str, width: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_models, "WIDTH", width)
        compare(name)


@pytest.mark.parametrize("name", ["plain", "bfloat16"])
def test_the_same_bits_as_torch_where_shards_fill_no_vectors(name: str, two_ranks: RankGroup) -> None:
    """torch rounds the last elements of each rank's shard in another way."""
    two_ranks.run(compare_of_width, name, 30)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "layers that move"])
def test_the_same_bits_as_torch_on_eight_ranks(name: str, eight_ranks: RankGroup) -> None:
    """Also where every second rank leaves all layers to the CPU, and the others to the GPU."""
    eight_ranks.run(compare_of_width, name, 128)


def compare_offloaded() -> int:
    """With activations in host memory, also small ones. Returns how often blocks' activations left the device."""
    sent = []

    def send(self: Activations, group: Any) -> None:
        before(self, group)
        sent.append(group.departure is not None)

    before = Activations._send
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activations, "MIN_BYTES", 512)
        patch.setattr(Activations, "_send", send)
        for name in (
            "mixed precision and prefetch",
            "ZeRO-2, tied",
            "activation checkpointing",
            "evaluation",
            "two roots",
        ):
            row = ROWS[name]
            same_as(row.reference, row.practice, row.make, [{**BOTH, "offload_activations": True}])
    return sum(sent)


def test_activations_in_host_memory(two_ranks: RankGroup) -> None:
    """Weights that are gathered are none, though autograd saves them: FSDP2 frees them and gathers them again."""
    assert all(sent > 20 for sent in two_ranks.run(compare_offloaded))


def lent_view(each: Any) -> Tensor:
    return view(Mapping(each.memory.descriptor, each.memory.nbytes), each.offset, each.dtype, each.shape)


def lend_shards() -> None:
    """After an evaluation, which leaves the outermost parameters gathered."""
    model = frozen_scales()
    with adamw(model, k=0.4) as opt:
        for step in range(3):
            loss_of(model, step).backward()
            opt.step()
            opt.zero_grad()
        expected = {name: local(parameter).detach().clone() for name, parameter in model.named_parameters()}
        with torch.no_grad():
            model.eval()(tokens(0, 0))
        with opt.lend_weights() as lent:
            found = {name: lent_view(each) for name, each in lent.items()}
            assert differing(found, expected) == []
            assert {name for name in lent if lent[name].kind == "frozen"} == {n for n in lent if n.endswith("scale")}


def test_each_rank_lends_its_shards(two_ranks: RankGroup) -> None:
    two_ranks.run(lend_shards)


def compare_hybrid() -> None:
    same_as(fused, loop, hybrid, [{"k": (0.0, 1.0, 1.0, 0.0)}])


def test_shards_with_replicas(four_ranks: RankGroup) -> None:
    """HSDP: of the two replicas of a shard, one is updated by the CPU, the other by the GPU."""
    four_ranks.run(compare_hybrid)


def momentum(folder: Path) -> None:
    """Another algorithm's shards, updated on both sides; all ranks save, and load at another k."""
    numbers: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}

    def steps(model: Any, opt: Any, which: range) -> None:
        for step in which:
            backward(model, step)
            update(opt)

    def parts(model: nn.Module) -> dict[str, Tensor]:
        return {name: local(p.detach()).clone() for name, p in model.named_parameters()}

    theirs, ours, resumed = plain(), plain(), plain()
    named = dict(ours.named_parameters())
    steps(theirs, torch.optim.SGD(theirs.parameters(), **numbers), range(STEPS))
    with opened(hytrain.SGD, ours, **numbers, **for_this_rank({"k": (0.0, 0.6)})) as opt, late_weights():
        steps(ours, opt, range(STEPS // 2))
        opt.save(folder)
        kept = copy.deepcopy(ours.state_dict())
        steps(ours, opt, range(STEPS // 2, STEPS))
        opt.synchronize()
        assert differing({name: local(p.detach()).clone() for name, p in named.items()}, parts(theirs)) == []
    resumed.load_state_dict(kept)
    with opened(hytrain.SGD, resumed, k=1.0, **numbers) as opt:
        opt.load(folder)
        steps(resumed, opt, range(STEPS // 2, STEPS))
        opt.synchronize()
        assert differing(parts(resumed), parts(theirs)) == []


def test_another_algorithm(two_ranks: RankGroup, tmp_path: Path) -> None:
    two_ranks.run(momentum, tmp_path)


# ---------------------------------------------------------------- who waits for what


def waits(make: Callable[[], Any]) -> list[str]:
    """In the second step's forward: what is waited for, and which blocks are entered."""
    model, seen = make(), []
    with adamw(model, k=0.0) as opt, late_weights(), pytest.MonkeyPatch.context() as patch:
        list(itertools.islice(loop(model, opt), 2))
        update(opt)
        for index, block in enumerate(model.blocks):
            block.up.register_forward_pre_hook(
                lambda module, inputs, index=index: seen.append(f"blocks.{index} computes")
            )
        on_waiting(patch, lambda what: seen.append(what.removeprefix("the update of layer ")))
        with torch.no_grad():
            loss_of(model, 2)
    return seen


@pytest.mark.parametrize("make, ahead", [(plain, 0), (prefetched, 1)])
def test_each_all_gather_waits_for_its_own_layers(make: Callable[[], Any], ahead: int, two_ranks: RankGroup) -> None:
    """The root's all-gather for those outside the blocks; a block's one block ahead, where it is prefetched."""
    for seen in two_ranks.run(waits, make):
        for index in range(3):
            computes = seen.index(f"blocks.{index} computes")
            waited = [what for what in seen[:computes] if what in ("blocks.0", "blocks.1", "blocks.2")]
            assert waited == [f"blocks.{before}" for before in range(min(index + ahead, 2) + 1)], seen
        assert seen.index("embedding") < seen.index("blocks.0")


# ---------------------------------------------------------------- one norm, one verdict


def clipped(norms: list[float], max_norm: float, model: Any, opt: Any) -> Iterable[Tensor]:
    for step in range(STEPS):
        yield backward(model, step)
        if not isinstance(opt, hytrain.AdamW):
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).full_tensor().item())
        update(opt)
        if isinstance(opt, hytrain.AdamW):
            norms.append(float(opt.grad_norm))  # type: ignore[arg-type]


def clip_plain() -> list[list[float]]:
    return clip(clipped, plain, 0.76, CPU, GPU, {**BOTH, "speculate": False}, {**BOTH, "speculate": True})


def test_clipping(two_ranks: RankGroup) -> None:
    require_one_norm(two_ranks.run(clip_plain), 0.76)


def clip_hybrid() -> list[list[float]]:
    return clip(clipped, hybrid, 0.54, {"k": (0.0, 1.0, 1.0, 0.0)})


def test_replicas_count_once_in_the_norm(four_ranks: RankGroup) -> None:
    require_one_norm(four_ranks.run(clip_hybrid), 0.54)


POISONED_STEPS = (1, 4)


def poisoned(model: Any, opt: Any) -> Iterable[Tensor]:
    """Rank 0 makes an inf in some steps, in a row of the embedding that rank 1 holds. torch's loop leaves them out."""
    half = -(-VOCAB // 2)

    def poison(gradient: Tensor) -> Tensor:
        where = (tokens(step, 0)[:, :-1] >= half).nonzero()[0]
        changed = gradient.clone()
        changed[tuple(where)][0] = torch.inf
        return changed

    def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if step in POISONED_STEPS and dist.get_rank() == 0:
            output.register_hook(poison)

    model.embedding.register_forward_hook(hook)
    for step in range(STEPS):
        loss = loss_of(model, step)
        ours = isinstance(opt, hytrain.AdamW)
        (opt.scale(loss) if ours else loss).backward()
        found = [p for p in model.parameters() if not ours and not local(p.grad).isfinite().all()]
        assert bool(found) is (not ours and step in POISONED_STEPS and dist.get_rank() == 1), "the rank that notices"
        if ours:
            assert opt.skipped_steps == sum(past < step for past in POISONED_STEPS), opt.skipped_steps
            halved = sum(past <= step for past in POISONED_STEPS)
            assert opt.loss_scale is None or float(opt.loss_scale) == 2.0 ** (16 - halved), opt.loss_scale
        if ours or step not in POISONED_STEPS:
            opt.step()
        opt.zero_grad()
        yield loss.detach()


SKIPS: dict[str, dict[str, Any]] = {
    "on_nonfinite": {"on_nonfinite": "skip", **BOTH},
    "loss_scale": {"loss_scale": "dynamic", **BOTH},
}


def without_gradients() -> list[float]:
    """In the second step, rank 1 has no gradient. Returns each step's norm."""
    model, norms = plain(), []
    with adamw(model, max_grad_norm=1.0, k=0.0) as opt:
        for step in range(3):
            if step != 1:
                backward(model, step)
            elif dist.get_rank() == 0:
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter, requires_grad=False)
            update(opt)
            assert opt.grad_norm is not None
            norms.append(opt.grad_norm.item())
    return norms


def test_a_rank_without_gradients_comes_to_the_same_verdict(two_ranks: RankGroup) -> None:
    first, second = two_ranks.run(without_gradients)
    assert first == second and len(set(first)) == 3


def measured() -> tuple[set[int], set[int], float]:
    """Layers, those whose forward the last step timed, and its stalls, while weights are late."""
    model, found = plain(), []
    with adamw(model, k=0.0) as opt, late_weights(), pytest.MonkeyPatch.context() as patch:
        meter = opt._engine._meter
        end_step = meter.end_step
        patch.setattr(meter, "end_step", lambda *ended: found.append(end_step(*ended)) or found[-1])
        for step in range(4):
            backward(model, step)
            update(opt)
        lids = set(range(len(opt._session.layers)))
    return lids, {each.lid for each in found[-1] if each.forward_s is not None}, meter.stall_s


def test_the_forward_of_every_gathered_layer_is_measured(two_ranks: RankGroup) -> None:
    for lids, timed, stall_s in two_ranks.run(measured):
        assert timed == lids and stall_s > 0.0


def never_resharded() -> str:
    """torch would train on with the weights of the first forward."""
    model = plain()
    model.set_reshard_after_backward(False)
    with adamw(model, k=0.0) as opt:
        backward(model, 0)
        update(opt)
        with pytest.raises(StaleReadError) as caught:
            backward(model, 1)
    return str(caught.value)


def test_weights_that_are_not_gathered_after_an_update_are_an_error(two_ranks: RankGroup) -> None:
    assert all("let a step's last backward reshard" in sentence for sentence in two_ranks.run(never_resharded))


def compare_poisoned(name: str) -> None:
    same_as(fused, poisoned, plain, [SKIPS[name]])


@pytest.mark.parametrize("name", SKIPS)
def test_all_ranks_skip_what_one_has_found(name: str, two_ranks: RankGroup) -> None:
    two_ranks.run(compare_poisoned, name)


# ---------------------------------------------------------------- refused, on every rank


def ddp() -> tuple[nn.Module, dict[str, Any]]:
    return DistributedDataParallel(Decoder()), {}


def cpu_offload() -> tuple[nn.Module, dict[str, Any]]:
    return shard(Decoder(), offload_policy=CPUOffloadPolicy(pin_memory=False)), {}


def not_sharded() -> tuple[nn.Module, dict[str, Any]]:
    return Decoder(), {}


def plain_head() -> tuple[nn.Module, dict[str, Any]]:
    """Its gradient would be each rank's own."""
    model = Decoder()
    for part in (model.embedding, *model.blocks, model.norm):
        fully_shard(part, mesh=mesh(2))
    return model, {}


def other_models() -> tuple[nn.Module, dict[str, Any]]:
    return shard(Decoder(blocks=2 + dist.get_rank())), {}


def other_options() -> tuple[nn.Module, dict[str, Any]]:
    return plain(), {"max_grad_norm": 1.0} if dist.get_rank() == 1 else {}


def per_layer() -> tuple[nn.Module, dict[str, Any]]:
    return plain(), {"max_grad_norm": 1.0, "clip": "per_layer"}


def per_layer_on_one() -> tuple[nn.Module, dict[str, Any]]:
    return plain(), {"max_grad_norm": 1.0, "clip": "per_layer" if dist.get_rank() == 1 else "global"}


def other_betas() -> tuple[nn.Module, dict[str, Any]]:
    return plain(), {"betas": (0.9, 0.9 + dist.get_rank() / 100)}


def other_accumulation() -> tuple[nn.Module, dict[str, Any]]:
    return plain(), {"grad_accumulation": 1 + dist.get_rank()}


def refusal(make: Callable[[], tuple[nn.Module, dict[str, Any]]]) -> str:
    """What HyTrain says. The ranks are still together afterwards."""
    model, options = make()
    try:
        hytrain.AdamW(model, lr=LR, **options).close()
        said = "nothing"
    except HyTrainError as error:
        said = str(error)
    dist.barrier()
    return said


@pytest.mark.parametrize(
    "make, sentence",
    [
        (ddp, r"DistributedDataParallel.*fully_shard\(.*reshard_after_forward=False"),
        (cpu_offload, r"CPUOffloadPolicy"),
        (not_sharded, r"fully_shard"),
        (plain_head, r"head\.weight is in no module.*fully_shard.*ignored_params"),
        (other_models, r"rank"),
        (other_options, r"max_grad_norm"),
        (other_accumulation, r"grad_accumulation"),
        (per_layer, r"a layer is in shards"),
        (per_layer_on_one, r"the same .*clip"),
        (other_betas, r"param_groups"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_refused_on_every_rank(
    make: Callable[[], tuple[nn.Module, dict[str, Any]]], sentence: str, two_ranks: RankGroup
) -> None:
    said = two_ranks.run(refusal, make)
    assert [re.search(sentence, text) is not None for text in said] == [True, True], said


def wrong_group() -> list[str]:
    """One rank adds a group with a wrong number."""
    model, said = plain(), []
    first, *others = model.parameters()
    with adamw(model, [first]) as opt:
        try:
            opt.add_param_group({"params": others, "eps": -float(dist.get_rank())})
        except HyTrainError as error:
            said.append(str(error))
        list(itertools.islice(loop(model, opt), 2))
        assert len(opt.param_groups) == 1
    return said


def test_a_group_that_one_rank_refuses_is_added_on_none(two_ranks: RankGroup) -> None:
    [[said, same]] = zip(*two_ranks.run(wrong_group), strict=True)
    assert said == f"rank 1: {same}", "and all go on"


def said_by_the_check(**options: Any) -> list[str]:
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "_say", lambda level, text: said.append(text))
        model = plain()
        with adamw(model, check=3, **options) as opt:
            for step in range(4):
                loss_of(model, step).backward()
                opt.step()
                opt.zero_grad()
    return said


def test_each_rank_checks_its_shards(two_ranks: RankGroup) -> None:
    for [said] in two_ranks.run(said_by_the_check, k=0.5, max_grad_norm=0.5):
        assert said.endswith("in 3 steps: the same bits as torch.optim.AdamW")
