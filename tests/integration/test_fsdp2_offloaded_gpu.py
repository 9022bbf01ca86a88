"""FSDP2 on two GPUs with shards in host memory: the same bits, also where copies come late, and less GPU memory."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from helpers import opened
from ranks import RankGroup
from test_fsdp2_gpu import llama, run
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

import hytrain
from hytrain.memory.transfer import CudaTransfers

pytestmark = [pytest.mark.gpu, pytest.mark.spawns]

#: So long a fetch waits for, in the GPU's cycles: longer than a block's forward.
LATE_CYCLES = 2_000_000


def run_late(options: dict[str, Any], making: dict[str, Any], backwards: int) -> dict[str, Tensor]:
    """As `run`. Whoever does not wait for a fetch reads what was there before."""
    stream_in = CudaTransfers.stream_in

    def come_late(self: CudaTransfers, *args: Any, **named: Any) -> Any:
        with torch.cuda.stream(self._window):
            torch.cuda._sleep(LATE_CYCLES)
        return stream_in(self, *args, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CudaTransfers, "stream_in", come_late)
        return run(options, making, backwards)


@pytest.mark.parametrize(
    "options, making, backwards",
    [
        ({}, {}, 1),
        ({"max_grad_norm": 0.5}, {"prefetch": True}, 1),
        ({}, {"dtype": torch.float32, "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}, 1),
        ({}, {"reshard_after_forward": False}, 2),
    ],
    ids=["bfloat16", "prefetch, clipped", "mixed precision", "ZeRO-2, accumulated"],
)
def test_the_same_bits_wherever_shards_rest(
    options: dict[str, Any], making: dict[str, Any], backwards: int, two_gpus: RankGroup
) -> None:
    expected = two_gpus.run(run, {**options, "k": 1.0}, making, backwards)
    whole = {"k": 0.0, "offload_weights": 1.0}
    for choice in (
        whole,
        {**whole, "visit": 1.0},
        {"k": (0.0, 0.5), "visit": 0.5, "offload_weights": 0.5},
        {"policy": "random", "offload_weights": "auto"},
    ):
        found = two_gpus.run(run_late, {**options, **choice}, making, backwards)
        for rank, (theirs, ours) in enumerate(zip(found, expected, strict=True)):
            unequal = [name for name, value in ours.items() if not torch.equal(theirs[name], value)]
            assert not unequal, (choice, rank, unequal)


def bytes_between_steps(options: dict[str, Any]) -> int:
    gc.collect()  # models of runs before
    before = torch.cuda.memory_allocated()
    model: Any = llama()
    with opened(hytrain.AdamW, model, lr=1e-3, k=0.0, **options) as opt:
        for step in range(3):
            tokens = torch.randint(4096, (4, 64), generator=torch.Generator().manual_seed(step)).cuda()
            model(input_ids=tokens, labels=tokens).loss.backward()
            opt.step()
            opt.zero_grad()
        opt.synchronize()
        return torch.cuda.memory_allocated() - before


def test_shards_leave_the_gpu(two_gpus: RankGroup) -> None:
    """Three blocks of six stay, as the next ones. The first run has torch's own memory made, which stays."""
    choices: list[dict[str, Any]] = [{"offload_weights": 1.0}, {}, {"offload_weights": 1.0}]
    _, there, away = (two_gpus.run(bytes_between_steps, options) for options in choices)
    shard_bytes = (4 * 512**2 + 3 * 512 * 1376) * 2 // 2
    for before, after in zip(there, away, strict=True):
        assert before - after >= 2.9 * shard_bytes
