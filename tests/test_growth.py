"""What a batch larger than any so far will need, as two sizes have shown."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hytrain.step.growth import Growth


def step(growth: Growth, *sizes: int, peak: int, now: int = 100) -> list[int | None]:
    found = [growth.foreseen(size) for size in sizes]
    growth.end_step(peak, now)
    growth.check()
    return found


def test_all_grows_with_the_size_until_two_sizes_tell_how_much_does() -> None:
    growth = Growth()
    assert step(growth, 10, peak=150) == [None], "nothing is known"
    assert step(growth, 10, 5, peak=150) == [None, None]
    assert growth.foreseen(20) == 100
    growth.end_step(180, 100)  # it needed 80
    assert growth.foreseen(40) == 80 + 60, "3 for each element, 50 - 30 besides"
    assert growth.foreseen(40) is None, "the same step has seen it"
    assert growth.foreseen(50) == 80 + 90


def test_a_peak_of_before_is_not_this_steps() -> None:
    growth = Growth()
    step(growth, 10, peak=150)
    step(growth, 10, peak=150, now=20)  # state has left the GPU meanwhile
    assert growth.foreseen(20) == 100
    growth = Growth()
    step(growth, 10, peak=150)
    step(growth, 4, peak=170)  # a small batch with long rows, perhaps
    assert growth.foreseen(20) == 140
    growth.peak = 0  # state was evicted, and the peak began anew
    growth.end_step(130, 20)
    assert growth.foreseen(40) == 110 + 80


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 500)), max_size=20), st.integers(1, 99))
def test_what_is_foreseen_is_no_less_than_what_the_largest_needed(steps: list[tuple[int, int]], size: int) -> None:
    growth = Growth()
    for seen, needed in steps:
        step(growth, seen, peak=100 + needed)
    if (foreseen := growth.foreseen(size)) is not None:
        assert size > growth._largest[0] and foreseen >= growth._largest[1]
