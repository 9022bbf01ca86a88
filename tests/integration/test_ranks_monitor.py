"""The monitor of a job with several ranks: which rank the others wait for."""

from __future__ import annotations

import json
import time

import torch.distributed as dist
from helpers import DEADLINE_S, LR
from ranks import RankGroup
from sharded_models import Decoder, next_token_loss
from torch.distributed.fsdp import fully_shard

import hytrain
from hytrain.monitoring import Client
from workers.watch import status_text as view

PAUSE_S = 0.5  # a busy machine does not hold the other rank up for so long in each step
STEPS = 4


def one_is_slow(slow: int) -> str | None:
    """Train with a pause in each forward of one rank; rank 0 returns the status as JSON, once both have reported."""
    model = Decoder()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    if dist.get_rank() == slow:
        model.blocks[1].register_forward_pre_hook(lambda module, inputs: time.sleep(PAUSE_S))
    opt = hytrain.AdamW(model, lr=LR, k=0.0)
    try:
        for step in range(STEPS):
            next_token_loss(model, step).backward()
            opt.step()
            opt.zero_grad()
            opt.log(step + 1)
        shown = None
        if dist.get_rank() == 0:
            with Client(opt._session.place.cluster) as client:
                ends_s = time.monotonic() + DEADLINE_S
                while None in view.waits_s(status := client.status()):
                    assert time.monotonic() < ends_s, status.ranks
            shown = view.record_json(status)
        dist.barrier()
        return shown
    finally:
        opt.close()


def test_the_rank_that_others_wait_for_is_named(two_ranks: RankGroup) -> None:
    shown, _ = two_ranks.run(one_is_slow, 1)
    record = json.loads(shown)
    assert record["slowest"]["rank"] == 1 and record["slowest"]["wait_s"] > PAUSE_S / 2
    assert [rank["rank"] for rank in record["ranks"]] == [0, 1]
    waits, slow = record["ranks"]
    assert slow["waits_s"] == 0.0 and waits["waits_s"] == record["slowest"]["wait_s"]
    assert all(rank["host"] and "on cores" in rank["cores"] for rank in record["ranks"])
