"""What replaces clocks, devices and processes in a run of the real step code.

Operations of a stream come in order, a tile at a time. Messages are first in, first out from each party, and in any
order between parties. Waits give the turn back, and chance decides verdicts.
"""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
from interleaving_world import (
    BLANK,
    TORN,
    WRONG,
    Actor,
    Mark,
    Scheduler,
    Stream,
    World,
    at,
    holds,
    require,
    written_in,
)
from torch import Tensor

from hytrain.errors import ClusterError
from hytrain.kernels.backend import Operands
from hytrain.memory import visits
from hytrain.memory.arena import Arena, receive_arena, send_arena
from hytrain.memory.clock import HostClock
from hytrain.memory.transfer import Copy, Traffic, Transfer
from hytrain.run.ownership import PlanBook, PlanLedger
from hytrain.step import engine, health, verdict
from hytrain.step.masters import SAMPLED_ELEMENTS
from hytrain.tensors import address, count_write
from protocol import messages as m
from protocol.address import Address
from protocol.handles import STATE_PLANES
from protocol.placement import Places
from workers.coordinate.coordinator_state import CoordinatorState
from workers.coordinate.members import HandshakeError
from workers.effects import Send
from workers.optimize.update_queue import Tile, UpdateQueue

TOKEN = "token"


# ---------------------------------------------------------------- the device


class Streams:
    """In place of `CudaTransfers`. `pinned` is the host memory that copies may touch: address and size."""

    def __init__(self, world: World, *, offloaded: bool = False) -> None:
        """`offloaded`: weights are, on a stream of their own."""
        numbers = count()
        self.clock: Any = HostClock()
        self.traffic = Traffic()
        self.clock.mark = lambda: 1e-3 * next(numbers)
        self.pinned: dict[int, int] = {}
        self._world, self._pause = world, world.scheduler.pause
        self.compute, self.out, self.into, self.state = (Stream(world.scheduler) for _ in range(4))
        self.fetching, self.visiting, self.returning = (Stream(world.scheduler) for _ in range(3))
        self.window = Stream(world.scheduler) if offloaded else self.fetching
        self.current = self.compute

    def pin(self, start: int, nbytes: int, *, gently: bool = False) -> None:
        require(start not in self.pinned, "I2: memory is pinned twice")
        self.pinned[start] = nbytes

    def unpin(self, start: int, nbytes: int) -> None:
        require(self.pinned.pop(start, None) == nbytes, "I2: what was not pinned is unpinned")

    def stream(self) -> None:
        self._pause()

    def gradients_out(self, copies: Sequence[Copy]) -> Transfer:
        made = written_in(self._world.step())

        def look(into: Any, source: Any) -> None:
            require(holds(source, made), "I1: a gradient is copied before it is made")
            require(into[0] in (0.0, BLANK), f"I2: the gradient {into[0]} is overwritten unread")

        self.out.wait(self.compute.mark())
        leaving = self._copy(self.out, [(copy, look) for copy in copies], host=0)
        self._pause()
        return leaving

    def let_go(self, leaving: Transfer) -> Transfer:
        return leaving

    def weights_out(self, copies: Sequence[Copy]) -> Transfer:
        self.out.wait(self.compute.mark())
        return self._copy(self.out, [(copy, lambda *_: None) for copy in copies], host=0)

    def weights_in(self, copies: Sequence[Copy]) -> Transfer:
        def look(due: float, into: Any, source: Any) -> None:
            require(not holds(source, TORN), "I2: weights are copied while an update writes them")
            require(holds(source, due), f"I1: the copy of an update finds {source[0]}, not {due}")

        looks = [partial(look, self._world.by_address[address(into)].due) for into, _ in copies]
        landing = self._copy(self.into, list(zip(copies, looks)), host=1)
        for into, _ in copies:
            count_write(into)
        return landing

    def state_out(self, copies: Sequence[Copy]) -> Transfer:
        self.state.wait(self.compute.mark())
        return self._copy(self.state, [(copy, lambda *_: None) for copy in copies], host=0)

    def state_in(self, copies: Sequence[Copy], fence: Mark) -> Transfer:
        def look(into: Any, source: Any) -> None:
            require(not holds(source, TORN), "I3: a layer is handed over in the middle of an update")

        for into, _ in copies:
            into.numpy()[:] = BLANK
        self.state.wait(fence)
        self.state.wait(self.into.mark())
        return self._copy(self.state, [(copy, look) for copy in copies], host=1)

    @contextmanager
    def visit(self, made: Sequence[Tensor]) -> Iterator[None]:
        self.visiting.wait(self.compute.mark())
        self.current = self.visiting
        try:
            yield
        finally:
            self.current = self.compute

    def fetch(self, copies: Sequence[Copy], *, after: Sequence[Transfer]) -> Transfer:
        def look(into: Any, source: Any) -> None:
            require(not holds(source, TORN), "I3: a layer is handed over in the middle of an update")

        for other in after:
            if other.done is not None:
                self.fetching.wait(other.done)
        return self._copy(self.fetching, [(copy, look) for copy in copies], host=1)

    def send_back(self, copies: Sequence[Copy]) -> Transfer:
        self.returning.wait(self.visiting.mark())
        return self._copy(self.returning, [(copy, lambda *_: None) for copy in copies], host=0)

    def stream_in(self, tensors: Sequence[Tensor], copies: Sequence[Copy], *, after: Sequence[Mark | None]) -> Transfer:
        def look(into: Any, source: Any) -> None:
            require(not holds(source, TORN), "I2: weights are fetched while an update writes them")

        for mark in after:
            if mark is not None:
                self.window.wait(mark)
        return self._copy(self.window, [(copy, look) for copy in copies], host=1)

    def free(self, tensors: Sequence[Tensor], *, after: Sequence[Mark | None]) -> None:
        """Their memory is somebody else's at once, in the order of the stream."""
        for mark in after:
            if mark is not None:
                self.window.wait(mark)
        for tensor in tensors:
            for tile in at(address(tensor), tensor.numel()):
                self.window.run(partial(tile.fill, BLANK))

    def so_far(self) -> Transfer:
        return Transfer(self.current.mark(), (self.clock.mark(), self.clock.mark()))  # type: ignore[arg-type]

    def _copy(self, stream: Stream, copies: list[tuple[Copy, Callable[..., None]]], *, host: int) -> Transfer:
        """`host` says which one of a copy's tensors is in host memory."""

        def run(pinned: Tensor, look: Callable[..., None], into: Any, source: Any) -> None:
            start = address(pinned)
            is_pinned = any(first <= start < first + nbytes for first, nbytes in self.pinned.items())
            is_small = pinned.numel() in (1, SAMPLED_ELEMENTS)  # a norm, or a sample of a parameter
            require(is_pinned or is_small, "I2: a copy touches an arena that was given up")
            look(into, source)
            into[:] = source

        for copy, look in copies:
            for parts in zip(*(at(address(tensor), tensor.numel()) for tensor in copy)):
                stream.run(partial(run, copy[host], look, *parts))
        self._world.kept += copies
        return Transfer(stream.mark(), (self.clock.mark(), self.clock.mark()))  # type: ignore[arg-type]

    def fence(self) -> Mark:
        self._pause()
        return self.compute.mark()

    event = fence

    def events(self) -> list[Mark]:
        return [self.fence()]

    def land(self, transfer: Transfer, stream: None = None) -> None:
        if transfer.done is not None:
            self.current.wait(transfer.done)
        if self.current is self.compute:
            self._pause()

    def keep_for(self, stream: None, tensors: Sequence[Tensor]) -> None:
        """One stream makes all gradients."""

    join = keep_for

    def drain(self) -> None:
        streams = (self.compute, self.out, self.into, self.state, self.fetching, self.visiting, self.returning)
        streams += (self.window,)
        self._world.scheduler.wait_until(lambda: not any(stream.operations for stream in streams))


class Visits(visits.Visits):
    """Memory of gradients that has been let go is somebody else's now, on the stream that had made them."""

    def __init__(self, streams: Streams, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._compute = streams.compute

    def _let_go(self) -> None:
        for grads in self._waiting[0][1]:
            for tile in at(address(grads), grads.numel()):
                self._compute.run(partial(tile.fill, BLANK))
        super()._let_go()


class Device:
    """In place of AdamW on the GPU: an update goes onto the current stream."""

    float_mode = 0

    def __init__(self, world: World, streams: Streams) -> None:
        self._world, self._streams = world, streams

    def update(self, of: Operands) -> None:
        known, step = self._world.covering(of.weights), self._world.step()
        self._world.kept += [known.layer.state(plane) for plane in STATE_PLANES]

        def update(gradient: Any, *planes: Any) -> None:
            self._world.require_update(step, known.before[step], gradient, *planes)
            for plane in planes:
                plane[:] = written_in(step)

        for parts in zip(*(at(start, of.numel) for start in (of.grads, of.weights, *of.moments))):
            self._streams.current.run(partial(update, *parts))


# ---------------------------------------------------------------- the trainer's other parts


class Link:
    """In place of the link: `post`, and its two I/O threads as functions. `listener` is set when the plan is agreed."""

    def __init__(self, world: World, arenas: socket.socket) -> None:
        self._world, self._arenas = world, arenas
        self._jobs: deque[tuple[str, Any, Any]] = deque()
        self.is_closing = self.is_asked = False
        self.listener: engine.Engine | None = None
        world.scheduler.add(Actor(self._can_send, self._send))
        for sender in ("optimizer", "coordinator"):
            world.scheduler.add(Actor(partial(self._can_receive, sender), partial(self._receive, sender)))

    def agree(self, table: m.LayerTable, book: PlanBook) -> m.Plan:
        """As `hytrain.run.link.Link.agree`."""

        def expect() -> Any:
            self._world.scheduler.wait_until(lambda: self._world.waits("trainer", "coordinator"))
            return self._world.take("trainer", "coordinator")

        calibration = m.Calibration(d2h_s=1e-9, h2d_s=1e-9, gpu_update_s=1e-9)
        self._introduction = partial(m.Rejoin, table=table, calibration=calibration)
        self.post("coordinator", table)
        self.post("coordinator", calibration)
        plan: m.Plan = expect()
        self.post("coordinator", book.on_plan(plan))
        book.on_reassign(expect())
        return plan

    def post(self, to: str, what: m.Message | Callable[[], m.Message], *, after: Transfer | None = None) -> None:
        if isinstance(what, m.TakeOver | m.GiveUp):
            self._world.handing[what.lid] += 1
        self._jobs.append((to, what, after))
        self._world.scheduler.pause()

    def rejoin(self, **facts: Any) -> None:
        self.is_asked = False
        self.post("coordinator", self._introduction(**facts))

    def leave(self, rejoin: Callable[[], None]) -> None:
        """It may be dead to the end."""
        rejoin()

    def receive_arena(self, layouts: dict[int, Any]) -> Arena:
        self._world.scheduler.wait_until(lambda: self.is_closing or bool(select.select([self._arenas], [], [], 0)[0]))
        if self.is_closing:
            raise ClusterError("the link is closed")
        return receive_arena(self._arenas, layouts, token=TOKEN)

    def give_arena(self, file: Arena) -> None:
        send_arena(self._arenas, file, token=TOKEN, sender=Address("trainer", 0))

    def close(self, release: Callable[[], None]) -> None:
        self.is_closing = True
        self.post("optimizer", m.Goodbye())
        self._world.scheduler.wait_until(lambda: not self._jobs)
        release()

    def _can_send(self) -> bool:
        after = self._jobs[0][2] if self._jobs else None
        return bool(self._jobs) and (after is None or after.done is None or after.done.passed)

    def _send(self) -> None:
        to, what, _ = self._jobs.popleft()
        self._world.send("trainer", to, what() if callable(what) else what)

    def _can_receive(self, sender: str) -> bool:
        return self.listener is not None and not self.is_closing and self._world.waits("trainer", sender)

    def _receive(self, sender: str) -> None:
        assert self.listener is not None
        message = self._world.take("trainer", sender)
        if isinstance(message, m.Introduce):
            self.post("coordinator", m.Hello(pid=2, inbox="trainer-0"))
        elif isinstance(message, m.Welcome):
            self.post("coordinator", m.Ready(detail=""))
            self.is_asked = True
        else:
            self.listener.on_message(message)


class Health(health.Health):
    """Waits give the turn back."""

    def __init__(self, scheduler: Scheduler, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._scheduler = scheduler

    def wait_for(self, happened: Callable[[], bool], what: str) -> None:
        self._scheduler.wait_until(lambda: self.failure is not None or happened())
        self.check()


class Verdicts(verdict.Verdicts):
    """Decide by chance: whether a step awaits a verdict, and which."""

    def __init__(self, world: World, streams: Streams, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._world, self._streams, self._rng = world, streams, world.rng
        self.takes_norms = False

    def count_last(self) -> None:
        """Called before a step begins."""
        super().count_last()
        self.awaited, self.scale = self._rng.random() < 0.7, None
        scale = self._rng.choice((1.0, 1.0, 1.0, 0.5, None, None)) if self.awaited else 1.0
        self._world.scales[self._world.step()] = scale

    def judge(self, step: int) -> verdict.Judgement:
        scale = self._world.scales[step]
        self.scale = torch.tensor([verdict.SKIPPED if scale is None else scale])
        arrival = Transfer(self._streams.compute.mark(), (0.0, 0.0))  # type: ignore[arg-type]
        self._last = verdict.Judgement(step, arrival, self.scale)
        self._world.judged(step)
        return self._last


# ---------------------------------------------------------------- the other processes


class Queue(UpdateQueue):
    """Remembers the tile that is being updated."""

    def next_tile(self) -> Tile | None:
        self.tile = super().next_tile()
        return self.tile


class Host:
    """In place of AdamW in the optimizer process."""

    threads = 1

    def __init__(self, run: Any) -> None:
        self._run, self._world = run, run.world

    def update(self, of: Operands) -> None:
        tile = self._run.session._queue.tile
        [gradient], to = at(of.grads, of.numel), of.into or of
        sources, targets = (
            [at(each, of.numel)[0] for each in (planes.weights, *planes.moments)] for planes in (of, to)
        )
        before = self._world.expected[tile.lid][tile.segment].before[tile.step]
        self._world.require_update(tile.step, before, gradient, *sources)
        for target in targets:
            target[:] = TORN
        self._world.scheduler.wait_until(lambda: True)
        require(holds(gradient, written_in(tile.step)), "I2: a gradient is overwritten while it is being read")
        is_right = tile.scale == self._world.scales[tile.step]
        self._world.undone += not is_right
        for target in targets:
            target[:] = written_in(tile.step) if is_right else WRONG


class Inbox:
    """The optimizer's: what one of the two senders sends may come late."""

    def __init__(self, world: World) -> None:
        self._world, self._late = world, ""

    def receive(self, timeout_s: float | None) -> Any:
        rng, senders, waits = self._world.rng, ("trainer", "coordinator"), partial(self._world.waits, "optimizer")
        self._world.scheduler.wait_until(lambda: timeout_s is not None or any(map(waits, senders)))
        if rng.random() < 0.05:
            self._late = rng.choice(("", *senders))
        here = [sender for sender in senders if waits(sender) and sender != self._late]
        if not here or (timeout_s is not None and rng.random() < 0.3):
            return None
        message = self._world.take("optimizer", rng.choice(here))
        if isinstance(message, m.TakeOver | m.GiveUp):
            self._world.handing[message.lid] -= 1
        return SimpleNamespace(message=message)


class Planner:
    """A coordinator that proposes anything for any step: the real ledger without the real planner."""

    #: `choices[lid % len(choices)]` are the placements that a layer may have.
    choices: tuple[tuple[str, ...], ...] = (("cpu", "gpu", "visit"), ("cpu", "visit"), ("cpu", "gpu"))

    def __init__(self, world: World) -> None:
        self.world, self.ledger = world, PlanLedger(("cpu",) * len(world.layers))

    def handle(self, message: m.Message, sender: str) -> None:
        match message:
            case m.LayerTable():
                self.world.send("coordinator", "optimizer", message)
            case m.Calibration() if sender == "optimizer":
                self.propose(0)
            case m.PlanAck():
                if (reassign := self.ledger.on_ack(sender, message)) is not None:
                    self.world.send("coordinator", "trainer", reassign)
            case m.Evicted(lid=lid):
                self.ledger.on_evicted(lid)
            case m.PlanApplied(step=step):
                self.ledger.on_applied(message)
                self.propose(step + self.world.rng.choice((0, 1, 2)))
            case m.TrainerReport(step=step):
                if self.world.rng.random() < 0.3:
                    mode = m.SetMode(speculate=self.world.rng.random() < 0.5)
                    self.world.send("coordinator", "optimizer", mode)
                if not self.ledger.busy:
                    self.propose(step + self.world.rng.choice((0, 1, 2, 3)))

    def propose(self, step: int) -> None:
        lids = range(len(self.world.layers))
        owned = Places(tuple(self.world.rng.choice(self.choices[lid % len(self.choices)]) for lid in lids))
        why: Any = {"k": 0.0, "policy": "random", "reason": "", "predicted_step_s": None}
        stays = (layer for layer in self.world.layers if layer.block is None or layer.lid in owned.gpu)
        offloaded = {*lids}.difference(layer.lid for layer in stays)
        places = owned.offload({lid for lid in offloaded if self.world.chance.random() < 0.8})
        plan = m.Plan(plan_id=self.ledger.next_id, step=step, places=places, **why)
        for role in ("trainer", "optimizer"):
            self.world.send("coordinator", role, plan)
        self.ledger.propose(plan)

    def check(self) -> None:
        self.ledger.check()


class Coordinator:
    """The real coordinator's state, with the policy that moves layers at every chance."""

    def __init__(self, world: World) -> None:
        self.world, self.state = world, self._new()

    def _new(self) -> CoordinatorState:
        return CoordinatorState(run_name="run", run_dir="/run", host="here", pid=1, replan_every=1, ranks=1)

    def handle(self, message: m.Message, sender: str) -> None:
        for command in self.state.handle(message, Address(sender, 0), 0.0):
            if isinstance(command, Send):
                self.world.send("coordinator", command.to.role, command.message)

    def check(self) -> None:
        self.state.check()


class Mortal(Coordinator):
    """The same, which dies, with messages on their way to it and from it; another one takes its place."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._known, self._deaths, self.reports = {"trainer", "optimizer"}, 0, 0
        world.scheduler.add(Actor(lambda: self.reports > self._deaths, self._die))

    def handle(self, message: m.Message, sender: str) -> None:
        if isinstance(message, m.Hello):
            self._known.add(sender)
        with suppress(HandshakeError):  # two have asked, before one of them died
            if sender in self._known:
                super().handle(message, sender)
        self.reports += isinstance(message, m.TrainerReport)

    def _die(self) -> None:
        """Once for each report at most, which may be soon or late."""
        rng, network = self.world.rng, self.world.network
        self._deaths += 1
        if rng.random() < 0.7:
            return
        self.world.moved_before_death = self.world.moved
        self.world.story.append("the coordinator dies")
        for worker in sorted(self._known):
            network.lose(f"coordinator from {worker}", first=rng.randint(0, 3))
            network.lose(f"{worker} from coordinator", last=rng.randint(0, 3))
        self.state, self._known = self._new(), set()
        for worker in ("trainer", "optimizer"):
            self.world.send("coordinator", worker, m.Introduce(coordinator_pid=1, attempt=1))
