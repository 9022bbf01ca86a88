"""The Hugging Face Trainer with one new line: a small Llama learns State of the Union addresses, byte by byte.

    python examples/hf_causal_lm.py             # minutes on two cores
    python examples/hf_causal_lm.py --small     # seconds
    python examples/hf_causal_lm.py --resume    # continues from the last checkpoint, bit for bit

The training arguments keep their meaning: `max_grad_norm` and `weight_decay` are passed to HyTrain's AdamW.
"""

from __future__ import annotations

import argparse
import lzma
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from hytrain.integrations.transformers import adopt

parser = argparse.ArgumentParser()
parser.add_argument("--small", action="store_true", help="a small model and a short text, to try it out")
parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
chosen = parser.parse_args()
width, depth, window, steps = (64, 2, 64, 40) if chosen.small else (192, 4, 256, 500)

text = lzma.open(Path(__file__).parent / "data/sotu.txt.xz").read(400 * window * 32)
windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().view(-1, window)
examples = [{"input_ids": tokens, "labels": tokens} for tokens in windows]

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=depth,
        num_attention_heads=4,
        max_position_embeddings=window,
        vocab_size=256,
    )
)
args = TrainingArguments(
    "runs/hf_causal_lm",
    max_steps=steps,
    per_device_train_batch_size=8,
    learning_rate=3e-3,
    lr_scheduler_type="cosine",
    warmup_steps=steps // 20,
    weight_decay=0.1,
    max_grad_norm=1.0,
    logging_steps=steps // 20,
    eval_strategy="steps",
    eval_steps=steps // 2,
    save_steps=steps // 2,
    report_to="none",
)
trainer = Trainer(model, args, train_dataset=examples[64:], eval_dataset=examples[:64])
opt = adopt(trainer, k="auto")  # the only new line
trainer.train(resume_from_checkpoint=chosen.resume)

for record in trainer.state.log_history:
    if "loss" in record:
        print("step {step}: loss {loss:.4f}, norm {grad_norm:.2f}, k {hytrain_k:.2f}".format(**record))
print(f"validation loss {trainer.evaluate()['eval_loss']:.4f} nats per byte")
