"""What the CPU trainer does once its cores are pinned: it keeps the model, and computes the parts that it is sent.

p.data ─ a view of the memory where the trainer says that the weights are
p.grad ─ copied into the job's slot, or added there, as soon as it is complete, and freed
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from examples.studies.cotraining import numerics
from examples.studies.cotraining.wire import (
    GRADIENTS,
    INPUTS,
    MAX_DATAGRAM_BYTES,
    OTHERS,
    Compute,
    Computed,
    LendMemory,
    Message,
    Ready,
    TakeBack,
    WeightsAt,
    read,
    written,
)
from examples.studies.cotraining.work import found, unpacked
from hytrain.memory import arena
from hytrain.memory.lending import view
from hytrain.model.given import give
from hytrain.model.layers import clean


class CpuParts:
    """The model, and the memory that the trainer has lent."""

    def __init__(self, settings: Mapping[str, Any], trainer: socket.socket) -> None:
        """Build the model, and tell the trainer that it is ready. Raises `ConfigError` if it is another one."""
        self._trainer = trainer
        self._memories: dict[int, arena.Mapping] = {}
        numbers = (GRADIENTS, INPUTS, OTHERS)
        for number, (descriptor, nbytes) in zip(numbers, settings["memories"], strict=True):
            self._map(number, descriptor, nbytes)
        described = settings["parameters"]
        trained = {name: torch.empty((), dtype=getattr(torch, of)).expand(shape) for name, _, of, shape in described}
        others = self._others(settings["others"])
        work = settings["work"]
        sys.path[:] = [*work["path"], *(folder for folder in sys.path if folder not in work["path"])]
        self._loss = found(work["loss"])
        with torch.device("meta"):
            self._model: nn.Module = found(work["build"])()
        self._parameters = [*give(self._model, trained, others, who="build()").values()]
        torch.set_num_threads(settings["threads"])  # after the imports, which may have set them
        for name, module in self._model.named_modules():
            module.training = clean(name) not in work["evaluated"]
        self._offsets, self._slot_bytes = [at for _, at, _, _ in described], settings["slot_bytes"]
        self._slot, self._has_gradient = 0, [False] * len(self._parameters)
        for index, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(partial(self._take_gradient, index))
        self._send(Ready())

    def serve(self) -> None:
        """Do as the trainer says, until it is gone."""
        while True:
            frame, descriptors, _, _ = socket.recv_fds(self._trainer, MAX_DATAGRAM_BYTES, 1)
            if not frame:
                return
            message = read(frame)
            match message:
                case LendMemory():
                    [descriptor] = descriptors
                    self._map(message.memory, descriptor, message.nbytes)
                case WeightsAt():
                    mapping = self._memories[message.memory]
                    for index, at in zip(message.parameters, message.offsets, strict=True):
                        parameter = self._parameters[index]
                        parameter.data = view(mapping, at, parameter.dtype, parameter.shape)
                case TakeBack():
                    del self._memories[message.memory]
                case Compute():
                    self._compute(message)
                case _:
                    raise ValueError(f"a CPU trainer has no use for {type(message).__name__}")

    def _others(self, described: list[tuple[str, int, str, list[int]]]) -> dict[str, Tensor]:
        mapping = self._memories[OTHERS]
        return {name: view(mapping, at, getattr(torch, dtype), shape) for name, at, dtype, shape in described}

    def _map(self, number: int, descriptor: int, nbytes: int) -> None:
        self._memories[number] = arena.Mapping(descriptor, nbytes)
        os.close(descriptor)

    def _compute(self, job: Compute) -> None:
        began_s = time.monotonic()
        self._slot, self._has_gradient = job.slot, [False] * len(self._parameters)
        numerics.use(job.numerics)
        losses = list[float]()
        for at, text_bytes, seed in job.micro_batches:
            batch = unpacked(self._memories[INPUTS], at, text_bytes)
            torch.manual_seed(seed)
            loss = self._loss(self._model, batch)
            (loss / len(job.micro_batches)).backward()
            losses.append(float(loss.detach()))
        seconds = time.monotonic() - began_s
        self._send(Computed(job=job.job, losses=losses, has_gradient=self._has_gradient, seconds=seconds))

    def _take_gradient(self, index: int, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None, "autograd has just made it"
        at = self._slot * self._slot_bytes + self._offsets[index]
        into = view(self._memories[GRADIENTS], at, parameter.dtype, parameter.shape)
        if self._has_gradient[index]:  # of another micro-batch
            into.add_(parameter.grad)
        else:
            into.copy_(parameter.grad)
        parameter.grad = None
        self._has_gradient[index] = True

    def _send(self, message: Message) -> None:
        self._trainer.send(written(message))
