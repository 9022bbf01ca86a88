"""Trains until something ends it, with as many worker processes of a DataLoader as asked for; prints each step."""

import itertools
import sys

import torch

import hytrain

torch.manual_seed(0)
torch.set_num_threads(1)


class Seeds(torch.utils.data.IterableDataset):
    """Numbers, not tensors: whoever is killed while it shares tensors leaves files of torch's behind."""

    def __iter__(self):
        return itertools.count()


model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh()) for _ in range(4)])
opt = hytrain.AdamW(model, lr=1e-3, k=0.3)
workers = {"num_workers": int(sys.argv[1]), "multiprocessing_context": "fork"} if len(sys.argv) > 1 else {}
loader = torch.utils.data.DataLoader(Seeds(), batch_size=None, **workers)
for step, seed in enumerate(loader):
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(seed))
    loss = (model(x) - x.sin()).square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    print("step", step, flush=True)
