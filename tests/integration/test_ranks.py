"""The harness of the tests with several ranks: an error shows its traceback, and spoils no later test."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable

import pytest
import ranks
import torch
import torch.distributed as dist
from ranks import RankError, RankGroup


def summed(value: float) -> tuple[int, torch.Tensor, str]:
    tensor = torch.full([3], value * (dist.get_rank() + 1))
    dist.all_reduce(tensor)
    return os.getpid(), tensor, tempfile.gettempdir()


def one_raises() -> None:
    if dist.get_rank() == 1:
        raise ValueError("on purpose")
    dist.recv(torch.zeros(1), src=1, tag=3)


def one_dies() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    dist.recv(torch.zeros(1), src=1, tag=3)


def the_same_processes_answer_each_call(group: RankGroup) -> None:
    for _, tensor, folder in group.run(summed, 2.0):
        assert tensor.tolist() == [6.0] * 3 and folder == tempfile.gettempdir()
    pids = [[pid for pid, _, _ in group.run(summed, 1.0)] for _ in range(2)]
    assert pids[0] == pids[1] and len(set(pids[0])) == group.world


@pytest.mark.parametrize(
    "function, told",
    [
        (
            one_raises,
            r"rank 0 of 2: no answer, its threads are at(.|\n)*in one_raises\n"
            r"(.|\n)*rank 1 of 2: Traceback(.|\n)*ValueError: on purpose",
        ),
        (one_dies, r"rank 0 of 2: (.|\n)*in one_dies(.|\n)*rank 1 of 2: died with status 7"),
    ],
    ids=["raises", "dies"],
)
def test_a_rank_that_fails_is_shown_and_spoils_no_later_test(
    function: Callable[[], None], told: str, failing_ranks: RankGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    the_same_processes_answer_each_call(failing_ranks)
    monkeypatch.setattr(ranks, "GRACE_S", 0.5)
    with pytest.raises(RankError, match=told):
        failing_ranks.run(function)
