"""Accelerate and the Trainer with their FSDP2 plugin, on two ranks: as with torch's AdamW, bit for bit.

Accelerate shards only on GPUs. Here it takes two CPUs for them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import LR, differing, late_weights
from ranks import RankGroup
from sharded_models import Decoder, fused, local, next_token_loss, trained
from torch import Tensor, nn

import hytrain

STEPS = 6


@contextmanager
def accelerated() -> Iterator[None]:
    """Accelerate's settings outlive the Accelerator that made them, in the environment too."""
    from accelerate import DistributedType, PartialState
    from accelerate.state import AcceleratorState, GradientState

    def reset() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    reset()
    with mock.patch.dict(os.environ):
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        yield
    reset()


def accelerator(precision: str = "no", **options: Any) -> Any:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    chosen = {name: options.pop(name) for name in list(options) if name != "gradient_accumulation_steps"}
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        **{"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"], **chosen},
    )
    return Accelerator(mixed_precision=precision, fsdp_plugin=plugin, **options)


def one(steps: int, acc: Any, model: nn.Module, opt: Any, scheduler: Any = None, first=0, norms=None):
    for step in range(first, steps):
        with acc.accumulate(model):
            loss = next_token_loss(model, step)
            acc.backward(loss)
            if acc.sync_gradients and norms is not None:
                norms.append(float(acc.clip_grad_norm_(model.parameters(), 1e3)))
            opt.step()
            scheduler.step()
            opt.zero_grad()


def weights(model):
    return {name: local(p.detach()).clone() for name, p in model.named_parameters()}


def state(opt):
    return {f"{i}.{plane}": local(v).clone() for i, e in opt.state_dict()["state"].items() for plane, v in e.items()}


def run(ours: bool, folder, precision="no", **options):
    from hytrain.integrations.accelerate import adopt
    out = {}
    with accelerated():
        acc = accelerator(precision, **options)
        model = Decoder()
        if ours:
            opt = adopt(acc, model, lr=LR, max_grad_norm=1e3, k=float(dist.get_rank()))
            raw = opt
        else:
            raw = opt = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
        sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: 0.9**s)
        model, opt, sched = acc.prepare(model, opt, sched)
        norms = []
        one(STEPS, acc, model, opt, sched, norms=norms)
        acc.save_state(folder)
        a = weights(model)
        one(STEPS + 2, acc, model, opt, sched, STEPS, norms=norms)
        b = weights(model)
        acc.load_state(folder)
        c = weights(model)
        one(STEPS + 2, acc, model, opt, sched, STEPS, norms=norms)
        d = weights(model)
        s = state(raw)
        if ours: raw.close()
        assert differing(a, c) == []
        assert differing(b, d) == []
        return b, s, norms


def both(folder, *a, **o):
    import warnings
    x = run(False, folder + "/torch", *a, **o)
    y = run(True, folder + "/ours", *a, **o)
    assert len(set(x[1]) ) > 3
    return differing(x[0], y[0]), differing(x[1], y[1]), x[2], y[2], os.listdir(folder+"/ours")


OPTIONS = [{}, {"precision": "bf16"}, {"gradient_accumulation_steps": 3}, {"activation_checkpointing": True},
   {"cpu_ram_efficient_loading": True}, {"state_dict_type": "FULL_STATE_DICT"}, {"reshard_after_forward": False}]

@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it(two_ranks: RankGroup, tmp_path, options) -> None:
    print(two_ranks.run(both, str(tmp_path), **options))
