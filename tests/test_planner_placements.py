"""Plans of a coordinator in a closed loop with a made-up GPU: owners, visits and offloaded weights, below a cap.

    first plan ─▶ true step of these placements ─ noise ─▶ TrainerReport, OptimizerReport ─▶ plan ─▶ … two steps later

The machine differs from what the planner assumes of it: its CPU is slower than calibrated, and updates, visits and
copies slow each other down by other amounts. Steps are counted, no time is taken.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

import pytest
from variants import slow

from hytrain.planner.contention import Crowding
from hytrain.planner.profile import LayerProfile, Profile
from hytrain.planner.simulate import Timeline, simulate
from protocol import messages as m
from protocol.address import Address
from protocol.placement import CPU, GPU, VISIT, Places
from workers.effects import Command, Remember, Send
from workers.planning.last import LastPlan
from workers.planning.planning import Planning
from workers.planning.room import facts, sizes_of

TRAINER, OPTIMIZER = Address("trainer", 0), Address("optimizer", 0)
PIECES = 2
GB = 10**9
NOISE = 0.03


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A GPU with a host. Rates in parameters per second, the link's in bytes."""

    work_s: float  # forward and backward
    cap: int
    cpu: float = 4.2e9
    visits: float = 4.4e9
    link: float = 52e9
    cpu_loss: float = 0.2  # beside visits
    is_flat: bool = False  # the CPU loses that however few visits there are
    work_loss: float = 0.08  # of the GPU's work, beside visits
    visit_loss: float = 0.4  # beside updates
    others: int = 6 * GB  # what a step takes besides what is placed
    gpu: float = 140e9
    host: int = 125 * GB
    blocks: int = 16
    numel: int = 202_000_000  # of a layer; a block has two
    of_muon: int = 0  # of a block's layers
    paces: tuple[float, ...] = (1.0,)  # one of them, in each step, is how many times as long as usual the CPU takes


class Run:
    """Blocks of two layers, with all placements to choose from."""

    def __init__(self, machine: Machine, seed: int, last: LastPlan | None = None) -> None:
        self.machine, self.random = machine, random.Random(seed)
        self.numel = machine.numel
        segment = m.Segment(name="w", numel=self.numel, dtype="bfloat16", grads_dtype="bfloat16", group=0)
        matrix = replace(segment, rule="muon", shape=(1000, self.numel // 1000))
        count = machine.blocks * PIECES
        kinds = [matrix if lid % PIECES < machine.of_muon else segment for lid in range(count)]
        layers = tuple(m.Layer(lid=lid, position=lid, name=f"{lid}", segments=(it,)) for lid, it in enumerate(kinds))
        wishes: dict[str, Any] = {
            "policy": "deadline",
            "objective": "speed",
            "k": None,
            "visit": None,
            "offload_weights": None,
        }
        wishes |= {"awaits_verdict": False, "speculate": False, "backend": "auto", "continues": False}
        self.hold = int(0.06 * machine.cap)
        self.table = m.LayerTable(
            layers=layers,
            inbox="trainer",
            device="cuda",
            gpu_bytes=machine.cap,
            host_bytes=machine.host,
            blocks=tuple((lid, lid + 1) for lid in range(0, count, PIECES)),
            window_bytes=3 * PIECES * 2 * self.numel,
            ring_bytes=GB // 2,
            hold_bytes=self.hold,
            **wishes,
        )
        self.facts = [asdict(facts(one, self.table, sizes_of(self.table))) for one in layers]
        self.planning = Planning(self.table, 0, replan_every=4, last=last)
        self.remembered: list[LastPlan] = []
        self.step = self.moved = self.due = self.ring = 0
        self.steps_s: list[float] = []
        self.plan: m.Plan | None = None
        self.needed = 0
        self._follow(self.planning.begin())
        copies = m.Calibration(d2h_s=2 / machine.link, h2d_s=2 / machine.link, gpu_update_s=1 / machine.gpu)
        self._follow(self.planning.on_calibration(TRAINER, copies))
        self._follow(self.planning.on_calibration(OPTIMIZER, m.Calibration(cpu_update_s=1 / (1.4 * machine.cpu))))
        assert self.plan is not None
        self.now = self.plan
        self._apply()

    def steps(self, count: int) -> None:
        for _ in range(count):
            moved = self.plan is not None and self.step >= self.due
            if moved:
                self._apply()
            self._measure(moved)
            self.step += 1

    def _follow(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Send) and command.to == TRAINER and isinstance(command.message, m.Plan):
                self.plan, self.due = command.message, self.step + 3
            if isinstance(command, Remember):
                assert command.table == self.table
                given = {"shares": command.shares, "gpu_bytes": command.table.gpu_bytes}
                self.remembered.append(LastPlan(places=command.places, **given))

    def _apply(self) -> None:
        plan, self.plan = self.plan, None
        assert plan is not None
        moved = sum(a.resident is not b.resident for a, b in zip(self.now.places, plan.places, strict=True))
        self._require_room_for_both(plan)
        for layer, placement in zip(self.table.layers, plan.places, strict=True):
            assert not (layer.stays_on_device and placement.updates == "cpu"), plan.reason
        self.moved, self.now = self.moved + moved, plan
        for who in (TRAINER, OPTIMIZER):
            self.planning.on_ack(who, m.PlanAck(plan_id=plan.plan_id, accepted=True, reason=""))
        where = {"places": plan.places, "moved": moved, "handover_s": 0.0}
        self._follow(self.planning.on_applied(m.PlanApplied(plan_id=plan.plan_id, step=self.step, **where)))
        self.planning.check()

    def _require_room_for_both(self, plan: m.Plan) -> None:
        """What comes has memory before what leaves gives its own up."""
        now, then = self.now.places, plan.places
        pairs, resident = list(zip(now, then, strict=True)), len(now) - len(now.offloaded & then.offloaded)
        state = [one["gpu_state_bytes"] for one in self.facts]
        on_gpu = sum(state[lid] for lid in now.gpu | then.gpu)
        on_gpu += 2 * resident * self.numel
        assert on_gpu + self.machine.others <= self.machine.cap, "no GPU memory for both"
        besides = {"gpu": 2, "cpu": 4}  # per parameter, by who updates
        on_host = 0
        for nbytes, pair in zip(state, pairs, strict=True):
            taken = (nbytes + besides[each.updates] * self.numel for each in pair if each.state == "host")
            on_host += max(taken, default=0)
        assert on_host <= self.machine.host, "no host memory for both"

    def true(self, pace: float = 1.0) -> tuple[Profile, Timeline]:
        """What a step of the present placements takes, with updates on the CPU that take so many times as long."""
        machine = self.machine
        part_s = machine.work_s / len(self.table.layers)
        times = {"forward_s": part_s / 4, "backward_s": 3 * part_s / 4, "gpu_update_s": self.numel / machine.gpu}
        times |= {"d2h_s": 2 * self.numel / machine.link, "h2d_s": 2 * self.numel / machine.link}
        times |= {"cpu_update_s": pace * self.numel / machine.cpu, "visit_s": self.numel / machine.visits}
        layers = tuple(LayerProfile(**one, **times) for one in self.facts)
        real = Real(layers=layers, other_s=0.004, window_bytes=self.table.window_bytes, hold_bytes=self.hold)
        real.machine, real.placed = machine, self.now.places
        real.cpu_loss, real.work_loss = machine.cpu_loss, machine.work_loss
        return real, simulate(real, self.now.places.gpu)

    def _measure(self, moved: bool) -> None:
        pace = self.random.choice(self.machine.paces)
        real, true = self.true(pace)
        places = self.now.places
        of_gpu, visiting, offloaded, of_cpu = places.gpu, places.visiting, places.offloaded, places.cpu
        scale = self.random.gauss(1, NOISE / 2)
        self.steps_s.append(true.step_s * scale)

        def noisy(time_s: float, *, if_: bool = True) -> float | None:
            return time_s * scale * max(0.5, self.random.gauss(1, NOISE)) if if_ else None

        visits_s = {lid: end_s - start_s for kind, lid, start_s, end_s in true.events if kind == "visit"}
        slowed = sum(end_s - start_s for kind, _, start_s, end_s in true.events if kind in ("forward", "backward"))
        slowed /= self.machine.work_s
        times = tuple(
            m.LayerTimes(
                lid=one.lid,
                forward_s=noisy(one.forward_s * slowed),
                backward_s=noisy(one.backward_s * slowed),
                d2h_s=noisy(one.d2h_s, if_=one.lid in of_cpu),
                h2d_s=noisy(one.h2d_s, if_=one.lid in of_cpu - offloaded),
                gpu_update_s=noisy(one.gpu_update_s, if_=one.lid in of_gpu),
                visit_s=noisy(visits_s.get(one.lid, 0.0), if_=one.lid in visiting),
            )
            for one in real.layers
        )
        placed = sum(self.facts[lid]["gpu_state_bytes"] for lid in of_gpu)
        placed += 2 * self.numel * (len(real.lids) - len(offloaded))
        self.ring = self.table.ring_bytes if visiting else self.ring  # it stays once it was made
        placed += (self.table.window_bytes if offloaded else 0) + self.ring + (self.hold if visiting else 0)
        self.needed = max(self.needed, placed + self.machine.others)
        assert self.needed <= self.machine.cap, "out of memory"
        longer = real.crowding(places).cpu
        updates = tuple(
            m.CpuUpdate(lid=lid, update_s=noisy(pace * longer * self.numel / self.machine.cpu) or 0.0)
            for lid in sorted(of_cpu)
        )
        busy_s = sum(update.update_s for update in updates)
        self.planning.measured.on_optimizer(
            m.OptimizerReport(step=self.step, threads=14, busy_s=busy_s, updates=updates)
        )
        facts: dict[str, Any] = dict.fromkeys(("exposed_s", "middle_s", "starved", "at_s", "wall_time", "k"), 0.0)
        report = m.TrainerReport(
            step=self.step,
            number=self.step + 1,
            step_s=self.steps_s[-1],
            measured=self.step,
            stall_s=(true.stall_s + true.fetch_s) * scale,
            gather_s=None,
            moving=moved,
            places=places,
            gpu_usable_bytes=self.machine.cap,
            gpu_needed_bytes=self.needed,
            host_free_bytes=None,
            waited_bytes=self.hold if visiting else 0,
            activation_bytes=0,
            to_device_bytes=0,
            to_host_bytes=0,
            layers=times,
            **facts,
        )
        self._follow(self.planning.on_trainer(report))
        self.planning.check()


class Real(Profile):
    """What is true of the machine, with placements that are given."""

    machine: Machine
    placed: Places

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def places(self, gpu_lids: frozenset[int]) -> Places:
        return self.placed

    def crowding(self, places: Places) -> Crowding:
        there, both = super().crowding(places), bool(places.cpu)
        if not places.visiting:
            return there
        cpu = 1 + both * self.cpu_loss if self.machine.is_flat else there.cpu
        return replace(there, cpu=cpu, visits=1 + both * self.machine.visit_loss)


def require_a_good_plan(run: Run) -> None:
    """The present one takes as long as predicted, and no earlier one was better."""
    _, true = run.true()
    assert run.planning.predicted_step_s == pytest.approx(true.step_s, rel=0.1)
    assert true.step_s <= 1.08 * min(run.steps_s) / (1 - NOISE), "a better plan was left"


@pytest.mark.parametrize(
    "machine",
    [
        slow(Machine(work_s=0.45, cap=24 * GB)),
        Machine(work_s=0.9, cap=16 * GB, is_flat=True),
        Machine(work_s=0.9, cap=13 * GB, visits=3.5e9, work_loss=0.16),
        slow(Machine(work_s=0.9, cap=75 * GB)),
        Machine(work_s=1.2, cap=25 * GB, others=7 * GB, host=118 * GB, blocks=24),
        # 10 B parameters, of which a token meets 3 B: the CPU has time for a fifth of them
        slow(Machine(work_s=0.45, cap=139 * GB, others=12 * GB, host=117 * GB, blocks=27, numel=192_000_000)),
    ],
    ids=["24 GB", "16 GB, a flat loss", "13 GB, slow link", "75 GB", "both memories full", "few FLOPs, many states"],
)
def test_plans_settle_soon_and_predict_what_comes(machine: Machine) -> None:
    run = Run(machine, seed=1)
    run.steps(60)
    require_a_good_plan(run)
    assert run.moved <= 2.5 * len(run.table.layers), "layers move to and fro"
    settled = run.moved
    run.steps(40)
    assert run.moved - settled <= len(run.table.layers) / 2


@pytest.mark.parametrize(("of_muon", "others"), [(1, {CPU.name}), (2, set())], ids=["half of a block", "whole blocks"])
def test_what_the_cpu_cannot_update_visits_or_is_the_gpus(of_muon: int, others: set[str]) -> None:
    """`Run` checks that of each plan. What the CPU can update may be its own; the reason tells."""
    run = Run(Machine(work_s=0.9, cap=30 * GB, of_muon=of_muon), seed=1)
    run.steps(30)
    assert {each.resident.name for each in run.now.places} == {GPU.name, VISIT.name, *others}
    assert f"the CPU cannot update {of_muon / PIECES:.0%}, whose state visits" in run.planning.reason
    if of_muon == PIECES:
        require_a_good_plan(run)


def test_what_visits_cost_is_learned() -> None:
    """As on an H100, whose host's memory updates alone use up: what is assumed is half of it, and less."""
    run = Run(
        Machine(work_s=0.565, cap=16 * GB, cpu_loss=0.42, work_loss=0.16, others=4 * GB, numel=107_000_000), seed=1
    )
    run.steps(60)
    require_a_good_plan(run)
    found = run.planning._book.profile()
    assert found is not None
    assert found.cpu_loss == pytest.approx(0.42, abs=0.15)
    assert found.work_loss == pytest.approx(0.16, abs=0.04)


#: Of a CPU that other programs use, too: how many times as long as usual its updates take.
SWINGING = (0.75, 0.8, 1.0, 1.2, 1.25)


def test_a_cpu_whose_pace_swings_has_no_more_than_it_can_do() -> None:
    """With its mean pace the CPU would be in time for more layers; in half of the steps they would be late."""
    run = Run(Machine(work_s=0.9, cap=75 * GB, paces=SWINGING), seed=1)
    run.steps(60)
    steps_s = [run.true(pace)[1].step_s for pace in SWINGING]
    assert fmean(steps_s) <= 0.94
    assert run.planning.predicted_step_s == pytest.approx(fmean(steps_s), rel=0.03)


#: What many people have, by data sheets: the rates follow from the bandwidths of memory and link.
HOME: dict[str, tuple[dict[str, Any], str]] = {
    # 24 GB, 64 GB of DDR5, PCIe 4, batch 4: the CPU updates 3.2 B parameters in little more than a step.
    "RTX 4090": (
        {"blocks": 14, "numel": 114_000_000, "work_s": 1.2, "cap": 22 * GB, "others": 4 * GB, "host": 56 * GB}
        | {"gpu": 38e9, "cpu": 2.4e9, "visits": 2.3e9, "link": 24e9},
        "the CPU has most",
    ),
    # 24 GB, 32 GB of DDR4, PCIe 3, short steps: state stays on the GPU, as far as it has room.
    "RTX 3090": (
        {"blocks": 12, "numel": 70_000_000, "work_s": 0.4, "cap": 22 * GB, "others": 4 * GB, "host": 26 * GB}
        | {"gpu": 35e9, "cpu": 1.4e9, "visits": 1.1e9, "link": 12e9},
        "the GPU has more than half",
    ),
    # 12 GB, 32 GB of DDR4, PCIe 3, long steps: the CPU is in time, so the GPU needs nothing but its window.
    "RTX 3060": (
        {"blocks": 24, "numel": 27_000_000, "work_s": 3.0, "cap": 10 * GB, "others": 3 * GB, "host": 26 * GB}
        | {"gpu": 14e9, "cpu": 1.3e9, "visits": 1.1e9, "link": 12e9},
        "the CPU has all",
    ),
    # 12 GB, 64 GB of DDR5, 8 lanes of PCIe 4, short steps: the CPU is late, and the GPU has no room for more.
    "a laptop": (
        {"blocks": 28, "numel": 57_000_000, "work_s": 0.5, "cap": 10 * GB, "others": 3 * GB, "host": 56 * GB}
        | {"gpu": 16e9, "cpu": 2.2e9, "visits": 1.1e9, "link": 12e9},
        "the GPU is full",
    ),
    # 24 GB, four cores: their updates are slow, but the steps are long.
    "A10G": (
        {"blocks": 12, "numel": 70_000_000, "work_s": 2.2, "cap": 22 * GB, "others": 4 * GB, "host": 26 * GB}
        | {"gpu": 22e9, "cpu": 0.9e9, "visits": 1.6e9, "link": 20e9},
        "the CPU has most",
    ),
    # One memory of 128 GB, all of which counts as the GPU's.
    "GB10": (
        {"blocks": 36, "numel": 100_000_000, "work_s": 3.0, "cap": 110 * GB, "others": 8 * GB, "host": 0}
        | {"gpu": 7e9, "cpu": 2.5e9, "visits": 3e9, "link": 80e9},
        "the GPU has all",
    ),
}


@pytest.mark.parametrize("name", HOME)
def test_machines_at_home(name: str) -> None:
    """With little bandwidth, updates and visits slow each other down by half."""
    numbers, expected = HOME[name]
    run = Run(Machine(**numbers, cpu_loss=0.5, visit_loss=0.5), seed=1)
    run.steps(40)
    require_a_good_plan(run)
    k = len(run.now.places.gpu) / len(run.table.layers)
    assert run.moved <= len(run.table.layers)
    is_full = run.needed > 0.9 * run.machine.cap
    found = {
        "the CPU has all": k == 0,
        "the CPU has most": 0 < k < 0.2 and not is_full,
        "the GPU has more than half": 0.5 < k < 1,
        "the GPU has all": k == 1,
        "the GPU is full": 0.1 < k < 0.3 and is_full,
    }
    assert [plan for plan, is_so in found.items() if is_so] == [expected], run.planning.reason
