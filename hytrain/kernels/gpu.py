"""The updates of GPU-owned layers: the arithmetic of update.cpp on device tensors.

The trainer calls on a stream of its choice once gradients are ready. The bits are the native backend's, so a layer may
change owners during a run. Triton is imported at the first call.

    update            one segment, or a part of one
    update_rows       all segments that have the same scalars, of one layer or several, in one launch: small ones take
                      as long as their launches do

At each launch Triton looks up the compiled kernel for the arguments, which takes several times as long as the launch.
This module caches compiled kernels by the properties that matter for these kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, count
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from hytrain.errors import BackendUnavailable
from hytrain.kernels.backend import FIRST, Elements, check_dtypes, seeds
from hytrain.kernels.scalars import Scalars
from hytrain.kernels.split import REMAINDERS
from hytrain.tensors import address, addresses, on_device
from protocol.rules import MOMENTS

BLOCK = 1024  # elements per program

# Contraction would skip roundings, and "flush to zero" would lose subnormals in library functions.
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False, "enable_reflect_ftz": False}

#: So many moments and scalars the kernel takes. Rules with fewer leave the last ones out.
MOST_MOMENTS: Final = max(map(len, MOMENTS.values()))
MOST_SCALARS: Final = 9

_MASK = 0xFFFFFFFF
#: Of a row in a launch's table: addresses of weights, gradients, remainder and moments, six numbers.
_COLUMNS: Final = 3 + MOST_MOMENTS + 6
_DTYPES_OF_ROWS: Final = ("WEIGHTS", "GRADS", "REMAINDER", "MOMENTS")
_OF_ROWS: Final = len(_DTYPES_OF_ROWS) + 2  # constants that only the kernel of rows has
TABLES: Final = 4  # kept of launches: torch's allocator may give gradients the same places in every second step only
ALIGNMENT = 16  # bytes; for multiples of it, Triton compiles a separate kernel with wider loads
_compiled: dict[tuple[object, ...], Any] = {}
_numbers = count()


def update(
    *,
    weights: Tensor,
    grads: Tensor,
    remainder: Tensor | None,
    moments: Sequence[Tensor],
    scalars: Scalars,
    verdict: Tensor | None = None,
    elements: Elements = FIRST,
) -> None:
    """Update one segment in place, on the current device and stream.

    All tensors are contiguous and have one shape, [numel]. `remainder` is int16 for bfloat16 weights, or None if they
    are their own masters; the float32 master for float16 weights. `moments` are those of the rule of `scalars`, in
    float32, bfloat16 or, as float8.py's codes, uint8. `verdict` is a float32 scalar on the device: the gradient is
    multiplied by it, and nothing is updated if it is below 0.
    Raises ValueError for planes that do not fit together, BackendUnavailable without Triton.
    """
    kernel = scalars.kernel
    _check(weights, grads, remainder, moments, kernel)
    numel = weights.numel()
    if numel == 0:
        return
    rest = weights if remainder is None else remainder
    given = (*moments, *(rest,) * (MOST_MOMENTS - len(moments)))  # the kernel ignores those that the rule does not have
    planes = (_bits(weights), _bits(grads), *map(_bits, (rest, *given)))
    which = (elements.in_vectors(numel), elements.first & _MASK, *seeds(elements.key, scalars.step))
    numbers = (*which, *_all_scalars(scalars))
    judge, judged = planes[0] if verdict is None else verdict, verdict is not None
    lone = remainder is None and weights.dtype == torch.bfloat16
    grid = (numel + BLOCK - 1) // BLOCK
    aligned = tuple(address(plane) % ALIGNMENT == 0 for plane in (*planes, judge))
    constants = {"RULE": kernel, "JUDGED": judged, "LONE": lone, "FUSES": elements.fuses, "BLOCK": BLOCK}
    kind = (weights.device, *constants.values(), weights.dtype, grads.dtype, given[0].dtype, aligned)
    if (compiled := _compiled.get(kind)) is not None:
        compiled[grid, 1, 1](*planes, numel, *numbers, judge, *constants.values())
        return
    kernel_of = _kernels().update_kernel
    _compiled[kind] = kernel_of[(grid,)](*planes, numel, *numbers, judge, **constants, **OPTIONS)


class Rows:
    """Segments whose planes have the same dtypes, and all of them the same `fuses`, for launches of `update_rows`.

    State stays where it is. Tables that were laid out, and kernels, are kept with the first rows of a launch.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        remainders: Sequence[Tensor | None],
        moments: Sequence[Sequence[Tensor]],
        elements: Sequence[Elements],
    ) -> None:
        """For each segment the tensors that `update` takes, and which elements they are. None is empty."""
        self.weights, self.remainders, self.moments, self.elements = weights, remainders, moments, elements
        self.number = next(_numbers)
        self.lone = remainders[0] is None and weights[0].dtype == torch.bfloat16
        self.rests = [own if rest is None else rest for own, rest in zip(weights, remainders, strict=True)]
        self.rounds = self.lone or bool(moments[0]) and moments[0][0].dtype != torch.float32
        self.programs = [(plane.numel() + BLOCK - 1) // BLOCK for plane in weights]
        self.fixed = [
            (
                *addresses((rest, *given, *(rest,) * (MOST_MOMENTS - len(given)))),
                own.numel(),
                of.in_vectors(own.numel()),
            )
            for own, given, rest, of in zip(weights, moments, self.rests, elements, strict=True)
        ]
        self.tables: dict[tuple[object, ...], _Table] = {}
        self.row_of_program: tuple[tuple[object, ...], Tensor] | None = None  # of the last launch, and whose it was
        self.kernels: dict[tuple[object, ...], tuple[Any, tuple[object, ...]]] = {}  # by kind, with last arguments


class _Table(NamedTuple):
    """What a launch reads: a row for each segment; which segment each of its programs updates; how many those are."""

    rows: Tensor
    row_of_program: Tensor
    grid: int
    is_aligned: bool


def update_rows(
    parts: Sequence[Rows], grads: Sequence[Tensor], scalars: Scalars, verdict: Tensor | None = None
) -> None:
    """Update all segments of rows in place, in one launch on their device's current stream.

    All rows have the same dtypes and `fuses`. `grads` has a gradient for each segment in turn, as `update` takes it. If
    weights and gradients are where they were in one of the last launches, its table serves again.
    """
    first, kernel = parts[0], scalars.kernel
    device = first.weights[0].device
    stream, whose = torch._C._cuda_getCurrentRawStream(device.index), tuple([part.number for part in parts])
    at = addresses([*[own for part in parts for own in part.weights], *grads])
    known = stream, scalars.step if first.rounds else 0, kernel, whose, *at
    if (table := first.tables.get(known)) is None:
        _check_rows(parts, grads, kernel)
        if len(first.tables) == TABLES:
            del first.tables[next(iter(first.tables))]
        table = first.tables[known] = _lay_out(parts, at, scalars.step, (stream, whose))
    else:
        own = [weights.shape for part in parts for weights in part.weights]
        assert all([mine.shape == shape for mine, shape in zip(grads, own, strict=True)])
    judge = table.rows if verdict is None else verdict
    if not table.is_aligned and len(parts) > 1:  # those that are need not be slower
        for part in parts:
            mine, grads = grads[: len(part.weights)], grads[len(part.weights) :]
            update_rows([part], mine, scalars, verdict)
        return
    kind = kernel, verdict is not None, grads[0].dtype, table.is_aligned
    arguments = (table.rows, table.row_of_program, *_all_scalars(scalars), judge)
    with torch.cuda.device(device):
        if (compiled := first.kernels.get(kind)) is None:
            first.kernels[kind] = _launch_first(first, kind, table.grid, grads[0], arguments)
        else:
            compiled[0][table.grid, 1, 1](*arguments, *compiled[1], stream=stream)


def _check_rows(parts: Sequence[Rows], grads: Sequence[Tensor], kernel: str) -> None:
    planes = [one for part in parts for one in zip(part.weights, part.remainders, part.moments, strict=True)]
    for (weights, rest, moments), mine in zip(planes, grads, strict=True):
        _check(weights, mine, rest, moments, kernel)


def _launch_first(
    rows: Rows, kind: tuple[object, ...], grid: int, mine: Tensor, arguments: Any
) -> tuple[Any, tuple[object, ...]]:
    """Launch the kernel of this kind, compiled if no other launch had it. Returns it, with its last arguments."""
    rule, judged, _, is_aligned = kind
    weights, given, rest = rows.weights[0], rows.moments[0], rows.rests[0]
    constants = {"RULE": rule, "JUDGED": judged, "LONE": rows.lone, "FUSES": rows.elements[0].fuses, "BLOCK": BLOCK}
    last = (*constants.values(), *(None,) * _OF_ROWS)
    which = (weights.device, *last, weights.dtype, mine.dtype, given[0].dtype if given else None, is_aligned)
    if (compiled := _compiled.get(which)) is not None:
        compiled[grid, 1, 1](*arguments, *last)
    else:
        elements = map(_element, (weights, mine, rest, (*given, rest)[0]))
        constants |= dict(zip(_DTYPES_OF_ROWS, elements, strict=True))
        constants |= {"ALIGNED": is_aligned, "COLUMNS": _COLUMNS}
        compiled = _kernels().update_rows_kernel[(grid,)](*arguments, **constants, **OPTIONS)
        _compiled[which] = compiled
    return compiled, last


def _lay_out(parts: Sequence[Rows], at: Sequence[int], step: int, whose: tuple[object, ...]) -> _Table:
    """A new table, since launches may still read the others."""
    first, programs = parts[0], [count for part in parts for count in part.programs]
    fixed, elements = [one for part in parts for one in part.fixed], [of for part in parts for of in part.elements]
    begins, among = list(accumulate(programs, initial=0)), len(programs)
    grid, device = begins.pop(), first.weights[0].device
    rows = [
        (own, mine, *state, of.first & _MASK, *(seeds(of.key, step) if first.rounds else (0, 0)), begin)
        for own, mine, state, of, begin in zip(at[:among], at[among:], fixed, elements, begins, strict=True)
    ]
    is_aligned = all(plane % ALIGNMENT == 0 for row in rows for plane in row[: 3 + MOST_MOMENTS])
    if first.row_of_program is None or first.row_of_program[0] != whose:  # another stream may not wait for it
        counts = on_device(torch.tensor(programs, dtype=torch.int64, device="cpu"), device)
        found = torch.repeat_interleave(counts, output_size=grid).to(torch.int32)
        first.row_of_program = whose, found
    table = on_device(torch.tensor(rows, dtype=torch.int64, device="cpu"), device)
    return _Table(table, first.row_of_program[1], grid, is_aligned)


def _kernels() -> Any:
    """The module with the kernels. Raises BackendUnavailable without Triton."""
    try:
        from hytrain.kernels import triton_update
    except ImportError as error:
        raise BackendUnavailable(
            "the GPU's update needs Triton, which comes with torch's CUDA builds: pip install triton, "
            "or let the CPU own every layer with k=0"
        ) from error
    return triton_update


def _all_scalars(scalars: Scalars) -> tuple[float, ...]:
    return (*scalars.values, *(0.0,) * (MOST_SCALARS - len(scalars.values)))


def _element(plane: Tensor) -> Any:
    """Triton's type of a plane's elements, as `_bits` has them."""
    import triton.language as tl

    return getattr(tl, str(_bits(plane[:0]).dtype).removeprefix("torch."))


@cache
def _check_dtypes(weights: torch.dtype, grads: torch.dtype, remainder: bool, state: torch.dtype, kernel: str) -> None:
    weights_dtype, grads_dtype, state_dtype = (str(dtype).removeprefix("torch.") for dtype in (weights, grads, state))
    state_dtype = "float8" if state is torch.uint8 else state_dtype
    check_dtypes(weights_dtype, grads_dtype, remainder, state_dtype, kernel)


def _bits(plane: Tensor) -> Tensor:
    """bfloat16 as bit patterns, so conversions are shifts, as in C++."""
    return plane.view(torch.int16) if plane.dtype == torch.bfloat16 else plane


def _check(weights: Tensor, grads: Tensor, remainder: Tensor | None, moments: Sequence[Tensor], kernel: str) -> None:
    """Must take only a few microseconds: the device may be waiting for the launch."""
    state = moments[0].dtype if moments else torch.float32
    _check_dtypes(weights.dtype, grads.dtype, remainder is not None, state, kernel)
    shape = weights.shape
    for plane in (weights, grads, *moments, weights if remainder is None else remainder):
        if plane.shape != shape or len(shape) != 1 or not plane.is_contiguous():
            raise ValueError("an update wants contiguous one-dimensional planes of one length")
    if any(moment.dtype != state for moment in moments):
        raise ValueError(f"all moments have one dtype, not {', '.join(str(moment.dtype) for moment in moments)}")
    if remainder is not None and remainder.dtype != REMAINDERS[weights.dtype]:
        raise ValueError(f"the remainder of {weights.dtype} weights is not {remainder.dtype}")
