"""Who orthogonalizes which of the matrices that ranks share: each matrix once, everyone with about the same work."""

from __future__ import annotations

from collections import Counter

import pytest

from hytrain.model.rounds import SharedMatrix, Spans, numel, rounds, work

#: Those of a Llama with 7 B parameters: four of attention, three of the MLP.
BLOCK = [(4096, 4096)] * 4 + [(11008, 4096)] * 2 + [(4096, 11008)]


def shapes_of(blocks: int) -> dict[str, tuple[int, int]]:
    return {f"blocks.{block}.{index}": shape for block in range(blocks) for index, shape in enumerate(BLOCK)}


def by_rows(shapes: dict[str, tuple[int, int]], ranks: int) -> dict[int, dict[str, Spans]]:
    """As FSDP2 shares them out: of few rows, the last ranks have none."""
    found: dict[int, dict[str, Spans]] = {rank: {} for rank in range(ranks)}
    for name, (rows, columns) in shapes.items():
        size = -(-rows // ranks)
        for rank, top in enumerate(range(0, rows, size)):
            found[rank][name] = ((top, min(top + size, rows)), (0, columns))
    return found


def loads(matrices: list[SharedMatrix]) -> Counter[int]:
    found = Counter[int]()
    for matrix in matrices:
        found[matrix.worker] += work(matrix.shape)
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_all_ranks_work_about_as_long(ranks: int) -> None:
    """In the whole step, and but for the last round in each one; what comes is in the model's order, once."""
    shapes = shapes_of(12)
    found = rounds(shapes, by_rows(shapes, ranks))
    assert [matrix.name for turn in found for matrix in turn] == [*shapes]
    in_all = loads([matrix for turn in found for matrix in turn])
    assert len(in_all) == ranks and max(in_all.values()) < 1.15 * sum(in_all.values()) / ranks
    largest = max(rows * columns for rows, columns in BLOCK)
    for turn in found:
        assert sum(rows * columns for rows, columns in (matrix.shape for matrix in turn)) <= ranks * largest
    assert sum(max(loads(turn).values()) for turn in found) < 1.3 * sum(in_all.values()) / ranks


def test_only_ranks_with_a_part_work_and_what_they_send_is_the_whole() -> None:
    shapes = {"few rows": (3, 40), "one more": (2, 8), "more": (64, 40)}
    for [matrix] in [[each] for turn in rounds(shapes, by_rows(shapes, 4)) for each in turn]:
        assert matrix.worker in matrix.parts and matrix.sources == matrix.parts
        assert sum(map(numel, matrix.sources.values())) == matrix.shape[0] * matrix.shape[1]


def test_of_replicas_one_sends() -> None:
    """The worker itself, if it has the part."""
    halves: list[Spans] = [((0, 8), (0, 4)), ((8, 16), (0, 4))]
    parts = {rank: {"w": halves[rank % 2], "v": halves[rank % 2]} for rank in range(4)}
    found = [each for turn in rounds({"w": (16, 4), "v": (16, 4)}, parts) for each in turn]
    assert len({matrix.worker for matrix in found}) == 2
    for matrix in found:
        assert sorted(matrix.sources.values()) == halves and matrix.worker in matrix.sources
        assert matrix.parts == {rank: halves[rank % 2] for rank in range(4)}


def test_a_matrix_for_which_there_is_no_room_in_a_round_begins_the_next() -> None:
    shapes = {"large": (100, 10), "small": (10, 10), "again": (100, 10)}
    assert [[each.name for each in turn] for turn in rounds(shapes, by_rows(shapes, 2))] == [
        ["large", "small"],
        ["again"],
    ]
    assert rounds({}, {0: {}, 1: {}}) == []
