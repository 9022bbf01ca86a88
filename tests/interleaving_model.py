"""A run in one thread: the real state machines over a model of memory, streams and links, in any order.

What decides is the real thing: `LayerLife` and `PlanBook` of the trainer, `UpdateQueue` and `PlanBook` of the
optimizer, `CoordinatorState` or a bare `PlanLedger`, and the wire format. What moves bytes is a model.

    trainer      main thread, three streams, sender, receiver (`interleaving_trainer`)
    optimizer    a message, or half a tile
    coordinator  a message
    links        first in, first out from each sender; between senders in any order

`Run.play` lets one of those who can go on go on, chosen by chance, until all is done. `Violation` is what the search
is after; the events that led there are in its notes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from interleaving_trainer import Trainer
from interleaving_world import TILE, WRONG, Arena, Memory, Violation, World, random_table, require

from hytrain.run.ownership import OwnershipError, PlanBook, PlanLedger
from protocol import messages as m
from protocol.address import Address
from workers.coordinator_state import CoordinatorState
from workers.effects import Send
from workers.update_queue import Tile, UpdateQueue


class Optimizer:
    """The optimizer process: messages, and updates a tile at a time, each with a beginning and an end."""

    book_type = PlanBook
    queue_type = UpdateQueue

    def __init__(self, world: World) -> None:
        self.world = world
        self.queue: UpdateQueue | None = None
        self.book: PlanBook | None = None
        self.arenas: dict[int, Arena] = {}
        self.tile: Tile | None = None

    def can_receive(self, sender: str) -> bool:
        return self.tile is None and self.world.waits("optimizer", sender)

    def receive(self, sender: str) -> None:
        message = self.world.take("optimizer", sender)
        if isinstance(message, m.LayerTable):
            self.queue = self.queue_type(message.layers, tile_numel=TILE, speculate=message.banks == 2)
            self.book = self.book_type("optimizer", len(message.layers))
            self.world.send("optimizer", "coordinator", m.Calibration(cpu_update_s=1e-9))
            return
        assert self.queue is not None and self.book is not None
        match message:
            case m.Plan():
                ack = self.book.on_plan(message)
                if ack.accepted:
                    self.world.accepted.setdefault(message.plan_id, set()).add("optimizer")
                self.world.send("optimizer", "coordinator", ack)
            case m.AllocatePlanes(lid=lid):
                require(lid not in self.arenas, f"I3: layer {lid} has its planes already")
                self.arenas[lid] = self.world.memories[lid].arena()
                self.world.descriptors.append((lid, self.arenas[lid]))
            case m.TakeOver(plan_id=plan_id, lid=lid):
                self.require_plan(plan_id, lid, "cpu")
                self.queue.take_over(lid)
                self.world.handing.discard(lid)
            case m.GiveUp(plan_id=plan_id, lid=lid):
                self.require_plan(plan_id, lid, "gpu")
                self.queue.give_up(lid)
                self.world.handing.discard(lid)
                del self.arenas[lid]
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

    def require_plan(self, plan_id: int, lid: int, updates: str) -> None:
        assert self.book is not None
        if not self.book.allows(plan_id, lid, updates) or lid not in self.arenas:
            raise OwnershipError(f"layer {lid} cannot go to the {updates}")

    def can_work(self) -> bool:
        return self.queue is not None and not self.queue.idle

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
        arena, index, memory = self.place(tile)
        if arena.master is None:
            raise Violation(f"I3: the optimizer updates layer {tile.lid}, whose state is the GPU's")
        require(arena.grads[index] == tile.step, "I1: the optimizer reads a gradient that has not arrived")
        before = memory.before[tile.step][index]
        require(arena.master[tile.source][index] == before, "I1: an update on another's leftovers")
        arena.written = tile.step

    def end(self, tile: Tile) -> None:
        assert self.queue is not None
        arena, index, _ = self.place(tile)
        require(arena.master is not None and arena.grads[index] == tile.step, "I2: overwritten while being read")
        assert arena.master is not None
        verdict = self.world.verdicts[tile.step]
        holds = tile.scale == verdict.scale and not verdict.skipped
        self.world.undone += not holds
        arena.master[tile.target][index] = arena.weights[tile.target][index] = tile.step if holds else WRONG
        self.tile_done(tile)

    def tile_done(self, tile: Tile) -> None:
        assert self.queue is not None
        self.announce(self.queue.tile_done(tile))

    def announce(self, done: m.WeightsReady | None) -> None:
        if done is not None:
            self.arenas[done.lid].unread = self.arenas[done.lid].written = None
            self.world.send("optimizer", "trainer", done)

    def place(self, tile: Tile) -> tuple[Arena, int, Memory]:
        memory = self.world.memories[tile.lid]
        return self.arenas[tile.lid], memory.tiles.index((tile.segment, tile.start)), memory


class Planner:
    """A coordinator that proposes anything for any step: the real ledger without the real planner."""

    ledger_type = PlanLedger

    def __init__(self, world: World) -> None:
        self.world, self.ledger = world, self.ledger_type(("cpu",) * len(world.table.layers))

    def handle(self, message: m.Message, sender: str) -> None:
        match message:
            case m.LayerTable():
                self.world.send("coordinator", "optimizer", message)
            case m.Calibration() if sender == "optimizer":
                self.propose(0)
            case m.PlanAck():
                reassign = self.ledger.on_ack(sender, message)
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
        placements = tuple("gpu" if self.world.rng.random() < 0.5 else "cpu" for _ in self.world.table.layers)
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

    def handle(self, message: m.Message, sender: str) -> None:
        for command in self.state.handle(message, Address(sender, 0), 0.0):
            if isinstance(command, Send):
                self.world.send("coordinator", command.to.role, command.message)

    def check(self) -> None:
        self.state.check()


class Run:
    """A run with all its parties. Subclass the parties to plant a fault."""

    def __init__(
        self,
        seed: int,
        *,
        layers: int,
        steps: int,
        trainer: type[Trainer] = Trainer,
        optimizer: type[Optimizer] = Optimizer,
        coordinator: type[Planner] | type[Coordinator] = Planner,
    ) -> None:
        rng = random.Random(seed)
        self.world = World(random_table(rng, layers), rng)
        self.trainer = trainer(self.world, steps)
        self.optimizer = optimizer(self.world)
        self.coordinator = coordinator(self.world)
        self._main = self.trainer.main()
        self._until: Callable[[], bool] | None = None
        self._over = False
        self._actors = self._list_actors()

    def play(self) -> World:
        """Let chance decide who goes on, with paces that change now and then so that anybody may fall far behind."""
        rng, paces = self.world.rng, [1.0] * len(self._actors)
        try:
            while True:
                if rng.random() < 0.03:
                    paces = [rng.choice((0.001, 0.1, 1.0, 1.0, 10.0)) for _ in self._actors]
                able = [index for index, (_, can, _) in enumerate(self._actors) if can()]
                if not able:
                    require(self._over, "nobody can go on: a deadlock")
                    return self.world
                (chosen,) = rng.choices(able, [paces[index] for index in able])
                self._actors[chosen][2]()
                self.check()
        except Exception as error:
            error.add_note("\n".join(self.world.story))
            raise

    def check(self) -> None:
        """Every state machine's own check, and one owner for each layer but while a handover is on its way."""
        self.trainer.book.check()
        self.coordinator.check()
        queue = self.optimizer.queue
        if queue is not None:
            queue.check()
        for life, memory in zip(self.trainer.lives, self.world.memories):
            life.check()
            arena = self.trainer.arenas.get(life.lid)
            places = (memory.master is not None) + (arena is not None and arena.master is not None)
            require(places == 1, f"I3: the state of layer {life.lid} is in {places} places")
            if queue is not None and life.lid not in self.world.handing:
                require(
                    (life.lid in queue.owned) == (life.placement.updates == "cpu"),
                    f"I3: layer {life.lid} has two owners or none",
                )

    def _list_actors(self) -> list[tuple[str, Callable[[], bool], Callable[[], None]]]:
        world, trainer, optimizer = self.world, self.trainer, self.optimizer
        streams = {name: getattr(trainer, name) for name in ("compute", "out", "into", "state")}
        return [
            ("main", self._main_ready, self._go_on),
            *((name, stream.ready, stream.act) for name, stream in streams.items()),
            ("sender", trainer.sender_ready, trainer.send_next),
            ("handover", trainer.can_prepare, trainer.prepare_next),
            ("optimizer works", optimizer.can_work, optimizer.work),
            *(
                (f"trainer from {sender}", partial(world.waits, "trainer", sender), partial(trainer.receive, sender))
                for sender in ("optimizer", "coordinator")
            ),
            *(
                (f"optimizer from {sender}", partial(optimizer.can_receive, sender), partial(optimizer.receive, sender))
                for sender in ("trainer", "coordinator")
            ),
            *(
                (
                    f"coordinator from {sender}",
                    partial(world.waits, "coordinator", sender),
                    partial(self._coordinate, sender),
                )
                for sender in ("trainer", "optimizer")
            ),
        ]

    def _coordinate(self, sender: str) -> None:
        self.coordinator.handle(self.world.take("coordinator", sender), sender)

    def _main_ready(self) -> bool:
        return not self._over and (self._until is None or self._until())

    def _go_on(self) -> None:
        try:
            self._until = next(self._main)
        except StopIteration:
            self._over = True
