"""How many tokens per second a small decoder reads and writes, on the CPU and on the GPU.

    python -m examples.studies.decoder            # a minute on two cores
    python -m examples.studies.decoder --small    # seconds

A prompt is read in one forward; then tokens are written one by one with the cache of keys and values. The model is a
GPT-2 of 20 M parameters in float32 with random weights: what it writes means nothing, the time is the same. Call it
from the checkout's folder: the table is written as in the benchmarks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.columns import markdown, number

REPEATS = 3


class Rate(NamedTuple):
    """Tokens per second, of all sequences of a batch together."""

    read: float
    written: float


def decoder(device: str, *, small: bool) -> Any:
    """The model in inference mode, from a fixed seed."""
    torch.manual_seed(0)
    width, layers, vocabulary = (64, 2, 256) if small else (384, 6, 16384)
    config = GPT2Config(
        n_embd=width,
        n_layer=layers,
        n_head=width // 64,
        vocab_size=vocabulary,
        n_positions=1024,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config).to(device).eval()


@torch.inference_mode()
def rate(model: Any, batch: int, prompt: int, written: int) -> Rate:
    """Read a prompt of random tokens, write `written` more, the likeliest each; medians over repeats."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, (batch, prompt), generator=generator).to(model.device)

    def read() -> Any:
        return model(input_ids=tokens, use_cache=True, logits_to_keep=1)

    def write() -> None:
        seen = found
        for _ in range(written):
            following = seen.logits[:, -1].argmax(-1, keepdim=True)
            seen = model(input_ids=following, past_key_values=seen.past_key_values, use_cache=True)

    reads, writes = list[float](), list[float]()
    read()  # memory and kernels are new
    for _ in range(REPEATS):
        found, seconds = timed(read)
        reads.append(seconds)
        writes.append(timed(write)[1])
    return Rate(batch * prompt / statistics.median(reads), batch * written / statistics.median(writes))


def timed(act: Callable[[], Any]) -> tuple[Any, float]:
    """What `act` returns, and the seconds until the device has done it."""
    began_s = time.perf_counter()
    result = act()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return result, time.perf_counter() - began_s


def main(argv: Sequence[str] | None = None) -> None:
    """The command line: measures each batch size and length, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a smaller model, fewer sizes")
    parser.add_argument("--threads", type=int, help="torch's threads on the CPU")
    given = parser.parse_args(argv)
    if given.threads:
        torch.set_num_threads(given.threads)
    sizes = [(b, p) for b in ((1, 4) if given.small else (1, 4, 16)) for p in ((8,) if given.small else (32, 128, 512))]
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    models = {device: decoder(device, small=given.small) for device in devices}
    lines = []
    for batch, prompt in sizes:
        rates = {device: rate(model, batch, prompt, 4 if given.small else 32) for device, model in models.items()}
        cpu, gpu = rates["cpu"], rates.get("cuda")
        ratios = None if gpu is None else Rate(gpu.read / cpu.read, gpu.written / cpu.written)
        rounded = [(cpu, 0), (gpu, 0), (ratios, 1)]
        cells = [number(each and each[i], digits) for i in range(2) for each, digits in rounded]
        lines.append([str(batch), str(prompt), *cells])
    parameters = sum(parameter.numel() for parameter in models["cpu"].parameters())
    print(f"A decoder of {parameters:,} parameters, float32, {torch.get_num_threads()} threads on the CPU; tokens/s:\n")
    head = [f"{what}, {where}" for what in ("read", "written") for where in ("CPU", "GPU", "GPU / CPU")]
    print(markdown(["batch", "prompt", *head], lines))


if __name__ == "__main__":
    main()
