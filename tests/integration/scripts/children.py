"""A guarded script whose children are of the difficult kinds: spawned workers, and a fork that ends like a program.

Trains a model beside each kind, one after the other, and prints digests of their weights, which do not depend on it.
"""

import hashlib
import os
import sys

import torch

import hytrain

STEPS = 6


class Vectors(torch.utils.data.Dataset):
    def __len__(self):
        return 8 * STEPS

    def __getitem__(self, index):
        return torch.randn(32, generator=torch.Generator().manual_seed(index))


def main(kind):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh()) for _ in range(4)])
    opt = hytrain.AdamW(model, lr=1e-2, k=0.3)
    workers = {"num_workers": 1, "multiprocessing_context": "spawn"} if kind == "spawn" else {}
    for step, x in enumerate(torch.utils.data.DataLoader(Vectors(), batch_size=8, **workers)):
        if kind == "fork" and step in (0, 3):
            child = os.fork()
            if child == 0:
                sys.exit(5)  # runs what is registered for the interpreter's end
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
        loss = (model(x) - x.sin()).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
    values = torch.cat([value.flatten() for value in model.state_dict().values()])
    print("weights", hashlib.sha256(values.numpy().tobytes()).hexdigest())


if __name__ == "__main__":
    for kind in ("spawn", "fork"):
        main(kind)
