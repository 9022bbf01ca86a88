"""HyTrain on this machine, `make demo`: with a GPU, a Llama that torch's AdamW cannot train in the memory it is given.

    python examples/demo.py

    with a GPU      torch below a cap ─▶ out of memory; torch without ─▶ its step; HyTrain below the cap ─▶ the verdict
    without one     examples/demo.yaml: a small Llama on the CPU, through three processes

All sizes follow from what is free: the model has at most 1.3 billion parameters.
"""

from __future__ import annotations

import gc
import lzma
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import psutil
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import hytrain
from hytrain.readable import gib

ROOT: Final = Path(__file__).resolve().parent.parent
#: Bytes per parameter: bf16 weights and gradients, fp32 masters and moments; what the demo gives; what HyTrain needs on
#: the host.
TORCH, GIVEN, ON_HOST = 16, 10, 18
MOST_PARAMETERS: Final = 1.3e9
HIDDEN, BATCH, SEQUENCE, LR = 2048, 4, 1024, 1e-4
#: HyTrain measures in its first steps, and plans. Of all systems, the last steps count.
STEPS, TORCH_STEPS, COUNTED = 50, 12, 8


class Measured(NamedTuple):
    """Median seconds per step, the most bytes of GPU memory at a time, and the last loss."""

    step_s: float
    peak: int
    loss: float


def llama(parameters: float, device: str) -> nn.Module:
    """A byte-level Llama of about so many parameters, or one small layer; in bf16 on a GPU."""
    layers = round(parameters / (12 * HIDDEN**2))  # 4 matrices of attention, 3 of 8/3 the width
    layers, hidden = (layers, HIDDEN) if layers else (1, 128)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=8 * hidden // 3 // 32 * 32,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = LlamaForCausalLM(config)
    if device != "cpu":
        model = model.to(torch.bfloat16)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trained: nn.Module = model.train()
    return trained


def batches(device: str, steps: int, batch: int = BATCH, sequence: int = SEQUENCE) -> Tensor:
    """Bytes of speeches, (steps, batch, sequence)."""
    text = lzma.decompress((ROOT / "examples/data/sotu.txt.xz").read_bytes())
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    starts = torch.randint(len(tokens) - sequence, (steps, batch, 1), generator=torch.Generator().manual_seed(1))
    return tokens[starts + torch.arange(sequence)].to(device)


def train(model: nn.Module, step: Callable[[], None], data: Tensor, name: str) -> Measured:
    """Train one step with each batch of `data`, and print a line about every tenth."""
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    times_s = list[float]()
    for number, batch in enumerate(data, start=1):
        began_s = time.perf_counter()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        step()
        value = loss.item()  # waits for the GPU; HyTrain's updates go on
        times_s.append(time.perf_counter() - began_s)
        if number == 1 or number % 10 == 0:
            print(f"  {name}, step {number:2}: loss {value:.3f}, {times_s[-1]:.3f} s", flush=True)
    peak = torch.cuda.memory_stats().get("active_bytes.all.peak", 0)
    return Measured(statistics.median(times_s[-COUNTED:]), peak, value)


def by_torch(parameters: float, device: str, steps: int = TORCH_STEPS) -> Measured | str:
    """torch's fused AdamW over fp32 masters on the GPU; the first sentence of its error if memory does not suffice."""
    try:
        model = llama(parameters, device)
        weights = list(model.parameters())
        masters = [weight.detach().float() for weight in weights]
        opt = torch.optim.AdamW(masters, lr=LR, fused=True)

        def step() -> None:
            for master, weight in zip(masters, weights, strict=True):
                master.grad, weight.grad = weight.grad.float(), None  # type: ignore[union-attr]
            opt.step()
            opt.zero_grad()
            with torch.no_grad():
                torch._foreach_copy_(list[Tensor](weights), masters)

        return train(model, step, batches(device, steps), "torch")
    except torch.OutOfMemoryError as error:
        return str(error).partition(". ")[0]


def by_hytrain(parameters: float, device: str, steps: int = STEPS) -> Measured:
    model = llama(parameters, device)
    opt = hytrain.AdamW(model.parameters(), lr=LR)

    def step() -> None:
        opt.step()
        opt.zero_grad()

    measured = train(model, step, batches(device, steps), "HyTrain")
    opt.close()
    return measured


def same_bits(device: str) -> None:
    """torch's AdamW beside HyTrain's for three steps of a small model: all bits are compared, and the log says so."""
    model = llama(0, device)
    opt = hytrain.AdamW(model.parameters(), lr=LR, check=3)
    for batch in batches(device, 3, 2, 64):
        model(input_ids=batch, labels=batch).loss.backward()
        opt.step()
        opt.zero_grad()
    opt.close()


def give_back() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def on_gpu(device: str = "cuda") -> None:
    """The whole of it, in at most two minutes."""
    free, total = torch.cuda.mem_get_info()
    host = psutil.virtual_memory().available
    parameters = min(MOST_PARAMETERS, 0.8 * free / GIVEN, host / ON_HOST)
    cap = int(parameters * GIVEN)
    print(f"{torch.cuda.get_device_name()}, {gib(free)} free; {gib(host)} of host memory.")
    print(f"A Llama of {parameters / 1e9:.2f} B parameters: {gib(int(TORCH * parameters))} for torch's AdamW, and")
    print(f"activations. This process may take {gib(cap)} now.\n")

    torch.cuda.set_per_process_memory_fraction(cap / total)
    refused = by_torch(parameters, device, 2)
    give_back()
    print(f"  torch: {refused}\n" if isinstance(refused, str) else "  torch: it fits\n", flush=True)

    ours = by_hytrain(parameters, device)
    give_back()
    torch.cuda.set_per_process_memory_fraction(1.0)
    print("\n  torch, with all of the GPU's memory:", flush=True)
    theirs = by_torch(parameters, device)
    give_back()
    print("\n  a small model, beside torch's optimizer:", flush=True)
    same_bits(device)

    print("\n| | s/step | GPU memory |\n| --- | --- | --- |")
    print(f"| torch, below {gib(cap)} | {'out of memory' if isinstance(refused, str) else 'fits'} | |")
    print(f"| HyTrain, below {gib(cap)} | {ours.step_s:.3f} | {gib(ours.peak)} |")
    if isinstance(theirs, str):
        print("| torch, all memory | out of memory | |")
        print(
            f"\nThis GPU cannot train the model with torch's AdamW. With HyTrain it does, {ours.step_s:.3f} s a step."
        )
    else:
        print(f"| torch, all memory | {theirs.step_s:.3f} | {gib(theirs.peak)} |")
        ratio, part = ours.step_s / theirs.step_s, ours.peak / theirs.peak
        print(f"\nHyTrain takes {ratio:.2f} times torch's step, with {part:.0%} of its GPU memory.")
    print("\nNext:")
    print("  bin/hytrain-cluster doctor                                   what this machine can train, and how fast")
    print("  bin/hytrain-cluster examples/llama-7b-24gb.yaml --dry-run    whether 7 B fit here")
    print("  python examples/plain_script.py                              the line to change in your script")


def main() -> None:
    if torch.cuda.is_available():
        on_gpu()
        return
    if Path("/proc/driver/nvidia").exists():
        print("There is a GPU, but this torch is for CPUs: `make demo SYSTEM_TORCH=1` uses yours.", flush=True)
    launcher = str(ROOT / "bin/hytrain-cluster")
    os.environ.setdefault("HYTRAIN_CHECK", "3")  # torch's AdamW beside HyTrain's: the same bits?
    os.execv(sys.executable, [sys.executable, launcher, str(ROOT / "examples/demo.yaml"), *sys.argv[1:]])


if __name__ == "__main__":
    main()
