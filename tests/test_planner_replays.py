"""Runs on made-up machines, replayed: plans cost no more time than they did, beside the best layers for each step."""

from __future__ import annotations

import pytest
from planner_replays import REPLAYS, Run

#: By which fraction steps took longer than with the best layers, as measured. Below 0, visits have helped. In the first
#: steps, nothing is known yet: where steps are short, that is most of it.
REGRETS = {
    "large batch": 0.011,
    "batch 1, launches": 0.145,
    "batch 2, less drag": 0.071,
    "slow CPU": 0.042,
    "fast CPU, batch 16": 0.001,
    "slow link": 0.051,
    "another job takes turns": 0.047,
    "another job comes": 0.045,
    "a wide spread": 0.035,
    "a busy host": 0.026,
    "no calibration": 0.025,
    "40 % of the memory, shares": 0.025,
    "25 %, visits cost the GPU": -0.154,
    "25 %, a slow link": -0.131,
    "clipped at times": 0.018,
    "clipped mostly": 0.018,
    "least GPU memory": 0.34,
    "ranks": 0.018,
    "half the threads, and back": 0.021,
    "a first step that is slow": 0.072,
    "no room": 0.063,
    "batch 1, launches suffer most": 0.225,
    "batch 2, launches hardly suffer": 0.061,
    "launches wait at times": 0.087,
    "longer batches come": 0.044,
}


@pytest.mark.parametrize("name", REPLAYS)
def test_a_replay_costs_no_more_than_it_did(name: str) -> None:
    assert Run(REPLAYS[name]).go().regret <= REGRETS[name] + 0.01
