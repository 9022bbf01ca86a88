"""Other ways to train with optimizer state in host memory, each set up as its own documentation recommends.

torchao     CPUOffloadOptimizer over torch's fused AdamW; float32 weights under autocast, or all in bfloat16
deepspeed   ZeRO-2 offload, Twin-Flow (ZeRO-3, half of the update on the GPU), SuperOffload, ZenFlow
fsdp2       fully_shard with CPUOffloadPolicy on one rank, float32 masters, torch's fused AdamW on the CPU

The packages are imported where they are needed: one that is missing costs its own row and no other.
"""

from __future__ import annotations

import os
import socket
from typing import Any, Final

import torch
from torch import Tensor, nn

from benchmarks.loop import LR, Running, Setting, Unavailable, clip, loss_of

#: Parameters that DeepSpeed's ZeRO-3 updates at a time.
SUB_GROUP: Final = 100_000_000


def torchao(model: nn.Module, setting: Setting) -> Running:
    """Its gradients leave for the host while backward runs, as HyTrain's do; its update waits for step()."""
    from torchao.optim import CPUOffloadOptimizer  # type: ignore[import-not-found, unused-ignore]

    if setting.clip:
        raise Unavailable("torchao's CPUOffloadOptimizer has sent the gradients off before they could be clipped")
    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, lr=LR, fused=True)
    autocast = next(model.parameters()).dtype == torch.float32

    def step(batch: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Running(step)


def deepspeed_zero2(model: nn.Module, setting: Setting) -> Running:
    """The optimizer's state and update in host memory."""
    return _deepspeed(model, setting, _zero2())


def deepspeed_zenflow(model: nn.Module, setting: Setting) -> Running:
    """The most important 5 % of the gradients are applied each step, the rest every fourth: not exact."""
    zero = _zero2()
    zero["zenflow"] = {
        "topk_ratio": 0.05,
        "select_strategy": "auto",
        "select_interval": "auto",
        "update_interval": 4,
        "full_warm_up_rounds": 0,
        "overlap_step": True,
    }
    return _deepspeed(model, setting, zero)


def deepspeed_twinflow(model: nn.Module, setting: Setting) -> Running:
    """Half of the state on the GPU, by hand."""
    return _deepspeed(model, setting, _zero3(ratio=0.5))


def deepspeed_superoffload(model: nn.Module, setting: Setting) -> Running:
    """The CPU's update in a process of its own, speculative, rolled back if the gradients turn out bad."""
    zero = _zero3(ratio=1.0, super_offload=True, cpuadam_cores_perc=0.85)
    zero["stage3_max_live_parameters"] = 10**10
    zero["stage3_param_persistence_threshold"] = 10**5
    return _deepspeed(model, setting, zero)


def _zero2() -> dict[str, Any]:
    return {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "contiguous_gradients": True,
        "overlap_comm": True,
    }


def _zero3(**offload: Any) -> dict[str, Any]:
    return {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True, **offload},
        "sub_group_size": SUB_GROUP,
    }


def _deepspeed(model: nn.Module, setting: Setting, zero: dict[str, Any]) -> Running:
    _be_rank_zero_of_one()
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": setting.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": setting.clip,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "wall_clock_breakdown": False,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(batch: Tensor) -> Tensor:
        loss = loss_of(engine, batch)
        engine.backward(loss)
        engine.step()
        return loss

    running = Running(step)
    running.fixed_batch = True
    return running


def fsdp2(model: nn.Module, setting: Setting) -> Running:
    """Parameters, gradients and state in host memory; the layers come to the GPU as they are needed."""
    _be_rank_zero_of_one()
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1)
    options: dict[str, Any] = {
        "offload_policy": CPUOffloadPolicy(pin_memory=True),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
    }
    model = model.float()
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step(batch: Tensor) -> Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        clip(model.parameters(), setting)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Running(step)


def _be_rank_zero_of_one() -> None:
    """What torch.distributed reads. This process measures one system and ends, so nobody else sees it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **rank)
