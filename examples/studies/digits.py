"""An MLP on scikit-learn's handwritten digits, trained on the CPU alone, on the GPU alone, and with HyTrain.

    python -m examples.studies.digits            # two minutes on two cores
    python -m examples.studies.digits --small    # seconds

All see the same batches in the same order, from the same weights. With HyTrain, the trainer computes on the GPU if
there is one, and the optimizer process updates on the CPU what the planner leaves to it. Call it from the checkout's
folder: the table is written as in the benchmarks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hytrain
from benchmarks.columns import markdown, number, share

BATCH = 64
LR = 1e-3


@dataclass
class Run:
    """What one way to train has shown: the mean training loss and the seconds of each epoch, and the accuracy."""

    losses: list[float] = field(default_factory=list)
    epoch_s: list[float] = field(default_factory=list)
    accuracy: float = 0.0  # on the held-out images

    @property
    def usual_epoch_s(self) -> float:
        """The median, without the first epoch, in which memory and kernels are new."""
        return statistics.median(self.epoch_s[1:] or self.epoch_s)


@cache
def images() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pixels (images, 64), from -1 to 1, and labels (images,): of 1,437 images to train on, then of 360 held out."""
    digits = load_digits()
    pixels = torch.tensor(digits.data, dtype=torch.float32) / 8 - 1
    labels = torch.tensor(digits.target, dtype=torch.int64)
    train_x, test_x, train_y, test_y = train_test_split(pixels, labels, test_size=360, random_state=0)
    return train_x, train_y, test_x, test_y


def perceptron(width: int, depth: int) -> nn.Sequential:
    """`depth` hidden layers of the same width, initialised from a fixed seed.

    The output has no biases: of ten numbers, torch's AdamW would compute some in another way than the rest.
    """
    torch.manual_seed(0)
    sizes = [64, *[width] * depth]
    hidden = [nn.Sequential(nn.Linear(i, o), nn.ReLU()) for i, o in zip(sizes, sizes[1:], strict=False)]
    return nn.Sequential(*hidden, nn.Linear(width, 10, bias=False))


def train(device: str, epochs: int, width: int, depth: int, *, with_hytrain: bool) -> Run:
    """Train on `device` with torch's AdamW or HyTrain's."""
    x, y, test_x, test_y = (each.to(device) for each in images())
    model = perceptron(width, depth).to(device)
    opt: torch.optim.Optimizer
    opt = hytrain.AdamW(model, lr=LR) if with_hytrain else torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    run, order = Run(), torch.Generator().manual_seed(0)
    for _ in range(epochs):
        began_s, total = time.perf_counter(), torch.zeros((), device=device)
        batches = torch.randperm(len(x), generator=order).to(device).split(BATCH)
        for batch in batches:
            loss = cross_entropy(model(x[batch]), y[batch])
            loss.backward()
            opt.step()
            opt.zero_grad()
            total += loss.detach()
        run.losses.append(float(total) / len(batches))  # waits for the device
        run.epoch_s.append(time.perf_counter() - began_s)
    with torch.no_grad():
        run.accuracy = float((model(test_x).argmax(1) == test_y).float().mean())
    if isinstance(opt, hytrain.AdamW):
        opt.close()
    return run


def main(argv: Sequence[str] | None = None) -> None:
    """The command line: trains each way, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a smaller model and fewer epochs")
    parser.add_argument("--threads", type=int, help="torch's threads on the CPU")
    given = parser.parse_args(argv)
    epochs, width, depth = (3, 64, 2) if given.small else (20, 1024, 4)
    if given.threads:
        torch.set_num_threads(given.threads)
    gpu = "cuda" if torch.cuda.is_available() else None
    ways = {"CPU alone": ("cpu", False), "GPU alone": (gpu, False)}
    ways["GPU and CPU, HyTrain" if gpu else "CPU, HyTrain's processes"] = (gpu or "cpu", True)
    shown = [each for each in (1, 2, 5, 10, 20) if each <= epochs]
    lines = []
    for name, (device, with_hytrain) in ways.items():
        if device is not None:
            run = train(device, epochs, width, depth, with_hytrain=with_hytrain)
            losses = [number(run.losses[epoch - 1], 4) for epoch in shown]
            lines.append([name, *losses, share(run.accuracy), number(1000 * run.usual_epoch_s, 1)])
    parameters = sum(parameter.numel() for parameter in perceptron(width, depth).parameters())
    print(f"An MLP of {parameters:,} parameters, batches of {BATCH}, {torch.get_num_threads()} threads on the CPU:\n")
    print(markdown(["trained on", *(f"loss, epoch {e}" for e in shown), "held-out accuracy", "ms per epoch"], lines))


if __name__ == "__main__":
    main()
