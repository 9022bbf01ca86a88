"""A run of the real step code among stand-ins, in any order.

The trainer is `hytrain.step.engine.Engine` with all its parts, over real layers. The optimizer process is its
`Session`, with its arenas and their way to the trainer; the coordinator is `CoordinatorState`, or a bare `PlanLedger`.
Messages have the wire format. `interleaving_stand_ins` has what replaces clocks, devices and processes.

`Run.play` lets chance choose who goes on until all is done. A `Violation` is what the search is after; the events that
led to it are in its notes.
"""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from interleaving_stand_ins import (
    TOKEN,
    Device,
    Health,
    Host,
    Inbox,
    Link,
    Planner,
    Queue,
    Streams,
    Verdicts,
    Visits,
)
from interleaving_world import (
    BLANK,
    INITIAL,
    NEVER,
    TILE,
    Actor,
    Baton,
    Scheduler,
    World,
    at,
    holds,
    require,
    written_in,
)
from torch import nn

from hytrain.algorithms import ADAMW
from hytrain.build import build_layers
from hytrain.errors import UsageError
from hytrain.memory import visits
from hytrain.memory.capacity import GpuMemory, HostRoom
from hytrain.memory.lending import Lending
from hytrain.model.layers import ModelLayer, Piece
from hytrain.model.offloaded import _offloaded
from hytrain.model.trained import Gate, TrainedLayer, TrainedParameter
from hytrain.options import Options
from hytrain.run.ownership import PlanBook
from hytrain.run.ranks import Ranks
from hytrain.run.trace import NO_STEP, TraceWriter
from hytrain.step import boundary, device, engine, handover, offload
from hytrain.step.accumulation import Accumulation
from hytrain.step.timing import Timing
from hytrain.tensors import form_of, in_form
from protocol import messages as m
from protocol.address import Address
from protocol.handles import layout
from protocol.rules import AdamWHyper
from workers.optimize import optimizer

OFF = TraceWriter("", Address("trainer", 0), NO_STEP)

HYPER = AdamWHyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, maximize=False)


class Run:
    """A run with all its parties. To plant a fault, patch the real code."""

    def __init__(
        self, seed: int, *, layers: int, steps: int, coordinator: type[Any] = Planner, share: float = 0.0
    ) -> None:
        """`share`: of the layers whose weights are offloaded."""
        self.rng, self.steps = random.Random(seed), steps
        self.scheduler = Scheduler(self.rng)
        self.layers, self.parameters, self._kept = random_layers(self.rng, layers)
        self.gates = [Gate([layer]) for layer in self.layers]
        chance = random.Random(seed)
        # Of what waits for visits. A layer has two or four tiles at most.
        self.hold_bytes = random.Random(-seed).choice((0, 4 * 12 * TILE, 1 << 30))
        self._chance = random.Random(-seed)
        self._memory_runs_out = partial(random.Random(seed + 1).random)
        self.blocks = [_offloaded(gate) for gate in self.gates if chance.random() < share]
        self.world = World(self.rng, self.scheduler, self.layers, chance)
        self.streams, self.book = Streams(self.world, offloaded=share > 0), PlanBook("trainer", layers)
        self.coordinator = coordinator(self.world)
        for sender in ("trainer", "optimizer"):
            ready = partial(self.world.waits, "coordinator", sender)
            self.scheduler.add(Actor(ready, partial(self._coordinate, sender)))
        self._arenas = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.link = Link(self.world, self._arenas[0])
        self.session: Any = None

    def _coordinate(self, sender: str) -> None:
        self.coordinator.handle(self.world.take("coordinator", sender), sender)

    def _put_off(self) -> set[int]:
        """Any visits may be made after backward."""
        return {layer.lid for layer in self.layers if self._chance.random() < 0.5}

    def play(self) -> World:
        """Let chance decide who goes on, until all is done."""
        time: Any = SimpleNamespace(monotonic=self.streams.clock.mark, time=self.streams.clock.mark)
        threads: Any = SimpleNamespace(Thread=partial(Baton, self.scheduler), Lock=threading.Lock)
        verdicts: Any = partial(Verdicts, self.world, self.streams)
        queues: Any = partial(Queue, tile_numel=TILE)
        try:
            with (
                mock.patch.multiple(engine, Verdicts=verdicts, Health=partial(Health, self.scheduler)),
                mock.patch.object(engine, "Visits", partial(Visits, self.streams)),
                mock.patch.multiple(optimizer, time=time, UpdateQueue=queues, accept=lambda end: end),
                mock.patch.object(handover, "threading", threads),
                mock.patch.object(boundary, "time", time),
                mock.patch.object(visits, "SLOT_NUMEL", TILE),
                mock.patch.object(offload, "SLOTS", 1),
                mock.patch.object(device.DeviceUpdates, "_visits_after_backward", self._put_off),
            ):
                self.engine = self._make_engine()
                self.world.step = lambda: self.engine.steps
                for serve in (self.main, self.optimize):
                    Baton(self.scheduler, serve).start()
                self.scheduler.play(self.check)
        except Exception as error:
            error.add_note("\n".join(self.world.story))
            raise
        finally:
            self.scheduler.stop()
            if self.session is not None:
                self.session.close()
            for end in self._arenas:
                end.close()
        return self.world

    def _make_engine(self) -> engine.Engine:
        parts: Any = {"link": self.link, "plans": self.book, "transfers": self.streams}
        options = random_options(self.rng)
        parts |= {"host": Device(self.world, self.streams), "options": options}
        parts |= {
            "read_groups": lambda: (HYPER,),
            "memory": GpuMemory(torch.device("cpu")),
            "host_room": HostRoom(lambda: None),
            "blocks": self.blocks,
        }
        parts |= {"hold_bytes": self.hold_bytes, "trace": OFF, "lending": Lending(self.parameters, self.streams)}
        counted = {id(known.parameter) for known in self.parameters}
        made = engine.Engine(
            self.layers,
            self.parameters,
            accumulation=Accumulation(1, Timing(options.updates_on(1))),
            ranks=Ranks(),
            counted=counted,
            **parts,
        )
        made._offload._wider_by_bytes = self._chance.choice((0, 1 << 30))  # options await verdicts, steps seldom do
        return made

    def check(self) -> None:
        """Every state machine's own check, one owner for each layer but while a handover is on its way, no failure."""
        failure = self.engine._health.failure
        if failure is not None and not self.link.is_closing:
            raise failure
        self.engine._health.life.check()
        self.book.check()
        self.coordinator.check()
        if self.session is None:
            return
        queue = self.session._queue
        queue.check()
        for layer in self.layers:
            layer.life.check()
            is_owned = (layer.lid in queue.banks) == (layer.life.placement.updates == "cpu")
            require(is_owned or self.world.handing[layer.lid], f"I3: layer {layer.lid} has two owners or none")

    def optimize(self) -> None:
        """The optimizer process, on a thread of its own."""
        inbox, trainer, coordinator = Inbox(self.world), *(SimpleNamespace(send=f) for f in (self._tell, self._report))
        while (table := inbox.receive(None)) is None:
            continue
        network = SimpleNamespace(token=TOKEN, address=Address("optimizer", 0))
        pinning = SimpleNamespace(cores=(0,))
        server: Any = SimpleNamespace(network=network, pinning=pinning, coordinator=coordinator, trace=OFF)
        server.join = self._introduce
        parts: Any = (table.message, Host(self), trainer, self._arenas[1])
        self.session = optimizer.Session(server, *parts)
        self._report(m.Calibration(cpu_update_s=1e-9))
        self.session.run(inbox)

    def _introduce(self, attempt: int) -> None:
        """As the optimizer's server does."""
        for message in (m.Hello(pid=3, inbox="optimizer-0"), m.Ready(detail=""), m.Calibration(cpu_update_s=1e-9)):
            self._report(message)

    def _report(self, message: m.Message) -> None:
        self.world.send("optimizer", "coordinator", message)

    def _tell(self, message: m.Message) -> None:
        """The optimizer tells the trainer. The gradients of an update that is announced are used up."""
        if isinstance(message, m.WeightsReady):
            for planes in self.session._arenas.segments[message.lid]:
                for tile in at(planes.grads[0], planes.segment.numel):
                    tile[:] = BLANK
        self.world.send("optimizer", "trainer", message)

    # ------------------------------------------------------------ the user's loop

    def main(self) -> None:
        """On a thread of its own."""
        engine = self.engine
        blocks = tuple((layer.lid,) for block in self.blocks for layer in block.layers)
        plan = self.link.agree(table_of(self.layers, blocks), self.book)
        self.link.listener = engine
        engine.start(plan)
        while engine.steps < self.steps:
            self.step()
        engine.synchronize()
        engine._offload.restore()
        self.streams.drain()
        for known in self.world.by_address.values():
            require(holds(known.weights.numpy(), known.due), "I1: an update is missing at the end")
        engine.close(UsageError("closed"))
        require(not self.streams.pinned, "I2: memory is still pinned when all is closed")

    def evict(self) -> None:
        """The device's memory may run out at any time."""
        if self._memory_runs_out() < 0.03:
            self.world.evicted += self.engine.evictions.evict(1, "a test")

    def step(self) -> None:
        """Some layers run, some of them get gradients, some of these only in part."""
        rng, engine = self.rng, self.engine
        if rng.random() < 0.1:
            engine.synchronize()
        engine.before_root()
        most = rng.choice((0.9, 0.5))
        entered = [layer for layer in self.layers if rng.random() < most] or self.layers[:1]
        left, views = list[TrainedLayer](), list[torch.Tensor]()
        for layer in entered:
            self.evict()
            if is_called := rng.random() < 0.9:
                engine.reads.enter(self.gates[layer.lid])
            else:  # not the module is called, its parameters are read
                for segment in layer.segments:
                    engine.uses.use(segment.owner.parameter)
                    views.append(segment.owner.parameter.detach())  # as autograd does
            self.streams.compute.run(self.world.reading(layer))
            if is_called and layer.block is not None:
                engine._offload.leave(layer.block)
                left.append(layer)
        for layer in reversed(entered):
            if layer in left:
                engine._blocks.enter_backward(self.gates[layer.lid])
            read: Callable[[], None] | None = self.world.reading(layer)
            for segment in reversed(layer.segments):
                self.evict()
                if rng.random() < 0.9:
                    self.gradient(segment.owner, read)
                    read = None  # what it reads may be changing now
        del views
        self.evict()
        engine.step()
        self.evict()
        for known in self.parameters:
            known.parameter.grad = None

    def gradient(self, known: TrainedParameter, read: Callable[[], None] | None) -> None:
        """Backward reaches a parameter: its gradient is made when the device comes to it."""
        step, expected = self.engine.steps, self.world.by_address[known.address]
        made = torch.full_like(known.parameter, NEVER).numpy()  # its memory: its storage is autograd's alone
        known.parameter.grad = in_form(torch.from_numpy(made), form_of(known.parameter))
        self.world.kept.append(made)

        def backward() -> None:
            if read is not None:
                read()
            made[:] = written_in(step)

        self.streams.compute.run(backward)
        expected.before[step], expected.due = expected.due, written_in(step)
        self.engine.backward.on_gradient(known, known.parameter)


def random_layers(
    rng: random.Random, layers: int
) -> tuple[list[TrainedLayer], list[TrainedParameter], list[nn.Parameter]]:
    """Layers of one or two parameters of one or two tiles, with two banks; and the parameters, which somebody keeps."""
    parts = []
    for lid in range(layers):
        numels = [TILE * rng.randint(1, 2) for _ in range(rng.randint(1, 2))]
        pieces = [Piece(nn.Parameter(torch.full((numel,), INITIAL)), f"{lid}.{numel}", 0, numel) for numel in numels]
        parts.append(ModelLayer(lid, f"layer {lid}", tuple(pieces)))
    group = [piece.parameter for part in parts for piece in part.pieces]
    built, parameters = build_layers(parts, [group], ["adamw"], None)
    for layer in built:
        layer.layout = layout(layer.spec, banks=2)
    return built, parameters, group


def table_of(layers: list[TrainedLayer], blocks: tuple[tuple[int, ...], ...] = ()) -> m.LayerTable:
    wishes: Any = {"policy": "random", "objective": "speed", "speculate": None, "k": None, "backend": "auto"}
    limits: Any = {"gpu_bytes": None, "host_bytes": None, "awaits_verdict": True, "continues": False}
    specs = tuple(layer.spec for layer in layers)
    wishes |= {"offload_weights": None, "blocks": blocks}
    return m.LayerTable(layers=specs, inbox="trainer-0", device="cpu", **wishes, **limits)


def random_options(rng: random.Random) -> Options:
    """Most runs overlap updates with backward."""
    overlap = rng.random() < 0.85
    sums = {"accumulate_on": "device", "overlap": overlap, "updates": "backward"}
    return Options.of(ADAMW, {"policy": "random", "max_grad_norm": 1.0, "on_nonfinite": "skip", **sums})
