"""Hypothesis strategies for every message of the protocol, built from the dataclasses' own type hints."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from typing import Any

from hypothesis import strategies as st

from protocol import codec
from protocol import messages as m
from protocol.address import ROLES, Address
from protocol.placement import PLACEMENTS, Places
from protocol.rules import HYPERS, MOMENTS, ON_DEVICE, Hyper

MESSAGES: tuple[type, ...] = tuple(codec.MESSAGES.values())
COUNTS = st.integers(0, 2**63)
addresses = st.builds(Address, st.sampled_from(ROLES), COUNTS)
TEXT = st.text(max_size=20)
INBOXES = st.sampled_from(("coordinator-0", "trainer-0-12ab34cd"))
NAMES = st.lists(st.sampled_from(sorted(PLACEMENTS)), max_size=5).map(tuple)
SECONDS_EACH = st.none() | st.floats(0, 1, exclude_min=True, exclude_max=True)

#: Where not every value of a field's type can be.
RANGES: dict[tuple[type, str], st.SearchStrategy[Any]] = {
    (m.Hello, "pid"): st.integers(1, 2**31 - 1),
    (m.Hello, "inbox"): INBOXES,
    (m.Introduce, "coordinator_pid"): st.integers(1, 2**31 - 1),
    (m.Introduce, "attempt"): st.integers(1, 2**31),
    (m.LayerTable, "inbox"): INBOXES,
    (m.LayerTable, "awaits_verdict"): st.just(True),
    (m.LayerTable, "threads"): st.none() | st.integers(1, 100),
    (m.LayerTable, "rank"): st.integers(0, 7),
    (m.LayerTable, "world"): st.integers(8, 100),
    (m.LayerTable, "k"): st.none() | st.floats(0, 1),
    (m.LayerTable, "visit"): st.none() | st.floats(0, 1),
    (m.LayerTable, "offload_weights"): st.none() | st.floats(0, 1),
    (m.LayerTable, "blocks"): st.just(()),
    (m.LayerTable, "policy"): st.sampled_from([policy for policy in m.POLICIES if policy != "fixed"]),
    (m.LayerTable, "objective"): st.sampled_from(m.OBJECTIVES),
    **{(m.Calibration, name): SECONDS_EACH for name in ("d2h_s", "h2d_s", "cpu_update_s", "gpu_update_s")},
    (m.StepBegin, "float_mode"): st.integers(0, m.FLOAT_MODES - 1),
    **{(cls, "threads"): st.integers(1, 2**31) for cls in (m.SetThreads, m.OptimizerReport)},
    **{(cls, "steps"): st.integers(0, m.MAX_TRACED_STEPS) for cls in (m.TraceNext, m.TraceSteps)},
    (m.PositionsLearned, "positions"): st.integers(0, 6).flatmap(lambda n: st.permutations(range(n)).map(tuple)),
    (m.GradReady, "counts"): st.lists(COUNTS, min_size=1, max_size=4).map(tuple).filter(any),
    (m.Verdict, "scale"): st.floats(0, 2**20),
    **{(cls, "banks"): st.lists(st.integers(0, 1), max_size=4).map(tuple) for cls in (m.WeightsReady, m.TakeOver)},
    (Places, "names"): NAMES,
    (m.Plan, "k"): st.floats(0, 1),
}


@st.composite
def segments(draw: st.DrawFn) -> m.Segment:
    dtype, rule = draw(st.sampled_from(sorted(m.GRADS_DTYPES))), draw(st.sampled_from(sorted(MOMENTS)))
    shape = draw(st.tuples(*[st.integers(1, 2**20)] * 2)) if rule in ON_DEVICE else ()
    return m.Segment(
        name=draw(TEXT),
        numel=math.prod(shape) if shape else draw(st.integers(1, 2**40)),
        dtype=dtype,
        grads_dtype=draw(st.sampled_from(m.GRADS_DTYPES[dtype])),
        group=draw(st.integers(0, 3)),
        state_dtype=draw(st.sampled_from(m.STATE_DTYPES)),
        master_dtype=draw(st.sampled_from(m.MASTER_DTYPES if dtype == "bfloat16" else ("float32",))),
        key=draw(st.integers(0, 2**32 - 1)),
        start=draw(st.integers(0, 2**40)),
        rule=rule,
        shape=shape,
        by_columns=draw(st.booleans()),
        lanes=draw(st.integers(1, 128)),
        fuses=draw(st.booleans()),
    )


@st.composite
def layers(draw: st.DrawFn) -> tuple[m.Layer, ...]:
    positions = draw(st.integers(1, 4).flatmap(lambda n: st.permutations(range(n))))
    return tuple(
        m.Layer(
            lid=lid,
            position=position,
            name=draw(TEXT),
            segments=tuple(draw(st.lists(segments(), min_size=1, max_size=3))),
        )
        for lid, position in enumerate(positions)
    )


def _values(hint: Any) -> st.SearchStrategy[Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint == tuple[m.Layer, ...]:
        return layers()
    if hint is Address:
        return addresses
    if hint is Hyper:
        return st.one_of(*map(instances, HYPERS.values()))
    if origin is tuple:
        return st.lists(_values(arguments[0]), max_size=4).map(tuple)
    if origin in (types.UnionType, typing.Union):
        return st.none() | _values(next(argument for argument in arguments if argument is not types.NoneType))
    if origin is dict:
        return st.dictionaries(TEXT, _values(arguments[1]), max_size=4)
    if dataclasses.is_dataclass(hint):
        return instances(typing.cast(type, hint))
    return {int: COUNTS, float: st.floats(allow_nan=False), bool: st.booleans(), str: TEXT}[hint]


@st.composite
def rejoins(draw: st.DrawFn) -> m.Rejoin:
    table = draw(instances(m.LayerTable))

    def places() -> Places:
        return Places(tuple(draw(st.sampled_from(sorted(PLACEMENTS))) for _ in table.layers))

    return m.Rejoin(
        table=table,
        calibration=draw(instances(m.Calibration)),
        plan=dataclasses.replace(draw(instances(m.Plan)), places=places()),
        holds=draw(st.booleans()),
        places=places(),
        step=draw(COUNTS),
        moved=draw(COUNTS),
        skipped=draw(COUNTS),
        draws=draw(st.booleans()),
    )


def instances(cls: type) -> st.SearchStrategy[Any]:
    """Any value of a message class, or of a dataclass inside one."""
    if cls is m.Rejoin:
        return rejoins()
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    return st.builds(
        cls, **{name: RANGES[cls, name] if (cls, name) in RANGES else _values(hints[name]) for name in names}
    )


any_message: st.SearchStrategy[m.Message] = st.one_of([instances(cls) for cls in MESSAGES])
