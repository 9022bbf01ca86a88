"""Pipelines of torch.distributed.pipelining: each stage trains as with torch's AdamW, and norms are of all stages."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import LR, adamw, differing, late_weights
from ranks import RankGroup
from sharded_models import STEPS, VOCAB, Block, Practice, for_this_rank, fused, same_as, tokens, trained
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn import functional

import hytrain
from hytrain.errors import UsageError

MICRO_BATCHES = 4
MAX_NORM = 0.5


class Stage(nn.Module):
    """A part of a decoder: the first embeds, the last predicts. All have the same names."""

    def __init__(self, index: int, stages: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.first = nn.Embedding(VOCAB, 32) if index == 0 else nn.Identity()
        self.blocks = nn.ModuleList(Block(35, True) for _ in range(2))
        self.last = nn.Linear(32, VOCAB, bias=False) if index == stages - 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)  # type: ignore[no-any-return]


def parts_of(schedule: str) -> nn.Module:
    """This rank's stages."""
    per_rank = 2 if schedule in ("Interleaved1F1B", "ZBVZeroBubble") else 1
    stages = per_rank * dist.get_world_size()
    rank = dist.get_rank()
    mine = [rank, stages - 1 - rank] if schedule == "ZBVZeroBubble" else range(rank, stages, dist.get_world_size())
    return nn.ModuleList(Stage(index, stages) for index in mine)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten()) / MICRO_BATCHES


def piped(schedule: str, max_norm: float | None, parts: Any, opt: Any) -> Iterable[Tensor]:
    """Train with the schedule. torch's loop clips by the norm over all stages."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    count = ranks * len(parts)
    indices = [rank, count - 1 - rank] if schedule == "ZBVZeroBubble" else range(rank, count, ranks)
    stages = [PipelineStage(p, index, count, torch.device("cpu")) for p, index in zip(parts, indices, strict=True)]
    kind = schedules.get_schedule_class(schedule)
    several = issubclass(kind, schedules.PipelineScheduleMulti)
    runs = kind(stages if several else stages[0], MICRO_BATCHES, loss_fn=loss_of, scale_grads=False)
    held = opt.no_sync if schedule == "ZBVZeroBubble" and isinstance(opt, hytrain.AdamW) else nullcontext
    for step in range(STEPS):
        batch = torch.cat([tokens(step, 0)] * 2)
        has_first, has_last = 0 in indices, count - 1 in indices
        with held():
            runs.step(*[batch[:, :-1]] * has_first, **({"target": batch[:, 1:]} if has_last else {}))
        if max_norm is not None and isinstance(opt, torch.optim.AdamW):
            square = sum(p.grad.square().sum() for p in parts.parameters())
            dist.all_reduce(square)
            for p in parts.parameters():
                p.grad.mul_((max_norm / (square.sqrt() + 1e-6)).clamp(max=1.0))
        opt.step()
        opt.zero_grad()
        yield torch.tensor(float(step))


def compare(schedule: str) -> None:
    """Every owner leaves the bits of torch's AdamW."""
    practice: Practice = partial(piped, schedule, None)
    backwards = MICRO_BATCHES * len(list(parts_of(schedule)))  # type: ignore[call-overload]
    options = {"grad_accumulation": backwards, "pipeline_group": dist.group.WORLD}
    same_as(fused, practice, partial(parts_of, schedule), [{**options, "k": 0.0}, {**options, "k": (1.0, 0.5)}])


def clipped_by_stage(parts: Any, opt: Any) -> Iterable[Tensor]:
    """Some losses' gradients are beyond the limit."""
    for _ in piped("1F1B", None, parts, _Clips(parts, opt)):
        yield torch.zeros(())


class _Clips:
    """An optimizer whose loop clips each stage by itself before `step()`."""

    def __init__(self, parts: Any, opt: Any) -> None:
        self._parts, self._opt, self.zero_grad = parts, opt, opt.zero_grad

    def step(self) -> None:
        nn.utils.clip_grad_norm_(self._parts.parameters(), 0.1)
        self._opt.step()


def compare_clipped() -> None:
    options = {"pipeline_group": dist.group.WORLD}
    same_as(fused, clipped_by_stage, partial(parts_of, "1F1B"), [{**options, "k": 0.0}, {**options, "k": (1.0, 0.5)}])


def test_stages_that_the_loop_clips(two_ranks: RankGroup) -> None:
    two_ranks.run(compare_clipped)


class _Averages(_Clips):
    """An optimizer whose loop writes all stages' blocks by collectives after `step()`: autograd does not count that."""

    def step(self) -> None:
        self._opt.step()
        first, second = self._parts[0].blocks
        with torch.no_grad():
            for p in first.parameters():
                dist.reduce(p, 1)
            for p in second.parameters():
                dist.all_reduce(p)
                p.div_(dist.get_world_size())


def average(parts: Any, opt: Any) -> Iterable[Tensor]:
    for _ in piped("1F1B", None, parts, _Averages(parts, opt)):
        yield torch.zeros(())


def compare_averaged() -> None:
    options = {"grad_accumulation": MICRO_BATCHES, "pipeline_group": dist.group.WORLD}
    same_as(fused, average, partial(parts_of, "1F1B"), [{**options, "k": 0.0}, {**options, "k": (1.0, 0.5)}])


def test_a_loop_that_averages_weights_of_stages(two_ranks: RankGroup) -> None:
    two_ranks.run(compare_averaged)


def end_before_the_step(k: float) -> None:
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2)])
    options: Any = {"k": k, "max_grad_norm": 1.0, "updates": "backward", "pipeline_group": dist.group.WORLD}
    opt = hytrain.AdamW(model, lr=LR, **options)
    for step in range(3):
        model(torch.randn(4, 8)).square().mean().backward()
        if step < 2:
            opt.step()
            opt.zero_grad()
    for use in (opt.synchronize, opt.state_dict, model.state_dict):
        with pytest.raises(UsageError, match=r"norm of all stages: call it after opt\.step"):
            use()
    opt.close()


@pytest.mark.parametrize("k", [0.0, 1.0])
def test_nobody_waits_for_a_norm_that_does_not_come(k: float, two_ranks: RankGroup) -> None:
    two_ranks.run(end_before_the_step, k)


def refuse_parameters() -> None:
    with pytest.raises(UsageError, match="pass the stage's module"):
        hytrain.AdamW(Stage(0, 2).parameters(), pipeline_group=dist.group.WORLD)


def test_a_stages_parameters_are_refused_before_its_model_is_looked_for(two_ranks: RankGroup) -> None:
    """That is a collective, in a forward whose result the other stages wait for."""
    two_ranks.run(refuse_parameters)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B"])
def test_stages_train_as_with_torch(schedule: str, two_ranks: RankGroup) -> None:
    two_ranks.run(compare, schedule)


def test_modules_of_a_list_are_trained_together() -> None:
    """They keep their names. All are entered one by one, and the CPU's weights are late."""
    results = []
    for ours in (False, True):
        parts = [Stage(index, 2) for index in range(2)]
        groups = [p for part in parts for p in part.parameters()]
        opt: Any = hytrain.AdamW(parts, lr=LR, k=0.0) if ours else torch.optim.AdamW(groups, lr=LR, fused=True)
        with late_weights() if ours else nullcontext():
            for step in range(STEPS):
                batch = tokens(step, 0)
                loss_of(parts[1](parts[0](batch[:, :-1])), batch[:, 1:]).backward()
                opt.step()
                opt.zero_grad()
            if ours:
                opt.close()
        results.append(
            {f"{i}.{n}": p.detach().clone() for i, part in enumerate(parts) for n, p in part.named_parameters()}
        )
    assert not differing(results[1], results[0])


def compare_nearly(schedule: str, max_norm: float | None) -> None:
    """Every owner leaves the same bits, and torch's AdamW nearly the same ones."""
    backwards = MICRO_BATCHES * len(list(parts_of(schedule)))  # type: ignore[call-overload]
    results = []
    for choice in ({}, {"k": 0.0}, {"k": (1.0, 0.5)}):
        parts = parts_of(schedule)
        options = {"grad_accumulation": backwards, "pipeline_group": dist.group.WORLD, "max_grad_norm": max_norm}
        practice: Practice = partial(piped, schedule, max_norm)
        if not choice:
            results.append(trained(practice, parts, fused(parts)))
            continue
        with adamw(parts, **for_this_rank({**options, **choice})) as opt, late_weights():
            results.append(trained(practice, parts, opt))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
    assert not differing(results[2], results[1])


@pytest.mark.parametrize("schedule, max_norm", [("1F1B", MAX_NORM), ("ZBVZeroBubble", None)])
def test_the_norm_is_of_all_stages_and_weight_gradients_may_come_late(
    schedule: str, max_norm: float | None, two_ranks: RankGroup
) -> None:
    two_ranks.run(compare_nearly, schedule, max_norm)
