"""Lends the weights of a step, and trains on until it is killed. Says where, and after which step."""

import sys

import torch

import hytrain

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh()) for _ in range(4)])
opt = hytrain.AdamW(model, lr=1e-2, k=float(sys.argv[1]))
for step in range(1_000_000):
    model(torch.randn(8, 32)).square().mean().backward()
    opt.step()
    opt.zero_grad()
    if step == 2:
        lent = opt.lend_weights()
        print("lent", opt.run_dir, flush=True)
        input()
    if step == 5:
        print("trained", flush=True)
