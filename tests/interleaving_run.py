"""A run of the real step code among stand-ins, in any order.

The trainer is `hytrain.step.engine.Engine` with all its parts, over real layers, real arenas and a real `PlanBook`.
Real, too, are `UpdateQueue` and `PlanBook` of the optimizer, `CoordinatorState` or a bare `PlanLedger`, and the wire
format. Stand-ins are what has a clock, a device or a process:

    Streams, Backend    the device: compute, gradients out, weights in, state; a tile at a time
    Link                the sender and the receiver; first in, first out from each party, between them in any order
    Verdicts            decide by chance
    Optimizer           a message, or half a tile          Planner, Coordinator    a message
    Driver              the user's loop

`Run.play` lets chance choose who goes on until all is done. A `Violation` is what the search is after; the events that
led to it are in its notes.
"""

from __future__ import annotations

import os
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from interleaving_world import (
    BLANK,
    INITIAL,
    NEVER,
    TILE,
    TORN,
    WRONG,
    Actor,
    Mark,
    Scheduler,
    Stream,
    World,
    holds,
    require,
    state_beside,
    tiles,
    written_in,
)
from torch import Tensor, nn

from hytrain.checks import Options, check_options
from hytrain.errors import ClusterError
from hytrain.memory.arena import ArenaFile, HostArena
from hytrain.memory.planes import STATE_PLANES
from hytrain.memory.transfer import Copy, Transfer
from hytrain.model.layers import ModelLayer, Piece
from hytrain.model.trained import Gate, TrainedLayer, TrainedParameter, build_layers
from hytrain.run.link import Draft
from hytrain.run.ownership import OwnershipError, PlanBook, PlanLedger
from hytrain.step import boundary, handover, health, verdict
from hytrain.step import engine as engine_module
from hytrain.step.accumulation import Accumulation
from hytrain.step.engine import Engine
from hytrain.tensors import address, count_write
from protocol import messages as m
from protocol.handles import bank_plane, layout
from workers.coordinator_state import CoordinatorState
from workers.effects import Send
from workers.update_queue import Tile, UpdateQueue

HYPER = m.GroupHyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, maximize=False)
TOKEN_S = 1e-9


# ---------------------------------------------------------------- the device


class Clock:
    """Marks are numbers that count up."""

    runs_ahead = False

    def __init__(self) -> None:
        numbers = count()
        self.mark = lambda: 1e-3 * next(numbers)

    def passed(self, mark: float) -> bool:
        return True

    def seconds(self, span: tuple[float, float]) -> float:
        return span[1] - span[0]

    def recycle(self, marks: object) -> None:
        """Numbers need no pool."""


class Streams:
    """In place of `CudaTransfers`. `pinned` is the host memory that copies may touch: address and size."""

    def __init__(self, world: World) -> None:
        self.clock = Clock()
        self.pinned: dict[int, int] = {}
        self._world, self._pause = world, world.scheduler.pause
        self.compute, self.out, self.into, self.state = (Stream(world.scheduler) for _ in range(4))

    def pin(self, start: int, nbytes: int, *, gently: bool = False) -> None:
        require(start not in self.pinned, "I2: memory is pinned twice")
        self.pinned[start] = nbytes

    def unpin(self, start: int, nbytes: int) -> None:
        require(self.pinned.pop(start, None) == nbytes, "I2: what was not pinned is unpinned")

    def require_pinned(self, host: Tensor) -> None:
        start = address(host)
        is_pinned = any(first <= start < first + nbytes for first, nbytes in self.pinned.items())
        require(is_pinned, "I2: a copy touches an arena that was given up")

    def stream(self) -> None:
        self._pause()

    def gradients_out(self, copies: Sequence[Copy]) -> Transfer:
        made = written_in(self._world.step())

        def copy_out(into: Any, source: Any) -> None:
            require(holds(source, made), "I1: a gradient is copied before it is made")
            require(holds(into, 0.0) or holds(into, BLANK), f"I2: the gradient {into[0]} is overwritten unread")
            into[:] = source

        self.out.wait(self.compute.mark())
        leaving = self._copy(self.out, copies, copy_out, host=0)
        self._pause()
        return leaving

    def weights_in(self, copies: Sequence[Copy]) -> Transfer:
        due = {address(into): self._world.by_address[address(into)].due for into, _ in copies}

        def copy_in(into: Any, source: Any, *, value: float) -> None:
            require(not holds(source, TORN), "I2: weights are copied while an update writes them")
            require(holds(source, value), f"I1: the copy of an update finds {source[0]}, not {value}")
            into[:] = source

        arrivals = [
            self._copy(self.into, [copy], partial(copy_in, value=due[address(copy[0])]), host=1) for copy in copies
        ]
        for into, _ in copies:
            count_write(into)
        return arrivals[-1] if arrivals else self._copy(self.into, [], copy_in, host=1)

    def state_out(self, copies: Sequence[Copy]) -> Transfer:
        self.state.wait(self.compute.mark())
        return self._copy(self.state, copies, _move, host=0, keep=[source for _, source in copies])

    def state_in(self, copies: Sequence[Copy], fence: Mark) -> Transfer:
        def copy_state(into: Any, source: Any) -> None:
            require(not holds(source, TORN), "I3: a layer is handed over in the middle of an update")
            into[:] = source

        for into, _ in copies:
            into.numpy()[:] = BLANK
        self.state.wait(fence)
        self.state.wait(self.into.mark())
        return self._copy(self.state, copies, copy_state, host=1)

    def fence(self) -> Mark:
        self._pause()
        return self.compute.mark()

    def land(self, transfer: Transfer) -> None:
        if transfer.done is not None:
            self.compute.wait(transfer.done)
        self._pause()

    def drain(self) -> None:
        streams = (self.compute, self.out, self.into, self.state)
        self._world.scheduler.wait_until(lambda: all(stream.is_empty for stream in streams))

    def _copy(
        self, stream: Stream, copies: Sequence[Copy], move: Callable[[Any, Any], None], *, host: int, **kept: Any
    ) -> Transfer:
        """`host` says which one of each copy's tensors is in host memory."""

        def run(pinned: Tensor, into: Any, source: Any) -> None:
            if pinned.numel() > 1:  # or else it is a norm
                self.require_pinned(pinned)
            move(into, source)

        for copy in copies:
            for into, source in tiles(*copy):
                stream.run(partial(run, copy[host], into, source))
        now = self.clock.mark()
        return Transfer(stream.mark(), (now, now), **kept)  # type: ignore[arg-type]


def _move(into: Any, source: Any) -> None:
    into[:] = source


class Backend:
    """In place of AdamW on the device: an update goes onto the compute stream."""

    def __init__(self, world: World, compute: Stream) -> None:
        self._world, self._compute = world, compute

    def update(self, *, weights: int, grads: int, exp_avg: int, exp_avg_sq: int, **others: Any) -> None:
        known, step = self._world.by_address[weights], self._world.step()
        planes = known.layer.planes
        assert planes is not None
        state = [tensor for plane in STATE_PLANES if (tensor := planes.state(plane)[known.index]) is not None]
        assert [address(tensor) for tensor in state] == [exp_avg, exp_avg_sq], "the state of the present placement"

        def update(parameter: Any, gradient: Any, *moments: Any) -> None:
            before = known.before[step]
            require(holds(gradient, written_in(step)), "I1: an update without its gradient")
            fits = holds(parameter, before) and all(holds(moment, state_beside(before)) for moment in moments)
            require(fits, f"I1: an update on another's leftovers: {[x[0] for x in (parameter, *moments)]}, not {before}")
            for array in (parameter, *moments):
                array[:] = written_in(step)

        for parts in tiles(known.weights, self._world.gradients[grads], *state):
            self._compute.run(partial(update, *parts))


# ---------------------------------------------------------------- the trainer's other parts


class Link:
    """In place of the link: `post` and the two I/O threads, as functions. `listener` is set once the plan is agreed."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._jobs: deque[tuple[str, m.Message | Draft, Transfer | None]] = deque()
        self._closed = False
        self.is_closing = False
        self.listener: Engine | None = None
        world.scheduler.add(Actor(self._can_send, self._send))
        for sender in ("optimizer", "coordinator"):
            world.scheduler.add(Actor(partial(self._can_receive, sender), partial(self._receive, sender)))

    def agree(self, book: PlanBook) -> m.Plan:
        """As `hytrain.run.link.Link.agree`."""
        self.post("coordinator", self._world.table)
        self.post("coordinator", m.Calibration(role="trainer", d2h_s=TOKEN_S, h2d_s=TOKEN_S, gpu_update_s=TOKEN_S))
        plan = self._expect()
        assert isinstance(plan, m.Plan)
        self._world.plans[plan.plan_id] = plan
        self.post("coordinator", book.on_plan(plan))
        reassign = self._expect()
        assert isinstance(reassign, m.Reassign)
        book.on_reassign(reassign)
        return plan

    def _expect(self) -> m.Message:
        self._world.scheduler.wait_until(lambda: self._world.waits("trainer", "coordinator"))
        return self._world.take("trainer", "coordinator")

    def post(self, to: str, what: m.Message | Draft, *, after: Transfer | None = None) -> None:
        match what:
            case m.PlanAck(accepted=True):
                self._world.accepted.setdefault(what.plan_id, set()).add("trainer")
            case m.TakeOver() | m.GiveUp():
                self._require_agreed(what.plan_id, what.step)
                self._world.handing.add(what.lid)
            case m.PlanApplied() if to == "coordinator":
                plan = self._require_agreed(what.plan_id, what.step)
                self._world.moved += what.moved
                self._world.postponed += plan.step < what.step
        self._jobs.append((to, what, after))
        self._world.scheduler.pause()

    def _require_agreed(self, plan_id: int, step: int) -> m.Plan:
        plan = self._world.plans[plan_id]
        require(plan.step <= step, "I3: a plan holds from its step on")
        require(self._world.accepted.get(plan_id) == {"trainer", "optimizer"}, "I3: both acknowledge")
        return plan

    def receive_arena(self, layouts: dict[int, Any]) -> ArenaFile:
        self._world.scheduler.wait_until(lambda: bool(self._world.descriptors) or self._closed)
        if self._closed:
            raise ClusterError("the link is closed")
        file: ArenaFile = self._world.descriptors.popleft()
        require(file.layout is layouts.get(file.layout.lid) or file.layout == layouts[file.layout.lid], "I3: asked for")
        return file

    def close(self) -> None:
        self.is_closing = True
        self._world.scheduler.wait_until(lambda: not self._jobs)
        self._closed = True

    def _can_send(self) -> bool:
        if not self._jobs:
            return False
        _, _, after = self._jobs[0]
        return after is None or after.done is None or after.done.passed  # type: ignore[attr-defined]

    def _send(self) -> None:
        to, what, _ = self._jobs.popleft()
        if isinstance(what, Draft):
            assert self.listener is not None
            what = self.listener.on_departure(what)
        self._world.send("trainer", to, what)

    def _can_receive(self, sender: str) -> bool:
        return self.listener is not None and not self._closed and self._world.waits("trainer", sender)

    def _receive(self, sender: str) -> None:
        message = self._world.take("trainer", sender)
        if isinstance(message, m.Plan):
            self._world.plans[message.plan_id] = message
        assert self.listener is not None
        self.listener.on_message(message)


class Health(health.Health):
    """Waits give the turn back."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler

    def wait_for(self, happened: Callable[[], bool], what: str, timeout_s: float = 0.0) -> None:
        self._scheduler.wait_until(lambda: self.failure is not None or happened())
        self.check()


class Verdicts(verdict.Verdicts):
    """Decide by chance: whether a step awaits a verdict, and which."""

    def __init__(self, world: World, streams: Streams, parameters: list[TrainedParameter], *others: Any, **options: Any):
        super().__init__(parameters, *others, **options)
        self._world, self._streams, self._rng = world, streams, world.rng
        self.takes_norms = False

    def count_last(self) -> None:
        """Called before a step begins."""
        super().count_last()
        self.awaited, scale = self._rng.random() < 0.7, None if self._rng.random() < 0.3 else 1.0
        if scale is not None and self._rng.random() < 0.3:
            scale = 0.5
        self._world.scales[self._world.step()] = scale if self.awaited else 1.0
        self.scale = None

    def norm_so_far(self, layer: TrainedLayer) -> Any:
        exceeds, copy = self._rng.random() < 0.1, (torch.zeros(1), torch.full((1,), written_in(self._world.step())))
        return SimpleNamespace(copy=copy, exceeds=lambda: exceeds)

    def judge(self, step: int) -> verdict.Judgement:
        scale, now = self._world.scales[step], self._streams.clock.mark()
        self.scale = torch.tensor([verdict.SKIPPED if scale is None else scale])
        arrival = Transfer(self._streams.compute.mark(), (now, now))  # type: ignore[arg-type]
        self._last = verdict.Judgement(step, arrival, self.scale)
        self._world.judged(step)
        return self._last


# ---------------------------------------------------------------- the other processes


class Optimizer:
    """The optimizer process: messages, and updates a tile at a time, each with a beginning and an end."""

    book_type = PlanBook
    queue_type = UpdateQueue

    def __init__(self, world: World) -> None:
        self.world = world
        self.queue: UpdateQueue | None = None
        self.book = self.book_type("optimizer", len(world.layers))
        self.arenas: dict[int, HostArena] = {}
        self.tile: Tile | None = None
        world.scheduler.add(Actor(lambda: self.queue is not None and not self.queue.idle, self.work))
        for sender in ("trainer", "coordinator"):
            ready = partial(lambda sender: self.tile is None and world.waits("optimizer", sender), sender)
            world.scheduler.add(Actor(ready, partial(self.receive, sender)))

    def receive(self, sender: str) -> None:
        message = self.world.take("optimizer", sender)
        if isinstance(message, m.LayerTable):
            self.queue = self.queue_type(message.layers, tile_numel=TILE, speculate=message.banks == 2)
            self.world.send("optimizer", "coordinator", m.Calibration(role="optimizer", cpu_update_s=TOKEN_S))
            return
        assert self.queue is not None
        match message:
            case m.Plan():
                ack = self.book.on_plan(message)
                if ack.accepted:
                    self.world.accepted.setdefault(message.plan_id, set()).add("optimizer")
                self.world.send("optimizer", "coordinator", ack)
            case m.AllocatePlanes(lid=lid):
                self.allocate(lid)
            case m.TakeOver(lid=lid):
                self.require_plan(message, "cpu")
                self.queue.take_over(lid)
                self.world.handing.discard(lid)
            case m.GiveUp(lid=lid):
                self.require_plan(message, "gpu")
                if lid in self.queue.owned:
                    self.queue.give_up(lid)
                self.world.handing.discard(lid)
                self.arenas.pop(lid).close()
            case m.StepBegin():
                self.queue.begin(message)
            case m.GradReady():
                self.announce(self.queue.grad_ready(message))
            case m.Verdict():
                for done in self.queue.verdict(message):
                    self.announce(done)
            case m.SetMode(speculate=speculate):
                self.queue.speculate = speculate
            case m.PositionsLearned(positions=positions):
                self.queue.learn_positions(positions)
            case m.PlanApplied(plan_id=plan_id):
                self.book.forget(plan_id)

    def allocate(self, lid: int) -> None:
        require(lid not in self.arenas, f"I3: layer {lid} has its planes already")
        arena = self.arenas[lid] = HostArena(self.world.layers[lid].layout)
        self.world.descriptors.append(ArenaFile(arena.layout, os.dup(arena.descriptor)))

    def require_plan(self, handover: m.TakeOver | m.GiveUp, updates: str) -> None:
        assert self.queue is not None
        lid = handover.lid
        if not self.book.allows(handover.plan_id, lid, updates) or lid not in self.arenas:
            raise OwnershipError(f"layer {lid} cannot go to the {updates}")
        require(handover.step == self.queue.step + 1, "I3: a handover happens between two steps")

    def work(self) -> None:
        assert self.queue is not None
        if self.tile is None:
            self.tile = self.queue.next_tile()
            assert self.tile is not None
            self.begin(self.tile)
            return
        tile, self.tile = self.tile, None
        self.end(tile)

    def begin(self, tile: Tile) -> None:
        before = self.world.expected[tile.lid, tile.segment].before[tile.step]
        made = self.part(tile, "grads")
        require(holds(made, written_in(tile.step)), "I1: the optimizer reads a gradient that has not arrived")
        found = self.banked(tile, tile.source)
        values = (before, state_beside(before), state_beside(before))
        fits = all(holds(array, value) for array, value in zip(found, values))
        require(fits, f"I1: an update on another's leftovers: {[array[0] for array in found]}, not {before}")
        for array in self.banked(tile, tile.target):
            array[:] = TORN

    def end(self, tile: Tile) -> None:
        made = self.part(tile, "grads")
        require(holds(made, written_in(tile.step)), "I2: a gradient is overwritten while it is being read")
        right = tile.scale == self.world.scales[tile.step]
        self.world.undone += not right
        for array in self.banked(tile, tile.target):
            array[:] = written_in(tile.step) if right else WRONG
        self.tile_done(tile)

    def tile_done(self, tile: Tile) -> None:
        assert self.queue is not None
        self.announce(self.queue.tile_done(tile))

    def announce(self, done: m.WeightsReady | None) -> None:
        """The layer's gradients have been used up."""
        if done is not None:
            for index in range(len(self.world.layers[done.lid].segments)):
                self.plane(done.lid, "grads", index)[:] = BLANK
            self.world.send("optimizer", "trainer", done)

    def banked(self, tile: Tile, bank: int) -> list[Any]:
        return [self.part(tile, bank_plane(plane, bank)) for plane in ("weights", "exp_avg", "exp_avg_sq")]

    def part(self, tile: Tile, plane: str) -> Any:
        return self.plane(tile.lid, plane, tile.segment)[tile.start : tile.stop]

    def plane(self, lid: int, plane: str, index: int) -> Any:
        arena = self.arenas[lid]
        handle = arena.layout.handles[plane][index]
        assert handle is not None
        buffer = arena._mapping.buffer
        return np.frombuffer(buffer, dtype=np.float32, count=handle.numel, offset=handle.offset)


class Planner:
    """A coordinator that proposes anything for any step: the real ledger without the real planner.

    `choices[lid % len(choices)]` are the placements that a layer may have.
    """

    ledger_type = PlanLedger
    choices: tuple[tuple[str, ...], ...] = (("cpu", "gpu"),)

    def __init__(self, world: World) -> None:
        self.world, self.ledger = world, self.ledger_type(("cpu",) * len(world.layers))

    def handle(self, message: m.Message) -> None:
        match message:
            case m.LayerTable():
                self.world.send("coordinator", "optimizer", message)
            case m.Calibration(role="optimizer"):
                self.propose(0)
            case m.PlanAck():
                reassign = self.ledger.on_ack(message)
                if reassign is not None:
                    self.world.send("coordinator", "trainer", reassign)
            case m.PlanApplied():
                self.ledger.on_applied(message)
            case m.TrainerReport(step=step):
                if self.world.rng.random() < 0.3:
                    mode = m.SetMode(speculate=self.world.rng.random() < 0.5)
                    self.world.send("coordinator", "optimizer", mode)
                if not self.ledger.busy and self.world.rng.random() < 0.8:
                    self.propose(step + self.world.rng.choice((0, 1, 2, 2, 3)))

    def propose(self, step: int) -> None:
        lids = range(len(self.world.layers))
        placements = tuple(self.world.rng.choice(self.choices[lid % len(self.choices)]) for lid in lids)
        plan = m.Plan(
            plan_id=self.ledger.next_id,
            step=step,
            placements=placements,
            k=0.0,
            policy="random",
            reason="",
            predicted_step_s=None,
        )
        for role in ("trainer", "optimizer"):
            self.world.send("coordinator", role, plan)
        self.ledger.propose(plan)

    def check(self) -> None:
        self.ledger.check()


class Coordinator:
    """The real coordinator's state, with the policy that moves layers at every chance."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.state = CoordinatorState(run_name="run", run_dir="/run", pid=1, replan_every=1)

    def handle(self, message: m.Message) -> None:
        for command in self.state.handle(message, 0.0):
            if isinstance(command, Send):
                self.world.send("coordinator", command.role, command.message)

    def check(self) -> None:
        self.state.check()


# ---------------------------------------------------------------- the run


class Run:
    """A run with all its parties. Patch the real code, or subclass a party, to plant a fault."""

    def __init__(
        self,
        seed: int,
        *,
        layers: int,
        steps: int,
        optimizer: type[Optimizer] = Optimizer,
        coordinator: type[Planner] | type[Coordinator] = Planner,
    ) -> None:
        self.rng, self.steps = random.Random(seed), steps
        self.scheduler = Scheduler(self.rng)
        self.layers, self.parameters, table = random_layers(self.rng, layers)
        self.gates = [Gate([layer]) for layer in self.layers]
        self.world = World(self.rng, self.scheduler, table, self.layers)
        self.streams, self.book = Streams(self.world), PlanBook("trainer", layers)
        self.link, self.optimizer, self.coordinator = Link(self.world), optimizer(self.world), coordinator(self.world)
        for sender in ("trainer", "optimizer"):
            ready = partial(self.world.waits, "coordinator", sender)
            self.scheduler.add(Actor(ready, partial(self._coordinate, sender)))

    def _coordinate(self, sender: str) -> None:
        self.coordinator.handle(self.world.take("coordinator", sender))

    def play(self) -> World:
        """Let chance decide who goes on, until all is done."""
        with self._stand_ins():
            self.engine = Engine(
                self.layers,
                self.parameters,
                link=self.link,  # type: ignore[arg-type]
                plans=self.book,
                transfers=self.streams,  # type: ignore[arg-type]
                host=Backend(self.world, self.streams.compute),  # type: ignore[arg-type]
                read_groups=lambda: (HYPER,),
                free_gpu_bytes=lambda: None,
                accumulation=Accumulation(1),
                options=random_options(self.rng),
            )
            self.world.step = lambda: self.engine.steps
            try:
                self.scheduler.thread(self.main).start()
                self.scheduler.play(self.check)
            except Exception as error:
                error.add_note("\n".join(self.world.story))
                raise
            finally:
                self.scheduler.stop()
                for arena in (*self.optimizer.arenas.values(), *self.world.descriptors):
                    arena.close()
        return self.world

    @contextmanager
    def _stand_ins(self) -> Iterator[None]:
        with ExitStack() as stack:
            for module, name, stand_in in (
                (engine_module, "Verdicts", partial(Verdicts, self.world, self.streams)),
                (engine_module, "Health", partial(Health, self.scheduler)),
                (handover, "threading", SimpleNamespace(Thread=self.scheduler.thread, Lock=threading.Lock)),
                (boundary, "time", SimpleNamespace(monotonic=self.streams.clock.mark)),
            ):
                stack.enter_context(mock.patch.object(module, name, stand_in))
            yield

    def check(self) -> None:
        """Every state machine's own check, one owner for each layer but while a handover is on its way, no failure."""
        health, queue = self.engine._health, self.optimizer.queue
        if health.failure is not None and not self.link.is_closing:
            raise health.failure
        health.life.check()
        self.book.check()
        self.coordinator.check()
        if queue is None:
            return
        queue.check()
        for layer in self.layers:
            layer.life.check()
            owned = layer.lid in queue.owned
            has_owner = owned == (layer.life.placement.updates == "cpu") or layer.lid in self.world.handing
            require(has_owner, f"I3: layer {layer.lid} has two owners or none")

    # ------------------------------------------------------------ the user's loop

    def main(self) -> None:
        """On a thread of its own."""
        engine = self.engine
        plan = self.link.agree(self.book)
        self.link.listener = engine
        engine.start(plan)
        while engine.steps < self.steps:
            self.step()
        engine.synchronize()
        self.streams.drain()
        for known in self.world.expected.values():
            require(holds(known.weights.numpy(), known.due), "I1: an update is missing at the end")
        engine.close()
        require(not self.streams.pinned, "I2: memory is still pinned when all is closed")

    def step(self) -> None:
        """Some layers run, some of them get gradients, some of these only in part."""
        rng, engine = self.rng, self.engine
        if rng.random() < 0.1:
            engine.synchronize()
        engine.before_root()
        most = rng.choice((0.9, 0.9, 0.4))
        entered = [layer for layer in self.layers if rng.random() < most] or self.layers[:1]
        for layer in entered:
            self.enter(layer)
            self.streams.compute.run(self.world.reading(layer))
        for layer in reversed(entered):
            read = self.world.reading(layer)
            for segment in reversed(layer.segments):
                if rng.random() < 0.9:
                    self.gradient(segment.owner, read)
                    read = _look_away  # what it reads may be changing now
        engine.step()
        for known in self.parameters:
            known.parameter.grad = None

    def enter(self, layer: TrainedLayer) -> None:
        """The module is called, or its parameters are read one by one."""
        if self.rng.random() < 0.9:
            self.engine.reads.enter(self.gates[layer.lid])
        else:
            for segment in layer.segments:
                self.engine.reads.read(segment.owner)

    def gradient(self, known: TrainedParameter, read: Callable[[], None]) -> None:
        """Backward reaches a parameter: its gradient is made when the device comes to it."""
        step, expected = self.engine.steps, self.world.by_address[known.address]
        made = known.parameter.grad = torch.full_like(known.parameter, NEVER)
        self.world.gradients[address(made)] = made

        def backward() -> None:
            read()
            made.numpy()[:] = written_in(step)

        self.streams.compute.run(backward)
        expected.before[step], expected.due = expected.due, written_in(step)
        self.engine.backward.on_gradient(known)


def _look_away() -> None:
    pass


def random_layers(rng: random.Random, layers: int) -> tuple[list[TrainedLayer], list[TrainedParameter], m.LayerTable]:
    """Layers of one or two parameters of one or two tiles, with two banks."""
    parts = []
    for lid in range(layers):
        numels = [TILE * rng.randint(1, 2) for _ in range(rng.randint(1, 2))]
        parameters = [nn.Parameter(torch.full((numel,), INITIAL)) for numel in numels]
        pieces = (Piece(parameter, f"{lid}.{i}", 0, parameter.numel()) for i, parameter in enumerate(parameters))
        parts.append(ModelLayer(lid, f"layer {lid}", tuple(pieces)))
    built, parameters = build_layers(parts, [[piece.parameter for part in parts for piece in part.pieces]], None)
    for layer in built:
        layer.layout = layout(layer.spec, banks=2)
    table = m.LayerTable(
        layers=tuple(layer.spec for layer in built),
        inbox="trainer-0",
        device="cpu",
        policy="random",
        objective="speed",
        awaits_verdict=True,
        speculate=None,
        k=None,
        backend="auto",
        gpu_bytes=None,
        host_bytes=None,
        continues=False,
    )
    return built, parameters, table


def random_options(rng: random.Random) -> Options:
    """Most runs overlap updates with backward."""
    return check_options(
        k="auto",
        policy="random",
        objective="speed",
        backend="auto",
        gradient_dtype=None,
        grad_accumulation=1,
        accumulate_on="device",
        max_grad_norm=1.0,
        clip="global",
        on_nonfinite="skip",
        speculate=None,
        loss_scale=None,
        overlap=rng.random() < 0.85,
    )
