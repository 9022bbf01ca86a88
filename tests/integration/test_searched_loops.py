"""The short form of the search for loops that HyTrain runs differently from torch, and what it has found."""

from __future__ import annotations

import pytest

from tests.fuzz import loops
from tests.fuzz.loops import Program

#: So many programs in each of so many tests, from the seed 1.
COUNT, PARTS = 20, 4


@pytest.mark.parametrize("part", range(PARTS))
def test_no_loop_differs_without_a_word(part: int) -> None:
    """A failure here is found again with: python -m tests.fuzz.loops --program NUMBER --seed 1."""
    found = {number: loops.examine(Program.drawn(1, number)) for number in range(part * COUNT, (part + 1) * COUNT)}
    assert {number: said for number, said in found.items() if said[0] not in ("the same", "refused")} == {}
    assert any(outcome == "the same" for outcome, _ in found.values())


OPTIONS = {"k": 0.5, "grad_accumulation": 1}
#: Each was different once: retained graphs, sums that were dropped or changed, gradients that are used again.
FOUND = {
    "a retained graph's gradient is clipped": [
        (loops.backward, (0, "all", True, False)),
        (loops.clip, (1e-3,)),
        (loops.step, ()),
    ],
    "what a retained graph has left is dropped": [
        (loops.backward, (0, "all", True, False)),
        (loops.drop, ("model",)),
        (loops.step, ()),
    ],
    "the first of two sums is dropped": [
        (loops.backward, (0, "all", False, True)),
        (loops.drop, ("some",)),
        (loops.backward, (1, "all", False, True)),
        (loops.step, ()),
    ],
    "gradients are used twice": [
        (loops.backward, (0, "all", False, True)),
        (loops.step, ()),
        (loops.backward, (1, "first", False, True)),
        (loops.step, ()),
    ],
}


@pytest.mark.parametrize("algorithm", ["AdamW", "SGD"])
@pytest.mark.parametrize("name", FOUND)
def test_what_was_found(name: str, algorithm: str) -> None:
    program = Program(algorithm, 16, OPTIONS, FOUND[name])
    assert loops.examine(program) == ("the same", None)


def test_what_differs_is_found() -> None:
    """The comparison sees one bit of one weight, and harm before a refusal."""

    def nudge(loop: loops.Loop) -> None:
        if loop.is_ours:
            next(loop.model.parameters()).data[0, 0] += 1e-6

    def refused(loop: loops.Loop) -> None:
        if loop.is_ours:
            nudge(loop)
            raise loops.HyTrainError("no")

    for action, word in ((nudge, "weights"), (refused, "harm")):
        outcome, said = loops.examine(Program("AdamW", 16, OPTIONS, [(action, ())]))
        assert outcome == "DIFFERENT" and word in str(said)
