"""Streams and events of a GPU over a CPU's memory, so that the code that copies to and from a GPU runs without one."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from examples.studies.cotraining import whole
from hytrain.memory.clock import HostClock
from hytrain.memory.transfer import CudaTransfers

#: The model's GPU, which is not the first one.
MODELS = 1


class Event:
    """Work is done when it is asked for, so an event is passed when it is recorded."""

    def __init__(self, **options: bool) -> None:
        self.at_s: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.at_s = time.monotonic()

    def synchronize(self) -> None:
        assert self.at_s is not None, "waits for what was never recorded"

    def query(self) -> bool:
        self.synchronize()
        return True

    def wait(self, stream: Stream) -> None:
        self.synchronize()
        stream.waited_for.add(self)


class Stream:
    def __init__(self, device: torch.device | None = None) -> None:
        self.waited_for: set[Stream | Event] = set()

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.add(other)

    def wait_event(self, event: Event) -> None:
        event.synchronize()
        self.waited_for.add(event)


class OverHostMemory(CudaTransfers):
    def __init__(self, device: torch.device) -> None:
        super().__init__(torch.device("cuda", MODELS))
        self.clock = HostClock()

    def pin(self, address: int, nbytes: int, *, gently: bool = False) -> None:
        pass

    def unpin(self, address: int, nbytes: int) -> None:
        pass


class Current(threading.local):
    """The user's streams, and what is current: each thread has its own, as on a GPU."""

    def __init__(self, *streams: Stream) -> None:
        self.streams = streams
        self.stream = streams[0]
        self.device: torch.device | None = None  # the first GPU, which need not be the model's

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        before, self.device = self.device, device
        try:
            yield
        finally:
            self.device = before

    def set(self, stream: Stream) -> None:
        assert self.device is not None, "torch.cuda.set_stream makes the stream's device the current one"
        self.stream = stream

    def index(self) -> int:
        return 0 if self.device is None else MODELS

    @contextlib.contextmanager
    def use(self, stream: Stream | None) -> Iterator[None]:
        before, self.stream = self.stream, stream or self.stream
        try:
            yield
        finally:
            self.stream = before


def over_host_memory(monkeypatch: pytest.MonkeyPatch) -> Current:
    """From now on, copies take the GPU's way."""
    current = Current(Stream(), Stream())
    for name, stub in {
        "Event": Event,
        "Stream": Stream,
        "current_stream": lambda device=None: current.stream,
        "default_stream": lambda device=None: current.streams[0],
        "device": current.on,
        "set_stream": current.set,
        "current_device": current.index,
        "synchronize": lambda device=None: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    for module in ("clock", "transfer"):
        monkeypatch.setattr(f"hytrain.memory.{module}.current_stream", lambda device: current.stream)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr("hytrain.build.transfers_for", OverHostMemory)
    monkeypatch.setattr(whole, "transfers_for", OverHostMemory)
    return current
