"""Trains until SIGUSR1 has come to every rank for the second time, and saves then."""

import itertools
import os
import signal

import torch
from torch.distributed.fsdp import fully_shard

import hytrain

warned, told = [], 0
signal.signal(signal.SIGUSR1, lambda number, frame: warned.append(number))
torch.manual_seed(0)
if "RANK" in os.environ:
    torch.distributed.init_process_group("gloo")
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh()) for _ in range(4)])
if "RANK" in os.environ:
    fully_shard(model)
opt = hytrain.AdamW(model, lr=1e-3, k=0.3)
for step in itertools.count():
    model(torch.randn(8, 32)).square().mean().backward()
    opt.step()
    opt.zero_grad()
    if step == 2:
        print("ready", flush=True)
    times = torch.tensor(len(warned))
    if "RANK" in os.environ:
        torch.distributed.all_reduce(times, torch.distributed.ReduceOp.MIN)
    if times > told:
        told += 1
        print("warned", flush=True)
    if told == 2:
        break
signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # one that is late would end an interpreter that is about to end
opt.close()
print("saved", flush=True)
