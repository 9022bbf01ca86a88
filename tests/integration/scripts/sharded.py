"""Trains a sharded model on several ranks, for some steps or, with 0, until something ends it.

With --fail, the last rank kills itself when torchrun has not yet started the ranks again.
"""

import itertools
import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import hytrain

steps, fails = int(sys.argv[1]), "--fail" in sys.argv and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32))
fully_shard(model)
opt = hytrain.AdamW(model, lr=1e-3)
for step in range(steps) if steps else itertools.count():
    model(torch.randn(8, 32)).square().mean().backward()
    opt.step()
    opt.zero_grad()
    if step == 4:
        print(f"rank {rank}, process {os.getpid()}: step 5", flush=True)
        if fails:
            dist.barrier()  # all have said it
        if fails and rank == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
opt.close()
dist.destroy_process_group()
print(f"rank {rank} is done")
