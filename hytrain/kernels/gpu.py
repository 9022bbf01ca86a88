"""The updates of GPU-owned layers: the arithmetic of update.cpp on device tensors.

The trainer calls on a stream of its choice once gradients are ready. The bits are the native backend's, so a layer may
change owners during a run. Triton is imported at the first call.

    update            one segment, or a part of one
    Launch.update     all segments of a layer that have the same scalars, in one launch: small ones take as long as
                      their launches do

At each launch Triton looks up the compiled kernel for the arguments, which takes several times as long as the launch.
This module caches compiled kernels by the properties that matter for these kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any, Final

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
TABLES: Final = 4  # kept by a launch: torch's allocator may give gradients the same places in every second step only
ALIGNMENT = 16  # bytes; for multiples of it, Triton compiles a separate kernel with wider loads
_compiled: dict[tuple[object, ...], Any] = {}


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


class Launch:
    """Updates of several segments in one launch. Their planes have the same dtypes, and all of them the same `fuses`.

    The kernel finds planes and elements in a table on the device: a row for each segment. State stays where it is; if
    weights and gradients are where they were in one of the last updates, its table serves again. `row_of_program` says
    which segment each program of the launch updates.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        remainders: Sequence[Tensor | None],
        moments: Sequence[Sequence[Tensor]],
        elements: Sequence[Elements],
    ) -> None:
        """For each segment the tensors that `update` takes, and which elements they are. None is empty."""
        self._weights, self._remainders, self._moments, self._elements = weights, remainders, moments, elements
        self._device = weights[0].device
        self._lone = remainders[0] is None and weights[0].dtype == torch.bfloat16
        state = [
            addresses((rest, *given, *(rest,) * (MOST_MOMENTS - len(given))))
            for given, rest in zip(moments, self._rests(), strict=True)
        ]
        programs = [(plane.numel() + BLOCK - 1) // BLOCK for plane in weights]
        begins = list(accumulate(programs, initial=0))
        self._grid = begins.pop()
        self._fixed = [
            (one, plane.numel(), of.in_vectors(plane.numel()), of.first & _MASK, begin)
            for one, plane, of, begin in zip(state, weights, elements, begins, strict=True)
        ]
        self._rows = torch.repeat_interleave(torch.tensor(programs, device="cpu")).to(torch.int32)
        self._rounds = self._lone or bool(moments[0]) and moments[0][0].dtype != torch.float32
        self._row_of_program: dict[int, Tensor] = {}  # by stream, since another one may not wait for its copy
        self._tables: dict[tuple[object, ...], tuple[Tensor, bool]] = {}  # by addresses; and whether those are aligned
        self._kernels: dict[tuple[object, ...], tuple[Any, tuple[object, ...]]] = {}  # by kind, with last arguments

    def _rests(self) -> list[Tensor]:
        """What stands for the remainder: weights that are their own masters."""
        return [own if rest is None else rest for own, rest in zip(self._weights, self._remainders, strict=True)]

    def update(self, grads: Sequence[Tensor], scalars: Scalars, verdict: Tensor | None = None) -> None:
        """Update all segments in place, on their device's current stream. `grads` has each one's, as for `update`."""
        kernel, stream = scalars.kernel, torch._C._cuda_getCurrentRawStream(self._device.index)
        at = addresses((*self._weights, *grads))
        known = stream, scalars.step if self._rounds else 0, kernel, *at
        if (found := self._tables.get(known)) is None:
            for weights, mine, rest, moments in zip(self._weights, grads, self._remainders, self._moments, strict=True):
                _check(weights, mine, rest, moments, kernel)
            if len(self._tables) == TABLES:
                del self._tables[next(iter(self._tables))]
            found = self._tables[known] = self._lay_out(at, scalars.step)
            if stream not in self._row_of_program:
                self._row_of_program[stream] = on_device(self._rows, self._device)
        else:
            assert all([mine.shape == own.shape for mine, own in zip(grads, self._weights, strict=True)])
        table, is_aligned = found
        judge, kind = table if verdict is None else verdict, (kernel, verdict is not None, grads[0].dtype, is_aligned)
        arguments = (table, self._row_of_program[stream], *_all_scalars(scalars), judge)
        with torch.cuda.device(self._device):
            if (compiled := self._kernels.get(kind)) is None:
                self._kernels[kind] = self._launch_first(kind, grads[0], arguments)
            else:
                compiled[0](*arguments, *compiled[1], stream=stream)

    def _launch_first(self, kind: tuple[object, ...], mine: Tensor, arguments: Any) -> tuple[Any, tuple[object, ...]]:
        """Launch the kernel of this kind, compiled if no other launch had it. Returns it, with its last arguments."""
        rule, judged, _, is_aligned = kind
        first, given, rest = self._weights[0], self._moments[0], self._rests()[0]
        constants = {
            "RULE": rule,
            "JUDGED": judged,
            "LONE": self._lone,
            "FUSES": self._elements[0].fuses,
            "BLOCK": BLOCK,
        }
        last = (*constants.values(), *(None,) * _OF_ROWS)
        which = (self._device, *last, first.dtype, mine.dtype, given[0].dtype if given else None, is_aligned)
        if (compiled := _compiled.get(which)) is not None:
            compiled[self._grid, 1, 1](*arguments, *last)
        else:
            elements = map(_element, (first, mine, rest, (*given, rest)[0]))
            constants |= dict(zip(_DTYPES_OF_ROWS, elements, strict=True))
            constants |= {"ALIGNED": is_aligned, "COLUMNS": _COLUMNS}
            compiled = _kernels().update_rows_kernel[(self._grid,)](*arguments, **constants, **OPTIONS)
            _compiled[which] = compiled
        return compiled[self._grid, 1, 1], last

    def _lay_out(self, at: Sequence[int], step: int) -> tuple[Tensor, bool]:
        """A new table, since launches may still read the others."""
        count = len(self._fixed)
        rows = [
            (own, mine, *state, numel, in_vectors, first, *(seeds(of.key, step) if self._rounds else (0, 0)), begin)
            for (state, numel, in_vectors, first, begin), of, own, mine in zip(
                self._fixed, self._elements, at[:count], at[count:], strict=True
            )
        ]
        is_aligned = all(plane % ALIGNMENT == 0 for row in rows for plane in row[: 3 + MOST_MOMENTS])
        return on_device(torch.tensor(rows, dtype=torch.int64, device="cpu"), self._device), is_aligned


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
