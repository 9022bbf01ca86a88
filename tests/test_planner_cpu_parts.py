"""How many parts the CPU trains, in made-up machines: close to the best number, also once the GPU becomes slower."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest

from examples.studies.cotraining.planner import SETTLE, CpuPartsPlanner, Step

CASES = range(100)


@dataclass
class Machine:
    """Seconds of a part on the GPU and on the CPU, of its start there, and of its gradients' way.

    `crowding`: what a second of the CPU's training costs the updates. `after`: how many parts the GPU trains after the
    CPU's, none in a pipeline.
    """

    parts: int
    gpu_s: float
    cpu_s: float
    lead_s: float = 0.0
    add_s: float = 0.0
    crowding: float = 0.0
    after: int = 1

    def step_s(self, cpu_parts: int) -> float:
        if not cpu_parts:
            return self.parts * self.gpu_s
        cpu_s = self.lead_s + cpu_parts * self.cpu_s
        beside_s = max((self.parts - self.after - cpu_parts) * self.gpu_s, cpu_s)
        return beside_s + cpu_parts * (self.add_s + self.crowding * self.cpu_s) + self.after * self.gpu_s

    def best_s(self, most: int) -> float:
        return min(map(self.step_s, range(most + 1)))

    def run(self, planner: CpuPartsPlanner, steps: int, rng: random.Random, noise: float = 0.02) -> None:
        """The loop: it tries a part on the CPU where that is not known yet. Measurements are some percent off."""
        for _ in range(steps):
            if not planner.is_tried:
                planner.observe_cpu(self.cpu_s * (1.0 + self.crowding))
            planner.decide()
            c, about = planner.cpu_parts, rng.uniform(1.0 - noise, 1.0 + noise)
            step = Step(cpu_parts=c, step_s=self.step_s(c) * about, gpu_part_s=self.gpu_s * about)
            if c:
                idle_s = max(self.lead_s + c * self.cpu_s - (self.parts - self.after - c) * self.gpu_s, 0.0)
                step = replace(step, cpu_part_s=self.cpu_s * about, add_s=self.add_s, idle_s=idle_s)
            planner.observe(step)


def made_up(seed: int, after: int) -> Machine:
    rng = random.Random(seed)
    return Machine(
        parts=rng.choice([2, 4, 8, 16, 64]),
        gpu_s=(gpu_s := rng.uniform(0.01, 1.0)),
        cpu_s=gpu_s * 10 ** rng.uniform(-0.3, 1.7),
        lead_s=gpu_s * rng.uniform(0.0, 2.0),
        add_s=gpu_s * rng.uniform(0.0, 0.3),
        crowding=rng.choice([0.0, 0.0, 0.1, 0.3]),
        after=after,
    )


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("slowdown", [1.0, 0.5, 4.0])
def test_the_choice_is_within_five_percent_of_the_best(slowdown: float, after: int) -> None:
    helped = 0
    for seed in CASES:
        machine, rng = made_up(seed, after), random.Random(seed)
        planner = CpuPartsPlanner(machine.parts, machine.parts - 1, after)
        machine.run(planner, 100, rng)
        machine.gpu_s *= slowdown
        machine.run(planner, 100, rng)
        assert machine.step_s(planner.cpu_parts) <= 1.05 * machine.best_s(machine.parts - 1), (seed, machine)
        helped += planner.cpu_parts > 0
    assert 0 < helped < len(CASES), "both are made up: machines where it pays, and where it does not"


def test_it_stays_with_its_choice_and_says_why() -> None:
    """1 part on the CPU is as good as 2, so what measurements are off makes either look better."""
    machine, rng = Machine(parts=8, gpu_s=0.1, cpu_s=0.25, lead_s=0.1), random.Random(1)
    planner, choices = CpuPartsPlanner(8, 7), list[int]()
    for _ in range(100):
        machine.run(planner, 1, rng)
        choices.append(planner.cpu_parts)
    assert choices[0] == 0 and choices[-1] in (1, 2)
    assert sum(one != other for one, other in pairwise(choices)) == 1
    machine.cpu_s = 0.4
    machine.run(planner := CpuPartsPlanner(8, 7), 40, rng, noise=0.0)
    assert planner.why == (
        "a part takes 0.1 s on the GPU and 0.4 s on the CPU, so a step 0.7 s with 1 of them on the CPU and 0.8 s "
        "with none"
    )


def test_what_does_not_pay_is_said_once() -> None:
    machine, rng = Machine(parts=4, gpu_s=0.1, cpu_s=10.0), random.Random(1)
    planner = CpuPartsPlanner(4, 3)
    machine.run(planner, SETTLE - 1, rng)
    planner.observe_cpu(10.0)
    assert not planner.decide() and not planner.why, "not before enough is measured"
    machine.run(planner, 1, rng)
    assert planner.decide() and planner.cpu_parts == 0 and planner.why.startswith("a part takes 0.1")
    assert not planner.decide()
