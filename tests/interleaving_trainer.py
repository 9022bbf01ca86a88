"""The trainer of a run in one thread: engine, boundary, handover and I/O threads, as their real ones go about it.

    main         forward ▶ backward ▶ boundary ▶ handover, a generator that yields wherever others may run
    streams      compute, out (gradients), in (weights): operations one after the other, a tile at a time
    sender       messages, each after its copy          receiver    what arrives

`LayerLife` and `PlanBook` decide; subclasses plant faults.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

from interleaving_world import NEVER, Arena, Job, Mark, Stream, Violation, World, require

from hytrain.lifecycle import Command, Event, LayerLife, State
from hytrain.ownership import PlanBook
from protocol import messages as m

HYPER = m.GroupHyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, maximize=False)
Waiting = Generator[Callable[[], bool] | None, None, None]


class Trainer:
    """The engine, boundary and handover of a trainer, with its two I/O threads."""

    life_type = LayerLife

    def __init__(self, world: World, steps: int) -> None:
        self.world, self.steps = world, steps
        self.lives = [self.life_type(layer.lid, "gpu") for layer in world.table.layers]
        self.book = PlanBook("trainer", len(self.lives))
        self.compute, self.out, self.into = Stream(), Stream(), Stream()
        self.jobs: deque[Job] = deque()
        self.arenas: dict[int, Arena] = {}
        self.landing: dict[int, Mark] = {}
        self.sent: dict[int, tuple[int, ...]] = {}
        self.counts = [[0] * len(layer.segments) for layer in world.table.layers]

    # ------------------------------------------------------------ the main thread

    def main(self) -> Waiting:
        self.post("coordinator", self.world.table)
        yield lambda: self.book.holds
        assert self.book.plan is not None
        yield from self.apply(self.book.plan, 0)
        for step in range(self.steps):
            yield from self.step(step)
        for lid in range(len(self.lives)):
            yield from self.await_layer(lid)
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
        self.world.backward = step
        self.post("optimizer", m.StepBegin(step=step, groups=(HYPER,)))
        for lid in reversed(entered):
            filled = [rng.random() < 0.9 for _ in self.counts[lid]]
            if any(filled) or lid == entered[0]:
                self.gradient(lid, step, filled if any(filled) else [True] * len(filled))
            yield None
        self.report(step)
        if step == 0:
            ranks = list(lids)
            rng.shuffle(ranks)
            for role in ("optimizer", "coordinator"):
                self.post(role, m.RanksLearned(ranks=tuple(ranks)))
        yield from self.boundary(step + 1)

    def boundary(self, step: int) -> Waiting:
        plan = self.book.due(step)
        if plan is not None:
            self.world.postponed += plan.step < step
            yield from self.apply(plan, step)

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
            self.compute.run(lambda: self.update_on_device(lid, step, tiles, made))
            return
        self.out.wait(self.compute.mark())
        arena = self.arenas[lid]
        for tile in tiles:
            self.out.run(partial(self.copy_out, arena, tile, made, step))
        self.out.run(lambda: setattr(arena, "unread", step))
        self.sent[lid] = counts
        self.send_off(lid, m.GradReady(step=step, lid=lid, counts=counts), self.out.mark())

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

    def apply(self, plan: m.Plan, step: int) -> Waiting:
        """Hand layers over. What I3 says of a plan that holds is looked at here, from the record."""
        require(plan.step <= step, "I3: a plan holds from its step on")
        require(self.world.accepted.get(plan.plan_id) == {"trainer", "optimizer"}, "I3: both acknowledge")
        owners = ["gpu" if lid in plan.gpu_lids else "cpu" for lid in range(len(self.lives))]
        changing = [life.lid for life, owner in zip(self.lives, owners) if life.owner != owner]
        for lid in changing:
            yield from self.finish_update(lid)
        for lid in changing:
            if owners[lid] == "cpu":
                self.post("optimizer", m.AllocatePlanes(lid=lid))
        for owner in (owners[lid] for lid in changing):
            if owner == "cpu":
                yield lambda: bool(self.world.descriptors)
                yield from self.to_cpu(*self.world.descriptors.popleft(), plan, step)
        for lid in changing:
            if owners[lid] == "gpu":
                yield from self.to_gpu(lid, plan, step)
        self.world.moved += len(changing)
        self.settle(plan, step, moved=len(changing))

    def finish_update(self, lid: int) -> Waiting:
        yield from self.await_layer(lid)

    def to_cpu(self, lid: int, arena: Arena, plan: m.Plan, step: int) -> Waiting:
        memory = self.world.memories[lid]
        yield from self.synchronize(self.compute)
        self.check_handover(lid, memory.master)
        arena.weights[:] = memory.weights
        yield None
        arena.master, memory.master = memory.master, None
        self.arenas[lid] = arena
        self.change_owner(lid, "cpu")
        self.post("optimizer", m.TakeOver(plan_id=plan.plan_id, lid=lid, step=step))

    def to_gpu(self, lid: int, plan: m.Plan, step: int) -> Waiting:
        memory, arena = self.world.memories[lid], self.arenas[lid]
        yield from self.synchronize(self.compute)
        self.check_handover(lid, arena.master)
        yield None
        memory.master, arena.master = arena.master, None
        self.change_owner(lid, "gpu")
        del self.arenas[lid]
        self.post("optimizer", m.GiveUp(plan_id=plan.plan_id, lid=lid, step=step))

    def check_handover(self, lid: int, master: list[int] | None) -> None:
        memory = self.world.memories[lid]
        require(master is not None, f"I3: the state of layer {lid} is not where its owner should be")
        require(
            master == memory.weights == memory.produced,
            f"I3: layer {lid} is handed over in the middle of an update",
        )

    def change_owner(self, lid: int, owner: str) -> None:
        self.lives[lid].change_owner(owner)
        self.world.handing.add(lid)

    def settle(self, plan: m.Plan, step: int, *, moved: int) -> None:
        self.book.settle()
        gpu_lids = tuple(life.lid for life in self.lives if life.owner == "gpu")
        for role in ("optimizer", "coordinator"):
            self.post(
                role,
                m.PlanApplied(
                    plan_id=plan.plan_id,
                    step=step,
                    gpu_lids=gpu_lids,
                    moved=moved,
                    handover_s=0.0,
                ),
            )

    def report(self, step: int) -> None:
        times = tuple(
            m.LayerTimes(lid=life.lid, forward_s=1e-3, backward_s=2e-3, d2h_s=1e-4, h2d_s=1e-4) for life in self.lives
        )
        gpu_lids = tuple(life.lid for life in self.lives if life.owner == "gpu")
        self.post(
            "coordinator",
            m.TrainerReport(
                step=step,
                number=step + 1,
                at_s=float(step),
                step_s=1.0,
                stall_s=0.0,
                k=0.0,
                gpu_lids=gpu_lids,
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
            case m.WeightsReady(lid=lid, step=step):
                self.weights_ready(lid, step)
            case m.Plan() as plan:
                ack = self.book.on_plan(plan)
                if ack.accepted:
                    self.world.accepted.setdefault(plan.plan_id, set()).add("trainer")
                self.post("coordinator", ack)
            case m.Reassign() as reassign:
                self.book.on_reassign(reassign)

    def weights_ready(self, lid: int, step: int) -> None:
        assert self.lives[lid].on(Event.WEIGHTS_READY, step) is Command.COPY_WEIGHTS
        for tile in self.world.memories[lid].changed(self.sent[lid]):
            self.into.run(partial(self.copy_in, lid, self.arenas[lid], tile, step))
        self.landing[lid] = self.into.mark()

    # ------------------------------------------------------------ what runs on the device

    def reading(self, lid: int, step: int) -> Callable[[], None]:
        """A kernel that reads a layer's weights: every update that was caused before it was launched, and no other."""
        memory = self.world.memories[lid]
        due = list(memory.produced)

        def read() -> None:
            require(memory.weights == due, f"I1: step {step} reads layer {lid} at {memory.weights}, not {due}")

        return read

    def update_on_device(self, lid: int, step: int, tiles: list[int], made: list[int]) -> None:
        memory = self.world.memories[lid]
        if memory.master is None:
            raise Violation(f"I3: the device updates layer {lid}, whose state is the CPU's")
        for tile in tiles:
            require(made[tile] == step, "I1: an update without its gradient")
            require(memory.master[tile] == memory.before[step][tile], "I1: an update on another's leftovers")
            memory.master[tile] = memory.weights[tile] = step

    def copy_out(self, arena: Arena, tile: int, made: list[int], step: int) -> None:
        require(made[tile] == step, "I1: a gradient is copied before it is made")
        require(arena.unread is None, f"I2: the gradient of step {arena.unread} is overwritten unread")
        arena.grads[tile] = step

    def copy_in(self, lid: int, arena: Arena, tile: int, step: int) -> None:
        require(arena.written is None, f"I2: layer {lid} is copied while update {arena.written} writes it")
        require(arena.weights[tile] == step, f"I1: the copy of update {step} finds {arena.weights[tile]}")
        self.world.memories[lid].weights[tile] = step
