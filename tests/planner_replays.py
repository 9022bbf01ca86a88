"""Runs on made-up machines, replayed through the planning of the coordinator: what plans cost beside the best ones.

    the machine's true times of this step's placements ─ noise ─▶ reports ─▶ Planning ─▶ placements two steps on

Each has a machine, what changes on it, and a model. `regret` says how much longer steps took than with the best plan.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from planner_layers import around, with_cpu

from hytrain.planner.profile import LayerProfile, Profile
from hytrain.planner.simulate import simulate
from protocol import messages as m
from protocol.address import Address
from workers.effects import Command, Send
from workers.planning.planning import Planning
from workers.planning.room import facts, sizes_of

BLOCKS = 12
NOISE = 0.04
STEPS = 60
TRAINER, OPTIMIZER = Address("trainer", 0), Address("optimizer", 0)


@dataclass(frozen=True)
class Replay:
    """A run of `batch` x 1024 tokens. `memory`: the share of all state and weights that the GPU has room for.

    `slowness` of the CPU's updates in each step. `busy`: steps in which another program keeps the host busy.
    `drag` and `starved` are those of launches. `spread`: how much the CPU's pace differs from step to step, and
    `scatter` all of the machine's. `hidden_s`: how much longer a step takes if the CPU updates all layers, which no
    layer's times tell; that is a stall if it `shows`. `is_one`: CPU and "GPU" are the same processor, so that steps
    take as long whoever owns the layers.
    """

    batch: int = 8
    cpu_rate: float = 5e9
    link: float = 45e9
    memory: float | None = None
    shares: float | None = 0.0  # of visits and of offloaded weights; None: chosen
    drag: float = 0.0
    starved: float = 0.0
    cpu_loss: float = 0.14
    work_loss: float = 0.08
    spread: float = 0.05
    scatter: float = NOISE / 2
    hidden_s: float = 0.0
    shows: bool = False
    is_one: bool = False
    slowness: Callable[[int], float] = lambda step: 1.0
    busy: Callable[[int], bool] = lambda step: False
    clipped: float | None = None  # the share of steps whose norm is clipped
    objective: str = "speed"
    ranks: int = 1
    calibrated: bool = True
    batches: Callable[[int], float] = lambda step: 1.0  # how many times as long forward and backward take
    threads: Mapping[int, int] = field(default_factory=dict)  # by the step before which they are commanded

    @property
    def table(self) -> m.LayerTable:
        numels = [102_000_000, *[124_000_000] * BLOCKS, 102_000_000]
        layers = tuple(
            m.Layer(
                lid=lid,
                position=lid,
                name=f"layer {lid}",
                segments=(m.Segment(name="w", numel=numel, dtype="bfloat16", grads_dtype="bfloat16", group=0),),
            )
            for lid, numel in enumerate(numels)
        )
        blocks = tuple((lid,) for lid in range(1, BLOCKS + 1)) if self.shares is None else ()
        return m.LayerTable(
            layers=layers,
            inbox="trainer",
            device="cuda",
            policy="deadline",
            objective=self.objective,
            backend="auto",
            awaits_verdict=self.clipped is not None,
            speculate=None if self.clipped is not None else False,
            continues=False,
            k=None,
            gpu_bytes=self.gpu_bytes,
            host_bytes=None,
            world=self.ranks,
            visit=self.shares,
            offload_weights=self.shares,
            blocks=blocks,
            window_bytes=3 * 248_000_000 if blocks else 0,
            ring_bytes=500_000_000,
            hold_bytes=2_000_000_000,
        )

    @property
    def gpu_bytes(self) -> int | None:
        numel = 204_000_000 + BLOCKS * 124_000_000
        return None if self.memory is None else int(self.memory * 12 * numel)

    @property
    def machine(self) -> Profile:
        """The true times of all layers."""
        table = self.table
        numels = [layer.numel for layer in table.layers]
        forward_s = [1e-4, *(2 * numel * self.batch * 1024 / 4e14 + 1e-4 for numel in numels[1:])]
        timed = around(numels, forward_s, link=self.link, cpu_rate=self.cpu_rate, gpu_rate=140e9)
        sizes, roles = sizes_of(table), ("forward_s", "backward_s", "d2h_s", "h2d_s", "cpu_update_s", "gpu_update_s")
        known = (facts(layer, table, sizes) for layer in table.layers)
        layers = tuple(
            LayerProfile(
                **{name: getattr(fact, name) for name in fact.__slots__},
                **{role: getattr(layer, role) for role in roles},
                visit_s=5 * max(layer.d2h_s, layer.h2d_s),
            )
            for fact, layer in zip(known, timed, strict=True)
        )
        return Profile(
            layers=layers,
            other_s=5e-3,
            drag=self.drag,
            cpu_loss=self.cpu_loss,
            work_loss=self.work_loss,
            awaits_verdict=self.clipped is not None,
            window_bytes=table.window_bytes,
            hold_bytes=table.hold_bytes,
        )


@dataclass
class Result:
    """`seconds` of all steps but those that warm up, and the least that they could have taken without visits.

    `gpu_bytes`: the GPU memory of the plans, in their mean. `moves`: how many layers have moved.
    """

    seconds: float
    best_s: float
    gpu_bytes: float
    moves: int

    @property
    def regret(self) -> float:
        """By which fraction steps took longer than with the best layers on the GPU in each of them."""
        return self.seconds / self.best_s - 1


class Run:
    """One replay under way."""

    def __init__(self, replay: Replay, seed: int = 1) -> None:
        self.replay, self.random, self.real = replay, random.Random(seed), replay.machine
        self.planning = Planning(replay.table, 0, replan_every=4)
        self.step, self.moves, self.plans, self.threads = 0, 0, 0, 14
        self.due: m.Plan | None = None
        self.ahead = replay.clipped is not None
        for message, sender in (
            (m.Calibration(d2h_s=2 / replay.link, h2d_s=2 / replay.link, gpu_update_s=1 / 140e9), TRAINER),
            (m.Calibration(cpu_update_s=1 / replay.cpu_rate / 1.35), OPTIMIZER),
        ):
            self.act(self.planning.on_calibration(sender, message if replay.calibrated else m.Calibration()))
        self.apply()
        self.seconds, self.best_s, self.gpu_bytes = 0.0, 0.0, 0.0
        self.bests: dict[tuple[float, float], float] = {}  # the best step by the CPU's pace and the length of the work

    def act(self, commands: list[Command]) -> None:
        """Both processes agree on each plan at once, and it takes effect two steps on."""
        for command in commands:
            if isinstance(command, Send) and isinstance(command.message, m.Plan) and command.to == TRAINER:
                self.due = command.message
                for sender in (TRAINER, OPTIMIZER):
                    ack = m.PlanAck(plan_id=self.due.plan_id, accepted=True, reason="")
                    self.act(self.planning.on_ack(sender, ack))
            elif isinstance(command, Send) and isinstance(command.message, m.SetMode):
                self.ahead = command.message.speculate

    def apply(self) -> None:
        plan, self.due = self.due, None
        if plan is None:
            return
        moved = sum(a != b for a, b in zip(self.planning.places, plan.places, strict=True))
        self.moves, self.plans = self.moves + moved, self.plans + 1
        self.places = plan.places
        self.act(
            self.planning.on_applied(
                m.PlanApplied(plan_id=plan.plan_id, step=self.step, places=plan.places, moved=moved, handover_s=0.0)
            )
        )

    def now(self) -> Profile:
        """The machine in this step."""
        longer = self.replay.batches(self.step)
        layers = tuple(
            replace(layer, forward_s=longer * layer.forward_s, backward_s=longer * layer.backward_s)
            for layer in self.real.layers
        )
        return replace(self.real, layers=layers, drag=self.real.drag * (longer <= 2))  # long batches need no launches

    def truth(self) -> Profile:
        """The machine under this step's placements."""
        visit, offload = self.planning._shares
        real = replace(self.now(), visit=visit, offload=offload)
        clipped = self.replay.clipped is not None and self.random.random() < self.replay.clipped
        self.is_clipped = clipped
        return replace(real, speculates=self.ahead and not clipped)

    def best(self, pace: float) -> float:
        """The shortest step that some layers on the GPU bring, at about this pace of the CPU, without visits."""
        pace, longer = round(pace, 1), self.replay.batches(self.step)
        if (pace, longer) not in self.bests:
            real, limit = with_cpu(replace(self.now(), visit=0.0, offload=0.0), pace), self.replay.gpu_bytes
            prefixes = [frozenset(range(count)) for count in range(len(real.layers) + 1)]
            fit = [lids for lids in prefixes if limit is None or not lids or real.gpu_state_bytes(lids) <= limit]
            self.bests[pace, longer] = min(simulate(real, lids).step_s for lids in fit)
        return self.bests[pace, longer]

    def go(self, steps: int = STEPS) -> Result:
        for _ in range(steps):
            self.one()
        return Result(self.seconds, self.best_s, self.gpu_bytes / (steps - 2), self.moves)

    def one(self) -> None:
        step, replay = self.step, self.replay
        if self.due is not None and self.due.step <= step:
            self.apply()
        if step in replay.threads:
            self.threads = replay.threads[step]
            self.act(self.planning.command("threads", str(self.threads))[1])
        real, gpu = self.truth(), self.places.gpu
        pace = (14 / self.threads) ** 0.6 * replay.slowness(step) * max(0.7, self.random.gauss(1, replay.spread))
        launches = 1.6 if replay.busy(step) else 1.0
        line = simulate(with_cpu(real, pace), gpu)
        machine = max(0.8, self.random.gauss(1, replay.scatter))
        spans = [end_s - start_s for what, _, start_s, end_s in line.events if what in ("forward", "backward")]
        slowed = launches * sum(spans) / (real.forward_s + real.backward_s)
        crowding = real.crowding(self.places)

        def noisy(time_s: float) -> float:
            return time_s * machine * max(0.5, self.random.gauss(1, NOISE))

        times = tuple(
            m.LayerTimes(
                lid=layer.lid,
                forward_s=noisy(slowed * layer.forward_s),
                backward_s=noisy(slowed * layer.backward_s),
                d2h_s=noisy(layer.d2h_s) if layer.lid in self.places.cpu else None,
                h2d_s=noisy(layer.h2d_s) if layer.lid in self.places.cpu else None,
                gpu_update_s=noisy(layer.gpu_update_s) if layer.lid in gpu else None,
                visit_s=noisy(layer.visit_s * crowding.visits) if layer.lid in self.places.visiting else None,
            )
            for layer in real.layers
        )
        updates = tuple(
            m.CpuUpdate(lid=layer.lid, update_s=noisy(pace * crowding.cpu * layer.cpu_update_s))
            for layer in real.layers
            if layer.lid in self.places.cpu
        )
        hidden_s = replay.hidden_s * (1 - real.k_of(gpu))
        alone_s = simulate(with_cpu(real, pace), frozenset()).step_s if replay.is_one else line.step_s
        step_s = machine * (alone_s + hidden_s + (launches - 1) * sum(spans))
        if step >= 2:
            self.seconds += step_s
            self.best_s += step_s / line.step_s * self.best(pace)
            self.gpu_bytes += real.gpu_state_bytes(gpu)
        self.planning.measured.on_optimizer(
            m.OptimizerReport(
                step=step, threads=self.threads, busy_s=sum(each.update_s for each in updates), updates=updates
            )
        )
        if replay.clipped is not None:
            self.planning.mode.on_verdict(m.Verdict(step=step, scale=0.5 if self.is_clipped else 1.0, skipped=False))
        placed = real.gpu_state_bytes(gpu)
        usable = None if replay.gpu_bytes is None else replay.gpu_bytes + 10_000_000_000
        report = m.TrainerReport(
            step=step,
            number=step + 1,
            at_s=float(step),
            wall_time=1e9 + step,
            step_s=step_s,
            measured=step,
            stall_s=machine * (line.stall_s + line.fetch_s + hidden_s * replay.shows),
            exposed_s=0.0,
            middle_s=0.0,
            starved=max(replay.starved * (replay.batches(step) <= 2), float(replay.busy(step))),
            gather_s=None,
            k=real.k_of(gpu),
            moving=False,
            places=self.places,
            gpu_usable_bytes=usable,
            gpu_needed_bytes=None if usable is None else placed + 10_000_000_000,
            host_free_bytes=None,
            waited_bytes=0,
            activation_bytes=0,
            to_device_bytes=0,
            to_host_bytes=0,
            layers=times,
        )
        self.act(self.planning.on_trainer(report))
        self.planning.check()
        self.step += 1


def _turns(every: int, factor: float) -> Callable[[int], float]:
    return lambda step: factor if step // every % 2 else 1.0


REPLAYS: Mapping[str, Replay] = {
    "large batch": Replay(),
    "batch 1, launches": Replay(batch=1, drag=0.4, starved=1.0),
    "batch 2, less drag": Replay(batch=2, drag=0.15, starved=0.6),
    "slow CPU": Replay(cpu_rate=2e9),
    "fast CPU, batch 16": Replay(batch=16, cpu_rate=7e9),
    "slow link": Replay(link=12e9, batch=4),
    "another job takes turns": Replay(slowness=_turns(12, 1.8)),
    "another job comes": Replay(slowness=lambda step: 1.7 if step > 25 else 1.0),
    "a wide spread": Replay(spread=0.25, batch=6),
    "a busy host": Replay(batch=4, busy=lambda step: 20 <= step < 30),
    "no calibration": Replay(calibrated=False, cpu_rate=3e9),
    "40 % of the memory, shares": Replay(memory=0.4, shares=None),
    "25 %, visits cost the GPU": Replay(memory=0.25, shares=None, work_loss=0.2, batch=4),
    "25 %, a slow link": Replay(memory=0.25, shares=None, link=20e9),
    "clipped at times": Replay(clipped=0.1),
    "clipped mostly": Replay(clipped=0.8),
    "least GPU memory": Replay(objective="gpu-memory"),
    "ranks": Replay(ranks=4, spread=0.15),
    "half the threads, and back": Replay(threads={20: 7, 40: 14}),
    "a first step that is slow": Replay(slowness=lambda step: 3.0 if step < 8 else 1.0),
    "no room": Replay(memory=0.12, batch=2),
    "batch 1, launches suffer most": Replay(batch=1, drag=0.75, starved=1.0),
    "batch 2, launches hardly suffer": Replay(batch=2, drag=0.03, starved=1.0),
    "launches wait at times": Replay(batch=2, drag=0.3, starved=0.5),
    "longer batches come": Replay(batch=2, drag=0.4, starved=0.9, batches=lambda step: 6 if step > 30 else 1),
}
