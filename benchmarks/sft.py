"""Fine-tuning on conversations under the Hugging Face Trainer, with torch's AdamW or with HyTrain's: the part "sft".

    python -m benchmarks.suite sft

All systems have the same model, conversations, clipping and schedule. The loop is the Trainer's own; a callback marks
the ends of its steps. `systems` lists these systems, `step` calls `measure`.
"""

from __future__ import annotations

import tempfile
import time
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.host import gpu_peak_bytes, used_bytes
from benchmarks.parts import SHAPES, Job, Segment
from benchmarks.rows import times_of

IGNORED: Final = -100  # the label of a token that no loss is computed for
TURN_TOKENS: Final = 64
#: Questions and answers use so many tokens of the vocabulary: there is something to learn within a few steps.
WORDS: Final = 256
LOGGED_STEPS: Final = 10


class Marks(TrainerCallback):
    """Marks the end of each step on the device, and begins the count of peak memory after `settle` steps."""

    reads_weights = False

    def __init__(self, segment: Segment, device: str) -> None:
        self._settle, self._cuda = segment.settle, device == "cuda"
        self._marks: list[Any] = []

    def on_step_end(self, args: Any, state: Any, *event: Any, **others: Any) -> None:
        if self._cuda:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
            if state.global_step == self._settle:
                torch.cuda.reset_peak_memory_stats()
        self._marks.append(mark if self._cuda else time.perf_counter())

    def times(self) -> list[float]:
        """Seconds from each step's end to the next one's."""
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        if not self._cuda:
            return [after - before for before, after in pairs]
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairs]


def conversations(count: int, length: int, vocabulary: int) -> list[dict[str, Tensor]]:
    """Turns of user and assistant, (length,) each. An answer is its question shifted by one word; answers count."""
    words, generator = min(WORDS, vocabulary), torch.Generator().manual_seed(1)
    asked = torch.randint(words, (count, -(-length // (2 * TURN_TOKENS)), TURN_TOKENS), generator=generator)
    answered = (asked + 1) % words
    tokens = torch.stack([asked, answered], 2).flatten(1)[:, :length]
    labels = torch.stack([torch.full_like(asked, IGNORED), answered], 2).flatten(1)[:, :length]
    return [{"input_ids": row, "labels": wanted} for row, wanted in zip(tokens, labels, strict=True)]


def measure(job: Job, segment: Segment, model: nn.Module, options: dict[str, Any] | None) -> dict[str, Any]:
    """Train for the segment's steps. `options` are those of `adopt`; None keeps torch's AdamW.

    fp32 weights compute under bf16 autocast.
    """
    marks, steps = Marks(segment, job.device), segment.settle + segment.measure
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=segment.batch,
            learning_rate=2e-5,
            warmup_steps=5,
            max_grad_norm=job.clip,
            bf16=next(model.parameters()).dtype is torch.float32,
            optim="adamw_torch_fused",
            logging_steps=min(LOGGED_STEPS, segment.measure),
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=job.device == "cpu",
            dataloader_pin_memory=job.device == "cuda",
        )
        data = conversations(segment.batch * steps, job.sequence, SHAPES[job.shape].vocabulary)
        trainer = Trainer(model, args, train_dataset=data, callbacks=[marks])
        opt = None
        if options is not None:
            from hytrain.integrations.transformers import adopt

            opt = adopt(trainer, **options)
        trainer.train()
    row = {
        **times_of(marks.times(), segment.measure),
        "gpu_peak_gb": round(gpu_peak_bytes() / 1e9, 2),
        "host_used_bytes": used_bytes(),
        "loss": round([entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-1], 4),
    }
    if opt is not None:
        row["k"] = float(opt.statistics().k)
        opt.close()
    return row
