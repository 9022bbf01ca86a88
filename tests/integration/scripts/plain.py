"""A user's script without a main guard, which takes its batches from two worker processes, with torch from its own.

    python plain.py hytrain|torch STEPS [--pause]

Prints `begin` once, `paused` if it waits for a line of input in the middle, and at the end a digest of the weights.
"""

import hashlib
import sys
import warnings

import torch

import hytrain

which, steps = sys.argv[1], int(sys.argv[2])
print("begin", flush=True)
torch.manual_seed(0)
torch.set_num_threads(1)


class Vectors(torch.utils.data.Dataset):
    def __len__(self):
        return 8 * steps

    def __getitem__(self, index):
        return torch.randn(32, generator=torch.Generator().manual_seed(index))


model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh()) for _ in range(4)])
if which == "hytrain":
    opt = hytrain.AdamW(model, lr=1e-2, k=0.3)
else:
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
warnings.filterwarnings("ignore", message="This DataLoader will create")  # where there is one core
workers = {"num_workers": 2, "multiprocessing_context": "fork"} if which == "hytrain" else {}
loader = torch.utils.data.DataLoader(Vectors(), batch_size=8, **workers)
for step, x in enumerate(loader):
    loss = (model(x) - x.sin()).square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    if "--pause" in sys.argv and step == steps // 2:
        print("paused", flush=True)
        input()
values = torch.cat([value.flatten() for value in model.state_dict().values()])
print("weights", hashlib.sha256(values.numpy().tobytes()).hexdigest(), flush=True)
