"""TRL's GRPO on one GPU: trainer and sampler take turns, and the sampler computes with weights that the trainer lends.

python examples/grpo_one_gpu.py                     # a small Llama learns to write vowels: half a minute on two cores
python examples/grpo_one_gpu.py --small             # seconds
python examples/grpo_one_gpu.py --model FOLDER      # a pretrained model

It needs TRL: python -m pip install '.[hf]' 'trl>=1.16'

    trainer ── prompts ──▶ sampler: attaches this step's weights, generates ── tokens, log-probabilities ──▶ trainer

The trainer gives its GPU memory back while the sampler has its turn. The sampler's model is built without memory. On a
CPU it computes with the weights where the optimizer process keeps them. Where there is a GPU, they are copied there for
each turn.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

import hytrain
import hytrain.weights

parser = argparse.ArgumentParser()
parser.add_argument("--small", action="store_true", help="fewer steps of a smaller model")
parser.add_argument("--model", type=Path, help="a folder that from_pretrained loads; without it, a small Llama")
parser.add_argument("--steps", type=int, help="how many")
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--tokens", type=int, default=16, help="of a completion, at most")
parser.add_argument("--sampler", action="store_true", help=argparse.SUPPRESS)  # this process is the other one
args = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
letters = ["<end>", "<pad>", *"abcdefghijklmnopqrstuvwxyz 0123456789:"]


def configuration() -> Any:
    if args.model:
        return AutoConfig.from_pretrained(args.model)
    width = 32 if args.small else 128
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"eos_token_id": 0, "pad_token_id": 1}
    return LlamaConfig(**sizes, **ends, vocab_size=len(letters), max_position_embeddings=64)


def tokenizer() -> Any:
    """The model's own, or one token per letter."""
    if args.model:
        return AutoTokenizer.from_pretrained(args.model, padding_side="left")
    by_letter = Tokenizer(BPE({letter: number for number, letter in enumerate(letters)}, []))
    by_letter.decoder = decoders.Fuse()
    ends = {"eos_token": letters[0], "pad_token": letters[1]}
    return PreTrainedTokenizerFast(tokenizer_object=by_letter, padding_side="left", **ends)


def vowels(completions: list[str], **others: Any) -> list[float]:
    """The reward: how many of a completion's characters are vowels, of as many as there may be."""
    return [sum(letter in "aeiou" for letter in text) / args.tokens for text in completions]


def serve() -> None:
    """The sampler. For each line of prompts, it answers with a line of completions."""
    words, weights = tokenizer(), None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(configuration()).eval()
    print("ready", flush=True)
    for line in sys.stdin:
        asked, began = json.loads(line), time.monotonic()
        if weights is None:
            weights = hytrain.weights.attach(asked["run"])
        else:
            weights.renew()
        weights.load_into(model, None if device == "cpu" else device)
        attached = time.monotonic()
        answer = sample(model, words, asked["prompts"], seed=weights.step)
        if device == "cuda":
            model.to("meta")  # the trainer needs the memory
            torch.cuda.empty_cache()
        weights.release()  # the trainer may write them where they are
        took = {"attach": attached - began, "sample": time.monotonic() - attached}
        print(json.dumps({"answer": answer, "took": took}), flush=True)


def sample(model: Any, words: Any, prompts: list[str], *, seed: int) -> dict[str, Any]:
    """A completion for each prompt: its tokens, and the logarithms of their probabilities."""
    torch.manual_seed(seed)
    given = words(prompts, return_tensors="pt", padding=True).to(device)
    how = {"do_sample": True, "top_k": 0, "max_new_tokens": args.tokens}
    ids = {"input_ids": given.input_ids, "attention_mask": given.attention_mask}
    made = model.generate(**ids, **how, return_dict_in_generate=True, output_logits=True)
    chosen = made.sequences[:, given.input_ids.shape[1] :]
    logarithms = torch.stack(made.logits, 1).float().log_softmax(-1).gather(-1, chosen[..., None])[..., 0]
    after_end = (chosen == words.eos_token_id).cumsum(1) > 0
    lengths = (1 + (~after_end).sum(1)).clamp(max=chosen.shape[1]).tolist()
    return {
        "prompt_ids": [row[mask.bool()].tolist() for row, mask in zip(given.input_ids, given.attention_mask)],
        "completion_ids": [row[:length].tolist() for row, length in zip(chosen, lengths)],
        "logprobs": [row[:length].tolist() for row, length in zip(logarithms, lengths)],
    }


def train(sampler: subprocess.Popen[str]) -> None:
    """The trainer. It waits while the sampler has its turn."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # `rollout_func` may change
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.manual_seed(0)
    load = AutoModelForCausalLM.from_pretrained if args.model else AutoModelForCausalLM.from_config
    model = load(args.model or configuration()).to(device)
    opt = hytrain.AdamW(model, lr=args.lr)
    took: Counter[str] = Counter()
    steps = args.steps or (20 if args.small else 60)

    def rollout(prompts: list[str], trainer: Any) -> Any:
        times = [time.monotonic()]
        with opt.lend_weights():
            times.append(time.monotonic())
            with opt.parked(weights=True):  # the GPU is the sampler's
                times.append(time.monotonic())
                sampler.stdin.write(json.dumps({"run": str(opt.run_dir), "prompts": prompts}) + "\n")
                sampler.stdin.flush()
                said = json.loads(sampler.stdout.readline())
                times.append(time.monotonic())
        times.append(time.monotonic())
        lend, park, waited, resume = (after - before for before, after in pairwise(times))
        took.update(said["took"])
        took.update(lend=lend, park=park, resume=resume, rollout=lend + park + waited + resume)
        return said["answer"]

    trainer = GRPOTrainer(
        model,
        vowels,
        GRPOConfig(
            "runs/grpo_one_gpu",
            max_steps=steps,
            per_device_train_batch_size=32,
            num_generations=8,
            max_completion_length=args.tokens,
            learning_rate=args.lr,
            lr_scheduler_type="constant",
            use_cpu=device == "cpu",
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=max(steps // 6, 1),
            disable_tqdm=True,
            report_to="none",
            save_strategy="no",
        ),
        train_dataset=Dataset.from_list([{"prompt": f"line {number}: "} for number in range(64)]),
        processing_class=tokenizer(),
        optimizers=(opt, None),
        rollout_func=rollout,
    )
    trainer.remove_callback(PrinterCallback)
    began = time.monotonic()
    trainer.train()
    took["train"] = time.monotonic() - began - took["rollout"]
    opt.close()
    for record in trainer.state.log_history:
        if "reward" in record:
            print("step {step}: reward {reward:.3f}".format(**record))
    for phase in ("lend", "park", "attach", "sample", "resume", "train"):
        print(f"{phase}: {1e3 * took[phase] / steps:.1f} ms per step")


if __name__ == "__main__":
    if args.sampler:
        serve()
    else:
        command = [sys.executable, __file__, "--sampler", *sys.argv[1:]]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sampler:
            assert sampler.stdout.readline() == "ready\n"
            train(sampler)
            sampler.stdin.close()
