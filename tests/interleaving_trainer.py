"""The trainer of a run in one thread: engine, boundary, handover and I/O threads, as their real ones go about it.

    main         forward ▶ backward ▶ boundary, a generator that yields wherever others may run
    streams      compute, out (gradients), in (weights), state: one operation after the other, a tile at a time
    sender       messages, each after its copy          receiver    what arrives
    handover     a plan's arenas are asked for and awaited; those that were left are closed

`LayerLife` and `PlanBook` decide; subclasses plant faults.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from interleaving_world import NEVER, Arena, Job, Mark, Stream, Violation, World, require

from hytrain.model.lifecycle import Command, Event, LayerLife, State
from hytrain.run.ownership import PlanBook
from protocol import messages as m
from protocol.placement import CPU, GPU, Placement

HYPER = m.GroupHyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, maximize=False)
Waiting = Generator[Callable[[], bool] | None, None, None]


@dataclass
class Moving:
    """State on its way to the device, and the copy's end once the copy was started."""

    state: list[int]
    arrival: Mark | None = None


@dataclass
class Move:
    """One plan's handovers."""

    plan: m.Plan
    leaving: list[int]
    coming: list[int]
    arenas: dict[int, Arena] = field(default_factory=dict)
    asked: bool = False
    begun: bool = False

    @property
    def prepared(self) -> bool:
        return self.asked and len(self.arenas) == len(self.leaving)


class Trainer:
    """The engine, boundary and handover of a trainer, with its two I/O threads."""

    life_type = LayerLife

    def __init__(self, world: World, steps: int) -> None:
        self.world, self.steps = world, steps
        self.lives = [self.life_type(layer.lid, GPU) for layer in world.table.layers]
        self.book = PlanBook("trainer", len(self.lives))
        self.compute, self.out, self.into, self.state = (Stream() for _ in range(4))
        self.jobs: deque[Job] = deque()
        self.arenas: dict[int, Arena] = {}
        self.landing: dict[int, Mark] = {}
        self.move: Move | None = None
        self.moving: dict[int, Moving] = {}
        self.banks: dict[int, tuple[int, ...]] = {}
        self.closing: deque[tuple[Arena, Mark]] = deque()
        self.sent: dict[int, tuple[int, ...]] = {}
        self.counts = [[0] * len(layer.segments) for layer in world.table.layers]

    # ------------------------------------------------------------ the main thread

    def main(self) -> Waiting:
        self.post("coordinator", self.world.table)
        self.post("coordinator", m.Calibration(d2h_s=1e-9, h2d_s=1e-9, gpu_update_s=1e-9))
        yield lambda: self.move is not None and self.move.prepared
        self.begin(0)
        yield from self.finish(0)
        for step in range(self.steps):
            yield from self.step(step)
        for lid in range(len(self.lives)):
            yield from self.await_layer(lid)
        yield from self.finish(self.steps)
        yield from self.synchronize(self.compute)
        for memory in self.world.memories:
            require(memory.weights == memory.produced, "I1: an update is missing at the end")

    def step(self, step: int) -> Waiting:
        """Some layers run, some of them get gradients, some of these only in part."""
        rng, lids = self.world.rng, range(len(self.lives))
        entered = [lid for lid in lids if rng.random() < 0.9] or [0]
        for lid in entered:
            yield from self.await_layer(lid)
            self.compute.run(self.reading(lid, step))
            yield None
        yield from self.finish(step)
        awaits_verdict = rng.random() < 0.7
        self.verdict = m.Verdict(step=step, scale=1.0, skipped=False)
        if awaits_verdict:
            scale, skipped = rng.choice((1.0, 1.0, 0.5)), rng.random() < 0.3
            self.verdict = m.Verdict(step=step, scale=scale, skipped=skipped)
        self.world.verdicts[step] = self.verdict
        self.held: list[Callable[[], None]] | None = [] if awaits_verdict else None
        self.post("optimizer", m.StepBegin(step=step, groups=(HYPER,), awaits_verdict=awaits_verdict))
        for lid in reversed(entered):
            filled = [rng.random() < 0.9 for _ in self.counts[lid]]
            if any(filled) or lid == entered[0]:
                self.gradient(lid, step, filled if any(filled) else [True] * len(filled))
            yield None
        if self.held is not None:
            self.judge(step)
            yield None
        self.report(step)
        if step == 0:
            positions = list(lids)
            rng.shuffle(positions)
            for role in ("optimizer", "coordinator"):
                self.post(role, m.PositionsLearned(positions=tuple(positions)))
        yield from self.boundary(step + 1)

    def boundary(self, step: int) -> Waiting:
        plan = self.book.due(step)
        if plan is not None and self.move is not None and self.move.prepared:
            self.world.postponed += plan.step < step
            self.begin(step)
            yield None

    def gradient(self, lid: int, step: int, filled: list[bool]) -> None:
        """Backward reaches a layer: the gradient, then its way out, or the update on the device."""
        for segment, has in enumerate(filled):
            self.counts[lid][segment] += has
        counts = tuple(count if has else 0 for count, has in zip(self.counts[lid], filled))
        memory = self.world.memories[lid]
        tiles, made = memory.changed(counts), [NEVER] * len(memory.tiles)

        read = self.reading(lid, step)

        def backward() -> None:
            read()
            for tile in tiles:
                made[tile] = step

        self.compute.run(backward)
        memory.before[step] = tuple(memory.produced)
        for tile in tiles:
            memory.produced[tile] = step
        if self.lives[lid].on(Event.FILLED, step) is Command.UPDATE_ON_DEVICE:
            updates = [partial(self.update_on_device, lid, memory.master, step, tile, made) for tile in tiles]
            if self.held is not None:
                self.held += updates
                return
            for update in updates:
                self.compute.run(update)
            return
        self.out.wait(self.compute.mark())
        arena = self.arenas[lid]
        for tile in tiles:
            self.out.run(partial(self.copy_out, arena, tile, made, step))
        self.out.run(lambda: setattr(arena, "unread", step))
        self.sent[lid] = counts
        exceeds = self.held is not None and self.world.rng.random() < 0.1
        self.send_off(lid, m.GradReady(step=step, lid=lid, counts=counts, exceeds=exceeds), self.out.mark())

    def judge(self, step: int) -> None:
        """All gradients are there. A skipped step is as if it had not been."""
        for role in ("optimizer", "coordinator"):
            self.post(role, self.verdict, after=self.compute.mark())
        if self.verdict.skipped:
            for memory in self.world.memories:
                memory.produced = list(memory.before.get(step, memory.produced))
        else:
            for update in self.held or []:
                self.compute.run(update)

    def send_off(self, lid: int, ready: m.GradReady, copied: Mark) -> None:
        self.post(
            "optimizer",
            ready,
            after=copied,
            before_sending=lambda: self.lives[lid].on(Event.COPIED, ready.step),
        )

    def await_layer(self, lid: int) -> Waiting:
        """The pre-hook: the stream, not the thread, waits for the copy itself."""
        life = self.lives[lid]
        if life.is_current:
            return
        yield lambda: life.state in (State.LANDING, State.CURRENT)
        if life.state is State.LANDING:
            self.compute.wait(self.landing.pop(lid))
            life.on(Event.AWAITED, life.updated)

    def synchronize(self, stream: Stream) -> Waiting:
        mark = stream.mark()
        yield lambda: mark.passed

    # ------------------------------------------------------------ plans and handovers

    def prepare(self, plan: m.Plan) -> None:
        moving = [life.lid for life in self.lives if life.placement is not plan.placement(life.lid)]
        leaving = [lid for lid in moving if plan.placement(lid) is CPU]
        coming = [lid for lid in moving if plan.placement(lid) is GPU]
        self.move = Move(plan, leaving, coming)

    def can_prepare(self) -> bool:
        move = self.move
        asking = move is not None and (not move.asked or (not move.prepared and bool(self.world.descriptors)))
        return asking or (bool(self.closing) and self.closing[0][1].passed)

    def prepare_next(self) -> None:
        """The handover's threads: close what was left, ask for arenas, take one in."""
        if self.closing and self.closing[0][1].passed:
            self.closing.popleft()[0].closed = True
        elif self.move is not None and not self.move.asked:
            self.move.asked = True
            for lid in self.move.leaving:
                self.post("optimizer", m.AllocatePlanes(lid=lid))
        elif self.move is not None:
            lid, arena = self.world.descriptors.popleft()
            self.move.arenas[lid] = arena

    def begin(self, step: int) -> None:
        """Start the copies. What I3 says of a plan that holds is looked at here, from the record."""
        move = self.move
        assert move is not None
        require(move.plan.step <= step, "I3: a plan holds from its step on")
        require(self.world.accepted.get(move.plan.plan_id) == {"trainer", "optimizer"}, "I3: both acknowledge")
        move.begun = True
        for lid in move.leaving:
            self.to_cpu(lid, move.arenas[lid], move.plan, step)
        for lid in move.coming:
            self.moving[lid] = Moving(self.world.memories[lid].blank())
            if self.lives[lid].is_current or lid in self.landing:
                self.state_in(lid)

    def finish(self, step: int) -> Waiting:
        move = self.move
        if move is None or not move.begun:
            return
        for lid in move.coming:
            yield from self.finish_update(lid)
            self.to_gpu(lid, move.plan, step)
        self.move = None
        self.world.moved += len(move.leaving) + len(move.coming)
        self.settle(move.plan, step, moved=len(move.leaving) + len(move.coming))

    def finish_update(self, lid: int) -> Waiting:
        yield from self.await_layer(lid)

    def to_cpu(self, lid: int, arena: Arena, plan: m.Plan, step: int) -> None:
        memory = self.world.memories[lid]
        state, memory.master = memory.master, None
        require(state is not None, f"I3: the state of layer {lid} is not where its owner should be")
        arena.master = memory.blank_banks()
        self.banks[lid] = (0,) * len(self.counts[lid])
        self.state.wait(self.compute.mark())
        for tile in range(len(memory.tiles)):
            self.state.run(partial(self.copy_to_cpu, lid, state, arena, arena.master[0], tile))
        self.arenas[lid] = arena
        self.place(lid, CPU)
        self.take_over(m.TakeOver(plan_id=plan.plan_id, lid=lid, step=step), self.state.mark())

    def take_over(self, taking: m.TakeOver, copied: Mark) -> None:
        self.post("optimizer", taking, after=copied)

    def state_in(self, lid: int) -> None:
        """The optimizer is done with the layer: copy its state in."""
        moving, arena, memory = self.moving[lid], self.arenas[lid], self.world.memories[lid]
        assert arena.master is not None
        for tile in range(len(moving.state)):
            master = arena.master[memory.bank(self.banks[lid], tile)]
            self.state.run(partial(self.copy_to_gpu, lid, arena, master, moving.state, tile))
        moving.arrival = self.state.mark()

    def to_gpu(self, lid: int, plan: m.Plan, step: int) -> None:
        memory, arena, moving = self.world.memories[lid], self.arenas.pop(lid), self.moving.pop(lid)
        arrival = moving.arrival or Mark()
        self.await_state(arrival)
        memory.master, arena.master = moving.state, None
        self.place(lid, GPU)
        self.post("optimizer", m.GiveUp(plan_id=plan.plan_id, lid=lid, step=step), after=arrival)
        self.closing.append((arena, arrival))

    def await_state(self, arrival: Mark) -> None:
        self.compute.wait(arrival)

    def place(self, lid: int, placement: Placement) -> None:
        self.lives[lid].place(placement)
        self.world.handing.add(lid)

    def settle(self, plan: m.Plan, step: int, *, moved: int) -> None:
        self.book.settle()
        placements = tuple(life.placement.name for life in self.lives)
        for role in ("optimizer", "coordinator"):
            self.post(
                role,
                m.PlanApplied(
                    plan_id=plan.plan_id,
                    step=step,
                    placements=placements,
                    moved=moved,
                    handover_s=0.0,
                ),
            )

    def report(self, step: int) -> None:
        times = tuple(
            m.LayerTimes(lid=life.lid, forward_s=1e-3, backward_s=2e-3, d2h_s=1e-4, h2d_s=1e-4) for life in self.lives
        )
        placements = tuple(life.placement.name for life in self.lives)
        self.post(
            "coordinator",
            m.TrainerReport(
                step=step,
                number=step + 1,
                at_s=float(step),
                step_s=1.0,
                measured=step,
                stall_s=0.0,
                middle_s=0.0,
                starved=0.0,
                k=0.0,
                moving=False,
                placements=placements,
                gpu_free_bytes=None,
                layers=times,
            ),
        )

    # ------------------------------------------------------------ the I/O threads

    def post(self, to: str, message: m.Message, **conditions: Any) -> None:
        self.jobs.append(Job(to, message, **conditions))

    def sender_ready(self) -> bool:
        return bool(self.jobs) and (self.jobs[0].after is None or self.jobs[0].after.passed)

    def send_next(self) -> None:
        job = self.jobs.popleft()
        job.before_sending()
        self.world.send("trainer", job.to, job.message)

    def receive(self, sender: str) -> None:
        match self.world.take("trainer", sender):
            case m.WeightsReady(lid=lid, step=step, banks=banks):
                self.banks[lid] = banks
                self.weights_ready(lid, step)
            case m.Plan() as plan:
                ack = self.book.on_plan(plan)
                if ack.accepted:
                    self.world.accepted.setdefault(plan.plan_id, set()).add("trainer")
                self.post("coordinator", ack)
            case m.Reassign() as reassign:
                self.book.on_reassign(reassign)
                assert self.book.plan is not None
                self.prepare(self.book.plan)

    def weights_ready(self, lid: int, step: int) -> None:
        assert self.lives[lid].on(Event.WEIGHTS_READY, step) is Command.COPY_WEIGHTS
        arena, memory = self.arenas[lid], self.world.memories[lid]
        for tile in memory.changed(self.sent[lid]):
            weights = arena.weights[memory.bank(self.banks[lid], tile)]
            self.into.run(partial(self.copy_in, lid, arena, weights, tile, step))
        self.landing[lid] = self.into.mark()
        if lid in self.moving:
            self.state_in(lid)

    # ------------------------------------------------------------ what runs on the device

    def reading(self, lid: int, step: int) -> Callable[[], None]:
        """A kernel that reads a layer's weights: every update that was caused before it was launched, and no other."""
        memory = self.world.memories[lid]
        due = list(memory.produced)

        def read() -> None:
            require(memory.weights == due, f"I1: step {step} reads layer {lid} at {memory.weights}, not {due}")

        return read

    def update_on_device(self, lid: int, state: list[int] | None, step: int, tile: int, made: list[int]) -> None:
        memory = self.world.memories[lid]
        if state is None:
            raise Violation(f"I3: the device updates layer {lid}, whose state is the CPU's")
        require(made[tile] == step, "I1: an update without its gradient")
        require(state[tile] == memory.before[step][tile], "I1: an update on another's leftovers")
        state[tile] = memory.weights[tile] = step

    def copy_to_cpu(self, lid: int, state: list[int], arena: Arena, master: list[int], tile: int) -> None:
        weights = self.world.memories[lid].weights
        require(state[tile] == weights[tile], f"I3: layer {lid} is handed over in the middle of an update")
        master[tile], arena.weights[0][tile] = state[tile], weights[tile]

    def copy_to_gpu(self, lid: int, arena: Arena, master: list[int], state: list[int], tile: int) -> None:
        require(not arena.closed, f"I2: the state of layer {lid} is read from an arena that was given up")
        require(arena.written is None, f"I3: layer {lid} is handed over in the middle of an update")
        state[tile] = master[tile]

    def copy_out(self, arena: Arena, tile: int, made: list[int], step: int) -> None:
        require(made[tile] == step, "I1: a gradient is copied before it is made")
        require(arena.unread is None, f"I2: the gradient of step {arena.unread} is overwritten unread")
        arena.grads[tile] = step

    def copy_in(self, lid: int, arena: Arena, weights: list[int], tile: int, step: int) -> None:
        require(arena.written is None, f"I2: layer {lid} is copied while update {arena.written} writes it")
        memory = self.world.memories[lid]
        due = memory.before[step][tile] if self.world.verdicts[step].skipped else step
        require(weights[tile] == due, f"I1: the copy of update {step} finds {weights[tile]}")
        memory.weights[tile] = due
