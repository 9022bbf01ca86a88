"""The usual training loop with one line changed: a small Llama memorizes this file.

    python examples/plain_script.py

There is no main guard and no launcher: `hytrain.AdamW` starts the two other processes by itself, and they end with this
one. Under `hytrain-cluster examples/plain_script.py` it joins the processes that are already running.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hytrain

STEPS, BATCH, WINDOW = 150, 8, 64

torch.manual_seed(0)
torch.set_num_threads(1)  # more do not speed up such a small model, and gradients depend on their number
device = "cuda" if torch.cuda.is_available() else "cpu"
model = LlamaForCausalLM(
    LlamaConfig(hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4, vocab_size=256)
).to(device)

text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
starts = torch.randint(len(text) - WINDOW, (STEPS, BATCH, 1))
batches = text[starts + torch.arange(WINDOW)].to(device)  # (STEPS, BATCH, WINDOW) bytes

opt = hytrain.AdamW(model, lr=3e-3)  # before: torch.optim.AdamW(model.parameters(), lr=3e-3)
for step, batch in enumerate(batches, start=1):
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    opt.step()
    opt.zero_grad()
    if step == 1 or step % 25 == 0:
        print(f"step {step}: loss {loss.item():.4f}")

for role, pid, cores in opt.processes():
    print(f"{role}: process {pid}, cores {cores}")
