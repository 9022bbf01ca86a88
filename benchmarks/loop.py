"""What all systems share: the model, its batches, the loss, the form of a step.

Same seed, same shapes, same random tokens for every system; parameters are made on the device in their dtype.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from benchmarks.job import SHAPES, Job

Step = Callable[[Tensor], Tensor]
LR: Final = 1e-4
BATCHES: Final = 4
RECORD_PATIENCE_S: Final = 5.0


class Unavailable(Exception):
    """This system can't do what is asked for, here or at all; the text is the row's error."""


@dataclass(frozen=True)
class Setting:
    """What a system's builder is told beside the model. `option` is what stood behind the system's colon."""

    option: str
    clip: float
    device: str
    batch: int
    run_dir: str


class Running:
    """A system that was built: its step, and its own account of what it does."""

    def __init__(self, step: Step, optimizer: Any = None) -> None:
        """`optimizer` is a `hytrain.AdamW`, None for all other systems."""
        self.step, self.optimizer = step, optimizer
        self.fixed_batch = False  # whether other batch sizes need another process

    def k(self) -> float | None:
        return None if self.optimizer is None else float(self.optimizer.statistics().k)

    def moving(self) -> bool:
        """Whether layers moved in the last step, or memory was worked on for that."""
        return self.optimizer is not None and bool(self.optimizer.statistics().moving)

    def number(self) -> int:
        """The last finished step's number, as in metrics.jsonl."""
        return 0 if self.optimizer is None else int(self.optimizer.statistics().step)

    def records(self, first: int, last: int, loss: float) -> list[dict[str, Any]]:
        """HyTrain's own records of these steps. Its coordinator holds them back for the loop's numbers: give it one."""
        if self.optimizer is None:
            return []
        self.optimizer.log(last, loss=loss)
        path, deadline = Path(self.optimizer.run_dir) / "metrics.jsonl", time.monotonic() + RECORD_PATIENCE_S
        found: dict[int, dict[str, Any]] = {}
        while last not in found and time.monotonic() < deadline:
            time.sleep(0.02)
            lines = path.read_text().splitlines() if path.exists() else []
            found = {record["step"]: record for line in lines if "step_s" in (record := _whole(line))}
        return [found[number] for number in range(first, last + 1) if number in found]

    def command(self, name: str, value: str) -> None:
        """What `hytrain-monitor` does: ask the coordinator. Raises `Unavailable` with its answer if it refuses."""
        from protocol import messages as m
        from workers.monitor import Attachment, find

        if self.optimizer is None:
            raise Unavailable(f"only HyTrain takes commands such as {name}={value}")
        with Attachment(find(str(self.optimizer.run_dir))) as attachment:
            reply = attachment.require(m.Command(name=name, value=value), m.CommandReply)
        if not reply.ok:
            raise Unavailable(f"{name}={value}: {reply.text}")

    def close(self) -> None:
        if self.optimizer is not None:
            self.optimizer.close()


def _whole(line: str) -> dict[str, Any]:
    """The record of a line; none yet if its end is still being written."""
    try:
        record: dict[str, Any] = json.loads(line)
    except ValueError:
        return {}
    return record


def build_model(job: Job, dtype: str) -> nn.Module:
    """A Llama with random weights on the job's device; with activation checkpointing on a GPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, intermediate, layers, heads, vocabulary = SHAPES[job.shape]
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=vocabulary,
        max_position_embeddings=4096,
        use_cache=False,
        attn_implementation="sdpa",  # type: ignore[call-arg]
    )
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, dtype))
    with torch.device(job.device):
        model: nn.Module = LlamaForCausalLM(config).train()
    torch.set_default_dtype(torch.float32)
    if job.device == "cuda":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    return model


def batches(job: Job, batch: int) -> list[Tensor]:
    """Random tokens of a fixed seed, on the device: (batch, sequence) each."""
    generator = torch.Generator().manual_seed(1)
    shape, vocabulary = (batch, job.sequence), SHAPES[job.shape][-1]
    return [torch.randint(0, vocabulary, shape, generator=generator).to(job.device) for _ in range(BATCHES)]


def flops_a_step(job: Job, parameters: int, batch: int) -> int:
    """6 FLOP a parameter and token, and causal attention's; what checkpointing does again does not count."""
    hidden, _, layers, _, _ = SHAPES[job.shape]
    return (6 * parameters + 6 * layers * hidden * job.sequence) * batch * job.sequence


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=batch, labels=batch).loss
    return loss


def clip(parameters: Iterable[Tensor], setting: Setting) -> None:
    if setting.clip:
        nn.utils.clip_grad_norm_(parameters, setting.clip)
