"""Shards that rest in host memory: FSDP2's all-gathers find them, few are on the device at once, and no bit differs."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import RankGroup
from sharded_models import same_as
from test_fsdp2 import ROWS

from hytrain.step import offload

CPU: dict[str, Any] = {"k": 0.0, "offload_weights": 1.0}
VISITS: dict[str, Any] = {**CPU, "visit": 1.0}
MIXED: dict[str, Any] = {"k": (0.0, 0.5), "visit": 0.5, "offload_weights": 0.5}
RANDOM: dict[str, Any] = {"policy": "random", "offload_weights": "auto"}


def compare(name: str, choices: list[dict[str, Any]]) -> None:
    row = ROWS[name]
    common = {key: value for key, value in row.choices[0].items() if key not in ("k", "policy")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "SLOTS", 1)
        same_as(row.reference, row.practice, row.make, [{**choice, **common} for choice in choices])


@pytest.mark.parametrize("name", ROWS)
def test_the_same_bits_as_torch(name: str, two_ranks: RankGroup) -> None:
    two_ranks.run(compare, name, [RANDOM] if ROWS[name].choices[0].get("policy") else [CPU, VISITS, MIXED])
