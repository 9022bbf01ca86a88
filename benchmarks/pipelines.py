"""A Llama as the stages of a pipeline, for the part "pipeline": one stage a rank, GPipe or 1F1B.

    pipelined ─▶ a stage, and a pass: every micro-batch's forward and backward on this rank ─▶ the last rank's loss

A traced run (`HYTRAIN_TRACE=1`) also leaves micro-batches-RANK.jsonl in its folder: [kind, micro-batch, step, began,
ended] in seconds of CLOCK_MONOTONIC, for `timeline`. HyTrain's own trace has one forward and backward of each layer.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import cross_entropy

from benchmarks.parts import SHAPES
from benchmarks.systems import Pass, Setting

#: Micro-batches for each stage.
MICRO_BATCHES: Final = 4
SCHEDULES: Final = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class Stage(nn.Module):
    """A pipeline's part of a Llama: (batch, sequence) tokens or (batch, sequence, hidden) in, hidden or logits out.

    The rest of `model` is dropped.
    """

    def __init__(self, model: Any, index: int, count: int) -> None:
        super().__init__()
        body, last = model.model, index == count - 1
        cuts = [len(body.layers) * each // count for each in range(count + 1)]
        body.layers = nn.ModuleList(body.layers[cuts[index] : cuts[index + 1]])
        body.embed_tokens, body.norm = (body.embed_tokens if index == 0 else None), (body.norm if last else None)
        model.lm_head = model.lm_head if last else None
        self.embedding, self.rotary, self.layers = body.embed_tokens, body.rotary_emb, body.layers
        self.norm, self.head = body.norm, model.lm_head

    def forward(self, hidden: Tensor) -> Tensor:
        if self.embedding is not None:
            hidden = self.embedding(hidden)
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        angles = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, position_ids=positions, position_embeddings=angles)
        return hidden if self.norm is None else self.head(self.norm(hidden))


class Traced(PipelineStage):
    """Notes on the device's clock when each micro-batch ran, and writes that two steps later: nobody waits for it."""

    path: Path | None = None

    def forward_one_chunk(self, index: int, *args: Any, **options: Any) -> Any:
        return self._noted("forward", index, super().forward_one_chunk, *args, **options)

    def backward_one_chunk(self, index: int, *args: Any, **options: Any) -> Any:
        return self._noted("backward", index, super().backward_one_chunk, *args, **options)

    def trace(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self.path, self._zero, self._steps = path, self._mark(), list[list[Any]]()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self._zero_s = time.monotonic()

    def next_step(self, number: int) -> None:
        if self.path is None:
            return
        self._steps.append([])
        if number > 2:
            with self.path.open("a") as file:
                for kind, index, began, ended in self._steps[number - 3]:
                    file.write(json.dumps([kind, index, number - 2, self._at_s(began), self._at_s(ended)]) + "\n")

    def _noted(self, kind: str, index: int, run: Any, *args: Any, **options: Any) -> Any:
        if self.path is None:
            return run(index, *args, **options)
        began = self._mark()
        try:
            return run(index, *args, **options)
        finally:
            self._steps[-1].append((kind, index, began, self._mark()))

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _at_s(self, mark: Any) -> float:
        if self.device.type != "cuda":
            return float(mark)
        mark.synchronize()
        return self._zero_s + float(self._zero.elapsed_time(mark)) / 1e3


def pipelined(model: nn.Module, setting: Setting) -> tuple[nn.Module, Pass]:
    """This rank's stage, and a pass of all micro-batches through the pipeline."""
    job, rank = setting.job, int(os.environ["RANK"])
    first, last, count = rank == 0, rank == job.ranks - 1, MICRO_BATCHES * job.ranks
    stage = Stage(model, rank, job.ranks)
    shape, dtype = SHAPES[job.shape], next(model.parameters()).dtype
    tokens = torch.empty(setting.batch * job.ranks // count, job.sequence, dtype=torch.long, device="meta")
    like: dict[str, Any] = {"dtype": dtype, "device": "meta", "requires_grad": True}
    between = torch.empty(*tokens.shape, shape.hidden, **like)
    logits = torch.empty(*tokens.shape, shape.vocabulary, **like)
    device = next(stage.parameters()).device
    inputs, outputs = tokens if first else between, logits if last else between
    part = Traced(stage, rank, job.ranks, device, input_args=inputs, output_args=outputs)
    if job.system.startswith("hytrain") and os.environ.get("HYTRAIN_TRACE"):
        part.trace(Path(setting.run_dir) / f"micro-batches-{rank}.jsonl")

    def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
        return cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()) / count

    schedule, steps = SCHEDULES[job.schedule](part, count, loss_fn=loss_of, scale_grads=False), itertools.count(1)

    def run(stage: nn.Module, batch: Tensor) -> Tensor:
        part.next_step(next(steps))
        losses: list[Tensor] = []
        needed = {"target": batch, "losses": losses} if last else {}
        schedule.step(*([batch] if first else []), return_outputs=False, **needed)
        return torch.stack(losses).sum() if last else torch.zeros(())

    return stage, run
